"""gpt-oss: experts with biases and a bounded activation, sinks, a window in every second layer.

Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card".
"""

from dataclasses import replace

from executor_svc.models.config import ModelConfig, WeightNames
from executor_svc.models.families.common import mlp_of, read_decoder, read_experts, read_windows
from executor_svc.models.fields import ConfigFields


def read_gpt_oss(fields: ConfigFields) -> ModelConfig:
    """Read a gpt-oss config.json: every second layer, from the first, has a window."""
    fields.refuse({"swiglu_alpha": 1.702, "swiglu_limit": 7.0})
    num_layers, window = fields.integer("num_hidden_layers"), fields.integer("sliding_window", 128)
    windows = read_windows(fields, window, [layer % 2 == 0 for layer in range(num_layers)])
    config = read_decoder(fields, windows=windows)
    mlp = replace(mlp_of(config), activation="swiglu_oai", has_bias=True)
    experts = read_experts(fields, "num_local_experts", mlp, is_normalized=True)
    has_bias = fields.flag("attention_bias", True)
    return replace(
        config.with_layers(mlp=replace(experts, has_router_bias=True), has_sinks=True),
        names=WeightNames(router="model.layers.{layer}.mlp.router"),
        qkv_bias=has_bias,
        attention_output_bias=has_bias,
    )
