"""One token of each row: the inverse of the cumulative distribution, in the order of token ids.

The same draw gives the same token on every device and in every batch: sums are float64.
"""

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.sampler.filters import Survivors
from executor_svc.sampler.likeliest import BLOCK, block_maxima, block_sums, weights_of

# Draws are in [0, 1); a quotient of two sums must not be rounded to 1.
LARGEST_DRAW = 1 - 2.0**-40

Draws = npt.NDArray[np.float64]


def draw_survivor(left: Survivors, draws: Draws) -> torch.Tensor:
    """Return a token for each of the rows of `left`, [num_rows]; `draws` are theirs, [num_rows]."""
    targets = torch.from_numpy(draws).to(left.weights.device)[:, None]
    by_id = left.token_ids.sort(dim=-1)
    return by_id.values.gather(1, _pick(left.weights.gather(1, by_id.indices), targets))[:, 0]


def draw(scores: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Return for each row the first token id whose cumulative probability exceeds the draw, [num_rows].

    First the block of tokens is found, then the token in it. A token at -inf is never drawn: it does not
    raise the cumulative sum.

    Args:
        scores: [num_rows, vocab_size] float32; unchanged.
        draws: [num_rows], in [0, 1).
    """
    weights = weights_of(scores - block_maxima(scores).amax(-1, keepdim=True))
    sums = block_sums(weights)
    targets = torch.from_numpy(draws).to(scores.device)[:, None]
    blocks = _pick(sums, targets)
    before = sums.cumsum(-1).gather(1, blocks) - sums.gather(1, blocks)
    inside = (targets * sums.cumsum(-1)[:, -1:] - before) / sums.gather(1, blocks)
    token_ids = blocks * BLOCK + torch.arange(BLOCK, device=scores.device)
    last = scores.shape[1] - 1
    in_block = weights.gather(1, token_ids.clamp(max=last)).double().masked_fill_(token_ids > last, 0.0)
    picked = _pick(in_block, inside.clamp_(0.0, LARGEST_DRAW))
    return token_ids.gather(1, picked)[:, 0].clamp_(max=last)  # beyond the end only if the logits are NaN


def _pick(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return the first column of each row whose cumulative share exceeds the draw; both results [num_rows, 1]."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    picked = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    return picked.clamp_(max=weights.shape[1] - 1)
