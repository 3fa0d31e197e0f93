"""The largest values of rows, found by blocks: a pass over block maxima costs far less than one over values.

The largest `count` values of a row lie in the `count` blocks with the largest maxima, so only these are searched.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.device.transfer import index_to_device
from executor_svc.sampler.interface import Alternatives, Float32Array
from octavo_shared.step_wire.step import Int32Array

BLOCK = 32
FLOOR = -80.0


def block_maxima(values: torch.Tensor) -> torch.Tensor:
    """Return the largest of every `BLOCK` values of [num_rows, num_values], the last block maybe shorter."""
    num_full = values.shape[1] // BLOCK
    maxima = values[:, : num_full * BLOCK].view(len(values), num_full, BLOCK).amax(-1)
    rest = values[:, num_full * BLOCK :]
    return torch.cat((maxima, rest.amax(-1, keepdim=True)), 1) if rest.shape[1] else maxima


def block_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of every `BLOCK` values of [num_rows, num_values], float32 made float64.

    The same blocks whatever the number of rows, so that a row alone has the same sums to the last bit.
    """
    num_full = values.shape[1] // BLOCK
    sums = values[:, : num_full * BLOCK].view(len(values), num_full, BLOCK).sum(-1)
    rest = values[:, num_full * BLOCK :]
    return (torch.cat((sums, rest.sum(-1, keepdim=True)), 1) if rest.shape[1] else sums).double()


def weights_of(shifted: torch.Tensor) -> torch.Tensor:
    """Return exp of scores that are shifted so that the largest of a row is 0, in their memory.

    What is below `FLOOR` gets 0: it is lost in the sum of a row anyway, and exp of -inf takes fifty times as
    long as that of a number.
    """
    return torch.threshold_(shifted.clamp_(min=FLOOR).exp_(), 2 * math.exp(FLOOR), 0.0)


def largest_index(values: torch.Tensor) -> torch.Tensor:
    """Return the index of the largest of each row, [num_rows]; of equal ones the first.

    -1: the row has NaN or infinity, or nothing but -infinity.
    """
    blocks = block_maxima(values).argmax(-1, keepdim=True)
    inside, indices = _look_into(values, blocks)
    places = inside.argmax(-1, keepdim=True)  # NaN counts as largest
    is_finite = inside.gather(1, places).isfinite()
    return torch.where(is_finite, indices.gather(1, places), -1)[:, 0]


def are_finite(values: torch.Tensor) -> torch.Tensor:
    """Return which rows have neither NaN nor infinity, and more than -infinity, [num_rows]."""
    return block_maxima(values).amax(-1).isfinite()


def largest(values: torch.Tensor, count: int, maxima: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest of each row, falling, and their indices, [num_rows, count] both.

    Equal ones come in any order, and if not all of them fit, any of them. `maxima` are the maxima of blocks, if known.
    """
    num_values = values.shape[1]
    if count * BLOCK + num_values // BLOCK > num_values // 2:
        if count > num_values // 8:
            ordered = values.sort(dim=-1, descending=True, stable=True)
            return ordered.values[:, :count], ordered.indices[:, :count]
        found = values.topk(count, dim=-1)
        return found.values, found.indices
    maxima = block_maxima(values) if maxima is None else maxima
    inside, indices = _look_into(values, maxima.topk(count, dim=-1, sorted=False).indices)
    found = inside.topk(count, dim=-1)
    return found.values, indices.gather(1, found.indices)


def likeliest(
    values: torch.Tensor, count: int, maxima: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `largest` does, but equal ones by index, and if not all of them fit, the first.

    The order is that of numbers in which no two are equal, so that nothing has to be looked at on the way. Blocks are
    found alike: of those with equal maxima the first ones have the first of the equal values.
    """
    num_values = values.shape[1]
    if count * BLOCK + num_values // BLOCK > num_values // 2:
        found = _keys(values).topk(count, dim=-1).indices
        return values.gather(1, found), found
    maxima = block_maxima(values) if maxima is None else maxima
    blocks = _keys(maxima).topk(count, dim=-1).indices.sort(dim=-1).values
    inside, indices = _look_into(values, blocks)
    found = _keys(inside).topk(count, dim=-1).indices
    return inside.gather(1, found), indices.gather(1, found)


def _keys(values: torch.Tensor) -> torch.Tensor:
    """Return int64 that order as [num_rows, num_values] float32, of equal ones the first is the largest.

    NaN counts as infinity.
    """
    bits = torch.where(values.isnan(), torch.inf, values + 0.0).view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) - torch.arange(values.shape[1], device=values.device)


def _look_into(values: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of blocks, [num_rows, num_blocks], and their indices; -inf behind the end of a row."""
    offsets = torch.arange(BLOCK, device=values.device)
    indices = (blocks[:, :, None] * BLOCK + offsets).flatten(1)
    last = values.shape[1] - 1
    if values.shape[1] % BLOCK == 0:
        return values.gather(1, indices), indices
    beyond = indices > last
    return values.gather(1, indices.clamp_(max=last)).masked_fill_(beyond, -torch.inf), indices


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


@dataclass(frozen=True, slots=True)
class Ranked:
    """The likeliest tokens of some rows where the logits are, each row with as many as the most that one wants."""

    token_ids: torch.Tensor  # [num_rows, most] int64, likeliest first, equal ones by token id
    logprobs: torch.Tensor  # the same, float32
    counts: Int32Array  # how many each row wants, [num_rows]


def logprobs_of(
    logits: torch.Tensor, rows: Int32Array, token_ids: torch.Tensor, num_alternatives: Int32Array
) -> tuple[torch.Tensor, Ranked | None]:
    """Return the log-probability of one token in each of some rows of logits, and of the likeliest, without waiting.

    Args:
        logits: Raw, [num_logit_rows, vocab_size] float32.
        rows: Row of `logits`, [num_rows].
        token_ids: The token, [num_rows] int64, where the logits are.
        num_alternatives: How many of the likeliest each row wants, [num_rows], at most vocab_size. None is
            returned for them if no row wants any.

    Returns:
        [num_rows] float32, and the likeliest; NaN where a row is not finite.
    """
    distinct, inverse = np.unique(rows, return_inverse=True)
    selected, of_rows = rows_of(logits, distinct), index_to_device(inverse, logits.device)
    maxima = block_maxima(selected)
    totals = totals_of_rows(selected, maxima)
    logprobs = (selected[of_rows, token_ids].double() - totals[of_rows, 0]).float()
    most = int(num_alternatives.max())
    if most <= 0:
        return logprobs, None
    values, likeliest_ids = likeliest(selected, most, maxima)
    return logprobs, Ranked(likeliest_ids[of_rows], (values - totals).float()[of_rows], num_alternatives)


def take_wanted(token_ids: npt.NDArray[np.integer], logprobs: Float32Array, counts: Int32Array) -> Alternatives:
    """Return the first so many of each row, joined; on the host, shapes as in `Ranked`."""
    wanted = np.arange(token_ids.shape[1]) < counts[:, None]
    return Alternatives(token_ids[wanted].astype(np.int32), logprobs[wanted])


def rows_of(logits: torch.Tensor, rows: npt.NDArray[np.integer]) -> torch.Tensor:
    """Return some rows of a matrix; without a copy if they lie side by side."""
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return logits[rows[0] : rows[0] + len(rows)]
    return logits.index_select(0, index_to_device(rows, logits.device))
