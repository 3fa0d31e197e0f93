"""How fast paged attention reads the cache in decodes, beside a plain copy on the same card."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.attention.interface import AttentionLayer, DecodeBatch, DecodePlanner, LayerCache
from executor_svc.attention.key_value_write import write_in_torch
from executor_svc.cache.cache_engine import CacheShape


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """A batch of decodes of one layer."""

    num_rows: int
    context_tokens: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None  # None: as `dtype`

    @property
    def cache(self) -> CacheShape:
        """The cache of the layer."""
        return CacheShape(1, self.block_size, self.num_kv_heads, self.head_dim, self.cache_dtype or self.dtype)

    @property
    def num_bytes(self) -> int:
        """What the queries must read: keys and values of all contexts, once, with their scales."""
        return self.num_rows * self.context_tokens * self.cache.bytes_per_block // self.block_size


def seconds_per_call(run: Callable[[], object], device: torch.device, *, num_calls: int = 20) -> float:
    """Return the time of a call on the device, the median over calls after some to warm up."""
    if device.type != "cuda":
        run()
        times = []
        for _ in range(3):
            begin_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin_s)
        return float(np.median(times))
    for _ in range(5):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize(device)
    return float(np.median([begin.elapsed_time(end) for begin, end in itertools.pairwise(events)])) * 1e-3


def copy_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Return what a copy within the device's memory moves, read and written bytes together."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_per_call(lambda: target.copy_(source), device)


def filled_cache(shape: DecodeShape, num_blocks: int, device: torch.device) -> LayerCache:
    """Return a layer's cache of normally distributed keys and values."""
    pools = [
        torch.empty(num_blocks, *shape.cache.pool_shape, dtype=shape.cache.pool_dtype, device=device) for _ in range(2)
    ]
    cache = shape.cache.layer_cache(pools[0], pools[1], (1.0, 1.0))
    num_slots = num_blocks * shape.block_size
    for begin in range(0, num_slots, 2**14):
        slots = torch.arange(begin, min(begin + 2**14, num_slots), device=device)
        numbers = torch.randn(len(slots), 2 * shape.num_kv_heads, shape.head_dim, device=device).to(shape.dtype)
        write_in_torch(numbers, None, slots, cache)
    return cache


@torch.inference_mode()
def decode_bytes_per_s(backend: DecodePlanner, shape: DecodeShape, device: torch.device) -> float:
    """Return the rate at which decodes read keys and values that lie in scattered blocks.

    Several layers' caches are read in turn, together far larger than the card's second-level cache.
    """
    num_blocks_each = -(-shape.context_tokens // shape.block_size)
    num_blocks = shape.num_rows * num_blocks_each
    num_layers = max(2, min(16, 2**30 // shape.num_bytes)) if device.type == "cuda" else 2
    caches = [filled_cache(shape, num_blocks, device) for _ in range(num_layers)]
    tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(shape.num_rows, -1)
    last = shape.context_tokens - 1
    slots = tables[:, last // shape.block_size].astype(np.int64) * shape.block_size + last % shape.block_size
    batch = DecodeBatch(
        torch.full((shape.num_rows,), shape.context_tokens, dtype=torch.int32, device=device),
        torch.from_numpy(tables).to(device),
        torch.from_numpy(slots).to(device),
    )
    num_vectors = shape.num_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(shape.num_rows, num_vectors, shape.head_dim, device=device).to(shape.dtype)
    layer = AttentionLayer(shape.head_dim**-0.5)
    plan = backend.decode_plan(batch, caches[0])

    def attend() -> None:
        for cache in caches:
            plan.attend(qkv, None, cache, layer)

    run: Callable[[], object] = attend
    if device.type == "cuda":
        attend()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        run = graph.replay
    return num_layers * shape.num_bytes / seconds_per_call(run, device)
