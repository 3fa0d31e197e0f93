"""How many requests and tokens may wait, over all tenants and of one. Requests that are being checked count.

A full queue still takes a request within the fair share of its tenant: the limit, divided by weight among the waiting
tenants. The only request of a tenant is always within it. To make room, the newest requests of the tenant that is
furthest above its own share are displaced; but no request that has begun to run, continues a cut answer, or waits
longest of its tenant.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from octavo_shared.errors import QueueFullError
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.engine.held_requests import HeldRequests
from scheduler_svc.engine.settings import EngineSettings
from scheduler_svc.engine.suspects import Suspects


class _Limit(NamedTuple):
    """A limit of the queue, in requests or in tokens, and what tenants use of it.

    Attributes:
        most: The limit for all tenants together.
        num_of: What each tenant uses, requests being checked included.
        num_checked_of: The part of requests being checked.
        size_of: Returns what a group uses.
    """

    most: int
    num_of: Mapping[str, int]
    num_checked_of: Mapping[str, int]
    size_of: Callable[[SequenceGroup], int]

    def without(self, groups: Iterable[SequenceGroup]) -> "_Limit":
        """Return the limit as it is once these groups are gone."""
        num_of = dict(self.num_of)
        for group in groups:
            num_of[group.tenant] -= self.size_of(group)
        return self._replace(num_of=num_of)


class WaitingLimits:
    """Counts the waiting requests, and refuses more than the limits.

    Args:
        queue: Requests that wait for a place in a batch, or for an executor.
        suspects: Requests that are parked.
        held: Requests that wait outside the queue while the fleet is paused.
        settings: The limits.
        retry_after_s: Returns when refused clients are to try again, in seconds.

    Attributes:
        tenants: The quotas of tenants; may be set.
        num_refused: Requests that were refused since the start.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        suspects: Suspects,
        held: HeldRequests,
        settings: EngineSettings,
        retry_after_s: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.tenants = settings.tenants
        self.num_refused = 0
        self._queue = queue
        self._suspects = suspects
        self._held = held
        self._retry_after_s = retry_after_s
        self._num_checked_of: Counter[str] = Counter()  # by tenant

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place in a batch, an executor, or their check; parked and held ones count."""
        return len(self._queue) + len(self._suspects.parked) + len(self._held) + self._num_checked_of.total()

    def num_waiting_of(self, tenant: str) -> int:
        """Return how many of them are a tenant's."""
        num_parked = sum(parked.group.tenant == tenant for parked in self._suspects.parked)
        num_outside = num_parked + self._held.num_of[tenant] + self._num_checked_of[tenant]
        return self._queue.num_waiting_of(tenant) + num_outside

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts that wait; those of parked and held requests count."""
        num_parked_tokens = sum(_num_tokens(parked.group) for parked in self._suspects.parked)
        return self._queue.num_prompt_tokens + num_parked_tokens + self._held.num_tokens_of.total()

    @property
    def most_of_a_tenant(self) -> int:
        """Requests of a tenant that may wait if no other tenant's do."""
        return self.tenants.max_waiting_of(self.settings.max_waiting_requests)

    @property
    def tenants_at_share(self) -> frozenset[str]:
        """Tenants whose next request is refused because the queue is full; empty: it is not."""
        settings, limits = self.settings, list[_Limit]()
        if self.num_waiting >= settings.max_waiting_requests:
            limits.append(self._requests())
        if settings.max_waiting_tokens is not None and self.num_prompt_tokens >= settings.max_waiting_tokens:
            limits.append(self._tokens())
        return frozenset(
            tenant
            for limit in limits
            for tenant, share in self._shares(limit.most, limit.num_of).items()
            if limit.num_of[tenant] + 1 > share
        )

    def require_room(self, tenant: str, num_tokens: int = 1) -> list[tuple[SequenceGroup, QueueFullError]]:
        """Return the groups that a further request of a tenant, with `num_tokens`, displaces, and their errors.

        In an empty queue a prompt of any length may wait.

        Raises: QueueFullError: the request may not wait.
        """
        settings, num_of_tenant = self.settings, self.num_waiting_of(tenant)
        if num_of_tenant >= self.tenants.of(tenant).max_waiting_of(settings.max_waiting_requests):
            self.num_refused += 1
            raise QueueFullError(num_of_tenant, self._retry_after_s(), tenant)
        displaced: list[SequenceGroup] = []
        is_full = self.num_waiting >= settings.max_waiting_requests
        if is_full and not self._make_room(self._requests(), tenant, 1, displaced):
            self.num_refused += 1
            raise QueueFullError(self.num_waiting, self._retry_after_s())
        most, num_waiting_tokens = settings.max_waiting_tokens, self.num_prompt_tokens
        num_left = num_waiting_tokens - sum(map(_num_tokens, displaced))
        is_full = most is not None and num_left > 0 and num_left + num_tokens > most
        if is_full and not self._make_room(self._tokens(), tenant, num_tokens, displaced):
            self.num_refused += 1
            raise QueueFullError(self.num_waiting, self._retry_after_s(), num_waiting_tokens=num_waiting_tokens)
        retry_after_s = self._retry_after_s() if displaced else 0.0
        num_waiting_of = self._queue.num_waiting_of
        return [
            (group, QueueFullError(num_waiting_of(group.tenant), retry_after_s, group.tenant, gives_way=True))
            for group in displaced
        ]

    def _make_room(self, limit: _Limit, tenant: str, num_wanted: int, displaced: list[SequenceGroup]) -> bool:
        """Add groups that make room for a tenant to `displaced`; False: it has its share, or too few can go.

        A request displaces no more than it takes, nor more than its tenant's share, however long the prompt is. A
        request that is being checked keeps a place only within its tenant's share: beyond it, it is refused later.
        """
        limit = limit.without(displaced)
        shares = self._shares(limit.most, {*limit.num_of, tenant})
        num_own = limit.num_of.get(tenant, 0)
        if num_own and num_own + num_wanted > shares[tenant]:
            return False
        num_wanted_of_share = min(num_wanted, shares[tenant] - num_own)
        kept = {
            name: max(num - limit.num_checked_of.get(name, 0), min(num, max(1.0, shares[name])))
            for name, num in limit.num_of.items()
        }
        num_lacking = num_wanted_of_share - max(0.0, limit.most - sum(kept.values()))
        candidates = self._candidates(displaced)
        furthest = [(shares[name] - kept[name], name) for name in candidates]
        heapq.heapify(furthest)
        while num_lacking > 0 and furthest:
            distance, name = heapq.heappop(furthest)  # below 0: it has more than its share
            if distance < 0 and candidates[name]:
                group = candidates[name].pop()
                displaced.append(group)
                num_lacking -= limit.size_of(group)
                heapq.heappush(furthest, (distance + limit.size_of(group), name))
        return num_lacking <= 0

    def _candidates(self, displaced: list[SequenceGroup]) -> dict[str, list[SequenceGroup]]:
        """Return the groups that can still be displaced, by tenant; the newest ones stand last."""
        candidates: dict[str, list[SequenceGroup]] = {}
        for group in self._queue:
            of_tenant = candidates.get(group.tenant)
            if of_tenant is None:
                candidates[group.tenant] = []
            elif not group.has_run and group.continuation is None and group not in displaced:
                of_tenant.append(group)
        return candidates

    def _shares(self, most: int, tenants: Iterable[str]) -> dict[str, float]:
        weights = {name: self.tenants.of(name).share.weight for name in tenants}
        unit = most / sum(weights.values())
        return {name: unit * weight for name, weight in weights.items()}

    def _requests(self) -> _Limit:
        parked = Counter(parked.group.tenant for parked in self._suspects.parked)
        num_of = self._num_checked_of + parked + self._held.num_of
        num_of.update({name: work.num_groups for name, work in self._queue.work.by_tenant().items()})
        return _Limit(self.settings.max_waiting_requests, num_of, self._num_checked_of, lambda _: 1)

    def _tokens(self) -> _Limit:
        """Return the limit of tokens; it must exist."""
        most = self.settings.max_waiting_tokens
        assert most is not None, "any number of tokens may wait"
        num_of = Counter({name: work.num_prompt_tokens for name, work in self._queue.work.by_tenant().items()})
        for parked in self._suspects.parked:
            num_of[parked.group.tenant] += _num_tokens(parked.group)
        num_of.update(self._held.num_tokens_of)
        return _Limit(most, num_of, {}, _num_tokens)

    @contextmanager
    def counting(self, tenant: str) -> Iterator[None]:
        """Let a request of a tenant count as waiting while it is checked."""
        self._num_checked_of[tenant] += 1
        try:
            yield
        finally:
            self._num_checked_of[tenant] -= 1
            self._num_checked_of += Counter()  # forgets tenants with none


def _num_tokens(group: SequenceGroup) -> int:
    return group.num_input_tokens
