"""Memory of weights and states, given back while an executor sleeps, and taken anew.

On a CPU addresses stay: the system takes the pages, and gives empty ones when they are next written. On a GPU the
storages shrink to nothing and grow again, maybe elsewhere: what has recorded their addresses has to be made anew.
"""

import ctypes
import mmap
from collections.abc import Sequence

import torch


class ReturnableMemory:
    """Storages that tensors lie in.

    Args:
        storages: Each once.

    Attributes:
        is_lost: Whether it has been given up, with its content, and nothing is written yet.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self._storages = storages
        self._sizes = [storage.nbytes() for storage in storages]
        self._on_host: list[torch.UntypedStorage] | None = None
        self._is_away = False
        self.is_lost = False

    def to_host(self) -> None:
        """Move what is on a GPU to host memory; what is on a CPU is there."""
        if self.is_lost or self._is_away or not self._is_on_gpu:
            return
        self._on_host = [torch.UntypedStorage(size).copy_(each, False) for each, size in self._pairs]  # type: ignore[no-untyped-call]
        self._shrink()

    def drop(self) -> None:
        """Give it back, and up what it holds."""
        self._on_host, self.is_lost = None, True
        if self._is_on_gpu:
            self._shrink()
            return
        for storage in self._storages:
            _give_back(storage.data_ptr(), storage.nbytes())

    def restore(self) -> None:
        """Take it anew, with what has been moved to the host."""
        moved = self._on_host
        self.allocate()
        if moved is not None:
            for storage, on_host in zip(self._storages, moved, strict=True):
                storage.copy_(on_host, False)

    def allocate(self) -> None:
        """Take it anew, to be written."""
        if self._is_away:
            for storage, size in self._pairs:
                storage.resize_(size)
        self._on_host, self._is_away = None, False

    @property
    def _pairs(self) -> list[tuple[torch.UntypedStorage, int]]:
        return list(zip(self._storages, self._sizes, strict=True))

    @property
    def _is_on_gpu(self) -> bool:
        return any(storage.device.type == "cuda" for storage in self._storages)

    def _shrink(self) -> None:
        for storage in self._storages:
            storage.resize_(0)
        self._is_away = True
        torch.cuda.empty_cache()


def give_back_freed() -> None:
    """Give what has been freed back to the system: glibc keeps pieces of up to 32 MiB for whoever asks next."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _give_back(address: int, num_bytes: int) -> None:
    """Give whole pages of memory back to the system; they are zero when they are next read."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and hasattr(mmap, "MADV_DONTNEED"):
        system = ctypes.CDLL(None)
        system.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
