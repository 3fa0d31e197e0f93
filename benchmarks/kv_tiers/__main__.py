"""The command; see `__init__.py`."""

import argparse
import asyncio
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.costs.harness import Line, Size, about, run_scenario
from benchmarks.kv_tiers.arms import WITH, WITHOUT, Comparison
from benchmarks.kv_tiers.scenarios import TARGETS, scenarios
from octavo.bench.provenance import markdown_table, provenance


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kv_tiers", description="What KV tiers and moved blocks save."
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="host, pull, drain, spread (default: all)")
    parser.add_argument("--without", default="", metavar="FLAGS", help="flags of the scheduler of the first arm")
    parser.add_argument("--with", dest="with_", metavar="FLAGS", help="of the second (default: there is none)")
    parser.add_argument("--pairs", type=int, help="turns of each arm (default: each scenario has its own)")
    parser.add_argument("--quick", action="store_true", help="small: under two minutes a scenario")
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: the demo model in float32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the value of every turn there as well")
    options = parser.parse_args(given)
    flags = {WITHOUT: shlex.split(options.without)}
    if options.with_ is not None:
        flags[WITH] = shlex.split(options.with_)
    comparison = Comparison(flags)
    known = scenarios(comparison)
    if unknown := set(options.scenarios) - set(known):
        parser.error(f"there is no scenario {min(unknown)}; there are {', '.join(known)}")
    lines: list[Line] = []
    for name in options.scenarios or known:
        pairs = options.pairs or (1 if options.quick else known[name].num_pairs)
        size = Size(options.quick, options.model)
        lines += asyncio.run(run_scenario(known[name], size, pairs, say=lambda text: print(text, file=sys.stderr)))
    made = provenance("python", "-m", "benchmarks.kv_tiers", *given)
    print(f"{table(lines)}\n\n{about(made)}")
    if options.with_ is not None:
        print(f"{comparison.num_equal:,} outputs of both arms, tokens and log-probabilities: equal to the bit.")
    if options.json is not None:
        options.json.write_text(made.json({"rows": [asdict(line) for line in lines]}), encoding="utf-8")


def table(lines: Sequence[Line]) -> str:
    """Return the lines with their targets."""
    heading = ["scenario", "arm", "figure", "median (interval)", "ratio (interval)", "target"]
    return markdown_table(heading, ([*line.cells(), target_of(line)] for line in lines), num_texts=3)


def target_of(line: Line) -> str:
    """Return the target of a figure of the second arm, and whether its median meets it."""
    target = TARGETS.get((line.scenario, line.way.rpartition(", ")[0], line.figure))
    if target is None or not line.beside:
        return ""
    values = line.values
    if target.is_ratio:
        values = [value / other for value, other in zip(line.values, line.others, strict=True)]
    return f"{target}: {'met' if target.is_met(statistics.median(values)) else 'missed'}"


if __name__ == "__main__":
    main()
