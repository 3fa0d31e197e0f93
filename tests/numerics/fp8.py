"""Checkpoints in FP8 as publishers write them, and the numbers that they stand for: the layout in numpy."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Floats = npt.NDArray[np.float32]


def _value(code: int) -> float:
    """Return what a code stands for. Source: OCP 8-bit Floating Point Specification, E4M3."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


VALUES: Final[Floats] = np.array([_value(code) for code in range(256)], np.float32)
_SORTED: Final = np.argsort(np.where(np.isnan(VALUES), np.inf, VALUES), kind="stable")[:254]

BLOCK: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}


def compressed(strategy: str, **weights: object) -> Mapping[str, Any]:
    """Return the settings of llm-compressor."""
    of_weights = {"type": "float", "num_bits": 8, "strategy": strategy, "dynamic": False, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": of_weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


# Settings, what the scale is called, how many outputs and inputs share one, and its number format.
LAYOUTS: Final[Mapping[str, tuple[Mapping[str, Any], str, tuple[int, int], torch.dtype]]] = {
    "blocks": (BLOCK, "weight_scale_inv", (128, 128), torch.float32),
    "blocks, scales in bfloat16": (BLOCK, "weight_scale_inv", (128, 128), torch.bfloat16),
    "channels": (compressed("channel"), "weight_scale", (1, 10**6), torch.bfloat16),
    "tensors": (compressed("tensor"), "weight_scale", (10**6, 10**6), torch.float32),
    "compressed blocks": (
        compressed("block", block_structure=[128, 128]),
        "weight_scale",
        (128, 128),
        torch.bfloat16,
    ),
    "AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", (10**6, 10**6), torch.float32),
}


def is_converted(name: str, weight: torch.Tensor) -> bool:
    """Whether publishers store a weight in FP8: the linear maps of layers, without routers."""
    others = ("embed", "wte", "lm_head", "embeddings", "gate.weight")
    return weight.ndim == 2 and not any(other in name for other in others)


def write_fp8(directory: Path, target: Path, layout: str = "blocks") -> Mapping[str, torch.Tensor]:
    """Write the checkpoint of a directory in FP8; return the weights that it stands for."""
    settings, scale_name, sharing, dtype = LAYOUTS[layout]
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    stored: dict[str, torch.Tensor] = {}
    restored: dict[str, torch.Tensor] = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        stored[name] = restored[name] = weight
        if not is_converted(name, weight):
            continue
        values, scales, index = weight.numpy(), *_scales(weight.numpy(), sharing, dtype)
        codes = _codes(values / scales.float().numpy()[index])
        restored[name] = torch.from_numpy(VALUES[codes] * scales.float().numpy()[index])
        stored[name] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        module = name.removesuffix("weight")
        stored[f"{module}{scale_name}"] = scales.reshape(-1) if layout in ("tensors", "AutoFP8") else scales
        if settings.get("activation_scheme") == "static":
            stored[f"{module}input_scale"] = torch.tensor(0.02)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    return restored


def _scales(values: Floats, sharing: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """Return scales, and where each weight has its own."""
    rows, columns = (np.arange(size) // shared for size, shared in zip(values.shape, sharing, strict=True))
    largest = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
    index = np.ix_(rows, columns)
    np.maximum.at(largest, index, np.abs(values))
    return torch.from_numpy(largest / 448).to(dtype), index


def _codes(values: Floats) -> npt.NDArray[np.uint8]:
    """Return the nearest code of each value."""
    ordered = VALUES[_SORTED]
    borders = (ordered[1:] + ordered[:-1]) / 2
    return _SORTED[np.searchsorted(borders, values)].astype(np.uint8)
