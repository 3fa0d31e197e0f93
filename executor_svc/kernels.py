"""Which kernels run a model: the C library on a CPU, Triton's beside those of torch on a GPU, else plain torch."""

import importlib.util
import logging
from functools import partial
from typing import Literal

import torch

from executor_svc.attention import AttentionBackend, TorchAttentionBackend
from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.attention.native_layers import NativeLayers
from executor_svc.errors import ModelLoadError
from executor_svc.models import Decoder, ModelConfig
from executor_svc.models.dense import DenseKernels
from executor_svc.models.torch_dense import TorchDense, TorchMatrix
from executor_svc.native import (
    NativeDense,
    NativeLibrary,
    NativeUnavailableError,
    load_library,
    missing_in_native_dense,
)
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from shared.events import Event

CpuKernels = Literal["auto", "native", "torch"]
Quantization = Literal["none", "int8"]

_logger = logging.getLogger(__name__)


def make_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    cpu_kernels: CpuKernels = "auto",
    quantization: Quantization = "none",
    group: TensorParallelGroup = SINGLE_RANK,
    attention: AttentionBackend | None = None,
) -> tuple[Decoder, AttentionBackend]:
    """Return a model with uninitialised weights, and the attention that goes with it.

    Args:
        config: Of the model.
        dtype: Number format of activations and cache.
        device: Where it runs.
        cpu_kernels: "native": the C library; "torch": torch; "auto": the C library for all that it has.
        quantization: "int8": weights are quantized as they are loaded.
        group: The ranks that share the model.
        attention: None: that of the C library, or without one that of torch.

    Raises: ModelLoadError: the ranks cannot share it, or "native" was asked for and cannot be had.
    """
    is_int8 = quantization == "int8"
    library = find_library(dtype, device, cpu_kernels)
    attention = attention or make_attention(library)
    missing = "tensor parallelism" if group.size > 1 else missing_in_native_dense(config)
    if library is not None and missing is None:
        dense = NativeDense(library, is_int8=is_int8)
        has_loop = isinstance(attention, NativeAttentionBackend)
        return Decoder(config, dense, make_layer_loop=partial(NativeLayers, library) if has_loop else None), attention
    if cpu_kernels == "native":
        raise ModelLoadError(f"cpu_kernels is native, but the dense kernels in C do not have {missing}")
    if library is not None and group.rank == 0:
        _logger.info(Event("dense_kernels", kernels="torch", reason=f"those in C do not have {missing}"))
    return Decoder(config, _make_dense(dtype, device, is_int8, group), group), attention


def _make_dense(
    dtype: torch.dtype, device: torch.device, is_int8: bool, group: TensorParallelGroup
) -> DenseKernels[TorchMatrix]:
    """Return the dense kernels of torch; on a GPU with Triton those that leave fewer launches."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from executor_svc.models.triton_dense import TritonDense  # Triton takes seconds to import

        return TritonDense(dtype, device, is_int8=is_int8, group=group)
    return TorchDense(dtype, device, is_int8=is_int8, group=group)


def make_attention(library: NativeLibrary | None) -> AttentionBackend:
    """Return the attention of the C library, or without one that of torch."""
    return TorchAttentionBackend() if library is None else NativeAttentionBackend(library)


def find_library(dtype: torch.dtype, device: torch.device, cpu_kernels: CpuKernels) -> NativeLibrary | None:
    """Return the C library; None if it is not to be used, or, with one line in the log, if it cannot be had.

    Raises: ModelLoadError: "native" was asked for, and it cannot be had.
    """
    is_elsewhere = device.type != "cpu" or dtype != torch.float32
    if cpu_kernels == "torch" or (cpu_kernels == "auto" and is_elsewhere):
        return None
    if is_elsewhere:
        raise ModelLoadError("cpu_kernels is native, but these kernels are for device cpu and dtype float32")
    try:
        library = load_library(torch.get_num_threads())
    except NativeUnavailableError as error:
        if cpu_kernels == "native":
            raise ModelLoadError(f"cpu_kernels is native, but {error}") from error
        _logger.warning(Event("cpu_kernels", kernels="torch", reason=str(error)))
        return None
    _logger.info(Event("cpu_kernels", kernels="native", lanes=library.num_lanes, threads=library.num_threads))
    return library
