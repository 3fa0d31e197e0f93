"""The last steps, kept for operators: `AdminService` shows them (`scheduler_svc/admin/steps.py`)."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from octavo_shared.process.clock import monotonic_s
from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.step import Step, StepResult
from scheduler_svc.core.step.step_size import step_bytes

NUM_KEPT_STEPS = 256

# Bytes of the arrays of all kept steps; 256 steps of 4,096 sequences would be 57 MiB for an executor. The last few are
# kept whatever their size: the steps in flight are among them.
MAX_KEPT_BYTES = 8 * 2**20
MIN_KEPT_STEPS = 16

# About the size of the objects around the arrays of a step.
OBJECT_BYTES = 2000


@dataclass(slots=True)
class RecentStep:
    """One step: `request_bytes` is 0 until it is sent, `result` None until it is processed.

    Monotonic times in seconds: `decided_at_s`, when the planner began to decide it, is set by the driver; the log
    sets `logged_at_s`, when it is about to be sent, `answered_at_s`, when its result has come, and
    `processed_at_s`, when the requests have its tokens. `num_kept_bytes` is the log's own count.
    """

    step: Step
    layout: StepLayout
    request_bytes: int = 0
    result: StepResult | None = None
    decided_at_s: float = 0.0
    logged_at_s: float = 0.0
    answered_at_s: float = 0.0
    processed_at_s: float = 0.0
    num_kept_bytes: int = 0

    @property
    def round_trip_us(self) -> int:
        """Microseconds from the decision to the result; needs a result."""
        return round((self.answered_at_s - self.decided_at_s) * 1e6)


class RecentSteps:
    """The last steps of the current epoch by id, oldest first.

    Args:
        capacity: The most steps that are kept.
        max_bytes: The most bytes of all steps together, except the last `MIN_KEPT_STEPS`.
        clock: Monotonic time in seconds.
        observe: Called with each step when its result has been processed.
    """

    def __init__(
        self,
        capacity: int = NUM_KEPT_STEPS,
        max_bytes: int = MAX_KEPT_BYTES,
        clock: Callable[[], float] = monotonic_s,
        observe: Callable[[RecentStep], None] = lambda step: None,
    ) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._clock = clock
        self._observe = observe
        self._steps: OrderedDict[int, RecentStep] = OrderedDict()

    def clear(self) -> None:
        """Forget all steps: a new epoch counts from 1."""
        self._steps.clear()
        self._num_bytes = 0

    def add(self, logged: RecentStep) -> None:
        """Keep a step that is about to be sent."""
        logged.logged_at_s = self._clock()
        self._steps[logged.step.step_id] = logged
        self._hold(logged, decided_bytes(logged))

    def set_result(self, result: StepResult, answered_at_s: float) -> None:
        """Keep a step's result, which has just been processed."""
        logged = self._steps.get(result.step_id)
        if logged is not None:
            logged.result, logged.answered_at_s, logged.processed_at_s = result, answered_at_s, self._clock()
            self._hold(logged, result_bytes(result))
            self._observe(logged)

    def _hold(self, logged: RecentStep, num_bytes: int) -> None:
        """Count the bytes that a step adds, and drop the oldest steps."""
        logged.num_kept_bytes += num_bytes
        self._num_bytes += num_bytes
        while len(self._steps) > self._capacity or (
            self._num_bytes > self._max_bytes and len(self._steps) > min(MIN_KEPT_STEPS, self._capacity)
        ):
            _, dropped = self._steps.popitem(last=False)
            self._num_bytes -= dropped.num_kept_bytes

    def get(self, step_id: int) -> RecentStep | None:
        """Return a step, the last one for 0; None: it is not kept."""
        if step_id == 0:
            return next(reversed(self._steps.values()), None)
        return self._steps.get(step_id)

    def last(self, num_steps: int) -> list[RecentStep]:
        """Return the last steps, oldest first; as many as are kept."""
        return list(self._steps.values())[-num_steps:]

    @property
    def kept_ids(self) -> tuple[int, int]:
        """First and last id kept; (0, 0): none."""
        return (next(iter(self._steps)), next(reversed(self._steps))) if self._steps else (0, 0)


def decided_bytes(logged: RecentStep) -> int:
    """Return about the size of a step and its layout; the arrays take as much as the message."""
    layout = logged.layout
    optional = (layout.num_candidates, layout.num_alternatives, layout.num_prompt_logprobs)
    num_numbers = 4 * (len(layout.slots) + len(layout.sample_slots)) + sum(
        len(array) for array in optional if array is not None
    )
    return OBJECT_BYTES + step_bytes(logged.step) + 4 * num_numbers


def result_bytes(result: StepResult) -> int:
    """Return the size of a result in bytes."""
    return sum(array.nbytes for array in result.arrays) + sum(text.values.nbytes for text in result.pooling_outputs)
