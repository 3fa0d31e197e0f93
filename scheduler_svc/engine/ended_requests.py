"""The last requests that ended, kept for people who ask about them."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from scheduler_svc.request.life import EndedRequest, RequestKey

NUM_KEPT_REQUESTS = 1000


class EndedRequests(Mapping[RequestKey, EndedRequest]):
    """The last `capacity` requests that ended, by tenant and id, the oldest end first; of equal ids, the last one."""

    def __init__(self, capacity: int = NUM_KEPT_REQUESTS) -> None:
        self._capacity = capacity
        self._requests: OrderedDict[RequestKey, EndedRequest] = OrderedDict()

    def __getitem__(self, key: RequestKey) -> EndedRequest:
        return self._requests[key]

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def named(self, request_id: str, tenant: str | None) -> list[EndedRequest]:
        """Return the request to which a tenant gave an id; `tenant` None: the requests of all tenants."""
        return [one for one in self.values() if one.request_id == request_id and tenant in (None, one.tenant)]

    def newest(self, num_requests: int) -> list[EndedRequest]:
        """Return at most `num_requests`, the newest end first."""
        newest = reversed(self._requests.values())
        return [request for request, _ in zip(newest, range(num_requests), strict=False)]

    def add(self, ended: EndedRequest) -> None:
        """Keep a request that has ended."""
        key = ended.tenant, ended.request_id
        self._requests.pop(key, None)
        self._requests[key] = ended
        if len(self._requests) > self._capacity:
            self._requests.popitem(last=False)
