"""The largest values of rows, found by blocks: a pass over block maxima costs far less than one over values.

The largest `count` values of a row lie in the `count` blocks with the largest maxima, so only these are searched.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

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
    """Return what `largest` does, but equal ones by index, and if not all of them fit, the first."""
    num_values = values.shape[1]
    wider, indices = largest(values, min(count + 1, num_values), maxima)
    top, order = wider[:, :count], indices[:, :count].sort(dim=-1)
    top, by_value = top.gather(1, order.indices).sort(dim=-1, descending=True, stable=True)
    indices = order.values.gather(1, by_value)
    if count < num_values:
        cut_between_equals = torch.nonzero(wider[:, count - 1] == wider[:, count])[:, 0]
        if len(cut_between_equals):
            ordered = values[cut_between_equals].sort(dim=-1, descending=True, stable=True)
            top[cut_between_equals] = ordered.values[:, :count]
            indices[cut_between_equals] = ordered.indices[:, :count]
    return top, indices


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
