"""The threads of an executor, simulated: calls are made in their order, and a step takes virtual time."""

import math
from collections import deque
from collections.abc import Callable

from executor_svc.service.step_thread import Call, StepThread
from tests.simulation.loop import SimulationLoop
from tests.simulation.processes import PROCESS


class SimulatedStepThread(StepThread):
    """Makes the calls of a `StepThread` on the loop, for the process in whose context it is made.

    What runs in the middle of a call cannot meet it here: a call is one piece. `busy_until_s` is when the call that is
    made will have ended, `device_until_s` when the device will have computed all that was launched.
    """

    def __init__(self, loop: SimulationLoop) -> None:
        self.busy_until_s = self.device_until_s = 0.0
        self._loop = loop
        self._context = PROCESS.get().context()
        self._queued: deque[Call] = deque()
        self._unanswered: deque[Call] = deque()

    def start(self) -> None:
        """Nothing: the loop makes the calls."""

    @property
    def cpu_time_us(self) -> None:
        """No processor is used; whoever looks at a step that takes long has its duration alone."""

    def submit(self, call: Call) -> None:
        """See `StepThread`."""
        self._queued.append(call)
        if len(self._queued) == 1:
            self._later(self._make_next)

    def answer(self, call: Call) -> None:
        """See `StepThread`."""
        self._unanswered.append(call)
        self._later(self._answer_next)

    def wait(self, call: Call) -> None:
        """See `StepThread`: the device is done when it has computed what was launched last."""
        if not math.isinf(self.device_until_s):
            self._loop.call_at(max(self._loop.time(), self.device_until_s), call, context=self._context)

    def wait_for_answers(self) -> None:
        """See `StepThread`; they come at once."""
        while self._unanswered:
            self._unanswered.popleft()()

    def close(self) -> None:
        """See `StepThread`."""
        self._queued.clear()
        self._unanswered.clear()

    def occupy(self, duration_s: float) -> None:
        """Let the call that is being made take so long; as the `sleep` of a worker."""
        self.busy_until_s = max(self._loop.time(), self.busy_until_s) + duration_s

    def compute(self, duration_s: float) -> float:
        """Let the device compute for so long, behind what it does already; return when it will be done."""
        self.device_until_s = max(self._loop.time(), self.device_until_s) + duration_s
        return self.device_until_s

    def hang(self) -> None:
        """Let the call that is being made, and what the device computes, never end."""
        self.busy_until_s = self.device_until_s = math.inf

    def clock(self) -> float:
        """Return the time as the call that is being made has it."""
        return max(self._loop.time(), self.busy_until_s)

    def _later(self, callback: Callable[[], None]) -> None:
        """Call something when the running step has ended."""
        if not math.isinf(self.busy_until_s):
            self._loop.call_at(max(self._loop.time(), self.busy_until_s), callback, context=self._context)

    def _make_next(self) -> None:
        if self.busy_until_s > self._loop.time():  # it became busy since, by an earlier call
            self._later(self._make_next)
            return
        self._queued[0]()
        self._queued.popleft()
        if self._queued:
            self._later(self._make_next)

    def _answer_next(self) -> None:
        if self._unanswered:  # `wait_for_answers` may have been faster
            self._unanswered.popleft()()
