"""DeepSeek-V2 and V3, GLM-4.7-Flash, dots.llm1: behind the first layers experts; most attend on a latent cache.

Sources: DeepSeek-AI 2024, "DeepSeek-V2"; 2024, "DeepSeek-V3 Technical Report"; Zhipu AI 2026, "GLM-4.7-Flash";
rednote-hilab 2025, "dots.llm1 Technical Report".
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from executor_svc.attention.interface import AttentionLayer
from executor_svc.models.config import LatentConfig, ModelConfig, WeightNames, YarnScaling
from executor_svc.models.families.common import (
    mlp_of,
    read_decoder,
    read_experts,
    read_groups,
    read_sigmoid_experts,
    read_windows,
    with_experts_behind,
)
from executor_svc.models.fields import ConfigFields
from executor_svc.models.rotary_embedding import rope_fields
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError

_SHARED: Final = "model.layers.{layer}.mlp.shared_experts"
NAMES: Final = WeightNames(
    shared_gate_up=(f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"), shared_down=f"{_SHARED}.down_proj"
)

# Where config.json is silent, as in transformers.
_DEFAULTS_OF_V3: Final[Mapping[str, object]] = MappingProxyType(
    {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "max_position_embeddings": 4096}
)
_DEFAULTS_OF_GLM: Final[Mapping[str, object]] = MappingProxyType(
    {"routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "max_position_embeddings": 202_752}
)
_MOST_MSCALE: Final = 1000  # that anybody would want


def read_deepseek_v2(fields: ConfigFields) -> ModelConfig:
    """Read a DeepSeek-V2 or V2-Lite config.json: experts are chosen by their softmax."""
    fields.refuse({"scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False})
    config, size = read_latent_decoder(fields), fields.integer("moe_intermediate_size")
    mlp = replace(mlp_of(config), intermediate_size=size)
    experts = replace(
        read_experts(fields, "n_routed_experts", mlp, is_normalized=False),
        scale=fields.number("routed_scaling_factor", 1.0),
        shared=replace(mlp, intermediate_size=size * fields.integer("n_shared_experts")),
        has_shared_gate=False,
    )
    if fields.values.get("topk_method", "greedy") != "greedy":
        fields.refuse({"topk_method": "group_limited_greedy"})
        experts = read_groups(fields, experts)
    return with_experts_behind(config, fields.integer("first_k_dense_replace", 0, least=0), experts)


def read_deepseek_v3(fields: ConfigFields) -> ModelConfig:
    """Read a DeepSeek-V3 config.json, also that of R1 and Kimi K2; layers for further tokens are not read."""
    fields.refuse({"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    fields = fields.with_defaults(_DEFAULTS_OF_V3)
    first = fields.integer("first_k_dense_replace", 3, least=0)
    return with_sigmoid_experts(fields, read_latent_decoder(fields), first)


def read_glm4_moe_lite(fields: ConfigFields) -> ModelConfig:
    """Read a GLM-4.7-Flash config.json: DeepSeek-V3 with kinds of layers by name."""
    fields = fields.with_defaults(_DEFAULTS_OF_GLM)
    kinds = fields.values.get("mlp_layer_types")
    first = fields.integer("first_k_dense_replace", 1, least=0)
    if kinds is not None:
        num_layers = fields.integer("num_hidden_layers")
        first = kinds.count("dense") if isinstance(kinds, list) else 0
        if kinds != ["dense"] * first + ["sparse"] * (num_layers - first):
            raise ModelLoadError(
                f"{fields.source} has mlp_layer_types {shown(repr(kinds))}; supported are {num_layers}, first dense "
                "ones and then sparse ones"
            )
    return with_sigmoid_experts(fields, read_latent_decoder(fields), first)


def read_dots1(fields: ConfigFields) -> ModelConfig:
    """Read a dots.llm1 config.json: attention as of Qwen3, experts as of DeepSeek-V3."""
    window, num_layers = fields.optional_integer("sliding_window"), fields.integer("num_hidden_layers")
    first_window = fields.integer("max_window_layers", 62, least=0)
    windows = read_windows(
        fields, window, [window is not None and layer >= first_window for layer in range(num_layers)]
    )
    has_bias = fields.flag("attention_bias")
    config = replace(
        read_decoder(fields, windows=windows),
        names=NAMES,
        qkv_bias=has_bias,
        attention_output_bias=has_bias,
        has_query_key_norm=True,
    )
    fields = ConfigFields({"norm_topk_prob": False, **fields.values}, fields.source)
    return with_sigmoid_experts(fields, config, fields.integer("first_k_dense_replace", 0, least=0))


def with_sigmoid_experts(
    fields: ConfigFields, config: ModelConfig, first: int, size_name: str = "n_routed_experts"
) -> ModelConfig:
    """Return a decoder with experts as of DeepSeek-V3 in all layers but the first ones.

    `size_name`: what the family calls the number of experts.
    """
    size = fields.integer("moe_intermediate_size")
    mlp = replace(mlp_of(config), intermediate_size=size)
    shared_size = size * fields.integer("n_shared_experts", 1)
    return with_experts_behind(config, first, read_sigmoid_experts(fields, size_name, mlp, shared_size))


def read_latent_decoder(fields: ConfigFields) -> ModelConfig:
    """Read a decoder with attention on a latent cache, and an MLP in every layer."""
    fields.refuse({"attention_bias": False, "moe_layer_freq": 1})
    latent = LatentConfig(
        rank=fields.integer("kv_lora_rank"),
        rotary_dim=fields.integer("qk_rope_head_dim"),
        key_dim=fields.integer("qk_nope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        query_rank=fields.optional_integer("q_lora_rank"),
        has_maps_apart=fields.flag("has_latent_maps_apart"),  # of GGUF files
    )
    if latent.rotary_dim % 2:
        raise ModelLoadError(f"{fields.source} has qk_rope_head_dim {latent.rotary_dim}; it must be even")
    of_rotation = {"head_dim": latent.rotary_dim, "num_key_value_heads": fields.values.get("num_attention_heads")}
    config = read_decoder(ConfigFields({**fields.values, **of_rotation}, fields.source))
    rope, scale = config.layers[0].rope, (latent.key_dim + latent.rotary_dim) ** -0.5
    assert rope is not None, "every layer has one"
    if isinstance(rope.scaling, YarnScaling):
        parameters = rope_fields(fields)
        grown = parameters.number("mscale_all_dim") if parameters.values.get("mscale_all_dim") else 0.0
        if grown > _MOST_MSCALE:
            raise ModelLoadError(f"{fields.source} has mscale_all_dim {grown:g}; at most {_MOST_MSCALE} is supported")
        scale *= (1 + 0.1 * grown * math.log(max(1.0, rope.scaling.factor))) ** 2
    config = config.with_layers(
        num_kv_heads=1,
        head_dim=latent.vector_dim,
        attention=AttentionLayer(scale),
        rope=replace(rope, rotary_dim=latent.rotary_dim, is_interleaved=fields.flag("rope_interleave", True)),
        latent=latent,
    )
    further = fields.integer("num_nextn_predict_layers", 0, least=0)
    return replace(config, names=NAMES, num_further_layers=further)
