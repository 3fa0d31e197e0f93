"""`python -m tests.mutants`: plant mutants, one at a time; each must be caught by the suite that its row names.

Everything happens in copies of the tree. First all suites run without a mutant: one that fails anyway proves nothing.
Exit code 1 if a mutant survived, or if a row is stale.
"""

import argparse
import fnmatch
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from tests.mutants.fault import TreeCopy, try_in_copies
from tests.mutants.mutant import Mutant, read_mutants
from tests.mutants.run import Outcome, Verdict, failing_without_mutants, try_mutant

STYLES = {Verdict.CAUGHT: "green", Verdict.SURVIVED: "bold red", Verdict.STALE: "bold yellow"}
NICENESS = 10  # the machine stays usable meanwhile


def main() -> int:
    """Return the exit code."""
    arguments = _parse()
    console = Console(highlight=False, soft_wrap=True)
    mutants = [mutant for mutant in read_mutants() if _is_wanted(mutant, arguments.only)]
    if not mutants:
        console.print(f"no mutant is named like {', '.join(arguments.only)}; --list shows all")
        return 2
    if arguments.list:
        for mutant in mutants:
            console.print(f"[bold]{escape(mutant.name)}[/]\n    {mutant.place}\n    caught by {escape(mutant.suite)}")
        return 0
    os.nice(NICENESS)
    with tempfile.TemporaryDirectory(prefix="octavo-mutants-") as name:
        copies = [TreeCopy(Path(name) / str(number)) for number in range(arguments.jobs)]
        suites = list(dict.fromkeys(mutant.suite for mutant in mutants))
        console.print(f"{len(suites)} suites without a mutant ...")
        try:
            failing = failing_without_mutants(copies[0], suites)
        finally:
            copies[0].stop()
        outcomes = []
        for outcome in try_in_copies(
            copies, mutants, lambda copy, mutant: try_mutant(copy, mutant, failing, arguments.timeout_s)
        ):
            outcomes.append(outcome)
            _print_outcome(console, outcome)
    return _report(console, outcomes)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="part of a name, or a pattern")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants that are tried at once (default 1)")
    parser.add_argument("--list", action="store_true", help="show the table and end")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of one suite with a mutant (default 120)")
    return parser.parse_args()


def _is_wanted(mutant: Mutant, patterns: list[str]) -> bool:
    text = f"{mutant.name} {mutant.place}"
    return not patterns or any(fnmatch.fnmatch(text, f"*{pattern}*") for pattern in patterns)


def _print_outcome(console: Console, outcome: Outcome) -> None:
    verdict = f"[{STYLES[outcome.verdict]}]{outcome.verdict.value:8}[/]"
    console.print(f"{verdict} {outcome.duration_s:5.1f} s  {escape(outcome.mutant.name)}  {escape(outcome.remark)}")


def _report(console: Console, outcomes: list[Outcome]) -> int:
    """Print what was not caught once more, at the end, where it is seen; return the exit code."""
    for outcome in outcomes:
        if outcome.verdict is not Verdict.CAUGHT:
            _print_outcome(console, outcome)
    counts = Counter(outcome.verdict for outcome in outcomes)
    summary = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    console.print(f"{len(outcomes)} mutants: {summary}; {sum(outcome.duration_s for outcome in outcomes):.0f} s")
    return 0 if counts[Verdict.CAUGHT] == len(outcomes) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
