"""A product with a weight; no row depends on how many there are.

A library chooses its kernel by the number of rows: another instruction, sums over inputs in several parts when rows
are few. So a token decoded alone and the same token in a chunk have other bits. Here one program goes over all inputs
of its tile from the first to the last, as many at once whatever the tile, and by the same kind of instruction, which
adds up 16 inputs: that is all that the sum of an element depends on. So tiles may be larger where rows are many.
Nothing is tuned at run time.
Source of the idea: He et al. 2025, "Defeating Nondeterminism in LLM Inference" (Thinking Machines Lab).

Programs are as many as the device runs at once, and take one tile of the output after the other. Neighbours take the
same columns of different rows, so that a weight comes from memory once for `GROUP_ROWS` tiles of rows, which stay in
the cache of the device meanwhile.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from executor_svc.triton_kernels.common import sum_products

# Programs on a multiprocessor at once: each has 48 to 96 KiB of shared memory.
RESIDENT_PROGRAMS: Final = 2
# Tiles of rows that take the same columns one after the other.
GROUP_ROWS: Final = 16
# Narrower tiles, where wider ones would leave most of a device idle when rows are few.
LEAST_COLUMN_TILES: Final = 64


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """How a program of `matmul_kernel` works."""

    num_rows: int
    num_columns: int  # outputs
    num_inputs: int  # that are multiplied at once
    num_warps: int
    num_stages: int
    num_resident: int = RESIDENT_PROGRAMS


def large_tile(capability: tuple[int, int]) -> MatmulTile | None:
    """Return the tile for many rows, of numbers of 16 bits; None: there is none that adds up as the small ones do."""
    if capability[0] == 9:  # 227 KiB of shared memory
        return MatmulTile(128, 256, 64, 8, 4, 1)
    if capability[0] == 8:
        return MatmulTile(128, 128, 64, 8, 3, 1)
    return None


def matmul_tile(num_outputs: int, itemsize: int) -> MatmulTile:
    """Return the tile for few rows and a weight of so many outputs, of numbers of `itemsize` bytes.

    64 rows are the least that the products of Hopper take. Float32 has no tensor cores without rounding.
    """
    if itemsize == 4:
        return MatmulTile(16, 64, 32, 4, 3)
    widest = next((width for width in (128, 64) if num_outputs >= LEAST_COLUMN_TILES * width), 32)
    return MatmulTile(64, widest, 64, 4, 4)


@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    x,
    x_stride,
    weight,
    bias,
    output,
    num_rows,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    """Write x @ weight.T + bias; any number of programs.

    Args:
        x: [num_rows, NUM_INPUTS], rows `x_stride` apart.
        x_stride: In elements.
        weight: [NUM_OUTPUTS, NUM_INPUTS], contiguous.
        bias: [NUM_OUTPUTS], or None.
        output: [num_rows, NUM_OUTPUTS], contiguous, written.
        num_rows: 1 or more.
        NUM_OUTPUTS: Of the weight.
        NUM_INPUTS: Of the weight.
        TILE_ROWS: See `MatmulTile`; so are the other two.
        TILE_COLUMNS: See there.
        TILE_INPUTS: See there.
        GROUP_ROWS: Tiles of rows that take the same columns one after the other.
    """
    num_row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    NUM_COLUMN_TILES: tl.constexpr = (NUM_OUTPUTS + TILE_COLUMNS - 1) // TILE_COLUMNS
    for tile in tl.range(tl.program_id(0), num_row_tiles * NUM_COLUMN_TILES, tl.num_programs(0)):
        first_row_tile = tile // (GROUP_ROWS * NUM_COLUMN_TILES) * GROUP_ROWS
        group_rows = tl.minimum(num_row_tiles - first_row_tile, GROUP_ROWS)
        in_group = tile % (GROUP_ROWS * NUM_COLUMN_TILES)
        rows = (first_row_tile + in_group % group_rows) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        columns = in_group // group_rows * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        is_row, is_column = rows < num_rows, columns < NUM_OUTPUTS
        x_rows = x + rows.to(tl.int64)[:, None] * x_stride
        weight_rows = weight + columns.to(tl.int64)[:, None] * NUM_INPUTS
        sums = sum_products(x_rows, weight_rows, is_row, is_column, NUM_INPUTS, TILE_INPUTS)
        if bias is not None:
            sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        places = output + rows.to(tl.int64)[:, None] * NUM_OUTPUTS + columns[None, :]
        tl.store(places, sums.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    num_multiprocessors: int,
    capability: tuple[int, int],
) -> torch.Tensor:
    """Return x @ weight.T + bias, [num_rows, num_outputs], contiguous; summed in float32 and rounded once.

    Args:
        x: [num_rows, num_inputs], of the number format of the weight.
        weight: [num_outputs, num_inputs], contiguous.
        bias: [num_outputs]; None: nothing is added.
        num_multiprocessors: Of the device; more or fewer change no bit.
        capability: Of the device.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, (num_outputs, num_inputs) = len(x), weight.shape
    assert x.dtype == weight.dtype, "they are multiplied as they are"
    assert weight.is_contiguous(), "inputs lie one after the other"
    output = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if not num_rows:
        return output
    tile = matmul_tile(num_outputs, x.dtype.itemsize)
    large = large_tile(capability) if x.dtype.itemsize == 2 else None
    if large is not None and _num_tiles(large, num_rows, num_outputs) >= num_multiprocessors:
        tile = large
    num_programs = min(_num_tiles(tile, num_rows, num_outputs), tile.num_resident * num_multiprocessors)
    matmul_kernel[(num_programs,)](
        x,
        # The stride of a single row may be anything.
        x.stride(0) if num_rows > 1 else num_inputs,
        weight,
        bias,
        output,
        num_rows,
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        TILE_ROWS=tile.num_rows,
        TILE_COLUMNS=tile.num_columns,
        TILE_INPUTS=tile.num_inputs,
        GROUP_ROWS=GROUP_ROWS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return output


def _num_tiles(tile: MatmulTile, num_rows: int, num_outputs: int) -> int:
    return int(triton.cdiv(num_rows, tile.num_rows) * triton.cdiv(num_outputs, tile.num_columns))
