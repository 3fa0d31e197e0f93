"""Who takes how many microseconds of one decode step on a CPU: functions of the C library, and parts of the Python.

    python -m benchmarks.step_profile [--rows 1 8 32] [--steps 200] [--threads 1] [--json]

CPU time of the thread that launches steps and finishes them, medians over steps of one token a row. Functions are
timed by clocks around them, here and nowhere else. A part of the Python is the time in it without the parts and the
functions of the library that it calls. A whole step is one call of the library; the shares of its parts are those of
steps whose functions are called one by one. Clocks take time too, more than where they are measured in a loop: the
weights have driven all else out of the caches. So the sum of the Python is that of steps in which only the library is
timed.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from executor_svc.cache.cache_engine import CacheEngine
from executor_svc.config import ExecutorConfig
from executor_svc.native import library, sampling
from executor_svc.native.binding import bind
from executor_svc.native.library import NativeLibrary
from executor_svc.sampler.native_backend import NativeBackend
from executor_svc.sampler.sample_rows import RowLookup
from executor_svc.sampler.sampler import Sampler
from executor_svc.worker import assembly, torch_worker
from executor_svc.worker.interface import Worker, execute
from executor_svc.worker.loading import load_worker
from executor_svc.worker.native_runner import NativeRunner
from executor_svc.worker.torch_worker import TorchWorker
from octavo.models.store import prepare_model
from shared import batch_table
from shared.batch_table import BatchTable
from shared.step import Admission, SamplingRow, Step, TableDelta, pairs

BLOCK_SIZE = 16
CONTEXT = 200  # tokens before the first step that is timed
WARM_UP = 20  # steps
FORMATS: Sequence[Literal["none", "int8-a8"]] = ("none", "int8-a8")

# What is timed of the Python: how the table calls it, where it is, its name there.
PARTS: Sequence[tuple[str, object, str]] = (
    ("launch", TorchWorker, "launch"),
    ("launch: check the step", torch_worker, "check_step"),
    ("launch: check the layout", torch_worker, "check_layout"),
    ("launch: move blocks", CacheEngine, "move"),
    ("launch: answer", torch_worker, "answer_step"),
    ("table: check the delta", batch_table, "check_delta"),
    ("table: apply", BatchTable, "apply"),
    ("table: record", BatchTable, "record"),
    ("model: run", NativeRunner, "run"),
    ("model: call", NativeLibrary, "forward"),
    ("sampler: rows", RowLookup, "of_step"),
    ("sampler: sample", Sampler, "sample"),
    ("sampler: choose", NativeBackend, "choose"),
)

PYTHON, REST = "all of Python", "rest"
WHOLE_STEP = "C: forward"


class Clock:
    """Adds up the time that parts take in themselves, in nanoseconds."""

    def __init__(self) -> None:
        self.elapsed: dict[str, int] = {}
        self._inner = [0]  # for each part that is running, the time of the parts that it has called
        self._cost_inside, self._cost_around = 0, 0
        self._calibrate()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time taken."""

        @wraps(function, assigned=(), updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0)
            began = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                total = time.thread_time_ns() - began - self._cost_inside
                self.elapsed[name] = self.elapsed.get(name, 0) + total - self._inner.pop()
                self._inner[-1] += total + self._cost_inside + self._cost_around

        return run

    def take(self) -> dict[str, int]:
        """Return what has added up, and start again."""
        taken, self.elapsed = self.elapsed, {}
        return taken

    def _calibrate(self) -> None:
        """Find what timing a function adds to it, and to who calls it."""

        def nothing() -> None:
            return None

        inside, around = self.timed("inside", nothing), self.timed("outer", lambda: [inside() for _ in range(100)])
        samples = []
        for _ in range(100):
            around()
            self._inner = [0]
            samples.append(self.take())
        self._cost_inside = round(statistics.median(sample["inside"] for sample in samples) / 100)
        self._cost_around = round(statistics.median(sample["outer"] for sample in samples) / 100)


@contextmanager
def timed_library(clock: Clock) -> Iterator[None]:
    """Time the functions of every library that is loaded meanwhile."""

    def bind_timed(path: Path, functions: Any) -> Any:
        bound = bind(path, functions)
        for name, _, _ in functions:
            setattr(bound, name, clock.timed(f"C: {name.removeprefix('octavo_')}", getattr(bound, name)))
        return bound

    with patch.object(library, "bind", bind_timed), patch.object(sampling, "bind", bind_timed):
        yield


@contextmanager
def timed_parts(clock: Clock) -> Iterator[None]:
    """Time the parts of the Python."""
    with ExitStack() as stack:
        for name, owner, attribute in PARTS:
            timed = clock.timed(name, vars(owner)[attribute])
            stack.enter_context(patch.object(owner, attribute, timed))
        yield


