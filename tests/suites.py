"""Suites that `make test` leaves out: what each runs, and the files whose change concerns it.

`make test-all` runs all of them, and `.ci/run` those that a change since the commit in `.ci/base` concerns.

    python -m tests.suites                  # names of all
    python -m tests.suites --since COMMIT   # names of those whose files changed, committed or not
    python -m tests.suites --paths NAME...  # what pytest runs of these
    python -m tests.suites --ignore         # the options that leave all of them out
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
# Concern every suite: versions of libraries, and the set-up of pytest.
SHARED = ("constraints.txt", "tests/conftest.py", "tests/suites.py")
SETTINGS = ("scheduler_svc/config/*", "executor_svc/config.py", "shared/octavo_shared/process/*config.py")


class Suite(NamedTuple):
    """A suite: files and folders of tests, and patterns of what it tests; `*` matches `/` too."""

    tests: tuple[str, ...]
    sources: tuple[str, ...]


SUITES = {
    "docs": Suite(
        tests=(
            "tests/docs/test_agents.py",
            "tests/docs/test_cookbook.py",
            "tests/docs/test_python_client_page.py",
            "tests/docs/test_site.py",
        ),
        sources=("*.md", "docs/*", "octavo/*", "protos/*", "scheduler_svc/front/*", "executor_svc/fake/*", *SETTINGS),
    ),
    "page": Suite(
        tests=("tests/page",),
        sources=("scheduler_svc/admin/*", "scheduler_svc/http/*", "octavo/admin/*", "octavo/top/*"),
    ),
    "k8s": Suite(tests=("tests/k8s", "tests/cluster"), sources=("k8s/*", "images/*", *SETTINGS)),
    "monitoring": Suite(
        tests=("tests/monitoring",),
        sources=(
            "k8s/components/monitoring/*",
            "scheduler_svc/telemetry/*",
            "scheduler_svc/*me[tr][er]*.py",
            "executor_svc/service/*me[tr][er]*.py",
            "shared/octavo_shared/*metric*.py",
            "shared/octavo_shared/process/histogram.py",
            "docs/tools/*",
        ),
    ),
    "packaging": Suite(
        tests=("tests/packaging",),
        sources=(
            "pyproject.toml",
            "install.sh",
            "Makefile",
            "images/*",
            "CHANGELOG.md",
            "README.md",
            "docs/releasing.md",
            "docs/upgrades.md",
            "octavo/__init__.py",
        ),
    ),
    "skew": Suite(
        tests=("tests/skew",),
        sources=(
            "protos/*",
            "shared/octavo_shared/step_wire/*",
            "shared/octavo_shared/grpc/*",
            "scheduler_svc/link/*",
            "scheduler_svc/executors/*",
            "scheduler_svc/processes/*",
            "scheduler_svc/front/api/*",
            "executor_svc/service/*",
            "executor_svc/fake/*",
            "octavo/calls/*",
            "octavo/values/*",
            "octavo/*client.py",
        ),
    ),
    "tls": Suite(
        tests=("tests/tls",),
        sources=(
            "shared/octavo_shared/grpc/*",
            "scheduler_svc/*tls*.py",
            "scheduler_svc/http/*",
            "scheduler_svc/front/access/*",
            "scheduler_svc/admin/http/*",
            "scheduler_svc/link/*",
            "scheduler_svc/processes/*",
            "scheduler_svc/executors/client.py",
            "executor_svc/service/process.py",
            "octavo/calls/*",
            "octavo/values/*",
            "octavo/*client.py",
            *SETTINGS,
        ),
    ),
    "kernels": Suite(
        tests=("tests/kernels", "tests/device", "tests/contract_attention"),
        sources=(
            "executor_svc/triton_kernels/*",
            "executor_svc/attention/*",
            "executor_svc/cache/*",
            "executor_svc/sampler/*",
            "executor_svc/models/*dense.py",
            "executor_svc/numerics/triton_code.py",
            "benchmarks/gpu/*",
        ),
    ),
    "tracing": Suite(
        tests=("tests/tracing",),
        sources=("*tracing.py", "executor_svc/service/traced_worker.py", "executor_svc/fake/spans.py"),
    ),
    "benchmarks": Suite(tests=("tests/unit/benchmarks",), sources=("benchmarks/*",)),
}


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern names a file, or a folder above it."""
    return any(fnmatch(path, pattern) or path.startswith(f"{pattern}/") for pattern in patterns)


@cache
def imported_tests(suite: Suite) -> set[str]:
    """Return the files below tests/ that a suite imports, and what these import."""
    found: set[str] = set()
    roots = [REPOSITORY / path for path in suite.tests]
    queue = [file for root in roots for file in (root.rglob("*.py") if root.is_dir() else [root])]
    while queue:
        for node in ast.walk(ast.parse(queue.pop().read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tests":
                for module in (f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)):
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
    asked.add_argument("--ignore", action="store_true")
    options = parser.parse_args(arguments)
    if options.ignore:
        print(*(f"--ignore={path}" for suite in SUITES.values() for path in suite.tests))
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
