"""From records to numbers."""

import numpy as np
import pytest

from octavo.bench.config import parse_slo
from octavo.bench.record import Outcome, TokenUsage
from octavo.bench.summary import distribution, make_timeline, max_running, meets, summarize
from tests.support.each_row import each_row
from tests.unit.octavo.bench.records import load_of, record


def test_percentiles_are_interpolated_between_the_closest_ranks() -> None:
    # Of 1 to 5 the p-th percentile is at position p / 100 * 4: 50 -> 2, 90 -> 3.6, 95 -> 3.8, 99 -> 3.96.
    found = distribution([5.0, 1.0, None, 3.0, 2.0, 4.0])
    assert found is not None
    assert (found.count, found.mean, found.max) == (5, 3.0, 5.0)
    assert (found.p50, found.p90, found.p95, found.p99) == pytest.approx((3.0, 4.6, 4.8, 4.96))


def test_one_value_is_every_percentile() -> None:
    found = distribution([2.5])
    assert found is not None
    assert {found.mean, found.p50, found.p90, found.p95, found.p99, found.max} == {2.5}


def test_no_values_have_no_distribution() -> None:
    assert distribution([None]) is None
    assert distribution(np.empty(0)) is None


def test_a_load_in_numbers() -> None:
    summary = summarize(
        load_of(
            record((1.0, 1), (1.5, 2), ended_s=2.0, usage=TokenUsage(10, 3, 4)),
            record((3.0, 1), (4.0, 1), sent_s=1.0, ended_s=4.0, usage=TokenUsage(20, 2, 0)),
            record((1.2, 1), sent_s=1.0, ended_s=1.2, error="full"),
            record(sent_s=2.0, ended_s=2.2, error="full"),
            record(sent_s=2.0, ended_s=2.1, error="lost"),
            record((3.0, 1), sent_s=2.0, ended_s=4.0, outcome=Outcome.CANCELLED),
            end_s=4.0,
        ),
        None,
    )
    assert (summary.num_completed, summary.num_failed, summary.num_cancelled) == (2, 3, 1)
    assert summary.requests_per_s == 0.5
    assert summary.output_tokens_per_s == 5 / 4
    assert summary.total_tokens_per_s == 35 / 4
    assert summary.ttft_s is not None
    assert (summary.ttft_s.count, summary.ttft_s.mean, summary.ttft_s.max) == (2, 1.5, 2.0)
    assert summary.itl_s is not None
    assert summary.itl_s.count == 3  # 0.25, 0.25, 1
    assert summary.itl_s.mean == pytest.approx(0.5)
    assert summary.tpot_s is not None
    assert summary.tpot_s.mean == pytest.approx((0.25 + 1.0) / 2)
    assert summary.e2e_s is not None
    assert summary.e2e_s.mean == 2.5
    assert summary.prompt_tokens is not None
    assert summary.prompt_tokens.mean == 15
    assert summary.num_cached_tokens == 4
    assert summary.errors == (("full", 2), ("lost", 1))
    # On their way: 0-2, 1-4, 1-1.2, 2-2.2, 2-2.1, 2-4.
    assert summary.mean_running == pytest.approx((2 + 3 + 0.2 + 0.2 + 0.1 + 2) / 4)
    assert summary.max_running == 4
    assert (summary.lateness_s, summary.goodput, summary.num_without_usage) == (None, None, 0)


def test_lateness_is_that_of_all_requests() -> None:
    late = record(sent_s=1.5, ended_s=2.0, scheduled_s=1.0, error="lost")
    summary = summarize(load_of(late, record((2.0, 1), sent_s=1.1, scheduled_s=1.0), end_s=2.0), None)
    assert summary.lateness_s is not None
    assert (summary.lateness_s.count, summary.lateness_s.max) == (2, 0.5)


