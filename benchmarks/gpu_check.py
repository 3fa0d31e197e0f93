"""Check and measure the GPU path on this machine, with what is installed on it; writes a report.

    make gpu-check PYTHON=python3 ARGS='--budget-s 540'
    python3 -m benchmarks.gpu_check [--only generation,graphs] [--results FOLDER] [--budget-s 540] [--rehearse]

Each part (`--list`; `benchmarks/gpu/parts.py`) is a process with a time limit; the report is written again whenever one
of them has something new, so whatever ends a part, or this process, costs nothing that was found before. Needs a CUDA
device, torch, Triton, transformers, NumPy and pytest; no network. docs/gpu.md says how to use half an hour with a card.

A rehearsal runs the same code with tiny sizes on a CPU, kernels in Triton's interpreter; its figures mean nothing.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.driver import Plan, run_parts
from benchmarks.gpu.machine import describe, describe_wheels, look_at_card, why_not_installed
from benchmarks.gpu.part import Part, Report
from benchmarks.gpu.parts import PARTS
from octavo.bench.provenance import provenance

ROOT = Path(__file__).parents[1]
# A lent machine takes commands of ten minutes.
BUDGET_S = 540.0
# Parts at once: each holds some GB of the card and a few cores.
MAX_JOBS = 4


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the check; return 0 if all parts passed, 1 if one did not, 2 if it cannot be run here."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description="Check and measure the GPU path."
    )
    names = [part.name for part in parts]
    parser.add_argument("--only", default=",".join(names), help="parts to run, joined by commas")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the report")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all parts (default %(default)g)")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="parts at once that only check, not measure")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU: shows that the check works")
    parser.add_argument("--list", action="store_true", help="list the parts and run none")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{part.name:20} {part.limit_s:4.0f} s  {part.about}" for part in parts))
        return 0
    wanted = options.only.split(",")
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(names)}")
    if options.budget_s <= 0 or options.jobs < 1:
        parser.error("--budget-s and --jobs must be above 0")
    machine = describe()
    print("\n".join([*machine, describe_wheels()]), flush=True)
    try:
        title, file_name, card = _look(is_rehearsal=options.rehearse)
    except RuntimeError as problem:
        print(f"gpu-check cannot run: {problem}", file=sys.stderr)
        return 2
    made = provenance("make", "gpu-check", f"ARGS=--only {options.only}")
    file_name += "" if options.rehearse else f"-{made.date}"
    report = Report(title, [*card, *machine], made, not options.rehearse)
    plan = Plan(options.results, file_name, options.budget_s, options.jobs, is_rehearsal=options.rehearse)
    try:
        run_parts([part for part in parts if part.name in wanted], report, plan)
    except KeyboardInterrupt:
        return 1
    finally:
        print(f"\n{report.markdown()}\nwrote {options.results / file_name}.md and .json", flush=True)
    return 0 if report.passed else 1


def default_jobs() -> int:
    """Return how many parts run at once: each compiles kernels, on a core or two."""
    return max(1, min(MAX_JOBS, (os.cpu_count() or 1) // 3))


def _look(*, is_rehearsal: bool) -> tuple[str, str, list[str]]:
    """Return title of the report, how its files begin, and lines about the card. Raises: RuntimeError: why not here."""
    problem = why_not_installed(is_rehearsal=is_rehearsal)
    if problem is not None:
        raise RuntimeError(problem)
    if is_rehearsal:
        return "Rehearsal of the GPU check on a CPU", "gpu-check-rehearsal", []
    name, lines = look_at_card()
    return f"GPU check on {name}", f"gpu-check-{name.lower().replace(' ', '-')}", lines


if __name__ == "__main__":
    sys.exit(main())
