"""The dense part of a model on a GPU: matrix products, and what is between them by kernels in Triton.

A layer of a Llama launches, beside its attention, four matrix products (output, gate and up, down, next projection) and
three kernels: add and norm, activation and product, add and norm. The products are torch's, which chooses how to sum by
the number of rows, or ours, where a row is the same among any others. Nothing else here depends on other rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from executor_svc.models.coded_linear import CODED_FORMATS, CodedLinear, RestoredLinear
from executor_svc.models.dense import (
    Embedding,
    EmbeddingWeights,
    Experts,
    HeadMaps,
    HeadNorms,
    LastSegment,
    LayerEnd,
    MatrixRole,
    MatrixStack,
    Norm,
    Segment,
)
from executor_svc.models.torch_dense import (
    Linear,
    TorchDense,
    TorchEmbedding,
    TorchMatrix,
    finish_output,
    parts_to_norm,
    scale_residual,
)
from executor_svc.models.triton_experts import run_chosen, run_experts, run_mlp
from executor_svc.native.structs import NumberFormat
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from executor_svc.triton_kernels.dense import add_layer_norm, add_rms_norm, gated_activation
from executor_svc.triton_kernels.matmul import matmul


class TritonDense(TorchDense):
    """Matrices and segments on a CUDA device, of every model that `TorchDense` has.

    Args:
        dtype, device, number_format, group: See `TorchDense`.
        is_invariant: Whether products are ours, so that no row depends on others, and ranks are added up in their
            order; not with int8.
    """

    merges_gate_and_up = True

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        number_format: NumberFormat = NumberFormat.FLOAT32,
        is_invariant: bool = False,
        group: TensorParallelGroup = SINGLE_RANK,
    ) -> None:
        assert number_format == NumberFormat.FLOAT32 or not is_invariant, "int8 is torchao's"
        super().__init__(dtype, device, number_format=number_format, group=group)
        self._is_invariant = is_invariant
        if is_invariant:
            self._multiply = lambda x, weight: matmul(x, weight, None, *_multiprocessors(x.device))

    def matrix(
        self,
        num_inputs: int,
        sizes: Sequence[int],
        *,
        has_bias: bool = False,
        role: MatrixRole = "layer",
        stored: Sequence[NumberFormat] = (),
        stack: MatrixStack | None = None,
    ) -> TorchMatrix:
        """Return a map with uninitialised weights; see `DenseKernels`.

        Codes of a file stay codes, but where rows are looked up, where experts lie in a stack, and where a matrix has
        parts in several formats: there they are restored as they are loaded.
        """
        if not any(each in CODED_FORMATS for each in stored):
            return super().matrix(num_inputs, sizes, has_bias=has_bias, role=role, stored=stored, stack=stack)
        if len(set(stored)) == 1 and stack is None and role not in ("vocabulary", "router"):
            return CodedLinear(num_inputs, stored[0], sizes, has_bias=has_bias, dtype=self.dtype, device=self.device)
        return RestoredLinear(self._linear(num_inputs, sizes, has_bias, stack))

    def _linear(self, num_inputs: int, sizes: Sequence[int], has_bias: bool, stack: MatrixStack | None) -> Linear:
        """Return a map in floats, in a stack if there is one."""
        memory = None
        if stack is not None:
            shape = (sum(sizes), num_inputs)
            memory = stack.take(shape, has_bias=has_bias, dtype=self.dtype, device=self.device)
        make = InvariantLinear if self._is_invariant else Linear
        return make(num_inputs, sizes, has_bias=has_bias, dtype=self.dtype, device=self.device, memory=memory)

    def joined_maps(self, num_heads: int, num_inputs: int, num_outputs: int) -> HeadMaps | None:
        """Return a linear map for each head; see `DenseKernels`. None: products are ours."""
        return None if self._is_invariant else super().joined_maps(num_heads, num_inputs, num_outputs)

    def embedding(self, weights: EmbeddingWeights[TorchMatrix]) -> Embedding:
        """Join the weights to an embedding; see `DenseKernels`."""
        look_up = TorchEmbedding(replace(weights, norm=None), self.dtype, self._group)
        norm = weights.norm
        return look_up if norm is None else lambda ids, positions: _add_and_norm(look_up(ids, positions), None, norm)

    def segment(
        self,
        layer_end: LayerEnd[TorchMatrix] | None,
        norm: Norm | None,
        projection: TorchMatrix,
        head_norms: HeadNorms | None = None,
        *,
        is_post_norm: bool = False,
    ) -> Segment:
        """Join weights to a segment; see `DenseKernels`. With norms behind parts it is torch's."""
        if is_post_norm:
            return super().segment(layer_end, norm, projection, head_norms, is_post_norm=True)
        end = None if layer_end is None else self._layer_end(layer_end)
        return TritonSegment(end, norm, projection, head_norms)

    def last_segment(self, layer_end: LayerEnd[TorchMatrix], *, is_post_norm: bool = False) -> LastSegment:
        """Join the weights of the last layer's end; see `segment`."""
        return super().last_segment(layer_end, is_post_norm=True) if is_post_norm else self._layer_end(layer_end)

    def _layer_end(self, layer_end: LayerEnd[TorchMatrix]) -> "TritonLastSegment":
        add_up = partial(sum_in_rank_order, self._group) if self._is_invariant else self._group.all_reduce
        return TritonLastSegment(layer_end, add_up)


