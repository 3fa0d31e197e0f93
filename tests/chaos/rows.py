"""The rows of the table that `make chaos` prints. A row is added by a line of ROWS."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from tests.chaos.cancel_storm import CancelStorm
from tests.chaos.cell import CellFaults
from tests.chaos.drain import Drain
from tests.chaos.endless import Endless
from tests.chaos.every_step import EveryStep
from tests.chaos.every_step_of_scheduler import EveryStepOfEngine, EveryStepOfFront
from tests.chaos.faults import EXECUTOR_FAULTS, SCHEDULER_FAULTS
from tests.chaos.many_clients import ManyClients
from tests.chaos.result import Result
from tests.chaos.scale import Scale
from tests.chaos.services import demo_executor, fake_executor, hybrid_executor


class Row(Protocol):
    """A kind of faults under a kind of load.

    Attributes:
        name: In `--only` and in the file of results.
        what: What happens, in words.
        target: What must come of it, in words.
    """

    @property
    def name(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def target(self) -> str: ...

    def pieces(self, scale: Scale) -> list[str]:
        """Return the names of its pieces: what is done at a time, and not again by `--resume`."""

    def play(self, pieces: Sequence[str], scale: Scale) -> AsyncIterator[Result]:
        """Run pieces and yield their results."""


ROWS: tuple[Row, ...] = (
    EveryStep(
        "steps",
        "SIGKILL of the executor at every step of 64 tokens, in three phases; two fake executors",
        fake_executor,
    ),
    EveryStep(
        "steps-demo",
        "the same at every fourth step; two executors with the demo model",
        demo_executor,
        every=4,
    ),
    EveryStep(
        "steps-hybrid",
        "the same at every second step; two executors with a tiny hybrid",
        hybrid_executor,
        every=2,
    ),
    EveryStepOfEngine(
        "steps-core",
        "SIGKILL of the core at every step of 64 tokens, in three phases; a front, a fake executor",
        fake_executor,
    ),
    EveryStepOfEngine(
        "steps-core-demo",
        "the same at every fourth step; a front, an executor with the demo model",
        demo_executor,
        every=4,
    ),
    EveryStepOfEngine(
        "steps-core-hybrid",
        "the same at every second step; a front, an executor with a tiny hybrid",
        hybrid_executor,
        every=2,
    ),
    EveryStepOfFront(),
    ManyClients(),
    Endless(),
    Endless(
        "streams-fronts",
        "the same through two fronts; among the faults SIGKILL and SIGSTOP of the core, of a front, and SIGKILL of the "
        "core while a front stands still",
        num_fronts=2,
        faults={**EXECUTOR_FAULTS, **SCHEDULER_FAULTS},
    ),
    CancelStorm(),
    CancelStorm("cancel-fronts", "the same through two fronts", num_fronts=2),
    Drain(),
    CellFaults(),
)
