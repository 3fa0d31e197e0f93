"""Counts of values by size, as Prometheus reads them."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from octavo_shared.process.histogram import Histogram

BOUNDS = (0.1, 0.5, 2.5)


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(0.5)
    assert histogram.cumulative() == [("0.1", 0.0), ("0.5", 1.0), ("2.5", 1.0), ("+Inf", 1.0)]


def test_a_value_may_count_several_times() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(2.0, 3)
    assert (histogram.num_observed, histogram.sum) == (3, 6.0)


@given(st.lists(st.floats(0, 10)))
def test_it_counts_as_the_librarys_histogram_does(values: list[float]) -> None:
    registry = CollectorRegistry()
    ours, reference = Histogram(BOUNDS), Reference("a", "a", buckets=BOUNDS, registry=registry)
    for value in values:
        ours.observe(value)
        reference.observe(value)
    for bound, count in ours.cumulative():
        assert registry.get_sample_value("a_bucket", {"le": bound}) == count
    assert registry.get_sample_value("a_sum") == ours.sum
