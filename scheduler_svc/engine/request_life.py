"""The events of a live request, for people: `GetRequest` of `AdminService` shows them."""

from scheduler_svc.request.life import LifeEvent

MAX_EVENTS = 96


class RequestLife:
    """The events of a request, oldest first: the first and the last ones, at most MAX_EVENTS."""

    def __init__(self) -> None:
        self._events: list[LifeEvent] = []

    @property
    def events(self) -> tuple[LifeEvent, ...]:
        """The kept events."""
        return tuple(self._events)

    def add(self, event: LifeEvent) -> None:
        """Keep an event; when there are too many, drop one from the middle."""
        if len(self._events) == MAX_EVENTS:
            del self._events[MAX_EVENTS // 2]
        self._events.append(event)
