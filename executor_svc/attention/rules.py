"""What each attention backend can do, known without its library; `selection.py` chooses by these rules.

flash-attn comes in two versions, both `--attention-backend flash_attn`. Version 2 is the package flash-attn. Version 3
is for Hopper devices alone; it is built from source and comes as the module `flash_attn_interface`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from executor_svc.attention.cache_format import FORMAT_NAMES
from executor_svc.attention.installed_libraries import version_numbers, why_not_version
from executor_svc.attention.interface import AttentionLayer

HALF_PRECISION: Final = (torch.float16, torch.bfloat16)

# The first devices that copy to shared memory behind the back of the program's registers.
TRITON_MIN_CAPABILITY: Final = (8, 0)
TRITON_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
TRITON_BLOCK_SIZES: Final = range(16, 257, 16)
TRITON_HEAD_DIMS: Final = range(16, 257)
# Of a latent cache: numbers of a vector that are no value, and those that are.
TRITON_VALUE_BEGINS: Final = range(1, 65)
TRITON_LATENT_DIMS: Final = range(16, 513)

FLASH_ATTN_MAX_HEAD_DIM: Final = 256
# Other sizes would be padded: a copy of the whole cache at each call.
FLASH_ATTN_HEAD_DIM_MULTIPLE: Final = 8

# What its split-K kernel is written for, as far as flash-attn goes.
XFORMERS_HEAD_DIMS: Final = (16, 32, 64, 128, 256)
# The first Triton without block pointers, which the kernel of xformers 0.0.35 is written with.
TRITON_WITHOUT_BLOCK_POINTERS: Final = (3, 8)


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """All that may keep a backend from running a model, apart from the block size."""

    dtype: torch.dtype
    num_heads: int  # of this rank
    num_kv_heads: int  # of this rank
    head_dim: int
    layers: Sequence[AttentionLayer]
    compute_capability: tuple[int, int] | None  # of the CUDA device, such as (9, 0); None: the device is a CPU
    cache_dtype: torch.dtype | None = None  # format of the KV cache; None: `dtype`
    value_begin: int = 0  # see `LayerCache`; not 0: the cache is latent

    @property
    def has_window(self) -> bool:
        """Whether some layer has a sliding window."""
        return any(layer.window_tokens is not None for layer in self.layers)

    @property
    def has_soft_cap(self) -> bool:
        """Whether some layer caps its scores."""
        return any(layer.soft_cap is not None for layer in self.layers)

    @property
    def has_alibi(self) -> bool:
        """Whether some layer has ALiBi."""
        return any(layer.alibi_slopes is not None for layer in self.layers)

    @property
    def has_sinks(self) -> bool:
        """Whether some layer has attention sinks."""
        return any(layer.sinks is not None for layer in self.layers)

    @property
    def has_distance_biases(self) -> bool:
        """Whether some layer has biases of distances."""
        return any(layer.distance_biases is not None for layer in self.layers)

    @property
    def reads_only(self) -> bool:
        """Whether some layer reads the cache of an earlier one."""
        return any(layer.reads_only for layer in self.layers)


class BackendRules:
    """What a backend can do, without making it: as it stands here, all."""

    name: str  # as in `--attention-backend`
    module: str | None = None  # the library that it imports, which may not fit the installed torch
    preferred_block_size = 16  # tokens; where no other was asked for

    def why_not_block_size(self, block_size: int) -> str | None:
        """Return what is wrong with a block size and which ones work, as the end of a sentence; None: nothing."""
        del block_size
        return None

    def why_not(self, needs: AttentionNeeds) -> str | None:
        """Return what the backend lacks for these needs, the installation last, as the end of a sentence."""
        del needs
        return None


class TorchRules(BackendRules):
    """The rules of `TorchAttentionBackend`, the reference: it gathers whole blocks, whatever their size."""

    name = "torch"


class TritonRules(BackendRules):
    """The rules of `TritonAttentionBackend`."""

    name = "triton"

    def why_not_block_size(self, block_size: int) -> str | None:
        """Return that blocks are multiples of 16 tokens, if this one is not, or that it is too large."""
        if block_size in TRITON_BLOCK_SIZES:
            return None
        return f"it supports block sizes that are multiples of 16 from 16 to 256, not {block_size}"

    def why_not(self, needs: AttentionNeeds) -> str | None:
        """Return what is wrong with the device, the number format or the heads."""
        if (problem := _why_not_device(needs, TRITON_MIN_CAPABILITY)) is not None:
            return problem
        if (problem := _why_not_reads(needs)) is not None:
            return problem
        if needs.dtype not in TRITON_DTYPES:
            return f"it supports float32, bfloat16 and float16, not {dtype_name(needs.dtype)}"
        if needs.value_begin:
            value_dim = needs.head_dim - needs.value_begin
            if needs.value_begin in TRITON_VALUE_BEGINS and value_dim in TRITON_LATENT_DIMS:
                return None
            return (
                "it supports latent caches of 16 to 512 numbers behind up to 64 that are rotated, not "
                f"{value_dim} behind {needs.value_begin}"
            )
        if needs.head_dim not in TRITON_HEAD_DIMS:
            return f"it supports head dimensions of 16 to 256, not {needs.head_dim}"
        return None


class InvariantRules(TritonRules):
    """The rules of `InvariantAttentionBackend`: the same kernels in another order of sums."""

    name = "invariant"


class FlashAttention2Rules(BackendRules):
    """The rules of `FlashAttention2Backend`.

    Args:
        installed: Version of the package flash-attn; None: it is not installed.
    """

    name = "flash_attn"
    module = "flash_attn"
    # The least that the library takes. A block is shared by equal prefixes only as a whole, so large ones cost hits.
    preferred_block_size = 256

    def __init__(self, installed: str | None) -> None:
        self._installed = installed

    def why_not_block_size(self, block_size: int) -> str | None:
        """Return that the library insists on multiples of 256."""
        if block_size % 256 == 0:
            return None
        return f"version 2 supports block sizes that are multiples of 256 tokens, not {block_size}"

    def why_not(self, needs: AttentionNeeds) -> str | None:
        """Return what it lacks, the installation last."""
        return (
            _why_not_device(needs, lowest=(8, 0))
            or _why_not_dtype(needs)
            or _why_not_cache(needs)
            or _why_not_reads(needs)
            or _why_not_latent(needs)
            or _why_not_flash_attn_head_dim(needs)
            or _why_not_flash_attn_biases(needs)
            or why_not_version("flash-attn", "flash-attn", self._installed, needed=(2, 8))
        )


class FlashAttention3Rules(BackendRules):
    """The rules of `FlashAttention3Backend`.

    Args:
        is_installed: Whether the module `flash_attn_interface` is there.
    """

    name = "flash_attn"
    module = "flash_attn_interface"
    # Of 16 tokens: small blocks waste little and give prefixes more hits. Where there are many queries, multiples of
    # the kernel's tile would let it load keys by TMA instead of asynchronous copies.

    def __init__(self, *, is_installed: bool) -> None:
        self._is_installed = is_installed

    def why_not(self, needs: AttentionNeeds) -> str | None:
        """Return what it lacks, the installation last."""
        return (
            _why_not_device(needs, lowest=(9, 0), highest_major=9)
            or _why_not_dtype(needs)
            or _why_not_cache(needs)
            or _why_not_reads(needs)
            or _why_not_latent(needs)
            or _why_not_flash_attn_head_dim(needs)
            or _why_not_flash_attn_biases(needs)
            or ("version 3 does not support ALiBi, which this model needs" if needs.has_alibi else None)
            or (None if self._is_installed else "flash-attn 3 (the module flash_attn_interface) is not installed")
        )


class XformersRules(BackendRules):
    """The rules of `XformersBackend`.

    Args:
        installed: Version of the package xformers; None: it is not installed.
        triton: Version of the package triton; None: unknown.
    """

    name = "xformers"
    module = "xformers"
    # The keys that the kernel reads at once, from within one block. Large blocks cost prefix hits.
    preferred_block_size = 64

    def __init__(self, installed: str | None, triton: str | None) -> None:
        self._installed = installed
        self._triton = triton

    def why_not_block_size(self, block_size: int) -> str | None:
        """Return that the kernel needs multiples of 64."""
        if block_size % 64 == 0:
            return None
        return f"it supports block sizes that are multiples of 64 tokens, not {block_size}"

    def why_not(self, needs: AttentionNeeds) -> str | None:
        """Return what it lacks, the installation last."""
        problem = _why_not_device(needs, lowest=(8, 0)) or _why_not_dtype(needs) or _why_not_cache(needs)
        problem = problem or _why_not_reads(needs) or _why_not_latent(needs)
        wanted = {
            "sliding window": needs.has_window,
            "soft cap": needs.has_soft_cap,
            "ALiBi": needs.has_alibi,
            "attention sinks": needs.has_sinks,
            "distance biases": needs.has_distance_biases,
        }
        for feature, is_wanted in wanted.items():
            if problem is None and is_wanted:
                problem = f"it has no {feature} on a paged cache, which this model needs"
        if problem is None and needs.head_dim not in XFORMERS_HEAD_DIMS:
            problem = f"it supports a head_dim of {', '.join(map(str, XFORMERS_HEAD_DIMS))}, not {needs.head_dim}"
        problem = problem or why_not_version("xformers", "xformers", self._installed, needed=(0, 0, 35))
        if problem is None and self._triton and version_numbers(self._triton) >= TRITON_WITHOUT_BLOCK_POINTERS:
            problem = f"its kernel needs a Triton before 3.8, not {self._triton}"
        return problem


def _why_not_reads(needs: AttentionNeeds) -> str | None:
    """Return that it writes the keys and values of each layer, if some layers only read those of an earlier one."""
    return (
        "it has no layers that read the cache of an earlier one, which this model needs" if needs.reads_only else None
    )


def _why_not_latent(needs: AttentionNeeds) -> str | None:
    """Return that it reads values of their own, if values are a part of the keys."""
    return "it does not support latent caches, which this model needs" if needs.value_begin else None


def _why_not_device(needs: AttentionNeeds, lowest: tuple[int, int], highest_major: int | None = None) -> str | None:
    """Return what is wrong with the device; `highest_major`: the last generation that the kernels are for."""
    capability = needs.compute_capability
    if capability is None:
        return "it needs a CUDA device"
    is_too_new = highest_major is not None and capability[0] > highest_major
    if capability < lowest or is_too_new:
        least = f"{lowest[0]}.{lowest[1]} or more" if highest_major is None else f"{highest_major}.x"
        return f"it needs a device with compute capability {least}, not {capability[0]}.{capability[1]}"
    return None


def _why_not_dtype(needs: AttentionNeeds) -> str | None:
    """Return that the kernels are for numbers of 16 bits, if the model has others."""
    if needs.dtype in HALF_PRECISION:
        return None
    return f"it supports float16 and bfloat16, not {dtype_name(needs.dtype)}"


def _why_not_cache(needs: AttentionNeeds) -> str | None:
    """Return that the kernels read keys and values in the model's number format, if the cache has another."""
    if needs.cache_dtype in (None, needs.dtype):
        return None
    return f"it needs a KV cache in the model's dtype, {dtype_name(needs.dtype)}, not {FORMAT_NAMES[needs.cache_dtype]}"


def _why_not_flash_attn_head_dim(needs: AttentionNeeds) -> str | None:
    if needs.head_dim <= FLASH_ATTN_MAX_HEAD_DIM and needs.head_dim % FLASH_ATTN_HEAD_DIM_MULTIPLE == 0:
        return None
    return (
        f"it supports a head_dim of up to {FLASH_ATTN_MAX_HEAD_DIM}, in steps of {FLASH_ATTN_HEAD_DIM_MULTIPLE}, "
        f"not {needs.head_dim}"
    )


def _why_not_flash_attn_biases(needs: AttentionNeeds) -> str | None:
    for feature, is_wanted in {
        "attention sinks": needs.has_sinks,
        "distance biases": needs.has_distance_biases,
    }.items():
        if is_wanted:
            return f"it does not support {feature}, which this model needs"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a number format, as in `--dtype`."""
    return str(dtype).removeprefix("torch.")
