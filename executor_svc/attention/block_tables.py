"""Block tables for libraries that look at more ids than the row's own blocks.

A library may load whole tiles of keys, which begin before a window, and may check ids that it never follows. Every id
that is not a block of the row becomes the id of the row's nearest block: memory of the row itself.
"""

from typing import Protocol

import numpy as np
import torch

from executor_svc.attention.interface import AttentionMetadata, DecodeBatch, LayerCache
from executor_svc.device.transfer import to_device
from octavo_shared.step_wire.step import Int32Array


class BlockTables(Protocol):
    """The block tables of a step, with only the blocks that their rows have."""

    def under(self, window: int | None) -> torch.Tensor:
        """Return what layers with this window use, [num_rows, max_num_blocks] int32 on the device."""


class StepBlockTables:
    """Tables of any step; made on the host, once for each window that layers ask for."""

    def __init__(self, metadata: AttentionMetadata, cache: LayerCache) -> None:
        self._metadata = metadata
        self._block_size = cache.block_size
        self._device = cache.keys.device
        self._longest = int((metadata.starts + metadata.lengths).max())
        self._tables: dict[int | None, torch.Tensor] = {}

    def under(self, window: int | None) -> torch.Tensor:
        """Return what layers with this window use."""
        if window is not None and window >= self._longest:
            window = None
        tables = self._tables.get(window)
        if tables is None:
            tables = to_device(own_blocks_only(self._metadata, self._block_size, window), self._device)
            self._tables[window] = tables
        return tables


class DecodeBlockTables:
    """Tables of decodes; made on the device, waiting for nothing, at the first use of a plan.

    A CUDA graph has that first use in it, because the plan is made inside of the capture.
    """

    def __init__(self, batch: DecodeBatch, block_size: int) -> None:
        self._batch = batch
        self._block_size = block_size
        self._tables: dict[int | None, torch.Tensor] = {}

    def under(self, window: int | None) -> torch.Tensor:
        """Return what layers with this window use."""
        tables = self._tables.get(window)
        if tables is None:
            tables = self._tables[window] = self._own_blocks_only(window)
        return tables

    def _own_blocks_only(self, window: int | None) -> torch.Tensor:
        num_visible_tokens, block_tables = self._batch.num_visible_tokens, self._batch.block_tables
        firsts = torch.zeros_like(num_visible_tokens) if window is None else (num_visible_tokens - window).clamp(min=0)
        first_blocks, last_blocks = (
            positions.div(self._block_size, rounding_mode="floor")[:, None]
            for positions in (firsts, num_visible_tokens - 1)
        )
        indices = torch.arange(block_tables.shape[1], device=block_tables.device)
        return block_tables.gather(1, indices.clamp(first_blocks, last_blocks))


def own_blocks_only(metadata: AttentionMetadata, block_size: int, window: int | None) -> Int32Array:
    """Return the block tables of a step with only the blocks that the rows still have.

    Args:
        metadata: The step.
        block_size: In tokens.
        window: Positions before the last so many may have no blocks any more; None: all have blocks.

    Returns:
        [num_rows, max_num_blocks].
    """
    firsts = np.zeros_like(metadata.starts) if window is None else np.maximum(metadata.starts + 1 - window, 0)
    lasts = metadata.starts + metadata.lengths - 1
    indices = np.arange(metadata.block_tables.shape[1])
    nearest = np.clip(indices, (firsts // block_size)[:, None], (lasts // block_size)[:, None])
    tables: Int32Array = np.take_along_axis(metadata.block_tables, nearest, axis=1)
    return tables
