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

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from octavo_shared.step_wire.batch_table import IndexArray
from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.core.blocks.prefix_cache import PrefixCache

_NOT_QUEUED = -1


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free; nothing was changed."""


class Dependents(Protocol):
    """What is of use only while the blocks of a pool are cached."""

    def drop(self, names: Sequence[bytes]) -> None:
        """Forget what belongs to blocks with these names, which are evicted."""


class Left(Protocol):
    """Who wants to know which named blocks their last user has left."""

    def want(self, block_ids: IndexArray) -> None:
        """Note such blocks."""


class BlockAllocator:
    """Hands out blocks 0 to num_blocks - 1 and takes them back by reference count.

    The free list is a stack, so that a block that was just freed is the next to be written: it is
    still in the processor's caches. Blocks that hold a cached prefix are given out last.

    Attributes:
        dependents: They are told the names of blocks that are evicted and in no other place; None: there are none.
        left: It is told the cached blocks that their last user leaves; None: nobody is.
    """

    dependents: Dependents | None = None
    left: Left | None = None

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
            if self.left is not None and not goes_first:
                self.left.want(unused[is_registered])
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
        if self.dependents is not None:
            self.dependents.drop(self.prefix_cache.names_here_only(evicted))
        self.prefix_cache.forget(evicted)
        self._push(evicted)

    def forget_names(self) -> None:
        """Let no block be found that has a name: evict those that are cached, and take away the names of the others."""
        if self.prefix_cache is not None:
            if self.num_cached_blocks:
                self._evict(self.num_cached_blocks)
            self.prefix_cache.forget(self.prefix_cache.is_registered.nonzero()[0])

    def drop(self, block_ids: Sequence[int]) -> None:
        """Evict distinct cached blocks, whatever their place in the order."""
        if block_ids:
            assert self.prefix_cache is not None
            index: IndexArray = np.array(block_ids, np.intp)
            self._cached_blocks.remove(index)
            self.prefix_cache.forget(index)
            self._push(index)

    def register(self, hashes: list[bytes], block_ids: list[int]) -> None:
        """Name used blocks that were computed; the lists are parallel, and there must be a prefix cache.

        A cached block with the same content gives its name up: it would be evicted by the age of its former use.
        """
        assert self.prefix_cache is not None
        if others := self.prefix_cache.others_of(hashes, block_ids):
            self.drop([block for block in others if not self.ref_counts[block]])
        self.prefix_cache.register(hashes, block_ids)

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


class EvictionOrder:
    """The cached blocks of a pool of `num_blocks`, in the order in which they are evicted.

    A queue in an array: blocks are appended at its end and evicted from its beginning. Blocks that are unlikely to be
    used again are put at the beginning at once. A block that is used again leaves a stale entry behind, which is
    skipped, so that every operation works on whole arrays.
    """

    def __init__(self, num_blocks: int) -> None:
        # Both ends have room for `num_blocks` entries before stale ones must be dropped.
        self._queue: IndexArray = np.zeros(3 * num_blocks, np.intp)
        self._positions: IndexArray = np.arange(3 * num_blocks)
        self._position_of: IndexArray = np.full(num_blocks, _NOT_QUEUED, np.intp)  # an entry elsewhere is stale
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
        self._position_of[block_ids] = _NOT_QUEUED
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
        self._position_of[first] = _NOT_QUEUED
        self._begin += int(indices[-1]) + 1
        self._num_blocks -= num_blocks
        return first

    def _drop_stale_entries(self) -> None:
        block_ids = self.block_ids
        self._begin = self._end = self._middle
        self._num_blocks = 0
        self.append(block_ids)
