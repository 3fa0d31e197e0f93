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
    return (_bfloat16(x) if number_format == NumberFormat.BFLOAT16_A16 else x).astype(np.float64)


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
    """Take the scale and minimum of least error: of the whole range, or by least squares of codes near those."""
    smallest, largest = group.min(1, keepdims=True), group.max(1, keepdims=True)
    importance = np.abs(group) + _sum(np.abs(group)) / np.float32(group.shape[1])
    scale, best, error = _rounded_int4(group, importance, (largest - smallest) / np.float32(15), smallest)
    total, weighted_sum = _sum(importance), _sum(importance * group)
    first = _inverse(scale)
    for step in range(-5, 6):
        codes = np.rint((group - smallest) * (first * np.float32(1 + step / 32))).clip(0, 15)
        sums = _sum(importance * codes)
        squares, products = _sum(importance * codes * codes), _sum(importance * codes * group)
        with np.errstate(divide="ignore", invalid="ignore"):
            determinant = total * squares - sums * sums
            scale = np.divide(total * products - sums * weighted_sum, determinant)
            minimum = np.divide(squares * weighted_sum - sums * products, determinant)
            _, rounded, new_error = _rounded_int4(group, importance, scale, minimum)
        is_better = new_error < error
        best, error = np.where(is_better, rounded, best), np.where(is_better, new_error, error)
    return best


def _rounded_int4(
    group: Float32Array, importance: Float32Array, scale: Float32Array, minimum: Float32Array
) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Return the scale as float16 has it, what is multiplied with, and the error."""
    scale, minimum = (value.astype(np.float16).astype(np.float32) for value in (scale, minimum))
    rounded = np.rint((group - minimum) * _inverse(scale)).clip(0, 15) * scale + minimum
    return scale, rounded, _sum(importance * (rounded - group) * (rounded - group))


def _sum(values: Float32Array) -> Float32Array:
    """Add up each row from the first to the last."""
    return np.add.accumulate(values, axis=1)[:, -1:]


def _codes(group: Float32Array, scale: Float32Array) -> Float32Array:
    codes: Float32Array = np.rint(group * _inverse(scale))
    return codes


def _inverse(scale: Float32Array) -> Float32Array:
    inverse: Float32Array = np.divide(np.float32(1), scale, where=scale > 0, out=np.zeros_like(scale))
    return inverse


_WEIGHTS: Final[Mapping[NumberFormat, Callable[[Float32Array], Float32Array]]] = {
    NumberFormat.FLOAT32: lambda weight: weight,
    NumberFormat.BFLOAT16: _bfloat16,
    NumberFormat.BFLOAT16_A16: _bfloat16,
    NumberFormat.INT8: _int8,
    NumberFormat.INT8_A8: _int8,
    NumberFormat.INT4: _int4,
}
