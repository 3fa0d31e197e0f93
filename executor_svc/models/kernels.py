"""Which kernels run a model: the C library on a CPU, Triton's beside torch's on a GPU, else plain torch.

A model is invariant if an output depends on its request alone, to the bit. Invariant code sums every number in an order
that depends on the model's shape alone: the kernels in C, and on a GPU the Triton kernels that `--numerics invariant`
takes. A library's products are not invariant: they choose their order by the number of rows.
"""

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from executor_svc.adapters.slots import AdapterSlots
from executor_svc.attention.interface import AttentionBackend
from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.checkpoint.weight_map import WeightSource
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.dense import DenseKernels
from executor_svc.models.encoder_decoder import EncoderDecoder
from executor_svc.models.file_formats import FORMAT_NAMES, CodeFormats
from executor_svc.models.language_model import LanguageModel
from executor_svc.models.native_dense import NativeDense
from executor_svc.models.torch_dense import TorchDense, TorchMatrix
from executor_svc.models.weight_format import ComputeDtype, Quantization, number_format_of
from executor_svc.native import build
from executor_svc.native.build import NativeBrokenError, NativeUnavailableError
from executor_svc.native.library import NativeLibrary, load_library
from executor_svc.native.structs import NumberFormat
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from executor_svc.states.native_states import NativeStateBackend
from octavo_shared.errors import ModelLoadError
from octavo_shared.process.events import Event

# "C" is `executor_svc/native/`.
Kernels = Literal["C", "Triton", "torch", "torchao", "transformers"]


@dataclass(frozen=True, slots=True)
class ComputePath:
    """What computes a model, from token ids to sampled ids.

    Attributes:
        device: Where.
        dtype: Number format of the activations.
        dense: What does the dense work; "transformers" runs the model with code of its own.
        attention: The name of what attends: "C", a backend of `--attention-backend`, or "invariant", in Triton.
        sampler: What makes tokens of logits.
        why_not_c: Why the kernels in C do not do all of it, if that is known.
        warning: What an operator should mend about that; empty: nothing.
        states: What runs layers with a recurrent state; None: there are none.
    """

    device: torch.device
    dtype: torch.dtype
    dense: Kernels
    attention: str
    sampler: Kernels
    why_not_c: str = ""
    warning: str = ""
    states: Kernels | None = None


CpuKernels = Literal["auto", "native", "torch"]
Numerics = Literal["fast", "invariant"]

_DENSE = "dense work"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundLibrary:
    """The C library, or why it is not used."""

    library: NativeLibrary | None
    reason: str = ""
    is_broken: bool = False  # whether an operator can mend the reason

    @property
    def warning(self) -> str:
        """What to tell an operator who expects the library; empty: nothing."""
        if not self.is_broken:
            return ""
        return (
            f"the kernels in C cannot be used: {self.reason}; torch computes in their place, which is slower and not "
            "batch-invariant (--cpu-kernels torch accepts that)"
        )


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """A model, its attention, and what computes them. `load` fills the weights, if they are not there yet.

    `quantization` is "bfloat16" too where weights stay as they are stored, or products are computed in it.
    """

    model: LanguageModel
    attention: AttentionBackend
    path: ComputePath
    load: Callable[[WeightSource], None]
    kernels: str = ""  # what computes it, for people
    quantization: Quantization = "none"
    compute_dtype: ComputeDtype = "float32"  # what attention rounds its inputs to, and products but for integers
    library: NativeLibrary | None = None  # the C library, if it computes some of it
    stored: CodeFormats | None = None  # of a file with codes, where each matrix has its own format
    block_size: int = 0  # tokens; known when the attention is chosen
    kv_cache_dtype: torch.dtype | None = None  # None: as activations
    cache_scales: Sequence[tuple[float, float]] = ()  # of keys and values of each layer, for FP8; empty: 1
    has_head: bool = True  # False: it cannot generate
    keeps_bfloat16: bool = False  # weights are in bfloat16 because they are stored so

    @property
    def dtype(self) -> torch.dtype:
        """Number format of activations."""
        return self.path.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """Format of the KV cache."""
        return self.kv_cache_dtype or self.path.dtype

    @property
    def weights(self) -> str:
        """The number formats of the weights, for people and for the numerics id."""
        if self.stored is None:
            return str(self.dtype).removeprefix("torch.") if self.quantization == "none" else self.quantization
        return ", ".join(FORMAT_NAMES[each] for each in sorted(self.stored.used))

    @property
    def why_not_invariant(self) -> str | None:
        """Why outputs may depend on more than their request, in a few words; None: they do not."""
        return why_not_invariant(self.path)


