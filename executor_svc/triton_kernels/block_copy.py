"""Copies of cache blocks, for all layers in one launch."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from executor_svc.device.transfer import to_device
from octavo_shared.step_wire.step import Int32Array

# 8-byte words that a program copies.
TILE_WORDS: Final = 2048


@triton.jit
def block_copy_kernel(pools, pairs, NUM_WORDS: tl.constexpr, TILE_WORDS: tl.constexpr):
    """Copy a part of one block in one pool; the grid is (pairs, parts of a block, pools)."""
    pool = tl.load(pools + tl.program_id(2)).to(tl.pointer_type(tl.int64))
    pool = tl.multiple_of(pool, 16)
    pair = pairs + tl.program_id(0) * 2
    source = tl.load(pair).to(tl.int64)
    destination = tl.load(pair + 1).to(tl.int64)
    words = tl.program_id(1) * TILE_WORDS + tl.arange(0, TILE_WORDS)
    is_word = words < NUM_WORDS
    copied = tl.load(pool + source * NUM_WORDS + words, mask=is_word)
    tl.store(pool + destination * NUM_WORDS + words, copied, mask=is_word)


class BlockCopier:
    """Copies blocks within each of some pools. Made once; the pools must stay where they are.

    Args:
        pools: All keys and values, each [num_blocks, ...], contiguous, equal in shape and dtype, on one device; the
            size of a block must be a multiple of 16 bytes.
    """

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        first = pools[0]
        num_bytes = first[0].nbytes
        assert num_bytes % 16 == 0, "a block is a multiple of 16 bytes"
        for pool in pools:
            assert pool.is_contiguous(), "blocks lie one after the other"
            assert pool.data_ptr() % 16 == 0, "pools begin at a multiple of 16 bytes"
            assert (pool.shape, pool.dtype, pool.device) == (first.shape, first.dtype, first.device), "equal pools"
        self._pools = tuple(pools)  # they live as long as their addresses here
        self._addresses = torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64, device=first.device)
        self._num_words = num_bytes // 8

    def copy_blocks(self, pairs: Int32Array) -> None:
        """Copy blocks, without waiting.

        Args:
            pairs: Block ids, [num_pairs, 2]: source, destination. No destination is among the sources, and none is
                there twice: the copies run in any order.
        """
        if not len(pairs):
            return
        on_device = to_device(pairs.astype(np.int32), self._addresses.device)
        num_parts = triton.cdiv(self._num_words, TILE_WORDS)
        block_copy_kernel[(len(pairs), num_parts, len(self._pools))](
            self._addresses, on_device, NUM_WORDS=self._num_words, TILE_WORDS=TILE_WORDS, num_warps=4
        )
