"""The C segments equal the torch ones, for every remainder of every block of rows, columns and inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from executor_svc.models.dense import DenseKernels, EmbeddingWeights, LayerEnd, MatrixRole, Mlp, Norm
from executor_svc.models.native_dense import NativeDense
from executor_svc.models.torch_dense import TorchDense
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import NumberFormat
from tests.numerics.native import FORMATS, LANES, native_library, packed_matrix
from tests.support.each_row import each_row

EPSILON = 1e-5
TILE_ROWS = 8  # of tile.h, the larger one
PANEL_COLUMNS = 48  # of dense.h, the larger one
ALL_ROWS = (*range(2 * TILE_ROWS + 2), 127, 128, 129, 300)
ALL_COLUMNS = (1, 7, 8, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 97, 143)
ALL_INPUTS = (1, 3, 31, 32, 33, 50, 63, 64, 65, 127, 128, 129, 257, 576)


# int16 inputs differ from float32 by less than 2 ** -16 of the largest one of their row. An input of 8 bits that is
# between two codes may become either, since sums before it are in another order: a step of 1 / 127 of its group.
SEGMENT_TOLERANCES: dict[NumberFormat, float] = {
    NumberFormat.FLOAT32: 2e-5,
    NumberFormat.BFLOAT16: 2e-5,
    NumberFormat.BFLOAT16_A16: 3e-2,
    NumberFormat.INT8: 1e-3,
    NumberFormat.INT8_A8: 5e-2,
    NumberFormat.INT4: 5e-2,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a layer's end and the projection behind it."""

    attended: int = 24
    hidden: int = 40
    intermediate: int = 56
    projected: tuple[int, ...] = (24, 8, 8)
    has_bias: bool = False


def make_segment(kernels: DenseKernels[Any], shape: Shape, seed: int = 1) -> Any:
    """Return a segment whose weights depend on the seed only."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(num_inputs: int, sizes: Sequence[int], role: MatrixRole = "layer") -> Any:
        made = kernels.matrix(num_inputs, sizes, has_bias=shape.has_bias, role=role)
        for part in (*made.weights, *made.biases):
            part.copy_(torch.randn(part.shape, generator=generator) / num_inputs**0.5)
        return made

    def norm() -> Norm:
        return Norm(torch.rand(shape.hidden, generator=generator) + 0.5, None, EPSILON)

    mlp = Mlp(
        matrix(shape.hidden, [shape.intermediate]),
        matrix(shape.hidden, [shape.intermediate]),
        matrix(shape.intermediate, [shape.hidden]),
        "silu",
    )
    layer_end = LayerEnd(matrix(shape.attended, [shape.hidden]), None, norm(), mlp, None)
    role: MatrixRole = "qkv" if len(shape.projected) == 3 else "layer"
    return kernels.segment(layer_end, norm(), matrix(shape.hidden, shape.projected, role))


def run_both(
    lanes: str, shape: Shape, num_rows: int, number_format: NumberFormat = NumberFormat.FLOAT32
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return (residual, projected) of C and of torch."""
    generator = torch.Generator().manual_seed(num_rows)
    attended = torch.randn(num_rows, shape.attended, generator=generator)
    residual = torch.randn(num_rows, shape.hidden, generator=generator)
    results = []
    for kernels in (
        NativeDense(native_library(lanes), number_format=number_format),
        TorchDense(torch.float32, torch.device("cpu"), number_format=number_format),
    ):
        updated = residual.clone()
        results.append((updated, make_segment(kernels, shape)(attended.clone(), updated)))
    return results[0], results[1]


def check(lanes: str, shape: Shape, num_rows: int, number_format: NumberFormat) -> None:
    tolerance = SEGMENT_TOLERANCES[number_format]
    for our, their in zip(*run_both(lanes, shape, num_rows, number_format), strict=True):
        torch.testing.assert_close(
            our, their, rtol=tolerance, atol=tolerance, msg=lambda text: f"{shape}, {num_rows} rows: {text}"
        )


