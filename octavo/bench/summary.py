"""From records to numbers: percentiles, rates, what ran at once, errors, goodput, and the load over time.

A percentile is the linear interpolation between the two closest ranks: with n sorted values x[0] to x[n-1], the p-th
lies at position p / 100 * (n - 1) (type 7 of Hyndman and Fan 1996, numpy's default).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.bench.comparison import Comparison, compare
from octavo.bench.config import Metric, Slo
from octavo.bench.load import LoadResult
from octavo.bench.record import Float64Array, Outcome, RequestRecord

# Widths of an interval in seconds, and how many of them a timeline has at most.
_WIDTHS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_MOST_INTERVALS = 60


@dataclass(frozen=True, slots=True)
class Distribution:
    """Figures of some values, in their unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every objective; failed ones did not."""

    share: float  # of the requests that ended, 0 to 1
    requests_per_s: float  # of them a second


@dataclass(frozen=True, slots=True)
class Summary:
    """A load in numbers; times are in seconds and only of requests that were completed."""

    duration_s: float  # from the first moment to the end of the last answer
    num_completed: int  # requests with a whole answer
    num_failed: int  # requests with an error
    num_cancelled: int  # requests that an interruption of the load ended
    ttft_s: Distribution | None  # from sending to the first token
    itl_s: Distribution | None  # between tokens; see `RequestRecord.itls_s`
    tpot_s: Distribution | None  # mean between tokens, of each request
    e2e_s: Distribution | None  # from sending to the end of the answer
    longest_gap_s: Distribution | None  # longest time between two parts of an answer, of each request
    lateness_s: Distribution | None  # of sending, also of requests that failed; None in a closed loop
    requests_per_s: float  # completed ones a second
    output_tokens_per_s: float  # of completed requests
    total_tokens_per_s: float  # output and prompt tokens of completed requests
    prompt_tokens: Distribution | None  # tokens of each prompt, as the server counted if it did
    output_tokens: Distribution | None  # tokens of each answer
    num_cached_tokens: int | None  # prompt tokens that the server had in its cache; None: it did not say
    num_without_usage: int  # completed requests whose tokens the server did not count
    mean_running: float  # requests on their way, averaged over time
    max_running: int  # most requests on their way
    errors: tuple[tuple[str, int], ...]  # messages of failed requests and how often they came, the most frequent first
    goodput: Goodput | None  # None without objectives
    lag_s: Distribution | None  # of the sender's event loop; None: the load was too short to look
    busy_share: float  # share of the time that the sender computed, 0 to 1
    comparison: Comparison | None  # of pairs with and without speculation; None: there are none

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that the server had in its cache, 0 to 1; 0 if it did not say."""
        if self.prompt_tokens is None:
            return 0.0
        num_prompt_tokens = self.prompt_tokens.mean * self.prompt_tokens.count
        return (self.num_cached_tokens or 0) / num_prompt_tokens if num_prompt_tokens else 0.0


def summarize(load: LoadResult, slo: Slo | None) -> Summary:
    """Return the numbers of a load."""
    records = load.records
    done = [record for record in records if record.outcome is Outcome.COMPLETED]
    duration_s = load.end_s - load.begin_s
    num_output_tokens = sum(record.num_output_tokens for record in done)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in done)
    cached = [record.usage.num_cached_tokens for record in done if record.usage is not None]
    known_cached = [count for count in cached if count is not None]
    outcomes = Counter(record.outcome for record in records)
    spans_s = [(record.sent_s, record.ended_s) for record in records]
    return Summary(
        duration_s=duration_s,
        num_completed=len(done),
        num_failed=outcomes[Outcome.FAILED],
        num_cancelled=outcomes[Outcome.CANCELLED],
        ttft_s=distribution(record.ttft_s for record in done),
        itl_s=distribution(all_itls_s(done)),
        tpot_s=distribution(record.tpot_s for record in done),
        e2e_s=distribution(record.e2e_s for record in done),
        longest_gap_s=distribution(record.longest_gap_s for record in done),
        lateness_s=distribution(record.lateness_s for record in records),
        requests_per_s=len(done) / duration_s,
        output_tokens_per_s=num_output_tokens / duration_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / duration_s,
        prompt_tokens=distribution(record.num_prompt_tokens for record in done),
        output_tokens=distribution(record.num_output_tokens for record in done),
        num_cached_tokens=sum(known_cached) if known_cached else None,
        num_without_usage=sum(record.usage is None for record in done),
        mean_running=sum(end_s - begin_s for begin_s, end_s in spans_s) / duration_s,
        max_running=max_running(spans_s),
        errors=tuple(Counter(record.error for record in records if record.error is not None).most_common()),
        goodput=None if slo is None else _goodput(records, slo, duration_s),
        lag_s=distribution(load.lags_s),
        busy_share=load.busy_share,
        comparison=compare(records),
    )


def distribution(values: Iterable[float | None] | Float64Array) -> Distribution | None:
    """Return the figures of the values that are there; None: there are none."""
    found = values if isinstance(values, np.ndarray) else np.array([v for v in values if v is not None], np.float64)
    if not found.size:
        return None
    p50, p90, p95, p99 = np.percentile(found, (50, 90, 95, 99)).tolist()
    return Distribution(found.size, float(found.mean()), p50, p90, p95, p99, float(found.max()))


def all_itls_s(records: Sequence[RequestRecord]) -> Float64Array:
    """Return the inter-token latencies of all of them, in seconds."""
    return np.concatenate([record.itls_s() for record in records]) if records else np.empty(0)


def max_running(spans_s: Sequence[tuple[float, float]]) -> int:
    """Return the most intervals (begin, end) that overlap; an interval that begins where another ends does not."""
    changes = sorted([(begin, 1) for begin, _ in spans_s] + [(end, -1) for _, end in spans_s])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def meets(record: RequestRecord, slo: Slo) -> bool:
    """Return whether a request was completed within every limit; a metric that it does not have is within."""
    if record.outcome is not Outcome.COMPLETED:
        return False
    return all(_is_within(record, metric, limit_s) for metric, limit_s in slo.limits_s.items())


def _is_within(record: RequestRecord, metric: Metric, limit_s: float) -> bool:
    match metric:
        case Metric.TTFT:
            time_s = record.ttft_s
        case Metric.TPOT:
            time_s = record.tpot_s
        case Metric.E2E:
            time_s = record.e2e_s
        case Metric.ITL:
            itls_s = record.itls_s()
            time_s = float(np.percentile(itls_s, 99)) if itls_s.size else None
    return time_s is None or time_s <= limit_s


def _goodput(records: Sequence[RequestRecord], slo: Slo, duration_s: float) -> Goodput:
    num_ended = sum(record.outcome is not Outcome.CANCELLED for record in records)
    num_good = sum(meets(record, slo) for record in records)
    return Goodput(num_good / num_ended if num_ended else 0.0, num_good / duration_s)


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened in each interval; the last one takes what is left, from half a width to one and a half."""

    # Where intervals begin and end, in seconds from the beginning; one more than there are intervals.
    edges_s: Float64Array
    output_tokens_per_s: Float64Array  # tokens that came, a second
    running: Float64Array  # requests on their way, averaged
    failed: Float64Array  # requests that failed


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
