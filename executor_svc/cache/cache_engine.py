"""The paged KV cache: one pool of keys and one of values a layer, a host pool, and moves between blocks.

Which block belongs to whom is the scheduler's business; this module only moves them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap

import torch

from executor_svc.attention.interface import LayerCache
from executor_svc.cache.swap_stream import swap_stream
from executor_svc.device.transfer import index_to_device, pin
from octavo_shared.step_wire.step import Int32Array, Step

# Blocks of a swap that are gathered on the device at once: all the memory that swapping takes there.
MAX_STAGED_BLOCKS = 64

# Copies blocks in all pools, [num_pairs, 2]: source, destination. No destination is a source.
CopyBlocks = Callable[[Int32Array], None]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one block is, over all layers.

    With `is_one_piece` a block is one piece of memory, keys and values of each layer side by side: decodes
    read scattered blocks faster so. Without, each layer has pools of its own.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    is_one_piece: bool = False

    @property
    def bytes_per_block(self) -> int:
        """Size of one block over all layers, keys and values together."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def num_blocks_in(self, cache_gib: float) -> int:
        """Return how many whole blocks fit into `cache_gib` GiB."""
        return int(cache_gib * 2**30) // self.bytes_per_block


class CacheEngine:
    """Owns the block pools of all layers, on the device and, for swapped sequences, on the host.

    On a CPU memory comes unwritten: the operating system commits it as blocks are first used, and whatever it
    holds, NaN included, attention must not see. On a GPU it holds zeros: flash-attn 3 multiplies what it hides by
    0, which NaN would survive. The host pool beside a GPU is pinned where the system allows it, so that blocks
    move without a stop on the way; that commits all of it at once.

    Args:
        shape: What one block is.
        num_blocks: Blocks of the device pool that sequences get. One more, the last, is for rows that pad a batch.
        num_host_blocks: Blocks of the host pool.
        device: Where the model runs.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, num_host_blocks: int, device: torch.device) -> None:
        self._device = device
        self._swaps = swap_stream(device)
        block_shape = (shape.block_size, shape.num_kv_heads, shape.head_dim)
        self._pools = _make_pools(shape, num_blocks + 1, device)
        self.layers = tuple(starmap(LayerCache, zip(self._pools[::2], self._pools[1::2], strict=True)))
        self._copy_blocks = _copier_of(self._pools)
        # A host block is one piece of memory over all layers: one transfer a block.
        self.host_blocks = torch.empty((num_host_blocks, len(self._pools), *block_shape), dtype=shape.dtype)
        if device.type == "cuda":
            pin(self.host_blocks, device, self)
        num_staged = min(MAX_STAGED_BLOCKS, num_host_blocks)
        # Kept: what is made anew for each part of a swap would pile up until the device has come to it.
        self._staging = torch.empty((num_staged, len(self._pools), *block_shape), dtype=shape.dtype, device=device)

    def move(self, step: Step) -> None:
        """Swap out, swap in, copy: in this order. The blocks exist; see `executor_svc.worker.interface.check_step`."""
        if len(step.blocks_to_swap_out):
            for pairs in self._parts(step.blocks_to_swap_out):
                self._swap_out(pairs)
        if len(step.blocks_to_swap_in):
            for pairs in self._parts(step.blocks_to_swap_in):
                self._swap_in(pairs)
        if len(step.blocks_to_copy):
            self._copy_blocks(step.blocks_to_copy)

    def _parts(self, pairs: Int32Array) -> Iterator[Int32Array]:
        """Return a swap in parts that staging has room for."""
        for begin in range(0, len(pairs), max(1, len(self._staging))):
            yield pairs[begin : begin + len(self._staging)]

    def _swap_out(self, pairs: Int32Array) -> None:
        with self._swaps.behind_compute():
            sources = index_to_device(pairs[:, 0], self._device)
            staged = self._staging[: len(pairs)]
            for index, pool in enumerate(self._pools):
                staged[:, index] = pool.index_select(0, sources)
            self._swaps.hold_compute()  # from here on the blocks may be written
            for block, host_block in zip(staged, pairs[:, 1].tolist(), strict=True):
                self.host_blocks[host_block].copy_(block, non_blocking=True)

    def _swap_in(self, pairs: Int32Array) -> None:
        with self._swaps.beside_compute():
            staged = self._staging[: len(pairs)]
            for block, host_block in zip(staged, pairs[:, 0].tolist(), strict=True):
                block.copy_(self.host_blocks[host_block], non_blocking=True)
        self._swaps.hold_compute()
        destinations = index_to_device(pairs[:, 1], self._device)
        for index, pool in enumerate(self._pools):
            pool.index_copy_(0, destinations, staged[:, index])
        self._swaps.hold_swaps()  # from here on staging may be written


def _make_pools(shape: CacheShape, num_blocks: int, device: torch.device) -> list[torch.Tensor]:
    """Return the pools of keys and values, layer by layer."""
    num_pools, block_shape = 2 * shape.num_layers, (shape.block_size, shape.num_kv_heads, shape.head_dim)
    if shape.is_one_piece:
        # No huge pages: where a machine lends its free memory to others, the first use of one takes milliseconds.
        whole = torch.empty((num_blocks, num_pools, *block_shape), dtype=shape.dtype, device=device)
        return list(whole.unbind(1))
    make_pool = torch.zeros if device.type == "cuda" else torch.empty
    return [make_pool((num_blocks, *block_shape), dtype=shape.dtype, device=device) for _ in range(num_pools)]


def _copier_of(pools: Sequence[torch.Tensor]) -> CopyBlocks:
    """Return what copies blocks in some pools: on a GPU one launch for all, where blocks have whole 16 bytes."""
    if pools[0].is_cuda and pools[0][0].nbytes % 16 == 0:
        from executor_svc.triton_kernels.block_copy import BlockCopier  # Triton takes seconds to import

        return BlockCopier(pools).copy_blocks
    return partial(_copy_in_torch, pools)


def _copy_in_torch(pools: Sequence[torch.Tensor], pairs: Int32Array) -> None:
    sources, destinations = index_to_device(pairs.T, pools[0].device)
    for pool in pools:
        pool[destinations] = pool[sources]
