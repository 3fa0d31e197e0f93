"""The blocks of one cache group: its pool, its prefix cache, and the blocks that its sequences still hold.

A cache group without a window keeps every block of a sequence. A cache group with a sliding window keeps the blocks
that the next token sees: a block that falls out of the window is freed, its entry in the block table is stale, and a
prefix is found again wherever the blocks of its last window are cached, on the device or on the host.

All cache groups have blocks of one size. A sequence has as many entries in the block table of each, except while its
prompt is computed: then the blocks of a window come chunk by chunk.

Pure. Read next: `block_manager.py`, which owns all cache groups.
"""

import math
from typing import NamedTuple

import numpy as np

from octavo_shared.step_wire.batch_table import IndexArray
from octavo_shared.step_wire.step import BoolArray, Int32Array
from octavo_shared.step_wire.table_columns import BlockTables
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.block_holders import BlockHolders
from scheduler_svc.core.blocks.host_blocks import HostBlocks
from scheduler_svc.core.blocks.prefix_cache import NO_BLOCKS, PrefixCache
from scheduler_svc.core.limits import CoreLimits, PoolLimits

# Stands for a block that comes from the host.
ON_HOST = -1


class Found(NamedTuple):
    """Where the blocks of a prefix are.

    Attributes:
        blocks: Of the device, ON_HOST where the host has the only copy. [n]
        names_on_host: The names of the latter.
    """

    blocks: IndexArray
    names_on_host: list[bytes]

    @property
    def on_device(self) -> IndexArray:
        """Those on the device."""
        return self.blocks[self.blocks != ON_HOST] if self.names_on_host else self.blocks


NOTHING_FOUND = Found(NO_BLOCKS, [])


class GroupBlocks:
    """Owns the pools of a cache group.

    Args:
        limits: The limits of the planner.
        pool: The sizes of its pools, and its window.
        first_id: The id of its first block on the wire.
        first_host_id: The same of the host pool.
        holders: The fleet's index of registered blocks; None: its blocks are not in it.

    Attributes:
        tables: The block tables of the cache group.
        first_blocks: First block that each slot still holds: earlier ones fell out of the window. [max_num_seqs]
        words: Names the cache group if there are several, to put behind "blocks".
    """

    tables: BlockTables
    words = ""

    def __init__(
        self,
        limits: CoreLimits,
        pool: PoolLimits,
        first_id: int,
        first_host_id: int,
        holders: BlockHolders | None,
    ) -> None:
        self.block_size = limits.block_size
        self.window = pool.sliding_window
        self.first_id = first_id
        self.prefix_cache: PrefixCache | None = None
        if limits.prefix_caching:
            self.prefix_cache = PrefixCache(pool.num_blocks, holders, sends_names=limits.names_blocks)
        self.allocator = BlockAllocator(pool.num_blocks, self.prefix_cache)
        self.host = HostBlocks(
            pool.num_host_blocks,
            first_host_id,
            self.allocator,
            first_id,
            pool.block_bytes,
            keeps_prefixes=limits.host_prefixes,
        )
        self.num_watermark_blocks = math.ceil(pool.num_blocks * limits.watermark)
        # Most tokens of a sequence that have blocks at the same time.
        self.max_resident_tokens = self.window + limits.max_num_batched_tokens if self.window else limits.max_model_len
        self.first_blocks: Int32Array = np.zeros(limits.max_num_seqs, np.int32)

    @property
    def num_free(self) -> int:
        """Blocks that newcomers may take: an empty pool has no watermark."""
        return max(0, self.num_free_beside(0))

    def num_free_beside(self, num_taken: int) -> int:
        """Return `num_free` as it is once `num_taken` blocks more are taken; negative: these are too many."""
        num_free = self.allocator.num_free_blocks - num_taken
        return num_free if num_free == self.allocator.num_blocks else num_free - self.num_watermark_blocks

    def num_new(self, num_tokens: int, num_cached: int) -> int:
        """Return the blocks that a sequence of `num_tokens` takes behind a prefix of `num_cached` blocks."""
        num_tokens = min(num_tokens, self.first_seen(num_cached) * self.block_size + self.max_resident_tokens)
        return max(0, -(-num_tokens // self.block_size) - num_cached)

    def num_saved(self, num_tokens: int, num_cached: int) -> int:
        """Return how many fewer blocks a sequence takes behind a prefix of `num_cached` blocks."""
        return self.num_new(num_tokens, 0) - self.num_new(num_tokens, num_cached) if self.window else num_cached

    # Prefixes ------------------------------------------------------------------------------------

    def first_seen(self, num_blocks: int) -> int:
        """Return the index of the first block that the token behind `num_blocks` blocks sees."""
        return max(0, num_blocks * self.block_size - self.window + 1) // self.block_size if self.window else 0

    def ends(self, hashes: list[bytes], *, with_host: bool) -> BoolArray:
        """Return whether the token behind i blocks finds all blocks that it sees, for each i, [num_hashes + 1] bool."""
        assert self.prefix_cache is not None
        return self.prefix_cache.ends(hashes, self.first_seen, self.host.names if with_host else None)

    def found(self, hashes: list[bytes], *, with_host: bool) -> Found:
        """Return the blocks of a prefix that the token behind it sees; they must be registered."""
        assert self.prefix_cache is not None
        seen = hashes[self.first_seen(len(hashes)) :]
        if not with_host:
            return Found(self.prefix_cache.match(seen, len(seen)), [])
        blocks = self.prefix_cache.blocks_of(seen)
        return Found(blocks, [seen[place] for place in (blocks == ON_HOST).nonzero()[0].tolist()])

    def acquire(self, found: Found) -> None:
        """Count one block table more that names what is on the device: before anything is allocated."""
        if len(on_device := found.on_device):
            self.allocator.acquire(on_device)

    def bring(self, found: Found) -> tuple[IndexArray, list[tuple[int, int]]]:
        """Take blocks for what is on the host only; return all blocks, and the pairs of a swap-in as on the wire.

        They have their names at once: a step moves blocks before it reads any. There must be room.
        """
        if not found.names_on_host:
            return found.blocks, []
        brought = self.allocator.allocate(len(found.names_on_host))
        blocks = found.blocks.copy()
        blocks[blocks == ON_HOST] = brought
        self.allocator.register(found.names_on_host, brought.tolist())
        return blocks, self.host.bring(found.names_on_host, brought)

    # Slots ---------------------------------------------------------------------------------------

    def held(self, slot: int) -> Int32Array:
        """Return a view of the block table of a slot, without blocks that fell out of the window."""
        return self.tables.block_ids[slot, self.first_blocks[slot] : self.tables.counts[slot]]

    def free_below(self, slot: int, first: int, num_prompt_blocks: int) -> None:
        """Free the blocks of a slot before `first`, if it has some.

        Blocks of the output are evicted before all others: few prompts end within an earlier output, and decodes would
        else push the windows at the ends of prompts out of a small pool.
        """
        former, block_ids = int(self.first_blocks[slot]), self.tables.block_ids[slot]
        if first > former:
            middle = min(max(former, num_prompt_blocks), first)
            for begin, end, goes_first in ((former, middle, False), (middle, first, True)):
                if begin < end:
                    self.allocator.free(block_ids[begin:end], goes_first=goes_first)
            self.first_blocks[slot] = first
