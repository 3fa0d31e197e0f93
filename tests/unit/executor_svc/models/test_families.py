"""What a family does not read and would have to ignore is refused by name."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from executor_svc.attention.interface import AttentionLayer
from executor_svc.models.config import ExpertsConfig, MlpConfig
from executor_svc.models.families import parse_config
from executor_svc.models.families.common import alibi_slopes
from executor_svc.models.fields import MOST
from executor_svc.models.sharding import Shard
from octavo_shared.errors import ModelLoadError, UnsupportedModelError
from tests.support.each_row import each_row

SOURCE = Path("config.json")
ROOT = Path(__file__).parents[4]
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
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8, "n_routed_experts": 32}

REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("MarianMTModel", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings False"),
    (
        "T5ForConditionalGeneration",
        {"feed_forward_proj": "gated-tanh"},
        "feed_forward_proj 'gated-tanh'; supported are",
    ),
    ("BartForConditionalGeneration", {"tie_word_embeddings": False}, "tie_word_embeddings False"),
    (
        "BloomForCausalLM",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm",
    ),
    ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ("Gemma3ForCausalLM", {"layer_types": ["full_attention", "linear_attention"]}, "supported are full_attention and"),
    ("Gemma2ForCausalLM", {"layer_types": [[]]}, "supported are full_attention and"),
    ("Gemma4ForCausalLM", {"attention_bias": True}, "attention_bias True"),
    ("LlamaForCausalLM", {"sliding_window": 9}, "sliding_window 9"),
    ("MptForCausalLM", {"attn_config": {"clip_qkv": 6}}, "attn_config.clip_qkv 6"),
    ("MptForCausalLM", {"logit_scale": 0.5}, "logit_scale 0.5"),
    ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before False"),
    ("OPTForCausalLM", {"word_embed_proj_dim": 16}, "word_embed_proj_dim 16"),
    (
        "Phi3ForCausalLM",
        {"rope_scaling": {"type": "axial"}},
        "type axial; supported are default, linear, dynamic, llama3, yarn and longrope",
    ),
    (
        "Qwen3ForCausalLM",
        {"partial_rotary_factor": 0.5},
        "for 4 of the 8 dimensions of a head; Qwen3ForCausalLM rotates",
    ),
    (
        "Qwen3_5ForCausalLM",
        {"layer_types": [[], "full_attention"]},
        "supported are linear_attention and full_attention",
    ),
    ("Qwen3_5ForCausalLM", {"layer_types": ["linear_attention"] * 2}, "the latter at least once"),
    ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba"] * 2}, "the latter at least once"),
    (
        "GraniteMoeHybridForCausalLM",
        {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "time_step_limit": [0.1, 2.0]},
        r"time_step_limit \[0.1, 2.0\], which is not supported",
    ),
    (
        "GraniteMoeHybridForCausalLM",
        {"position_embedding_type": "alibi"},
        "position_embedding_type 'alibi'; supported are rope, nope and null",
    ),
    ("Qwen3NextForCausalLM", {"attn_output_gate": False, "num_experts": 4}, "attn_output_gate False"),
    (
        "NemotronHForCausalLM",
        {"layers_block_type": ["mamba", "window"]},
        r"\['mamba', 'window'\]; supported are linear",
    ),
    ("NemotronHForCausalLM", {"hybrid_override_pattern": "-M*"}, "'-M\\*'; supported are .* and not mlp or moe first"),
    ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-"}, "full_attention at least once"),
    ("NemotronHForCausalLM", {"layers_block_type": 3}, "layers_block_type 3; supported are"),
    ("NemotronHForCausalLM", {"moe_latent_size": 16}, "moe_latent_size 16, which is not supported"),
    ("NemotronHForCausalLM", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu', which is not supported"),
    ("GptOssForCausalLM", {"swiglu_limit": 5.0, "num_local_experts": 4, "num_experts_per_tok": 2}, "swiglu_limit 5.0"),
]

WRONG: list[tuple[str, dict[str, object], str]] = [
    ("BloomForCausalLM", {"n_layer": 10**9}, "n_layer 1000000000; at most 10000 are supported"),
    ("BloomForCausalLM", {"n_head": 10**9}, "n_head 1000000000; at most 10000 are supported"),
    ("MixtralForCausalLM", {"num_local_experts": 10**9}, "num_local_experts 1000000000; at most 10000 are supported"),
    ("UnknownForCausalLM", {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000; at most 10000 are supported"),
    ("Glm4MoeForCausalLM", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers 1000000000; at most 10000"),
    (
        "Gemma4ForCausalLM",
        {"per_layer_config": {"1": {"head_dim": 10**9}}},
        "per_layer_config.1.head_dim 1000000000; at most 10000000 are supported",
    ),
    ("MixtralForCausalLM", {"num_experts_per_tok": 5}, "selects 5 of 4 experts"),
    (
        "Qwen3MoeForCausalLM",
        {"mlp_only_layers": "all", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        "mlp_only_layers 'all'; it must be a list of layers",
    ),
    ("Qwen3_5ForCausalLM", {"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
    (
        "Qwen3_5ForCausalLM",
        {"linear_num_value_heads": 6, "linear_num_key_heads": 4},
        "6 value heads in a delta net, not",
    ),
    (
        "GraniteMoeHybridForCausalLM",
        {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "mamba_n_heads": 6, "mamba_n_groups": 4},
        "6 heads in a Mamba-2 layer, not a multiple of 4 groups",
    ),
    (
        "NemotronHForCausalLM",
        {"hybrid_override_pattern": "M*", "mamba_num_heads": 6},
        "6 heads in a Mamba-2 layer, not a",
    ),
    ("Lfm2ForCausalLM", {"full_attn_idxs": 1}, "full_attn_idxs 1; it must be a list of layers"),
    (
        "T5ForConditionalGeneration",
        {"relative_attention_num_buckets": 30},
        "relative_attention_num_buckets 30 and relative_attention_max_distance 128; there must be a multiple of 4",
    ),
    ("T5ForConditionalGeneration", {"relative_attention_max_distance": 10**9}, "1000000000; at most 10000 are"),
    ("MptForCausalLM", {"attn_config": 3}, "attn_config 3; it must be an object"),
    ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
    (
        "Gemma4ForCausalLM",
        {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 1},
        "num_kv_shared_layers 1, which leaves no layer without a window whose keys and values others could read",
    ),
    (
        "Gemma4ForCausalLM",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
        "selects 5 of 4 experts",
    ),
    ("Gemma4ForCausalLM", {"num_kv_shared_layers": 3}, "num_kv_shared_layers 3, which leaves no layer with"),
    (
        "DeepseekV3ForCausalLM",
        {**LATENT, "n_routed_experts": 12},
        "n_group 8 and topk_group 4, but chooses 2 of 12 experts",
    ),
    ("DeepseekV3ForCausalLM", {**LATENT, "qk_rope_head_dim": 5}, "qk_rope_head_dim 5; it must be even"),
    (
        "DeepseekV3ForCausalLM",
        {**LATENT, "rope_scaling": {"type": "yarn", "factor": 4, "mscale_all_dim": 1e300}},
        "mscale_all_dim 1e.300; at most 1000 is supported",
    ),
    (
        "Glm4MoeLiteForCausalLM",
        {**LATENT, "mlp_layer_types": ["dense"]},
        "mlp_layer_types .'dense'.; supported are 2, first dense",
    ),
    ("MistralForCausalLM", {"sliding_window": 10**15}, "sliding_window 1000000000000000; at most 100000000 are"),
    ("Qwen2ForCausalLM", {"max_window_layers": -1}, "max_window_layers -1; it must be a whole number of at least 0"),
    ("Qwen2ForCausalLM", {"use_sliding_window": "yes"}, "use_sliding_window 'yes'; it must be true or false"),
]


# What a family reads as a whole number and makes nothing of: every so many layers, a window, which layer, an id.
NO_SIZES = {
    *("decoder_sparse_step", "first_k_dense_replace", "full_attention_interval", "no_rope_layer_interval"),
    *("num_dense_layers", "num_kv_shared_layers", "sliding_window_pattern"),
    *("_sliding_window_pattern", "pad_token_id"),
}


# Families whose configuration classes of transformers can be made with these settings alone.
SILENT: Mapping[str, Mapping[str, object]] = {
    "CwmForCausalLM": {},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "DeepseekV3ForCausalLM": {},
    "Dots1ForCausalLM": {"n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6},
    "Ernie4_5ForCausalLM": {},
    "GlmForCausalLM": {},
    "Glm4ForCausalLM": {},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Glm4MoeLiteForCausalLM": {},
    "MinistralForCausalLM": {},
    "Ministral3ForCausalLM": {},
    "NemotronForCausalLM": {},
    "StableLmForCausalLM": {},
    "Starcoder2ForCausalLM": {},
}
# Tensors have other shapes or names without them, so that a checkpoint is refused.
IN_TENSORS = {"q_lora_rank", "num_key_value_heads", "head_dim", "num_nextn_predict_layers"}


@each_row(*SILENT.items())
def test_what_config_json_leaves_out_is_as_in_transformers(architecture: str, settings: Mapping[str, object]) -> None:
    """Of each field alone: it is refused, or the model is the same."""
    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**settings)
    values = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [architecture]}
    whole = parse_config(values, SOURCE)
    different: list[str] = []
    for name in sorted(values.keys() - IN_TENSORS - settings.keys()):
        rest = {other: value for other, value in values.items() if other != name}
        try:
            if parse_config(rest, SOURCE) != whole:
                different.append(name)
        except ModelLoadError:
            continue
    assert not different


def test_queries_of_ministral_3_grow_by_either_name_of_its_rotary_embedding() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
    for name in ("rope_parameters", "rope_scaling"):
        values = {
            "architectures": ["Ministral3ForCausalLM"],
            **SIZES,
            "num_key_value_heads": 2,
            name: {**rope, "llama_4_scaling_beta": 0.1},
        }
        read = parse_config(values, SOURCE).layers[0].rope
        assert read is not None
        assert (read.query_growth, read.query_interval) == (0.1, 16384)


def test_each_size_that_is_read_has_a_limit() -> None:
    sources = (ROOT / "executor_svc/models").rglob("*.py")
    read = {name for source in sources for name in re.findall(r'integer\(\s*"(\w+)"', source.read_text("utf-8"))}
    assert len(read) > 40
    assert read - NO_SIZES <= MOST.keys()


# What config.json says, and the name in the sentence.
QUANTIZED: list[tuple[dict[str, object], str]] = [
    ({"quantization_config": {"quant_method": "quip", "bits": 4}}, "quip"),
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
    ({"quantization_config": {"bits": 4}}, "a method that its quantization_config does not name"),
    (
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": 1},
                "kv_cache_scheme": {},
            }
        },
        "compressed-tensors",
    ),
    ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
]


@each_row(*((*row, architecture) for row in QUANTIZED for architecture in ["LlamaForCausalLM", "OlmoForCausalLM"]))
def test_quantized_weights_are_refused_once_and_by_name(
    settings: dict[str, object], method: str, architecture: str
) -> None:
    with pytest.raises(ModelLoadError) as refused:
        parse_config({"architectures": [architecture], **SIZES, **settings}, Path("tiny/config.json"))
    assert str(refused.value) == (
        f"the weights of tiny are quantized with {method}, which Octavo does not read; use the unquantized checkpoint, "
        "with --quantization int8 or int4 if memory is short"
    )
    assert not isinstance(refused.value, UnsupportedModelError)


def test_codes_are_for_families_with_code_of_our_own() -> None:
    settings = {**SIZES, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert parse_config({"architectures": ["LlamaForCausalLM"], **settings}, SOURCE).vocab_size == 97
    with pytest.raises(ModelLoadError, match=r"tiny are F8_E4M3, which needs Octavo's .*; but .* OlmoForCausalLM"):
        parse_config({"architectures": ["OlmoForCausalLM"], **settings}, Path("tiny/config.json"))


def test_weights_of_modelopt_are_refused_though_config_json_is_silent(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(ModelLoadError, match=r"are quantized with modelopt \(FP8\), which Octavo does not read"):
        parse_config({"architectures": ["LlamaForCausalLM"], **SIZES}, tmp_path / "config.json")


# llm-compressor's settings for scales of the cache alone.
CACHE_ONLY = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}


@each_row({"quantization_config": None}, {"quantization_config": {}}, {"quantization_config": CACHE_ONLY})
def test_an_empty_quantization_is_none(settings: dict[str, object]) -> None:
    assert parse_config({"architectures": ["LlamaForCausalLM"], **SIZES, **settings}, SOURCE).vocab_size == 97


# Whether a window of 7 is on, the layers without it, the window of each layer.
QWEN_WINDOWS = [(True, 0, (7, 7)), (True, 1, (None, 7)), (True, 2, (None, None)), (False, 0, (None, None))]


@each_row(*((*row, architecture) for row in QWEN_WINDOWS for architecture in ["Qwen2ForCausalLM", "Qwen3ForCausalLM"]))
def test_the_first_layers_of_qwen_have_no_window(
    is_on: bool, num_whole: int, windows: tuple[int | None, ...], architecture: str
) -> None:
    settings = {"use_sliding_window": is_on, "sliding_window": 7, "max_window_layers": num_whole}
    config = parse_config({"architectures": [architecture], **SIZES, **settings}, SOURCE)
    assert tuple(layer.attention.window_tokens for layer in config.layers) == windows


@each_row(
    # As of the first Llama: heads share nothing.
    ({}, (6, 16, 10_000.0, 2048)),
    ({"num_key_value_heads": 2, "head_dim": 10, "rope_theta": 5e5, "max_position_embeddings": 70}, (2, 10, 5e5, 70)),
)
def test_what_is_taken_for_what_the_oldest_files_lack(
    settings: dict[str, object], expected: tuple[object, ...]
) -> None:
    sizes = {**SIZES, "hidden_size": 96, "num_attention_heads": 6}
    config = parse_config({"architectures": ["LlamaForCausalLM"], **sizes, **settings}, SOURCE)
    rope = config.layers[0].rope
    assert rope is not None
    found = (config.layers[0].num_kv_heads, config.layers[0].head_dim, rope.theta, config.max_position_embeddings)
    assert found == expected
    assert not config.tie_word_embeddings


def test_a_pattern_of_letters_says_what_nemotron_h_has_in_each_layer() -> None:
    settings = {"moe_shared_expert_intermediate_size": 8, "n_routed_experts": 4, "hybrid_override_pattern": "M*-E"}
    layers = parse_config({"architectures": ["NemotronHForCausalLM"], **SIZES, **settings}, SOURCE).layers
    assert [(layer.attends, layer.state is None, type(layer.mlp)) for layer in layers] == [
        (False, False, type(None)),
        (True, True, type(None)),
        (False, True, MlpConfig),
        (False, True, ExpertsConfig),
    ]


def test_slopes_of_heads_that_are_no_power_of_two_lie_between_those_of_the_nearest_one() -> None:
    assert alibi_slopes(7) == tuple(2.0**-power for power in (2, 4, 6, 8, 1, 3, 5))


def test_a_rank_has_the_slopes_of_its_heads() -> None:
    config = parse_config({"architectures": ["LlamaForCausalLM"], **SIZES}, SOURCE)
    attention = AttentionLayer(0.25, alibi_slopes=(0.4, 0.3, 0.2, 0.1))
    own = Shard.of(config, 1, 2).attention_layer(replace(config.layers[0], attention=attention))
    assert own.alibi_slopes == (0.2, 0.1)


@each_row(*REFUSED)
def test_settings_that_are_left_to_others(architecture: str, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        parse_config({"architectures": [architecture], **SIZES, **settings}, SOURCE)


@each_row(*WRONG)
def test_settings_that_nothing_can_run(architecture: str, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason) as caught:
        parse_config({"architectures": [architecture], **SIZES, **settings}, SOURCE)
    assert not isinstance(caught.value, UnsupportedModelError)
