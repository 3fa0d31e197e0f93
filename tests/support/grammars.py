"""Outputs of the fake executor's byte tokens, followed by a grammar."""

from functools import cache

import numpy as np

from executor_svc.fake.tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, fake_tokenizer_files
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.grammar.matcher import MatcherTokenizer, OutputMatcher


@cache
def byte_matcher() -> MatcherTokenizer:
    """Return the matcher's part of the fake executor's tokenizer."""
    return MatcherTokenizer.load(fake_tokenizer_files(), (EOS_TOKEN_ID,), VOCAB_SIZE)


def num_followed(grammar: Grammar, text: str | list[int], matcher: MatcherTokenizer | None = None) -> tuple[int, bool]:
    """Return how many tokens of a text are allowed, one behind the other, and whether the output may end there."""
    tokenizer = matcher or byte_matcher()
    token_ids = list(text.encode()) if isinstance(text, str) else text
    output, row = OutputMatcher(tokenizer, grammar), np.zeros(tokenizer.num_mask_words, np.uint32)
    for place, token_id in enumerate([*token_ids, EOS_TOKEN_ID]):
        output.fill_mask(row)
        if not row[token_id // 32] >> token_id % 32 & 1:
            return place, False
        output.follow([*token_ids[: place + 1]])
    return len(token_ids), True


def is_followed(grammar: Grammar, text: str | list[int]) -> bool:
    """Return whether a text is a whole output."""
    return num_followed(grammar, text)[1]
