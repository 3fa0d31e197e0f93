"""A pool of KV cache blocks: which are free, and how many block tables name each other block.

With a prefix cache, a block that no block table names any more keeps its content, and counts as free, until
the pool needs it: the pool evicts the block that has been unused for longest.

    free ──allocate──> used (reference count >= 1) ──free, last reference──> free     nothing registered
                         ^                                └────────────────> cached   registered
                         └──────────── acquire: a prefix hit ───────────────────┘ │
    free <──────────────────────────── evicted ───────────────────────────────────┘

Invariants, checked by `check_integrity`:
- every block is in exactly one of the three states: free + cached + used == total;
- a cached block is registered, and the prefix cache names it.
"""

import numpy as np

from octavo_shared.step_wire.batch_table import IndexArray
from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.core.blocks.eviction_order import EvictionOrder
from scheduler_svc.core.blocks.prefix_cache import PrefixCache


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free; nothing was changed."""


class BlockAllocator:
    """Hands out blocks 0 to num_blocks - 1 and takes them back by reference count.

    The free list is a stack, so that a block that was just freed is the next to be written: it is
    still in the processor's caches. Blocks that hold a cached prefix are given out last.
    """

    def __init__(self, num_blocks: int, prefix_cache: PrefixCache | None = None) -> None:
        self.num_blocks = num_blocks
        self.ref_counts: Int32Array = np.zeros(num_blocks, np.int32)
        self.prefix_cache = prefix_cache
        self._free_blocks: IndexArray = np.arange(num_blocks - 1, -1, -1)
        self._num_uncached_free_blocks = num_blocks
        self._cached_blocks = EvictionOrder(num_blocks)

    @property
    def num_free_blocks(self) -> int:
        """Unused blocks, cached ones included."""
        return self._num_uncached_free_blocks + len(self._cached_blocks)

    @property
    def num_cached_blocks(self) -> int:
        """Unused blocks that hold a prefix."""
        return len(self._cached_blocks)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that at least one block table names."""
        return self.num_blocks - self.num_free_blocks

    @property
    def num_shared_blocks(self) -> int:
        """Blocks that more than one block table names."""
        return int(np.count_nonzero(self.ref_counts > 1))

    def allocate(self, num_blocks: int) -> Int32Array:
        """Take free blocks, each with reference count 1; [num_blocks] int32.

        Raises: OutOfBlocksError: fewer are free; nothing was changed.
        """
        if num_blocks > self._num_uncached_free_blocks:
            if num_blocks > self.num_free_blocks:
                raise OutOfBlocksError(f"{num_blocks} blocks wanted, {self.num_free_blocks} of {self.num_blocks} free")
            self._evict(num_blocks - self._num_uncached_free_blocks)
        self._num_uncached_free_blocks -= num_blocks
        top = self._num_uncached_free_blocks
        index = self._free_blocks[top : top + num_blocks][::-1]
        self.ref_counts[index] = 1
        return index.astype(np.int32)

    def acquire(self, block_ids: Int32Array | IndexArray, num_references: int = 1) -> None:
        """Count more block tables that name each of the distinct `block_ids`, used or cached."""
        index = block_ids.astype(np.intp, copy=False)
        counts = self.ref_counts[index]
        if np.count_nonzero(counts) < len(counts):
            self._cached_blocks.remove(index[counts == 0])
        self.ref_counts[index] = counts + num_references

    def free(self, block_ids: Int32Array, *, goes_first: bool = False) -> None:
        """Count one block table less for each of the distinct `block_ids`, in the order of a table.

        Blocks at count 0 are free; of a cached prefix, the last block is evicted first. With `goes_first` these blocks
        are evicted before all that are cached already.
        """
        unused = index = block_ids.astype(np.intp)[::-1]
        counts = self.ref_counts[index] - 1
        if np.count_nonzero(counts):  # other block tables name some of them
            assert not np.count_nonzero(counts < 0), "a free block cannot be freed again"
            unused = index[counts == 0]
        self.ref_counts[index] = counts
        if self.prefix_cache is not None:
            is_registered = self.prefix_cache.is_registered[unused]
            put = self._cached_blocks.prepend if goes_first else self._cached_blocks.append
            put(unused[is_registered])
            unused = unused[~is_registered]
        self._push(unused)

    def adopt(self, block_ids: IndexArray) -> None:
        """Count blocks of the empty pool as cached; they hold prefixes, and are evicted in this order."""
        assert self.num_free_blocks == self.num_blocks, "blocks were given out before"
        is_adopted = np.zeros(self.num_blocks, np.bool_)
        is_adopted[block_ids] = True
        free = self._free_blocks[: self._num_uncached_free_blocks]
        rest = free[~is_adopted[free]]
        self._free_blocks[: len(rest)] = rest
        self._num_uncached_free_blocks = len(rest)
        self._cached_blocks.append(block_ids)

    def _evict(self, num_blocks: int) -> None:
        assert self.prefix_cache is not None
        evicted = self._cached_blocks.take_first(num_blocks)
        self.prefix_cache.forget(evicted)
        self._push(evicted)

    def _push(self, block_ids: IndexArray) -> None:
        top = self._num_uncached_free_blocks
        self._free_blocks[top : top + len(block_ids)] = block_ids
        self._num_uncached_free_blocks += len(block_ids)

    @property
    def cached_block_ids(self) -> IndexArray:
        """The unused blocks that hold a prefix, the next one to be evicted first, [num_cached_blocks]."""
        return self._cached_blocks.block_ids

    def check_integrity(self) -> None:
        """Assert the invariants of this module."""
        free = self._free_blocks[: self._num_uncached_free_blocks]
        cached = self._cached_blocks.block_ids
        assert len(cached) == len(self._cached_blocks), "cached blocks are miscounted"
        unused = np.concatenate((free, cached))
        assert len(np.unique(unused)) == len(unused), "a block is free twice"
        assert (self.ref_counts[unused] == 0).all(), "a block is free and used"
        assert np.count_nonzero(self.ref_counts) == self.num_used_blocks, "a block is neither free, cached nor used"
        assert (self.ref_counts >= 0).all(), "a reference count is negative"
        is_registered = self.prefix_cache.is_registered if self.prefix_cache else np.zeros(self.num_blocks, np.bool_)
        assert is_registered[cached].all(), "a cached block holds no prefix"
        assert not is_registered[free].any(), "a free block is registered"
