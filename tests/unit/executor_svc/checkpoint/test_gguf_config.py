"""What is taken for keys that the oldest or the largest files of a family alone have, or lack."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as FileType

from executor_svc.checkpoint.gguf.config import build_config
from executor_svc.checkpoint.gguf.decoder_config import EMBEDDING
from executor_svc.checkpoint.gguf.header import GGUFTensor, read_header
from executor_svc.checkpoint.gguf.metadata import Metadata
from octavo_shared.errors import ModelLoadError
from tests.support.each_row import each_row
from tests.support.gguf_files import write_small_gguf

PATH = Path("m.gguf")
TENSORS = {EMBEDDING: GGUFTensor(EMBEDDING, (97, 96), FileType.F32, PATH, 0, 97 * 96 * 4)}
VALUES: dict[str, Any] = {
    "context_length": 64,
    "embedding_length": 96,
    "block_count": 2,
    "feed_forward_length": 100,
    "attention.head_count": 6,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}


def of_gemma(num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "block_count": num_layers,
        "embedding_length": hidden_size,
        "attention.head_count": num_heads,
        "attention.key_length": head_dim,
        "attention.sliding_window": 1024,
    }


@each_row(
    ("llama", {}, {"num_key_value_heads": 6, "head_dim": 16, "rope_parameters": DEFAULT_ROPE}),
    ("llama", {"attention.head_count_kv": [2, 2]}, {"num_key_value_heads": 2, "architectures": ["LlamaForCausalLM"]}),
    ("llama", {"rope.scale_linear": 4}, {"rope_parameters": {**DEFAULT_ROPE, "rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope.freq_base": 1_000_000}, {"rope_parameters": {**DEFAULT_ROPE, "rope_theta": 1e6}}),
    ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_parameters": DEFAULT_ROPE}),
    (
        "qwen3",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 0.5},
        {"rope_parameters": {**DEFAULT_ROPE, **YARN, "original_max_position_embeddings": 64, "attention_factor": 0.5}},
    ),
    ("llama", {"attention.sliding_window": 70}, {"sliding_window": 70, "architectures": ["MistralForCausalLM"]}),
    (
        "qwen3moe",
        {"feed_forward_length": None, "expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 50},
        {"intermediate_size": 50, "moe_intermediate_size": 50},
    ),
    (
        "gemma2",
        {},
        {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    ("gemma2", of_gemma(42, 3584, 16, 256), {"query_pre_attn_scalar": 256}),
    ("gemma2", of_gemma(46, 4608, 32, 128), {"query_pre_attn_scalar": 144}),
    ("gemma3", of_gemma(48, 3840, 16, 256), {"query_pre_attn_scalar": 256, "sliding_window_pattern": 6}),
    ("gemma3", of_gemma(62, 5376, 32, 128), {"query_pre_attn_scalar": 168, "final_logit_softcapping": None}),
)
def test_what_config_json_would_say(architecture: str, changes: dict[str, Any], expected: dict[str, object]) -> None:
    given = {f"{architecture}.{key}": value for key, value in {**VALUES, **changes}.items() if value is not None}

    config = build_config(Metadata(PATH, {"general.architecture": architecture, **given}), TENSORS)

    assert {key: config[key] for key in expected} == expected


OF_EXPERTS: dict[str, Any] = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 50,
    "expert_shared_count": 1,
    "rope.dimension_count": 16,
}
OF_DEEPSEEK: dict[str, Any] = {
    **OF_EXPERTS,
    "attention.kv_lora_rank": 30,
    "attention.key_length_mla": 40,
    "attention.value_length_mla": 20,
    "attention.key_length": 46,
    "attention.value_length": 30,
    "attention.head_count_kv": 1,
}
STRETCHED = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.0707}


@each_row(
    ("deepseek2", {}, {"architectures": ["DeepseekV2ForCausalLM"], "qk_nope_head_dim": 24, "q_lora_rank": None}),
    ("deepseek2", {"expert_gating_func": 2}, {"architectures": ["DeepseekV3ForCausalLM"], "routed_scaling_factor": 1}),
    ("deepseek2", {"expert_group_count": 4}, {"n_group": 4, "topk_method": "group_limited_greedy"}),
    ("deepseek2", {"nextn_predict_layers": 1}, {"num_hidden_layers": 1}),
    ("deepseek2", STRETCHED, "'attention_factor': 1.0, 'mscale_all_dim': 0.707}"),
    ("deepseek2", STRETCHED | {"rope.scaling.attn_factor": 0.5}, "attn_factor 0.5; it must be 1 beside a yarn_log"),
    ("deepseek2", {"expert_gating_func": 3}, "expert_gating_func 3; it must be 1 (softmax) or 2 (sigmoid)"),
    ("deepseek2", {"attention.key_length_mla": 16}, "key_length_mla 16; it must be above rope.dimension_count, 16"),
    ("deepseek2", {"attention.key_length": 40}, "deepseek2.attention.key_length 40; it must be 46, beside its other"),
    ("deepseek2", {"attention.head_count_kv": 6}, "deepseek2.attention.head_count_kv 6; it must be 1, beside its"),
    ("deepseek2", {"attention.key_length_mla": None}, "head_count_kv 1; it must be 6, beside its other sizes"),
    ("deepseek2", {"attention.temperature_scale": 0.1}, "temperature_scale 0.1, which is not supported"),
    ("glm4moe", {"attention.key_length": 16}, "'rotary_dim': 16"),
    ("glm4moe", {"expert_gating_func": 1}, "expert_gating_func 1; it must be 2 (sigmoid)"),
)
def test_experts_in_groups(architecture: str, changes: dict[str, Any], expected: dict[str, object] | str) -> None:
    sizes = VALUES | (OF_DEEPSEEK if architecture == "deepseek2" else OF_EXPERTS) | changes
    given = {f"{architecture}.{key}": value for key, value in sizes.items() if value is not None}
    try:
        config = build_config(Metadata(PATH, {"general.architecture": architecture, **given}), TENSORS)
        told = str(config["rope_parameters"])
    except ModelLoadError as error:
        config, told = {}, str(error)

    if isinstance(expected, str):
        assert expected in told
    else:
        assert {key: config[key] for key in expected} == expected


OF_GEMMA4: dict[str, Any] = {
    "block_count": 4,
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "attention.head_count_kv": [3, 2, 3, 2],
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, False, True, False],
    "attention.shared_kv_layers": 2,
    "feed_forward_length": [100, 100, 200, 200],
    "embedding_length_per_layer_input": 0,
}
FACTORS = {"rope_freqs.weight": GGUFTensor("rope_freqs.weight", (16,), FileType.F32, PATH, 0, 64)}


@each_row(
    ({}, None),
    ({"attention.sliding_window_pattern": [True, True]}, "it must be a flag for each layer, with both kinds"),
    ({"attention.head_count_kv": [3, 2, 2, 2]}, r"head_count_kv \[3, 2, 2, 2\]; it must be \[3, 2, 3, 2\], one"),
    ({"feed_forward_length": [100, 200, 200, 200]}, r"it must be \[100, 100, 200, 200\], one"),
    ({"feed_forward_length": [100]}, "it must be a number for each of 4 layers"),
    ({"rope.dimension_count_swa": 8}, "rope.dimension_count_swa 8; it must be the length of a key, 16"),
    ({"attention.head_count": None}, "m.gguf has no gemma4.attention.head_count"),
    ({"rope_freqs": None}, "the tensor rope_freqs.weight is missing from m.gguf"),
)
def test_layers_of_gemma_4_are_of_two_kinds(changes: dict[str, Any], refusal: str | None) -> None:
    given = {f"gemma4.{key}": value for key, value in {**VALUES, **OF_GEMMA4, **changes}.items() if value is not None}
    metadata = Metadata(PATH, {"general.architecture": "gemma4", **given})
    tensors = TENSORS | ({} if "rope_freqs" in changes else FACTORS)

    if refusal is not None:
        with pytest.raises(ModelLoadError, match=refusal):
            build_config(metadata, tensors)
        return
    config = build_config(metadata, tensors)
    assert (config["num_key_value_heads"], config["head_dim"], config["intermediate_size"]) == (3, 16, 100)
    assert config["per_layer_config"] == {"full_attention": {"head_dim": 32, "num_key_value_heads": 2}}
    assert (config["use_double_wide_mlp"], config["attention_k_eq_v"]) == (True, True)


@each_row(8, 32, 64, 4096)
def test_tensors_lie_where_the_alignment_of_the_file_has_them(alignment: int, *, tmp_path: Path) -> None:
    path = write_small_gguf(tmp_path / "m.gguf", FileType.F32, **{"general.alignment": alignment})

    [embedding, norm] = read_header(path).tensors.values()

    for tensor in (embedding, norm):
        assert (np.fromfile(path, np.float32, 256, offset=tensor.begin) == 1).all()
    assert norm.begin + norm.num_bytes <= path.stat().st_size
