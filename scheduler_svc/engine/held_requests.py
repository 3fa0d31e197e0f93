"""New requests that wait outside the queue while a fleet is paused until its requests have ended."""

from collections import Counter

from scheduler_svc.engine.live_request import LiveRequest


class HeldRequests:
    """Holds them, in order of arrival, and counts them for the limits of the queue.

    Attributes:
        num_of: Requests, by tenant.
        num_tokens_of: Tokens of their prompts, by tenant.
    """

    def __init__(self) -> None:
        self.num_of: Counter[str] = Counter()
        self.num_tokens_of: Counter[str] = Counter()
        self._requests: dict[LiveRequest, None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: LiveRequest) -> bool:
        return request in self._requests

    def add(self, request: LiveRequest) -> None:
        """Hold a request."""
        self._requests[request] = None
        self._count(request, 1)

    def discard(self, request: LiveRequest) -> None:
        """Hold a request no more, if it is held."""
        if request in self._requests:
            del self._requests[request]
            self._count(request, -1)

    def take(self) -> list[LiveRequest]:
        """Return all, and hold none."""
        taken, self._requests = list(self._requests), {}
        self.num_of.clear()
        self.num_tokens_of.clear()
        return taken

    def _count(self, request: LiveRequest, sign: int) -> None:
        group = request.group
        for counter, number in ((self.num_of, 1), (self.num_tokens_of, group.num_input_tokens)):
            counter[group.tenant] += sign * number
            if not counter[group.tenant]:
                del counter[group.tenant]
