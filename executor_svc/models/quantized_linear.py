"""Linear maps in torch with weights in the number formats of the kernels in C: what these mean, and their reference.

Of a format of integers, GROUP inputs share a scale in float16. What each does:

    bfloat16   weights are rounded to the nearest; so are inputs where products are computed in bfloat16
    int8       weight = code * scale, codes of -127 to 127; inputs are rounded to 16 bits, with a scale of each row
    int8-a8    weights as with int8; inputs are rounded to 8 bits, with a scale of each group of a row
    int4       weight = code * scale + minimum, codes of 0 to 15, the minimum in float16; inputs as with int8-a8
    q5_1       as int4, with codes of 0 to 31; from files alone
    mxfp4      weight = code * scale, codes of E2M1, held twice as large, the scale half of a power of two, in float32;
               inputs as with int8-a8; from files alone
    q4_k, ..   as the K formats of llama.cpp have them: their scales and minima are products in float32, of 16 or 32
               inputs; inputs as with int8-a8

`quantize_int4` is the search of pack.c for a scale and a minimum, with the same bits. `read_blocks`, `read_mxfp4` and
`read_k_blocks` read blocks as GGUF files have them: 32 weights of a row, weight = code * scale + minimum; of a K format
256, and a scale for each 16 or 32. Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 -- the usual name
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as FileType

from executor_svc.checkpoint.scaled_codes import KINDS, MXFP4
from executor_svc.native.structs import FILE_FORMATS, K_FORMATS, NumberFormat

# Inputs that share a scale: of a few hundred the largest would rule, fewer cost more scales. GROUP of dense.h.
GROUP = 32

_BFLOAT16 = (NumberFormat.BFLOAT16, NumberFormat.BFLOAT16_A16)
_FLOAT32_SCALES = (NumberFormat.MXFP4, *K_FORMATS)


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
    scales: torch.Tensor  # [num_outputs, num_groups, 1] float16, of MXFP4 and a K format float32
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
        of_scales = torch.float32 if number_format in _FLOAT32_SCALES else torch.float16
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

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        return (self.codes, self.scales, self.minima)

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
        if block_type in KINDS and block_type != MXFP4.block_type:  # for the kernels in C alone
            return False
        rows = blocks if order is None else blocks[order]
        if self.number_format in _FLOAT32_SCALES:
            is_mxfp4 = self.number_format == NumberFormat.MXFP4
            read = read_mxfp4(block_type, rows) if is_mxfp4 else read_k_blocks(FileType(block_type), rows)
            for mine, theirs in zip((self.codes, self.scales, self.minima), read, strict=True):
                mine.copy_(theirs)
            return bool(self.scales.isfinite().all() and self.minima.isfinite().all())
        codes, scales, minima, offset = read_blocks(FileType(block_type), rows)
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


LARGEST_CODE = 15
# Steps of the search up and down, each such a part of the scale; as in pack.c.
FIT_STEPS, FIT_STEP = 5, 1 / 32


def quantize_int4(groups: torch.Tensor, num_padded: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales and minima of [num_rows, num_groups, size]; the last group ends with so many zeros."""
    weights = groups.permute(2, 0, 1).contiguous()  # [size, num_rows, num_groups]
    is_padding = torch.zeros(weights.shape[0], 1, weights.shape[2], dtype=torch.bool)
    is_padding[weights.shape[0] - num_padded :, :, -1:] = num_padded > 0
    is_padding = is_padding.to(weights.device)
    importance = weights.abs() + _sum(weights.abs()) / (~is_padding).sum(0)
    searched = _Groups(weights, importance.masked_fill(is_padding, 0))
    smallest = weights.masked_fill(is_padding, torch.inf).amin(0)
    largest = weights.masked_fill(is_padding, -torch.inf).amax(0)
    fit = searched.fit(smallest, largest)
    codes = _int4_codes(weights, fit.minimum, _inverse(fit.scale))
    return codes.permute(1, 2, 0), fit.scale[..., None], fit.minimum[..., None]


