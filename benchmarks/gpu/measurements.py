"""The figures of `make gpu-check`, each with its target; see `benchmarks/gpu_check.py`."""

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bandwidth import copy_bytes_per_s, decode_bytes_per_s, seconds_per_call
from benchmarks.gpu.engine import InProcessEngine, Run
from benchmarks.gpu.models import random_worker
from benchmarks.gpu.report import Figure
from benchmarks.gpu.settings import executor_settings
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.throughput import of_transformers
from executor_svc.attention.cache_format import CACHE_DTYPES, FORMAT_NAMES
from executor_svc.attention.interface import DecodePlanner
from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.step_wire.step import SAMPLING_ROW, SamplingRow

FILTERS = {
    "greedy": SamplingRow(),
    "top-p alone": SamplingRow(temperature=0.9, top_p=0.95),
    "every filter at once": SamplingRow(temperature=0.9, top_k=200, top_p=0.95, min_p=0.01, typical_p=0.95),
}


def attention_figures(
    backends: dict[str, DecodePlanner], sizes: Sizes, device: torch.device, copy_rate: float
) -> Iterator[Figure]:
    """Measure decode attention of each backend as a share of the copy bandwidth."""
    for name, backend in backends.items():
        for shape in sizes.decode_shapes_of(name):
            rate = decode_bytes_per_s(backend, shape, device)
            yield Figure(
                f"decode attention, {name}, {shape.num_rows} rows of {shape.context_tokens:,} tokens",
                100 * rate / copy_rate,
                "% of the copy bandwidth",
                target=80.0 if name == "triton" else None,
                detail=f"{rate / 1e9:,.0f} GB/s; {shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}",
            )
            free_memory(device)


def cache_format_figures(
    backend: DecodePlanner, sizes: Sizes, device: torch.device, copy_rate: float
) -> Iterator[Figure]:
    """Measure decodes with caches of 8 bits: the share of the copy bandwidth, and the time beside the model's dtype."""
    for shape in sizes.cache_shapes:
        plain_s = shape.num_bytes / decode_bytes_per_s(backend, shape, device)
        for name in ("int8", "fp8_e4m3"):
            narrow = replace(shape, cache_dtype=CACHE_DTYPES[name])
            rate = decode_bytes_per_s(backend, narrow, device)
            about = f"{shape.num_rows} rows of {shape.context_tokens:,} tokens, cache {name}"
            yield Figure(
                f"decode attention, triton, {about}",
                100 * rate / copy_rate,
                "% of the copy bandwidth",
                detail=f"{rate / 1e9:,.0f} GB/s",
            )
            seconds = narrow.num_bytes / rate
            beside = f"the time of {FORMAT_NAMES[shape.dtype]}"
            yield Figure(
                f"time of a decode, {about}", seconds / plain_s, f"× {beside}", detail=f"{seconds * 1e6:.1f} µs a layer"
            )
            free_memory(device)


def throughput_figures(sizes: Sizes, device: torch.device) -> Iterator[Figure]:
    """Measure output tokens a second of ragged requests, beside transformers' static batches."""
    prompts = sizes.workload.prompts(sizes.small_model["vocab_size"])
    batch_size = sizes.workload.batch_size
    run = InProcessEngine(worker_of(sizes.small_model, sizes, device, batch_size)).generate(prompts)
    free_memory(device)
    rate = run.num_output_tokens / run.wall_s
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    requests = f"{len(prompts)} requests, {num_prompt_tokens:,} prompt and {run.num_output_tokens:,} output tokens"
    yield Figure("output tokens, Octavo", rate, "tokens/s", detail=f"{requests}; {run.num_steps} steps")
    yield idle_figure(run, batch_size)
    theirs = of_transformers(sizes.small_model, prompts[:batch_size], batch_size, device, sizes.dtype)
    yield Figure(
        "output tokens, transformers", theirs, "tokens/s", detail=f"the first {batch_size} of them, a static batch"
    )
    yield Figure("Octavo beside transformers", rate / theirs, "×", target=10.0)


def idle_figure(run: Run, num_sequences: int) -> Figure:
    """Return the share of the time in which the device had no step.

    A step begins with its first work on the device; what the device waits for within a step counts as work.
    """
    steps = "1 sequence" if num_sequences == 1 else f"{num_sequences} sequences"
    detail = f"{run.num_steps} steps, {1e3 * run.wall_s / run.num_steps:.2f} ms each"
    return Figure(f"idle between steps, {steps}", 100 * run.idle_share, "%", target=3.0, at_most=True, detail=detail)


def sampling_figures(sizes: Sizes, device: torch.device) -> Iterator[Figure]:
    """Measure sampling on the device, greedy and with filters."""
    from executor_svc.sampler.device_sampling import sample_on_device

    num_rows, vocab_size = sizes.workload.batch_size, sizes.large_model["vocab_size"]
    logits = torch.randn(num_rows, vocab_size, device=device) * 3
    rows = np.arange(num_rows, dtype=np.int32)
    draws = np.random.default_rng(0).random(num_rows)
    for name, row in FILTERS.items():
        sampling = np.zeros(num_rows, SAMPLING_ROW)
        sampling[:] = row.as_tuple()
        seconds = seconds_per_call(partial(sample_on_device, logits, rows, sampling, draws), device)
        yield Figure(f"sampling, {num_rows} rows of {vocab_size:,} logits, {name}", seconds * 1e3, "ms")


def copy_figure(sizes: Sizes, device: torch.device) -> Figure:
    """Measure what a copy within the device's memory moves."""
    rate = copy_bytes_per_s(device, sizes.copy_bytes)
    free_memory(device)
    return Figure("copy bandwidth", rate / 1e9, "GB/s", detail="read and written bytes together")


def worker_of(
    model: Mapping[str, Any], sizes: Sizes, device: torch.device, max_num_seqs: int, **settings: Any
) -> TorchWorker:
    """Return a worker with random weights."""
    config = executor_settings(
        device=device.type,
        dtype=str(sizes.dtype).removeprefix("torch."),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        num_device_blocks=sizes.num_device_blocks,
        host_cache_gib=0.0,
        **settings,
    )
    return random_worker(model, config, device)


def free_memory(device: torch.device) -> None:
    """Give back what nobody uses any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
