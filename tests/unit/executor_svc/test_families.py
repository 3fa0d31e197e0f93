"""What a family does not read and would have to ignore is refused by name."""

from pathlib import Path

import pytest

from executor_svc.errors import ModelLoadError, UnsupportedModelError
from executor_svc.models import FAMILIES, parse_config

SOURCE = Path("config.json")
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_layer": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}

REFUSED: list[tuple[str, dict[str, object], str]] = [
    (
        "BloomForCausalLM",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm",
    ),
    ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ("Gemma3ForCausalLM", {"layer_types": ["full_attention", "linear_attention"]}, "supported are full_attention and"),
    ("LlamaForCausalLM", {"sliding_window": 9}, "sliding_window 9"),
    ("MptForCausalLM", {"attn_config": {"clip_qkv": 6}}, "attn_config.clip_qkv 6"),
    ("MptForCausalLM", {"logit_scale": 0.5}, "logit_scale 0.5"),
    ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before False"),
    ("OPTForCausalLM", {"word_embed_proj_dim": 16}, "word_embed_proj_dim 16"),
    ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope"}}, "supported types are default, linear and llama3"),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1]}, "mlp_only_layers"),
    ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
]

WRONG: list[tuple[str, dict[str, object], str]] = [
    ("MixtralForCausalLM", {"num_experts_per_tok": 5}, "chooses 5 experts of 4"),
    ("MptForCausalLM", {"attn_config": 3}, "attn_config 3; it must be an object"),
    ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
    ("Qwen2ForCausalLM", {"use_sliding_window": "yes"}, "use_sliding_window 'yes'; it must be true or false"),
]


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("quantization", [{"bits": 4}])
def test_no_family_runs_quantized_weights(architecture: str, quantization: object) -> None:
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        parse_config({"architectures": [architecture], **SIZES, "quantization_config": quantization}, SOURCE)


@pytest.mark.parametrize(("architecture", "settings", "reason"), REFUSED)
def test_settings_that_are_left_to_others(architecture: str, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        parse_config({"architectures": [architecture], **SIZES, **settings}, SOURCE)


@pytest.mark.parametrize(("architecture", "settings", "reason"), WRONG)
def test_settings_that_nothing_can_run(architecture: str, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason) as caught:
        parse_config({"architectures": [architecture], **SIZES, **settings}, SOURCE)
    assert not isinstance(caught.value, UnsupportedModelError)
