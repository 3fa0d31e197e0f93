"""SIGTERM of one of two executors under streams: they go on with the other one."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from octavo import Client
from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from tests.chaos.asking import Answer, Ask, answer_to, answers_to, by_grpc, compare
from tests.chaos.result import Result
from tests.chaos.scale import Scale
from tests.chaos.services import Executor, Scheduler, fake_executor, num_attached, running_executors, running_scheduler

NUM_STREAMS = 64
NUM_TOKENS = 150
NUM_ROUNDS = 10
# SIGTERM comes when so many streams have begun.
NUM_BEGUN = NUM_STREAMS * 3 // 4
EMPTY_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class Drain:
    """The row."""

    name: str = "drain"
    what: str = "SIGTERM of one of two fake executors under 64 streams"
    target: str = "no failed stream; empty in less than 2 s"

    def pieces(self, scale: Scale) -> list[str]:
        """Return its pieces: one for each SIGTERM."""
        return [f"round {number}" for number in range(1, scale.part_of(NUM_ROUNDS) + 1)]

    async def play(self, pieces: Sequence[str], _scale: Scale) -> AsyncIterator[Result]:
        """Run pieces and yield their results."""
        asks = [Ask(stream, 0, NUM_TOKENS) for stream in range(NUM_STREAMS)]
        async with (
            running_executors(2, fake_executor("--step-ms", "10")) as executors,
            running_scheduler([one.address for one in executors]) as scheduler,
            Client(scheduler.address) as client,
        ):
            undisturbed = await answers_to(asks, by_grpc(client), NUM_STREAMS)
            for piece in pieces:
                result, begin_s = Result(self.name, piece), time.monotonic()
                begun: set[int] = set()
                send = by_grpc(client, lambda answer, begun=begun: begun.add(id(answer)))  # type: ignore[misc]
                running = [asyncio.create_task(answer_to(ask, send)) for ask in asks]
                await scheduler.until(lambda _, begun=begun: len(begun) >= NUM_BEGUN)  # type: ignore[misc]
                await terminate_one(executors, scheduler, running, result)
                for ask, answer in zip(asks, await asyncio.gather(*running), strict=True):
                    compare(result, ask, answer, undisturbed[ask])
                await scheduler.until(lambda state: num_attached(state) == 2)
                result.seconds = time.monotonic() - begin_s
                yield result


async def terminate_one(
    executors: Sequence[Executor], scheduler: Scheduler, running: Sequence["asyncio.Task[Answer]"], result: Result
) -> None:
    """Send SIGTERM to the executor with more streams, wait until it has none, and start another one there."""
    states = await scheduler.executors()
    victim = max(executors, key=lambda each: states[each.address].num_running_requests)
    if not states[victim.address].num_running_requests:
        result.complain("no stream ran on the executor")

    def is_empty(state: pb.GetSchedulerStateResponse) -> bool:
        [own] = [each for each in state.executors if each.address == victim.address]
        return own.status != admin_pb2.EXECUTOR_STATUS_ATTACHED or not own.num_running_requests

    begin_s = time.monotonic()
    draining = asyncio.create_task(victim.drain())
    await scheduler.until(is_empty)
    empty_after_s = time.monotonic() - begin_s
    result.note("empty_after_s", empty_after_s)
    if empty_after_s > EMPTY_AFTER_S:
        result.missed.append(f"it was empty after {empty_after_s:.2f} s")
    if all(task.done() for task in running):
        result.complain("all streams had ended before the executor was empty")
    result.note("ended_after_s", await draining)
    result.note_fault("SIGTERM")
    await victim.start()
