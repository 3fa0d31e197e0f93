"""Whole texts as rows of an attention: each has blocks of its own in a scratch cache that all layers share.

A text is computed in one step, so no layer reads what another step or another layer has written.
"""

from collections.abc import Sequence

import numpy as np
import torch

from executor_svc.attention.interface import AttentionMetadata, LayerCache
from octavo_shared.step_wire.step import Int32Array


def text_rows(lengths: Sequence[int], block_size: int, device: torch.device) -> AttentionMetadata:
    """Return where the tokens of some texts are: one text after the other, none padded.

    Args:
        lengths: Tokens of each text.
        block_size: Tokens in a block of the scratch cache.
        device: Of the cache.
    """
    sizes = np.array(lengths, np.int32)
    num_blocks = -(-sizes // block_size)
    first_blocks = np.cumsum(num_blocks) - num_blocks
    tables = (first_blocks[:, None] + np.arange(num_blocks.max())[None]).astype(np.int32)
    slots = np.repeat(first_blocks * block_size, sizes) + positions_of(sizes)
    return AttentionMetadata(
        starts=np.zeros(len(sizes), np.int32),
        lengths=sizes,
        block_tables=tables,
        slot_mapping=torch.from_numpy(slots.astype(np.int64)).to(device),
    )


def positions_of(lengths: Int32Array) -> Int32Array:
    """Return the position of each token in its text, [num_tokens]."""
    begins = np.cumsum(lengths) - lengths
    positions: Int32Array = (np.arange(lengths.sum()) - np.repeat(begins, lengths)).astype(np.int32)
    return positions


class ScratchCache:
    """The keys and values of one layer of some texts; its memory is kept.

    Args:
        block_size: Tokens in a block.
        num_kv_heads: Heads of keys and values.
        head_dim: Numbers of a head.
        dtype: Number format.
        device: Where it lies.
    """

    def __init__(
        self, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self._shape = (block_size, num_kv_heads, head_dim)
        self._dtype, self._device = dtype, device
        self._cache = self._make(0)

    def of_size(self, rows: AttentionMetadata) -> LayerCache:
        """Return a cache with the blocks of some texts; what it holds is left over."""
        num_blocks = int((-(-rows.lengths // self.block_size)).sum())
        if len(self._cache.keys) < num_blocks:
            self._cache = self._make(num_blocks)
        return self._cache

    def _make(self, num_blocks: int) -> LayerCache:
        keys, values = (torch.empty(num_blocks, *self._shape, dtype=self._dtype, device=self._device) for _ in range(2))
        return LayerCache(keys, values)
