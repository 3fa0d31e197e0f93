"""Embed and Score over gRPC: every input is one request, the call ends as a whole, and what is wrong is a sentence."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from executor_svc.fake.pooling import EMBEDDING_SIZE, fake_values
from executor_svc.fake.worker import FakeWorker
from octavo.client import Client
from octavo.errors import InvalidRequestError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.step_wire.step import PoolingTask
from scheduler_svc.front.api import pooling
from tests.support.encoder_worker import CLS, SEP, EncoderWorker
from tests.support.stack import Stack, WithoutTokenizer, running_stack, token_request, until

MAX_LEN = 512
LONG = "x" * (MAX_LEN - 1)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(EncoderWorker()) as running:
        yield running


def text(content: str) -> pb.EmbedInput:
    return pb.EmbedInput(text=content)


def ids(*token_ids: int) -> pb.EmbedInput:
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=token_ids))


def texts(*contents: str, **fields: Any) -> pb.EmbedRequest:
    return pb.EmbedRequest(inputs=[*map(text, contents)], **fields)


def pairs(query: str, *documents: str, **fields: Any) -> pb.ScoreRequest:
    return pb.ScoreRequest(queries=[query], documents=documents, **fields)


def vector(token_ids: list[int]) -> list[float]:
    return list(map(float, fake_values(PoolingTask.EMBED, token_ids)))


def wrapped(content: str) -> list[int]:
    return [CLS, *content.encode(), SEP]


def score(query: str, document: str) -> float:
    token_ids = [*wrapped(query), *document.encode(), SEP]
    types = bytes(len(query) + 2) + b"\1" * (len(document) + 1)
    return float(fake_values(PoolingTask.SCORE, token_ids, types)[0])


def rows(answer: pb.EmbedResponse | pb.ScoreResponse) -> NDArray[np.float32]:
    width = answer.num_dimensions if isinstance(answer, pb.EmbedResponse) else answer.num_scores
    return np.frombuffer(answer.values, "<f4").reshape(-1, width)


async def refusal(stack: Stack, request: pb.EmbedRequest | pb.ScoreRequest) -> grpc.aio.AioRpcError:
    call: Any = stack.generation.Embed if isinstance(request, pb.EmbedRequest) else stack.generation.Score
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(request)
    return raised.value


async def test_vectors_come_in_the_order_of_texts_and_token_ids(stack: Stack) -> None:
    answer = await stack.generation.Embed(
        pb.EmbedRequest(inputs=[text("b"), ids(1, 2, 3), text("aa")], request_id="me")
    )
    assert rows(answer).tolist() == [vector(wrapped("b")), vector([1, 2, 3]), vector(wrapped("aa"))]
    assert (answer.request_id, answer.num_prompt_tokens, answer.num_dimensions) == ("me", 3 + 3 + 4, EMBEDDING_SIZE)
    assert not stack.engine.requests


async def test_pairs_have_the_template_and_the_token_types_of_the_tokenizer(stack: Stack) -> None:
    one = await stack.generation.Score(pairs("q", "first", "second"))
    assert rows(one)[:, 0].tolist() == [score("q", "first"), score("q", "second")]
    each = await stack.generation.Score(pb.ScoreRequest(queries=["q", "r"], documents=["first", "second"]))
    assert rows(each)[:, 0].tolist() == [score("q", "first"), score("r", "second")]
    pair = pb.TokenizedPair(token_ids=[*wrapped("q"), 65, SEP], token_type_ids=bytes(3) + b"\1\1")
    tokenized = await stack.generation.Score(pb.ScoreRequest(tokenized_pairs=[pair]))
    assert rows(tokenized)[:, 0].tolist() == [score("q", "A")]


async def test_prompts_sizes_and_cuts(stack: Stack) -> None:
    whole = vector(wrapped("query: a"))
    for request, expected in (
        (texts("a", prompt_name="query"), whole),
        (texts("a", prompt_name="document"), vector(wrapped("a"))),
        (texts("a", prompt_name=""), vector(wrapped("a"))),
        (texts("abcdef", truncate_prompt_tokens=4), vector(wrapped("ab"))),
        (texts("x" * 300_000, truncate_prompt_tokens=-1), vector(wrapped("x" * (MAX_LEN - 2)))),
        (pb.EmbedRequest(inputs=[ids(1, 2, 3)], truncate_prompt_tokens=3), vector([1, 2, 3])),
        (pb.EmbedRequest(inputs=[ids(1, 2, 3, 4)], truncate_prompt_tokens=3), vector([1, 2, 3])),
    ):
        assert rows(await stack.generation.Embed(request)).tolist() == [expected], request
    short = rows(await stack.generation.Embed(texts("a", prompt_name="query", dimensions=4)))[0]
    np.testing.assert_allclose(short, np.array(whole[:4]) / np.linalg.norm(whole[:4]), rtol=1e-6)
    cut = await stack.generation.Score(pairs("abcd", "xy", truncate_prompt_tokens=8))
    assert rows(cut)[0, 0] == score("abc", "xy")


WRONG: list[tuple[pb.EmbedRequest | pb.ScoreRequest, str]] = [
    (texts(), "inputs is empty; it must be from 1 to 2,048 of them in one call"),
    (texts(*"a" * 2049), "inputs is 2049 inputs; it must be at most 2048 inputs (send more in several calls)"),
    (texts("a", ""), "inputs[1] is empty; it must be at least 1 character long"),
    (pb.EmbedRequest(inputs=[ids()]), "inputs[0] is empty; it must be at least 1 token long"),
    (pb.EmbedRequest(inputs=[pb.EmbedInput()]), "inputs[0] is absent; it must be a text or token_ids"),
    (
        pb.EmbedRequest(inputs=[ids(1), ids(2, 259)]),
        "inputs[1] is a list with token id 259; it must be ids from 0 to 258",
    ),
    (pb.EmbedRequest(inputs=[ids(-1)]), "inputs[0] is a list with token id -1; it must be ids from 0 to 258"),
    (
        texts("a", LONG),
        "inputs[1] is too long: it has 513 tokens; this model's maximum context length is 512 tokens; shorten it, or "
        "set truncate_prompt_tokens",
    ),
    (texts("x" * 300_000), "inputs[0] is too long: it has 300000 characters, for at most 131072"),
    (pb.EmbedRequest(inputs=[ids(*[1] * 513)]), "inputs[0] is too long: it has 513 tokens"),
    (texts("a", dimensions=5), "dimensions is 5; it must be 4 or 8 or 16"),
    (texts("a", dimensions=0), "dimensions is 0; it must be 4 or 8 or 16"),
    (texts("a", prompt_name="passage"), "prompt_name is 'passage'; it must be 'document' or 'query'"),
    (pb.EmbedRequest(inputs=[ids(1)], prompt_name="query"), "prompt_name is 'query'; it must be unset with token ids"),
    (texts("a", truncate_prompt_tokens=2), "truncate_prompt_tokens is 2; it must be from 3 to 512, or -1: as many as"),
    (texts("a", truncate_prompt_tokens=513), "truncate_prompt_tokens is 513; it must be from 3 to 512"),
    (texts("a", priority=1), "priority is 1; it must be 0: this server uses --policy fcfs"),
    (texts("a", model="other"), 'model is "other"; it must be "fake", the served model'),
    (texts("a", tenant="t" * 257), "tenant is 257 characters long; it must be at most 256 characters long"),
    (texts("a", request_id="r" * 252), "request_id is 252 characters long; it must be at most 251 characters long"),
    (pairs("q"), "documents is empty; it must be from 1 to 2,048 of them"),
    (pairs("q", *"d" * 2049), "documents is 2049 documents; it must be at most 2048 documents"),
    (pairs("", "d"), "queries is empty; it must be at least 1 character long"),
    (pairs("q", "d", ""), "documents[1] is empty; it must be at least 1 character long"),
    (pairs("q", "d", LONG), "documents[1] is too long: it has 515 tokens"),
    (
        pb.ScoreRequest(queries=["q", "r"], documents=["d"] * 3),
        "queries is 2 long; it must be 1 query for all documents, or 3: one for each",
    ),
    (pairs("q", "d", truncate_prompt_tokens=4), "truncate_prompt_tokens is 4; it must be from 5 to 512"),
    (
        pb.ScoreRequest(queries=["q"], tokenized_pairs=[pb.TokenizedPair(token_ids=[1])]),
        "queries is set; it must be unset with tokenized_pairs",
    ),
    (
        pb.ScoreRequest(tokenized_pairs=[pb.TokenizedPair(token_ids=[1, 2], token_type_ids=b"\0")]),
        "tokenized_pairs[0].token_type_ids is 1 long; it must be empty, or 2 long as token_ids",
    ),
    (
        pb.ScoreRequest(tokenized_pairs=[pb.TokenizedPair(token_ids=[1], token_type_ids=b"\2")]),
        "tokenized_pairs[0].token_type_ids is a list with 2; it must be of 0 to 1",
    ),
]


async def test_what_is_wrong_is_a_sentence_with_what_would_work(stack: Stack) -> None:
    for request, words in WRONG:
        error = await refusal(stack, request)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (words, error)
        assert words in str(error.details())
    assert not stack.engine.requests


async def test_a_model_says_what_it_can_and_other_calls_are_refused_by_name(stack: Stack) -> None:
    model = await stack.generation.GetModel(pb.GetModelRequest())
    assert list(model.tasks) == [pb.MODEL_TASK_EMBED, pb.MODEL_TASK_SCORE]
    sizes = model.embedding_size, model.num_scores, model.max_input_tokens, list(model.prompt_names)
    assert sizes == (16, 1, MAX_LEN, ["document", "query"])
    with pytest.raises(grpc.aio.AioRpcError) as generates:
        await anext(aiter(stack.generation.Generate(token_request(3, 1))))
    assert "it must be one that can generate; this one answers Embed (/v1/embeddings) and Score" in str(
        generates.value.details()
    )
    async with running_stack(FakeWorker()) as generating:
        model = await generating.generation.GetModel(pb.GetModelRequest())
        assert (list(model.tasks), model.max_input_tokens) == ([pb.MODEL_TASK_GENERATE], 0)
        for request in (texts("a"), pairs("q", "d")):
            words = str((await refusal(generating, request)).details())
            assert "this one answers Generate (/v1/chat/completions, /v1/completions)" in words
            assert ("--pooling" in words) == isinstance(request, pb.EmbedRequest)


async def test_a_model_without_a_tokenizer_takes_token_ids() -> None:
    async with running_stack(WithoutTokenizer(has_pooling=True)) as stack:
        answer = await stack.generation.Embed(pb.EmbedRequest(inputs=[ids(5)]))
        assert rows(answer).tolist() == [vector([5])]
        assert "inputs is text; it must be token ids: this model has no tokenizer; send token_ids, or" in str(
            (await refusal(stack, texts("a"))).details()
        )


async def test_many_inputs_are_admitted_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "MAX_IN_ENGINE", 20)
    async with running_stack(EncoderWorker(), max_waiting_requests=8) as stack:
        most, add = 0, stack.engine.requests.add

        def counting(request: Any) -> None:
            nonlocal most
            add(request)
            most = max(most, len(stack.engine.requests))

        monkeypatch.setattr(stack.engine.requests, "add", counting)
        contents = [f"text {index}" for index in range(500)]
        answer = await stack.generation.Embed(texts(*contents))
        assert rows(answer).tolist() == [vector(wrapped(content)) for content in contents]
        assert 8 <= most <= 20


async def test_a_call_fails_as_a_whole_and_none_of_it_goes_on() -> None:
    async with running_stack(EncoderWorker(nan_token_id=ord("!"), step_ms=1)) as stack:
        error = await refusal(stack, texts(*["fine"] * 700, "not!", *["fine"] * 700))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "not finite" in str(error.details())
        await until(lambda: not stack.engine.requests)


async def test_a_call_that_is_cancelled_aborts_all_of_it() -> None:
    async with running_stack(EncoderWorker(step_ms=200)) as stack:
        call = stack.generation.Embed(texts(*"abcdefgh"))
        await until(lambda: len(stack.engine.requests) == 8)
        call.cancel()
        await until(lambda: not stack.engine.requests)
        late = stack.generation.Embed(texts("a"), timeout=0.05)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await late
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not stack.engine.requests)


async def test_a_lost_executor_is_not_seen() -> None:
    slow = EncoderWorker(step_ms=50, max_num_batched_tokens=512)
    async with running_stack(slow, EncoderWorker(max_num_batched_tokens=512), loses_soon=True) as stack:
        contents = ["x" * 200 + str(index) for index in range(40)]
        call = asyncio.create_task(_embed(stack, texts(*contents)))
        await until(lambda: stack.num_groups_on(stack.executor))
        await stack.executor.kill()
        assert rows(await call).tolist() == [vector(wrapped(content)) for content in contents]


async def _embed(stack: Stack, request: pb.EmbedRequest) -> pb.EmbedResponse:
    return await stack.generation.Embed(request)


async def test_the_client_makes_as_many_calls_as_it_takes(stack: Stack) -> None:
    async with Client(stack.address) as client:
        contents = [f"text {index}" for index in range(1100)]
        progress: list[int] = []
        embeddings = await client.embed(contents, on_progress=progress.append)
        assert [list(each) for each in embeddings.embeddings] == [vector(wrapped(content)) for content in contents]
        assert (sorted(progress), progress[-1], len(progress)) == (progress, 1100, 3)
        both: list[Any] = [[1, 2], "a"]
        single, mixed = await client.embed("a"), await client.embed(both)
        assert [*map(list, mixed.embeddings)] == [vector([1, 2]), list(single.embeddings[0])]
        scores = await client.score("q", ["first", "second"])
        assert scores.scores == (score("q", "first"), score("q", "second"))
        assert (await client.get_model()).tasks == ("embed", "score")
        for inputs, words in (
            ([*contents[:1000], LONG], "inputs[1000] is too long"),
            ([], "inputs is empty; it must have at least 1 text"),
            (5, "inputs is an int; it must be a text"),
            ([[{"role": "user", "content": "x"}]], "inputs[0] is a conversation"),
        ):
            with pytest.raises(InvalidRequestError) as raised:
                await client.embed(inputs)  # type: ignore[arg-type]
            assert words in str(raised.value)
        with pytest.raises(InvalidRequestError, match="priority is 'high'; it must be a whole number"):
            await client.embed("a", priority="high")  # type: ignore[arg-type]


async def test_two_calls_run_at_a_time(stack: Stack) -> None:
    answers = await asyncio.gather(*(stack.generation.Embed(texts(*"ab" * 40)) for _ in range(5)))
    assert all(rows(answer).tolist() == [vector(wrapped("a")), vector(wrapped("b"))] * 40 for answer in answers)
