"""The dense part of a model: segments between the attentions, and the weights that they own.

A *segment* is all the work from the output of one attention to the input of the next:

    residual += attended @ attention_output          the end of a layer, which the first segment has not
    residual += mlp(rms_norm(residual))
    result    = rms_norm(residual) @ projection      the next layer's q, k and v, before rotation

A decoder of n layers is n segments with an attention behind each, the end of the last layer, and the head, which is
a segment without a layer's end. `DenseKernels` makes them. It has two implementations: `TorchDense` (any device and
number format; the reference) and `executor_svc.native.NativeDense` (C, float32 on a CPU).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch


class WeightTarget(Protocol):
    """Where the loader puts one tensor of a checkpoint. A `torch.Tensor` is one."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor, for the progress bar."""

    def copy_(self, source: torch.Tensor, /) -> object:
        """Take over the values of a tensor of this shape, converted as needed."""


class Matrix(Protocol):
    """A linear map, possibly of several parts that a checkpoint holds apart, such as q, k and v."""

    @property
    def weights(self) -> Sequence[WeightTarget]:
        """The parts, each [num_outputs of the part, num_inputs]."""

    @property
    def biases(self) -> Sequence[torch.Tensor]:
        """The bias of each part; empty if there is none."""


MatrixT = TypeVar("MatrixT", bound=Matrix)


@dataclass(frozen=True, slots=True)
class LayerEnd(Generic[MatrixT]):
    """The weights of a layer behind its attention, with a SwiGLU MLP: down(silu(gate(x)) * up(x))."""

    attention_output: MatrixT
    norm: torch.Tensor  # [hidden_size], before the MLP
    gate: MatrixT
    up: MatrixT
    down: MatrixT


class Segment(Protocol):
    """The dense work between two attentions."""

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Run the segment.

        Args:
            attended: Output of the attention, [num_tokens, num_heads * head_dim]; None if no layer ends here.
            residual: The residual stream, [num_tokens, hidden_size]; updated in place.

        Returns:
            [num_tokens, outputs of the projection].
        """


class LastSegment(Protocol):
    """The end of the last layer, which nothing follows but the head."""

    def __call__(self, attended: torch.Tensor, residual: torch.Tensor) -> None:
        """Update the residual stream in place; shapes as in `Segment`."""


class DenseKernels(Protocol[MatrixT]):
    """Makes the weights and segments of a model. One model at a time; its segments run in turn."""

    @property
    def dtype(self) -> torch.dtype:
        """Number format of activations and cache."""

    @property
    def device(self) -> torch.device:
        """Where the model runs."""

    def matrix(self, num_inputs: int, sizes: Sequence[int], *, has_bias: bool = False) -> MatrixT:
        """Return a linear map of `len(sizes)` parts with uninitialised weights."""

    def vector(self, size: int) -> torch.Tensor:
        """Return an uninitialised vector, [size]."""

    def embed(self, embedding: MatrixT, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of a matrix that belong to the tokens, [num_tokens, num_inputs], free to be written."""

    def segment(
        self, layer_end: LayerEnd[MatrixT] | None, norm: torch.Tensor, projection: MatrixT, norm_epsilon: float
    ) -> Segment:
        """Join weights, filled by now or later, to a segment.

        Args:
            layer_end: The layer that ends here; None in the first segment and in the head.
            norm: Weight of the RMSNorm before the projection, [hidden_size].
            projection: To the next layer's q, k and v, or to logits.
            norm_epsilon: Of both norms.
        """

    def last_segment(self, layer_end: LayerEnd[MatrixT], norm_epsilon: float) -> LastSegment:
        """Join the weights of the last layer's end."""
