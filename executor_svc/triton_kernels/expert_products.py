"""Products of rows with the matrices of the experts that they go to: one launch for all experts, nothing on the host.

A choice is one expert of one row; choice c is of row c // num_chosen. Choices are put in tiles, all choices of a tile
of one expert, in their order. How many tiles there may be follows from the number of choices alone, so that a launch is
the same whatever experts are chosen; tiles that are not needed have no expert, and their programs end at once.

One kernel serves all number formats and both kinds of numerics. As in `matmul.py` its tiles follow from the model's
shape and number format, and one program goes over all inputs from the first to the last, so no row depends on others.
torch's grouped product takes bfloat16 alone, adds no bias, and wants rows in the order of experts.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from executor_svc.triton_kernels.common import sum_products
from executor_svc.triton_kernels.dense import sigmoid

# Choices that a program reads at once, to find those of its expert.
SCAN_TILE: Final = 1024
# Numbers that a program of a weighted sum writes.
SUM_TILE: Final = 1024
# Narrower tiles, where wider ones would leave most of a device idle when there is one row.
LEAST_COLUMN_TILES: Final = 64


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """How a program of `expert_product_kernel` works."""

    num_rows: int  # choices of one expert
    num_columns: int  # outputs
    num_inputs: int  # that are multiplied at once
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class GroupedChoices:
    """The choices of a step, in tiles of one expert each."""

    tile_experts: torch.Tensor  # [num_tiles] int32; -1: the tile has no choices
    tile_choices: torch.Tensor  # [num_tiles, rows of a tile] int32; -1: none
    num_choices: int


def rows_of_tile(itemsize: int) -> int:
    """Return the choices in a tile: of 16 bits the least that the products of Hopper take."""
    return 16 if itemsize == 4 else 64


def expert_tile(num_outputs: int, num_chosen: int, itemsize: int) -> ExpertTile:
    """Return the tile for a weight.

    Args:
        num_outputs: Of an expert.
        num_chosen: Experts of a row, all of which are multiplied with.
        itemsize: Bytes of a number. Float32 has no tensor cores without rounding.
    """
    if itemsize == 4:
        return ExpertTile(rows_of_tile(4), 64, 32, 4, 3)
    widths = (width for width in (128, 64) if num_outputs * num_chosen >= LEAST_COLUMN_TILES * width)
    return ExpertTile(rows_of_tile(itemsize), next(widths, 32), 64, 4, 4)


@triton.jit(do_not_specialize=["num_choices"])
def count_kernel(chosen, counts, num_choices, TILE: tl.constexpr):
    """Count the choices of an expert; a program an expert.

    Args:
        chosen: The expert of each choice, [num_choices].
        counts: [num_experts], written.
        num_choices: 1 or more.
        TILE: Choices read at once.
    """
    expert = tl.program_id(0)
    found = tl.full([TILE], 0, tl.int32)
    for begin in tl.range(0, num_choices, TILE):
        choices = begin + tl.arange(0, TILE)
        found += (tl.load(chosen + choices, mask=choices < num_choices, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_choices", "num_tiles"])
def group_kernel(
    chosen,
    counts,
    tile_experts,
    tile_choices,
    num_choices,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Put the choices of an expert in tiles behind those of the experts before; a program an expert.

    Args:
        chosen: The expert of each choice, [num_choices].
        counts: Of each expert, [NUM_EXPERTS].
        tile_experts: [num_tiles], written.
        tile_choices: [num_tiles, TILE_ROWS], written where a tile has an expert.
        num_choices: 1 or more.
        num_tiles: As many as there may be.
        NUM_EXPERTS: Also of programs.
        EXPERTS_PADDED: The next power of two.
        TILE_ROWS: Choices in a tile.
        TILE: Choices read at once.
    """
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_PADDED)
    needed = tl.cdiv(tl.load(counts + experts, mask=experts < NUM_EXPERTS, other=0), TILE_ROWS)
    first_tile = tl.sum(tl.where(experts < expert, needed, 0), 0)
    end_tile = tl.sum(tl.where(experts <= expert, needed, 0), 0)
    for begin in tl.range(first_tile, end_tile, TILE):
        tiles = begin + tl.arange(0, TILE)
        tl.store(tile_experts + tiles, expert + tl.full([TILE], 0, tl.int32), mask=tiles < end_tile)
    if expert == NUM_EXPERTS - 1:
        for begin in tl.range(end_tile, num_tiles, TILE):
            tiles = begin + tl.arange(0, TILE)
            tl.store(tile_experts + tiles, tl.full([TILE], -1, tl.int32), mask=tiles < num_tiles)
    place = first_tile * TILE_ROWS
    for begin in tl.range(0, num_choices, TILE):
        choices = begin + tl.arange(0, TILE)
        is_own = (tl.load(chosen + choices, mask=choices < num_choices, other=-1) == expert).to(tl.int32)
        tl.store(tile_choices + place + tl.cumsum(is_own, 0) - 1, choices, mask=is_own != 0)
        place += tl.sum(is_own, 0)
    unused = place + tl.arange(0, TILE_ROWS)
    tl.store(tile_choices + unused, tl.full([TILE_ROWS], -1, tl.int32), mask=unused < end_tile * TILE_ROWS)


