"""From NumPy to the device without waiting for what the device is doing."""

import numpy as np
import numpy.typing as npt
import torch


def to_device(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return a copy of an array on a device; on a CPU it may share the array's memory.

    On a GPU the copy takes its place in the current stream, and the array may be changed at once: the values wait in
    pinned memory, which torch keeps until the device has read them.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def index_to_device(values: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    """Return a copy of indices on a device, int64."""
    return to_device(values.astype(np.int64), device)
