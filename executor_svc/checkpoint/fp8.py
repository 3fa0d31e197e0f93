"""FP8 weights of safetensors: what config.json says of them, and the blocks in which their codes are handed over.

A weight is code * scale: the code in E4M3 of the Open Compute Project, which has no infinities, the scale of 128 x 128
weights, of a row or of a tensor. Imports no torch: `octavo list` asks too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError

# As safetensors name it.
E4M3: Final = "F8_E4M3"

# A block of a row: the scale in float32, then codes, 0 behind the row. The number stands beside ggml's; see blocks.c.
FP8_BLOCK: Final = 1000
BLOCK_INPUTS: Final = 128
BLOCK_BYTES: Final = 4 + BLOCK_INPUTS
HELD_BITS: Final = 8 * BLOCK_BYTES / BLOCK_INPUTS

# What shares a scale.
Sharing = Literal["block", "channel", "tensor"]

_ACCEPTED: Final = "FP8 is read with E4M3 codes and a scale for each tensor, channel or block of [128, 128]"


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """What config.json says.

    Attributes:
        scale_name: What a scale is called in place of `weight`.
        sharings: What may share a scale.
    """

    scale_name: str
    sharings: frozenset[Sharing]


def read_fp8(values: Mapping[str, object], source: Path) -> Fp8Config | None:
    """Return how weights are stored in FP8; None: they are not, or another method is named.

    How activations would be rounded is not read: they stay in float32.

    Raises: ModelLoadError: they are in FP8 of a kind that is not read.
    """
    for field in ("quantization_config", "compression_config"):
        settings = values.get(field)
        if not isinstance(settings, dict):
            continue
        if settings.get("quant_method") == "fp8":
            return _read_plain(settings, f"{source} has in {field}")
        if settings.get("quant_method") == "compressed-tensors" and settings.get("format") == "float-quantized":
            return _read_groups(settings, f"{source} has in {field}")
    return None


def _read_plain(settings: Mapping[str, object], begin: str) -> Fp8Config:
    """Read what DeepSeek and Qwen write, and without blocks AutoFP8."""
    _expect(settings, "fmt", ("e4m3", None), begin)
    _expect(settings, "weight_block_size", ([128, 128], None), begin)
    if settings.get("weight_block_size") is None:
        return Fp8Config("weight_scale", frozenset({"tensor"}))
    return Fp8Config("weight_scale_inv", frozenset({"block"}))


def _read_groups(settings: Mapping[str, object], begin: str) -> Fp8Config:
    """Read what llm-compressor writes."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelLoadError(f"{begin} config_groups {shown(repr(groups))}; {_ACCEPTED}")
    sharings: set[Sharing] = set()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        where = f"{begin} config_groups {shown(str(name))}"
        if not isinstance(weights, dict):
            raise ModelLoadError(f"{where} weights {shown(repr(weights))}; {_ACCEPTED}")
        _expect(weights, "type", ("float",), where)
        _expect(weights, "num_bits", (8,), where)
        _expect(weights, "strategy", ("block", "channel", "tensor"), where)
        if weights["strategy"] == "block":
            _expect(weights, "block_structure", ([128, 128],), where)
        sharings.add(weights["strategy"])
    return Fp8Config("weight_scale", frozenset(sharings))


def _expect(settings: Mapping[str, object], field: str, values: tuple[object, ...], begin: str) -> None:
    if settings.get(field) not in values:
        raise ModelLoadError(f"{begin} {field} {shown(repr(settings.get(field)))}; {_ACCEPTED}")


def restore_fp8(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return what rows of blocks stand for, [num_rows, num_inputs rounded up to whole blocks]."""
    blocks = np.ascontiguousarray(blocks).reshape(len(blocks), -1, BLOCK_BYTES)
    scales = np.ascontiguousarray(blocks[..., :4]).view(np.float32)
    return (_values()[blocks[..., 4:]] * scales).reshape(len(blocks), -1)


def _values() -> npt.NDArray[np.float32]:
    """Return what each code stands for."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    sizes = np.ldexp(np.where(exponents > 0, 8 + mantissas, mantissas), np.maximum(exponents, 1) - 10)
    sizes[codes & 127 == 127] = np.nan
    values: npt.NDArray[np.float32] = np.where(codes > 127, -sizes, sizes).astype(np.float32)
    return values
