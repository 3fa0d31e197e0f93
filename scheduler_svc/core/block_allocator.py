"""The pool of KV cache blocks: which are free, and how many block tables name each other one.

Invariants, checked by `check_integrity`:
- every block is either free (reference count 0, on the free list once) or used (count above 0);
- free + used == total.
"""

import numpy as np

from shared.step import Int32Array


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free; nothing was changed."""


class BlockAllocator:
    """Hands out blocks 0 to num_blocks - 1 and takes them back by reference count.

    The free list is a stack, so that a block that was just freed is the next to be written: it is
    still in the processor's caches.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts: Int32Array = np.zeros(num_blocks, np.int32)
        self._free_blocks: Int32Array = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free_blocks = num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody uses."""
        return self._num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that at least one block table names."""
        return self.num_blocks - self._num_free_blocks

    def ref_count(self, block_id: int) -> int:
        """Return how many block tables name the block."""
        return int(self._ref_counts[block_id])

    def allocate(self, num_blocks: int) -> Int32Array:
        """Take blocks from the free list, each with reference count 1; [num_blocks] int32.

        Raises: OutOfBlocksError: fewer are free; nothing was changed.
        """
        if num_blocks > self._num_free_blocks:
            raise OutOfBlocksError(f"{num_blocks} blocks wanted, {self._num_free_blocks} of {self.num_blocks} free")
        self._num_free_blocks -= num_blocks
        top = self._num_free_blocks
        block_ids = self._free_blocks[top : top + num_blocks][::-1].copy()
        self._ref_counts[block_ids] = 1
        return block_ids

    def share(self, block_ids: Int32Array) -> None:
        """Count one more block table that names each of the distinct, used `block_ids`."""
        assert (self._ref_counts[block_ids] > 0).all(), "a free block cannot be shared"
        self._ref_counts[block_ids] += 1

    def free(self, block_ids: Int32Array) -> None:
        """Count one block table less for each of the distinct `block_ids`; free those at count 0."""
        assert (self._ref_counts[block_ids] > 0).all(), "a free block cannot be freed again"
        self._ref_counts[block_ids] -= 1
        freed = block_ids[self._ref_counts[block_ids] == 0]
        top = self._num_free_blocks
        self._free_blocks[top : top + len(freed)] = freed[::-1]
        self._num_free_blocks += len(freed)

    def check_integrity(self) -> None:
        """Assert the invariants of this module."""
        free = self._free_blocks[: self._num_free_blocks]
        assert len(np.unique(free)) == len(free), "a block is on the free list twice"
        assert (self._ref_counts[free] == 0).all(), "a block is free and used"
        assert np.count_nonzero(self._ref_counts) == self.num_used_blocks, "a block is neither free nor used"
        assert (self._ref_counts >= 0).all(), "a reference count is negative"
