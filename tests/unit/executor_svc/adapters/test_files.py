"""An adapter's folder is read, or refused with one sentence that names what is wrong."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.adapters.files import read_adapter
from octavo_shared.errors import ModelLoadError
from tests.support.adapters import save_adapter
from tests.support.each_row import each_row

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.10.mlp.up_proj"
SHAPES = {Q: (12, 8), UP: (20, 8)}
KEY = f"base_model.model.{Q}"


def edit_config(**fields: Any) -> Callable[[Path], object]:
    def edit(directory: Path) -> None:
        path = directory / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def edit_tensors(**tensors: torch.Tensor | None) -> Callable[[Path], object]:
    """Replace tensors of q by the ends of their names, or leave them out."""

    def edit(directory: Path) -> None:
        path = directory / "adapter_model.safetensors"
        named = {f"{KEY}.{end.replace('__', '.')}": tensor for end, tensor in tensors.items()}
        save_file({k: v for k, v in (load_file(path) | named).items() if v is not None}, path)

    return edit


def link_weights_out(path: Path) -> None:
    weights = path / "adapter_model.safetensors"
    weights.symlink_to(weights.rename(path.parent / "elsewhere.safetensors"))


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "not LoRA": (edit_config(peft_type="IA3"), "peft_type is IA3; only LORA is served"),
    "DoRA": (edit_config(use_dora=True), "sets use_dora"),
    "modules beside it": (edit_config(modules_to_save=["lm_head"]), "sets modules_to_save"),
    "bias": (edit_config(bias="all"), "bias is all"),
    "PiSSA": (edit_config(init_lora_weights="pissa_niter_4"), "changes the base too"),
    "LoftQ": (edit_config(init_lora_weights="loftq"), "changes the base too"),
    "no rank": (edit_config(r=None), "r is None"),
    "an alpha that is no number": (edit_config(lora_alpha=math.inf), "lora_alpha is inf"),
    "half a rank": (edit_config(r=4.5), "must be a whole number"),
    "an expression": (edit_config(rank_pattern={"(a+)+$": 4}), "which is no name of a module"),
    "a rank above the limit": (edit_config(rank_pattern={"q_proj": 33}), f"{Q} has rank 33; max_adapter_rank is 16"),
    "another rank than it says": (edit_config(r=3), r"has shape \[4, 8\]; the model and rank need \[3, 8\]"),
    "JSON in depth": (lambda path: (path / "adapter_config.json").write_text("[" * 10**5), "cannot be read as JSON"),
    "a long configuration": (
        lambda path: (path / "adapter_config.json").write_text(" " * 2**21),
        "is larger than 1048576 bytes",
    ),
    "no configuration": (lambda path: (path / "adapter_config.json").unlink(), "cannot be read as JSON"),
    "no weights": (lambda path: (path / "adapter_model.safetensors").unlink(), "only adapters in safetensors"),
    "weights that are a link": (link_weights_out, "outside the model directory"),
    "damaged weights": (
        lambda path: (path / "adapter_model.safetensors").write_bytes(b"\xff" * 100),
        "cannot be read as safetensors",
    ),
    "another model": (edit_tensors(lora_A__weight=torch.zeros(4, 9)), r"has shape \[4, 9\]"),
    "half a pair": (edit_tensors(lora_B__weight=None), "has one of the two tensors"),
    "NaN": (edit_tensors(lora_B__weight=torch.full((12, 4), math.nan)), "is not finite"),
    "integers": (edit_tensors(lora_B__weight=torch.ones(12, 4, dtype=torch.int32)), "has the number format I32"),
    "an embedding": (edit_tensors(lora_embedding_A=torch.ones(4, 8)), "embeddings of an adapter cannot be served"),
    "an unknown module": (edit_tensors(x__lora_A__weight=torch.ones(4, 8)), "q_proj.x, which this model does not have"),
}


def test_refused_with_a_sentence(tmp_path: Path) -> None:
    @each_row(REFUSALS)
    def check(name: str) -> None:
        spoil, message = REFUSALS[name]
        directory = save_adapter(tmp_path / name, SHAPES, rank=4)
        spoil(directory)

        with pytest.raises(ModelLoadError, match=message) as refusal:
            read_adapter(directory, SHAPES, max_rank=16)

        assert "\n" not in str(refusal.value)


def test_patterns_name_modules_by_the_end_of_their_names(tmp_path: Path) -> None:
    patterns = {"layers.1.mlp.up_proj": 1, "proj": 2, "mlp.up_proj": 32, "up_proj": 3, f"^{Q}": 64, "q_proj": 4}

    for is_stabilized, root in ((False, 4.0), (True, 2.0)):
        directory = save_adapter(tmp_path, SHAPES, rank=4, alpha_pattern=patterns, use_rslora=is_stabilized)
        pairs = read_adapter(directory, SHAPES, max_rank=4).pairs

        assert {name: pair.scale for name, pair in pairs.items()} == {Q: 64 / root, UP: 32 / root}


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    directory = save_adapter(tmp_path, SHAPES, rank=4, dtype=torch.bfloat16)
    digest = read_adapter(directory, SHAPES, max_rank=4).digest
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)

    save_file(dict(reversed(tensors.items())), path, metadata={"format": "pt"})
    same = read_adapter(directory, SHAPES, max_rank=4).digest
    edit_config(lora_alpha=17)(directory)
    other_scale = read_adapter(directory, SHAPES, max_rank=4).digest
    tensors[f"{KEY}.lora_A.weight"][3, 7] += 1
    save_file(tensors, path)
    other_value = read_adapter(directory, SHAPES, max_rank=4).digest

    assert digest == same
    assert len({digest, other_scale, other_value}) == 3
