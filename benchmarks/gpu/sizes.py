"""How large the check is: on a GPU, and in a rehearsal on a CPU, which shows that its code works."""

import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.end_to_end.adapters.peers import generate_batch
from benchmarks.gpu.engine import Prompt
from benchmarks.gpu.models import LLAMA_1B, LLAMA_8B, TINY
from benchmarks.gpu.part import Progress
from executor_svc.attention.interface import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadata,
    DecodeBatch,
    DecodePlanner,
    LayerCache,
)
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
    value_begin: int = 0  # not 0: the cache is latent

    @property
    def cache(self) -> CacheShape:
        sizes = self.block_size, self.num_kv_heads, self.head_dim
        return CacheShape(1, *sizes, self.cache_dtype or self.dtype, value_begin=self.value_begin)

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
    cache_shape = shape.cache
    pools = [
        torch.empty(num_blocks, *cache_shape.pool_shape, dtype=cache_shape.pool_dtype, device=device)
        for _ in range(cache_shape.num_pools)
    ]
    (cache,) = cache_shape.layer_caches(pools)
    num_slots = num_blocks * shape.block_size
    for begin in range(0, num_slots, 2**14):
        slots = torch.arange(begin, min(begin + 2**14, num_slots), device=device)
        numbers = torch.randn(len(slots), cache.num_vectors, shape.head_dim, device=device).to(shape.dtype)
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
    num_vectors = shape.num_heads + caches[0].num_vectors
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


