"""How many blocks the KV cache gets: as configured, or what the memory has room for."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from executor_svc.attention.cache_format import CACHE_DTYPES
from executor_svc.cache.cache_engine import CacheShape
from executor_svc.device.host_memory import (
    available_memory_bytes,
    cache_bytes_for,
    cache_share_bytes,
    saved_states_in,
    total_memory_bytes,
)
from executor_svc.device.memory import GpuMemory
from octavo_shared.errors import ModelLoadError
from octavo_shared.process.events import Event

if TYPE_CHECKING:  # its rules need pydantic, which a machine that only measures may lack
    from executor_svc.config import ExecutorConfig

# Where the system does not say what is free.
FALLBACK_CACHE_GIB = 1.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks of the device pool and of the host pool, and saved states beside them."""

    device: int
    host: int
    states: int = 0
    host_states: int = 0


def gpu_cache_bytes(
    memory: GpuMemory,
    utilization: float,
    run_largest_steps: Callable[[], object],
    measure_graphs: Callable[[GpuMemory], int],
) -> int:
    """Return what the cache of a GPU may take, with the weights loaded; may be below 0.

    What libraries and other processes use of the device is neither free nor torch's.
    """
    peak = memory.measure_peak(run_largest_steps)
    others = memory.total() - memory.free() - memory.used_by_torch()
    graphs = measure_graphs(memory)
    budget = int(memory.total() * utilization)
    sizes = {
        "total": memory.total(),
        "peak": peak,
        "others": others,
        "graphs": graphs,
        "cache": budget - peak - others - graphs,
    }
    gib = {f"{name}_gib": round(size / 2**30, 2) for name, size in sizes.items()}
    _logger.info(Event("gpu_memory", utilization=utilization, **gib))
    return budget - peak - others - graphs


def cpu_cache_bytes(local_size: int, state_bytes: int = 0) -> int:
    """Return what the cache of one of `local_size` ranks on this machine takes, with the weights loaded.

    A quarter of the machine's memory, halved until it is at most half of what is free beside the states: so a restart
    finds the same size again unless much has changed. Requests that were accepted for a larger cache would have to
    wait.
    """
    available, total = available_memory_bytes(), total_memory_bytes()
    if available is None or total is None:
        return int(FALLBACK_CACHE_GIB * 2**30)
    return cache_share_bytes(max(1, available - state_bytes * local_size), total) // local_size


def check_cache_settings(config: ExecutorConfig, shape: CacheShape, local_size: int = 1) -> None:
    """Refuse what is asked for and can never be, before the weights are loaded. Raises: as `count_blocks`."""
    sizes = shape.bytes_per_block, shape.state_bytes, config.state_cache_gib
    count_blocks(config, shape, lambda: cache_bytes_for(1, *sizes), local_size)


def count_blocks(
    config: ExecutorConfig, shape: CacheShape, free_cache_bytes: Callable[[], int], local_size: int = 1
) -> BlockCounts:
    """Return how many blocks and saved states this rank has room for.

    Args:
        config: May say it in blocks or in GiB.
        shape: What a block is, and a state.
        free_cache_bytes: What the memory has room for; asked only if `config` says nothing.
        local_size: How many ranks of this machine take as much each.

    Raises: ModelLoadError: there is no room for even one block, or a CPU's memory is too small for what is asked for.
    """
    state_gib = config.state_cache_gib
    if config.num_device_blocks is not None:
        num_blocks = config.num_device_blocks
        num_bytes = cache_bytes_for(num_blocks, shape.bytes_per_block, shape.state_bytes, state_gib)
        num_states = saved_states_in(num_bytes, shape.bytes_per_block, shape.state_bytes, state_gib)
    else:
        num_bytes = free_cache_bytes() if config.kv_cache_gib is None else int(config.kv_cache_gib * 2**30)
        num_blocks, num_states = _split(num_bytes, shape, state_gib)
    if num_blocks < 1:
        least = cache_bytes_for(1, shape.bytes_per_block, shape.state_bytes, state_gib)
        raise ModelLoadError(
            f"the KV cache is too small for a single block; set at least --kv-cache-gib "
            f"{_least_gib(least)}, or smaller blocks with --block-size-tokens"
        )
    counts = _with_host_pools(config, shape, num_blocks, num_states)
    wanted = counts.host * shape.bytes_per_block + counts.host_states * shape.state_bytes
    if config.device == "cpu":
        wanted += num_blocks * shape.bytes_per_block + num_states * shape.state_bytes
    _check_memory(config, shape, wanted, local_size)
    return counts


