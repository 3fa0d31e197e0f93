"""The command; see `__init__.py`."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.costs import (  # noqa: F401 - each adds its scenarios
    core,
    formats,
    model,
    quality,
    scheduler,
    services,
    translations,
    weights,
)
from benchmarks.costs.harness import SCENARIOS, Size, about, run_scenario, table
from octavo.bench.provenance import provenance


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description="What each part costs.")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="(default: all)")
    parser.add_argument("--list", action="store_true", help="tell what each scenario measures")
    parser.add_argument("--pairs", type=int, help="turns of each way (default: each scenario has its own)")
    parser.add_argument("--only", default="", metavar="TEXT", help="ways whose names have it in them")
    parser.add_argument("--smallest", action="store_true", help="so small that figures mean nothing, to try it")
    parser.add_argument(
        "--model",
        type=Path,
        help="Hugging Face directory, or for some a GGUF file (default: the demo model in float32)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the value of every turn there as well")
    options = parser.parse_args(given)
    if unknown := set(options.scenarios) - set(SCENARIOS):
        parser.error(f"there is no scenario {min(unknown)}; --list tells all")
    chosen = [SCENARIOS[name] for name in options.scenarios or SCENARIOS]
    if options.list:
        print("\n".join(f"{one.name:10} {one.what}" for one in chosen))
        return
    lines = []
    for one in chosen:
        pairs = options.pairs or (1 if options.smallest else one.num_pairs)
        size = Size(options.smallest, options.model)
        lines += asyncio.run(run_scenario(one, size, pairs, options.only, lambda text: print(text, file=sys.stderr)))
    made = provenance("python", "-m", "benchmarks.costs", *given)
    print(f"{table(lines)}\n\n{about(made)}")
    if options.json is not None:
        options.json.write_text(made.json({"rows": [asdict(line) for line in lines]}), encoding="utf-8")


if __name__ == "__main__":
    main()
