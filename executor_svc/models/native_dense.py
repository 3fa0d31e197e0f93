"""The dense part of a model in the C library; see `executor_svc.models.dense`."""

from collections.abc import Sequence
from ctypes import addressof
from typing import Final

import torch

from executor_svc.attention.interface import Rotation
from executor_svc.models.config import Activation
from executor_svc.models.dense import EmbeddingWeights, Experts, HeadNorms, LayerEnd, MatrixRole, Mlp, Norm
from executor_svc.native.library import NativeLibrary
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import (
    EmbeddingStruct,
    ExpertsStruct,
    HeadNormsStruct,
    LayerEndStruct,
    MlpStruct,
    NormStruct,
    SegmentStruct,
)

# `Activation` of activation.h, in its order.
_ACTIVATIONS: Final[Sequence[Activation]] = ("silu", "gelu", "gelu_tanh", "relu")


class NativeDense:
    """Matrices and segments on a CPU, float32.

    Args:
        library: The compiled library.
        is_int8: Whether weights are quantized to int8 as they are loaded, the embedding included.
    """

    merges_gate_and_up = False

    def __init__(self, library: NativeLibrary, *, is_int8: bool = False) -> None:
        self._library = library
        self._is_int8 = is_int8
        self.dtype = torch.float32
        self.device = torch.device("cpu")

    def matrix(
        self, num_inputs: int, sizes: Sequence[int], *, has_bias: bool = False, role: MatrixRole = "layer"
    ) -> PackedMatrix:
        """Return a map with uninitialised weights; see `DenseKernels`."""
        return PackedMatrix(self._library, num_inputs, sizes, has_bias, self._is_int8 and role != "router")

    def embedding(self, weights: EmbeddingWeights[PackedMatrix]) -> "NativeEmbedding":
        """Join the weights to an embedding; see `DenseKernels`."""
        return NativeEmbedding(self._library, weights)

    def segment(
        self,
        layer_end: LayerEnd[PackedMatrix] | None,
        norm: Norm,
        projection: PackedMatrix,
        head_norms: HeadNorms | None = None,
    ) -> "NativeSegment":
        """Join weights to a segment; see `DenseKernels`."""
        return NativeSegment(self._library, layer_end, norm, projection, head_norms)

    def last_segment(self, layer_end: LayerEnd[PackedMatrix]) -> "NativeLastSegment":
        """Join the weights of the last layer's end; see `DenseKernels`."""
        return NativeLastSegment(self._library, layer_end)

    def rotations(self, positions: torch.Tensor, frequencies: torch.Tensor) -> Rotation:
        """Return the rotary embedding of tokens; see `DenseKernels`."""
        shape = (positions.shape[0], 2 * frequencies.shape[0])
        rotation = Rotation(torch.empty(shape), torch.empty(shape))
        self._library.rotations(positions.long(), frequencies, rotation.cos, rotation.signed_sin)
        return rotation

    def cap_logits(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """Return cap * tanh(logits / cap), in place if they lie one after the other."""
        logits = logits.contiguous()
        self._library.soft_cap(logits, cap)
        return logits


class NativeEmbedding:
    """See `executor_svc.models.dense.Embedding`."""

    def __init__(self, library: NativeLibrary, weights: EmbeddingWeights[PackedMatrix]) -> None:
        self._library = library
        self._weights = weights  # the struct has pointers into them
        self._is_plain = weights.scale is None and weights.positions is None and weights.norm is None
        self._struct = EmbeddingStruct(
            scale=1.0 if weights.scale is None else float(weights.scale),
            positions=None if weights.positions is None else weights.positions.data_ptr(),
            position_offset=weights.position_offset,
            norm=norm_struct(weights.norm),
            hidden_size=weights.tokens.num_inputs,
        )

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed tokens."""
        tokens = self._weights.tokens
        residual = torch.empty(token_ids.shape[0], tokens.num_inputs)
        self._library.read_rows(tokens.struct, token_ids.long(), residual, self._weights.vocabulary[0])
        if not self._is_plain:
            self._library.finish_embedding(self._struct, positions.long(), residual)
        return residual


class NativeSegment:
    """A segment as one call of the library; see `executor_svc.models.dense.Segment`."""

    def __init__(
        self,
        library: NativeLibrary,
        layer_end: LayerEnd[PackedMatrix] | None,
        norm: Norm,
        projection: PackedMatrix,
        head_norms: HeadNorms | None = None,
    ) -> None:
        self._library = library
        self._layer_end = None if layer_end is None else NativeLayerEnd(layer_end)
        self._weights = (norm, projection, head_norms)  # the struct has pointers into them
        self.num_outputs = projection.num_outputs
        self.struct = SegmentStruct(
            norm=norm_struct(norm), projection=projection.struct, hidden_size=projection.num_inputs
        )
        if self._layer_end is not None:
            self.struct.end, self.struct.has_layer_end = self._layer_end.struct, 1
        if head_norms is not None:
            self.struct.head_norms = HeadNormsStruct(
                norm_struct(head_norms.query),
                norm_struct(head_norms.key),
                head_norms.num_heads,
                head_norms.num_kv_heads,
                len(head_norms.query.weight),
            )

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Run the segment."""
        out = torch.empty(residual.shape[0], self.num_outputs)
        self._library.segment(self.struct, attended, residual, out)
        return out


class NativeLastSegment:
    """See `executor_svc.models.dense.LastSegment`."""

    def __init__(self, library: NativeLibrary, layer_end: LayerEnd[PackedMatrix]) -> None:
        self._library = library
        self._layer_end = NativeLayerEnd(layer_end)
        hidden_size = layer_end.attention_output.num_outputs
        self._struct = SegmentStruct(end=self._layer_end.struct, hidden_size=hidden_size, has_layer_end=1)

    def __call__(self, attended: torch.Tensor, residual: torch.Tensor) -> None:
        """End the last layer."""
        self._library.segment(self._struct, attended, residual, None)


class NativeLayerEnd:
    """The end of a layer as the library has it."""

    def __init__(self, weights: LayerEnd[PackedMatrix]) -> None:
        self._weights = weights  # the structs have pointers into them
        mlp = weights.mlp
        mlps = mlp.experts if isinstance(mlp, Experts) else (mlp,)
        self._mlps = (MlpStruct * len(mlps))(*map(_mlp_struct, mlps))
        self.struct = LayerEndStruct(
            attention_output=weights.attention_output.struct,
            attention_output_norm=norm_struct(weights.attention_output_norm),
            mlp_norm=norm_struct(weights.mlp_norm),
            mlp_output_norm=norm_struct(weights.mlp_output_norm),
            activation=_ACTIVATIONS.index(mlps[0].activation),
        )
        if isinstance(mlp, Experts):
            self.struct.experts = ExpertsStruct(
                mlp.router.struct, addressof(self._mlps), len(mlps), mlp.num_chosen, mlp.is_normalized
            )
        else:
            self.struct.mlp = self._mlps[0]


def norm_struct(norm: Norm | None) -> NormStruct:
    """Return a norm as the library has it; its tensors must live as long as it is used."""
    if norm is None:
        return NormStruct()
    bias = None if norm.bias is None else norm.bias.data_ptr()
    return NormStruct(norm.weight.data_ptr(), bias, norm.is_layer_norm, norm.epsilon)


def _mlp_struct(mlp: Mlp[PackedMatrix]) -> MlpStruct:
    struct = MlpStruct(up=mlp.up.struct, down=mlp.down.struct)
    if mlp.gate is not None:
        struct.gate = mlp.gate.struct
    return struct
