"""What the steps of an executor take at most, the one rule by which a step is overdue; and what they take at least.

The time of a step grows with its tokens and with the tokens that these attend to. Steps are sorted by these two numbers
into classes a few percent wide; each class remembers its slowest recent step. A step should take no longer than the
slowest step with as much of both, nor than a smaller one, scaled up. The least of these bounds, with some slack, is the
estimate. The first step of a kind may have to compile: it does not count as hung before COLD_START_S more.

An executor that was called hung, and was only slow, would be lost again and again at the same step. So each such
verdict doubles the slack, and results bring it back.

The cost of a decode beside that of a prompt token is learned as well: how the time of a step grows with its tokens, and
the time of a step without prefill with its rows. The dispatcher prices the rows of an executor by it.

So is the cost of a byte that moves between device and host: as the executor measures it, or what steps that move some
take longer than their tokens explain. By it a prefix on the host is brought back or computed, and copies get a small
share of each step.

Pure: the executor measures the durations.
"""

import math
from collections import deque

import numpy as np

from octavo_shared.step_wire.batch_table import StepLayout

LEAST_SLACK = 1.25
COLD_START_S = 10.0

_CLASSES_PER_DOUBLING = 8
# After each step, the share that is kept of its class's slowest time, and of the slack.
_KEPT = 0.97
# Steps of which the shortest counts.
_NUM_RECENT = 16

# After each step, the weight that earlier steps keep in the two fitted lines.
_KEPT_OF_LINES = 0.995
# The weight of the assumption that a row costs as much as a token, as a sum of squares of rows.
_PRIOR_VARIANCE = 64.0
# What copies to the host may take of a step with tokens, and of one without.
_COPIES_SHARE = 0.05
_IDLE_COPIES_S = 0.005
LEAST_ROW_TOKENS, MOST_ROW_TOKENS = 0.25, 4.0

# Sums over steps: their number, sizes, durations in seconds, squared sizes, and products of size and duration.
Sums = tuple[float, float, float, float, float]
NO_STEPS: Sums = (0.0, 0.0, 0.0, 0.0, 0.0)
_Class = tuple[int, int]
_Kind = tuple[bool, bool, bool]


