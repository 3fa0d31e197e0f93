"""Qwen3-Next, Qwen3.5 and 3.6: three layers with a gated delta net, then one that attends, with a gate on its output.

Norms hold the weight less 1, as Gemma's, but for those inside the delta nets. Sources: Qwen Team 2025, "Qwen3-Next";
2026, "Qwen3.5"; Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule".
"""

from dataclasses import replace

from executor_svc.models.config import ExpertsConfig, LayerConfig, ModelConfig
from executor_svc.models.families.common import mlp_of, read_decoder, read_experts, read_layer_types, with_experts
from executor_svc.models.fields import ConfigFields
from executor_svc.models.state_config import DeltaNetConfig
from octavo_shared.errors import ModelLoadError


def read_qwen3_5(fields: ConfigFields) -> ModelConfig:
    """Read the config.json of a Qwen3.5 text model."""
    config = _read_hybrid(_with_defaults(fields))
    return replace(config, mtp=_layer_of_mtp(config))


def read_qwen3_5_moe(fields: ConfigFields) -> ModelConfig:
    """Read the config.json of a Qwen3.5 text model with experts in every layer."""
    fields = _with_defaults(fields)
    config = _read_hybrid(fields)
    config = config.with_layers(mlp=_read_experts(fields, config, is_normalized=True))
    return replace(config, mtp=_layer_of_mtp(config))


def read_qwen3_next(fields: ConfigFields) -> ModelConfig:
    """Read a Qwen3-Next config.json: every layer has experts, but those that it names."""
    fields = _with_defaults(fields)
    config = _read_hybrid(fields)
    config = replace(config, names=replace(config.names, delta_net_layout="by key head"))
    experts = _read_experts(fields, config, is_normalized=fields.flag("norm_topk_prob", True))
    return replace(with_experts(config, fields, experts), mtp=_layer_of_mtp(config.with_layers(mlp=experts)))


def _layer_of_mtp(config: ModelConfig) -> LayerConfig | None:
    """Return the layer of a head that drafts: one of those that attend, if there is any."""
    return next((layer for layer in config.layers if layer.attends), None)


def _with_defaults(fields: ConfigFields) -> ConfigFields:
    """Return the fields with what these families have where config.json is silent, and others do not."""
    known = {name: value for name, value in fields.values.items() if value is not None}
    defaults = {"head_dim": 256, "partial_rotary_factor": 0.25}
    if "intermediate_size" not in known:  # every layer has experts
        defaults["intermediate_size"] = fields.integer("moe_intermediate_size")
    return ConfigFields({**defaults, **known}, fields.source)


def _read_hybrid(fields: ConfigFields) -> ModelConfig:
    fields.refuse({"attn_output_gate": True, "hidden_act": "silu"})
    config, net = read_decoder(fields, has_partial_rotary=True), _read_delta_net(fields)
    has_bias = fields.flag("attention_bias")

    def layer_of(layer: LayerConfig, kind: str) -> LayerConfig:
        if kind == "linear_attention":
            return replace(layer, rope=None, attends=False, state=net)
        return replace(layer, has_output_gate=True)

    interval = fields.integer("full_attention_interval", 4)
    attends = [(layer + 1) % interval == 0 for layer in range(len(config.layers))]
    pairs = zip(config.layers, read_layer_types(fields, "linear_attention", attends), strict=True)
    return replace(
        config,
        layers=tuple(layer_of(*pair) for pair in pairs),
        norm=replace(config.norm, weight_offset=1.0),
        qkv_bias=has_bias,
        attention_output_bias=has_bias,
        has_query_key_norm=True,
    )


def _read_delta_net(fields: ConfigFields) -> DeltaNetConfig:
    net = DeltaNetConfig(
        num_key_heads=fields.integer("linear_num_key_heads", 16),
        num_value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        conv_size=fields.integer("linear_conv_kernel_dim", 4, least=2),
        is_tiled=fields.flag("linear_is_tiled"),  # what GGUF files have
    )
    if net.num_value_heads % net.num_key_heads:
        raise ModelLoadError(
            f"{fields.source} has {net.num_value_heads} value heads in a delta net, not a multiple of "
            f"{net.num_key_heads} key heads"
        )
    return net


def _read_experts(fields: ConfigFields, config: ModelConfig, *, is_normalized: bool) -> ExpertsConfig:
    mlp = replace(mlp_of(config), intermediate_size=fields.integer("moe_intermediate_size"))
    shared = replace(mlp, intermediate_size=fields.integer("shared_expert_intermediate_size"))
    return replace(read_experts(fields, "num_experts", mlp, is_normalized=is_normalized), shared=shared)
