"""A tiny gpt-oss in MXFP4, as OpenAI stores it: the layout written down in numpy, and beside it the same in numbers.

Source: OCP Microscaling Formats (MX) Specification, version 1.0.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

Tensors = dict[str, npt.NDArray[Any]]
SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
STACKS = ("gate_up_proj", "down_proj")


def write_mxfp4(directory: Path, target: Path, seed: int = 3) -> tuple[Tensors, Tensors]:
    """Write a float32 gpt-oss of `directory` with random codes for its experts.

    Returns: the tensors that are written, and all as the numbers that they stand for.
    """
    random = np.random.default_rng(seed)
    weights = load_file(directory / "model.safetensors")
    coded: Tensors = {}
    for name, values in weights.items():
        if not name.endswith(STACKS):
            coded[name] = values
            continue
        num_experts, num_inputs, num_outputs = values.shape
        codes = random.integers(0, 16, (num_experts, num_outputs, num_inputs // 32, 32), np.uint8)
        scales = random.integers(121, 126, codes.shape[:3], np.uint8)
        numbers = np.where(codes < 8, 1, -1) * SIZES[codes % 8] * np.exp2(scales[..., None].astype(np.float32) - 127)
        weights[name] = np.ascontiguousarray(numbers.reshape(num_experts, num_outputs, -1).swapaxes(1, 2), np.float32)
        coded[f"{name}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        coded[f"{name}_scales"] = scales
    target.mkdir(exist_ok=True)
    save_file(coded, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (target / "config.json").write_text(json.dumps(config))
    return coded, weights
