"""The dispatcher: gives the first groups in line to planners.

Groups stand in one line. The first group is dispatched to the best planner whose next step can admit it: where
least is computed until it has its last token (`placement.py`), then where most blocks of the first cache group are
free. Other groups pass it only if it waits for something that is sure to come (`Wait.SKIPPED`). A group that waits
for a slot of a grammar or an adapter is passed by a group with one only if a slot of each kind stays free for it: even
who shares what others use would keep that in use. One that waits for room is passed by groups for planners that can
never take it; and by texts to be pooled, which need neither slots nor blocks, unless it is a text itself.

A dispatched group waits in the inbox of its planner until the planner decides its next step, which is soon. Until then
a more urgent group may take its place, or another planner the group.

Pure. Read next: `placement.py`, the choice; `moves.py`, what is kept for groups that leave their planner;
`capacity.py`, what a planner can take; `waiting_queue.py`, the order of the line.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator

from scheduler_svc.core.blocks.block_holders import BlockHolders
from scheduler_svc.core.fleet.capacity import is_open_to
from scheduler_svc.core.fleet.inbox import Assignment, Inbox, TenantCap
from scheduler_svc.core.fleet.moves import RoomForMoves, keep_room
from scheduler_svc.core.fleet.placement import Offer, Placement
from scheduler_svc.core.fleet.transfers import Transfers, exchange
from scheduler_svc.core.limits import Role
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.admission import MAX_PASSED_GROUPS
from scheduler_svc.core.step.demand import Obstacle, Wait
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.slotted_things import GrammarSlots, kinds_of
from scheduler_svc.core.waiting.waiting_queue import Turn, WaitingQueue

# Groups that one call dispatches: some 15 microseconds each (docs/benchmarks.md).
MAX_DISPATCHED_GROUPS = 96


class Dispatcher:
    """Owns the inboxes of a fleet.

    Args:
        queue: The line.
        is_complete: Says whether no other planner is expected back.

    Attributes:
        holders: Which planner holds which registered block.
        inboxes: One for each planner, in the order in which they joined.
        transfers: Prefixes on their way between planners.
        num_grammar_waits: Groups that have waited for a grammar slot, so far.
        unplaceable: Groups that no planner can ever take: they wait for another planner, out of the line.
    """

    def __init__(self, queue: WaitingQueue, is_complete: Callable[[], bool] = lambda: True) -> None:
        self.queue = queue
        self._is_complete = is_complete
        self.holders = BlockHolders()
        self.inboxes: list[Inbox] = []
        self.transfers = Transfers()
        self.num_grammar_waits = 0
        self.unplaceable: set[SequenceGroup] = set()
        self._takers: list[Inbox] | None = None  # as last seen; None: look anew
        self._dispatched_to: set[ExecutorPlanner] = set()

    # Planners come and go ---------------------------------------------------------------------------

    def add(self, inbox: Inbox) -> None:
        """Add a planner that joins."""
        inbox.kind = next((other.kind for other in self.inboxes if other.kind == inbox.kind), inbox.kind)
        self.inboxes.append(inbox)
        self.transfers.follow([inbox.planner for inbox in self.inboxes])

    def remove(self, planner: ExecutorPlanner) -> None:
        """Remove a planner that is gone: groups that were dispatched to it stand in line again."""
        inbox = next(inbox for inbox in self.inboxes if inbox.planner is planner)
        self.inboxes.remove(inbox)
        self._dispatched_to.discard(planner)
        self.transfers.forget(planner)
        self.transfers.follow([inbox.planner for inbox in self.inboxes])
        self._recall(inbox)
        if planner.blocks.prefix_cache is not None:
            planner.blocks.prefix_cache.leave()
        self._takers = None
        del inbox.planner  # else the two form a cycle, and megabytes wait for the garbage collector

    def takers(self) -> list[Inbox]:
        """Return the inboxes of the planners that groups may be dispatched to; all of them if every planner is leaving.

        A draining planner is among them for groups that have run and that no other planner can ever take.
        """
        if not any(inbox.planner.takes_groups for inbox in self.inboxes):
            return self.inboxes
        return [inbox for inbox in self.inboxes if inbox.planner.takes_groups or inbox.planner.is_draining]

    def withdraw(self, group: SequenceGroup) -> None:
        """Remove a waiting group, wherever it waits."""
        for inbox in self.inboxes:
            inbox.take_group(group)
        self.transfers.abort(group)
        self.unplaceable.discard(group)
        self.queue.remove(group)

    def forget_refusals(self, planner: ExecutorPlanner) -> None:
        """Let a planner be given again, before its next decision, what it refused: something was loaded for it."""
        next(inbox for inbox in self.inboxes if inbox.planner is planner).refused.clear()

    # Dispatching -------------------------------------------------------------------------------------

    def dispatch(self, now_s: float) -> set[ExecutorPlanner]:
        """Give the first groups in line to planners with room; return the planners that got new groups."""
        if self.queue.num_in_line and self.inboxes:
            former = {inbox.planner: {given.group for given in inbox.assignments} for inbox in self.inboxes}
            for _ in self._groups_for(None, now_s):
                raise AssertionError("a group was yielded, though no planner is served")
            for inbox in self.inboxes:  # a group that made way, and then came back, is not new
                if former[inbox.planner].issuperset(given.group for given in inbox.assignments):
                    self._dispatched_to.discard(inbox.planner)
        return self.take_dispatched()

    def serve(self, inbox: Inbox) -> Generator[SequenceGroup]:
        """Yield the groups that a planner is to admit in the step that it decides, and dispatch others on the way.

        Groups that it has not removed from the queue when the walk ends, or is closed, stand in line again.
        """
        inbox.refused.clear()
        offered: list[SequenceGroup] = []
        try:
            for group in self._groups_for(inbox, inbox.planner.now_s):
                offered.append(group)
                yield group
            if inbox.assignments:  # too many before them wait for loads: given at once again, they would be passed over
                inbox.refused.update(given.group for given in inbox.assignments if not given.group.runs_alone)
        finally:
            for group in offered:
                if group in self.queue:
                    self.queue.release(group)
                    inbox.refused.add(group)
            self._recall(inbox, keeps_solo=True)

    def serve_solo(self, inbox: Inbox) -> Generator[SequenceGroup]:
        """Yield the group in the planner's inbox that is to have the next step for itself; none if it just left."""
        self._follow_takers()
        index = next((i for i, given in enumerate(inbox.assignments) if given.group.runs_alone), None)
        if index is None:
            return
        assignment = inbox.take(index)
        try:
            yield assignment.group
        finally:
            if assignment.group in self.queue:
                self.queue.release(assignment.group)
                inbox.refused.add(assignment.group)

    def take_dispatched(self) -> set[ExecutorPlanner]:
        """Return the planners to which groups were dispatched since the last call."""
        dispatched_to, self._dispatched_to = self._dispatched_to, set()
        if self.transfers.woken:
            dispatched_to |= self.transfers.woken
            self.transfers.woken.clear()
        return dispatched_to

    def place(self, group: SequenceGroup, level: int, now_s: float) -> ExecutorPlanner | None:
        """Return the planner that a group would be dispatched to if it stood first in line; None: none has capacity."""
        offer = self._placement(now_s).choose(self.queue.turn_of(group, level))
        return offer.capacity.planner if isinstance(offer, Offer) else None

    def preferred(self, group: SequenceGroup, level: int, now_s: float) -> list[ExecutorPlanner]:
        """Return the planners that a group is kept for if it stands first in line; see `Placement.preferred`."""
        return [capacity.planner for capacity in self._placement(now_s).preferred(self.queue.turn_of(group, level))]

    def why_capped(self, group: SequenceGroup) -> Obstacle | None:
        """Return why a group waits until other groups of its tenant have ended; None: it does not."""
        cap = self._tenant_cap()
        return None if cap is None else cap.obstacle(group)

    def _tenant_cap(self) -> TenantCap | None:
        shares = self.queue.shares
        return TenantCap(shares, self.inboxes) if shares.has_caps else None

    def _placement(self, now_s: float) -> Placement:
        return self._placement_among(self.takers(), None, now_s)

    def _placement_among(self, takers: list[Inbox], server: Inbox | None, now_s: float) -> Placement:
        judged_at_s = self.judged_at_s(now_s)
        return Placement(takers, self.holders, server, judged_at_s, self.transfers)

    def judged_at_s(self, now_s: float) -> float:
        """Return the time to judge by whether a step is overdue: -inf, never, with one planner."""
        return now_s if len(self.inboxes) > 1 else -math.inf

    def _groups_for(self, server: Inbox | None, now_s: float) -> Iterator[SequenceGroup]:
        """Dispatch groups; yield the groups for the planner that is served, each of them held."""
        self._follow_takers()
        takers = self.takers()
        if server is not None and server not in takers:
            return
        if not self.queue.num_in_line and not any(inbox.assignments for inbox in self.inboxes):
            return  # no group waits, as in most steps
        placement = self._placement_among(takers, server, now_s)
        now_s = self.judged_at_s(now_s)
        self._recall_stalled(server, now_s)
        skipped: list[SequenceGroup] = []
        closed: list[Turn] = []
        try:
            yield from self._groups_in_line(placement, skipped, closed, now_s)
            yield from self._groups_of_others(placement)
        finally:
            for turn in closed:
                self.queue.open_line(turn)
            for group in skipped:
                self.queue.release(group)

    def _groups_in_line(
        self, placement: Placement, skipped: list[SequenceGroup], closed: list[Turn], now_s: float
    ) -> Iterator[SequenceGroup]:
        queue, server, cap = self.queue, placement.server, self._tenant_cap()
        kept: Counter[str] = Counter()  # slots for earlier groups in line that lack some, by kind
        lacks_room = False  # an earlier group in line lacks room: only texts are dispatched
        draining = [inbox.planner for inbox in self.inboxes if inbox.planner.is_draining]
        moves = RoomForMoves(placement, queue, draining, now_s) if draining else None
        for _ in range(MAX_DISPATCHED_GROUPS):
            turn = self._first_turn(cap, closed)
            index = None if server is None else server.first_in_company
            if server is not None and index is not None and (turn is None or server.assignments[index].turn < turn):
                yield server.take(index).group
                placement.look_at_server()
                continue
            if turn is None:
                return
            if turn.group.pooling is None and (
                lacks_room or (moves is not None and turn.is_newcomer and moves.must_be_awaited(turn))
            ):
                lacks_room = True
                queue.hold(turn.group)
                skipped.append(turn.group)
                if not queue.num_texts or len(skipped) == MAX_PASSED_GROUPS:
                    return
                continue
            waits_behind = bool(kept) and any(
                0 < kept[kind] >= placement.num_spare_slots(kind) for kind in kinds_of(turn.group)
            )
            offer = Wait.SKIPPED if waits_behind else placement.choose(turn)
            if isinstance(offer, Offer) and offer.sender is not None:
                offer = self._after_transfer(placement, turn, offer, now_s)
            if offer is Wait.IN_LINE:
                made_way = self._make_way(placement, turn)
                if made_way is None:
                    lacks_room |= not placement.await_room(turn)
                    queue.hold(turn.group)
                    skipped.append(turn.group)
                    takes_texts = queue.num_texts and placement.may_take_texts
                    if (lacks_room and not takes_texts) or len(skipped) == MAX_PASSED_GROUPS:
                        return
                    continue
                placement.forget_awaited()
                for group in skipped:  # a group that was passed over may fit now
                    queue.release(group)
                skipped.clear()
                kept.clear()
                if cap is not None:
                    cap.count(made_way, -1)
                    for other in closed:
                        if other.group.tenant == made_way.group.tenant:
                            queue.open_line(other)
                continue
            queue.hold(turn.group)
            if isinstance(offer, Offer):
                placement.give(offer)
                if cap is not None:
                    cap.count(offer.assignment)
                if offer.capacity.inbox is server and not turn.group.runs_alone:
                    server.take_group(turn.group)
                    yield turn.group
                    placement.look_at_server()
                else:
                    self._dispatched_to.add(offer.capacity.planner)
            elif offer is Wait.NEVER and self.has_no_hope(turn.group):  # for a planner to end it
                if server is not None and _may_go_on(server, turn.group):
                    yield turn.group
                else:
                    inbox = next(inbox for inbox in placement.takers if _may_go_on(inbox, turn.group))
                    inbox.put(Assignment(turn, 0, inbox.planner.blocks.nothing, 0, is_long=False))
                    self._dispatched_to.add(inbox.planner)
            elif offer is Wait.NEVER:
                self.unplaceable.add(turn.group)
            else:
                skipped.append(turn.group)
                if waits_behind or placement.lacks_slot(turn.group):
                    kept.update(kinds_of(turn.group))
                    if kept[GrammarSlots.kind] > placement.num_spare_slots(GrammarSlots.kind):
                        self._note_grammar_wait(turn.group)
                if len(skipped) == MAX_PASSED_GROUPS:
                    return

    def _after_transfer(self, placement: Placement, turn: Turn, offer: Offer, now_s: float) -> Offer | Wait:
        """Let a group wait for its prefix, which is sent from now on, or return what is best for it without."""
        assert offer.sender is not None
        receiver = offer.capacity.planner
        names = receiver.blocks.hash_blocks(turn.group.sequences_to_compute[0])
        if self.transfers.begin(offer.sender, receiver, names, turn.group, now_s):
            return Wait.SKIPPED
        turn.group.pulls_nothing = True
        return placement.choose(turn)

    def _note_grammar_wait(self, group: SequenceGroup) -> None:
        if group.grammar is not None and not group.has_waited_for_grammar_slot:
            self.num_grammar_waits += 1
            group.has_waited_for_grammar_slot = True

    def _first_turn(self, cap: TenantCap | None, closed: list[Turn]) -> Turn | None:
        """Return the first turn of a tenant that is not at its cap; close the lines of tenants that are."""
        while (
            (turn := self.queue.first_turn()) is not None and cap is not None and cap.obstacle(turn.group) is not None
        ):
            self.queue.close_line(turn)
            closed.append(turn)
        return turn

    def _make_way(self, placement: Placement, turn: Turn) -> Assignment | None:
        """Put the dispatched group with the last turn back into the line, and return what it was assigned.

        None: none is after `turn` where the group of that could go.
        """
        inboxes = [
            inbox
            for inbox in self.inboxes
            if inbox.assignments and inbox.assignments[-1].turn > turn and is_open_to(inbox.planner, turn.group)
        ]
        if not inboxes:
            return None
        last = max(inboxes, key=lambda inbox: inbox.assignments[-1].turn)
        assignment = placement.take_back(last, -1)
        self.queue.release(assignment.group)
        return assignment

    def _groups_of_others(self, placement: Placement) -> Iterator[SequenceGroup]:
        """Yield groups of other inboxes that cost less on the planner that is served; the line has no more for it."""
        server = placement.server
        while server is not None:
            others = [inbox for inbox in self.inboxes if inbox.assignments and inbox is not server]
            if not others:
                return
            busiest = max(others, key=lambda inbox: (inbox.planner.batch.num_rows, inbox.planner.load))
            group, level = busiest.assignments[0].group, busiest.assignments[0].turn.level
            if group.runs_alone or not placement.claim(busiest, self.queue.turn_of(group, level)):
                return
            yield busiest.take(0).group
            placement.look_at_server()

    # Draining planners ------------------------------------------------------------------------------

    def wanted_elsewhere(
        self, planner: ExecutorPlanner, groups: Iterable[SequenceGroup], now_s: float
    ) -> Iterator[SequenceGroup]:
        """Yield, in order, the groups of a planner that leave it now: for which other planners have room.

        Of a planner that is not draining, but for prompts, see `_computed_for_others`.
        Groups that stand in line before them come first, and groups that left before and still wait for late tokens.
        """
        if not planner.is_draining:
            yield from self._computed_for_others(planner, groups, now_s)
            return
        for _ in self._groups_for(None, now_s):
            raise AssertionError("a group was yielded, though no planner is served")
        staying = [inbox for inbox in self.inboxes if inbox.planner.takes_groups]
        placement = self._placement_among(staying, None, now_s)
        for emptied in (inbox.planner for inbox in self.inboxes if inbox.planner.is_draining):
            for group in emptied.preempted.groups:
                keep_room(placement, self.queue, emptied, group)
        closed: list[Turn] = []
        first = self._first_turn(self._tenant_cap(), closed)
        for turn in closed:
            self.queue.open_line(turn)
        ahead = None if first is None else (first.level, first.is_newcomer, first.arrival)
        for group in groups:
            if ahead is not None and ahead < (group.order[0], False, group.arrival):
                return
            offer = keep_room(placement, self.queue, planner, group)
            if offer is Wait.IN_LINE:
                return
            if isinstance(offer, Offer) and not self.transfers.sends_ahead(
                planner, offer.capacity.planner, group, now_s
            ):
                yield group

    def _computed_for_others(
        self, planner: ExecutorPlanner, groups: Iterable[SequenceGroup], now_s: float
    ) -> Iterator[SequenceGroup]:
        """Yield, in order, groups of an executor for prompts that have theirs computed and their blocks elsewhere.

        The blocks of each prompt travel from its first chunk on, to where it would be placed then. What cannot be sent
        decodes where it is.
        """
        others = [inbox for inbox in self.takers() if inbox.planner.limits.role is not Role.PREFILL]
        others = [inbox for inbox in others if not inbox.planner.is_draining]
        if not any(exchange(planner, inbox.planner) for inbox in others):
            return
        placement = self._placement_among(others, None, now_s)
        for group in groups:
            is_bound = group.beams is not None or group.pulls_nothing or group not in planner.batch
            if is_bound or group in self.transfers.of_group:
                continue
            offer = keep_room(placement, self.queue, planner, group)
            if offer is Wait.IN_LINE:
                return
            if isinstance(offer, Offer) and self.transfers.has_sent(planner, offer.capacity.planner, group, now_s):
                yield group

    # Back into the line --------------------------------------------------------------------------

    def _follow_takers(self) -> None:
        """If other planners take groups than before, retry unplaceable groups, and recall from leaving planners."""
        takers = [inbox for inbox in self.inboxes if inbox.planner.takes_groups]
        if takers == self._takers:
            if self.unplaceable and self._is_complete():
                self._release([group for group in self.unplaceable if self.has_no_hope(group)])
            return
        self._takers = takers
        self._release(list(self.unplaceable))
        for inbox in self.inboxes:
            if not inbox.planner.takes_groups:
                self._recall(inbox)

    def _release(self, groups: list[SequenceGroup]) -> None:
        for group in groups:
            self.unplaceable.remove(group)
            self.queue.release(group)

    def has_no_hope(self, group: SequenceGroup) -> bool:
        """Return whether a group that fits no planner is too large for every planner that may come.

        A group that no planner may go on with, because their numerics or matchers differ, waits instead.
        """
        if not group.has_outgrown or not self._is_complete():
            return False
        return any(_may_go_on(inbox, group) for inbox in self.takers())

    def _recall_stalled(self, server: Inbox | None, now_s: float) -> None:
        """Recall groups dispatched to planners that have been at a step for too long, if there is another planner."""
        for inbox in self.inboxes:
            if inbox.assignments and inbox is not server and inbox.planner.oldest_step.stalled_s(now_s) is not None:
                self._recall(inbox)

    def recall_all(self) -> None:
        """Let dispatched groups stand in line again: they are to be placed anew."""
        for inbox in self.inboxes:
            self._recall(inbox)

    def _recall(self, inbox: Inbox, *, keeps_solo: bool = False) -> None:
        for index in reversed(range(len(inbox.assignments))):
            if not (keeps_solo and inbox.assignments[index].group.runs_alone):
                self.queue.release(inbox.take(index).group)


def _may_go_on(inbox: Inbox, group: SequenceGroup) -> bool:
    """Return whether a group may go on at a planner if that has the room."""
    return not inbox.planner.admissions.must_not_go_on(group)
