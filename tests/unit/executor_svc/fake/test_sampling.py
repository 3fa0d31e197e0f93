"""The fake executor carries out rules, penalties, alternatives and prompt log-probabilities in its own way."""

from dataclasses import replace

import numpy as np
import pytest

from executor_svc.fake.tokenizer import EOS_TOKEN_ID, VOCAB_SIZE
from octavo_shared.errors import InvalidStepError
from octavo_shared.step_wire.step import SamplingRow, StepResult, TableDelta, pairs
from octavo_shared.step_wire.token_rules import TokenRules, pack_mask, pad_words
from tests.support.each_row import each_row
from tests.support.fake_runs import Run, admission, small_worker

BLOCKS = (0, 1, 2, 3, 4)
PROMPT = "abcdefg"


def array(*token_ids: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(token_ids, np.int32)


def generate(
    num_tokens: int, rules: TokenRules | None = None, sampling: SamplingRow | None = None, eos_probability: float = 0.0
) -> list[int]:
    run = Run(small_worker(eos_probability=eos_probability))
    entry = replace(admission(PROMPT, BLOCKS, sampling=sampling), token_rules=rules)
    tokens = run.prefill(entry)
    while len(tokens) < num_tokens:
        tokens += run.decode()
    return tokens


STOPS = TokenRules(stop_token_ids=array(EOS_TOKEN_ID))


@each_row(0.0, 1.0)
def test_no_end_comes_before_min_tokens(temperature: float) -> None:
    sampling = SamplingRow(temperature=temperature, seed=5)

    assert generate(3, STOPS, sampling, eos_probability=1.0) == [EOS_TOKEN_ID] * 3
    tokens = generate(6, STOPS, replace(sampling, min_tokens=4), eos_probability=1.0)

    assert [token == EOS_TOKEN_ID for token in tokens] == [False] * 4 + [True] * 2


def test_banned_tokens_and_words_never_come_and_what_is_allowed_comes_alone() -> None:
    free = generate(8)

    without = generate(8, TokenRules(banned_token_ids=array(free[3])))
    assert without[:3] == free[:3]
    assert free[3] not in without
    wordless = generate(8, TokenRules(banned_words=pad_words([free[2:5]])))
    assert wordless[:4] == free[:4]
    assert wordless[4] != free[4]
    assert set(generate(8, TokenRules(allowed_mask=pack_mask(array(65, 66), VOCAB_SIZE)))) <= {65, 66}


def test_a_bias_and_penalties_change_what_comes() -> None:
    assert generate(4, TokenRules(biased_token_ids=array(200), biases=np.array([50.0], np.float32))) == [200] * 4
    biased = TokenRules(biased_token_ids=array(200, 97), biases=np.array([50.0, 40.0], np.float32))
    assert generate(4, biased, SamplingRow(frequency_penalty=25.0)) == [200, 97, 200, 97]
    assert generate(3, biased, SamplingRow(repetition_penalty=2.0)) == [200, 200, 200]
    assert generate(3, biased, SamplingRow(presence_penalty=12.0)) == [200, 97, 200]
    assert generate(4, biased, SamplingRow(no_repeat_ngram_size=2)) == [200, 200, 97, 200]


def test_seeds_and_outputs_differ_under_rules_too() -> None:
    rules = TokenRules(banned_token_ids=array(0))
    rows = [SamplingRow(temperature=1.0, seed=seed, output_index=index) for seed in (1, 2) for index in (0, 1)]

    assert len({tuple(generate(6, rules, row)) for row in rows}) == 4
    assert generate(6, rules, rows[0]) == generate(6, rules, rows[0])


def test_alternatives_are_likeliest_first_and_hold_the_greedy_token_in_front() -> None:
    entry = admission(PROMPT, BLOCKS, sampling=SamplingRow(num_logprobs=5))

    result = Run().step(TableDelta(admissions=(entry,), prefill_chunks=pairs((0, 7))))

    assert result.alternative_token_ids is not None
    assert result.alternative_logprobs is not None
    assert result.logprobs is not None
    assert len(set(result.alternative_token_ids.tolist())) == 5
    assert (np.diff(result.alternative_logprobs) < 0).all()
    assert result.alternative_token_ids[0] == result.sampled_token_ids[0]
    assert result.alternative_logprobs[0] == result.logprobs[0]


def prompt_results(*chunks: int) -> list[StepResult]:
    run = Run()
    entry = replace(admission(PROMPT, BLOCKS), num_prompt_logprobs=2)
    results = []
    for number, length in enumerate(chunks):
        delta = TableDelta(admissions=() if number else (entry,), prefill_chunks=pairs((0, length)))
        results.append(run.step(delta))
    return results


@each_row((1, 6), (3, 4), (2, 2, 3), (1, 1, 1, 1, 1, 1, 1))
def test_prompt_logprobs_do_not_depend_on_the_chunks(chunks: tuple[int, ...]) -> None:
    (whole,) = prompt_results(7)
    parts = prompt_results(*chunks)

    assert whole.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == len(PROMPT) - 1
    assert (whole.prompt_logprobs < 0).all()
    for name in ("prompt_logprobs", "prompt_alternative_token_ids", "prompt_alternative_logprobs"):
        found = [getattr(part, name) for part in parts if getattr(part, name) is not None]
        assert np.concatenate(found).tolist() == getattr(whole, name).tolist()


REFUSED = {
    "rule for token id 259; ids are 0 to 258": {"token_rules": TokenRules(banned_token_ids=array(259))},
    "rule for token id -5": {"token_rules": TokenRules(stop_token_ids=array(-5))},
    "mask of 3 bytes; one for 259 tokens has 33": {"token_rules": TokenRules(allowed_mask=b"abc")},
    "asks for 260 alternatives": {"num_prompt_logprobs": 260},
    "slot 0 asks for 300 alternatives": {"sampling": SamplingRow(num_logprobs=300)},
}


@each_row(*REFUSED)
def test_rules_beyond_the_vocabulary_are_refused_and_nothing_is_written(message: str) -> None:
    run = Run()
    entry = replace(admission(PROMPT, BLOCKS), **REFUSED[message])  # type: ignore[arg-type]

    with pytest.raises(InvalidStepError, match=message):
        run.step(TableDelta(admissions=(entry,), prefill_chunks=pairs((0, 7))))

    assert not run.worker.table.live.any()
