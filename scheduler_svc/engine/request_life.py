"""What happened to a request between its arrival and its end, for people: `GetRequest` of `AdminService` shows it.

Arrival, first token and end are in `RequestTimes`; here is the rest, which only some requests have and some
have often.
"""

from dataclasses import dataclass

from scheduler_svc.core.group_event import EventKind

MAX_EVENTS = 96


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """One thing that happened to a request.

    Attributes:
        kind: What.
        at_s: When, monotonic time in seconds.
        executor: Address of the executor concerned; empty: none is.
        step_id: The step of that executor that it happened with; None: with none.
        num_tokens: Tokens that were known, prompt and output, of the first live sequence.
        num_computed_tokens: Of these, those that needed not be computed.
        cause: Why, in words; empty: the kind says it.
    """

    kind: EventKind
    at_s: float
    executor: str = ""
    step_id: int | None = None
    num_tokens: int = 0
    num_computed_tokens: int = 0
    cause: str = ""


class RequestLife:
    """The events of a request, oldest first: the first and the last ones, at most MAX_EVENTS."""

    def __init__(self) -> None:
        self._events: list[LifeEvent] = []

    @property
    def events(self) -> tuple[LifeEvent, ...]:
        """What is remembered."""
        return tuple(self._events)

    def add(self, event: LifeEvent) -> None:
        """Remember an event; of a long life, one from the middle is forgotten."""
        if len(self._events) == MAX_EVENTS:
            del self._events[MAX_EVENTS // 2]
        self._events.append(event)
