"""The last requests that ended, kept for people who ask what became of theirs."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from scheduler_svc.request.life import EndedRequest

NUM_KEPT_REQUESTS = 1000


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

    def add(self, ended: EndedRequest) -> None:
        """Keep a request that has ended."""
        self._requests.pop(ended.request_id, None)
        self._requests[ended.request_id] = ended
        if len(self._requests) > self._capacity:
            self._requests.popitem(last=False)
