"""The logarithm of the sum of the exponentials of a row of logits; a program a row.

Torch has none that keeps to a row. A sum chooses its blocks by the number of rows
(`set_block_dimension` in aten/src/ATen/native/cuda/Reduce.cuh), and a softmax of rows whose length is no multiple of 16
bytes begins each at its own address (`shift` in aten/src/ATen/native/cuda/SoftMax.cu), so that a row's sum follows its
place in the batch. For the same reason this kernel is not told how addresses are aligned.
"""

import torch
import triton
import triton.language as tl

# Logits that are read at once, and warps.
TILE = 2048
NUM_WARPS = 8


@triton.jit(do_not_specialize=["row_stride", "size"], do_not_specialize_on_alignment=["logits", "row_stride", "size"])
def log_total_kernel(logits, row_stride, size, totals, TILE: tl.constexpr):
    """Write the total of a row, float64."""
    row = logits + tl.program_id(0).to(tl.int64) * row_stride
    lanes = tl.arange(0, TILE)
    highest = tl.full([TILE], -float("inf"), tl.float32)
    for begin in tl.range(0, size, TILE):
        x = tl.load(row + begin + lanes, mask=begin + lanes < size, other=-float("inf"))
        highest = tl.maximum(highest, x)
    top = tl.max(highest, 0)
    sums = tl.zeros([TILE], tl.float64)
    for begin in tl.range(0, size, TILE):
        x = tl.load(row + begin + lanes, mask=begin + lanes < size, other=-float("inf"))
        sums += tl.exp(x - top).to(tl.float64)
    tl.store(totals + tl.program_id(0), tl.log(tl.sum(sums, 0)) + top.to(tl.float64))


def log_totals_on_device(logits: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the sum of exp(logits) of each row, [num_rows, 1] float64.

    Args:
        logits: [num_rows, size] float32, not all -inf in any row; the numbers of a row lie one after the other.
    """
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    totals = torch.empty((len(logits), 1), dtype=torch.float64, device=logits.device)
    if len(logits):
        log_total_kernel[(len(logits),)](
            logits, logits.stride(0), logits.shape[1], totals, TILE=TILE, num_warps=NUM_WARPS
        )
    return totals
