"""The device of a rank."""

import logging
import re
import warnings

import torch

from octavo_shared.errors import ModelLoadError
from octavo_shared.process.events import Event

_logger = logging.getLogger(__name__)


def find_device(name: str, local_rank: int) -> torch.device:
    """Return the device of a rank. Raises: ModelLoadError: there is none, or its driver is too old for torch."""
    if name == "cpu":
        return torch.device("cpu")
    num_devices = _num_cuda_devices()
    if num_devices == 0:
        without = "" if torch.version.cuda else f" (this torch, {torch.__version__}, is built without CUDA)"
        raise ModelLoadError(f"the device is cuda, but torch finds no CUDA device{without}; use --device cpu")
    if local_rank >= num_devices:
        raise ModelLoadError(f"rank {local_rank} on this machine needs its own CUDA device; torch finds {num_devices}")
    return torch.device("cuda", local_rank)


def _num_cuda_devices() -> int:
    """Return how many CUDA devices torch can use. Raises: ModelLoadError: their driver is too old for it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
            messages = [str(warning.message) for warning in caught]
        except RuntimeError as error:  # torch warns or raises, depending on the call
            num_devices, messages = 0, [str(error)]
    for message in messages:
        found = re.search(r"driver on your system is too old \(found version (\d+)\)", message)
        if found is not None:
            major, minor = divmod(int(found[1]) // 10, 100)  # 12020: CUDA 12.2
            raise ModelLoadError(
                f"the NVIDIA driver is too old for the installed torch {torch.__version__}: it supports CUDA "
                f"{major}.{minor}, and torch is built for CUDA {torch.version.cuda}; update the driver, or install a "
                f"torch for CUDA {major}.{minor}"
            )
        _logger.warning(Event("cuda_unavailable", reason=message))
    return num_devices
