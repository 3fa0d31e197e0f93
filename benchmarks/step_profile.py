"""Who takes how many microseconds of one decode step on a CPU: functions of the C library, and parts of the Python.

    python -m benchmarks.step_profile [--rows 1 8 32] [--steps 200] [--threads 1] [--json]

CPU time of the thread that launches steps and finishes them, medians over steps of one token a row. Functions are
timed by clocks around them, here and nowhere else; what a clock takes is measured and left out. A part of the Python
is the time in it without the parts and the functions of the library that it calls; "the rest" is in no part.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.cache.cache_engine import CacheEngine
from executor_svc.config import ExecutorConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.native_dense import NativeDense, NativeEmbedding
from executor_svc.models.native_layers import NativeLayers
from executor_svc.models.native_segments import NativeLastSegment, NativeSegment
from executor_svc.native import library, sampling
from executor_svc.native.binding import bind
from executor_svc.sampler.native_backend import NativeBackend
from executor_svc.sampler.sample_rows import SampleRows
from executor_svc.worker import model_runner, torch_worker
from executor_svc.worker.interface import Worker, execute
from executor_svc.worker.last_tokens import LastTokens
from executor_svc.worker.launched_step import LaunchedStep
from executor_svc.worker.loading import load_worker
from octavo.models.store import prepare_model
from shared.batch_table import BatchTable
from shared.step import Admission, SamplingRow, Step, TableDelta, pairs

BLOCK_SIZE = 16
CONTEXT = 200  # tokens before the first step that is timed
WARM_UP = 20  # steps
FORMATS: Sequence[Literal["none", "int8"]] = ("none", "int8")

# What is timed of the Python: how the table calls it, where it is, its name there.
PARTS: Sequence[tuple[str, object, str]] = (
    ("check the step", torch_worker, "check_step"),
    ("table: apply", BatchTable, "apply"),
    ("check the layout", torch_worker, "check_layout"),
    ("move blocks", CacheEngine, "move"),
    ("prepare the input", model_runner, "prepare_input"),
    ("plan the attention", NativeAttentionBackend, "plan"),
    ("run the model", model_runner.ModelRunner, "run"),
    ("forward", Decoder, "forward"),
    ("rotations", NativeDense, "rotations"),
    ("embedding", NativeEmbedding, "__call__"),
    ("layers", NativeLayers, "__call__"),
    ("end of the last layer", NativeLastSegment, "__call__"),
    ("head", NativeSegment, "__call__"),
    ("logits", Decoder, "logits"),
    ("sample rows", SampleRows, "of_step"),
    ("sample", NativeBackend, "choose"),
    ("answer", torch_worker, "answer_step"),
    ("last tokens: store", LastTokens, "store"),
    ("table: record", BatchTable, "record"),
    ("finish", LaunchedStep, "finish"),
)

STEP, REST = "step", "the rest"


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
def timed_parts(clock: Clock) -> Iterator[None]:
    """Time the parts, and the functions of every library that is loaded meanwhile."""

    def bind_timed(path: Path, functions: Any) -> Any:
        bound = bind(path, functions)
        for name, _, _ in functions:
            setattr(bound, name, clock.timed(f"C: {name.removeprefix('octavo_')}", getattr(bound, name)))
        return bound

    with ExitStack() as stack:
        for module in (library, sampling):
            stack.enter_context(patch.object(module, "bind", bind_timed))
        for name, owner, attribute in PARTS:
            static = vars(owner)[attribute]
            if isinstance(static, classmethod):
                stack.enter_context(patch.object(owner, attribute, classmethod(clock.timed(name, static.__func__))))
            else:
                stack.enter_context(patch.object(owner, attribute, clock.timed(name, static)))
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
    """Return the median time of each part of a step, in microseconds, the largest first; REST comes last."""
    worker.reset()
    # The first prompts decode while the others are computed.
    for prompt_step in prompt_steps(worker, num_rows, CONTEXT + num_rows + WARM_UP + num_steps):
        execute(worker, prompt_step)
    samples: list[dict[str, int]] = []
    run_step = clock.timed(REST, execute)
    for number in range(WARM_UP + num_steps):
        step = Step(1, num_rows + 1 + number, TableDelta())
        clock.take()
        run_step(worker, step)
        samples.append(clock.take())
    samples = samples[WARM_UP:]
    names = sorted({name for sample in samples for name in sample})
    medians = {name: statistics.median(sample.get(name, 0) for sample in samples) / 1e3 for name in names}
    rest = medians.pop(REST)
    return {**dict(sorted(medians.items(), key=lambda item: -item[1])), REST: rest}


def measure(arguments: argparse.Namespace) -> dict[str, dict[int, dict[str, float]]]:
    """Return the profile of each number format, by rows."""
    torch.set_num_threads(arguments.threads)
    directory, most_rows = arguments.model or prepare_model("smollm2"), max(arguments.rows)
    num_blocks = most_rows * -(-(CONTEXT + most_rows + WARM_UP + arguments.steps) // BLOCK_SIZE)
    profiles: dict[str, dict[int, dict[str, float]]] = {}
    for quantization in FORMATS:
        clock = Clock()
        with timed_parts(clock):
            worker = load_worker(
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
            name = "float32" if quantization == "none" else quantization
            profiles[name] = {rows: profile(worker, clock, rows, arguments.steps) for rows in arguments.rows}
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

    for is_c, total in ((True, "C"), (False, "Python")):
        parts = [part for part in first if part.startswith("C: ") == is_c]
        for part in parts:
            add(part.removeprefix("C: "), [profile.get(part, 0.0) for profile in profiles.values()])
        add(f"all of {total}", [sum(profile.get(part, 0.0) for part in parts) for profile in profiles.values()])
        table.add_section()
    add(STEP, [sum(profile.values()) for profile in profiles.values()])
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
