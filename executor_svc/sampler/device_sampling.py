"""Filters and draw on the device, without waiting for it: by the kernels of `executor_svc.triton_kernels.sampling`.

Biases, penalties and token rules come before (`torch_backend.py`): rows that have them are passed as rows of scores.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton

from executor_svc.device.transfer import to_device
from executor_svc.sampler.filters import MIN_TEMPERATURE, Draws, SamplingRows
from executor_svc.triton_kernels.sampling import choose_tokens, scan_parts, weigh_parts
from octavo.values.sampling_params_table import Stage, of_stage
from octavo_shared.step_wire.step import Int32Array

MAX_VOCAB_SIZE = 2**20

# Tokens of a part of a row, and of a block of one.
PART = 4096
BLOCK = 64
PART_WARPS = 8
# Tokens that a program of the choice reads at once, eight a thread; thresholds that a pass over candidates tries.
TILE = 2048
NUM_WARPS = 8
NUM_PIVOTS = 8
# Candidates of a row that are put aside: 128 KiB.
ROOM = 2**14

# The numbers that the kernels read, in the order of their table; top_k, a whole number, goes beside the row.
_NUMBERS = tuple(parameter.name for parameter in of_stage(Stage.FILTER) if not parameter.is_whole)


def sample_on_device(
    logits: torch.Tensor, logit_rows: Int32Array, sampling: SamplingRows, draws: Draws
) -> torch.Tensor:
    """Return the sampled tokens and which rows are not finite, [2, num_samples] int64, on the device, without waiting.

    A row with NaN or infinity, or with nothing but -infinity, gets some token, and a 1.

    Args:
        logits: Raw, or scores that rules and penalties have changed, [num_logit_rows, vocab_size] float32; unchanged.
        logit_rows: The row of `logits` that each sample row uses, [num_samples].
        sampling: [num_samples] of SAMPLING_ROW; read are the temperature (0: the first of the likeliest tokens) and
            the filters.
        draws: [num_samples], in [0, 1).
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "rows of float32"  # noqa: PT018
    num_samples, size, device = len(sampling), logits.shape[1], logits.device
    assert size <= MAX_VOCAB_SIZE, "the masses of more tokens may overflow"
    # The stride of a single row may be anything, and another stride may be another machine code.
    row_stride = logits.stride(0) if len(logits) > 1 else size
    sampled = torch.empty((2, num_samples), dtype=torch.int64, device=device)
    if not num_samples:
        return sampled
    is_greedy = bool((sampling["temperature"] <= 0).all())
    draws_on_device, numbers, limits = _parameters(logit_rows, sampling, draws, size, device)
    num_parts, num_blocks = -(-size // PART), -(-size // BLOCK)
    parts_padded = triton.next_power_of_2(num_parts)

    def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_samples * count, dtype=dtype, device=device)

    part_largest, part_indices = empty(num_parts, torch.float32), empty(num_parts, torch.int32)
    block_maxima = empty(num_blocks, torch.float32)
    scan_parts[(num_samples, num_parts)](
        logits,
        row_stride,
        size,
        limits,
        part_largest,
        part_indices,
        block_maxima,
        num_blocks,
        PART=PART,
        BLOCK=BLOCK,
        num_warps=PART_WARPS,
    )
    room = 0 if is_greedy else ROOM
    part_masses, part_moments = empty(num_parts, torch.int64), empty(num_parts, torch.float64)
    if not is_greedy:
        weigh_parts[(num_samples, num_parts)](
            logits,
            row_stride,
            size,
            numbers,
            len(_NUMBERS),
            limits,
            part_largest,
            part_indices,
            part_masses,
            part_moments,
            PART=PART,
            PARTS_PADDED=parts_padded,
            num_warps=PART_WARPS,
        )
    choose_tokens[(num_samples,)](
        logits,
        row_stride,
        size,
        numbers,
        len(_NUMBERS),
        limits,
        draws_on_device,
        part_largest,
        part_indices,
        part_masses,
        part_moments,
        block_maxima,
        num_blocks,
        empty(num_blocks if room else 0, torch.int32),
        empty(room, torch.float32),
        empty(room, torch.int32),
        room,
        num_parts,
        sampled,
        PART=PART,
        PARTS_PADDED=parts_padded,
        BLOCK=BLOCK,
        TILE=TILE,
        NUM_PIVOTS=NUM_PIVOTS,
        num_warps=NUM_WARPS,
    )
    return sampled


def _parameters(
    logit_rows: Int32Array, sampling: SamplingRows, draws: Draws, size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the draws, the numbers and the limits that the kernels read, in one copy."""
    top_k = sampling["top_k"]
    numbers = np.stack([_AS_KERNEL_READS.get(name, np.asarray)(sampling[name]) for name in _NUMBERS], 1)
    limits = np.stack((logit_rows, np.where(top_k < size, top_k, 0)), 1)
    arrays = (draws.astype(np.float64), numbers.astype(np.float32), limits.astype(np.int32))
    packed = to_device(np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays]), device)
    of_draws, of_numbers, of_limits = torch.split(packed, [array.nbytes for array in arrays])
    return of_draws.view(torch.float64), of_numbers.view(torch.float32), of_limits.view(torch.int32)


def _bounded(temperature: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.where(temperature > 0, np.maximum(temperature, MIN_TEMPERATURE), np.float32(0))


def _logarithm(min_p: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return it as torch has it: the kernel compares with the same float32."""
    logarithm: npt.NDArray[np.float32] = torch.from_numpy(np.maximum(min_p, np.float32(0))).log().numpy()
    return logarithm


_AS_KERNEL_READS = {"temperature": _bounded, "min_p": _logarithm}
