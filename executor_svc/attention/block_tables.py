"""Block tables for libraries that look at more ids than the row's own blocks.

A library may load whole tiles of keys, which begin before a window, and may check ids that it never follows. Every id
that is not a block of the row becomes the id of the row's nearest block: memory of the row itself.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch

from executor_svc.attention.interface import AttentionMetadata, DecodeBatch, LayerCache
from executor_svc.device.transfer import to_device
from octavo_shared.step_wire.step import Int32Array

# The block tables of a step for layers with a window, None: without, [num_rows, max_num_blocks] int32 on the device.
TablesUnder = Callable[[int | None], torch.Tensor]


def step_block_tables(metadata: AttentionMetadata, cache: LayerCache) -> TablesUnder:
    """Return the tables of any step; made on the host, once for each window that layers ask for."""
    longest = int((metadata.starts + metadata.lengths).max())

    @functools.cache
    def under(window: int | None) -> torch.Tensor:
        if window is not None and window >= longest:
            return under(None)
        return to_device(own_blocks_only(metadata, cache.block_size, window), cache.keys.device)

    return under


def decode_block_tables(batch: DecodeBatch, block_size: int) -> TablesUnder:
    """Return the tables of decodes; made on the device, waiting for nothing, at the first use of a plan.

    A CUDA graph has that first use in it, because the plan is made inside of the capture.
    """

    @functools.cache
    def under(window: int | None) -> torch.Tensor:
        num_visible_tokens, block_tables = batch.num_visible_tokens, batch.block_tables
        firsts = torch.zeros_like(num_visible_tokens) if window is None else (num_visible_tokens - window).clamp(min=0)
        first_blocks, last_blocks = (
            positions.div(block_size, rounding_mode="floor")[:, None] for positions in (firsts, num_visible_tokens - 1)
        )
        indices = torch.arange(block_tables.shape[1], device=block_tables.device)
        return block_tables.gather(1, indices.clamp(first_blocks, last_blocks))

    return under


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
