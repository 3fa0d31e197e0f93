"""The metrics of a scheduler with fronts: one set, whichever process counted."""

from collections.abc import Iterable

import pytest

from octavo_shared.errors import CallerError
from octavo_shared.process.histogram import Histogram
from octavo_shared.process.metric import Family, Metric
from scheduler_svc.link import front_metrics
from scheduler_svc.link.front_metrics import FrontMetrics, encode_families
from tests.support.each_row import each_row

CALLS = Metric("calls_total", "counter", "Calls.", ("method",))
SECONDS = Metric("handling_seconds", "histogram", "Time.")
EXPIRY = Metric("expiry_seconds", "gauge", "Expiry.")


def families(num_calls: int, *, method: str = "a", expiry: float = 1.0) -> list[Family]:
    histogram = Histogram((1.0, 2.0))
    for _ in range(num_calls):
        histogram.observe(1.5)
    return [CALLS.family({(method,): num_calls}), SECONDS.histogram_family({(): histogram}), EXPIRY.single(expiry)]


def samples(found: Iterable[Family]) -> dict[tuple[str, ...], float]:
    """Return the samples by name and values of labels; a family comes once."""
    listed = list(found)
    assert len({family.name for family in listed}) == len(listed)
    return {(s.name, *s.labels.values()): s.value for family in listed for s in family.samples}


async def test_counts_are_added_over_fronts_and_stay_when_one_has_gone() -> None:
    metrics = FrontMetrics()
    await metrics.take(1, encode_families(families(3)))
    await metrics.take(2, encode_families(families(4)))
    await metrics.take(1, encode_families(families(5, expiry=9.0)))  # the last word counts
    found = samples(metrics.merged(families(1, method="b", expiry=2.0)))
    assert (found["calls_total", "a"], found["calls_total", "b"]) == (9, 1)
    assert (found["handling_seconds_count",], found["handling_seconds_bucket", "2.0"]) == (10, 10)
    assert found["expiry_seconds",] == 9.0
    metrics.end(1)
    found = samples(metrics.merged([]))
    assert (found["calls_total", "a"], found["expiry_seconds",]) == (9, 1.0)
    metrics.end(2)
    assert samples(metrics.merged([]))["calls_total", "a"] == 9


def test_without_fronts_the_metrics_are_the_own_ones() -> None:
    own = families(2)
    assert list(FrontMetrics().merged(own)) == own or samples(FrontMetrics().merged(own)) == samples(own)


async def test_what_fronts_leave_behind_is_bounded() -> None:
    metrics = FrontMetrics()
    for session in range(30):
        calls = CALLS.family({(f"{session}.{number}",): 1 for number in range(1000)})
        await metrics.take(session, encode_families([calls, *families(1)]))
        metrics.end(session)
    found = samples(metrics.merged([]))
    assert 19_000 < len(found) <= front_metrics.MAX_PAST_SERIES
    assert found["calls_total", "0.0"] == 1
    assert found["handling_seconds_count",] == 30, "series that are there are counted on"


@each_row(b"a b c d\n", b"\xff", b"metric{ 1\n", b"a 1\n" * 300_000)
async def test_what_is_no_text_of_metrics_is_refused(content: bytes) -> None:
    with pytest.raises(CallerError):
        await FrontMetrics().take(1, content)