class InvariantLinear(Linear):
    """A linear map whose rows have the same bits alone and among any others."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] to [num_rows, num_outputs]."""
        return matmul(x, self._weight, self._bias, *_multiprocessors(x.device))


@dataclass(frozen=True, slots=True)
class TritonLastSegment:
    """See `executor_svc.models.dense.LastSegment`."""

    layer_end: LayerEnd[TorchMatrix]
    add_up: Callable[[torch.Tensor], torch.Tensor]  # a part of this rank -> the sum over all ranks

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> None:
        """End a layer."""
        output = self.run(attended, residual)
        if output is not None:
            residual += output

    def run(self, attended: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor | None:
        """Do all but the last addition to the residual stream, which joins the norm that follows.

        Returns:
            What is still to be added, [num_tokens, hidden_size]; None: nothing.
        """
        layer, mlp, output = self.layer_end, self.layer_end.mlp, None
        if layer.attention_output is not None:
            assert attended is not None, "it has attended"
            output = self.add_up(layer.attention_output(attended))
            output = _normed_output(output, layer.attention_output_norm, layer.residual_scale)
        if mlp is None:
            assert output is not None, "a layer has one of both"
            return output
        assert layer.mlp_norm is not None, "an MLP has one"
        normed = _add_and_norm(residual, output, layer.mlp_norm)
        if isinstance(mlp, Experts) and (norms := mlp.norms) is not None:
            assert mlp.shared is not None, "the layer has both"
            scored, inputs = (_add_and_norm(residual, None, norm) for norm in (norms.router, norms.inputs))
            output = _normed_output(self.add_up(run_chosen(mlp, scored, inputs)), norms.outputs, 1.0)
            output += _normed_output(self.add_up(run_mlp(mlp.shared, normed)), norms.shared_outputs, 1.0)
        else:
            output = self.add_up(run_experts(mlp, normed) if isinstance(mlp, Experts) else run_mlp(mlp, normed))
        output = _normed_output(output, layer.mlp_output_norm, layer.residual_scale)
        if layer.per_layer is None and layer.layer_scale is None:
            return output
        residual += output
        if (own := layer.per_layer) is not None:
            gated = gated_activation(own.gate(residual), own.own_inputs, own.activation)
            residual += _normed_output(own.projection(gated), own.norm, 1.0)
        scale_residual(layer, residual)
        return None


@dataclass(frozen=True, slots=True)
class TritonSegment:
    """See `executor_svc.models.dense.Segment`."""

    layer_end: TritonLastSegment | None
    norm: Norm | None
    projection: TorchMatrix
    head_norms: HeadNorms | None

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Run the segment."""
        output = None
        if self.layer_end is not None:
            output = self.layer_end.run(attended, residual)
        normed = residual if self.norm is None else _add_and_norm(residual, output, self.norm)
        projected = self.projection(normed)
        return projected if self.head_norms is None else _norm_heads(projected, self.head_norms)


def _add_and_norm(residual: torch.Tensor, output: torch.Tensor | None, norm: Norm) -> torch.Tensor:
    """Add `output` in place, if there is one, and return the norm of the sum, [num_tokens, hidden_size]."""
    if norm.is_layer_norm:
        return add_layer_norm(residual, output, norm.weight, norm.bias, norm.epsilon)
    return add_rms_norm(residual, output, norm.weight, norm.epsilon)


def _normed_output(output: torch.Tensor, norm: Norm | None, scale: float) -> torch.Tensor:
    """Return what joins the residual stream."""
    return finish_output(output, None if norm is None else lambda x: _add_and_norm(x.contiguous(), None, norm), scale)


def _norm_heads(projected: torch.Tensor, norms: HeadNorms) -> torch.Tensor:
    """Return queries, keys and values, [num_tokens, all heads * head_dim], normed head by head.

    Heads are copied aside even where they lie together, as in a step of one token: their rows then begin at multiples
    of 16 bytes in every step, and the norm is the same machine code.
    """
    heads = projected.contiguous().view(projected.shape[0], -1, len(norms.query.weight))
    for part, norm in parts_to_norm(heads, norms):
        aside = part.clone(memory_format=torch.contiguous_format)
        part.copy_(_add_and_norm(aside.flatten(0, 1), None, norm).view(part.shape))
    return heads.view(projected.shape)


def sum_in_rank_order(group: TensorParallelGroup, part: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, added in their order: a library's sum follows the place in its buffer."""
    if group.size == 1:
        return part
    parts = part.new_empty((group.size, *part.shape))
    group.gather(part, parts)
    total = parts[0].float()
    for other in parts[1:]:
        total += other
    return total.to(part.dtype)


@cache
def _multiprocessors(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Return how many there are, and their capability; the interpreter has none, and anything is right there."""
    if device.type != "cuda":
        return 1, (9, 0)
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, (properties.major, properties.minor)
