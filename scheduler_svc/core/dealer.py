"""The dealer: gives the first groups in line to the cores that are to compute them.

Groups stand in one line. The first one is dealt to the best of the cores whose next step can admit it: where
fewest tokens are computed before it has its first one (prompt less cached prefix, prefills that run, one token for
each sequence that decodes, what was dealt before), then where most blocks are free. Nobody passes the first one, but
for those that wait for something that is sure to come (`Wait.SKIPPED`).

A dealt group waits in the inbox of its core until the core decides its next step, which is soon. Until then

- it goes back into the line if somebody comes whose turn is before it and who finds no room elsewhere, if the core
  is lost, leaves, or has been at a step for too long;
- another core takes it that has room, and would have its first token sooner.

So order and shares hold for whoever comes later. A core that decides a step is served: the line is dealt out until it
has what it can take. Each call deals a bounded number of groups.

Pure. Read next: `deal.py`, the choice; `room.py`, what a core can take; `waiting_queue.py`, the order of the line.
"""

import math
from collections.abc import Callable, Generator, Iterator

from scheduler_svc.core.admission import MAX_PASSED_GROUPS, Wait
from scheduler_svc.core.block_holders import BlockHolders
from scheduler_svc.core.deal import Deal, Offer
from scheduler_svc.core.executor_core import ExecutorCore
from scheduler_svc.core.inbox import Inbox, Share
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting_queue import Turn, WaitingQueue

# Groups that one call deals out: some 15 microseconds each (docs/benchmarks.md).
MAX_DEALT_GROUPS = 96


