"""The paged KV cache: pools of keys and of values, or of what is both, a host pool, and moves between blocks.

The scheduler decides which sequence has which block; this module only moves them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.attention.cache_format import has_scales
from executor_svc.attention.interface import LayerCache
from executor_svc.cache.block_transfers import BlocksInMemory, block_transfers
from executor_svc.cache.swap_stream import swap_stream
from executor_svc.device.transfer import index_to_device, pin
from octavo_shared.step_wire.step import Int32Array, Step

# Blocks of a swap that are gathered on the device at once: all the memory that swapping takes there.
MAX_STAGED_BLOCKS = 64

# Copies blocks in all pools, [num_pairs, 2]: source, destination. No destination is a source.
CopyBlocks = Callable[[Int32Array], None]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one block is, over all layers that attend; and the size of a saved state, over all layers with one.

    With `is_one_piece` a block is one piece of memory, keys and values of each layer side by side: decodes
    read scattered blocks faster so. Without, each layer has pools of its own. Scales of int8 lie behind the elements
    of a block, in the same piece of memory: what moves blocks knows nothing of them.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    is_one_piece: bool = False
    state_bytes: int = 0
    # Of layers whose heads have other sizes, which are in groups of their own: how many, KV heads, head_dim.
    others: tuple[tuple[int, int, int], ...] = ()
    value_begin: int = 0  # see `LayerCache.value_begin`; the same in all layers

    def of(self, num_layers: int, num_kv_heads: int, head_dim: int) -> "CacheShape":
        """Return the shape of some layers that are alike."""
        return replace(self, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, others=())

    @property
    def bytes_per_block(self) -> int:
        """Size of one block over all layers, keys and values together."""
        own = self.num_pools * math.prod(self.pool_shape) * self.pool_dtype.itemsize
        return own + sum(self.of(*sizes).bytes_per_block for sizes in self.others)

    @property
    def num_pools(self) -> int:
        """Pools of all layers: of keys and of values, or of what is both."""
        return self.num_layers * (1 if self.value_begin else 2)

    @property
    def pool_shape(self) -> tuple[int, ...]:
        """One block of the keys or values of a layer, as the pools have it."""
        if self.pool_dtype == self.dtype:
            return self.block_size, self.num_kv_heads, self.head_dim
        num_scales = self.block_size * self.num_kv_heads if has_scales(self.dtype) else 0
        return (self._scales_begin + 4 * num_scales if num_scales else self._num_elements,)

    @property
    def pool_dtype(self) -> torch.dtype:
        """What the pools hold: bytes, where torch cannot move the elements themselves."""
        return torch.uint8 if self.dtype.itemsize == 1 else self.dtype

    @property
    def _num_elements(self) -> int:
        return self.block_size * self.num_kv_heads * self.head_dim

    @property
    def _scales_begin(self) -> int:
        return -(-self._num_elements // 4) * 4

    def layer_caches(
        self, pools: Sequence[torch.Tensor], scales: Sequence[tuple[float, float]] = ()
    ) -> tuple[LayerCache, ...]:
        """Return `num_pools` pools, each [num_blocks, *pool_shape], as attention sees them, with the scales of FP8."""
        keys, values = (pools, pools) if self.value_begin else (pools[::2], pools[1::2])
        return tuple(
            LayerCache(
                self._elements(of_keys),
                self._elements(of_values),
                value_begin=self.value_begin,
                key_scales=self._scales(of_keys),
                value_scales=self._scales(of_values),
                key_scale=key_scale,
                value_scale=key_scale if self.value_begin else value_scale,
            )
            for of_keys, of_values, (key_scale, value_scale) in zip(
                keys, values, scales or repeat((1.0, 1.0), self.num_layers), strict=True
            )
        )

    def _elements(self, pool: torch.Tensor) -> torch.Tensor:
        if self.pool_dtype == self.dtype:
            return pool
        elements = pool[:, : self._num_elements].view(self.dtype)
        return elements.view(-1, self.block_size, self.num_kv_heads, self.head_dim)

    def _scales(self, pool: torch.Tensor) -> torch.Tensor | None:
        if not has_scales(self.dtype):
            return None
        return pool[:, self._scales_begin :].view(torch.float32).view(-1, self.num_kv_heads, self.block_size)

    def num_blocks_in(self, cache_gib: float) -> int:
        """Return how many whole blocks fit into `cache_gib` GiB."""
        return int(cache_gib * 2**30) // self.bytes_per_block


class BlockPools:
    """Pools of blocks on the device and one on the host, and the moves between them.

    The host pool beside a GPU is pinned where the system allows it, so that blocks move without a stop on the way; that
    commits all of it at once.

    Args:
        pools: On the device, each [num_blocks, *block_shape], equal in shape and dtype.
        num_host_blocks: Blocks of the host pool.
        max_staged_blocks: Blocks of a swap that are gathered on the device at once.
        device: Where the model runs.
    """

    def __init__(
        self, pools: Sequence[torch.Tensor], num_host_blocks: int, max_staged_blocks: int, device: torch.device
    ) -> None:
        self._device = device
        self._swaps = swap_stream(device)
        self._pools = pools
        self._copy_blocks = _copier_of(pools)
        # A host block is one piece of memory over all pools: one transfer a block.
        block_shape, dtype = (len(pools), *pools[0].shape[1:]), pools[0].dtype
        self.host_blocks = torch.empty((num_host_blocks, *block_shape), dtype=dtype)
        if device.type == "cuda":
            pin(self.host_blocks, device, self)
        self._transfers = block_transfers(pools, device)
        self._memory = self._transfers if isinstance(self._transfers, BlocksInMemory) else None
        num_staged = 0 if self._memory is not None else min(max_staged_blocks, num_host_blocks)
        # Kept: what is made anew for each part of a swap would pile up until the device has come to it.
        self._staging = torch.empty((num_staged, *block_shape), dtype=dtype, device=device)

    def move(self, step: Step) -> None:
        """Swap out, swap in, copy: in this order. The blocks exist; see `executor_svc.worker.interface.check_step`."""
        if self._memory is not None and (len(step.blocks_to_swap_out) or len(step.blocks_to_swap_in)):
            host_blocks = self.host_blocks.flatten(1).view(torch.uint8).numpy()
            self._memory.move_out(step.blocks_to_swap_out, host_blocks)
            self._memory.move_in(step.blocks_to_swap_in, host_blocks)
        elif len(step.blocks_to_swap_out):
            for pairs in self._parts(step.blocks_to_swap_out):
                self._swap_out(pairs)
        elif len(step.blocks_to_swap_in):
            for pairs in self._parts(step.blocks_to_swap_in):
                self._swap_in(pairs)
        if len(step.blocks_to_copy):
            self._copy_blocks(step.blocks_to_copy)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """The bytes of a block over all pools."""
        return (self._transfers.block_bytes,)

    def begin_transfers(self) -> None:
        """See `executor_svc.worker.interface.Worker`; so do the others."""
        self._transfers.begin()

    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the content of blocks, [n, block_bytes]: pool after pool."""
        return self._transfers.read(block_ids)

    def write_blocks(self, block_ids: Int32Array, content: npt.NDArray[np.uint8]) -> None:
        """Make `content`, [n, block_bytes], that of blocks."""
        self._transfers.write(block_ids, content)

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


