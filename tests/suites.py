"""Suites that `make test` leaves out; suites.toml has what each runs, and the files whose change concerns it.

`make test-all` runs all of them, and `.ci/run` those that a change since the commit in `.ci/base` concerns.

    python -m tests.suites                  # names of all
    python -m tests.suites --since COMMIT   # names of those whose files changed, committed or not
    python -m tests.suites --paths NAME...  # what pytest runs of these
    python -m tests.suites --ignore NAME... # the options that leave out all but these
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]


class Suite(NamedTuple):
    """A suite: files and folders of tests, and patterns of files whose change concerns it."""

    tests: tuple[str, ...]
    sources: tuple[str, ...]


IMPORT = re.compile(r"^ *from (tests[.\w]*) import (\([^)]*\)|.*)", re.MULTILINE)
TABLE = tomllib.loads((REPOSITORY / "tests/suites.toml").read_text(encoding="utf-8"))
SHARED = TABLE["shared"].split()
SUITES = {
    name: Suite(tuple(row["tests"].split()), tuple(row["sources"].split())) for name, row in TABLE["suites"].items()
}


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern names a file, or a folder above it."""
    return any(
        path == pattern or path.startswith(f"{pattern}/") or ("*" in pattern and PurePosixPath(path).match(pattern))
        for pattern in patterns
    )


@cache
def imported_tests(suite: Suite) -> set[str]:
    """Return the files below tests/ that a suite imports, and what these import."""
    found: set[str] = set()
    roots = [REPOSITORY / path for path in suite.tests]
    queue = [file for root in roots for file in (root.rglob("*.py") if root.is_dir() else [root])]
    while queue:
        for package, names in IMPORT.findall(queue.pop().read_text(encoding="utf-8")):
            for module in (package, *(f"{package}.{name}" for name in re.findall(r"\w+", names))):
                path = module.replace(".", "/") + ".py"
                if path not in found and (REPOSITORY / path).is_file():
                    found.add(path)
                    queue.append(REPOSITORY / path)
    return found


def concerned_by(changed: Iterable[str]) -> list[str]:
    """Return the names of the suites that the change of some files concerns."""
    paths = list(changed)
    return [
        name
        for name, suite in SUITES.items()
        if any(matches(path, (*SHARED, *suite.tests, *suite.sources)) for path in paths)
        or not imported_tests(suite).isdisjoint(paths)
    ]


def changed_since(commit: str, repository: Path = REPOSITORY) -> list[str] | None:
    """Return the files that differ from a commit or are new; None if the commit is unknown, as in a shallow clone."""

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(repository), "-c", "core.quotePath=false", *arguments)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    try:
        known = git("diff", "--name-only", "--no-renames", commit, "--")
    except subprocess.CalledProcessError:
        return None
    return [*known.splitlines(), *git("ls-files", "--others", "--exclude-standard").splitlines()]


def main(arguments: list[str] | None = None) -> None:
    """Print what is asked for, in one line."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=(__doc__ or "").partition("\n")[0])
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--since", metavar="COMMIT")
    asked.add_argument("--paths", metavar="NAME", nargs="+", choices=SUITES)
    asked.add_argument("--ignore", metavar="NAME", nargs="*", choices=SUITES)
    options = parser.parse_args(arguments)
    if options.ignore is not None:
        left_out = (suite for name, suite in SUITES.items() if name not in options.ignore)
        print(*(f"--ignore={path}" for suite in left_out for path in suite.tests))
    elif options.paths:
        print(*(path for name in options.paths for path in SUITES[name].tests))
    elif options.since and (changed := changed_since(options.since)) is not None:
        print(*concerned_by(changed))
    else:
        if options.since:
            print(f"{options.since} is unknown here: all suites", file=sys.stderr)
        print(*SUITES)


if __name__ == "__main__":
    main()
