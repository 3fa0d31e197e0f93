"""Blocks of quantized weights as a GGUF file has them, in torch: what csrc/blocks.c copies, and its reference.

A block has 32 weights of a row: weight = code * scale + minimum.
Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as FileType

_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL


def read_blocks(kind: FileType, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
    """Read rows of blocks, [num_rows, num_bytes] uint8.

    Returns:
        Codes [num_rows, num_blocks, 32] int16, scales [num_rows, num_blocks, 1] float16, minima like them or None, and
        what is added to every code before it is scaled.
    """
    blocks = rows.reshape(len(rows), -1, GGML_QUANT_SIZES[kind][1])
    scales = blocks[..., :2].contiguous().view(torch.float16)
    if kind == FileType.Q8_0:
        return blocks[..., 2:].contiguous().view(torch.int8).to(torch.int16), scales, None, 0
    if kind == FileType.Q5_0:
        fifth = blocks[..., 2:6].repeat_interleave(8, -1) >> torch.arange(8, dtype=torch.uint8).repeat(4) & 1
        return _nibbles(blocks[..., 6:]) | fifth.to(torch.int16) << 4, scales, None, -16
    if kind == FileType.Q4_0:
        return _nibbles(blocks[..., 2:]), scales, None, -8
    if kind == FileType.IQ4_NL:
        return torch.tensor(_NON_LINEAR, dtype=torch.int16)[_nibbles(blocks[..., 2:]).long()], scales, None, 0
    assert kind == FileType.Q4_1, "HOLDERS has no other type"
    return _nibbles(blocks[..., 4:]), scales, blocks[..., 2:4].contiguous().view(torch.float16), 0


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return half bytes: the low ones are the first weights of a block."""
    return torch.cat([packed & 15, packed >> 4], -1).to(torch.int16)
