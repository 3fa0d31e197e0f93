"""Checkpoints in codes as publishers write them, and the numbers that they stand for: layouts in numpy."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

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


E4M3: Final[Floats] = np.array([_value(code) for code in range(256)], np.float32)
INT8: Final[Floats] = np.arange(256).astype(np.uint8).view(np.int8).astype(np.float32)

BLOCK: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}


def compressed(strategy: str, kind: str = "float-quantized", **weights: object) -> Mapping[str, Any]:
    """Return the settings of llm-compressor."""
    type_name = "float" if kind == "float-quantized" else "int"
    of_weights = {"type": type_name, "num_bits": 8, "symmetric": True, "strategy": strategy, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": of_weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True)
class Layout:
    """Settings, what the scale is called, how many outputs and inputs share one, and its number format."""

    settings: Mapping[str, Any]
    scale_name: str
    sharing: tuple[int, int]
    dtype: torch.dtype
    codes: Literal["e4m3", "int8", "packed", "packed4", "gptq", "gptq8", "awq", "nvfp4", "modelopt"] = "e4m3"
    zeros: Literal["8", "any", "any less 1"] = "8"

    @property
    def has_4_bits(self) -> bool:
        return self.codes in ("packed4", "gptq", "awq", "nvfp4", "modelopt")


def gptq(**settings: object) -> Mapping[str, Any]:
    """Return the settings of GPTQModel."""
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False, **settings}


def awq(**settings: object) -> Mapping[str, Any]:
    """Return the settings of AutoAWQ."""
    settings = {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm", **settings}
    return {"quant_method": "awq", "modules_to_not_convert": None, **settings}


def packed4(strategy: str, **weights: object) -> Mapping[str, Any]:
    return compressed(strategy, "pack-quantized", num_bits=4, **weights)


def nvfp4(**weights: object) -> Mapping[str, Any]:
    weights = {"type": "float", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn", **weights}
    return compressed("tensor_group", "nvfp4-pack-quantized", num_bits=4, **weights)


def model_opt(**settings: object) -> Mapping[str, Any]:
    """Return the settings of NVIDIA's ModelOpt."""
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    groups = {"group_0": {"input_activations": weights, "weights": weights, "targets": ["Linear"]}}
    return {
        "config_groups": groups,
        "ignore": ["lm_head"],
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
        **settings,
    }


