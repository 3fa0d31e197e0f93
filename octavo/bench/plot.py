"""The report as a picture: how TTFT and ITL are distributed, and what happened over time."""

import warnings
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo.bench.config import BenchConfig, Metric
from octavo.bench.load import SessionResult
from octavo.bench.record import Float64Array, Outcome
from octavo.bench.report import describe_lengths, describe_load
from octavo.bench.summary import Timeline, all_itls_s, make_timeline

# Of the palette of Okabe and Ito (2008), which people with the usual kinds of colour blindness can tell apart.
_BLUE, _GREEN, _VERMILION = "#0072B2", "#009E73", "#D55E00"
_GREY = "#595959"

# A curve needs no more points, and a file with all ITLs of a long load would be large.
_MOST_POINTS = 2_000


def save_plot(path: Path, config: BenchConfig, session: SessionResult) -> None:
    """Draw the load into a file; its ending says the format.

    Raises:
        OSError: the file cannot be written.
    """
    done = [record for record in session.load.records if record.outcome is Outcome.COMPLETED]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    title = f"{session.info.model_id}: {describe_load(config)}\n{describe_lengths(config)}"
    figure.suptitle(title, fontsize=12, parse_math=False)
    (left, right), (below_left, below_right) = figure.subplots(2, 2)
    ttfts_s = np.array([record.ttft_s for record in done if record.ttft_s is not None])
    limits_s = {} if config.slo is None else config.slo.limits_s
    _draw_distribution(left, ttfts_s, "Time to first token (TTFT)", _BLUE)
    _draw_limit(left, limits_s.get(Metric.TTFT))
    _draw_distribution(right, all_itls_s(done), "Inter-token latency (ITL)", _GREEN)
    _draw_limit(right, limits_s.get(Metric.ITL))
    timeline = make_timeline(session.load)
    _draw_timeline(below_left, timeline, timeline.output_tokens_per_s, "Output tokens/s", _GREEN)
    _draw_timeline(below_right, timeline, timeline.running, "Requests running", _BLUE)
    _mark_failures(below_right, timeline)
    with warnings.catch_warnings():
        # A model's name may have characters that the font lacks; they become boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        figure.savefig(path, dpi=150)


def _draw_distribution(axes: Axes, values_s: Float64Array, title: str, colour: str) -> None:
    """Draw the share of values up to each time, and name its percentiles."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("ms")
    axes.set_ylabel("share of requests" if "TTFT" in title else "share of tokens")
    axes.set_ylim(0, 1.03)
    _clear(axes)
    if not values_s.size:
        axes.text(0.5, 0.5, "no values", ha="center", transform=axes.transAxes, color=_GREY)
        return
    shares = np.linspace(0, 1, min(values_s.size, _MOST_POINTS)) if values_s.size > 1 else np.array([1.0])
    axes.plot(np.quantile(values_s, shares) * 1e3, shares, color=colour, linewidth=2)
    p50, p90, p99 = np.percentile(values_s, (50, 90, 99)) * 1e3
    lines = [(p50, 0.5, "p50"), (p90, 0.9, "p90"), (p99, 0.99, "p99")]
    # A few values far out must not press the rest against the axis.
    longest = float(values_s.max()) * 1e3
    if longest > 3 * p99 > 0:
        axes.set_xlim(0, 1.5 * p99)
        far = f"max {_ms(longest)} ms, beyond the axis"
        axes.text(0.99, 0.03, far, ha="right", fontsize=9, color=_GREY, transform=axes.transAxes)
    else:
        axes.set_xlim(0, max(longest * 1.05, 1e-3))
    for value, share, _ in lines:
        axes.plot([value], [share], "o", color=colour, markersize=5)
    text = "   ".join(f"{name} {_ms(value)}" for value, _, name in lines)
    axes.set_title(f"{text} ms", loc="right", fontsize=10, color=_GREY)


def _draw_limit(axes: Axes, limit_s: float | None) -> None:
    if limit_s is None:
        return
    limit = limit_s * 1e3
    axes.axvline(limit, color=_VERMILION, linestyle="--", linewidth=1.5)
    axes.set_xlim(0, max(axes.get_xlim()[1], limit * 1.05))
    axes.text(limit, 0.03, f" objective {limit:g} ms ", color=_VERMILION, fontsize=9, rotation=90, ha="right")


def _draw_timeline(axes: Axes, timeline: Timeline, values: Float64Array, title: str, colour: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("s since the beginning")
    axes.stairs(values, timeline.edges_s, color=colour, linewidth=2)
    axes.stairs(values, timeline.edges_s, color=colour, fill=True, alpha=0.15)
    axes.set_xlim(0, timeline.edges_s[-1])
    axes.set_ylim(0, max(float(values.max(initial=0.0)) * 1.12, 1e-9))
    _clear(axes)


def _mark_failures(axes: Axes, timeline: Timeline) -> None:
    middles_s = (timeline.edges_s[:-1] + timeline.edges_s[1:]) / 2
    has_failed = timeline.failed > 0
    if not has_failed.any():
        return
    num_failed = round(float(timeline.failed.sum()))
    heights = np.full(int(has_failed.sum()), axes.get_ylim()[1] * 0.03)
    axes.plot(middles_s[has_failed], heights, "x", color=_VERMILION, markersize=8, markeredgewidth=2)
    axes.text(0.99, 0.96, f"× {num_failed} failed", ha="right", va="top", color=_VERMILION, transform=axes.transAxes)


def _clear(axes: Axes) -> None:
    axes.grid(axis="both", color="#d9d9d9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_GREY)


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
