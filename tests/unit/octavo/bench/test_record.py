import pytest

from octavo.bench.record import TokenUsage
from tests.unit.octavo.bench.records import record


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
