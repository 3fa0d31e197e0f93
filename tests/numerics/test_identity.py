"""The definition of "identical" forgives a tie and nothing else."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from executor_svc.sampler.sample_rows import uniforms
from scheduler_svc.core.stopping import FinishReason
from shared.step import SamplingRow
from tests.numerics.identity import TIE, Logits, assert_identical, assert_same_search
from tests.support.fleet import FoundHypothesis, Output

GREEDY = SamplingRow()
SEEDED = SamplingRow(temperature=1.0, seed=5, output_index=1)
PROMPT = [0]


def model(*scores: float) -> Logits:
    """A model that says the same after every history."""

    def logits(token_ids: Sequence[int], first: int) -> torch.Tensor:
        return torch.tensor([scores] * (len(token_ids) - first))

    return logits


def output(*token_ids: int, logprob: float = -1.0) -> Output:
    return Output(list(token_ids), [logprob] * len(token_ids), FinishReason.LENGTH)


def test_equal_outputs_are_identical() -> None:
    assert_identical(output(0, 1), output(0, 1, logprob=-1.00005), PROMPT, GREEDY, model(0.0, 1.0))


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        (output(0, 2), "output token 1 is 2 instead of 1; 2 is 1.00e"),
        (output(0), "1 tokens instead of 2"),
        (output(0, 1, 1), "3 tokens instead of 2"),
        (output(0, 1, logprob=-1.001), "log-probability 0 is -1.001 instead of -1.0"),
        (replace(output(0, 1), reason=FinishReason.STOP), "ended by .*STOP instead of .*LENGTH"),
        (replace(output(0, 1), logprobs=[-1.0]), "1 log-probabilities instead of 2"),
    ],
)
def test_a_real_difference_fails(actual: Output, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_identical(actual, output(0, 1), PROMPT, GREEDY, model(0.0, 1.0, 0.0))


def test_after_a_greedy_tie_all_may_differ() -> None:
    assert_identical(output(2, 0, 0), output(1, 1), PROMPT, GREEDY, model(0.0, 1.0, 1.0 - TIE / 2))


def test_a_token_beside_a_tie_of_two_others_fails() -> None:
    with pytest.raises(AssertionError, match=r"output token 0 is 0 instead of 1; 0 is 1\.00e"):
        assert_identical(output(0), output(1), PROMPT, GREEDY, model(0.0, 1.0, 1.0))


def test_log_probabilities_before_a_tie_are_compared() -> None:
    with pytest.raises(AssertionError, match="log-probability 0"):
        assert_identical(output(1, 0, logprob=-2.0), output(1, 1), PROMPT, GREEDY, model(1.0, 1.0))


def with_edge_at(probability: float) -> Logits:
    """A model that says token 0 with this probability, token 1 nearly always otherwise, sometimes 2, never 3."""
    return model(math.log(probability), math.log(0.99 - probability), math.log(0.01), -math.inf)


def test_a_draw_is_a_tie_only_near_the_edge_between_both_tokens() -> None:
    draw = float(uniforms(np.array([5], np.uint64), np.array([1], np.int32), np.array([0], np.int32))[0])
    assert 0.1 < draw < 0.9

    for edge in (draw - TIE / 2, draw + TIE / 2):
        assert_identical(output(0), output(1), PROMPT, SEEDED, with_edge_at(edge))
        assert_identical(output(1), output(0), PROMPT, SEEDED, with_edge_at(edge))
        for token_id in (2, 3):
            with pytest.raises(AssertionError, match=f"{token_id} is .* away from being chosen"):
                assert_identical(output(token_id), output(1), PROMPT, SEEDED, with_edge_at(edge))
    for edge in (draw - 2 * TIE, draw + 2 * TIE):
        with pytest.raises(AssertionError, match="away from being chosen"):
            assert_identical(output(0), output(1), PROMPT, SEEDED, with_edge_at(edge))


def test_the_draw_depends_on_seed_output_and_position() -> None:
    draw = float(uniforms(np.array([5], np.uint64), np.array([1], np.int32), np.array([0], np.int32))[0])
    logits = with_edge_at(draw)

    assert_identical(output(0), output(1), PROMPT, SEEDED, logits)
    for other in (replace(SEEDED, seed=6), replace(SEEDED, output_index=0)):
        with pytest.raises(AssertionError, match="away from being chosen"):
            assert_identical(output(0), output(1), PROMPT, other, logits)
    with pytest.raises(AssertionError, match="away from being chosen"):
        assert_identical(output(1, 0), output(1, 1), PROMPT, SEEDED, logits)


def hypothesis(*token_ids: int, score: float) -> FoundHypothesis:
    """A hypothesis whose log-probabilities add up to its score, without a length penalty."""
    logprobs = (score / len(token_ids),) * len(token_ids)
    return FoundHypothesis(token_ids, logprobs, score, FinishReason.LENGTH)


LIKELY, UNLIKELY = -math.log(2), -math.log(4)
SEARCHED = model(LIKELY, UNLIKELY, UNLIKELY)
EXPECTED = [([0, 0], 2 * LIKELY), ([0, 1], LIKELY + UNLIKELY)]


def test_a_search_with_a_tie_at_one_rank_is_the_same() -> None:
    best = hypothesis(0, 0, score=2 * LIKELY)

    for token_ids in ((0, 1), (0, 2), (1, 0)):
        assert_same_search([best, hypothesis(*token_ids, score=LIKELY + UNLIKELY)], EXPECTED, PROMPT, 0.0, SEARCHED)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([], "1 hypotheses instead of 2"),
        ([hypothesis(0, 0, score=LIKELY + UNLIKELY)], "found twice"),
        ([hypothesis(0, 1, score=LIKELY + UNLIKELY - 1e-3)], "rank 1 has score"),
        ([hypothesis(1, 1, score=LIKELY + UNLIKELY)], "rank 1 has other tokens and no tie"),
        ([replace(hypothesis(0, 1, score=LIKELY + UNLIKELY), logprobs=(LIKELY, LIKELY))], "its tokens do not have"),
    ],
)
def test_another_search_fails(second: list[FoundHypothesis], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_search([hypothesis(0, 0, score=2 * LIKELY), *second], EXPECTED, PROMPT, 0.0, SEARCHED)
