"""How long the oldest step in flight has been running, beside what it should take: its executor may hang.

Times are monotonic, in seconds. Read next: `step_cost.py`, which learns what steps take, and
`executors/step_watch.py`, which tells a step that hangs from a slow one.
"""

from collections import deque

from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.step.step_plan import StepInFlight


class OldestStep:
    """How late the oldest step in flight of a planner is.

    Args:
        blocks: Has the step cost, which may be replaced.
        in_flight: The steps, the oldest one first.
        stall_after_s: A step is late that takes so much longer than it should.

    Attributes:
        progress_at_s: The first decision after the last result.
        was_processed: Whether a result has come since the last decision.
    """

    def __init__(self, blocks: BlockManager, in_flight: deque[StepInFlight], stall_after_s: float) -> None:
        self._blocks, self._in_flight, self._stall_after_s = blocks, in_flight, stall_after_s
        self.progress_at_s = 0.0
        self.was_processed = False

    def note_decision(self, now_s: float) -> None:
        """Note that the next step is decided now."""
        if self.was_processed:
            self.was_processed, self.progress_at_s = False, now_s

    def running_s(self, now_s: float) -> float | None:
        """Return how long the oldest step in flight has been running; None: none is.

        Time in which it waited for earlier steps does not count.
        """
        if not self._in_flight or self.was_processed:
            return None
        return now_s - max(self._in_flight[0].scheduled_at_s, self.progress_at_s)

    def longest_s(self) -> float | None:
        """Return what the oldest step in flight should take at most; None: no step has finished yet."""
        return self._blocks.step_cost.longest_s(self._in_flight[0].workload)

    def stalled_s(self, now_s: float) -> float | None:
        """Return how long the oldest step in flight has been running, if longer than it should; None: it has not."""
        running_s = self.running_s(now_s)
        if running_s is None or running_s <= self._stall_after_s:
            return None
        longest_s = self.longest_s() or 0.0
        return running_s if running_s > longest_s + self._stall_after_s else None

    def hangs(self, now_s: float, after_s: float) -> bool:
        """Return whether the oldest step in flight takes more than `after_s` longer than it may."""
        running_s = self.running_s(now_s)
        if running_s is None or running_s <= after_s:
            return False
        longest_s = self.longest_s()
        allowance_s = self._blocks.step_cost.allowance_s(self._in_flight[0].workload)
        return longest_s is not None and running_s > longest_s + allowance_s + after_s
