"""The text model of a checkpoint with a vision tower equals transformers' whole model on texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from executor_svc.checkpoint.model import open_checkpoint
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.text_tower import text_config
from executor_svc.config import ExecutorConfig
from executor_svc.models.families import parse_config
from executor_svc.models.selection import choose_model
from executor_svc.worker.loading import load_worker
from octavo_shared.errors import ModelLoadError
from tests.numerics.architectures import SIZES, compare_with_transformers, save_tiny_architecture
from tests.numerics.family_architectures import DELTA_NETS, FAMILY_ARCHITECTURES
from tests.numerics.ties import TIE

TEXT = dict(SIZES)
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "patch_size": 4}
CLIP = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
COMBINED: Mapping[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {"text_config": TEXT | {"sliding_window": 9}, "vision_config": CLIP},
    "Gemma4ForConditionalGeneration": {
        "text_config": {**TEXT, **FAMILY_ARCHITECTURES["Gemma4ForCausalLM"]},
        "vision_config": CLIP | {"head_dim": 8, "num_key_value_heads": 2, "patch_size": 4},
    },
    "Mistral3ForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": CLIP | {"model_type": "pixtral", "head_dim": 8, "patch_size": 4},
    },
    "Qwen2VLForConditionalGeneration": {
        "text_config": TEXT | {"rope_parameters": MROPE},
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": TEXT | {"rope_parameters": MROPE},
        "vision_config": QWEN | {"out_hidden_size": 32, "fullatt_block_indexes": [0]},
    },
    "Qwen3VLForConditionalGeneration": {
        "text_config": TEXT | {"rope_parameters": MROPE},
        "vision_config": QWEN | {"out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    },
    **{
        name: {
            "text_config": TEXT | DELTA_NETS | {"rope_parameters": MROPE | {"partial_rotary_factor": 0.5}},
            "vision_config": QWEN | {"out_hidden_size": 32},
        }
        for name in ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
    },
}
# What stands in front of the text model's names: Gemma's and Mistral's, those of transformers 5, and Qwen2-VL's.
FRONTS = ("language_model.model.", "model.language_model.", "model.")


def called(name: str, front: str) -> str:
    """Return another name for a tensor of the text model; others keep theirs."""
    if name.endswith("lm_head.weight"):
        return ("language_model." if front == FRONTS[0] else "") + "lm_head.weight"
    found = next((each for each in FRONTS if name.startswith(each)), None)
    is_text = found is not None and not any(part in name for part in ("vis", "projector"))
    return front + name.removeprefix(found or "") if is_text else name


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("name", COMBINED)
def test_logits_and_greedy_tokens_equal_the_whole_model(name: str, front: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    reference = model_class(model_class.config_class(**COMBINED[name], tie_word_embeddings=False)).eval()
    reference.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    renamed = {called(each, front): values for each, values in load_file(path).items()}
    assert any(each.startswith(front) for each in renamed)
    assert any("vis" in each for each in renamed)
    save_file(renamed, path, metadata={"format": "pt"})
    config = ExecutorConfig.model_validate({"model": str(tmp_path), "dtype": "float32", "num_device_blocks": 64})

    chosen = choose_model(ModelDirectory(tmp_path), config, torch.device("cpu"))
    chosen.load(open_checkpoint(ModelDirectory(tmp_path)))
    comparison = compare_with_transformers(chosen.model, chosen.attention, reference)

    assert chosen.path.dense != "transformers"
    assert comparison.logit_difference < 1e-5
    assert comparison.greedy_distance < TIE


def test_what_is_left_out_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name = "Gemma3ForConditionalGeneration"
    model_class = getattr(transformers, name)
    model_class(model_class.config_class(**COMBINED[name])).save_pretrained(tmp_path)
    load_worker(ExecutorConfig.model_validate({"model": str(tmp_path), "num_device_blocks": 64}))

    assert f"notice: {name} is served for text alone: its vision tower is left out" in capfd.readouterr().out


def test_what_a_published_config_of_gemma_leaves_out_is_as_in_transformers() -> None:
    text = {  # of google/gemma-3-4b-it
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "model_type": "gemma3_text",
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    published: dict[str, object] = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {},
    }
    full = transformers.Gemma3TextConfig(**text).to_dict() | {"architectures": ["Gemma3ForCausalLM"]}

    assert parse_config(text_config(published), Path("config.json")) == parse_config(full, Path("config.json"))


def test_keys_and_values_beside_a_cache_that_is_read_are_left_out(tmp_path: Path) -> None:
    """Published checkpoints of Gemma 4 have them, and nobody reads them."""
    save_tiny_architecture(tmp_path, "Gemma4ForCausalLM", FAMILY_ARCHITECTURES["Gemma4ForCausalLM"])
    file = tmp_path / "model.safetensors"
    unread = {f"model.layers.5.self_attn.{part}.weight": torch.ones(16) for part in ("k_proj", "v_proj", "k_norm")}
    save_file(load_file(file) | unread, file, metadata={"format": "pt"})

    load_worker(ExecutorConfig.model_validate({"model": str(tmp_path), "num_device_blocks": 8}))
    save_file(load_file(file) | {"model.layers.3.self_attn.x.weight": torch.ones(16)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"layers.3.self_attn.x.weight, which the model does not have"):
        load_worker(ExecutorConfig.model_validate({"model": str(tmp_path), "num_device_blocks": 8}))
