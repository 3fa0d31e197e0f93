"""What the number formats of weights mean, in NumPy: weights and inputs rounded by definition, products in float64."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from executor_svc.native.structs import NumberFormat

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

GROUP: Final = 32  # inputs that share a scale


def rounded_weight(number_format: NumberFormat, weight: Float32Array) -> Float32Array:
    """Return what is multiplied with in place of a weight, [num_outputs, num_inputs]."""
    return _of_groups(weight, _WEIGHTS[number_format])


def rounded_inputs(number_format: NumberFormat, x: Float32Array) -> Float64Array:
    """Return what is multiplied in place of inputs, [num_rows, num_inputs]."""
    if number_format == NumberFormat.INT8:
        return _inputs(x, 32767)
    if number_format in (NumberFormat.INT8_A8, NumberFormat.INT4):
        return _of_groups(x, lambda group: _inputs(group, 127)).astype(np.float64)
    return x.astype(np.float64)


def product(number_format: NumberFormat, x: Float32Array, weight: Float32Array, bias: Float32Array) -> Float64Array:
    """Return x @ weight.T + bias, [num_rows, num_outputs]."""
    rounded = rounded_weight(number_format, weight).astype(np.float64)
    result: Float64Array = rounded_inputs(number_format, x) @ rounded.T + bias
    return result


def largest_parts(number_format: NumberFormat, weight: Float32Array) -> Float64Array:
    """Return the largest that a kernel may multiply an input with: of int4 code * scale and minimum apart."""
    sizes = np.abs(weight).astype(np.float64)
    if number_format == NumberFormat.INT4:
        sizes = _of_groups(weight, lambda group: np.abs(group).max(1, keepdims=True) + np.zeros(group.shape)) * 3
    return sizes


def _of_groups(values: Float32Array, change: Callable[[Float32Array], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    groups = [change(values[:, begin : begin + GROUP]) for begin in range(0, values.shape[1], GROUP)]
    return np.concatenate(groups, axis=1)


def _inputs(x: Float32Array, largest_code: int) -> Float64Array:
    """Round each row: codes to the nearest, of two to the even one."""
    largest = np.abs(x).max(1, keepdims=True)
    with np.errstate(over="ignore"):
        inverse = np.divide(np.float32(largest_code), largest, where=largest > 0, out=np.zeros_like(largest))
    inverse[np.isinf(inverse)] = 0  # so small that the codes do not matter
    scale = (largest / np.float32(largest_code)).astype(np.float64)
    rounded: Float64Array = np.rint(x * inverse) * scale
    return rounded


def _bfloat16(weight: Float32Array) -> Float32Array:
    """Round to 8 significant bits, of two to the even one."""
    bits = weight.view(np.uint32)
    rounded: Float32Array = (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return rounded


def _int8(group: Float32Array) -> Float32Array:
    scale = (np.abs(group).max(1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    rounded: Float32Array = _codes(group, scale).clip(-127, 127) * scale
    return rounded


def _int4(group: Float32Array) -> Float32Array:
    smallest, largest = group.min(1, keepdims=True), group.max(1, keepdims=True)
    scale = ((largest - smallest) / np.float32(15)).astype(np.float16).astype(np.float32)
    minimum = smallest.astype(np.float16).astype(np.float32)
    rounded: Float32Array = _codes(group - minimum, scale).clip(0, 15) * scale + minimum
    return rounded


def _codes(group: Float32Array, scale: Float32Array) -> Float32Array:
    inverse = np.divide(np.float32(1), scale, where=scale > 0, out=np.zeros_like(scale))
    codes: Float32Array = np.rint(group * inverse)
    return codes


_WEIGHTS: Final[Mapping[NumberFormat, Callable[[Float32Array], Float32Array]]] = {
    NumberFormat.FLOAT32: lambda weight: weight,
    NumberFormat.BFLOAT16: _bfloat16,
    NumberFormat.INT8: _int8,
    NumberFormat.INT8_A8: _int8,
    NumberFormat.INT4: _int4,
}