@pytest.mark.parametrize("number_format", FORMATS, ids=lambda one: one.name)
@pytest.mark.parametrize("lanes", LANES)
class TestSegments:
    """Products of every shape in every format are in test_number_formats.py; here a format has some."""

    def test_every_number_of_rows(self, lanes: str, number_format: NumberFormat) -> None:
        some = (1, TILE_ROWS, TILE_ROWS + 1, 129)
        for num_rows in ALL_ROWS if number_format == NumberFormat.FLOAT32 else some:
            check(lanes, Shape(), num_rows, number_format)

    def test_every_remainder_of_columns(self, lanes: str, number_format: NumberFormat) -> None:
        some = (1, 31, 49)
        for size in ALL_COLUMNS if number_format == NumberFormat.FLOAT32 else some:
            for shape in (Shape(projected=(size,)), Shape(intermediate=size), Shape(projected=(3, size, 5))):
                for num_rows in (1, 9):
                    check(lanes, shape, num_rows, number_format)

    def test_every_remainder_of_inputs(self, lanes: str, number_format: NumberFormat) -> None:
        some = (1, 33, 64, 257)
        for size in ALL_INPUTS if number_format == NumberFormat.FLOAT32 else some:
            for shape in (Shape(attended=size), Shape(hidden=size), Shape(intermediate=size)):
                check(lanes, shape, 5, number_format)

    def test_biases(self, lanes: str, number_format: NumberFormat) -> None:
        for num_rows in (1, 13):
            check(lanes, Shape(has_bias=True), num_rows, number_format)

    def test_rows_of_the_embedding(self, lanes: str, number_format: NumberFormat) -> None:
        weight = torch.randn(2 * PANEL_COLUMNS + 5, 70)
        token_ids = torch.tensor([0, 47, 48, 100, 100, 23])
        rows = []
        both: list[DenseKernels[Any]] = [
            NativeDense(native_library(lanes), number_format=number_format),
            TorchDense(torch.float32, torch.device("cpu"), number_format=number_format),
        ]
        for kernels in both:
            matrix = kernels.matrix(70, [len(weight)])
            matrix.weights[0].copy_(weight)
            weights = EmbeddingWeights(matrix, (0, len(weight)), None, None, 0, None)
            rows.append(kernels.embedding(weights)(token_ids, token_ids))

        torch.testing.assert_close(rows[0], rows[1], rtol=1e-6, atol=0)
        if number_format == NumberFormat.FLOAT32:
            assert torch.equal(rows[0], weight[token_ids])

    def test_the_result_does_not_depend_on_the_other_rows(self, lanes: str, number_format: NumberFormat) -> None:
        kernels = NativeDense(native_library(lanes), number_format=number_format)
        segment = make_segment(kernels, Shape(attended=300, hidden=576, intermediate=100))
        attended, residual = torch.randn(19, 300), torch.randn(19, 576)
        alone = [segment(attended[i : i + 1].clone(), residual[i : i + 1].clone()) for i in range(19)]

        together = segment(attended.clone(), residual.clone())

        assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("number_format", FORMATS, ids=lambda one: one.name)
@pytest.mark.parametrize("lanes", LANES)
class TestOneProduct:
    """What models without segments in C multiply with; its numbers are in test_number_formats.py."""

    @staticmethod
    def make(lanes: str, number_format: NumberFormat, num_inputs: int, num_outputs: int) -> PackedMatrix:
        """Return a matrix of two parts."""
        made = packed_matrix(lanes, num_inputs, [num_outputs, 3], number_format, has_bias=True)
        generator = torch.Generator().manual_seed(num_inputs)
        parts: list[Any] = [*made.weights, *made.biases]
        for part in parts:
            part.copy_(torch.randn(part.shape, generator=generator))
        return made

    def test_other_number_formats_come_back(self, lanes: str, number_format: NumberFormat) -> None:
        matrix, x = self.make(lanes, number_format, 70, 50), torch.randn(5, 70).to(torch.bfloat16)

        assert torch.equal(matrix(x), matrix(x.float()).to(torch.bfloat16))
        assert torch.equal(matrix(x.t().contiguous().t()), matrix(x))

    def test_a_row_does_not_depend_on_the_other_rows(self, lanes: str, number_format: NumberFormat) -> None:
        matrix, x = self.make(lanes, number_format, 300, 1000), torch.randn(19, 300)

        assert torch.equal(matrix(x), torch.cat([matrix(x[i : i + 1]) for i in range(19)]))


@each_row(*LANES)
def test_the_last_segment_has_no_projection(lanes: str) -> None:
    shape, attended, residual = Shape(), torch.randn(3, 24), torch.randn(3, 40)
    results = []
    for kernels in (NativeDense(native_library(lanes)), TorchDense(torch.float32, torch.device("cpu"))):
        whole = make_segment(kernels, shape)
        updated, expected = residual.clone(), residual.clone()
        whole(attended.clone(), expected)
        layer_end = whole._layer_end._weights if isinstance(kernels, NativeDense) else whole.layer_end.layer_end
        kernels.last_segment(layer_end)(attended.clone(), updated)
        assert torch.equal(updated, expected)
        results.append(updated)
    torch.testing.assert_close(results[0], results[1], rtol=2e-5, atol=2e-5)


def test_what_the_weights_of_a_format_take() -> None:
    library = native_library("widest")

    sizes = {
        number_format: NativeDense(library, number_format=number_format).matrix(576, [960]).num_bytes
        for number_format in FORMATS
    }

    expected = {
        NumberFormat.FLOAT32: 4.0,
        NumberFormat.BFLOAT16: 2.0,
        NumberFormat.BFLOAT16_A16: 2.0,
        NumberFormat.INT8: 1 + 2 / 32,  # a scale for each group
        NumberFormat.INT8_A8: 1 + 2 / 32,
        NumberFormat.INT4: 1 / 2 + 4 / 32,  # and a minimum
    }
    assert sizes == {number_format: 960 * 576 * size for number_format, size in expected.items()}
