"""`python -m tests.mutants`: plant the faults of the table, one at a time; each must be caught by the suite beside it.

Everything happens in copies of the tree. First all suites run without a fault: a test that fails anyway proves nothing.
Exit code 1 if a fault survived, or if a row is stale.
"""

import argparse
import fnmatch
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.mutants.fault import Fault, TreeCopy, try_in_copies
from tests.mutants.run import Outcome, Verdict, failing_without_faults, try_fault
from tests.mutants.table import FAULTS

STYLES = {Verdict.CAUGHT: "green", Verdict.SURVIVED: "bold red", Verdict.STALE: "bold yellow"}
NICENESS = 10  # the machine stays usable meanwhile


def main() -> int:
    """Return the exit code."""
    arguments = _parse()
    console = Console(highlight=False, soft_wrap=True)
    faults = [fault for fault in FAULTS if not arguments.only or _matches(fault, arguments.only)]
    if not faults:
        console.print(f"no fault is named like {', '.join(arguments.only)}; --list shows all")
        return 2
    if arguments.list:
        _print_list(console, faults)
        return 0
    os.nice(NICENESS)
    with tempfile.TemporaryDirectory(prefix="octavo-mutants-") as name:
        copies = [TreeCopy(Path(name) / str(number)) for number in range(arguments.jobs)]
        tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
        console.print(f"{len(tests)} suites without a fault ...")
        try:
            failing = failing_without_faults(copies[0], tests)
        finally:
            copies[0].stop()
        for test in failing:
            console.print(f"[bold yellow]fails without a fault[/]: {escape(test)}")
        outcomes = _try_all(console, copies, faults, failing, arguments.timeout_s)
    return _report(console, outcomes)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="part of a name, or a pattern")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults that are tried at once (default 1)")
    parser.add_argument("--list", action="store_true", help="show the table and end")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of one suite with a fault (default 120)")
    return parser.parse_args()


def _matches(fault: Fault, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(fault.name, f"*{pattern}*") for pattern in patterns)


def _print_list(console: Console, faults: list[Fault]) -> None:
    for fault in faults:
        console.print(f"[bold]{escape(fault.name)}[/]\n    {fault.path}")
        for test in fault.tests:
            console.print(f"    caught by {escape(test)}")


def _try_all(
    console: Console, copies: Sequence[TreeCopy], faults: list[Fault], failing: Sequence[str], timeout_s: float
) -> list[Outcome]:
    """Try the faults, as many at once as there are copies, and tell each outcome when it is known."""
    outcomes = []
    for outcome in try_in_copies(copies, faults, lambda copy, fault: try_fault(copy, fault, failing, timeout_s)):
        outcomes.append(outcome)
        verdict = f"[{STYLES[outcome.verdict]}]{outcome.verdict.value:8}[/]"
        console.print(f"{verdict} {outcome.duration_s:5.1f} s  {escape(outcome.fault.name)}")
    return outcomes


def _report(console: Console, outcomes: list[Outcome]) -> int:
    """Print a table of all; return the exit code."""
    order = [Verdict.CAUGHT, Verdict.STALE, Verdict.SURVIVED]  # what matters stands last, where it is seen
    table = Table("result", "s", "fault", "by the test", title="planted faults")
    for outcome in sorted(outcomes, key=lambda outcome: order.index(outcome.verdict)):
        verdict = f"[{STYLES[outcome.verdict]}]{outcome.verdict.value}"
        table.add_row(verdict, f"{outcome.duration_s:.1f}", escape(outcome.fault.name), escape(outcome.remark))
    console.print(table)
    counts = Counter(outcome.verdict for outcome in outcomes)
    summary = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    console.print(f"{len(outcomes)} faults: {summary}; {sum(outcome.duration_s for outcome in outcomes):.0f} s")
    return 0 if counts[Verdict.CAUGHT] == len(outcomes) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
