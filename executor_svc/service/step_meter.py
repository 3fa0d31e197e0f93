"""What an executor counts of its steps: how many, how long, how many tokens, and how busy it was lately.

One thread tells it when a step is launched, another when its answer is there; a scrape reads it on the event loop, so
a lock stands between them. Durations are as in the answers: on a GPU what the device
took, by events in its stream that are read when the step is over. Nothing here waits for a device.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.histogram import Histogram
from octavo_shared.step_wire.step import BoolArray, TableDelta

# From a decode of the fake executor to the longest prompt; each at most 2.5 times the one before.
STEP_BOUNDS_S = (*(scale * 10**power for power in range(-4, 1) for scale in (1.0, 2.5, 5.0)), 10.0, 25.0, 60.0)

WINDOW_S = 60


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens that a step computes: of prompts and pooled texts (prefill), one for each running sequence (decode)."""

    num_prefill: int
    num_decode: int

    @classmethod
    def of(cls, delta: TableDelta, was_active: BoolArray, num_pooled: int = 0) -> "StepTokens":
        """Return the tokens of a step that was applied to a batch table.

        Args:
            delta: Of the step.
            was_active: A copy of the table's `active` before the step, which is changed here.
            num_pooled: Tokens of the step's texts to be pooled.
        """
        was_active[delta.released_slots] = False
        was_active[delta.deactivated_slots] = False
        was_active[delta.activated_slots] = True
        return cls(int(delta.prefill_chunks[:, 1].sum()) + num_pooled, int(np.count_nonzero(was_active)))


class StepMeter:
    """Counts the steps of a process since its start.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic_s) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._started_s = clock()
        self._running: list[float] = []  # since when, in the order of their launch
        self._busy = [0.0] * WINDOW_S  # seconds of work in each of the last seconds, by second modulo WINDOW_S
        self._newest_second = int(self._started_s)
        self.num_steps = 0
        self.busy_s = 0.0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.durations = Histogram(STEP_BOUNDS_S)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """A step is launched in the block; it runs from the begin of the block on, unless the block raises."""
        with self._lock:
            self._running.append(self._clock())
        try:
            yield
        except BaseException:
            with self._lock:
                self._running.pop()
            raise

    def finished(self, duration_s: float, tokens: StepTokens) -> None:
        """The oldest launched step is done; it took so long, and computed so many tokens."""
        with self._lock:
            now_s = self._clock()
            self._running.pop(0)
            if self._running:  # it has had the device to itself from now on only
                self._running[0] = max(self._running[0], now_s)
            self._add_busy(now_s - duration_s, now_s)
            self.num_steps += 1
            self.busy_s += duration_s
            self.num_prefill_tokens += tokens.num_prefill
            self.num_decode_tokens += tokens.num_decode
            self.durations.observe(duration_s)

    def failed(self) -> None:
        """The oldest launched step failed when it was finished."""
        with self._lock:
            self._running.pop(0)

    def idle_ratio(self) -> float:
        """Return the share of the last minute, or of the time since the start, in which no step ran; 0 to 1."""
        with self._lock:
            now_s = self._clock()
            self._forget_before(now_s)
            begin_s = max(self._started_s, int(now_s) - WINDOW_S + 1)
            if now_s <= begin_s:
                return 1.0
            busy_s = sum(self._busy)
            if self._running:
                busy_s += now_s - max(begin_s, self._running[0])
            return max(0.0, 1.0 - busy_s / (now_s - begin_s))

    def _add_busy(self, begin_s: float, end_s: float) -> None:
        """Spread a time over the seconds that it touches."""
        self._forget_before(end_s)
        first = max(int(begin_s), int(end_s) - WINDOW_S + 1)
        for second in range(first, int(end_s) + 1):
            self._busy[second % WINDOW_S] += min(end_s, second + 1) - max(begin_s, second)

    def _forget_before(self, now_s: float) -> None:
        """Empty the seconds that begin now or came and went unseen."""
        newest = int(now_s)
        for second in range(max(self._newest_second + 1, newest - WINDOW_S + 1), newest + 1):
            self._busy[second % WINDOW_S] = 0.0
        self._newest_second = newest