@triton.jit(do_not_specialize=["num_tiles"])
def expert_product_kernel(
    x,
    weights,
    biases,
    output,
    tile_experts,
    tile_choices,
    num_tiles,
    CHOICES_OF_ROW: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """Write x @ weight.T + bias of one expert, for a tile of choices and of outputs; a program a tile.

    Neighbours take the same outputs of other choices, so that a weight comes from memory once.

    Args:
        x: [num_rows, NUM_INPUTS], contiguous; choice c reads row c // CHOICES_OF_ROW.
        weights: [num_experts, NUM_OUTPUTS, NUM_INPUTS], contiguous.
        biases: [num_experts, NUM_OUTPUTS], or None.
        output: [num_choices, NUM_OUTPUTS], contiguous, written.
        tile_experts: See `GroupedChoices`; so is the next.
        tile_choices: See there.
        num_tiles: Of choices.
        CHOICES_OF_ROW: Of `x`.
        NUM_OUTPUTS: Of an expert.
        NUM_INPUTS: Of an expert.
        TILE_ROWS: See `ExpertTile`; so are the other two.
        TILE_COLUMNS: See there.
        TILE_INPUTS: See there.
    """
    tile = tl.program_id(0) % num_tiles
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert >= 0:
        choices = tl.load(tile_choices + tile * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
        columns = tl.program_id(0) // num_tiles * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        is_row, is_column = choices >= 0, columns < NUM_OUTPUTS
        x_rows = x + choices[:, None] // CHOICES_OF_ROW * NUM_INPUTS
        weight_rows = weights + expert * (NUM_OUTPUTS * NUM_INPUTS) + columns.to(tl.int64)[:, None] * NUM_INPUTS
        sums = sum_products(x_rows, weight_rows, is_row, is_column, NUM_INPUTS, TILE_INPUTS)
        if biases is not None:
            bias = tl.load(biases + expert * NUM_OUTPUTS + columns, mask=is_column, other=0.0)
            sums += bias.to(tl.float32)[None, :]
        places = output + choices[:, None] * NUM_OUTPUTS + columns[None, :]
        tl.store(places, sums.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def weighted_sum_kernel(
    outputs,
    weights,
    chosen,
    shared,
    shared_gates,
    result,
    NUM_CHOSEN: tl.constexpr,
    CHOSEN_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add up what the experts of a row return, in their order, then the shared one; the grid is (rows, tiles of a row).

    Args:
        outputs: Of each choice, [num_rows * NUM_CHOSEN, SIZE], contiguous.
        weights: Of each choice, [num_rows, NUM_CHOSEN].
        chosen: Its expert, [num_rows, NUM_CHOSEN] int32.
        shared: What the shared expert returns, [num_rows, SIZE], or None.
        shared_gates: Its weight is the sigmoid, [num_rows], or None: the weight is 1.
        result: [num_rows, SIZE], contiguous, written.
        NUM_CHOSEN: Experts of a row.
        CHOSEN_PADDED: The next power of two.
        SIZE: Of a row.
        TILE: Numbers of a program, a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = columns < SIZE
    places = tl.arange(0, CHOSEN_PADDED)
    # Of a row of NaN the same expert may be there more than once: places tell the choices apart.
    NONE: tl.constexpr = 2**31 - 1
    experts = tl.load(chosen + row * NUM_CHOSEN + places, mask=places < NUM_CHOSEN, other=0)
    left = tl.where(places < NUM_CHOSEN, experts * CHOSEN_PADDED + places, NONE)
    sums = tl.full([TILE], 0.0, tl.float32)
    for _ in tl.static_range(NUM_CHOSEN):
        first = tl.min(left, 0)
        choice = row * NUM_CHOSEN + first % CHOSEN_PADDED
        left = tl.where(left == first, NONE, left)
        part = tl.load(outputs + choice * SIZE + columns, mask=is_inside, other=0.0).to(tl.float32)
        sums += part * tl.load(weights + choice).to(tl.float32)
    if shared is not None:
        part = tl.load(shared + row * SIZE + columns, mask=is_inside, other=0.0).to(tl.float32)
        if shared_gates is not None:
            part *= sigmoid(tl.load(shared_gates + row).to(tl.float32))
        sums += part
    tl.store(result + row * SIZE + columns, sums.to(result.dtype.element_ty), mask=is_inside)


def group_choices(chosen: torch.Tensor, num_experts: int, itemsize: int) -> GroupedChoices:
    """Return the choices of a step in tiles.

    Args:
        chosen: The experts of each row, [num_rows, num_chosen] int32, contiguous; a row or more.
        num_experts: Of the layer.
        itemsize: Bytes of a number that is multiplied.
    """
    num_choices, tile_rows = chosen.numel(), rows_of_tile(itemsize)
    # An expert has at most one tile that is not full.
    num_tiles = num_choices // tile_rows + min(num_choices, num_experts)
    counts, tile_experts = (
        torch.empty(count, dtype=torch.int32, device=chosen.device) for count in (num_experts, num_tiles)
    )
    tile_choices = torch.empty((num_tiles, tile_rows), dtype=torch.int32, device=chosen.device)
    count_kernel[(num_experts,)](chosen, counts, num_choices, TILE=SCAN_TILE, num_warps=4)
    group_kernel[(num_experts,)](
        chosen,
        counts,
        tile_experts,
        tile_choices,
        num_choices,
        num_tiles,
        NUM_EXPERTS=num_experts,
        EXPERTS_PADDED=triton.next_power_of_2(num_experts),
        TILE_ROWS=tile_rows,
        TILE=SCAN_TILE,
        num_warps=4,
    )
    return GroupedChoices(tile_experts, tile_choices, num_choices)


def multiply_chosen(
    x: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None, groups: GroupedChoices, num_chosen: int
) -> torch.Tensor:
    """Return x @ weight.T + bias of the expert of each choice, [num_choices, num_outputs]; summed in float32.

    Args:
        x: [num_rows, num_inputs], or of each choice a row, [num_choices, num_inputs]; of the format of the weights.
        weights: [num_experts, num_outputs, num_inputs], contiguous.
        biases: [num_experts, num_outputs]; None: nothing is added.
        groups: Of the choices.
        num_chosen: Experts of a row.
    """
    x = x.contiguous()
    _, num_outputs, num_inputs = weights.shape
    assert x.dtype == weights.dtype, "they are multiplied as they are"
    output = torch.empty((groups.num_choices, num_outputs), dtype=x.dtype, device=x.device)
    tile, num_tiles = expert_tile(num_outputs, num_chosen, x.dtype.itemsize), len(groups.tile_experts)
    expert_product_kernel[(num_tiles * triton.cdiv(num_outputs, tile.num_columns),)](
        x,
        weights,
        biases,
        output,
        groups.tile_experts,
        groups.tile_choices,
        num_tiles,
        CHOICES_OF_ROW=groups.num_choices // len(x),
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        TILE_ROWS=tile.num_rows,
        TILE_COLUMNS=tile.num_columns,
        TILE_INPUTS=tile.num_inputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return output


def sum_chosen(
    outputs: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    shared: torch.Tensor | None = None,
    shared_gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sums of what the experts of each row return, [num_rows, size]; rounded once.

    Args:
        outputs: Of each choice, [num_rows * num_chosen, size], contiguous.
        weights: [num_rows, num_chosen], contiguous.
        chosen: The experts, [num_rows, num_chosen] int32, contiguous.
        shared: What the expert for every row returns, [num_rows, size]; None: there is none.
        shared_gates: Of which the sigmoid weighs it, [num_rows, 1]; None: it has weight 1.
    """
    (num_rows, num_chosen), size = chosen.shape, outputs.shape[1]
    result = torch.empty((num_rows, size), dtype=outputs.dtype, device=outputs.device)
    weighted_sum_kernel[(num_rows, triton.cdiv(size, SUM_TILE))](
        outputs,
        weights,
        chosen,
        None if shared is None else shared.contiguous(),
        shared_gates,
        result,
        NUM_CHOSEN=num_chosen,
        CHOSEN_PADDED=triton.next_power_of_2(num_chosen),
        SIZE=size,
        TILE=SUM_TILE,
        num_warps=4,
    )
    return result
