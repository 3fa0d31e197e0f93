"""From runs to figures, and from figures to tables of Markdown."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.end_to_end.engines import CLASSES, OURS, PRODUCTS, workload_flops
from benchmarks.end_to_end.result import EngineRecord, Result, RunRecord
from benchmarks.end_to_end.workloads import WORKLOADS, Workload
from octavo.bench.provenance import markdown_table


@dataclass(frozen=True, slots=True)
class Figure:
    """What one engine reached at one workload."""

    engine: EngineRecord
    median: float  # tokens a second; of a first token, milliseconds
    low: float  # of all runs
    high: float  # of all runs
    num_runs: int  # that count
    is_spoiled: bool  # whether other work disturbed all runs
    # W1: bytes of weights that it read a second, of the memory's bandwidth; else: operations a second, of the
    # float32 peak; None: the limit was not measured.
    limit_share: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One workload in one class of number formats."""

    workload: Workload
    number_class: str
    ours: Figure | None  # our best figure; None: we did not run
    peers: dict[str, Figure]  # the best figure of each other product

    @property
    def best_peer(self) -> Figure | None:
        return best(list(self.peers.values()), self.workload)

    @property
    def ratio(self) -> float | None:
        """Ours by that of the best peer: of tokens a second or of milliseconds."""
        peer = self.best_peer
        return None if self.ours is None or peer is None else self.ours.median / peer.median


def rate(run: RunRecord, workload: Workload) -> float:
    """Return what a run is judged by; see `Workload.unit`."""
    if workload.unit == "output":
        return run.output_tokens / run.seconds
    first_token_s = run.first_token_s[0] if run.first_token_s else run.seconds
    if workload.unit == "first token":
        return 1e3 * first_token_s
    return (run.output_tokens - 1) / (run.seconds - first_token_s)


def best(figures: list[Figure], workload: Workload) -> Figure | None:
    choose = min if workload.unit == "first token" else max
    return choose(figures, key=lambda figure: figure.median, default=None)


def figure_of(result: Result, engine: EngineRecord, workload: Workload) -> Figure | None:
    """Return what an engine reached; runs that other work spoiled count only where there are no others."""
    runs = [run for run in result.runs if (run.engine, run.workload) == (engine.name, workload.name)]
    if not runs:
        return None
    clean = [run for run in runs if not run.is_spoiled]
    rates = [rate(run, workload) for run in clean or runs]
    median = statistics.median(rates)
    share = _limit_share(result, engine, workload, median)
    return Figure(engine, median, min(rates), max(rates), len(rates), not clean, share)


def _limit_share(result: Result, engine: EngineRecord, workload: Workload, median: float) -> float | None:
    limits = result.limits
    if workload.unit == "decode":
        peak = 1e9 * max(limits.read_gb_per_s, default=0.0)
        return engine.weight_bytes * median / peak if peak else None
    peak = 1e9 * max(limits.fma_gflop_per_s, default=0.0)
    seconds = median / 1e3 if workload.unit == "first token" else workload.output_tokens / median
    return workload_flops(result.model, workload) / seconds / peak if peak else None


def rows(result: Result) -> list[Row]:
    """Return all rows that were run, in the order of the workloads."""
    made = []
    for workload in WORKLOADS:
        for number_class in CLASSES:
            figures = [
                figure
                for engine in result.engines
                if engine.number_class == number_class and (figure := figure_of(result, engine, workload)) is not None
            ]
            products = dict.fromkeys(figure.engine.product for figure in figures)
            of_product = {
                product: best([figure for figure in figures if figure.engine.product == product], workload)
                for product in products
            }
            ours = of_product.pop(OURS, None)
            peers = {product: figure for product, figure in of_product.items() if figure is not None}
            if ours is not None or peers:
                made.append(Row(workload, number_class, ours, peers))
    return made


_NOTHING = "–"

# What the front page shows of it, at most 14 rows: every format of one stream and of 32, two formats of the rest.
_FRONT_CLASSES = {
    "W1": CLASSES,
    "W2": CLASSES,
    "W4": ("float32", "8 bits"),
    "P2000": ("float32", "8 bits"),
    "P8000": ("float32", "8 bits"),
}


def comparison(result: Result, *, is_front: bool = False) -> str:
    """Return the table of all rows, or of the rows for the front page."""
    chosen = [row for row in rows(result) if not is_front or _is_on_front(row)]
    products = [product for product in PRODUCTS[1:] if any(product in row.peers for row in chosen)]
    header = ["", "Octavo", *products, "Octavo / best peer", "of the limit"]
    return markdown_table(header, (_cells(row, products) for row in chosen))


def _is_on_front(row: Row) -> bool:
    return row.number_class in _FRONT_CLASSES.get(row.workload.name, ())


def _cells(row: Row, products: Sequence[str]) -> list[str]:
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
    lines = []
    for row in rows(result):
        figures = [] if row.ours is None else [row.ours]
        for figure in [*figures, *row.peers.values()]:
            share = _NOTHING if figure.limit_share is None else f"{100 * figure.limit_share:.0f} %"
            extent = f"{figure.low:,.1f} to {figure.high:,.1f}"
            name = f"{row.workload.name} {row.number_class}{_unit(row)}"
            lines.append([name, figure.engine.name, _number(figure), extent, str(figure.num_runs), share])
    return markdown_table(["", "engine", "median", "range", "runs", "of the limit"], lines, num_texts=2)


def machine_line(result: Result) -> str:
    """Return the machine, the versions and the date, in one sentence."""
    versions: dict[str, str] = {}
    for engine in result.engines:
        versions |= {name: text for name, text in engine.versions.items() if name not in ("octavo", "torch", "grpcio")}
    told = ", ".join(f"{name} {text}" for name, text in versions.items())
    return f"{result.machine}, {result.num_threads} threads each, {told}, Python {result.python}, {result.date}."


def limits_line(result: Result) -> str:
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
