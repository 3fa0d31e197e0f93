"""From runs to figures: medians, the ratio to the best peer, the share of what the machine could do."""

import statistics
from dataclasses import dataclass

from benchmarks.end_to_end.engines import CLASSES, OURS
from benchmarks.end_to_end.model_costs import workload_flops
from benchmarks.end_to_end.result import EngineRecord, Result, RunRecord
from benchmarks.end_to_end.workloads import WORKLOADS, Workload


@dataclass(frozen=True, slots=True)
class Figure:
    """What one engine reached at one workload.

    Attributes:
        engine: The engine.
        median: Tokens a second; of a first token, milliseconds.
        low: Of all runs.
        high: Of all runs.
        num_runs: That count.
        is_spoiled: Whether other work disturbed all runs.
        limit_share: W1: bytes of weights that it read a second, of the memory's bandwidth; else: operations a second,
            of the float32 peak; None: the limit was not measured.
    """

    engine: EngineRecord
    median: float
    low: float
    high: float
    num_runs: int
    is_spoiled: bool
    limit_share: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One workload in one class of number formats.

    Attributes:
        workload: The workload.
        number_class: The class.
        ours: Our best figure; None: we did not run.
        peers: The best figure of each other product.
    """

    workload: Workload
    number_class: str
    ours: Figure | None
    peers: dict[str, Figure]

    @property
    def best_peer(self) -> Figure | None:
        """The best figure of all others."""
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
    """Return the fastest one."""
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
    """Return all rows that anybody ran, in the order of the workloads."""
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
