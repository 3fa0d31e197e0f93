"""Processes are killed, and others come that hold less: an answer gets the length that it was first accepted for.

Executors have blocks of 16 tokens: the large one holds the answer, the small one less than half of it.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from octavo.admin_client import AdminClient
from octavo.client import Client
from octavo.errors import OctavoError
from octavo.values.outputs import Delta, Finished
from tests.support.patience import PATIENCE_S
from tests.support.processes import Service, children_of, running_service

PROMPT = [40, 41, 42, 43, 44]
NUM_TOKENS = 400
SENTENCE = f"accepted for {len(PROMPT) + NUM_TOKENS} tokens"


@asynccontextmanager
async def executor(num_blocks: int, listen: str = "127.0.0.1:0") -> AsyncIterator[Service]:
    """Run a fake executor with so many blocks."""
    flags = ("--num-device-blocks", str(num_blocks), "--step-ms", "5", "--log-level", "warning", "--listen", listen)
    async with running_service("executor_svc.fake", *flags) as service:
        yield service


def scheduler_flags(*executors: Service) -> list[str]:
    """Return the flags of a scheduler."""
    addresses = ",".join(service.address for service in executors)
    return ["--executor", addresses, "--log-level", "warning"]


async def answer(client: Client, begun: asyncio.Event) -> Finished:
    """Return the end of an answer, and say when 30 of its tokens are there."""
    num_tokens = 0
    async for event in client.stream(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True):
        if isinstance(event, Delta):
            num_tokens += len(event.token_ids)
        if num_tokens >= 30:
            begun.set()
    assert isinstance(event, Finished)
    assert num_tokens == len(event.outputs[0].token_ids)
    return event


async def begin(client: Client) -> asyncio.Task[Finished]:
    """Return who reads an answer, once 30 of its tokens are there."""
    begun = asyncio.Event()
    reading = asyncio.create_task(answer(client, begun))
    await begun.wait()
    return reading


async def until_it_waits(admin: AdminClient, for_what: str) -> None:
    """Return once the scheduler has the request and says what it waits for."""
    while True:
        with suppress(OctavoError):  # while it starts
            for queued in await admin.list_queue(1):
                if for_what in (await admin.explain_request(queued.request_id)).explanation:
                    return
        await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_scheduler_is_killed_and_the_next_address_has_only_a_smaller_executor() -> None:
    async with AsyncExitStack() as stack:
        large, small = [await stack.enter_async_context(executor(num_blocks)) for num_blocks in (300, 12)]
        first = await stack.enter_async_context(running_service("scheduler_svc", *scheduler_flags(large)))
        second = await stack.enter_async_context(running_service("scheduler_svc", *scheduler_flags(small)))
        client = await stack.enter_async_context(Client([first.address, second.address]))
        admin = await stack.enter_async_context(AdminClient(second.other_addresses["admin"]))
        whole = (await client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)).outputs
        reading = await begin(client)
        await first.kill()
        await until_it_waits(admin, SENTENCE)
        again = running_service("scheduler_svc", *scheduler_flags(large), "--listen", first.address)
        await stack.enter_async_context(again)
        finished = await reading
        assert finished.outputs == whole
        assert finished.num_resumptions >= 2


@pytest.mark.slow
async def test_all_that_held_the_request_is_killed_and_a_smaller_executor_comes_first() -> None:
    async with AsyncExitStack() as stack:
        large = await stack.enter_async_context(executor(300))
        flags = (*scheduler_flags(large), "--fronts", "2")
        scheduler = await stack.enter_async_context(running_service("scheduler_svc", *flags))
        client = await stack.enter_async_context(Client(scheduler.address, resume_timeout_s=300))
        admin = await stack.enter_async_context(AdminClient(scheduler.other_addresses["admin"]))
        await client.wait_until_ready(timeout_s=PATIENCE_S)
        whole = (await client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)).outputs
        reading = await begin(client)
        await large.kill()
        for module in ("scheduler_svc.processes.engine_process", "scheduler_svc.processes.front_process"):
            for pid in children_of(scheduler.process.pid, module):
                os.kill(pid, signal.SIGKILL)
        async with executor(12, large.address):
            await until_it_waits(admin, SENTENCE)
        await stack.enter_async_context(executor(300, large.address))
        assert (await reading).outputs == whole
