"""A part of the check, what it tells, and the report of all parts, for people and for programs. Imports no torch.

A part is a function that gets a `Progress` and its arguments. It adds figures as it has them, and returns one line or
nothing; it fails by an exception. Whatever ends the process, the file has what was added before.
"""

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from octavo.bench.provenance import Provenance, markdown_table

Status = Literal["not run", "running", "passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Figure:
    """Something measured. `target` None: nothing is promised."""

    name: str
    value: float
    unit: str
    target: float | None = None
    at_most: bool = False  # the target is an upper limit
    detail: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the target was reached; None: there is none."""
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


@dataclass(slots=True)
class PartResult:
    """What is known of one part. Its process writes it to a file after each figure and before each test.

    `doing`: what the process does now; if it dies, that is where.
    """

    name: str
    status: Status = "not run"
    detail: str = ""
    doing: str = ""
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write it in place of what stood there."""
        write_in_place(path, json.dumps(asdict(self), indent=2))

    @classmethod
    def read(cls, path: Path) -> "PartResult":
        """Read what a part has written. Raises: OSError: it wrote nothing."""
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**found, "figures": [Figure(**figure) for figure in found["figures"]]})


def write_in_place(path: Path, text: str) -> None:
    """Replace a file: a process that is killed in between leaves the old one."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


@dataclass(slots=True)
class Report:
    """Everything about one run. `title` names the card, `machine` the rest."""

    title: str
    machine: Sequence[str]
    provenance: Provenance
    has_targets: bool = True  # False: the figures mean nothing
    parts: list[PartResult] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all parts ran and passed, or lack what they need; a missed target of speed fails nothing."""
        return all(part.status in ("passed", "skipped") for part in self.parts)

    def markdown(self) -> str:
        about = (*self.machine, self.provenance.date, f"command: `{self.provenance.command}`")
        lines = [f"# {self.title}", "", *(f"- {line}" for line in about), ""]
        parts = [
            [
                part.name,
                part.status.upper() if part.status == "failed" else part.status,
                f"{part.seconds:.0f}",
                _cell(part.detail or part.doing),
            ]
            for part in self.parts
        ]
        figures = [
            [
                figure.name,
                f"{_number(figure.value)} {figure.unit}",
                self._target(figure),
                _cell(figure.detail),
            ]
            for part in self.parts
            for figure in part.figures
        ]
        lines += [markdown_table(["part", "", "seconds", ""], parts, num_texts=4), ""]
        lines += [markdown_table(["measured", "", "target", ""], figures, num_texts=4), ""]
        return "\n".join(lines) + "\n"

    def _target(self, figure: Figure) -> str:
        if figure.target is None or not self.has_targets:
            return ""
        sign, met = ("≤" if figure.at_most else "≥"), ("met" if figure.is_met else "MISSED")
        return f"{sign} {_number(figure.target)} {figure.unit}: {met}"

    def write(self, folder: Path, name: str) -> None:
        """Write the page, and its figures as JSON."""
        rows = {name: value for name, value in asdict(self).items() if name != "provenance"}
        write_in_place(folder / f"{name}.md", self.markdown())
        write_in_place(folder / f"{name}.json", self.provenance.json(rows))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the check."""

    name: str  # for `--only`, the report and its files
    about: str  # what it shows, in one line
    function: str  # `module:name`
    limit_s: float  # the part is ended after so long
    arguments: tuple[str, ...] = ()  # for the function, behind the `Progress`
    is_alone: bool = False  # whether it needs the card for itself, since it measures
    needs: tuple[str, ...] = ()  # modules without which it is skipped


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