def test_requests_that_follow_one_another_do_not_run_at_once() -> None:
    assert max_running([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]) == 1
    assert max_running([(0.0, 3.0), (1.0, 2.0), (1.5, 4.0)]) == 3
    assert max_running([]) == 0


def test_each_objective_has_to_be_met() -> None:
    one = record((0.2, 1), (0.3, 1), (0.5, 1), ended_s=0.6)
    assert meets(one, parse_slo("ttft=200ms,tpot=150ms,itl=200ms,e2e=600ms"))
    for limit in ("ttft=199ms", "tpot=149ms", "itl=198ms", "e2e=599ms"):
        assert not meets(one, parse_slo(limit)), limit


def test_the_objective_of_the_itl_is_for_the_99th_percentile_of_the_request() -> None:
    times = [(0.01 * n, 1) for n in range(1, 202)]  # 200 gaps of 10 ms
    one_stall = record(*times, (3.0, 1))  # 1 of 201 above
    three_stalls = record(*times, (3.0, 1), (4.0, 1), (5.0, 1))
    assert meets(one_stall, parse_slo("itl=20ms"))
    assert not meets(three_stalls, parse_slo("itl=20ms"))


def test_goodput_counts_failed_requests_and_not_cancelled_ones() -> None:
    good, slow = record((0.1, 1)), record((0.9, 1))
    failed, cancelled = record(ended_s=0.1, error="full"), record(ended_s=1.0, outcome=Outcome.CANCELLED)
    summary = summarize(load_of(good, good, slow, failed, cancelled, end_s=4.0), parse_slo("ttft=200ms"))
    assert summary.goodput is not None
    assert (summary.goodput.share, summary.goodput.requests_per_s) == (0.5, 0.5)


def test_a_load_without_an_answer_has_numbers_too() -> None:
    summary = summarize(load_of(record(ended_s=1.0, error="full"), end_s=1.0), parse_slo("ttft=1s"))
    assert (summary.ttft_s, summary.itl_s, summary.requests_per_s, summary.num_failed) == (None, None, 0.0, 1)
    assert summary.goodput is not None
    assert summary.goodput.share == 0


def test_times_of_a_request() -> None:
    # Sent at 1; first token at 1.5; then 1 token 0.1 later, and 3 tokens 0.6 after that; the end at 2.5.
    one = record((1.5, 1), (1.6, 1), (2.2, 3), sent_s=1.0, ended_s=2.5, scheduled_s=0.75)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.e2e_s == pytest.approx(1.5)
    assert one.lateness_s == pytest.approx(0.25)
    assert one.itls_s().tolist() == pytest.approx([0.1, 0.2, 0.2, 0.2])
    assert one.tpot_s == pytest.approx(0.7 / 4)
    assert one.longest_gap_s == pytest.approx(0.6)
    assert one.num_output_tokens == 5


def test_the_mean_of_a_requests_itls_is_its_tpot() -> None:
    one = record((0.2, 4), (0.3, 2), (0.9, 1), (1.0, 5))
    assert one.itls_s().mean() == pytest.approx(one.tpot_s)
    assert len(one.itls_s()) == 8


def test_an_answer_in_one_part_has_no_time_between_tokens() -> None:
    one = record((0.4, 7))
    assert (one.ttft_s, one.tpot_s, one.longest_gap_s, one.itls_s().size) == (0.4, None, None, 0)


def test_an_answer_without_tokens_has_no_first_one() -> None:
    one = record(ended_s=1.0)
    assert (one.ttft_s, one.tpot_s, one.itls_s().size, one.num_output_tokens) == (None, None, 0, 0)


def test_the_servers_count_is_the_one_that_counts() -> None:
    one = record((0.4, 7), usage=TokenUsage(12, 9))
    assert (one.num_prompt_tokens, one.num_output_tokens) == (12, 9)


def test_a_server_may_count_outputs_only() -> None:
    assert record((0.4, 7), num_prompt_tokens=10, usage=TokenUsage(None, 9)).num_prompt_tokens == 10


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
