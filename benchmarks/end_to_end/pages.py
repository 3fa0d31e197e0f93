"""Write the last results into the pages, between their markers: `make bench-pages`.

    python -m benchmarks.end_to_end.pages

README.md gets a short table, docs/benchmarks.md all of it, a picture, the profile of a step, and what the stack costs.
A test compares the pages with the results.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.end_to_end.engines import ROOT
from benchmarks.end_to_end.plot import save_plot
from benchmarks.end_to_end.result import RESULTS, Result, last_result, read_result
from benchmarks.end_to_end.tables import comparison, limits_line, machine_line, runs_table
from benchmarks.stack_cost import Result as StackCost
from benchmarks.stack_cost import comparison as stack_comparison

PICTURE = Path("docs/figures/benchmark.svg")
STEP_PROFILE = RESULTS / "step_profile.json"  # python -m benchmarks.step_profile --json
STACK_COST = RESULTS / "stack_cost.json"  # python -m benchmarks.stack_cost --json
_LEAST_US = 20.0
_PYTHON = "all of Python"  # as benchmarks.step_profile calls it


@dataclass(frozen=True, slots=True)
class Section:
    """What stands between two markers of a page.

    Attributes:
        page: The page.
        name: Of the section, in its markers.
        make: Returns its text.
    """

    page: str
    name: str
    make: Callable[[], str]

    @property
    def markers(self) -> tuple[str, str]:
        """The lines before and after it."""
        return f"<!-- begin: {self.name}, by make bench-pages -->", f"<!-- end: {self.name} -->"

    def insert_into(self, text: str) -> str:
        """Return the page with this section as it is now.

        Raises:
            ValueError: the page has no markers.
        """
        begin, end = self.markers
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found or not found_end:
            raise ValueError(f"the page has no {begin} with {end} after it")
        return f"{before}{begin}\n\n{self.make()}\n\n{end}{after}"


def of_last_result(make: Callable[[Result], str], path: Path | None) -> str:
    """Return what is said of a result's file."""
    return "No run is recorded yet: `make bench` measures yours." if path is None else make(read_result(path))


def front_part(result: Result) -> str:
    """Return what README.md says."""
    return "\n\n".join([comparison(result, is_front=True), machine_line(result), limits_line(result)])


def whole_part(result: Result) -> str:
    """Return what docs/benchmarks.md says."""
    parts = [comparison(result), f"{machine_line(result)} {limits_line(result)}"]
    if result.missing:
        parts.append("Left out: " + "; ".join(f"{name} ({why})" for name, why in result.missing.items()) + ".")
    parts += ["![Each engine's tokens a second, by workload and number format](figures/benchmark.svg)"]
    return "\n\n".join([*parts, "Every engine, with the range of its runs:", runs_table(result)])


def step_part(path: Path) -> str:
    """Return the profile of a step as a table for each number format; parts that take little are one line."""
    if not path.exists():
        return "No profile is recorded yet: `make bench-core` measures yours."
    profile = json.loads(path.read_text(encoding="utf-8"))
    threads = f"{profile['threads']} thread" + "s" * (profile["threads"] > 1)
    tables = [_step_table(name, by_rows) for name, by_rows in profile["microseconds"].items()]
    return "\n\n".join([*tables, f"{threads}, {profile['machine']}."])


def _step_table(name: str, by_rows: dict[str, dict[str, float]]) -> str:
    wholes = {_PYTHON: [column[_PYTHON] for column in by_rows.values()]}  # timed without clocks around the parts
    columns = [{part: us for part, us in column.items() if part != _PYTHON} for column in by_rows.values()]
    wholes["all of C"] = [sum(us for part, us in column.items() if part.startswith("C: ")) for column in columns]
    lines = [
        "| " + " | ".join([f"{name}, CPU µs", *(f"{rows} row" + "s" * (rows != "1") for rows in by_rows)]) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for is_c, title in ((True, "C"), (False, "Python")):
        parts = [part for part in columns[0] if part.startswith("C: ") == is_c]
        large = [part for part in parts if max(column.get(part, 0.0) for column in columns) >= _LEAST_US]
        rows = {f"{title}: {part.removeprefix('C: ')}": [part] for part in large}
        if len(large) < len(parts):
            rows[f"{title}: what takes less"] = sorted(set(parts) - set(large))
        for label, summed in rows.items():
            lines.append(_step_row(label, [sum(column.get(part, 0.0) for part in summed) for column in columns]))
        lines.append(_step_row(f"all of {title}", wholes[f"all of {title}"]))
    lines.append(_step_row("step", [sum(whole) for whole in zip(*wholes.values(), strict=True)]))
    return "\n".join(lines)


def _step_row(label: str, microseconds: Sequence[float]) -> str:
    return f"| {label} | " + " | ".join(f"{us:,.0f}" for us in microseconds) + " |"


def stack_part(path: Path) -> str:
    """Return what the stack costs."""
    if not path.exists():
        return "No run is recorded yet: `python -m benchmarks.stack_cost` measures yours."
    return stack_comparison(StackCost.model_validate_json(path.read_text(encoding="utf-8")))


SECTIONS = (
    Section("README.md", "results", lambda: of_last_result(front_part, last_result())),
    Section("docs/benchmarks.md", "results", lambda: of_last_result(whole_part, last_result())),
    Section("docs/benchmarks.md", "one step", lambda: step_part(STEP_PROFILE)),
    Section("docs/benchmarks.md", "what the stack costs", lambda: stack_part(STACK_COST)),
)


def main() -> None:
    """Write the pages and the picture."""
    for section in SECTIONS:
        page = ROOT / section.page
        page.write_text(section.insert_into(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{section.page}: {section.name}")
    path = last_result()
    if path is not None:
        save_plot(read_result(path), ROOT / PICTURE)


if __name__ == "__main__":
    main()
