"""What sampling.c chooses equals what the torch form of the sampler chooses, with either width of vectors."""

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.native.sampling import NativeSampling
from executor_svc.sampler.filters import filtered_scores
from executor_svc.sampler.interface import NOT_FINITE
from executor_svc.sampler.sampler import Sampler
from executor_svc.sampler.torch_backend import process
from octavo_shared.step_wire.step import SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules, pack_mask
from tests.numerics.native import LANES, NUM_THREADS, library_path
from tests.numerics.test_processors import ROWS, logits_of
from tests.support.sample_rows import KEPT_OF_TIES, ROWS_OF_FILTERS, TYPICAL_TOKENS, Row, sample_rows, sampling_of

# Draws that touch both ends of a distribution, and many places between.
DRAWS = np.concatenate(([0.0, 1 - 2.0**-53], (np.arange(62) + 0.5) / 62))


@cache
def native_sampling(lanes: str) -> NativeSampling:
    """Return the functions. Raises: NativeUnavailableError: the machine cannot have them."""
    return NativeSampling(library_path(lanes), NUM_THREADS)


@pytest.fixture(params=LANES)
def native(request: pytest.FixtureRequest) -> NativeSampling:
    return native_sampling(request.param)


def choose(
    native: NativeSampling, scores: torch.Tensor, row: SamplingRow, draws: npt.NDArray[np.float64] = DRAWS
) -> list[list[int]]:
    """Return for each row of scores the tokens of all draws."""
    index = np.repeat(np.arange(len(scores)), len(draws))
    chosen = native.choose(scores, index, sampling_of(*[row] * len(index)), np.tile(draws, len(scores)))
    return chosen.reshape(len(scores), len(draws)).tolist()


def check_draws(token_ids: list[int], kept: torch.Tensor) -> None:
    """Fail unless each of DRAWS falls into the part of the distribution that its token has, up to rounding.

    Of hundreds of tokens of nearly equal scores, two at the edge of a filter may be in or out.
    """
    num_kept = int((kept > -torch.inf).sum())
    edge = 1e-5 if num_kept < 100 else 2 / num_kept
    cumulative = kept.double().softmax(-1).cumsum(-1)
    for token_id, draw in zip(token_ids, DRAWS.tolist(), strict=True):
        begin = float(cumulative[token_id - 1]) if token_id else 0.0
        assert begin - edge <= draw <= float(cumulative[token_id]) + edge


# 4,000 is more than a vocabulary of 5,003 has blocks.
FILTERS = [*ROWS_OF_FILTERS, SamplingRow(temperature=1.0, top_k=4000)]


@pytest.mark.parametrize("vocab_size", [1, 31, 33, 1000, 5003])
@pytest.mark.parametrize("row", FILTERS, ids=repr)
def test_draws_fall_where_the_torch_form_has_them(row: SamplingRow, vocab_size: int, native: NativeSampling) -> None:
    """From one token to nearly all of them."""
    logits = logits_of(2, seed=vocab_size, vocab_size=vocab_size)
    scores = torch.cat([logits * spread for spread in (0.01, 1.0, 8.0)])

    token_ids = choose(native, scores, row)

    for of_row, kept in zip(token_ids, filtered_scores(scores, sampling_of(*[row] * len(scores))), strict=True):
        check_draws(of_row, kept)
        # The ends of what is left, where every token that is too many or missing shows.
        left = torch.nonzero(kept > -torch.inf)[:, 0].tolist()
        assert left[0] <= min(of_row)
        assert max(of_row) <= left[-1]
        if len(left) <= 2:
            assert set(of_row) == set(left)


@pytest.mark.parametrize("row", FILTERS, ids=repr)
def test_forbidden_tokens_are_never_drawn(row: SamplingRow, native: NativeSampling) -> None:
    scores = logits_of(3, seed=1, vocab_size=500)
    scores[:, ::2] = -torch.inf
    scores[1, 7:] = -torch.inf
    scores[2, :499] = -torch.inf

    token_ids = choose(native, scores, row)

    assert {token_id % 2 for token_id in token_ids[0]} == {1}
    assert set(token_ids[1]) <= {1, 3, 5}
    assert set(token_ids[2]) == {499}


@pytest.mark.parametrize(("row", "kept"), KEPT_OF_TIES)
def test_ties_stay_together(row: SamplingRow, kept: set[int], native: NativeSampling) -> None:
    scores = torch.tensor([[0.0, 3.0, 2.0, 2.0, -1.0, -2.0, -9.0]])

    token_ids = choose(native, scores, row, (np.arange(2000) + 0.5) / 2000)

    assert set(token_ids[0]) == kept


