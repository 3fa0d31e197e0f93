"""Write the last results into the pages, between their markers: `make bench-pages`.

    python -m benchmarks.end_to_end.pages

README.md gets a short table, docs/benchmarks.md the whole one and a picture.
A test compares the pages with the results.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.end_to_end.engines import ROOT
from benchmarks.end_to_end.plot import save_plot
from benchmarks.end_to_end.result import Result, last_result, read_result
from benchmarks.end_to_end.tables import comparison, limits_line, machine_line

PICTURE = Path("docs/figures/benchmark.svg")


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
    return "\n\n".join(parts)


SECTIONS = (
    Section("README.md", "results", lambda: of_last_result(front_part, last_result())),
    Section("docs/benchmarks.md", "results", lambda: of_last_result(whole_part, last_result())),
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
