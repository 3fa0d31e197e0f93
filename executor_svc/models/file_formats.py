"""How weights are held that are codes in their file: the codes are copied, so a format must have every weight exactly.

The one table of GGUF files: a type that is not in it is refused by name, before anything is loaded, or rounded
(`executor_svc/checkpoint/gguf/rounding.py`).
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from gguf import GGMLQuantizationType as FileType

from executor_svc.checkpoint.gguf.header import GGUFTensor
from executor_svc.checkpoint.gguf.rounding import check_type
from executor_svc.checkpoint.gguf.weights import FLOATS, GGUFCheckpoint
from executor_svc.checkpoint.scaled_codes import E4M3, INT8, MXFP4, NVFP4, UINT4_G32, UINT4_G128
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.models.weight_format import NUMBER_FORMATS
from executor_svc.native.structs import FILE_FORMATS, FLOAT_INPUTS, K_FORMATS, NumberFormat
from octavo_shared.errors import ModelLoadError

# The formats that have a type exactly, the best one first. To add a type: a line here and in `HELD_BITS`, its block in
# csrc/blocks.c or csrc/pack_k.c, and in `quantized_linear.py`. tests/numerics/test_file_formats.py then compares it
# with what the package gguf makes of it.
HOLDERS: Final[Mapping[FileType, tuple[NumberFormat, ...]]] = MappingProxyType(
    {
        FileType.F32: (NumberFormat.FLOAT32,),
        FileType.F16: (NumberFormat.FLOAT32,),
        FileType.BF16: (NumberFormat.BFLOAT16, NumberFormat.FLOAT32),
        FileType.Q8_0: (NumberFormat.INT8_A8, NumberFormat.INT8),
        FileType.Q5_0: (NumberFormat.INT8_A8, NumberFormat.INT8),
        FileType.IQ4_NL: (NumberFormat.INT8_A8, NumberFormat.INT8),
        # Its minimum is -8 scales, which float16 has up to scales of 8188; packing says if one is larger.
        FileType.Q4_0: (NumberFormat.INT4, NumberFormat.INT8_A8, NumberFormat.INT8),
        FileType.Q4_1: (NumberFormat.INT4,),
        FileType.Q5_1: (NumberFormat.Q5_1,),
        FileType.MXFP4: (NumberFormat.MXFP4,),
        FileType.Q2_K: (NumberFormat.Q2_K,),
        FileType.Q3_K: (NumberFormat.Q3_K,),
        FileType.Q4_K: (NumberFormat.Q4_K,),
        FileType.Q5_K: (NumberFormat.Q5_K,),
        FileType.Q6_K: (NumberFormat.Q6_K,),
    }
)


FORMAT_NAMES: Final[Mapping[NumberFormat, str]] = MappingProxyType(
    {number_format: "float32" if name == "none" else name for name, number_format in NUMBER_FORMATS.items()}
    | {each: each.name.lower() for each in FILE_FORMATS}
    | {NumberFormat.INT8_A32: "int8-a32"}
)

# Of an MLP or of experts: gates and what they gate take the same inputs, as all experts do.
_OF_MLP: Final = re.compile(r"(blk\.\d+)\.ffn_(gate|up|down)(?!_inp)")

_ALWAYS_FLOATS: Final = {"ffn_gate_inp": "router", "ssm_conv1d": "convolution", "shortconv.conv": "convolution"}

# What weights of other types are rounded to.
_ROUNDED = (NumberFormat.INT8_A8, NumberFormat.INT8)
_FLOATS = (NumberFormat.FLOAT32, NumberFormat.BFLOAT16)
# Their products take activations in 8 bits.
_SHORT = (NumberFormat.INT4, NumberFormat.INT8_A8, NumberFormat.Q5_1, NumberFormat.MXFP4, *K_FORMATS)

# Whose products can take activations in 16 bits, and what is no code.
LONG_INPUTS: Final = {*FLOATS} | {kind for kind, holders in HOLDERS.items() if set(holders) - set(_SHORT)}


class FileFormats:
    """The number formats of a GGUF checkpoint: the formats of a matrix by the names of its tensors.

    Args:
        checkpoint: The weights.
        has_long_inputs: Whether products take activations in 16 bits, not 8: `--quantization int8`.
        allow_requantization: Whether types that no format holds exactly are rounded.

    Raises: ModelLoadError: a type has no format; the message has file, tensor and type.
    """

    def __init__(
        self, checkpoint: GGUFCheckpoint, *, has_long_inputs: bool = False, allow_requantization: bool = False
    ) -> None:
        self._checkpoint = checkpoint
        self.has_codes = checkpoint.has_codes
        self.used: set[NumberFormat] = set()
        self._holders: dict[FileType, list[NumberFormat]] = {}
        alike: dict[str, GGUFTensor] = {}  # the first tensor of each group that takes the same inputs
        for tensor in checkpoint.tensors.values():
            check_type(tensor, allow_requantization=allow_requantization)
            self._holders[tensor.type] = _holders(tensor, has_long_inputs)
            match = _OF_MLP.match(tensor.name)
            if match is None or tensor.name.endswith((".bias", ".scale")):
                continue
            first = alike.setdefault(f"{match[1]} {match[2] == 'down'}", tensor)
            if (first.type in FLOATS) != (tensor.type in FLOATS):
                raise ModelLoadError(
                    f"{first} is {first.type.name}, but {tensor.name} is {tensor.type.name}: both must be quantized, "
                    "or neither"
                )

    def __call__(self, names: Sequence[str]) -> Sequence[NumberFormat]:
        """Return the format of each part of a matrix, by its Hugging Face name: all take the same inputs.

        Raises: ModelLoadError: the parts cannot be joined.
        """
        types = [self._checkpoint.type_of(name) for name in names]
        for formats in itertools.product(*(self._holders[each] for each in types)):
            if len({each in _FLOATS for each in formats}) == 1:
                self.used |= set(formats)
                return formats
        kinds = ", ".join(each.name for each in types)
        raise ModelLoadError(
            f"{self._checkpoint.describe(names[0])} and its companions are {kinds}; they cannot be joined"
        )


def _holders(tensor: GGUFTensor, has_long_inputs: bool) -> list[NumberFormat]:
    what = next((what for part, what in _ALWAYS_FLOATS.items() if part in tensor.name), None)
    if what is not None and tensor.type not in FLOATS:
        raise ModelLoadError(f"{tensor} is {tensor.type.name}; a {what} must be F32, F16 or BF16")
    if (len(tensor.shape) == 1 or tensor.name.endswith(".bias")) and tensor.type not in FLOATS:
        raise ModelLoadError(f"{tensor} is {tensor.type.name}; a vector must be F32, F16 or BF16")
    holders = [each for each in HOLDERS.get(tensor.type, _ROUNDED) if not (has_long_inputs and each in _SHORT)]
    if not holders:
        raise ModelLoadError(
            f"quantization is int8, but {tensor} is {tensor.type.name}, whose products take activations in 8 bits; "
            "remove --quantization"
        )
    return holders


_HOLDERS_OF_CODES: Final = {
    E4M3: NumberFormat.FP8,
    INT8: NumberFormat.INT8_A32,
    MXFP4: NumberFormat.MXFP4,
    UINT4_G32: NumberFormat.INT4_G32,
    UINT4_G128: NumberFormat.INT4_G128,
    NVFP4: NumberFormat.NVFP4,
}


class ScaledFormats:
    """The number formats of safetensors with codes and scales: the formats of a matrix by the names of its tensors.

    Args:
        checkpoint: The weights; some are codes.
        is_held: Whether there are kernels that multiply with the codes; else they are rounded to int8-a8.
    """

    has_codes = True

    def __init__(self, checkpoint: Checkpoint, *, is_held: bool) -> None:
        self._checkpoint = checkpoint
        codes = checkpoint.codes
        assert codes is not None, "without codes there is nothing to hold"
        self._holders = {
            codes.stored_format: _HOLDERS_OF_CODES[codes.kind] if is_held else NumberFormat.INT8_A8,
            "BF16": NumberFormat.BFLOAT16,
        }
        self.used: set[NumberFormat] = set()

    def __call__(self, names: Sequence[str]) -> Sequence[NumberFormat]:
        """Return the format of each part of a matrix, by its Hugging Face name: all take the same inputs.

        Raises: ModelLoadError: the parts cannot be joined.
        """
        kinds = [self._checkpoint.format_of(name) or "" for name in names]
        formats = [self._holders.get(kind, NumberFormat.FLOAT32) for kind in kinds]
        if len({each in FLOAT_INPUTS for each in formats}) == 2:
            raise ModelLoadError(f"{names[0]} and its companions are {', '.join(kinds)}; they cannot be joined")
        self.used |= set(formats)
        return formats


CodeFormats = FileFormats | ScaledFormats
