"""When to look again for an executor that does not answer: soon at first, then less and less often."""

# The shortest time between two attempts to attach, in seconds, and their share of the time that it is looked for
# already: so an executor that starts is attached soon after it is ready.
FIRST_RETRY_S = 0.05
RETRY_SHARE = 0.1


class RetryPace:
    """The pauses between attempts to attach to one executor.

    Args:
        longest_s: The longest one, in seconds.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._since_s: float | None = None  # None: it is attached, or nobody has looked for it

    def attached(self) -> None:
        """It was found: the next search begins anew."""
        self._since_s = None

    def next_pause_s(self, now_s: float) -> float:
        """Return how long to wait before the next attempt, in seconds."""
        if self._since_s is None:
            self._since_s = now_s
        return min(max(FIRST_RETRY_S, RETRY_SHARE * (now_s - self._since_s)), self._longest_s)
