"""How fast the steps of an executor are at their best: what seconds are estimated with that nobody has measured yet.

Beside `step_cost.py`, which knows what steps take at most. The shortest of the recent steps counts, so that an
estimate errs towards too little. The first step of a kind may have to compile, and does not count.

Pure: the durations are those that the executor measured.
"""

from collections import deque

from octavo_shared.step_wire.batch_table import StepLayout

_NUM_RECENT = 16


class StepPace:
    """Learns from the steps of one attachment; starts knowing nothing.

    Args:
        max_num_tokens: That a step computes.
    """

    def __init__(self, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._recent_large: deque[float] = deque(maxlen=_NUM_RECENT)
        self._kinds: set[tuple[bool, bool]] = set()

    def learn(self, layout: StepLayout, duration_s: float) -> None:
        """A step with these rows took so long."""
        is_large = 2 * layout.num_tokens >= self._max_num_tokens
        kind = layout.num_decodes < len(layout.slots), is_large
        if kind not in self._kinds:
            self._kinds.add(kind)
            return
        self._recent.append(duration_s)
        if is_large:
            self._recent_large.append(duration_s)

    @property
    def step_s(self) -> float | None:
        """What a step takes at least, in seconds; None: nothing was measured."""
        return min(self._recent, default=None)

    @property
    def large_step_s(self) -> float | None:
        """The same of a step with half of the tokens that there may be, or more; where none came, that of any step."""
        return min(self._recent_large, default=self.step_s)
