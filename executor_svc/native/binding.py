"""What every binding of the C library needs: its functions with their types, and memory for them to work in.

The library is loaded without linking to torch. Steps run on threads of its own (region.c), packing on threads of
OpenMP's runtime, libgomp; torch has loaded its own by then under the same name, and the loader takes that one.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from executor_svc.native.build import NativeBrokenError
from executor_svc.native.weight_memory import HUGE_PAGE_BYTES, map_huge_pages

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float

# Name, type of the result (None: void), types of the arguments.
Function = tuple[str, type | None, Sequence[type]]

_ALIGNMENT = 64  # bytes; what scratch memory must begin at


def bind(path: Path, functions: Sequence[Function]) -> ctypes.CDLL:
    """Return a compiled library with the types of its functions set.

    Args:
        path: Of the library.
        functions: The functions to call.

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
