"""The dense part of a model in the C library; see `executor_svc.models.dense`."""

from collections.abc import Sequence

import torch

from executor_svc.attention.interface import Rotation
from executor_svc.models.dense import EmbeddingWeights, HeadNorms, LastSegment, LayerEnd, MatrixRole, Norm, Segment
from executor_svc.models.native_segments import (
    NativeLastSegment,
    NativeSegment,
    RankSum,
    SharedLastSegment,
    SharedSegment,
    norm_struct,
)
from executor_svc.models.weight_format import matrix_formats
from executor_svc.native.library import NativeLibrary
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import EmbeddingStruct, NumberFormat
from executor_svc.native.weight_memory import WeightMemory
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup


class NativeDense:
    """Matrices and segments on a CPU, with activations in float32.

    Args:
        library: The compiled library.
        number_format: Of the weights; see `matrix_formats`.
        group: The ranks that share the model.
    """

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
    ) -> PackedMatrix:
        """Return a map with uninitialised weights; see `DenseKernels`."""
        formats = matrix_formats(self._number_format, role, sizes, stored)
        return PackedMatrix(self._library, num_inputs, formats, has_bias=has_bias, memory=self._memory)

    def embedding(self, weights: EmbeddingWeights[PackedMatrix]) -> "NativeEmbedding":
        """Join the weights to an embedding; see `DenseKernels`."""
        return NativeEmbedding(self._library, weights, self._group)

    def segment(
        self,
        layer_end: LayerEnd[PackedMatrix] | None,
        norm: Norm,
        projection: PackedMatrix,
        head_norms: HeadNorms | None = None,
    ) -> Segment:
        """Join weights to a segment; see `DenseKernels`."""
        if layer_end is None or self._group.size == 1:
            return NativeSegment(self._library, layer_end, norm, projection, head_norms)
        return SharedSegment(
            self.last_segment(layer_end), NativeSegment(self._library, None, norm, projection, head_norms)
        )

    def last_segment(self, layer_end: LayerEnd[PackedMatrix]) -> LastSegment:
        """Join the weights of the last layer's end; see `DenseKernels`."""
        if self._group.size == 1:
            return NativeLastSegment(self._library, layer_end)
        return SharedLastSegment(self._library, layer_end, self._rank_sum)

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
