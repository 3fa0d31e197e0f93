"""Which planners of a fleet hold which registered block, by the name of the block.

The prefix caches of the planners keep this one index, so that placing a group looks up each of its blocks once,
however many planners there are. Blocks with equal contents have equal names, because the fleet has one prefix key.

Pure. Read next: `prefix_cache.py`, which names blocks; `placement.py`, which looks them up.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Every planner, for `depths`.
ALL_PLANNERS = -1


class Depth(NamedTuple):
    """The planners of `members`, a set of bits, hold at least the first `num_blocks` blocks of a sequence."""

    members: int
    num_blocks: int


class BlockHolders:
    """Sets of planners by block name; a planner is a bit, and a set is the sum of its planners' bits.

    Attributes:
        holders_of: The planners that hold a block, by its name; without names that no planner holds.
    """

    def __init__(self) -> None:
        self.holders_of: dict[bytes, int] = {}
        self._bits = 0

    def join(self) -> int:
        """Return the bit of a planner that joins."""
        bit = ~self._bits & (self._bits + 1)  # the lowest free bit
        self._bits |= bit
        return bit

    def leave(self, bit: int, names: Sequence[bytes]) -> None:
        """Remove a planner, and the blocks that it has registered under these names."""
        for name in names:
            if others := self.holders_of[name] & ~bit:
                self.holders_of[name] = others
            else:
                del self.holders_of[name]
        self._bits &= ~bit

    def depths(self, names: Sequence[bytes], members: int) -> list[Depth]:
        """Return which planners hold how many of the first blocks.

        Args:
            names: Names of the blocks of a sequence, from its first one.
            members: The planners to look at.

        Returns:
            Deepest first; each set is part of the next one. Planners that hold no block are left out.
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
