"""One go through the line: which core with capacity is the best place for the group that stands first.

Pure. Used by `dispatcher.py`; read next: `capacity.py`.
"""

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scheduler_svc.core.dispatch.block_holders import BlockHolders
from scheduler_svc.core.dispatch.capacity import Capacity, Demand, is_open_to
from scheduler_svc.core.dispatch.inbox import Assignment, Inbox
from scheduler_svc.core.executor_core import ExecutorCore
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.admission import Wait
from scheduler_svc.core.waiting.waiting_queue import Turn

_WORST_COST = 2**62

# What `Capacity.rank` returns.
Ranked = tuple[int, int, int, Capacity]


class Offer(NamedTuple):
    """Where a group is to be computed, and what it takes there."""

    capacity: Capacity
    assignment: Assignment


class Placement:
    """What each core with room can still take.

    Args:
        takers: The inboxes of the cores that groups may be dispatched to.
        holders: Which core holds which registered block.
        server: The inbox of the core that asks; None: none does.
        now_s: Monotonic time, in seconds; -inf: no core is stalled.
    """

    def __init__(self, takers: list[Inbox], holders: BlockHolders, server: Inbox | None, now_s: float) -> None:
        self.server = server
        self.takers = takers
        self._holders = holders
        self._capacities: dict[Inbox, Capacity] = {}
        for inbox in takers:
            core = inbox.core
            is_serving = inbox is server
            if is_serving or (core.batch.num_free_slots > inbox.num_slots and core.stalled_s(now_s) is None):
                self._capacities[inbox] = Capacity.of(inbox, is_serving=is_serving, number=len(self._capacities))
        self._ranked = sorted(map(Capacity.rank, self._capacities.values()))
        self._members = sum(capacity.bit for capacity in self._capacities.values())

    def choose(self, turn: Turn) -> Offer | Wait:
        """Return where a group is to be computed that stands first in line, or how it waits.

        A group that has output goes on at an executor of the kind that made it, if one has room, or has it as soon as
        its next step is sent: only there it gets the tokens that it would have had.
        """
        if preferred := self.preferred(turn):
            offer = self._choose(turn, preferred)
            return offer if isinstance(offer, Offer) else Wait.SKIPPED
        return self._choose(turn, self._ranked)

    def preferred(self, turn: Turn) -> list[Ranked]:
        """Return the cores that a group goes on at, or waits for; empty: all cores are of one kind to it."""
        alike = self._alike(turn.group) if turn.group.provenance.spans else []
        return [ranked for ranked in alike if self._will_take(ranked[-1], turn)]

    def _alike(self, group: SequenceGroup) -> list[Ranked]:
        """Return the cores that a group prefers if others are of another kind; empty: all are equal to it."""
        numerics = {capacity.core.numerics for *_, capacity in self._ranked}
        if len(numerics) < 2 or (preferred := group.provenance.preferred(group.progress)) not in numerics:
            return []
        return [ranked for ranked in self._ranked if ranked[-1].core.numerics == preferred]

    def _will_take(self, capacity: Capacity, turn: Turn) -> bool:
        """Return whether a core lacks nothing but the budget of the step that it is at, or waits for what is sure."""
        group = turn.group
        if avoids(capacity.core, group, [inbox.core for inbox in self.takers]):
            return False
        demand = Demand.of(group, capacity.core)
        depths = self._holders.depths(demand.block_names, capacity.bit)
        num_cached_blocks = depths[0].num_blocks if depths else 0
        return capacity.with_budget().obstacle(turn, demand, num_cached_blocks) in (None, Wait.SKIPPED)

    def _choose(self, turn: Turn, ranked: Sequence[Ranked]) -> Offer | Wait:
        """Return where a group is to be computed, of some cores, or how it waits."""
        group, kind = turn.group, None
        best: Offer | None = None
        best_cost, waits = (_WORST_COST, 0), set[Wait]()
        is_forked = not group.is_lone and group.is_forked
        for *_, capacity in ranked:
            if is_forked or capacity.inbox.kind is not kind:
                kind = capacity.inbox.kind
                demand = Demand.of(group, capacity.core)
                depths = self._holders.depths(demand.block_names, self._members)
            num_cached_tokens = depths[0].num_blocks * demand.block_size if depths else 0
            if capacity.load + demand.num_tokens - num_cached_tokens >= best_cost[0]:
                break  # not even with the longest prefix; and those behind it have more to compute
            num_cached_blocks = next((depth.num_blocks for depth in depths if depth.members & capacity.bit), 0)
            wait = self._obstacle(capacity, turn, demand, num_cached_blocks)
            if wait is not None:
                waits.add(wait)
                continue
            assignment = demand.assignment(turn, capacity, num_cached_blocks)
            cost = capacity.load + assignment.num_tokens, -capacity.num_free_blocks
            if cost < best_cost:
                best, best_cost = Offer(capacity, assignment), cost
        if best is not None:
            return best
        if Wait.SKIPPED in waits:
            return Wait.SKIPPED
        return Wait.IN_LINE if any(is_open_to(inbox.core, group) for inbox in self.takers) else Wait.NEVER

    def give(self, offer: Offer) -> None:
        """Put a group into the inbox of the core that it was offered to."""
        offer.capacity.give(offer.assignment)
        self._rank_anew(offer.capacity, offer.capacity)

    def look_at_server(self) -> None:
        """The core that asks has admitted a group, or not: see what room it has now.

        What the step computes that it decides goes before newcomers, so its load stays.
        """
        assert self.server is not None
        former = self._capacities[self.server]
        capacity = self._capacities[self.server] = Capacity.of(self.server, is_serving=True, number=former.number)
        capacity.load = former.load
        self._rank_anew(former, capacity)

    def take_back(self, inbox: Inbox, index: int) -> Assignment:
        """Take an assignment out of an inbox; what it took is free again, and so may be the watermark."""
        former = self._capacities.get(inbox)
        assignment = inbox.take(index)
        number = len(self._capacities) if former is None else former.number
        capacity = self._capacities[inbox] = Capacity.of(inbox, is_serving=inbox is self.server, number=number)
        if former is None:
            self._members |= capacity.bit
            bisect.insort(self._ranked, capacity.rank())
        else:
            capacity.load = former.load - assignment.num_tokens - assignment.num_slots
            self._rank_anew(former, capacity)
        return assignment

    def claim(self, assignment: Assignment, cost: int) -> bool:
        """Let the core that asks have an assignment of another one, if it has capacity, and fewer tokens before it.

        Args:
            assignment: Of another inbox.
            cost: Tokens that are computed there before the group has its first one.
        """
        assert self.server is not None
        capacity = self._capacities[self.server]
        if self._is_of_another_kind(assignment.group, capacity.core):
            return False
        demand = Demand.of(assignment.group, capacity.core)
        depths = self._holders.depths(demand.block_names, capacity.bit)
        num_cached_blocks = depths[0].num_blocks if depths else 0
        own = demand.assignment(assignment.turn, capacity, num_cached_blocks)
        if (
            self._obstacle(capacity, assignment.turn, demand, num_cached_blocks) is not None
            or capacity.load + own.num_tokens >= cost
        ):
            return False
        capacity.count(own)
        return True

    def _is_of_another_kind(self, group: SequenceGroup, core: ExecutorCore) -> bool:
        """Return whether a group has output that another kind of executor made than that of a core."""
        preferred = group.provenance.preferred(group.progress) if group.provenance.spans else None
        return preferred is not None and preferred != core.numerics

    def _obstacle(self, capacity: Capacity, turn: Turn, demand: Demand, num_cached_blocks: int) -> Wait | None:
        """Return how a group waits for a room; None: it can go there."""
        group = turn.group
        if group in capacity.inbox.refused:
            return Wait.IN_LINE
        if group.lost_on and avoids(capacity.core, group, [inbox.core for inbox in self.takers]):
            return Wait.SKIPPED
        return capacity.obstacle(turn, demand, num_cached_blocks)

    def _rank_anew(self, former: Capacity, capacity: Capacity) -> None:
        """A room has become better or worse, or stands for a former one."""
        index = 0
        while self._ranked[index][-1] is not former:  # most often it was the first one
            index += 1
        del self._ranked[index]
        bisect.insort(self._ranked, capacity.rank())


def avoids(core: ExecutorCore, group: SequenceGroup, takers: Iterable[ExecutorCore]) -> bool:
    """Return whether a group is not to run on a core after a loss, although it might.

    Who was lost somewhere goes elsewhere next, and to no executor in doubt, as long as there is a choice.

    Args:
        core: That it might run on.
        group: Waits.
        takers: The cores that groups may be dispatched to.
    """
    if not group.lost_on or not (core.is_probing or core.name == group.lost_on):
        return False
    others = (other for other in takers if not other.is_probing and other.name != group.lost_on)
    return any(is_open_to(other, group) for other in others)
