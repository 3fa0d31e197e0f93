"""A row of the C sampler is the same to the last bit alone, beside any neighbours, in any place, on any threads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.native.sampling import NativeSampling
from executor_svc.sampler.interface import Alternatives
from executor_svc.sampler.sampler import Sampler
from octavo_shared.step_wire.step import Int32Array, SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules, pack_mask, pad_words
from tests.numerics.native import LANES, library_path
from tests.numerics.test_processors import ROWS
from tests.support.each_row import each_row
from tests.support.sample_rows import ROWS_OF_FILTERS, Row, sample_rows

VOCAB_SIZES = (17, 49_152, 50_257)
NUM_LOGIT_ROWS = 2
BATCHES = (3, 24, 65)
THREADS = (1, 2)


@cache
def sampler(lanes: str, num_threads: int) -> Sampler:
    return Sampler(NativeSampling(library_path(lanes), num_threads))


def array(*token_ids: int) -> Int32Array:
    return np.array(token_ids, np.int32)


def rows_of_every_kind(vocab_size: int) -> list[Row]:
    """Return every filter, processor and rule by itself, greedy and drawn, and all of them together."""
    half = np.arange(0, vocab_size, 2, dtype=np.int32)
    rules = (
        TokenRules(array(1, 3, 16), np.array([2.0, -3.5, 0.1], np.float32)),
        TokenRules(banned_token_ids=array(0, 2, 7)),
        TokenRules(banned_words=pad_words([[4, 5, 6], [5, 9], [1, 5, 2]])),
        TokenRules(stop_token_ids=array(2, 11)),
        TokenRules(allowed_mask=pack_mask(half, vocab_size)),
    )
    everything = TokenRules(
        rules[0].biased_token_ids,
        rules[0].biases,
        stop_token_ids=rules[3].stop_token_ids,
        banned_token_ids=rules[1].banned_token_ids,
        banned_words=rules[2].banned_words,
        allowed_mask=rules[4].allowed_mask,
    )
    penalties = SamplingRow(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.4)
    greedy = [
        SamplingRow(),
        SamplingRow(repetition_penalty=1.7),
        SamplingRow(presence_penalty=1.5),
        SamplingRow(frequency_penalty=0.9),
        SamplingRow(no_repeat_ngram_size=2),
        penalties,
    ]
    samplings = [
        *greedy,
        *(replace(row, temperature=1.1) for row in greedy),
        *ROWS_OF_FILTERS,
        replace(penalties, temperature=0.9, top_k=12, top_p=0.9, min_p=0.01, typical_p=0.95),
    ]
    rows = [Row(row, (4, 3, 4), (5, 5, 9, 4)) for row in samplings]
    rows += [
        Row(replace(row, min_tokens=9), (1, 4), (4, 5), rule)
        for rule in (*rules, everything)
        for row in (SamplingRow(), SamplingRow(temperature=1.0), samplings[-1])
    ]
    return [replace(row, sampling=replace(row.sampling, seed=seed)) for seed, row in enumerate(rows)]


@dataclass(frozen=True)
class Case:
    """A sample row, the row of the logits that it uses, and how many candidates it would want as a beam."""

    row: Row
    logit_row: int
    num_candidates: int

    @property
    def num_alternatives(self) -> int:
        return max(0, self.row.sampling.num_logprobs)

    @property
    def prompt_token_id(self) -> int:
        return self.num_candidates


def bits_of_parts(alternatives: Alternatives | None, counts: Sequence[int]) -> list[bytes]:
    if alternatives is None:
        return [b""] * len(counts)
    ends = np.cumsum(counts)[:-1]
    token_ids, logprobs = np.split(alternatives.token_ids, ends), np.split(alternatives.logprobs, ends)
    return [ids.tobytes() + values.tobytes() for ids, values in zip(token_ids, logprobs, strict=True)]


def bits(sampler: Sampler, logits: torch.Tensor, cases: Sequence[Case]) -> list[tuple[bytes, ...]]:
    """Return all that the sampler says of each case, if these are the rows of a step: as samples, beams, prompts."""
    logit_rows = np.array([case.logit_row for case in cases], np.int32)
    rows = sample_rows(*(case.row for case in cases))
    num_candidates = np.array([case.num_candidates for case in cases], np.int32)
    prompt_ids = np.array([case.prompt_token_id for case in cases], np.int32)

    sampled = sampler.sample(logits, logit_rows, rows)
    beams = sampler.candidates(logits, logit_rows, rows, num_candidates)
    prompts = sampler.prompt_logprobs(
        torch.from_numpy(logit_rows), lambda index: logits[index], prompt_ids, num_candidates
    )

    if sampled.logprobs is None:
        logprobs = [b""] * len(cases)
    else:
        logprobs = [b"" if np.isnan(value) else value.tobytes() for value in sampled.logprobs]
    return list(
        zip(
            [token_id.tobytes() for token_id in sampled.token_ids],
            logprobs,
            bits_of_parts(sampled.alternatives, [case.num_alternatives for case in cases]),
            bits_of_parts(beams, num_candidates.tolist()),
            [value.tobytes() for value in prompts[0]],
            bits_of_parts(prompts[1], num_candidates.tolist()),
            strict=True,
        )
    )


@cache
def logits_of(vocab_size: int) -> torch.Tensor:
    """Return narrow and wide distributions, [NUM_LOGIT_ROWS, vocab_size]."""
    generator = torch.Generator().manual_seed(vocab_size)
    spread = torch.linspace(0.5, 4.0, NUM_LOGIT_ROWS)[:, None]
    return torch.randn(NUM_LOGIT_ROWS, vocab_size, generator=generator) * spread


def all_cases(vocab_size: int) -> list[Case]:
    """Return every kind of row on every row of the logits, without log-probabilities and with."""
    return [
        Case(replace(row, sampling=replace(row.sampling, num_logprobs=num_logprobs)), logit_row, 1 + index % 9)
        for index, row in enumerate(rows_of_every_kind(vocab_size))
        for logit_row in range(NUM_LOGIT_ROWS)
        for num_logprobs in (-1, 0, 5)
    ]


@cache
def bits_alone(lanes: str, vocab_size: int) -> list[tuple[bytes, ...]]:
    """Return what each of all cases is alone, on one thread, with logits that have no other row."""
    logits = logits_of(vocab_size)
    return [
        bits(sampler(lanes, 1), logits[case.logit_row : case.logit_row + 1].clone(), [replace(case, logit_row=0)])[0]
        for case in all_cases(vocab_size)
    ]


@each_row(*product(THREADS, BATCHES, VOCAB_SIZES, LANES))
def test_a_row_alone_is_the_row_in_any_batch(num_threads: int, num_rows: int, vocab_size: int, lanes: str) -> None:
    """Neighbours are drawn; rows share logits, as the outputs of one prompt do."""
    cases, alone = all_cases(vocab_size), bits_alone(lanes, vocab_size)
    order = np.random.default_rng(num_rows).permutation(len(cases))

    for begin in range(0, len(order), num_rows):
        batch = order[begin : begin + num_rows].tolist()
        together = bits(sampler(lanes, num_threads), logits_of(vocab_size), [cases[index] for index in batch])
        for index, found in zip(batch, together, strict=True):
            assert found == alone[index], cases[index]


@each_row(*product(VOCAB_SIZES, LANES))
def test_a_row_that_asks_for_log_probabilities_gets_the_token_that_it_gets_without(vocab_size: int, lanes: str) -> None:
    token_ids = [found[0] for found in bits_alone(lanes, vocab_size)]

    for without, with_its_own, with_five in zip(token_ids[::3], token_ids[1::3], token_ids[2::3], strict=True):
        assert without == with_its_own == with_five


@pytest.mark.parametrize("lanes", LANES)
@given(
    rows=st.lists(st.tuples(ROWS, st.integers(0, 3), st.integers(1, 150)), min_size=2, max_size=8),
    vocab_size=st.integers(150, 700),
    seed=st.integers(0, 1000),
    num_threads=st.sampled_from(THREADS),
)
def test_so_it_is_with_rows_and_neighbours_that_are_drawn(
    lanes: str, rows: list[tuple[Row, int, int]], vocab_size: int, seed: int, num_threads: int
) -> None:
    cases = [
        Case(replace(row, rules=_widened(row.rules, vocab_size)), logit_row, min(num_candidates, vocab_size - 1))
        for row, logit_row, num_candidates in rows
    ]
    logits = torch.randn((4, vocab_size), generator=torch.Generator().manual_seed(seed)) * 3

    together = bits(sampler(lanes, num_threads), logits, cases)

    for case, found in zip(cases, together, strict=True):
        row = logits[case.logit_row : case.logit_row + 1].clone()
        assert bits(sampler(lanes, 1), row, [replace(case, logit_row=0)]) == [found]


def _widened(rules: TokenRules | None, vocab_size: int) -> TokenRules | None:
    """Return rules whose mask is as long as the vocabulary needs; tokens that it did not name may not come."""
    if rules is None or rules.allowed_mask is None:
        return rules
    return replace(rules, allowed_mask=rules.allowed_mask.ljust(-(-vocab_size // 8), b"\0"))


@each_row(*product(VOCAB_SIZES, [*LANES, "torch"]))
def test_a_token_has_one_log_probability_whoever_asks(vocab_size: int, lanes: str) -> None:
    """As the sampled token, as an alternative, in a prompt, and as a beam's candidate."""
    with_all = Sampler() if lanes == "torch" else sampler(lanes, 1)
    logits, count = logits_of(vocab_size), min(vocab_size, 40)
    counts, every_row = np.full(NUM_LOGIT_ROWS, count, np.int32), np.arange(NUM_LOGIT_ROWS, dtype=np.int32)

    sampled = with_all.sample(logits, every_row, sample_rows(*[Row(SamplingRow(num_logprobs=count))] * NUM_LOGIT_ROWS))
    beams = with_all.candidates(logits, every_row, sample_rows(*[Row()] * NUM_LOGIT_ROWS), counts)

    assert sampled.alternatives is not None
    assert sampled.logprobs is not None
    token_ids, logprobs = sampled.alternatives.token_ids, sampled.alternatives.logprobs.reshape(-1, count)
    rows = np.repeat(every_row, count)
    in_prompt, _ = with_all.prompt_logprobs(
        torch.from_numpy(rows), lambda index: logits[index], token_ids, np.zeros(len(rows), np.int32)
    )
    as_beams = dict(zip(zip(rows.tolist(), beams.token_ids.tolist(), strict=True), beams.logprobs, strict=True))
    assert sampled.logprobs.tobytes() == logprobs[:, 0].tobytes()  # the likeliest is what greedy rows take
    assert in_prompt.tobytes() == logprobs.tobytes()
    for row, token_id, logprob in zip(rows.tolist(), token_ids.tolist(), logprobs.ravel(), strict=True):
        assert as_beams.get((row, token_id), logprob).tobytes() == logprob.tobytes()
    assert set(beams.token_ids.tolist()) == set(token_ids.tolist())
