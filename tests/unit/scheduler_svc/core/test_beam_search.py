import math
from itertools import product

import numpy as np
import pytest

from scheduler_svc.core.beam_search import BeamSearch, Candidates
from scheduler_svc.request.outputs import FinishReason, Hypothesis
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


def test_a_row_has_at_most_the_whole_vocabulary() -> None:
    search = BeamSearch(BeamSearchParams(4), 3, 10, frozenset({END}), vocab_size=5)

    assert search.num_candidates == 5


# Live beams ----------------------------------------------------------------------------------------


def test_the_prompt_is_the_first_live_beam() -> None:
    search = start(BeamSearchParams(2))

    assert outputs(search) == [[]]
    assert search.live[0].score == 0.0
    assert search.finished_hypotheses() == []
    assert not search.is_over


def test_the_first_step_branches_the_prompt() -> None:
    search = start(BeamSearchParams(2))

    assert search.advance([candidates((5, -1.0), (6, -2.0), (7, -3.0))]) == [(0, 5), (0, 6)]
    assert outputs(search) == [[5], [6]]


def test_beams_are_ranked_by_the_sum_of_their_logprobs() -> None:
    search = start(BeamSearchParams(2))
    search.advance([candidates((5, -1.0), (6, -2.0))])

    chosen = search.advance([candidates((1, -3.0), (2, -4.0)), candidates((3, -0.5), (4, -8.0))])

    assert chosen == [(1, 3), (0, 1)]
    assert outputs(search) == [[6, 3], [5, 1]]
    assert [beam.score for beam in search.live] == [-2.5, -4.0]
    assert [beam.logprobs.tolist() for beam in search.live] == [[-2.0, -0.5], [-1.0, -3.0]]


def test_a_parent_may_have_all_children() -> None:
    search = start(BeamSearchParams(2))
    search.advance([candidates((5, -1.0), (6, -9.0))])

    chosen = search.advance([candidates((1, -1.0), (2, -1.5)), candidates((3, -0.1), (4, -0.2))])

    assert chosen == [(0, 1), (0, 2)]
    assert outputs(search) == [[5, 1], [5, 2]]


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


def test_a_token_that_cannot_come_is_no_continuation() -> None:
    search = start(BeamSearchParams(3))

    assert search.advance([candidates((5, -1.0), (6, -2.0), (7, -math.inf))]) == [(0, 5), (0, 6)]


def test_candidates_for_another_number_of_beams_are_refused() -> None:
    with pytest.raises(AssertionError, match="each live beam has its candidates"):
        start(BeamSearchParams(2)).advance([candidates((5, -1.0))] * 2)


# Hypotheses ----------------------------------------------------------------------------------------


def test_an_end_token_makes_a_hypothesis_and_the_next_ones_stay_live() -> None:
    search = start(BeamSearchParams(2, num_outputs=2))

    chosen = search.advance([candidates((END, -1.0), (5, -2.0), (6, -3.0))])

    assert chosen == [(0, 5), (0, 6)]
    (hypothesis,) = search.finished_hypotheses()
    assert hypothesis.token_ids.tolist() == [END]
    assert hypothesis.logprobs.tolist() == [-1.0]
    assert hypothesis.finish_reason is FinishReason.STOP


def test_an_end_token_below_the_first_width_is_dropped() -> None:
    search = start(BeamSearchParams(2, num_outputs=2))

    chosen = search.advance([candidates((5, -1.0), (6, -2.0), (END, -2.1), (7, -3.0))])

    assert chosen == [(0, 5), (0, 6)]
    assert search.finished_hypotheses() == []


def test_every_end_token_ends_a_beam() -> None:
    params = BeamSearchParams(2, num_outputs=2, early_stopping=EarlyStopping.NEVER)
    search = start(params, ends=frozenset({8, 9}))

    assert search.advance([candidates((8, -1.0), (9, -2.0), (5, -3.0), (6, -4.0))]) == [(0, 5), (0, 6)]
    assert [hypothesis.token_ids.tolist() for hypothesis in search.finished_hypotheses()] == [[8], [9]]


@each_row((-1.0, -6.0), (0.0, -3.0), (1.0, -1.5), (2.0, -0.75))
def test_the_score_counts_the_end_token_in_the_length_and_the_prompt_not(length_penalty: float, score: float) -> None:
    search = start(BeamSearchParams(2, length_penalty=length_penalty))
    search.advance([candidates((5, -1.0), (6, -9.0))])
    search.advance([candidates((END, -2.0), (7, -3.0)), candidates((7, -1.0))])

    assert scores(search.finished_hypotheses()) == [score]


def test_a_better_hypothesis_takes_the_place_of_the_worst() -> None:
    search = start(BeamSearchParams(2, num_outputs=2, length_penalty=2.0, early_stopping=EarlyStopping.NEVER))
    search.advance([candidates((5, -1.0), (END, -4.0), (6, -5.0))])
    search.advance([candidates((6, -1.0), (END, -2.0)), candidates((6, -1.0))])
    before = scores(search.finished_hypotheses())

    search.advance([candidates((END, -0.25), (6, -1.0)), candidates((6, -1.0))])

    assert before == [-0.75, -4.0]
    assert scores(search.finished_hypotheses()) == [-0.25, -0.75]


def test_of_equal_hypotheses_the_older_one_is_first() -> None:
    search = start(BeamSearchParams(2, num_outputs=2, early_stopping=EarlyStopping.NEVER))
    search.advance([candidates((END, -1.0), (5, -1.0), (6, -5.0))])
    search.advance([candidates((END, -1.0), (5, -1.5)), candidates((5, -1.0))])

    assert scores(search.finished_hypotheses()) == [-1.0, -1.0]
    assert [hypothesis.token_ids.tolist() for hypothesis in search.finished_hypotheses()] == [[END], [5, END]]


def test_only_the_wanted_number_of_hypotheses_is_returned() -> None:
    search = start(BeamSearchParams(3, num_outputs=2), max_new_tokens=1)
    search.advance([candidates((5, -1.0), (6, -2.0), (7, -3.0))])

    assert [hypothesis.token_ids.tolist() for hypothesis in search.finished_hypotheses()] == [[5], [6]]


@each_row(-400.0, 400.0)
def test_an_extreme_length_penalty_loses_no_hypothesis(length_penalty: float) -> None:
    params = BeamSearchParams(4, num_outputs=4, length_penalty=length_penalty)
    model = HashedModel(seed=1, vocab_size=20)

    hypotheses = run_search(BeamSearch(params, 1, 13, frozenset(), vocab_size=20), [1], model.logprobs)

    assert [len(hypothesis.token_ids) for hypothesis in hypotheses] == [12] * 4


# The end of a search -------------------------------------------------------------------------------


def test_at_the_limit_the_first_width_beams_end() -> None:
    search = start(BeamSearchParams(2, num_outputs=2), max_new_tokens=1)

    assert search.advance([candidates((5, -1.0), (END, -2.0), (6, -3.0))]) == []
    assert search.is_over
    assert search.live == []
    assert [
        (hypothesis.token_ids.tolist(), hypothesis.finish_reason) for hypothesis in search.finished_hypotheses()
    ] == [([5], FinishReason.LENGTH), ([END], FinishReason.STOP)]


def test_a_search_without_a_beam_left_is_over() -> None:
    search = start(BeamSearchParams(2, num_outputs=2))

    assert search.advance([candidates((END, -0.1))]) == []
    assert search.is_over
    assert scores(search.finished_hypotheses()) == pytest.approx([-0.1])


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
