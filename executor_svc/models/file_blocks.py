"""Blocks of quantized weights as a GGUF file has them, in torch: what csrc/blocks.c copies, and its reference.

A block has 32 weights of a row: weight = code * scale + minimum. A block of a K format has 256, and a scale for each 16
or 32.
Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as FileType

_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL
_DOUBLED_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # of MXFP4, whose scale is half of its own


def read_blocks(kind: FileType, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
    """Read rows of blocks, [num_rows, num_bytes] uint8.

    Returns:
        Codes [num_rows, num_blocks, 32] int16, scales [num_rows, num_blocks, 1] float16, minima like them or None, and
        what is added to every code before it is scaled. A scale that float16 does not have is infinite.
    """
    blocks = rows.reshape(len(rows), -1, GGML_QUANT_SIZES[kind][1])
    if kind == FileType.MXFP4:
        codes = torch.tensor(_DOUBLED_FP4, dtype=torch.int16)[_nibbles(blocks[..., 1:]).long()]
        powers = torch.exp2(blocks[..., :1].double() - 128).to(torch.float16)
        powers[powers == 0] = torch.inf
        return codes, torch.where((codes != 0).any(-1, keepdim=True), powers, 0), None, 0
    scales = _half(blocks[..., :2])
    if kind == FileType.Q8_0:
        return blocks[..., 2:].contiguous().view(torch.int8).to(torch.int16), scales, None, 0
    if kind == FileType.Q5_0:
        return _five_bits(blocks[..., 2:6], blocks[..., 6:]), scales, None, -16
    if kind == FileType.Q5_1:
        return _five_bits(blocks[..., 4:8], blocks[..., 8:]), scales, _half(blocks[..., 2:4]), 0
    if kind == FileType.Q4_0:
        return _nibbles(blocks[..., 2:]), scales, None, -8
    if kind == FileType.IQ4_NL:
        return torch.tensor(_NON_LINEAR, dtype=torch.int16)[_nibbles(blocks[..., 2:]).long()], scales, None, 0
    assert kind == FileType.Q4_1, "HOLDERS has no other type"
    return _nibbles(blocks[..., 4:]), scales, _half(blocks[..., 2:4]), 0


def read_k_blocks(kind: FileType, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read rows of blocks of a K format, [num_rows, num_bytes] uint8.

    Returns:
        Codes [num_rows, num_groups, inputs of a scale] int16, scales and minima [num_rows, num_groups, 1] float32.
    """
    blocks = rows.reshape(len(rows), -1, GGML_QUANT_SIZES[kind][1])
    if kind == FileType.Q2_K:
        packed, low, d, dmin = torch.split(blocks, [16, 64, 2, 2], -1)
        return _scaled(_bits(low, 2), d, packed & 15, dmin, packed >> 4)
    if kind == FileType.Q3_K:
        high, low, packed, d = torch.split(blocks, [32, 64, 12, 2], -1)
        scales = _nibbles(packed[..., :8]) | _bits(packed[..., 8:], 2, run=4) << 4
        return _scaled(_bits(low, 2) + _bits(high, 1) * 4 - 4, d, scales - 32)
    if kind == FileType.Q6_K:
        low, high, scales, d = torch.split(blocks, [128, 64, 16, 2], -1)
        return _scaled((_bits(low, 4, run=64) | _bits(high, 2) << 4) - 32, d, scales.contiguous().view(torch.int8))
    d, dmin, packed, high, low = torch.split(blocks, [2, 2, 12, 32 if kind == FileType.Q5_K else 0, 128], -1)
    first, second, rest = torch.split(packed, 4, -1)
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], -1)
    minima = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], -1)
    codes = _bits(low, 4)
    return _scaled(codes + _bits(high, 1) * 16 if kind == FileType.Q5_K else codes, d, scales, dmin, minima)


def _bits(packed: torch.Tensor, size: int, run: int = 32) -> torch.Tensor:
    """Return numbers of `size` bits: of each `run` bytes the lowest bits first, then the ones above."""
    shifts = torch.arange(0, 8, size, dtype=torch.uint8)[:, None]
    parts = packed.reshape(*packed.shape[:-1], -1, 1, run) >> shifts & (1 << size) - 1
    return parts.flatten(-3).to(torch.int16)


def _scaled(
    codes: torch.Tensor,
    d: torch.Tensor,
    scales: torch.Tensor,
    dmin: torch.Tensor | None = None,
    minima: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes in groups, with the products that scale them."""
    groups = codes.reshape(len(codes), -1, codes.shape[-1] // scales.shape[-1])
    scaled = _float(d) * scales.float()
    lowered = torch.zeros_like(scaled) if dmin is None or minima is None else -(_float(dmin) * minima.float())
    return groups, scaled.flatten(1).unsqueeze(-1), lowered.flatten(1).unsqueeze(-1)


def _half(stored: torch.Tensor) -> torch.Tensor:
    return stored.contiguous().view(torch.float16)


def _float(stored: torch.Tensor) -> torch.Tensor:
    return _half(stored).float()


def _five_bits(fifth: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return half bytes with a bit above each."""
    bits = fifth.repeat_interleave(8, -1) >> torch.arange(8, dtype=torch.uint8).repeat(4) & 1
    return _nibbles(packed) | bits.to(torch.int16) << 4


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return half bytes: the low ones are the first weights of a block."""
    return torch.cat([packed & 15, packed >> 4], -1).to(torch.int16)
