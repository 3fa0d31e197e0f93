"""Which planners of a fleet hold which registered block, by the name of the block.

One index for the fleet, kept by the prefix caches of its planners, so that placing a group looks each of its blocks up
once, however many planners there are. Names are equal where contents are, because the prefix key is the fleet's.

Pure. Read next: `prefix_cache.py`, which names blocks; `dispatcher.py`, which asks.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Every planner, for `depths`.
ALL_CORES = -1


class Depth(NamedTuple):
    """The planners of `members`, a set of bits, hold at least the first `num_blocks` blocks that were asked for."""

    members: int
    num_blocks: int


class BlockHolders:
    """Sets of planners by block name; a planner is a bit, and a set the sum of its bits.

    Attributes:
        holders_of: The set of a name; one that nobody holds is not there.
    """

    def __init__(self) -> None:
        self.holders_of: dict[bytes, int] = {}
        self._bits = 0

    def join(self) -> int:
        """Return the bit of a planner that joins."""
        bit = ~self._bits & (self._bits + 1)  # the lowest that is free
        self._bits |= bit
        return bit

    def leave(self, bit: int, names: Sequence[bytes]) -> None:
        """A planner is gone, and with it the blocks that it has registered under these names."""
        for name in names:
            if others := self.holders_of[name] & ~bit:
                self.holders_of[name] = others
            else:
                del self.holders_of[name]
        self._bits &= ~bit

    def depths(self, names: Sequence[bytes], members: int) -> list[Depth]:
        """Return how many of the first blocks are held by whom.

        Args:
            names: Of the blocks of a sequence, from its first one.
            members: The planners that are of interest.

        Returns:
            Deepest first, each set a part of the next one; those that hold nothing are left out.
        """
        depths: list[Depth] = []
        for num_blocks, name in enumerate(names):
            remaining = self.holders_of.get(name, 0) & members
            if remaining != members and num_blocks:
                depths.append(Depth(members, num_blocks))
            members = remaining
            if not members:
                break
        if members and names:
            depths.append(Depth(members, len(names)))
        depths.reverse()
        return depths
