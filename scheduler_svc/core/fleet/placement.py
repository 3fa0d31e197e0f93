"""One pass through the line: which planner with capacity is best for the group that stands first.

The cost of a planner is what it computes until the group has its last token, in prompt tokens:

    tokens before it + its tokens that are not cached + rows beside it * its expected tokens * what a row costs

So a group goes where its prefix is cached, unless so many more sequences decode there that computing the prefix again
is cheaper, or having it sent (`transfers.py`): what is sent counts as fewer tokens. The planners learn what a row
costs (`StepCost.row_tokens`). All costs use the median, so that equal planners stay equal. An adapter's load
counts as some tokens.

Pure. Read next: `capacity.py`.
"""

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from octavo_shared.step_wire.step import Adapter
from scheduler_svc.core.blocks.block_holders import BlockHolders, Depth
from scheduler_svc.core.fleet.capacity import Capacity, Footprint, is_open_to, num_expected_tokens
from scheduler_svc.core.fleet.inbox import Assignment, Inbox
from scheduler_svc.core.fleet.transfers import Transfers
from scheduler_svc.core.limits import Role
from scheduler_svc.core.sequence import Placed, Requirements, SequenceGroup
from scheduler_svc.core.step.demand import Wait
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.slotted_things import kinds_of
from scheduler_svc.core.waiting.waiting_queue import Turn

_WORST_COST = 2**62

# What the load of an adapter costs, in tokens: it is read beside steps, while its group waits.
ADAPTER_LOAD_TOKENS = 256

# What `Capacity.rank` returns.
Ranked = tuple[int, int, int, Capacity]


class Offer(NamedTuple):
    """The planner that is best for a group, what the group takes there, and why.

    `sender`: the planner that is to send it a prefix first; None: none is.
    """

    capacity: Capacity
    assignment: Assignment
    placed: Placed
    sender: ExecutorPlanner | None = None


