"""Token rules between values and messages; `shared/wire.py` has the admissions that they are part of."""

import itertools

import numpy as np

from octavo.execution.v1 import step_pb2
from shared.errors import InvalidStepError
from shared.token_rules import NO_TOKEN, TokenRules, pad_words


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

    Raises: InvalidStepError: the lengths of banned words do not add up, or one has less than two tokens.
    """
    lengths, token_ids = list(message.banned_word_lengths), list(message.banned_word_token_ids)
    if sum(lengths) != len(token_ids) or any(length < 2 for length in lengths):
        raise InvalidStepError(f"banned words of {lengths} tokens, each 2 or more, have {len(token_ids)} tokens")
    ends = itertools.accumulate(lengths)
    return TokenRules(
        biased_token_ids=np.array(message.biased_token_ids, np.int32),
        biases=np.array(message.biases, np.float32),
        stop_token_ids=np.array(message.stop_token_ids, np.int32),
        banned_token_ids=np.array(message.banned_token_ids, np.int32),
        banned_words=pad_words(token_ids[end - length : end] for end, length in zip(ends, lengths, strict=True)),
        allowed_mask=message.allowed_mask if message.HasField("allowed_mask") else None,
    )
