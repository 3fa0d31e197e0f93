"""The last steps, kept for people: `AdminService` shows them (`admin_steps.py`)."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from shared.batch_table import StepLayout
from shared.step import Step, StepResult

NUM_KEPT_STEPS = 256


@dataclass(slots=True)
class LoggedStep:
    """One step: `request_bytes` is 0 until it is sent, `result` None until it is processed.

    Monotonic times in seconds: `decided_at_s`, when the core began to decide it, is the driver's to set; the log
    sets `logged_at_s`, when it is about to be sent, `answered_at_s`, when its result had come, and
    `processed_at_s`, when the requests had what it brought.
    """

    step: Step
    layout: StepLayout
    request_bytes: int = 0
    result: StepResult | None = None
    decided_at_s: float = 0.0
    logged_at_s: float = 0.0
    answered_at_s: float = 0.0
    processed_at_s: float = 0.0

    @property
    def round_trip_us(self) -> int:
        """Microseconds from the decision to the result; only with a result."""
        return round((self.answered_at_s - self.decided_at_s) * 1e6)


class StepLog:
    """The last `capacity` steps of the current epoch by id, oldest first.

    Args:
        capacity: How many are kept.
        clock: Monotonic time in seconds.
        observe: Called with each step when its result has been processed.
    """

    def __init__(
        self,
        capacity: int = NUM_KEPT_STEPS,
        clock: Callable[[], float] = time.monotonic,
        observe: Callable[[LoggedStep], None] = lambda step: None,
    ) -> None:
        self._capacity = capacity
        self._clock = clock
        self._observe = observe
        self._steps: OrderedDict[int, LoggedStep] = OrderedDict()

    def clear(self) -> None:
        """Forget all steps: a new epoch counts from 1."""
        self._steps.clear()

    def add(self, logged: LoggedStep) -> None:
        """Keep a step that is about to be sent."""
        logged.logged_at_s = self._clock()
        self._steps[logged.step.step_id] = logged
        if len(self._steps) > self._capacity:
            self._steps.popitem(last=False)

    def set_result(self, result: StepResult, answered_at_s: float) -> None:
        """Keep a step's result, which came at a time and has just been processed."""
        logged = self._steps.get(result.step_id)
        if logged is not None:
            logged.result, logged.answered_at_s, logged.processed_at_s = result, answered_at_s, self._clock()
            self._observe(logged)

    def get(self, step_id: int) -> LoggedStep | None:
        """Return a step, the last one for 0; None if it is not kept."""
        if step_id == 0:
            return next(reversed(self._steps.values()), None)
        return self._steps.get(step_id)

    def last(self, num_steps: int) -> list[LoggedStep]:
        """Return the last steps, oldest first; as many as are kept."""
        return list(self._steps.values())[-num_steps:]

    @property
    def kept_ids(self) -> tuple[int, int]:
        """First and last id kept; (0, 0): none."""
        return (next(iter(self._steps)), next(reversed(self._steps))) if self._steps else (0, 0)
