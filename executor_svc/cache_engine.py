"""The paged KV cache: one pool of keys and one of values a layer, and copies between blocks.

Which block belongs to whom is the scheduler's business; this module only moves them.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from executor_svc.attention import LayerCache
from shared.errors import InvalidStepError
from shared.step import Int32Array, Step


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one block is, over all layers."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Size of one block over all layers, keys and values together."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def num_blocks_in(self, cache_gib: float) -> int:
        """Return how many whole blocks fit into `cache_gib` GiB."""
        return int(cache_gib * 2**30) // self.bytes_per_block


class CacheEngine:
    """Owns the block pools of all layers.

    Memory comes unwritten: the operating system commits it as blocks are first used, and whatever it
    holds, NaN included, attention must not see.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self._device = device
        pool_shape = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.layers = tuple(
            LayerCache(
                torch.empty(pool_shape, dtype=shape.dtype, device=device),
                torch.empty(pool_shape, dtype=shape.dtype, device=device),
            )
            for _ in range(shape.num_layers)
        )

    def check(self, step: Step) -> None:
        """Raise InvalidStepError unless the block moves of a step can be carried out."""
        if len(step.blocks_to_swap_out) or len(step.blocks_to_swap_in):
            raise InvalidStepError(f"step {step.step_id} swaps blocks, but this executor has no host blocks")
        pairs = step.blocks_to_copy
        outside = pairs[(pairs < 0) | (pairs >= self.num_blocks)]
        if len(outside):
            raise InvalidStepError(
                f"step {step.step_id} copies block {outside[0]}; blocks are 0 to {self.num_blocks - 1}"
            )

    def copy(self, pairs: Int32Array) -> None:
        """Copy blocks in all layers. `pairs` is [n, 2]: source, destination; no block is both."""
        if not len(pairs):
            return
        sources, destinations = torch.from_numpy(pairs.T.astype(np.int64)).to(self._device)
        for layer in self.layers:
            layer.keys[destinations] = layer.keys[sources]
            layer.values[destinations] = layer.values[sources]


def available_memory_bytes() -> int | None:
    """Return the memory that new work can take without swapping, as Linux estimates it; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes_kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return sizes_kib[0] * 1024 if sizes_kib else None