def why_short(
    shape: CacheShape, num_blocks: int, max_model_len: int, num_states: int = 0, state_cache_gib: float | None = None
) -> str | None:
    """Say that a cache holds less than the longest sequence, and what would hold it; None: it holds one.

    A model whose windows leave blocks behind needs less, which is not looked at here.
    """
    num_tokens = num_blocks * shape.block_size
    if num_tokens >= max_model_len:
        return None
    num_wanted = -(-max_model_len // shape.block_size)
    gib = _least_gib(cache_bytes_for(num_wanted, shape.bytes_per_block, shape.state_bytes, state_cache_gib))
    num_bytes = num_blocks * shape.bytes_per_block + num_states * shape.state_bytes
    sentence = f"the KV cache holds {num_tokens} tokens of the model's {max_model_len}; set --kv-cache-gib {gib}"
    for name in ("bfloat16", "int8"):
        smaller = replace(shape, dtype=CACHE_DTYPES[name])
        held = _split(num_bytes, smaller, state_cache_gib)[0] * shape.block_size
        if held >= max_model_len:
            return f"{sentence}, or --kv-cache-dtype {name}, which holds {held}"
    return sentence


def _split(num_bytes: int, shape: CacheShape, state_cache_gib: float | None) -> tuple[int, int]:
    """Return how many blocks and how many saved states a cache of so many bytes has."""
    num_states = saved_states_in(num_bytes, shape.bytes_per_block, shape.state_bytes, state_cache_gib)
    return (num_bytes - num_states * shape.state_bytes) // shape.bytes_per_block, num_states


def _with_host_pools(config: ExecutorConfig, shape: CacheShape, num_blocks: int, num_states: int) -> BlockCounts:
    """Add the host pools, which share their memory in the proportion of the device pools."""
    if config.num_host_blocks is not None:
        num_host_states = num_states * config.num_host_blocks // num_blocks
        return BlockCounts(num_blocks, config.num_host_blocks, num_states, num_host_states)
    num_bytes = int(config.host_cache_gib * 2**30)
    of_device = num_blocks * shape.bytes_per_block + num_states * shape.state_bytes
    num_host_blocks, num_host_states = (num_bytes * count // of_device for count in (num_blocks, num_states))
    return BlockCounts(num_blocks, num_host_blocks, num_states, num_host_states)


def _least_gib(num_bytes: int) -> str:
    """Return a number of GiB that holds so many bytes, rounded up to two digits."""
    exact = num_bytes / 2**30
    step = 10.0 ** (math.floor(math.log10(exact)) - 1)
    return f"{math.ceil(exact / step) * step:.12f}".rstrip("0").removesuffix(".")


def count_host_blocks(config: ExecutorConfig, shape: CacheShape) -> int:
    """Return how many blocks the host pool has at most: saved states take a part of it."""
    if config.num_host_blocks is not None:
        return config.num_host_blocks
    return shape.num_blocks_in(config.host_cache_gib)


def _check_memory(config: ExecutorConfig, shape: CacheShape, wanted: int, local_size: int) -> None:
    """Refuse so many bytes of each rank in this machine's memory if it has no room for them.

    It is only promised when it is asked for, and taken later; too much of it would end the process under load.
    """
    available = available_memory_bytes()
    if available is not None and wanted * local_size > available:
        gib = f"{wanted * local_size / 2**30:.1f} GiB"
        if local_size > 1:
            gib += f" ({wanted / 2**30:.1f} GiB for each of {local_size} ranks)"
        raise ModelLoadError(
            f"the KV cache would take {gib}, but {available / 2**30:.1f} GiB of memory are available; lower "
            "--kv-cache-gib or --host-cache-gib"
            + (", or set --kv-cache-dtype int8" if shape.dtype.itemsize > 1 and config.device == "cpu" else "")
        )
