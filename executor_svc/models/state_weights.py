"""The weights of layers with a recurrent state on one rank, float32; `decoder_weights.py` makes all others.

Each kind of state has its tensors between two projections: `WeightMap` is told which rows of which tensor of a
checkpoint they take.
"""

import torch

from executor_svc.checkpoint.weight_map import Range, WeightMap
from executor_svc.models.config import ModelConfig
from executor_svc.models.dense import MatrixRole
from executor_svc.models.sharding import Rows, Shard, rows_by_turns, scaled
from executor_svc.models.state_config import DeltaNetConfig, Mamba2Config, ShortConvConfig, StateConfig
from executor_svc.states.interface import DeltaNetWeights, Mamba2Weights, ShortConvWeights, StateWeights


class StateLayers:
    """Makes the weights of these layers, uninitialised.

    Args:
        config: Of the model.
        shard: The part of this rank.
        weight_map: Is told where tensors of a checkpoint go.
        device: Where the model runs.
    """

    def __init__(self, config: ModelConfig, shard: Shard, weight_map: WeightMap, device: torch.device) -> None:
        self._config = config
        self._shard = shard
        self._map = weight_map
        self._device = device

    def weights(self, index: int, state: StateConfig) -> StateWeights:
        """Return the weights of a layer between its projections."""
        if isinstance(state, DeltaNetConfig):
            return self._delta_net(index, state)
        if isinstance(state, Mamba2Config):
            return self._mamba2(index, state)
        return self._short_conv(index, state)

    def projected_rows(self, index: int, state: StateConfig) -> tuple[list[Rows], MatrixRole]:
        """Return this rank's rows of the projection of a layer, and the role of that matrix."""
        if isinstance(state, DeltaNetConfig):
            return self._delta_net_rows(index, state), "delta_net"
        if isinstance(state, Mamba2Config):
            return self._mamba2_rows(index, state), "mamba2"
        return [self._short_conv_rows(index, state)], "layer"

    def _delta_net(self, index: int, net: DeltaNetConfig) -> DeltaNetWeights:
        module, own = self._config.names.state.format(layer=index), net.shared_by(self._shard.size)
        weights = DeltaNetWeights(
            config=own,
            conv_weight=self._tensor(own.conv_size, own.conv_dim),
            a_log=self._tensor(own.num_value_heads),
            dt_bias=self._tensor(own.num_value_heads),
            norm_weight=self._tensor(own.value_dim),
            epsilon=self._config.norm.epsilon,
        )
        conv_shape = (net.conv_dim, 1, net.conv_size)
        ours = (self._shard.even_part(net.num_value_heads),)
        self._map.add(f"{module}.conv1d.weight", conv_shape, weights.conv_weight.T[:, None], rows=self._conv_rows(net))
        self._map.add(f"{module}.A_log", (net.num_value_heads,), weights.a_log, rows=ours)
        self._map.add(f"{module}.dt_bias", (net.num_value_heads,), weights.dt_bias, rows=ours)
        self._map.add(f"{module}.norm.weight", (net.value_dim,), weights.norm_weight)
        return weights

    def _conv_rows(self, net: DeltaNetConfig) -> tuple[Range, Range, Range]:
        """Return this rank's channels of the convolution: of queries, keys and values."""
        keys = scaled(self._shard.even_part(net.num_key_heads), net.key_dim)
        values = scaled(self._shard.even_part(net.num_value_heads), net.value_dim)
        key_size = net.num_key_heads * net.key_dim
        return keys, (key_size + keys[0], key_size + keys[1]), (2 * key_size + values[0], 2 * key_size + values[1])

    def _delta_net_rows(self, index: int, net: DeltaNetConfig) -> list[Rows]:
        """Return this rank's rows of q, k, v, z, b and a."""
        names, module = self._config.names, self._config.names.state.format(layer=index)
        if names.delta_net_layout == "apart":
            ours = self._shard.even_part(net.num_value_heads)
            return [
                *(Rows(f"{module}.in_proj_qkv", net.conv_dim, (rows,)) for rows in self._conv_rows(net)),
                Rows(f"{module}.in_proj_z", net.output_dim, (scaled(ours, net.value_dim),)),
                *(Rows(f"{module}.in_proj_{part}", net.num_value_heads, (ours,)) for part in "ba"),
            ]
        ours, num_values = self._shard.even_part(net.num_key_heads), net.num_value_heads // net.num_key_heads
        sizes = (net.key_dim, net.key_dim, num_values * net.value_dim, num_values * net.value_dim)
        return [
            *rows_by_turns(f"{module}.in_proj_qkvz", net.num_key_heads, sizes, [ours] * 4),
            *rows_by_turns(f"{module}.in_proj_ba", net.num_key_heads, (num_values, num_values), [ours] * 2),
        ]

    def _short_conv(self, index: int, conv: ShortConvConfig) -> ShortConvWeights:
        name, ours = f"{self._config.names.state.format(layer=index)}.conv", self._shard.even_part(conv.size)
        own = conv.shared_by(self._shard.size)
        weight = self._tensor(own.conv_size, own.size)
        bias = self._tensor(own.size) if own.has_bias else None
        self._map.add(f"{name}.weight", (conv.size, 1, conv.conv_size), weight.T[:, None], rows=(ours,))
        if bias is not None:
            self._map.add(f"{name}.bias", (conv.size,), bias, rows=(ours,))
        return ShortConvWeights(own, weight, bias)

    def _short_conv_rows(self, index: int, conv: ShortConvConfig) -> Rows:
        """Return this rank's rows of b, c and x."""
        begin, end = self._shard.even_part(conv.size)
        ranges = tuple((part * conv.size + begin, part * conv.size + end) for part in range(3))
        return Rows(f"{self._config.names.state.format(layer=index)}.in_proj", conv.projected_dim, ranges)

    def _mamba2(self, index: int, mamba: Mamba2Config) -> Mamba2Weights:
        module, own = self._config.names.state.format(layer=index), mamba.shared_by(self._shard.size)
        heads, rows = self._shard.even_part(mamba.num_heads), self._mamba2_conv_rows(mamba)
        weights = Mamba2Weights(
            config=own,
            conv_weight=self._tensor(own.conv_size, own.conv_dim),
            conv_bias=self._tensor(own.conv_dim) if own.has_conv_bias else None,
            a_log=self._tensor(own.num_heads),
            dt_bias=self._tensor(own.num_heads),
            d=self._tensor(own.num_heads),
            norm_weight=self._tensor(own.output_dim),
            epsilon=self._config.norm.epsilon,
        )
        shape, conv_weight = (mamba.conv_dim, 1, mamba.conv_size), weights.conv_weight.T[:, None]
        self._map.add(f"{module}.conv1d.weight", shape, conv_weight, rows=rows)
        if weights.conv_bias is not None:
            self._map.add(f"{module}.conv1d.bias", shape[:1], weights.conv_bias, rows=rows)
        for name, vector in (("A_log", weights.a_log), ("dt_bias", weights.dt_bias), ("D", weights.d)):
            self._map.add(f"{module}.{name}", (mamba.num_heads,), vector, rows=(heads,))
        ours = (scaled(heads, mamba.head_dim),)
        self._map.add(f"{module}.norm.weight", (mamba.output_dim,), weights.norm_weight, rows=ours)
        return weights

    def _mamba2_conv_rows(self, mamba: Mamba2Config) -> tuple[Range, Range, Range]:
        """Return this rank's channels of the convolution: of x, B and C."""
        heads = scaled(self._shard.even_part(mamba.num_heads), mamba.head_dim)
        groups = (0, 1) if mamba.num_groups == 1 else self._shard.even_part(mamba.num_groups)
        begin, end = scaled(groups, mamba.state_size)
        firsts = (mamba.output_dim, mamba.output_dim + mamba.num_groups * mamba.state_size)
        of_b, of_c = ((first + begin, first + end) for first in firsts)
        return heads, of_b, of_c

    def _mamba2_rows(self, index: int, mamba: Mamba2Config) -> list[Rows]:
        """Return this rank's rows of x, B, C and the gates, and those of dt; the gates come first in a checkpoint."""
        name, size = f"{self._config.names.state.format(layer=index)}.in_proj", mamba.output_dim
        heads = self._shard.even_part(mamba.num_heads)
        convolved = tuple((size + begin, size + end) for begin, end in self._mamba2_conv_rows(mamba))
        first = size + mamba.conv_dim
        return [
            Rows(name, mamba.projected_dim, (*convolved, scaled(heads, mamba.head_dim))),
            Rows(name, mamba.projected_dim, ((first + heads[0], first + heads[1]),)),
        ]

    def _tensor(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)
