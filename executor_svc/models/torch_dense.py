"""The dense part of a model in plain torch operations: any model, any device, any number format; the reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 -- the usual name

from executor_svc.adapters.products import AdaptedPart, Multiply, TorchAdapted
from executor_svc.adapters.slots import AdapterSlots
from executor_svc.attention.interface import Rotation
from executor_svc.models.dense import (
    Embedding,
    EmbeddingWeights,
    Experts,
    HeadMaps,
    HeadNorms,
    LastSegment,
    Latent,
    LatentWeights,
    LayerEnd,
    Matrix,
    MatrixRole,
    MatrixStack,
    Norm,
    Segment,
)
from executor_svc.models.quantized_linear import QuantizedLinear
from executor_svc.models.rotary_embedding import rotations
from executor_svc.models.torch_experts import activate, run_chosen, run_experts, run_mlp
from executor_svc.models.torch_latent import JoinedMaps, TorchLatent
from executor_svc.models.weight_format import matrix_formats
from executor_svc.native.binding import WeightMemory
from executor_svc.native.library import NativeLibrary
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import NumberFormat
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from octavo_shared.errors import ModelLoadError


class TorchMatrix(Matrix, Protocol):
    """A matrix that maps tensors."""

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, [num_ids, num_inputs]."""


class TorchDense:
    """Matrices and segments on any device.

    Args:
        dtype: Number format of activations, and of weights that are not quantized.
        device: Where the model runs.
        number_format: Of the weights; FLOAT32: as `dtype`. On a GPU also INT8: by torchao, all but the vocabulary.
        library: What multiplies quantized weights on a CPU; None: the reference, which restores them in each call.
        group: The ranks that share the model: each multiplies by its columns of the second matrix of a pair, and
            the results are added up.
    """

    merges_gate_and_up = False
    _multiply: Multiply | None = None  # of adapters; None: as torch does

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        number_format: NumberFormat = NumberFormat.FLOAT32,
        library: NativeLibrary | None = None,
        group: TensorParallelGroup = SINGLE_RANK,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._number_format = number_format
        self._uses_torchao = number_format == NumberFormat.INT8 and device.type == "cuda"
        self._library = library
        self._memory = WeightMemory()
        self._group = group

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
        """Return a map with uninitialised weights; see `DenseKernels`."""
        if all(each in (NumberFormat.FLOAT32, NumberFormat.BFLOAT16) for each in stored):
            stored = ()
        formats = matrix_formats(self._number_format, role, sizes, stored)
        if self._uses_torchao and role not in ("vocabulary", "router"):
            return TorchaoLinear(num_inputs, sizes, has_bias=has_bias, dtype=self.dtype, device=self.device)
        if self._uses_torchao or formats[0][0] == NumberFormat.FLOAT32:
            return self._linear(num_inputs, sizes, has_bias, stack)
        if self._library is not None:
            return PackedMatrix(self._library, num_inputs, formats, has_bias=has_bias, memory=self._memory)
        return QuantizedLinear(num_inputs, formats, has_bias=has_bias, dtype=self.dtype, device=self.device)

    def _linear(self, num_inputs: int, sizes: Sequence[int], has_bias: bool, stack: MatrixStack | None) -> "Linear":
        """Return a map in floats; each has memory of its own."""
        del stack
        return Linear(num_inputs, sizes, has_bias=has_bias, dtype=self.dtype, device=self.device)

    def adapted(
        self,
        matrices: Sequence[TorchMatrix],
        parts: Sequence[Sequence[AdaptedPart]],
        slots: AdapterSlots,
        *,
        of_wanted: bool,
    ) -> Sequence[TorchMatrix]:
        """Return matrices to whose products adapters add; see `DenseKernels`."""
        products = []
        for matrix, own in zip(matrices, parts, strict=True):
            shape = sum(part.num_outputs for part in own), own[0].num_inputs
            sizes = shape, slots.num_slots, slots.num_shrunk(own)
            current = slots.current(of_wanted=of_wanted)
            products.append(TorchAdapted(matrix, *sizes, current, self.dtype, self.device, self._multiply))
            slots.add(own, products[-1])
        return products

    def embedding(self, weights: EmbeddingWeights[TorchMatrix]) -> Embedding:
        """Join the weights to an embedding; see `DenseKernels`."""
        return TorchEmbedding(weights, self.dtype, self._group)

    def segment(
        self,
        layer_end: LayerEnd[TorchMatrix] | None,
        norm: Norm | None,
        projection: TorchMatrix,
        head_norms: HeadNorms | None = None,
        *,
        is_post_norm: bool = False,
    ) -> Segment:
        """Join weights to a segment; see `DenseKernels`."""
        last_segment = None if layer_end is None else TorchLastSegment(layer_end, self._group, is_post_norm)
        return TorchSegment(last_segment, norm, projection, head_norms, is_post_norm)

    def last_segment(self, layer_end: LayerEnd[TorchMatrix], *, is_post_norm: bool = False) -> LastSegment:
        """Join the weights of the last layer's end; see `DenseKernels`."""
        return TorchLastSegment(layer_end, self._group, is_post_norm)

    def rotations(self, positions: torch.Tensor, frequencies: torch.Tensor, factor: float = 1.0) -> Rotation:
        """Return the rotary embedding of tokens; see `DenseKernels`."""
        return rotations(positions, frequencies, factor, self.dtype)

    def joined_maps(self, num_heads: int, num_inputs: int, num_outputs: int) -> HeadMaps | None:
        """Return a linear map for each head; see `DenseKernels`. None: they are quantized here."""
        if self._number_format != NumberFormat.FLOAT32 and not self._uses_torchao:
            return None
        return JoinedMaps(num_heads, num_inputs, num_outputs, self.dtype, self.device)

    def latent(self, weights: LatentWeights[TorchMatrix]) -> Latent:
        """Join weights to what is before and behind an attention on a latent cache; see `DenseKernels`."""
        return TorchLatent(weights)

    def gate(self, values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return values * sigmoid(gates)."""
        return values * gates.sigmoid()

    def scale_logits(self, logits: torch.Tensor, scale: float) -> torch.Tensor:
        """Return scale * logits."""
        return logits * scale

    def cap_logits(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """Return cap * tanh(logits / cap)."""
        return (logits / cap).tanh_().mul_(cap)


@dataclass(frozen=True, slots=True)
class TorchEmbedding:
    """See `executor_svc.models.dense.Embedding`."""

    weights: EmbeddingWeights[TorchMatrix]
    dtype: torch.dtype
    group: TensorParallelGroup

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed tokens."""
        weights = self.weights
        residual = self._look_up(token_ids)
        if weights.scale is not None:
            residual *= weights.scale
        if weights.positions is not None:
            residual += weights.positions[positions + weights.position_offset]
        return residual if weights.norm is None else weights.norm(residual)

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the tokens: each rank has the rows of its part of the vocabulary."""
        tokens = self.weights.tokens
        if self.group.size == 1:
            return tokens.rows(token_ids).to(self.dtype)
        begin, end = self.weights.vocabulary
        is_elsewhere = (token_ids < begin) | (token_ids >= end)
        rows = tokens.rows((token_ids - begin).masked_fill(is_elsewhere, 0)).to(self.dtype)
        return self.group.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))


@dataclass(frozen=True, slots=True)
class TorchLastSegment:
    """See `executor_svc.models.dense.LastSegment`."""

    layer_end: LayerEnd[TorchMatrix]
    group: TensorParallelGroup
    is_post_norm: bool = False

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> None:
        """End a layer."""
        layer, mlp = self.layer_end, self.layer_end.mlp
        if layer.attention_output is not None:
            assert attended is not None, "it has attended"
            output = self.group.all_reduce(layer.attention_output(attended))
            residual += finish_output(output, layer.attention_output_norm, layer.residual_scale)
        if mlp is None:
            return
        assert layer.mlp_norm is not None, "an MLP has one"
        normed, add_up = layer.mlp_norm(residual), self.group.all_reduce
        if self.is_post_norm:
            residual.copy_(normed)
        if isinstance(mlp, Experts) and (norms := mlp.norms) is not None:
            assert mlp.shared is not None, "the layer has both"
            output = norms.outputs(add_up(run_chosen(mlp, norms.router(residual), norms.inputs(residual))))
            output += norms.shared_outputs(add_up(run_mlp(mlp.shared, normed)))
        else:
            output = add_up(run_experts(mlp, normed) if isinstance(mlp, Experts) else run_mlp(mlp, normed))
        residual += finish_output(output, layer.mlp_output_norm, layer.residual_scale)
        end_layer(layer, residual)


def end_layer(layer: LayerEnd[TorchMatrix], residual: torch.Tensor) -> None:
    """Add what the tokens have for a layer, and scale the residual stream, where a model has that."""
    if (own := layer.per_layer) is not None:
        residual += own.norm(own.projection(activate(own.activation, own.gate(residual), own.own_inputs)))
    scale_residual(layer, residual)


def scale_residual(layer: LayerEnd[TorchMatrix], residual: torch.Tensor) -> None:
    """Scale the residual stream where a model has that."""
    if layer.layer_scale is not None:
        residual *= layer.layer_scale.to(residual.dtype)


def finish_output(
    output: torch.Tensor, norm: Callable[[torch.Tensor], torch.Tensor] | None, scale: float
) -> torch.Tensor:
    """Return what joins the residual stream."""
    output = output if norm is None else norm(output)
    return output if scale == 1.0 else output * scale


@dataclass(frozen=True, slots=True)
class TorchSegment:
    """See `executor_svc.models.dense.Segment`."""

    layer_end: TorchLastSegment | None
    norm: Norm | None
    projection: TorchMatrix
    head_norms: HeadNorms | None
    is_post_norm: bool = False

    def __call__(self, attended: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Run the segment."""
        if self.layer_end is not None:
            self.layer_end(attended, residual)
        normed = residual if self.norm is None else self.norm(residual)
        if self.is_post_norm:
            residual.copy_(normed)
        return norm_heads(self.projection(normed), self.head_norms)


def norm_heads(projected: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
    """Return queries, keys and values, [num_tokens, all heads * head_dim], normed head by head."""
    if norms is None:
        return projected
    heads = projected.contiguous().view(projected.shape[0], -1, len(norms.query.weight))
    for part, norm in parts_to_norm(heads, norms):
        part.copy_(norm(part))
    return heads.view(projected.shape)


def parts_to_norm(heads: torch.Tensor, norms: HeadNorms) -> list[tuple[torch.Tensor, Norm]]:
    """Return the heads that are normed, of [num_tokens, all heads, head_dim], with their norms."""
    queries, others = heads[:, : norms.num_heads], heads[:, norms.num_heads :]
    count = norms.num_kv_heads
    parts = [(queries, norms.query), (others[:, :count], norms.key)]
    if norms.value is not None:
        parts.append((others[:, count : 2 * count], norms.value))
    return parts[:1] if not count else parts


# Between these numbers of rows, MKL's x @ W.T runs at half the speed of W @ x.T or less, for every
# weight shape of SmolLM2-135M (30 gate_up products of 32 rows: 73.7 against 32.4 ms; the lm_head:
# 37.6 against 16.7 ms). Outside of them it is as fast or faster. Measured: Intel Xeon 2.5 GHz with
# 2 cores, torch 2.13.0, float32, 2026-11-21; an AMD Milan shows the same at 32 rows.
MIN_ROWS_TRANSPOSED = 4
MAX_ROWS_TRANSPOSED = 63


class Linear:
    """A linear map [sum of sizes, num_inputs] of parts that are merged; its weights are filled in by the loader.

    `memory` is for the weight and the bias; None: of its own.
    """

    def __init__(
        self,
        num_inputs: int,
        sizes: Sequence[int],
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        memory: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> None:
        if memory is None:
            weight = torch.empty((sum(sizes), num_inputs), dtype=dtype, device=device)
            memory = weight, torch.empty(sum(sizes), dtype=dtype, device=device) if has_bias else None
        self._weight, self._bias = memory
        self.weights = torch.split(self._weight, list(sizes))
        self.biases = () if self._bias is None else torch.split(self._bias, list(sizes))

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, [num_ids, num_inputs]."""
        return F.embedding(row_ids, self._weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] to [num_rows, num_outputs]; the result may be column-major."""
        if not (MIN_ROWS_TRANSPOSED <= len(x) <= MAX_ROWS_TRANSPOSED and x.is_cpu and x.dtype == torch.float32):
            return F.linear(x, self._weight, self._bias)
        if self._bias is None:
            return torch.mm(self._weight, x.t()).t()
        return torch.addmm(self._bias[:, None], self._weight, x.t()).t()


class TorchaoLinear:
    """A linear map [sum of sizes, num_inputs] of parts, each quantized as it is loaded, a scale an output.

    Raises: ModelLoadError: torchao is not installed.
    """

    def __init__(
        self, num_inputs: int, sizes: Sequence[int], *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        _require_torchao()
        self.weights = tuple(_TorchaoPart(num_inputs, size, dtype, device) for size in sizes)
        self._bias = torch.empty(sum(sizes), dtype=dtype, device=device) if has_bias else None
        self.biases = () if self._bias is None else torch.split(self._bias, list(sizes))

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Never called: `TorchDense` keeps the vocabulary, where rows are looked up, as it is."""
        raise AssertionError("the embedding is not quantized")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] to [num_rows, num_outputs]."""
        parts = [part(x) for part in self.weights]
        result = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return result if self._bias is None else result + self._bias


class _TorchaoPart:
    """Some outputs of a map, and their weight as the loader sees it."""

    def __init__(self, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = torch.Size((num_outputs, num_inputs))
        self.nbytes = num_outputs * num_inputs * dtype.itemsize
        self._dtype = dtype
        self._device = device
        self._linear: torch.nn.Module | None = None

    def copy_(self, source: torch.Tensor, /) -> None:
        """Quantize `source`, a tensor of this shape."""
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        num_outputs, num_inputs = self.shape
        linear = torch.nn.Linear(num_inputs, num_outputs, bias=False, dtype=self._dtype, device=self._device)
        linear.weight.data.copy_(source)
        linear.requires_grad_(False)
        quantize_(linear, Int8WeightOnlyConfig())
        self._linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] to [num_rows, num_outputs]."""
        assert self._linear is not None, "the weights are loaded"
        mapped: torch.Tensor = self._linear(x)
        return mapped


def _require_torchao() -> None:
    try:
        import torchao.quantization  # noqa: F401 -- seconds, and only where it is wanted
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            "quantization is int8 and the device is cuda, which requires torchao; install the extra gpu-int8"
        ) from error
