"""What the stack costs: workload W2 through client, scheduler and executor, and by a bare loop of core and worker.

    python -m benchmarks.stack_cost [--pairs 3] [--formats none int8-a8] [--threads 2 1] [--quick] [--json FILE]

The bare loop decides a step, executes it and gives its result back, in one process: no gRPC, no text, no stream. Both
run in processes of their own that stay alive and take turns. A pair is one run of each, with the same prompts, new in
every pair; the one that begins changes with the pair. The figure of a pair is the share of the bare loop's tokens a
second that the stack loses. The executor has a thread for each core, or leaves one core to the stack. A pair during
which other work had more than 5 % of the cores is repeated, twice at most, and counts only where there is no other.
"""

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.markdown import Markdown

from benchmarks.end_to_end.adapters.interface import Generation, Options
from benchmarks.end_to_end.engine_process import EngineError, EngineProcess
from benchmarks.end_to_end.engines import our_formats
from benchmarks.end_to_end.model_costs import model_costs
from benchmarks.end_to_end.process_load import LoadMeter
from benchmarks.end_to_end.session import RUN_TIMEOUT_S, SPOILED_SHARE, START_TIMEOUT_S
from benchmarks.end_to_end.workloads import WARM_UPS, Workload, by_name
from benchmarks.machine import describe_machine
from executor_svc.device.cpus import read_cpus
from octavo.models.store import prepare_model

STACK, BARE = "octavo_stack", "octavo_core"  # modules in end_to_end/adapters
FORMATS = ("none", "int8-a8")
QUICK_FORMATS = ("int8-a8",)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Pair(_Record):
    """One run of each way."""

    stack_tokens_per_s: float = Field(gt=0)
    bare_tokens_per_s: float = Field(gt=0)
    foreign_share: float = Field(description="Of all cores, what others took: in the run where they took more.")
    num_unequal: int = Field(description="Requests that got other tokens from the stack than from the bare loop.")

    @property
    def ratio(self) -> float:
        """The stack's tokens a second by those of the bare loop."""
        return self.stack_tokens_per_s / self.bare_tokens_per_s

    @property
    def is_disturbed(self) -> bool:
        """Whether other work took too much."""
        return self.foreign_share > SPOILED_SHARE


class Row(_Record):
    """All pairs of one number format and one number of threads."""

    number_format: str
    num_threads: int
    num_cores: int
    pairs: list[Pair] = Field(min_length=1)

    @property
    def is_disturbed(self) -> bool:
        """Whether other work disturbed all pairs."""
        return all(pair.is_disturbed for pair in self.pairs)

    @property
    def counted(self) -> list[Pair]:
        """The undisturbed pairs; all, if there is none."""
        return [pair for pair in self.pairs if not pair.is_disturbed] or self.pairs

    @property
    def ratio(self) -> float:
        """The median over the pairs."""
        return statistics.median(pair.ratio for pair in self.counted)


class Result(_Record):
    """A whole run."""

    machine: str
    workload: str
    rows: list[Row]

    @property
    def num_unequal(self) -> int:
        """Requests of all pairs that got other tokens from the stack than from the bare loop."""
        return sum(pair.num_unequal for row in self.rows for pair in row.pairs)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a row is measured.

    Attributes:
        directory: The model, as a Hugging Face directory.
        vocab_size: Of the model.
        workload: What is computed.
        num_pairs: Of each row.
        num_repeats: How often a pair is repeated that others disturbed.
        folder: Where the logs of both processes go.
        command: How the process of an adapter is started; tests have another one.
        seeds: Of the prompts, another one for every run.
    """

    directory: Path
    vocab_size: int
    workload: Workload
    num_pairs: int
    num_repeats: int
    folder: Path
    command: Callable[[str], list[str]] = lambda adapter: adapter_command(adapter)
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(time.time_ns() // 1_000_000_000))


def adapter_command(adapter: str) -> list[str]:
    """Return what starts an adapter's process."""
    return [sys.executable, "-m", "benchmarks.end_to_end.adapters.serve", adapter]


def measure_row(
    plan: Plan, number_format: str, num_threads: int, num_cores: int, say: Callable[[str], None] = lambda _: None
) -> Row:
    """Start both ways, let them take turns, and stop them.

    Raises:
        EngineError: one of them failed; the message says how.
    """
    pairs = []
    with ExitStack() as stack:
        bare, whole = (_start(plan, adapter, number_format, num_threads, stack) for adapter in (BARE, STACK))
        for number in range(1, plan.num_pairs + 1):
            tries = (_measure_pair(plan, bare, whole, bare_begins=number % 2 == 1) for _ in range(1 + plan.num_repeats))
            pair = first_undisturbed(tries)
            pairs.append(pair)
            say(
                f"{_name(number_format)}, {_counted(num_threads)}, pair {number}: bare loop "
                f"{pair.bare_tokens_per_s:,.0f} tokens/s, stack {pair.stack_tokens_per_s:,.0f}"
                + (f"; others took {pair.foreign_share:.0%} of the machine" if pair.is_disturbed else "")
            )
    return Row(number_format=number_format, num_threads=num_threads, num_cores=num_cores, pairs=pairs)


def first_undisturbed(tries: Iterator[Pair]) -> Pair:
    """Return the first pair that nobody disturbed, or the least disturbed one."""
    made = []
    for pair in tries:
        made.append(pair)
        if not pair.is_disturbed:
            break
    return min(made, key=lambda pair: pair.foreign_share)


