"""The last requests that ended, kept for people who ask what became of theirs."""

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from scheduler_svc.engine.request_life import LifeEvent
from scheduler_svc.engine.request_times import RequestTimes
from scheduler_svc.front.request import Request
from shared.grpc_status import status_code

NUM_KEPT_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What is kept of a request: counts, times and events, and no token of it.

    Attributes:
        ended_at_unix_s: When it ended, in seconds since 1970.
        outcome: The finish reason of its first output, or the status code and the message of its error.
        has_failed: Whether it ended with an error.
    """

    request_id: str
    tenant: str
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_losses: int
    times: RequestTimes
    events: tuple[LifeEvent, ...]
    ended_at_unix_s: float
    outcome: str
    has_failed: bool


class EndedRequests(Mapping[str, EndedRequest]):
    """The last requests that ended, by id, the oldest end first. Of two with the same id the later one is kept.

    Args:
        capacity: How many are kept.
    """

    def __init__(self, capacity: int = NUM_KEPT_REQUESTS) -> None:
        self._capacity = capacity
        self._requests: OrderedDict[str, EndedRequest] = OrderedDict()

    def __getitem__(self, request_id: str) -> EndedRequest:
        return self._requests[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def newest(self, num_requests: int) -> list[EndedRequest]:
        """Return the last ones, the newest end first; as many as are kept."""
        newest = reversed(self._requests.values())
        return [request for request, _ in zip(newest, range(num_requests), strict=False)]

    def note_end(self, request: Request) -> None:
        """Keep a request that has ended."""
        self._requests.pop(request.request_id, None)
        self._requests[request.request_id] = _summary(request)
        if len(self._requests) > self._capacity:
            self._requests.popitem(last=False)


def _summary(request: Request) -> EndedRequest:
    group, error = request.group, request.error
    return EndedRequest(
        request_id=request.request_id,
        tenant=group.tenant,
        priority=group.priority,
        num_prompt_tokens=group.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_cached_tokens=group.num_cached_tokens,
        num_preemptions=group.num_preemptions,
        num_losses=request.num_lost_executors,
        times=request.times,
        events=request.life.events,
        ended_at_unix_s=time.time(),
        outcome=request.finish_reason.value if error is None else f"{status_code(error).name}: {error}",
        has_failed=error is not None,
    )
