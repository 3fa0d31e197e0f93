"""The dense part of a model in the C library, whole or shared out to ranks; see `executor_svc.models.dense`."""

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass, replace
from typing import Final

import torch

from executor_svc.adapters.products import AdaptedPart, NativeAdapted
from executor_svc.adapters.slots import AdapterSlots
from executor_svc.attention.interface import Rotation
from executor_svc.models.config import Activation
from executor_svc.models.dense import (
    EmbeddingWeights,
    Experts,
    HeadMaps,
    HeadNorms,
    LastSegment,
    LatentWeights,
    LayerEnd,
    MatrixRole,
    MatrixStack,
    Mlp,
    Norm,
    Segment,
)
from executor_svc.models.native_latent import NativeLatent, norm_struct
from executor_svc.models.weight_format import matrix_formats
from executor_svc.native.binding import WeightMemory
from executor_svc.native.library import NativeLibrary
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import (
    EmbeddingStruct,
    ExpertsStruct,
    HeadNormsStruct,
    LayerEndStruct,
    LayerInputsStruct,
    MlpStruct,
    NormStruct,
    NumberFormat,
    PerLayerStruct,
    SegmentStruct,
)
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup


class NativeDense:
    """Matrices and segments on a CPU, with activations in float32."""

    merges_gate_and_up = False

    def __init__(
        self,
        library: NativeLibrary,
        *,
        number_format: NumberFormat = NumberFormat.FLOAT32,
        group: TensorParallelGroup = SINGLE_RANK,
    ) -> None:
        self._library = library
        self._number_format = number_format
        self._memory = WeightMemory()
        self._group = group
        self._rank_sum = RankSum(library, group)
        self.dtype = torch.float32
        self.device = torch.device("cpu")

    def matrix(
        self,
        num_inputs: int,
        sizes: Sequence[int],
        *,
        has_bias: bool = False,
        role: MatrixRole = "layer",
        stored: Sequence[NumberFormat] = (),
        stack: MatrixStack | None = None,
    ) -> PackedMatrix:
        """Return a map with uninitialised weights; see `DenseKernels`. Each has memory of its own."""
        del stack
        formats = matrix_formats(self._number_format, role, sizes, stored)
        return PackedMatrix(self._library, num_inputs, formats, has_bias=has_bias, memory=self._memory)

    def adapted(
        self,
        matrices: Sequence[PackedMatrix],
        parts: Sequence[Sequence[AdaptedPart]],
        slots: AdapterSlots,
        *,
        of_wanted: bool,
    ) -> Sequence[PackedMatrix]:
        """Return the matrices, to whose products adapters add; see `DenseKernels`."""
        joined = [part for own in parts for part in own]
        sizes = slots.num_slots, slots.num_shrunk(joined)
        slots.add(joined, NativeAdapted(self._library, matrices, *sizes, slots.current(of_wanted=of_wanted)))
        return matrices

    def embedding(self, weights: EmbeddingWeights[PackedMatrix]) -> "NativeEmbedding":
        """Join the weights to an embedding; see `DenseKernels`."""
        return NativeEmbedding(self._library, weights, self._group)

    def segment(
        self,
        layer_end: LayerEnd[PackedMatrix] | None,
        norm: Norm | None,
        projection: PackedMatrix,
        head_norms: HeadNorms | None = None,
        *,
        is_post_norm: bool = False,
    ) -> Segment:
        """Join weights to a segment; see `DenseKernels`."""
        if layer_end is None or self._group.size == 1:
            return NativeSegment(self._library, layer_end, norm, projection, head_norms, is_post_norm=is_post_norm)
        return SharedSegment(
            self.last_segment(layer_end, is_post_norm=is_post_norm),
            NativeSegment(self._library, None, norm, projection, head_norms, is_post_norm=is_post_norm),
        )

    def last_segment(self, layer_end: LayerEnd[PackedMatrix], *, is_post_norm: bool = False) -> LastSegment:
        """Join the weights of the last layer's end; see `DenseKernels`."""
        if self._group.size == 1:
            return NativeLastSegment(self._library, layer_end, is_post_norm=is_post_norm)
        return SharedLastSegment(self._library, layer_end, self._rank_sum, is_post_norm=is_post_norm)

    def rotations(self, positions: torch.Tensor, frequencies: torch.Tensor, factor: float = 1.0) -> Rotation:
        """Return the rotary embedding of tokens; see `DenseKernels`."""
        shape = (positions.shape[0], 2 * frequencies.shape[0])
        rotation = Rotation(torch.empty(shape), torch.empty(shape))
        self._library.rotations(positions.long(), frequencies, factor, rotation.cos, rotation.signed_sin)
        return rotation

    def joined_maps(self, num_heads: int, num_inputs: int, num_outputs: int) -> HeadMaps | None:
        """Return None: panels hold outputs of one map."""
        return None

    def latent(self, weights: LatentWeights[PackedMatrix]) -> NativeLatent:
        """Join weights to what is before and behind an attention on a latent cache; see `DenseKernels`."""
        return NativeLatent(self._library, weights)

    def gate(self, values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return values * sigmoid(gates), in place."""
        self._library.gate_rows(values, gates)
        return values

    def scale_logits(self, logits: torch.Tensor, scale: float) -> torch.Tensor:
        """Return scale * logits, in place if they lie one after the other."""
        logits = logits.contiguous()
        self._library.scale(logits, scale)
        return logits

    def cap_logits(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """Return cap * tanh(logits / cap), in place if they lie one after the other."""
        logits = logits.contiguous()
        self._library.soft_cap(logits, cap)
        return logits


class NativeEmbedding:
    """See `executor_svc.models.dense.Embedding`."""

    def __init__(
        self, library: NativeLibrary, weights: EmbeddingWeights[PackedMatrix], group: TensorParallelGroup
    ) -> None:
        self._library = library
        self._group = group
        self.weights = weights  # the struct has pointers into them
        self._is_plain = weights.scale is None and weights.positions is None and weights.norm is None
        self.struct = EmbeddingStruct(
            scale=1.0 if weights.scale is None else float(weights.scale),
            positions=None if weights.positions is None else weights.positions.data_ptr(),
            position_offset=weights.position_offset,
            norm=norm_struct(weights.norm),
            hidden_size=weights.tokens.num_inputs,
        )

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed tokens."""
        tokens = self.weights.tokens
        residual = torch.empty(token_ids.shape[0], tokens.num_inputs)
        self._library.read_rows(tokens.struct, token_ids.long(), residual, self.weights.vocabulary[0])
        # One rank has the row, the others have zeros: their sum has the same bits in every order.
        residual = self._group.all_reduce(residual)
        if not self._is_plain:
            self._library.finish_embedding(self.struct, positions.long(), residual)
        return residual


# `Activation` of activation.h, in its order.
_ACTIVATIONS: Final[Sequence[Activation]] = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai", "relu2")


class _WithLayerEnd:
    """What ends a layer, maybe."""

    struct: SegmentStruct
    _layer_end: "NativeLayerEnd | None"

    def struct_with(self, inputs: LayerInputsStruct) -> SegmentStruct:
        """Return the struct with what the tokens of a step have for layers at `inputs`, which must live as long."""
        struct = SegmentStruct.from_buffer_copy(self.struct)
        if self._layer_end is not None:
            struct.end.per_layer.inputs = addressof(inputs)
        return struct


class NativeSegment(_WithLayerEnd):
    """A segment as one call of the library; see `executor_svc.models.dense.Segment`."""

    def __init__(
        self,
        library: NativeLibrary,
        layer_end: LayerEnd[PackedMatrix] | None,
        norm: Norm | None,
        projection: PackedMatrix,
        head_norms: HeadNorms | None = None,
        *,
        is_post_norm: bool = False,
    ) -> None:
        self._library = library
        self._layer_end = None if layer_end is None else NativeLayerEnd(layer_end)
        self._weights = (norm, projection, head_norms)  # the struct has pointers into them
        self.num_outputs = projection.num_outputs
        self.struct = SegmentStruct(
            norm=norm_struct(norm),
            projection=projection.struct,
            hidden_size=projection.num_inputs,
            is_post_norm=is_post_norm,
        )
        if self._layer_end is not None:
            self.struct.end, self.struct.has_layer_end = self._layer_end.struct, 1
        if head_norms is not None:
            self.struct.head_norms = HeadNormsStruct(
                norm_struct(head_norms.query),
                norm_struct(head_norms.key),
                norm_struct(head_norms.value),
                head_norms.num_heads,
                head_norms.num_kv_heads,
                len(head_norms.query.weight),
            )

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Run the segment."""
        out = torch.empty(residual.shape[0], self.num_outputs)
        if self._layer_end is not None:
            self._layer_end.take_inputs()
        self._library.segment(self.struct, attended, residual, out)
        return out


class NativeLastSegment(_WithLayerEnd):
    """See `executor_svc.models.dense.LastSegment`."""

    def __init__(
        self,
        library: NativeLibrary,
        layer_end: LayerEnd[PackedMatrix],
        post_norm: Norm | None = None,
        *,
        is_post_norm: bool = False,
    ) -> None:
        self._library = library
        self._layer_end: NativeLayerEnd = NativeLayerEnd(layer_end)
        self._post_norm = post_norm  # behind the MLP, with `mlp_norm` as the one before it; the struct points into it
        self.struct = SegmentStruct(
            end=self._layer_end.struct,
            norm=norm_struct(post_norm),
            hidden_size=self._layer_end.hidden_size,
            has_layer_end=1,
            is_post_norm=is_post_norm or post_norm is not None,
        )

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> None:
        """End a layer."""
        self._layer_end.take_inputs()
        self._library.segment(self.struct, attended, residual, None)


class RankSum:
    """Adds up the parts of all ranks in the order of the ranks, whatever the step; its memory is kept."""

    def __init__(self, library: NativeLibrary, group: TensorParallelGroup) -> None:
        self._library = library
        self._group = group
        self._memory = torch.empty(0)

    def part(self, residual: torch.Tensor) -> torch.Tensor:
        """Return memory for the part of this rank, in the shape of the residual stream; valid until the next step."""
        return self._slots(residual)[-1]

    def add(self, part: torch.Tensor, norm: NormStruct, scale: float, residual: torch.Tensor) -> None:
        """Add the sum of the parts, normed if there is a norm, and scaled, to `residual`, [num_tokens, hidden_size]."""
        parts = self._slots(residual)[:-1]
        self._group.gather(part, parts)
        self._library.add_parts(norm, scale, parts, residual)

    def _slots(self, residual: torch.Tensor) -> torch.Tensor:
        """Return room for the parts of all ranks, and behind them for our own."""
        size = (self._group.size + 1) * residual.numel()
        if self._memory.numel() < size:
            self._memory = torch.empty(size + size // 4)
        return self._memory[:size].view(self._group.size + 1, *residual.shape)


class SharedLastSegment:
    """The end of a layer that is shared out to ranks; see `executor_svc.models.dense.LastSegment`."""

    def __init__(
        self, library: NativeLibrary, layer_end: LayerEnd[PackedMatrix], rank_sum: RankSum, *, is_post_norm: bool
    ) -> None:
        self._library = library
        self._rank_sum = rank_sum
        self._layer_end = NativeLayerEnd(layer_end)
        self._has_output, self._has_mlp = layer_end.attention_output is not None, layer_end.mlp is not None
        self._struct = self._layer_end.as_segment(is_post_norm=is_post_norm)
        self._parts: list[
            tuple[NativeLayerEnd, Norm]
        ] = []  # MLPs whose sums over the ranks are normed before they add up
        if isinstance(mlp := layer_end.mlp, Experts) and mlp.norms is not None:
            assert mlp.shared is not None, "the layer has both"
            self._parts = [
                (NativeLayerEnd(replace(layer_end, mlp=replace(mlp, shared=None))), mlp.norms.outputs),
                (NativeLayerEnd(replace(layer_end, mlp=mlp.shared)), mlp.norms.shared_outputs),
            ]

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> None:
        """End a layer."""
        layer_end, part = self._layer_end.struct, self._rank_sum.part(residual)
        if self._has_output:
            assert attended is not None, "it has attended"
            self._library.linear(layer_end.attention_output, attended, part)
            self._rank_sum.add(part, layer_end.attention_output_norm, layer_end.residual_scale, residual)
        if self._parts:
            sums = torch.zeros_like(residual)
            for mlp, norm in self._parts:
                self._library.mlp(mlp.as_segment(), residual, part)
                self._rank_sum.add(part, norm_struct(norm), 1.0, sums)
            self._library.add_parts(layer_end.mlp_output_norm, layer_end.residual_scale, sums[None], residual)
        elif self._has_mlp:
            self._library.mlp(self._struct, residual, part)
            self._rank_sum.add(part, layer_end.mlp_output_norm, layer_end.residual_scale, residual)
        self._layer_end.take_inputs()
        self._library.end_layer(self._struct, residual)


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """A segment on one of several ranks; see `executor_svc.models.dense.Segment`."""

    layer_end: LastSegment
    projection: NativeSegment

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Run the segment."""
        self.layer_end(attended, residual)
        return self.projection(None, residual)


class NativeLayerEnd:
    """The end of a layer as the library has it."""

    def __init__(self, weights: LayerEnd[PackedMatrix]) -> None:
        self._weights = weights  # the structs have pointers into them
        self.struct = LayerEndStruct(
            attention_output_norm=norm_struct(weights.attention_output_norm),
            mlp_norm=norm_struct(weights.mlp_norm),
            mlp_output_norm=norm_struct(weights.mlp_output_norm),
            residual_scale=weights.residual_scale,
            layer_scale=None if weights.layer_scale is None else weights.layer_scale.data_ptr(),
        )
        self.inputs = LayerInputsStruct()  # of this layer alone, where segments run one by one
        if weights.per_layer is not None:
            self.struct.per_layer = PerLayerStruct(
                weights.per_layer.gate.struct,
                weights.per_layer.projection.struct,
                norm_struct(weights.per_layer.norm),
                addressof(self.inputs),
                weights.per_layer.begin,
            )
        if weights.attention_output is not None:
            self.struct.attention_output = weights.attention_output.struct
            self.hidden_size = weights.attention_output.num_outputs
        mlp = weights.mlp
        if mlp is None:
            return
        mlps = mlp.experts if isinstance(mlp, Experts) else (mlp,)
        self._mlps = (MlpStruct * len(mlps))(*map(_mlp_struct, mlps))
        self.struct.activation = _ACTIVATIONS.index(mlps[0].activation)
        self.hidden_size = mlps[0].down.num_outputs
        if isinstance(mlp, Experts):
            self.struct.experts = ExpertsStruct(
                router=mlp.router.struct,
                mlps=addressof(self._mlps),
                num_experts=len(mlps),
                num_chosen=mlp.config.num_chosen,
                is_normalized=mlp.config.is_normalized,
                is_sigmoid=mlp.config.scoring == "sigmoid",
                correction_bias=None if mlp.correction_bias is None else mlp.correction_bias.data_ptr(),
                sum_epsilon=mlp.config.sum_epsilon,
                scale=mlp.config.scale,
                num_groups=mlp.config.num_groups,
                num_chosen_groups=mlp.config.num_chosen_groups,
                expert_scales=None if mlp.scales is None else mlp.scales.data_ptr(),
            )
            if (norms := mlp.norms) is not None:
                self.struct.experts.router_norm = norm_struct(norms.router)
                self.struct.experts.input_norm = norm_struct(norms.inputs)
                self.struct.experts.output_norm = norm_struct(norms.outputs)
                self.struct.experts.shared_output_norm = norm_struct(norms.shared_outputs)
            if mlp.shared is not None:
                self.struct.experts.shared = _mlp_struct(mlp.shared)
            if mlp.shared_gate is not None:
                self.struct.experts.shared_gate = mlp.shared_gate.struct
        else:
            self.struct.mlp = self._mlps[0]

    def as_segment(self, *, is_post_norm: bool = False) -> SegmentStruct:
        """Return a segment that is this alone."""
        sizes = {"hidden_size": self.hidden_size, "has_layer_end": 1, "is_post_norm": is_post_norm}
        return SegmentStruct(end=self.struct, **sizes)

    def take_inputs(self) -> None:
        """Point to what the tokens of this step have for the layers."""
        if self._weights.per_layer is not None:
            values = self._weights.per_layer.inputs.values
            self.inputs.values, self.inputs.stride = values.data_ptr(), values.stride(0)


def _mlp_struct(mlp: Mlp[PackedMatrix]) -> MlpStruct:
    struct = MlpStruct(up=mlp.up.struct, down=mlp.down.struct)
    if mlp.gate is not None:
        struct.gate = mlp.gate.struct
    return struct