class Placement:
    """The capacities of the planners with room, and the choice among them.

    Args:
        takers: The inboxes of the planners that groups may be dispatched to.
        holders: Which planner holds which registered block.
        server: The inbox of the planner that is served; None: none is.
        now_s: Monotonic time, in seconds; -inf: no planner is stalled.
        transfers: Of the fleet; None: nothing is sent.
    """

    def __init__(
        self,
        takers: list[Inbox],
        holders: BlockHolders,
        server: Inbox | None,
        now_s: float,
        transfers: Transfers | None = None,
    ) -> None:
        self.server = server
        self.takers = takers
        self._holders, self._now_s = holders, now_s
        self._transfers = transfers
        self._sender_bits = 0 if transfers is None else sum(transfers.senders)
        self._kept: list[tuple[Inbox, Assignment]] = []
        # By the first group that waits for room there, and by the first text.
        self._awaited: dict[Inbox, Turn] = {}
        self._awaited_by_text: dict[Inbox, Turn] = {}
        self._any_awaited = False
        learned = sorted(inbox.planner.step_cost.row_tokens for inbox in takers) or [1.0]
        self._row_tokens = learned[(len(learned) - 1) // 2]
        self._has_roles = any(inbox.planner.limits.role is not Role.BOTH for inbox in takers)
        self._capacities: dict[Inbox, Capacity] = {}
        for inbox in takers:
            planner = inbox.planner
            is_serving = inbox is server
            if is_serving or (
                planner.batch.num_free_slots > inbox.num_slots and planner.oldest_step.stalled_s(now_s) is None
            ):
                self._capacities[inbox] = self._capacity(inbox, len(self._capacities))
        self._ranked: dict[int, list[Ranked]] = {}  # by what a row costs
        self._members = sum(capacity.bit for capacity in self._capacities.values())

    def choose(self, turn: Turn) -> Offer | Wait:
        """Return the best planner for a group that stands first in line, or how it waits.

        A group that has output goes on at an executor with the same numerics, if one has room, or will have it as soon
        as its next step is sent: only there does it get the tokens that it would have had.
        """
        if self._transfers is not None and turn.group in self._transfers.of_group:
            return Wait.SKIPPED
        row_cost = self._row_cost(turn.group)
        if preferred := self.preferred(turn):
            offer = self._choose(turn, row_cost, sorted(capacity.rank(row_cost) for capacity in preferred))
            return offer if isinstance(offer, Offer) else Wait.SKIPPED
        if row_cost not in self._ranked:
            self._ranked[row_cost] = sorted(capacity.rank(row_cost) for capacity in self._capacities.values())
        return self._choose(turn, row_cost, self._ranked[row_cost])

    def preferred(self, turn: Turn) -> list[Capacity]:
        """Return planners with a group's numerics that it goes on at, or waits for; empty: any will do."""
        alike = self._alike(turn.group) if turn.group.provenance.spans else []
        return [capacity for capacity in alike if self._will_take(capacity, turn)]

    def _alike(self, group: SequenceGroup) -> list[Capacity]:
        """Return the planners with the group's numerics if others have different ones; empty: any will do."""
        capacities = self._capacities.values()
        numerics = {capacity.planner.numerics for capacity in capacities}
        if len(numerics) < 2 or (preferred := group.provenance.preferred(group.progress)) not in numerics:
            return []
        return [capacity for capacity in capacities if capacity.planner.numerics == preferred]

    def _will_take(self, capacity: Capacity, turn: Turn) -> bool:
        """Return whether a planner can take a group now, with its next step, or after something sure to come."""
        group = turn.group
        if self._leaves_to_others(capacity.planner, group) or avoids(capacity.planner, group, self._staying):
            return False
        if self._any_awaited and self._is_awaited(capacity.inbox, turn):
            return False
        footprint = Footprint.of(group, capacity.planner)
        depths = self._holders.depths(footprint.block_names, capacity.bit)
        num_cached_blocks = depths[0].num_blocks if depths else 0
        return capacity.with_budget().obstacle(turn, footprint, num_cached_blocks) in (None, Wait.SKIPPED)

    def _choose(self, turn: Turn, row_cost: int, ranked: Sequence[Ranked]) -> Offer | Wait:
        """Return the best of some planners for a group, or how it waits."""
        group, kind, is_long = turn.group, None, False
        best: tuple[Capacity, Assignment, Footprint, ExecutorPlanner | None] | None = None
        sources: list[Depth] = []
        other: tuple[int, str] = 0, ""
        best_cost, waits = (_WORST_COST, 0), set[Wait]()
        is_forked = not group.is_lone and group.is_forked
        for rank_cost, *_, capacity in ranked:
            if is_forked or capacity.inbox.kind is not kind:
                kind = capacity.inbox.kind
                footprint = Footprint.of(group, capacity.planner)
                depths = self._holders.depths(footprint.block_names, self._members)
                num_cached_tokens = depths[0].num_blocks * footprint.block_size if depths else 0
                if self._sender_bits and not group.pulls_nothing:
                    sources = self._holders.depths(footprint.block_names, self._sender_bits)
                    if sources:
                        num_cached_tokens = max(num_cached_tokens, sources[0].num_blocks * footprint.block_size)
                # What an encoder has made stays where it is.
                may_move = self._has_roles and group.encoder_token_ids is None
                is_long = may_move and self._is_long(footprint, num_cached_tokens, depths, sources)
            if self._has_roles and self._is_for_other_roles(capacity.planner, group, is_long=is_long):
                waits.add(Wait.IN_LINE)
                continue
            if rank_cost + footprint.num_tokens - num_cached_tokens >= best_cost[0]:
                break  # not even with the longest prefix; and later planners have more to compute
            num_cached_blocks = next((depth.num_blocks for depth in depths if depth.members & capacity.bit), 0)
            wait = self._obstacle(capacity, turn, footprint, num_cached_blocks)
            if wait is not None:
                waits.add(wait)
                continue
            assignment = footprint.assignment(turn, capacity, num_cached_blocks)
            num_tokens, sender = assignment.num_tokens, None
            if sources and sources[0].num_blocks > num_cached_blocks:
                num_tokens, sender = self._with_transfer(num_tokens, num_cached_blocks, sources, footprint, capacity)
            if group.adapter is not None:
                num_tokens += _load_tokens(capacity.planner, group.adapter)
            cost = rank_cost + num_tokens, -capacity.num_free_blocks[0]
            if cost < best_cost:
                if best is not None:
                    other = best_cost[0], best[0].planner.name
                best, best_cost = (capacity, assignment, footprint, sender), cost
            elif not other[1] or cost[0] < other[0]:
                other = cost[0], capacity.planner.name
        if best is not None:
            capacity, assignment, footprint, sender = best
            return Offer(capacity, assignment, _placed(best_cost[0], capacity, footprint, assignment, other), sender)
        if Wait.SKIPPED in waits:
            return Wait.SKIPPED
        return Wait.IN_LINE if any(is_open_to(inbox.planner, group) for inbox in self.takers) else Wait.NEVER

    def _is_long(
        self, footprint: Footprint, num_cached_tokens: int, depths: Sequence[Depth], sources: Sequence[Depth]
    ) -> bool:
        """Return whether a group has a prompt for executors with the role PREFILL, wherever it is placed."""
        limits = self.takers[0].planner.limits
        if footprint.num_tokens - num_cached_tokens > limits.prefill_role_tokens:
            return True
        # What only they have, and cannot send, does not count.
        decoders = sum(
            capacity.bit for capacity in self._capacities.values() if capacity.planner.limits.role is not Role.PREFILL
        )
        there = [depth for depth in depths if depth.members & decoders]
        num_blocks = max((held[0].num_blocks for held in (there, sources) if held), default=0)
        return footprint.num_tokens - num_blocks * footprint.block_size > limits.prefill_role_tokens

    def _is_for_other_roles(self, planner: ExecutorPlanner, group: SequenceGroup, *, is_long: bool) -> bool:
        """Return whether a group is left to executors with another role, of which one can take it."""
        if planner.limits.role is not (Role.DECODE if is_long else Role.PREFILL):
            return False
        others = (inbox.planner for inbox in self.takers if inbox.planner.limits.role is not planner.limits.role)
        return any(is_open_to(other, group) for other in others if not other.is_draining)

    def _with_transfer(
        self,
        num_tokens: int,
        num_cached_blocks: int,
        sources: Sequence[Depth],
        footprint: Footprint,
        capacity: Capacity,
    ) -> tuple[int, ExecutorPlanner | None]:
        """Return what a group of `num_tokens` to compute costs, and who is to send its prefix first; None: nobody."""
        assert self._transfers is not None
        for depth in sources:
            num_sent = (depth.num_blocks - num_cached_blocks) * footprint.block_size
            cost = num_tokens - num_sent + self._transfers.price(num_sent, capacity.planner)
            if num_sent < self._transfers.least_tokens or cost >= num_tokens:
                break
            for bit, sender in self._transfers.senders.items():
                if depth.members & bit and self._transfers.can_send(sender, capacity.planner, self._now_s):
                    return cost, sender
        return num_tokens, None

    def lacks_slot(self, group: SequenceGroup) -> bool:
        """Return whether a group uses slotted things, and no planner with room has slots for them."""
        requires = group.requires
        return bool(kinds_of(requires)) and not any(
            is_open_to(capacity.planner, group) and capacity.obstacle_of_slots(requires) is None
            for capacity in self._capacities.values()
        )

    def num_spare_slots(self, kind: str) -> int:
        """Return how many slots for slotted things of a kind are free on each planner with room that has such slots."""
        nums = [
            pool.num_slots
            - pool.num_in_use
            - sum(kind in kinds_of(given.group) for given in capacity.inbox.assignments)
            for capacity in self._capacities.values()
            for pool in capacity.planner.batch.things.pools
            if pool.kind == kind and pool.num_slots
        ]
        return min(nums, default=0)

    def give(self, offer: Offer) -> None:
        """Put a group into the inbox of the planner that it was offered to."""
        offer.assignment.group.placed = offer.placed
        offer.capacity.give(offer.assignment)
        self._rank_anew(offer.capacity, offer.capacity)

    def keep(self, offer: Offer) -> None:
        """Keep the offered room for a group that is to come from another planner."""
        self._kept.append((offer.capacity.inbox, offer.assignment))
        offer.capacity.count(offer.assignment)
        self._rank_anew(offer.capacity, offer.capacity)

    def await_room(self, turn: Turn) -> bool:
        """Keep the planners that a group waits for from groups behind it; return whether another one may have room.

        From texts behind it only a text keeps them: those need nothing that other groups wait for.
        """
        self._any_awaited = True
        if turn.group.pooling is not None:
            for inbox, capacity in self._capacities.items():
                if is_open_to(capacity.planner, turn.group):
                    self._awaited_by_text.setdefault(inbox, turn)
        # One with assignments is among them even without a free slot: it may be served, and is to admit these.
        others = [
            capacity
            for capacity in self._capacities.values()
            if capacity.inbox not in self._awaited and (capacity.num_free_slots > 0 or capacity.inbox.assignments)
        ]
        awaited = [capacity.inbox for capacity in others if is_open_to(capacity.planner, turn.group)]
        self._awaited.update(dict.fromkeys(awaited, turn))
        return len(awaited) < len(others)

    @property
    def may_take_texts(self) -> bool:
        """Whether there is a planner that no text waits for."""
        return len(self._awaited_by_text) < len(self._capacities)

    def forget_awaited(self) -> None:
        """Let all planners be offered again: a group made way."""
        self._any_awaited = False
        self._awaited.clear()
        self._awaited_by_text.clear()

    def look_at_server(self) -> None:
        """Renew the capacity of the planner that is served, after it has admitted a group or not.

        The tokens of the step that it decides go before newcomers, so its load stays.
        """
        assert self.server is not None
        former = self._capacities[self.server]
        capacity = self._capacities[self.server] = self._capacity(self.server, former.number)
        capacity.load = former.load
        self._rank_anew(former, capacity)

    def take_back(self, inbox: Inbox, index: int) -> Assignment:
        """Take an assignment out of an inbox, and renew the capacity of its planner."""
        former = self._capacities.get(inbox)
        assignment = inbox.take(index)
        number = len(self._capacities) if former is None else former.number
        capacity = self._capacities[inbox] = self._capacity(inbox, number)
        if former is None:
            self._members |= capacity.bit
            for row_cost, ranked in self._ranked.items():
                bisect.insort(ranked, capacity.rank(row_cost))
        else:
            capacity.load = former.load - assignment.num_tokens - assignment.num_slots
            self._rank_anew(former, capacity)
        return assignment

    def claim(self, other: Inbox, turn: Turn) -> bool:
        """Claim the first assignment of another inbox for the served planner, if that can take it at less cost.

        `turn` is the turn of the group at this moment.
        """
        assert self.server is not None
        assignment, there = other.assignments[0], other.planner
        capacity = self._capacities[self.server]
        if self._has_other_numerics(assignment.group, capacity.planner):
            return False
        footprint = Footprint.of(assignment.group, capacity.planner)
        depths = self._holders.depths(footprint.block_names, capacity.bit)
        num_cached_blocks = depths[0].num_blocks if depths else 0
        own = footprint.assignment(turn, capacity, num_cached_blocks)
        row_cost = self._row_cost(assignment.group)
        cost = capacity.cost(row_cost) + own.num_tokens
        cost_there = there.load + there.batch.num_rows * row_cost + assignment.num_tokens
        if (adapter := assignment.group.adapter) is not None:
            cost += _load_tokens(capacity.planner, adapter)
            cost_there += _load_tokens(there, adapter)
        is_obstructed = self._obstacle(capacity, turn, footprint, num_cached_blocks) is not None
        if is_obstructed or cost >= cost_there:
            return False
        assignment.group.placed = _placed(cost, capacity, footprint, own, (cost_there, there.name))
        capacity.count(own)
        return True

    def _capacity(self, inbox: Inbox, number: int) -> Capacity:
        capacity = Capacity.of(inbox, is_serving=inbox is self.server, number=number)
        for other, assignment in self._kept:
            if other is inbox:
                capacity.count(assignment)
        return capacity

    def _row_cost(self, group: SequenceGroup) -> int:
        """Return what a row beside a group costs until the group has its last token, in tokens."""
        return max(1, round(self._row_tokens * num_expected_tokens(group)))

    def _has_other_numerics(self, group: SequenceGroup, planner: ExecutorPlanner) -> bool:
        """Return whether a group has output of other numerics than a planner's."""
        preferred = group.provenance.preferred(group.progress) if group.provenance.spans else None
        return preferred is not None and preferred != planner.numerics

    def _obstacle(self, capacity: Capacity, turn: Turn, footprint: Footprint, num_cached_blocks: int) -> Wait | None:
        """Return how a group waits for a planner; None: it can go there."""
        group = turn.group
        if self._waits_for_load(capacity.planner, footprint.requires):
            return Wait.SKIPPED
        if group in capacity.inbox.refused or (self._any_awaited and self._is_awaited(capacity.inbox, turn)):
            return Wait.IN_LINE
        if (group.lost_on or group.adapter is not None) and avoids(capacity.planner, group, self._staying):
            return Wait.SKIPPED
        if self._leaves_to_others(capacity.planner, group):
            return Wait.IN_LINE
        return capacity.obstacle(turn, footprint, num_cached_blocks)

    def _is_awaited(self, inbox: Inbox, turn: Turn) -> bool:
        """Return whether a group before this one waits for room at a planner; if this one is a text, a text."""
        first = (self._awaited if turn.group.pooling is None else self._awaited_by_text).get(inbox)
        return first is not None and first < turn

    def _waits_for_load(self, planner: ExecutorPlanner, requires: Requirements) -> bool:
        """Return whether a planner would have to load what a group uses, and it or another planner is loading it."""
        if not planner.batch.things.waits_for_load(requires):
            return False
        return any(capacity.planner.batch.things.is_loading(requires) for capacity in self._capacities.values())

    @property
    def _staying(self) -> list[ExecutorPlanner]:
        return [inbox.planner for inbox in self.takers if not inbox.planner.is_draining]

    def _leaves_to_others(self, planner: ExecutorPlanner, group: SequenceGroup) -> bool:
        return planner.is_draining and any(is_open_to(other, group) for other in self._staying)

    def _rank_anew(self, former: Capacity, capacity: Capacity) -> None:
        for row_cost, ranked in self._ranked.items():
            index = 0
            while ranked[index][-1] is not former:  # most often it was the first one
                index += 1
            del ranked[index]
            bisect.insort(ranked, capacity.rank(row_cost))


def _load_tokens(planner: ExecutorPlanner, adapter: Adapter) -> int:
    """Return what the load of an adapter costs at a planner; 0: it is there."""
    return ADAPTER_LOAD_TOKENS * planner.batch.things.adapters.waits_for(adapter)


def _placed(
    cost: int, capacity: Capacity, footprint: Footprint, assignment: Assignment, other: tuple[int, str]
) -> Placed:
    num_tokens, (other_cost, name) = assignment.num_tokens, other
    num_cached_tokens = footprint.num_tokens - num_tokens
    return Placed(capacity.planner.name, cost, num_tokens, num_cached_tokens, capacity.num_rows, name, other_cost)


def avoids(planner: ExecutorPlanner, group: SequenceGroup, takers: Iterable[ExecutorPlanner]) -> bool:
    """Return whether a group is not to run on a planner, because another one can take it.

    A group that lost its executor is placed on another one, and on none in doubt, as long as there is a choice. So is
    one whose adapter an executor could not load.

    Args:
        planner: The planner in question.
        group: The waiting group.
        takers: The planners that groups may be dispatched to.
    """
    if not lacks_adapter(planner, group):
        if not group.lost_on or not (planner.is_probing or planner.name == group.lost_on):
            return False
        takers = (other for other in takers if not other.is_probing and other.name != group.lost_on)
    return any(is_open_to(other, group) and not lacks_adapter(other, group) for other in takers)


def lacks_adapter(planner: ExecutorPlanner, group: SequenceGroup) -> bool:
    """Return whether the executor of a planner could not load the adapter of a group, a short time ago."""
    return group.adapter is not None and bool(planner.batch.things.adapters.error_of(group.adapter))
