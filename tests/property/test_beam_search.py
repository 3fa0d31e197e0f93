"""Any beam search, on a model of hashed logits: its invariants, and where it is wide enough, the truth."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.beam_search import BeamSearch
from scheduler_svc.request.outputs import FinishReason, Hypothesis
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping
from tests.support.beam_driving import HashedModel, live_histories, run_search, top_candidates


def outputs(search: BeamSearch) -> list[list[int]]:
    return [beam.token_ids.tolist() for beam in search.live]


def scores(hypotheses: list[Hypothesis]) -> list[float]:
    return [hypothesis.score for hypothesis in hypotheses]


@st.composite
def searches(draw: st.DrawFn) -> tuple[BeamSearch, HashedModel, int]:
    """Draw a search, the model it runs on and the most output tokens."""
    vocab_size = draw(st.integers(2, 30))
    ends = draw(st.frozensets(st.integers(0, vocab_size - 1), max_size=3))
    width = draw(st.integers(1, 9))
    params = BeamSearchParams(
        width,
        draw(st.integers(1, width)),
        draw(st.floats(-3.0, 3.0)),
        draw(st.sampled_from(EarlyStopping)),
    )
    model = HashedModel(
        draw(st.integers(0, 2**32)),
        vocab_size,
        spread=draw(st.floats(0.0, 10.0)),
        end_token_ids=tuple(ends),
        end_bias=draw(st.floats(-2.0, 4.0)),
        num_levels=draw(st.sampled_from([0, 1, 4])),
    )
    max_new_tokens = draw(st.integers(1, 15))
    return BeamSearch(params, 2, 2 + max_new_tokens, ends, vocab_size=vocab_size), model, max_new_tokens


def assert_live_beams_are_sound(search: BeamSearch, num_output_tokens: int, ends: frozenset[int]) -> None:
    histories = [tuple(output) for output in outputs(search)]
    assert len(histories) <= search.params.beam_width
    assert len(set(histories)) == len(histories)
    assert all(len(history) == num_output_tokens and ends.isdisjoint(history) for history in histories)
    assert all(better.score >= worse.score for better, worse in pairwise(search.live))
    for beam in search.live:
        assert beam.score == pytest.approx(beam.logprobs.sum(), rel=1e-5, abs=1e-5)


def assert_hypotheses_are_sound(search: BeamSearch, max_new_tokens: int, ends: frozenset[int]) -> None:
    hypotheses = search.finished_hypotheses()
    histories = [tuple(hypothesis.token_ids.tolist()) for hypothesis in hypotheses]
    assert len(histories) <= search.params.num_outputs
    assert len(set(histories)) == len(histories)
    assert all(better >= worse for better, worse in pairwise(scores(hypotheses)))
    for hypothesis, history in zip(hypotheses, histories, strict=True):
        stopped = hypothesis.finish_reason is FinishReason.STOP
        assert stopped == (history[-1] in ends)
        assert ends.isdisjoint(history[:-1])
        assert 1 <= len(history) <= max_new_tokens
        assert stopped or len(history) == max_new_tokens
        penalty = len(history) ** search.params.length_penalty
        assert hypothesis.score == pytest.approx(hypothesis.logprobs.sum() / penalty, rel=1e-4, abs=1e-5)


@given(searches())
def test_any_search_keeps_its_invariants_and_ends(drawn: tuple[BeamSearch, HashedModel, int]) -> None:
    search, model, max_new_tokens = drawn
    ends = frozenset(model.end_token_ids)
    best: list[float] = []

    for num_output_tokens in range(1, max_new_tokens + 1):
        before = outputs(search)
        logprobs = model.logprobs(live_histories(search, [0, 1]))
        chosen = search.advance(top_candidates(logprobs, search.num_candidates))

        assert outputs(search) == [[*before[parent], token_id] for parent, token_id in chosen]
        assert_live_beams_are_sound(search, num_output_tokens, ends)
        assert_hypotheses_are_sound(search, max_new_tokens, ends)
        now = scores(search.finished_hypotheses())
        assert all(new >= old for new, old in zip(now, best, strict=False))
        best = now
        if search.is_over:
            break

    assert search.is_over
    if model.vocab_size >= search.params.beam_width:
        assert len(best) == search.params.num_outputs


@given(searches())
def test_a_search_is_deterministic(drawn: tuple[BeamSearch, HashedModel, int]) -> None:
    search, model, max_new_tokens = drawn
    ends = frozenset(model.end_token_ids)
    again = BeamSearch(search.params, 2, 2 + max_new_tokens, ends, vocab_size=model.vocab_size)

    first, second = (run_search(one, [0, 1], model.logprobs) for one in (search, again))

    assert [(h.token_ids.tolist(), h.score) for h in first] == [(h.token_ids.tolist(), h.score) for h in second]


@given(st.integers(0, 2**32), st.sampled_from([-1.0, 0.0, 1.0, 2.0]))
def test_a_search_as_wide_as_the_tree_finds_the_best_sequences_of_all(seed: int, length_penalty: float) -> None:
    model, depth, end = HashedModel(seed, vocab_size=3), 3, 2
    tree = [(*body, last) for n in range(depth) for body in product((0, 1), repeat=n) for last in (0, 1, 2)]
    ended = [tokens for tokens in tree if tokens[-1] == end or len(tokens) == depth]
    params = BeamSearchParams(len(ended), len(ended), length_penalty, EarlyStopping.NEVER)

    def score(tokens: tuple[int, ...]) -> float:
        prefixes = [np.array([[0, *tokens[:length]]]) for length in range(len(tokens))]
        logprobs = [float(model.logprobs(prefix)[0, token]) for prefix, token in zip(prefixes, tokens, strict=True)]
        return sum(logprobs) / float(len(tokens) ** length_penalty)

    hypotheses = run_search(BeamSearch(params, 1, 1 + depth, frozenset({end}), vocab_size=3), [0], model.logprobs)

    assert scores(hypotheses) == pytest.approx(sorted(map(score, ended), reverse=True), rel=1e-5)
    assert {tuple(hypothesis.token_ids.tolist()) for hypothesis in hypotheses} == set(ended)
