"""A language model without weights, and the loop that runs a beam search on it or on any other model.

`HashedModel` turns a seed and the tokens so far into logits by hashing: the same history has the same
logits everywhere, different ones have unrelated logits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.beam_search import BeamSearch, Candidates
from scheduler_svc.request.outputs import Float32Array, Hypothesis

# Log-probabilities of the next token after each history, [num_histories, vocab_size].
NextLogprobs = Callable[[npt.NDArray[np.int64]], Float32Array]


@dataclass(frozen=True)
class HashedModel:
    """Logits between 0 and `spread`; end tokens get `end_bias` more; only `num_levels` different ones if not 0."""

    seed: int
    vocab_size: int
    spread: float = 4.0
    end_token_ids: tuple[int, ...] = ()
    end_bias: float = 0.0
    num_levels: int = 0

    def logits(self, histories: npt.NDArray[np.int64]) -> Float32Array:
        """Return the logits of the next token, [num_histories, vocab_size]."""
        state = np.full(len(histories), self.seed, np.uint64)
        for token_ids in histories.T:
            state = _mixed(state ^ token_ids.astype(np.uint64))
        hashes = _mixed(state[:, None] ^ np.arange(self.vocab_size, dtype=np.uint64))
        uniform = (hashes >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
        if self.num_levels:
            uniform = np.floor(uniform * np.float32(self.num_levels)) / np.float32(self.num_levels)
        logits = uniform * np.float32(self.spread)
        logits[:, list(self.end_token_ids)] += np.float32(self.end_bias)
        return logits

    def logprobs(self, histories: npt.NDArray[np.int64]) -> Float32Array:
        """Return the log-probabilities of the next token, [num_histories, vocab_size]."""
        logits = self.logits(histories)
        shifted = logits - logits.max(axis=1, keepdims=True)
        normalized: Float32Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return normalized


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread each number over all bits (the output function of SplitMix64)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def live_histories(search: BeamSearch, prompt: list[int]) -> npt.NDArray[np.int64]:
    """Return prompt and output of the live beams, [num_live, num_tokens]."""
    return np.stack([np.concatenate((prompt, beam.token_ids)) for beam in search.live]).astype(np.int64)


def top_candidates(logprobs: Float32Array, num_candidates: int) -> list[Candidates]:
    """Return the best candidates of each row as an executor does: most likely first, equal ones by token id."""
    token_ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :num_candidates]
    best = np.take_along_axis(logprobs, token_ids, axis=1)
    return [Candidates(ids, row) for ids, row in zip(token_ids.astype(np.int32), best, strict=True)]


def run_search(search: BeamSearch, prompt: list[int], next_logprobs: NextLogprobs) -> list[Hypothesis]:
    """Run a search to its end."""
    while not search.is_over:
        logprobs = next_logprobs(live_histories(search, prompt))
        search.advance(top_candidates(logprobs, search.num_candidates))
    return search.finished_hypotheses()
