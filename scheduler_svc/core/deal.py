"""One go through the line: which core with room is the best place for the group that stands first.

Pure. Used by `dealer.py`; read next: `room.py`.
"""

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from scheduler_svc.core.admission import Wait
from scheduler_svc.core.block_holders import BlockHolders
from scheduler_svc.core.executor_core import ExecutorCore
from scheduler_svc.core.inbox import Inbox, Share
from scheduler_svc.core.room import Need, Room, is_open_to
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting_queue import Turn

_WORST_COST = 2**62


class Offer(NamedTuple):
    """Where a group is to be computed, and what it takes there."""

    room: Room
    share: Share


class Deal:
    """What each core with room can still take.

    Args:
        takers: The inboxes of the cores that groups may be dealt to.
        holders: Which core holds which registered block.
        server: The inbox of the core that asks; None: none does.
        now_s: Monotonic time, in seconds; -inf: no core is stalled.
    """

    def __init__(self, takers: list[Inbox], holders: BlockHolders, server: Inbox | None, now_s: float) -> None:
        self.server = server
        self.takers = takers
        self._holders = holders
        self._rooms: dict[Inbox, Room] = {}
        for inbox in takers:
            core = inbox.core
            is_serving = inbox is server
            if is_serving or (core.batch.num_free_slots > inbox.num_slots and core.stalled_s(now_s) is None):
                self._rooms[inbox] = Room.of(inbox, is_serving=is_serving, number=len(self._rooms))
        self._ranked = sorted(map(Room.rank, self._rooms.values()))
        self._members = sum(room.bit for room in self._rooms.values())

    def choose(self, turn: Turn) -> Offer | Wait:
        """Return where a group is to be computed that stands first in line, or how it waits."""
        group, kind = turn.group, None
        best: Offer | None = None
        best_cost, waits = (_WORST_COST, 0), set[Wait]()
        is_forked = not group.is_lone and group.is_forked
        for *_, room in self._ranked:
            if is_forked or room.inbox.kind is not kind:
                kind = room.inbox.kind
                need = Need.of(group, room.core)
                depths = self._holders.depths(need.block_names, self._members)
            num_cached_tokens = depths[0].num_blocks * need.block_size if depths else 0
            if room.load + need.num_tokens - num_cached_tokens >= best_cost[0]:
                break  # not even with the longest prefix; and those behind it have more to compute
            num_cached_blocks = next((depth.num_blocks for depth in depths if depth.members & room.bit), 0)
            wait = self._obstacle(room, turn, need, num_cached_blocks)
            if wait is not None:
                waits.add(wait)
                continue
            share = need.share(turn, room, num_cached_blocks)
            cost = room.load + share.num_tokens, -room.num_free_blocks
            if cost < best_cost:
                best, best_cost = Offer(room, share), cost
        if best is not None:
            return best
        if Wait.SKIPPED in waits:
            return Wait.SKIPPED
        return Wait.IN_LINE if any(is_open_to(inbox.core, group) for inbox in self.takers) else Wait.NEVER

    def give(self, offer: Offer) -> None:
        """Put a group into the inbox of the core that it was offered to."""
        offer.room.give(offer.share)
        self._rank_anew(offer.room, offer.room)

    def look_at_server(self) -> None:
        """The core that asks has admitted a group, or not: see what room it has now.

        What the step computes that it decides goes before newcomers, so its load stays.
        """
        assert self.server is not None
        former = self._rooms[self.server]
        room = self._rooms[self.server] = Room.of(self.server, is_serving=True, number=former.number)
        room.load = former.load
        self._rank_anew(former, room)

    def take_back(self, inbox: Inbox, index: int) -> Share:
        """Take a share out of an inbox; what it took is free again, and so may be the watermark."""
        former = self._rooms.get(inbox)
        share = inbox.take(index)
        number = len(self._rooms) if former is None else former.number
        room = self._rooms[inbox] = Room.of(inbox, is_serving=inbox is self.server, number=number)
        if former is None:
            self._members |= room.bit
            bisect.insort(self._ranked, room.rank())
        else:
            room.load = former.load - share.num_tokens - share.num_slots
            self._rank_anew(former, room)
        return share

    def claim(self, share: Share, cost: int) -> bool:
        """Let the core that asks have a share of another one, if it has room, and fewer tokens before it.

        Args:
            share: Of another inbox.
            cost: Tokens that are computed there before the group has its first one.
        """
        assert self.server is not None
        room = self._rooms[self.server]
        need = Need.of(share.group, room.core)
        depths = self._holders.depths(need.block_names, room.bit)
        num_cached_blocks = depths[0].num_blocks if depths else 0
        own = need.share(share.turn, room, num_cached_blocks)
        if self._obstacle(room, share.turn, need, num_cached_blocks) is not None or room.load + own.num_tokens >= cost:
            return False
        room.count(own)
        return True

    def _obstacle(self, room: Room, turn: Turn, need: Need, num_cached_blocks: int) -> Wait | None:
        """Return how a group waits for a room; None: it can go there."""
        group = turn.group
        if group in room.inbox.refused:
            return Wait.IN_LINE
        if group.lost_on and avoids(room.core, group, [inbox.core for inbox in self.takers]):
            return Wait.SKIPPED
        return room.obstacle(turn, need, num_cached_blocks)

    def _rank_anew(self, former: Room, room: Room) -> None:
        """A room has become better or worse, or stands for a former one."""
        index = 0
        while self._ranked[index][-1] is not former:  # most often it was the first one
            index += 1
        del self._ranked[index]
        bisect.insort(self._ranked, room.rank())


def avoids(core: ExecutorCore, group: SequenceGroup, takers: Iterable[ExecutorCore]) -> bool:
    """Return whether a group is not to run on a core after a loss, although it might.

    Who was lost somewhere goes elsewhere next, and to no executor in doubt, as long as there is a choice.

    Args:
        core: That it might run on.
        group: Waits.
        takers: The cores that groups may be dealt to.
    """
    if not group.lost_on or not (core.is_probing or core.name == group.lost_on):
        return False
    others = (other for other in takers if not other.is_probing and other.name != group.lost_on)
    return any(is_open_to(other, group) for other in others)
