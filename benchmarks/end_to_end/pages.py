"""Write the last result into the pages, between their markers: `make bench-pages`.

    python -m benchmarks.end_to_end.pages

README.md gets a short table, docs/benchmarks.md all of it and a picture. A test compares the pages with the result.
"""

from collections.abc import Callable
from pathlib import Path

from benchmarks.end_to_end.engines import ROOT
from benchmarks.end_to_end.plot import save_plot
from benchmarks.end_to_end.result import Result, last_result, read_result
from benchmarks.end_to_end.tables import comparison, limits_line, machine_line, runs_table

BEGIN, END = "<!-- begin: make bench-pages -->", "<!-- end: make bench-pages -->"
PICTURE = Path("docs/figures/benchmark.svg")


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


PAGES: dict[str, Callable[[Result], str]] = {"README.md": front_part, "docs/benchmarks.md": whole_part}


def part_of(page: str, path: Path | None) -> str:
    """Return what a page says of a result's file."""
    if path is None:
        return "No run is recorded yet: `make bench` measures yours."
    return PAGES[page](read_result(path))


def with_part(text: str, part: str) -> str:
    """Return a page with another text between its markers.

    Raises:
        ValueError: the page has no markers.
    """
    before, found, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"the page has no {BEGIN} with {END} after it")
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def main() -> None:
    """Write both pages and the picture."""
    path = last_result()
    for name in PAGES:
        page = ROOT / name
        page.write_text(with_part(page.read_text(encoding="utf-8"), part_of(name, path)), encoding="utf-8")
    if path is not None:
        save_plot(read_result(path), ROOT / PICTURE)
    print(f"{', '.join(PAGES)}: " + ("there is no result in benchmarks/results" if path is None else path.name))


if __name__ == "__main__":
    main()
