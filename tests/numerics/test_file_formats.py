"""Every type of GGUF files is held exactly: each weight is what the package gguf makes of it, in C and in torch."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as FileType
from gguf.quants import dequantize

from executor_svc.checkpoint.gguf.header import GGUFTensor
from executor_svc.checkpoint.gguf.weights import Blocks
from executor_svc.checkpoint.mxfp4 import MXFP4_BLOCK, join_blocks, restore_mxfp4
from executor_svc.models.file_formats import HOLDERS
from executor_svc.models.quantized_linear import QuantizedLinear, round_inputs
from executor_svc.native.binding import WeightMemory
from executor_svc.native.library import NativeLibrary
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import NumberFormat
from octavo_shared.errors import ModelLoadError
from tests.numerics.native import LANES, each_instructions, library_path, packed_matrix
from tests.support.each_row import each_row
from tests.support.gguf_files import HALVES_OF_K

NUM_OUTPUTS = 70
CODED = [kind for kind in HOLDERS if GGML_QUANT_SIZES[kind][0] > 1]


# Where a block has numbers of two bytes; at 0 where nothing is said.
HALVES: Mapping[FileType, tuple[int, ...]] = {
    FileType.Q4_1: (0, 2),
    FileType.Q5_1: (0, 2),
    FileType.MXFP4: (),
    **HALVES_OF_K,
}
K_TYPES = [kind for kind in CODED if kind in HALVES_OF_K]


def inputs_of(kind: FileType) -> int:
    """Return the length of three blocks."""
    return 3 * GGML_QUANT_SIZES[kind][0]


def random_blocks(kind: FileType, largest_scale: float = 3.0) -> npt.NDArray[np.uint8]:
    """Return rows of blocks with every code, and scales (and minima) of both signs, some of them 0 or subnormal."""
    generator = np.random.default_rng(int(kind))
    blocks = generator.integers(0, 256, (3 * NUM_OUTPUTS, GGML_QUANT_SIZES[kind][1]), np.uint8)
    blocks[5] = 255  # all codes, scales and minima of few bits are the largest ones
    for begin in HALVES.get(kind, (0,)):
        halves = generator.uniform(-largest_scale, largest_scale, (len(blocks), 1)).astype(np.float16)
        halves[::7] = 0
        halves[::11] = np.float16(3e-7)
        halves[::13] = np.float16(largest_scale)
        blocks[:, begin : begin + 2] = halves.view(np.uint8)
    if kind == FileType.MXFP4:
        blocks[:, 0] = generator.integers(90, 128, len(blocks))
        blocks[::7] = 0
        blocks[::11, 1:] = 0x88
    return blocks.reshape(NUM_OUTPUTS, -1)


def make(by: str, number_format: NumberFormat, kind: FileType, num_outputs: int = NUM_OUTPUTS) -> Any:
    """Return a matrix of two parts."""
    sizes = [num_outputs - 3, 3]
    if by != "torch":
        return packed_matrix(by, inputs_of(kind), sizes, number_format)
    return QuantizedLinear(
        inputs_of(kind), [(number_format, sizes)], has_bias=False, dtype=torch.float32, device=torch.device("cpu")
    )


@each_row(*[(by, kind, holder) for by in (*LANES, "torch") for kind in CODED for holder in HOLDERS[kind]])
def test_every_weight_is_that_of_the_file(by: str, kind: FileType, holder: NumberFormat) -> None:
    blocks = random_blocks(kind)
    order = torch.randperm(NUM_OUTPUTS, generator=torch.Generator().manual_seed(1))
    matrix = make(by, holder, kind)
    parts = [order[:-3].contiguous(), order[-3:].contiguous()]

    held = [
        part.copy_blocks(torch.from_numpy(blocks), int(kind), ids)
        for part, ids in zip(matrix.weights, parts, strict=True)
    ]

    assert all(held)
    expected, ours = torch.from_numpy(dequantize(blocks, kind))[order], matrix.rows(torch.arange(NUM_OUTPUTS))
    assert torch.equal(ours, expected)
    if by != "torch" and kind in K_TYPES:
        assert torch.equal(ours.view(torch.int32), expected.view(torch.int32)), "zeros have their signs"


@each_row(*[(lanes, kind, holder) for lanes in LANES for kind in CODED for holder in HOLDERS[kind]])
def test_products_take_codes_at_both_ends(lanes: str, kind: FileType, holder: NumberFormat) -> None:
    matrix, reference = make(lanes, holder, kind), make("torch", holder, kind)
    blocks = torch.from_numpy(random_blocks(kind))
    for each in (matrix, reference):
        for part, begin in zip(each.weights, (0, NUM_OUTPUTS - 3), strict=True):
            part.copy_blocks(blocks[begin : begin + part.shape[0]], int(kind), None)
    x = torch.randn(5, inputs_of(kind), generator=torch.Generator().manual_seed(2))
    x[0] = x[0].sign()  # all codes of the activations are the largest one, and its negative

    expected = reference(x)

    assert float((matrix(x) - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@each_row(*LANES, "torch")
def test_a_minimum_that_float16_does_not_have_is_told(by: str) -> None:
    blocks = torch.from_numpy(random_blocks(FileType.Q4_0, largest_scale=9000.0))

    told = {
        holder: make(by, holder, FileType.Q4_0).weights[0].copy_blocks(blocks[:-3], 2, None)
        for holder in HOLDERS[FileType.Q4_0]
    }

    assert told == {NumberFormat.INT4: False, NumberFormat.INT8_A8: True, NumberFormat.INT8: True}


@each_row(*[(by, kind) for by in ("widest", "torch") for kind in (FileType.Q4_1, FileType.Q5_0)])
def test_a_rank_takes_its_rows_and_columns(by: str, kind: FileType) -> None:
    blocks, order = random_blocks(kind), torch.arange(NUM_OUTPUTS).flip(0)
    tensor = GGUFTensor("t", (NUM_OUTPUTS, inputs_of(kind)), kind, Path("m.gguf"), 0, blocks.nbytes)
    source = Blocks(tensor, torch.from_numpy(blocks), order)
    holder = HOLDERS[kind][0]
    matrix: Any = (
        packed_matrix(by, 64, [7], holder)
        if by != "torch"
        else QuantizedLinear(64, [(holder, [7])], has_bias=False, dtype=torch.float32, device=torch.device("cpu"))
    )

    source[slice(3, 10), slice(32, 96)].copy_to(matrix.weights[0])

    expected = torch.from_numpy(dequantize(blocks, kind))[order][3:10, 32:96]
    assert torch.equal(matrix.rows(torch.arange(7)), expected)
    with pytest.raises(ModelLoadError, match=r"one would have inputs 48 to 96, which are not whole blocks of 32;"):
        source[slice(3, 10), slice(48, 96)]


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])


@each_row(*LANES, "torch")
def test_mxfp4_is_exact_with_every_scale_in_the_layouts_of_both_files(by: str) -> None:
    """Rows have a scale each. In C products are numbers also where a weight is beyond float32."""
    random = np.random.default_rng(5)
    codes = np.stack([random.permutation(np.arange(96) % 16) for _ in range(255)]).reshape(255, 3, 32).astype(np.uint8)
    scales = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 3, 1)
    exact = (E2M1[codes] * np.exp2(scales[..., None] - 127.0)).reshape(255, 96)
    weight = torch.from_numpy(exact).float()
    of_gguf = torch.from_numpy(codes[..., :16] | codes[..., 16:] << 4)
    of_safetensors = torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(6)) * 2**-9
    products = []
    for block_type, packed in ((int(FileType.MXFP4), of_gguf), (MXFP4_BLOCK, of_safetensors)):
        blocks = join_blocks(packed, torch.from_numpy(scales))
        matrix = make(by, NumberFormat.MXFP4, FileType.MXFP4, num_outputs=255)

        for part, begin in zip(matrix.weights, (0, 252), strict=True):
            assert part.copy_blocks(blocks[begin : begin + part.shape[0]], block_type, None)

        assert torch.equal(matrix.rows(torch.arange(255)), weight)
        products.append(matrix(x)[:, : 253 if by == "torch" else 255])
        blocks[100, 17] = 255
        assert not matrix.weights[0].copy_blocks(blocks[:252], block_type, None)

    assert np.array_equal(restore_mxfp4(join_blocks(of_safetensors, torch.from_numpy(scales)).numpy()), weight.numpy())
    assert torch.equal(*products)
    inputs, num_columns = round_inputs(NumberFormat.MXFP4, x).double().numpy(), products[0].shape[1]
    errors = np.abs(products[0].numpy() - inputs @ exact[:num_columns].T)
    assert (errors <= 2e-6 * np.abs(inputs) @ np.abs(exact[:num_columns]).T + 2.0**-147).all()
    with pytest.raises(ValueError, match="255, which is NaN"):
        join_blocks(of_safetensors, torch.from_numpy(scales + 1))


@each_row(*itertools.product((*LANES, "torch"), CODED, (np.inf, -np.inf, np.nan)))
def test_a_scale_that_is_no_number_is_told(by: str, kind: FileType, value: float) -> None:
    for begin in HALVES.get(kind, (0,)):
        blocks = random_blocks(kind)
        blocks[3, begin : begin + 2] = np.array([value], np.float16).view(np.uint8)

        part = make(by, HOLDERS[kind][0], kind).weights[0]

        assert not part.copy_blocks(torch.from_numpy(blocks[:-3]), int(kind), None)


@each_instructions
@each_row(*CODED)
def test_every_processor_has_the_same_bits(kind: FileType, *, instructions: str) -> None:
    """Whatever instructions it has, however many rows there are beside one, and however many threads."""
    blocks, holder = torch.from_numpy(random_blocks(kind, largest_scale=0.01)), HOLDERS[kind][0]
    x = torch.randn(150, inputs_of(kind), generator=torch.Generator().manual_seed(2))
    x[3], x[4, 5:], x[5] = 0, 0, 1e-44
    results = []
    for name, num_threads in itertools.product(dict.fromkeys(["widest", instructions]), (1, 3)):
        library = NativeLibrary(library_path(name), num_threads)
        matrix = PackedMatrix(
            library, inputs_of(kind), [(holder, [NUM_OUTPUTS])], has_bias=False, memory=WeightMemory()
        )
        assert matrix.weights[0].copy_blocks(blocks, int(kind), None)
        results.append(matrix(x))
        for num_rows in (1, 2, 3, 8, 17, 64, 129) if num_threads == 1 else (1, 65):
            assert torch.equal(matrix(x[-num_rows:]), results[0][-num_rows:]), (name, num_rows)

    assert all(torch.equal(result, results[0]) for result in results)
