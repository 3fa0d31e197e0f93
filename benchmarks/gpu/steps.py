"""How long steps of an 8B shape take: decodes of several batches, prompts, both in one step; and captures of graphs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu.engine import InProcessEngine, Prompt, Run
from benchmarks.gpu.measurements import copy_figure, free_memory, idle_figure, worker_of
from benchmarks.gpu.models import num_weight_bytes
from benchmarks.gpu.report import Figure
from benchmarks.gpu.sizes import Sizes
from executor_svc.worker.decode_graphs import Capture, Replay, graph_capture
from executor_svc.worker.torch_worker import TorchWorker


class TimedCapture:
    """Captures, and keeps how long each capture took."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.seconds: list[float] = []

    def __call__(self, run: Callable[[], torch.Tensor]) -> Replay:
        """Capture `run`; see `Capture`."""
        begin_s = time.perf_counter()
        replay = self._capture(run)
        self.seconds.append(time.perf_counter() - begin_s)
        return replay


def step_figures(sizes: Sizes, device: torch.device) -> Iterator[Figure]:
    """Measure on one worker: to make it takes as long as all its steps."""
    copy = copy_figure(sizes, device)
    yield copy
    begin_s = time.perf_counter()
    with timed_captures() as captures:
        worker = worker_of(sizes.large_model, sizes, device, max(sizes.decode_batch_sizes))
    yield Figure("start of a worker, weights made on the device", time.perf_counter() - begin_s, "s")
    for capture in captures[-1:]:  # those before it measured what graphs take
        seconds = capture.seconds
        detail = f"{max(seconds):.2f} s the longest"
        yield Figure(f"capture of {len(seconds)} graphs", sum(seconds), "s", detail=detail)
    limit_s = num_weight_bytes(sizes.large_model, sizes.dtype.itemsize) / (copy.value * 1e9)
    for size in sizes.decode_batch_sizes:
        run = _run(worker, [_prompt(sizes.prompt_tokens, sizes.num_new_tokens)] * size)
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
        run = min((_run(worker, [_prompt(num_tokens, 1)]) for _ in range(3)), key=lambda run: run.device_s)
        flops = 2 * num_weights * num_tokens / run.device_s
        detail = f"{num_tokens / run.device_s:,.0f} tokens/s, {flops / 1e12:,.0f} TFLOP/s of products"
        yield Figure(f"prefill of {num_tokens:,} tokens", run.device_s * 1e3, "ms", detail=detail)
    yield _mixed_figure(worker, sizes)
    del worker
    free_memory(device)


def _mixed_figure(worker: TorchWorker, sizes: Sizes) -> Figure:
    """Measure a step that has decodes and the rest of a prompt."""
    num_decodes = max(sizes.decode_batch_sizes) // 8 or 1
    budget, longest = sizes.max_num_batched_tokens, sizes.prefill_tokens[-1]
    shorts = [_prompt(min(sizes.prompt_tokens, budget // (2 * num_decodes)), 8)] * num_decodes
    num_first = budget - sum(len(prompt.token_ids) for prompt in shorts)
    run = _run(worker, [*shorts, _prompt(longest, 1)])
    detail = f"{num_decodes} decodes and a chunk of {longest - num_first:,} tokens"
    return Figure("mixed step", run.step_s[1] * 1e3, "ms", detail=detail)


def _prompt(num_tokens: int, num_new_tokens: int) -> Prompt:
    return Prompt(3 + np.arange(num_tokens, dtype=np.int32) % 90, num_new_tokens)


def _run(worker: TorchWorker, prompts: list[Prompt]) -> Run:
    """Run prompts on an empty worker."""
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
