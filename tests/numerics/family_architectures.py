"""Tiny random models of the families (`executor_svc/models/families/`); settings as in `architectures.py`."""

from collections.abc import Mapping
from typing import Any

from tests.numerics.tiny_models import LLAMA3_ROPE, VOCAB_SIZE

# No multiple of the width of vectors, of what threads share or of groups of weights; three query heads for a KV head.
# Four ranks can share it.
ODD_SIZES = {
    "hidden_size": 45,
    "intermediate_size": 52,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 10,
}

# Four ranks can share them; they have as many outputs as attention.
DELTA_NETS = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 4,
}
ODD_DELTA_NETS = {**DELTA_NETS, "linear_num_value_heads": 12, "linear_key_head_dim": 7, "linear_value_head_dim": 10}

# Four ranks can share the channels.
SHORT_CONVS = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "hidden_size": 40}

GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.5,
}
# Four ranks can share the heads; they norm what the layer returns together.
MAMBA2 = {
    **GRANITE,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 10,
    "mamba_d_state": 11,
    "hidden_size": 40,
    "shared_intermediate_size": 20,
}

# Each layer is one of Mamba-2, attention, an MLP and experts; two MLPs lie side by side. Four ranks can share the heads
# and the groups. transformers' code raises shorter times to time_step_min, NVIDIA's does not.
NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "full_attention", "mlp", "mlp", "linear_attention", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 10,
    "ssm_state_size": 11,
    "n_groups": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 5,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 2.5,
    "time_step_min": 1e-30,
}

# Four ranks can share the heads; no size is that of another, or of a vector.
LATENT = {
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "hidden_size": 48,
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
# Experts are chosen in some of equal groups.
GROUPS = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
MSCALES = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}

# By the name in config.json. Windows are shorter than the prompts.
FAMILY_ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    # No power of two heads: ALiBi has slopes between those of the nearest one.
    "BloomForCausalLM": {"hidden_size": 48, "n_head": 12},
    # Queries of the hidden state, or of a vector; yarn; pairs that are rotated half of the numbers apart.
    "DeepseekV2ForCausalLM": {
        **LATENT,
        **GROUPS,
        "topk_method": "group_limited_greedy",
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
    },
    "DeepseekV3ForCausalLM": {
        **LATENT,
        **GROUPS,
        "q_lora_rank": 13,
        "first_k_dense_replace": 1,
        "rope_parameters": MSCALES,
        "rope_interleave": False,
    },
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {"sliding_window": 9, "query_pre_attn_scalar": 20},
    "Gemma3ForCausalLM": {"sliding_window": 9, "query_pre_attn_scalar": 20, "num_hidden_layers": 7},
    # Windows among layers with larger heads, of which the last ones read what earlier ones have written.
    "Gemma4ForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "sliding_window": 9,
        "head_dim": 10,
        "global_head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size_per_layer_input": 12,
        "use_double_wide_mlp": True,
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "final_logit_softcapping": 20.0,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "Glm4MoeLiteForCausalLM": {**LATENT, "q_lora_rank": 13, "mlp_layer_types": ["dense", "sparse"]},
    "GptOssForCausalLM": {"sliding_window": 9, "num_local_experts": 5, "num_experts_per_tok": 2},
    "GraniteMoeHybridForCausalLM": MAMBA2,
    "Lfm2ForCausalLM": SHORT_CONVS,
    "Lfm2MoeForCausalLM": {**SHORT_CONVS, "num_dense_layers": 1, "num_experts": 5, "routed_scaling_factor": 1.5},
    "LlamaForCausalLM": {"rope_parameters": LLAMA3_ROPE},
    # Queries grow within the prompts.
    "Ministral3ForCausalLM": {"rope_parameters": {**MSCALES, "llama_4_scaling_beta": 0.5}},
    "MistralForCausalLM": {"sliding_window": 9, **ODD_SIZES},
    "MixtralForCausalLM": {},
    "MptForCausalLM": {"hidden_size": 48, "num_attention_heads": 12, "attn_config": {"softmax_scale": 0.3}},
    "NemotronHForCausalLM": NEMOTRON_H,
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Phi3ForCausalLM": {"sliding_window": 11},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {"norm_topk_prob": True},
    "Qwen3NextForCausalLM": {**DELTA_NETS, "mlp_only_layers": [1]},
    "Qwen3_5ForCausalLM": {**ODD_DELTA_NETS, **ODD_SIZES},
    "Qwen3_5MoeForCausalLM": DELTA_NETS,
}

# Some of their layers have a recurrent state.
WITH_STATES = (
    "GraniteMoeHybridForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
