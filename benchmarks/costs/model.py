"""Scenarios of the model on a CPU: the whole stack, long prompts, sampling, a step by its parts, contention."""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.costs.clock import Clock
from benchmarks.costs.harness import Figures, Groups, Size, Way, in_turn, scenario
from benchmarks.costs.workers import (
    BLOCK_SIZE,
    IN_BFLOAT16,
    Decoding,
    chunks_of,
    decode_tokens,
    new_worker,
    prompt_steps,
    random_prompts,
    title,
)
from benchmarks.end_to_end.adapters.interface import Options
from benchmarks.end_to_end.engine_process import EngineProcess
from benchmarks.end_to_end.engines import model_costs
from benchmarks.end_to_end.session import RUN_TIMEOUT_S, START_TIMEOUT_S, adapter_command
from benchmarks.end_to_end.workloads import WARM_UPS, Workload, by_name
from executor_svc.attention.interface import AttentionLayer, AttentionMetadata, LayerCache
from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.device.cpus import read_cpus
from executor_svc.models.config import ModelConfig
from executor_svc.models.families import parse_config
from executor_svc.native import library, sampling
from executor_svc.native.binding import bind
from executor_svc.native.library import load_library
from executor_svc.native.sampling import load_sampling
from executor_svc.sampler.sample_rows import SampleRows
from executor_svc.sampler.sampler import Sampler
from executor_svc.worker import assembly
from executor_svc.worker.interface import Worker, execute
from octavo_shared.step_wire.step import SAMPLING_ROW, Int32Array, SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules, pack_mask, pad_words

# The whole stack beside a bare loop -------------------------------------------------------------

BARE, WHOLE = "octavo:OctavoLoop", "octavo:OctavoStack"  # in end_to_end/adapters


@scenario("stack", "tokens a second of the whole stack beside a bare loop of planner and worker, workload W2", pairs=3)
async def stack(size: Size) -> Groups:
    """The bare loop has no gRPC, no text, no stream. Both live in processes of their own and take turns."""
    num_planners = read_cpus().num_threads()
    teams = sorted({num_planners, max(1, num_planners - 1)}, reverse=True)
    for number_format, num_threads in itertools.islice(itertools.product(("none", "int8-a8"), teams), size.of(None, 1)):
        with ExitStack() as running, tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
            options = Options(
                *(str(size.directory()), number_format, num_threads),
                cores=sorted(os.sched_getaffinity(0)),
                max_tokens=max(one.longest_tokens for one in (by_name("W2"), *WARM_UPS)),
            )
            pair = StackPair(options, size.of(by_name("W2"), WARM_UPS[0]), Path(folder), running)
            name = f"{title(number_format)}, {counted(num_threads)}: "
            yield [
                Way(f"{name}bare loop", in_turn(pair.turn, BARE)),
                Way(f"{name}whole stack", in_turn(pair.turn, WHOLE), beside=f"{name}bare loop"),
            ]


def counted(num_threads: int) -> str:
    return f"{num_threads} thread{'s' * (num_threads > 1)}"


class StackPair:
    """Both ways with one set of options; a pair has new prompts, the same for both, and must get the same tokens."""

    def __init__(self, options: Options, workload: Workload, folder: Path, running: ExitStack) -> None:
        self._options = options
        self._workload = workload
        self._folder = folder
        self._running = running
        self._vocab_size = model_costs(Path(options.model)).vocab_size
        self._processes: dict[str, EngineProcess] = {}
        self._num_turns = {BARE: 0, WHOLE: 0}
        self._outputs: dict[int, list[list[int]]] = {}

    def turn(self, adapter: str) -> Figures:
        """Compute the workload."""
        process = self._processes.get(adapter) or self._start(adapter)
        self._num_turns[adapter] += 1
        seed = self._num_turns[adapter]
        made = process.generate(self._workload.requests(seed, self._vocab_size), RUN_TIMEOUT_S)
        if self._outputs.setdefault(seed, made.token_ids) != made.token_ids:
            raise RuntimeError("the stack and the bare loop gave other tokens: nothing can be compared")
        return {"tokens/s": self._workload.output_tokens / made.seconds}

    def _start(self, adapter: str) -> EngineProcess:
        log = self._folder / f"{adapter.partition(':')[2]}.log"
        process = self._processes[adapter] = self._running.enter_context(EngineProcess(adapter_command(adapter), log))
        process.start(self._options, START_TIMEOUT_S)
        for warm_up in WARM_UPS:
            process.generate(warm_up.requests(0, self._vocab_size), RUN_TIMEOUT_S)
        return process


