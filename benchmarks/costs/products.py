"""A scenario of the products of the C library, in every number format of weights."""

import time

import torch

from benchmarks.costs.harness import Figures, Groups, Size, Way, in_turn, scenario
from executor_svc.native.library import NativeLibrary, load_library
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import K_FORMATS, NumberFormat
from executor_svc.native.weight_memory import WeightMemory

# Outputs and inputs: attention, both halves of an MLP, and the head of SmolLM2-135M; an MLP of about 1B weights.
SHAPES = ((576, 576), (1536, 576), (576, 1536), (49152, 576), (8192, 2048), (2048, 8192))
ROWS = (1, 8, 32, 512)
FORMATS = tuple(number_format for number_format in NumberFormat if number_format not in K_FORMATS)
LEAST_OPERATIONS = 4e8  # of a turn


@scenario("products", "products of float32 rows with weights in each number format, one thread, CPU time", pairs=7)
async def products(size: Size) -> Groups:
    """The rounding of rows is part of it. A product of 512 rows with the head is what no model does."""
    library = load_library(1)
    for (num_outputs, num_inputs), rows in size.of(
        [(shape, rows) for shape in SHAPES for rows in ROWS if rows * shape[0] < 2**24], [((50, 70), 3)]
    ):
        name = f"{num_outputs:,} x {num_inputs:,}, {rows} rows, "
        yield [
            Way(
                name + number_format.name,
                in_turn(product_turn, library, matrix_of(library, number_format, num_outputs, num_inputs), rows),
                beside=name + NumberFormat.FLOAT32.name if number_format else "",
            )
            for number_format in FORMATS
        ]


def matrix_of(library: NativeLibrary, number_format: NumberFormat, num_outputs: int, num_inputs: int) -> PackedMatrix:
    """Return a random matrix."""
    formats = [(number_format, [num_outputs])]
    matrix = PackedMatrix(library, num_inputs, formats, has_bias=False, memory=WeightMemory())
    matrix.weights[0].copy_(torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(1)))
    return matrix


def product_turn(library: NativeLibrary, matrix: PackedMatrix, num_rows: int) -> Figures:
    """Return how many floating-point operations a nanosecond has."""
    x, out = torch.randn(num_rows, matrix.num_inputs), torch.empty(num_rows, matrix.num_outputs)
    num_operations = 2 * num_rows * matrix.num_inputs * matrix.num_outputs
    num_times = max(1, int(LEAST_OPERATIONS / num_operations))
    library.linear(matrix.struct, x, out)
    began_ns = time.thread_time_ns()
    for _ in range(num_times):
        library.linear(matrix.struct, x, out)
    return {"GFLOP/s": num_times * num_operations / (time.thread_time_ns() - began_ns)}
