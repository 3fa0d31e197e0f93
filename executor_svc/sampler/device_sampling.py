"""Filters and draw on the device, without waiting for it: by the kernel of `executor_svc.triton_kernels.sampling`.

Biases, penalties and token rules come before (`torch_backend.py`): rows that have them are passed as rows of scores.
"""

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.device.transfer import to_device
from executor_svc.sampler.filters import MIN_TEMPERATURE, Draws, SamplingRows
from executor_svc.triton_kernels.sampling import sample_rows
from octavo.values.sampling_params_table import Stage, of_stage
from octavo_shared.step_wire.step import Int32Array

MAX_VOCAB_SIZE = 2**20

# Tokens that a program reads at once, four a thread; thresholds that a pass over a row tries.
TILE = 2048
NUM_WARPS = 16
NUM_PIVOTS = 8

# The numbers that the kernel reads, in the order of their table; top_k, a whole number, goes beside the row.
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
    top_k = sampling["top_k"]
    numbers = np.stack([_AS_KERNEL_READS.get(name, np.asarray)(sampling[name]) for name in _NUMBERS], 1)
    limits = np.stack((logit_rows, np.where(top_k < vocab_size, top_k, 0)), 1)
    sampled = torch.empty((2, len(sampling)), dtype=torch.int64, device=logits.device)
    sample_rows[(len(sampling),)](
        logits,
        # The stride of a single row may be anything, and another stride may be another machine code.
        logits.stride(0) if len(logits) > 1 else vocab_size,
        vocab_size,
        to_device(numbers.astype(np.float32), logits.device),
        numbers.shape[1],
        to_device(limits.astype(np.int32), logits.device),
        to_device(draws, logits.device),
        sampled,
        TILE=TILE,
        NUM_PIVOTS=NUM_PIVOTS,
        num_warps=NUM_WARPS,
    )
    return sampled


def _bounded(temperature: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.where(temperature > 0, np.maximum(temperature, MIN_TEMPERATURE), np.float32(0))


def _logarithm(min_p: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return it as torch has it: the kernel compares with the same float32."""
    logarithm: npt.NDArray[np.float32] = torch.from_numpy(np.maximum(min_p, np.float32(0))).log().numpy()
    return logarithm


_AS_KERNEL_READS = {"temperature": _bounded, "min_p": _logarithm}
