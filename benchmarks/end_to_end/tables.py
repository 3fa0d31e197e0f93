"""The figures as a table of Markdown, for pages and for the terminal."""

from collections.abc import Sequence

from benchmarks.end_to_end.engines import PRODUCTS
from benchmarks.end_to_end.result import Result
from benchmarks.end_to_end.summary import Figure, Row, rows

_NOTHING = "–"

# What the front page shows of it.
_FRONT_CLASSES = {"W1": ("float32", "bfloat16", "8 bits", "4 bits"), "W2": ("float32", "bfloat16", "8 bits", "4 bits")}


def comparison(result: Result, *, is_front: bool = False) -> str:
    """Return the table of all rows, or of those for the front page."""
    chosen = [row for row in rows(result) if not is_front or _is_on_front(row)]
    products = [product for product in PRODUCTS[1:] if any(product in row.peers for row in chosen)]
    header = ["", "Octavo", *products, "Octavo / best peer", "of the limit"]
    lines = [_line(header), "|---|" + "---:|" * (len(header) - 1)]
    lines += [_line(_cells(row, products, chosen)) for row in chosen]
    return "\n".join(lines)


def _is_on_front(row: Row) -> bool:
    return row.number_class in _FRONT_CLASSES.get(row.workload.name, ("float32", "8 bits"))


def _cells(row: Row, products: Sequence[str], chosen: Sequence[Row]) -> list[str]:
    best = row.best_peer
    ours = row.ours
    cells = [f"{row.workload.name} {row.number_class}{_unit(row)}", _NOTHING]
    if ours is not None:
        cells[1] = _number(ours)
        if row.number_class == "8 bits":
            cells[1] += f" ({ours.engine.number_format})"
    for product in products:
        figure = row.peers.get(product)
        text = _NOTHING if figure is None else _number(figure)
        cells.append(f"**{text}**" if figure is not None and figure is best else text)
    cells.append(_NOTHING if row.ratio is None else f"{row.ratio:.2f}")
    cells.append(_NOTHING if ours is None or ours.limit_share is None else f"{ours.limit_share:.0%}".replace("%", " %"))
    return cells


def _unit(row: Row) -> str:
    return ", ms" if row.workload.unit == "first token" else ""


def _number(figure: Figure) -> str:
    digits = 1 if figure.median < 100 else 0
    return f"{figure.median:,.{digits}f}" + ("*" if figure.is_spoiled else "")


def runs_table(result: Result) -> str:
    """Return every figure with its range and the number of its runs."""
    lines = [_line(["", "engine", "median", "range", "runs", "of the limit"]), "|---|---|---:|---:|---:|---:|"]
    for row in rows(result):
        figures = [] if row.ours is None else [row.ours]
        for figure in [*figures, *row.peers.values()]:
            share = _NOTHING if figure.limit_share is None else f"{100 * figure.limit_share:.0f} %"
            extent = f"{figure.low:,.1f} to {figure.high:,.1f}"
            name = f"{row.workload.name} {row.number_class}{_unit(row)}"
            lines.append(_line([name, figure.engine.name, _number(figure), extent, str(figure.num_runs), share]))
    return "\n".join(lines)


def machine_line(result: Result) -> str:
    """Return the machine, the versions and the date, in one sentence."""
    versions: dict[str, str] = {}
    for engine in result.engines:
        versions |= {name: text for name, text in engine.versions.items() if name not in ("octavo", "torch", "grpcio")}
    told = ", ".join(f"{name} {text}" for name, text in versions.items())
    machine = result.machine
    return (
        f"{machine.processor} ({machine.instructions}), {machine.cores} cores, {machine.memory_gib} GiB, "
        f"{result.num_threads} threads each, {told}, Python {result.python}, {result.date}."
    )


def limits_line(result: Result) -> str:
    """Return what the machine could do, in one sentence."""
    limits = result.limits
    if not limits.read_gb_per_s:
        return "The limits of the machine were not measured: there is no C compiler."
    read, fma = limits.read_gb_per_s, limits.fma_gflop_per_s
    text = (
        f"Measured in the same run: {_extent(read)} GB/s read from memory, {_extent(fma)} GFLOP/s of float32 "
        f"multiply-adds"
    )
    gemm = limits.gemm_gflop_per_s
    return f"{text}, {_extent(gemm)} in torch's best large matrix product." if gemm else f"{text}."


def _extent(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{high:.0f}" if f"{low:.0f}" == f"{high:.0f}" else f"{low:.0f} to {high:.0f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