ALL = 10**6
F16 = torch.float16
BF16 = torch.bfloat16
LAYOUTS: Final[Mapping[str, Layout]] = {
    "blocks": Layout(BLOCK, "weight_scale_inv", (128, 128), torch.float32),
    "blocks, scales in bfloat16": Layout(BLOCK, "weight_scale_inv", (128, 128), BF16),
    "channels": Layout(compressed("channel"), "weight_scale", (1, ALL), BF16),
    "tensors": Layout(compressed("tensor"), "weight_scale", (ALL, ALL), torch.float32),
    "compressed blocks": Layout(
        compressed("block", block_structure=[128, 128]), "weight_scale", (128, 128), torch.bfloat16
    ),
    "AutoFP8": Layout(
        {"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", (ALL, ALL), torch.float32
    ),
    "w8a8": Layout(compressed("channel", "int-quantized"), "weight_scale", (1, ALL), BF16, "int8"),
    "w8a8, tensors": Layout(compressed("tensor", "int-quantized"), "weight_scale", (ALL, ALL), torch.float32, "int8"),
    "w8a16": Layout(compressed("channel", "pack-quantized"), "weight_scale", (1, ALL), torch.float32, "packed"),
    "w8a16, groups": Layout(
        compressed("group", "pack-quantized", group_size=256, actorder="static"),
        "weight_scale",
        (1, 256),
        torch.bfloat16,
        "packed",
    ),
    "w4a16": Layout(packed4("group", group_size=128, actorder="group"), "weight_scale", (1, 128), BF16, "packed4"),
    "w4a16, channels": Layout(packed4("channel"), "weight_scale", (1, ALL), torch.float32, "packed4"),
    "w4a16, zeros": Layout(
        packed4("group", group_size=64, symmetric=False), "weight_scale", (1, 64), F16, "packed4", "any"
    ),
    "gptq": Layout(gptq(), "scales", (1, 128), F16, "gptq", "any less 1"),
    "gptq, rows": Layout(gptq(group_size=-1), "scales", (1, ALL), F16, "gptq", "any less 1"),
    "gptq_v2, groups of 32": Layout(
        gptq(group_size=32, checkpoint_format="gptq_v2", desc_act=True), "scales", (1, 32), BF16, "gptq", "any"
    ),
    "gptq, groups of 256": Layout(gptq(group_size=256), "scales", (1, 256), F16, "gptq", "any less 1"),
    "gptq of 8 bits": Layout(gptq(bits=8), "scales", (1, 128), F16, "gptq8"),
    "gptq_v2 of 8 bits, rows": Layout(
        gptq(bits=8, group_size=-1, checkpoint_format="gptq_v2", sym=True), "scales", (1, ALL), F16, "gptq8"
    ),
    "awq": Layout(awq(), "scales", (1, 128), F16, "awq", "any"),
    "awq, groups of 32": Layout(awq(group_size=32), "scales", (1, 32), F16, "awq", "any"),
    "nvfp4": Layout(nvfp4(), "weight_scale", (1, 16), torch.float32, "nvfp4"),
    "modelopt": Layout(model_opt(), "weight_scale", (1, 16), torch.float32, "modelopt"),
}


def is_converted(name: str, weight: torch.Tensor) -> bool:
    """Whether publishers store a weight in codes: the linear maps of layers, without routers."""
    others = ("embed", "wte", "lm_head", "embeddings", "gate.weight", "router.layer", "router.proj")
    return weight.ndim == 2 and not any(other in name for other in others)


def write_codes(directory: Path, target: Path, layout: str = "blocks") -> Mapping[str, torch.Tensor]:
    """Write the checkpoint of a directory in codes; return the weights that it stands for."""
    how = LAYOUTS[layout]
    values_of = E4M3 if how.codes == "e4m3" else INT8
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": how.settings}))
    stored: dict[str, torch.Tensor] = {}
    restored: dict[str, torch.Tensor] = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        stored[name] = restored[name] = weight
        if not is_converted(name, weight):
            continue
        module = name.removesuffix("weight")
        if how.has_4_bits:
            store = _nvfp4 if how.sharing[1] == 16 else _four_bits
            of_module, restored[name] = store(weight.numpy(), how)
            del stored[name]
            stored |= {f"{module}{last}": tensor for last, tensor in of_module.items()}
            continue
        scales, index = _scales(weight.numpy(), how, float(np.nanmax(values_of)))
        codes = _codes(weight.numpy() / scales.float().numpy()[index], values_of)
        restored[name] = torch.from_numpy(values_of[codes] * scales.float().numpy()[index])
        if how.codes in ("packed", "gptq8"):
            del stored[name]
        if how.codes == "gptq8":
            less = how.settings.get("checkpoint_format") != "gptq_v2"
            zeros = torch.full((scales.shape[1], len(codes) // 4), 0x80808080 - 0x01010101 * less - 2**32)
            stored |= {f"{module}qweight": _four_bytes(codes ^ 128).T.contiguous(), f"{module}qzeros": zeros.int()}
            stored |= {f"{module}scales": scales.T.contiguous(), f"{module}g_idx": torch.from_numpy(index[1][0]).int()}
            continue
        stored |= _stored_codes(module, codes, how.codes)
        stored[f"{module}{how.scale_name}"] = scales.reshape(-1) if how.sharing == (ALL, ALL) else scales
        if how.settings.get("activation_scheme") == "static":
            stored[f"{module}input_scale"] = torch.tensor(0.02)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    return restored


def _stored_codes(module: str, codes: npt.NDArray[np.uint8], kind: str) -> Mapping[str, torch.Tensor]:
    """Return the tensors of codes. Source: compressors/pack_quantized/helpers.py of compressed-tensors 0.20.1."""
    if kind == "e4m3":
        return {f"{module}weight": torch.from_numpy(codes).view(torch.float8_e4m3fn)}
    if kind == "int8":
        return {f"{module}weight": torch.from_numpy(codes.view(np.int8))}
    shape = torch.tensor(codes.shape)
    return {f"{module}weight_packed": _four_bytes(codes ^ 128), f"{module}weight_shape": shape}


def _four_bytes(codes: npt.NDArray[Any]) -> torch.Tensor:
    """Return four neighbours of a row in an int32, the first in the lowest bits; 0 behind the row."""
    padded = np.pad(codes.astype(np.int64), ((0, 0), (0, -codes.shape[1] % 4)))
    words = (padded.reshape(len(codes), -1, 4) << np.array([0, 8, 16, 24])).sum(-1).astype(np.uint32).view(np.int32)
    return torch.from_numpy(words.copy())


def _four_bits(values: Floats, how: Layout) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a matrix in 4 bits, by the ends of their names, and what they stand for.

    Sources: pack_quantized of compressed-tensors 0.20.1; `pack` of GPTQModel's and AutoAWQ's linear layers.
    """
    num_outputs, num_inputs = values.shape
    group = np.minimum(np.arange(num_inputs) // how.sharing[1], num_inputs)
    scales, zeros = np.zeros((2, num_outputs, group[-1] + 1), np.float32)
    for number in range(group[-1] + 1):
        part = values[:, group == number]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scales[:, number] = (high - low) / 15 if how.zeros != "8" else np.maximum(-low / 8, high / 7)
        zeros[:, number] = 8 if how.zeros == "8" else np.round(-low / scales[:, number])
    if how.zeros == "any less 1":
        zeros = zeros.clip(1, 16)
    in_type = torch.from_numpy(scales).to(how.dtype)
    exact = in_type.float().numpy()[:, group]
    codes = np.round(values / exact + zeros[:, group]).clip(0, 15).astype(np.int64)
    restored = torch.from_numpy((codes - zeros[:, group]).astype(np.float32) * exact)
    stored_zeros = zeros.astype(np.int64) - (how.zeros == "any less 1")
    order = torch.from_numpy(group).int()
    if how.codes == "packed4":
        tensors = {"weight_packed": _words(codes), "weight_scale": in_type, "weight_shape": torch.tensor(values.shape)}
        if how.zeros != "8":
            tensors["weight_zero_point"] = _words(stored_zeros.T).T.contiguous()
        if "actorder" in json.dumps(how.settings):
            tensors["weight_g_idx"] = order
        return tensors, restored
    tensors = {"scales": in_type.T.contiguous()}
    if how.codes == "gptq":
        tensors |= {"qweight": _words(codes).T.contiguous(), "qzeros": _words(stored_zeros.T), "g_idx": order}
        return {**tensors, "bias": torch.zeros(num_outputs, dtype=how.dtype)}, restored
    places = np.arange(num_outputs).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    return {**tensors, "qweight": _words(codes.T[:, places]), "qzeros": _words(stored_zeros.T[:, places])}, restored


FP4: Final[Floats] = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _nvfp4(values: Floats, how: Layout) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a matrix in NVFP4, and what they stand for; as `_four_bits`.

    Sources: compressors/nvfp4 of compressed-tensors 0.20.1; qtensor/nvfp4_tensor.py of ModelOpt.
    """
    num_outputs, num_inputs = values.shape
    groups = values.reshape(num_outputs, -1, 16)
    is_divisor = how.codes == "nvfp4"
    of_all = np.abs(values).max(keepdims=True)[0] / np.float32(448 * 6)
    stored = 1 / of_all if is_divisor else of_all
    of_all = 1 / stored if is_divisor else stored
    scales = _codes(np.abs(groups).max(-1) / 6 / of_all, E4M3)
    exact = E4M3[scales][..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = _codes(np.nan_to_num(groups / (exact * of_all)), FP4).reshape(num_outputs, num_inputs)
    restored = (FP4[codes].reshape(groups.shape) * exact * of_all).reshape(values.shape)
    tensors = {
        "weight_packed" if is_divisor else "weight": torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4),
        "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
        "weight_global_scale" if is_divisor else "weight_scale_2": torch.from_numpy(stored).reshape([1] * is_divisor),
        "input_global_scale" if is_divisor else "input_scale": torch.tensor(0.02),
    }
    return tensors, torch.from_numpy(restored)


def _words(codes: npt.NDArray[np.int64]) -> torch.Tensor:
    """Return eight neighbours of a row in an int32, the first in the lowest bits; 0 behind the row."""
    words = np.zeros((len(codes), -(-codes.shape[1] // 8)), np.int64)
    for column in range(codes.shape[1]):
        words[:, column // 8] |= codes[:, column] << column % 8 * 4
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def _scales(values: Floats, how: Layout, largest_code: float) -> tuple[torch.Tensor, Any]:
    """Return scales, and where each weight has its own."""
    rows, columns = (np.arange(size) // shared for size, shared in zip(values.shape, how.sharing, strict=True))
    largest = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
    index = np.ix_(rows, columns)
    np.maximum.at(largest, index, np.abs(values))
    return torch.from_numpy(largest / largest_code).to(how.dtype), index


def _codes(values: Floats, values_of: Floats) -> npt.NDArray[np.uint8]:
    """Return the nearest code of each value."""
    order = np.argsort(values_of, kind="stable")  # NaN is last
    order = order[: int(np.isfinite(values_of).sum())]
    ordered = values_of[order]
    borders = (ordered[1:] + ordered[:-1]) / 2
    return order[np.searchsorted(borders, values)].astype(np.uint8)
