"""The weights of a decoder on one rank: made by the kernels, with a map from the tensors of a checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic

import torch

from executor_svc.adapters.products import AdaptedPart
from executor_svc.adapters.slots import AdapterSlots
from executor_svc.checkpoint.weight_map import Range, WeightMap
from executor_svc.models.config import Activation, ExpertsConfig, LayerConfig, MlpConfig, ModelConfig, activation_of
from executor_svc.models.dense import (
    DenseKernels,
    Embedding,
    EmbeddingWeights,
    ExpertNorms,
    Experts,
    HeadNorms,
    LastSegment,
    Latent,
    LayerEnd,
    LayerInputs,
    MatrixRole,
    MatrixStack,
    MatrixT,
    Mlp,
    Norm,
    PerLayer,
    Segment,
)
from executor_svc.models.latent_weights import LatentLayers
from executor_svc.models.rotary_embedding import sinusoidal_positions
from executor_svc.models.sharding import Rows, Shard, encoder_rows, qkv_rows
from executor_svc.models.state_weights import StateLayers
from executor_svc.native.structs import FLOAT_INPUTS, NumberFormat
from executor_svc.states.interface import StateWeights
from octavo_shared.errors import ModelLoadError

StoredFormats = Callable[[Sequence[str]], Sequence[NumberFormat]]


class DecoderWeights(Generic[MatrixT]):
    """All weights, uninitialised, joined to segments; `map` says where each tensor of a checkpoint goes.

    Args:
        config: Of the model.
        kernels: What makes matrices and segments.
        shard: The part of this rank.
        stored: The number formats of the parts of a matrix, by the names of their tensors, where a file has decided
            them; None: the kernels decide.
        drafted: Those of the model for which these are the head that drafts: both share the embedding, the vocabulary's
            matrix and the map. None: these are of a model.
        adapters: What holds adapters of linear layers of attention and of dense MLPs; None: there are none.
        embedded: Those of the decoder for which these are the encoder: both share the tokens' embedding and the map.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: DenseKernels[MatrixT],
        shard: Shard,
        stored: StoredFormats | None = None,
        drafted: "DecoderWeights[MatrixT] | None" = None,
        adapters: AdapterSlots | None = None,
        embedded: "DecoderWeights[MatrixT] | None" = None,
    ) -> None:
        sharing = drafted or embedded
        self.map: WeightMap = WeightMap() if sharing is None else sharing.map
        self._config = config
        self._kernels = kernels
        self._shard = shard
        self._stored = stored
        self._adapters = adapters
        self._state_layers = StateLayers(config, shard, self.map, kernels.device)
        self._latent_layers = LatentLayers(
            config, shard, kernels, self.map, self._columns_of_vector, self._norm, self._stored_formats
        )
        names = config.names
        self.joins: Sequence[Segment] = ()  # of embeddings and hidden states, whose sum a head that drafts begins with
        self.embed: Embedding
        self._embedding: MatrixT
        self._vocabulary: MatrixT
        if drafted is None:
            is_tied, has_bias = config.tie_word_embeddings, config.has_logits_bias
            self._embedding = (
                self._vocabulary_matrix(names.embedding, has_bias=is_tied and has_bias)
                if embedded is None
                else embedded._embedding
            )
            self.embed = kernels.embedding(self._embedding_weights(self._embedding))
            self._vocabulary = self._embedding if is_tied else self._vocabulary_matrix(names.head, has_bias=has_bias)
        else:
            self._embedding = drafted._embedding
            self.embed, self._vocabulary, self.joins = drafted.embed, drafted._vocabulary, self._joins()
        self.segments: list[Segment | LastSegment] = []  # a `LastSegment` is in front of a layer that mixes no tokens
        self.sinks: list[torch.Tensor | None] = []  # of each layer, of this rank's heads; see `AttentionLayer.sinks`
        # The same of `AttentionLayer.distance_biases`, which layers may share.
        self.distance_biases: list[torch.Tensor | None] = []
        self._tables: dict[str, torch.Tensor] = {}  # those, by the names of their tensors
        self.states: list[StateWeights | None] = []  # of each layer; None: it has none
        self.latents: list[Latent | None] = []  # the same
        # What makes keys and values of the normed states of an encoder, by layer.
        self.encoder_maps: dict[int, Segment] = {}
        self.layer_inputs = LayerInputs(torch.empty(0))  # of the step that runs
        # What a token has for each layer: a row of its own, and a projection of its embedding; None: none.
        self.token_inputs: tuple[Embedding, Segment] | None = None
        if config.per_layer_size:
            self.token_inputs = self._token_inputs()
        self.has_experts_apart = False  # whether there are experts that lie in no stacks
        layer_end: LayerEnd[MatrixT] | None = None
        for index, layer in enumerate(config.layers):
            if layer.has_mixer:
                name = config.names_of(index).attention_norm
                norm = self._norm(name.format(layer=index)) if name else None
                projection = self._projection(index, layer)
                head_norms = self._head_norms(index, layer)
                self.segments.append(
                    kernels.segment(layer_end, norm, projection, head_norms, is_post_norm=config.is_post_norm)
                )
            else:
                assert layer_end is not None, "the first layer mixes tokens"
                self.segments.append(kernels.last_segment(layer_end, is_post_norm=config.is_post_norm))
            self.sinks.append(self._sinks(index, layer) if layer.has_sinks else None)
            self.distance_biases.append(self._distance_biases(index, layer))
            self.states.append(None if layer.state is None else self._state_layers.weights(index, layer.state))
            self.latents.append(None if layer.latent is None else self._latent_layers.latent(index, layer))
            if layer.attends_to_encoder:
                rows = encoder_rows(config, shard, index)
                self.encoder_maps[index] = kernels.segment(None, None, self._columns(rows, has_bias=config.qkv_bias))
            layer_end = self._layer_end(index, layer)
        assert layer_end is not None, "a model has layers"
        self.last_segment = kernels.last_segment(layer_end, is_post_norm=config.is_post_norm)
        self.norm = self._norm(names.norm)
        self.head = kernels.segment(None, self.norm, self._vocabulary)

    def _joins(self) -> Sequence[Segment]:
        """Return what takes embeddings and hidden states into one residual stream: both halves of one tensor."""
        names, size = self._config.names, self._config.hidden_size
        norms = (names.mtp_embedding_norm, names.mtp_hidden_norm)
        halves = ((0, size), (size, 2 * size))
        return [
            self._kernels.segment(
                None, self._norm(norm), self._row_parallel(names.mtp_projection, 2 * size, half, has_bias=False)
            )
            for norm, half in zip(norms, halves, strict=True)
        ]

    def _token_inputs(self) -> tuple[Embedding, Segment]:
        config, names = self._config, self._config.names
        size = config.per_layer_size
        width = config.num_hidden_layers * size
        tokens = self._vocabulary_matrix(names.per_layer_tokens, width)
        scale = self._tensor().fill_(size**0.5)
        rows = EmbeddingWeights(tokens, self._shard.vocabulary, scale, positions=None, position_offset=0, norm=None)
        norm = self._norm(names.per_layer_embedding_norm, size)
        # It is of the projection of the embedding divided by the root of its size, which the norm undoes.
        norm = replace(norm, epsilon=norm.epsilon * config.hidden_size)
        projection = self._columns([Rows(names.per_layer_embedding_projection, width, ((0, width),))], has_bias=False)
        norms = HeadNorms(norm, norm, config.num_hidden_layers, 0)
        return self._kernels.embedding(rows), self._kernels.segment(None, None, projection, norms)

    def _per_layer(self, index: int, activation: Activation) -> PerLayer[MatrixT]:
        """Return what a layer takes of what tokens have for it; all ranks have it whole."""
        config, names = self._config, self._config.names
        size = config.per_layer_size
        gate = self._columns([Rows(names.per_layer_gate.format(layer=index), size, ((0, size),))], has_bias=False)
        name = names.per_layer_projection.format(layer=index)
        projection = self._row_parallel(name, size, (0, size), has_bias=False)
        norm = self._norm(names.per_layer_norm.format(layer=index))
        return PerLayer(gate, projection, norm, activation, self.layer_inputs, index * size, size)

    def _layer_scale(self, index: int) -> torch.Tensor:
        scale = self._tensor(1, dtype=torch.float32)
        self.map.add(self._config.names.layer_scale.format(layer=index), (1,), scale)
        return scale

    def _projection(self, index: int, layer: LayerConfig) -> MatrixT:
        if layer.state is not None:
            rows, role = self._state_layers.projected_rows(index, layer.state)
            return self._columns(rows, has_bias=layer.state.has_bias, role=role)
        if layer.latent is not None:
            return self._columns(self._latent_layers.projected_rows(index, layer), has_bias=False, role="qkv")
        rows = qkv_rows(self._config, self._shard, index)
        matrix = self._columns(rows, has_bias=self._config.qkv_bias, role="qkv")
        (matrix,) = self._adapted([matrix], [self._column_parts(rows)])
        return matrix

    def _adapted(
        self, matrices: Sequence[MatrixT], parts: Sequence[Sequence[AdaptedPart]], *, of_wanted: bool = False
    ) -> Sequence[MatrixT]:
        """Return matrices with the same inputs that adapters may change; see `DenseKernels.adapted`."""
        if self._adapters is None:
            return matrices
        return self._kernels.adapted(matrices, parts, self._adapters, of_wanted=of_wanted)

    def _column_parts(self, parts: Sequence[Rows]) -> list[AdaptedPart]:
        return [
            AdaptedPart(part.tensor, (part.tensor_rows, self._config.hidden_size), part.ranges, None) for part in parts
        ]

    def _row_part(self, name: str, num_inputs: int, ours: Range) -> list[AdaptedPart]:
        size = self._config.hidden_size
        return [AdaptedPart(name, (size, num_inputs), ((0, size),), None if ours == (0, num_inputs) else ours)]

    def _is_last(self, index: int) -> bool:
        """Whether the end of a layer has the wanted tokens alone."""
        return index == len(self._config.layers) - 1

    def _layer_end(self, index: int, layer: LayerConfig) -> LayerEnd[MatrixT]:
        config, names = self._config, self._config.names_of(index)
        output, has_bias = names.attention_output, config.attention_output_bias
        num_inputs = layer.num_heads * layer.head_dim
        if layer.state is not None:
            output, has_bias, num_inputs = f"{names.state}.out_proj", layer.state.has_bias, layer.state.output_dim
        if layer.latent is not None:
            num_inputs = layer.num_heads * layer.latent.value_dim
        matrix, norm = None, None
        if layer.has_mixer:
            ours = self._shard.even_part(num_inputs)
            name = output.format(layer=index)
            matrix = self._row_parallel(name, num_inputs, ours, has_bias)
            part = self._row_part(name, num_inputs, ours)
            (matrix,) = self._adapted([matrix], [part], of_wanted=self._is_last(index))
            norm = self._output_norm(names.attention_output_norm, index)
        if layer.mlp is None:
            return LayerEnd(matrix, norm, None, None, None, config.residual_scale)
        mlp: Mlp[MatrixT] | Experts[MatrixT]
        mlp_norm = self._norm(names.mlp_norm.format(layer=index))
        if isinstance(layer.mlp, ExpertsConfig):
            mlp = self._experts(index, layer.mlp)
        else:
            mlp = self._mlp(layer.mlp, names.gate_up, names.down, adapted_layer=index, layer=index)
        mlp_output_norm = self._output_norm(names.mlp_output_norm, index)
        per_layer = self._per_layer(index, activation_of(layer.mlp)) if config.per_layer_size else None
        scale = self._layer_scale(index) if config.has_layer_scales else None
        return LayerEnd(matrix, norm, mlp_norm, mlp, mlp_output_norm, config.residual_scale, per_layer, scale)

    def _mlp(
        self,
        mlp: MlpConfig,
        gate_up: Sequence[str],
        down: str,
        stacks: tuple[MatrixStack, MatrixStack] | None = None,
        adapted_layer: int | None = None,
        **numbers: int,
    ) -> Mlp[MatrixT]:
        """Return an MLP whose tensors have these names, with `numbers` in them; `stacks`: see `Experts`.

        `adapted_layer` is the layer of an MLP that adapters may change; None: they may not.
        """
        up_stack, down_stack = stacks or (None, None)
        tensors = [name.format(**numbers) for name in gate_up]
        self._check_alike(tensors)
        size = mlp.intermediate_size
        begin, end = self._shard.even_part(size)
        parts = [Rows(tensors[-1], size, ((begin, end),))]
        if mlp.is_gated and len(tensors) == 1:
            parts = [Rows(tensors[0], 2 * size, ((first + begin, first + end),)) for first in (0, size)]
        elif mlp.is_gated:
            parts = [Rows(tensor, size, ((begin, end),)) for tensor in tensors]
        is_merged = mlp.is_gated and self._kernels.merges_gate_and_up
        matrices = [parts] if is_merged else [[part] for part in parts]
        firsts: Sequence[MatrixT] = [
            self._columns(matrix, has_bias=mlp.has_bias, stack=up_stack) for matrix in matrices
        ]
        down_name = down.format(**numbers)
        down_matrix = self._row_parallel(down_name, size, (begin, end), mlp.has_bias, down_stack)
        if adapted_layer is not None:
            of_wanted = self._is_last(adapted_layer)
            firsts = self._adapted(firsts, [self._column_parts(each) for each in matrices], of_wanted=of_wanted)
            part = self._row_part(down_name, size, (begin, end))
            (down_matrix,) = self._adapted([down_matrix], [part], of_wanted=of_wanted)
        *gate, up = firsts
        return Mlp(gate[0] if gate else None, up, down_matrix, mlp.activation, is_merged)

    def _experts(self, index: int, experts: ExpertsConfig) -> Experts[MatrixT]:
        names = self._config.names
        for name in (names.expert_gate_up[0], names.expert_down):
            self._check_alike([name.format(layer=index, expert=expert) for expert in range(experts.num_experts)])
        router = self._router(names.router.format(layer=index), experts.num_experts, experts.has_router_bias)
        stacks = MatrixStack(experts.num_experts), MatrixStack(experts.num_experts)
        mlps = tuple(
            self._mlp(experts.mlp, names.expert_gate_up, names.expert_down, stacks, layer=index, expert=expert)
            for expert in range(experts.num_experts)
        )
        are_stacked = all(stack.weights is not None for stack in stacks)
        self.has_experts_apart = self.has_experts_apart or not are_stacked
        correction_bias = (
            self._of_experts(names.correction_bias, index, experts) if experts.has_correction_bias else None
        )
        scales = self._of_experts(names.expert_scales, index, experts) if experts.has_expert_scales else None
        norms = self._expert_norms(index) if experts.has_norms else None
        mixture = Experts(
            router, mlps, experts, correction_bias, scales=scales, norms=norms, stacks=stacks if are_stacked else None
        )
        if experts.shared is None:
            return mixture
        return replace(
            mixture,
            shared=self._mlp(experts.shared, names.shared_gate_up, names.shared_down, layer=index),
            shared_gate=self._router(names.shared_gate.format(layer=index), 1, has_bias=False)
            if experts.has_shared_gate
            else None,
        )

    def _of_experts(self, name: str, index: int, experts: ExpertsConfig) -> torch.Tensor:
        """Return a float32 of each expert; the name has no suffix."""
        values = self._tensor(experts.num_experts, dtype=torch.float32)
        self.map.add(name.format(layer=index), (experts.num_experts,), values)
        return values

    def _expert_norms(self, index: int) -> ExpertNorms:
        names, size, norm = self._config.names, self._config.hidden_size, self._config.norm
        weight = self._tensor(size)
        self.map.add(names.router_norm.format(layer=index), (size,), weight, factor=size**-0.5)
        inputs, outputs, shared_outputs = (
            self._norm(name.format(layer=index))
            for name in (names.expert_norm, names.expert_output_norm, names.shared_output_norm)
        )
        return ExpertNorms(Norm(weight, None, norm.epsilon), inputs, outputs, shared_outputs)

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

    def _distance_biases(self, index: int, layer: LayerConfig) -> torch.Tensor | None:
        if layer.distance_buckets is None:
            return None
        name = self._config.names_of(index).distance_biases.format(layer=index)
        if name not in self._tables:
            begin, end = ours = self._shard.even_part(layer.num_heads)
            buckets = layer.distance_buckets.of_distances
            table = self._tables[name] = self._tensor(end - begin, len(buckets), dtype=torch.float32)
            shape = layer.distance_buckets.num_buckets, layer.num_heads
            rows = [(bucket, bucket + 1) for bucket in buckets]
            self.map.add(f"{name}.weight", shape, table.T, rows=rows, columns=ours)
        return self._tables[name]

    def _columns_of_vector(self, parts: Sequence[Rows], num_inputs: int) -> MatrixT:
        return self._columns(parts, has_bias=False, num_inputs=num_inputs)

    def _columns(
        self,
        parts: Sequence[Rows],
        *,
        has_bias: bool,
        role: MatrixRole = "layer",
        num_inputs: int | None = None,
        stack: MatrixStack | None = None,
    ) -> MatrixT:
        """Return a matrix of this rank's outputs, from the hidden state or from so many inputs."""
        num_inputs = num_inputs or self._config.hidden_size
        stored = self._stored_formats([part.tensor for part in parts])
        sizes = [part.count for part in parts]
        matrix = self._kernels.matrix(num_inputs, sizes, has_bias=has_bias, role=role, stored=stored, stack=stack)
        for part, weight in zip(parts, matrix.weights, strict=True):
            self.map.add(f"{part.tensor}.weight", (part.tensor_rows, num_inputs), weight, rows=part.ranges)
        if has_bias:
            for part, bias in zip(parts, matrix.biases, strict=True):
                self.map.add(f"{part.tensor}.bias", (part.tensor_rows,), bias, rows=part.ranges)
        return matrix

    def _row_parallel(
        self, name: str, num_inputs: int, ours: Range, has_bias: bool, stack: MatrixStack | None = None
    ) -> MatrixT:
        """Return a matrix of this rank's inputs, to the hidden state; the results are summed, so one adds the bias."""
        num_outputs, adds_bias = self._config.hidden_size, has_bias and self._shard.rank == 0
        stored = self._stored_formats([name])
        num_ours = ours[1] - ours[0]
        matrix = self._kernels.matrix(num_ours, [num_outputs], has_bias=adds_bias, stored=stored, stack=stack)
        columns = None if ours == (0, num_inputs) else ours
        self.map.add(f"{name}.weight", (num_outputs, num_inputs), matrix.weights[0], columns=columns)
        if adds_bias:
            self.map.add(f"{name}.bias", (num_outputs,), matrix.biases[0])
        elif has_bias:
            self.map.ignore(f"{name}.bias", (num_outputs,))
        return matrix

    def _vocabulary_matrix(self, name: str, num_inputs: int | None = None, *, has_bias: bool = False) -> MatrixT:
        """Return this rank's rows of the embedding or the head; what pads them is never read or cut off.

        `has_bias`: it makes logits, which have one.
        """
        shape = (self._config.vocab_size, num_inputs or self._config.hidden_size)
        begin, end = self._shard.vocabulary
        num_padded = self._shard.vocabulary_rows - (end - begin)
        sizes = [end - begin, num_padded] if num_padded else [end - begin]
        stored = self._stored_formats([name] * len(sizes))
        matrix = self._kernels.matrix(shape[1], sizes, has_bias=has_bias, role="vocabulary", stored=stored)
        bias = self._config.names.logits_bias
        self.map.ignore(f"{name}.weight", shape)
        if has_bias:
            self.map.ignore(bias, (1, shape[0]))
        if begin < end:
            self.map.add(f"{name}.weight", shape, matrix.weights[0], rows=((begin, end),))
        if begin < end and has_bias:
            self.map.add(bias, (1, shape[0]), matrix.biases[0][None], columns=(begin, end))
        return matrix

    def _embedding_weights(self, tokens: MatrixT) -> EmbeddingWeights[MatrixT]:
        config, names = self._config, self._config.names
        positions, offset = None, config.position_offset
        if config.has_sinusoidal_positions:
            table = sinusoidal_positions(config.max_position_embeddings, config.hidden_size)
            positions = table.to(self._kernels.device, self._kernels.dtype)
        elif offset is not None:
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
        query = self._norm(names.query_norm.format(layer=index), layer.head_dim)
        if layer.cache_of is not None:
            return HeadNorms(query, query, self._shard.num_heads(layer), 0)
        key, value = self._norm(names.key_norm.format(layer=index), layer.head_dim), None
        if config.has_value_norm:
            value = replace(query, weight=torch.ones_like(query.weight))
        return HeadNorms(query, key, self._shard.num_heads(layer), self._shard.num_kv_heads(layer), value)

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

    def _check_alike(self, tensors: Sequence[str]) -> None:
        """Check that matrices with the same inputs all take floats, or all codes.

        Raises: ModelLoadError: they do not.
        """
        formats = [self._stored_formats([tensor]) for tensor in tensors]
        are_floats = [each[0] in FLOAT_INPUTS for each in formats if each]
        if len(set(are_floats)) == 2:
            first, other = tensors[are_floats.index(True)], tensors[are_floats.index(False)]
            raise ModelLoadError(f"{first} is not in codes of 4 bits, but {other} is: both must be, or neither")

    def _stored_formats(self, tensors: Sequence[str]) -> Sequence[NumberFormat]:
        return () if self._stored is None else self._stored([f"{tensor}.weight" for tensor in tensors])

    def _tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._kernels.dtype, device=self._kernels.device)
