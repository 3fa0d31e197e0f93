"""The number format that weights are kept in: as `--quantization` says, or as the checkpoint has them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from executor_svc.models.dense import MatrixRole
from executor_svc.native.structs import NumberFormat

Quantization = Literal["none", "bfloat16", "int8", "int8-a8", "int4"]

# "none" is float32 for the kernels in C, and with those of torch what the rest of the model is in.
NUMBER_FORMATS: Final[Mapping[Quantization, NumberFormat]] = MappingProxyType(
    {
        "none": NumberFormat.FLOAT32,
        "bfloat16": NumberFormat.BFLOAT16,
        "int8": NumberFormat.INT8,
        "int8-a8": NumberFormat.INT8_A8,
        "int4": NumberFormat.INT4,
    }
)


def matrix_format(number_format: NumberFormat, role: MatrixRole) -> NumberFormat:
    """Return the number format of a matrix in a model of some number format.

    A router stays exact, since it chooses who computes a token. Of four bits embedding and head lose the most.
    """
    if role == "router":
        return NumberFormat.FLOAT32
    if role == "vocabulary" and number_format == NumberFormat.INT4:
        return NumberFormat.INT8_A8
    return number_format
