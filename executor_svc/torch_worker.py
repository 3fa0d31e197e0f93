"""The worker that runs a real model: batch table, model runner, cache engine and sampler of one rank.

`load_worker` does all the reading; `TorchWorker` takes ready parts. Read next:
`executor_svc/model_runner.py`.
"""

import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from executor_svc.cache_engine import CacheEngine, CacheShape, available_memory_bytes
from executor_svc.errors import ModelLoadError
from executor_svc.kernels import CpuKernels, Quantization, make_model
from executor_svc.model_directory import find_model_directory
from executor_svc.model_runner import ModelRunner, SampleLogits
from executor_svc.models import ModelConfig
from executor_svc.models.config import parse_config
from executor_svc.sample_rows import SampleRows
from executor_svc.sampler import Sampler
from executor_svc.sampler.logprobs import prompt_logprobs
from executor_svc.weights import Checkpoint
from executor_svc.worker import check_layout, check_step
from shared.batch_table import BatchTable, StepLayout
from shared.errors import InvalidStepError, StepFailedError
from shared.executor_info import ExecutorInfo, TokenizerFile
from shared.step import UNKNOWN_TOKEN, Step, StepResult, no_slots

DeviceName = Literal["cpu", "cuda"]
DtypeName = Literal["float32", "bfloat16", "float16"]


