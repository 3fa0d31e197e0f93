"""Prompts of given lengths: random token ids, or random words, maybe behind one of a few shared prefixes."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

# Short and common: nearly every tokenizer has one token for each, with the space in front of it.
_WORDS_IN_A_ROW = (
    "about after again air all also always and animal another answer any are area ask away back ball base bed "
    "before began being best better big bird black blue boat body book both box boy bring build but call came can "
    "car care case cat change children city class clear close cold color come common could country course cut dark "
    "day did different do does dog done door down draw dry each early earth east easy eat end enough even ever "
    "every example eye face fact fall family far farm fast father feel feet few field find fine fire first fish "
    "five food foot for force form found four free friend from front full game gave get girl give go gold good "
    "got great green ground group grow had half hand hard has have head hear help her here high him his hold home "
    "horse hot hour house how idea if in inch is it just keep kind king know land large last late"
)
WORDS = _WORDS_IN_A_ROW.split()

# What a generator is for; together with the seed it says what comes out of it.
STREAM_ARRIVALS, STREAM_INPUT_LENGTHS, STREAM_OUTPUT_LENGTHS, STREAM_PREFIX, STREAM_PROMPT = range(5)


def ordinary_token_ids(vocab_size: int) -> range:
    """Return the middle three quarters of a vocabulary: special tokens are at one of its ends."""
    return range(vocab_size // 8, max(vocab_size - vocab_size // 8, vocab_size // 8 + 1))


class Prompts:
    """Makes the prompts of a load; each depends on its arguments only, not on those made before.

    Args:
        token_ids: Which ids prompts are made of; None: they are text of `WORDS`.
        seed: Of the whole load.
        phase: Equal seeds give other prompts in another phase; the shared prefixes are those of the seed.
        prefix_len: Tokens, or words, that many prompts begin with.
        num_prefixes: How many such beginnings there are; each prompt has one of them, chosen at random.
    """

    def __init__(
        self, token_ids: range | None, *, seed: int, phase: int = 0, prefix_len: int = 0, num_prefixes: int = 1
    ) -> None:
        self._range = range(len(WORDS)) if token_ids is None else token_ids
        self._is_text = token_ids is None
        self._seed = seed
        self._phase = phase
        self._prefix_len = prefix_len
        self._num_prefixes = num_prefixes
        self._prefix = cache(self._make_prefix)

    def make(self, index: int, length: int) -> str | list[int]:
        """Return the prompt of a request: the shared prefix and so many tokens, or words, of its own."""
        generator = np.random.default_rng([self._seed, self._phase, STREAM_PROMPT, index])
        ids = self._draw(generator, length)
        if self._prefix_len:
            ids = np.concatenate([self._prefix(int(generator.integers(self._num_prefixes))), ids])
        values: list[int] = ids.tolist()
        return " ".join(WORDS[value] for value in values) if self._is_text else values

    def _make_prefix(self, number: int) -> NDArray[np.int64]:
        return self._draw(np.random.default_rng([self._seed, 0, STREAM_PREFIX, number]), self._prefix_len)

    def _draw(self, generator: np.random.Generator, length: int) -> NDArray[np.int64]:
        return generator.integers(self._range.start, self._range.stop, length)
