"""A row of a product has the same bits alone and among any number of others."""

from typing import Any

import pytest
import torch

from executor_svc.triton_kernels import matmul as module
from executor_svc.triton_kernels.matmul import matmul_tile
from tests.kernels.device import DEVICE, SLOW_IF_INTERPRETED
from tests.kernels.products import add_up_rows_alike
from tests.support.each_row import each_row

QUICK = {(torch.float32, True), (torch.bfloat16, False)}
KINDS = [
    pytest.param(dtype, has_bias, marks=() if (dtype, has_bias) in QUICK else SLOW_IF_INTERPRETED)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for has_bias in (True, False)
]


@pytest.fixture(autouse=True)
def row_products(monkeypatch: pytest.MonkeyPatch) -> None:
    add_up_rows_alike(monkeypatch)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_multiprocessors: int) -> torch.Tensor:
    """Multiply as on a device with so many multiprocessors: with few of them many rows take large tiles."""
    capability = torch.cuda.get_device_capability(DEVICE) if DEVICE.type == "cuda" else (9, 0)
    return module.matmul(x, weight, bias, num_multiprocessors, capability)


@pytest.mark.parametrize(("dtype", "has_bias"), KINDS)
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype, has_bias: bool) -> None:
    """Sizes that no tile divides, on devices that have one program and many: in large tiles and in small ones."""
    x, weight = random(130, 70, dtype=dtype), random(40, 70, dtype=dtype, seed=1)
    bias = random(40, dtype=dtype, seed=2) if has_bias else None
    among_130 = matmul(x, weight, bias, 132)

    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(among_130.double(), exact, rtol=tolerance, atol=tolerance)
    for begin, num_rows in ((0, 1), (77, 1), (129, 1), (50, 3), (13, 17), (64, 64)):
        some = matmul(x[begin : begin + num_rows].clone(), weight, bias, 1)
        assert torch.equal(some, among_130[begin : begin + num_rows])


def test_rows_of_any_layout_are_multiplied() -> None:
    wide, weight = random(20, 90), random(8, 30, seed=1)
    expected = matmul(wide[:, 10:40].contiguous(), weight, None, 1)

    assert torch.equal(matmul(wide[:, 10:40], weight, None, 1), expected)
    assert torch.equal(matmul(wide[:, 10:40].t().contiguous().t(), weight, None, 1), expected)
    assert torch.equal(matmul(wide[3:4, 10:40], weight, None, 1), expected[3:4])
    assert matmul(wide[:0, :30], weight, None, 1).shape == (0, 8)


def test_a_row_that_is_no_number_harms_no_other() -> None:
    x, weight = random(5, 33), random(7, 33, seed=1)
    expected = matmul(x, weight, None, 1)
    x[2] = torch.nan

    result = matmul(x, weight, None, 1)

    assert torch.equal(result[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
    assert bool(result[2].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(128, 512), (1024, 64), (4096, 64), (8192, 64), (50_257, 32)])
def test_the_order_of_sums_follows_the_weight_alone(
    num_outputs: int, num_inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the rows and the device: as many inputs at once, and programs that cover all tiles."""
    seen: set[Any] = set()
    grids: list[int] = []

    class Launch:
        def __getitem__(self, grid: tuple[int]) -> Any:
            grids.append(grid[0])
            return lambda *_, **constants: seen.add((constants["TILE_INPUTS"], constants["TILE_ROWS"]))

    monkeypatch.setattr(module, "matmul_kernel", Launch())
    weight = torch.empty(num_outputs, num_inputs, dtype=dtype)
    for num_rows in (1, 2, 3, 16, 17, 64, 65, 130, 512, 2048, 20_000):
        for num_multiprocessors in (1, 46, 132):
            matmul(torch.empty(num_rows, num_inputs, dtype=dtype), weight, None, num_multiprocessors)

    assert len({num_inputs for num_inputs, _ in seen}) == 1
    # 50,257 outputs fill any of these devices with large tiles, however few the rows.
    has_both_sizes = dtype == torch.bfloat16 and num_outputs < 50_257
    assert len(seen) == 1 + has_both_sizes
    assert min(grids) >= 1
    assert max(grids) <= 264


@pytest.mark.parametrize("num_row_tiles", [1, 16, 17, 40])
def test_every_tile_is_computed_once(num_row_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "matmul_tile", lambda *_: module.MatmulTile(16, 16, 16, 4, 3))
    x, weight = random(16 * num_row_tiles - 3, 16), random(40, 16, seed=1)

    torch.testing.assert_close(matmul(x, weight, None, 3), x @ weight.T)


@each_row((8, 32), (4095, 32), (4096, 64), (8191, 64), (8192, 128), (200_000, 128))
def test_columns_of_a_tile(num_outputs: int, width: int) -> None:
    assert matmul_tile(num_outputs, 2).num_columns == width


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a card adds up float32 input by input, whatever the tile")
@pytest.mark.parametrize("num_inputs", [pytest.param(64, marks=SLOW_IF_INTERPRETED)])
def test_tiles_that_follow_the_rows_are_found(num_inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first test must notice: another number of inputs at once is another order of sums."""
    x, weight = random(3, num_inputs), random(8, num_inputs, seed=1)
    expected = matmul(x, weight, None, 1)
    monkeypatch.setattr(module, "matmul_tile", lambda *_: module.MatmulTile(16, 64, 16, 4, 3))

    assert not torch.equal(matmul(x, weight, None, 1), expected)
