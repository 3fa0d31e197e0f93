"""GLM-4.5 and 4.6: experts behind the first layers, chosen by sigmoids with a bias, beside one for every token.

Source: Zhipu AI 2025, "GLM-4.5".
"""

from dataclasses import replace

from executor_svc.models.config import ExpertsConfig, ModelConfig
from executor_svc.models.families.common import mlp_of, read_decoder, read_sigmoid_experts, with_experts_behind
from executor_svc.models.families.deepseek import NAMES
from executor_svc.models.fields import ConfigFields


def read_glm4_moe(fields: ConfigFields) -> ModelConfig:
    """Read a GLM-4.5 config.json; its layers that predict further tokens are not read."""
    defaults = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}
    known = {name: value for name, value in fields.values.items() if value is not None}
    fields = ConfigFields({**defaults, **known}, fields.source)
    config, first = read_decoder(fields, has_partial_rotary=True), fields.integer("first_k_dense_replace", 1, least=0)
    return replace(
        with_experts_behind(config, first, _read_experts(fields, config)),
        names=NAMES,
        qkv_bias=fields.flag("attention_bias"),
        has_query_key_norm=fields.flag("use_qk_norm"),
        num_further_layers=fields.integer("num_nextn_predict_layers", 0, least=0),
    )


def _read_experts(fields: ConfigFields, config: ModelConfig) -> ExpertsConfig:
    size = fields.integer("moe_intermediate_size")
    mlp = replace(mlp_of(config), intermediate_size=size)
    name = "n_routed_experts" if fields.values.get("n_routed_experts") is not None else "num_local_experts"
    return read_sigmoid_experts(fields, name, mlp, size * fields.integer("n_shared_experts", 1))
