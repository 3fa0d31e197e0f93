"""How much memory a GPU has."""

from collections.abc import Callable
from typing import Protocol

import torch


class GpuMemory(Protocol):
    """The memory of one GPU, in bytes."""

    def total(self) -> int:
        """Return all of it."""

    def free(self) -> int:
        """Return the free memory; memory that torch keeps for later is in use."""

    def release(self) -> None:
        """Give back what torch keeps for later."""

    def measure_peak(self, run: Callable[[], object]) -> int:
        """Return the most that torch used at one time during `run`, what it used before included."""

    def used_by_torch(self) -> int:
        """Return what tensors take, and what torch keeps for later."""


class CudaMemory:
    """The memory of a CUDA device; see `GpuMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """Return all of it."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        """Return the free memory."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def release(self) -> None:
        """Give back what torch keeps for later."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def measure_peak(self, run: Callable[[], object]) -> int:
        """Return the most that torch used at one time during `run`."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        peak = int(torch.cuda.max_memory_allocated(self._device))
        torch.cuda.empty_cache()
        return peak

    def used_by_torch(self) -> int:
        """Return what tensors take, and what torch keeps for later."""
        return int(torch.cuda.memory_reserved(self._device))


def gpu_memory(device: torch.device) -> GpuMemory | None:
    """Return the memory of a GPU; None: the device has none of its own."""
    return CudaMemory(device) if device.type == "cuda" else None
