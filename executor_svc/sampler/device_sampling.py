"""Filters and draw on the device, without waiting for it: by the kernels of `executor_svc.triton_kernels.sampling`.

A row is worked on in parts, whose size never depends on the batch: neither does what is drawn. Which kernels are
launched depends on what the host knows, the parameters: 2 if all rows are greedy, 3 without filters, else 4.

Biases, penalties and token rules come before (`torch_backend.py`): rows that have them are passed as rows of scores.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton

from executor_svc.device.transfer import to_device
from executor_svc.sampler.filters import MIN_TEMPERATURE, Draws, SamplingRows
from executor_svc.triton_kernels.sampling import sample_rows
from executor_svc.triton_kernels.sampling_candidates import (
    NUM_BINS,
    PART_NUMBERS,
    gather_parts,
    measure_parts,
    weigh_parts,
)
from octavo.values.sampling_params_table import Stage, of_stage
from octavo_shared.step_wire.step import Int32Array

MAX_VOCAB_SIZE = 2**20

# Tokens of a part, 16 a thread: 63 programs for a row of 128,256.
PART = 2048
NUM_WARPS_OF_PART = 4
# Parts that a program takes candidates from.
PARTS_OF_PROGRAM = 4
# Tokens that a program reads at once where it has a row for itself, four a thread; thresholds that a pass tries.
TILE = 2048
NUM_WARPS = 16
NUM_PIVOTS = 8
# Tokens of a row that the filters may look at in memory of their own. Beyond, they read the row itself.
CAPACITY = 16 * 1024

_FILTERS = tuple(parameter for parameter in of_stage(Stage.FILTER) if parameter.name != "temperature")
# The numbers that the kernels read, in the order of their table; top_k, a whole number, goes before them.
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
    vocab_size = logits.shape[1]
    assert vocab_size <= MAX_VOCAB_SIZE, "the masses of more tokens may overflow"
    device, num_samples = logits.device, len(sampling)
    is_random, choices = sampling["temperature"] > 0, _choices(logit_rows, sampling, draws, vocab_size)
    num_parts = triton.cdiv(vocab_size, PART)
    grid, padded = (num_samples, num_parts), triton.next_power_of_2(num_parts)
    capacity = min(CAPACITY, vocab_size)
    parts = torch.empty((*grid, PART_NUMBERS.value), dtype=torch.float64, device=device)
    counts = torch.empty((num_samples, 1 + num_parts, NUM_BINS.value), dtype=torch.int32, device=device)
    candidates = torch.empty((num_samples, capacity), dtype=torch.float32, device=device)
    token_ids = torch.empty((num_samples, 1 + capacity), dtype=torch.int32, device=device)
    sampled = torch.empty((2, num_samples), dtype=torch.int64, device=device)
    # The stride of a single row may be anything, and another stride may be another machine code.
    row_stride = logits.stride(0) if len(logits) > 1 else vocab_size
    rows = (logits, row_stride, vocab_size, to_device(choices, device), choices.shape[1], parts)
    of_part = {"TILE": PART, "num_warps": NUM_WARPS_OF_PART}
    measure_parts[grid](*rows, counts, **of_part)
    if is_random.any():
        weigh_parts[grid](*rows, counts, PARTS_PADDED=padded, **of_part)
    if choices[is_random, 1].any():
        gather_parts[num_samples, triton.cdiv(num_parts, PARTS_OF_PROGRAM)](
            *rows,
            counts,
            candidates,
            token_ids,
            capacity,
            num_parts,
            PARTS_PADDED=padded,
            PARTS_OF_PROGRAM=PARTS_OF_PROGRAM,
            **of_part,
        )
    sample_rows[(num_samples,)](
        *rows,
        num_parts,
        candidates,
        token_ids,
        capacity,
        sampled,
        PART=PART,
        PARTS_PADDED=padded,
        TILE=TILE,
        NUM_PIVOTS=NUM_PIVOTS,
        num_warps=NUM_WARPS,
    )
    return sampled


def _choices(logit_rows: Int32Array, sampling: SamplingRows, draws: Draws, vocab_size: int) -> npt.NDArray[np.float64]:
    """Return what `sample_rows` reads of each row, in one array: float64 has room for all numbers as they are."""
    top_k = np.where(sampling["top_k"] < vocab_size, sampling["top_k"], 0)
    is_filtered = np.any(
        [(top_k if each.name == "top_k" else sampling[each.name]) != each.row_value for each in _FILTERS], 0
    )
    numbers = [_AS_KERNEL_READS.get(name, np.asarray)(sampling[name]).astype(np.float32) for name in _NUMBERS]
    return np.stack((logit_rows, is_filtered, top_k, draws, *numbers), 1, dtype=np.float64)


def _bounded(temperature: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.where(temperature > 0, np.maximum(temperature, MIN_TEMPERATURE), np.float32(0))


def _logarithm(min_p: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return it as torch has it: the kernel compares with the same float32."""
    logarithm: npt.NDArray[np.float32] = torch.from_numpy(np.maximum(min_p, np.float32(0))).log().numpy()
    return logarithm


_AS_KERNEL_READS = {"temperature": _bounded, "min_p": _logarithm}
