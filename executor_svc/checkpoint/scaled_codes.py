"""Codes with scales in safetensors: what config.json says of them, and the blocks that hand them over.

A weight is code * scale. The code is in E4M3 of the Open Compute Project, which has no infinities, or an integer; the
scale is that of 128 x 128 weights, of some inputs of a row, of a row or of a tensor; or both are MXFP4's (`mxfp4.py`).
With 4 bits a weight is (code - zero) * scale: AWQ, GPTQ, and some of compressed-tensors; or NVFP4 (`nvfp4.py`). With 8
bits GPTQ has a zero of 128 there, so that the code less 128 is an integer as above.
Imports no torch: `octavo list` asks too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from executor_svc.checkpoint import mxfp4
from executor_svc.checkpoint.model_directory import read_json_object
from executor_svc.checkpoint.model_files import MODEL_OPT_FILE
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError

# A block of a row of 8 bits: the scale in float32, then codes, 0 behind the row.
BLOCK_INPUTS: Final = 128
BLOCK_BYTES: Final = 4 + BLOCK_INPUTS


@dataclass(frozen=True, slots=True)
class CodeKind:
    """What codes are.

    Attributes:
        name: As safetensors name it; "MXFP4" and "NVFP4" are nowhere else.
        block_type: The number of such a block beside ggml's; see blocks.c.
        largest: The largest magnitude.
        block_inputs: Weights of a block.
        block_bytes: Its size.
        row_bytes: Of these, which are the same in all blocks of a row, and held once.
    """

    name: str
    block_type: int
    largest: float
    block_inputs: int = BLOCK_INPUTS
    block_bytes: int = BLOCK_BYTES
    row_bytes: int = 0

    @property
    def held_bits(self) -> float:
        """Of a weight, with its part of a scale."""
        return 8 * (self.block_bytes - self.row_bytes) / self.block_inputs


E4M3: Final = CodeKind("F8_E4M3", 1000, 448.0)
INT8: Final = CodeKind("I8", 1001, 128.0)
MXFP4: Final = CodeKind("MXFP4", mxfp4.MXFP4_BLOCK, 6.0, mxfp4.BLOCK_INPUTS, mxfp4.BLOCK_BYTES)
# A block of a row of 4 bits: the scale in float32, the zero in a byte, then codes, of inputs 2 i and 2 i + 1 in the low
# and the high half of byte i, 0 behind the row. The largest difference of a code and a zero is that of 0 and 16.
UINT4_G32: Final = CodeKind("U4", 1003, 16.0, 32, 4 + 1 + 16)
UINT4_G128: Final = CodeKind("U4", 1004, 16.0, 128, 4 + 1 + 64)
UINT4: Final = (UINT4_G128, UINT4_G32)  # the one with fewer scales first
# A block of a row: the scale of the tensor in float32, those of 16 inputs each in E4M3, then codes as those of MXFP4.
NVFP4: Final = CodeKind("NVFP4", 1005, 448.0 * 6.0, 32, 4 + 2 + 16, 4)
KINDS: Final[Mapping[int, CodeKind]] = MappingProxyType(
    {kind.block_type: kind for kind in (E4M3, INT8, MXFP4, *UINT4, NVFP4)}
)

# How codes of less than a byte, or of a byte in an int32, lie in it; see `packed_codes.py`. "pairs": two in a byte of
# a tensor that has the name of packed ones.
Packing = Literal["none", "pairs", "rows", "gptq", "awq"]

# What shares a scale; "group": some inputs of a row.
Sharing = Literal["block", "group", "channel", "tensor"]

_ACCEPTED: Final = (
    "codes may be E4M3 or symmetric integers of 8 bits, with a scale for each tensor, channel, block of [128, 128], or "
    "group of 128 inputs or a multiple of that; or integers of 4 bits in int32, with a scale for each channel, or "
    "group of 32 inputs or a multiple of that; or E2M1 with a scale for each group of 16 inputs and a tensor (NVFP4)"
)


@dataclass(frozen=True, slots=True)
class CodesConfig:
    """What config.json says.

    Attributes:
        kind: Of the codes.
        scale_name: What a scale is called in place of `weight`.
        sharings: What may share a scale.
        group_inputs: Inputs of a group, a multiple of those of a block of `kind`.
        packing: How several codes lie in an int32. "rows": neighbours of a row, the first in the lowest bits, plus 128
            or 8: `weight_packed` in place of `weight`, beside `weight_shape`. Source:
            compressors/pack_quantized/helpers.py of compressed-tensors 0.20.1.
        zero_name: What tells the code of weight 0; None: it is 8.
        added_to_zeros: What the stored ones lack.
        has_order: Whether config.json says that inputs may be in groups out of order.
    """

    kind: CodeKind
    scale_name: str
    sharings: frozenset[Sharing]
    group_inputs: int = BLOCK_INPUTS
    packing: Packing = "none"
    zero_name: str | None = None
    added_to_zeros: int = 0
    has_order: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether an int32 holds several codes."""
        return self.packing in ("rows", "gptq", "awq")

    @property
    def code_name(self) -> str:
        """What codes are called in place of `weight`."""
        return {"none": "weight", "rows": "weight_packed", "pairs": "weight_packed"}.get(self.packing, "qweight")

    @property
    def global_name(self) -> str:
        """What the scale of a tensor in NVFP4 is called; scales of groups are divided by weight_global_scale."""
        return "weight_global_scale" if self.packing == "pairs" else "weight_scale_2"

    @property
    def stored_format(self) -> str:
        """The number format of codes in files, as safetensors name it."""
        return "I32" if self.is_packed else "U8" if self.kind in (MXFP4, NVFP4) else self.kind.name

    @property
    def codes_of_element(self) -> int:
        """Codes that an element of a tensor holds."""
        return 8 if self.kind in UINT4 else 4 if self.is_packed else 2 if self.kind in (MXFP4, NVFP4) else 1

    @property
    def companions(self) -> tuple[str, ...]:
        """What may lie beside codes; scales of activations are not used."""
        if self.packing in ("gptq", "awq"):
            # Packers once wrote a bias of zeros for maps that have none.
            return (self.scale_name, "qzeros", "g_idx", "bias")
        if self.kind == NVFP4:
            return (self.scale_name, self.global_name, "input_scale", "input_global_scale")
        of_rows = ("weight_shape",) if self.is_packed else ()
        of_groups = ("weight_zero_point", "weight_g_idx") if self.kind in UINT4 else ()
        return (self.scale_name, *of_rows, *of_groups, "input_scale", "input_zero_point", "activation_scale")

    def is_companion(self, name: str) -> bool:
        """Return whether a tensor lies beside codes, by its name, and is no vector of the model."""
        if self.kind == MXFP4:
            return name.endswith(mxfp4.SCALES)
        return (last := name.rpartition(".")[2]) in self.companions and last != "bias"

    def is_code(self, name: str, number_format: str) -> bool:
        """Return whether a tensor of a file has codes."""
        ending = f".{self.code_name}" if self.is_packed or self.kind == NVFP4 else ""
        ending = mxfp4.BLOCKS if self.kind == MXFP4 else ending
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
        if settings.get("quant_method") == "gptq":
            return _read_gptq(settings, f"{source} has in {field}")
        if settings.get("quant_method") == "awq":
            return _read_awq(settings, f"{source} has in {field}")
        if settings.get("quant_method") == "compressed-tensors" and str(settings.get("format")) in _FORMATS:
            return _read_groups(settings, f"{source} has in {field}")
        if settings.get("quant_method") == "compressed-tensors" and settings.get("format") == "nvfp4-pack-quantized":
            return _read_nvfp4(settings, "pairs", f"{source} has in {field}")
        if settings.get("quant_method") == "modelopt" and settings.get("quant_algo") == "NVFP4":
            return _read_nvfp4(settings, "none", f"{source} has in {field}")
    model_opt = source.parent / MODEL_OPT_FILE
    settings = read_json_object(model_opt).get("quantization") if model_opt.is_file() else None
    if isinstance(settings, dict) and settings.get("quant_algo") == "NVFP4":
        return _read_nvfp4(settings, "none", f"{model_opt} has in quantization")
    return None


