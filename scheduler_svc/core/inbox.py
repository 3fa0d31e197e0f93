"""The inbox of a core: groups that the dealer has given it and that its next step is to admit.

They wait still, held by the queue of the fleet: whoever counts or aborts waiting groups finds them there. An inbox
lasts until its core decides its next step; what that step does not admit goes back into the line, where it stood.

Pure. Read next: `dealer.py`.
"""

import bisect
from operator import attrgetter
from typing import NamedTuple

from scheduler_svc.core.executor_core import ExecutorCore
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting_queue import Turn

_BY_TURN = attrgetter("turn")


class Share(NamedTuple):
    """A group that was dealt to a core, and what it is expected to take there.

    Attributes:
        turn: With which it was dealt.
        num_slots: Slots of the batch.
        num_blocks: Free blocks.
        num_tokens: Tokens to compute.
        is_long: Whether it is a long prefill.
    """

    turn: Turn
    num_slots: int
    num_blocks: int
    num_tokens: int
    is_long: bool

    @property
    def group(self) -> SequenceGroup:
        """Whose share it is."""
        return self.turn.group


class Inbox:
    """What one core was dealt, and the sums of it.

    Args:
        limits: Of the core.

    Attributes:
        core: Whose inbox it is; set as soon as the core is there.
        kind: Equal for cores on which a group needs the same: their blocks are of one size, and live as long. Those of
            one dealer are then the same object.
        shares: In the order of their turns.
        refused: Groups that the core did not admit when it was to; they are not dealt to it before its next decision.
    """

    core: ExecutorCore

    def __init__(self, limits: CoreLimits) -> None:
        num_chunk_tokens = limits.max_num_batched_tokens if limits.sliding_window else 0
        self.kind = limits.block_size, limits.sliding_window + num_chunk_tokens, limits.caches_prefixes
        self.shares: list[Share] = []
        self.refused: set[SequenceGroup] = set()
        self.num_slots = self.num_blocks = self.num_tokens = self.num_long = 0

    def __len__(self) -> int:
        return len(self.shares)

    def put(self, share: Share) -> None:
        """Take what was dealt."""
        if not self.shares or self.shares[-1].turn < share.turn:
            self.shares.append(share)
        else:
            bisect.insort(self.shares, share, key=_BY_TURN)
        self._count(share, 1)

    def take(self, index: int) -> Share:
        """Give up the share at an index; return it."""
        share = self.shares.pop(index)
        self._count(share, -1)
        return share

    def take_group(self, group: SequenceGroup) -> None:
        """Give up the share of a group, if it has one here."""
        for index, share in enumerate(self.shares):
            if share.group is group:
                self.take(index)
                return

    def _count(self, share: Share, sign: int) -> None:
        self.num_slots += sign * share.num_slots
        self.num_blocks += sign * share.num_blocks
        self.num_tokens += sign * share.num_tokens
        self.num_long += sign * share.is_long
