"""What a check found, for people and for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """A part of the check that passed, failed, or could not be run."""

    name: str
    passed: bool
    detail: str


@dataclass(slots=True)
class Report:
    """Everything about one run. `title` names the card, `machine` the rest."""

    title: str
    machine: Sequence[str]
    command: str
    has_targets: bool = True  # False: the figures mean nothing
    outcomes: list[Outcome] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all parts ran and passed; a missed target of speed is reported, not failed."""
        return all(outcome.passed for outcome in self.outcomes)

    def markdown(self) -> str:
        """Return the report as a page."""
        lines = [f"# {self.title}", "", *(f"- {line}" for line in self.machine), f"- command: `{self.command}`", ""]
        lines += ["| part | | |", "| --- | --- | --- |"]
        for outcome in self.outcomes:
            lines.append(f"| {outcome.name} | {'passed' if outcome.passed else 'FAILED'} | {outcome.detail} |")
        lines += ["", "| measured | | target | |", "| --- | --- | --- | --- |"]
        for figure in self.figures:
            value = f"{_number(figure.value)} {figure.unit}"
            lines.append(f"| {figure.name} | {value} | {self._target(figure)} | {figure.detail} |")
        return "\n".join([*lines, ""])

    def _target(self, figure: Figure) -> str:
        if figure.target is None or not self.has_targets:
            return ""
        sign, met = ("≤" if figure.at_most else "≥"), ("met" if figure.is_met else "MISSED")
        return f"{sign} {_number(figure.target)} {figure.unit}: {met}"

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write the page and its figures as JSON; return the two files."""
        folder.mkdir(parents=True, exist_ok=True)
        page, data = folder / f"{name}.md", folder / f"{name}.json"
        page.write_text(self.markdown(), encoding="utf-8")
        data.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        return [page, data]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
