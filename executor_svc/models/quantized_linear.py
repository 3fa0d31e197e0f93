"""Linear maps in torch with weights in the number formats of the kernels in C: what these mean, and their reference.

Of a format of integers, GROUP inputs share a scale in float16. What each does:

    bfloat16   weights are rounded to the nearest; so are inputs where products are computed in bfloat16
    int8       weight = code * scale, codes of -127 to 127; inputs are rounded to 16 bits, with a scale of each row
    int8-a8    weights as with int8; inputs are rounded to 8 bits, with a scale of each group of a row
    int4       weight = code * scale + minimum, codes of 0 to 15, the minimum in float16; inputs as with int8-a8
    q5_1       as int4, with codes of 0 to 31; from files alone
    q4_k, ..   as the K formats of llama.cpp have them: their scales and minima are products in float32, of 16 or 32
               inputs; inputs as with int8-a8
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 -- the usual name
from gguf import GGMLQuantizationType as FileType

from executor_svc.models.file_blocks import read_blocks, read_k_blocks
from executor_svc.models.int4_groups import quantize_int4
from executor_svc.native.structs import FILE_FORMATS, K_FORMATS, NumberFormat

# Inputs that share a scale: of a few hundred the largest would rule, fewer cost more scales. GROUP of dense.h.
GROUP = 32

_BFLOAT16 = (NumberFormat.BFLOAT16, NumberFormat.BFLOAT16_A16)


class QuantizedLinear:
    """A linear map [sum of sizes, num_inputs] of parts that are merged; its weights are filled in by the loader.

    Parts of different number formats must take the same inputs.

    The weight is restored in each call, which saves memory and costs much time: the reference of the kernels in C, and
    what `--cpu-kernels torch` serves with.
    """

    def __init__(
        self,
        num_inputs: int,
        formats: Sequence[tuple[NumberFormat, Sequence[int]]],
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        sizes = [size for _, of_format in formats for size in of_format]
        self._dtype = dtype
        self._bias = torch.empty(sum(sizes), dtype=dtype, device=device) if has_bias else None
        self._blocks = []
        self.weights: tuple[_QuantizedRows, ...] = ()
        for number_format, of_format in formats:
            assert number_format != NumberFormat.FLOAT32, "that is Linear"
            block = _QuantizedRows.empty(number_format, sum(of_format), num_inputs, device)
            self._blocks.append(block)
            ends = itertools.accumulate(of_format)
            self.weights += tuple(block[end - size : end] for size, end in zip(of_format, ends, strict=True))
        self.biases = () if self._bias is None else torch.split(self._bias, sizes)

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, [num_ids, num_inputs], which has one number format."""
        (block,) = self._blocks
        return block[row_ids].restore().to(self._dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, num_inputs] to [num_rows, num_outputs]."""
        x = round_inputs(self._blocks[0].number_format, x)
        weight = torch.cat([block.restore() for block in self._blocks])
        return F.linear(x, weight.to(self._dtype), self._bias)


def round_inputs(number_format: NumberFormat, x: torch.Tensor) -> torch.Tensor:
    """Return what products with a format take in place of [num_rows, num_inputs]."""
    if number_format == NumberFormat.BFLOAT16:
        return x
    if number_format == NumberFormat.BFLOAT16_A16:
        return x.bfloat16().to(x.dtype)
    largest_code, groups = (
        (32767, x.float()[:, None]) if number_format == NumberFormat.INT8 else (127, _groups(x.float()))
    )
    largest = groups.abs().amax(-1, keepdim=True)
    codes = (groups * torch.where(largest > 0, torch.full_like(largest, largest_code) / largest, 0)).round()
    return (codes * (largest / largest_code)).flatten(1)[:, : x.shape[1]].to(x.dtype)


@dataclass(frozen=True, slots=True)
class _QuantizedRows:
    """Rows of a quantized weight; the loader writes them."""

    number_format: NumberFormat
    num_inputs: int
    codes: torch.Tensor  # [num_outputs, num_groups, inputs of a scale]; of bfloat16 the values
    scales: torch.Tensor  # [num_outputs, num_groups, 1] float16, of a K format float32
    minima: torch.Tensor  # the same

    @classmethod
    def empty(
        cls, number_format: NumberFormat, num_outputs: int, num_inputs: int, device: torch.device
    ) -> "_QuantizedRows":
        dtypes = dict.fromkeys(_BFLOAT16, torch.bfloat16) | {NumberFormat.INT4: torch.uint8}
        shared = 16 if number_format in (NumberFormat.Q2_K, NumberFormat.Q3_K, NumberFormat.Q6_K) else GROUP
        num_groups = -(-num_inputs // shared)
        dtype = dtypes.get(number_format, torch.int8)
        codes = torch.empty((num_outputs, num_groups, shared), dtype=dtype, device=device)
        of_scales = torch.float32 if number_format in K_FORMATS else torch.float16
        scales, minima = torch.empty((2, num_outputs, num_groups, 1), dtype=of_scales, device=device)
        return cls(number_format, num_inputs, codes, scales, minima)

    def __getitem__(self, index: slice | torch.Tensor) -> "_QuantizedRows":
        """Return some of them: the same memory for a slice, a copy for ids."""
        return replace(self, codes=self.codes[index], scales=self.scales[index], minima=self.minima[index])

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.codes), self.num_inputs))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.minima.nbytes

    def copy_(self, source: torch.Tensor, /) -> None:
        """Quantize `source`, a tensor of this shape."""
        source = source.to(self.codes.device, torch.float32)
        groups = _groups(source)
        if self.number_format in _BFLOAT16:
            self.codes.copy_(groups)
        elif self.number_format == NumberFormat.INT4:
            num_padded = groups.shape[1] * GROUP - self.num_inputs
            for name, values in zip(("codes", "scales", "minima"), quantize_int4(groups, num_padded), strict=True):
                getattr(self, name).copy_(values)
        else:
            self.scales.copy_(groups.abs().amax(-1, keepdim=True) / 127)
            self.codes.copy_(_codes(groups, self.scales).clamp(-127, 127))

    def round_rows(self, first_row: int, source: torch.Tensor) -> torch.Tensor:
        """Quantize some rows, and return what they are held as; see `RoundingTarget`."""
        rows = self[first_row : first_row + len(source)]
        rows.copy_(source)
        return rows.restore()

    def copy_blocks(self, blocks: torch.Tensor, block_type: int, order: torch.Tensor | None) -> bool:
        """Take over codes; see `BlockTarget`."""
        rows, kind = blocks if order is None else blocks[order], FileType(block_type)
        if self.number_format in K_FORMATS:
            for mine, theirs in zip((self.codes, self.scales, self.minima), read_k_blocks(kind, rows), strict=True):
                mine.copy_(theirs)
            return bool(self.scales.isfinite().all() and self.minima.isfinite().all())
        codes, scales, minima, offset = read_blocks(kind, rows)
        if not scales.isfinite().all() or (minima is not None and not minima.isfinite().all()):
            return False
        if self.number_format == NumberFormat.INT4:
            wanted = scales.float() * offset
            minima = wanted.half() if minima is None else minima
            if offset and not torch.equal(minima.float(), wanted):
                return False
            self.minima.copy_(minima)
        elif self.number_format == NumberFormat.Q5_1 and minima is not None:
            self.minima.copy_(minima)
        elif minima is not None:
            return False
        self.codes.copy_(codes if self.number_format == NumberFormat.INT4 else codes + offset)
        self.scales.copy_(scales)
        return True

    def restore(self) -> torch.Tensor:
        """Return the weight, [num_outputs, num_inputs] float32."""
        values = self.codes.float()
        if self.number_format not in _BFLOAT16:
            values *= self.scales
        if self.number_format == NumberFormat.INT4 or self.number_format in FILE_FORMATS:
            values += self.minima
        return values.flatten(1)[:, : self.num_inputs]


def _groups(values: torch.Tensor, padding: float = 0.0) -> torch.Tensor:
    """Return [num_rows, num_inputs] as [num_rows, num_groups, GROUP]."""
    padded = F.pad(values, (0, -values.shape[-1] % GROUP), value=padding)
    return padded.view(len(values), padded.shape[1] // GROUP, GROUP)


def _codes(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what multiplied by the scales is nearest to the values of groups; 0 where the scale is 0."""
    inverse = torch.where(scales > 0, 1 / scales.float(), 0)
    return (groups * inverse).round()
