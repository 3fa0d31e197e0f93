"""When to try again to attach to an executor that does not answer: soon at first, then less and less often."""

# The pause between two attempts is at least this long, and this share of the time since the first attempt: so an
# executor that starts is attached soon after it is ready.
FIRST_RETRY_S = 0.05
RETRY_SHARE = 0.1


class RetryPace:
    """The pauses between attempts to attach to one executor, at most `longest_s` seconds."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._since_s: float | None = None  # time of the first attempt; None: it is attached, or no attempt was made

    def attached(self) -> None:
        """Note that the executor was attached."""
        self._since_s = None

    def next_pause_s(self, now_s: float) -> float:
        """Return how long to wait before the next attempt, in seconds."""
        if self._since_s is None:
            self._since_s = now_s
        return min(max(FIRST_RETRY_S, RETRY_SHARE * (now_s - self._since_s)), self._longest_s)
