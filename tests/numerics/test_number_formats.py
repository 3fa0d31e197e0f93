"""Products in every number format of weights are what NumPy makes of its definition, in C and in torch."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from executor_svc.models.quantized_linear import QuantizedLinear
from executor_svc.models.torch_dense import TorchDense
from executor_svc.native.binding import WeightMemory
from executor_svc.native.library import NativeLibrary
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import NumberFormat
from tests.numerics.native import (
    FORMATS,
    LANES,
    each_instructions,
    library_path,
    mode_of_floats,
    native_library,
    packed_matrix,
)
from tests.numerics.number_formats import Float32Array, largest_parts, product, rounded_inputs, rounded_weight
from tests.support.each_row import each_row

CPU = torch.device("cpu")
EPSILON = 2.0**-24
SMALLEST = 1e-31  # what inputs that are too small for codes may make of a sum

formats = pytest.mark.parametrize("number_format", FORMATS, ids=lambda one: one.name)
lanes = pytest.mark.parametrize("lanes", LANES)
by = pytest.mark.parametrize("by", [*LANES, "torch"])
# Inputs and outputs: remainders of groups, of pairs and fours of inputs, of panels; several depths of float32. The last
# one is more work than a thread takes alone.
shapes = pytest.mark.parametrize(
    "shape", [(1, 1), (2, 7), (31, 50), (32, 48), (33, 47), (70, 5), (97, 143), (300, 96), (576, 1000)]
)


def random_values(*shape: int, seed: int = 1) -> Float32Array:
    """Return values with outliers, as trained weights and their activations have them."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return values * (1 + 20 * (np.abs(values) > 2.5)).astype(np.float32)


def make(by: str, number_format: NumberFormat, weight: Float32Array, bias: Float32Array) -> Any:
    """Return a matrix of two parts if there are enough outputs, of which the last is filled first."""
    num_outputs, num_inputs = weight.shape
    sizes = [num_outputs - 3, 3] if num_outputs > 3 else [num_outputs]
    matrix: Any
    if by == "torch":
        matrix = TorchDense(torch.float32, CPU, number_format=number_format).matrix(num_inputs, sizes, has_bias=True)
    else:
        matrix = packed_matrix(by, num_inputs, sizes, number_format, has_bias=True)
    begins = [0, num_outputs - 3][: len(sizes)]
    for part, part_bias, begin, size in reversed([*zip(matrix.weights, matrix.biases, begins, sizes, strict=True)]):
        part.copy_(torch.from_numpy(weight[begin : begin + size]))
        part_bias.copy_(torch.from_numpy(bias[begin : begin + size]))
    return matrix


def assert_product(
    number_format: NumberFormat, ours: torch.Tensor, x: Float32Array, weight: Float32Array, bias: Float32Array
) -> None:
    """Compare with the definition; a sum may be off by what its largest parts make of float32's rounding."""
    exact = product(number_format, x, weight, bias)
    sizes = np.abs(rounded_inputs(number_format, x)) @ largest_parts(number_format, weight).T
    error = np.abs(ours.numpy() - exact)
    bound = EPSILON * (8 + x.shape[1] ** 0.5) * (sizes + np.abs(bias)) + SMALLEST
    assert (error <= bound).all(), f"{(error / bound).max():.1f} times what is allowed"


@by
@formats
@shapes
def test_rows_of_a_weight_and_products_of_every_number_of_rows(
    shape: tuple[int, int], number_format: NumberFormat, by: str
) -> None:
    num_inputs, num_outputs = shape
    weight, bias = random_values(num_outputs, num_inputs), random_values(1, num_outputs, seed=2)[0]
    matrix = make(by, number_format, weight, bias)
    x = random_values(40, num_inputs, seed=3)
    ids = torch.randperm(num_outputs, generator=torch.Generator().manual_seed(2))

    whole = matrix(torch.from_numpy(x))

    assert np.array_equal(matrix.rows(ids).numpy(), rounded_weight(number_format, weight)[ids.numpy()])
    assert_product(number_format, whole, x, weight, bias)
    for num_rows in range(1, 40 if by in LANES else 1):
        assert torch.equal(matrix(torch.from_numpy(x[:num_rows])), whole[:num_rows])


