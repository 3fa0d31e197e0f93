"""The number format that weights are kept in: as `--quantization` says, or as the checkpoint has them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from executor_svc.models.dense import MatrixRole
from executor_svc.native.structs import NumberFormat

Quantization = Literal["none", "bfloat16", "int8", "int8-a8", "int4"]

_FORMATS: Final[Mapping[Quantization, NumberFormat]] = MappingProxyType(
    {
        "none": NumberFormat.FLOAT32,
        "bfloat16": NumberFormat.BFLOAT16,
        "int8": NumberFormat.INT8,
        "int8-a8": NumberFormat.INT8_A8,
        "int4": NumberFormat.INT4,
    }
)


def matrix_format(quantization: Quantization, role: MatrixRole) -> NumberFormat:
    """Return the number format of a matrix on a CPU.

    A router stays exact, since it chooses who computes a token. With int4 the vocabulary has 8 bits: it is the first
    and the last to touch every token, and many models use it for both.
    """
    if role == "router":
        return NumberFormat.FLOAT32
    if role == "vocabulary" and quantization == "int4":
        return NumberFormat.INT8_A8
    return _FORMATS[quantization]
