"""The results of a request: alternatives of tokens, hypotheses, and why sequences end."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo_shared.step_wire.step import Int32Array

Float32Array = npt.NDArray[np.float32]


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The likeliest tokens in some places, the same number in each, likeliest first, one place after the other."""

    token_ids: list[int]
    logprobs: list[float]

    def extend(self, others: Alternatives) -> None:
        """Add the alternatives of the next places."""
        self.token_ids.extend(others.token_ids)
        self.logprobs.extend(others.logprobs)

    def since(self, begin: int, end: int | None = None) -> Alternatives:
        """Return a copy of the tokens from `begin` up to `end`."""
        return Alternatives(self.token_ids[begin:end], self.logprobs[begin:end])


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A continuation that ended: by an end token (STOP), which is its last token, or at the limit (LENGTH).

    `token_ids` and `logprobs` are [num_output_tokens]. `score` is the sum of `logprobs` over length ** length_penalty.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    score: float
    finish_reason: FinishReason
