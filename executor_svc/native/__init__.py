"""The C library for CPUs: dense segments, paged attention and sampling, float32 with float32 or int8 weights.

`csrc/` is the library, `build.py` compiles it, `binding.py` loads it, `library.py` and `sampling.py` call it;
`matrix.py` and `dense.py` are the `DenseKernels` of the models. `executor_svc/attention/native_backend.py` is the
attention, `native_layers.py` beside it the loop over the layers in C.
"""

from executor_svc.native.build import build_library, cache_directory
from executor_svc.native.dense import NativeDense, NativeSegment, missing_in_native_dense
from executor_svc.native.errors import NativeUnavailableError
from executor_svc.native.library import NativeLibrary


def load_library(num_threads: int) -> NativeLibrary:
    """Return the library, compiled now if the user's cache does not have it.

    Args:
        num_threads: Threads of every parallel region.

    Raises: NativeUnavailableError: it cannot be had on this machine; the message says why.
    """
    return NativeLibrary(build_library(cache_directory()), num_threads)


__all__ = [
    "NativeDense",
    "NativeLibrary",
    "NativeSegment",
    "NativeUnavailableError",
    "load_library",
    "missing_in_native_dense",
]
