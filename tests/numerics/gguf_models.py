"""Tiny models of the families that GGUF files have, saved with matrices that a type of such files has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as FileType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.family_architectures import (
    DELTA_NETS,
    FAMILY_ARCHITECTURES,
    GRANITE,
    GROUPS,
    LATENT,
    MAMBA2,
    MSCALES,
    NEMOTRON_H,
    SHORT_CONVS,
)
from tests.support.gguf_files import of_type

# Rows of blocks are multiples of 32.
SIZES = {"intermediate_size": 64}
HYBRID = {**DELTA_NETS, "head_dim": 16}
# Of a hidden size that is whole blocks.
CONVS = {**SHORT_CONVS, "hidden_size": 64}
# A latent cache whose maps are whole blocks; published models have one mscale for everything.
LATENT_BLOCKS = {
    **LATENT,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
}
EXPERTS_OF_HYBRID = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "ArceeForCausalLM": {},
    "DeepseekV2ForCausalLM": {
        **LATENT_BLOCKS,
        **GROUPS,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "q_lora_rank": None,
        "rope_parameters": {**MSCALES, "mscale": 0.9},
    },
    "DeepseekV3ForCausalLM": {
        **LATENT_BLOCKS,
        **GROUPS,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "rope_parameters": {**MSCALES, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "Glm4MoeForCausalLM": {
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "n_shared_experts": 2,
    },
    "GraniteForCausalLM": GRANITE,
    "Qwen2MoeForCausalLM": EXPERTS_OF_HYBRID,
    "SeedOssForCausalLM": {},
    "SmolLM3ForCausalLM": {"num_hidden_layers": 5},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {"sliding_window": 9, "query_pre_attn_scalar": 8, "head_dim": 8},
    "Gemma3ForCausalLM": {"sliding_window": 9, "query_pre_attn_scalar": 8, "head_dim": 8, "num_hidden_layers": 7},
    "Gemma4ForCausalLM": {
        **FAMILY_ARCHITECTURES["Gemma4ForCausalLM"],
        "head_dim": 8,
        "hidden_size_per_layer_input": 32,
        "moe_intermediate_size": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "GptOssForCausalLM": {"sliding_window": 9, "num_local_experts": 5, "num_experts_per_tok": 2},
    "GraniteMoeHybridForCausalLM": {
        **MAMBA2,
        "hidden_size": 32,
        "mamba_n_groups": 2,
        "mamba_d_head": 8,
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
    },
    "Lfm2ForCausalLM": {**CONVS, "block_auto_adjust_ff_dim": False},
    "Lfm2MoeForCausalLM": {**CONVS, "moe_intermediate_size": 32, "num_dense_layers": 1, "num_experts": 5},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 9},
    "MixtralForCausalLM": {},
    "NemotronHForCausalLM": {
        **NEMOTRON_H,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
        "mamba_head_dim": 8,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
    },
    "Phi3ForCausalLM": {"sliding_window": 11},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {"norm_topk_prob": True, "moe_intermediate_size": 32},
    "Qwen3NextForCausalLM": {**HYBRID, **EXPERTS_OF_HYBRID},
    "Qwen3_5ForCausalLM": {**HYBRID, "linear_num_value_heads": 4, "linear_value_head_dim": 8},
    "Qwen3_5MoeForCausalLM": {
        **HYBRID,
        **EXPERTS_OF_HYBRID,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
        "intermediate_size": None,
    },
}


def save(directory: Path, name: str, settings: Mapping[str, Any], kind: FileType) -> Path:
    """Save a model whose matrices are those that a type has."""
    sizes = {**SIZES, **settings}
    save_tiny_architecture(directory, name, {key: value for key, value in sizes.items() if value is not None})
    path = directory / "model.safetensors"
    keep = of_type(FileType.F32)(name, np.zeros(1))
    kept = (
        ".gate.weight",
        "expert_gate.weight",
        "router.weight",
        "router.proj.weight",
        "router.layer.weight",
        "_bias",
        "conv1d.weight",
        "conv.conv.weight",
    )
    weights = {
        each: values
        if values.ndim == 1 or each.endswith(kept) or kind == keep
        else _rounded(each, values, kind, settings)
        for each, values in load_file(path).items()
    }
    for each, values in weights.items():
        if each.endswith("A_log"):  # a file has the exponential in float32
            weights[each] = np.log(np.exp(values).astype(np.float64)).astype(np.float32)
    save_file(weights, path, metadata={"format": "pt"})
    return directory


def _rounded(name: str, values: npt.NDArray[Any], kind: FileType, settings: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Return a matrix as a type has it.

    Of the stacked experts of gpt-oss inputs come before outputs; the maps of a latent cache to keys are transposed.
    """
    if name.endswith(".kv_b_proj.weight"):
        heads = values.reshape(settings["num_attention_heads"], -1, values.shape[1])
        keys, values_of = np.split(heads, [settings["qk_nope_head_dim"]], 1)
        keys = _rounded("", keys.swapaxes(1, 2), kind, settings).swapaxes(1, 2)
        return np.concatenate([keys, _rounded("", values_of, kind, settings)], 1).reshape(values.shape)
    is_transposed = values.ndim == 3 and ".mlp.experts." in name and not name.endswith(".weight")
    rows = values.swapaxes(-1, -2) if is_transposed else values
    rounded = dequantize(quantize(np.ascontiguousarray(rows), kind), kind)
    return np.ascontiguousarray(rounded.swapaxes(-1, -2)) if is_transposed else rounded
