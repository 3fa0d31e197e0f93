"""The rolling upgrade of docs/upgrades.md and the way back: one service after the other is replaced, under load."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from octavo import Client
from octavo.errors import UnavailableError
from tests.skew.peers import (
    CURRENT,
    FAKE,
    FRONT,
    SCHEDULER,
    WITH_FRONTS,
    Code,
    attached_executors,
    each,
    running,
)
from tests.skew.requests import REQUESTS, Stream, watch
from tests.support.processes import Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEP_MS = 10
PAUSE_S = 0.05


class Load:
    """Clients that send their requests again and again; no two that run at a time begin alike.

    Attributes:
        streams: What came of each request, each time.
        num_refused: How often one was refused, for the client to send it again.
    """

    def __init__(self) -> None:
        self.streams: list[list[Stream]] = [[] for _ in REQUESTS]
        self.num_refused = 0
        self._has_news = asyncio.Event()

    @asynccontextmanager
    async def running(self, client: Client) -> AsyncIterator[None]:
        """Run it for the length of a block."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._repeat(client, index)) for index in range(len(REQUESTS))]
            yield
            for task in tasks:
                task.cancel()

    async def go_on(self) -> None:
        """Return once each client has had two more answers: at least one of them began after the call."""
        wanted = [len(streams) + 2 for streams in self.streams]
        while any(len(streams) < num for streams, num in zip(self.streams, wanted, strict=True)):
            self._has_news.clear()
            await self._has_news.wait()

    async def _repeat(self, client: Client, index: int) -> None:
        while True:
            stream = Stream()
            try:
                await watch(client, index, stream)
            except UnavailableError:
                assert not stream.is_accepted, "an accepted request was lost"
                self.num_refused += 1
                await asyncio.sleep(PAUSE_S)
            else:
                self.streams[index].append(stream)
                self._has_news.set()


@each(WITH_FRONTS)
@pytest.mark.parametrize("is_upgrade", [True, False], ids=["upgrade", "way back"])
async def test_executors_core_and_fronts_are_replaced_under_load_and_every_answer_is_whole(
    release: Code, is_upgrade: bool, undisturbed: list[Stream]
) -> None:
    old, new = (release, CURRENT) if is_upgrade else (CURRENT, release)
    load = Load()
    async with AsyncExitStack() as stack:

        async def start(code: Code, module: str, *flags: str) -> Service:
            return await stack.enter_async_context(running(code, module, *flags))

        executor_flags = ("--step-ms", str(STEP_MS))
        executors = [await start(old, FAKE, *executor_flags) for _ in range(2)]
        core_flags = ("--executor", ",".join(executor.address for executor in executors), "--scheduler-id", "one")
        cores = [await start(old, SCHEDULER, *core_flags, "--engine-listen", "127.0.0.1:0", "--engine-insecure")]
        join = cores[0].other_addresses["fronts"]
        fronts = [await start(old, FRONT, "--engine", join) for _ in range(2)]

        async def replace_executors() -> None:
            for executor in executors:
                former = (await attached_executors(cores[-1], 2))[executor.address].instance_id
                assert await executor.terminate() == 0
                await start(new, FAKE, *executor_flags, "--listen", executor.address)
                while (await attached_executors(cores[-1], 2))[executor.address].instance_id == former:
                    await asyncio.sleep(PAUSE_S)
                await load.go_on()

        async def replace_engine() -> None:
            num_refused = load.num_refused
            if is_upgrade:
                assert await cores[-1].terminate() == 0
            else:
                await cores[-1].kill()
            cores.append(await start(new, SCHEDULER, *core_flags, "--engine-listen", join, "--engine-insecure"))
            await load.go_on()
            assert is_upgrade or load.num_refused == num_refused, "a front waits for the next core"

        async def replace_fronts() -> None:
            for front, end in zip(fronts, (Service.terminate, Service.kill), strict=True):
                await end(front)
                await start(new, FRONT, "--engine", join, "--listen", front.address)
                await load.go_on()

        order = [replace_executors, replace_engine, replace_fronts]
        client = await stack.enter_async_context(Client([front.address for front in fronts]))
        await attached_executors(cores[0], 2)
        await client.wait_until_ready(60)
        async with load.running(client):
            await load.go_on()
            for replace in order if is_upgrade else reversed(order):
                await replace()
    for streams, whole in zip(load.streams, undisturbed, strict=True):
        assert len(streams) >= 12
        assert all(stream == whole for stream in streams)
