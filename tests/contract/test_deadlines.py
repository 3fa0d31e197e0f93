"""Requests whose deadline cannot be met are refused with the estimate; the queue says when to come back."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.client import Client
from octavo.errors import DeadlineError, OverloadedError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.sampling_params import SamplingParams
from tests.support.stack import Stack, collect, running_stack, token_request, until

STEP_MS = 20
SECONDS = r"(?P<seconds>[\d.e+]+) s"

# With 0 and with 1 front: then the estimate is the core's, and the deadline the front's.
FRONTS = pytest.mark.parametrize("fronts", [0, 1])


@asynccontextmanager
async def measured_stack(**settings: Any) -> AsyncIterator[Stack]:
    """Run a scheduler that knows how long a step takes, and has nothing to do."""
    async with running_stack(FakeWorker(step_ms=STEP_MS), **settings) as stack:
        await collect(stack, token_request(4, 4))
        yield stack


async def error_of(stack: Stack, request: pb.GenerateRequest, timeout_s: float) -> grpc.aio.AioRpcError:
    """Return what a request with a deadline ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stack.generation.Generate(request, timeout=timeout_s):
            pass
    return caught.value


async def first_event(stack: Stack, request: pb.GenerateRequest, timeout_s: float) -> str | None:
    """Return the kind of the first event of a request with a deadline, and leave."""
    call = stack.generation.Generate(request, timeout=timeout_s)
    event = await call.read()
    call.cancel()
    assert isinstance(event, pb.GenerateResponse), await call.details()
    return event.WhichOneof("event")


@FRONTS
async def test_an_answer_that_takes_far_longer_than_its_call_has_is_refused_with_the_estimate(fronts: int) -> None:
    async with measured_stack(fronts=fronts) as stack:
        for params in ({"ignore_eos": True}, {"min_tokens": 1000}, {"ignore_eos": True, "n": 2, "temperature": 1.0}):
            error = await error_of(stack, token_request(4, 1000, **params), 1.0)
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            told = re.fullmatch(
                (rf"the answer would take about {SECONDS}; the call's deadline is in [\d.]+ s"), error.details() or ""
            )
            assert told, error.details()
            assert 19 <= float(told["seconds"]) < 60
        assert not stack.engine.requests


@FRONTS
async def test_an_answer_that_may_come_in_time_is_begun(fronts: int) -> None:
    async with measured_stack(fronts=fronts) as stack:
        for name, request, timeout_s in (
            ("an end of sequence may come", token_request(4, 1000), 1.0),
            ("a stop token may", token_request(4, 1000, ignore_eos=True, stop_token_ids=[3]), 1.0),
            ("a stop string may", token_request(4, 1000, ignore_eos=True, stop=["xyz"]), 1.0),
            ("it is less than twice too long", token_request(4, 1000, ignore_eos=True), 12.0),
        ):
            assert await first_event(stack, request, timeout_s) == "accepted", name


async def test_nothing_is_refused_before_a_step_was_measured() -> None:
    async with running_stack(FakeWorker(step_ms=STEP_MS)) as stack:
        assert await first_event(stack, token_request(4, 1000, ignore_eos=True), 1.0) == "accepted"


@asynccontextmanager
async def queue_of_80_s(**settings: Any) -> AsyncIterator[Stack]:
    """Run a scheduler with one place, taken for 20 s, and four requests that wait and take 20 s each."""
    async with measured_stack(max_num_seqs=1, **settings) as stack:
        requests = [token_request(4, 1000, first_id=number, ignore_eos=True) for number in range(5)]
        calls = [stack.generation.Generate(request) for request in requests]
        await asyncio.gather(*(call.read() for call in calls))
        await until(lambda: len(stack.engine.queue) == 4)
        yield stack
        for call in calls:
            call.cancel()


@FRONTS
async def test_a_deadline_that_passes_in_the_queue_is_refused(fronts: int) -> None:
    async with queue_of_80_s(fronts=fronts) as stack:
        error = await error_of(stack, token_request(4, 1, first_id=9), 0.5)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        told = re.fullmatch(
            (rf"the answer would begin in about {SECONDS}; the call's deadline is in [\d.]+ s"), error.details() or ""
        )
        assert told, error.details()
        assert 95 < float(told["seconds"]) < 300
        other = token_request(4, 1, first_id=10)
        other.tenant = "another"  # it need not stand behind all of them
        assert await first_event(stack, other, 15.0) == "accepted"


@FRONTS
async def test_who_finds_the_queue_full_is_told_when_half_of_it_is_through(fronts: int) -> None:
    async with queue_of_80_s(fronts=fronts, max_waiting_requests=4) as stack, Client(stack.address) as client:
        if stack.fronts is not None:  # the front has heard of the queue
            await until(lambda: stack.engine.waiting.num_waiting == 4)
        with pytest.raises(OverloadedError) as caught:
            await client.generate("x", SamplingParams(max_tokens=1))
        assert 38 <= caught.value.retry_after_s <= 60
        assert str(caught.value).endswith(f"retry in {caught.value.retry_after_s:g} s")


async def test_requests_on_a_stream_have_the_deadline_of_their_stream() -> None:
    async with measured_stack() as stack:
        call: Any = stack.generation.StreamRequests(timeout=5.0)
        for number, ignore_eos in ((1, True), (2, False)):
            request = token_request(4, 1000 if ignore_eos else 2, first_id=number, ignore_eos=ignore_eos)
            await call.write(pb.StreamRequestsRequest(number=number, submit=request))
        await call.done_writing()
        failed, finished = [], []
        async for message in call:
            failed += [(one.number, one.code) for one in message.failed]
            finished += [one.number for one in message.finished]
        assert (failed, finished) == ([(1, grpc.StatusCode.DEADLINE_EXCEEDED.value[0])], [2])


async def test_the_python_client_raises_the_estimate_and_goes_on_with_what_was_begun() -> None:
    async with measured_stack() as stack, Client(stack.address) as client:
        with pytest.raises(DeadlineError, match=r"^the answer would take about .* s; the call's deadline is in "):
            await client.generate([40, 41], SamplingParams(max_tokens=1000, ignore_eos=True), timeout_s=1.0)
        begun = token_request(4, 1000, ignore_eos=True)
        begun.continuation.outputs.add(token_ids=[40])
        begun.continuation.attempt = 1
        assert await first_event(stack, begun, 1.0) == "accepted"
