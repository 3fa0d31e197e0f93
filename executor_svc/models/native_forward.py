"""A decoder as the C library runs it: a step from the batch table to logits in one call.

What stays as it is from step to step, which is all but a few pointers and numbers, is put together once. Bit for bit
this is what `Decoder` does segment by segment.
"""

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.attention.cache_format import FORMAT_NUMBERS
from executor_svc.attention.interface import AttentionBackend, LayerCache
from executor_svc.attention.native_backend import NativeAttentionBackend, biases_address, cache_struct, sinks_address
from executor_svc.models.config import LayerConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.language_model import LanguageModel
from executor_svc.models.native_dense import NativeEmbedding, NativeLastSegment, NativeSegment
from executor_svc.models.native_latent import NativeLatent
from executor_svc.native.library import NativeLibrary
from executor_svc.native.structs import (
    AcceptedDraftsStruct,
    AttentionKindStruct,
    BatchStruct,
    DeltaNetStruct,
    LayerInputsStruct,
    LayerStruct,
    Mamba2Struct,
    ModelStruct,
    RotationStruct,
    ShortConvStruct,
    StepRowsStruct,
    StepStruct,
    TokenInputsStruct,
)
from executor_svc.states.interface import DeltaNetWeights, LayerState, Mamba2Weights
from executor_svc.states.live_states import AcceptedDrafts
from executor_svc.states.native_states import delta_net_struct, mamba2_struct, short_conv_struct


@dataclass(frozen=True, slots=True)
class _NativeParts:
    """The weights of a model that the library computes whole."""

    embedding: NativeEmbedding
    segments: Sequence[NativeSegment | NativeLastSegment]
    last_segment: NativeLastSegment
    head: NativeSegment
    joins: Sequence[NativeSegment]  # of the embedding and the hidden state, of a head that drafts
    token_inputs: tuple[NativeEmbedding, NativeSegment] | None  # of what tokens have for each layer
    latents: Sequence[NativeLatent | None]

    @classmethod
    def of(cls, model: Decoder) -> "_NativeParts | None":
        """Return the parts; None: other kernels have some, or several ranks share them."""
        weights = model.weights
        segments = [each for each in weights.segments if isinstance(each, NativeSegment | NativeLastSegment)]
        embedding, last_segment, head = weights.embed, weights.last_segment, weights.head
        joins = [join for join in weights.joins if isinstance(join, NativeSegment)]
        token_inputs = None
        if weights.token_inputs is not None:
            rows, projection = weights.token_inputs
            assert isinstance(rows, NativeEmbedding), "as the embedding is"
            assert isinstance(projection, NativeSegment), "as the head is"
            token_inputs = rows, projection
        if (
            len(segments) < len(weights.segments)
            or not isinstance(embedding, NativeEmbedding)
            or not isinstance(last_segment, NativeLastSegment)
            or not isinstance(head, NativeSegment)
        ):
            return None
        latents = [each if isinstance(each, NativeLatent) else None for each in weights.latents]
        return cls(embedding, segments, last_segment, head, joins, token_inputs, latents)


