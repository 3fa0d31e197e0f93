"""Orphans: requests that no attached executor can take. They wait for one, and not for ever.

A request is an orphan while no executor is attached; while the attached ones hold shorter sequences, fewer outputs or a
smaller cache than it was accepted for, because no accepted request is cut short; while all have other numerics than it
requires; or while the executors that could hold it are draining or leaving. After `timeout_s` an orphan ends with
UNAVAILABLE, or with RESOURCE_EXHAUSTED if its outputs together have outgrown every cache, where no retry helps. The
clock starts when no executor can take the request, and is reset when one can. So a request that a healthy executor will
get to waits as long as it takes.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from octavo_shared.errors import CacheTooSmallError, OctavoServiceError, UnavailableError
from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.events import Event
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.engine.live_request import LiveRequest

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0


class Orphans:
    """Knows since when requests have been orphans, and ends orphans that wait too long.

    Args:
        fleet: The attached executors.
        waiting: Returns the waiting requests.
        end: Ends a request with an error.
        timeout_s: How long a request may be an orphan.
    """

    def __init__(
        self,
        fleet: Fleet,
        waiting: Callable[[], Iterable[LiveRequest]],
        end: Callable[[LiveRequest, OctavoServiceError], object],
        timeout_s: float,
    ) -> None:
        self.timeout_s = timeout_s
        self._fleet = fleet
        self._waiting = waiting
        self._end = end
        self._since_s: dict[LiveRequest, float] = {}
        self._told: set[LiveRequest] = set()  # orphans that the log has named
        self._unplaceable: set[SequenceGroup] = set()  # when all waiting requests were looked at last
        self._is_stale = False

    def note_change(self) -> None:
        """Let the next look go through all waiting requests: executors have come, or gone, or are to go."""
        self._is_stale = True

    def add(self, request: LiveRequest, now_s: float) -> None:
        """Note a queued request that no attached executor can take."""
        self._since_s[request] = now_s

    def left_s(self, request: LiveRequest, now_s: float) -> float | None:
        """Return how long a request may still wait; None: it was no orphan at the last look."""
        since_s = self._since_s.get(request)
        return None if since_s is None else max(0.0, since_s + self.timeout_s - now_s)

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look(monotonic_s())
            await asyncio.sleep(min(LOOK_INTERVAL_S, self.timeout_s))

    def look(self, now_s: float) -> None:
        """Note the orphans; end requests that have been orphans for too long.

        Very many requests may wait. So all are only looked at when executors have come or gone, or when a request has
        outgrown the attached ones while another executor is expected.
        """
        unplaceable = self._fleet.dispatcher.unplaceable
        if self._is_stale or not unplaceable <= self._unplaceable:
            self._is_stale, former = False, self._since_s
            self._unplaceable = set(unplaceable)
            orphans = [request for request in self._waiting() if not self._fleet.can_take(request.group)]
            self._since_s = {request: former.get(request, now_s) for request in orphans}
            self._warn(orphans)
        late = [request for request, since_s in self._since_s.items() if now_s - since_s >= self.timeout_s]
        for request in late:
            del self._since_s[request]
            if not request.has_ended:
                self._end(request, self._error(request))

    def _warn(self, orphans: list[LiveRequest]) -> None:
        """Log each new orphan once, unless no executor is attached, which has a line of its own."""
        orphans = [request for request in orphans if not self._fleet.can_ever_take(request.group)]
        new = [request for request in orphans if request not in self._told]
        if not (new and self._fleet.planners):
            return
        self._told = set(orphans)
        longest = max(new, key=lambda request: request.group.stop_conditions.accepted_len or 0)
        must_not_go_on = self._fleet.must_not_go_on(longest.group)
        log.warning(
            Event(
                "requests_wait_for_an_equal_executor" if must_not_go_on else "requests_wait_for_a_larger_executor",
                requests=len(new),
                request_id=longest.request_id,
                cause=self._fleet.why_never(longest.group),
                orphan_timeout_s=self.timeout_s,
            )
        )

    def _error(self, request: LiveRequest) -> OctavoServiceError:
        waited = f"within {self.timeout_s:g} s (--orphan-timeout-s)"
        if not self._fleet.planners:
            return UnavailableError(f"no executor was attached {waited}; retry later")
        if self._fleet.can_ever_take(request.group):
            drains = "every executor that can hold the request is draining or leaving the fleet"
            return UnavailableError(f"{drains}; no other executor was attached {waited}; retry later")
        reason = self._fleet.why_never(request.group)
        if self._fleet.must_not_go_on(request.group):
            return UnavailableError(f"{reason}; no such executor was attached {waited}; retry later")
        reason = f"{reason}; no larger one was attached {waited}"
        if self._fleet.lacks_blocks_only(request.group):  # it ends like a request that outgrows the cache while it runs
            return CacheTooSmallError(reason)
        return UnavailableError(f"{reason}; retry later, or request less")
