"""GLM-4 with half of each head turning, and GLM-4.5 and 4.6, with experts behind the first layers.

Sources: Team GLM 2024, "ChatGLM"; Zhipu AI 2025, "GLM-4.5".
"""

from dataclasses import replace
from typing import Final

from executor_svc.models.config import ModelConfig, WeightNames
from executor_svc.models.families.common import read_decoder, with_interleaved_rotary
from executor_svc.models.families.deepseek import NAMES, with_sigmoid_experts
from executor_svc.models.fields import ConfigFields

# Where config.json is silent, as in transformers.
_DEFAULTS: Final[dict[str, object]] = {"partial_rotary_factor": 0.5, "max_position_embeddings": 131_072}
_MERGED: Final = WeightNames(gate_up=("model.layers.{layer}.mlp.gate_up_proj",))


def read_glm(fields: ConfigFields) -> ModelConfig:
    """Read a config.json of GLM-4-9B: pairs that turn lie side by side, in half of each head."""
    defaults = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7}
    fields = fields.with_defaults(_DEFAULTS | defaults)
    config = with_interleaved_rotary(read_decoder(fields, has_partial_rotary=True))
    return replace(config, names=_MERGED, qkv_bias=fields.flag("attention_bias", True))


def read_glm4(fields: ConfigFields) -> ModelConfig:
    """Read a config.json of GLM-4-0414: GLM-4 with norms behind attention and MLP too."""
    names = replace(
        _MERGED,
        attention_output_norm="model.layers.{layer}.post_self_attn_layernorm",
        mlp_output_norm="model.layers.{layer}.post_mlp_layernorm",
    )
    return replace(read_glm(fields), names=names, has_output_norms=True)


def read_glm4_moe(fields: ConfigFields) -> ModelConfig:
    """Read a GLM-4.5 config.json; its layers that predict further tokens are not read."""
    fields = fields.with_defaults(_DEFAULTS | {"rms_norm_eps": 1e-5})
    config, first = read_decoder(fields, has_partial_rotary=True), fields.integer("first_k_dense_replace", 1, least=0)
    name = "n_routed_experts" if fields.values.get("n_routed_experts") is not None else "num_local_experts"
    return replace(
        with_sigmoid_experts(fields, config, first, name),
        names=NAMES,
        qkv_bias=fields.flag("attention_bias"),
        has_query_key_norm=fields.flag("use_qk_norm"),
        num_further_layers=fields.integer("num_nextn_predict_layers", 0, least=0),
    )
