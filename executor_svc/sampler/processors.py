"""What changes logits before sampling, in the order and with the meaning of transformers' processors.

Biases, the repetition penalty (prompt and output), the presence and frequency penalties (output; as OpenAI
defines them), then the tokens that may not come. All rows at once: histories and rules are joined to flat
lists of (row, token) places, and only those places are read and written.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F  # noqa: N812

from executor_svc.sampler.sample_rows import FlatTokens, SampleRows

# Added to the 8 tokens of a byte of an allow-list: twice as fast as a mask that is filled in.
_ADDED_BY_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, 0.0, -np.inf
).astype(np.float32)


def process(scores: torch.Tensor, rows: SampleRows) -> None:
    """Apply the rules and penalties of some rows to their scores.

    Args:
        scores: [num_rows, vocab_size] float32, contiguous; overwritten. -inf: the token cannot come.
        rows: The rows, in the same order.
    """
    _add_biases(scores, rows)
    _penalize_repetition(scores, rows)
    _penalize_output(scores, rows)
    scores.view(-1).index_fill_(0, _places(rows.forbidden_tokens(), scores), -torch.inf)
    _keep_allowed(scores, rows)


def _add_biases(scores: torch.Tensor, rows: SampleRows) -> None:
    tokens, biases = rows.biased_tokens()
    if len(biases):
        scores.view(-1).scatter_add_(0, _places(tokens, scores), torch.from_numpy(biases).to(scores.device))


def _penalize_repetition(scores: torch.Tensor, rows: SampleRows) -> None:
    """Make every token of prompt and output less likely, once however often it is there.

    Source: Keskar et al. 2019, "CTRL", section 4.1; negative logits are multiplied, as in transformers.
    """
    asking = np.flatnonzero(rows.sampling["repetition_penalty"] != 1)
    if not len(asking):
        return
    history = rows.history(asking, output_only=False)
    flat, places = scores.view(-1), _places(history, scores)
    penalties = _of_rows(rows.sampling["repetition_penalty"], history, scores.device)
    former = flat[places]
    flat.scatter_(0, places, torch.where(former < 0, former * penalties, former / penalties))


def _penalize_output(scores: torch.Tensor, rows: SampleRows) -> None:
    presence, frequency = rows.sampling["presence_penalty"], rows.sampling["frequency_penalty"]
    asking = np.flatnonzero((presence != 0) | (frequency != 0))
    if not len(asking):
        return
    output = rows.history(asking, output_only=True)
    vocab_size = scores.shape[1]
    distinct, counts = np.unique(output.rows * vocab_size + output.token_ids, return_counts=True)
    of_rows = distinct // vocab_size
    penalties = frequency[of_rows] * counts.astype(np.float32) + presence[of_rows]
    places = torch.from_numpy(distinct).to(scores.device)
    scores.view(-1).scatter_add_(0, places, torch.from_numpy(-penalties).to(scores.device))


def _keep_allowed(scores: torch.Tensor, rows: SampleRows) -> None:
    asking, packed = rows.allowed_masks()
    if not len(asking):
        return
    table = torch.from_numpy(_ADDED_BY_BYTE).to(scores.device)
    added = F.embedding(torch.from_numpy(packed.astype(np.int64)).to(scores.device), table).flatten(1)
    added = added[:, : scores.shape[1]]
    if len(asking) == len(scores):
        scores.add_(added)
    else:
        scores.index_add_(0, torch.from_numpy(asking).to(scores.device), added)


def _places(tokens: FlatTokens, scores: torch.Tensor) -> torch.Tensor:
    """Return where in the flat scores the tokens are, [num_tokens] int64."""
    return torch.from_numpy(tokens.rows * scores.shape[1] + tokens.token_ids).to(scores.device)


def _of_rows(values: npt.NDArray[np.generic], tokens: FlatTokens, device: torch.device) -> torch.Tensor:
    """Return for each token the value of its row, [num_tokens]."""
    return torch.from_numpy(np.ascontiguousarray(values)[tokens.rows]).to(device)
