"""Token rules between values and messages; `step_wire/wire.py` has the admissions that include them."""

import itertools

import numpy as np

from octavo.execution.v1 import step_pb2
from octavo_shared.errors import InvalidStepError
from octavo_shared.step_wire.token_rules import NO_TOKEN, TokenRules, pad_words

# Banned words become a rectangle as wide as the longest one: 4 MiB of it, where a scheduler needs 8 KiB.
MAX_WORD_CELLS = 2**20


def encode_rules(rules: TokenRules) -> step_pb2.TokenRules:
    """Turn token rules into their message."""
    words = [word[word != NO_TOKEN].tolist() for word in rules.banned_words]
    return step_pb2.TokenRules(
        biased_token_ids=rules.biased_token_ids.tolist(),
        biases=rules.biases.tolist(),
        stop_token_ids=rules.stop_token_ids.tolist(),
        banned_token_ids=rules.banned_token_ids.tolist(),
        banned_word_lengths=[len(word) for word in words],
        banned_word_token_ids=[token_id for word in words for token_id in word],
        allowed_mask=rules.allowed_mask,
    )


def decode_rules(message: step_pb2.TokenRules) -> TokenRules:
    """Turn a message into token rules.

    Raises: InvalidStepError: the lengths of banned words do not add up, one has less than two tokens, or they would
        take too much memory.
    """
    lengths, token_ids = list(message.banned_word_lengths), list(message.banned_word_token_ids)
    num_words, longest, num_tokens = len(lengths), max(lengths, default=0), sum(lengths)
    if num_tokens != len(token_ids) or any(length < 2 for length in lengths):
        raise InvalidStepError(
            f"{num_words} banned words of {num_tokens} tokens, each 2 or more, have {len(token_ids)} tokens"
        )
    if num_words * longest > MAX_WORD_CELLS:
        raise InvalidStepError(
            f"{num_words} banned words of up to {longest} tokens; number times length is at most {MAX_WORD_CELLS}"
        )
    ends = itertools.accumulate(lengths)
    return TokenRules(
        biased_token_ids=np.array(message.biased_token_ids, np.int32),
        biases=np.array(message.biases, np.float32),
        stop_token_ids=np.array(message.stop_token_ids, np.int32),
        banned_token_ids=np.array(message.banned_token_ids, np.int32),
        banned_words=pad_words(token_ids[end - length : end] for end, length in zip(ends, lengths, strict=True)),
        allowed_mask=message.allowed_mask if message.HasField("allowed_mask") else None,
    )
