"""The dense part of a model in the C library; see `executor_svc.models.dense`."""

from collections.abc import Sequence

import torch

from executor_svc.models.dense import LayerEnd
from executor_svc.native.library import NativeLibrary, SegmentStruct
from executor_svc.native.matrix import PackedMatrix


class NativeDense:
    """Matrices and segments on a CPU, float32.

    Args:
        library: The compiled library.
        is_int8: Whether weights are quantized to int8 as they are loaded, the embedding included.
    """

    def __init__(self, library: NativeLibrary, *, is_int8: bool = False) -> None:
        self._library = library
        self._is_int8 = is_int8
        self.dtype = torch.float32
        self.device = torch.device("cpu")

    def matrix(self, num_inputs: int, sizes: Sequence[int], *, has_bias: bool = False) -> PackedMatrix:
        """Return a map with uninitialised weights; see `DenseKernels`."""
        return PackedMatrix(self._library, num_inputs, sizes, has_bias, self._is_int8)

    def vector(self, size: int) -> torch.Tensor:
        """Return an uninitialised vector, [size]."""
        return torch.empty(size)

    def embed(self, embedding: PackedMatrix, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the tokens; see `DenseKernels`."""
        hidden = torch.empty(len(token_ids), embedding.num_inputs)
        embedding.read_rows(token_ids.long(), hidden)
        return hidden

    def segment(
        self,
        layer_end: LayerEnd[PackedMatrix] | None,
        norm: torch.Tensor,
        projection: PackedMatrix,
        norm_epsilon: float,
    ) -> "NativeSegment":
        """Join weights to a segment; see `DenseKernels`."""
        return NativeSegment(self._library, layer_end, norm, projection, norm_epsilon)

    def last_segment(self, layer_end: LayerEnd[PackedMatrix], norm_epsilon: float) -> "NativeLastSegment":
        """Join the weights of the last layer's end; see `DenseKernels`."""
        return NativeLastSegment(self._library, layer_end, norm_epsilon)


class NativeSegment:
    """A segment as one call of the library; see `executor_svc.models.dense.Segment`."""

    def __init__(
        self,
        library: NativeLibrary,
        layer_end: LayerEnd[PackedMatrix] | None,
        norm: torch.Tensor,
        projection: PackedMatrix,
        norm_epsilon: float,
    ) -> None:
        self._library = library
        self._weights = (layer_end, norm, projection)  # the struct has pointers into them
        self._num_outputs = projection.num_outputs
        self._struct = _make_struct(layer_end, len(norm), norm_epsilon)
        self._struct.projection = projection.struct
        self._struct.norm = norm.data_ptr()

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Run the segment."""
        out = torch.empty(residual.shape[0], self._num_outputs)
        self._library.segment(self._struct, attended, residual, out)
        return out


class NativeLastSegment:
    """See `executor_svc.models.dense.LastSegment`."""

    def __init__(self, library: NativeLibrary, layer_end: LayerEnd[PackedMatrix], norm_epsilon: float) -> None:
        self._library = library
        self._weights = layer_end  # the struct has pointers into it
        self._struct = _make_struct(layer_end, len(layer_end.norm), norm_epsilon)

    def __call__(self, attended: torch.Tensor, residual: torch.Tensor) -> None:
        """End the last layer."""
        self._library.segment(self._struct, attended, residual, None)


def _make_struct(layer_end: LayerEnd[PackedMatrix] | None, hidden_size: int, norm_epsilon: float) -> SegmentStruct:
    """Return a segment without a projection."""
    if layer_end is None:
        return SegmentStruct(hidden_size=hidden_size, norm_epsilon=norm_epsilon)
    return SegmentStruct(
        attention_output=layer_end.attention_output.struct,
        gate=layer_end.gate.struct,
        up=layer_end.up.struct,
        down=layer_end.down.struct,
        post_attention_norm=layer_end.norm.data_ptr(),
        hidden_size=hidden_size,
        intermediate_size=layer_end.gate.num_outputs,
        has_layer_end=1,
        norm_epsilon=norm_epsilon,
    )
