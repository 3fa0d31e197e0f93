"""The client's side of StreamRequests, against servers that misbehave as each test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2

from octavo.calls.request_stream import MAX_MESSAGES_ON_THEIR_WAY, MAX_UNWRITTEN_REQUESTS, RequestStream
from octavo.client import Client
from octavo.errors import ClosedError, InternalError, InvalidRequestError, OctavoError, UnavailableError
from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.outputs import Accepted, Delta, FailedRequest, Finished
from tests.support.each_row import each_row
from tests.unit.octavo.stand_in import StandIn

Requests: TypeAlias = AsyncIterator[pb.StreamRequestsRequest]
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = Callable[[Requests, Context], AsyncIterator[pb.StreamRequestsResponse]]


@asynccontextmanager
async def client_of(handler: Handler | None) -> AsyncIterator[Client]:
    """Serve StreamRequests and nothing else; None: not even that."""

    async def stream_requests(requests: Requests, context: Context) -> AsyncIterator[pb.StreamRequestsResponse]:
        assert handler is not None
        await context.send_initial_metadata(())
        async for response in handler(requests, context):
            yield response

    served = grpc.stream_stream_rpc_method_handler(
        stream_requests, pb.StreamRequestsRequest.FromString, pb.StreamRequestsResponse.SerializeToString
    )
    methods = {} if handler is None else {"StreamRequests": served}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("octavo.generation.v1.GenerationService", methods)]
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with Client(address) as client:
            yield client
    finally:
        await server.stop(0)


def accepted(number: int) -> pb.StreamRequestsResponse:
    message = pb.Accepted(request_id=f"r{number}", num_prompt_tokens=1)
    return pb.StreamRequestsResponse(accepted=[pb.RequestAccepted(number=number, accepted=message)])


def finished(*numbers: int, **deltas: Any) -> pb.StreamRequestsResponse:
    outputs = [generation_pb2.Output(finish_reason=generation_pb2.FINISH_REASON_STOP)]
    ends = [pb.RequestEnd(number=number, finished=pb.RequestFinished(outputs=outputs)) for number in numbers]
    return pb.StreamRequestsResponse(finished=ends, deltas=pb.RequestDeltas(**deltas))


async def all_of(stream: RequestStream) -> list[tuple[int, object]]:
    return [pair async for pair in stream]


async def test_a_stream_that_breaks_in_the_middle_says_why_to_whoever_iterates_and_to_whoever_submits() -> None:
    async def breaks(requests: Requests, context: Context) -> AsyncIterator[pb.StreamRequestsResponse]:
        async for request in requests:
            if request.HasField("submit"):
                yield accepted(request.number)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the client read nothing for 60 s")

    async with client_of(breaks) as client, client.request_stream() as stream:
        await stream.submit([1])
        events = aiter(stream)
        assert await anext(events) == (1, Accepted("r1", 1, (1,)))
        with pytest.raises(OctavoError, match="the client read nothing for 60 s"):
            await anext(events)
        for further in (stream.submit([2]), stream.abort(1)):
            with pytest.raises(OctavoError, match="the client read nothing for 60 s"):
                await further


@each_row(True, False)
async def test_a_scheduler_without_the_call_is_told_apart_in_one_sentence(submits_first: bool) -> None:
    sentence = r"^the server at 127.0.0.1:\d+ does not implement this call; .* or upgrade that scheduler$"
    async with client_of(None) as client:
        prompts = [[number] for number in range(500 if submits_first else 0)]
        with pytest.raises(InternalError, match=sentence):
            async for _ in client.stream_many(prompts, max_in_flight=400):
                pass


async def test_a_stream_that_ends_before_its_requests_is_an_error() -> None:
    async def forgets(requests: Requests, context: Context) -> AsyncIterator[pb.StreamRequestsResponse]:
        async for request in requests:
            if request.HasField("submit"):
                yield accepted(request.number)
                return

    async with client_of(forgets) as client, client.request_stream() as stream:
        await stream.submit([1])
        with pytest.raises(InternalError, match="closed the stream before its requests"):
            await all_of(stream)
        with pytest.raises(ClosedError, match="the stream is closed; open a new one"):
            await stream.submit([2])


async def test_nothing_is_submitted_behind_the_last_one_or_outside_the_stream(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        with pytest.raises(ClosedError, match="the stream is not open; use it as `async with"):
            await client.request_stream().submit([1])
        async with client.request_stream() as stream:
            await stream.submit("sky")
            await stream.close_submissions()
            with pytest.raises(ClosedError, match="accepts no more requests"):
                await stream.submit("sky")
            assert isinstance((await all_of(stream))[-1][1], Finished)


@each_row("the stream", "the client")
async def test_closing_early_ends_the_call_and_the_iteration_of_others(closes: str, *, stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        stream = client.request_stream()
        await stream.__aenter__()
        await stream.submit("endless")
        iterating = asyncio.create_task(all_of(stream))
        await stand_in.call_began.wait()
        await (stream.__aexit__() if closes == "the stream" else client.close())
        with pytest.raises(ClosedError, match="the stream is closed"):
            await asyncio.wait_for(iterating, 10)
        await asyncio.wait_for(stand_in.call_ended.wait(), 10)
        with pytest.raises(ClosedError):
            await stream.submit("sky")


async def test_a_cancelled_submit_leaves_the_stream_as_it_was() -> None:
    reads = asyncio.Event()

    async def slow_reader(requests: Requests, context: Context) -> AsyncIterator[pb.StreamRequestsResponse]:
        await reads.wait()
        async for request in requests:
            if request.HasField("submit"):
                yield finished(request.number)

    long_prompt = list(range(100_000))
    async with client_of(slow_reader) as client, client.request_stream() as stream:
        numbers: list[int] = []

        async def submit_many() -> None:
            while len(numbers) < 4 * MAX_UNWRITTEN_REQUESTS:
                number = await stream.submit(long_prompt)
                numbers.append(number)

        submitting = asyncio.create_task(submit_many())
        await asyncio.sleep(0.3)
        assert not submitting.done(), "who submits waits until the scheduler takes it"
        submitting.cancel()
        await asyncio.wait((submitting,))
        assert numbers == list(range(1, len(numbers) + 1))
        reads.set()
        await stream.submit([1])
        await stream.close_submissions()
        assert [number for number, _ in await all_of(stream)] == [*numbers, len(numbers) + 1]


async def test_a_slow_consumer_stops_granting_credits_and_gets_what_has_grown_together() -> None:
    granted = 0

    async def by_credits(requests: Requests, context: Context) -> AsyncIterator[pb.StreamRequestsResponse]:
        nonlocal granted
        waiting, told = 0, asyncio.Event()

        async def read() -> None:
            nonlocal granted
            async for request in requests:
                granted += request.credits
                told.set()

        reading = asyncio.create_task(read())
        num_sent = 0
        while num_sent < 3 * MAX_MESSAGES_ON_THEIR_WAY:
            waiting += 1  # tokens that have come about
            if num_sent < granted:
                num_sent += 1
                ids = list(range(waiting))
                waiting = 0
                yield finished(numbers=[1], token_counts=[len(ids)], token_ids=ids)
            else:
                told.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(told.wait(), 0.01)
        yield finished(1)
        await reading

    async with client_of(by_credits) as client, client.request_stream() as stream:
        await stream.submit([1])
        await stream.close_submissions()
        sizes = []
        async for _, event in stream:
            if isinstance(event, Delta):
                sizes.append(len(event.token_ids))
                if len(sizes) == 1:
                    await asyncio.sleep(0.5)
                    assert granted == MAX_MESSAGES_ON_THEIR_WAY
    assert sizes[1:MAX_MESSAGES_ON_THEIR_WAY] == [1] * (MAX_MESSAGES_ON_THEIR_WAY - 1)
    assert sizes[MAX_MESSAGES_ON_THEIR_WAY] > 10


async def test_many_run_so_many_at_a_time_and_what_a_full_queue_refused_is_sent_again() -> None:
    live: dict[int, int] = {}
    refusals: dict[int, int] = {}
    most_live = 0

    async def often_full(requests: Requests, context: Context) -> AsyncIterator[pb.StreamRequestsResponse]:
        nonlocal most_live

        async def read() -> None:
            async for request in requests:
                if request.HasField("submit"):
                    [live[request.number]] = request.submit.token_ids.ids

        reading = asyncio.create_task(read())
        while not reading.done() or live:
            await asyncio.sleep(0.02)
            most_live = max(most_live, len(live))
            for number, prompt in list(live.items()):
                del live[number]
                if prompt % 3 == 0 and refusals.get(prompt, 0) < 2:
                    refusals[prompt] = refusals.get(prompt, 0) + 1
                    yield overloaded(number)
                else:
                    yield finished(number, numbers=[number], token_ids=[prompt])

    def overloaded(number: int) -> pb.StreamRequestsResponse:
        failed = pb.RequestFailed(number=number, code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="full")
        delay = duration_pb2.Duration(nanos=1_000_000)
        failed.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        return pb.StreamRequestsResponse(failed=[failed])

    async with client_of(often_full) as client:
        prompts = [[number] for number in range(12)]
        ended: dict[int, object] = {}
        async for index, event in client.stream_many(prompts, max_in_flight=4):
            if isinstance(event, Finished | FailedRequest):
                assert index not in ended
                ended[index] = event
    assert [ended[index].outputs[0].token_ids for index in range(12)] == [(index,) for index in range(12)]  # type: ignore[attr-defined]
    assert most_live == 4
    assert refusals == {0: 2, 3: 2, 6: 2, 9: 2}


async def test_leaving_many_early_cancels_the_call(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        events = client.stream_many(["endless", "sky"])
        assert isinstance((await anext(events))[1], Accepted)
        await events.aclose()
        await asyncio.wait_for(stand_in.call_ended.wait(), 10)


@each_row(
    ({"max_in_flight": 0}, "max_in_flight is 0; it must be at least 1"),
    ({"sampling_params": [None, None]}, "the list sampling_params has 2 for 1 prompts"),
)
async def test_wrong_arguments_are_refused_before_anything_is_sent(
    arguments: dict[str, Any], sentence: str, *, stand_in: StandIn
) -> None:
    async with Client(stand_in.address) as client:
        with pytest.raises(InvalidRequestError, match=sentence):
            async for _ in client.stream_many(["sky"], **arguments):
                pass
    assert not stand_in.requests


async def test_nobody_at_the_address_is_one_sentence() -> None:
    async with Client("127.0.0.1:1", resume_timeout_s=0.1) as client:
        with pytest.raises(UnavailableError, match=r"no scheduler is reachable at 127\.0\.0\.1:1"):
            async for _ in client.stream_many(["sky"] * 100):
                pass
