"""Penalties, rules and filters equal transformers' logits processors; a row alone is a row in a batch."""

import dataclasses
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from executor_svc.sampler.filters import filtered_scores
from executor_svc.sampler.sampler import Sampled, Sampler
from executor_svc.sampler.torch_backend import process
from octavo_shared.step_wire.step import SamplingRow
from octavo_shared.step_wire.token_rules import NO_TOKEN, TokenRules, pack_mask, pad_words
from tests.support.each_row import each_row
from tests.support.sample_rows import Row, sample_rows

VOCAB_SIZE = 150
TOKENS = st.integers(0, VOCAB_SIZE - 1)
FEW_TOKENS = st.lists(TOKENS, max_size=4, unique=True)
HISTORIES = st.lists(st.integers(0, 20), min_size=1, max_size=12)
WORDS = st.lists(st.lists(st.integers(0, 20), min_size=2, max_size=4), max_size=4, unique_by=tuple)


def array(token_ids: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(token_ids, np.int32)


@st.composite
def token_rules(draw: st.DrawFn) -> TokenRules | None:
    if draw(st.booleans()):
        return None
    biased = draw(FEW_TOKENS)
    biases = draw(st.lists(st.floats(-9, 9, width=32), min_size=len(biased), max_size=len(biased)))
    allowed = draw(st.none() | st.lists(TOKENS, min_size=100, unique=True))
    return TokenRules(
        biased_token_ids=array(biased),
        biases=np.array(biases, np.float32),
        stop_token_ids=array(draw(FEW_TOKENS)),
        banned_token_ids=array(draw(FEW_TOKENS)),
        banned_words=pad_words(draw(WORDS)),
        allowed_mask=None if allowed is None else pack_mask(array(allowed), VOCAB_SIZE),
    )


SAMPLING_ROWS = st.builds(
    SamplingRow,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 1, 7, 64, 100, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.4]),
    typical_p=st.sampled_from([1.0, 1.0, 0.2, 0.85]),
    seed=st.integers(0, 2**64 - 1),
    output_index=st.integers(0, 3),
    num_logprobs=st.integers(-1, 5),
    repetition_penalty=st.sampled_from([1.0, 0.75, 1.25, 2.0]),
    presence_penalty=st.sampled_from([0.0, -1.5, 0.75]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 1.25]),
    no_repeat_ngram_size=st.sampled_from([0, 0, 1, 2, 3, 64]),
    min_tokens=st.integers(0, 12),
)
ROWS = st.builds(Row, SAMPLING_ROWS, HISTORIES, st.lists(st.integers(0, 20), max_size=12), token_rules())


def logits_of(num_rows: int, seed: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * 3


def processed(logits: torch.Tensor, *rows: Row) -> torch.Tensor:
    scores = logits.clone()
    process(scores, sample_rows(*rows))
    return scores


def transformers_processors(row: Row) -> LogitsProcessorList:
    """Return transformers' processors, in the order of its generate; those for which it has none are left out."""
    sampling, rules, processors = row.sampling, row.rules or TokenRules(), LogitsProcessorList()
    if len(rules.biases):
        pairs = zip(rules.biased_token_ids.tolist(), rules.biases.tolist(), strict=True)
        processors.append(SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in pairs]))
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size))
    words = [word[word != NO_TOKEN].tolist() for word in rules.banned_words]
    words += [[token_id] for token_id in rules.banned_token_ids.tolist()]
    if words:
        processors.append(NoBadWordsLogitsProcessor(words))
    if sampling.min_tokens and len(rules.stop_token_ids):
        stops = rules.stop_token_ids.tolist()
        processors.append(MinNewTokensLengthLogitsProcessor(len(row.prompt), sampling.min_tokens, stops))
    return processors


def transformers_warpers(sampling: SamplingRow) -> LogitsProcessorList:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.typical_p < 1:
        warpers.append(TypicalLogitsWarper(sampling.typical_p))
    return warpers


