"""Steps that run on a device of a test."""

import threading
from dataclasses import dataclass, field

from octavo_shared.step_wire.step import StepResult


@dataclass
class StepOnDevice:
    """Runs until the test ends it; see `executor_svc.worker.interface.RunningStep`."""

    result: StepResult
    error: Exception | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)

    def is_done(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        self.ended.wait()
        if self.error is not None:
            raise RuntimeError("the device failed")

    def finish(self) -> StepResult:
        self.ended.wait()
        self.finished.set()
        if self.error is not None:
            raise self.error
        return self.result
