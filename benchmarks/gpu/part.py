"""A part of the check. `run_part.py` runs it in a process of its own.

A part is a function that gets a `Progress` and its arguments. It adds figures as it has them, and returns one line or
nothing; it fails by an exception. Whatever ends the process, the file has what was added before.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.report import Figure, PartResult


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the check.

    Attributes:
        name: For `--only`, the report and its files.
        about: What it shows, in one line.
        function: `module:name`.
        limit_s: The part is ended after so long.
        arguments: For the function, behind the `Progress`.
        is_alone: Whether it needs the card for itself, since it measures.
        needs: Modules without which it is skipped.
    """

    name: str
    about: str
    function: str
    limit_s: float
    arguments: tuple[str, ...] = ()
    is_alone: bool = False
    needs: tuple[str, ...] = ()


class SkippedError(Exception):
    """A part lacks what it needs; its text says what, in one sentence."""


class Progress:
    """What a part tells while it runs.

    Args:
        name: The part.
        path: The file that always has what was told.
        is_rehearsal: Whether sizes are tiny and the device is a CPU.
    """

    def __init__(self, name: str, path: Path, *, is_rehearsal: bool) -> None:
        self.is_rehearsal = is_rehearsal
        self.result = PartResult(name, "running")
        self._path = path
        self._begin_s = time.perf_counter()
        self.write()

    def add(self, *figures: Figure) -> None:
        """Keep figures, and print them."""
        for figure in figures:
            self.result.figures.append(figure)
            self.write()
            print(f"{figure.name}: {figure.value:.3g} {figure.unit}  {figure.detail}", flush=True)

    def add_all(self, figures: Iterable[Figure]) -> None:
        """Keep each figure as soon as it is there."""
        for figure in figures:
            self.add(figure)

    def doing(self, what: str) -> None:
        """Say what comes next: the report has it if the process dies there."""
        self.result.doing = what
        self.write()

    def write(self) -> None:
        """Write all that was told."""
        self.result.seconds = time.perf_counter() - self._begin_s
        self.result.write(self._path)
