"""`python -m tests.simulation.planted`: plant bugs, one at a time; the simulation must find each within 200 seeds.

Each is planted in a copy of the tree, where seeds are run until a promise is broken. Exit code 1 if a bug survived, or
if a row of `planted_bugs.py` does not fit the code any more.
"""

import argparse
import fnmatch
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.mutants.fault import StaleError, TreeCopy, try_in_copies
from tests.simulation.hunt import Find
from tests.simulation.planted_bugs import BUGS, Bug

NICENESS = 10  # the machine stays usable meanwhile
LAST_LINES = 5
LONGEST_REMARK = 160


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a bug: where it was found, or in words why it proves nothing that it was not."""

    bug: Bug
    find: Find | None
    stale: str = ""

    @property
    def is_found(self) -> bool:
        """Whether a promise was broken with it."""
        return self.find is not None and bool(self.find.broken)

    @property
    def verdict(self) -> str:
        """One word for people."""
        if self.stale:
            return "stale"
        return "found" if self.is_found else "survived"

    @property
    def remark(self) -> str:
        """What the run said, or how many there were."""
        if self.find is None:
            return self.stale
        if not self.find.broken:
            return f"{self.find.num_runs} runs"
        return self.find.broken.splitlines()[0][:LONGEST_REMARK]


def try_bug(copy: TreeCopy, bug: Bug, seeds: str) -> Outcome:
    """Plant a bug in a copy, run `seeds` (BEGIN:END) until a promise is broken, and take it out again."""
    modes = [f"--mode={bug.mode}"] if bug.mode else []
    try:
        with copy.with_fault(bug):
            process = copy.start([sys.executable, "-m", "tests.simulation.hunt", f"--seeds={seeds}", *modes])
            output, _ = process.communicate()
    except StaleError as error:
        return Outcome(bug, None, str(error))
    lines = output.splitlines()
    if process.returncode != 0:
        return Outcome(bug, None, "\n".join([f"the run ended with code {process.returncode}", *lines[-LAST_LINES:]]))
    return Outcome(bug, Find(**json.loads(lines[-1])))


def main() -> int:
    """Return the exit code."""
    arguments = _parse()
    console = Console(highlight=False, soft_wrap=True)
    bugs = [bug for bug in BUGS if not arguments.only or _matches(bug, arguments.only)]
    if not bugs:
        console.print(f"no bug is named like {', '.join(arguments.only)}; --list shows all")
        return 2
    if arguments.list:
        for bug in bugs:
            console.print(f"[bold]{escape(bug.name)}[/]\n    {bug.path}{f', {bug.mode} only' if bug.mode else ''}")
        return 0
    os.nice(NICENESS)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="octavo-planted-") as name:
        copies = [TreeCopy(Path(name) / str(number)) for number in range(arguments.jobs)]
        for outcome in try_in_copies(copies, bugs, lambda copy, bug: try_bug(copy, bug, arguments.seeds)):
            outcomes.append(outcome)
            console.print(f"{outcome.verdict:8} {escape(outcome.bug.name)}: {escape(outcome.remark)}")
    return _report(console, outcomes)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.planted", description=(__doc__ or "").split("\n\n", maxsplit=1)[0]
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="part of a name, or a pattern")
    parser.add_argument("--list", action="store_true", help="show the bugs and end")
    parser.add_argument("--seeds", default="0:200", metavar="BEGIN:END", help="that are run at most (default 0:200)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="bugs that are tried at once (default 1)")
    return parser.parse_args()


def _matches(bug: Bug, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(bug.name, f"*{pattern}*") for pattern in patterns)


def _report(console: Console, outcomes: Sequence[Outcome]) -> int:
    """Print a table of all; return the exit code."""
    table = Table("bug", "found at", "runs", "s", "what the run said", title="planted bugs")
    for outcome in sorted(outcomes, key=lambda outcome: not outcome.is_found):  # what matters stands last
        find, where, num_runs, cpu = outcome.find, outcome.verdict, "", ""
        if find is not None:
            where = f"{find.seed} {find.mode}" if find.broken else outcome.verdict
            num_runs, cpu = str(find.num_runs), f"{find.cpu_s:.1f}"
        table.add_row(escape(outcome.bug.name), where, num_runs, cpu, escape(outcome.remark))
    console.print(table)
    num_found = sum(outcome.is_found for outcome in outcomes)
    cpu_s = sum(outcome.find.cpu_s for outcome in outcomes if outcome.find is not None)
    console.print(f"{num_found} of {len(outcomes)} bugs found; {cpu_s:.0f} s of processor time")
    return 0 if num_found == len(outcomes) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
