"""What the sampler and its backends agree on: three functions of logits, and what they return.

`NativeBackend` of `sampler.py` does all of it in C, on a CPU; `torch_backend.py` in torch, on any device. Both leave
the logits as they are. A row's result depends on that row alone, to the last bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.sampler.sample_rows import SampleRows
from octavo_shared.step_wire.step import Int32Array

Float32Array = npt.NDArray[np.float32]

# In place of a token; the same in likeliest.h.
NOT_FINITE = -1

# (logits, row of the logits of each sample row, how each is sampled, its draw) -> token ids, and 1 for each row that is
# not finite, [2, num_rows] int64 on the device.
DrawOnDevice = Callable[[torch.Tensor, Int32Array, npt.NDArray[np.void], npt.NDArray[np.float64]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The likeliest tokens of some rows, one row after the other, likeliest first, equal ones by token id."""

    token_ids: Int32Array  # [sum over the rows of how many each wants]
    logprobs: Float32Array  # the same


class SamplingBackend(Protocol):
    """From logits, [num_logit_rows, vocab_size] float32, to NumPy arrays.

    `logit_rows` is the row of the logits that each sample row uses, [num_rows].
    """

    def choose(self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows) -> Int32Array:
        """Return a token for each row, [num_rows]: processors, then the likeliest or a draw of what the filters leave.

        `NOT_FINITE` in place of a token: the logits are NaN or infinity somewhere, or no token may come.
        """

    def logprobs(
        self, logits: torch.Tensor, logit_rows: Int32Array, token_ids: Int32Array, num_alternatives: Int32Array
    ) -> tuple[Float32Array, Alternatives | None]:
        """Return the log-probability of one token in each row, [num_rows], and of the likeliest; NaN: it is not finite.

        Args:
            logits: Raw.
            logit_rows: See the class.
            token_ids: The token, [num_rows].
            num_alternatives: How many of the likeliest each row wants, [num_rows], at most vocab_size. None is
                returned for them if no row wants any.
        """

    def candidates(
        self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, num_candidates: Int32Array
    ) -> Alternatives:
        """Return the likeliest tokens of beam rows, as transformers' beam search has them.

        The processors work on the log-probabilities, and nothing is normalised after them; a token that may not come
        has -inf. If the first one of a row is no number, the row is not finite. `num_candidates` is [num_rows], at most
        vocab_size.
        """


def join_alternatives(parts: Sequence[Alternatives]) -> Alternatives | None:
    """Return the alternatives of all rows; None if there is no part."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    return Alternatives(
        np.concatenate([part.token_ids for part in parts]), np.concatenate([part.logprobs for part in parts])
    )
