"""Tokens in log-probabilities: their names, their bytes, and where they begin in the text."""

import math
from collections.abc import Sequence

import pytest

from scheduler_svc.front.openai.logprobs import CompletionLogprobs, TokenLogprobs, TokenTexts
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.request.outputs import Alternatives
from tests.support.each_row import each_row
from tests.support.tokenizers import byte_fallback_backend, byte_level_backend, make_tokenizer

NOTHING = Alternatives([], [])


@pytest.fixture
def with_bytes() -> Tokenizer:
    """A tokenizer that writes a character without a token as bytes, such as that of Llama 2."""
    return make_tokenizer(byte_fallback_backend(["▁a", "a", "▁你"]))


def ids_of(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[int]:
    ids = [tokenizer.id_of(token) for token in tokens]
    assert None not in ids
    return [token_id for token_id in ids if token_id is not None]


def test_a_token_has_the_text_and_the_bytes_that_it_adds(with_bytes: Tokenizer) -> None:
    texts = TokenTexts(with_bytes)
    tokens = {"▁a": " a", "a": "a", "<0x61>": "a", "▁你": " 你", "<0xE4>": "bytes:\\xe4"}
    for token_id, text in zip(ids_of(with_bytes, list(tokens)), tokens.values(), strict=True):
        assert texts.text(token_id) == text
        content = b"\xe4" if text.startswith("bytes:") else text.encode()
        assert bytes(texts.content(token_id)) == content


@each_row("é€🦊a", "a", "🦊")
def test_tokens_of_one_character_begin_where_it_does(text: str) -> None:
    tokenizer = make_tokenizer(byte_level_backend())
    ids = tokenizer.encode(text)
    tokens = TokenLogprobs(TokenTexts(tokenizer), shows_ids=False)
    told = CompletionLogprobs(tokens, 0, skips_special_tokens=True).of(ids, [-1.0] * len(ids), NOTHING)
    assert told["text_offset"] == [place for place, character in enumerate(text) for _ in character.encode()]
    assert told["token_logprobs"] == [-1.0] * len(ids)


def test_of_two_tokens_with_one_text_the_likeliest_is_told(with_bytes: Tokenizer) -> None:
    [letter, byte, other] = ids_of(with_bytes, ["a", "<0x61>", "▁你"])
    tokens = TokenLogprobs(TokenTexts(with_bytes), shows_ids=False)
    both = Alternatives([letter, byte] * 2, [-0.5, -2.0] * 2)
    told = CompletionLogprobs(tokens, 2, skips_special_tokens=True).of([byte, other], [-2.0, -math.inf], both)
    assert told["top_logprobs"] == [{"a": -0.5}, {"a": -0.5, " 你": -9999.0}]
    assert told["token_logprobs"] == [-2.0, -9999.0]