def _read_fp8(settings: Mapping[str, object], begin: str) -> CodesConfig:
    """Read what DeepSeek and Qwen write, and without blocks AutoFP8."""
    _expect(settings, "fmt", ("e4m3", None), begin)
    _expect(settings, "weight_block_size", ([128, 128], None), begin)
    if settings.get("weight_block_size") is None:
        return CodesConfig(E4M3, "weight_scale", frozenset({"tensor"}))
    return CodesConfig(E4M3, "weight_scale_inv", frozenset({"block"}))


def _read_gptq(settings: Mapping[str, object], begin: str) -> CodesConfig:
    """Read what AutoGPTQ and GPTQModel write."""
    _expect(settings, "bits", (4, 8), begin)
    for field in ("checkpoint_format", "format"):
        _expect(settings, field, ("gptq", "gptq_v2", None), begin)
    _expect(settings, "is_marlin_format", (False, None), begin)
    _expect(settings, "pack_dtype", ("int32", None), begin)
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(str(pattern).startswith("-:") for pattern in dynamic):
        raise ModelLoadError(
            f"{begin} dynamic {shown(repr(dynamic))}; all modules in codes must have the same settings"
        )
    is_second = "gptq_v2" in (settings.get("checkpoint_format"), settings.get("format"))
    return replace(
        _read_group_size(settings, "group_size", "gptq", begin, UINT4 if settings["bits"] == 4 else (INT8,)),
        added_to_zeros=0 if is_second else 1,
        has_order=settings.get("desc_act") is True,
    )


