"""From a model with its weights to a worker: its cache, its graphs, its sampler."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.block_count import CudaMemory, count_blocks, cpu_cache_bytes, gpu_cache_bytes
from executor_svc.cache_engine import CacheEngine, CacheShape
from executor_svc.decode_graphs import DecodeGraphs, capture_decode_graphs, graph_capture
from executor_svc.largest_step import largest_step
from executor_svc.last_tokens import LastTokens
from executor_svc.model_choice import ChosenModel
from executor_svc.model_runner import ModelRunner
from executor_svc.native.sampling import load_sampling
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from executor_svc.sampler import DrawOnDevice, Sampler
from executor_svc.torch_worker import TorchWorker
from executor_svc.warm_up import warm_up
from shared.executor_info import ExecutorInfo, TokenizerFile

if TYPE_CHECKING:  # its rules need pydantic, which a machine that only measures may lack
    from executor_svc.config import ExecutorConfig


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What an executor says of its model beside its sizes."""

    model_id: str
    model_hash: str
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    tokenizer_files: tuple[TokenizerFile, ...] = ()


def cache_shape_of(chosen: ChosenModel) -> CacheShape:
    """Return what a block of this model's cache is."""
    shape = chosen.model.shape
    return CacheShape(shape.num_layers, chosen.block_size, shape.num_kv_heads, shape.head_dim, chosen.dtype)


def assemble_worker(
    chosen: ChosenModel,
    identity: ModelIdentity,
    config: ExecutorConfig,
    device: torch.device,
    group: TensorParallelGroup = SINGLE_RANK,
    local_size: int = 1,
) -> TorchWorker:
    """Make the cache of a model, as large as configured or as there is room, and all that runs on it.

    Args:
        chosen: The model, with its weights.
        identity: What to say of it.
        config: The settings of the executor.
        device: Of this rank.
        group: The ranks that share the model.
        local_size: How many ranks share the memory of this machine.

    Raises: ModelLoadError: there is no room for a cache.
    """
    model, backend, cache_shape = chosen.model, chosen.attention, cache_shape_of(chosen)

    def free_cache_bytes() -> int:
        if device.type == "cpu":
            return cpu_cache_bytes(local_size)
        run = partial(largest_step, model, backend, config, cache_shape)
        return gpu_cache_bytes(CudaMemory(device), config.gpu_memory_utilization, run)

    blocks = count_blocks(config, cache_shape, free_cache_bytes, local_size)
    num_blocks, num_host_blocks = group.least(blocks.device), group.least(blocks.host)
    cache_engine = CacheEngine(cache_shape, num_blocks, num_host_blocks, device)
    info = ExecutorInfo(
        instance_id=uuid.uuid4().hex,
        model_id=identity.model_id,
        model_hash=identity.model_hash,
        dtype=config.dtype,
        block_size_tokens=chosen.block_size,
        num_device_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=identity.max_model_len,
        vocab_size=model.shape.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_message_bytes=config.max_message_bytes,
        eos_token_ids=identity.eos_token_ids,
        tp_size=group.size,
        sliding_window_tokens=model.shape.sliding_window_tokens,
    )
    last_tokens = LastTokens(config.max_num_seqs, device)
    graphs: DecodeGraphs | None = None
    capture = graph_capture(device) if config.cuda_graphs == "auto" else None
    if capture is not None:
        max_num_blocks = -(-identity.max_model_len // chosen.block_size)
        graphs = capture_decode_graphs(model, cache_engine.layers, backend, last_tokens, max_num_blocks, capture)
    runner = ModelRunner(model, cache_engine.layers, backend, last_tokens, graphs)
    native = load_sampling(torch.get_num_threads()) if isinstance(backend, NativeAttentionBackend) else None
    sampler = Sampler(native, device_sampling(device))
    worker = TorchWorker(info, runner, cache_engine, sampler, identity.tokenizer_files, group)
    if device.type == "cuda":
        warm_up(worker)
    return worker


def device_sampling(device: torch.device) -> DrawOnDevice | None:
    """Return what samples on a GPU without the host."""
    if device.type != "cuda":
        return None
    from executor_svc.sampler.device_sampling import sample_on_device  # Triton takes seconds to import

    return sample_on_device
