"""ctypes bindings of sampling.c: what the sampler does with float32 scores on a CPU, one row a task.

`executor_svc/sampler/` has the same in torch, for every device.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.native.binding import INT, LONG, POINTER, Function, ScratchMemory, bind
from executor_svc.native.build import build_library, cache_directory
from shared.sampling_parameters import Stage, of_stage

_BLOCK = 32  # BLOCK of sampling.c

# `Choice` of sampling.c: the temperature and the filters, in the order of their table.
_FROM_SAMPLING_ROW = tuple(parameter.name for parameter in of_stage(Stage.FILTER))
_CHOICE = np.dtype(
    [
        ("row", np.int64),
        ("draw", np.float64),
        *((parameter.name, parameter.kind.row_type) for parameter in of_stage(Stage.FILTER)),
    ],
    align=True,
)

_FUNCTIONS: Sequence[Function] = (
    ("octavo_choose_scratch_bytes", LONG, (LONG, INT)),
    ("octavo_choice_bytes", LONG, ()),
    ("octavo_choose", None, (POINTER, LONG, LONG, POINTER, POINTER, POINTER, INT)),
    ("octavo_log_totals", None, (POINTER, LONG, LONG, POINTER, POINTER, INT)),
    ("octavo_keep_allowed", None, (POINTER, LONG, LONG, POINTER, POINTER, INT)),
)


class NativeSampling:
    """The functions of sampling.c, and their scratch memory: one call at a time.

    Scores are float32, contiguous and on the CPU.

    Args:
        path: The compiled library.
        num_threads: Threads of every parallel region.

    Raises: NativeUnavailableError: the file cannot be loaded.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        self._library = bind(path, _FUNCTIONS)
        num_bytes = self._library.octavo_choice_bytes()
        assert num_bytes == _CHOICE.itemsize, f"Choice of sampling.c has {num_bytes} bytes, not {_CHOICE.itemsize}"
        self._num_threads = num_threads
        self._scratch = ScratchMemory()

    def choose(
        self,
        scores: torch.Tensor,
        rows: npt.NDArray[np.integer],
        sampling: npt.NDArray[np.void],
        draws: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.int32]:
        """Return a token for each of some rows of scores, [num_rows], drawn from what the filters leave.

        Args:
            scores: [any, vocab_size]; unchanged.
            rows: Which of them, [num_rows].
            sampling: Of SAMPLING_ROW, [num_rows], temperatures above 0.
            draws: [num_rows], in [0, 1).
        """
        choices = np.zeros(len(rows), _CHOICE)
        choices["row"], choices["draw"] = rows, draws
        for name in _FROM_SAMPLING_ROW:
            choices[name] = sampling[name]
        token_ids = np.empty(len(rows), np.int32)
        self._library.octavo_choose(
            self._address(scores),
            scores.shape[1],
            len(rows),
            choices.ctypes.data,
            token_ids.ctypes.data,
            self._scratch.address(self._library.octavo_choose_scratch_bytes(scores.shape[1], self._num_threads)),
            self._num_threads,
        )
        return token_ids

    def log_totals(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logarithm of the sum of exp(score) of each row, [num_rows, 1] float64, and its block maxima.

        Args:
            scores: [num_rows, vocab_size]; unchanged. The maxima are those of `likeliest.block_maxima`.
        """
        num_rows, vocab_size = scores.shape
        maxima = torch.empty(num_rows, -(-vocab_size // _BLOCK))
        totals = torch.empty(num_rows, 1, dtype=torch.float64)
        self._library.octavo_log_totals(
            self._address(scores), vocab_size, num_rows, maxima.data_ptr(), totals.data_ptr(), self._num_threads
        )
        return totals, maxima

    def keep_allowed(self, scores: torch.Tensor, rows: npt.NDArray[np.int64], packed: npt.NDArray[np.uint8]) -> None:
        """Set to -inf what is not in the allow-lists of some rows.

        Args:
            scores: [any, vocab_size]; overwritten.
            rows: Which have a list, [num_rows], none twice.
            packed: A bit for each token, the lowest first, [num_rows, ceil(vocab_size / 8)].
        """
        packed = np.ascontiguousarray(packed)
        self._library.octavo_keep_allowed(
            self._address(scores),
            scores.shape[1],
            len(rows),
            rows.ctypes.data,
            packed.ctypes.data,
            self._num_threads,
        )

    def _address(self, scores: torch.Tensor) -> int:
        assert scores.is_contiguous(), "rows lie one after the other"
        assert scores.dtype == torch.float32, "scores are float32"
        assert scores.device.type == "cpu", "scores are on the CPU"
        return scores.data_ptr()


def load_sampling(num_threads: int) -> NativeSampling:
    """Return the functions, compiled first if the user's cache does not have the library.

    Args:
        num_threads: Threads of every parallel region.

    Raises: NativeUnavailableError: they cannot be had on this machine; the message says why.
    """
    return NativeSampling(build_library(cache_directory()), num_threads)
