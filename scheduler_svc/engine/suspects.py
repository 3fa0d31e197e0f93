"""Suspects: requests that may break executors, and which of them is tried.

An executor that is lost in the middle of a step was broken by itself, or by a request of that step. To tell these
apart:

- *A bad executor or a bad link* fails with any requests, or now and then. So a loss counts against a request only if
  the executor works without it (`circuit_breaker.py`), and no single loss is proof.
- *A bad neighbour* is in the same step. So a request that was in the steps of two losses in a row is only a suspect.
  Suspects are tried one at a time, each in steps of its own (`SequenceGroup.runs_alone`), and only a loss in such a
  step counts against it. Other requests that lost their executor with it are computed again, and not blamed.
- *A request that breaks executors* breaks each step that computes it alone: with more than `max_losses` such losses in
  a row, it ends with an error. So it costs at most LOSSES_OF_A_SUSPECT + `max_losses` + 1 losses, and the losses that
  are still unclear.

A good request gets its token in its first own step that does not fail by chance, and is cleared. Other suspects wait
only for the prompts of the suspects before them, and at most as many requests are suspects as ran in two steps.
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
        """The suspect that may be computed; None: there is no suspect."""
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
        """Clear a request that got a token, or ended; return the next suspect, which may be queued now; None: none."""
        if request in self.parked:
            self.parked.remove(request)
        if request is not self._current:
            return None
        self._current = self.parked.pop(0) if self.parked else None
        return self._current

    def absolve(self) -> list[LiveRequest]:
        """Release requests that are no suspects after losses were forgotten; return them and the next suspect."""
        released = [request for request in self.parked if not is_suspect(request)]
        self.parked = [request for request in self.parked if is_suspect(request)]
        if self._current is not None and not is_suspect(self._current):
            self._current = self.parked.pop(0) if self.parked else None
            released += [] if self._current is None else [self._current]
        return released


def is_suspect(request: LiveRequest) -> bool:
    """Return whether a request may be the cause of losses."""
    return request.num_losses + len(request.unclear_losses) >= LOSSES_OF_A_SUSPECT