@dataclass(frozen=True, slots=True)
class _Fit:
    """What weights of a group become: code * scale + minimum, both as float16 has them; all [num_rows, num_groups]."""

    scale: torch.Tensor
    minimum: torch.Tensor
    error: torch.Tensor  # sum of importance * square


@dataclass(frozen=True, slots=True)
class _Groups:
    """Both [size, num_rows, num_groups]; the importance of padding is 0."""

    weights: torch.Tensor
    importance: torch.Tensor

    def fit(self, smallest: torch.Tensor, largest: torch.Tensor) -> _Fit:
        """Return the best one: of the whole range, or by least squares of nearby codes."""
        best = self._try((largest - smallest) / LARGEST_CODE, smallest)
        inverse = _inverse(best.scale)
        total, weighted_sum = _sum(self.importance), _sum(self.importance * self.weights)
        for step in range(-FIT_STEPS, FIT_STEPS + 1):
            codes = _int4_codes(self.weights, smallest, inverse * (1 + FIT_STEP * step))
            parts = self.importance * codes
            sums, squares, products = _sum(parts), _sum(parts * codes), _sum(parts * self.weights)
            determinant = total * squares - sums * sums
            fit = self._try(
                (total * products - sums * weighted_sum) / determinant,
                (squares * weighted_sum - sums * products) / determinant,
            )
            is_better = fit.error < best.error
            best = _Fit(
                torch.where(is_better, fit.scale, best.scale),
                torch.where(is_better, fit.minimum, best.minimum),
                torch.where(is_better, fit.error, best.error),
            )
        return best

    def _try(self, scale: torch.Tensor, minimum: torch.Tensor) -> _Fit:
        scale, minimum = scale.half().float(), minimum.half().float()
        error = _int4_codes(self.weights, minimum, _inverse(scale)) * scale + minimum - self.weights
        return _Fit(scale, minimum, _sum(self.importance * error * error))


def _int4_codes(weights: torch.Tensor, minimum: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return ((weights - minimum) * inverse).round().clamp(0, LARGEST_CODE)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, 1 / scale, 0)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Add up [size, ...] from the first to the last: torch's own sums have another order."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL
_DOUBLED_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # of MXFP4


