"""From settings to a worker: find the model, make it, load its weights, make its cache."""

import uuid
from functools import partial
from pathlib import Path

import numpy as np
import torch

from executor_svc.attention import AttentionBackend, AttentionMetadata
from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.block_count import CudaMemory, count_blocks, cpu_cache_bytes, gpu_cache_bytes
from executor_svc.cache_engine import CacheEngine, CacheShape
from executor_svc.config import ExecutorConfig
from executor_svc.decode_graphs import DecodeGraphs, capture_decode_graphs, graph_capture
from executor_svc.errors import ModelLoadError
from executor_svc.last_tokens import LastTokens
from executor_svc.model_choice import choose_model, read_model_config
from executor_svc.model_directory import find_model_directory
from executor_svc.model_runner import ModelRunner
from executor_svc.models.language_model import LanguageModel
from executor_svc.native.sampling import load_sampling
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from executor_svc.sampler import Sampler
from executor_svc.torch_worker import TorchWorker
from executor_svc.weights import Checkpoint
from shared.executor_info import ExecutorInfo


def load_worker(
    config: ExecutorConfig,
    group: TensorParallelGroup = SINGLE_RANK,
    device: torch.device | None = None,
    local_size: int = 1,
) -> TorchWorker:
    """Load a model and make its worker.

    Args:
        config: The settings of the executor.
        group: The ranks that share the model; all of them load it at the same time.
        device: Of this rank; None: the first of the kind that is configured.
        local_size: How many ranks share the memory of this machine.

    Raises:
        ModelLoadError: the model, or a setting, does not work; the message names the file or the setting.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    directory = find_model_directory(config.model)
    device, dtype = device or find_device(config.device, 0), _torch_dtype(config.dtype)
    chosen = choose_model(directory, config, dtype, device, group)
    model, backend = chosen.model, chosen.attention
    shape = model.shape
    model_len = _checked_model_len(shape.max_position_embeddings, config.max_model_len, directory.path / "config.json")
    cache_shape = CacheShape(shape.num_layers, config.block_size_tokens, shape.num_kv_heads, shape.head_dim, dtype)
    count_blocks(config, cache_shape, lambda: cache_shape.bytes_per_block)  # what is asked for is refused at once
    checkpoint = Checkpoint(directory.path)
    chosen.load(checkpoint)

    def free_cache_bytes() -> int:
        if device.type == "cpu":
            return cpu_cache_bytes(local_size)
        run = partial(largest_step, model, backend, config, cache_shape)
        return gpu_cache_bytes(CudaMemory(device), config.gpu_memory_utilization, run)

    blocks = count_blocks(config, cache_shape, free_cache_bytes)
    num_blocks, num_host_blocks = group.least(blocks.device), group.least(blocks.host)
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
    last_tokens = LastTokens(config.max_num_seqs, device)
    graphs: DecodeGraphs | None = None
    capture = graph_capture(device) if config.cuda_graphs == "auto" else None
    if capture is not None:
        max_num_blocks = -(-model_len // cache_shape.block_size)
        graphs = capture_decode_graphs(model, cache_engine.layers, backend, last_tokens, max_num_blocks, capture)
    runner = ModelRunner(model, cache_engine.layers, backend, last_tokens, graphs)
    sampler = Sampler(load_sampling(torch.get_num_threads()) if isinstance(backend, NativeAttentionBackend) else None)
    return TorchWorker(info, runner, cache_engine, sampler, directory.tokenizer_files(), group)


def check_model(config: ExecutorConfig) -> None:
    """Raise ModelLoadError if so many ranks cannot share the model; nothing of it is loaded."""
    read_model_config(find_model_directory(config.model), config)


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


def largest_step(
    model: LanguageModel, backend: AttentionBackend, config: ExecutorConfig, shape: CacheShape
) -> torch.Tensor | None:
    """Run as many tokens as a step may have, in prompts as long as they can be, on a cache of their own.

    Returns:
        Logits of as many rows as a step may sample, [num_rows, vocab_size] float32, on rank 0; else None.
    """
    num_tokens = config.max_num_batched_tokens
    longest = min(num_tokens, model.shape.max_position_embeddings)
    lengths = np.array([longest] * (num_tokens // longest) + [num_tokens % longest], np.int32)
    lengths = lengths[lengths > 0]
    table_width = -(-longest // shape.block_size)
    engine = CacheEngine(shape, len(lengths) * table_width, 0, model.device)
    positions = np.concatenate([np.arange(length) for length in lengths])
    first_slots = np.repeat(np.arange(len(lengths)) * table_width * shape.block_size, lengths)
    metadata = AttentionMetadata(
        starts=np.zeros(len(lengths), np.int32),
        lengths=lengths,
        block_tables=np.arange(len(lengths) * table_width, dtype=np.int32).reshape(-1, table_width),
        slot_mapping=torch.from_numpy(first_slots + positions).to(model.device),
    )
    plan = backend.plan(metadata, engine.layers[0])
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=model.device)
    wanted = torch.arange(min(num_tokens, config.max_num_seqs), device=model.device)
    with torch.inference_mode():
        at = torch.from_numpy(positions).to(model.device)
        return model.logits(model.forward(token_ids, at, engine.layers, plan, wanted))


def _checked_model_len(limit: int, max_model_len: int | None, source: Path) -> int:
    if max_model_len is None:
        return limit
    if not 1 <= max_model_len <= limit:
        raise ModelLoadError(f"max_model_len is {max_model_len}; {source} allows 1 to {limit}")
    return max_model_len


def _torch_dtype(dtype: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


def _model_id(model: str) -> str:
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model
