"""The order of waiting groups: levels, and fair shares among the tenants of a level.

A `Policy` puts each group on a level. Lower levels are served first; victims of preemption are taken
from the other end of the total order `(level, arrival)`.

`FairShare` orders the tenants of a level by *virtual token counters* (Sheng et al. 2024, "Fairness in
Serving Large Language Models"): the tokens that were computed for a tenant, divided by its weight.
The least counter goes first. The counter of a tenant that starts to wait is lifted to the least counter of
the waiting tenants, so that no tenant gathers credit while none of its groups waits. If no tenant waits, it is
lifted to the counter of the tenant that stopped waiting last.

Pure arithmetic. Read next: `waiting_queue.py`, which keeps the groups.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.tenant_shares import EQUAL_SHARES, TenantShares

# How many counters are kept of tenants that do not wait; the tenant that left longest ago is forgotten first.
MAX_IDLE_COUNTERS = 1024
# A heap with stale entries is rebuilt when it has so many more entries than four for each waiting tenant.
MAX_STALE_ENTRIES = 64


class Policy(Protocol):
    """Puts groups on levels."""

    def level(self, group: SequenceGroup) -> int:
        """Return the level of a group: smaller is served first. It does not change while the group lives."""


class FcfsPolicy:
    """First come, first served."""

    def level(self, group: SequenceGroup) -> int:
        """Return 0: all groups are on one level, where arrival and fair shares decide."""
        return 0


class PriorityPolicy:
    """Strict priorities: a group waits for all groups of smaller `priority`, for ever if they never end."""

    def level(self, group: SequenceGroup) -> int:
        """Return the priority of the request."""
        return group.priority


@dataclass(slots=True)
class _Tenant:
    weight: float
    served: float = 0.0  # tokens per weight
    num_counters: int = 0


@dataclass(slots=True, eq=False)
class VirtualTokenCounter:
    """What a tenant was served on one level: `base`, and what was served since the counter had that value.

    It is a difference, so that `charge` touches one number however many levels the tenant uses, and so that
    a counter that was just lifted equals `floor` to the last bit.
    """

    tenant: _Tenant
    base: float
    served_at_base: float

    @property
    def value(self) -> float:
        """Tokens per weight."""
        return self.base + (self.tenant.served - self.served_at_base)

    def value_after(self, num_tokens: int) -> float:
        """Return the value as if `num_tokens` more were charged."""
        return self.value + num_tokens / self.tenant.weight

    def lift(self, floor: float) -> None:
        """Raise the value to `floor` if it is less."""
        if self.value < floor:
            self.base, self.served_at_base = floor, self.tenant.served


@dataclass(slots=True)
class _Level:
    """The counters of a level. `lowest` is a heap of waiting tenants, by (value, number), with stale entries."""

    counters: dict[str, VirtualTokenCounter] = field(default_factory=dict)
    waiting: dict[str, VirtualTokenCounter] = field(default_factory=dict)
    last_left: VirtualTokenCounter | None = None
    lowest: list[tuple[float, int, str]] = field(default_factory=list)
    entry_of: dict[str, int] = field(default_factory=dict)
    num_entries: int = 0

    def enter(self, tenant: str, counter: VirtualTokenCounter) -> None:
        """A tenant starts to wait."""
        self.waiting[tenant] = counter
        if len(self.lowest) > 4 * len(self.waiting) + MAX_STALE_ENTRIES:
            self.lowest = [entry for entry in self.lowest if self.entry_of.get(entry[2]) == entry[1]]
            heapq.heapify(self.lowest)
        self.num_entries += 1
        self.entry_of[tenant] = self.num_entries
        heapq.heappush(self.lowest, (counter.value, self.num_entries, tenant))

    def leave(self, tenant: str) -> None:
        """A tenant waits no more."""
        self.last_left = self.waiting.pop(tenant)
        del self.entry_of[tenant]

    @property
    def floor(self) -> float:
        """The least counter of the waiting tenants; if none waits, that of the tenant that waited last.

        Counters of waiting tenants only grow: an entry with a smaller value is stale, and is replaced.
        """
        while self.lowest:
            value, number, tenant = self.lowest[0]
            if self.entry_of.get(tenant) != number:
                heapq.heappop(self.lowest)
            elif (now := self.waiting[tenant].value) > value:
                heapq.heapreplace(self.lowest, (now, number, tenant))
            else:
                return value
        return self.last_left.value if self.last_left is not None else 0.0


class FairShare:
    """The virtual token counters, one per tenant and level.

    Levels are lifted apart, because only tenants of one level compete: a tenant that starves on a low
    level must not lend its small counter to newcomers on a high one. A token counts on every level that
    the tenant uses.

    The number of tenants that are known but do not wait is bounded; a forgotten tenant comes back as a new one.

    Args:
        shares: The weights of the tenants.
    """

    def __init__(self, shares: TenantShares = EQUAL_SHARES) -> None:
        self._shares = shares
        self._tenants: dict[str, _Tenant] = {}
        self._levels: dict[int, _Level] = {}
        self._idle: OrderedDict[tuple[int, str], None] = OrderedDict()

    def set_shares(self, shares: TenantShares) -> None:
        """Use other weights for tokens that are computed from now on."""
        self._shares = shares
        for name, tenant in self._tenants.items():
            tenant.weight = shares.of(name).weight

    def enter(self, level: int, tenant: str) -> VirtualTokenCounter:
        """Note that a tenant starts to wait on a level; return its counter, lifted."""
        entered = self._levels.setdefault(level, _Level())
        assert tenant not in entered.waiting, f"tenant {tenant!r} waits already"
        floor = entered.floor
        counter = entered.counters.get(tenant)
        if counter is None:
            counter = entered.counters[tenant] = self._new_counter(tenant)
        else:
            del self._idle[level, tenant]
        counter.lift(floor)
        entered.enter(tenant, counter)
        return counter

    def leave(self, level: int, tenant: str) -> None:
        """Note that a tenant has no waiting group left on a level. Its counter stays, and goes on counting."""
        self._levels[level].leave(tenant)
        self._idle[level, tenant] = None
        if len(self._idle) > MAX_IDLE_COUNTERS:
            self._forget(*self._idle.popitem(last=False)[0])

    def value_of(self, level: int, tenant: str) -> float:
        """Return the counter of a tenant on a level, waiting or not; an unknown tenant counts as new."""
        known = self._levels.get(level)
        if known is None:
            return 0.0
        counter = known.counters.get(tenant)
        return known.floor if counter is None else counter.value

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens that are computed for a tenant; tokens of an unknown tenant are not counted."""
        assert num_tokens >= 0
        charged = self._tenants.get(tenant)
        if charged is not None:
            charged.served += num_tokens / charged.weight

    def _new_counter(self, tenant: str) -> VirtualTokenCounter:
        owner = self._tenants.get(tenant)
        if owner is None:
            owner = self._tenants[tenant] = _Tenant(self._shares.of(tenant).weight)
        owner.num_counters += 1
        return VirtualTokenCounter(owner, base=0.0, served_at_base=owner.served)

    def _forget(self, level: int, tenant: str) -> None:
        forgotten = self._levels[level]
        owner = forgotten.counters.pop(tenant).tenant
        owner.num_counters -= 1
        if not owner.num_counters:
            del self._tenants[tenant]
        if not forgotten.counters:
            del self._levels[level]
