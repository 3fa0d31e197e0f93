"""A callback that is to run, with the process that it belongs to."""

import contextvars
from collections.abc import Callable
from typing import Any

from tests.simulation.processes import PROCESS


class SimulatedHandle:
    """What asyncio has of a callback or a timer; lighter than its own handles.

    Attributes:
        callback: What is to run, with `args` and in `context`; None: it was cancelled.
        process: Whose it is, by its context.
    """

    __slots__ = ("_when", "args", "callback", "context", "process")

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
        when: float = 0.0,
    ) -> None:
        if context is None:
            context = contextvars.copy_context()
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context
        self.process = context[PROCESS]
        self._when = when

    def __repr__(self) -> str:
        return f"<{self.process.name}: {self.callback!r}>"

    def cancel(self) -> None:
        """Do not run it."""
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        """Return whether it is not to run."""
        return self.callback is None

    def when(self) -> float:
        """Return when it is due, in seconds of the loop."""
        return self._when
