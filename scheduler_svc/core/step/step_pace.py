"""How fast the steps of an executor are at their best; waits are estimated with it.

`step_cost.py` knows what steps take at most. Here the shortest recent step counts, so that estimates err towards too
little. The first step of a kind may have to compile, and does not count.

Pure: the executor measures the durations.
"""

from collections import deque

from octavo_shared.step_wire.batch_table import StepLayout

_NUM_RECENT = 16


class StepPace:
    """Learns from the steps of one attachment, each of at most `max_num_tokens`; starts knowing nothing."""

    def __init__(self, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._recent_large: deque[float] = deque(maxlen=_NUM_RECENT)
        self._kinds: set[tuple[bool, bool]] = set()

    def learn(self, layout: StepLayout, duration_s: float) -> None:
        """Learn from a step that has run."""
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
        """What a step takes at least, in seconds; None: no step was measured."""
        return min(self._recent, default=None)

    @property
    def large_step_s(self) -> float | None:
        """The same of a step with at least half of the token budget; if there was none, of any step."""
        return min(self._recent_large, default=self.step_s)