# Long prompts -----------------------------------------------------------------------------------


@scenario("prefill", "time to the first token of long prompts, without RPC, and the attention in it", pairs=3)
async def prefill(size: Size) -> Groups:
    """One prompt at a time, cut into chunks as the scheduler cuts it, greedy. Attention is timed by itself on the same
    chunks, with a cache of the model's shape, and counted for all layers.
    """
    threads, lengths, chunk = torch.get_num_threads(), size.of((512, 2000, 8000), (40,)), size.of(2048, 32)
    for number_format in size.of(("none", "int8", IN_BFLOAT16, f"{IN_BFLOAT16}int8-a8"), ("none",)):
        worker = new_worker(size.directory(), number_format, threads, max(lengths) + 1, chunk=chunk)
        first_token_ms(worker, min(lengths), chunk)  # memory, and the team's size
        yield [
            Way(
                f"{title(number_format)}, {length:,} tokens",
                in_turn(prefill_turn, worker, size.directory(), number_format, length, chunk),
            )
            for length in lengths
        ]


def prefill_turn(worker: Worker, directory: Path, number_format: str, num_tokens: int, chunk: int) -> Figures:
    """Compute a prompt, and its attention by itself."""
    whole_ms = first_token_ms(worker, num_tokens, chunk)
    config = parse_config(ModelDirectory(directory).config(), directory / "config.json")
    attention_ms = attention_ms_of(config, num_tokens, chunk, in_bfloat16=number_format.startswith(IN_BFLOAT16))
    # Of what a query sees: two products, each multiply-add two operations.
    width = sum(layer.num_heads * layer.head_dim for layer in config.layers)
    flop = 2.0 * width * num_tokens * (num_tokens + 1)
    return {
        "first token, ms": whole_ms,
        "tokens/s": 1000 * num_tokens / whole_ms,
        "attention, ms": attention_ms,
        "attention, GFLOP/s": flop / attention_ms / 1e6,
    }


def first_token_ms(worker: Worker, num_tokens: int, chunk: int) -> float:
    """Return the time from the first chunk of a prompt to its sampled token."""
    prompts = random_prompts(worker, 1, num_tokens)
    worker.reset()
    began_s = time.perf_counter()
    for step in prompt_steps(worker, prompts, num_tokens + 1, chunk):
        execute(worker, step)
    return 1000 * (time.perf_counter() - began_s)


