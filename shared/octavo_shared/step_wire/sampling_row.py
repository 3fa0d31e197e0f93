"""The sampling row of a slot, as a value and as a NumPy record.

Written by `make protos` from octavo/values/sampling_params_table.py; changes here are lost.
"""

from dataclasses import dataclass

import numpy as np

SAMPLING_ROW = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("seed", "<u8"),
        ("output_index", "<i4"),
        ("num_logprobs", "<i4"),
        ("num_candidates", "<i4"),
        ("typical_p", "<f4"),
        ("repetition_penalty", "<f4"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("min_tokens", "<i4"),
        ("no_repeat_ngram_size", "<i4"),
    ]
)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to sample one slot: numbers only, neutral by default. `top_k` 0: all tokens.

    `num_candidates` above 0 makes it a beam slot: nothing is sampled, the executor answers so many of
    the likeliest tokens, and the scheduler chooses (`TableDelta.appended_tokens`).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    output_index: int = 0
    num_logprobs: int = -1
    num_candidates: int = 0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    no_repeat_ngram_size: int = 0

    def as_tuple(self) -> tuple[float | int, ...]:
        """Return the values in the order of `SAMPLING_ROW`."""
        return (
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed,
            self.output_index,
            self.num_logprobs,
            self.num_candidates,
            self.typical_p,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.min_tokens,
            self.no_repeat_ngram_size,
        )
