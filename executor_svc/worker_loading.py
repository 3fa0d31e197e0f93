"""From settings to a worker: find the model, make it, load its weights, make its cache."""

import uuid
from pathlib import Path

import torch

from executor_svc.cache_engine import CacheEngine, CacheShape, available_memory_bytes
from executor_svc.config import ExecutorConfig
from executor_svc.errors import ModelLoadError
from executor_svc.kernels import make_model
from executor_svc.model_directory import find_model_directory
from executor_svc.model_runner import ModelRunner
from executor_svc.models.families import parse_config
from executor_svc.models.sharding import Shard
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from executor_svc.sampler import Sampler
from executor_svc.torch_worker import TorchWorker
from executor_svc.weights import Checkpoint
from shared.executor_info import ExecutorInfo


def load_worker(
    config: ExecutorConfig, group: TensorParallelGroup = SINGLE_RANK, device: torch.device | None = None
) -> TorchWorker:
    """Load a model and make its worker.

    Args:
        config: The settings of the executor.
        group: The ranks that share the model; all of them load it at the same time.
        device: Of this rank; None: the first of the kind that is configured.

    Raises:
        ModelLoadError: the model, or a setting, does not work; the message names the file or the setting.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    directory = find_model_directory(config.model)
    device, dtype = device or find_device(config.device, 0), _torch_dtype(config.dtype)
    model, backend = make_model(
        parse_config(directory.config(), directory.path / "config.json"),
        dtype,
        device,
        cpu_kernels=config.cpu_kernels,
        quantization=config.quantization,
        group=group,
    )
    shape = model.shape
    model_len = _checked_model_len(shape.max_position_embeddings, config.max_model_len, directory.path / "config.json")
    cache_shape = CacheShape(shape.num_layers, config.block_size_tokens, shape.num_kv_heads, shape.head_dim, dtype)
    num_blocks, num_host_blocks = _count_blocks(config, cache_shape, group)
    checkpoint = Checkpoint(directory.path)
    model.load(checkpoint)
    cache_engine = CacheEngine(cache_shape, num_blocks, num_host_blocks, device)
    info = ExecutorInfo(
        instance_id=uuid.uuid4().hex,
        model_id=config.model_id or _model_id(config.model),
        model_hash=checkpoint.model_hash(config.quantization),
        dtype=config.dtype,
        block_size_tokens=config.block_size_tokens,
        num_device_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=model_len,
        vocab_size=shape.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_message_bytes=config.max_message_bytes,
        eos_token_ids=directory.eos_token_ids(),
        tp_size=group.size,
        sliding_window_tokens=shape.sliding_window_tokens,
    )
    runner = ModelRunner(model, cache_engine.layers, backend)
    return TorchWorker(info, runner, cache_engine, Sampler(), directory.tokenizer_files(), group)


def check_model(config: ExecutorConfig) -> None:
    """Raise ModelLoadError if so many ranks cannot share the model; nothing of it is loaded."""
    directory = find_model_directory(config.model)
    Shard.of(parse_config(directory.config(), directory.path / "config.json"), rank=0, size=config.tp)


def find_device(name: str, local_rank: int) -> torch.device:
    """Return the device of a rank. Raises: ModelLoadError: there is none."""
    if name == "cpu":
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if num_devices == 0:
        raise ModelLoadError("the device is cuda, but torch finds no CUDA device")
    if local_rank >= num_devices:
        raise ModelLoadError(
            f"rank {local_rank} of this machine needs a CUDA device of its own; torch finds {num_devices}"
        )
    return torch.device("cuda", local_rank)


def _count_blocks(config: ExecutorConfig, shape: CacheShape, group: TensorParallelGroup) -> tuple[int, int]:
    """Return the blocks on the device and on the host: so many as every rank has room for."""
    num_blocks, num_host_blocks = config.num_device_blocks, config.num_host_blocks
    if num_blocks is None:
        num_blocks = shape.num_blocks_in(config.kv_cache_gib)
    if num_host_blocks is None:
        num_host_blocks = shape.num_blocks_in(config.host_cache_gib)
    _check_cache_size(shape, num_blocks, num_host_blocks, config.device)
    return group.least(num_blocks), group.least(num_host_blocks)


def _checked_model_len(limit: int, max_model_len: int | None, source: Path) -> int:
    if max_model_len is None:
        return limit
    if not 1 <= max_model_len <= limit:
        raise ModelLoadError(f"max_model_len is {max_model_len}; {source} allows 1 to {limit}")
    return max_model_len


def _check_cache_size(shape: CacheShape, num_blocks: int, num_host_blocks: int, device: str) -> None:
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


def _torch_dtype(dtype: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


def _model_id(model: str) -> str:
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model
