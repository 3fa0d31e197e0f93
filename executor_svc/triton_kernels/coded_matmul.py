"""A product with a weight in codes, which come from memory as they are held and are widened in registers.

A program takes some outputs, all rows of a tile, and a part of the inputs: of a wide weight all of them, of a narrow
one a fraction, so that a decode fills a device. Parts are added up in their order. Which parts there are follows from
the weight's shape; with more rows than a tile of a decode has, one program goes over all parts, in the same order, so
that nothing but outputs is written. Either way an element is the same sum, and a row is the same among any others.

Outputs are rows of the tile here, and rows of `x` its columns: a decode of one row then needs a tile of 16, not of 64.
A weight is scaled in float32 and rounded once to the number format of `x`, as if restored when it was loaded.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from executor_svc.triton_kernels.common import dot

# Kinds of codes: of a byte E4M3 and int8; of half a byte unsigned ones less a zero, and E2M1, whose scales are E8M0 of
# 32 inputs, or E4M3 of 16 and float32 of a row.
E4M3 = tl.constexpr(0)
INT8 = tl.constexpr(1)
UINT4 = tl.constexpr(2)
MXFP4 = tl.constexpr(3)
NVFP4 = tl.constexpr(4)

# What moves the exponent of a small float's bits, read as those of float32, to where float32 has it: 127 less the bias.
E4M3_UNIT = tl.constexpr(2.0**120)
E2M1_UNIT = tl.constexpr(2.0**126)
# As an integer the bits of 2 ** 23: with a small integer in the lowest bits they are the sum of both in float32.
INTEGER_BITS = tl.constexpr(0x4B000000)
INTEGER_BASE = tl.constexpr(2.0**23)

TILE_INPUTS: Final = 128  # that are multiplied at once: whole groups, or a part of one
NARROW_ROWS: Final = 16  # of a tile of a decode, the fewest that are multiplied
# Programs of a decode that fill a device; a constant, since a row's bits must not depend on the device's size.
WANTED_PROGRAMS: Final = 256
# Tiles of inputs of a program: with fewer its first loads are most of its time.
FEWEST_TILES: Final = 8
SUM_TILE: Final = 256


@dataclass(frozen=True, slots=True)
class CodedTile:
    """How a program of `coded_matmul_kernel` works, of some shape of a weight."""

    num_columns: int  # outputs
    num_parts: int  # of the inputs
    part_inputs: int  # of each; the last may have fewer


def coded_tile(num_outputs: int, num_inputs: int) -> CodedTile:
    """Return the tile for a weight: 64 outputs are the least that the products of Hopper take."""
    num_tiles = triton.cdiv(num_inputs, TILE_INPUTS)
    parts = max(1, min(WANTED_PROGRAMS // triton.cdiv(num_outputs, 64), num_tiles // FEWEST_TILES))
    part_tiles = triton.cdiv(num_tiles, parts)
    return CodedTile(64, triton.cdiv(num_tiles, part_tiles), part_tiles * TILE_INPUTS)


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight in codes, [num_outputs, num_inputs].

    Attributes:
        kind: Of the codes: one of the constants above.
        num_inputs: Of the weight.
        group_inputs: That share a scale; a power of two, 16 to 128.
        codes: [num_outputs, num_groups * bytes of a group] uint8; of half bytes inputs 2 i and 2 i + 1 are in the low
            and the high half of byte i. What is behind the last input is never multiplied.
        scales: [num_groups, num_outputs]: float32, of MXFP4 uint8 (E8M0), of NVFP4 uint8 (E4M3). Outputs lie together
            so that a tile reads whole lines of memory.
        zeros: Of UINT4, [num_groups, num_outputs] uint8.
        row_scales: Of NVFP4, [num_outputs] float32.
    """

    kind: int
    num_inputs: int
    group_inputs: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of all that a product reads of it."""
        tensors = (self.codes, self.scales, self.zeros, self.row_scales)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@triton.jit
def widened(codes, scales, zeros, row_scales, KIND: tl.constexpr):
    """Return weights in float32, [outputs, groups, inputs of a group].

    Args:
        codes: [outputs, groups, inputs of a group] int32, of one byte or half of one each.
        scales: [outputs, groups, 1], as they are held.
        zeros: The same, of UINT4.
        row_scales: [outputs, 1, 1], of NVFP4.
        KIND: Of the codes.
    """
    if KIND == E4M3:
        bits = ((codes & 0x7F) << 20) | ((codes & 0x80) << 24)
        numbers = bits.to(tl.float32, bitcast=True) * E4M3_UNIT
    elif KIND == INT8:  # 128 more than a code is no less than 0
        numbers = ((codes ^ 0x80) | INTEGER_BITS).to(tl.float32, bitcast=True) - (INTEGER_BASE + 128.0)
    elif KIND == UINT4:
        numbers = (codes | INTEGER_BITS).to(tl.float32, bitcast=True) - (INTEGER_BASE + zeros.to(tl.float32))
    else:
        numbers = (((codes & 7) << 22) | ((codes & 8) << 28)).to(tl.float32, bitcast=True) * E2M1_UNIT
    if KIND == MXFP4:
        exponents = scales.to(tl.int32)
        # 2 ** -127 is none of the normal numbers of float32.
        numbers *= tl.where(exponents > 0, exponents << 23, 1 << 22).to(tl.float32, bitcast=True)
    elif KIND == NVFP4:
        numbers *= (scales.to(tl.int32) << 20).to(tl.float32, bitcast=True) * E4M3_UNIT
        numbers *= row_scales
    else:
        numbers *= scales
    return numbers


@triton.jit(do_not_specialize=["num_rows"])
def coded_matmul_kernel(
    x,
    x_stride,
    codes,
    scales,
    zeros,
    row_scales,
    bias,
    output,
    num_rows,
    KIND: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_INPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    PART_INPUTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Write x @ weight.T + bias, or a part of the inputs of it; the grid is (tiles, parts or 1).

    Args:
        x: [num_rows, NUM_INPUTS], rows `x_stride` apart.
        x_stride: In elements.
        codes: See `CodedWeight`; so are the next three, None where a kind has none.
        scales: See there.
        zeros: See there.
        row_scales: See there.
        bias: [NUM_OUTPUTS], or None; not of parts.
        output: [num_rows, NUM_OUTPUTS], of parts [NUM_PARTS, num_rows, NUM_OUTPUTS] float32; contiguous, written.
        num_rows: 1 or more.
        KIND: Of the codes.
        NUM_OUTPUTS: Of the weight.
        NUM_INPUTS: Of the weight.
        NUM_GROUPS: Of a row as it is held.
        GROUP_INPUTS: That share a scale.
        TILE_ROWS: Rows of a program, 16 or more.
        TILE_COLUMNS: See `CodedTile`.
        TILE_INPUTS: That are multiplied at once.
        PART_INPUTS: See `CodedTile`.
        NUM_PARTS: See there.
        IS_SPLIT: Whether a program takes one part.
    """
    PER_BYTE: tl.constexpr = 2 if KIND >= UINT4 else 1
    GROUPS: tl.constexpr = TILE_INPUTS // GROUP_INPUTS
    ROW_BYTES: tl.constexpr = NUM_GROUPS * (GROUP_INPUTS // PER_BYTE)
    IS_EVEN: tl.constexpr = NUM_INPUTS % TILE_INPUTS == 0
    num_row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    rows = tl.program_id(0) % num_row_tiles * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(0) // num_row_tiles * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_row, is_column = rows < num_rows, columns < NUM_OUTPUTS
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    code_rows = codes + columns.to(tl.int64)[:, None] * ROW_BYTES
    row_scale = row_scales
    if KIND == NVFP4:
        row_scale = tl.load(row_scales + columns, mask=is_column, other=0.0)[:, None, None]
    part = tl.program_id(1)
    total = tl.full([TILE_COLUMNS, TILE_ROWS], 0.0, tl.float32)
    for of_part in tl.range(0, 1 if IS_SPLIT else NUM_PARTS, num_stages=1):
        first = (part if IS_SPLIT else of_part) * PART_INPUTS
        sums = tl.full([TILE_COLUMNS, TILE_ROWS], 0.0, tl.float32)
        for begin in tl.range(first, tl.minimum(first + PART_INPUTS, NUM_INPUTS), TILE_INPUTS):
            inputs = begin + tl.arange(0, TILE_INPUTS)
            # What is beyond the last input adds zeros.
            is_input = tl.full([TILE_INPUTS], True, tl.int1) if IS_EVEN else inputs < NUM_INPUTS
            places = begin // PER_BYTE + tl.arange(0, TILE_INPUTS // PER_BYTE)
            is_byte = tl.full([TILE_INPUTS // PER_BYTE], True, tl.int1) if IS_EVEN else places < ROW_BYTES
            groups = begin // GROUP_INPUTS + tl.arange(0, GROUPS)
            is_group = tl.full([GROUPS], True, tl.int1) if IS_EVEN else groups < NUM_GROUPS
            right = tl.load(x_rows + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
            packed = tl.load(code_rows + places[None, :], mask=is_column[:, None] & is_byte[None, :], other=0)
            of_groups = groups.to(tl.int64)[:, None] * NUM_OUTPUTS + columns[None, :]
            is_scale = is_group[:, None] & is_column[None, :]
            scale = tl.trans(tl.load(scales + of_groups, mask=is_scale, other=0))[:, :, None]
            zero = zeros
            if KIND == UINT4:
                zero = tl.trans(tl.load(zeros + of_groups, mask=is_scale, other=0))[:, :, None]
            of_code = packed.to(tl.int32)
            if PER_BYTE == 2:
                of_code = tl.join(of_code & 15, of_code >> 4)
            of_code = tl.reshape(of_code, [TILE_COLUMNS, GROUPS, GROUP_INPUTS])
            left = tl.reshape(widened(of_code, scale, zero, row_scale, KIND), [TILE_COLUMNS, TILE_INPUTS])
            sums = dot(left.to(right.dtype), tl.trans(right), sums)
        total = sums if NUM_PARTS == 1 or IS_SPLIT else total + sums
    if bias is not None and not IS_SPLIT:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    place = output + (part.to(tl.int64) * num_rows + rows[None, :]) * NUM_OUTPUTS + columns[:, None]
    tl.store(place, total.to(output.dtype.element_ty), mask=is_column[:, None] & is_row[None, :])


@triton.jit
def sum_parts_kernel(parts, bias, output, size, NUM_OUTPUTS: tl.constexpr, NUM_PARTS: tl.constexpr, TILE: tl.constexpr):
    """Add up parts in their order, as `coded_matmul_kernel` does that takes all; a program a tile.

    Args:
        parts: [NUM_PARTS, size] float32.
        bias: [NUM_OUTPUTS], or None.
        output: [size], written.
        size: Numbers of the product.
        NUM_OUTPUTS: Of a row.
        NUM_PARTS: 2 or more.
        TILE: Numbers of a program, a power of two.
    """
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_inside = places < size
    total = tl.full([TILE], 0.0, tl.float32)
    for part in tl.static_range(NUM_PARTS):
        total += tl.load(parts + part * size + places, mask=is_inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + places % NUM_OUTPUTS, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(output + places, total.to(output.dtype.element_ty), mask=is_inside)


def rows_of_tile(num_rows: int) -> int:
    """Return how many rows of `x` a program multiplies: which ones those are changes no sum."""
    return NARROW_ROWS if num_rows <= NARROW_ROWS else 64


def coded_matmul(x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight.T + bias, [num_rows, num_outputs], contiguous; summed in float32 and rounded once.

    Args:
        x: [num_rows, num_inputs]; weights are rounded to its number format.
        weight: In codes.
        bias: [num_outputs]; None: nothing is added.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, num_outputs = len(x), len(weight.codes)
    output = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if not num_rows:
        return output
    tile, tile_rows = coded_tile(num_outputs, weight.num_inputs), rows_of_tile(num_rows)
    is_split = tile.num_parts > 1 and tile_rows == NARROW_ROWS
    parts = x.new_empty((tile.num_parts, num_rows, num_outputs), dtype=torch.float32) if is_split else output
    num_tiles = triton.cdiv(num_rows, tile_rows) * triton.cdiv(num_outputs, tile.num_columns)
    coded_matmul_kernel[(num_tiles, tile.num_parts if is_split else 1)](
        x,
        # The stride of a single row may be anything.
        x.stride(0) if num_rows > 1 else weight.num_inputs,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.row_scales,
        bias,
        parts,
        num_rows,
        KIND=weight.kind,
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=weight.num_inputs,
        NUM_GROUPS=len(weight.scales),
        GROUP_INPUTS=weight.group_inputs,
        TILE_ROWS=tile_rows,
        TILE_COLUMNS=tile.num_columns,
        TILE_INPUTS=TILE_INPUTS,
        PART_INPUTS=tile.part_inputs,
        NUM_PARTS=tile.num_parts,
        IS_SPLIT=is_split,
        num_warps=warps_of(tile_rows),
        num_stages=stages_of(tile_rows, x.dtype.itemsize),
    )
    if is_split:
        size = output.numel()
        sum_parts_kernel[(triton.cdiv(size, SUM_TILE),)](
            parts, bias, output, size, NUM_OUTPUTS=num_outputs, NUM_PARTS=tile.num_parts, TILE=SUM_TILE, num_warps=4
        )
    return output


def warps_of(tile_rows: int) -> int:
    """Return the warps of a program; the sums of a wide tile, of a part and of all, fill the registers of eight."""
    return 4 if tile_rows == NARROW_ROWS else 8


def stages_of(tile_rows: int, itemsize: int) -> int:
    """Return how many tiles of inputs a program has in flight, within 99 KiB of shared memory."""
    if itemsize == 4:
        return 2 if tile_rows == NARROW_ROWS else 1
    return 4 if tile_rows == NARROW_ROWS else 3
