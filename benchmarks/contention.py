"""Decode steps on a CPU beside other work: tokens a second, without RPC.

    python -m benchmarks.contention [--rows 1 32] [--busy 0 1 2] [--quantization int8] [--turns 3] [--json]

Other work is processes that never rest; more than the machine has cores leave none free. An executor with as many
threads as there are cores, and one with a single thread, take turns. The best of the turns counts least what the rest
of the machine does; the median is printed too.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.step_profile import BLOCK_SIZE, CONTEXT, prompt_steps
from executor_svc.config import ExecutorConfig
from executor_svc.device.cpus import read_cpus
from executor_svc.worker.interface import Worker, execute
from executor_svc.worker.loading import load_worker
from octavo.models.store import prepare_model
from shared.step import Step, TableDelta

TURN_S = 2.0
MOST_STEPS = 600  # of a turn


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes that never rest."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def tokens_per_second(worker: Worker, num_rows: int) -> float:
    """Decode for a turn."""
    worker.reset()
    for step in prompt_steps(worker, num_rows, CONTEXT + num_rows + MOST_STEPS + 1):
        execute(worker, step)
    began = time.perf_counter()
    for number in itertools.count(1):
        execute(worker, Step(1, num_rows + number, TableDelta()))
        elapsed = time.perf_counter() - began
        if elapsed > TURN_S or number == MOST_STEPS:
            return num_rows * number / elapsed
    raise AssertionError("the loop has no other end")


def new_worker(num_threads: int, most_rows: int, quantization: str) -> Worker:
    """Load the demo model."""
    config = {
        "model": str(prepare_model("smollm2")),
        "dtype": "float32",
        "quantization": quantization,
        "num_threads": num_threads,
        "block_size_tokens": BLOCK_SIZE,
        "num_device_blocks": most_rows * -(-(CONTEXT + most_rows + MOST_STEPS + 1) // BLOCK_SIZE),
        "num_host_blocks": 0,
    }
    return load_worker(ExecutorConfig.model_validate(config))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Decode steps beside other work: tokens a second.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="rows of a step (default: 1 32)")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="busy processes (default: 0 1 2)")
    parser.add_argument("--quantization", default="none", help="number format of the weights (default: none)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    arguments = parser.parse_args()
    team_sizes = sorted({read_cpus().num_threads(), 1}, reverse=True)
    workers = {size: new_worker(size, max(arguments.rows), arguments.quantization) for size in team_sizes}
    found: dict[tuple[int, int], dict[int, list[float]]] = {}
    for rows, busy in itertools.product(arguments.rows, arguments.busy):
        turns: dict[int, list[float]] = {size: [] for size in team_sizes}
        with busy_processes(busy):
            for _, size in itertools.product(range(arguments.turns), team_sizes):
                turns[size].append(tokens_per_second(workers[size], rows))
        found[rows, busy] = turns
    print_figures(found, team_sizes, as_json=arguments.json)


def print_figures(
    found: dict[tuple[int, int], dict[int, list[float]]], team_sizes: Sequence[int], *, as_json: bool
) -> None:
    """Print the figures of all turns, or a table of the best and the median ones."""
    load = os.getloadavg()[0]
    if as_json:
        figures = [{"rows": rows, "busy": busy, "turns": turns} for (rows, busy), turns in found.items()]
        print(json.dumps({"machine": describe_machine(), "load": load, "tokens_per_second": figures}))
        return
    table = Table(title="Tokens a second beside busy processes: best turn (median)")
    for name in ("rows", "busy processes", *(f"{size} thread{'s' * (size > 1)}" for size in team_sizes)):
        table.add_column(name, justify="right")
    for (rows, busy), turns in found.items():
        cells = [f"{max(turns[size]):,.0f} ({statistics.median(turns[size]):,.0f})" for size in team_sizes]
        table.add_row(str(rows), str(busy), *cells)
    console = Console()
    console.print(table)
    console.print(f"load of the machine {load:.1f}; {describe_machine()}")


if __name__ == "__main__":
    main()
