"""How many requests may wait: over all, and of one tenant; and how many tokens. Those being checked count."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.engine.settings import EngineSettings
from scheduler_svc.engine.suspects import Suspects
from shared.errors import QueueFullError


class WaitingLimits:
    """Counts the requests that wait, and refuses more than there may be.

    Args:
        queue: Those that wait for a place in a batch, or for an executor.
        suspects: Those that are parked.
        settings: The limits.
        retry_after_s: Returns when those who are refused are to try again, in seconds.

    Attributes:
        num_refused: Requests that were refused since the start.
    """

    def __init__(
        self, queue: WaitingQueue, suspects: Suspects, settings: EngineSettings, retry_after_s: Callable[[], float]
    ) -> None:
        self.settings = settings
        self.num_refused = 0
        self._queue = queue
        self._suspects = suspects
        self._retry_after_s = retry_after_s
        self._num_checked_of: Counter[str] = Counter()  # by tenant

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place in a batch, an executor, or their tokens; the parked ones count."""
        return len(self._queue) + len(self._suspects.parked) + self._num_checked_of.total()

    @property
    def most_of_a_tenant(self) -> int:
        """Requests of a tenant that may wait if no others do."""
        return min(self.settings.max_waiting_requests, self.settings.max_waiting_requests_per_tenant)

    def require_room(self, tenant: str, num_tokens: int = 1) -> None:
        """Raise QueueFullError if no other request of a tenant, with so many tokens, may wait.

        Where nothing waits, a prompt of any length may.
        """
        settings, num_of_tenant = self.settings, self._queue.num_waiting_of(tenant) + self._num_checked_of[tenant]
        if self.num_waiting >= settings.max_waiting_requests:
            self.num_refused += 1
            raise QueueFullError(self.num_waiting, self._retry_after_s())
        if num_of_tenant >= settings.max_waiting_requests_per_tenant:
            self.num_refused += 1
            raise QueueFullError(num_of_tenant, self._retry_after_s(), tenant)
        limit, num_waiting_tokens = settings.max_waiting_tokens, self._queue.num_prompt_tokens
        if limit is not None and num_waiting_tokens and num_waiting_tokens + num_tokens > limit:
            self.num_refused += 1
            raise QueueFullError(self.num_waiting, self._retry_after_s(), num_waiting_tokens=num_waiting_tokens)

    @contextmanager
    def counting(self, tenant: str) -> Iterator[None]:
        """Let a request of a tenant count as waiting while it is checked."""
        self._num_checked_of[tenant] += 1
        try:
            yield
        finally:
            self._num_checked_of[tenant] -= 1
            self._num_checked_of += Counter()  # forgets tenants with none
