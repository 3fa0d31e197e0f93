"""Log-probabilities: log-softmax of the raw float32 logits, of chosen tokens and of the likeliest ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.native.sampling import NativeSampling
from executor_svc.sampler.likeliest import block_maxima, block_sums, likeliest, weights_of
from shared.step import Int32Array

Float32Array = npt.NDArray[np.float32]

# Logits that exist at once, in rows: a whole chunk's would be hundreds of MiB.
PROMPT_TOKENS_AT_ONCE = 128
# Logits that the sampler works on at one time: it takes some ten times their memory, in float64 and int64 too.
VALUES_AT_ONCE = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The likeliest tokens of some rows, one row after the other, likeliest first, equal ones by token id."""

    token_ids: Int32Array  # [sum over the rows of how many each wants]
    logprobs: Float32Array  # the same


def log_totals(
    scores: torch.Tensor, temperature: torch.Tensor | None = None, maxima: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the logarithm of the sum of exp(scores / temperature) of each row, [num_rows, 1] float64.

    Args:
        scores: [num_rows, vocab_size] float32, not all -inf in any row; unchanged.
        temperature: [num_rows, 1] float32; None: 1.
        maxima: Those of the blocks of `scores`, if they are known.
    """
    top = (block_maxima(scores) if maxima is None else maxima).amax(-1, keepdim=True)
    shifted = scores - top
    if temperature is not None:
        shifted.div_(temperature)
        top = top.div(temperature)
    return block_sums(weights_of(shifted)).sum(-1, keepdim=True).log_() + top


def logprobs_of(
    logits: torch.Tensor,
    rows: Int32Array,
    token_ids: Int32Array,
    num_alternatives: Int32Array,
    native: NativeSampling | None = None,
) -> tuple[Float32Array, Alternatives | None]:
    """Return the log-probability of one token in each of some rows of logits, [num_rows], and of the likeliest.

    Args:
        logits: Raw, [num_logit_rows, vocab_size] float32.
        rows: Row of `logits`, [num_rows].
        token_ids: The token, [num_rows].
        num_alternatives: How many of the likeliest each row wants, [num_rows], at most vocab_size. None is
            returned for them if no row wants any.
        native: The C library, if the logits are on a CPU and it can be had.
    """
    distinct, inverse = np.unique(rows, return_inverse=True)
    selected = rows_of(logits, distinct)
    if native is None:
        maxima = block_maxima(selected)
        totals = log_totals(selected, maxima=maxima)
    else:
        totals, maxima = native.log_totals(selected.contiguous())
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


def prompt_logprobs(
    hidden: torch.Tensor,
    to_logits: Callable[[torch.Tensor], torch.Tensor],
    token_ids: Int32Array,
    num_alternatives: Int32Array,
    native: NativeSampling | None = None,
) -> tuple[Float32Array, Alternatives | None]:
    """Return the log-probability of each of some prompt tokens, [num_tokens], and the likeliest in its place.

    Args:
        hidden: What the model made of the token before each, [num_tokens, hidden_size].
        to_logits: Turns hidden states into raw float32 logits, [any, vocab_size].
        token_ids: The tokens, [num_tokens].
        num_alternatives: How many of the likeliest are wanted for each, [num_tokens].
        native: The C library, if the logits are on a CPU and it can be had.
    """
    logprobs: list[Float32Array] = []
    found: list[Alternatives] = []
    for span in prompt_spans(len(token_ids)):
        rows = np.arange(len(token_ids[span]), dtype=np.int32)
        logits = to_logits(hidden[span])
        some, alternatives = logprobs_of(logits, rows, token_ids[span], num_alternatives[span], native)
        logprobs.append(some)
        if alternatives is not None:
            found.append(alternatives)
    joined = np.concatenate(logprobs) if logprobs else np.empty(0, np.float32)
    return joined, join_alternatives(found) if found else None


def prompt_spans(num_tokens: int) -> Iterator[slice]:
    """Return the parts of [num_tokens] prompt tokens whose logits are in memory at one time."""
    for begin in range(0, num_tokens, PROMPT_TOKENS_AT_ONCE):
        yield slice(begin, min(begin + PROMPT_TOKENS_AT_ONCE, num_tokens))


def row_spans(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Return the parts of [num_rows] sample rows that the sampler works on at one time."""
    num_at_once = max(1, VALUES_AT_ONCE // vocab_size)
    for begin in range(0, num_rows, num_at_once):
        yield slice(begin, min(begin + num_at_once, num_rows))


def join_alternatives(parts: Sequence[Alternatives]) -> Alternatives:
    """Return those of all rows; of one part or more."""
    if len(parts) == 1:
        return parts[0]
    return Alternatives(
        np.concatenate([part.token_ids for part in parts]), np.concatenate([part.logprobs for part in parts])
    )


def take_first(token_ids: torch.Tensor, logprobs: torch.Tensor, counts: Int32Array) -> Alternatives:
    """Return the first so many of each row, [num_rows, most] tensors and [num_rows] counts, joined."""
    wanted = np.arange(token_ids.shape[1]) < counts[:, None]
    return Alternatives(token_ids.cpu().numpy()[wanted].astype(np.int32), logprobs.cpu().numpy()[wanted])


def rows_of(logits: torch.Tensor, rows: npt.NDArray[np.integer]) -> torch.Tensor:
    """Return some rows of a matrix; without a copy if they lie one behind the other."""
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return logits[rows[0] : rows[0] + len(rows)]
    return logits.index_select(0, _index(rows, logits.device))


def _index(values: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)
