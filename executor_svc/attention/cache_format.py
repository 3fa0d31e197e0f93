"""The formats of keys and values in the cache, and the reference of what is written and read, in torch.

A format is known by the dtype of its elements. An element is rounded to nearest even as it is written, from its token
alone. int8 has a scale for each token and KV head, the largest magnitude / 127; FP8 saturates, and a layer has one
scale for all its keys and one for all its values. `executor_svc/native/csrc/cache_format.h` does the same in C,
`executor_svc/triton_kernels/cache_formats.py` in Triton.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

import torch

CacheDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2"]

# Names as in `--kv-cache-dtype`; the order is that of the numbers in C.
CACHE_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "int8": torch.int8,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }
)
FORMAT_NAMES: Final = {dtype: name for name, dtype in CACHE_DTYPES.items()}
FORMAT_NUMBERS: Final = {dtype: number for number, dtype in enumerate(CACHE_DTYPES.values())}
FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)

_LARGEST_INT8 = 127


def choose_cache_dtype(configured: CacheDtype, dtype: torch.dtype, *, in_bfloat16: bool = False) -> torch.dtype:
    """Return the format of the cache: as configured, or bfloat16 if attention is in it, or the activations' format."""
    return CACHE_DTYPES[configured] if configured != "auto" else torch.bfloat16 if in_bfloat16 else dtype


def has_scales(dtype: torch.dtype) -> bool:
    """Return whether each token and KV head has a scale."""
    return dtype == torch.int8


def encode(heads: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the elements of some heads, and of int8 their scales.

    Args:
        heads: [..., head_dim].
        dtype: Of the elements.
        scale: Of FP8: what is written is divided by it.

    Returns:
        [..., head_dim] in `dtype`; [...] float32, None: there are none.
    """
    if has_scales(dtype):
        heads = heads.float()
        largest = heads.abs().amax(-1, keepdim=True)
        # By a tensor: on a GPU torch multiplies by the reciprocal of a number, which is rounded.
        scales = torch.where(largest.isfinite(), largest, torch.nan) / largest.new_tensor(_LARGEST_INT8)
        elements = torch.where(scales > 0, heads / scales, 0.0).clamp(-_LARGEST_INT8, _LARGEST_INT8).round()
        return elements.to(dtype), scales.squeeze(-1)
    if dtype in FP8:
        limit = torch.finfo(dtype).max
        heads = (heads.float() / scale).clamp(-limit, limit)
    return heads.to(dtype), None


def decode(elements: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Return what elements stand for, [..., head_dim] in `dtype`; the other way round of `encode`."""
    if scales is not None:
        return (elements.float() * scales[..., None]).to(dtype)
    if elements.dtype in FP8:
        return (elements.float() * scale).to(dtype)
    return elements.to(dtype)
