"""A request keeps the length that it was first accepted for, wherever it goes on: it is neither cut nor lengthened.

Executors have blocks of 16 tokens here: SMALL holds sequences of 192, LARGE of 4,800.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.calls.resumption import ResumeWindow
from octavo.client import Client
from octavo.errors import OctavoError
from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.outputs import Delta, FailedRequest, Finished
from octavo_shared.step_wire.executor_info import MAX_MODEL_LEN
from tests.contract.test_continuation import continued, cut_behind, refused, run
from tests.contract.test_resumption import Cutter
from tests.support.stack import Stack, running_stack, token_request, until

SMALL, LARGE = 12, 300
SERVED = 16 * SMALL
PROMPT = [40, 41, 42, 43, 44]
WANTED = 400

WAITED_IN_VAIN = (
    f"the request was accepted for {len(PROMPT) + WANTED} tokens (a prompt of {len(PROMPT)}); this executor holds "
    f"sequences of {SERVED}; no larger one was attached within 0.2 s (--orphan-timeout-s); retry later, or request less"
)


def worker(num_blocks: int, step_ms: float = 0.0) -> FakeWorker:
    """Return an executor with so many blocks."""
    return FakeWorker(num_device_blocks=num_blocks, step_ms=step_ms)


def asked(max_tokens: int = WANTED, num_prompt_tokens: int = len(PROMPT)) -> pb.GenerateRequest:
    """Return a request that tells what a continuation needs."""
    request = token_request(num_prompt_tokens, max_tokens, request_id="mine")
    request.include_prompt_token_ids = True
    return request


async def begun(num_blocks: int, request: pb.GenerateRequest, num_tokens: int = 30) -> tuple[Any, pb.GenerateRequest]:
    """Return what a request is answered with at an executor of this size, and its continuation behind some tokens."""
    async with running_stack(worker(num_blocks)) as stack:
        whole = await run(stack, request)
        again = continued(request, whole.accepted, cut_behind(whole, 0))
        again.continuation.max_model_len = whole.accepted.max_model_len
        again.continuation.outputs.add(token_ids=whole.finished.outputs[0].token_ids[:num_tokens])
        return whole, again


async def replace_executor(stack: Stack, num_blocks: int) -> None:
    """Let an executor of this size come in the place of the first one."""
    await stack.executor.kill()
    stack.executor.worker = worker(num_blocks)
    await stack.executor.start()


@pytest.mark.parametrize(("num_prompt_tokens", "num_tokens"), [(5, 0), (5, 30), (5, 300), (SERVED + 50, 30)])
async def test_what_was_accepted_for_more_than_is_here_waits_for_a_larger_executor(
    num_prompt_tokens: int, num_tokens: int
) -> None:
    whole, again = await begun(LARGE, asked(num_prompt_tokens=num_prompt_tokens), num_tokens)
    assert (whole.accepted.max_model_len, whole.accepted.waits_for_larger_executor) == (16 * LARGE, False)
    async with running_stack(worker(SMALL)) as stack:
        going_on = asyncio.create_task(run(stack, again))
        await until(lambda: ("", "mine") in stack.engine.requests)
        await replace_executor(stack, LARGE)
        rest = await going_on
        assert (rest.accepted.max_model_len, rest.accepted.waits_for_larger_executor) == (16 * LARGE, True)
        assert rest.finished.outputs == whole.finished.outputs
        assert len(rest.finished.outputs[0].token_ids) == WANTED


async def test_what_no_larger_executor_comes_for_ends_with_the_numbers() -> None:
    _, again = await begun(LARGE, asked())
    async with running_stack(worker(SMALL), orphan_timeout_s=0.2) as stack:
        await refused(stack, again, grpc.StatusCode.UNAVAILABLE, WAITED_IN_VAIN)


async def test_a_request_runs_on_a_smaller_executor_if_all_that_it_can_need_fits_there() -> None:
    whole, again = await begun(LARGE, asked(max_tokens=SERVED - len(PROMPT)))
    async with running_stack(worker(SMALL)) as stack:
        rest = await run(stack, again)
        assert not rest.accepted.waits_for_larger_executor
        assert rest.finished.outputs == whole.finished.outputs


@pytest.mark.parametrize("num_tokens", [0, 30, SERVED - len(PROMPT)])
async def test_what_was_accepted_for_less_ends_there_at_a_larger_executor(num_tokens: int) -> None:
    whole, again = await begun(SMALL, asked(), num_tokens)
    async with running_stack(worker(LARGE)) as stack:
        rest = await run(stack, again)
        assert rest.accepted.max_model_len == SERVED
        assert rest.finished.outputs == whole.finished.outputs
        [output] = rest.finished.outputs
        assert (len(output.token_ids), output.finish_reason) == (
            SERVED - len(PROMPT),
            generation_pb2.FINISH_REASON_LENGTH,
        )


async def test_a_client_that_does_not_say_the_length_gets_what_is_served_where_it_goes_on() -> None:
    """Clients of earlier releases do not know the field."""
    for begins_at, goes_on_at, length in ((LARGE, SMALL, SERVED - len(PROMPT)), (SMALL, LARGE, WANTED)):
        _, again = await begun(begins_at, asked())
        again.continuation.ClearField("max_model_len")
        async with running_stack(worker(goes_on_at)) as stack:
            rest = await run(stack, again)
            assert (rest.accepted.max_model_len, len(rest.finished.outputs[0].token_ids)) == (16 * goes_on_at, length)


async def test_a_length_that_no_request_was_accepted_for_is_refused() -> None:
    _, good = await begun(SMALL, asked())
    async with running_stack(worker(SMALL)) as stack:
        for length in (1, len(PROMPT), MAX_MODEL_LEN + 1, 2**32 - 1):
            good.continuation.max_model_len = length
            rule = f"continuation.max_model_len is {length}; it must be from 6, one token longer than the prompt, to"
            await refused(stack, good, grpc.StatusCode.INVALID_ARGUMENT, rule)
        good.continuation.max_model_len = SERVED
        await run(stack, good)


async def received(client: Client, on_tokens: Callable[[], Any], *, is_stream: bool) -> Finished:
    """Return the last event of a request; something happens behind 30 of its tokens."""
    options: dict[str, Any] = {"max_tokens": WANTED, "temperature": 0.0}
    stream = client.stream_many([PROMPT], **options) if is_stream else client.stream(PROMPT, **options)
    num_tokens, has_happened = 0, False
    async for item in stream:
        event = item[1] if isinstance(item, tuple) else item
        assert not isinstance(event, FailedRequest), event.error
        num_tokens += len(event.token_ids) if isinstance(event, Delta) else 0
        if num_tokens >= 30 and not has_happened:
            has_happened = True
            on_tokens()
    assert isinstance(event, Finished)
    assert num_tokens == len(event.outputs[0].token_ids)
    return event


async def test_a_client_goes_back_to_the_address_that_has_the_larger_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other scheduler would wait for 300 s; the client looks elsewhere meanwhile."""
    monkeypatch.setattr(ResumeWindow, "left_s", lambda self, now_s: 0.5)
    losses = []
    pause_s = ResumeWindow.pause_s

    def note_loss(window: ResumeWindow, error: OctavoError, now_s: float, **options: float) -> float:
        losses.append(str(error))
        return pause_s(window, error, now_s, **options)

    monkeypatch.setattr(ResumeWindow, "pause_s", note_loss)
    async with (
        running_stack(worker(LARGE, step_ms=2)) as large,
        Cutter(large.address) as cutter,
        running_stack(worker(SMALL)) as small,
        Client([cutter.address, small.address]) as client,
    ):

        def cut() -> None:
            cutter.refuses = True
            cutter.cut()

        answer = asyncio.create_task(received(client, cut, is_stream=False))
        await until(lambda: small.engine.requests)
        sentence = f"the scheduler at {small.address} has no executor for its {len(PROMPT) + WANTED} tokens"
        await until(lambda: sentence in losses)
        cutter.refuses = False
        finished = await answer
        assert len(finished.outputs[0].token_ids) == WANTED
        assert finished.num_resumptions >= 2


@pytest.mark.parametrize("is_stream", [False, True], ids=["a call", "one stream for many"])
async def test_a_client_goes_on_behind_the_end_of_an_orphan(is_stream: bool) -> None:
    async with (
        running_stack(worker(LARGE, step_ms=2), orphan_timeout_s=0.2, loses_soon=True) as stack,
        Client(stack.address, resume_timeout_s=60) as client,
    ):
        tasks: list[asyncio.Task[None]] = []

        def shrink() -> None:
            tasks.append(asyncio.create_task(replace_executor(stack, SMALL)))

        answer = asyncio.create_task(received(client, shrink, is_stream=is_stream))
        fleet = stack.engine.fleet

        def waits_again() -> bool:
            requests = stack.engine.requests.values()
            return bool(fleet.planners) and any(
                each.attempt and not fleet.can_ever_take(each.group) for each in requests
            )

        await until(waits_again)
        await replace_executor(stack, LARGE)
        assert len((await answer).outputs[0].token_ids) == WANTED
