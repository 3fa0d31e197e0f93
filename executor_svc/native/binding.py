"""What every binding of the C library needs: its functions with their types, memory to work in, memory for weights.

The library is loaded without linking to torch. Steps run on threads of its own (region.c), packing on threads of
OpenMP's runtime, libgomp; torch has loaded its own by then under the same name, and the loader takes that one.
"""

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from executor_svc.native.build import NativeBrokenError

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float

# Name, type of the result (None: void), types of the arguments.
Function = tuple[str, type | None, Sequence[type]]


def bind(path: Path, functions: Sequence[Function]) -> ctypes.CDLL:
    """Return a compiled library with the types of its functions set.

    Raises: NativeBrokenError: the file cannot be loaded.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeBrokenError(f"{path} cannot be loaded: {error}") from error
    for name, result, arguments in functions:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class ScratchMemory:
    """What functions of the library write to while they run: for one call at a time.

    It is kept, so that no call pays for page faults again; what fills huge pages has them.
    """

    def __init__(self) -> None:
        self.num_bytes = 0  # behind the address
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._address = 0

    def address(self, num_bytes: int) -> int:
        """Return the address of at least `num_bytes`, uninitialised, aligned to 64 bytes; valid until the next call."""
        if self.num_bytes < num_bytes:
            self.num_bytes = num_bytes + num_bytes // 4
            if self.num_bytes < HUGE_PAGE_BYTES:
                self._memory = torch.empty(self.num_bytes + _ALIGNMENT, dtype=torch.uint8)
            else:
                self._memory = map_huge_pages(self.num_bytes)
            self._address = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        return self._address


# Huge pages of Linux on x86-64; they begin at multiples of their size.
HUGE_PAGE_BYTES: Final = 2 << 20
_MOST_CHUNK_BYTES: Final = 1 << 30
_ALIGNMENT: Final = 64  # bytes, of each part and of scratch memory


class WeightMemory:
    """Hands out parts of large chunks, one behind the other.

    A matrix alone often fills no huge page, and the experts of a model are more mappings than a process may have. A
    page is taken from the system when it is first written. Chunks live as long as one of their parts.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)  # what is left of the last one
        self._chunk_bytes = HUGE_PAGE_BYTES

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed memory, [num_bytes] uint8, aligned to 64 bytes."""
        if len(self._chunk) < num_bytes:
            self._chunk = map_huge_pages(max(num_bytes, self._chunk_bytes))
            self._chunk_bytes = min(2 * self._chunk_bytes, _MOST_CHUNK_BYTES)
        part = self._chunk[:num_bytes]
        self._chunk = self._chunk[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return part


def map_huge_pages(num_bytes: int) -> torch.Tensor:
    """Return memory of whole huge pages, zeroed, where the system has some."""
    size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    # Private: shared memory gets no huge pages.
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -chunk.data_ptr() % HUGE_PAGE_BYTES
    return chunk[begin : begin + size]
