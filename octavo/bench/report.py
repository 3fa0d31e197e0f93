"""The reports: for a person, as tables and lines of rich, and for a program, as one JSON object."""

import math
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

import octavo
from octavo.bench.comparison import comparison_report
from octavo.bench.config import BenchConfig, DatasetName
from octavo.bench.load import SessionResult
from octavo.bench.record import RequestRecord, TargetInfo
from octavo.bench.summary import Distribution, Summary, make_timeline

# Above these the sender's own delays are no longer small beside a token's.
_LATE_S = 0.02
_BUSY_SHARE = 0.8

# What random prompts do not reach by chance.
_CACHED_SHARE = 0.02

_MOST_ERRORS = 8


def print_report(console: Console, config: BenchConfig, info: TargetInfo, summary: Summary) -> None:
    """Print a load's numbers, what went wrong, and what makes them doubtful."""
    for part in _report(config, info, summary):
        console.print(part, soft_wrap=isinstance(part, str), highlight=False)


def warnings(config: BenchConfig, info: TargetInfo, summary: Summary) -> list[str]:
    """Return a sentence for each reason to doubt the numbers."""
    found = []
    if summary.lateness_s is not None and summary.lateness_s.p99 > _LATE_S:
        found.append(
            f"1 % of the requests were sent more than {_ms(summary.lateness_s.p99)} ms late: "
            "the load was less even than asked for"
        )
    if summary.lag_s is not None and summary.lag_s.p99 > _LATE_S:
        found.append(
            f"the sender's event loop lagged by up to {_ms(summary.lag_s.p99)} ms (p99): "
            "the times include its own delays, more if it shares processors with the server"
        )
    if summary.busy_share > _BUSY_SHARE:
        found.append(
            f"the sender was busy {summary.busy_share:.0%} of the time, so it may limit the rate; use several processes"
        )
    # What a chat template puts around each prompt is shared too.
    has_fresh_prompts = not config.shared_prefix_len and config.dataset is None and info.api != "chat"
    if has_fresh_prompts and not config.compares_speculation and summary.cached_share > _CACHED_SHARE:
        found.append(
            f"{summary.cached_share:.0%} of the prompt tokens came from the server's prefix cache: "
            "it saw prompts of this --seed before"
        )
    if config.dataset is not None and config.warmup and summary.cached_share > _CACHED_SHARE:
        found.append(
            f"{summary.cached_share:.0%} of the prompt tokens came from the server's prefix cache: "
            "the warm-up sent prompts of the same dataset"
        )
    if config.compares_speculation and config.dataset is None:
        found.append("random prompts: the ratios say nothing of real text; add --dataset-name or --dataset")
    if summary.num_without_usage:
        found.append(
            f"{summary.num_without_usage} answers had no usage: each part of their streams counts as one token"
        )
    return found


def describe_load(config: BenchConfig) -> str:
    """Return how requests were sent, in a few words."""
    if config.rate is not None:
        gaps = "Poisson" if config.burstiness == 1 else f"gamma, burstiness {config.burstiness:g}"
        how = f"open loop, {config.rate:g} requests/s ({gaps})"
    else:
        how = f"closed loop, {config.concurrency} at once"
        how += ", each twice, with speculation and without" if config.compares_speculation else ""
    if config.duration_s is not None:
        how += f", for {config.duration_s:g} s"
    return how


def describe_lengths(config: BenchConfig) -> str:
    """Return what was asked for, in a few words."""
    if isinstance(config.dataset, DatasetName):
        return f"dataset {config.dataset}"
    if config.dataset is not None:
        return f"prompts of {config.dataset}, output {config.output_len.text} where it does not say"
    prefix = f"{config.shared_prefix_len} shared (of {config.num_prefixes}) + " if config.shared_prefix_len else ""
    return f"prompt {prefix}{config.input_len.text}, output {config.output_len.text}"


def _report(config: BenchConfig, info: TargetInfo, summary: Summary) -> Iterator[RenderableType]:
    api = {"octavo": "octavo gRPC", "octavo-stream": "octavo gRPC, one stream"}.get(info.api, f"OpenAI {info.api}")
    yield f"[bold]{escape(info.model_id)}[/bold] at {escape(info.address)} ({api})"
    yield escape(f"{describe_load(config)}; {describe_lengths(config)}; seed {config.seed}")
    yield ""
    if summary.comparison is None:
        yield _latency_table(summary)
    else:
        yield from comparison_report(summary.comparison)
    yield _counts_table(config, summary)
    if summary.errors:
        yield _errors_table(summary)
    for sentence in warnings(config, info, summary):
        yield f"[yellow]warning:[/yellow] {escape(sentence)}"


