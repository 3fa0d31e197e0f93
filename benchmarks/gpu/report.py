"""What a check found, for people and for programs. Imports no torch: the driver lives on when a part's process dies."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

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
    """Replace a file: whoever is killed in between leaves the old one."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text + "\n", encoding="utf-8")
    os.replace(new, path)


@dataclass(slots=True)
class Report:
    """Everything about one run. `title` names the card, `machine` the rest."""

    title: str
    machine: Sequence[str]
    command: str
    has_targets: bool = True  # False: the figures mean nothing
    parts: list[PartResult] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all parts ran and passed, or lack what they need; a missed target of speed fails nothing."""
        return all(part.status in ("passed", "skipped") for part in self.parts)

    def markdown(self) -> str:
        """Return the report as a page."""
        lines = [f"# {self.title}", "", *(f"- {line}" for line in self.machine), f"- command: `{self.command}`", ""]
        lines += ["| part | | seconds | |", "| --- | --- | ---: | --- |"]
        for part in self.parts:
            status = part.status.upper() if part.status == "failed" else part.status
            lines.append(f"| {part.name} | {status} | {part.seconds:.0f} | {_cell(part.detail or part.doing)} |")
        lines += ["", "| measured | | target | |", "| --- | --- | --- | --- |"]
        for figure in (figure for part in self.parts for figure in part.figures):
            value = f"{_number(figure.value)} {figure.unit}"
            lines.append(f"| {figure.name} | {value} | {self._target(figure)} | {_cell(figure.detail)} |")
        return "\n".join([*lines, ""])

    def _target(self, figure: Figure) -> str:
        if figure.target is None or not self.has_targets:
            return ""
        sign, met = ("≤" if figure.at_most else "≥"), ("met" if figure.is_met else "MISSED")
        return f"{sign} {_number(figure.target)} {figure.unit}: {met}"

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write the page and its figures as JSON; return the two files."""
        page, data = folder / f"{name}.md", folder / f"{name}.json"
        write_in_place(page, self.markdown())
        write_in_place(data, json.dumps(asdict(self), indent=2))
        return [page, data]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
