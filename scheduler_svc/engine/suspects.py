"""Requests that may break executors: which ones there are, and which of them is tried.

An executor that is lost in the middle of a step was broken by itself, or by a request of that step. What tells them
apart:

- *A bad executor or a bad link* fails whatever runs there, or now and then. So a loss speaks against a request only if
  the executor works without it (`circuit_breaker.py`), and no single loss is proof.
- *A bad neighbour* is in the same step. So a request that was in the steps of two losses in a row is a suspect and no
  more. Suspects are tried one at a time, each in steps of its own (`SequenceGroup.runs_alone`), and only a loss in
  such a step counts against it. What it cost others is theirs to compute again, and is not held against them.
- *A request that breaks executors* breaks the step that computes it alone, each time: with more than `max_losses`
  losses suffered alone, in a row, it ends with an error. So it costs at most LOSSES_OF_A_SUSPECT + `max_losses` + 1
  losses, and those of which it is not known yet whether they count.

A good request gets its token in the first step of its own that nothing else befalls, and is cleared. The others wait
for no more than the prompts of the suspects before them, and there are at most as many of these as ran in two steps.
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
        if not is_suspect(request) or self._current is request:
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
        released = [request for request in self.parked if not is_suspect(request)]
        self.parked = [request for request in self.parked if is_suspect(request)]
        if self._current is not None and not is_suspect(self._current):
            self._current = self.parked.pop(0) if self.parked else None
            released += [] if self._current is None else [self._current]
        return released


def is_suspect(request: LiveRequest) -> bool:
    """Return whether a request may be the cause of losses."""
    return request.num_losses + len(request.unclear_losses) >= LOSSES_OF_A_SUSPECT
