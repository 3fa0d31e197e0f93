"""Compiles the attention kernels for devices that need not be there, and says what they take.

`python -m tests.kernels.compile_kernels CASE ...` takes cases and prints kernels, both as JSON objects. It runs the
launchers of `executor_svc.triton_kernels` with a driver that launches nothing: what is compiled is what they ask for.
TRITON_INTERPRET must not be in the environment.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from executor_svc.attention.cache_format import CACHE_DTYPES
from executor_svc.attention.interface import AttentionLayer, LayerCache, Rotation
from executor_svc.cache.cache_engine import CacheShape
from executor_svc.triton_kernels.block_copy import BlockCopier
from executor_svc.triton_kernels.decode import DecodeRows, PartialResults, decode
from executor_svc.triton_kernels.invariant_attention import QueryTiles, SplitStates, attend
from executor_svc.triton_kernels.key_value_write import write_in_triton
from executor_svc.triton_kernels.prefill import PrefillRows, prefill
from executor_svc.triton_kernels.tiles import groups_of, invariant_tile, prefill_tile

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class Case:
    """One way to call the launchers."""

    capability: int  # 80 for 8.0
    dtype: str
    head_dim: int
    block_size: int
    has_options: bool  # window, soft cap, ALiBi and sinks
    group: int = 4  # query heads of a KV head
    has_invariant: bool = True  # whether the invariant attention is compiled too
    cache: str = ""  # format of the cache; empty: `dtype`
    value_begin: int = 0  # not 0: the cache is latent, and `group` are all query heads
    has_distance_biases: bool = False

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the elements of the cache."""
        return CACHE_DTYPES[self.cache or self.dtype]

    @property
    def num_kv_heads(self) -> int:
        """Of a latent cache there is one."""
        return 1 if self.value_begin else 8

    @property
    def num_heads(self) -> int:
        """Of queries."""
        return self.group * self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Numbers in a value."""
        return self.head_dim - self.value_begin

    @property
    def cache_shape(self) -> CacheShape:
        """Of one layer."""
        sizes = self.block_size, self.num_kv_heads, self.head_dim
        return CacheShape(1, *sizes, self.cache_dtype, value_begin=self.value_begin)

    @property
    def itemsize(self) -> int:
        """Bytes of the wider of both."""
        return max(CACHE_DTYPES[self.dtype].itemsize, self.cache_dtype.itemsize)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """What a kernel takes of a multiprocessor, and some instructions in it."""

    case: Case
    name: str
    num_threads: int
    registers: int  # a thread
    stack_bytes: int  # a thread; spilled registers lie there
    local_bytes: int  # a thread
    shared_bytes: int  # a program
    num_wide_copies: int  # of 16 bytes, from the cache to shared memory
    num_wide_loads: int  # of 16 bytes
    num_narrow_loads: int  # of 1 or 2 bytes
    num_warpgroup_products: int  # of Hopper
    digest: str  # of the machine code


class _AbsentDevice:
    """A driver for a device that is not there."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(case: Case) -> list[CompiledKernel]:
    """Compile all that a decode, a prefill and a copy of blocks launch. Triton has no other driver afterwards."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        compiled.append(run(self, *args, **{**kwargs, "warmup": True}))

    JITFunction.run = compile_only
    driver.set_active(_AbsentDevice(case.capability))
    try:
        for launch in (_write, _decode, _prefill, _copy, *((_invariant,) if case.has_invariant else ())):
            launch(case)
    finally:
        JITFunction.run = run
    return [_describe(case, kernel) for kernel in compiled]


def _inputs(case: Case) -> tuple[torch.Tensor, LayerCache, AttentionLayer, torch.Tensor | None]:
    """Return queries, keys and values, the cache, the layer, and its slopes."""
    dtype, num_heads, shape = getattr(torch, case.dtype), case.num_heads, case.cache_shape
    pools = [torch.empty(2, *shape.pool_shape, dtype=shape.pool_dtype) for _ in range(shape.num_pools)]
    (cache,) = shape.layer_caches(pools)
    qkv = torch.empty(4, num_heads + cache.num_vectors, case.head_dim, dtype=dtype)
    if case.has_options:
        return qkv, cache, AttentionLayer(0.1, 100, 30.0, sinks=torch.empty(num_heads)), torch.empty(num_heads)
    biases = torch.empty(num_heads, 129) if case.has_distance_biases else None
    return qkv, cache, AttentionLayer(0.1, distance_biases=biases), None


def _write(case: Case) -> None:
    qkv, cache, _, _ = _inputs(case)
    angles = torch.empty(4, case.value_begin or case.head_dim, dtype=qkv.dtype)
    write_in_triton(qkv, Rotation(angles, angles), torch.zeros(4, dtype=torch.int64), cache)


def _decode(case: Case) -> None:
    qkv, cache, layer, slopes = _inputs(case)
    num_splits, num_heads = 8, case.num_heads
    rows = DecodeRows(
        torch.ones(4, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    )
    num_parts = 4 * num_heads * num_splits
    partial = PartialResults(torch.empty(num_parts * case.value_dim), torch.empty(num_parts))
    decode(rows, qkv[:, :num_heads], cache, layer, slopes, num_splits, partial, torch.empty_like(qkv))
    decode(rows, qkv[:, :num_heads], cache, layer, slopes, 1, None, torch.empty_like(qkv))


def _prefill(case: Case) -> None:
    qkv, cache, layer, slopes = _inputs(case)
    _, group = groups_of(case.num_heads, cache)
    itemsizes = qkv.dtype.itemsize, case.cache_dtype.itemsize
    tile = prefill_tile(case.value_dim, group, *itemsizes, divmod(case.capability, 10))
    rows = PrefillRows(torch.zeros(2, 4, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32), tile, 8)
    num_parts = 2 * tile.num_queries * case.num_kv_heads * 8
    partial = PartialResults(torch.empty(num_parts * case.value_dim), torch.empty(num_parts))
    for num_splits, room in ((1, None), (8, partial)):
        prefill(rows, qkv[:, : case.num_heads], cache, layer, slopes, num_splits, room, torch.empty_like(qkv))


def _invariant(case: Case) -> None:
    """Attend in one order of sums: with decodes of one and of several programs a row, then with a chunk."""
    qkv, cache, layer, slopes = _inputs(case)
    num_heads = case.num_heads
    shape = invariant_tile(case.value_dim, groups_of(num_heads, cache)[1], case.itemsize)
    tables, four = torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    states = SplitStates(8, 8, 1, torch.empty(4 * num_heads * 8 * case.value_dim), torch.empty(4 * num_heads * 8 * 2))
    one = torch.ones(1, dtype=torch.int32)
    for tiles, shared in (
        (QueryTiles(four, four, four, four, tables), states),
        (QueryTiles(four, four, four, four, tables), replace(states, num_programs=1, num_splits=1)),
        (QueryTiles(one, one, one * 3, one * 3, tables), replace(states, num_programs=1, num_splits=1)),
    ):
        attend(tiles, shape, qkv[:, :num_heads], cache, layer, slopes, shared, torch.empty_like(qkv))


def _copy(case: Case) -> None:
    shape = case.cache_shape
    pools = torch.empty(2, 2, *shape.pool_shape, dtype=shape.pool_dtype)
    BlockCopier(list(pools)).copy_blocks(np.array([(0, 1)], np.int32))


def _describe(case: Case, kernel: Any) -> CompiledKernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    ptx = kernel.asm["ptx"]
    return CompiledKernel(
        case,
        kernel.metadata.name,
        num_threads=32 * kernel.metadata.num_warps,
        registers=_number_after("REG", usage),
        stack_bytes=_number_after("STACK", usage),
        local_bytes=_number_after("LOCAL", usage),
        shared_bytes=kernel.metadata.shared,
        num_wide_copies=_count(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", ptx),
        num_wide_loads=_count(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", ptx),
        num_narrow_loads=_count(r"ld\.global\S*\.[bu](8|16) ", ptx),
        num_warpgroup_products=_count(r"wgmma\.mma_async", ptx),
        digest=hashlib.sha256(kernel.asm["cubin"]).hexdigest()[:16],
    )


def _count(pattern: str, ptx: str) -> int:
    return len(re.findall(pattern, ptx))


def _number_after(name: str, usage: str) -> int:
    match = re.search(rf"\b{name}:(\d+)", usage)
    assert match is not None, usage
    return int(match[1])


if __name__ == "__main__":
    for text in sys.argv[1:]:
        for kernel in compile_for(Case(**json.loads(text))):
            print(json.dumps(asdict(kernel)), flush=True)
