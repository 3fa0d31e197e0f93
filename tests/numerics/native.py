"""The C library as the tests use it: for this machine's vectors, and for AVX2 where those are wider."""

import shutil
from functools import cache

import pytest

from executor_svc.native import NativeLibrary, NativeUnavailableError
from executor_svc.native.build import FLAGS, build_library, cache_directory

LANES = ("widest", "avx2")
NUM_THREADS = 3  # more than some products have panels, fewer than others


@cache
def native_library(lanes: str) -> NativeLibrary:
    """Return the library; skip the test on machines that cannot have it."""
    flags = FLAGS if lanes == "widest" else (*FLAGS, "-mno-avx512f")
    try:
        return NativeLibrary(build_library(cache_directory(), flags=flags), NUM_THREADS)
    except NativeUnavailableError as error:
        if shutil.which("gcc"):
            raise
        pytest.skip(str(error))