def prompt_steps(worker: Worker, num_rows: int, num_tokens: int) -> Iterator[Step]:
    """Yield a step for the prompt of each row, with blocks for as many tokens as there will be."""
    num_blocks, generator = -(-num_tokens // worker.info.block_size_tokens), np.random.default_rng(0)
    for slot in range(num_rows):
        prompt = generator.integers(0, worker.info.vocab_size, CONTEXT).astype(np.int32)
        blocks = np.arange(slot * num_blocks, (slot + 1) * num_blocks, dtype=np.int32)
        admission = Admission(slot, 1, prompt, CONTEXT, 0, blocks, SamplingRow())
        delta = TableDelta(admissions=(admission,), prefill_chunks=pairs((slot, CONTEXT)))
        yield Step(1, slot + 1, delta)


def profile(worker: Worker, clock: Clock, num_rows: int, num_steps: int) -> dict[str, float]:
    """Return the median time of each part of a step, in microseconds, the largest first, and their sum in Python."""
    worker.reset()
    step_ids = itertools.count(num_rows + 1)
    run_step = clock.timed(REST, execute)

    def medians() -> dict[str, float]:
        samples: list[dict[str, int]] = []
        for _ in range(WARM_UP + num_steps):
            step = Step(1, next(step_ids), TableDelta())
            clock.take()
            run_step(worker, step)
            samples.append(clock.take())
        names = sorted({name for sample in samples for name in sample})
        return {name: statistics.median(sample.get(name, 0) for sample in samples[WARM_UP:]) / 1e3 for name in names}

    # The first prompts decode while the others are computed.
    for prompt_step in prompt_steps(worker, num_rows, CONTEXT + num_rows + 2 * (WARM_UP + num_steps)):
        execute(worker, prompt_step)
    found = medians()
    python_us = found.pop(REST)
    with timed_parts(clock):
        parts = {name: figure for name, figure in medians().items() if not name.startswith("C: ") and name != REST}
    ordered = dict(sorted({**found, **parts}.items(), key=lambda item: -item[1]))
    return {**ordered, PYTHON: python_us}


def split_whole_step(profile: dict[str, float], one_by_one: dict[str, float]) -> dict[str, float]:
    """Return a profile in which the one call of the library is split as its functions share the time one by one."""
    parts = {name: figure for name, figure in one_by_one.items() if name.startswith("C: ")}
    scale = profile[WHOLE_STEP] / sum(parts.values())
    others = {name: figure for name, figure in profile.items() if name != WHOLE_STEP}
    return {**{name: figure * scale for name, figure in parts.items()}, **others}


def measure(arguments: argparse.Namespace) -> dict[str, dict[int, dict[str, float]]]:
    """Return the profile of each number format, by rows."""
    torch.set_num_threads(arguments.threads)
    directory, most_rows = arguments.model or prepare_model("smollm2"), max(arguments.rows)
    num_blocks = most_rows * -(-(CONTEXT + most_rows + 2 * (WARM_UP + arguments.steps)) // BLOCK_SIZE)
    profiles: dict[str, dict[int, dict[str, float]]] = {}
    for quantization in FORMATS:
        clock = Clock()

        def load(quantization: Literal["none", "int8-a8"] = quantization) -> Worker:
            return load_worker(
                ExecutorConfig(
                    model=str(directory),
                    dtype="float32",
                    quantization=quantization,
                    num_threads=arguments.threads,
                    block_size_tokens=BLOCK_SIZE,
                    num_device_blocks=num_blocks,
                    num_host_blocks=0,
                )
            )

        with timed_library(clock):
            whole = load()
            with patch.object(assembly, "native_forward", lambda *_: None):
                one_by_one = load()
            profiles["float32" if quantization == "none" else quantization] = {
                rows: split_whole_step(
                    *(profile(worker, clock, rows, arguments.steps) for worker in (whole, one_by_one))
                )
                for rows in arguments.rows
            }
    return profiles


def table_of(name: str, profiles: dict[int, dict[str, float]]) -> Table:
    """Return the profile of a number format: the library first, then the Python, then both."""
    table = Table(title=f"One decode step, {name}: CPU time of the thread in µs, medians")
    table.add_column("part")
    for rows in profiles:
        table.add_column(f"{rows} rows" if rows > 1 else "1 row", justify="right")
    first = next(iter(profiles.values()))

    def add(label: str, figures: Sequence[float]) -> None:
        table.add_row(label, *(f"{figure:,.0f}" for figure in figures))

    def sums(of: Callable[[str], bool]) -> list[float]:
        return [sum(figure for part, figure in profile.items() if of(part)) for profile in profiles.values()]

    library_parts = [part for part in first if part.startswith("C: ")]
    for part in library_parts:
        add(part, [profile.get(part, 0.0) for profile in profiles.values()])
    table.add_section()
    for part in first:
        if part not in library_parts:
            add(part, [profile.get(part, 0.0) for profile in profiles.values()])
    table.add_section()
    add("step", sums(lambda part: part in library_parts or part == PYTHON))
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Who takes how many µs of one decode step on a CPU.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="rows of a step (default: 1 8 32)")
    parser.add_argument("--steps", type=int, default=200, help="steps that are timed (default: 200)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the executor (default: 1)")
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: the demo model)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    arguments = parser.parse_args()
    with redirect_stdout(sys.stderr):  # the executor says which kernels it has
        profiles = measure(arguments)
    if arguments.json:
        print(json.dumps({"machine": describe_machine(), "threads": arguments.threads, "microseconds": profiles}))
        return
    console = Console()
    for name, by_rows in profiles.items():
        console.print(table_of(name, by_rows))
    console.print(f"{arguments.threads} thread{'s' * (arguments.threads > 1)}, {describe_machine()}")


if __name__ == "__main__":
    main()
