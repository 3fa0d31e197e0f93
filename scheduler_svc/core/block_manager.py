"""Which sequence gets which blocks: admission, growth by one token, release.

A block table covers the tokens whose keys and values have been or are being computed. The token
that was just sampled gets its place in the step that feeds it, so a sequence of n tokens in which
all but the last are computed needs a new block exactly when n - 1 is a multiple of the block size.

The watermark keeps a share of the pool back from admissions, so that a sequence that was just
admitted is not preempted by the next growth. Running sequences may use all of it.
"""

import enum
import math

import numpy as np

from scheduler_svc.core.block_allocator import BlockAllocator
from shared.batch_table import BatchTable
from shared.step import Int32Array, no_slots


class AllocStatus(enum.Enum):
    """Whether a sequence can have its blocks."""

    OK = "ok"
    LATER = "later"
    """Not now: others use the blocks."""
    NEVER = "never"
    """The pool is too small."""


class BlockManager:
    """Owns the device pool; the block tables themselves are columns of the batch table.

    Args:
        num_blocks: Blocks of the device pool.
        block_size: Tokens in a block.
        watermark: Share of the pool, 0 to 1, that admissions leave free.
    """

    def __init__(self, num_blocks: int, block_size: int, watermark: float) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.block_size = block_size
        self.num_watermark_blocks = math.ceil(num_blocks * watermark)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold `num_tokens` computed tokens."""
        return -(-num_tokens // self.block_size)

    def can_ever_allocate(self, num_tokens: int) -> bool:
        """Return whether the empty pool holds `num_tokens`."""
        return self.num_blocks_for(num_tokens) <= self.allocator.num_blocks

    def try_allocate(self, num_tokens: int) -> tuple[AllocStatus, Int32Array]:
        """Take the blocks of a sequence of `num_tokens` that is to be admitted.

        Returns the blocks, [ceil(num_tokens / block_size)], with OK; none otherwise. The watermark
        does not hold back a sequence that would have the pool for itself.
        """
        if not self.can_ever_allocate(num_tokens):
            return AllocStatus.NEVER, no_slots()
        num_blocks = self.num_blocks_for(num_tokens)
        reserve = self.num_watermark_blocks if self.allocator.num_used_blocks else 0
        if num_blocks + reserve > self.allocator.num_free_blocks:
            return AllocStatus.LATER, no_slots()
        return AllocStatus.OK, self.allocator.allocate(num_blocks)

    def slots_without_room(self, table: BatchTable, slots: Int32Array) -> Int32Array:
        """Return those of `slots` whose next token needs a new block."""
        full = table.num_scheduled_tokens[slots] == table.num_blocks[slots] * self.block_size
        without_room: Int32Array = slots[full]
        return without_room

    def append_blocks(self, slots: Int32Array) -> Int32Array:
        """Take one block for each of `slots`; return (slot, block id) pairs, [n, 2].

        Raises: OutOfBlocksError: nothing was changed; preempt somebody first.
        """
        return np.stack((slots, self.allocator.allocate(len(slots))), axis=1).astype(np.int32, copy=False)

    def free(self, block_ids: Int32Array) -> None:
        """Give back the block table of a sequence."""
        self.allocator.free(block_ids)
