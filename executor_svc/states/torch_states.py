"""Gated delta nets and short convolutions in plain torch operations: any device; the reference.

All rows that have a next token take it together; the rest is done for all tokens at once.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 -- the usual name

from executor_svc.states.interface import DeltaNetWeights, LayerState, ShortConvWeights, StateRows

_NORM_EPSILON = 1e-6  # of queries and keys


class TorchStateBackend:
    """States on any device that torch runs on; see `StateBackend`."""

    def delta_net(
        self, projected: torch.Tensor, rows: StateRows, state: LayerState, weights: DeltaNetWeights
    ) -> torch.Tensor:
        """Run a gated delta net over the tokens of a step."""
        config = weights.config
        key_size = config.num_key_heads * config.key_dim
        sizes = [config.conv_dim, config.output_dim, config.num_value_heads, config.num_value_heads]
        mixed, gate, b, a = torch.split(projected.float(), sizes, -1)
        convolved = F.silu(_convolve(mixed, rows, state.conv, weights.conv_weight.unbind(0)))
        query, key, value = torch.split(convolved, [key_size, key_size, config.output_dim], -1)
        out = _recur(
            _normed_heads(query, weights) * config.key_dim**-0.5,
            _normed_heads(key, weights),
            value.reshape(-1, config.num_value_heads, config.value_dim),
            decay=torch.exp(-weights.a_log.exp() * F.softplus(a + weights.dt_bias)),
            beta=b.sigmoid(),
            rows=rows,
            recurrent=state.recurrent,
        )
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + weights.epsilon) * weights.norm_weight
        return (normed.flatten(1) * F.silu(gate)).to(projected.dtype)

    def short_conv(
        self, projected: torch.Tensor, rows: StateRows, state: LayerState, weights: ShortConvWeights
    ) -> torch.Tensor:
        """Run a short convolution over the tokens of a step."""
        b, c, x = projected.float().chunk(3, -1)
        convolved = _convolve(b * x, rows, state.conv, weights.conv_weight.unbind(0))
        if weights.conv_bias is not None:
            convolved = convolved + weights.conv_bias
        return (c * convolved).to(projected.dtype)


def _convolve(mixed: torch.Tensor, rows: StateRows, conv: torch.Tensor, taps: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the convolved inputs, [num_tokens, conv_dim]; keep the last committed inputs of each row."""
    parts = []
    commits = rows.lengths if rows.commits is None else rows.commits
    inputs_of = torch.split(mixed, rows.lengths.tolist())
    for inputs, slot, start, num_committed in zip(inputs_of, rows.slots, rows.starts, commits, strict=True):
        before = conv[slot] if start else torch.zeros_like(conv[slot])
        window = torch.cat((before, inputs))
        total = window[: len(inputs)] * taps[0]
        for index, tap in enumerate(taps[1:], 1):
            total = total + window[index : index + len(inputs)] * tap
        parts.append(total)
        conv[slot] = window[num_committed:][: len(before)]
    return torch.cat(parts)


def _normed_heads(heads: torch.Tensor, weights: DeltaNetWeights) -> torch.Tensor:
    """Return queries or keys of length 1, one for each value head, [num_tokens, num_value_heads, key_dim]."""
    config = weights.config
    heads = heads.reshape(-1, config.num_key_heads, config.key_dim)
    heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _NORM_EPSILON)
    count = config.num_value_heads // config.num_key_heads
    return heads.repeat(1, count, 1) if config.is_tiled else heads.repeat_interleave(count, 1)


def _recur(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rows: StateRows,
    recurrent: torch.Tensor,
) -> torch.Tensor:
    """Return what the states say to the queries, as `value`, [num_tokens, num_value_heads, value_dim]."""
    order = np.argsort(-rows.lengths, kind="stable")  # so the rows that have a next token are the first ones
    lengths = rows.lengths[order]
    commits = lengths if rows.commits is None else rows.commits[order]
    slots = torch.from_numpy(rows.slots[order].astype(np.int64)).to(recurrent.device)
    first_tokens = (np.cumsum(rows.lengths) - rows.lengths)[order]
    is_later = torch.from_numpy(rows.starts[order] > 0).to(recurrent.device)
    states = recurrent[slots].where(is_later[:, None, None, None], 0.0)
    out = torch.empty_like(value)
    for index in range(lengths[0]):
        num_rows = int(np.count_nonzero(lengths > index))
        tokens = torch.from_numpy(first_tokens[:num_rows] + index).to(recurrent.device)
        state, k = states[:num_rows], key[tokens][..., None]
        state *= decay[tokens][..., None, None]
        known = (state * k).sum(-2)
        change = (value[tokens] - known) * beta[tokens][..., None]
        state += k * change[..., None, :]
        out[tokens] = (state * query[tokens][..., None]).sum(-2)
        if len(committed := (commits == index + 1).nonzero()[0]):
            of_rows = torch.from_numpy(committed).to(recurrent.device)
            recurrent[slots[of_rows]] = states[of_rows]
    return out
