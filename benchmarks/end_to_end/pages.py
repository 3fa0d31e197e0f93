"""Write the last results into the pages, between their markers, and draw them: `make bench-pages`.

    python -m benchmarks.end_to_end.pages

README.md gets a short table, docs/benchmarks.md all of it and a picture. A test compares the pages with the results.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from benchmarks.end_to_end.engines import CLASSES, OURS, PRODUCTS, ROOT
from benchmarks.end_to_end.result import Result, last_result, read_result
from benchmarks.end_to_end.tables import Row, comparison, limits_line, machine_line, rows

PICTURE = Path("docs/figures/benchmark.svg")


@dataclass(frozen=True, slots=True)
class Section:
    """What stands between two markers of a page."""

    page: str
    name: str  # of the section, in its markers
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
    return "\n\n".join([comparison(result, is_front=True), machine_line(result), limits_line(result)])


def whole_part(result: Result) -> str:
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
    for section in SECTIONS:
        page = ROOT / section.page
        page.write_text(section.insert_into(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{section.page}: {section.name}")
    path = last_result()
    if path is not None:
        save_plot(read_result(path), ROOT / PICTURE)


# Of the palette of Okabe and Ito (2008), which people with the usual kinds of colour blindness can tell apart.
_COLOURS = dict(zip(PRODUCTS, ("#0072B2", "#999999", "#E69F00", "#009E73", "#CC79A7"), strict=True))
_GROUP_WIDTH = 0.84


def save_plot(result: Result, path: Path) -> None:
    """Draw the result as SVG; the same result makes the same file."""
    workloads = {row.workload.name: row.workload for row in rows(result)}
    num_rows = (len(workloads) + 1) // 2
    # Text as text: the file is small, and a search finds the words.
    with rc_context({"svg.hashsalt": "octavo", "svg.fonttype": "none", "font.size": 9}):
        picture = Picture(figsize=(9, 2.3 * num_rows + 0.6), layout="constrained")
        panels = picture.subplots(num_rows, 2, squeeze=False).flatten().tolist()
        for axes, (name, workload) in zip(panels, workloads.items(), strict=False):
            unit = "ms, less is better" if workload.unit == "first token" else "tokens/s"
            axes.set_title(f"{name}: {workload.title}\n{unit}", loc="left", fontsize=9)
            _draw(axes, [row for row in rows(result) if row.workload.name == name])
        for axes in panels[len(workloads) :]:
            axes.set_visible(False)
        shown = [product for product in PRODUCTS if any(engine.product == product for engine in result.engines)]
        handles = [axes.bar(0, 0, color=_COLOURS[product], label=product) for product in shown]
        picture.legend(handles=handles, loc="outside lower center", ncols=len(shown), frameon=False)
        picture.savefig(path, format="svg", metadata={"Date": None})


def _draw(axes: Axes, chosen: list[Row]) -> None:
    """Draw one group of bars for each class, one bar for each product."""
    ordered = sorted(chosen, key=lambda row: CLASSES.index(row.number_class))
    for place, row in enumerate(ordered):
        figures = {**({} if row.ours is None else {OURS: row.ours}), **row.peers}
        width = _GROUP_WIDTH / max(len(figures), 3)
        for index, (product, figure) in enumerate(figures.items()):
            at = place + (index - (len(figures) - 1) / 2) * width
            axes.bar(at, figure.median, width, color=_COLOURS[product])
            axes.annotate(f"{figure.median:.0f}", (at, figure.median), ha="center", va="bottom", fontsize=6)
    axes.set_xticks(range(len(ordered)), [row.number_class for row in ordered])
    axes.margins(y=0.15)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
