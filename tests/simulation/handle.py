"""A callback that is to run, with the process that it belongs to."""

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.processes import PROCESS

if TYPE_CHECKING:
    from tests.simulation.loop import SimulationLoop


class SimulatedHandle:
    """What asyncio has of a callback or a timer; lighter than its own handles.

    Attributes:
        process: Whose it is, by its context.
    """

    __slots__ = ("_args", "_callback", "_context", "_is_cancelled", "_loop", "_when", "process")

    def __init__(
        self,
        loop: "SimulationLoop",
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
        when: float = 0.0,
    ) -> None:
        if context is None:
            context = contextvars.copy_context()
        self._loop = loop
        self._callback: Callable[..., object] | None = callback
        self._args = args
        self._context = context
        self._when = when
        self._is_cancelled = False
        self.process = context[PROCESS]

    def __repr__(self) -> str:
        return f"<{self.process.name}: {self._callback!r}>"

    @property
    def owner(self) -> object:
        """The object whose method it calls; of what lets a task go on, the task."""
        return getattr(self._callback, "__self__", None)

    def cancel(self) -> None:
        """Do not run it."""
        self._is_cancelled = True
        self._callback, self._args = None, ()

    def cancelled(self) -> bool:
        """Return whether it is not to run."""
        return self._is_cancelled

    def when(self) -> float:
        """Return when it is due, in seconds of the loop."""
        return self._when

    def run(self) -> None:
        """Run it; what it raises goes to the loop."""
        assert self._callback is not None
        try:
            self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._loop.call_exception_handler({"message": f"exception in callback {self!r}", "exception": error})
