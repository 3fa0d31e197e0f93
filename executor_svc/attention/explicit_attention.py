"""Attention written out: scores, what shapes them, softmax, weighted values.

For what torch's fused attention cannot do: it takes no soft cap and no sinks, and it would round biases of scores to
the number format of the queries. Nor does it round float32 to bfloat16.
"""

from functools import cache

import torch

from executor_svc.attention.step_reads import score_dtype

# Query tokens that are worked on at once: bounds the memory of the scores.
TILE_TOKENS = 256


def attend_explicitly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    distances: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    distance_biases: torch.Tensor | None = None,
    sees_later_tokens: bool = False,
    in_bfloat16: bool = False,
) -> torch.Tensor:
    """Attend with the query tokens of n rows, each to the keys of its row.

    Args:
        query: [n, length, num_heads, head_dim].
        keys: [n, num_keys, num_kv_heads, head_dim]; finite, also where they are hidden.
        values: As `keys`, but for the size of a head.
        distances: Key position - query position, [n, length, num_keys] in `score_dtype` of the query.
        hidden: Whether the query does not see the key, [n, length, num_keys] bool; never all of a row.
        scale: Of query . key.
        soft_cap: See `AttentionLayer`.
        slopes: Of ALiBi, [num_heads] in `score_dtype` of the query; None: no ALiBi.
        sinks: See `AttentionLayer`.
        distance_biases: The same.
        sees_later_tokens: Whether those are of both directions.
        in_bfloat16: Whether what is multiplied is rounded to bfloat16; sums stay in the format of the query.

    Returns:
        [n, length, num_heads, numbers of a value].
    """
    num_rows, length, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = keys.shape[1:3]
    rounded = _round if in_bfloat16 else _keep
    transposed_keys, values = rounded(keys).permute(0, 2, 3, 1), rounded(values).transpose(1, 2)
    group = num_heads // num_kv_heads
    output = query.new_empty(*query.shape[:3], values.shape[3])
    for begin in range(0, length, TILE_TOKENS):
        tile = slice(begin, min(begin + TILE_TOKENS, length))
        scaled = rounded(query[:, tile] * scale).reshape(num_rows, -1, num_kv_heads, group, head_dim)
        # The query heads that share a KV head act as its query tokens: no copy of K and V a head.
        scores = scaled.permute(0, 2, 3, 1, 4).reshape(num_rows, num_kv_heads, -1, head_dim) @ transposed_keys
        scores = scores.to(score_dtype(query.dtype)).view(num_rows, num_kv_heads, group, -1, num_keys)
        if soft_cap is not None:
            scores.div_(soft_cap).tanh_().mul_(soft_cap)
        if slopes is not None:
            scores.addcmul_(slopes.view(num_kv_heads, group, 1, 1), distances[:, None, None, tile])
        if distance_biases is not None:
            first = -(distance_biases.shape[1] // 2) if sees_later_tokens else 0
            nearest = (-distances[:, tile] - first).clamp(0, distance_biases.shape[1] - 1).long()
            of_pairs = distance_biases.to(scores.dtype)[:, nearest]  # [num_heads, n, tile, num_keys]
            scores.add_(of_pairs.view(num_kv_heads, group, *nearest.shape).movedim(2, 0))
        scores.masked_fill_(hidden[:, None, None, tile], -torch.inf)
        if sinks is not None:
            column = sinks.to(scores.dtype).view(num_kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., :num_keys].to(values.dtype).flatten(2, 3)
        result = (rounded(weights) @ values).view(num_rows, num_kv_heads, group, -1, values.shape[3])
        output[:, tile] = result.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return output


def _round(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.bfloat16().to(numbers.dtype)


def _keep(numbers: torch.Tensor) -> torch.Tensor:
    return numbers


@cache
def slopes_on(device: torch.device, dtype: torch.dtype, slopes: tuple[float, ...]) -> torch.Tensor:
    """Return the slopes of ALiBi on a device, [num_heads], for queries of a number format.

    Made once and kept: a CUDA graph has its address.
    """
    return torch.tensor(slopes, dtype=score_dtype(dtype), device=device)
