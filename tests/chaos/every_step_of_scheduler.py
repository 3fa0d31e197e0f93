"""SIGKILL of the core, or of a front, at every step of a generation. Read first: `every_step.py`."""

import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo import Client
from scheduler_svc.executors.driver_interface import FaultPoint
from tests.chaos.asking import Answer, Ask, answer_to, by_grpc, compare
from tests.chaos.doomed_scheduler import PLAN
from tests.chaos.every_step import NUM_TOKENS, pieces_of
from tests.chaos.result import Result
from tests.chaos.scale import Scale
from tests.chaos.services import DOOMED_SCHEDULER, fake_executor, running_executors, running_scheduler


@dataclass(frozen=True, slots=True)
class EveryStepOfEngine:
    """The row in which the core kills itself at the fault points of each step.

    Attributes:
        name: Of the row.
        what: What happens, in words.
        command: Returns module and flags of the executor.
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
        with tempfile.TemporaryDirectory() as folder:
            plan = Path(folder) / "plan"
            async with (
                running_executors(1, self.command()) as [executor],
                running_scheduler(
                    [executor.address],
                    *("--fronts", "1"),
                    module=DOOMED_SCHEDULER,
                    environment={PLAN: str(plan)},
                ) as scheduler,
                Client(scheduler.address) as client,
            ):
                for piece in pieces:
                    yield await _play_piece(self.name, piece, plan, client)


def write(plan: Path, text: str) -> None:
    """Let the core kill itself."""
    draft = plan.with_suffix(".new")  # the core reads it at any moment
    draft.write_text(text, encoding="ascii")
    draft.replace(plan)


def withdraw(plan: Path) -> bool:
    """Let the core live; return whether it did not kill itself."""
    is_there = plan.exists()
    plan.unlink(missing_ok=True)
    return is_there


async def _play_piece(name: str, piece: str, plan: Path, client: Client) -> Result:
    point, first, last, every = piece.split()
    result, begin_s = Result(name, piece), time.monotonic()
    send = by_grpc(client)
    for number in range(int(first), int(last) + 1, int(every)):
        ask = Ask(number % 2, number, NUM_TOKENS)
        undisturbed = await answer_to(ask, send)
        result.note("undisturbed_gap_s", undisturbed.longest_gap_s)
        write(plan, f"{point} {number}")
        compare(result, ask, await answer_to(ask, send), undisturbed)
        if withdraw(plan):
            result.complain(f"the core was not killed at step {number}")
        else:
            result.note_fault("SIGKILL")
    result.seconds = time.monotonic() - begin_s
    return result


@dataclass(frozen=True, slots=True)
class EveryStepOfFront:
    """The row in which the front that holds the call is killed when the client has so many tokens."""

    name: str = "steps-front"
    what: str = "SIGKILL of the front behind every token of 64; two fronts, a fake executor, octavo.Client"
    target: str = "all answers equal, to the bit"

    def pieces(self, scale: Scale) -> list[str]:
        """Return its pieces: some of the tokens."""
        return pieces_of(["tokens"], scale.divisor)

    async def play(self, pieces: Sequence[str], _scale: Scale) -> AsyncIterator[Result]:
        """Run pieces and yield their results."""
        async with (
            running_executors(1, fake_executor("--step-ms", "2")) as [executor],
            running_scheduler([executor.address], "--fronts", "2") as scheduler,
            Client(scheduler.address) as client,
        ):
            for piece in pieces:
                _, first, last, every = piece.split()
                result, begin_s = Result(self.name, piece), time.monotonic()
                for number in range(int(first), int(last) + 1, int(every)):
                    ask = Ask(number % 2, number, NUM_TOKENS)
                    undisturbed = await answer_to(ask, by_grpc(client))
                    await scheduler.until(lambda state: all(front.is_ready for front in state.fronts))
                    pids = scheduler.fronts()

                    def kill(answer: Answer, number: int = number, pids: list[int] = pids) -> None:
                        if len(answer.tokens) >= number and pids:
                            for pid in pids:  # whichever has the call
                                os.kill(pid, signal.SIGKILL)
                            pids.clear()

                    compare(result, ask, await answer_to(ask, by_grpc(client, kill)), undisturbed)
                    if pids:
                        result.complain(f"no front was killed behind token {number}")
                    else:
                        result.note_fault("SIGKILL")
                result.seconds = time.monotonic() - begin_s
                yield result
