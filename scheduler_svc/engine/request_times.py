"""When what happened to a request: for metrics, traces and the log line at its end."""

from dataclasses import dataclass


@dataclass(slots=True)
class RequestTimes:
    """Monotonic times in seconds; None: it has not come to that, and may never.

    All tokens of a step have one time, that at which the step's result is given to the requests.

    Attributes:
        arrived_at_s: It was queued: its fields are checked, its prompt is tokenized.
        first_scheduled_at_s: The step was decided that admitted it first; known from its first token or its end on.
        first_token_at_s: Its first token came, of whichever output.
        last_token_at_s: Its last token so far came.
        ended_at_s: It ended: finished, failed, or aborted.
    """

    arrived_at_s: float
    first_scheduled_at_s: float | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    ended_at_s: float | None = None

    @property
    def queue_s(self) -> float | None:
        """From the arrival to the first step; the wait after a preemption does not count."""
        return _between(self.arrived_at_s, self.first_scheduled_at_s)

    @property
    def time_to_first_token_s(self) -> float | None:
        """From the arrival to the first token."""
        return _between(self.arrived_at_s, self.first_token_at_s)

    @property
    def duration_s(self) -> float | None:
        """From the arrival to the end."""
        return _between(self.arrived_at_s, self.ended_at_s)


def _between(begin_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else end_s - begin_s