class NativeForward:
    """One call for a step of a decoder on its caches and states."""

    def __init__(
        self,
        library: NativeLibrary,
        model: Decoder,
        parts: _NativeParts,
        caches: Sequence[LayerCache],
        states: Sequence[LayerState],
        *,
        in_bfloat16: bool,
    ) -> None:
        self.hidden_size = model.config.hidden_size
        self.vocab_size = model.config.vocab_size
        self.draft_width = sum(state.projected_dim for state in model.shape.states.values())  # kept of a draft
        self._library = library
        self._parts = parts  # the structs have pointers into them, and into what follows
        self._attention_layers = model.attention_layers
        self._caches, self._states = caches, states
        self._frequencies, self._query_factors = model.frequencies, model.query_factors
        ropes = {rope: index for index, rope in enumerate(model.frequencies)}
        self._rotations = (RotationStruct * len(ropes))()
        for rotation, (rope, frequencies) in zip(self._rotations, model.frequencies.items(), strict=True):
            rotation.frequencies = frequencies.data_ptr()
            rotation.rotary_dim = 2 * len(frequencies)
            rotation.factor = rope.attention_factor
            if rope.query_growth:
                rotation.query_factors = model.query_factors[rope].data_ptr()
                rotation.query_interval = rope.query_interval
        layers, cache_of = model.config.layers, model.caches_of(caches)
        attending = [layer for layer in layers if layer.attends]
        distinct = list(dict.fromkeys(attending))
        self._slopes = [np.array(kind.attention.alibi_slopes or (), np.float32) for kind in distinct]
        self._kinds = (AttentionKindStruct * len(distinct))()
        for kind, like, slopes in zip(self._kinds, distinct, self._slopes, strict=True):
            cache = cache_of[layers.index(like)]  # layers that attend alike are in one cache group
            kind.group = cache.group
            kind.step = _constant_step(like, cache, slopes, in_bfloat16=in_bfloat16)
            attention = self._attention_layers[layers.index(like)]  # equal layers have the same biases of distances
            kind.step.distance_biases, kind.step.num_distances = biases_address(attention)
            kind.window = like.attention.window_tokens or 0
            kind.rotation = None if like.rope is None else addressof(self._rotations[ropes[like.rope]])
            kind.has_output_gate = like.has_output_gate
            kind.attends_to_encoder = like.attends_to_encoder
        self._layer_inputs = (LayerInputsStruct * 2)()  # of all tokens, and of the wanted ones
        self._state_structs: list[DeltaNetStruct | ShortConvStruct | Mamba2Struct] = []
        self._layers = (LayerStruct * len(layers))()
        next_state = iter(states)
        self._segments = [segment.struct_with(self._layer_inputs[0]) for segment in parts.segments]
        self._last_segment = parts.last_segment.struct_with(self._layer_inputs[1])
        of_layers = self._attention_layers, self._segments, model.weights.states, parts.latents
        for index, (struct, layer, attention, segment, weights, latent) in enumerate(
            zip(self._layers, layers, *of_layers, strict=True)
        ):
            struct.segment = addressof(segment)
            if latent is not None:
                struct.latent = addressof(latent.struct)
            if weights is not None:
                state = next(next_state)
                if isinstance(weights, DeltaNetWeights):
                    self._state_structs.append(delta_net_struct(weights))
                    struct.delta_net = addressof(self._state_structs[-1])
                elif isinstance(weights, Mamba2Weights):
                    self._state_structs.append(mamba2_struct(weights))
                    struct.mamba2 = addressof(self._state_structs[-1])
                else:
                    self._state_structs.append(short_conv_struct(weights))
                    struct.short_conv = addressof(self._state_structs[-1])
                struct.conv_states, struct.states = state.conv.data_ptr(), state.recurrent.data_ptr()
            if layer.attends:
                struct.kind = addressof(self._kinds[distinct.index(layer)])
                struct.cache = cache_struct(cache_of[index])
                struct.sinks = sinks_address(attention)
        self._token_inputs = None
        if parts.token_inputs is not None:
            rows, projection = parts.token_inputs
            for inputs in self._layer_inputs:
                inputs.stride = projection.num_outputs
            self._token_inputs = TokenInputsStruct(
                tokens=rows.weights.tokens.struct,
                projection=addressof(projection.struct),
                token_scale=rows.struct.scale,
                scale=2**-0.5,
                inputs=addressof(self._layer_inputs[0]),
                wanted_inputs=addressof(self._layer_inputs[1]),
            )
        self._model = ModelStruct(
            tokens=parts.embedding.weights.tokens.struct,
            embedding=parts.embedding.struct,
            layers=addressof(self._layers),
            kinds=addressof(self._kinds),
            rotations=addressof(self._rotations),
            num_layers=len(layers),
            num_kinds=len(distinct),
            num_rotations=len(ropes),
            last_segment=addressof(self._last_segment),
            token_inputs=None if self._token_inputs is None else addressof(self._token_inputs),
            head=addressof(parts.head.struct),
            join_embedding=addressof(parts.joins[0].struct) if parts.joins else None,
            join_hidden=addressof(parts.joins[1].struct) if parts.joins else None,
            logit_scale=model.config.logit_scale,
            logit_soft_cap=model.config.logit_soft_cap or 0.0,
        )

    def __call__(self, batch: BatchStruct) -> None:
        """Run a step; what it has pointers to must live as long."""
        self._library.forward(self._model, batch)

    def accept_drafts(self, accepted: AcceptedDrafts, draft_inputs: torch.Tensor) -> None:
        """Let the states take drafts of the last step, which has kept `draft_inputs`, [num_drafts * draft_width]."""
        rows = accepted.rows
        columns = [np.ascontiguousarray(column, np.int32) for column in (rows.slots, rows.starts, rows.lengths)]
        self._library.accept_drafts(
            self._model,
            AcceptedDraftsStruct(
                rows=StepRowsStruct(len(rows.slots), *(column.ctypes.data for column in columns)),
                first_drafts=accepted.first_drafts.ctypes.data,
                num_drafts=accepted.num_drafts,
                inputs=draft_inputs.data_ptr(),
            ),
        )


def native_forward(
    model: LanguageModel,
    attention: AttentionBackend,
    library: NativeLibrary | None,
    caches: Sequence[LayerCache],
    states: Sequence[LayerState] = (),
) -> NativeForward | None:
    """Return the one call for a model that the library computes whole; None: it does not.

    `states` are those of its layers with one; without them the model only pools.
    """
    if library is None or not isinstance(model, Decoder) or not isinstance(attention, NativeAttentionBackend):
        return None
    parts = _NativeParts.of(model)
    if parts is None or len(states) < len(model.shape.states):
        return None
    return NativeForward(library, model, parts, caches, states, in_bfloat16=attention.in_bfloat16)


def _constant_step(
    layer: LayerConfig, cache: LayerCache, slopes: npt.NDArray[np.float32], *, in_bfloat16: bool
) -> StepStruct:
    """Return what does not change from step to step, for layers that attend like this one."""
    return StepStruct(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        qkv_stride=(
            (1 + layer.has_output_gate) * layer.num_heads + (0 if layer.attention.reads_only else cache.num_vectors)
        )
        * layer.head_dim,
        block_size=cache.block_size,
        value_begin=cache.value_begin,
        block_stride=cache.keys.stride(0),
        cache_format=FORMAT_NUMBERS[cache.keys.dtype],
        first=layer.attention.first_position,
        scale=layer.attention.scale,
        soft_cap=layer.attention.soft_cap or 0.0,
        slopes=slopes.ctypes.data if len(slopes) else None,
        in_bfloat16=in_bfloat16,
        reads_only=layer.attention.reads_only,
    )
