import numpy as np
import pytest

from octavo.bench.summary import make_timeline
from tests.support.each_row import each_row
from tests.unit.octavo.bench.records import load_of, record


def test_tokens_and_running_requests_in_each_interval() -> None:
    # 6 s: intervals of 0.1 s. One request runs from 0 to 0.25, another one from 0.2 to 6.
    timeline = make_timeline(
        load_of(record((0.05, 3), (0.25, 1)), record((0.26, 2), sent_s=0.2, ended_s=6.0), end_s=6.0)
    )
    assert timeline.edges_s[:4] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert (len(timeline.edges_s), timeline.edges_s[-1]) == (61, 6.0)
    assert timeline.output_tokens_per_s[:4] == pytest.approx([30, 0, 30, 0])
    assert timeline.running[:4] == pytest.approx([1, 1, 1.5, 1])
    assert timeline.running[-1] == pytest.approx(1)


def test_what_is_left_at_the_end_joins_its_neighbour_if_it_is_short() -> None:
    assert make_timeline(load_of(record((0.5, 1)), end_s=1.04)).edges_s[-2:] == pytest.approx([0.9, 1.04])
    assert make_timeline(load_of(record((0.5, 1)), end_s=1.06)).edges_s[-2:] == pytest.approx([1.0, 1.06])


@each_row(0.001, 0.7, 59.0, 3_000.0, 100_000.0)
def test_the_whole_of_a_load_is_in_it(duration_s: float) -> None:
    timeline = make_timeline(load_of(record((duration_s / 3, 5), (duration_s, 2)), end_s=duration_s))
    widths_s = np.diff(timeline.edges_s)
    assert widths_s.min() > 0
    assert len(widths_s) <= 61
    assert (timeline.output_tokens_per_s * widths_s).sum() == pytest.approx(7)
    assert (timeline.running * widths_s).sum() == pytest.approx(duration_s)


def test_failures_are_where_they_were() -> None:
    timeline = make_timeline(load_of(record(ended_s=0.35, error="full"), record((0.9, 1)), end_s=1.0))
    assert np.flatnonzero(timeline.failed).tolist() == [3]
