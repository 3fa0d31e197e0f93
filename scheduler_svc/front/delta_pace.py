"""How long a stream rests between two messages: not at all, until the front falls behind its streams.

A message costs the same with one token or with ten: most of it is the write. So when the event loop is late, streams
rest, and tokens that come meanwhile go out together; when it has time again, they rest less. The first token never
waits.
"""

import asyncio
import time
from collections.abc import Callable

# How often the event loop's lag is measured, in seconds.
INTERVAL_S = 0.02

# Lag of a timer, in seconds: above the first value the loop has too much to do, below the second it has time.
LATE_S = 0.02
EARLY_S = 0.005

# A rest is at least the shortest one, or none; and no text is held for longer than the longest one, in seconds.
SHORTEST_REST_S = 0.01
LONGEST_REST_S = 0.1


class DeltaPace:
    """The rest of all streams of a front.

    Args:
        clock: Monotonic time in seconds.

    Attributes:
        rest_s: Between two messages of a stream, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.rest_s = 0.0
        self._clock = clock

    async def watch(self) -> None:
        """Watch the running loop until cancelled."""
        while True:
            due_at_s = self._clock() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self.note(self._clock() - due_at_s)

    def note(self, lag_s: float) -> None:
        """Note how late a timer of the loop was, in seconds."""
        if lag_s > LATE_S:
            self.rest_s = min(LONGEST_REST_S, max(SHORTEST_REST_S, 2 * self.rest_s))
        elif lag_s < EARLY_S and self.rest_s:
            self.rest_s *= 0.75
            if self.rest_s < SHORTEST_REST_S:
                self.rest_s = 0.0