class Dealer:
    """Owns the inboxes of a fleet.

    Args:
        queue: The line.
        is_complete: Says whether no other core is expected back.

    Attributes:
        holders: Which core holds which registered block.
        inboxes: One for each core, in the order in which they joined.
        unplaceable: Groups that none of these cores can ever take: they wait for another one, out of the line.
    """

    def __init__(self, queue: WaitingQueue, is_complete: Callable[[], bool] = lambda: True) -> None:
        self.queue = queue
        self._is_complete = is_complete
        self.holders = BlockHolders()
        self.inboxes: list[Inbox] = []
        self.unplaceable: set[SequenceGroup] = set()
        self._takers: list[Inbox] = []
        self._dealt_to: set[ExecutorCore] = set()

    # Cores come and go ---------------------------------------------------------------------------

    def add(self, inbox: Inbox) -> None:
        """A core joins."""
        inbox.kind = next((other.kind for other in self.inboxes if other.kind == inbox.kind), inbox.kind)
        self.inboxes.append(inbox)

    def remove(self, core: ExecutorCore) -> None:
        """A core is gone: what it was dealt stands in line again."""
        inbox = next(inbox for inbox in self.inboxes if inbox.core is core)
        self.inboxes.remove(inbox)
        self._dealt_to.discard(core)
        self._recall(inbox)
        if core.blocks.prefix_cache is not None:
            core.blocks.prefix_cache.leave()

    def takers(self) -> list[Inbox]:
        """Return the inboxes of the cores that groups may be dealt to; all of them if every core is leaving."""
        self._follow_takers()
        return self._takers or self.inboxes

    def withdraw(self, group: SequenceGroup) -> None:
        """Take out a group that waits, wherever it does: nobody wants it any more."""
        for inbox in self.inboxes:
            inbox.take_group(group)
        self.unplaceable.discard(group)
        self.queue.remove(group)

    # Dealing -------------------------------------------------------------------------------------

    def deal(self, now_s: float) -> set[ExecutorCore]:
        """Give the first groups in line to cores that have room; return those cores, which are to look."""
        if self.queue.num_in_line and self.inboxes:
            for _ in self._groups_for(None, now_s):
                raise AssertionError("a group was dealt to nobody")
        return self.take_dealt()

    def serve(self, inbox: Inbox) -> Generator[SequenceGroup]:
        """Yield the groups that a core is to admit in the step that it decides, and deal others out on the way.

        Those that it has not removed from the queue when the walk ends, or is closed, stand in line again.
        """
        inbox.refused.clear()
        offered: list[SequenceGroup] = []
        try:
            for group in self._groups_for(inbox, inbox.core.now_s):
                offered.append(group)
                yield group
        finally:
            for group in offered:
                if group in self.queue:
                    self.queue.release(group)
                    inbox.refused.add(group)
            self._recall(inbox)

    def take_dealt(self) -> set[ExecutorCore]:
        """Return the cores that found something in their inbox since the last call, while others were served."""
        dealt_to, self._dealt_to = self._dealt_to, set()
        return dealt_to

    def place(self, group: SequenceGroup, level: int, now_s: float) -> ExecutorCore | None:
        """Return the core that a group would be dealt to if it stood first in line; None: no core has room."""
        turn = Turn(level, not group.has_run, 0.0, group.arrival, group)
        offer = Deal(self.takers(), self.holders, None, self.judged_at_s(now_s)).choose(turn)
        return offer.room.core if isinstance(offer, Offer) else None

    def judged_at_s(self, now_s: float) -> float:
        """Return the time by which steps are overdue: never for a core that is alone, which takes all."""
        return now_s if len(self.inboxes) > 1 else -math.inf

    def _groups_for(self, server: Inbox | None, now_s: float) -> Iterator[SequenceGroup]:
        """Deal groups out; yield, held, those that the core which asks is to have."""
        takers = self.takers()
        if server is not None and server not in takers:
            return
        now_s = self.judged_at_s(now_s)
        self._recall_stalled(server, now_s)
        deal = Deal(takers, self.holders, server, now_s)
        aside: list[SequenceGroup] = []
        try:
            yield from self._groups_in_line(deal, aside)
            yield from self._groups_of_others(deal)
        finally:
            for group in aside:
                self.queue.release(group)

    def _groups_in_line(self, deal: Deal, aside: list[SequenceGroup]) -> Iterator[SequenceGroup]:
        queue, server = self.queue, deal.server
        for _ in range(MAX_DEALT_GROUPS):
            turn = queue.first_turn()
            if server is not None and server.shares and (turn is None or server.shares[0].turn < turn):
                yield server.take(0).group
                deal.look_at_server()
                continue
            if turn is None:
                return
            offer = deal.choose(turn)
            if offer is Wait.IN_LINE:
                if not self._make_way(deal, turn):
                    return
                continue
            queue.hold(turn.group)
            if isinstance(offer, Offer):
                deal.give(offer)
                if offer.room.inbox is server:
                    server.take_group(turn.group)
                    yield turn.group
                    deal.look_at_server()
                else:
                    self._dealt_to.add(offer.room.core)
            elif offer is Wait.NEVER and self._has_no_hope(turn.group):
                if server is not None:
                    yield turn.group  # for the core to end it
                else:
                    deal.takers[0].put(Share(turn, 0, 0, 0, is_long=False))
                    self._dealt_to.add(deal.takers[0].core)
            elif offer is Wait.NEVER:
                self.unplaceable.add(turn.group)
            else:
                aside.append(turn.group)
                if len(aside) == MAX_PASSED_GROUPS:
                    return

    def _make_way(self, deal: Deal, turn: Turn) -> bool:
        """Put the last group that was dealt out back into the line, if its turn is after this one."""
        inboxes = [inbox for inbox in self.inboxes if inbox.shares and inbox.shares[-1].turn > turn]
        if not inboxes:
            return False
        last = max(inboxes, key=lambda inbox: inbox.shares[-1].turn)
        self.queue.release(deal.take_back(last, -1).group)
        return True

    def _groups_of_others(self, deal: Deal) -> Iterator[SequenceGroup]:
        """Yield groups of other inboxes that have their first token sooner where nobody is left in line."""
        server = deal.server
        while server is not None:
            others = [inbox for inbox in self.inboxes if inbox.shares and inbox is not server]
            if not others:
                return
            busiest = max(others, key=lambda inbox: inbox.core.load)
            share = busiest.shares[0]
            if not deal.claim(share, busiest.core.load + share.num_tokens):
                return
            yield busiest.take(0).group
            deal.look_at_server()

    # Back into the line --------------------------------------------------------------------------

    def _follow_takers(self) -> None:
        """If other cores take groups than before, those that fitted none may fit, and no other has any."""
        takers = [inbox for inbox in self.inboxes if inbox.core.takes_groups]
        if takers == self._takers:
            if self.unplaceable and self._is_complete():
                self._release([group for group in self.unplaceable if group.has_outgrown])
            return
        self._takers = takers
        self._release(list(self.unplaceable))
        for inbox in self.inboxes:
            if not inbox.core.takes_groups:
                self._recall(inbox)

    def _release(self, groups: list[SequenceGroup]) -> None:
        """Groups that fitted no core are to be looked at again."""
        for group in groups:
            self.unplaceable.remove(group)
            self.queue.release(group)

    def _has_no_hope(self, group: SequenceGroup) -> bool:
        """Return whether a group that fits no core fits none that may come: it grew too large for all there will be."""
        return group.has_outgrown and self._is_complete()

    def _recall_stalled(self, server: Inbox | None, now_s: float) -> None:
        """Recall what cores were dealt that have been at a step for too long, if there is another one."""
        for inbox in self.inboxes:
            if inbox.shares and inbox is not server and inbox.core.stalled_s(now_s) is not None:
                self._recall(inbox)

    def _recall(self, inbox: Inbox) -> None:
        while inbox.shares:
            self.queue.release(inbox.take(len(inbox.shares) - 1).group)


class InboxQueue:
    """The queue as one core sees it (`AdmissionQueue`): what it is dealt stands first.

    Args:
        dealer: Of the fleet.
        inbox: Of the core.
    """

    def __init__(self, dealer: Dealer, inbox: Inbox) -> None:
        self._dealer = dealer
        self._inbox = inbox

    def in_order(self) -> Generator[SequenceGroup]:
        """Yield what the core is to admit in the step that it decides now; what it leaves goes back into the line."""
        return self._dealer.serve(self._inbox)

    def add(self, group: SequenceGroup) -> None:
        """Queue a group that was preempted: any core may take it."""
        self._dealer.queue.add(group)

    def remove(self, group: SequenceGroup) -> None:
        """Take out a group that is admitted here, or has ended."""
        self._dealer.queue.remove(group)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens that are computed for a tenant."""
        self._dealer.queue.charge(tenant, num_tokens)
