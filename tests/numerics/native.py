"""The C library as the tests use it: for this machine's vectors, and for AVX2 where those are wider."""

from functools import cache
from pathlib import Path

from executor_svc.models.weight_format import Quantization
from executor_svc.native.build import FLAGS, build_library, cache_directory
from executor_svc.native.library import NativeLibrary

LANES = ("widest", "avx2")
FORMATS: tuple[Quantization, ...] = ("none", "int8")
NUM_THREADS = 3  # more than some products have panels, fewer than others


@cache
def native_library(lanes: str) -> NativeLibrary:
    """Return its dense work and attention. Raises: NativeUnavailableError: the machine cannot have it."""
    return NativeLibrary(library_path(lanes), NUM_THREADS)


def library_path(lanes: str) -> Path:
    """Return the library, compiled for one of LANES. Raises: NativeUnavailableError: the machine cannot have it."""
    return build_library(cache_directory(), flags=FLAGS if lanes == "widest" else (*FLAGS, "-mno-avx512f"))
