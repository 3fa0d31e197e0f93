"""The last steps, kept for people: `AdminService.GetStep` shows them."""

from collections import OrderedDict
from dataclasses import dataclass

from shared.batch_table import StepLayout
from shared.step import Step, StepResult


@dataclass(slots=True)
class LoggedStep:
    """One step: `request_bytes` is 0 until it is sent, `result` None until it is processed."""

    step: Step
    layout: StepLayout
    request_bytes: int = 0
    result: StepResult | None = None


class StepLog:
    """The last `capacity` steps of the current epoch by id, oldest first."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._steps: OrderedDict[int, LoggedStep] = OrderedDict()

    def clear(self) -> None:
        """Forget all steps: a new epoch counts from 1."""
        self._steps.clear()

    def add(self, logged: LoggedStep) -> None:
        """Keep a step that was sent."""
        self._steps[logged.step.step_id] = logged
        if len(self._steps) > self._capacity:
            self._steps.popitem(last=False)

    def set_result(self, result: StepResult) -> None:
        """Keep a step's result."""
        if result.step_id in self._steps:
            self._steps[result.step_id].result = result

    def get(self, step_id: int) -> LoggedStep | None:
        """Return a step, the last one for 0; None if it is not kept."""
        if step_id == 0:
            return next(reversed(self._steps.values()), None)
        return self._steps.get(step_id)

    @property
    def kept_ids(self) -> tuple[int, int]:
        """First and last id kept; (0, 0): none."""
        return (next(iter(self._steps)), next(reversed(self._steps))) if self._steps else (0, 0)