def attention_ms_of(config: ModelConfig, num_tokens: int, chunk: int, *, in_bfloat16: bool) -> float:
    """Return the time of the attention of one prompt, all layers, as if none had a window."""
    backend = NativeAttentionBackend(load_library(torch.get_num_threads()), in_bfloat16=in_bfloat16)
    dtype = torch.bfloat16 if in_bfloat16 else torch.float32
    num_blocks, layer = -(-num_tokens // BLOCK_SIZE), config.layers[0]
    shape = (num_blocks, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim)
    # Two, so that each is cold again.
    caches = [LayerCache(torch.rand(shape).to(dtype), torch.rand(shape).to(dtype)) for _ in range(2)]
    tables, elapsed_s = np.arange(num_blocks, dtype=np.int32)[None], 0.0
    for begin, length in chunks_of(num_tokens, chunk):
        metadata = AttentionMetadata(
            np.array([begin], np.int32), np.array([length], np.int32), tables, torch.arange(begin, begin + length)
        )
        qkv = torch.rand(length, layer.num_heads + 2 * layer.num_kv_heads, layer.head_dim)
        plan = backend.plan(metadata, caches[0])
        for cache in caches:
            began_s = time.perf_counter()
            plan.attend(qkv, None, cache, AttentionLayer(layer.head_dim**-0.5))
            elapsed_s += time.perf_counter() - began_s
    return 1000 * elapsed_s / len(caches) * config.num_hidden_layers


# Sampling ---------------------------------------------------------------------------------------

SAMPLER_ROWS, SAMPLER_CONTEXT = 32, 256


@scenario("sampler", "sampling 32 rows, greedily and with all that a request can ask for, beside a step", pairs=30)
async def sampler(size: Size) -> Groups:
    """On the logits that the model has after some ordinary tokens."""
    context, most_steps, directory = size.of(SAMPLER_CONTEXT, 16), size.of(200, 3), size.directory()
    num_tokens = decode_tokens(SAMPLER_ROWS, context, most_steps)
    worker = new_worker(directory, "none", torch.get_num_threads(), num_tokens, SAMPLER_ROWS)
    vocab_size = worker.info.vocab_size
    prompts = torch.from_numpy(np.stack(random_prompts(worker, SAMPLER_ROWS, context)).astype(np.int64))
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        logits = reference(prompts, logits_to_keep=1).logits[:, 0].contiguous()
    sampler, all_rows = Sampler(load_sampling(torch.get_num_threads())), np.arange(SAMPLER_ROWS, dtype=np.int32)
    decoding = Decoding(worker, SAMPLER_ROWS, context, most_steps)

    @torch.inference_mode()
    def sampled(rows: SampleRows) -> Figures:
        return {"ms": milliseconds(lambda: sampler.sample(logits, all_rows, rows))}

    yield [
        Way("a step", in_turn(lambda: {"ms": milliseconds(decoding.step)})),
        Way("greedy", in_turn(sampled, sample_rows(SamplingRow(), None, vocab_size, context)), "a step"),
        Way(
            "everything", in_turn(sampled, sample_rows(*everything(vocab_size, context), vocab_size, context)), "a step"
        ),
    ]


def milliseconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began_s = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began_s)


