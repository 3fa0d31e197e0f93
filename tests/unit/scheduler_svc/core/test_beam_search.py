import math
from itertools import product

import numpy as np
import pytest

from scheduler_svc.core.beam_search import BeamSearch, Candidates
from scheduler_svc.request.outputs import Hypothesis
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping
from tests.support.beam_driving import HashedModel, run_search
from tests.support.each_row import each_row

END = 9
FAR_LIMIT = 1000


def candidates(*pairs: tuple[int, float]) -> Candidates:
    """Candidates from (token id, log-probability)."""
    token_ids, logprobs = zip(*pairs, strict=True)
    return Candidates(np.array(token_ids, np.int32), np.array(logprobs, np.float32))


def start(
    params: BeamSearchParams, max_new_tokens: int = FAR_LIMIT, ends: frozenset[int] = frozenset({END})
) -> BeamSearch:
    """Start a search on a prompt of 3 tokens."""
    return BeamSearch(params, 3, 3 + max_new_tokens, ends, vocab_size=100)


def outputs(search: BeamSearch) -> list[list[int]]:
    return [beam.token_ids.tolist() for beam in search.live]


def scores(hypotheses: list[Hypothesis]) -> list[float]:
    return [hypothesis.score for hypothesis in hypotheses]


# Parameters ----------------------------------------------------------------------------------------


@each_row((4, 5, 1.0), (4, 0, 1.0), (4, 1, math.nan), (4, 1, math.inf))
def test_params_that_mean_nothing_are_refused(width: int, num_outputs: int, length_penalty: float) -> None:
    with pytest.raises(AssertionError):
        BeamSearchParams(width, num_outputs, length_penalty)


def test_a_prompt_that_is_at_the_limit_is_refused() -> None:
    with pytest.raises(AssertionError):
        start(BeamSearchParams(2), max_new_tokens=0)


# Candidates ----------------------------------------------------------------------------------------


@each_row((0, 8), (1, 8), (2, 12), (3, 16))
def test_a_row_has_room_for_every_end_token(num_ends: int, num_candidates: int) -> None:
    search = start(BeamSearchParams(4), ends=frozenset(range(num_ends)))

    assert search.num_candidates == num_candidates


# Live beams ----------------------------------------------------------------------------------------


def test_equal_sums_go_by_parent_rank_then_token_id() -> None:
    search = start(BeamSearchParams(3))
    search.advance([candidates((5, -1.0), (6, -1.0), (7, -2.0))])

    chosen = search.advance(
        [candidates((2, -1.5), (8, -1.5)), candidates((1, -1.5), (4, -1.5)), candidates((0, -0.5), (3, -0.5))]
    )

    assert chosen == [(0, 2), (0, 8), (1, 1)]


def test_sums_that_are_equal_only_after_rounding_go_by_token_id() -> None:
    search = start(BeamSearchParams(2))
    search.advance([candidates((5, -100.0), (6, -200.0))])

    chosen = search.advance([candidates((8, -1e-7), (3, -2e-7)), candidates((1, -1.0))])

    assert chosen == [(0, 3), (0, 8)]


def test_candidates_for_another_number_of_beams_are_refused() -> None:
    with pytest.raises(AssertionError, match="each live beam has its candidates"):
        start(BeamSearchParams(2)).advance([candidates((5, -1.0))] * 2)


# Hypotheses ----------------------------------------------------------------------------------------


@each_row(-400.0, 400.0)
def test_an_extreme_length_penalty_loses_no_hypothesis(length_penalty: float) -> None:
    params = BeamSearchParams(4, num_outputs=4, length_penalty=length_penalty)
    model = HashedModel(seed=1, vocab_size=20)

    hypotheses = run_search(BeamSearch(params, 1, 13, frozenset(), vocab_size=20), [1], model.logprobs)

    assert [len(hypothesis.token_ids) for hypothesis in hypotheses] == [12] * 4


# The end of a search -------------------------------------------------------------------------------


def is_over_with_two_hypotheses(best_live: float, length_penalty: float, early_stopping: EarlyStopping) -> bool:
    """Find hypotheses of 1 token (sum -1) and 2 tokens (sum -4) beside a live beam of 2 tokens; the limit is 10."""
    search = start(BeamSearchParams(2, 2, length_penalty, early_stopping), max_new_tokens=10)
    search.advance([candidates((END, -1.0), (5, -2.0), (6, -2.5))])
    first = sorted([(END, -2.0), (5, best_live + 2.0), (6, -9.0)], key=lambda pair: -pair[1])
    search.advance([candidates(*first), candidates((5, -9.0), (6, -9.5))])
    assert scores(search.finished_hypotheses()) == [-1.0, -4.0 / 2**length_penalty]
    return search.is_over


@each_row(-3.0, -5.0)
def test_early_stopping_true_stops_at_width_hypotheses(best_live: float) -> None:
    assert is_over_with_two_hypotheses(best_live, 1.0, EarlyStopping.TRUE)


def test_a_search_looks_for_width_hypotheses_even_if_fewer_are_wanted() -> None:
    search = start(BeamSearchParams(2, num_outputs=1, early_stopping=EarlyStopping.TRUE))
    search.advance([candidates((END, -1.0), (5, -2.0), (6, -3.0))])
    was_over = search.is_over

    search.advance([candidates((END, -0.5), (5, -9.0)), candidates((5, -9.0))])

    assert not was_over
    assert search.is_over


@each_row(*product([-1.0, 0.0, 1.0], [EarlyStopping.FALSE, EarlyStopping.NEVER]))
def test_a_search_goes_on_while_the_best_live_beam_beats_the_worst_hypothesis(
    length_penalty: float, early_stopping: EarlyStopping
) -> None:
    assert not is_over_with_two_hypotheses(-3.0, length_penalty, early_stopping)


@each_row(-1.0, 0.0, 1.0)
def test_early_stopping_false_judges_the_best_live_beam_at_its_present_length(length_penalty: float) -> None:
    assert is_over_with_two_hypotheses(-5.0, length_penalty, EarlyStopping.FALSE)


@each_row((-1.0, True), (0.0, True), (1.0, False))
def test_early_stopping_never_judges_it_at_the_limit_if_length_is_favoured(
    length_penalty: float, is_over: bool
) -> None:
    assert is_over_with_two_hypotheses(-5.0, length_penalty, EarlyStopping.NEVER) == is_over


def test_a_live_beam_that_can_only_draw_level_does_not_keep_a_search_alive() -> None:
    assert is_over_with_two_hypotheses(-4.0, 1.0, EarlyStopping.FALSE)


def test_a_history_of_thousands_of_tokens_needs_no_recursion() -> None:
    length = 3000
    search = start(BeamSearchParams(2), max_new_tokens=length)
    for _ in range(length):
        search.advance([candidates((5, -0.25), (6, -0.5))] * len(search.live))

    (hypothesis,) = search.finished_hypotheses()
    assert hypothesis.token_ids.tolist() == [5] * length
    assert hypothesis.logprobs.tolist() == [-0.25] * length
    assert "BeamSearch" in repr(search)
