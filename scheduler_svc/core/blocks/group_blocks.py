"""The blocks of one cache group: its pool, what of it is cached, and what its sequences still hold.

A group of kind FULL keeps every block of a sequence. A group of kind WINDOW keeps those that the next token sees: what
fell out of the window is freed, its entry in the block table is stale, and a prefix is found again wherever the blocks
of its last window are still there.

All groups have blocks of one size, and a sequence has as many entries in the block table of each, but while its prompt
is computed: the blocks of a window come chunk by chunk.

Pure. Read next: `block_manager.py`, which asks all groups.
"""

import math

import numpy as np

from octavo_shared.step_wire.batch_table import IndexArray
from octavo_shared.step_wire.step import BoolArray, Int32Array
from octavo_shared.step_wire.table_columns import BlockTables
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.block_holders import BlockHolders
from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.limits import CoreLimits, PoolLimits


class GroupBlocks:
    """Owns the pool of a group.

    Args:
        limits: Of the planner.
        pool: Of the group.
        first_id: Of its first block on the wire.
        holders: The fleet's index of registered blocks; None: nobody asks where its blocks are.

    Attributes:
        tables: The block tables of the group.
        first_blocks: Blocks of each slot that fell out of the window; those before are not ours any more.
        words: Which of several groups it is, to put behind "blocks".
    """

    tables: BlockTables
    words = ""

    def __init__(self, limits: CoreLimits, pool: PoolLimits, first_id: int, holders: BlockHolders | None) -> None:
        self.block_size = limits.block_size
        self.window = pool.sliding_window
        self.first_id = first_id
        self.prefix_cache: PrefixCache | None = None
        if limits.prefix_caching:
            self.prefix_cache = PrefixCache(pool.num_blocks, holders, sends_names=limits.names_blocks)
        self.allocator = BlockAllocator(pool.num_blocks, self.prefix_cache)
        self.num_watermark_blocks = math.ceil(pool.num_blocks * limits.watermark)
        # Tokens of a sequence that have blocks at once; more only without a window.
        self.max_resident_tokens = self.window + limits.max_num_batched_tokens if self.window else limits.max_model_len
        self.first_blocks: Int32Array = np.zeros(limits.max_num_seqs, np.int32)

    @property
    def num_free(self) -> int:
        """Blocks that newcomers may take: the watermark does not hold back one that would have the pool for itself."""
        return max(0, self.num_free_beside(0))

    def num_free_beside(self, num_taken: int) -> int:
        """Return the same for those that come after so many blocks are taken; negative: too many are."""
        num_free = self.allocator.num_free_blocks - num_taken
        return num_free if num_free == self.allocator.num_blocks else num_free - self.num_watermark_blocks

    def num_new(self, num_tokens: int, num_cached: int) -> int:
        """Return the blocks that a sequence of so many tokens takes behind a prefix of so many blocks."""
        num_tokens = min(num_tokens, self.first_seen(num_cached) * self.block_size + self.max_resident_tokens)
        return max(0, -(-num_tokens // self.block_size) - num_cached)

    def num_saved(self, num_tokens: int, num_cached: int) -> int:
        """Return how many blocks fewer a sequence takes behind a prefix of so many blocks."""
        return self.num_new(num_tokens, 0) - self.num_new(num_tokens, num_cached) if self.window else num_cached

    # Prefixes ------------------------------------------------------------------------------------

    def first_seen(self, num_blocks: int) -> int:
        """Return the first block that the token behind so many blocks sees."""
        return max(0, num_blocks * self.block_size - self.window + 1) // self.block_size if self.window else 0

    def ends(self, hashes: list[bytes]) -> BoolArray:
        """Return behind how many blocks the next token finds all that it sees, [num_hashes + 1] bool."""
        assert self.prefix_cache is not None
        return self.prefix_cache.ends(hashes, self.first_seen)

    def found(self, hashes: list[bytes]) -> IndexArray:
        """Return the blocks of a prefix that the token behind it sees; they are there."""
        assert self.prefix_cache is not None
        return self.prefix_cache.match(hashes[self.first_seen(len(hashes)) :], len(hashes))

    # Slots ---------------------------------------------------------------------------------------

    def held(self, slot: int) -> Int32Array:
        """Return a view of the block table of a slot, without what fell out of the window."""
        return self.tables.block_ids[slot, self.first_blocks[slot] : self.tables.counts[slot]]

    def free_below(self, slot: int, first: int, num_prompt_blocks: int) -> None:
        """Free the blocks of a slot before `first`, if it has some.

        Those behind the prompt's are evicted before all others: a prompt seldom ends in the midst of an output, and
        what decodes would else push the windows at the ends of prompts out of a small pool.
        """
        former, block_ids = int(self.first_blocks[slot]), self.tables.block_ids[slot]
        if first > former:
            middle = min(max(former, num_prompt_blocks), first)
            for begin, end, goes_first in ((former, middle, False), (middle, first, True)):
                if begin < end:
                    self.allocator.free(block_ids[begin:end], goes_first=goes_first)
            self.first_blocks[slot] = first