def read_blocks(kind: FileType, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
    """Read rows of blocks, [num_rows, num_bytes] uint8.

    Returns:
        Codes [num_rows, num_blocks, 32] int16, scales [num_rows, num_blocks, 1] float16, minima like them or None, and
        what is added to every code before it is scaled.
    """
    blocks = rows.reshape(len(rows), -1, GGML_QUANT_SIZES[kind][1])
    scales = _half(blocks[..., :2])
    if kind == FileType.Q8_0:
        return blocks[..., 2:].contiguous().view(torch.int8).to(torch.int16), scales, None, 0
    if kind == FileType.Q5_0:
        return _five_bits(blocks[..., 2:6], blocks[..., 6:]), scales, None, -16
    if kind == FileType.Q5_1:
        return _five_bits(blocks[..., 4:8], blocks[..., 8:]), scales, _half(blocks[..., 2:4]), 0
    if kind == FileType.Q4_0:
        return _nibbles(blocks[..., 2:]), scales, None, -8
    if kind == FileType.IQ4_NL:
        return torch.tensor(_NON_LINEAR, dtype=torch.int16)[_nibbles(blocks[..., 2:]).long()], scales, None, 0
    assert kind == FileType.Q4_1, "HOLDERS has no other type"
    return _nibbles(blocks[..., 4:]), scales, _half(blocks[..., 2:4]), 0


def read_mxfp4(block_type: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read rows of blocks of MXFP4, [num_rows, num_bytes] uint8, as a GGUF file or safetensors have them.

    Returns:
        Codes, scales and minima as of `read_k_blocks`; the minima are 0, and a scale may be NaN.
    """
    blocks = rows.reshape(len(rows), -1, MXFP4.block_bytes)
    stored, packed = blocks[..., :1], blocks[..., 1:]
    is_paired = block_type == MXFP4.block_type
    halves = torch.stack([packed & 15, packed >> 4], -1).flatten(-2) if is_paired else _nibbles(packed)
    codes = torch.tensor(_DOUBLED_FP4, dtype=torch.int16)[halves.long()]
    scales = torch.exp2(stored.double() - 128).float().masked_fill(stored == 255, torch.nan)
    return codes, scales, torch.zeros_like(scales)


def read_k_blocks(kind: FileType, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read rows of blocks of a K format, [num_rows, num_bytes] uint8.

    Returns:
        Codes [num_rows, num_groups, inputs of a scale] int16, scales and minima [num_rows, num_groups, 1] float32.
    """
    blocks = rows.reshape(len(rows), -1, GGML_QUANT_SIZES[kind][1])
    if kind == FileType.Q2_K:
        packed, low, d, dmin = torch.split(blocks, [16, 64, 2, 2], -1)
        return _scaled(_bits(low, 2), d, packed & 15, dmin, packed >> 4)
    if kind == FileType.Q3_K:
        high, low, packed, d = torch.split(blocks, [32, 64, 12, 2], -1)
        scales = _nibbles(packed[..., :8]) | _bits(packed[..., 8:], 2, run=4) << 4
        return _scaled(_bits(low, 2) + _bits(high, 1) * 4 - 4, d, scales - 32)
    if kind == FileType.Q6_K:
        low, high, scales, d = torch.split(blocks, [128, 64, 16, 2], -1)
        return _scaled((_bits(low, 4, run=64) | _bits(high, 2) << 4) - 32, d, scales.contiguous().view(torch.int8))
    d, dmin, packed, high, low = torch.split(blocks, [2, 2, 12, 32 if kind == FileType.Q5_K else 0, 128], -1)
    first, second, rest = torch.split(packed, 4, -1)
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], -1)
    minima = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], -1)
    codes = _bits(low, 4)
    return _scaled(codes + _bits(high, 1) * 16 if kind == FileType.Q5_K else codes, d, scales, dmin, minima)


def _bits(packed: torch.Tensor, size: int, run: int = 32) -> torch.Tensor:
    """Return numbers of `size` bits: of each `run` bytes the lowest bits first, then the ones above."""
    shifts = torch.arange(0, 8, size, dtype=torch.uint8)[:, None]
    parts = packed.reshape(*packed.shape[:-1], -1, 1, run) >> shifts & (1 << size) - 1
    return parts.flatten(-3).to(torch.int16)


def _scaled(
    codes: torch.Tensor,
    d: torch.Tensor,
    scales: torch.Tensor,
    dmin: torch.Tensor | None = None,
    minima: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes in groups, with the products that scale them."""
    groups = codes.reshape(len(codes), -1, codes.shape[-1] // scales.shape[-1])
    scaled = _float(d) * scales.float()
    lowered = torch.zeros_like(scaled) if dmin is None or minima is None else -(_float(dmin) * minima.float())
    return groups, scaled.flatten(1).unsqueeze(-1), lowered.flatten(1).unsqueeze(-1)


def _half(stored: torch.Tensor) -> torch.Tensor:
    return stored.contiguous().view(torch.float16)


def _float(stored: torch.Tensor) -> torch.Tensor:
    return _half(stored).float()


def _five_bits(fifth: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return half bytes with a bit above each."""
    bits = fifth.repeat_interleave(8, -1) >> torch.arange(8, dtype=torch.uint8).repeat(4) & 1
    return _nibbles(packed) | bits.to(torch.int16) << 4


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return half bytes: the low ones are the first weights of a block."""
    return torch.cat([packed & 15, packed >> 4], -1).to(torch.int16)
