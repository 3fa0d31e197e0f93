"""What figures need beside them: machine, commit, command, date; the files of both, and tables.

No host name, no path. Needs the standard library only: machines that only measure lack most packages.
"""

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]  # of the clone


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it ran."""

    processor: str
    kind: str  # for names of files
    cores: int
    memory_gib: int
    instructions: str  # the widest vectors: AVX-512, AVX2 or none

    def __str__(self) -> str:
        return f"{self.processor} ({self.instructions}), {self.cores} cores, {self.memory_gib} GiB"


@dataclass(frozen=True, slots=True)
class Provenance:
    """What the file of every result begins with."""

    date: str
    commit: str
    command: str
    machine: Machine
    python: str

    def __str__(self) -> str:
        return f"`{self.command}`, commit {self.commit}; {self.machine}, Python {self.python}, {self.date}"

    def json(self, rows: dict[str, Any], indent: int | None = 1) -> str:
        """Return the text of a result's file."""
        return json.dumps({**asdict(self), **rows}, ensure_ascii=False, indent=indent) + "\n"


def provenance(*command: str) -> Provenance:
    """Return that of figures of now; of the command's paths the last parts, since a result is published."""
    words = shlex.join(Path(word).name if os.sep in word and "://" not in word else word for word in command)
    words = re.sub(r"(://)[^/@\s]+@", r"\1...@", words)  # credentials of a URL
    today = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    return Provenance(today, _commit(), words, this_machine(), platform.python_version())


def this_machine() -> Machine:
    """Return what Linux tells of this machine."""
    processor, cores = _cpu_info("model name") or platform.processor() or platform.machine(), os.cpu_count() or 1
    words = "".join(letter if letter.isalnum() else " " for letter in processor.lower()).split()
    flags = _cpu_info("flags").split()
    return Machine(
        processor,
        kind="-".join([*words, str(cores), "cores"]),
        cores=cores,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        instructions=next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "none"),
    )


def _cpu_info(field: str) -> str:
    """Return what /proc has of the first core; "": nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _commit() -> str:
    """Return the commit of the clone, and whether it has changes; "unknown": this is none, or there is no git."""
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
