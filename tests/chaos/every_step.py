"""SIGKILL of the executor at every step of a generation, in three phases of the step.

The scheduler runs in this process, so that it can be stopped at a fault point; the executors are processes.
"""

import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from octavo import Client
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.executors.driver_interface import FaultPoint
from scheduler_svc.processes.service import SchedulerService
from tests.chaos.asking import Ask, answer_to, by_grpc, compare
from tests.chaos.result import Result
from tests.chaos.scale import Scale
from tests.chaos.services import Executor, running_executors
from tests.support.stack import until

NUM_TOKENS = 64
# So many steps are a piece.
PIECE = 16


class StepKiller:
    """Called at the fault points: kills the executor of one step.

    Args:
        executors: Those that there are.

    Attributes:
        victim: Which one was killed.
    """

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = {executor.address: executor for executor in executors}
        self._point: FaultPoint | None = None
        self._num_left = 0
        self.victim: Executor | None = None

    def plan(self, point: FaultPoint, number: int) -> None:
        """Kill the executor of the step with this number, from 1, counted from now on."""
        self._point, self._num_left, self.victim = point, number, None

    def __call__(self, point: FaultPoint, address: str) -> None:
        """A step is at a fault point."""
        if point is not self._point:
            return
        self._num_left -= 1
        if not self._num_left:
            self.victim, self._point = self._executors[address], None
            os.kill(self.victim.pid, signal.SIGKILL)


@asynccontextmanager
async def running_service(
    executors: Sequence[Executor], killer: StepKiller
) -> AsyncIterator[tuple[SchedulerService, str]]:
    """Run a scheduler in this process until the end of the block; gives it and its address."""
    addresses = tuple(executor.address for executor in executors)
    ports = {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0"}
    config = SchedulerConfig.model_validate({**ports, "executor": addresses, "shutdown_grace_s": 1.0})
    service = SchedulerService(config, at_fault_point=killer)
    address = await service.start()
    try:
        await until(lambda: len(service.engine.fleet.planners) == len(executors))
        yield service, address
    finally:
        await service.stop("the row ends")


def pieces_of(phases: Sequence[str], every: int) -> list[str]:
    """Return the pieces of a row: a phase, the first and the last step, and how far steps are apart."""
    numbers = list(range((every + 1) // 2, NUM_TOKENS + 1, every)) if every <= NUM_TOKENS else []
    cut = [numbers[begin : begin + PIECE] for begin in range(0, len(numbers), PIECE)]
    return [f"{phase} {part[0]} {part[-1]} {every}" for phase in phases for part in cut]


@dataclass(frozen=True, slots=True)
class EveryStep:
    """The row.

    Attributes:
        name: Of the row.
        what: What happens, in words.
        command: Returns module and flags of the executors.
        every: Kills are so many steps apart.
        target: What must come of it, in words.
    """

    name: str
    what: str
    command: Callable[[], tuple[str, ...]]
    every: int = 1
    target: str = "all answers equal, to the bit"

    def pieces(self, scale: Scale) -> list[str]:
        """Return its pieces: a phase, and some of the steps."""
        return pieces_of([point.name for point in FaultPoint], self.every * scale.divisor)

    async def play(self, pieces: Sequence[str], _scale: Scale) -> AsyncIterator[Result]:
        """Run pieces and yield their results."""
        async with running_executors(2, self.command()) as executors:
            killer = StepKiller(executors)
            async with running_service(executors, killer) as (service, address), Client(address) as client:
                for piece in pieces:
                    yield await self._play_piece(piece, service, client, killer)

    async def _play_piece(self, piece: str, service: SchedulerService, client: Client, killer: StepKiller) -> Result:
        point, first, last, every = piece.split()
        result, begin_s = Result(self.name, piece), time.monotonic()
        send = by_grpc(client)
        for number in range(int(first), int(last) + 1, int(every)):
            ask = Ask(number % 2, number, NUM_TOKENS)
            undisturbed = await answer_to(ask, send)
            result.note("undisturbed_gap_s", undisturbed.longest_gap_s)
            killer.plan(FaultPoint[point], number)
            answer = await answer_to(ask, send)
            compare(result, ask, answer, undisturbed)
            result.pauses_s.append(answer.longest_gap_s)
            if killer.victim is None:
                result.complain(f"no executor was killed at step {number}")
                continue
            result.note_fault("SIGKILL")
            await killer.victim.kill()  # it waits for the end
            await until(lambda: len(service.engine.fleet.planners) == 1)
            await killer.victim.start()
            await until(lambda: len(service.engine.fleet.planners) == 2)
        result.seconds = time.monotonic() - begin_s
        return result
