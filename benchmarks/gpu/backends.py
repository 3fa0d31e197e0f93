"""The attention backends that can run on a device with what is installed."""

import torch

from executor_svc.attention.interface import AttentionBackend, AttentionLayer, DecodePlanner
from executor_svc.attention.rules import AttentionNeeds
from executor_svc.attention.selection import CUDA_BACKENDS, choose_backend
from executor_svc.attention.torch_backend import TorchAttentionBackend
from octavo_shared.errors import ModelLoadError


def usable_backends(device: torch.device, dtype: torch.dtype) -> dict[str, tuple[AttentionBackend, int]]:
    """Return each backend that can run a plain model in a number format, by name, and the block size it prefers.

    On a CPU these are torch and our Triton kernels, in Triton's interpreter.
    """
    if device.type == "cpu":
        from executor_svc.attention.triton_backend import TritonAttentionBackend

        return {"triton": (TritonAttentionBackend(num_multiprocessors=4), 16), "torch": (TorchAttentionBackend(), 16)}
    needs = AttentionNeeds(dtype, 32, 8, 128, [AttentionLayer(1.0)], torch.cuda.get_device_capability(device))
    usable: dict[str, tuple[AttentionBackend, int]] = {}
    for name in CUDA_BACKENDS:
        try:
            chosen = choose_backend(name, needs)
            usable[name] = (chosen.make(), chosen.block_size)
        except ModelLoadError:
            continue
    return usable


def decode_planners(device: torch.device, dtype: torch.dtype) -> dict[str, DecodePlanner]:
    """Return those whose decodes a CUDA graph can hold."""
    backends = {name: backend for name, (backend, _) in usable_backends(device, dtype).items()}
    return {name: backend for name, backend in backends.items() if isinstance(backend, DecodePlanner)}
