"""What names single tokens is checked, with the numbers, and becomes the executor's rules."""

import numpy as np
import pytest

from executor_svc.fake.tokenizer import fake_tokenizer_files
from octavo.generation.v1 import generation_pb2
from octavo_shared.errors import InvalidFieldError
from octavo_shared.step_wire.token_rules import NO_TOKEN, TokenRules, pack_mask
from scheduler_svc.front.api.params_validation import token_rules, tokenize_words
from scheduler_svc.front.api.request_limits import RequestLimits
from scheduler_svc.front.text.tokenizer import Tokenizer
from tests.support.each_row import each_row

VOCAB_SIZE, EOS = 20, 9
LIMITS = RequestLimits(64, 64, VOCAB_SIZE, 8, 4, eos_token_ids=(EOS,))


def rules_of(words: list[list[int]] | None = None, **params: object) -> TokenRules:
    rules = token_rules(generation_pb2.SamplingParams(**params), words or [], LIMITS)  # type: ignore[arg-type]
    assert rules is not None
    return rules


def biases(*pairs: tuple[int, float]) -> list[generation_pb2.LogitBias]:
    return [generation_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in pairs]


def test_a_request_without_rules_has_none() -> None:
    assert token_rules(generation_pb2.SamplingParams(stop_token_ids=[3], max_tokens=5), [], LIMITS) is None


def test_rules_hold_what_was_asked_for() -> None:
    rules = rules_of([[4, 5], [6], [1, 2, 3]], banned_token_ids=[8, 7, 8], logit_bias=biases((3, 0.5), (1, -100)))

    assert rules.biased_token_ids.tolist() == [3, 1]
    assert rules.biases.tolist() == [0.5, -100.0]
    assert rules.banned_token_ids.tolist() == [6, 7, 8]
    assert rules.banned_words.tolist() == [[NO_TOKEN, 4, 5], [1, 2, 3]]
    assert rules.allowed_mask is None
    assert rules.stop_token_ids.tolist() == []


def test_allowed_tokens_are_bits() -> None:
    rules = rules_of(allowed_token_ids=[0, 9, 19])

    assert rules.allowed_mask == b"\x01\x02\x08" == pack_mask(np.array([0, 9, 19], np.int32), VOCAB_SIZE)


@each_row((False, [3, EOS]), (True, [3]))
def test_min_tokens_keeps_out_what_would_end_the_output(ignore_eos: bool, expected: list[int]) -> None:
    rules = rules_of(min_tokens=2, stop_token_ids=[3], ignore_eos=ignore_eos)

    assert rules.stop_token_ids.tolist() == expected


def test_a_word_that_is_an_end_of_sequence_token_bans_nothing_but_a_banned_token_does() -> None:
    assert token_rules(generation_pb2.SamplingParams(), [[EOS]], LIMITS) is None
    assert rules_of(banned_token_ids=[EOS]).banned_token_ids.tolist() == [EOS]


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "bias of an unknown token": ({"logit_bias": biases((20, 1))}, "logit_bias is a list with token id 20; it must be"),
    "bias of no number": (
        {"logit_bias": biases((1, float("nan")))},
        "logit_bias is a list with bias nan for token id 1",
    ),
    "two biases": ({"logit_bias": biases((1, 1), (1, 2))}, "logit_bias is a list with a token twice"),
    "many biases": ({"logit_bias": biases(*[(1, 1.0)] * 301)}, "logit_bias is 301 ids long; it must be at most 300"),
    "many banned": ({"banned_token_ids": [1] * 1025}, "banned_token_ids is 1025 ids long; it must be at most 1024"),
    "banned unknown": ({"banned_token_ids": [-1]}, "banned_token_ids is a list with token id -1"),
    "allowed unknown": ({"allowed_token_ids": [20]}, "allowed_token_ids is a list with token id 20"),
    "nothing left": ({"allowed_token_ids": [1], "banned_token_ids": [1]}, "allowed_token_ids is 1 ids long"),
    "all banned": ({"banned_token_ids": list(range(20))}, "allowed_token_ids is empty"),
    "only stops": ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids is 1 ids long"),
}


@each_row(*REFUSED)
def test_what_is_wrong_is_refused_with_field_and_value(name: str) -> None:
    params, message = REFUSED[name]

    with pytest.raises(InvalidFieldError, match=f"^sampling_params.{message}"):
        rules_of(None, **params)


def test_a_word_may_not_take_the_last_allowed_token() -> None:
    with pytest.raises(InvalidFieldError, match="at least one allowed token"):
        rules_of([[3, 1]], allowed_token_ids=[1])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(fake_tokenizer_files())


def test_words_are_tokenized_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    words = tokenize_words(generation_pb2.SamplingParams(banned_words=["ab", " ab"]), tokenizer)

    assert words == [[97, 98], [32, 97, 98]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([""], "a list with a word of 0 characters"),
        (["a" * 16 + "b"], "a list with a word of 17 tokens; it must be words of 1 to 16 tokens"),
        (["a"] * 65, "banned_words is 65 words; it must be at most 64 words"),
    ],
)
def test_words_that_are_too_many_or_too_long_are_refused(words: list[str], message: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        tokenize_words(generation_pb2.SamplingParams(banned_words=words), tokenizer)
