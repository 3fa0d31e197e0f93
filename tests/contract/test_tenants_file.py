"""The file of tenants, end to end: what each may have, over gRPC and HTTP, with fronts and without, and its reload."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

from executor_svc.fake.worker import FakeWorker
from octavo.core.v1 import core_service_pb2 as core_pb
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import OctavoServiceError, RequestAbortedError
from octavo_shared.process.clock import monotonic_s
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.engine.engine import Engine
from scheduler_svc.link.messages import encode_failure
from scheduler_svc.processes import service
from scheduler_svc.processes.service import SchedulerService
from scheduler_svc.request.continuation import Continuation, ContinuedOutput
from scheduler_svc.request.continuation_message import encode_continuation
from tests.contract.openai.api import Answer, Api, running_api
from tests.contract.test_link import welcomed
from tests.support.stack import running_stack, token_request, until
from tests.support.step_logs import check_replay

ENDLESS = 8000
TENANTS = ("red", "blue", "green", "gray")
QUOTAS = """
[red]
slots = 1
waiting = 1

[blue]
tokens_per_minute = 60

[green]
"""


def secret_of(tenant: str) -> str:
    return f"{tenant}-secret-of-the-test"


class Tenants:
    """A scheduler with a file of tenants, and calls of theirs over both doors.

    Attributes:
        api: The scheduler.
    """

    def __init__(self, api: Api, file: Path) -> None:
        self.api = api
        self._file = file
        self._num_calls = 0

    def generate(
        self, tenant: str, max_tokens: int = 3, num_prompt_tokens: int = 4, *, num_known: int = 0, **params: Any
    ) -> "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]":
        """Call; `num_known`: tokens of an answer that goes on."""
        self._num_calls += 1
        request = token_request(num_prompt_tokens, max_tokens, first_id=self._num_calls, **params)
        if num_known:
            request.continuation.attempt = 1
            request.continuation.outputs.add(token_ids=[50] * num_known)
        metadata = [("authorization", f"Bearer {secret_of(tenant)}")]
        return self.api.stack.generation.Generate(request, metadata=metadata)

    async def complete(self, tenant: str, num_prompt_tokens: int = 4) -> Answer:
        body = {"model": "fake", "prompt": list(range(40, 40 + num_prompt_tokens)), "max_tokens": 3}
        headers = {"Authorization": f"Bearer {secret_of(tenant)}"}
        return await self.api.send("POST", "/v1/completions", json=body, headers=headers)

    async def is_refused_at_all_doors(self, tenant: str, sentence: str, num_prompt_tokens: int = 4) -> None:
        """See the sentence and the time to come back, over gRPC and HTTP."""
        with pytest.raises(grpc.aio.AioRpcError, match=sentence) as caught:
            await num_tokens(self.generate(tenant, num_prompt_tokens=num_prompt_tokens))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        delay_s = retry_delay_s(caught.value)
        assert delay_s
        answer = await self.complete(tenant, num_prompt_tokens)
        assert answer.status == 429
        assert 0 <= int(answer.headers["retry-after"]) <= delay_s + 2
        error = answer.error
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert re.search(sentence, error["message"]), error["message"]

    async def put(self, text: str) -> None:
        """Write the file anew, and return once the engine has read it."""
        before = self.api.stack.engine.tenants
        self._file.write_text(text)
        await until(lambda: self.api.stack.engine.tenants is not before)

    @property
    def num_running(self) -> int:
        return self.api.stack.engine.load.num_running

    @property
    def num_live(self) -> int:
        return len(self.api.stack.engine.requests)


async def num_tokens(call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]") -> int:
    """Return how many tokens a call brings until it ends in order."""
    return sum([len(event.delta.token_ids) async for event in call])


def retry_delay_s(error: grpc.aio.AioRpcError) -> float | None:
    trailing = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    retry = error_details_pb2.RetryInfo()
    is_there = any(detail.Unpack(retry) for detail in status.details)
    return retry.retry_delay.ToTimedelta().total_seconds() if is_there else None


@asynccontextmanager
async def running_tenants(
    folder: Path, monkeypatch: pytest.MonkeyPatch, quotas: str, fronts: int = 0, **settings: object
) -> AsyncIterator[Tenants]:
    monkeypatch.setattr(service, "TENANTS_INTERVAL_S", 0.01)
    tokens, file = folder / "tokens", folder / "tenants.toml"
    tokens.write_text("".join(f"{tenant} {secret_of(tenant)}\n" for tenant in TENANTS))
    tokens.chmod(0o600)
    file.write_text(quotas)
    async with running_api(
        FakeWorker(step_ms=1), tokens_file=tokens, tenants_file=file, fronts=fronts, **settings
    ) as api:
        yield Tenants(api, file)


@pytest.mark.parametrize("fronts", [0, 2])
async def test_each_quota_holds_at_all_doors(fronts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_tenants(tmp_path, monkeypatch, QUOTAS, fronts) as tenants:
        running = tenants.generate("red", ENDLESS)
        await until(lambda: tenants.num_running == 1)
        waiting = asyncio.create_task(num_tokens(tenants.generate("red")))
        await until(lambda: tenants.num_live == 2)
        await tenants.is_refused_at_all_doors(
            "red", r"the waiting queue of tenant 'red' is full \(1 request\); retry in"
        )
        assert await num_tokens(tenants.generate("green")) == 3, "others do not wait for the slots of red"
        assert tenants.num_running == 1
        running.cancel()
        assert await waiting == 3

        assert await num_tokens(tenants.generate("blue", 20, num_prompt_tokens=30)) == 20
        await tenants.is_refused_at_all_doors(
            "blue",
            r"tenant 'blue' has 1\d of its 60 tokens a minute left, and the request needs at least 40 tokens",
            40,
        )
        with pytest.raises(grpc.aio.AioRpcError, match="needs at least 55 tokens; retry in"):
            await num_tokens(tenants.generate("blue", num_prompt_tokens=55))

        with pytest.raises(grpc.aio.AioRpcError, match="tenant is gray; it must be one of the 3 tenants") as unknown:
            await num_tokens(tenants.generate("gray"))
        assert unknown.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await tenants.complete("gray")).status == 400


@pytest.mark.parametrize("fronts", [0, 2])
async def test_a_prompt_that_no_minute_has_tokens_for_is_refused_for_good(
    fronts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = "the prompt has 61 tokens, and tenant 'blue' may use 60 tokens a minute, so it can never run"
    async with running_tenants(tmp_path, monkeypatch, QUOTAS, fronts) as tenants:
        with pytest.raises(grpc.aio.AioRpcError, match=sentence) as caught:
            await num_tokens(tenants.generate("blue", num_prompt_tokens=61))
        assert (caught.value.code(), retry_delay_s(caught.value)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, None)
        answer = await tenants.complete("blue", 61)
        assert answer.status == 429
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
        assert sentence in answer.error["message"]


async def test_tokens_that_are_generated_beyond_the_quota_end_nothing_and_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_tenants(tmp_path, monkeypatch, QUOTAS) as tenants:
        several = token_request(10, 50, n=2, temperature=1.0, seed=1)
        metadata = [("authorization", f"Bearer {secret_of('blue')}")]
        assert await num_tokens(tenants.api.stack.generation.Generate(several, metadata=metadata)) == 100
        with pytest.raises(grpc.aio.AioRpcError, match=r"has used (49|50) tokens more than its 60 tokens a minute"):
            await num_tokens(tenants.generate("blue"))


def num_left(engine: Engine, tenant: str = "") -> float:
    """Return the tokens that are left to a tenant."""
    bucket = engine.token_quotas._bucket(("tenant", tenant), monotonic_s())
    assert bucket is not None
    return bucket.num_tokens


async def test_what_is_computed_counts_even_if_it_is_not_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_tenants(tmp_path, monkeypatch, "[blue]\ntokens_per_minute = 300\n[red]\n") as tenants:
        engine = tenants.api.stack.engine
        assert await num_tokens(tenants.generate("blue", 52, 10, num_known=50)) == 2
        assert 238 <= num_left(engine, "blue") <= 248, "the prompt, the answer so far, and 2 tokens"
        beams = tenants.generate("blue", 30, 10, beam_width=4, n=1, ignore_eos=True)
        assert [len(event.finished.outputs[0].token_ids) async for event in beams if event.HasField("finished")] == [30]
        assert 108 <= num_left(engine, "blue") <= 130, "4 beams of 30 tokens"
        cut = tenants.generate("blue", ENDLESS, 10, beam_width=4, n=1, ignore_eos=True)
        await until(lambda: num_left(engine, "blue") < -100)
        cut.cancel()
        await until(lambda: not tenants.num_live)
        assert num_left(engine, "blue") < -90, "though nothing of it was returned"
        sentence = r"has used \d+ tokens more than its 300 tokens a minute, and the request needs at least 1 token"
        with pytest.raises(grpc.aio.AioRpcError, match=sentence):
            await num_tokens(tenants.generate("blue"))


async def test_an_answer_that_goes_on_needs_no_more_than_a_full_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_tenants(tmp_path, monkeypatch, QUOTAS) as tenants:
        assert await num_tokens(tenants.generate("blue", 402, 10, num_known=400)) == 2
        with pytest.raises(grpc.aio.AioRpcError, match=r"has used 3[45].* tokens more than its 60 tokens a minute"):
            await num_tokens(tenants.generate("blue"))


async def test_what_was_counted_before_its_front_was_lost_is_not_counted_again(
    tmp_path: Path,
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[""]\ntokens_per_minute = 60\n')
    async with running_stack(FakeWorker(step_ms=1), fronts=1, tenants_file=file) as stack:
        for is_lost in (True, False):
            async with welcomed(stack, session=2 * is_lost + 1) as front:
                await front.submit(1, request_id="cut", max_tokens=ENDLESS)
                await until(lambda: any(one.num_output_tokens > 200 for one in stack.engine.requests.values()))
                if not is_lost:
                    await front.say(
                        aborts=[
                            core_pb.RequestAbort(
                                number=1, failure=encode_failure(RequestAbortedError("its client left"))
                            )
                        ]
                    )
            await until(lambda: ("", "cut") not in stack.engine.requests)
            before = num_left(stack.engine)
            async with welcomed(stack, session=2 * is_lost + 2) as front:
                known = Continuation((ContinuedOutput(np.full(200, 50, np.int32)),))
                await front.submit(1, request_id="cut", max_tokens=202, continuation=encode_continuation(known))
                [ended] = (await front.until("ended")).ended
            if is_lost:
                assert ended.ended.num_output_tokens == 202
                assert num_left(stack.engine) > before - 10
                stack.engine.token_quotas._buckets.clear()
            else:
                assert ended.failure.kind == "TokenQuotaError"


@pytest.mark.parametrize("fronts", [0, 2])
async def test_a_request_of_more_sequences_than_its_tenant_may_run_is_refused(
    fronts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas = "[red]\nslots = 2\n[green]\n[blue]\nslots = 3\n"
    async with running_tenants(tmp_path, monkeypatch, quotas, fronts) as tenants:
        drawn = {"temperature": 1.0, "seed": 1}
        wide: tuple[dict[str, Any], ...] = ({"n": 3, **drawn}, {"best_of": 3, **drawn}, {"beam_width": 3})
        for params in wide:
            sentence = "runs 3 sequences at a time .*, and tenant 'red' may run 2 "
            with pytest.raises(grpc.aio.AioRpcError, match=sentence) as caught:
                await num_tokens(tenants.generate("red", **params))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            for tenant in ("green", "blue"):
                await num_tokens(tenants.generate(tenant, **params))
        assert await num_tokens(tenants.generate("red", n=2, temperature=1.0, seed=1)) == 6


@pytest.mark.parametrize("fronts", [0, 2])
async def test_another_file_holds_under_load_and_ends_nothing(
    fronts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    async with running_tenants(tmp_path, monkeypatch, QUOTAS, fronts, step_log=log) as tenants:
        one = asyncio.create_task(num_tokens(tenants.generate("red", 2000)))
        await until(lambda: tenants.num_running == 1)
        other = asyncio.create_task(num_tokens(tenants.generate("red", 2000)))
        await until(lambda: tenants.num_live == 2)
        assert tenants.num_running == 1
        await tenants.put("[red]\nslots = 2\n[gray]\n")
        await until(lambda: tenants.num_running == 2)
        await until(lambda: all_fronts_serve(tenants, {"red", "gray"}))
        assert await num_tokens(tenants.generate("gray")) == 3
        with pytest.raises(grpc.aio.AioRpcError, match="tenant is green; it must be one of the 2 tenants"):
            await num_tokens(tenants.generate("green"))
        await tenants.put("[gray]\n")
        await until(lambda: all_fronts_serve(tenants, {"gray"}))
        assert (await one, await other) == (2000, 2000), "red has no table any more, and its answers go on"
        await tenants.put('["*"]\n')
        await until(lambda: all_fronts_serve(tenants, None))
        assert await num_tokens(tenants.generate("green")) == 3
    assert check_replay(log).counts.num_calls


async def test_a_file_that_is_broken_later_changes_nothing_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_tenants(tmp_path, monkeypatch, QUOTAS) as tenants:
        (tmp_path / "tenants.toml").write_text("[red]\nslots = 0\n[gray]\n")
        await until(lambda: "files_not_reloaded" in caplog.text)
        assert "[red]: slots is 0; it must be at least 1" in caplog.text
        assert await num_tokens(tenants.generate("green")) == 3
        await tenants.put("[gray]\n")
        assert "files_reloaded files=tenants" in caplog.text
        assert await num_tokens(tenants.generate("gray")) == 3


def test_a_file_that_is_broken_at_the_start_ends_it(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text("[red]\nweight = 0\n")
    config = SchedulerConfig.model_validate({"executor": ("127.0.0.1:1",), "tenants_file": file})
    with pytest.raises(OctavoServiceError, match=r"^--tenants-file .*, \[red\]: weight is 0; it must be a number from"):
        SchedulerService(config)


def all_fronts_serve(tenants: Tenants, names: set[str] | None) -> bool:
    """Return whether each front has heard whom it serves."""
    stack = tenants.api.stack
    fronts = [stack.front] if stack.fronts is None else [front.service.front for front in stack.fronts.fronts]
    return all(front.generations[""].settings.tenants == names for front in fronts)
