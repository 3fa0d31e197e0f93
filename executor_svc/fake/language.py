"""The little language that the fake executor speaks: what follows a history, as a pure function of it.

A history is known by its 64-bit hash (`executor_svc/fake/cache.py`) and by the bytes that its last
character still lacks. Sampled tokens are drawn by hash. For beam search the language has a whole
distribution over the vocabulary after every history:

- The likeliest token is the token that a greedy row gets.
- Next come the other tokens that keep the text valid UTF-8, in an order that the history shuffles, and
  then the rest of the vocabulary, shuffled too.
- The end of the sequence has any rank with the chance `eos_probability`, the first one included; inside
  a character, and with chance 0, it is the last of all.
- The token of rank r, from 0, has a probability in proportion to (r + 1) ** -s. The history draws s
  from 0.5 to 2.5, so some histories are sure of what follows and others are not, and beams overtake
  each other. Log-probabilities fall strictly, and no two histories have the same ones.
"""

import numpy as np
import numpy.typing as npt

from executor_svc.fake.tokenizer import EOS_TOKEN_ID, VOCAB_SIZE
from executor_svc.sampler.sample_rows import uniforms
from octavo_shared.step_wire.step import BoolArray, Int32Array

# Raise it when what follows a history changes.
LANGUAGE_VERSION = 1

UInt64Array = npt.NDArray[np.uint64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

# What a number is drawn for; keeps the draws of one history apart.
_FOR_TOKEN, _FOR_EOS, _FOR_RANK, _FOR_EXPONENT = 0, 1, 3, 4

# First bytes of UTF-8 characters and how many bytes follow. All of 0x90 to 0xBF may follow each.
_LEAD_BYTES = {0xC3: 1, 0xE4: 2, 0xF0: 3}
_FOLLOWING_BYTES = range(0x90, 0xC0)
_PRINTABLE_ASCII = range(0x20, 0x7F)
# Share of new characters of 1, 2, 3 and 4 bytes, summed up.
_CHARACTER_SHARES = (0.94, 0.97, 0.99, 1.0)


class FakeLanguage:
    """Says what follows a history. All arrays have one entry a sample row, [num_rows].

    Args:
        eos_probability: Chance that a token is the end of the sequence, 0 to 1.
    """

    def __init__(self, eos_probability: float) -> None:
        self._eos_probability = eos_probability
        self._num_following = np.zeros(VOCAB_SIZE, np.int32)
        self._num_following[list(_LEAD_BYTES)] = list(_LEAD_BYTES.values())

    def missing_bytes(self, table_token_ids: Int32Array, slots: Int32Array, positions: Int32Array) -> Int32Array:
        """Return how many bytes the last character before each of `positions` still lacks.

        `table_token_ids` is [max_num_seqs, max_model_len], as in the batch table.
        """
        missing = np.zeros(len(slots), np.int32)
        for distance in (1, 2, 3):
            lead = self._num_following[table_token_ids[slots, np.maximum(positions - distance, 0)]]
            missing = np.maximum(missing, np.where(positions >= distance, lead - (distance - 1), 0))
        return missing

    def sample(self, histories: UInt64Array, num_missing: Int32Array, sampling: npt.NDArray[np.void]) -> Int32Array:
        """Return token ids; rows that are not greedy mix in their seed and output index, so that these differ."""
        greedy = sampling["temperature"] == 0
        states = np.where(greedy, histories, histories ^ sampling["seed"])
        output_indices = np.where(greedy, 0, sampling["output_index"]).astype(np.int32)
        token_ids = _next_bytes(_draw(states, output_indices, _FOR_TOKEN), num_missing)
        ends = (num_missing == 0) & (_draw(states, output_indices, _FOR_EOS) < self._eos_probability)
        token_ids[ends] = EOS_TOKEN_ID
        return token_ids

    def rank(self, histories: UInt64Array, num_missing: Int32Array) -> tuple[Int32Array, Float32Array]:
        """Return the vocabulary by falling probability, and the log-probabilities, [num_rows, VOCAB_SIZE] both."""
        num_rows, no_output = len(histories), np.zeros(len(histories), np.int32)
        tokens = np.tile(np.arange(VOCAB_SIZE, dtype=np.int32), num_rows)
        keys = _draw(np.repeat(histories, VOCAB_SIZE), tokens, _FOR_RANK).reshape(num_rows, VOCAB_SIZE)
        keys += np.where(num_missing[:, None] > 0, ~_bytes_mask(_FOLLOWING_BYTES), ~_bytes_mask(_first_bytes()))
        keys[np.arange(num_rows), _next_bytes(_draw(histories, no_output, _FOR_TOKEN), num_missing)] = -1
        keys[:, EOS_TOKEN_ID] = np.inf
        eos_rank = self._eos_rank(_draw(histories, no_output, _FOR_EOS), num_missing)[:, None]
        ranks = np.arange(VOCAB_SIZE)
        others = np.take_along_axis(np.argsort(keys), ranks - (ranks > eos_rank), 1)
        token_ids = np.where(ranks == eos_rank, EOS_TOKEN_ID, others).astype(np.int32)
        exponents = 0.5 + 2 * _draw(histories, no_output, _FOR_EXPONENT)
        scores = -exponents[:, None] * np.log(ranks + 1)
        return token_ids, (scores - np.log(np.exp(scores).sum(1, keepdims=True))).astype(np.float32)

    def logprobs(self, histories: UInt64Array, num_missing: Int32Array) -> Float32Array:
        """Return the log-probability of every token, by token id, [num_rows, VOCAB_SIZE]."""
        token_ids, ranked = self.rank(histories, num_missing)
        result = np.empty_like(ranked)
        np.put_along_axis(result, token_ids, ranked, axis=1)
        return result

    def _eos_rank(self, draws: Float64Array, num_missing: Int32Array) -> npt.NDArray[np.int64]:
        """Return the rank of the end of the sequence: 0 where `sample` of a greedy row would end."""
        last = VOCAB_SIZE - 1
        if self._eos_probability == 0:
            return np.full(len(draws), last)
        ranks = np.minimum(draws / self._eos_probability, last).astype(np.int64)
        return np.where(num_missing > 0, last, ranks)


def _draw(states: UInt64Array, output_indices: Int32Array, purpose: int) -> Float64Array:
    return uniforms(states, output_indices, np.full(len(states), purpose, np.int32))


def _first_bytes() -> list[int]:
    return [*_PRINTABLE_ASCII, *_LEAD_BYTES]


def _bytes_mask(values: range | list[int]) -> BoolArray:
    """Return which tokens are among the bytes `values`, [VOCAB_SIZE]."""
    mask = np.zeros(VOCAB_SIZE, np.bool_)
    mask[list(values)] = True
    return mask


def _next_bytes(draws: Float64Array, num_missing: Int32Array) -> Int32Array:
    """Return the next byte of each row: mostly printable ASCII, always valid UTF-8."""
    kinds = np.searchsorted(_CHARACTER_SHARES, draws, side="right")
    leads = np.array([0, *_LEAD_BYTES])[kinds]
    # The low bits of a draw choose within a kind; the high bits chose the kind.
    fractions = (draws * 2**20) % 1.0
    first_bytes = np.where(kinds == 0, 0x20 + (fractions * 95).astype(np.int32), leads)
    following_bytes = 0x90 + (fractions * 48).astype(np.int32)
    return np.where(num_missing > 0, following_bytes, first_bytes).astype(np.int32)
