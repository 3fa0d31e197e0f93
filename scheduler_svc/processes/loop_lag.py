"""How long the event loop of this process was busy with one thing while other things were due."""

import asyncio
import time
from collections.abc import Callable

# How often the lag is measured. A shorter stall may be missed, a longer one may look shorter by up to this much.
INTERVAL_S = 0.02

WINDOW_S = 60.0


class LoopLag:
    """Remembers the longest lag of the last minute: how late a timer of the loop was.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._window_began_at_s = clock()
        self._longest_s = self._longest_before_s = 0.0

    async def watch(self) -> None:
        """Watch the running loop until cancelled."""
        while True:
            due_at_s = self._clock() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self.note(self._clock() - due_at_s)

    def note(self, lag_s: float) -> None:
        """Note how late a timer came, in seconds."""
        self._forget_old()
        self._longest_s = max(self._longest_s, lag_s)

    @property
    def longest_s(self) -> float:
        """The longest lag of the last minute, in seconds; lags up to a minute older may still count."""
        self._forget_old()
        return max(self._longest_s, self._longest_before_s)

    def _forget_old(self) -> None:
        """Keep two windows: the current one, and the one before it."""
        now_s = self._clock()
        while now_s - self._window_began_at_s >= WINDOW_S:
            self._longest_s, self._longest_before_s = 0.0, self._longest_s
            self._window_began_at_s += WINDOW_S