def make_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    cpu_kernels: CpuKernels = "auto",
    quantization: Quantization = "none",
    compute_dtype: ComputeDtype = "float32",
    is_stored_in_bfloat16: bool = False,
    group: TensorParallelGroup = SINGLE_RANK,
    attention: AttentionBackend | None = None,
    found: FoundLibrary | None = None,
    numerics: Numerics = "fast",
    stored: CodeFormats | None = None,
    adapters: AdapterSlots | None = None,
) -> ChosenModel:
    """Return a model with uninitialised weights, and the attention that goes with it.

    Args:
        config: Of the model.
        dtype: Number format of activations and cache.
        device: Where it runs.
        cpu_kernels: "native": the C library; "torch": torch; "auto": the C library if it can be had.
        quantization: What weights become as they are loaded; "none": what `dtype` is.
        compute_dtype: What products and attention round inputs to; "bfloat16" rounds weights too. Products with weights
            in integers are as without it.
        is_stored_in_bfloat16: Whether the checkpoint has all matrices in bfloat16. Without quantization the C library
            keeps them so: half the memory, and the bits of float32.
        group: The ranks that share the model.
        attention: None: the C library's, or without it torch's.
        found: The C library, or why it is not used; None: `cpu_kernels` says.
        numerics: "invariant": on a GPU products are ours, where they can be.
        stored: The formats of a file with codes, each matrix in its own; None: `quantization` says it for all.
        adapters: Slots for adapters; None: there are none.

    Raises: ModelLoadError: the ranks cannot share it, the device has not this quantization, or the C library is needed
        and cannot be had.
    """
    _check_formats(quantization, compute_dtype, dtype, device)
    setting = "" if stored is not None else "quantization" if quantization != "none" else "compute_dtype"
    if setting == "compute_dtype" and compute_dtype == "bfloat16":
        quantization = "bfloat16"
    number_format = number_format_of(quantization, compute_dtype if stored is None else "float32")
    found = found or find_library(dtype, device, cpu_kernels)
    attention = attention or make_attention(found.library, in_bfloat16=compute_dtype == "bfloat16")
    products: Kernels
    in_c: tuple[str, ...]
    keeps_bfloat16 = False
    if found.library is not None:
        if quantization == "none" and is_stored_in_bfloat16:
            quantization, number_format, keeps_bfloat16 = "bfloat16", NumberFormat.BFLOAT16, True
        dense: DenseKernels[Any] = NativeDense(found.library, number_format=number_format, group=group)
        in_use, products, in_c, is_invariant = found, "C", (_DENSE,), False
    else:
        is_quantized = quantization != "none" or (stored is not None and stored.has_codes)
        name: str = quantization if stored is None else "quantized"
        library = find_product_library(name, device, cpu_kernels, setting) if is_quantized else None
        is_ours = device.type == "cuda" and has_triton() and quantization == "none"  # also with codes
        is_invariant = numerics == "invariant" and is_ours
        dense = _make_dense(dtype, device, number_format, is_invariant, library, group)
        in_use, in_c = replace(found, library=library), () if library is None else (f"{name} products",)
        products = (
            "Triton" if is_invariant else "torchao" if quantization == "int8" and device.type == "cuda" else "torch"
        )
    has_states = any(layer.state is not None for layer in config.layers)
    states: Kernels = "torch" if found.library is None else "C"
    state_backend = None if found.library is None else NativeStateBackend(found.library)
    make = Decoder if config.encoder is None else EncoderDecoder
    model = make(config, dense, group, stored, state_backend, adapters=adapters)
    return ChosenModel(
        model,
        attention,
        compute_path(device, dtype, products, attention, in_use, states if has_states else None),
        model.load,
        describe_kernels(in_use, attention, device, in_c=in_c, is_invariant=is_invariant),
        quantization,
        compute_dtype,
        in_use.library,
        stored,
        has_head=config.has_head,
        keeps_bfloat16=keeps_bfloat16,
    )


