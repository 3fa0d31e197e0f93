"""Models that paged attention does not fit are refused, each in one sentence."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.masking_utils import create_causal_mask
from transformers.models.olmo import modeling_olmo

from octavo_shared.errors import ModelLoadError
from tests.numerics.architectures import load_architecture, save_tiny_architecture

CANNOT = "cannot run on paged attention: "

REFUSED_CONFIGS: dict[str, tuple[dict[str, object], str]] = {
    "no architecture": ({}, "has no architecture"),
    "unknown": (
        {"architectures": ["FooForCausalLM"]},
        rf"FooForCausalLM {CANNOT}transformers \S+ does not know it",
    ),
    "remote code": (
        {"architectures": ["FooForCausalLM"], "auto_map": {"AutoModelForCausalLM": "foo.FooForCausalLM"}},
        rf"FooForCausalLM {CANNOT}its code is part of the model repository \(auto_map\), and such code is never run",
    ),
    "not causal": (
        {"architectures": ["UMT5ForConditionalGeneration"]},
        f"UMT5ForConditionalGeneration {CANNOT}it is not a causal language model",
    ),
    "fixed attention": (
        {"architectures": ["FalconForCausalLM"]},
        f"FalconForCausalLM {CANNOT}its code in transformers does not support a custom attention implementation",
    ),
    "wrong type": (
        {"architectures": ["OlmoForCausalLM"], "num_attention_heads": "many"},
        "config.json is not a configuration of OlmoForCausalLM: .*num_attention_heads",
    ),
    "several models": (
        {"architectures": ["FuyuForCausalLM"]},
        f"FuyuForCausalLM {CANNOT}it combines several models, not just a language model",
    ),
    "longrope": (
        {
            "architectures": ["PhimoeForCausalLM"],
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0],
                "long_factor": [2.0],
                "short_mscale": 1.0,
                "long_mscale": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
        rf"PhimoeForCausalLM {CANNOT}its rotary frequencies depend on the other sequences of a batch \(longrope\)",
    ),
    "chunked attention": (
        {"architectures": ["Llama4ForCausalLM"]},
        f"Llama4ForCausalLM {CANNOT}it has layers of type chunked_attention",
    ),
    "no maximum sequence length": (
        {"architectures": ["WhisperForCausalLM"]},
        rf"WhisperForCausalLM {CANNOT}its configuration has no maximum sequence length \(max_position_embeddings\)",
    ),
    "several models at once": (
        {"architectures": ["BltForCausalLM"]},
        f"BltForCausalLM {CANNOT}it combines several models, not just a language model",
    ),
}


@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_a_configuration_that_cannot_work_is_refused_before_weights_are_read(case: str, tmp_path: Path) -> None:
    config, sentence = REFUSED_CONFIGS[case]
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelLoadError, match=sentence):
        load_architecture(tmp_path)


# By the type of the layers that keep the state; the class that has none says it of itself.
STATEFUL = {
    "BailingHybridForCausalLM": "linear_attention",
    "BambaForCausalLM": "linear_attention",
    "FalconH1ForCausalLM": "hybrid",
    "FalconMambaForCausalLM": "linear_attention",
    "InklingForCausalLM": "hybrid and hybrid_sliding",
    "Inkling2ForCausalLM": "hybrid and hybrid_sliding",
    "JambaForCausalLM": "linear_attention",
    "KimiLinearForCausalLM": "linear_attention",
    "MambaForCausalLM": "linear_attention",
    "Mamba2ForCausalLM": "linear_attention",
    "MiniMaxForCausalLM": "linear_attention",
    "OlmoHybridForCausalLM": "linear_attention",
    "Qwen4ExpForCausalLM": "linear_attention",
    "RecurrentGemmaForCausalLM": "linear_attention",
    "xLSTMForCausalLM": None,
    "ZambaForCausalLM": "hybrid and linear_attention",
    "Zamba2ForCausalLM": "hybrid and linear_attention",
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_recurrent_state_is_named_before_weights_are_read(name: str, tmp_path: Path) -> None:
    kinds = STATEFUL[name]
    getattr(transformers, name).config_class().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [name]}))

    with pytest.raises(ModelLoadError) as refused:
        load_architecture(tmp_path)

    where = f" (layers of type {kinds})" if kinds else ""
    assert str(refused.value) == f"{name} {CANNOT}it keeps a recurrent state besides the KV cache{where}"


REFUSED_MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "attention sinks": ("GptOssForCausalLM", {"swiglu_limit": 5.0}, "layer 0 passes s_aux to attention"),
    "latent attention": (
        "MiniCPM3ForCausalLM",
        {"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
        "its keys have the size 16 a head and its values 8",
    ),
    "different heads": (
        "LagunaForCausalLM",
        {"num_attention_heads_per_layer": [2, 4]},
        "layers 0 and 1 differ in the number or size of their heads",
    ),
    "bidirectional layers": ("BertLMHeadModel", {}, r"layer 0 attends to later tokens \(it is not causal\)"),
    "bidirectional mask": (
        "Gemma3ForCausalLM",
        {"use_bidirectional_attention": True},
        r"layer 0 attends to later tokens \(it is not causal\)",
    ),
    "layers that run twice": ("DiffLlamaForCausalLM", {}, "its layers do not call attention once each, in order"),
    "mask as a tensor": (
        "DogeForCausalLM",
        {},
        ("its code uses the attention mask, which paged attention does not create"),
    ),
    "wrapped decoder": (
        "BartForCausalLM",
        {"decoder_layers": 2, "d_model": 32, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
        "its logits differ from .*; its code computes positions itself instead of using those given",
    ),
    "several tokens a place": (
        "MusicgenForCausalLM",
        {"num_codebooks": 2},
        r"its code does not run on a sequence of token ids \(RuntimeError: ",
    ),
    "part of another model": ("MllamaForCausalLM", {}, "its code has no separable part before the head"),
}


@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_a_model_whose_layers_want_something_else_is_refused(case: str, tmp_path: Path) -> None:
    name, settings, reason = REFUSED_MODELS[case]
    save_tiny_architecture(tmp_path, name, settings)

    with pytest.raises(ModelLoadError, match=f"^{name} {CANNOT}{reason}"):
        load_architecture(tmp_path)


def calling_with(**changes: object) -> Callable[[Any], Any]:
    """Return what wraps a forward method, and hands `changes` over with its arguments."""

    def wrap(forward: Any) -> Any:
        return lambda self, *args, **kwargs: forward(self, *args, **{**kwargs, **changes})

    return wrap


def without_attention_in_layer_1(forward: Any) -> Any:
    def changed(self: Any, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> Any:
        if self.layer_idx == 1:
            return hidden_states, None
        return forward(self, hidden_states, *args, **kwargs)

    return changed


def adding_the_token_before(forward: Any) -> Any:
    """State of a layer outside the cache: a chunk does not know the token before it."""

    def changed(self: Any, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> Any:
        return forward(self, hidden_states + hidden_states.roll(1, 1), *args, **kwargs)

    return changed


CHANGED_MODELS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "other window": (
        "OlmoAttention",
        calling_with(sliding_window=5),
        "layer 0 passes a window of 5 tokens to attention, but a mask of None",
    ),
    "no mask": (
        "OlmoAttention",
        calling_with(attention_mask=None),
        "layer 0 has a custom mask, or none",
    ),
    "a layer that does not attend": (
        "OlmoAttention",
        without_attention_in_layer_1,
        "only 1 of its 2 layers call the attention interface, and the state of the others is not in the cache",
    ),
    "positions that are counted": (
        "OlmoModel",
        calling_with(position_ids=None),
        (
            r"its logits differ from those of its own attention by [\d.]+e-0\d of their length, above 3.5e-04; its "
            r"code computes positions itself instead of using those given$"
        ),
    ),
    "state beside the cache": (
        "OlmoAttention",
        adding_the_token_before,
        r"its logits differ from those of its own attention by [\d.]+e-0\d of their length, above 3.5e-04$",
    ),
}


@pytest.mark.parametrize("case", CHANGED_MODELS)
def test_code_that_paged_attention_does_not_fit_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_name, change, reason = CHANGED_MODELS[case]
    save_tiny_architecture(tmp_path, "OlmoForCausalLM", {})
    changed_class = getattr(modeling_olmo, class_name)
    monkeypatch.setattr(changed_class, "forward", change(changed_class.forward))

    with pytest.raises(ModelLoadError, match=f"^OlmoForCausalLM {CANNOT}{reason}"):
        load_architecture(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"or_mask_function": lambda batch, head, query, key: key == query + 1},
        # Chunks that are longer than what a model is probed with.
        {"and_mask_function": lambda batch, head, query, key: key // 64 == query // 64},
    ],
    ids=["next token", "chunks"],
)
def test_a_mask_that_is_no_causal_window_is_refused(
    changes: dict[str, Callable[..., torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_architecture(tmp_path, "OlmoForCausalLM", {})
    monkeypatch.setattr(modeling_olmo, "create_causal_mask", partial(create_causal_mask, **changes))

    with pytest.raises(ModelLoadError, match="the mask of layer 0 is neither causal nor a causal sliding window"):
        load_architecture(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "up_proj.weight is missing"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "extra does not belong to this model"),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 4)}),
            r"up_proj.weight has shape \[3, 4\], not \[48, 32\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], object], sentence: str, tmp_path: Path
) -> None:
    save_tiny_architecture(tmp_path, "OlmoForCausalLM", {})
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelLoadError, match=f"does not contain a OlmoForCausalLM: the tensor .*{sentence}"):
        load_architecture(tmp_path)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"damaged")])
def test_files_that_cannot_be_read_are_refused(damage: Callable[[Path], object], tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path, "OlmoForCausalLM", {})
    damage(tmp_path / "model.safetensors")

    with pytest.raises(ModelLoadError, match=f"{tmp_path} cannot be loaded as OlmoForCausalLM: "):
        load_architecture(tmp_path)