def _start(plan: Plan, adapter: str, number_format: str, num_threads: int, stack: ExitStack) -> EngineProcess:
    """Start one way, and warm it up."""
    log_path = plan.folder / f"{adapter}-{number_format}-{num_threads}.log"
    process = stack.enter_context(EngineProcess(plan.command(adapter), log_path))
    longest = max(workload.longest_tokens for workload in (plan.workload, *WARM_UPS))
    cores = tuple(sorted(os.sched_getaffinity(0)))
    process.start(Options(str(plan.directory), number_format, num_threads, cores, longest), START_TIMEOUT_S)
    for warm_up in WARM_UPS:
        process.generate(warm_up.requests(next(plan.seeds), plan.vocab_size), RUN_TIMEOUT_S)
    return process


def _measure_pair(plan: Plan, bare: EngineProcess, stack: EngineProcess, *, bare_begins: bool) -> Pair:
    requests = plan.workload.requests(next(plan.seeds), plan.vocab_size)
    made: dict[EngineProcess, Generation] = {}
    foreign_shares = []
    for process, idle in ((bare, stack), (stack, bare)) if bare_begins else ((stack, bare), (bare, stack)):
        meter = LoadMeter(process.pid, [idle.pid])
        made[process] = process.generate(requests, RUN_TIMEOUT_S)
        foreign_shares.append(meter.stop().foreign_share)
    return Pair(
        stack_tokens_per_s=plan.workload.output_tokens / made[stack].seconds,
        bare_tokens_per_s=plan.workload.output_tokens / made[bare].seconds,
        foreign_share=round(max(foreign_shares), 4),
        num_unequal=num_unequal(made[stack].token_ids, made[bare].token_ids, len(requests)),
    )


def num_unequal(outputs: list[list[int]], others: list[list[int]], num_requests: int) -> int:
    """Return for how many requests two ways gave other tokens; what a way does not tell is not equal."""
    return num_requests - sum(one == other for one, other in zip(outputs, others, strict=False))


def comparison(result: Result) -> str:
    """Return the table as Markdown, and below it what there is to say of it."""
    lines = [
        "| weights | threads of the executor | bare loop, tokens/s | whole stack, tokens/s | ratio | the stack costs |",
        "|---|---|---:|---:|---:|---:|",
        *map(_line, result.rows),
    ]
    parts = ["\n".join(lines), f"{result.machine}. Medians over pairs, and the range of what they cost."]
    if any(row.is_disturbed for row in result.rows):
        parts.append("A star: other work disturbed all pairs.")
    if result.num_unequal:
        parts.append(
            f"**{_counted(result.num_unequal, 'request')} got other tokens from the stack than from the loop.**"
        )
    return "\n\n".join(parts)


def _line(row: Row) -> str:
    bare, stack = (
        statistics.median(rates)
        for rates in zip(*((pair.bare_tokens_per_s, pair.stack_tokens_per_s) for pair in row.counted), strict=True)
    )
    costs = [100 * (1 - pair.ratio) for pair in row.counted]
    extent = f" ({min(costs):.1f} to {max(costs):.1f})" if len(costs) > 1 else ""
    cost = f"{100 * (1 - row.ratio):.1f} %{'*' * row.is_disturbed}{extent}"
    threads = f"{row.num_threads} on {_counted(row.num_cores, 'core')}"
    return f"| {_name(row.number_format)} | {threads} | {bare:,.0f} | {stack:,.0f} | {row.ratio:.3f} | {cost} |"


def _name(number_format: str) -> str:
    return "float32" if number_format == "none" else number_format


def _counted(number: int, noun: str = "thread") -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if one of the ways failed."""
    options = _parse(arguments)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes are stopped too
    directory: Path = options.model or prepare_model("smollm2")
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        vocab_size = model_costs(directory).vocab_size
        plan = Plan(directory, vocab_size, by_name("W2"), options.pairs, options.repeats, Path(folder))
        try:
            rows = [
                measure_row(plan, number_format, num_threads, options.cores, console.print)
                for number_format, num_threads in itertools.product(options.formats, options.threads)
            ]
        except EngineError as error:
            console.print(f"the benchmark ends here: {error}")
            return 1
    result = Result(machine=describe_machine(), workload=plan.workload.name, rows=rows)
    console.print(Markdown(comparison(result)))
    if options.json is not None:
        options.json.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    cores = read_cpus().num_threads()
    threads = sorted({cores, max(1, cores - 1)}, reverse=True)
    parser = argparse.ArgumentParser(
        description="What the stack costs: W2 through it, and by a loop of core and worker."
    )
    parser.add_argument("--pairs", type=int, help="pairs of runs of each row (default: 3)")
    parser.add_argument("--repeats", type=int, help="of a pair that other work disturbed (default: 2)")
    parser.add_argument("--formats", nargs="+", choices=our_formats(), help=f"(default: {' '.join(FORMATS)})")
    help_threads = "of the executor (default: as many as cores, and one less)"
    parser.add_argument("--threads", type=int, nargs="+", default=threads, help=help_threads)
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: the demo model)")
    parser.add_argument("--quick", action="store_true", help="one pair of each row, int8-a8")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args(arguments)
    options.cores = cores
    options.formats = options.formats or (QUICK_FORMATS if options.quick else FORMATS)
    options.pairs = options.pairs or (1 if options.quick else 3)
    options.repeats = (0 if options.quick else 2) if options.repeats is None else options.repeats
    return options


if __name__ == "__main__":
    sys.exit(main())
