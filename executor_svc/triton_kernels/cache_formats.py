"""The formats of the KV cache inside the kernels; `executor_svc/attention/cache_format.py` is the reference.

FP8 comes as bytes. A device of capability 8.9 or more widens E4M3 itself; before, and in the interpreter, integer
arithmetic does. What multiplies all keys or values of a layer is no business of an element: it is in the scale of the
scores, or multiplies the result.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from executor_svc.attention.interface import LayerCache

# Elements are numbers of 16 or 32 bits.
PLAIN = tl.constexpr(0)
INT8 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
E5M2 = tl.constexpr(3)

_FORMATS: Final = {torch.int8: INT8.value, torch.float8_e4m3fn: E4M3.value, torch.float8_e5m2: E5M2.value}


@triton.jit
def numbers_of(elements, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Return elements as numbers in `dtype`, which has all of them; int8 is without its scale."""
    if FORMAT == PLAIN:
        numbers = elements
    elif FORMAT == INT8:
        numbers = elements.to(tl.float32)
    elif FORMAT == E5M2:  # the upper half of float16
        numbers = (elements.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif cuda_capability_geq(8, 9):
        numbers = elements.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        codes = elements.to(tl.int8, bitcast=True).to(tl.int32)
        # The sign, then exponent and mantissa where float32 has them; its exponent counts from another number.
        numbers = ((codes << 20) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36
        numbers = tl.where((codes & 0x7F) == 0x7F, float("nan"), numbers)
    if FORMAT != PLAIN and numbers.dtype != dtype:
        numbers = numbers.to(tl.float32)  # from float16 to bfloat16 at once is slow
    return numbers.to(dtype)


@triton.jit
def fp8_of(numbers, FORMAT: tl.constexpr):
    """Return float32 numbers as bytes of FP8, to nearest even; what is too large becomes the largest."""
    BITS: tl.constexpr = 20 if FORMAT == E4M3 else 21  # that are rounded away
    EXPONENT: tl.constexpr = 120 if FORMAT == E4M3 else 112  # of float32 less that of the format
    LARGEST: tl.constexpr = 0x43E00000 if FORMAT == E4M3 else 0x47600000  # 448 and 57,344
    # A number so large that float32's last bit there is the format's smallest number.
    MAGIC: tl.constexpr = 16384.0 if FORMAT == E4M3 else 128.0
    bits = numbers.to(tl.uint32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    is_number = magnitudes <= 0x7F800000
    magnitudes = tl.minimum(magnitudes, LARGEST)
    normal = (magnitudes + ((1 << (BITS - 1)) - 1) + ((magnitudes >> BITS) & 1)) >> BITS
    normal = normal - (EXPONENT << (23 - BITS))
    small = (magnitudes.to(tl.float32, bitcast=True) + MAGIC).to(tl.uint32, bitcast=True)
    small = small - tl.full([], MAGIC, tl.float32).to(tl.uint32, bitcast=True)
    codes = tl.where(magnitudes < ((EXPONENT + 1) << 23), small, normal)
    codes = tl.where(is_number, codes, 0x7F)
    return (codes | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def int8_scales_of(low, high):
    """Return the scale of each head from both halves of its numbers, [num_heads] float32; NaN: one is not finite."""
    low_bits = low.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    high_bits = high.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.maximum(tl.max(low_bits, 1), tl.max(high_bits, 1))
    numbers = tl.where(largest < 0x7F800000, largest.to(tl.float32, bitcast=True), float("nan"))
    return tl.div_rn(numbers, 127.0)


@triton.jit
def int8_of(numbers, scales):
    """Return numbers as bytes of int8, to nearest even; 0 where the scale is 0 or no number."""
    has_scale = scales > 0
    quotients = tl.div_rn(numbers.to(tl.float32), tl.where(has_scale, scales, 1.0)[:, None])
    quotients = tl.where(has_scale[:, None], tl.minimum(tl.maximum(quotients, -127.0), 127.0), 0.0)
    # 1.5 * 2 ** 23: the last byte of the sum is the rounded number.
    return (quotients + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@dataclass(frozen=True, slots=True)
class CacheOperands:
    """What launchers give the kernels of a layer's cache."""

    keys: torch.Tensor  # elements of 8 bits are bytes
    values: torch.Tensor
    key_scales: torch.Tensor | None  # of int8; None: the format has none
    value_scales: torch.Tensor | None
    key_factor: float  # multiplies the scale of the scores
    value_factor: float | None  # multiplies the result; None: it is 1
    format_number: int
    block_stride: int  # elements from a block to the next


def operands_of(cache: LayerCache) -> CacheOperands:
    """Return what kernels get of a cache; its blocks may lie apart."""
    keys, values = cache.keys, cache.values
    assert keys.stride() == values.stride(), "keys and values lie alike"
    assert keys[0].is_contiguous(), "the slots of a block lie one after the other"
    format_number = _FORMATS.get(keys.dtype)
    stride = keys.stride(0)
    if format_number is None:
        return CacheOperands(keys, values, None, None, 1.0, None, PLAIN.value, stride)
    is_int8 = format_number == INT8.value
    return CacheOperands(
        keys if is_int8 else keys.view(torch.uint8),
        values if is_int8 else values.view(torch.uint8),
        cache.key_scales,
        cache.value_scales,
        cache.key_scale,
        None if is_int8 else cache.value_scale,
        format_number,
        stride,
    )