class StepCost:
    """Learns from the steps of one executor process; starts knowing nothing.

    Attributes:
        slack: Factor on the time of the slowest recent steps.
        slowest_s: The slowest recent step of each class, in seconds.
        kinds: The kinds of steps that have run.
        token_sums: Of all steps; size is their tokens.
        row_sums: Of steps without prefill; size is their rows.
        move_sums: Of steps that moved blocks: squared bytes, and products of bytes and what the steps took longer.
        row_tokens: What a decoding row costs in a step, in prompt tokens.
    """

    def __init__(self) -> None:
        self.slack = LEAST_SLACK
        self.slowest_s: dict[_Class, float] = {}
        self.kinds: set[_Kind] = set()
        self.token_sums = self.row_sums = NO_STEPS
        self.move_sums = 0.0, 0.0
        self.row_tokens = 1.0

    def learn(self, layout: StepLayout, duration_s: float, num_moved_bytes: int = 0, move_s: float = 0.0) -> None:
        """Learn from a step that has run.

        Args:
            layout: Of the step.
            duration_s: What it took.
            num_moved_bytes: That it moved between device and host.
            move_s: What that took of it; 0: the executor does not know.
        """
        known = _class_of(layout)
        self.slowest_s[known] = max(duration_s, self.slowest_s.get(known, 0.0) * _KEPT)
        kind = _kind_of(layout)
        if num_moved_bytes:
            self._learn_move(num_moved_bytes, layout.num_tokens, duration_s, move_s)
        elif kind in self.kinds:  # the first one may have compiled
            self.token_sums = _with_step(self.token_sums, layout.num_tokens, duration_s)
            if layout.num_decodes == len(layout.slots):
                self.row_sums = _with_step(self.row_sums, layout.num_decodes, duration_s)
            self.row_tokens = self._learned_row_tokens()
        self.kinds.add(kind)
        self.slack = max(LEAST_SLACK, self.slack * _KEPT)

    def longest_s(self, layout: StepLayout) -> float | None:
        """Return what a step should take at most; None: no step has finished yet."""
        if not self.slowest_s:
            return None
        tokens, attended = _class_of(layout)
        bound_s = math.inf
        for (known_tokens, known_attended), slowest_s in self.slowest_s.items():
            doublings = max(0, tokens - known_tokens, attended - known_attended) / _CLASSES_PER_DOUBLING
            bound_s = min(bound_s, slowest_s * math.exp2(doublings))
        return bound_s * self.slack

    def allowance_s(self, layout: StepLayout) -> float:
        """Return what a step may take beyond `longest_s` because it is the first of its kind."""
        return 0.0 if _kind_of(layout) in self.kinds else COLD_START_S

    def _learned_row_tokens(self) -> float:
        token_variance, token_covariance = _spread(self.token_sums)
        if token_variance <= 0.0 or token_covariance <= 0.0:
            return 1.0
        row_variance, row_covariance = _spread(self.row_sums)
        row_tokens = row_covariance * token_variance / token_covariance  # times the variance of rows
        learned = (row_tokens + _PRIOR_VARIANCE) / (row_variance + _PRIOR_VARIANCE)
        return min(max(learned, LEAST_ROW_TOKENS), MOST_ROW_TOKENS)

    # Moves between device and host ----------------------------------------------------------------

    @property
    def token_s(self) -> float:
        """What one token more costs in a step, in seconds; 0: it is not known."""
        variance, covariance = _spread(self.token_sums)
        return max(0.0, covariance / variance) if variance > 0.0 else 0.0

    @property
    def byte_s(self) -> float:
        """What one byte more that moves costs in a step, in seconds; 0: it is not known."""
        squares, products = self.move_sums
        return max(0.0, products / squares) if squares else 0.0

    def expected_s(self, num_tokens: int) -> float:
        """Return what a step of so many tokens that moves nothing takes, in seconds; 0: it is not known."""
        num, sizes, durations, _, _ = self.token_sums
        return max(0.0, durations / num + self.token_s * (num_tokens - sizes / num)) if num else 0.0

    def pays(self, num_bytes: int, num_tokens: int) -> bool:
        """Return whether bringing so many bytes back from the host costs less than computing so many tokens.

        While one of the two is unknown: yes, and the move teaches its cost.
        """
        token_s = self.token_s
        return not token_s or num_bytes * self.byte_s < num_tokens * token_s

    def copied_bytes(self, num_tokens: int) -> int | None:
        """Return how many bytes a step of so many tokens may copy to the host; None: their cost is not known."""
        if not (byte_s := self.byte_s):
            return None
        return int((_COPIES_SHARE * self.expected_s(num_tokens) if num_tokens else _IDLE_COPIES_S) / byte_s)

    def _learn_move(self, num_bytes: int, num_tokens: int, duration_s: float, move_s: float) -> None:
        if not (move_s or self.token_s or not num_tokens):
            return
        longer_s = move_s or (duration_s - self.expected_s(num_tokens) if num_tokens else duration_s)
        squares, products = self.move_sums
        self.move_sums = (
            squares * _KEPT_OF_LINES + float(num_bytes) * num_bytes,
            products * _KEPT_OF_LINES + num_bytes * longer_s,
        )

    def note_hang(self) -> None:
        """Note that a step was given up as hung; if it was only slow, the next one gets more time."""
        self.slack *= 2.0


def _class_of(layout: StepLayout) -> _Class:
    num_attended = float(np.dot(layout.lengths.astype(np.float64), layout.starts + layout.lengths))
    tokens, attended = (math.log2(max(1.0, number)) for number in (layout.num_tokens, num_attended))
    return round(_CLASSES_PER_DOUBLING * tokens), round(_CLASSES_PER_DOUBLING * attended)


def _kind_of(layout: StepLayout) -> _Kind:
    has_prefill = layout.num_decodes < len(layout.slots)
    return has_prefill, layout.num_candidates is not None, layout.num_alternatives is not None


def _with_step(sums: Sums, size: int, duration_s: float) -> Sums:
    """Return the sums with one step more; earlier steps count a little less."""
    num, sizes, durations, squares, products = sums
    return (
        num * _KEPT_OF_LINES + 1.0,
        sizes * _KEPT_OF_LINES + size,
        durations * _KEPT_OF_LINES + duration_s,
        squares * _KEPT_OF_LINES + size * size,
        products * _KEPT_OF_LINES + size * duration_s,
    )


def _spread(sums: Sums) -> tuple[float, float]:
    """Return the variance of the sizes and their covariance with the durations, both summed over steps."""
    num, size, duration_s, squares, products = sums
    return (squares - size * size / num, products - size * duration_s / num) if num else (0.0, 0.0)


class StepPace:
    """How fast the steps of one attachment, each of at most `max_num_tokens`, are at their best; for estimates.

    The shortest recent step counts, so that estimates err towards too little. The first step of a kind may have to
    compile, and does not count.
    """

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
