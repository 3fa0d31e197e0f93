"""Every type of GGUF files is held exactly: each weight is what the package gguf makes of it, in C and in torch."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as FileType
from gguf.quants import dequantize

from executor_svc.models.file_formats import HOLDERS
from executor_svc.models.quantized_linear import QuantizedLinear
from executor_svc.native.structs import NumberFormat
from tests.numerics.native import LANES, packed_matrix
from tests.support.each_row import each_row

NUM_INPUTS, NUM_OUTPUTS = 96, 70
CODED = [kind for kind in HOLDERS if GGML_QUANT_SIZES[kind][0] > 1]


def random_blocks(kind: FileType, largest_scale: float = 3.0) -> npt.NDArray[np.uint8]:
    """Return rows of blocks with every code, and scales (and minima) of both signs, some of them 0 or subnormal."""
    generator = np.random.default_rng(int(kind))
    num_blocks, size = NUM_OUTPUTS * NUM_INPUTS // 32, GGML_QUANT_SIZES[kind][1]
    blocks = generator.integers(0, 256, (num_blocks, size), np.uint8)
    halves = generator.uniform(-largest_scale, largest_scale, (num_blocks, 2)).astype(np.float16)
    halves[::7] = 0
    halves[::11] = np.float16(3e-7)
    blocks[:, :4] = halves.view(np.uint8)
    if kind != FileType.Q4_1:  # only the scale is a number of two bytes
        blocks[:, 2:4] = generator.integers(0, 256, (num_blocks, 2), np.uint8)
    return blocks.reshape(NUM_OUTPUTS, -1)


def make(by: str, number_format: NumberFormat) -> Any:
    """Return a matrix of two parts."""
    sizes = [NUM_OUTPUTS - 3, 3]
    if by != "torch":
        return packed_matrix(by, NUM_INPUTS, sizes, number_format)
    return QuantizedLinear(
        NUM_INPUTS, [(number_format, sizes)], has_bias=False, dtype=torch.float32, device=torch.device("cpu")
    )


@each_row(*[(by, kind, holder) for by in (*LANES, "torch") for kind in CODED for holder in HOLDERS[kind]])
def test_every_weight_is_that_of_the_file(by: str, kind: FileType, holder: NumberFormat) -> None:
    blocks = random_blocks(kind)
    order = torch.randperm(NUM_OUTPUTS, generator=torch.Generator().manual_seed(1))
    matrix = make(by, holder)
    parts = [order[:-3].contiguous(), order[-3:].contiguous()]

    held = [
        part.copy_blocks(torch.from_numpy(blocks), int(kind), ids)
        for part, ids in zip(matrix.weights, parts, strict=True)
    ]

    assert all(held)
    expected = torch.from_numpy(dequantize(blocks, kind))[order]
    assert torch.equal(matrix.rows(torch.arange(NUM_OUTPUTS)), expected)


@each_row(*[(lanes, kind, holder) for lanes in LANES for kind in CODED for holder in HOLDERS[kind]])
def test_products_take_codes_at_both_ends(lanes: str, kind: FileType, holder: NumberFormat) -> None:
    matrix, reference = make(lanes, holder), make("torch", holder)
    blocks = torch.from_numpy(random_blocks(kind))
    for each in (matrix, reference):
        for part, begin in zip(each.weights, (0, NUM_OUTPUTS - 3), strict=True):
            part.copy_blocks(blocks[begin : begin + part.shape[0]], int(kind), None)
    x = torch.randn(5, NUM_INPUTS, generator=torch.Generator().manual_seed(2))
    x[0] = x[0].sign()  # all codes of the activations are the largest one, and its negative

    expected = reference(x)

    assert float((matrix(x) - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@each_row(*LANES, "torch")
def test_a_minimum_that_float16_does_not_have_is_told(by: str) -> None:
    blocks = torch.from_numpy(random_blocks(FileType.Q4_0, largest_scale=9000.0))

    told = {holder: make(by, holder).weights[0].copy_blocks(blocks[:-3], 2, None) for holder in HOLDERS[FileType.Q4_0]}

    assert told == {NumberFormat.INT4: False, NumberFormat.INT8_A8: True, NumberFormat.INT8: True}