def with_zeros(x: Float32Array) -> None:
    x[1] = 0
    x[2, :40] = 0  # a group of zeros and a part of one
    x[3, 5:] = 0


def with_huge_ones(x: Float32Array) -> None:
    x[1] *= 1e30
    x[2, 3] = 1e35
    x[3, ::7] *= -1e20


def with_tiny_ones(x: Float32Array) -> None:
    x[1] *= 1e-30
    x[2] *= 1e-44  # most of them are 0, the others have a few bits
    x[3, 32:] *= 1e-36


@lanes
@formats
@pytest.mark.parametrize("change", [with_zeros, with_huge_ones, with_tiny_ones], ids=lambda change: change.__name__)
def test_products_of_unusual_inputs(
    change: Callable[[Float32Array], None], number_format: NumberFormat, lanes: str
) -> None:
    weight, bias, x = random_values(53, 77), np.zeros(53, np.float32), random_values(5, 77, seed=3)
    change(x)

    ours = make(lanes, number_format, weight, bias)(torch.from_numpy(x))

    assert_product(number_format, ours, x, weight, bias)


@lanes
@formats
def test_what_is_no_number_stays_in_its_row_and_is_seen(number_format: NumberFormat, lanes: str) -> None:
    weight, bias, x = random_values(53, 77), np.zeros(53, np.float32), random_values(9, 77, seed=3)
    matrix = make(lanes, number_format, weight, bias)
    expected = matrix(torch.from_numpy(x))
    others = [row for row in range(9) if row != 4]
    for place, value in itertools.product((0, 35, 76), (np.nan, np.inf, -np.inf)):
        changed = x.copy()
        changed[4, place] = value

        ours = matrix(torch.from_numpy(changed))

        assert not ours[4].isfinite().any(), (place, value)
        assert torch.equal(ours[others], expected[others]), (place, value)


@lanes
@formats
@pytest.mark.parametrize("size", [1e-7, 1e-5, 1.0, 300.0])
def test_weights_of_every_size(size: float, number_format: NumberFormat, lanes: str) -> None:
    """Small ones have scales that float16 has few digits of, or none."""
    weight, bias, x = random_values(50, 70), np.zeros(50, np.float32), random_values(3, 70, seed=3)
    weight *= np.float32(size)
    weight[3, 32:64] = 0.25 * size  # a group of equal ones
    weight[4] = 0
    matrix = make(lanes, number_format, weight, bias)

    assert np.array_equal(matrix.rows(torch.arange(50)).numpy(), rounded_weight(number_format, weight))
    assert_product(number_format, matrix(torch.from_numpy(x)), x, weight, bias)


@by
@pytest.mark.parametrize("largest_code", [15, 14, 13])
def test_weights_that_were_in_int4_come_back(largest_code: int, by: str) -> None:
    generator = np.random.default_rng(1)
    codes = generator.integers(0, largest_code, (60, 4, 32), endpoint=True)
    codes[..., 3], codes[..., 5] = 0, largest_code
    scales, minima = generator.uniform(0.01, 0.1, (2, 60, 4, 1)).astype(np.float16).astype(np.float32)
    weight = (codes.astype(np.float32) * scales - minima).reshape(60, 128)

    rows = make(by, NumberFormat.INT4, weight, np.zeros(60, np.float32)).rows(torch.arange(60))

    assert np.array_equal(rows.numpy(), weight)


@lanes
@pytest.mark.parametrize("num_inputs", [19, 32])
def test_int4_has_less_error_than_the_range_of_a_group_divided_by_15(num_inputs: int, lanes: str) -> None:
    weight = random_values(60, num_inputs)
    smallest, largest = weight.min(1, keepdims=True), weight.max(1, keepdims=True)
    scale = (largest - smallest) / np.float32(15)
    plain = np.rint((weight - smallest) / scale) * scale + smallest

    rows = make(lanes, NumberFormat.INT4, weight, np.zeros(60, np.float32)).rows(torch.arange(60)).numpy()

    ours, theirs = (float(np.square(rounded - weight).sum()) for rounded in (rows, plain))
    assert ours < 0.9 * theirs


