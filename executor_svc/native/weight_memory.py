"""Memory in huge pages where the system gives them, for weights: a step reads all of them."""

import mmap
from contextlib import suppress
from typing import Final

import torch

# Huge pages of Linux on x86-64; they begin at multiples of their size.
HUGE_PAGE_BYTES: Final = 2 << 20
_MOST_CHUNK_BYTES: Final = 1 << 30
_ALIGNMENT: Final = 64  # bytes, of each part


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
