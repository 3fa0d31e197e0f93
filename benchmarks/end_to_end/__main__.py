"""`make bench`: measure, print one table, write the result.

python -m benchmarks.end_to_end                     everything that is installed: half an hour to an hour
python -m benchmarks.end_to_end --quick             W1 and W2 once, float32 and 8 bits
python -m benchmarks.end_to_end --engines octavo llama.cpp --formats int8 int8-a8 --workloads W1 P2000
python -m benchmarks.end_to_end --model FILE.gguf   Octavo and llama.cpp with that file
python -m benchmarks.end_to_end --minutes 20        and then --append FILE --minutes 20, until the result has all rows
"""

import argparse
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.end_to_end.engines import (
    OURS,
    PRODUCTS,
    EngineSpec,
    all_engines,
    class_of,
    file_engines,
    model_costs,
    our_formats,
)
from benchmarks.end_to_end.result import (
    RESULTS,
    Limits,
    Model,
    Result,
    joined,
    read_result,
    result_name,
    write_result,
)
from benchmarks.end_to_end.session import Findings, Plan, Session
from benchmarks.end_to_end.tables import comparison, limits_line, machine_line, runs_table
from benchmarks.end_to_end.workloads import WORKLOADS, by_name
from benchmarks.float32_model import float32_model
from octavo.bench.provenance import Provenance, provenance

QUICK_WORKLOADS = ("W1", "W2")
QUICK_CLASSES = ("float32", "8 bits")
SLOW_TO_START = ("vLLM",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if an engine failed that is installed."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parse(given)
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are stopped too
    directory: Path = options.model or float32_model()
    model = model_costs(directory)
    made = provenance("python", "-m", "benchmarks.end_to_end", *given)
    began, earlier = time.monotonic(), None
    if options.append is not None:
        try:
            earlier = read_result(options.append)
            joined(earlier, _result(Findings(), made, model, options.threads, 0.0))
        except (OSError, ValueError) as error:
            console.print(f"{options.append.name} cannot be appended to: {error}", markup=False, soft_wrap=True)
            return 2
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        plan = Plan(
            specs=chosen_engines(options),
            directory=directory,
            vocab_size=model.vocab_size,
            workloads=[by_name(name) for name in options.workloads],
            num_rounds=options.rounds,
            num_repeats=options.repeats,
            num_threads=options.threads,
            folder=Path(folder),
            measured=frozenset((run.engine, run.workload) for run in earlier.runs) if earlier else frozenset(),
            most_minutes=options.minutes,
        )
        session = Session(plan, model, partial(console.print, highlight=False, markup=False))

        def result(findings: Findings) -> Result:
            piece = _result(findings, made, model, options.threads, (time.monotonic() - began) / 60)
            return piece if earlier is None else joined(earlier, piece)

        def save(findings: Findings) -> None:
            """What was measured stays if a later engine breaks the run."""
            path = options.append or options.output
            if findings.runs and (path or not options.quick):
                whole = result(findings)
                write_result(whole, path or RESULTS / result_name(whole))

        session.measure(save)
        last = result(session.findings)
    if not last.runs:
        console.print("nothing was measured: no engine could run")
        return 1
    _show(last, console)
    return 1 if any(engine.name in last.missing for engine in last.engines) else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = [workload.name for workload in WORKLOADS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end", description="Octavo's whole stack beside every engine that is here."
    )
    products = {product.lower(): product for product in PRODUCTS}
    parser.add_argument("--engines", nargs="+", choices=products, default=list(products), help="default: all")
    parser.add_argument("--formats", nargs="+", choices=our_formats(), help="of ours; peers follow (default: all)")
    parser.add_argument("--workloads", nargs="+", choices=names, help="default: all")
    parser.add_argument("--rounds", type=int, help="runs of each engine and workload (default: 3)")
    parser.add_argument("--repeats", type=int, help="of a run that other work disturbed (default: 2)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument(
        "--model",
        type=Path,
        help="Hugging Face directory (default: the demo model in float32), or a GGUF file",
    )
    parser.add_argument("--quick", action="store_true", help="W1 and W2, float32 and 8 bits, one round, no vLLM")
    parser.add_argument("--append", type=Path, metavar="FILE", help="measure what this result lacks, and add it there")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further row after so long")
    parser.add_argument("--output", type=Path, help="the result's file (default: benchmarks/results, if not quick)")
    options = parser.parse_args(arguments)
    options.engines = [products[name] for name in options.engines]
    options.workloads = options.workloads or (list(QUICK_WORKLOADS) if options.quick else names)
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.repeats = (0 if options.quick else 2) if options.repeats is None else options.repeats
    return options


def chosen_engines(options: argparse.Namespace) -> list[EngineSpec]:
    """Return the engines that the options name; a GGUF file has its own format."""
    if options.model is not None and options.model.suffix == ".gguf":
        return [spec for spec in file_engines(options.model) if spec.product in options.engines]
    formats = options.formats or our_formats()
    classes = {class_of(name) for name in formats}
    if options.quick and not options.formats:
        classes &= set(QUICK_CLASSES)
    left_out = SLOW_TO_START if options.quick else ()
    return [
        spec
        for spec in all_engines()
        if spec.product in options.engines
        and spec.product not in left_out
        and spec.number_class in classes
        and (spec.product != OURS or spec.number_format in formats)
    ]


def _result(findings: Findings, made: Provenance, model: Model, num_threads: int, minutes: float) -> Result:
    samples = [asdict(sample) for sample in findings.samples]
    limits = {
        f"{name}_per_s": [round(sample[name], 1) for sample in samples if sample[name] is not None]
        for name in ("read_gb", "fma_gflop", "gemm_gflop")
    }
    return Result(
        **asdict(made),
        minutes=round(minutes, 1),
        num_threads=num_threads,
        model=model,
        limits=Limits(**limits),
        engines=findings.engines,
        missing=findings.missing,
        runs=findings.runs,
    )


def _show(result: Result, console: Console) -> None:
    for table in (comparison(result), runs_table(result)):
        console.print(Markdown(table))
    for line in (machine_line(result), limits_line(result)):
        console.print(line, highlight=False)
    console.print("Tokens a second, or ms where it says so; * other work disturbed all runs.", highlight=False)
    for name, reason in result.missing.items():
        console.print(f"left out: {name}: {reason}", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
