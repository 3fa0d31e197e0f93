"""LoRA adapters of models, as peft writes them, with random numbers; and models with an adapter merged into them."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def save_adapter(
    directory: Path,
    shapes: Mapping[str, Sequence[int]],
    *,
    rank: int = 8,
    seed: int = 0,
    size: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write an adapter of these modules, whose weights have these shapes, [num_outputs, num_inputs]."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (num_outputs, num_inputs) in shapes.items():
        for half, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            values = torch.randn(shape, generator=generator) * size
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values.to(dtype)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "bias": "none"} | config
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


@torch.no_grad()
def merged(model: Any, pairs: Mapping[str, Any]) -> Any:
    """Return a copy of a model of transformers with W + scale * B @ A in the place of W."""
    model = copy.deepcopy(model)
    for name, pair in pairs.items():
        model.get_submodule(name).weight.add_(pair.scale * pair.b.float() @ pair.a.float())
    return model