@given(rows=st.lists(ROWS, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_processed_logits_equal_transformers(rows: list[Row], seed: int) -> None:
    """transformers has no presence and frequency penalty and no fixed list of allowed tokens; others test those."""
    neutral = [
        dataclasses.replace(
            row,
            sampling=dataclasses.replace(row.sampling, presence_penalty=0.0, frequency_penalty=0.0),
            rules=row.rules and dataclasses.replace(row.rules, allowed_mask=None),
        )
        for row in rows
    ]
    logits = logits_of(len(rows), seed)

    scores = processed(logits, *neutral)

    for index, row in enumerate(neutral):
        history = torch.tensor([[*row.prompt, *row.output]])
        expected = transformers_processors(row)(history, logits[index : index + 1].clone())
        torch.testing.assert_close(scores[index : index + 1], expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=300)
@given(rows=st.lists(SAMPLING_ROWS, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_filtered_scores_equal_transformers(rows: list[SamplingRow], seed: int) -> None:
    rows = [dataclasses.replace(row, temperature=max(row.temperature, 0.25)) for row in rows]
    logits = logits_of(len(rows), seed)

    scores = filtered_scores(logits, sample_rows(*map(Row, rows)).sampling)

    for index, row in enumerate(rows):
        expected = transformers_warpers(row)(torch.zeros((1, 1), dtype=torch.long), logits[index : index + 1].clone())
        torch.testing.assert_close(scores[index : index + 1], expected)


@each_row(
    *product(
        [0.01, 1.0, 8.0],
        [
            SamplingRow(temperature=1.0, typical_p=0.2),
            SamplingRow(temperature=0.7, typical_p=0.95),
            SamplingRow(temperature=1.0, top_p=0.97, typical_p=0.5),
            SamplingRow(temperature=1.0, min_p=0.001, typical_p=0.9),
            SamplingRow(temperature=1.0, top_k=900, top_p=0.9),
            SamplingRow(temperature=1.0, top_k=4000, typical_p=0.9),
        ],
    )
)
def test_filters_on_a_large_vocabulary_equal_transformers(spread: float, row: SamplingRow) -> None:
    """From one token to nearly all of them: every number of likeliest tokens that is looked at decides some."""
    logits = logits_of(4, seed=1, vocab_size=5003) * spread

    scores = filtered_scores(logits, sample_rows(*[Row(row)] * 4).sampling)

    expected = transformers_warpers(row)(torch.zeros((4, 1), dtype=torch.long), logits)
    # Of 5,003 tokens, those at the edge may fall on either side: transformers adds up in float32.
    assert int(((scores > -torch.inf) != (expected > -torch.inf)).sum(-1).max()) <= 5
    both = (scores > -torch.inf) & (expected > -torch.inf)
    torch.testing.assert_close(scores[both], expected[both])


def test_output_penalties_are_those_of_openai() -> None:
    logits = logits_of(2, seed=2)
    row = Row(SamplingRow(presence_penalty=0.5, frequency_penalty=0.25), prompt=[3, 4, 4], output=[5, 4, 5, 5])

    scores = processed(logits, row, Row(SamplingRow(repetition_penalty=1.5), prompt=[9]))

    change = (scores - logits)[0]
    assert change[[3, 4, 5, 6]].tolist() == pytest.approx([0, -0.75, -1.25, 0], abs=1e-6)
    assert torch.count_nonzero(change) == 2


def test_only_allowed_tokens_are_left() -> None:
    logits = logits_of(3, seed=3)
    rules = TokenRules(allowed_mask=pack_mask(array([0, 8, 149]), VOCAB_SIZE))

    scores = processed(logits, Row(), Row(rules=rules), Row())

    assert torch.nonzero(scores[1] > -torch.inf)[:, 0].tolist() == [0, 8, 149]
    assert torch.equal(scores[[0, 2]], logits[[0, 2]])


def sample(logits: torch.Tensor, *rows: Row) -> Sampled:
    return Sampler().sample(logits, np.arange(len(rows), dtype=np.int32), sample_rows(*rows))


def alternatives_by_row(sampled: Sampled, rows: list[Row]) -> list[tuple[bytes, bytes]]:
    """Return the bits of each row's alternatives."""
    counts = [max(row.sampling.num_logprobs, 0) for row in rows]
    if sampled.alternatives is None:
        assert not any(counts)
        return [(b"", b"")] * len(rows)
    ends = np.cumsum(counts)[:-1]
    token_ids, logprobs = sampled.alternatives.token_ids, sampled.alternatives.logprobs
    return [
        (ids.tobytes(), values.tobytes())
        for ids, values in zip(np.split(token_ids, ends), np.split(logprobs, ends), strict=True)
    ]


def check_alone_is_in_a_batch(rows: list[Row], logits: torch.Tensor) -> None:
    together = sample(logits, *rows)

    found = alternatives_by_row(together, rows)
    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1].clone(), row)
        assert together.token_ids[index] == alone.token_ids[0]
        assert alternatives_by_row(alone, [row])[0] == found[index]
        assert (row.sampling.num_logprobs < 0) == (alone.logprobs is None)
        if alone.logprobs is not None:
            assert together.logprobs is not None
            assert together.logprobs[index].tobytes() == alone.logprobs[0].tobytes()


@given(rows=st.lists(ROWS, min_size=2, max_size=8), seed=st.integers(0, 1000))
def test_a_row_alone_is_the_row_in_a_batch_to_the_last_bit(rows: list[Row], seed: int) -> None:
    check_alone_is_in_a_batch(rows, logits_of(len(rows), seed))


@settings(max_examples=10, deadline=None)
@given(rows=st.lists(ROWS, min_size=8, max_size=8), seed=st.integers(0, 1000))
def test_so_it_is_with_a_vocabulary_that_threads_share(rows: list[Row], seed: int) -> None:
    no_masks = [dataclasses.replace(row, rules=None) for row in rows]
    check_alone_is_in_a_batch(no_masks, logits_of(len(rows), seed, vocab_size=40_003))


@given(rows=st.lists(ROWS, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_logprobs_and_alternatives_are_of_the_raw_logits(rows: list[Row], seed: int) -> None:
    logits = logits_of(len(rows), seed)
    before = logits.clone()

    sampled = sample(logits, *rows)

    assert torch.equal(logits, before)
    expected = torch.log_softmax(logits.double(), -1)
    asking = [index for index, row in enumerate(rows) if row.sampling.num_logprobs >= 0]
    assert (sampled.logprobs is None) == (not asking)
    for index in asking:
        assert sampled.logprobs is not None
        assert sampled.logprobs[index] == pytest.approx(float(expected[index, sampled.token_ids[index]]), abs=1e-5)
    wanting = [index for index in asking if rows[index].sampling.num_logprobs > 0]
    tops = [expected[index].topk(rows[index].sampling.num_logprobs) for index in wanting]
    if not tops:
        assert sampled.alternatives is None
        return
    assert sampled.alternatives is not None
    assert sampled.alternatives.token_ids.tolist() == torch.cat([top.indices for top in tops]).tolist()
    np.testing.assert_allclose(sampled.alternatives.logprobs, torch.cat([top.values for top in tops]), atol=1e-5)


def test_greedy_rows_get_the_processors_too() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]]).repeat(5, 1)
    rows = [
        Row(rules=TokenRules(banned_token_ids=array([0]))),
        Row(SamplingRow(repetition_penalty=5.0), prompt=[0, 1]),
        Row(SamplingRow(min_tokens=2), output=[3], rules=TokenRules(stop_token_ids=array([0, 1]))),
        Row(SamplingRow(min_tokens=2), output=[3, 3], rules=TokenRules(stop_token_ids=array([0, 1]))),
        Row(prompt=[2], output=[3], rules=TokenRules(banned_words=pad_words([[2, 3, 0], [3, 3, 1], [3, 1]]))),
    ]

    assert sample(logits, *rows).token_ids.tolist() == [1, 2, 2, 0, 2]


def test_a_banned_word_at_the_beginning_of_a_history_matches_no_token_before_it() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    rules = TokenRules(banned_words=pad_words([[2, 1, 0]]))

    assert sample(logits, Row(prompt=[1], rules=rules)).token_ids.tolist() == [0]
    assert sample(logits, Row(prompt=[2], output=[1], rules=rules)).token_ids.tolist() == [1]


CANDIDATE_ROWS: dict[str, Callable[[], Row]] = {
    "n-grams": lambda: Row(SamplingRow(no_repeat_ngram_size=2), [4, 5, 4], [7, 4]),
    "repetition": lambda: Row(SamplingRow(repetition_penalty=1.5), [3, 4], [5, 5]),
    "bias": lambda: Row(rules=TokenRules(biased_token_ids=array([7]), biases=np.array([9.0], np.float32))),
    "banned": lambda: Row(rules=TokenRules(banned_token_ids=array(list(range(140))))),
    "words": lambda: Row(prompt=[4], output=[5], rules=TokenRules(banned_words=pad_words([[4, 5, 6], [5, 9]]))),
    "min_tokens": lambda: Row(SamplingRow(min_tokens=3), [4], [5], TokenRules(stop_token_ids=array([1, 2]))),
}


@each_row(*CANDIDATE_ROWS)
def test_candidates_are_processed_log_probabilities_as_in_transformers(name: str) -> None:
    row, logits = CANDIDATE_ROWS[name](), logits_of(2, seed=5)

    found = Sampler().candidates(logits, np.array([1, 0], np.int32), sample_rows(row, Row()), array([8, 3]))

    history = torch.tensor([[*row.prompt, *row.output]])
    expected = transformers_processors(row)(history, torch.log_softmax(logits[1:], -1))[0].topk(8)
    plain = torch.log_softmax(logits[0], -1).topk(3)
    assert found.token_ids.tolist() == [*expected.indices.tolist(), *plain.indices.tolist()]
    np.testing.assert_allclose(found.logprobs, [*expected.values.tolist(), *plain.values.tolist()], atol=1e-6)