@pytest.mark.parametrize(("probabilities", "typical_p", "kept"), TYPICAL_TOKENS)
def test_typical_tokens(probabilities: list[float], typical_p: float, kept: set[int], native: NativeSampling) -> None:
    scores = torch.tensor([probabilities]).log()

    token_ids = choose(native, scores, SamplingRow(temperature=1.0, typical_p=typical_p))

    assert set(token_ids[0]) == kept


def test_typical_tokens_of_a_wide_distribution_may_be_the_least_likely(native: NativeSampling) -> None:
    """The likeliest token is farther from the entropy than a tail that is less likely than a nucleus would hold."""
    shares = ((0.4, 1), (0.5, 20_000), (0.1, 40_000))
    scores = torch.cat([torch.full((count,), share / count) for share, count in shares]).log()[None]
    row = SamplingRow(temperature=1.0, typical_p=0.55)

    token_ids = choose(native, scores, row)

    kept = filtered_scores(scores, sampling_of(row))[0]
    assert torch.nonzero(kept > -torch.inf)[:, 0].tolist() == list(range(1, 60_001))
    check_draws(token_ids[0], kept)


def test_a_temperature_near_zero_is_greedy(native: NativeSampling) -> None:
    scores = logits_of(4, seed=3) * 100

    for row in (SamplingRow(temperature=1e-40), SamplingRow(temperature=1e-40, top_p=0.9)):
        token_ids = choose(native, scores, row)
        assert [set(of_row) for of_row in token_ids] == [{best} for best in scores.argmax(-1).tolist()]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 150, 5003])
