"""ctypes bindings of sampling.c and logprobs.c: all that is done with float32 logits on a CPU, one row a task.

A row's result depends on that row alone. `executor_svc/sampler/` has the same in torch, for every device.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.native.binding import INT, LONG, POINTER, Function, ScratchMemory, bind
from executor_svc.native.build import find_library
from executor_svc.native.library import TeamStruct
from octavo.values.sampling_params_table import SamplingParam, Stage, of_stage

Integers = npt.NDArray[np.integer]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

NO_PROCESSING = -1


def _columns(parameters: Sequence[SamplingParam]) -> list[tuple[str, str]]:
    return [(parameter.name, parameter.kind.row_type) for parameter in parameters]


# `Choice` of sampling.c: the temperature and the filters, in the order of their table.
_FILTERS = of_stage(Stage.FILTER)
_CHOICE = np.dtype([("row", np.int64), ("processing", np.int64), ("draw", np.float64), *_columns(_FILTERS)], align=True)

# `Processing` of processors.h: the processors, in the order of their table. Begins are indices into `Processors`.
PROCESSORS = of_stage(Stage.PROCESSOR)
PROCESSING = np.dtype(
    [
        ("history_begin", np.int64),
        ("mask_begin", np.int64),
        ("biases_begin", np.int64),
        ("num_biases", np.int64),
        ("forbidden_begin", np.int64),
        ("num_forbidden", np.int64),
        ("num_tokens", np.int32),
        ("num_prompt_tokens", np.int32),
        *_columns(PROCESSORS),
    ],
    align=True,
)
NO_MASK = -1

# `Wanted` of logprobs.c.
_WANTED = np.dtype(
    [
        ("row", np.int64),
        ("begin", np.int64),
        ("processing", np.int64),
        ("token_id", np.int32),
        ("count", np.int32),
    ],
    align=True,
)


class _TokenListsStruct(ctypes.Structure):
    """`TokenLists` of processors.h."""

    _fields_ = (
        ("histories", POINTER),
        ("masks", POINTER),
        ("biased_ids", POINTER),
        ("biases", POINTER),
        ("forbidden_ids", POINTER),
    )


_FUNCTIONS: Sequence[Function] = (
    ("octavo_sampling_scratch_bytes", LONG, (LONG, INT)),
    ("octavo_choice_bytes", LONG, ()),
    ("octavo_processing_bytes", LONG, ()),
    ("octavo_wanted_bytes", LONG, ()),
    ("octavo_choose", None, (POINTER, LONG, LONG, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER)),
    ("octavo_logprobs", None, (POINTER, LONG, LONG, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER)),
    ("octavo_candidates", None, (POINTER, LONG, LONG, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER)),
)


@dataclass(frozen=True, slots=True)
class Processors:
    """What changes some rows of a call before anything is chosen. All arrays are contiguous."""

    of_rows: npt.NDArray[np.int64]  # [num_rows] which of the records, or NO_PROCESSING
    records: npt.NDArray[np.void]  # [num_processed] of PROCESSING
    histories: Int32Array  # any shape
    masks: npt.NDArray[np.uint8]  # any shape
    biased_ids: Int32Array  # [num_biases]
    biases: Float32Array  # [num_biases]
    forbidden_ids: Int32Array  # [num_forbidden]


class NativeSampling:
    """The functions of the library, and their scratch memory: one call at a time.

    Logits are float32, contiguous and on the CPU, [any, vocab_size], and stay as they are.

    Args:
        path: The compiled library.
        num_threads: Most threads of a parallel region; where other work wants the cores too, they become fewer.

    Raises: NativeUnavailableError: the file cannot be loaded.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        self._library = bind(path, _FUNCTIONS)
        for name, record in (("choice", _CHOICE), ("processing", PROCESSING), ("wanted", _WANTED)):
            num_bytes = getattr(self._library, f"octavo_{name}_bytes")()
            assert num_bytes == record.itemsize, f"a {name} has {num_bytes} bytes in C, and {record.itemsize} here"
        self._team = TeamStruct(num_threads=num_threads, size=num_threads)
        self._scratch = ScratchMemory()

    def choose(
        self,
        logits: torch.Tensor,
        rows: Integers,
        sampling: npt.NDArray[np.void],
        draws: npt.NDArray[np.float64],
        processors: Processors | None = None,
    ) -> Int32Array:
        """Return a token for each of some rows of logits, [num_rows]: the likeliest, or one that the filters leave.

        `NOT_FINITE`: the row has NaN or infinity, or after the processors nothing but -infinity.

        Args:
            logits: See the class.
            rows: Which of them, [num_rows].
            sampling: Of SAMPLING_ROW, [num_rows].
            draws: [num_rows], in [0, 1); rows of temperature 0 use none.
            processors: Applied first; None: there are none.
        """
        choices = np.empty(len(rows), _CHOICE)
        choices["row"], choices["draw"] = rows, draws
        choices["processing"] = NO_PROCESSING if processors is None else processors.of_rows
        for parameter in _FILTERS:
            choices[parameter.name] = sampling[parameter.name]
        token_ids = np.empty(len(rows), np.int32)
        self._library.octavo_choose(
            _address(logits),
            logits.shape[1],
            len(rows),
            choices.ctypes.data,
            *_pointers(processors),
            token_ids.ctypes.data,
            *self._memory(logits.shape[1]),
        )
        return token_ids

    def logprobs(
        self, logits: torch.Tensor, rows: Integers, token_ids: Integers, counts: Integers
    ) -> tuple[Float32Array, Int32Array, Float32Array]:
        """Return the log-probability of a token in each of some rows, and the likeliest tokens with theirs.

        In a row that is not finite all of them are NaN.

        Args:
            logits: See the class.
            rows: Which of them, [num_rows].
            token_ids: One for each, [num_rows].
            counts: How many of the likeliest are wanted for each, [num_rows].

        Returns: [num_rows]; twice [sum of counts], falling, equal logits by token id.
        """
        wanted = _wanted(rows, counts)
        wanted["token_id"] = token_ids
        logprobs = np.empty(len(rows), np.float32)
        likeliest_ids, likeliest = _outputs(wanted)
        self._library.octavo_logprobs(
            _address(logits),
            logits.shape[1],
            len(rows),
            wanted.ctypes.data,
            logprobs.ctypes.data,
            likeliest_ids.ctypes.data,
            likeliest.ctypes.data,
            *self._memory(logits.shape[1]),
        )
        return logprobs, likeliest_ids, likeliest

    def candidates(
        self, logits: torch.Tensor, rows: Integers, counts: Integers, processors: Processors | None = None
    ) -> tuple[Int32Array, Float32Array]:
        """Return the likeliest tokens of some rows, [sum of counts], and their processed log-probabilities.

        Args:
            logits: See the class.
            rows: Which of them, [num_rows].
            counts: How many are wanted of each, [num_rows].
            processors: Applied to the log-probabilities; None: there are none.
        """
        wanted = _wanted(rows, counts)
        wanted["processing"] = NO_PROCESSING if processors is None else processors.of_rows
        token_ids, logprobs = _outputs(wanted)
        self._library.octavo_candidates(
            _address(logits),
            logits.shape[1],
            len(rows),
            wanted.ctypes.data,
            *_pointers(processors),
            token_ids.ctypes.data,
            logprobs.ctypes.data,
            *self._memory(logits.shape[1]),
        )
        return token_ids, logprobs

    def _memory(self, vocab_size: int) -> tuple[int, object]:
        """Return the last two arguments of every function: scratch memory, and the threads."""
        num_bytes = self._library.octavo_sampling_scratch_bytes(vocab_size, self._team.num_threads)
        return self._scratch.address(num_bytes), byref(self._team)