def _read_awq(settings: Mapping[str, object], begin: str) -> CodesConfig:
    """Read what AutoAWQ and GPTQModel write; AutoAWQ's own names of two fields are others."""
    _expect(settings, "bits" if "bits" in settings else "w_bit", (4,), begin)
    _expect(settings, "zero_point", (True, None), begin)
    for field in ("version", "format"):
        _expect(settings, field, ("gemm", "GEMM", None), begin)
    return _read_group_size(settings, "group_size" if "group_size" in settings else "q_group_size", "awq", begin)


def _read_group_size(
    settings: Mapping[str, object], field: str, packing: Packing, begin: str, kinds: Sequence[CodeKind] = UINT4
) -> CodesConfig:
    size = settings.get(field)
    if size == -1:
        return CodesConfig(kinds[0], "scales", frozenset({"channel"}), packing=packing, zero_name="qzeros")
    if (kind := _kind_of_groups(kinds, size)) is None or not isinstance(size, int):
        raise ModelLoadError(f"{begin} {field} {shown(repr(size))}; {_ACCEPTED}")
    return CodesConfig(kind, "scales", frozenset({"group"}), size, packing, "qzeros")


def _kind_of_groups(kinds: Iterable[CodeKind], size: object) -> CodeKind | None:
    """Return the first kind of which whole blocks are a group; None: there is none."""
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        return None
    return next((kind for kind in kinds if size % kind.block_inputs == 0), None)