def _latency_table(summary: Summary) -> Table:
    table = Table(title="Latency in ms, of completed requests", title_justify="left", title_style="bold")
    table.add_column("")
    for heading in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = {
        "TTFT": summary.ttft_s,
        "ITL": summary.itl_s,
        "TPOT": summary.tpot_s,
        "E2E": summary.e2e_s,
        "longest gap": summary.longest_gap_s,
    }
    for name, values in rows.items():
        table.add_row(name, *_cells(values))
    if summary.lateness_s is not None:
        table.add_section()
        table.add_row("sent late", *_cells(summary.lateness_s))
    return table


def _counts_table(config: BenchConfig, summary: Summary) -> Table:
    table = Table.grid(padding=(0, 2))
    cancelled = f", {summary.num_cancelled} cancelled" if summary.num_cancelled else ""
    table.add_row(
        "requests",
        f"{summary.num_completed} completed, {summary.num_failed} failed{cancelled} in {summary.duration_s:.2f} s",
    )
    table.add_row("requests/s", f"{summary.requests_per_s:.2f}")
    table.add_row("output tokens/s", f"{summary.output_tokens_per_s:.1f}")
    table.add_row("total tokens/s", f"{summary.total_tokens_per_s:.1f}")
    table.add_row("running", f"{summary.mean_running:.1f} on average, at most {summary.max_running}")
    if summary.prompt_tokens is not None and summary.output_tokens is not None:
        cached = "" if summary.num_cached_tokens is None else f", {summary.cached_share:.0%} cached"
        table.add_row("prompt tokens", f"{_range(summary.prompt_tokens)}{cached}")
        table.add_row("output tokens", _range(summary.output_tokens))
    if config.slo is not None and summary.goodput is not None:
        goodput = summary.goodput
        table.add_row("goodput", f"{goodput.share:.1%}, {goodput.requests_per_s:.2f} requests/s ({config.slo.text})")
    lag = "" if summary.lag_s is None else f", event loop lag p99 {_ms(summary.lag_s.p99)} ms"
    table.add_row("sender", f"{summary.busy_share:.0%} busy{lag}")
    return table


def _errors_table(summary: Summary) -> Table:
    table = Table(title="Errors", title_justify="left", title_style="bold")
    table.add_column("requests", justify="right")
    table.add_column("message")
    for message, count in summary.errors[:_MOST_ERRORS]:
        table.add_row(str(count), escape(message))
    if others := summary.errors[_MOST_ERRORS:]:
        table.add_row(str(sum(count for _, count in others)), f"{len(others)} other messages; --json has all")
    return table


def _range(values: Distribution) -> str:
    return f"{values.mean:.1f} on average, p99 {values.p99:.0f}, at most {values.max:.0f}"


def _cells(values: Distribution | None) -> list[str]:
    if values is None:
        return ["–"] * 6
    return [_ms(value) for value in (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)]


def _ms(value_s: float) -> str:
    value = value_s * 1e3
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


# Raised when a field changes its meaning or goes away.
FORMAT_VERSION = 1


def to_json(config: BenchConfig, session: SessionResult, summary: Summary, *, with_samples: bool) -> dict[str, Any]:
    """Return the object; times are in seconds, in samples from the beginning of the load."""
    timeline = make_timeline(session.load)
    report: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "octavo_version": octavo.__version__,
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "started_at": session.started_at.isoformat(),
        "is_interrupted": session.load.is_interrupted,
        "target": asdict(session.info),
        "config": _config(config),
        "summary": _summary(summary),
        "warnings": warnings(config, session.info, summary),
        "timeline": {
            "edges_s": timeline.edges_s.tolist(),
            "output_tokens_per_s": timeline.output_tokens_per_s.tolist(),
            "running": timeline.running.tolist(),
            "failed": timeline.failed.tolist(),
        },
    }
    if with_samples:
        report["samples"] = [_sample(record, session.load.begin_s) for record in session.load.records]
    return report


def _config(config: BenchConfig) -> dict[str, Any]:
    fields = asdict(config)
    fields["input_len"] = config.input_len.text
    fields["output_len"] = config.output_len.text
    fields["slo"] = None if config.slo is None else config.slo.text
    return {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}


def _summary(summary: Summary) -> dict[str, Any]:
    fields = asdict(summary)
    fields["errors"] = [{"message": message, "num_requests": count} for message, count in summary.errors]
    return fields


def _sample(record: RequestRecord, begin_s: float) -> dict[str, Any]:
    usage = record.usage
    return {
        "index": record.planned.index,
        "speculate": record.planned.speculate,
        "scheduled_s": record.planned.scheduled_s,
        "sent_s": record.sent_s - begin_s,
        "ended_s": record.ended_s - begin_s if math.isfinite(record.ended_s) else None,
        "outcome": record.outcome,
        "error": record.error,
        "max_tokens": record.planned.max_tokens,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_output_tokens": record.num_output_tokens,
        "num_cached_tokens": None if usage is None else usage.num_cached_tokens,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "e2e_s": record.e2e_s,
        "event_times_s": [time_s - begin_s for time_s in record.event_times_s],
        "event_num_tokens": record.event_num_tokens.tolist(),
    }