@by
@pytest.mark.parametrize("sizes", [(1, 1, 1), (40, 8, 7), (48, 48, 48), (96, 50, 100), (900, 300, 300)])
def test_parts_in_other_formats_have_the_bits_of_their_own_matrices(sizes: tuple[int, ...], by: str) -> None:
    ends = np.cumsum([0, 1, *sizes]).tolist()
    weight, bias = random_values(ends[-1], 70), random_values(1, ends[-1], seed=2)[0]
    blocks = [
        (NumberFormat.INT8_A8, [1]),
        (NumberFormat.INT4, sizes[:-1]),
        (NumberFormat.INT8_A8, sizes[-1:]),
    ]

    def made(formats: Sequence[tuple[NumberFormat, Sequence[int]]], begin: int) -> Any:
        """Return a matrix of the outputs from `begin`."""
        matrix: Any
        if by == "torch":
            matrix = QuantizedLinear(70, formats, has_bias=True, dtype=torch.float32, device=CPU)
        else:
            matrix = PackedMatrix(native_library(by), 70, formats, has_bias=True, memory=WeightMemory())
        for part, part_bias in zip(matrix.weights, matrix.biases, strict=True):
            end = begin + len(part_bias)
            part.copy_(torch.from_numpy(weight[begin:end]))
            part_bias.copy_(torch.from_numpy(bias[begin:end]))
            begin = end
        return matrix

    joined, apart = made(blocks, 0), [made(blocks[i : i + 1], begin) for i, begin in enumerate((0, 1, ends[-2]))]

    for num_rows in (1, 3, 40, 300):
        x = torch.from_numpy(random_values(num_rows, 70, seed=3))
        expected = torch.cat([matrix(x) for matrix in apart], 1)
        if by == "torch":  # the order of its sums depends on the shape
            torch.testing.assert_close(joined(x), expected, rtol=1e-4, atol=1e-2)
        else:
            assert torch.equal(joined(x), expected)


@lanes
def test_bfloat16_has_the_bits_of_float32(lanes: str) -> None:
    """So a checkpoint that is stored in bfloat16 loses nothing."""
    weight = rounded_weight(NumberFormat.BFLOAT16, random_values(100, 301))
    bias, x = random_values(1, 100, seed=2)[0], torch.from_numpy(random_values(40, 301, seed=3))
    short, long = (make(lanes, one, weight, bias) for one in (NumberFormat.BFLOAT16, NumberFormat.FLOAT32))

    for num_rows in range(1, 41):
        assert torch.equal(short(x[:num_rows]), long(x[:num_rows]))


def edge_values(num_rows: int, num_inputs: int, seed: int) -> Float32Array:
    """Return values whose products and sums are around the smallest normal numbers; some are denormal themselves."""
    generator = np.random.default_rng(seed)
    exponents = generator.choice([-140, -127, -126, -64, -63, -62, 0], (num_rows, num_inputs))
    values: Float32Array = np.ldexp(generator.uniform(-2, 2, (num_rows, num_inputs)), exponents).astype(np.float32)
    return values