def check_compute_dtype(compute_dtype: ComputeDtype, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ModelLoadError if products of a model in `dtype` are not computed so on a device."""
    if compute_dtype == "bfloat16" and device.type == "cuda":
        raise ModelLoadError("compute_dtype is bfloat16, which is for device cpu; on a GPU use --dtype bfloat16")
    if compute_dtype == "bfloat16" and dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        raise ModelLoadError(
            f"compute_dtype is bfloat16, which is for dtype float32, but dtype is {name}; "
            "remove --dtype or --compute-dtype"
        )


def _check_formats(
    quantization: Quantization, compute_dtype: ComputeDtype, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ModelLoadError if a device does not have a quantization, or not products in a number format."""
    check_compute_dtype(compute_dtype, dtype, device)
    if device.type == "cuda" and quantization not in ("none", "int8"):
        raise ModelLoadError(
            f"quantization is {quantization}, which is for device cpu; on a GPU use --quantization int8 or "
            "--dtype bfloat16"
        )


def _make_dense(
    dtype: torch.dtype,
    device: torch.device,
    number_format: NumberFormat,
    is_invariant: bool,
    library: NativeLibrary | None,
    group: TensorParallelGroup,
) -> DenseKernels[TorchMatrix]:
    """Return torch's dense kernels; on a GPU with Triton the ones with fewer launches, or invariant ones."""
    if device.type == "cuda" and has_triton():
        from executor_svc.models.triton_dense import TritonDense  # Triton takes seconds to import

        return TritonDense(dtype, device, number_format=number_format, is_invariant=is_invariant, group=group)
    return TorchDense(dtype, device, number_format=number_format, library=library, group=group)


def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def make_attention(library: NativeLibrary | None, *, in_bfloat16: bool = False) -> AttentionBackend:
    """Return the attention of the C library, or without it torch's; `in_bfloat16`: as in both."""
    if library is None:
        return TorchAttentionBackend(in_bfloat16=in_bfloat16)
    return NativeAttentionBackend(library, in_bfloat16=in_bfloat16)


def find_library(dtype: torch.dtype, device: torch.device, cpu_kernels: CpuKernels) -> FoundLibrary:
    """Return the C library for a model in `dtype`, or why it is not used.

    Raises: ModelLoadError: "native" was asked for, and it cannot be had.
    """
    is_elsewhere = device.type != "cpu" or dtype != torch.float32
    if cpu_kernels == "torch":
        return FoundLibrary(None, "cpu_kernels is torch")
    if is_elsewhere and cpu_kernels == "native":
        raise ModelLoadError("cpu_kernels is native, but these kernels support only device cpu and dtype float32")
    if is_elsewhere:
        return FoundLibrary(
            None, (f"the kernels in C support only float32, and dtype is {str(dtype).removeprefix('torch.')}")
        )
    try:
        return FoundLibrary(load_library(torch.get_num_threads()))
    except NativeUnavailableError as error:
        if cpu_kernels == "native":
            raise ModelLoadError(f"cpu_kernels is native, but {error}") from error
        return FoundLibrary(None, str(error), isinstance(error, NativeBrokenError))


def warn_of_kernels(warning: str) -> None:
    """Tell an operator what to mend about them, in the log and on stdout; empty: nothing."""
    if warning:
        _logger.warning(Event("kernels_unavailable", reason=warning))
        print(f"octavo executor notice: {warning}", flush=True)  # `octavo up` shows it


def find_product_library(
    quantization: str, device: torch.device, cpu_kernels: CpuKernels, setting: str
) -> NativeLibrary | None:
    """Return the C library for products with quantized weights, of a model with a dtype that the library lacks.

    Args:
        quantization: Of the weights.
        device: Where the model runs; None is returned for a GPU.
        cpu_kernels: "torch" was asked for: None.
        setting: Which setting has chosen it; empty: the file has, and None is returned if the library cannot be had.

    Raises: ModelLoadError: it is needed, and cannot be had.
    """
    if device.type != "cpu" or cpu_kernels == "torch":
        return None
    try:
        return load_library(torch.get_num_threads())
    except NativeUnavailableError as error:
        if not setting:
            return None
        flag = f"--{setting.replace('_', '-')}"
        raise ModelLoadError(
            f"{setting} is {quantization}, which needs the kernels in C on a CPU, but {error}; remove {flag}, or set "
            f"--cpu-kernels torch, where {quantization} saves memory but is several times slower than float32"
        ) from error


def why_no_products(device: torch.device, cpu_kernels: CpuKernels) -> str:
    """Return why no kernel can multiply by the codes of safetensors; empty: those in C can, or on a GPU Triton's."""
    if device.type == "cuda":
        return "" if has_triton() else "Triton is not installed"
    if device.type != "cpu":
        return f"device is {device.type}"
    if cpu_kernels == "torch":
        return "cpu_kernels is torch"
    try:
        build.find_library()
    except NativeUnavailableError as error:
        return str(error)
    return ""


def compute_path(
    device: torch.device,
    dtype: torch.dtype,
    dense: Kernels,
    attention: AttentionBackend,
    in_use: FoundLibrary,
    states: Kernels | None = None,
) -> ComputePath:
    """Return what computes a model."""
    is_c = isinstance(attention, NativeAttentionBackend)
    name = "C" if is_c else type(attention).__name__.removesuffix("Backend").removesuffix("Attention").lower()
    sampler: Kernels = "C" if is_c else "Triton" if device.type == "cuda" else "torch"
    return ComputePath(device, dtype, dense, name, sampler, in_use.reason, in_use.warning, states)


def describe_kernels(
    in_use: FoundLibrary,
    attention: AttentionBackend,
    device: torch.device,
    *,
    in_c: Sequence[str] = (),
    others: str = "torch",
    is_invariant: bool = False,
) -> str:
    """Say in a few words what computes a model.

    Args:
        in_use: The C library, and why it does not do all.
        attention: Of the model.
        device: Where it runs.
        in_c: What the C library does beside attention and sampling.
        others: What does the rest.
        is_invariant: Whether Triton does the products too.
    """
    if is_invariant:
        return "Triton, invariant"
    if device.type != "cpu":
        return f"Triton and {others}" if has_triton() else others
    threads = f"{torch.get_num_threads()} threads" if torch.get_num_threads() > 1 else "1 thread"
    parts = [*(("attention", "sampling") if isinstance(attention, NativeAttentionBackend) else ()), *in_c]
    reason = f", because {in_use.reason}" if in_use.reason else ""
    if in_use.library is None or not parts:
        return f"{others}, {threads}{reason}"
    name = f"C ({in_use.library.instructions})"
    if parts == ["attention", "sampling", _DENSE]:
        return f"{name}, {threads}"
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    return f"{name} for {listed}, {others} for the rest, {threads}{reason}"


def why_not_invariant(path: ComputePath) -> str | None:
    """Say in a few words why outputs may depend on more than their request; None: they do not."""
    if path.dense == "transformers":
        return f"transformers runs the model{_because(path)}"
    if path.device.type == "cuda":
        return _why_not_on_gpu(path)
    if path.dtype != torch.float32:
        return f"torch computes in {str(path.dtype).removeprefix('torch.')}, and on a CPU only float32 is invariant"
    parts = {"dense work": path.dense, "attention": path.attention, "sampling": path.sampler}
    for part, kernels in {**parts, "recurrent states": path.states or "C"}.items():
        if kernels != "C":
            return f"{kernels} computes the {part}{_because(path)}"
    return None


def _why_not_on_gpu(path: ComputePath) -> str | None:
    parts = (
        ("dense work", path.dense, "Triton"),
        ("attention", path.attention, "invariant"),
        ("sampling", path.sampler, "Triton"),
        ("recurrent states", path.states or "Triton", "Triton"),
    )
    return next((f"{found} computes the {part} on the GPU" for part, found, wanted in parts if found != wanted), None)


def _because(path: ComputePath) -> str:
    return f", because {path.why_not_c}" if path.why_not_c else ""
