"""A load over time, in intervals of one width: tokens a second, and requests on their way."""

from dataclasses import dataclass

import numpy as np

from octavo.bench.load import LoadResult
from octavo.bench.record import Float64Array

# Widths of an interval in seconds, and how many of them a timeline has at most.
_WIDTHS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_MOST_INTERVALS = 60


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened in each interval; the last one takes what is left, from half a width to one and a half.

    Attributes:
        edges_s: Where intervals begin and end, in seconds from the beginning; one more than there are intervals.
        output_tokens_per_s: Tokens that came, a second.
        running: Requests on their way, averaged.
        failed: Requests that failed.
    """

    edges_s: Float64Array
    output_tokens_per_s: Float64Array
    running: Float64Array
    failed: Float64Array


def make_timeline(load: LoadResult) -> Timeline:
    """Return the load over time, in at most 60 intervals (more if it took above 60 hours)."""
    duration_s = max(load.end_s - load.begin_s, 1e-6)
    width_s = next((width for width in _WIDTHS_S if duration_s <= width * _MOST_INTERVALS), _WIDTHS_S[-1])
    edges_s = np.append(np.arange(max(1, round(duration_s / width_s))) * width_s, duration_s)
    records = load.records
    times_s = np.concatenate([np.asarray(r.event_times_s) for r in records]) if records else np.empty(0)
    counts = np.concatenate([np.asarray(r.event_num_tokens) for r in records]) if records else np.empty(0)
    tokens, _ = np.histogram(times_s - load.begin_s, edges_s, weights=counts)
    failed, _ = np.histogram([r.ended_s - load.begin_s for r in records if r.error is not None], edges_s)
    begins_s = np.array([record.sent_s for record in records]) - load.begin_s
    ends_s = np.array([record.ended_s for record in records]) - load.begin_s
    # The time that requests have been on their way in all, up to each edge.
    total_s = np.array([np.clip(edge - begins_s, 0, ends_s - begins_s).sum() for edge in edges_s])
    widths_s = np.diff(edges_s)
    return Timeline(edges_s, tokens / widths_s, np.diff(total_s) / widths_s, failed.astype(np.float64))