@each_instructions
@each_row((1, 1), (3, 7), (257, 49), (577, 100), (1536, 50))
def test_products_in_bfloat16_have_one_set_of_bits(num_inputs: int, num_outputs: int, *, instructions: str) -> None:
    """Those that AVX-512 BF16 defines: with it and without it, in narrow vectors, in threads, alone and in a batch."""
    for make_values in (random_values, edge_values):
        weight, x = make_values(num_outputs, num_inputs, seed=1), make_values(40, num_inputs, seed=2)
        expected = torch.from_numpy(defined_product(x, weight)).view(torch.int32)
        for num_threads in (1, 3):
            library = NativeLibrary(library_path(instructions), num_threads)
            formats = [(NumberFormat.BFLOAT16_A16, [num_outputs])]
            matrix = PackedMatrix(library, num_inputs, formats, has_bias=False, memory=WeightMemory())
            matrix.weights[0].copy_(torch.from_numpy(weight))
            for num_rows in (1, 3, 8, 9, 40):
                ours = matrix(torch.from_numpy(x[:num_rows])).view(torch.int32)
                assert torch.equal(ours, expected[:num_rows]), f"{instructions}, {num_threads} threads, {num_rows} rows"


def defined_product(x: Float32Array, weight: Float32Array) -> Float32Array:
    """Return x @ weight.T, step by step: parts of 256 inputs, in each pair the odd one first, denormals as 0.

    A product of two bfloat16 is exact in float64. Where float64 rounds its sum with a float32, it is made odd, so that
    rounding it again goes the way that rounding once goes.
    """
    x, weight = (
        np.pad(_flushed(rounded_weight(NumberFormat.BFLOAT16, values)), ((0, 0), (0, values.shape[1] % 2)))
        for values in (x, weight)
    )
    total = np.zeros((len(x), len(weight)), np.float32)
    for begin in range(0, x.shape[1], 256):
        part = np.zeros_like(total)
        for pair in range(begin, min(begin + 256, x.shape[1]), 2):
            for k in (pair + 1, pair):
                product = np.outer(x[:, k].astype(np.float64), weight[:, k].astype(np.float64))
                part = _flushed(_sum_rounded_once(part.astype(np.float64), product))
        total = total + part if begin else part
    return total


def _flushed(values: Float32Array) -> Float32Array:
    is_denormal = np.abs(values) < np.finfo(np.float32).tiny
    flushed: Float32Array = np.where(is_denormal, np.copysign(np.float32(0), values), values)
    return flushed


def _sum_rounded_once(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> Float32Array:
    rounded = a + b
    other = rounded - a
    error = (a - (rounded - other)) + (b - other)  # Knuth's two-sum: exact
    is_even = rounded.view(np.int64) % 2 == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & is_even, np.nextafter(rounded, toward), rounded)
    return odd.astype(np.float32)


@each_instructions
def test_products_in_bfloat16_leave_the_denormals_of_others_alone(instructions: str, tmp_path: Path) -> None:
    mode = mode_of_floats(tmp_path)
    before = mode()
    library = NativeLibrary(library_path(instructions), 3)

    def product(number_format: NumberFormat, size: float) -> torch.Tensor:
        formats = [(number_format, [2000])]
        matrix = PackedMatrix(library, 300, formats, has_bias=False, memory=WeightMemory())
        matrix.weights[0].copy_(torch.full((2000, 300), size))
        return matrix(torch.full((9, 300), 2.0**-100))

    for _ in range(3):
        assert not product(NumberFormat.BFLOAT16_A16, 2.0**-40).any()
        assert torch.equal(product(NumberFormat.FLOAT32, 2.0**-40), torch.full((9, 2000), 300 * 2.0**-140))
        assert mode() == before


@lanes
@formats
def test_a_slice_of_inputs_has_groups_of_its_own(number_format: NumberFormat, lanes: str) -> None:
    """A rank of tensor parallelism has some inputs: cut between groups its weights are those of one process."""
    weight, bias = random_values(50, 96), np.zeros(50, np.float32)
    whole = make(lanes, number_format, weight, bias).rows(torch.arange(50))

    def sliced(place: int) -> torch.Tensor:
        halves = [np.ascontiguousarray(half) for half in (weight[:, :place], weight[:, place:])]
        return torch.cat([make(lanes, number_format, half, bias).rows(torch.arange(50)) for half in halves], 1)

    assert torch.equal(sliced(64), whole)
    assert torch.equal(sliced(40), whole) == (number_format <= NumberFormat.BFLOAT16_A16)
