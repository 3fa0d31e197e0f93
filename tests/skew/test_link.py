"""Standalone fronts and cores of different releases: the link between them keeps its name, octavo.core.v1."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo import Client
from octavo.errors import OctavoError, RequestAbortedError, UnavailableError
from octavo.values.outputs import Delta, FinishReason
from tests.skew.peers import CURRENT, FRONT, SCHEDULER, WITH_FRONTS, Code, each, executor_here, running, state_when
from tests.skew.requests import REQUESTS, STOPPED_BY_STRING, Stream, run_all, until_all_stream
from tests.support.processes import Service
from tests.support.stack import ExecutorProcess

pytestmark = pytest.mark.timeout(120)

# Slow enough that every stream is in its middle when a core ends.
STEP_MS = 10


def core_flags(executor: ExecutorProcess, join: str = "127.0.0.1:0") -> tuple[str, ...]:
    """Return the flags of a core with one executor, which fronts join at an address.

    Its lease outlasts the test: the next core has to take the executor over.
    """
    joined = ("--engine-listen", join, "--engine-insecure")
    return ("--executor", executor.address, "--scheduler-id", "one", "--lease-s", "600", *joined)


def front_flags(core: Service) -> tuple[str, ...]:
    """Return the flags of a front that joins a core."""
    return ("--engine", core.other_addresses["fronts"])


@pytest.mark.parametrize("front_is_current", [True, False], ids=["current front", "current core"])
@each(WITH_FRONTS)
async def test_a_front_goes_on_with_the_core_of_either_release_answers_the_same_and_aborts(
    release: Code, front_is_current: bool, undisturbed: list[Stream]
) -> None:
    front_code, core_code = (CURRENT, release) if front_is_current else (release, CURRENT)
    streams, again = [Stream() for _ in REQUESTS], [Stream() for _ in REQUESTS]
    async with AsyncExitStack() as stack:
        executor = await stack.enter_async_context(executor_here(FakeWorker(step_ms=STEP_MS)))
        core = await stack.enter_async_context(running(core_code, SCHEDULER, *core_flags(executor)))
        front = await stack.enter_async_context(running(front_code, FRONT, *front_flags(core)))
        client = await stack.enter_async_context(Client(front.address, resume_timeout_s=0))
        await client.wait_until_ready(60)
        everything = asyncio.create_task(run_all(client, streams))
        for code, num_tokens in [(front_code, 3), (core_code, 10)]:
            await until_all_stream(streams, num_tokens, everything.done)
            assert not any(stream.outputs for stream in streams), "a stream ended before the core did"
            await core.kill()
            flags = core_flags(executor, core.other_addresses["fronts"])
            core = await stack.enter_async_context(running(code, SCHEDULER, *flags))
        await everything
        await run_all(client, again)  # and without trouble
        await abort_in_its_middle(client)
        await state_when(core, lambda state: not state.num_running_requests and not state.num_used_blocks)
    assert streams == undisturbed
    assert again == undisturbed
    assert streams[STOPPED_BY_STRING].outputs[0].finish_reason is FinishReason.STOP


@pytest.mark.slow
@pytest.mark.parametrize("front_is_current", [True, False], ids=["current front", "current core"])
@each(WITH_FRONTS)
async def test_a_core_of_the_other_release_that_holds_less_than_was_accepted_cuts_nothing_and_says_so(
    release: Code, front_is_current: bool
) -> None:
    front_code, core_code = (CURRENT, release) if front_is_current else (release, CURRENT)
    num_tokens = 0
    async with AsyncExitStack() as stack:
        large = await stack.enter_async_context(executor_here(FakeWorker(step_ms=STEP_MS)))
        small = await stack.enter_async_context(executor_here(FakeWorker(num_device_blocks=12)))
        core = await stack.enter_async_context(running(front_code, SCHEDULER, *core_flags(large)))
        front = await stack.enter_async_context(running(front_code, FRONT, *front_flags(core)))
        client = await stack.enter_async_context(Client(front.address, resume_timeout_s=0))
        await client.wait_until_ready(60)
        with pytest.raises(OctavoError) as ended:
            async for event in client.stream([40, 41], max_tokens=400, temperature=0.0):
                num_tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                if num_tokens and core.process.returncode is None:
                    await core.kill()
                    flags = (*core_flags(small, core.other_addresses["fronts"]), "--orphan-timeout-s", "0.2")
                    await stack.enter_async_context(running(core_code, SCHEDULER, *flags))
    assert isinstance(ended.value, UnavailableError)
    assert "402 tokens" in str(ended.value)


async def abort_in_its_middle(client: Client) -> None:
    """Abort a request that would take longer than any test may."""
    was_live = None
    with pytest.raises(RequestAbortedError, match="'long' was aborted"):
        async for event in client.stream([40, 41], request_id="long", max_tokens=4000, temperature=0.0):
            if was_live is None and isinstance(event, Delta):
                was_live = await client.abort("long")
    assert was_live
    assert not await client.abort("long")


@each(WITH_FRONTS)
async def test_a_front_keeps_what_a_former_core_would_not_see_to_itself(release: Code) -> None:
    """That core would ignore `no_repeat_ngram_size`: of a new request, and of one that the core before it had."""
    asked: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "no_repeat_ngram_size": 2, "ignore_eos": True}
    async with AsyncExitStack() as stack:
        executor = await stack.enter_async_context(executor_here(FakeWorker(step_ms=STEP_MS)))
        core = await stack.enter_async_context(running(CURRENT, SCHEDULER, *core_flags(executor)))
        front = await stack.enter_async_context(running(CURRENT, FRONT, *front_flags(core)))
        client = await stack.enter_async_context(Client(front.address, resume_timeout_s=0))
        await client.wait_until_ready(60)
        events = client.stream([65, 66, 67], **asked)
        await anext(events)
        await core.kill()
        flags = core_flags(executor, core.other_addresses["fronts"])
        await stack.enter_async_context(running(release, SCHEDULER, *flags))

        with pytest.raises(UnavailableError, match="NO_REPEAT_NGRAM"):
            async for _ in events:
                pass
        await client.wait_until_ready(60)
        with pytest.raises(UnavailableError, match="NO_REPEAT_NGRAM"):
            await client.generate([65, 66, 67], **asked)
        assert (await client.generate([65, 66, 67], **(asked | {"no_repeat_ngram_size": 0}))).outputs
