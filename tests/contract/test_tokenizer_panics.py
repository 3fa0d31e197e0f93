"""A tokenizer whose library panics, or does not come back: one request ends, and the others go on."""

import json
import threading
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.fake.tokenizer import fake_tokenizer_files
from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import ModelLoadError, TokenizerFileError
from octavo_shared.step_wire.executor_info import TokenizerFile
from scheduler_svc.front.text import text_threads
from scheduler_svc.front.text.tokenizer import Tokenizer
from tests.contract.openai.api import running_api
from tests.support.stack import Stack, collect, running_stack, token_request

# Its search backtracks until the library panics.
SEARCH = tokenizers.Regex("(a+)+$")
PANICS = "a" * 40 + "b"
PANICKING_ID = 70


class Panicking(FakeWorker):
    """Has a tokenizer that panics at PANICS, and decodes PANICKING_ID to it."""

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        own, *others = fake_tokenizer_files()
        content = json.loads(own.content)
        vocab = content["model"]["vocab"]
        [name] = [name for name, token_id in vocab.items() if token_id == PANICKING_ID]
        del vocab[name]
        vocab[PANICS] = PANICKING_ID
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        splits = [pre_tokenizers.Split(SEARCH, "isolated"), tokenizer.pre_tokenizer]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
        tokenizer.decoder = decoders.Sequence([decoders.Replace(SEARCH, "c"), tokenizer.decoder])
        return (TokenizerFile(own.name, tokenizer.to_str().encode()), *others)


async def failure(stack: Stack, request: pb.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stack, request)
    return caught.value.code(), caught.value.details() or ""


async def test_a_panic_ends_its_request_and_no_other() -> None:
    async with running_api(Panicking()) as api:
        stack = api.stack
        code, words = await failure(stack, pb.GenerateRequest(text=PANICS))
        assert code is grpc.StatusCode.INTERNAL
        assert words.startswith("the tokenizer failed to encode the request's text: Onig"), words
        for call in (
            stack.generation.Tokenize(pb.TokenizeRequest(text=PANICS)),
            stack.generation.Detokenize(pb.DetokenizeRequest(token_ids=[PANICKING_ID])),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="the tokenizer failed to"):
                await call
        for path, prompt in (
            ("/v1/completions", {"prompt": PANICS, "model": "fake"}),
            ("/tokenize", {"prompt": PANICS}),
        ):
            answer = await api.send("POST", path, json=prompt)
            assert (answer.status, answer.headers["x-should-retry"]) == (500, "false"), answer.text
            assert "the tokenizer failed to encode the request's text" in answer.error["message"]
        stream: Any = stack.generation.StreamRequests()
        await stream.write(pb.StreamRequestsRequest(number=1, submit=pb.GenerateRequest(text=PANICS), credits=9))
        await stream.write(pb.StreamRequestsRequest(number=2, submit=token_request(3, 2)))
        found: set[str] = set()
        while not {"failed", "finished"} <= found:
            found |= {field.name for field, _ in (await stream.read()).ListFields()}
        stream.cancel()
        assert len((await collect(stack, token_request(3, 4))).token_ids) == 4


@pytest.mark.parametrize("params", [{}, {"stop": ["zzz"]}, {"beam_width": 2}, {"n": 2, "best_of": 3, "temperature": 1}])
async def test_a_panic_at_an_answer_ends_its_request_and_no_other(params: dict[str, Any]) -> None:
    async with running_stack(Panicking(step_ms=1)) as stack:
        panicking = token_request(3, 5, allowed_token_ids=[PANICKING_ID], **params)
        code, words = await failure(stack, panicking)
        assert code is grpc.StatusCode.INTERNAL
        assert words.startswith("the tokenizer failed to decode the request's tokens: Onig"), words
        assert len((await collect(stack, token_request(3, 4))).token_ids) == 4
        assert stack.driver.num_losses == 0
        assert not stack.engine.requests


async def test_calls_that_do_not_come_back_leave_requests_with_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_threads, "LIMIT_S", 0.05)
    hold = threading.Event()
    monkeypatch.setattr(Tokenizer, "_encode_all", lambda *_, **__: hold.wait() or [])
    async with running_stack() as stack:
        lost = [
            await failure(stack, pb.GenerateRequest(text="hello")) for _ in range((text_threads.NUM_THREADS + 1) // 2)
        ]
        assert lost == [(grpc.StatusCode.INTERNAL, "the tokenizer did not finish within 0.05 s")] * len(lost)
        code, words = await failure(stack, pb.GenerateRequest(text="hello"))
        assert (code, "accepts no more text" in words) == (grpc.StatusCode.UNAVAILABLE, True)
        family = next(one for one in stack.front.families() if one.name == text_threads.LOST_THREADS.name)
        assert [sample.value for sample in family.samples] == [len(lost)]
        assert len((await collect(stack, token_request(3, 4))).token_ids) == 4
        hold.set()


def test_a_tokenizer_that_panics_at_load_is_refused_by_name(tmp_path: Path) -> None:
    own, *_ = fake_tokenizer_files()
    content = json.loads(own.content) | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    broken = json.dumps(content).encode()
    with pytest.raises(TokenizerFileError, match=r"^tokenizer\.json is not a valid tokenizer: Precompiled"):
        Tokenizer([TokenizerFile("tokenizer.json", broken)])
    (tmp_path / "tokenizer.json").write_bytes(broken)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a valid tokenizer: Precompiled"):
        ModelDirectory(tmp_path).tokenizer_files()
