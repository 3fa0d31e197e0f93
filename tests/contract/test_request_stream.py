"""What a caller of StreamRequests meets: the answers of Generate, many of them on one stream."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.calls.request_stream import RequestStream
from octavo.client import Client
from octavo.errors import OctavoError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.outputs import Accepted, Delta, FailedRequest, Finished, Prompt
from octavo.values.sampling_params import SamplingParams
from scheduler_svc.front.api import stream_requests
from tests.support.stack import Stack, running_stack, token_request, until

# Prompts of different beginnings: the fake executor cannot tell equal histories apart.
REQUESTS: dict[str, tuple[Prompt, dict[str, Any]]] = {
    "greedy": ("A tale", {"max_tokens": 9, "temperature": 0.0}),
    "sampled": ([40, 41, 42], {"max_tokens": 7, "temperature": 1.0, "seed": 3}),
    "several": ("Bees", {"max_tokens": 6, "temperature": 1.0, "seed": 4, "n": 3}),
    "ranked": ("Cats", {"max_tokens": 5, "temperature": 1.0, "seed": 5, "n": 2, "best_of": 4}),
    "beams": ("Dogs", {"max_tokens": 5, "beam_width": 3, "n": 2, "logprobs": 0}),
    "alternatives": ("Eels", {"max_tokens": 8, "temperature": 0.0, "logprobs": 3}),
    "of the prompt": ("Foxes run", {"max_tokens": 3, "temperature": 0.0, "prompt_logprobs": 2, "logprobs": 0}),
    "one token": ("Goats", {"max_tokens": 1, "temperature": 0.0}),
    "stop string": ("Hens", {"max_tokens": 64, "temperature": 0.0, "stop": ["a", "e", "i", "o", "u", "R"]}),
}


async def ends(stream: RequestStream) -> dict[int, Finished | FailedRequest]:
    """Return the last event of each request, and see that the deltas make it up and that Accepted comes first."""
    found: dict[int, Finished | FailedRequest] = {}
    deltas: dict[int, list[Delta]] = {}
    accepted: set[int] = set()
    await stream.close_submissions()
    async for number, event in stream:
        assert number not in found, "an event came after the last one"
        if isinstance(event, Accepted):
            assert number not in accepted, "accepted twice"
            accepted.add(number)
        elif isinstance(event, Delta):
            assert number in accepted, "a delta came before accepted"
            deltas.setdefault(number, []).append(event)
        elif isinstance(event, Finished):
            found[number] = event
            for output in event.outputs:
                mine = [delta for delta in deltas[number] if delta.output_index == output.output_index]
                assert sum((delta.token_ids for delta in mine), ()) == output.token_ids
                assert "".join(delta.text for delta in mine) == output.text
        elif isinstance(event, FailedRequest):
            found[number] = event
    return found


async def test_each_request_gets_what_a_call_of_its_own_gets() -> None:
    async with running_stack() as stack, Client(stack.address) as client:
        alone = {
            name: [event async for event in client.stream(prompt, **params)][-1]
            for name, (prompt, params) in REQUESTS.items()
        }
        async with client.request_stream() as stream:
            numbers = {name: await stream.submit(prompt, **params) for name, (prompt, params) in REQUESTS.items()}
            found = await ends(stream)
        assert {name: without_cached(found[number]) for name, number in numbers.items()} == {
            name: without_cached(event) for name, event in alone.items()
        }
        assert_nothing_is_left(stack)


async def test_without_text_there_are_the_same_tokens_and_stop_strings_end_them() -> None:
    async with running_stack() as stack, Client(stack.address) as client:
        async with client.request_stream() as stream:
            for includes_text in (True, False):
                for prompt, params in REQUESTS.values():
                    await stream.submit(prompt, include_text=includes_text, **params)
            found = await ends(stream)
        for number in range(1, len(REQUESTS) + 1):
            with_text, without = found[number], found[number + len(REQUESTS)]
            assert any(output.text for output in with_text.outputs)
            assert [replace(output, text="") for output in with_text.outputs] == list(without.outputs)


async def test_a_refused_request_fails_alone_and_in_the_words_of_generate() -> None:
    wrong: list[tuple[Prompt, dict[str, Any]]] = [
        ("Hello", {"top_p": 2.0}),
        ([], {}),
        ([10**6], {}),
        ([40] * 200_000, {}),  # counted before it is decoded
        ("Hello", {"stop": ["x"] * 17}),
    ]
    async with running_stack() as stack, Client(stack.address) as client:
        async with client.request_stream() as stream:
            numbers = [await stream.submit(prompt, **params) for prompt, params in wrong]
            good = await stream.submit("Hello", max_tokens=3)
            found = await ends(stream)
        assert isinstance(found[good], Finished)
        for number, (prompt, params) in zip(numbers, wrong, strict=True):
            with pytest.raises(OctavoError) as raised:
                await client.generate(prompt, **params)
            failed = found[number]
            assert isinstance(failed, FailedRequest)
            assert (type(failed.error), str(failed.error)) == (type(raised.value), str(raised.value))
            assert vars(failed.error) == vars(raised.value)
        assert_nothing_is_left(stack)


async def test_a_request_is_aborted_by_number_wherever_it_is() -> None:
    async with running_stack() as stack, Client(stack.address) as client:
        async with client.request_stream() as stream:
            running = await stream.submit("Running", max_tokens=100_000, request_id="running", ignore_eos=True)
            other = await stream.submit("Other", max_tokens=4)
            events = aiter(stream)
            while not isinstance((await anext(events))[1], Delta):
                pass
            unchecked = await stream.submit("Never checked", max_tokens=100_000, ignore_eos=True)
            for number in (unchecked, running, 1_000):  # the last one is unknown
                await stream.abort(number)
            await stream.close_submissions()
            rest = {number: event async for number, event in events}
        assert isinstance(rest[other], Finished)
        assert error_of(rest[running]) == f"RequestAbortedError: the caller aborted request {running}"
        assert error_of(rest[unchecked]) == f"RequestAbortedError: the caller aborted request {unchecked}"
        assert_nothing_is_left(stack)


async def test_abort_by_request_id_ends_it_too() -> None:
    async with running_stack() as stack, Client(stack.address) as client, client.request_stream() as stream:
        number = await stream.submit("Hello", max_tokens=100_000, request_id="mine", ignore_eos=True)
        await until(lambda: ("", "mine") in stack.engine.requests)
        assert await client.abort("mine")
        assert error_of((await ends(stream))[number]) == "RequestAbortedError: request 'mine' was aborted"


async def messages(stack: Stack, *sent: pb.StreamRequestsRequest) -> AsyncIterator[pb.StreamRequestsResponse]:
    """Send messages, keep the stream open, and yield what comes."""
    call = stack.generation.StreamRequests()
    for message in sent:
        await call.write(message)
    try:
        async for response in call:
            yield response
    finally:
        call.cancel()


def submission(number: int, num_tokens: int = 8, **fields: Any) -> pb.StreamRequestsRequest:
    return pb.StreamRequestsRequest(number=number, submit=token_request(3, num_tokens, first_id=number), **fields)


async def test_what_is_new_waits_for_credits_and_grows_together() -> None:
    async with running_stack() as stack:
        call = stack.generation.StreamRequests()
        await call.write(submission(1, 8, credits=1))
        first = await anext(aiter(call))
        assert first.accepted
        await until(lambda: not stack.engine.requests)
        reading = asyncio.ensure_future(anext(aiter(call)))
        await asyncio.sleep(0.05)
        assert not reading.done(), "there is no credit"
        await call.write(pb.StreamRequestsRequest(credits=5))
        second = await reading
        assert list(second.deltas.numbers) == [1]
        assert len(first.deltas.token_ids) + len(second.deltas.token_ids) == 8
        assert [end.number for end in second.finished] == [1]
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK


async def test_one_message_has_a_step_of_all_requests() -> None:
    num_requests, num_tokens = 32, 20
    async with running_stack() as stack:
        async with stack.together(num_requests):
            call = stack.generation.StreamRequests()
            for number in range(1, num_requests + 1):
                await call.write(submission(number, num_tokens))
            await call.done_writing()
        num_messages = num_deltas = 0
        async for response in call:
            num_messages += bool(response.deltas.numbers)
            num_deltas += len(response.deltas.numbers)
        [core] = stack.engine.fleet.planners
        assert num_messages <= core.last_processed_step_id, "a step has one message"
        assert num_deltas > 4 * num_messages, "and it has all requests of the step"


async def test_who_leaves_ends_all_requests() -> None:
    async with running_stack() as stack:
        call = stack.generation.StreamRequests()
        for number in (1, 2, 3):
            await call.write(submission(number, 100_000))
        await anext(aiter(call))
        await until(lambda: len(stack.engine.requests) == 3)
        call.cancel()
        await until(lambda: not stack.engine.requests)
        assert_nothing_is_left(stack)


BROKEN_RULES: dict[str, tuple[Sequence[pb.StreamRequestsRequest], str]] = {
    "a number twice": (
        [submission(7, 100_000), submission(7)],
        "number is 7; it must be larger than 7, the one before it",
    ),
    "a number without a request": (
        [pb.StreamRequestsRequest(number=1)],
        "submit is absent; it must be set with number and include_text",
    ),
    "too many numbers to abort": (
        [pb.StreamRequestsRequest(abort=range(2_000))],
        "abort is 2000 elements long; it must be at most 1024 elements long",
    ),
}


@pytest.mark.parametrize(("sent", "sentence"), BROKEN_RULES.values(), ids=BROKEN_RULES)
async def test_who_breaks_a_rule_of_the_stream_is_told_and_all_requests_end(
    sent: Sequence[pb.StreamRequestsRequest], sentence: str
) -> None:
    async with running_stack() as stack:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in messages(stack, *sent):
                pass
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, sentence)
        await until(lambda: not stack.engine.requests)
        assert_nothing_is_left(stack)


async def test_what_is_no_message_ends_the_stream() -> None:
    async with running_stack() as stack, grpc.aio.insecure_channel(stack.address) as channel:
        for garbage in (b"\xff", b"\x0a\x05", b"\x12\x00\x12\x00", b"\x7a\x01a"):
            call: Any = channel.stream_stream("/octavo.generation.v1.GenerationService/StreamRequests")()
            await call.write(garbage)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, garbage


async def test_a_caller_that_takes_nothing_is_cut_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_requests, "SLOW_CALLER_S", 0.2)
    async with running_stack() as stack:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in messages(stack, submission(1, 100_000, credits=1)):
                pass
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert raised.value.details() == (
            "the client read nothing for 0.2 s while messages were waiting; its requests were aborted"
        )
        await until(lambda: not stack.engine.requests)


async def test_more_than_may_wait_for_their_check_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_requests, "MAX_UNCHECKED_REQUESTS", 4)
    async with running_stack() as stack:
        failed: list[pb.RequestFailed] = []
        finished: list[pb.RequestEnd] = []
        call = stack.generation.StreamRequests()
        for number in range(1, 200):
            await call.write(submission(number, 1))
        await call.done_writing()
        async for response in call:
            failed += response.failed
            finished += response.finished
        assert len(failed) + len(finished) == 199
        assert finished
        assert {(one.code, one.message) for one in failed} <= {
            (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "the queue of this stream is full (4 requests); retry in 1 s")
        }


async def test_a_stream_of_many_prompts_runs_them_all() -> None:
    async with running_stack() as stack, Client(stack.address) as client:
        async with client.request_stream() as stream:
            for number in range(300):
                await stream.submit([33 + number % 94, 40, 33 + number // 94], SamplingParams(max_tokens=3))
            found = await ends(stream)
        assert len(found) == 300
        assert all(isinstance(event, Finished) for event in found.values())


def without_cached(event: object) -> object:
    """Return a last event without the number of cached tokens, which depends on who came before."""
    assert isinstance(event, Finished)
    return replace(event, usage=replace(event.usage, num_cached_tokens=0))


def error_of(event: object) -> str:
    assert isinstance(event, FailedRequest)
    return f"{type(event.error).__name__}: {event.error}"


def assert_nothing_is_left(stack: Stack) -> None:
    assert not stack.engine.requests
    for core in stack.engine.fleet.planners:
        assert core.blocks.allocator.num_used_blocks == 0


async def test_a_request_that_wants_few_deltas_gets_few_and_the_first_and_the_end_at_once() -> None:
    async with running_stack(FakeWorker(step_ms=2)) as stack, Client(stack.address) as client:
        params = [SamplingParams(max_tokens=60, ignore_eos=True)] * 2
        sizes: dict[int, list[int]] = {0: [], 1: []}
        tokens: dict[int, tuple[int, ...]] = {}
        async with client.request_stream() as stream:
            paced = await stream.submit([40, 41], params[0], min_delta_interval_ms=10_000)
            plain = await stream.submit([40, 42], params[1])
            await stream.close_submissions()
            async with asyncio.timeout(9):  # the end does not wait
                async for number, event in stream:
                    if isinstance(event, Delta):
                        sizes[number - 1].append(len(event.token_ids))
                    elif isinstance(event, Finished):
                        tokens[number] = event.outputs[0].token_ids
        assert len(sizes[paced - 1]) == 2
        assert len(sizes[plain - 1]) > 10
        assert [len(tokens[number]) for number in (paced, plain)] == [60, 60]
        assert {number: sum(counts) for number, counts in sizes.items()} == {0: 60, 1: 60}
        running = client.stream_many([[40, 41]], params[0], min_delta_interval_ms=10_000)
        assert len([event async for _, event in running if isinstance(event, Delta)]) == 2
