"""The figures as a picture: each engine's tokens a second, by workload and class of number formats."""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from benchmarks.end_to_end.engines import CLASSES, OURS, PRODUCTS
from benchmarks.end_to_end.result import Result
from benchmarks.end_to_end.summary import Row, rows

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
