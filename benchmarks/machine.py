"""What a figure needs beside it: processor, cores, memory, commit, versions, date; and how figures become a table.

No host name, no path. Needs the standard library only: machines that only measure lack most packages.
"""

import datetime
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def describe_machine() -> str:
    """Return one line about this machine and the libraries."""
    from importlib.metadata import version  # parts of a GPU check start often, and need none of it

    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "grpcio"))
    return f"{hardware()}, Python {platform.python_version()}, {libraries}, {today()}"


def hardware() -> str:
    return f"{processor_name()}, {os.cpu_count()} cores, {memory_gib():.0f} GiB"


def memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def processor_name() -> str:
    return cpu_info("model name") or platform.processor() or platform.machine()


def cpu_info(field: str) -> str:
    """Return what Linux tells of the first core; "": nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def today() -> str:
    return f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"


def commit() -> str:
    """Return the commit of the clone, and whether it has changes; "unknown": there is no git."""
    import subprocess

    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def markdown_table(heading: Sequence[str], rows: Iterable[Sequence[str]], num_texts: int = 1) -> str:
    """Return a table of Markdown with numbers in the columns behind the first `num_texts`."""
    marks = ["---" if index < num_texts else "---:" for index in range(len(heading))]
    lines = [f"| {' | '.join(heading)} |", f"|{'|'.join(marks)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])
