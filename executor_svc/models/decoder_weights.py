"""The weights of a decoder on one rank: made by the kernels, with a map from the tensors of a checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic

import torch

from executor_svc.checkpoint.weight_map import Range, WeightMap
from executor_svc.models.config import (
    DeltaNetConfig,
    ExpertsConfig,
    LayerConfig,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    ShortConvConfig,
    StateConfig,
)
from executor_svc.models.dense import (
    DenseKernels,
    EmbeddingWeights,
    Experts,
    HeadNorms,
    LayerEnd,
    MatrixRole,
    MatrixT,
    Mlp,
    Norm,
    Segment,
)
from executor_svc.models.sharding import Shard
from executor_svc.native.structs import NumberFormat
from executor_svc.states.interface import DeltaNetWeights, Mamba2Weights, ShortConvWeights, StateWeights

StoredFormats = Callable[[Sequence[str]], Sequence[NumberFormat]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor of a checkpoint; `tensor` is its name without `.weight` and `.bias`."""

    tensor: str
    tensor_rows: int  # of all of it
    ranges: tuple[Range, ...]

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(end - begin for begin, end in self.ranges)


class DecoderWeights(Generic[MatrixT]):
    """All weights, uninitialised, joined to segments; `map` says where each tensor of a checkpoint goes.

    Args:
        config: Of the model.
        kernels: What makes matrices and segments.
        shard: The part of this rank.
        stored: The number formats of the parts of a matrix, by the names of their tensors, where a file has decided
            them; None: the kernels decide.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: DenseKernels[MatrixT],
        shard: Shard,
        stored: StoredFormats | None = None,
    ) -> None:
        self.map = WeightMap()
        self._config = config
        self._kernels = kernels
        self._shard = shard
        self._stored = stored
        names = config.names
        embedding = self._vocabulary_matrix(names.embedding)
        self.embed = kernels.embedding(self._embedding_weights(embedding))
        self.segments: list[Segment] = []
        self.sinks: list[torch.Tensor | None] = []  # of each layer, of this rank's heads; see `AttentionLayer.sinks`
        self.states: list[StateWeights | None] = []  # of each layer; None: it attends
        layer_end: LayerEnd[MatrixT] | None = None
        for index, layer in enumerate(config.layers):
            norm = self._norm(names.attention_norm.format(layer=index))
            projection = self._projection(index, layer)
            self.segments.append(kernels.segment(layer_end, norm, projection, self._head_norms(index, layer)))
            self.sinks.append(self._sinks(index, layer) if layer.has_sinks else None)
            self.states.append(None if layer.state is None else self._state(index, layer.state))
            layer_end = self._layer_end(index, layer)
        assert layer_end is not None, "a model has layers"
        self.last_segment = kernels.last_segment(layer_end)
        head = embedding if config.tie_word_embeddings else self._vocabulary_matrix(names.head)
        self.norm = self._norm(names.norm)
        self.head = kernels.segment(None, self.norm, head)

    def _projection(self, index: int, layer: LayerConfig) -> MatrixT:
        if isinstance(layer.state, DeltaNetConfig):
            return self._columns(self._delta_net_rows(index, layer.state), has_bias=False, role="delta_net")
        if isinstance(layer.state, Mamba2Config):
            return self._columns(self._mamba2_rows(index, layer.state), has_bias=layer.state.has_bias, role="mamba2")
        if layer.state is not None:
            return self._columns([self._short_conv_rows(index, layer.state)], has_bias=layer.state.has_bias)
        return self._columns(self._qkv_rows(index, layer), has_bias=self._config.qkv_bias, role="qkv")

    def _layer_end(self, index: int, layer: LayerConfig) -> LayerEnd[MatrixT]:
        config, names = self._config, self._config.names
        output, has_bias = names.attention_output, config.attention_output_bias
        num_inputs = layer.num_heads * layer.head_dim
        if layer.state is not None:
            output, has_bias, num_inputs = f"{names.state}.out_proj", layer.state.has_bias, layer.state.output_dim
        mlp: Mlp[MatrixT] | Experts[MatrixT]
        if isinstance(layer.mlp, ExpertsConfig):
            mlp = self._experts(index, layer.mlp)
        else:
            mlp = self._mlp(layer.mlp, names.gate_up, names.down, layer=index)
        return LayerEnd(
            attention_output=self._row_parallel(
                output.format(layer=index),
                num_inputs,
                self._shard.even_part(num_inputs),
                has_bias,
            ),
            attention_output_norm=self._output_norm(names.attention_output_norm, index),
            mlp_norm=self._norm(names.mlp_norm.format(layer=index)),
            mlp=mlp,
            mlp_output_norm=self._output_norm(names.mlp_output_norm, index),
            residual_scale=config.residual_scale,
        )

    def _mlp(self, mlp: MlpConfig, gate_up: Sequence[str], down: str, **numbers: int) -> Mlp[MatrixT]:
        """Return an MLP whose tensors have these names, with `numbers` in them."""
        tensors = [name.format(**numbers) for name in gate_up]
        size = mlp.intermediate_size
        begin, end = self._shard.even_part(size)
        parts = [Rows(tensors[-1], size, ((begin, end),))]
        if mlp.is_gated and len(tensors) == 1:
            parts = [Rows(tensors[0], 2 * size, ((first + begin, first + end),)) for first in (0, size)]
        elif mlp.is_gated:
            parts = [Rows(tensor, size, ((begin, end),)) for tensor in tensors]
        is_merged = mlp.is_gated and self._kernels.merges_gate_and_up
        matrices = [parts] if is_merged else [[part] for part in parts]
        *gate, up = (self._columns(matrix, has_bias=mlp.has_bias) for matrix in matrices)
        down_matrix = self._row_parallel(down.format(**numbers), size, (begin, end), mlp.has_bias)
        return Mlp(gate[0] if gate else None, up, down_matrix, mlp.activation, is_merged)

    def _experts(self, index: int, experts: ExpertsConfig) -> Experts[MatrixT]:
        names = self._config.names
        router = self._router(names.router.format(layer=index), experts.num_experts, experts.has_router_bias)
        mlps = tuple(
            self._mlp(experts.mlp, names.expert_gate_up, names.expert_down, layer=index, expert=expert)
            for expert in range(experts.num_experts)
        )
        correction_bias = None
        if experts.has_correction_bias:
            correction_bias = self._tensor(experts.num_experts, dtype=torch.float32)
            self.map.add(names.correction_bias.format(layer=index), (experts.num_experts,), correction_bias)
        mixture = Experts(router, mlps, experts, correction_bias)
        if experts.shared is None:
            return mixture
        return replace(
            mixture,
            shared=self._mlp(experts.shared, names.shared_gate_up, names.shared_down, layer=index),
            shared_gate=self._router(names.shared_gate.format(layer=index), 1, has_bias=False)
            if experts.has_shared_gate
            else None,
        )

    def _router(self, name: str, num_outputs: int, has_bias: bool) -> MatrixT:
        """Return a matrix that all ranks have whole."""
        shape = (num_outputs, self._config.hidden_size)
        router = self._kernels.matrix(shape[1], [shape[0]], has_bias=has_bias, role="router")
        self.map.add(f"{name}.weight", shape, router.weights[0])
        if has_bias:
            self.map.add(f"{name}.bias", shape[:1], router.biases[0])
        return router

    def _sinks(self, index: int, layer: LayerConfig) -> torch.Tensor:
        begin, end = ours = self._shard.even_part(layer.num_heads)
        sinks = self._tensor(end - begin, dtype=torch.float32)
        self.map.add(self._config.names.sinks.format(layer=index), (layer.num_heads,), sinks, rows=(ours,))
        return sinks

    def _state(self, index: int, state: StateConfig) -> StateWeights:
        if isinstance(state, DeltaNetConfig):
            return self._delta_net(index, state)
        if isinstance(state, Mamba2Config):
            return self._mamba2(index, state)
        return self._short_conv(index, state)

    def _delta_net(self, index: int, net: DeltaNetConfig) -> DeltaNetWeights:
        module, own = self._config.names.state.format(layer=index), net.shared_by(self._shard.size)
        weights = DeltaNetWeights(
            config=own,
            conv_weight=self._tensor(own.conv_size, own.conv_dim, dtype=torch.float32),
            a_log=self._tensor(own.num_value_heads, dtype=torch.float32),
            dt_bias=self._tensor(own.num_value_heads, dtype=torch.float32),
            norm_weight=self._tensor(own.value_dim, dtype=torch.float32),
            epsilon=self._config.norm.epsilon,
        )
        conv_shape = (net.conv_dim, 1, net.conv_size)
        ours = (self._shard.even_part(net.num_value_heads),)
        self.map.add(f"{module}.conv1d.weight", conv_shape, weights.conv_weight.T[:, None], rows=self._conv_rows(net))
        self.map.add(f"{module}.A_log", (net.num_value_heads,), weights.a_log, rows=ours)
        self.map.add(f"{module}.dt_bias", (net.num_value_heads,), weights.dt_bias, rows=ours)
        self.map.add(f"{module}.norm.weight", (net.value_dim,), weights.norm_weight)
        return weights

    def _conv_rows(self, net: DeltaNetConfig) -> tuple[Range, Range, Range]:
        """Return this rank's channels of the convolution: of queries, keys and values."""
        keys = _scaled(self._shard.even_part(net.num_key_heads), net.key_dim)
        values = _scaled(self._shard.even_part(net.num_value_heads), net.value_dim)
        key_size = net.num_key_heads * net.key_dim
        return keys, (key_size + keys[0], key_size + keys[1]), (2 * key_size + values[0], 2 * key_size + values[1])

    def _delta_net_rows(self, index: int, net: DeltaNetConfig) -> list[Rows]:
        """Return this rank's rows of q, k, v, z, b and a."""
        names, module = self._config.names, self._config.names.state.format(layer=index)
        if names.delta_net_layout == "apart":
            ours = self._shard.even_part(net.num_value_heads)
            return [
                *(Rows(f"{module}.in_proj_qkv", net.conv_dim, (rows,)) for rows in self._conv_rows(net)),
                Rows(f"{module}.in_proj_z", net.output_dim, (_scaled(ours, net.value_dim),)),
                *(Rows(f"{module}.in_proj_{part}", net.num_value_heads, (ours,)) for part in "ba"),
            ]
        ours, num_values = self._shard.even_part(net.num_key_heads), net.num_value_heads // net.num_key_heads
        sizes = (net.key_dim, net.key_dim, num_values * net.value_dim, num_values * net.value_dim)
        return [
            *_by_turns(f"{module}.in_proj_qkvz", net.num_key_heads, sizes, [ours] * 4),
            *_by_turns(f"{module}.in_proj_ba", net.num_key_heads, (num_values, num_values), [ours] * 2),
        ]

    def _short_conv(self, index: int, conv: ShortConvConfig) -> ShortConvWeights:
        name, ours = f"{self._config.names.state.format(layer=index)}.conv", self._shard.even_part(conv.size)
        own = conv.shared_by(self._shard.size)
        weight = self._tensor(own.conv_size, own.size, dtype=torch.float32)
        bias = self._tensor(own.size, dtype=torch.float32) if own.has_bias else None
        self.map.add(f"{name}.weight", (conv.size, 1, conv.conv_size), weight.T[:, None], rows=(ours,))
        if bias is not None:
            self.map.add(f"{name}.bias", (conv.size,), bias, rows=(ours,))
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
            conv_weight=self._tensor(own.conv_size, own.conv_dim, dtype=torch.float32),
            conv_bias=self._tensor(own.conv_dim, dtype=torch.float32) if own.has_conv_bias else None,
            a_log=self._tensor(own.num_heads, dtype=torch.float32),
            dt_bias=self._tensor(own.num_heads, dtype=torch.float32),
            d=self._tensor(own.num_heads, dtype=torch.float32),
            norm_weight=self._tensor(own.output_dim, dtype=torch.float32),
            epsilon=self._config.norm.epsilon,
        )
        shape, conv_weight = (mamba.conv_dim, 1, mamba.conv_size), weights.conv_weight.T[:, None]
        self.map.add(f"{module}.conv1d.weight", shape, conv_weight, rows=rows)
        if weights.conv_bias is not None:
            self.map.add(f"{module}.conv1d.bias", shape[:1], weights.conv_bias, rows=rows)
        for name, vector in (("A_log", weights.a_log), ("dt_bias", weights.dt_bias), ("D", weights.d)):
            self.map.add(f"{module}.{name}", (mamba.num_heads,), vector, rows=(heads,))
        ours = (_scaled(heads, mamba.head_dim),)
        self.map.add(f"{module}.norm.weight", (mamba.output_dim,), weights.norm_weight, rows=ours)
        return weights

    def _mamba2_conv_rows(self, mamba: Mamba2Config) -> tuple[Range, Range, Range]:
        """Return this rank's channels of the convolution: of x, B and C."""
        heads = _scaled(self._shard.even_part(mamba.num_heads), mamba.head_dim)
        groups = (0, 1) if mamba.num_groups == 1 else self._shard.even_part(mamba.num_groups)
        begin, end = _scaled(groups, mamba.state_size)
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
            Rows(name, mamba.projected_dim, (*convolved, _scaled(heads, mamba.head_dim))),
            Rows(name, mamba.projected_dim, ((first + heads[0], first + heads[1]),)),
        ]

    def _qkv_rows(self, index: int, layer: LayerConfig) -> list[Rows]:
        """Return this rank's rows of q, of k and of v, and of the gate of what is attended."""
        names = self._config.names
        tensors = [name.format(layer=index) for name in names.qkv]
        counts = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        ours_of_kv = self._shard.kv_heads(layer)
        ours = (self._shard.even_part(layer.num_heads), ours_of_kv, ours_of_kv)
        dim = layer.head_dim
        if names.qkv_layout == "apart":
            parts = zip(tensors, counts, ours, strict=True)
            query, *others = (Rows(tensor, count * dim, (_scaled(heads, dim),)) for tensor, count, heads in parts)
            if not layer.has_output_gate:
                return [query, *others]
            query, gate = _by_turns(tensors[0], counts[0], (dim, dim), [ours[0]] * 2)
            return [query, *others, gate]
        total = sum(counts) * dim
        if names.qkv_layout == "merged":
            begins = (0, counts[0], counts[0] + counts[1])
            return [
                Rows(tensors[0], total, (_scaled((first + heads[0], first + heads[1]), dim),))
                for first, heads in zip(begins, ours, strict=True)
            ]
        return _by_turns(tensors[0], layer.num_heads, (dim, dim, dim), ours)

    def _columns(self, parts: Sequence[Rows], *, has_bias: bool, role: MatrixRole = "layer") -> MatrixT:
        """Return a matrix of this rank's outputs, from the hidden state."""
        num_inputs = self._config.hidden_size
        stored = self._stored_formats([part.tensor for part in parts])
        sizes = [part.count for part in parts]
        matrix = self._kernels.matrix(num_inputs, sizes, has_bias=has_bias, role=role, stored=stored)
        for part, weight in zip(parts, matrix.weights, strict=True):
            self.map.add(f"{part.tensor}.weight", (part.tensor_rows, num_inputs), weight, rows=part.ranges)
        if has_bias:
            for part, bias in zip(parts, matrix.biases, strict=True):
                self.map.add(f"{part.tensor}.bias", (part.tensor_rows,), bias, rows=part.ranges)
        return matrix

    def _row_parallel(self, name: str, num_inputs: int, ours: Range, has_bias: bool) -> MatrixT:
        """Return a matrix of this rank's inputs, to the hidden state; the results are summed, so one adds the bias."""
        num_outputs, adds_bias = self._config.hidden_size, has_bias and self._shard.rank == 0
        stored = self._stored_formats([name])
        matrix = self._kernels.matrix(ours[1] - ours[0], [num_outputs], has_bias=adds_bias, stored=stored)
        columns = None if ours == (0, num_inputs) else ours
        self.map.add(f"{name}.weight", (num_outputs, num_inputs), matrix.weights[0], columns=columns)
        if adds_bias:
            self.map.add(f"{name}.bias", (num_outputs,), matrix.biases[0])
        elif has_bias:
            self.map.ignore(f"{name}.bias", (num_outputs,))
        return matrix

    def _vocabulary_matrix(self, name: str) -> MatrixT:
        """Return this rank's rows of the embedding or the head; what pads them is never read or cut off."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        begin, end = self._shard.vocabulary
        num_padded = self._shard.vocabulary_rows - (end - begin)
        sizes = [end - begin, num_padded] if num_padded else [end - begin]
        stored = self._stored_formats([name] * len(sizes))
        matrix = self._kernels.matrix(shape[1], sizes, role="vocabulary", stored=stored)
        self.map.ignore(f"{name}.weight", shape)
        if begin < end:
            self.map.add(f"{name}.weight", shape, matrix.weights[0], rows=((begin, end),))
        return matrix

    def _embedding_weights(self, tokens: MatrixT) -> EmbeddingWeights[MatrixT]:
        config, names = self._config, self._config.names
        positions, offset = None, config.position_offset
        if offset is not None:
            positions = self._tensor(config.max_position_embeddings + offset, config.hidden_size)
            self.map.add(f"{names.position_embedding}.weight", tuple(positions.shape), positions)
        return EmbeddingWeights(
            tokens,
            vocabulary=self._shard.vocabulary,
            scale=None if config.embedding_scale == 1.0 else self._tensor().fill_(config.embedding_scale),
            positions=positions,
            position_offset=offset or 0,
            norm=self._norm(names.embedding_norm) if config.has_embedding_norm else None,
        )

    def _head_norms(self, index: int, layer: LayerConfig) -> HeadNorms | None:
        config, names = self._config, self._config.names
        if not config.has_query_key_norm or layer.state is not None:
            return None
        return HeadNorms(
            self._norm(names.query_norm.format(layer=index), layer.head_dim),
            self._norm(names.key_norm.format(layer=index), layer.head_dim),
            self._shard.num_heads(layer),
            self._shard.num_kv_heads(layer),
        )

    def _output_norm(self, name: str, index: int) -> Norm | None:
        return self._norm(name.format(layer=index)) if self._config.has_output_norms else None

    def _norm(self, name: str, size: int | None = None) -> Norm:
        norm = self._config.norm
        # 1 + weight in a shorter format would round the weight of Gemma.
        dtype = torch.float32 if norm.weight_offset else self._kernels.dtype
        shape = (size or self._config.hidden_size,)
        weight = self._tensor(*shape, dtype=dtype)
        self.map.add(f"{name}.weight", shape, weight, offset=norm.weight_offset)
        bias = None
        if norm.has_bias:
            bias = self._tensor(*shape, dtype=dtype)
            self.map.add(f"{name}.bias", shape, bias)
        return Norm(weight, bias, norm.epsilon, norm.is_layer_norm)

    def _stored_formats(self, tensors: Sequence[str]) -> Sequence[NumberFormat]:
        return () if self._stored is None else self._stored([f"{tensor}.weight" for tensor in tensors])

    def _tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._kernels.dtype, device=self._kernels.device)


def _scaled(heads: Range, head_dim: int) -> Range:
    """Return the rows of a range of heads."""
    return heads[0] * head_dim, heads[1] * head_dim


def _by_turns(tensor: str, num_heads: int, sizes: Sequence[int], ours: Sequence[Range]) -> list[Rows]:
    """Return the rows of each part of a tensor that holds, head by head, so many rows of each."""
    rows_of_head = sum(sizes)
    begins = [sum(sizes[:part]) for part in range(len(sizes))]
    return [
        Rows(
            tensor,
            num_heads * rows_of_head,
            tuple((head * rows_of_head + begin, head * rows_of_head + begin + size) for head in range(*heads)),
        )
        for begin, size, heads in zip(begins, sizes, ours, strict=True)
    ]