class CacheEngine(BlockPools):
    """Owns the block pools of all layers, on the device and, for swapped sequences, on the host.

    On a CPU memory comes unwritten: the operating system commits it as blocks are first used, and whatever it
    holds, NaN included, attention must not see. On a GPU it holds zeros: flash-attn 3 multiplies what it hides by
    0, which NaN would survive.

    Args:
        shape: What one block is.
        num_blocks: Blocks of the device pool that sequences get. One more, the last, is for rows that pad a batch.
        num_host_blocks: Blocks of the host pool.
        device: Where the model runs.
        scales: Of FP8: what the elements of keys and of values are multiplied by, for each layer; empty: 1.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_blocks: int,
        num_host_blocks: int,
        device: torch.device,
        scales: Sequence[tuple[float, float]] = (),
    ) -> None:
        pools = _make_pools(shape, num_blocks + 1, device)
        super().__init__(pools, num_host_blocks, MAX_STAGED_BLOCKS, device)
        self.layers = shape.layer_caches(pools, scales)


def _make_pools(shape: CacheShape, num_blocks: int, device: torch.device) -> list[torch.Tensor]:
    num_pools, block_shape = shape.num_pools, shape.pool_shape
    if shape.is_one_piece:
        # No huge pages: where a machine lends its free memory to others, the first use of one takes milliseconds.
        whole = torch.empty((num_blocks, num_pools, *block_shape), dtype=shape.pool_dtype, device=device)
        return list(whole.unbind(1))
    make_pool = torch.zeros if device.type == "cuda" else torch.empty
    return [make_pool((num_blocks, *block_shape), dtype=shape.pool_dtype, device=device) for _ in range(num_pools)]


def _copier_of(pools: Sequence[torch.Tensor]) -> CopyBlocks:
    """Return what copies blocks in some pools: on a GPU one launch for all, where blocks have whole 16 bytes."""
    if pools[0].is_cuda and pools[0].shape[1:].numel() * pools[0].itemsize % 16 == 0:
        from executor_svc.triton_kernels.block_copy import BlockCopier  # Triton takes seconds to import

        return BlockCopier(pools).copy_blocks
    return partial(_copy_in_torch, pools)


def _copy_in_torch(pools: Sequence[torch.Tensor], pairs: Int32Array) -> None:
    sources, destinations = index_to_device(pairs.T, pools[0].device)
    for pool in pools:
        pool[destinations] = pool[sources]
