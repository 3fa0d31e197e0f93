"""Products with weights in codes: what they are, to which bits, and how many bytes they read."""

from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.checkpoint.scaled_codes import E4M3, INT8, MXFP4, NVFP4, UINT4, CodeKind, restore_codes
from executor_svc.models.coded_linear import CODED_FORMATS, CodedLinear
from executor_svc.native.structs import NumberFormat
from executor_svc.triton_kernels import coded_matmul as module
from tests.kernels.device import DEVICE
from tests.kernels.products import add_up_rows_alike

# Inputs in whole tiles; not even in whole blocks; and in three parts, the last of which is short.
SHAPES = [(64, 128), (70, 200), (40, 3190)]


@pytest.fixture(autouse=True)
def row_products(monkeypatch: pytest.MonkeyPatch) -> None:
    add_up_rows_alike(monkeypatch)


def random_blocks(kind: CodeKind, num_outputs: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    """Return rows of blocks as the loader hands them over: any codes, and scales around 2 ** -5."""
    generator = np.random.default_rng(seed)
    num_blocks = -(-num_inputs // kind.block_inputs)
    blocks = generator.integers(0, 256, (num_outputs, num_blocks, kind.block_bytes), np.uint8)
    if kind == MXFP4:
        blocks[..., 0] = generator.integers(118, 126, blocks.shape[:2])
        return torch.from_numpy(blocks.reshape(num_outputs, -1))
    scales = generator.uniform(0.01, 0.05, blocks.shape[:2]).astype(np.float32)
    if kind == NVFP4:
        scales[:] = scales[:, :1]  # one of a row
        blocks[..., 4:6] &= 0x77  # no NaN, nor less than 0
    blocks[..., :4] = scales[..., None].view(np.uint8)
    if kind in UINT4:
        blocks[..., 4] = generator.integers(0, 17, blocks.shape[:2])
    if kind == E4M3:
        blocks[..., 4:] &= 0xF7  # no NaN
    return torch.from_numpy(blocks.reshape(num_outputs, -1))


def linear_of(
    number_format: NumberFormat, num_outputs: int, num_inputs: int, dtype: torch.dtype, *, has_bias: bool = False
) -> tuple[CodedLinear, torch.Tensor]:
    """Return a map of two parts, and its weight in float32."""
    kind, sizes = CODED_FORMATS[number_format], (num_outputs - 7, 7)
    linear = CodedLinear(num_inputs, number_format, sizes, has_bias=has_bias, dtype=dtype, device=DEVICE)
    blocks = random_blocks(kind, num_outputs, num_inputs)
    for part, rows in zip(linear.weights, torch.split(blocks, list(sizes)), strict=True):
        assert part.copy_blocks(rows, kind.block_type, None)
    for bias in linear.biases:
        bias.copy_(torch.arange(len(bias)))
    weight = torch.from_numpy(restore_codes(kind, blocks.numpy())[:, :num_inputs].copy())
    return linear, weight.to(DEVICE)


def random_rows(num_rows: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("number_format", CODED_FORMATS, ids=lambda each: each.name)
def test_a_product_is_that_with_the_restored_weight(number_format: NumberFormat, shape: tuple[int, int]) -> None:
    """Whatever the format and the rows; alone, in a narrow tile, in a wide one the same bits."""
    # The interpreter cuts bfloat16 off, where a device rounds: weights here, and results.
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 2**-6)):
        linear, weight = linear_of(number_format, *shape, dtype, has_bias=True)
        x = random_rows(70, shape[1], dtype)

        result = linear(x)

        # Weights are rounded to the number format of `x`, as if restored in it.
        bias = torch.cat(linear.biases).double()
        exact = x.double() @ weight.to(dtype).double().T + bias
        magnitude = x.double().abs() @ weight.double().abs().T + bias
        assert bool(((result.double() - exact).abs() <= tolerance * magnitude + 1e-9).all())
        for begin, num_rows in ((0, 1), (69, 1), (13, 17), (40, 16)):
            assert torch.equal(linear(x[begin : begin + num_rows].clone()), result[begin : begin + num_rows])


@pytest.mark.parametrize("num_rows", [0, 2, 300])
def test_rows_of_any_number_and_layout_are_multiplied(num_rows: int) -> None:
    linear, weight = linear_of(NumberFormat.INT4_G128, 40, 200, torch.float32)
    x = random_rows(num_rows, 260, torch.float32)[:, 30:230]

    result = linear(x)

    assert result.shape == (num_rows, 40)
    torch.testing.assert_close(result, x @ weight.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(linear(x.T.contiguous().T), result)


def test_codes_of_every_value_are_widened_exactly() -> None:
    """All that a byte can say, by products with the rows of an identity."""
    for number_format, kind in CODED_FORMATS.items():
        linear, weight = linear_of(number_format, 300, kind.block_inputs, torch.float32)
        assert torch.equal(linear(torch.eye(kind.block_inputs, device=DEVICE)), weight.T), number_format


@pytest.mark.parametrize("number_format", CODED_FORMATS, ids=lambda each: each.name)
def test_a_decode_reads_a_weight_once(number_format: NumberFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of all loads that no mask holds back, other than those of rows; 4 bits stay 4 bits in memory."""
    if DEVICE.type == "cuda":
        pytest.skip("loads are counted in the interpreter")
    from triton.runtime import interpreter

    num_outputs, num_inputs = 128, 2048
    linear, _ = linear_of(number_format, num_outputs, num_inputs, torch.bfloat16)
    x = random_rows(1, num_inputs, torch.bfloat16)
    held = linear._weight
    begin_of_x, num_read = x.data_ptr(), 0
    load = interpreter.InterpreterBuilder.create_masked_load

    def counted(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        nonlocal num_read
        places = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.int64)
        is_of_x = (places >= begin_of_x) & (places < begin_of_x + x.nbytes)
        in_codes = (places >= held.codes.data_ptr()) & (places < held.codes.data_ptr() + held.codes.nbytes)
        itemsize = 1 if in_codes.any() else max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        num_read += int((~is_of_x).sum()) * itemsize
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", counted)
    parts: list[int] = []
    monkeypatch.setattr(module, "sum_parts_kernel", _Nothing(parts))
    linear(x)

    assert parts, "a narrow weight is split over inputs"
    assert held.nbytes <= num_read <= 1.05 * held.nbytes
    assert held.nbytes <= CODED_FORMATS[number_format].held_bits / 8 * num_outputs * num_inputs * 1.01


class _Nothing:
    """In place of the kernel that adds up parts, whose bytes are the product's own."""

    def __init__(self, grids: list[int]) -> None:
        self._grids = grids

    def __getitem__(self, grid: tuple[int]) -> Any:
        self._grids.append(grid[0])
        return lambda *_, **__: None


def test_blocks_of_another_kind_are_refused() -> None:
    linear = CodedLinear(128, NumberFormat.FP8, (8,), has_bias=False, dtype=torch.bfloat16, device=DEVICE)

    assert not linear.weights[0].copy_blocks(random_blocks(INT8, 8, 128), INT8.block_type, None)
