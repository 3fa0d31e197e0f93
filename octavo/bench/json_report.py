"""The report that a program reads: everything that was asked for and measured, as one JSON object."""

import math
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import octavo
from octavo.bench.config import BenchConfig
from octavo.bench.record import RequestRecord
from octavo.bench.report import warnings
from octavo.bench.session import SessionResult
from octavo.bench.summary import Summary
from octavo.bench.timeline import make_timeline

# Raised when a field changes its meaning or goes away.
FORMAT_VERSION = 1


def to_json(config: BenchConfig, session: SessionResult, summary: Summary, *, with_samples: bool) -> dict[str, Any]:
    """Return the object; times are in seconds, those of samples from the beginning of the load."""
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
