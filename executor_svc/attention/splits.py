"""Into how many parts decodes cut the keys of a row, so that few rows keep a whole GPU busy; the lengths have no say.

So a CUDA graph may hold what follows from it.
"""

import math
from typing import Final

import torch

from executor_svc.triton_kernels.tiles import MAX_SPLITS

# Programs for each place: more than one, so that a row longer than the others does not run alone at the end.
MIN_WAVES, MAX_WAVES = 2, 4
# A number of splits is good enough if it keeps this much of the device busy that the best one does.
GOOD_ENOUGH: Final = 0.9


def number_of_splits(num_rows: int, num_kv_heads: int, num_places: int) -> int:
    """Return into how many parts a decode kernel cuts the keys of each row; the lengths have no say.

    The least number that makes `MIN_WAVES` programs for each place on the device, if there may be so many, and a last
    wave that is nearly full. It follows the batch: backends but the invariant one cut a row's sums by it.

    Args:
        num_rows: 1 or more.
        num_kv_heads: Of the layer.
        num_places: Programs that the device runs at once: `resident_programs` for each multiprocessor.
    """
    num_programs = num_rows * num_kv_heads
    most = max(1, min(MAX_SPLITS, MAX_WAVES * num_places // num_programs))
    least = -(-MIN_WAVES * num_places // num_programs)
    if least > most:  # few rows: one wave that is full is better than two of which one is nearly empty
        least = max(1, most // 2)
    busy = [_busy_share(num_programs * splits / num_places) for splits in range(least, most + 1)]
    return next(least + index for index, share in enumerate(busy) if share >= GOOD_ENOUGH * max(busy))


def _busy_share(waves: float) -> float:
    """Return how much of the device works, on average, until the last of so many waves of programs is over."""
    return waves / math.ceil(waves)


def multiprocessors_of(device: torch.device) -> int:
    """Return how many multiprocessors a CUDA device has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
