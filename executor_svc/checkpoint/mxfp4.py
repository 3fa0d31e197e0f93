"""MXFP4 weights of safetensors: the blocks in which their codes are handed over. Imports no torch.

A weight is code * scale: the code in E2M1, the scale of 32 inputs of a row in E8M0, 2 ** (scale - 127), but 255 is NaN.
Source: OCP Microscaling Formats (MX) Specification, version 1.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

# How names of stacked codes and of their scales end.
BLOCKS, SCALES = "_blocks", "_scales"
# A block of a row: the scale, then codes, of inputs 2 i and 2 i + 1 in the low and the high half of byte i. The number
# stands beside ggml's, whose halves are inputs i and i + 16; see blocks.c.
MXFP4_BLOCK: Final = 1002
BLOCK_INPUTS: Final = 32
BLOCK_BYTES: Final = 1 + BLOCK_INPUTS // 2

_SIZES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES: Final = np.array([*_SIZES, *(-size for size in _SIZES)], np.float32)  # of the codes


def join_blocks(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return rows of blocks, [num_rows, num_groups * BLOCK_BYTES] uint8.

    Args:
        blocks: Codes, [num_rows, num_groups, 16] uint8.
        scales: Theirs, [num_rows, num_groups] uint8.

    Raises: ValueError: a scale is NaN; the message goes behind the name of the tensor.
    """
    if bool((scales == 255).any()):
        raise ValueError("has the scale 255, which is NaN; weights must be finite")
    rows = blocks.new_empty(*scales.shape, BLOCK_BYTES)
    rows[..., 0] = scales
    rows[..., 1:] = blocks
    return rows.flatten(1)


def restore_mxfp4(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return what rows of blocks stand for, [num_rows, num_inputs]."""
    blocks = rows.reshape(len(rows), -1, BLOCK_BYTES)
    codes = np.stack([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1).reshape(*blocks.shape[:2], BLOCK_INPUTS)
    values = VALUES[codes]
    with np.errstate(over="ignore"):  # what float32 does not have is infinite
        restored: npt.NDArray[np.float32] = np.ldexp(values, blocks[..., :1].astype(np.int32) - 127)
    return restored.reshape(len(rows), -1)
