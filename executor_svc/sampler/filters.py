"""Which tokens are left to draw from: temperature, top-k, top-p, min-p, typical-p, in transformers' order.

`filtered_scores` says it for all tokens. `likeliest_survivors` is the shortcut: the likeliest tokens of a
row mostly decide alone, because no filter leaves any of the rest.

`draw` and `draw_survivor` then take one token of each row: the inverse of the cumulative distribution, in the order of
token ids. The same draw gives the same token on every device and in every batch, as sums are float64.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.sampler.likeliest import BLOCK, block_maxima, block_sums, largest, log_totals, weights_of
from octavo_shared.step_wire.step import BoolArray

# How many of the likeliest tokens the shortcut looks at, at first and then; most nuclei of a model are smaller.
WIDTHS = (64, 512)

# Below, quotients may overflow to infinity and probabilities become NaN; the draw is greedy by then.
MIN_TEMPERATURE = np.float32(1e-6)

# Keys are counted in so many buckets to find where a mass is reached; what is so far below the largest key is
# one bucket.
NUM_BUCKETS = 8192
BUCKETED_RANGE = 32.0

# The least float32 above 0: two different numbers differ by more.
SMALLEST = 2.0**-149

SamplingRows = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Survivors:
    """What is left of some rows: tokens by falling score, and their weights, in proportion to the probabilities."""

    token_ids: torch.Tensor  # [num_rows, width] int64
    weights: torch.Tensor  # [num_rows, width] float64, 0 where a token is out
    are_all: BoolArray  # [num_rows] whether no other token is left; if not, the rest of the row means nothing


def are_cut_by_likelihood(sampling: SamplingRows, vocab_size: int) -> BoolArray:
    """Return which rows keep likely tokens only, [num_rows], so that the shortcut may decide them."""
    cut: BoolArray = _limits_number(sampling, vocab_size) | (sampling["top_p"] < 1) | (sampling["min_p"] > 0)
    return cut


def filtered_scores(scores: torch.Tensor, sampling: SamplingRows) -> torch.Tensor:
    """Return scores divided by the temperature, with -inf where a filter leaves the token out.

    Args:
        scores: [num_rows, vocab_size] float32; unchanged.
        sampling: [num_rows] of SAMPLING_ROW, temperatures above 0.
    """
    scores = scores / _temperatures(sampling, scores.device)
    for name, wants, filter_ in (
        ("top_k", _limits_number(sampling, scores.shape[1]), _keep_top_k),
        ("top_p", sampling["top_p"] < 1, _keep_top_p),
        ("min_p", sampling["min_p"] > 0, _keep_min_p),
        ("typical_p", sampling["typical_p"] < 1, _keep_typical),
    ):
        rows = np.flatnonzero(wants)
        if len(rows) == len(scores):
            filter_(scores, _column(sampling[name], scores.device))
        elif len(rows):
            index = torch.from_numpy(rows).to(scores.device)
            selected = scores[index]
            filter_(selected, _column(sampling[name][rows], scores.device))
            scores[index] = selected
    return scores


def likeliest_survivors(scores: torch.Tensor, sampling: SamplingRows, width: int) -> Survivors:
    """Apply the filters to the likeliest tokens of each row.

    Args:
        scores: Not divided by the temperature yet, [num_rows, vocab_size] float32; unchanged.
        sampling: [num_rows] of SAMPLING_ROW, temperatures above 0.
        width: How many tokens; all if there are less.
    """
    device, vocab_size = scores.device, scores.shape[1]
    width = min(width, vocab_size)
    temperatures, limits_number = _temperatures(sampling, device), _limits_number(sampling, vocab_size)
    found, token_ids = largest(scores, width)
    values = (found / temperatures).double()
    keeps = values > -torch.inf
    has_all = torch.full((len(values), 1), width == vocab_size, device=device)
    lacks_some = torch.zeros_like(has_all)  # a top-k is larger than the width: what follows works on too little
    log_totals_ = _log_totals_of_unlimited(scores, sampling, temperatures)
    if limits_number.any():
        top_k = _column(np.where(limits_number, sampling["top_k"], 0).astype(np.int64), device)
        threshold = values.gather(1, (top_k - 1).clamp_(0, width - 1))
        keeps &= (values >= threshold) | (top_k == 0)
        has_all |= (top_k > 0) & (top_k <= width) & (values[:, -1:] < threshold)
        lacks_some = (top_k > 0) & ~has_all
        within = values.masked_fill(~keeps, -torch.inf).logsumexp(-1, keepdim=True)
        log_totals_ = torch.where(top_k > 0, within, log_totals_)
    if (sampling["top_p"] < 1).any():
        top_p = _column(sampling["top_p"].astype(np.float64), device)
        weights = (values - log_totals_).exp_().masked_fill_(~keeps, 0.0)
        threshold = _last_key(values, weights, top_p)
        keeps &= (values >= threshold) | (top_p >= 1)
        has_all |= (top_p < 1) & (weights.sum(-1, keepdim=True) >= top_p) & (values[:, -1:] < threshold)
    if (sampling["min_p"] > 0).any():
        threshold = values[:, :1] + _column(sampling["min_p"].astype(np.float64), device).log_()
        keeps &= values >= threshold
        has_all |= values[:, -1:] < threshold
    if (sampling["typical_p"] < 1).any():
        keeps &= _are_typical(values.masked_fill(~keeps, -torch.inf), sampling)
    weights = (values - values[:, :1]).exp_().masked_fill_(~keeps, 0.0)
    return Survivors(token_ids, weights, (has_all & ~lacks_some)[:, 0].cpu().numpy())


def _keep_top_k(scores: torch.Tensor, top_k: torch.Tensor) -> None:
    """Keep the k largest scores of each row; ties with the last one stay, as in transformers."""
    likeliest, _ = largest(scores, int(top_k.max()))
    _cut_below(scores, scores, likeliest.gather(1, top_k.long() - 1))


def _keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> None:
    """Keep the nucleus of each row: the likeliest tokens, up to the token that reaches top_p, and ties with it.

    transformers cuts between tokens of equal score, in an order that its sort leaves open.
    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration".
    """
    weights = weights_of(scores - block_maxima(scores).amax(-1, keepdim=True))
    _cut_below(scores, scores, _mass_threshold(scores, weights, top_p))


def _keep_min_p(scores: torch.Tensor, min_p: torch.Tensor) -> None:
    """Keep what is at least min_p times as likely as the likeliest."""
    _cut_below(scores, scores, block_maxima(scores).amax(-1, keepdim=True) + min_p.log())


def _keep_typical(scores: torch.Tensor, typical_p: torch.Tensor) -> None:
    """Keep the tokens with information nearest to the entropy, up to the token that reaches typical_p, and ties.

    Source: Meister et al. 2023, "Locally Typical Sampling".
    """
    logprobs = scores - log_totals(scores).float()
    probs = weights_of(logprobs.clone())
    terms = (probs * logprobs).nan_to_num_(0.0)  # 0 times -inf where a token is out
    entropy = -block_sums(terms).sum(-1, keepdim=True).float()
    closeness = logprobs.add_(entropy).abs_().neg_()
    _cut_below(scores, closeness, _mass_threshold(closeness, probs, typical_p))


def _cut_below(scores: torch.Tensor, keys: torch.Tensor, threshold: torch.Tensor) -> None:
    """Set the scores to -inf where keys are below their row's threshold, [num_rows, 1].

    By arithmetic: a mask that no processor can predict takes ten times as long to fill in.
    """
    above = keys - threshold.clamp(min=torch.finfo(keys.dtype).min)
    scores.add_(torch.threshold_(above, -SMALLEST, -torch.inf).clamp_(max=0.0))


def _mass_threshold(keys: torch.Tensor, weights: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Return the last key, from the largest one down, that it takes to reach a share of the weights, [num_rows, 1].

    The keys are counted in buckets; only the bucket in which the mass is reached is sorted.

    Args:
        keys: [num_rows, num_keys] float32.
        weights: Of the keys, the same shape; 0 where a key is -inf.
        mass: Share of the sum of the weights, [num_rows, 1], above 0 to 1.
    """
    top = block_maxima(keys).amax(-1, keepdim=True)
    depth = top - keys
    depth.nan_to_num_(BUCKETED_RANGE, posinf=BUCKETED_RANGE).clamp_(max=BUCKETED_RANGE)
    span = block_maxima(depth).amax(-1, keepdim=True).clamp_(min=1e-6)
    buckets = depth.mul_((NUM_BUCKETS - 1) / span).long()
    sums = torch.zeros((len(keys), NUM_BUCKETS), dtype=torch.float64, device=keys.device)
    cumulative = sums.scatter_add_(1, buckets, weights.double()).cumsum(-1)
    target = mass * cumulative[:, -1:]
    reached = (cumulative < target).sum(-1, keepdim=True).clamp_(max=NUM_BUCKETS - 1)
    before = cumulative.gather(1, (reached - 1).clamp_(min=0)).masked_fill_(reached == 0, 0.0)
    is_inside = buckets == reached
    num_inside = max(1, int(is_inside.sum(-1).max()))
    ordered, indices = largest(keys.masked_fill(~is_inside, -torch.inf), num_inside)
    inside = weights.gather(1, indices).double().masked_fill_(~is_inside.gather(1, indices), 0.0)
    return _last_key(ordered, inside, target - before)


