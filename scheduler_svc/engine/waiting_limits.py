"""How many requests may wait: over all, and of one tenant; and how many tokens. Those being checked count.

A full queue still takes what is within the fair share of its tenant: the limit, divided by weight among the tenants
that wait. For it the newest requests of the tenants furthest above their own shares are displaced, as far as they
have not begun to run and continue nothing that was cut.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.policy import DEFAULT_WEIGHT
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

    def require_room(self, tenant: str, num_tokens: int = 1) -> list[tuple[SequenceGroup, QueueFullError]]:
        """Return the groups that another request of a tenant, with so many tokens, displaces, and with which error.

        Where nothing waits, a prompt of any length may.

        Raises: QueueFullError: it may not wait.
        """
        settings, num_of_tenant = self.settings, self._queue.num_waiting_of(tenant) + self._num_checked_of[tenant]
        if num_of_tenant >= settings.max_waiting_requests_per_tenant:
            self.num_refused += 1
            raise QueueFullError(num_of_tenant, self._retry_after_s(), tenant)
        displaced: list[SequenceGroup] = []
        if self.num_waiting >= settings.max_waiting_requests:
            nums = self._num_checked_of + Counter(parked.group.tenant for parked in self._suspects.parked)
            nums.update({name: work.num_groups for name, work in self._queue.work.by_tenant().items()})
            displaced = self._displaced(tenant, 1, nums, settings.max_waiting_requests, _one)
            if not displaced:
                self.num_refused += 1
                raise QueueFullError(self.num_waiting, self._retry_after_s())
        limit, num_waiting_tokens = settings.max_waiting_tokens, self._queue.num_prompt_tokens
        num_left = num_waiting_tokens - sum(group.num_prompt_tokens for group in displaced)
        if limit is not None and num_left and num_left + num_tokens > limit:
            nums = Counter({name: work.num_prompt_tokens for name, work in self._queue.work.by_tenant().items()})
            others = self._displaced(tenant, num_tokens, nums, limit, _num_tokens)
            if not others:
                self.num_refused += 1
                raise QueueFullError(self.num_waiting, self._retry_after_s(), num_waiting_tokens=num_waiting_tokens)
            displaced = list(dict.fromkeys([*displaced, *others]))
        retry_after_s = self._retry_after_s() if displaced else 0.0
        return [
            (
                group,
                QueueFullError(self._queue.num_waiting_of(group.tenant), retry_after_s, group.tenant, gives_way=True),
            )
            for group in displaced
        ]

    def _displaced(
        self, tenant: str, num_wanted: int, nums: Mapping[str, int], limit: int, num_of: Callable[[SequenceGroup], int]
    ) -> list[SequenceGroup]:
        """Return who makes room for a tenant in a full queue; empty: it is not within its share, or nobody can.

        Args:
            tenant: Whose request is to wait.
            num_wanted: What it takes of the limit.
            nums: What each tenant has of it.
            limit: What all may have.
            num_of: Says what a group takes.
        """
        weights = {name: self.settings.tenant_weights.get(name, DEFAULT_WEIGHT) for name in {*nums, tenant}}
        unit = limit / sum(weights.values())
        if nums.get(tenant, 0) + num_wanted > unit * weights[tenant]:
            return []
        excess = {name: num - unit * weights[name] for name, num in nums.items()}
        newest = {name: self._newest_of(name) for name, num in excess.items() if num > 0}
        num_lacking, displaced = sum(nums.values()) + num_wanted - limit, list[SequenceGroup]()
        while num_lacking > 0:
            name = max(newest, key=lambda name: excess[name], default=None)
            if name is None or excess[name] <= 0:
                return []
            group = next(newest[name], None)
            if group is None:
                del newest[name]
                continue
            displaced.append(group)
            num_lacking -= num_of(group)
            excess[name] -= num_of(group)
        return displaced

    def _newest_of(self, tenant: str) -> Iterator[SequenceGroup]:
        """Yield the requests of a tenant that can be displaced, newest first."""
        for group in reversed(self._queue):
            if group.tenant == tenant and not group.has_run and group.continuation is None:
                yield group

    @contextmanager
    def counting(self, tenant: str) -> Iterator[None]:
        """Let a request of a tenant count as waiting while it is checked."""
        self._num_checked_of[tenant] += 1
        try:
            yield
        finally:
            self._num_checked_of[tenant] -= 1
            self._num_checked_of += Counter()  # forgets tenants with none


def _one(_: SequenceGroup) -> int:
    return 1


def _num_tokens(group: SequenceGroup) -> int:
    return group.num_prompt_tokens
