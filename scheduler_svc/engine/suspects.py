"""Requests that may break executors.

A request that ran at two losses in a row is suspected to be the cause, whether they count against it or that is not
known yet (`circuit_breaker.py` has the rules). Suspects are computed one at a time, so that the innocent are not
counted out with the guilty; one that loses its executor once too often ends with an error instead of breaking executors
for ever.
"""

from scheduler_svc.engine.live_request import LiveRequest

LOSSES_OF_A_SUSPECT = 2


class Suspects:
    """Says which suspect may be computed now; the others are parked here, in order of arrival."""

    def __init__(self) -> None:
        self.parked: list[LiveRequest] = []
        self._current: LiveRequest | None = None

    @property
    def current(self) -> LiveRequest | None:
        """The suspect that may be computed; None: nobody is suspected."""
        return self._current

    def may_run(self, request: LiveRequest) -> bool:
        """Return whether the request may be queued now; if not, it is parked."""
        if not _is_suspect(request) or self._current is request:
            return True
        if self._current is None:
            self._current = request
            return True
        self.parked.append(request)
        self.parked.sort(key=lambda parked: parked.group.arrival)
        return False

    def clear(self, request: LiveRequest) -> LiveRequest | None:
        """The request got a token, or ended; return the next suspect, which may be queued now."""
        if request in self.parked:
            self.parked.remove(request)
        if request is not self._current:
            return None
        self._current = self.parked.pop(0) if self.parked else None
        return self._current

    def absolve(self) -> list[LiveRequest]:
        """Losses were no request's fault; return those who may be queued now: the innocent, and the next suspect."""
        released = [request for request in self.parked if not _is_suspect(request)]
        self.parked = [request for request in self.parked if _is_suspect(request)]
        if self._current is not None and not _is_suspect(self._current):
            self._current = self.parked.pop(0) if self.parked else None
            released += [] if self._current is None else [self._current]
        return released


def _is_suspect(request: LiveRequest) -> bool:
    return request.num_losses + len(request.unclear_losses) >= LOSSES_OF_A_SUSPECT
