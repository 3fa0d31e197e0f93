"""Which tokens a sequence may not get, or gets more likely: the sampling parameters that are no single number.

Rules travel with the admission, once, and belong to all sequences of a group: a fork has its parent's.
Next: `octavo_shared/step_wire/step.py`, where they are part of an `Admission`.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

# Fills up a word that is shorter than the longest one, and the place before the beginning of a history.
NO_TOKEN = -1

# Limits of a request.
MAX_BIASED_TOKENS = 300
MAX_STOP_TOKEN_IDS = 64
MAX_BANNED_TOKENS = 1024
MAX_BANNED_WORDS = 64
MAX_BANNED_WORD_TOKENS = 16

_NO_TOKENS: Int32Array = np.empty(0, np.int32)
_NO_BIASES: Float32Array = np.empty(0, np.float32)
_NO_WORDS: Int32Array = np.empty((0, 2), np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class TokenRules:
    """Rules on single tokens; the arrays are never written to. Token ids of one field are distinct.

    Attributes:
        biased_token_ids: Tokens whose logits get a bias, [num_biases].
        biases: The biases, [num_biases], finite.
        stop_token_ids: Tokens that would end the output, kept out while it is shorter than `min_tokens`, [any].
        banned_token_ids: Tokens that are never sampled, [any].
        banned_words: Sequences of two tokens or more that are never sampled, [num_words, longest], right-aligned
            behind `NO_TOKEN`.
        allowed_mask: Bit i of byte j stands for token 8 * j + i: only tokens with a 1 are sampled; as many bytes
            as the vocabulary needs, the bits behind it 0. None: all tokens are allowed.
    """

    biased_token_ids: Int32Array = field(default_factory=lambda: _NO_TOKENS)
    biases: Float32Array = field(default_factory=lambda: _NO_BIASES)
    stop_token_ids: Int32Array = field(default_factory=lambda: _NO_TOKENS)
    banned_token_ids: Int32Array = field(default_factory=lambda: _NO_TOKENS)
    banned_words: Int32Array = field(default_factory=lambda: _NO_WORDS)
    allowed_mask: bytes | None = None

    @property
    def always_apply(self) -> bool:
        """Whether the rules change logits whatever the length of the output is."""
        return bool(
            len(self.biased_token_ids)
            or len(self.banned_token_ids)
            or len(self.banned_words)
            or self.allowed_mask is not None
        )

    @property
    def is_neutral(self) -> bool:
        """Whether the rules change nothing at all."""
        return not (self.always_apply or len(self.stop_token_ids))

    def token_ids(self) -> Int32Array:
        """Return all tokens in the rules, without the padding of words, [any]."""
        words = self.banned_words
        return np.concatenate(
            (self.biased_token_ids, self.stop_token_ids, self.banned_token_ids, words[words != NO_TOKEN])
        )

    def content(self) -> bytes:
        """Return the rules as bytes; equal rules have equal bytes."""
        arrays = (self.biased_token_ids, self.biases, self.stop_token_ids, self.banned_token_ids)
        parts = [array.tobytes() for array in arrays]
        parts += [word[word != NO_TOKEN].tobytes() for word in self.banned_words]
        parts.append(b"" if self.allowed_mask is None else b"\1" + self.allowed_mask)
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def pad_words(words: Iterable[Seq[int]]) -> Int32Array:
    """Return words, each of two token ids or more, as `TokenRules.banned_words`."""
    listed = list(words)
    if not listed:
        return _NO_WORDS
    longest = max(len(word) for word in listed)
    return np.array([[NO_TOKEN] * (longest - len(word)) + list(word) for word in listed], np.int32)


def pack_mask(token_ids: Int32Array, vocab_size: int) -> bytes:
    """Return the mask that allows `token_ids`, [any], of a vocabulary: `TokenRules.allowed_mask`."""
    allowed = np.zeros(vocab_size, np.bool_)
    allowed[token_ids] = True
    return np.packbits(allowed, bitorder="little").tobytes()


def num_mask_bytes(vocab_size: int) -> int:
    """Return the length of a mask of a vocabulary."""
    return -(-vocab_size // 8)
