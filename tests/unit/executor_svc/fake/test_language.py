"""The fake's language is a distribution after every history, and a pure function of it."""

import numpy as np

from executor_svc.fake.language import FakeLanguage
from executor_svc.fake.sampling import likeliest
from executor_svc.fake.tokenizer import EOS_TOKEN_ID, VOCAB_SIZE
from octavo_shared.step_wire.step import SAMPLING_ROW, Int32Array, SamplingRow
from tests.support.each_row import each_row

NUM_HISTORIES = 400
HISTORIES = np.random.default_rng(1).integers(0, 2**64, NUM_HISTORIES, np.uint64)
COMPLETE = np.zeros(NUM_HISTORIES, np.int32)


def ranked(eos_probability: float = 0.0, num_missing: Int32Array = COMPLETE) -> Int32Array:
    return FakeLanguage(eos_probability).rank(HISTORIES, num_missing)[0]


@each_row(0.0, 0.1, 1.0)
def test_every_history_ranks_the_whole_vocabulary(eos_probability: float) -> None:
    token_ids = ranked(eos_probability, num_missing=np.arange(NUM_HISTORIES, dtype=np.int32) % 4)

    assert (np.sort(token_ids, axis=1) == np.arange(VOCAB_SIZE)).all()


def test_log_probabilities_fall_strictly_and_sum_to_one() -> None:
    _, logprobs = FakeLanguage(0.1).rank(HISTORIES, COMPLETE)

    assert logprobs.dtype == np.float32
    assert (np.diff(logprobs, axis=1) < 0).all()
    np.testing.assert_allclose(np.exp(logprobs.astype(np.float64)).sum(1), 1, atol=1e-5)


def test_no_two_histories_have_the_same_log_probabilities_and_some_are_surer_than_others() -> None:
    _, logprobs = FakeLanguage(0.1).rank(HISTORIES, COMPLETE)

    likeliest = np.exp(logprobs[:, 0])
    assert len(set(likeliest.tolist())) == NUM_HISTORIES
    assert likeliest.min() < 0.1
    assert likeliest.max() > 0.6


def test_log_probabilities_by_token_are_those_of_the_ranking() -> None:
    token_ids, logprobs = FakeLanguage(0.1).rank(HISTORIES, COMPLETE)

    by_token = FakeLanguage(0.1).logprobs(HISTORIES, COMPLETE)

    assert np.array_equal(np.take_along_axis(by_token, token_ids, 1), logprobs)


def test_fewer_of_the_likeliest_are_a_prefix_of_more() -> None:
    token_ids, logprobs = FakeLanguage(0.1).rank(HISTORIES[:2], COMPLETE[:2])
    by_token = FakeLanguage(0.1).logprobs(HISTORIES[:2], COMPLETE[:2])

    some_ids, some_logprobs = likeliest(by_token, np.array([3, 5]))

    assert some_ids is not None
    assert some_logprobs is not None
    assert some_ids.tolist() == [*token_ids[0, :3], *token_ids[1, :5]]
    assert some_logprobs.tolist() == [*logprobs[0, :3], *logprobs[1, :5]]


def test_the_likeliest_token_is_the_greedy_one() -> None:
    greedy = np.repeat(np.array([SamplingRow().as_tuple()], SAMPLING_ROW), NUM_HISTORIES)
    num_missing = np.arange(NUM_HISTORIES, dtype=np.int32) % 2

    token_ids = FakeLanguage(0.3).sample(HISTORIES, num_missing, greedy)

    assert ranked(0.3, num_missing)[:, 0].tolist() == token_ids.tolist()
    assert EOS_TOKEN_ID in token_ids


def test_the_end_has_each_rank_with_its_probability() -> None:
    is_eos = ranked(0.1) == EOS_TOKEN_ID

    # 400 draws of chance 0.1 and 0.5; the bounds are 4 standard deviations.
    assert abs(is_eos[:, 0].sum() - 40) < 24
    assert abs(is_eos[:, :5].sum() - 200) < 40
    assert is_eos[:, :10].sum() == NUM_HISTORIES
    assert (ranked(1.0)[:, 0] == EOS_TOKEN_ID).all()


def test_the_end_comes_last_without_a_chance_and_inside_a_character() -> None:
    assert (ranked(0.0)[:, -1] == EOS_TOKEN_ID).all()
    assert (ranked(1.0, COMPLETE + 1)[:, -1] == EOS_TOKEN_ID).all()


def test_the_first_candidates_keep_the_text_valid() -> None:
    starts = ranked()[:, :98]
    followers = ranked(num_missing=COMPLETE + 2)[:, :48]

    assert np.isin(starts, [*range(0x20, 0x7F), 0xC3, 0xE4, 0xF0]).all()
    assert ((followers >= 0x90) & (followers < 0xC0)).all()


def test_the_batch_changes_no_ranking() -> None:
    alone, _ = FakeLanguage(0.1).rank(HISTORIES[7:8], COMPLETE[:1])

    assert alone[0].tolist() == ranked(0.1)[7].tolist()
