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
        self._tasks: set[asyncio.Task[Any]] = set()
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
    def num_tasks(self) -> int:
        """How many tasks of it have not ended."""
        return len(self._tasks)

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Its tasks that have not ended."""
        return list(self._tasks)

    def context(self) -> contextvars.Context:
        """Return a new context of the process, for a callback or a task."""
        return self._context.copy()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Let the process run a coroutine."""
        return self.loop.create_task(coroutine, context=self.context())

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a task until it ends, also if the process dies before: nothing of it may run then, no `finally`."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard, context=self._context)

    def forget(self) -> None:
        """Let go of all that it holds: the simulation is over."""
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.clear()
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
        self.held.clear()
        self.callbacks.clear()
        self.loop.drop(self)
