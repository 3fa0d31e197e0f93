"""Callers of StreamRequests who take little or send much, executors that die and schedulers that go away under them."""

import asyncio
import itertools

import grpc
import grpc.aio
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.client import Client
from octavo.errors import UnavailableError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.outputs import FailedRequest, Finished
from scheduler_svc.front.api import stream_requests
from tests.contract.test_request_stream import assert_nothing_is_left, ends, error_of, submission
from tests.support.patience import PATIENCE_S
from tests.support.stack import Stack, collect, running_stack, token_request, until


async def all_open(stack: Stack, num_streams: int) -> list[stream_requests.StreamRequestsCall]:
    """Return the scheduler's side of all streams, once there are so many."""
    await until(lambda: len(stack.front.generation._streams) == num_streams)
    return list(stack.front.generation._streams)


async def test_a_caller_that_takes_nothing_is_cut_whatever_else_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_requests, "SLOW_CALLER_S", 0.5)
    async with running_stack() as stack:
        call = stack.generation.StreamRequests()
        await call.write(submission(1, 1, credits=0))
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            async with asyncio.timeout(PATIENCE_S):
                for number in itertools.count(2):
                    await call.write(submission(number, 1, credits=0))
                    await asyncio.sleep(0.05)
        assert number < 60, "each thing that it sends gives it another minute"
        await until(lambda: not stack.engine.requests)


async def test_what_a_caller_does_not_take_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_requests, "MAX_UNTAKEN_REQUESTS", 8)
    async with running_stack() as stack:
        call = stack.generation.StreamRequests()
        for number in range(1, 9):
            await call.write(submission(number, 1, credits=0))
        [stream] = await all_open(stack, 1)
        await until(lambda: [r for r in stream._requests.values() if r.accepted and r.accepted.response.ended][7:])
        await call.write(submission(9, 1))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
        assert (raised.value.code(), raised.value.details()) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "the stream has 8 finished requests whose results the client has not read, and it sent another one; all "
            "were aborted",
        )


async def test_bodies_that_wait_for_their_check_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_requests, "MAX_UNCHECKED_BYTES", 1_000)
    async with running_stack() as stack, Client(stack.address) as client, client.request_stream() as stream:
        for number in range(64):
            await stream.submit([40 + number] * 400, max_tokens=1)  # one alone has 800 bytes
        found = await ends(stream)
        errors = {error_of(event) for event in found.values() if isinstance(event, FailedRequest)}
        assert any(isinstance(event, Finished) for event in found.values())
        assert errors
        assert all("the queue of this stream is full" in error for error in errors)


async def test_a_caller_with_few_requests_does_not_wait_for_those_of_one_with_many() -> None:
    async with running_stack(FakeWorker(step_ms=5), max_num_seqs=512) as stack:
        many, few = stack.generation.StreamRequests(), stack.generation.StreamRequests()
        for number in range(1, 301):
            await many.write(submission(number, 200))
        for number in range(1, 4):
            await few.write(submission(number, 3))
        await few.done_writing()
        ended = [end.number async for response in few for end in response.finished]
        assert sorted(ended) == [1, 2, 3]
        assert stack.engine.requests, "the other caller's requests are not done"
        many.cancel()


async def test_callers_that_take_nothing_delay_nobody_and_what_is_kept_for_them_is_what_they_asked_for() -> None:
    async with running_stack(max_num_seqs=512) as stack:
        calls = [stack.generation.StreamRequests() for _ in range(64)]
        for call in calls:
            for number in (1, 2):
                await call.write(submission(number, 400, credits=0))
        await until(lambda: len(stack.engine.requests) + len(stack.engine.ended) == 128)
        answer = await asyncio.wait_for(collect(stack, token_request(3, 30)), 20)
        assert len(answer.token_ids) == 30
        await until(lambda: not stack.engine.requests)  # they end though nobody takes their tokens
        assert_nothing_is_left(stack)
        for call in calls:
            call.cancel()


