"""The C library as the tests use it: with all that this machine has, and with AVX2 alone.

`make test` compiles these two; what has one of the instructions between them is for `make test-all`.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from executor_svc.models.weight_format import NUMBER_FORMATS, Quantization
from executor_svc.native.binding import WeightMemory
from executor_svc.native.build import FLAGS, build_library, cache_directory
from executor_svc.native.library import NativeLibrary
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import NumberFormat
from tests.support.each_row import further_case

LANES = ("widest", "avx2")
# Flags of libraries, without instructions that some processors lack. Products have more than one.
INSTRUCTIONS: Mapping[str, Sequence[str]] = {
    "widest": (),
    "avx2": ("-mno-avx512f", "-mno-avxvnni"),
    "avx2 with VNNI": ("-mno-avx512f",),
    "widest without VNNI": ("-mno-avx512vnni",),
    "widest without BF16": ("-mno-avx512bf16",),
}
each_instructions = pytest.mark.parametrize(
    "instructions", [*LANES, *(pytest.param(name, marks=further_case) for name in INSTRUCTIONS if name not in LANES)]
)
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
# Settings of executors that compute in different number formats.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"quantization": name} for name in QUANTIZATIONS},
    "compute bfloat16": {"compute_dtype": "bfloat16"},
}
FORMATS: tuple[NumberFormat, ...] = (*(NUMBER_FORMATS[name] for name in QUANTIZATIONS), NumberFormat.BFLOAT16_A16)
NUM_THREADS = 3  # more than some products have panels, fewer than others


@cache
def native_library(lanes: str) -> NativeLibrary:
    """Return its dense work and attention. Raises: NativeUnavailableError: the machine cannot have it."""
    return NativeLibrary(library_path(lanes), NUM_THREADS)


def library_path(lanes: str) -> Path:
    """Return the library for some of INSTRUCTIONS. Raises: NativeUnavailableError: the machine cannot have it."""
    return build_library(cache_directory(), flags=(*FLAGS, *INSTRUCTIONS[lanes]))


def mode_of_floats(directory: Path) -> Callable[[], int]:
    """Return what tells the modes of MXCSR of this thread, without the flags of what happened."""
    (directory / "mode.c").write_text("#include <immintrin.h>\nunsigned mode(void) { return _mm_getcsr() & ~0x3fu; }\n")
    mode: Callable[[], int] = ctypes.CDLL(str(build_library(directory, sources=directory))).mode
    return mode


def packed_matrix(
    lanes: str, num_inputs: int, sizes: Sequence[int], number_format: NumberFormat, *, has_bias: bool = False
) -> PackedMatrix:
    """Return a matrix of its own."""
    formats = [(number_format, sizes)]
    return PackedMatrix(native_library(lanes), num_inputs, formats, has_bias=has_bias, memory=WeightMemory())
