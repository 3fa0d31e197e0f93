"""The dense part of a model on a GPU: matrix products by torch, what is between them by kernels in Triton.

A layer of a Llama launches, beside its attention, four matrix products (output, gate and up, down, next projection) and
three kernels: add and norm, activation and product, add and norm.
"""

from dataclasses import dataclass

import torch

from executor_svc.models.dense import Experts, HeadNorms, LayerEnd, Mlp, Norm
from executor_svc.models.torch_dense import TorchDense, TorchLastSegment, TorchMatrix, gate_and_up, norm_heads
from executor_svc.parallel.group import TensorParallelGroup
from executor_svc.triton_kernels.dense import add_layer_norm, add_rms_norm, gated_activation, plain_activation


class TritonDense(TorchDense):
    """Matrices and segments on a CUDA device, of every model that `TorchDense` has."""

    merges_gate_and_up = True

    def segment(
        self,
        layer_end: LayerEnd[TorchMatrix] | None,
        norm: Norm,
        projection: TorchMatrix,
        head_norms: HeadNorms | None = None,
    ) -> "TritonSegment":
        """Join weights to a segment; see `DenseKernels`."""
        return TritonSegment(None if layer_end is None else self.last_segment(layer_end), norm, projection, head_norms)

    def last_segment(self, layer_end: LayerEnd[TorchMatrix]) -> "TritonLastSegment":
        """Join the weights of the last layer's end; see `DenseKernels`."""
        return TritonLastSegment(layer_end, self._group)


@dataclass(frozen=True, slots=True)
class TritonLastSegment:
    """See `executor_svc.models.dense.LastSegment`."""

    layer_end: LayerEnd[TorchMatrix]
    group: TensorParallelGroup

    def __call__(self, attended: torch.Tensor, residual: torch.Tensor) -> None:
        """End a layer."""
        output = self.run(attended, residual)
        if output is not None:
            residual += output

    def run(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | None:
        """Do all but the last addition to the residual stream, which joins the norm that follows.

        Returns:
            What is still to be added, [num_tokens, hidden_size]; None: nothing.
        """
        layer = self.layer_end
        if isinstance(layer.mlp, Experts):
            TorchLastSegment(layer, self.group)(attended, residual)
            return None
        output = self.group.all_reduce(layer.attention_output(attended))
        output = _normed_output(output, layer.attention_output_norm)
        output = self.group.all_reduce(_run_mlp(layer.mlp, _add_and_norm(residual, output, layer.mlp_norm)))
        return _normed_output(output, layer.mlp_output_norm)


@dataclass(frozen=True, slots=True)
class TritonSegment:
    """See `executor_svc.models.dense.Segment`."""

    layer_end: TritonLastSegment | None
    norm: Norm
    projection: TorchMatrix
    head_norms: HeadNorms | None

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Run the segment."""
        output = None
        if self.layer_end is not None:
            assert attended is not None, "only where no layer ends there is no attention before"
            output = self.layer_end.run(attended, residual)
        return norm_heads(self.projection(_add_and_norm(residual, output, self.norm)), self.head_norms)


def _add_and_norm(residual: torch.Tensor, output: torch.Tensor | None, norm: Norm) -> torch.Tensor:
    """Add `output` in place, if there is one, and return the norm of the sum, [num_tokens, hidden_size]."""
    if norm.is_layer_norm:
        return add_layer_norm(residual, output, norm.weight, norm.bias, norm.epsilon)
    return add_rms_norm(residual, output, norm.weight, norm.epsilon)


def _normed_output(output: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """Return what joins the residual stream."""
    return output if norm is None else _add_and_norm(output.contiguous(), None, norm)


def _run_mlp(mlp: Mlp[TorchMatrix], x: torch.Tensor) -> torch.Tensor:
    """Map [num_rows, hidden_size] to the same shape."""
    gate, up = gate_and_up(mlp, x)
    if gate is None:
        return mlp.down(plain_activation(up, mlp.activation))
    return mlp.down(gated_activation(gate, up, mlp.activation))
