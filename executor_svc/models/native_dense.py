"""The dense part of a model in the C library; see `executor_svc.models.dense`."""

from collections.abc import Sequence

import torch

from executor_svc.models.config import ModelConfig
from executor_svc.models.dense import LayerEnd, Mlp, Norm
from executor_svc.native.library import NativeLibrary, SegmentStruct
from executor_svc.native.matrix import PackedMatrix


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
        self, num_inputs: int, sizes: Sequence[int], *, has_bias: bool = False, is_vocabulary: bool = False
    ) -> PackedMatrix:
        """Return a map with uninitialised weights; see `DenseKernels`."""
        return PackedMatrix(self._library, num_inputs, sizes, has_bias, self._is_int8)

    def embed(self, embedding: PackedMatrix, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the tokens; see `DenseKernels`."""
        return embedding.rows(token_ids)

    def segment(
        self, layer_end: LayerEnd[PackedMatrix] | None, norm: Norm, projection: PackedMatrix
    ) -> "NativeSegment":
        """Join weights to a segment; see `DenseKernels`."""
        return NativeSegment(self._library, layer_end, norm, projection)

    def last_segment(self, layer_end: LayerEnd[PackedMatrix]) -> "NativeLastSegment":
        """Join the weights of the last layer's end; see `DenseKernels`."""
        return NativeLastSegment(self._library, layer_end)


def missing_in_native_dense(config: ModelConfig) -> str | None:
    """Say in a few words what a model has that the library does not compute; None: it computes all of it."""
    missing = {
        "LayerNorm": config.norm.is_layer_norm,
        f"the activation {config.mlp.activation}": config.mlp.activation != "silu",
        "an MLP without a gate": not config.mlp.is_gated,
        "a mixture of experts": config.experts is not None,
        "norms behind attention and MLP": config.has_output_norms,
    }
    return next((what for what, is_missing in missing.items() if is_missing), None)


class NativeSegment:
    """A segment as one call of the library; see `executor_svc.models.dense.Segment`."""

    def __init__(
        self,
        library: NativeLibrary,
        layer_end: LayerEnd[PackedMatrix] | None,
        norm: Norm,
        projection: PackedMatrix,
    ) -> None:
        self._library = library
        self._weights = (layer_end, norm, projection)  # the struct has pointers into them
        self.num_outputs = projection.num_outputs
        self.struct = _make_struct(layer_end, norm)
        self.struct.projection = projection.struct
        self.struct.norm = norm.weight.data_ptr()

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Run the segment."""
        out = torch.empty(residual.shape[0], self.num_outputs)
        self._library.segment(self.struct, attended, residual, out)
        return out


class NativeLastSegment:
    """See `executor_svc.models.dense.LastSegment`."""

    def __init__(self, library: NativeLibrary, layer_end: LayerEnd[PackedMatrix]) -> None:
        self._library = library
        self._weights = layer_end  # the struct has pointers into it
        self._struct = _make_struct(layer_end, layer_end.mlp_norm)

    def __call__(self, attended: torch.Tensor, residual: torch.Tensor) -> None:
        """End the last layer."""
        self._library.segment(self._struct, attended, residual, None)


def _make_struct(layer_end: LayerEnd[PackedMatrix] | None, norm: Norm) -> SegmentStruct:
    """Return a segment without a projection; all norms of a model have the epsilon of `norm`."""
    hidden_size = len(norm.weight)
    if layer_end is None:
        return SegmentStruct(hidden_size=hidden_size, norm_epsilon=norm.epsilon)
    mlp = layer_end.mlp
    assert isinstance(mlp, Mlp), "see missing_in_native_dense"
    assert mlp.gate is not None, "see missing_in_native_dense"
    return SegmentStruct(
        attention_output=layer_end.attention_output.struct,
        gate=mlp.gate.struct,
        up=mlp.up.struct,
        down=mlp.down.struct,
        mlp_norm=layer_end.mlp_norm.weight.data_ptr(),
        hidden_size=hidden_size,
        intermediate_size=mlp.gate.num_outputs,
        has_layer_end=1,
        norm_epsilon=norm.epsilon,
    )
