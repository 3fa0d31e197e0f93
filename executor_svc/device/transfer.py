"""From host memory to the device: copies that do not wait for it, and memory that a GPU reads and writes by itself.

torch's own pinned memory comes from an allocator that rounds up to a power of two: 40 GiB would pin 64. So large memory
is allocated as always, and then registered with CUDA; that pins exactly as much as asked for.
"""

import contextlib
import logging
import weakref
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from octavo_shared.process.events import Event

# Visible to all CUDA contexts of the process, as torch's pinned memory is.
PORTABLE = 1

_logger = logging.getLogger(__name__)


def to_device(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return a copy of an array on a device; on a CPU it may share the array's memory.

    On a GPU the copy takes its place in the current stream, and the array may be changed at once: the values wait in
    pinned memory, which torch keeps until the device has read them.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_to_device(values: npt.NDArray[np.generic], destination: torch.Tensor) -> None:
    """Copy an array into memory of a device, contiguous, of the same dtype and shape: otherwise as `to_device`."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if destination.device.type != "cpu":
        tensor = tensor.pin_memory()
    destination.copy_(tensor, non_blocking=True)


def index_to_device(values: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    """Return a copy of indices on a device, int64."""
    return to_device(values.astype(np.int64), device)


class CudaRuntime(Protocol):
    """What is used here of `torch.cuda.cudart()`."""

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        """Pin memory; return 0, or the number of an error."""

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        """Undo it."""


def pin(memory: torch.Tensor, device: torch.device, owner: object, runtime: CudaRuntime | None = None) -> bool:
    """Pin the memory of a tensor for as long as its owner lives; that commits all of it.

    Where the system refuses, it stays pageable, with a warning in the log.

    Args:
        memory: Contiguous, on the host.
        device: The GPU that moves the blocks.
        owner: Holds the tensor. What is freed while it is registered could not be pinned again.
        runtime: None: torch's.

    Returns: Whether it is pinned.
    """
    if not memory.nbytes:
        return True
    runtime = runtime or torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE))
    if error == 0:
        weakref.finalize(owner, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
        return True
    # CUDA repeats its last error at the next launch: no step shall get it.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
    _logger.warning(
        Event(
            "host_cache_is_pageable",
            gib=round(memory.nbytes / 2**30, 2),
            cuda_error=error,
            effect="swaps are several times slower and delay the steps behind them",
            help="lower --host-cache-gib, or set it to 0 to recompute preempted sequences",
        )
    )
    return False