def _last_key(keys: torch.Tensor, weights: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Return the last of falling keys that it takes to reach a mass, [num_rows, 1]; keys are [num_rows, width]."""
    cumulative = weights.cumsum(-1)
    num_kept = (cumulative - weights < mass).sum(-1, keepdim=True)
    num_kept = torch.minimum(num_kept, (weights > 0).sum(-1, keepdim=True)).clamp_(min=1)
    return keys.gather(1, num_kept - 1)


def _are_typical(values: torch.Tensor, sampling: SamplingRows) -> torch.Tensor:
    """Return which of few values, [num_rows, width], are typical of them; all in rows that do not ask."""
    typical_p = _column(sampling["typical_p"].astype(np.float64), values.device)
    logprobs = values.log_softmax(-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).nan_to_num_(0.0).sum(-1, keepdim=True)
    closeness = -(logprobs + entropy).abs()
    ordered = closeness.sort(dim=-1, descending=True, stable=True)
    threshold = _last_key(ordered.values, probs.gather(1, ordered.indices), typical_p)
    return (closeness >= threshold) | (typical_p >= 1)


def _log_totals_of_unlimited(scores: torch.Tensor, sampling: SamplingRows, temperatures: torch.Tensor) -> torch.Tensor:
    """Return the log of the sum of all weights, [num_rows, 1], where top-p has no top-k before it; 0 elsewhere."""
    result = torch.zeros((len(sampling), 1), dtype=torch.float64, device=scores.device)
    rows = np.flatnonzero((sampling["top_p"] < 1) & ~_limits_number(sampling, scores.shape[1]))
    if len(rows) == len(scores):
        return log_totals(scores, temperatures)
    if len(rows):
        index = torch.from_numpy(rows).to(scores.device)
        result[index] = log_totals(scores[index], temperatures[index])
    return result


def _limits_number(sampling: SamplingRows, vocab_size: int) -> BoolArray:
    """Return which rows have a top-k that cuts something off."""
    limits: BoolArray = (sampling["top_k"] > 0) & (sampling["top_k"] < vocab_size)
    return limits


def _temperatures(sampling: SamplingRows, device: torch.device) -> torch.Tensor:
    return _column(np.maximum(sampling["temperature"], MIN_TEMPERATURE), device)


def _column(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return one value a row as [num_rows, 1]; fields of records are strided, so copy."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)[:, None]


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
