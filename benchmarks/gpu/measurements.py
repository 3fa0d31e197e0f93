"""The figures of make gpu-check, each with its target."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu.engine import InProcessEngine, Prompt, Run
from benchmarks.gpu.models import decode_planners, executor_settings, num_weight_bytes, random_worker, usable_backends
from benchmarks.gpu.part import Figure, Progress
from benchmarks.gpu.sizes import (
    Sizes,
    copy_bytes_per_s,
    decode_bytes_per_s,
    free_memory,
    of_transformers,
    place_of,
    prefix_bytes_per_s,
    seconds_per_call,
)
from executor_svc.attention.cache_format import CACHE_DTYPES, FORMAT_NAMES
from executor_svc.attention.interface import DecodePlanner
from executor_svc.worker.graph_capture import Capture, Cut, Launch, PieceCapture, Replay, graph_capture
from executor_svc.worker.interface import RunningStep, Worker, WorkerAround
from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.step_wire.step import SAMPLING_ROW, SamplingRow, Step, pairs
from octavo_shared.step_wire.token_rules import TokenRules

# With the time of 256 rows, in milliseconds.
FILTERS: Mapping[str, tuple[SamplingRow, float]] = {
    "greedy": (SamplingRow(), 0.05),
    "top-p alone": (SamplingRow(temperature=0.9, top_p=0.95), 0.3),
    "every filter at once": (SamplingRow(temperature=0.9, top_k=200, top_p=0.95, min_p=0.01, typical_p=0.95), 0.8),
}

# Beside each step of one figure.
NUM_SWAPPED_BLOCKS = 64


def measure(progress: Progress, figures: str) -> None:
    """Tell the figures of a function, given as MODULE:NAME, as they come."""
    module, _, name = figures.partition(":")
    progress.add_all(getattr(import_module(f"benchmarks.gpu.{module}"), name)(*place_of(progress)))


def attention_figures(sizes: Sizes, device: torch.device) -> Iterator[Figure]:
    """Measure decode attention of each backend as a share of the copy bandwidth, and with caches of 8 bits."""
    copy = copy_figure(sizes, device)
    yield copy
    copy_rate, planners = copy.value * 1e9, decode_planners(device, sizes.dtype)
    for name, backend in planners.items():
        for shape in sizes.decode_shapes_of(name):
            rate = decode_bytes_per_s(backend, shape, device)
            kind = "latent cache, " if shape.value_begin else ""
            yield Figure(
                f"decode attention, {name}, {kind}{shape.num_rows} rows of {shape.context_tokens:,} tokens",
                100 * rate / copy_rate,
                "% of the copy bandwidth",
                target=80.0 if name == "triton" and not shape.value_begin else None,
                detail=f"{rate / 1e9:,.0f} GB/s; {shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}",
            )
            free_memory(device)
    yield from cache_format_figures(planners["triton"], sizes, device, copy_rate)
    (shape, num_new), (chunked, _) = sizes.prefix, usable_backends(device, sizes.dtype)["triton"]
    rate = prefix_bytes_per_s(chunked, shape, num_new, device)
    about = f"{num_new} new tokens behind a cached prefix of {shape.context_tokens:,}"
    yield Figure(about, 100 * rate / copy_rate, "% of the copy bandwidth", 60.0, detail=f"{rate / 1e9:,.0f} GB/s")


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
                f"time of a decode, {about}",
                seconds / plain_s,
                f"× {beside}",
                target=0.6 if shape is sizes.cache_shapes[-1] else None,
                at_most=True,
                detail=f"{seconds * 1e6:.1f} µs a layer",
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


def idle_figure(run: Run, num_sequences: int, *, of: str = "", target: float = 3.0) -> Figure:
    """Return the share of the time in which the device had no step.

    A step begins with its first work on the device; what the device waits for within a step counts as work.
    """
    steps = "1 sequence" if num_sequences == 1 else f"{num_sequences} sequences"
    detail = f"{run.num_steps} steps, {1e3 * run.wall_s / run.num_steps:.2f} ms each"
    name = f"idle between steps, {of or steps}"
    return Figure(name, 100 * run.idle_share, "%", target=target, at_most=True, detail=detail)


def sampling_figures(sizes: Sizes, device: torch.device) -> Iterator[Figure]:
    """Measure sampling on the device, greedy and with filters."""
    from executor_svc.sampler.device_sampling import sample_on_device

    num_rows, vocab_size = sizes.workload.batch_size, sizes.large_model["vocab_size"]
    logits = torch.randn(num_rows, vocab_size, device=device) * 3
    rows = np.arange(num_rows, dtype=np.int32)
    draws = np.random.default_rng(0).random(num_rows)
    for name, (row, target) in FILTERS.items():
        sampling = np.zeros(num_rows, SAMPLING_ROW)
        sampling[:] = row.as_tuple()
        seconds = seconds_per_call(partial(sample_on_device, logits, rows, sampling, draws), device)
        about = f"sampling, {num_rows} rows of {vocab_size:,} logits, {name}"
        yield Figure(about, seconds * 1e3, "ms", target, at_most=True)
    del logits
    free_memory(device)
    yield _asking_figure(sizes, device)


def _asking_figure(sizes: Sizes, device: torch.device) -> Figure:
    """Measure decodes of which half ask for penalties, log-probabilities and rules, beside others that ask for none."""
    num_rows = sizes.workload.batch_size
    worker = worker_of(sizes.small_model, sizes, device, num_rows)
    plain = Prompt(prompt_of(sizes.prompt_tokens, 1).token_ids, sizes.num_new_tokens, FILTERS["top-p alone"][0])
    asking = replace(plain.sampling, num_logprobs=3, repetition_penalty=1.2, frequency_penalty=0.3)
    rules = TokenRules(
        banned_token_ids=np.arange(5, 9, dtype=np.int32),
        biased_token_ids=np.array([3], np.int32),
        biases=np.ones(1, np.float32),
    )
    asked = replace(plain, sampling=asking, token_rules=rules)
    runs = [_run(worker, [plain, other] * (num_rows // 2)) for other in (plain, asked)]
    plain_s, asked_s = (float(np.median(run.step_s[-sizes.num_new_tokens // 2 :])) for run in runs)
    detail = f"{asked_s * 1e3:.2f} and {plain_s * 1e3:.2f} ms; idle {100 * runs[1].idle_share:.1f} %"
    about = f"a step of {num_rows} rows of which half have penalties, log-probabilities and rules"
    return Figure(about, asked_s / plain_s, "× a step without", target=1.1, at_most=True, detail=detail)


def copy_figure(sizes: Sizes, device: torch.device) -> Figure:
    """Measure what a copy within the device's memory moves."""
    rate = copy_bytes_per_s(device, sizes.copy_bytes)
    free_memory(device)
    return Figure("copy bandwidth", rate / 1e9, "GB/s", detail="read and written bytes together")