async def test_an_executor_that_dies_under_a_stream_costs_no_token() -> None:
    requests = [token_request(20, 48, first_id=index, temperature=index % 2 / 1.0, seed=index) for index in range(20)]
    async with running_stack() as stack:
        expected = [(await collect(stack, request)).token_ids for request in requests]
    async with running_stack(FakeWorker(step_ms=2)) as stack:
        async with stack.together(len(requests)):
            call = stack.generation.StreamRequests()
            for number, request in enumerate(requests):
                await call.write(pb.StreamRequestsRequest(number=number, submit=request))
            await call.done_writing()

        async def answers() -> dict[int, list[int]]:
            found: dict[int, list[int]] = {}
            async for response in call:
                assert not response.failed
                assert not response.deltas.output_indexes
                ids = iter(response.deltas.token_ids)
                counts = response.deltas.token_counts or [1] * len(response.deltas.numbers)
                for number, count in zip(response.deltas.numbers, counts, strict=True):
                    found.setdefault(number, []).extend(itertools.islice(ids, count))
            return found

        running = asyncio.create_task(answers())
        await until(lambda: any(each.num_output_tokens > 10 for each in stack.engine.requests.values()))
        await stack.executor.kill()
        stack.executor.worker = FakeWorker()
        await stack.executor.start()
        found = await running
        assert stack.driver.num_losses == 1
    assert [found[number] for number in range(20)] == expected


async def test_a_scheduler_that_goes_away_lets_requests_finish_and_ends_streams_that_are_kept_open() -> None:
    async with (
        running_stack(shutdown_grace_s=20.0) as stack,
        Client(stack.address) as client,
        client.request_stream() as idle,
        client.request_stream() as busy,
    ):
        number = await busy.submit("Hello", max_tokens=200, ignore_eos=True)
        await until(lambda: stack.engine.requests)
        stopping = asyncio.create_task(stack.service.stop("the test says so"))
        await until(lambda: stack.engine.is_draining)
        late = await busy.submit("Too late")
        found: dict[int, object] = {}

        async def read() -> None:
            events = aiter(busy)
            while True:
                which, event = await anext(events)
                found[which] = event

        with pytest.raises(
            UnavailableError, match=("the scheduler shut down; send further requests to another scheduler")
        ):
            await asyncio.wait_for(read(), 15)
        assert isinstance(found[number], Finished)
        assert error_of(found[late]).startswith("UnavailableError: the scheduler is draining")
        with pytest.raises(UnavailableError, match="the scheduler shut down"):
            await asyncio.wait_for(ends(idle), PATIENCE_S)
        await asyncio.wait_for(stopping, PATIENCE_S)


async def test_requests_that_outlast_the_grace_period_fail_before_the_stream_does() -> None:
    async with running_stack(FakeWorker(step_ms=5), shutdown_grace_s=0.5) as stack:
        call = stack.generation.StreamRequests()
        await call.write(submission(1, 5_000))
        await until(lambda: stack.engine.requests)
        stopping = asyncio.create_task(stack.service.stop("the test says so"))
        failed: list[pb.RequestFailed] = []
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async with asyncio.timeout(PATIENCE_S):
                async for response in call:
                    failed += response.failed
        assert [one.message for one in failed] == ["the scheduler shut down; retry"]
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(stopping, PATIENCE_S)


async def test_a_message_is_bounded_also_by_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_requests, "MAX_VALUES_PER_MESSAGE", 100)
    num_requests, num_tokens = 16, 10
    async with running_stack() as stack:
        call = stack.generation.StreamRequests()
        for number in range(1, num_requests + 1):
            message = token_request(3, num_tokens, first_id=number, logprobs=10)
            await call.write(pb.StreamRequestsRequest(number=number, submit=message, credits=0))
        await until(lambda: len(stack.engine.ended) == num_requests)
        await call.done_writing()
        responses = [response async for response in call]
        assert sum(len(response.deltas.token_ids) for response in responses) == num_requests * num_tokens
        assert max(len(response.deltas.alternative_token_ids) for response in responses) <= 100 + num_tokens * 10
