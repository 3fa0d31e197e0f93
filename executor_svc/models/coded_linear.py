"""Linear maps on a GPU of weights that are codes in their file: held as they are, or restored as they are loaded."""

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from executor_svc.checkpoint.gguf.rounding import restore_rows
from executor_svc.checkpoint.scaled_codes import E4M3, INT8, KINDS, MXFP4, NVFP4, UINT4, UINT4_G32, UINT4_G128, CodeKind
from executor_svc.models.torch_dense import Linear
from executor_svc.native.structs import NumberFormat
from executor_svc.triton_kernels import coded_matmul as kernels
from executor_svc.triton_kernels.coded_matmul import CodedWeight, coded_matmul

# The formats that are multiplied as they are held, each with its blocks in a file.
CODED_FORMATS: Final[Mapping[NumberFormat, CodeKind]] = MappingProxyType(
    {
        NumberFormat.FP8: E4M3,
        NumberFormat.INT8_A32: INT8,
        NumberFormat.INT4_G32: UINT4_G32,
        NumberFormat.INT4_G128: UINT4_G128,
        NumberFormat.MXFP4: MXFP4,
        NumberFormat.NVFP4: NVFP4,
    }
)
_KIND_OF_KERNEL: Final = {
    E4M3: kernels.E4M3.value,
    INT8: kernels.INT8.value,
    UINT4_G32: kernels.UINT4.value,
    UINT4_G128: kernels.UINT4.value,
    MXFP4: kernels.MXFP4.value,
    NVFP4: kernels.NVFP4.value,
}


class CodedLinear:
    """A linear map [sum of sizes, num_inputs] of parts in one number format; codes are filled in by the loader.

    A row has the same bits alone and among any others.
    """

    def __init__(
        self,
        num_inputs: int,
        number_format: NumberFormat,
        sizes: Sequence[int],
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        kind, num_outputs = CODED_FORMATS[number_format], sum(sizes)
        self._weight = empty_weight(kind, num_outputs, num_inputs, device)
        self._bias = torch.empty(num_outputs, dtype=dtype, device=device) if has_bias else None
        ends = list(itertools.accumulate(sizes))
        spans = zip((0, *ends), ends, strict=False)
        self.weights = tuple(_CodedPart(kind, self._weight, begin, end) for begin, end in spans)
        self.biases = () if self._bias is None else torch.split(self._bias, list(sizes))

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Never called: an embedding, where rows are looked up, is restored."""
        raise AssertionError("the embedding is not in codes")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] to [num_rows, num_outputs]."""
        return coded_matmul(x, self._weight, self._bias)


def empty_weight(kind: CodeKind, num_outputs: int, num_inputs: int, device: torch.device) -> CodedWeight:
    """Return memory for a weight; rows are padded to whole blocks of the file."""
    num_blocks = -(-num_inputs // kind.block_inputs)
    group_inputs = 16 if kind == NVFP4 else kind.block_inputs
    per_byte = 1 if kind in (E4M3, INT8) else 2
    num_groups = num_blocks * kind.block_inputs // group_inputs
    of_scales = torch.uint8 if kind in (MXFP4, NVFP4) else torch.float32
    is_zeroed, has_row_scales = kind in UINT4, kind == NVFP4

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return CodedWeight(
        _KIND_OF_KERNEL[kind],
        num_inputs,
        group_inputs,
        empty(num_outputs, num_blocks * kind.block_inputs // per_byte),
        empty(num_groups, num_outputs, dtype=of_scales),
        empty(num_groups, num_outputs) if is_zeroed else None,
        empty(num_outputs, dtype=torch.float32) if has_row_scales else None,
    )


class _CodedPart:
    """Outputs of a weight in codes as the loader sees them; see `BlockTarget`."""

    def __init__(self, kind: CodeKind, weight: CodedWeight, begin: int, end: int) -> None:
        self._kind = kind
        self._weight = weight
        self._outputs = slice(begin, end)
        self.shape = torch.Size((end - begin, weight.num_inputs))
        self.nbytes = weight.nbytes * (end - begin) // max(1, len(weight.codes))

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """Codes and scales."""
        weight = self._weight
        return [each for each in (weight.codes, weight.scales, weight.zeros, weight.row_scales) if each is not None]

    def copy_(self, source: torch.Tensor, /) -> None:
        """Never called: what is in codes is never rounded to them."""
        raise AssertionError("weights in codes come as codes")

    def copy_blocks(self, blocks: torch.Tensor, block_type: int, order: torch.Tensor | None) -> bool:
        """Take over codes of blocks, [num_rows, num_bytes] uint8; see `BlockTarget`."""
        if block_type != self._kind.block_type:
            return False
        rows = blocks if order is None else blocks[order]
        rows = rows.reshape(len(rows), -1, self._kind.block_bytes)
        weight, outputs, kind = self._weight, self._outputs, self._kind
        # Of a block: what comes before the codes.
        head = {E4M3: 4, INT8: 4, UINT4_G32: 5, UINT4_G128: 5, MXFP4: 1, NVFP4: 6}[kind]
        weight.codes[outputs].copy_(rows[..., head:].flatten(1))
        if kind == MXFP4:
            weight.scales[:, outputs].copy_(rows[..., 0].T)
            return not bool((rows[..., 0] == 255).any())
        stored = rows[..., :4].contiguous().view(torch.float32)[..., 0]
        if kind == NVFP4:
            assert weight.row_scales is not None, "this kind has them"
            weight.scales[:, outputs].copy_(rows[..., 4:6].flatten(1).T)
            weight.row_scales[outputs].copy_(stored[:, 0])
            return bool(stored.isfinite().all())
        weight.scales[:, outputs].copy_(stored.T)
        if weight.zeros is not None:
            weight.zeros[:, outputs].copy_(rows[..., 4].T)
        return bool(stored.isfinite().all())


class RestoredPart:
    """Rows of a weight in floats whose tensor is codes in a file; see `BlockTarget`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.shape = weight.shape
        self.nbytes = weight.nbytes

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """The weight."""
        return (self._weight,)

    def copy_(self, source: torch.Tensor, /) -> None:
        """Take over numbers, a tensor of this shape."""
        self._weight.copy_(source)

    def copy_blocks(self, blocks: torch.Tensor, block_type: int, order: torch.Tensor | None) -> bool:
        """Take over the numbers that codes stand for, rounded once."""
        rows = blocks if order is None else blocks[order]
        assert block_type in KINDS, "blocks of safetensors alone come here"
        with np.errstate(all="ignore"):  # what overflows is not finite
            restored = restore_rows(block_type, rows.numpy())[:, : self.shape[1]]
        values = torch.from_numpy(np.ascontiguousarray(restored, np.float32))
        self._weight.copy_(values)
        return bool(values.isfinite().all())


class RestoredLinear:
    """A linear map in floats that takes codes too, which are restored as they are loaded."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self.weights = tuple(RestoredPart(weight) for weight in linear.weights)
        self.biases = linear.biases

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, [num_ids, num_inputs]."""
        return self._linear.rows(row_ids)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] to [num_rows, num_outputs]."""
        return self._linear(x)
