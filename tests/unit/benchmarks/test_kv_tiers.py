"""The arithmetic of the benchmark of KV tiers."""

import pytest

from benchmarks.costs.harness import Line
from benchmarks.kv_tiers.__main__ import target_of
from benchmarks.kv_tiers.arms import Answer, Comparison, DifferentOutputError
from benchmarks.kv_tiers.scenarios import HITS, LIGHT, RATE, TTFT


def test_a_pause_that_ended_before_the_drain_does_not_count() -> None:
    answer = Answer(sent_s=0.0, token_times_s=[1.0, 6.0, 6.5, 8.5, 9.0], token_ids=(), num_cached_tokens=0)
    assert answer.longest_gap_ms(since_s=7.0) == 2000.0
    assert answer.longest_gap_ms(since_s=5.0) == 5000.0
    assert answer.ttft_ms == 1000.0


def test_outputs_that_differ_in_a_bit_of_a_logprob_end_the_run() -> None:
    comparison = Comparison({})
    comparison.check("a", (1, 2), (-0.5, -0.25))
    comparison.check("a", (1, 2), (-0.5, -0.25))
    assert comparison.num_equal == 1
    with pytest.raises(DifferentOutputError):
        comparison.check("a", (1, 2), (-0.5, -0.25000000000000006))


@pytest.mark.parametrize(
    ("way", "figure", "values", "others", "said"),
    [
        ("with", TTFT, [30.0, 20.0, 90.0], [100.0] * 3, "ratio ≤ 0.3: met"),
        ("with", TTFT, [31.0, 20.0, 90.0], [100.0] * 3, "ratio ≤ 0.3: missed"),
        ("with", HITS, [0.9], [0.0], "≥ 0.9: met"),
        (f"{LIGHT}, with", RATE, [0.98], [1.0], "ratio ≥ 0.99: missed"),
    ],
)
def test_a_target_is_met_by_the_median_of_figures_or_of_ratios(
    way: str, figure: str, values: list[float], others: list[float], said: str
) -> None:
    assert target_of(Line("host", way, figure, values, "without", others)) == said
    assert target_of(Line("host", way, figure, values, "", [])) == ""
