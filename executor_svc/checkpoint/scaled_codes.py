"""Codes with scales in safetensors: what config.json says of them, and the blocks that hand them over.

A weight is code * scale. The code is in E4M3 of the Open Compute Project, which has no infinities, or an integer; the
scale is that of 128 x 128 weights, of some inputs of a row, of a row or of a tensor; or both are MXFP4's (`mxfp4.py`).
Imports no torch: `octavo list` asks too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from executor_svc.checkpoint import mxfp4
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError

# A block of a row of 8 bits: the scale in float32, then codes, 0 behind the row.
BLOCK_INPUTS: Final = 128
BLOCK_BYTES: Final = 4 + BLOCK_INPUTS


@dataclass(frozen=True, slots=True)
class CodeKind:
    """What codes are.

    Attributes:
        name: As safetensors name it; "MXFP4" is nowhere else.
        block_type: The number of such a block beside ggml's; see blocks.c.
        largest: The largest magnitude.
        block_inputs: Weights of a block.
        block_bytes: Its size.
    """

    name: str
    block_type: int
    largest: float
    block_inputs: int = BLOCK_INPUTS
    block_bytes: int = BLOCK_BYTES

    @property
    def held_bits(self) -> float:
        """Of a weight, with its part of a scale."""
        return 8 * self.block_bytes / self.block_inputs


E4M3: Final = CodeKind("F8_E4M3", 1000, 448.0)
INT8: Final = CodeKind("I8", 1001, 128.0)
MXFP4: Final = CodeKind("MXFP4", mxfp4.MXFP4_BLOCK, 6.0, mxfp4.BLOCK_INPUTS, mxfp4.BLOCK_BYTES)
KINDS: Final[Mapping[int, CodeKind]] = MappingProxyType({kind.block_type: kind for kind in (E4M3, INT8, MXFP4)})

# What shares a scale; "group": some inputs of a row.
Sharing = Literal["block", "group", "channel", "tensor"]

_ACCEPTED: Final = (
    "codes may be E4M3 or symmetric integers of 8 bits, with a scale for each tensor, channel, block of [128, 128], or "
    "group of 128 inputs or a multiple of that"
)


@dataclass(frozen=True, slots=True)
class CodesConfig:
    """What config.json says.

    Attributes:
        kind: Of the codes.
        scale_name: What a scale is called in place of `weight`.
        sharings: What may share a scale.
        group_inputs: Inputs of a group, a multiple of BLOCK_INPUTS.
        is_packed: Whether four codes plus 128 are an int32, the first in the lowest bits: `weight_packed` in place of
            `weight`, beside `weight_shape`. Source: compressors/pack_quantized/helpers.py of compressed-tensors 0.20.1.
    """

    kind: CodeKind
    scale_name: str
    sharings: frozenset[Sharing]
    group_inputs: int = BLOCK_INPUTS
    is_packed: bool = False

    @property
    def stored_format(self) -> str:
        """The number format of codes in files, as safetensors name it."""
        return "I32" if self.is_packed else "U8" if self.kind == MXFP4 else self.kind.name

    @property
    def codes_of_element(self) -> int:
        """Codes that an element of a tensor holds."""
        return 4 if self.is_packed else 2 if self.kind == MXFP4 else 1

    def is_code(self, name: str, number_format: str) -> bool:
        """Return whether a tensor of a file has codes."""
        ending = ".weight_packed" if self.is_packed else mxfp4.BLOCKS if self.kind == MXFP4 else ""
        return number_format == self.stored_format and name.endswith(ending)


# Formats of compressed-tensors: the kind of codes, the name of their type, and whether they are packed.
_FORMATS: Final[Mapping[object, tuple[CodeKind, str, bool]]] = MappingProxyType(
    {
        "float-quantized": (E4M3, "float", False),
        "int-quantized": (INT8, "int", False),
        "pack-quantized": (INT8, "int", True),
    }
)


def read_codes(values: Mapping[str, object], source: Path) -> CodesConfig | None:
    """Return how weights are stored in codes; None: they are not, or another method is named.

    How activations would be rounded is not read: they stay in float32.

    Raises: ModelLoadError: they are codes of a kind that is not read.
    """
    for field in ("quantization_config", "compression_config"):
        settings = values.get(field)
        if not isinstance(settings, dict):
            continue
        if settings.get("quant_method") == "mxfp4" and values.get("architectures") == ["GptOssForCausalLM"]:
            return CodesConfig(MXFP4, "", frozenset())
        if settings.get("quant_method") == "fp8":
            return _read_fp8(settings, f"{source} has in {field}")
        if settings.get("quant_method") == "compressed-tensors" and str(settings.get("format")) in _FORMATS:
            return _read_groups(settings, f"{source} has in {field}")
    return None


def _read_fp8(settings: Mapping[str, object], begin: str) -> CodesConfig:
    """Read what DeepSeek and Qwen write, and without blocks AutoFP8."""
    _expect(settings, "fmt", ("e4m3", None), begin)
    _expect(settings, "weight_block_size", ([128, 128], None), begin)
    if settings.get("weight_block_size") is None:
        return CodesConfig(E4M3, "weight_scale", frozenset({"tensor"}))
    return CodesConfig(E4M3, "weight_scale_inv", frozenset({"block"}))


def _read_groups(settings: Mapping[str, object], begin: str) -> CodesConfig:
    """Read what llm-compressor writes."""
    kind, type_name, is_packed = _FORMATS[settings["format"]]
    _expect(settings, "transform_config", (None, {}), begin)  # of activations, as the model runs
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelLoadError(f"{begin} config_groups {shown(repr(groups))}; {_ACCEPTED}")
    sharings: set[Sharing] = set()
    group_inputs = 0
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        where = f"{begin} config_groups {shown(str(name))}"
        if not isinstance(weights, dict):
            raise ModelLoadError(f"{where} weights {shown(repr(weights))}; {_ACCEPTED}")
        _expect(group, "format", (settings["format"], None), where)
        _expect(weights, "type", (type_name,), where)
        _expect(weights, "num_bits", (8,), where)
        _expect(weights, "symmetric", (True, None), where)
        _expect(weights, "actorder", ("static", "weight", False, None), where)
        _expect(weights, "strategy", ("block", "group", "channel", "tensor"), where)
        if weights["strategy"] == "block":
            _expect(weights, "block_structure", ([128, 128],), where)
        if weights["strategy"] == "group":
            size = weights.get("group_size")
            if not isinstance(size, int) or size <= 0 or size % BLOCK_INPUTS or group_inputs not in (0, size):
                other = f" beside {group_inputs}" if group_inputs else ""
                raise ModelLoadError(f"{where} group_size {shown(repr(size))}{other}; {_ACCEPTED}")
            group_inputs = size
        sharings.add(weights["strategy"])
    return CodesConfig(kind, "weight_scale", frozenset(sharings), group_inputs or BLOCK_INPUTS, is_packed)


def _expect(settings: Mapping[str, object], field: str, values: tuple[object, ...], begin: str) -> None:
    if settings.get(field) not in values:
        raise ModelLoadError(f"{begin} {field} {shown(repr(settings.get(field)))}; {_ACCEPTED}")


def restore_codes(kind: CodeKind, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return what rows of blocks stand for, [num_rows, num_inputs rounded up to whole blocks]."""
    if kind == MXFP4:
        return mxfp4.restore_mxfp4(blocks)
    blocks = np.ascontiguousarray(blocks).reshape(len(blocks), -1, BLOCK_BYTES)
    scales = np.ascontiguousarray(blocks[..., :4]).view(np.float32)
    codes = np.ascontiguousarray(blocks[..., 4:])
    values = _e4m3_values()[codes] if kind == E4M3 else codes.view(np.int8).astype(np.float32)
    return (values * scales).reshape(len(blocks), -1)


def _e4m3_values() -> npt.NDArray[np.float32]:
    """Return what each code stands for."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    sizes = np.ldexp(np.where(exponents > 0, 8 + mantissas, mantissas), np.maximum(exponents, 1) - 10)
    sizes[codes & 127 == 127] = np.nan
    values: npt.NDArray[np.float32] = np.where(codes > 127, -sizes, sizes).astype(np.float32)
    return values
