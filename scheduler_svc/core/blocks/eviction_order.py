"""The cached blocks of a pool, in the order in which they are evicted.

A queue in an array: blocks are appended at its end and evicted from its beginning. Blocks that are unlikely to be
used again are put at the beginning at once. A block that is used again leaves a stale entry behind, which is
skipped, so that every operation works on whole arrays.

Pure. Read next: `block_allocator.py`.
"""

import numpy as np

from octavo_shared.step_wire.batch_table import IndexArray

NOT_QUEUED = -1


class EvictionOrder:
    """The unused blocks of a pool of `num_blocks` that hold a prefix; the longest unused one comes first."""

    def __init__(self, num_blocks: int) -> None:
        # Both ends have room for `num_blocks` entries before stale ones must be dropped.
        self._queue: IndexArray = np.zeros(3 * num_blocks, np.intp)
        self._positions: IndexArray = np.arange(3 * num_blocks)
        self._position_of: IndexArray = np.full(num_blocks, NOT_QUEUED, np.intp)  # an entry elsewhere is stale
        self._begin = self._end = self._middle = num_blocks
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    @property
    def block_ids(self) -> IndexArray:
        """The blocks in their order, [n]."""
        queued = self._queue[self._begin : self._end]
        block_ids: IndexArray = queued[self._position_of[queued] == self._positions[self._begin : self._end]]
        return block_ids

    def append(self, block_ids: IndexArray) -> None:
        """Put distinct blocks, none of them queued, at the end."""
        if self._end + len(block_ids) > len(self._queue):
            self._drop_stale_entries()
        end = self._end + len(block_ids)
        self._queue[self._end : end] = block_ids
        self._position_of[block_ids] = self._positions[self._end : end]
        self._end = end
        self._num_blocks += len(block_ids)

    def prepend(self, block_ids: IndexArray) -> None:
        """Put distinct blocks, none of them queued, at the beginning, in their order."""
        if len(block_ids) > self._begin:
            self._drop_stale_entries()
        begin = self._begin - len(block_ids)
        self._queue[begin : self._begin] = block_ids
        self._position_of[block_ids] = self._positions[begin : self._begin]
        self._begin = begin
        self._num_blocks += len(block_ids)

    def remove(self, block_ids: IndexArray) -> None:
        """Remove distinct blocks; all of them must be queued."""
        self._position_of[block_ids] = NOT_QUEUED
        self._num_blocks -= len(block_ids)

    def take_first(self, num_blocks: int) -> IndexArray:
        """Remove and return the first `num_blocks`, at least 1, of at least as many, [num_blocks]."""
        num_entries = num_blocks
        while True:
            entries = self._queue[self._begin : min(self._begin + num_entries, self._end)]
            positions = self._positions[self._begin : self._begin + len(entries)]
            indices = (self._position_of[entries] == positions).nonzero()[0][:num_blocks]
            if len(indices) == num_blocks:
                break
            assert self._begin + num_entries < self._end, "fewer blocks are cached"
            num_entries *= 2
        first: IndexArray = entries[indices]
        self._position_of[first] = NOT_QUEUED
        self._begin += int(indices[-1]) + 1
        self._num_blocks -= num_blocks
        return first

    def _drop_stale_entries(self) -> None:
        block_ids = self.block_ids
        self._begin = self._end = self._middle
        self._num_blocks = 0
        self.append(block_ids)
