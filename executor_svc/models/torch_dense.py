"""The dense part of a model in plain torch operations: any device, any number format; the reference."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 -- the name that everybody knows

from executor_svc.models.dense import LayerEnd
from executor_svc.models.layers import Linear, QuantizedLinear

TorchMatrix = Linear | QuantizedLinear


class TorchDense:
    """Matrices and segments on any device.

    Args:
        dtype: Number format of activations, and of weights that are not quantized.
        device: Where the model runs.
        is_int8: Whether weights are quantized to int8 as they are loaded, the embedding included.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, is_int8: bool = False) -> None:
        self.dtype = dtype
        self.device = device
        self._is_int8 = is_int8

    def matrix(self, num_inputs: int, sizes: Sequence[int], *, has_bias: bool = False) -> TorchMatrix:
        """Return a map with uninitialised weights; see `DenseKernels`."""
        make = QuantizedLinear if self._is_int8 else Linear
        return make(num_inputs, sizes, has_bias=has_bias, dtype=self.dtype, device=self.device)

    def vector(self, size: int) -> torch.Tensor:
        """Return an uninitialised vector, [size]."""
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def embed(self, embedding: TorchMatrix, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the tokens; see `DenseKernels`."""
        return embedding.rows(token_ids)

    def segment(
        self, layer_end: LayerEnd[TorchMatrix] | None, norm: torch.Tensor, projection: TorchMatrix, norm_epsilon: float
    ) -> "TorchSegment":
        """Join weights to a segment; see `DenseKernels`."""
        last_segment = None if layer_end is None else TorchLastSegment(layer_end, norm_epsilon)
        return TorchSegment(last_segment, norm, projection, norm_epsilon)

    def last_segment(self, layer_end: LayerEnd[TorchMatrix], norm_epsilon: float) -> "TorchLastSegment":
        """Join the weights of the last layer's end; see `DenseKernels`."""
        return TorchLastSegment(layer_end, norm_epsilon)


@dataclass(frozen=True, slots=True)
class TorchLastSegment:
    """See `executor_svc.models.dense.LastSegment`."""

    layer_end: LayerEnd[TorchMatrix]
    norm_epsilon: float

    def __call__(self, attended: torch.Tensor, residual: torch.Tensor) -> None:
        """End a layer."""
        layer = self.layer_end
        residual += layer.attention_output(attended)
        normed = F.rms_norm(residual, layer.norm.shape, layer.norm, self.norm_epsilon)
        residual += layer.down(F.silu(layer.gate(normed), inplace=True).mul_(layer.up(normed)))


@dataclass(frozen=True, slots=True)
class TorchSegment:
    """See `executor_svc.models.dense.Segment`."""

    layer_end: TorchLastSegment | None
    norm: torch.Tensor
    projection: TorchMatrix
    norm_epsilon: float

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Run the segment."""
        if self.layer_end is not None:
            assert attended is not None, "only where no layer ends there is no attention before"
            self.layer_end(attended, residual)
        return self.projection(F.rms_norm(residual, self.norm.shape, self.norm, self.norm_epsilon))
