"""Which number format a model runs in: as configured, or what suits the device and the model."""

from collections.abc import Mapping
from typing import Final, Literal

import torch

from executor_svc.attention.selection import BFLOAT16_CAPABILITY

Dtype = Literal["float32", "bfloat16", "float16"]

# As safetensors name them.
STORED_NAMES: Final[Mapping[Dtype, str]] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def choose_dtype(
    configured: Literal["auto"] | Dtype, model_config: Mapping[str, object], device: torch.device
) -> Dtype:
    """Return the number format of activations and cache.

    "auto" is float32 on a CPU, which the kernels in C are for and which is exact for all that is stored. On a GPU it is
    what config.json says, or float32 if that says nothing; float16 where the device lacks bfloat16.

    Args:
        configured: What was asked for; anything but "auto" wins.
        model_config: config.json.
        device: Where the model runs.
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