def _address(logits: torch.Tensor) -> int:
    assert logits.is_contiguous(), "rows lie one after the other"
    assert logits.dtype == torch.float32, "logits are float32"
    assert logits.device.type == "cpu", "logits are on the CPU"
    return logits.data_ptr()


def _pointers(processors: Processors | None) -> tuple[object, object]:
    if processors is None:
        return None, None
    lists = (processors.histories, processors.masks, processors.biased_ids, processors.biases, processors.forbidden_ids)
    assert all(array.flags.c_contiguous for array in lists), "an index goes over all of an array"
    return processors.records.ctypes.data, byref(_TokenListsStruct(*(array.ctypes.data for array in lists)))


def _wanted(rows: Integers, counts: Integers) -> npt.NDArray[np.void]:
    wanted = np.empty(len(rows), _WANTED)
    wanted["row"], wanted["count"], wanted["processing"] = rows, counts, NO_PROCESSING
    wanted["begin"] = np.cumsum(counts) - counts
    return wanted


def _outputs(wanted: npt.NDArray[np.void]) -> tuple[Int32Array, Float32Array]:
    num_tokens = int(wanted["count"].sum())
    return np.empty(num_tokens, np.int32), np.empty(num_tokens, np.float32)


def load_sampling(num_threads: int) -> NativeSampling:
    """Return the functions, compiled first if the library was not built before.

    Raises: NativeUnavailableError: they cannot be had on this machine; the message says why.
    """
    return NativeSampling(find_library(), num_threads)
