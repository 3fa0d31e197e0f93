"""Streams without end on four executors; one of them, the core or a front is struck every few seconds."""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import median

from tests.chaos.asking import Answer, Ask, Send, answer_to, answers_to, compare, dealt
from tests.chaos.faults import EXECUTOR_FAULTS, LEASE_S, Faults, Target
from tests.chaos.proxy import running_proxy
from tests.chaos.result import Result
from tests.chaos.scale import Scale
from tests.chaos.services import fake_executor, running_executors, running_scheduler

NUM_EXECUTORS = 4
NUM_PROXIES = 2
NUM_STREAMS = 200
# Requests of a stream that differ.
NUM_DIFFERENT = 4
MINUTES_OF_A_PIECE = 5.0
# Memory goes up and down with each loss. In the second quarter all that is kept of ended requests is there.
MEMORY_INTERVAL_S = 1.0
MOST_GROWTH_MIB = 16.0


@dataclass(frozen=True, slots=True)
class Endless:
    """The row.

    Attributes:
        name: Of the row.
        what: What happens, in words.
        target: What must come of it, in words.
        num_fronts: Of the scheduler.
        faults: What strikes.
    """

    name: str = "streams"
    what: str = (
        "200 streams on 4 fake executors; every 10 s one of SIGKILL, SIGSTOP (short, or longer than "
        "the lease), a cut connection, a delayed one, failing steps, drain"
    )
    target: str = "0 lost, 0 repeated, 0 changed, 0 blocks leaked, memory flat"
    num_fronts: int = 0
    faults: Faults = field(default_factory=lambda: EXECUTOR_FAULTS)

    def pieces(self, scale: Scale) -> list[str]:
        """Return its pieces: some minutes each."""
        num_pieces = math.ceil(scale.minutes / MINUTES_OF_A_PIECE)
        return [f"{number} of {num_pieces}, {scale.minutes / num_pieces:g} min" for number in range(1, num_pieces + 1)]

    async def play(self, pieces: Sequence[str], scale: Scale) -> AsyncIterator[Result]:
        """Run pieces and yield their results."""
        for piece in pieces:
            result, begin_s = Result(self.name, piece), time.monotonic()
            minutes = float(piece.split(", ")[1].removesuffix(" min"))
            await self._play_for(60 * minutes, max(40, scale.part_of(NUM_STREAMS)), scale.fault_every_s, result)
            result.seconds = time.monotonic() - begin_s
            yield result

    async def _play_for(self, seconds: float, num_streams: int, fault_every_s: float, result: Result) -> None:
        """Run so many streams for a while; a fault strikes every so many seconds."""
        asks = [
            [Ask(stream, turn, 40 + (29 * stream + 53 * turn) % 160) for turn in range(NUM_DIFFERENT)]
            for stream in range(num_streams)
        ]
        flags = ("--lease-s", str(LEASE_S), "--fronts", str(self.num_fronts))
        async with AsyncExitStack() as stack:
            executors = await stack.enter_async_context(
                running_executors(NUM_EXECUTORS, fake_executor("--step-ms", str(num_streams / 4)))
            )
            proxies = [await stack.enter_async_context(running_proxy(each.listen)) for each in executors[:NUM_PROXIES]]
            for executor, proxy in zip(executors, proxies, strict=False):
                executor.address = proxy.address
            scheduler = await stack.enter_async_context(running_scheduler([each.address for each in executors], *flags))
            send = await stack.enter_async_context(dealt(scheduler.address, self.num_fronts))
            undisturbed = await answers_to([ask for own in asks for ask in own], send, len(asks) * NUM_DIFFERENT)
            target = Target(executors, proxies, scheduler, random.Random(result.piece))
            is_over = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                for own in asks:
                    tasks.create_task(ask_until(is_over, own, send, undisturbed, result))
                await strike(target, self.faults, seconds, fault_every_s, result)
                is_over.set()
            await scheduler.until_whole(NUM_EXECUTORS)
            await scheduler.until(lambda state: not state.num_used_blocks)
            result.wrong += await scheduler.leftovers()


async def ask_until(
    is_over: asyncio.Event, asks: Sequence[Ask], send: Send, undisturbed: Mapping[Ask, Answer], result: Result
) -> None:
    """Send one request after another, and compare what came."""
    number = 0
    while not is_over.is_set():
        ask = asks[number % len(asks)]
        compare(result, ask, await answer_to(ask, send), undisturbed[ask])
        number += 1


async def strike(target: Target, faults: Faults, seconds: float, fault_every_s: float, result: Result) -> None:
    """Let faults strike for a while, each kind as often as the others; watch the scheduler's memory."""
    begin_s = time.monotonic()
    sizes: list[float] = []
    order = random.Random(result.piece)
    watching = asyncio.create_task(watch_memory(target, sizes))
    while (now_s := time.monotonic() - begin_s) < seconds:
        fewest = min(result.counts.get(each, 0) for each in faults)
        rarest = [each for each in faults if result.counts.get(each, 0) == fewest]
        name = order.choice(rarest)
        await target.scheduler.until_whole(NUM_EXECUTORS)
        await faults[name](target)
        result.note_fault(name)
        await asyncio.sleep(max(0.0, begin_s + now_s + fault_every_s - time.monotonic()))
    watching.cancel()
    quarter = len(sizes) // 4
    growth_mib = median(sizes[-quarter - 1 :]) - median(sizes[quarter : 2 * quarter + 1])
    result.note("growth_mib", max(0.0, growth_mib))
    result.note("scheduler_mib", max(sizes))
    if growth_mib > MOST_GROWTH_MIB:
        result.missed.append(f"the scheduler's memory grew by {growth_mib:.1f} MiB")


async def watch_memory(target: Target, sizes: list[float]) -> None:
    """Note the resident memory of the scheduler's processes, in MiB, until cancelled."""
    while True:
        sizes.append(target.scheduler.resident_mib())
        await asyncio.sleep(MEMORY_INTERVAL_S)
