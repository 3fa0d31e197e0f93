"""A step that a worker has launched: a device may still be computing it while later steps are launched behind it."""

from dataclasses import dataclass
from typing import Protocol

from shared.step import StepResult


class RunningStep(Protocol):
    """Steps end in the order in which they were launched, and are finished in that order."""

    def is_done(self) -> bool:
        """Return whether `finish` would not have to wait."""

    def wait(self) -> None:
        """Return when the device is done with it. Any thread may call this, and only this."""

    def finish(self) -> StepResult:
        """Wait, record the sampled tokens in the worker's table, return the answer.

        Raises:
            StepFailedError: it failed on the device; the cache contents are in doubt.
            DeviceLostError: so will every later step, until the process is started anew.
        """


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step that was computed while it was launched; see `RunningStep`."""

    result: StepResult

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""

    def finish(self) -> StepResult:
        """Return the answer; the tokens are recorded."""
        return self.result