def test_log_probabilities_of_every_token(vocab_size: int, native: NativeSampling) -> None:
    """Also of those that are far below the sum's precision, and those that cannot come."""
    logits = logits_of(5, seed=4, vocab_size=vocab_size)
    logits[1, vocab_size // 2 :] -= 200
    logits[2, 1:] = -torch.inf
    rows, everything = np.arange(5), np.full(5, vocab_size, np.int32)

    logprobs, token_ids, likeliest = native.logprobs(logits, rows, rows % vocab_size, everything)

    expected = logits.double().log_softmax(-1).float()
    np.testing.assert_allclose(logprobs, expected[rows, rows % vocab_size], rtol=0, atol=1e-5)
    ordered = logits.sort(dim=-1, descending=True, stable=True)
    assert token_ids.reshape(5, -1).tolist() == ordered.indices.tolist()
    np.testing.assert_allclose(likeliest.reshape(5, -1), expected.gather(1, ordered.indices), rtol=0, atol=1e-5)


def test_the_logarithm_of_a_sum_is_exact_to_the_last_bit_of_a_float(native: NativeSampling) -> None:
    """Of n equal logits the sum is n. Between powers of two and at them, where its parts meet."""
    for n in (*range(1, 600), 1023, 1024, 1025, 5003, 49_152, 50_257):
        logits, zero = torch.zeros(1, n), np.zeros(1, np.int32)

        assert native.logprobs(logits, zero, zero, zero)[0][0] == np.float32(-np.log(n))


@pytest.mark.parametrize("count", [1, 2, 5, 31, 64, 199, 200])
def test_the_likeliest_are_falling_and_equal_ones_come_by_token_id(count: int, native: NativeSampling) -> None:
    logits = (logits_of(6, seed=8, vocab_size=200) / 3).round()  # many ties, 0 and -0
    logits[1] = 0.0
    logits[2, ::2] = -torch.inf
    logits[3] = -torch.inf
    assert bool((logits == 0).any() and (logits.view(torch.int32) == -(2**31)).any())

    token_ids = native.logprobs(logits, np.arange(6), np.zeros(6, np.int32), np.full(6, count, np.int32))[1]

    ordered = logits.sort(dim=-1, descending=True, stable=True)
    assert token_ids.reshape(6, -1).tolist() == ordered.indices[:, :count].tolist()


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_the_likeliest_of_no_numbers_are_distinct_tokens(value: float, native: NativeSampling) -> None:
    logits = torch.full((1, 70), value)
    logits[0, 40] = 0.0

    for count in (1, 3, 70):
        counts = np.array([count], np.int32)
        for token_ids in (
            native.logprobs(logits, np.zeros(1, np.int32), np.zeros(1, np.int32), counts)[1],
            native.candidates(logits, np.zeros(1, np.int32), counts)[0],
        ):
            assert len(set(token_ids.tolist())) == count
            assert set(token_ids.tolist()) <= set(range(70))


@pytest.mark.parametrize("vocab_size", [1, 17, 150, 5003])
def test_the_likeliest_token_of_a_greedy_row_is_the_first_of_the_largest(
    vocab_size: int, native: NativeSampling
) -> None:
    logits = logits_of(40, seed=9, vocab_size=vocab_size).round()
    logits[0] = -torch.inf
    logits[1] = -torch.inf
    logits[1, -1] = -1e30
    logits[2, vocab_size // 3 :] = 99.0

    token_ids = choose(native, logits, SamplingRow(), np.zeros(1))

    assert [of_row[0] for of_row in token_ids] == [NOT_FINITE, *logits.argmax(-1).tolist()[1:]]


@pytest.mark.parametrize("lanes", LANES)
@given(rows=st.lists(ROWS, min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_processors_change_what_they_change_in_torch_to_the_last_bit(lanes: str, rows: list[Row], seed: int) -> None:
    """Seen in the candidates: log-probabilities that are processed. Those of all tokens are the whole row."""
    sampler, logits = Sampler(native_sampling(lanes)), logits_of(len(rows), seed)
    everything = np.full(len(rows), logits.shape[1], np.int32)

    def all_candidates(*rows: Row) -> torch.Tensor:
        found = sampler.candidates(logits, np.arange(len(rows), dtype=np.int32), sample_rows(*rows), everything)
        scores, token_ids = torch.from_numpy(found.logprobs), torch.from_numpy(found.token_ids).long()
        return torch.empty_like(logits).scatter_(1, token_ids.view_as(logits), scores.view_as(logits))

    expected = all_candidates(*[Row()] * len(rows))
    process(expected, sample_rows(*rows))

    assert torch.equal(all_candidates(*rows), expected)


@pytest.mark.parametrize("vocab_size", [1, 7, 150, 5003])
def test_allow_lists_of_every_length(vocab_size: int, native: NativeSampling) -> None:
    logits = logits_of(3, seed=5, vocab_size=vocab_size)
    allowed = np.random.default_rng(0).choice(vocab_size, -(-vocab_size // 2), replace=False).astype(np.int32)
    one = np.array([vocab_size - 1], np.int32)
    rules = [TokenRules(allowed_mask=pack_mask(ids, vocab_size)) for ids in (allowed, one)]
    rows = sample_rows(Row(rules=rules[0]), Row(), Row(rules=rules[1]))

    found = Sampler(native).candidates(logits, np.arange(3, dtype=np.int32), rows, np.array([vocab_size] * 3, np.int32))

    token_ids, may_come = found.token_ids.reshape(3, -1), found.logprobs.reshape(3, -1) > -np.inf
    for row, expected in enumerate((allowed.tolist(), list(range(vocab_size)), [vocab_size - 1])):
        assert set(token_ids[row][may_come[row]].tolist()) == set(expected)


@pytest.mark.parametrize("lanes", LANES)
@given(rows=st.lists(ROWS, min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_the_sampler_gives_the_same_with_it_and_without(lanes: str, rows: list[Row], seed: int) -> None:
    native, logits = native_sampling(lanes), logits_of(len(rows), seed)
    before, index, table = logits.clone(), np.arange(len(rows), dtype=np.int32)[::-1].copy(), sample_rows(*rows)

    sampled = Sampler(native).sample(logits, index, table)

    expected = Sampler().sample(logits, index, table)
    assert torch.equal(logits, before)
    assert sampled.token_ids.tolist() == expected.token_ids.tolist()
    assert (sampled.logprobs is None) == (expected.logprobs is None)
    if sampled.logprobs is not None and expected.logprobs is not None:
        np.testing.assert_allclose(sampled.logprobs, expected.logprobs, atol=1e-5)
    assert (sampled.alternatives is None) == (expected.alternatives is None)
    if sampled.alternatives is not None and expected.alternatives is not None:
        assert sampled.alternatives.token_ids.tolist() == expected.alternatives.token_ids.tolist()
        np.testing.assert_allclose(sampled.alternatives.logprobs, expected.alternatives.logprobs, atol=1e-5)


def test_scores_of_another_layout_are_refused(native: NativeSampling) -> None:
    for scores in (torch.zeros(4, 3).t(), torch.zeros(3, 4, dtype=torch.float64)):
        with pytest.raises(AssertionError):
            choose(native, scores, SamplingRow())
