"""From settings to a worker: find the model, make it, load its weights, make its cache."""

import uuid
from pathlib import Path
from typing import Literal

import torch

from executor_svc.cache_engine import CacheEngine, CacheShape, available_memory_bytes
from executor_svc.errors import ModelLoadError
from executor_svc.kernels import CpuKernels, Quantization, make_model
from executor_svc.model_directory import find_model_directory
from executor_svc.model_runner import ModelRunner
from executor_svc.models.families import parse_config
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from executor_svc.sampler import Sampler
from executor_svc.torch_worker import TorchWorker
from executor_svc.weights import Checkpoint
from shared.executor_info import ExecutorInfo

DeviceName = Literal["cpu", "cuda"]
DtypeName = Literal["float32", "bfloat16", "float16"]


def load_worker(
    model: str,
    *,
    device: DeviceName = "cpu",
    dtype: DtypeName = "float32",
    quantization: Quantization = "none",
    cpu_kernels: CpuKernels = "auto",
    num_threads: int | None = None,
    block_size_tokens: int = 16,
    num_device_blocks: int | None = None,
    kv_cache_gib: float = 2.0,
    num_host_blocks: int | None = None,
    host_cache_gib: float = 0.5,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    max_message_bytes: int = 64 * 2**20,
    model_id: str | None = None,
    group: TensorParallelGroup = SINGLE_RANK,
) -> TorchWorker:
    """Load a model and make its worker.

    Args:
        model: A Hugging Face directory, or a hub id if there is no such directory.
        device: Where the model runs.
        dtype: Number format of weights and cache.
        quantization: "int8": weights become int8 as they are loaded.
        cpu_kernels: What computes on a CPU; see `executor_svc.kernels.make_model`.
        num_threads: Threads that compute on a CPU; None: torch's own choice, one a core.
        block_size_tokens: Tokens in a block, 1 to 1,024.
        num_device_blocks: Blocks of the cache; None: as many as `kv_cache_gib` holds.
        kv_cache_gib: Size of the cache in GiB; unused if `num_device_blocks` is given.
        num_host_blocks: Blocks of the host pool for swapping; None: as many as `host_cache_gib` holds.
        host_cache_gib: Size of the host pool in GiB; unused if `num_host_blocks` is given.
        max_model_len: Longest sequence in tokens; None: what config.json says.
        max_num_seqs: Slots of the batch table.
        max_num_batched_tokens: Reported to the scheduler, which keeps to it.
        max_message_bytes: Reported to the scheduler, which keeps to it.
        model_id: Reported name; None: `model`, for a directory its last path component.
        group: The ranks that share the model; all of them load it at the same time.

    Raises:
        ModelLoadError: the model, or a setting, does not work; the message names the file or the setting.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("the device is cuda, but torch finds no CUDA device")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    directory = find_model_directory(model)
    torch_device, torch_dtype = torch.device(device), _torch_dtype(dtype)
    network, backend = make_model(
        parse_config(directory.config(), directory.path / "config.json"),
        torch_dtype,
        torch_device,
        cpu_kernels=cpu_kernels,
        quantization=quantization,
        group=group,
    )
    shape = network.shape
    model_len = _checked_model_len(shape.max_position_embeddings, max_model_len, directory.path / "config.json")
    cache_shape = CacheShape(shape.num_layers, block_size_tokens, shape.num_kv_heads, shape.head_dim, torch_dtype)
    num_blocks = cache_shape.num_blocks_in(kv_cache_gib) if num_device_blocks is None else num_device_blocks
    if num_host_blocks is None:
        num_host_blocks = cache_shape.num_blocks_in(host_cache_gib)
    # Ranks may share a machine, and have the same settings: the check counts this rank alone.
    _check_cache_size(cache_shape, num_blocks, num_host_blocks, device)
    checkpoint = Checkpoint(directory.path)
    network.load(checkpoint)
    cache_engine = CacheEngine(cache_shape, num_blocks, num_host_blocks, torch_device)
    info = ExecutorInfo(
        instance_id=uuid.uuid4().hex,
        model_id=model_id or _model_id(model),
        model_hash=checkpoint.model_hash(quantization),
        dtype=dtype,
        block_size_tokens=block_size_tokens,
        num_device_blocks=group.least(num_blocks),
        num_host_blocks=group.least(num_host_blocks),
        max_model_len=model_len,
        vocab_size=shape.vocab_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_message_bytes=max_message_bytes,
        eos_token_ids=directory.eos_token_ids(),
        tp_size=group.size,
        sliding_window_tokens=shape.sliding_window_tokens,
    )
    runner = ModelRunner(network, cache_engine.layers, backend)
    return TorchWorker(info, runner, cache_engine, Sampler(), directory.tokenizer_files(), group)


def _checked_model_len(limit: int, max_model_len: int | None, source: Path) -> int:
    if max_model_len is None:
        return limit
    if not 1 <= max_model_len <= limit:
        raise ModelLoadError(f"max_model_len is {max_model_len}; {source} allows 1 to {limit}")
    return max_model_len


def _check_cache_size(shape: CacheShape, num_blocks: int, num_host_blocks: int, device: DeviceName) -> None:
    """Refuse a cache without a block, or one that this machine has no memory for.

    A machine's memory is only promised when it is taken; too much of it would end the process later,
    under load.
    """
    if num_blocks < 1:
        raise ModelLoadError(f"the KV cache has no room for even one block of {shape.bytes_per_block} bytes")
    available = available_memory_bytes()
    num_in_memory = num_host_blocks + (num_blocks if device == "cpu" else 0)
    if available is not None and num_in_memory * shape.bytes_per_block > available:
        wanted_gib = num_in_memory * shape.bytes_per_block / 2**30
        raise ModelLoadError(
            f"the KV cache would take {wanted_gib:.1f} GiB, but {available / 2**30:.1f} GiB of memory are available; "
            "choose less with --kv-cache-gib and --host-cache-gib"
        )


def _torch_dtype(dtype: DtypeName) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


def _model_id(model: str) -> str:
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model