@torch.inference_mode()
def prefix_bytes_per_s(backend: AttentionBackend, shape: DecodeShape, num_new: int, device: torch.device) -> float:
    """Return the rate at which a row of some new tokens reads the keys and values of a cached prefix."""
    num_blocks = -(-(shape.context_tokens + num_new) // shape.block_size)
    caches = [filled_cache(shape, num_blocks, device) for _ in range(16 if device.type == "cuda" else 2)]
    positions = shape.context_tokens + np.arange(num_new)
    metadata = AttentionMetadata(
        starts=np.array([shape.context_tokens], np.int32),
        lengths=np.array([num_new], np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        slot_mapping=torch.from_numpy(positions).to(device),
    )
    num_vectors = shape.num_heads + caches[0].num_vectors
    qkv = torch.randn(num_new, num_vectors, shape.head_dim, device=device).to(shape.dtype)
    layer, plan = AttentionLayer(shape.head_dim**-0.5), backend.plan(metadata, caches[0])

    def attend() -> None:
        for cache in caches:
            plan.attend(qkv, None, cache, layer)

    num_bytes = num_blocks * shape.cache.bytes_per_block
    return len(caches) * num_bytes / seconds_per_call(attend, device)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of ragged lengths; each wants so many tokens, whatever they are."""

    num_requests: int
    batch_size: int
    max_prompt_tokens: int
    max_new_tokens: int

    def prompts(self, vocab_size: int) -> list[Prompt]:
        """Return the requests: prompts of evenly spread lengths; most outputs are short and some are long."""
        generator = np.random.default_rng(0)
        prompts = []
        for _ in range(self.num_requests):
            length = int(generator.integers(self.max_prompt_tokens // 16, self.max_prompt_tokens + 1))
            share = float(np.clip(generator.exponential(0.25), 1 / 32, 1.0))
            token_ids = generator.integers(3, vocab_size, length, dtype=np.int32)
            prompts.append(Prompt(token_ids, max(1, round(share * self.max_new_tokens))))
        return prompts


def of_transformers(
    settings: Mapping[str, Any], prompts: Sequence[Prompt], batch_size: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the wanted output tokens a second of `generate` on batches, each as long as its longest request."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**settings)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(made, dtype=dtype).eval()
    generate_batch(model, [prompt.token_ids for prompt in prompts[:2]], 2, device)
    begin_s = time.perf_counter()
    for begin in range(0, len(prompts), batch_size):
        batch = prompts[begin : begin + batch_size]
        longest = max(prompt.num_new_tokens for prompt in batch)
        generate_batch(model, [prompt.token_ids for prompt in batch], longest, device).cpu()
    seconds = time.perf_counter() - begin_s
    del model
    free_memory(device)
    return sum(prompt.num_new_tokens for prompt in prompts) / seconds


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    copy_bytes: int
    decode_shapes: Sequence[DecodeShape]
    latent_shapes: Sequence[DecodeShape]  # of Triton alone
    cache_shapes: Sequence[DecodeShape]  # of which decodes are timed with caches of 8 bits, beside the model's dtype
    large_model: Mapping[str, Any]  # for one stream
    small_model: Mapping[str, Any]  # for many
    dtype: torch.dtype
    decode_batch_sizes: Sequence[int]
    prefill_tokens: Sequence[int]  # of one prompt
    prompt_tokens: int
    num_new_tokens: int
    workload: Workload
    max_num_batched_tokens: int
    num_device_blocks: int | None  # None: what the memory has room for
    invariant_tokens: int  # of the compared sequence: more than a split of keys
    invariant_batch_sizes: Sequence[int]
    prefix: tuple[DecodeShape, int]  # a cached prefix, and the new tokens behind it
    context_tokens: int  # of each sequence of long decodes
    context_batch_sizes: Sequence[int]
    num_published_requests: int  # of ShareGPT's lengths; a quarter of nano-vllm's
    published_tokens: int  # most of a prompt or of an output there
    published_model: Mapping[str, Any] | None = None  # in place of the others' models; None: theirs

    def decode_shapes_of(self, backend: str) -> Sequence[DecodeShape]:
        """Return the shapes with blocks that a backend takes."""
        block_size = {"flash_attn": 256, "xformers": 64}.get(backend, 16)
        shapes = [*self.decode_shapes, *(self.latent_shapes if backend == "triton" else ())]
        return [replace(shape, block_size=block_size) for shape in shapes]


FULL = Sizes(
    copy_bytes=4 * 2**30,
    decode_shapes=(
        DecodeShape(32, 2048),
        DecodeShape(32, 8192),
        DecodeShape(128, 2048),
        DecodeShape(256, 4096),
        DecodeShape(1, 32768),
    ),
    latent_shapes=(DecodeShape(128, 4096, 16, 1, 576, value_begin=64),),
    cache_shapes=(DecodeShape(32, 2048), DecodeShape(128, 2048)),
    large_model=LLAMA_8B,
    small_model=LLAMA_1B,
    dtype=torch.bfloat16,
    decode_batch_sizes=(1, 32, 256),
    prefill_tokens=(2048, 8190),
    prompt_tokens=128,
    num_new_tokens=64,
    workload=Workload(num_requests=512, batch_size=256, max_prompt_tokens=768, max_new_tokens=512),
    max_num_batched_tokens=8192,
    num_device_blocks=None,
    invariant_tokens=700,
    invariant_batch_sizes=(1, 32, 256),
    prefix=(DecodeShape(1, 32768), 64),
    context_tokens=2048,
    context_batch_sizes=(32, 256),
    num_published_requests=1000,
    published_tokens=1024,
)
REHEARSAL = Sizes(
    copy_bytes=2**20,
    decode_shapes=(DecodeShape(3, 40, 4, 2, 16, dtype=torch.float32),),
    latent_shapes=(DecodeShape(3, 40, 4, 1, 24, dtype=torch.float32, value_begin=8),),
    cache_shapes=(DecodeShape(3, 40, 4, 2, 16, dtype=torch.float32),),
    large_model=TINY,
    small_model=TINY,
    dtype=torch.float32,
    decode_batch_sizes=(1, 4),
    prefill_tokens=(60,),
    prompt_tokens=20,
    num_new_tokens=8,
    workload=Workload(num_requests=6, batch_size=4, max_prompt_tokens=32, max_new_tokens=12),
    max_num_batched_tokens=64,
    num_device_blocks=64,
    invariant_tokens=8,
    invariant_batch_sizes=(2,),
    prefix=(DecodeShape(1, 40, 4, 2, 16, dtype=torch.float32), 8),
    context_tokens=20,
    context_batch_sizes=(2, 4),
    num_published_requests=8,
    published_tokens=24,
    published_model=TINY,
)


def place_of(progress: Progress) -> tuple[Sizes, torch.device]:
    """Return how large a part is, and where it computes."""
    return (REHEARSAL, torch.device("cpu")) if progress.is_rehearsal else (FULL, torch.device("cuda"))


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
