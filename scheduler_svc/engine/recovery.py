"""What becomes of the requests of a lost executor: they wait again, unless they seem to break executors.

`scheduler_svc/executors/circuit_breaker.py` has the rules by which a loss counts against a request; `suspects.py` says
what follows from two such losses.
"""

from octavo_shared.errors import LostTooOftenError, OctavoServiceError
from octavo_shared.process.clock import monotonic_s
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.live_requests import LiveRequests
from scheduler_svc.request.life import EventKind, LifeEvent


class Recovery:
    """Takes requests back from planners of lost executors.

    `max_losses`: how often in a row a request may lose its executor in steps that compute nothing else.
    """

    def __init__(
        self,
        fleet: Fleet,
        requests: LiveRequests,
        max_losses: int,
    ) -> None:
        self._fleet = fleet
        self._requests = requests
        self._max_losses = max_losses

    def take_back(self, planner: ExecutorPlanner, address: str, cause: str, *, was_probed: bool = False) -> bool:
        """Queue the groups of a lost executor again, and end requests that lost too many; `cause`: why it was lost.

        Returns whether it is open if a request that got no token there is to blame; see `DriverOwner`.
        """
        now_s, is_open = monotonic_s(), False
        running, computed = set(planner.batch.running), planner.groups_in_flight
        for group in self._fleet.leave(planner):
            request = self._requests.of(group)
            request.life.add(LifeEvent(EventKind.EXECUTOR_LOST, now_s, address, cause=cause))
            if group in running:
                self._fleet.note_loss(group, address)
                request.num_lost_executors += 1
            if group in computed:
                counts = was_probed or _ran_without(planner, request)
                is_open |= not (counts or _got_token(request))
                request.note_loss(address, counts=counts, was_alone=len(computed) == 1)
            if not self._end_if_lost_too_often(request):
                self._requests.enqueue(request)
        return is_open

    def on_probed(self, address: str, *, works: bool) -> None:
        """Decide whether an executor that was lost without a result, or its requests, are to blame for the loss."""
        if not works:
            self._requests.forget_losses(address)
            return
        for request in self._requests.count_losses(address):
            self._end_if_lost_too_often(request)

    def fail_all(self, planner: ExecutorPlanner) -> None:
        """After a bug of ours, end the requests of a planner, without using it any more, and all waiting requests.

        A waiting request may have caused the failure.
        """
        if planner in self._fleet.planners:  # not if `take_back` failed half-way
            self._fleet.forget(planner)
        error = OctavoServiceError("the scheduler failed; its log has the reason")
        for request in list(self._requests.values()):
            if self._fleet.planner_of(request.group) is None:
                self._requests.abort(request, error)

    def _end_if_lost_too_often(self, request: LiveRequest) -> bool:
        """End a request that seems to break executors; return whether it does."""
        if request.num_lone_losses <= self._max_losses:
            return False
        self._requests.abort(request, LostTooOftenError(request.num_lone_losses))
        return True


def _ran_without(planner: ExecutorPlanner, request: LiveRequest) -> bool:
    """Return whether the executor of a planner, now lost, had finished a step before the request came."""
    if not planner.last_processed_step_id:
        return False
    came = _last_came(request)
    return came is not None and (came.step_id or 0) > 1


def _got_token(request: LiveRequest) -> bool:
    """Return whether a request has had a token since it came to the executor that it lost."""
    came, last_token_at_s = _last_came(request), request.times.last_token_at_s
    return came is not None and last_token_at_s is not None and last_token_at_s >= came.at_s


def _last_came(request: LiveRequest) -> LifeEvent | None:
    kinds = (EventKind.ADMITTED, EventKind.SWAPPED_IN)
    return next((event for event in reversed(request.life.events) if event.kind in kinds), None)
