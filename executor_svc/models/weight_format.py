"""The number formats that weights are kept in and that a model runs in: as asked for, or as the checkpoint has them."""

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

import torch

from executor_svc.attention.selection import BFLOAT16_CAPABILITY
from executor_svc.models.dense import MatrixRole
from executor_svc.native.structs import NumberFormat

Quantization = Literal["none", "bfloat16", "int8", "int8-a8", "int4"]
ComputeDtype = Literal["float32", "bfloat16"]

# "none" is float32 for the kernels in C, and for torch's the format of the rest of the model.
NUMBER_FORMATS: Final[Mapping[Quantization, NumberFormat]] = MappingProxyType(
    {
        "none": NumberFormat.FLOAT32,
        "bfloat16": NumberFormat.BFLOAT16,
        "int8": NumberFormat.INT8,
        "int8-a8": NumberFormat.INT8_A8,
        "int4": NumberFormat.INT4,
    }
)


def number_format_of(quantization: Quantization, compute_dtype: ComputeDtype) -> NumberFormat:
    """Return the format of weights whose products are computed in a number format; integers keep their own products."""
    number_format = NUMBER_FORMATS[quantization]
    is_rounded = compute_dtype == "bfloat16" and number_format <= NumberFormat.BFLOAT16
    return NumberFormat.BFLOAT16_A16 if is_rounded else number_format


def matrix_formats(
    number_format: NumberFormat, role: MatrixRole, sizes: Sequence[int], stored: Sequence[NumberFormat] = ()
) -> list[tuple[NumberFormat, Sequence[int]]]:
    """Return the number formats of a matrix in a model of some number format, each with the sizes of its parts.

    A router stays exact, since it chooses the experts of a token. With four bits embedding and head lose the most, and
    then values: several query heads share one, and no softmax hides their error; of a layer with a state what says how
    much of that is kept and changed. What a file has decided, `stored` of each part, stays.
    """
    if role == "router":
        return [(NumberFormat.FLOAT32, sizes)]
    if stored:
        parts = itertools.groupby(zip(stored, sizes, strict=True), key=lambda part: part[0])
        return [(each, [size for _, size in of_format]) for each, of_format in parts]
    if role in ("vocabulary", "values") and number_format == NumberFormat.INT4:
        return [(NumberFormat.INT8_A8, sizes)]
    if role == "qkv" and number_format == NumberFormat.INT4:
        return [(NumberFormat.INT4, sizes[:2]), (NumberFormat.INT8_A8, sizes[2:])]
    if role in ("delta_net", "mamba2") and number_format == NumberFormat.INT4:
        num_others = len(sizes) - (2 if role == "delta_net" else 1)
        return [(NumberFormat.INT4, sizes[:num_others]), (NumberFormat.INT8_A8, sizes[num_others:])]
    return [(number_format, sizes)]


Dtype = Literal["float32", "bfloat16", "float16"]

# As safetensors name them.
STORED_NAMES: Final[Mapping[Dtype, str]] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def choose_dtype(
    configured: Literal["auto"] | Dtype, model_config: Mapping[str, object], device: torch.device
) -> Dtype:
    """Return the number format of activations and cache.

    "auto" is float32 on a CPU, which the kernels in C are for and which is exact for all that is stored. On a GPU it is
    what config.json says, or float32 if that says nothing; float16 where the device lacks bfloat16.
    """
    if configured != "auto":
        return configured
    if device.type == "cpu":
        return "float32"
    chosen = _said_by(model_config)
    if chosen == "bfloat16" and torch.cuda.get_device_capability(device) < BFLOAT16_CAPABILITY:
        return "float16"
    return chosen


def _said_by(model_config: Mapping[str, object]) -> Dtype:
    """Return what a config.json says of the number format, for the model of text if it has several."""
    text_config = model_config.get("text_config")
    for config in (text_config if isinstance(text_config, dict) else {}, model_config):
        for key in ("dtype", "torch_dtype"):  # the second is the older name
            said = str(config.get(key)).removeprefix("torch.")
            for name in STORED_NAMES:
                if said == name:
                    return name
    return "float32"