class TorchWorker:
    """Runs steps on the model; see `executor_svc.worker.Worker`.

    Owns the batch table and, through the cache engine, the KV cache. Not thread-safe.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        model_runner: ModelRunner,
        cache_engine: CacheEngine,
        sampler: Sampler,
        tokenizer_files: tuple[TokenizerFile, ...],
    ) -> None:
        self._info = info
        self._model_runner = model_runner
        self._cache_engine = cache_engine
        self._sampler = sampler
        self._tokenizer_files = tokenizer_files
        self.reset()

    @property
    def info(self) -> ExecutorInfo:
        """What this executor is; constant over its life."""
        return self._info

    @property
    def table(self) -> BatchTable:
        """The batch table; replaced by `reset`."""
        return self._table

    def reset(self) -> None:
        """Empty the batch table: a scheduler has attached. The cache contents stay."""
        info = self._info
        self._table = BatchTable(info.max_num_seqs, info.max_model_len, info.block_size_tokens, info.num_device_blocks)

    def execute(self, step: Step) -> StepResult:
        """Apply the step to the table, run it, record and return the sampled tokens.

        Raises:
            InvalidStepError: the step does not fit the table or the cache; nothing was written.
            StepFailedError: it failed while it ran; the cache contents are in doubt.
        """
        check_step(step, self._info)
        try:
            return self._execute(step)
        except (InvalidStepError, StepFailedError):
            raise
        except Exception as error:
            # Torch fails with many types (RuntimeError, IndexError, out of memory); all mean the same here.
            raise StepFailedError(f"step {step.step_id} failed: {type(error).__name__}: {error}") from error

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return tokenizer.json and its companions; empty if the model has no tokenizer.json."""
        return self._tokenizer_files

    @torch.inference_mode()
    def _execute(self, step: Step) -> StepResult:
        begin_s = time.perf_counter()
        table = self._table
        layout = table.apply(step.delta)
        digest = check_layout(step, layout, table, self._info.max_num_batched_tokens)
        self._cache_engine.move(step)
        result = StepResult(step.epoch, step.step_id, no_slots())
        if layout.num_tokens:
            result = self._answer(step, layout, self._model_runner.run(table, layout))
            table.record(layout, result.sampled_token_ids)
        duration_us = round((time.perf_counter() - begin_s) * 1e6)
        return replace(result, execute_duration_us=duration_us, table_digest=digest)

    def _answer(self, step: Step, layout: StepLayout, computed: SampleLogits) -> StepResult:
        """Return the sampled tokens, the candidates of the beam rows, and the log-probabilities asked for."""
        rows = SampleRows.of_step(self._table, layout)
        result = StepResult(step.epoch, step.step_id, np.full(len(rows), UNKNOWN_TOKEN, np.int32))
        is_sampled = np.ones(len(rows), np.bool_) if layout.num_candidates is None else layout.num_candidates == 0
        if is_sampled.all():
            sampled = self._sampler.sample(computed.logits, computed.logit_rows, rows)
            result.sampled_token_ids, result.logprobs = sampled.token_ids, sampled.logprobs
        elif is_sampled.any():
            sampled = self._sampler.sample(computed.logits, computed.logit_rows[is_sampled], rows[is_sampled])
            result.sampled_token_ids[is_sampled] = sampled.token_ids
            if sampled.logprobs is not None:
                result.logprobs = np.full(len(rows), np.nan, np.float32)
                result.logprobs[is_sampled] = sampled.logprobs
        else:
            sampled = None
        if sampled is not None and sampled.alternatives is not None:
            result.alternative_token_ids = sampled.alternatives.token_ids
            result.alternative_logprobs = sampled.alternatives.logprobs
        if layout.num_candidates is not None:
            beams = ~is_sampled
            candidates = self._sampler.candidates(
                computed.logits, computed.logit_rows[beams], rows[beams], layout.num_candidates[beams]
            )
            result.candidate_token_ids, result.candidate_logprobs = candidates.token_ids, candidates.logprobs
        if computed.prompt_hidden is not None:
            self._answer_prompt(result, layout, computed.prompt_hidden)
        return result

    def _answer_prompt(self, result: StepResult, layout: StepLayout, hidden: torch.Tensor) -> None:
        """Add the log-probabilities of prompt tokens; `hidden` is that of the tokens before them."""
        counts, num_alternatives = layout.num_prompt_logprobs, layout.num_prompt_alternatives
        assert counts is not None
        assert num_alternatives is not None
        spans = zip(layout.slots.tolist(), layout.starts.tolist(), counts.tolist(), strict=True)
        token_ids = [self._table.token_ids[slot, start + 1 : start + 1 + count] for slot, start, count in spans]
        result.prompt_logprobs, alternatives = prompt_logprobs(
            hidden, self._model_runner.model.logits, np.concatenate(token_ids), np.repeat(num_alternatives, counts)
        )
        if alternatives is not None:
            result.prompt_alternative_token_ids = alternatives.token_ids
            result.prompt_alternative_logprobs = alternatives.logprobs


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

    Raises:
        ModelLoadError: the model, or a setting, does not work; the message names the file or the setting.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("the device is cuda, but torch finds no CUDA device")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    directory = find_model_directory(model)
    config = parse_config(directory.config(), directory.path / "config.json")
    model_len = _checked_model_len(config, max_model_len)
    torch_device, torch_dtype = torch.device(device), _torch_dtype(dtype)
    cache_shape = CacheShape(
        config.num_hidden_layers, block_size_tokens, config.num_key_value_heads, config.head_dim, torch_dtype
    )
    num_blocks = cache_shape.num_blocks_in(kv_cache_gib) if num_device_blocks is None else num_device_blocks
    if num_host_blocks is None:
        num_host_blocks = cache_shape.num_blocks_in(host_cache_gib)
    _check_cache_size(cache_shape, num_blocks, num_host_blocks, device)
    network, backend = make_model(config, torch_dtype, torch_device, cpu_kernels=cpu_kernels, quantization=quantization)
    checkpoint = Checkpoint(directory.path)
    checkpoint.load_into(network.named_weights(), network.is_redundant)
    cache_engine = CacheEngine(cache_shape, num_blocks, num_host_blocks, torch_device)
    info = ExecutorInfo(
        instance_id=uuid.uuid4().hex,
        model_id=model_id or _model_id(model),
        model_hash=checkpoint.model_hash(quantization),
        dtype=dtype,
        block_size_tokens=block_size_tokens,
        num_device_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=model_len,
        vocab_size=config.vocab_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_message_bytes=max_message_bytes,
        eos_token_ids=directory.eos_token_ids(),
    )
    runner = ModelRunner(network, cache_engine.layers, backend)
    return TorchWorker(info, runner, cache_engine, Sampler(), directory.tokenizer_files())


def _checked_model_len(config: ModelConfig, max_model_len: int | None) -> int:
    limit = config.max_position_embeddings
    if max_model_len is None:
        return limit
    if not 1 <= max_model_len <= limit:
        raise ModelLoadError(f"max_model_len is {max_model_len}; {config.source} allows 1 to {limit}")
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
