"""Gated delta nets, short convolutions and Mamba-2 in plain torch operations: any device; the reference.

All rows that have a next token take it together; the rest is done for all tokens at once.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 -- the usual name

from executor_svc.states.interface import DeltaNetWeights, LayerState, Mamba2Weights, ShortConvWeights, StateRows

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
        keys, queries = _normed_heads(key, weights), _normed_heads(query, weights) * config.key_dim**-0.5
        value = value.reshape(-1, config.num_value_heads, config.value_dim)
        decay, beta = torch.exp(-weights.a_log.exp() * F.softplus(a + weights.dt_bias)), b.sigmoid()

        def take(tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
            k = keys[tokens][..., None]
            states *= decay[tokens][..., None, None]
            change = (value[tokens] - (states * k).sum(-2)) * beta[tokens][..., None]
            states += k * change[..., None, :]
            told: torch.Tensor = (states * queries[tokens][..., None]).sum(-2)
            return told

        out = _recur(take, rows, state.recurrent, value.shape)
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

    def mamba2(
        self, projected: torch.Tensor, rows: StateRows, state: LayerState, weights: Mamba2Weights
    ) -> torch.Tensor:
        """Run a Mamba-2 layer over the tokens of a step."""
        config = weights.config
        mixed, gate, dt = torch.split(projected.float(), [config.conv_dim, config.output_dim, config.num_heads], -1)
        convolved = _convolve(mixed, rows, state.conv, weights.conv_weight.unbind(0))
        if weights.conv_bias is not None:
            convolved = convolved + weights.conv_bias
        size = config.num_groups * config.state_size
        x, b, c = torch.split(F.silu(convolved), [config.output_dim, size, size], -1)
        x = x.reshape(-1, config.num_heads, config.head_dim)
        heads_of_group = config.num_heads // config.num_groups
        b, c = (
            each.reshape(-1, config.num_groups, config.state_size).repeat_interleave(heads_of_group, 1)
            for each in (b, c)
        )
        time = F.softplus(dt + weights.dt_bias)
        decay, change = torch.exp(-weights.a_log.exp() * time), x * time[..., None]

        def take(tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
            states *= decay[tokens][..., None, None]
            states += b[tokens][..., None] * change[tokens][..., None, :]
            return (states * c[tokens][..., None]).sum(-2)

        out = _recur(take, rows, state.recurrent, x.shape) + x * weights.d[:, None]
        gated = out.flatten(1) * F.silu(gate)
        if weights.is_normed_apart:
            return gated.to(projected.dtype)
        groups = gated.view(len(gated), config.num_groups, -1)
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + weights.epsilon)
        return (normed.flatten(1) * weights.norm_weight).to(projected.dtype)


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
    take: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: StateRows,
    recurrent: torch.Tensor,
    shape: Sequence[int],
) -> torch.Tensor:
    """Return what the states say to the tokens, of this shape: [num_tokens, ...].

    Args:
        take: Changes the states of some rows, [num_rows, ...], by a token each, whose numbers are [num_rows], and
            returns what they say then.
        rows: Where the tokens are.
        recurrent: Read and written, [max_num_seqs, ...].
        shape: Of the result.
    """
    order = np.argsort(-rows.lengths, kind="stable")  # so the rows that have a next token are the first ones
    lengths = rows.lengths[order]
    commits = lengths if rows.commits is None else rows.commits[order]
    slots = torch.from_numpy(rows.slots[order].astype(np.int64)).to(recurrent.device)
    first_tokens = (np.cumsum(rows.lengths) - rows.lengths)[order]
    is_later = torch.from_numpy(rows.starts[order] > 0).to(recurrent.device)
    states = recurrent[slots].where(is_later[:, None, None, None], 0.0)
    out = recurrent.new_empty(shape)
    for index in range(lengths[0]):
        num_rows = int(np.count_nonzero(lengths > index))
        tokens = torch.from_numpy(first_tokens[:num_rows] + index).to(recurrent.device)
        out[tokens] = take(tokens, states[:num_rows])
        if len(committed := (commits == index + 1).nonzero()[0]):
            of_rows = torch.from_numpy(committed).to(recurrent.device)
            recurrent[slots[of_rows]] = states[of_rows]
    return out