def worker_of(
    model: Mapping[str, Any], sizes: Sizes, device: torch.device, max_num_seqs: int, **settings: Any
) -> TorchWorker:
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


class TimedCapture:
    """Captures, and keeps how long each capture took."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.seconds: list[float] = []

    def __call__(self, run: Callable[[], torch.Tensor]) -> Replay:
        begin_s = time.perf_counter()
        replay = self._capture(run)
        self.seconds.append(time.perf_counter() - begin_s)
        return replay

    def in_pieces(self, run: Callable[[Cut], torch.Tensor]) -> tuple[list[Launch], torch.Tensor]:
        assert isinstance(self._capture, PieceCapture), "a device captures both"
        return self._capture.in_pieces(run)


def steps_figures(sizes: Sizes, device: torch.device) -> Iterator[Figure]:
    """Measure on one worker: to make it takes as long as all its steps."""
    copy = copy_figure(sizes, device)
    yield copy
    begin_s = time.perf_counter()
    with timed_captures() as captures:
        worker = worker_of(
            sizes.large_model, sizes, device, max(sizes.decode_batch_sizes), num_host_blocks=NUM_SWAPPED_BLOCKS
        )
    yield Figure("start of a worker, weights made on the device", time.perf_counter() - begin_s, "s")
    for capture in captures[-1:]:  # those before it measured what graphs take
        seconds = capture.seconds
        detail = f"{max(seconds):.2f} s the longest"
        yield Figure(f"capture of {len(seconds)} graphs", sum(seconds), "s", detail=detail)
    limit_s = num_weight_bytes(sizes.large_model, sizes.dtype.itemsize) / (copy.value * 1e9)
    for size in sizes.decode_batch_sizes:
        run = _run(worker, [prompt_of(sizes.prompt_tokens, sizes.num_new_tokens)] * size)
        step_s = float(np.median(run.step_s[-sizes.num_new_tokens // 2 :]))
        yield Figure(
            f"decode step, {size} sequence{'s' * (size > 1)}",
            100 * limit_s / step_s,
            "% of the bandwidth limit of the weights",
            target=70.0 if size == 1 else None,
            detail=f"{step_s * 1e3:.2f} ms, {size / step_s:,.0f} tokens/s; the limit is {limit_s * 1e3:.2f} ms",
        )
        if size == 1:
            yield idle_figure(run, 1)
    num_weights = num_weight_bytes(sizes.large_model, 1)
    for num_tokens in sizes.prefill_tokens:
        run = min((_run(worker, [prompt_of(num_tokens, 1)]) for _ in range(3)), key=lambda run: run.device_s)
        flops = 2 * num_weights * num_tokens / run.device_s
        detail = f"{num_tokens / run.device_s:,.0f} tokens/s, {flops / 1e12:,.0f} TFLOP/s of products"
        yield Figure(f"prefill of {num_tokens:,} tokens", run.device_s * 1e3, "ms", detail=detail)
    yield _mixed_figure(worker, sizes)
    yield _swap_figure(worker, sizes)
    del worker
    free_memory(device)


def _mixed_figure(worker: TorchWorker, sizes: Sizes) -> Figure:
    """Measure a step that has decodes and the rest of a prompt."""
    num_decodes = max(sizes.decode_batch_sizes) // 8 or 1
    budget, longest = sizes.max_num_batched_tokens, sizes.prefill_tokens[-1]
    shorts = [prompt_of(min(sizes.prompt_tokens, budget // (2 * num_decodes)), 8)] * num_decodes
    num_first = budget - sum(len(prompt.token_ids) for prompt in shorts)
    run = _run(worker, [*shorts, prompt_of(longest, 1)])
    detail = f"{num_decodes} decodes and a chunk of {longest - num_first:,} tokens"
    return Figure("mixed step", run.step_s[1] * 1e3, "ms", detail=detail)


class SwappingWorker(WorkerAround):
    """Swaps blocks out in each step, whatever is in them."""

    def launch(self, step: Step) -> RunningStep:
        """Launch a step beside which the last blocks of the pool go to the host."""
        first = self.info.num_device_blocks - NUM_SWAPPED_BLOCKS
        moves = pairs(*((first + index, index) for index in range(NUM_SWAPPED_BLOCKS)))
        return self._worker.launch(replace(step, blocks_to_swap_out=moves))


def _swap_figure(worker: TorchWorker, sizes: Sizes) -> Figure:
    """Measure decodes beside each of which blocks go to the host."""
    num_decodes = sizes.decode_batch_sizes[1]
    prompts = [prompt_of(sizes.prompt_tokens, sizes.num_new_tokens)] * num_decodes
    runs = [_run(each, prompts) for each in (worker, SwappingWorker(worker))]
    plain_s, swapping_s = (float(np.median(run.step_s[-sizes.num_new_tokens // 2 :])) for run in runs)
    return Figure(
        f"a step of {num_decodes} decodes beside a swap-out of {NUM_SWAPPED_BLOCKS} blocks",
        100 * (swapping_s / plain_s - 1),
        "% longer than without",
        target=3.0,
        at_most=True,
        detail=f"{swapping_s * 1e3:.2f} and {plain_s * 1e3:.2f} ms",
    )


def prompt_of(num_tokens: int, num_new_tokens: int) -> Prompt:
    """Return a prompt that repeats itself."""
    return Prompt(3 + np.arange(num_tokens, dtype=np.int32) % 90, num_new_tokens)


def _run(worker: Worker, prompts: list[Prompt]) -> Run:
    worker.reset()
    return InProcessEngine(worker).generate(prompts)


@contextmanager
def timed_captures() -> Iterator[list[TimedCapture]]:
    """Time what the workers made meanwhile capture: one entry for each time that they ask for a capture."""
    made: list[TimedCapture] = []
    find = graph_capture

    def timed(device: torch.device) -> Capture | None:
        capture = find(device)
        if capture is None:
            return None
        made.append(TimedCapture(capture))
        return made[-1]

    with patch("executor_svc.worker.assembly.graph_capture", timed):
        yield made