def _read_groups(settings: Mapping[str, object], begin: str) -> CodesConfig:
    """Read what llm-compressor writes."""
    kind, type_name, is_packed = _FORMATS[settings["format"]]
    _expect(settings, "transform_config", (None, {}), begin)  # of activations, as the model runs
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelLoadError(f"{begin} config_groups {shown(repr(groups))}; {_ACCEPTED}")
    sharings: set[Sharing] = set()
    group_inputs, has_order, has_zeros = 0, False, False
    first = next(iter(groups.values()))
    of_first = first.get("weights") if isinstance(first, dict) else None
    kinds = UINT4 if is_packed and isinstance(of_first, dict) and of_first.get("num_bits") == 4 else (kind,)
    is_short = kinds == UINT4
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        where = f"{begin} config_groups {shown(str(name))}"
        if not isinstance(weights, dict):
            raise ModelLoadError(f"{where} weights {shown(repr(weights))}; {_ACCEPTED}")
        _expect(group, "format", (settings["format"], None), where)
        _expect(weights, "type", (type_name,), where)
        _expect(weights, "num_bits", (4 if is_short else 8,), where)
        _expect(weights, "symmetric", (True, False, None) if is_short else (True, None), where)
        orders = ("static", "weight", False, None)
        _expect(weights, "actorder", (*orders, "group") if is_short else orders, where)
        _expect(
            weights, "strategy", ("group", "channel") if is_short else ("block", "group", "channel", "tensor"), where
        )
        if weights["strategy"] == "block":
            _expect(weights, "block_structure", ([128, 128],), where)
        if weights["strategy"] == "group":
            size = weights.get("group_size")
            found = _kind_of_groups(kinds, size)
            if found is None or not isinstance(size, int) or group_inputs not in (0, size):
                other = f" beside {group_inputs}" if group_inputs else ""
                raise ModelLoadError(f"{where} group_size {shown(repr(size))}{other}; {_ACCEPTED}")
            kinds, group_inputs = (found,), size
        has_zeros |= weights.get("symmetric") is False
        has_order |= weights.get("actorder") == "group"
        sharings.add(weights["strategy"])
    return CodesConfig(
        kinds[0],
        "weight_scale",
        frozenset(sharings),
        group_inputs or BLOCK_INPUTS,
        "rows" if is_packed else "none",
        "weight_zero_point" if has_zeros else None,
        has_order=has_order,
    )


def _read_nvfp4(settings: Mapping[str, object], packing: Packing, begin: str) -> CodesConfig:
    """Read what llm-compressor and ModelOpt write of NVFP4."""
    _expect(settings, "group_size", (16, None), begin)
    _expect(settings, "transform_config", (None, {}), begin)
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, dict) or (packing == "pairs" and not groups):
        raise ModelLoadError(f"{begin} config_groups {shown(repr(groups))}; {_ACCEPTED}")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        where = f"{begin} config_groups {shown(str(name))}"
        if not isinstance(weights, dict):
            raise ModelLoadError(f"{where} weights {shown(repr(weights))}; {_ACCEPTED}")
        _expect(group, "format", (settings.get("format"), None), where)
        _expect(weights, "type", ("float",), where)
        _expect(weights, "num_bits", (4,), where)
        _expect(weights, "group_size", (16,), where)
        _expect(weights, "strategy", ("tensor_group", None), where)
    return CodesConfig(NVFP4, "weight_scale", frozenset({"group"}), 16, packing)


def _expect(settings: Mapping[str, object], field: str, values: tuple[object, ...], begin: str) -> None:
    if settings.get(field) not in values:
        raise ModelLoadError(f"{begin} {field} {shown(repr(settings.get(field)))}; {_ACCEPTED}")


def restore_codes(kind: CodeKind, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return what rows of blocks stand for, [num_rows, num_inputs rounded up to whole blocks]."""
    if kind == MXFP4:
        return mxfp4.restore_mxfp4(blocks)
    blocks = np.ascontiguousarray(blocks).reshape(len(blocks), -1, kind.block_bytes)
    scales = np.ascontiguousarray(blocks[..., :4]).view(np.float32)
    if kind in UINT4 or kind == NVFP4:
        pairs = blocks[..., 5 + (kind == NVFP4) :, None]
        codes = np.concatenate([pairs & 15, pairs >> 4], -1).reshape(*blocks.shape[:2], -1)
        if kind == NVFP4:
            of_groups = np.repeat(_e4m3_values()[blocks[..., 4:6]], 16, -1)
            restored: npt.NDArray[np.float32] = mxfp4.VALUES[codes] * of_groups * scales
            return restored.reshape(len(blocks), -1)
        return ((codes.astype(np.float32) - blocks[..., 4:5]) * scales).reshape(len(blocks), -1)
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
