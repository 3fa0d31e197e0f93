"""Simulated processes: they run, are stalled, go on, and die, each with all that they have begun.

A task or a callback belongs to the process in whose context it was made. Read next: `loop.py`.
"""

import asyncio
import contextvars
import enum
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tests.simulation.handle import SimulatedHandle
    from tests.simulation.loop import SimulationLoop

T = TypeVar("T")

PROCESS: contextvars.ContextVar["SimulatedProcess"] = contextvars.ContextVar("PROCESS")


class State(enum.Enum):
    """What a process is doing."""

    RUNNING = enum.auto()
    STALLED = enum.auto()  # as by SIGSTOP: its connections stay, it does nothing
    DEAD = enum.auto()


class SimulatedProcess:
    """A process of the simulation.

    Args:
        name: For people; unique, also over restarts.
        loop: Runs it.
        machine: Where it runs; a restart is on the same one. None: one of its own name.

    Attributes:
        state: As above.
        callbacks: Its plain callbacks that are ready, in their order; the loop's.
        held: What became ready while it was stalled; the loop's.
        loop: As above.
        unfinished: The tasks of a dead process, held until the end: nothing of them may run, no `finally`.
        watch: Called after each of its callbacks; None: nobody looks.
    """

    def __init__(self, name: str, loop: "SimulationLoop", machine: str | None = None) -> None:
        self.name = name
        self.machine = machine or name
        self.state = State.RUNNING
        self.callbacks: deque[SimulatedHandle] = deque()
        self.watch: Callable[[], None] | None = None
        self.held: list[Any] = []
        self.loop = loop
        self.unfinished: list[asyncio.Task[Any]] = []
        self._context = contextvars.Context()
        self._context.run(PROCESS.set, self)
        loop.add(self)

    def __repr__(self) -> str:
        return f"{self.name} ({self.state.name.lower()})"

    @property
    def is_running(self) -> bool:
        """Whether it is neither stalled nor dead."""
        return self.state is State.RUNNING

    @property
    def is_dead(self) -> bool:
        """Whether it was killed."""
        return self.state is State.DEAD

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Its tasks that have not ended."""
        return self.loop.tasks_of(self)

    def context(self) -> contextvars.Context:
        """Return a new context of the process, for a callback or a task."""
        return self._context.copy()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Let the process run a coroutine."""
        return self.loop.create_task(coroutine, context=self.context())

    def forget(self) -> None:
        """Let go of all that it holds, and hold nothing more: the simulation is over."""
        self.state = State.DEAD
        self.unfinished.clear()
        self.callbacks.clear()
        self.held.clear()
        self.watch = None

    def stall(self) -> None:
        """Stop it, as SIGSTOP does."""
        assert self.state is State.RUNNING
        self.state = State.STALLED
        self.loop.hold(self)

    def resume(self) -> None:
        """Let it go on, as SIGCONT does."""
        assert self.state is State.STALLED
        self.state = State.RUNNING
        self.loop.make_ready(self)

    def kill(self) -> None:
        """End it without a word, as SIGKILL does. What becomes of its connections is the network's affair."""
        self.state = State.DEAD
        self.unfinished = self.tasks
        self.held.clear()
        self.callbacks.clear()
        self.loop.drop(self)
