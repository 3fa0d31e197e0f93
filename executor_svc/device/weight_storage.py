"""The memory of a model's weights, given back while an executor sleeps, and taken anew at the same places.

On a CPU addresses stay: the system takes the pages, and gives empty ones when they are next written. On a GPU the
storages shrink to nothing and grow again, maybe elsewhere: what has recorded their addresses has to be made anew.
"""

import ctypes
import mmap
from collections.abc import Sequence

import torch


class WeightStorage:
    """The storages of weights. They can be used unless `are_there` is false.

    Args:
        storages: All of them, each once.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self._storages = storages
        self._sizes = [storage.nbytes() for storage in storages]
        self._on_host: list[torch.UntypedStorage] | None = None
        self._are_away = False
        self.are_lost = False  # dropped, and nothing has been loaded since

    def to_host(self) -> None:
        """Move weights on a GPU to host memory; those on a CPU are there."""
        if self.are_lost or self._are_away or not self._is_on_gpu:
            return
        self._on_host = [torch.UntypedStorage(size).copy_(each, False) for each, size in self._pairs]  # type: ignore[no-untyped-call]
        self._shrink()

    def drop(self) -> None:
        """Give the weights up, and their memory back."""
        self._on_host, self.are_lost = None, True
        if self._is_on_gpu:
            self._shrink()
            return
        for storage in self._storages:
            _give_back(storage.data_ptr(), storage.nbytes())

    def restore(self) -> None:
        """Take the memory anew, with the weights that have been moved to the host."""
        moved = self._on_host
        self.allocate()
        if moved is not None:
            for storage, on_host in zip(self._storages, moved, strict=True):
                storage.copy_(on_host, False)

    def allocate(self) -> None:
        """Take the memory anew, for weights to be written."""
        if self._are_away:
            for storage, size in self._pairs:
                storage.resize_(size)
        self._on_host, self._are_away = None, False

    @property
    def _pairs(self) -> list[tuple[torch.UntypedStorage, int]]:
        return list(zip(self._storages, self._sizes, strict=True))

    @property
    def _is_on_gpu(self) -> bool:
        return any(storage.device.type == "cuda" for storage in self._storages)

    def _shrink(self) -> None:
        for storage in self._storages:
            storage.resize_(0)
        self._are_away = True
        torch.cuda.empty_cache()


def _give_back(address: int, num_bytes: int) -> None:
    """Give whole pages of memory back to the system; they are zero when they are next read."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and hasattr(mmap, "MADV_DONTNEED"):
        system = ctypes.CDLL(None)
        system.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
