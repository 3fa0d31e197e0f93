"""A search is compared with transformers' up to a tie, and nothing else is forgiven."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from scheduler_svc.request.outputs import FinishReason
from tests.numerics.ties import Logits, assert_same_search
from tests.support.each_row import each_row
from tests.support.fleet import FoundHypothesis

PROMPT = [0]


def model(*scores: float) -> Logits:
    """A model that says the same after every history."""

    def logits(token_ids: Sequence[int], first: int) -> torch.Tensor:
        return torch.tensor([scores] * (len(token_ids) - first))

    return logits


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


@each_row(
    ([], "1 hypotheses instead of 2"),
    ([hypothesis(0, 0, score=LIKELY + UNLIKELY)], "found twice"),
    ([hypothesis(0, 1, score=LIKELY + UNLIKELY - 1e-3)], "rank 1 has score"),
    ([hypothesis(1, 1, score=LIKELY + UNLIKELY)], "rank 1 has other tokens and no tie"),
    ([replace(hypothesis(0, 1, score=LIKELY + UNLIKELY), logprobs=(LIKELY, LIKELY))], "its tokens do not have"),
)
def test_another_search_fails(second: list[FoundHypothesis], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_search([hypothesis(0, 0, score=2 * LIKELY), *second], EXPECTED, PROMPT, 0.0, SEARCHED)