def everything(vocab_size: int, context: int) -> tuple[SamplingRow, TokenRules]:
    """Return all that a request can ask of the sampler at once."""
    generator = np.random.default_rng(0)

    def some(count: int) -> Int32Array:
        return generator.choice(vocab_size, min(count, vocab_size // 2), replace=False).astype(np.int32)

    biased = some(300)
    rules = TokenRules(
        biased_token_ids=biased,
        biases=np.ones(len(biased), np.float32),
        stop_token_ids=some(3),
        banned_token_ids=some(1024)[: vocab_size // 4],
        banned_words=pad_words([some(4).tolist() for _ in range(64)]),
        allowed_mask=pack_mask(some(vocab_size // 2), vocab_size),
    )
    penalties: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    filters: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.95}
    return SamplingRow(num_logprobs=20, min_tokens=context, **penalties, **filters), rules


def sample_rows(sampling: SamplingRow, rules: TokenRules | None, vocab_size: int, context: int) -> SampleRows:
    """Return rows with random histories, all sampled alike but for their seeds."""
    rows = np.array([sampling.as_tuple()] * SAMPLER_ROWS, SAMPLING_ROW)
    rows["seed"] = np.arange(SAMPLER_ROWS)
    return SampleRows(
        sampling=rows,
        rules=[rules] * SAMPLER_ROWS,
        slots=np.arange(SAMPLER_ROWS, dtype=np.int32),
        num_tokens=np.full(SAMPLER_ROWS, context, np.int32),
        num_prompt_tokens=np.full(SAMPLER_ROWS, context // 2, np.int32),
        token_ids=np.random.default_rng(1).integers(0, vocab_size, (SAMPLER_ROWS, context)).astype(np.int32),
    )


# A step by its parts ----------------------------------------------------------------------------

CONTEXT = 200  # tokens before the first step that is timed
WARM_UP = 20  # steps


@scenario("step", "CPU of one decode step by the functions of the C library, and the Python around them", pairs=3)
async def step(size: Size) -> Groups:
    """One thread. A step is one call of the library; its parts have the shares that they have when they are called one
    by one. Clocks around the library's functions are here and nowhere else.
    """
    context, num_steps, most_rows = size.of(CONTEXT, 16), size.of(200, 3), size.of(32, 2)
    for number_format in size.of(("none", IN_BFLOAT16, "int8-a8", f"{IN_BFLOAT16}int8-a8"), ("none",)):
        clock = Clock()
        with timed_library(clock):
            num_tokens = decode_tokens(most_rows, context, WARM_UP + num_steps)
            load = partial(new_worker, size.directory(), number_format, 1, num_tokens, most_rows)
            whole = load()
            with patch.object(assembly, "native_forward", lambda *_: None):
                one_by_one = load()
        yield [
            Way(
                f"{title(number_format)}, {rows} row{'s' * (rows > 1)}",
                in_turn(step_turn, clock, whole, one_by_one, rows, context, num_steps),
            )
            for rows in size.of((1, 8, 32), (2,))
        ]


@contextmanager
def timed_library(clock: Clock) -> Iterator[None]:
    """Time the functions of every library that is loaded meanwhile."""

    def bind_timed(path: Path, functions: Any) -> Any:
        bound = bind(path, functions)
        for name, _, _ in functions:
            setattr(bound, name, clock.timed(name.removeprefix("octavo_"), getattr(bound, name)))
        return bound

    with patch.object(library, "bind", bind_timed), patch.object(sampling, "bind", bind_timed):
        yield


def step_turn(clock: Clock, whole: Worker, one_by_one: Worker, num_rows: int, context: int, num_steps: int) -> Figures:
    """Return the microseconds of the parts of a step, the largest first."""
    python_us, calls = parts_of(clock, whole, num_rows, context, num_steps)
    _, parts = parts_of(clock, one_by_one, num_rows, context, num_steps)
    forward_us = calls.pop("forward")
    scale = forward_us / sum(parts.values())
    split = {f"C: {name}, µs": us * scale for name, us in sorted(parts.items(), key=lambda part: -part[1])}
    others = {f"C: {name}, µs": us for name, us in calls.items() if name not in parts}
    total_us = forward_us + sum(calls.values()) + python_us
    return {**split, **others, "Python, µs": python_us, "a step, µs": total_us}


def parts_of(
    clock: Clock, worker: Worker, num_rows: int, context: int, num_steps: int
) -> tuple[float, dict[str, float]]:
    """Return the microseconds of a step outside of the library, and those in each of its functions: means."""
    decoding = Decoding(worker, num_rows, context, WARM_UP + num_steps)
    for _ in range(WARM_UP):
        decoding.step()
    clock.calls.clear()
    clock.elapsed_ns.clear()
    began_ns = time.thread_time_ns()
    for _ in range(num_steps):
        decoding.step()
    elapsed_ns = time.thread_time_ns() - began_ns
    of_clocks_ns = clock.elapsed_ns.total() + clock.calls.total() * clock.cost_ns
    parts = {name: part_ns / num_steps / 1000 for name, part_ns in clock.elapsed_ns.items()}
    return (elapsed_ns - of_clocks_ns) / num_steps / 1000, parts


# Beside other work ------------------------------------------------------------------------------


@scenario("contention", "decoded tokens a second beside processes that never rest, all threads or one", pairs=3)
async def contention(size: Size) -> Groups:
    """Without RPC. More busy processes than the machine has cores leave none free."""
    context, seconds, most_steps = size.of(CONTEXT, 16), size.of(2.0, 0.02), size.of(600, 20)
    teams = sorted({read_cpus().num_threads(), 1}, reverse=True)
    all_rows = size.of((1, 32), (2,))
    num_tokens = decode_tokens(max(all_rows), context, most_steps)
    workers = {team: new_worker(size.directory(), "none", team, num_tokens, max(all_rows)) for team in teams}
    for rows, num_busy in itertools.product(all_rows, size.of((0, 1, 2), (1,))):
        with busy_processes(num_busy):
            names = {team: f"{rows} rows, {num_busy} busy, {counted(team)}" for team in teams}
            yield [
                Way(
                    names[team],
                    in_turn(contention_turn, workers[team], rows, context, seconds, most_steps),
                    names[teams[0]] if team != teams[0] else "",
                )
                for team in teams
            ]


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def contention_turn(worker: Worker, num_rows: int, context: int, seconds: float, most_steps: int) -> Figures:
    """Decode for a while."""
    decoding = Decoding(worker, num_rows, context, most_steps)
    began_s, num_steps, elapsed_s = time.perf_counter(), 0, 0.0
    while elapsed_s < seconds and num_steps < most_steps:
        decoding.step()
        num_steps += 1
        elapsed_s = time.perf_counter() - began_s
    return {"tokens/s": num_rows * num_steps / elapsed_s}
