"""Log-probabilities in torch: log-softmax of the raw float32 logits, of chosen tokens and of the likeliest ones.

All are the logit less `totals_of_rows`, in float64, then rounded: the same token always has the same log-probability.
"""

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.sampler.interface import Alternatives, Float32Array
from executor_svc.sampler.likeliest import block_maxima, block_sums, likeliest, weights_of
from octavo_shared.step_wire.step import Int32Array


def log_totals(
    scores: torch.Tensor, temperature: torch.Tensor | None = None, maxima: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the logarithm of the sum of exp(scores / temperature) of each row, [num_rows, 1] float64.

    Args:
        scores: [num_rows, vocab_size] float32, not all -inf in any row; unchanged.
        temperature: [num_rows, 1] float32; None: 1.
        maxima: The maxima of the blocks of `scores`, if they are known.
    """
    top = (block_maxima(scores) if maxima is None else maxima).amax(-1, keepdim=True)
    shifted = scores - top
    if temperature is not None:
        shifted.div_(temperature)
        top = top.div(temperature)
    return block_sums(weights_of(shifted)).sum(-1, keepdim=True).log_() + top


def totals_of_rows(logits: torch.Tensor, maxima: torch.Tensor | None = None) -> torch.Tensor:
    """Return `log_totals` of each row as if it were alone: on a GPU torch's sums follow the number of rows."""
    if not logits.is_cuda:
        return log_totals(logits, maxima=maxima)
    from executor_svc.triton_kernels.log_total import log_totals_on_device  # Triton takes seconds to import

    return log_totals_on_device(logits)


def log_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of every token, [num_rows, vocab_size] float32."""
    return (scores - totals_of_rows(scores)).float()


def logprobs_of(
    logits: torch.Tensor,
    rows: Int32Array,
    token_ids: Int32Array,
    num_alternatives: Int32Array,
) -> tuple[Float32Array, Alternatives | None]:
    """Return the log-probability of one token in each of some rows of logits, [num_rows], and of the likeliest.

    Args:
        logits: Raw, [num_logit_rows, vocab_size] float32.
        rows: Row of `logits`, [num_rows].
        token_ids: The token, [num_rows].
        num_alternatives: How many of the likeliest each row wants, [num_rows], at most vocab_size. None is
            returned for them if no row wants any.
    """
    distinct, inverse = np.unique(rows, return_inverse=True)
    selected = rows_of(logits, distinct)
    maxima = block_maxima(selected)
    totals = totals_of_rows(selected, maxima)
    chosen = logits[_index(rows, logits.device), _index(token_ids, logits.device)].cpu().numpy()
    logprobs = (chosen - totals[:, 0].cpu().numpy()[inverse]).astype(np.float32)
    most = int(num_alternatives.max())
    if most <= 0:
        return logprobs, None
    values, likeliest_ids = likeliest(selected, most, maxima)
    likeliest_logprobs = (values - totals).float()
    return logprobs, take_first(
        likeliest_ids[_index(inverse, logits.device)],
        likeliest_logprobs[_index(inverse, logits.device)],
        num_alternatives,
    )


def take_first(token_ids: torch.Tensor, logprobs: torch.Tensor, counts: Int32Array) -> Alternatives:
    """Return the first so many of each row, [num_rows, most] tensors and [num_rows] counts, joined."""
    wanted = np.arange(token_ids.shape[1]) < counts[:, None]
    return Alternatives(token_ids.cpu().numpy()[wanted].astype(np.int32), logprobs.cpu().numpy()[wanted])


def rows_of(logits: torch.Tensor, rows: npt.NDArray[np.integer]) -> torch.Tensor:
    """Return some rows of a matrix; without a copy if they lie side by side."""
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return logits[rows[0] : rows[0] + len(rows)]
    return logits.index_select(0, _index(rows, logits.device))


def _index(values: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)
