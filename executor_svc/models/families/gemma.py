"""Gemma 1 to 3: scaled embeddings, norms whose checkpoints hold the weight less 1, soft caps, alternating windows.

Source: Gemma Team 2024, "Gemma"; "Gemma 2"; 2025, "Gemma 3 Technical Report".
"""

from collections.abc import Sequence
from dataclasses import replace

from executor_svc.attention.interface import AttentionLayer
from executor_svc.models.config import ModelConfig, RopeConfig, WeightNames
from executor_svc.models.families.common import mlp_of, read_decoder, read_windows
from executor_svc.models.fields import ConfigFields
from executor_svc.models.rotary_embedding import read_rope

_LAYER = "model.layers.{layer}"
_SANDWICH_NAMES = WeightNames(
    attention_output_norm=f"{_LAYER}.post_attention_layernorm",
    mlp_norm=f"{_LAYER}.pre_feedforward_layernorm",
    mlp_output_norm=f"{_LAYER}.post_feedforward_layernorm",
)


def read_gemma(fields: ConfigFields) -> ModelConfig:
    """Read a Gemma config.json, whose `hidden_act` says gelu and means its tanh approximation."""
    fields.refuse({"use_bidirectional_attention": False})
    config = read_decoder(fields, activation="gelu_tanh", is_tied=True)
    has_bias = fields.flag("attention_bias")
    return replace(
        config.with_layers(mlp=replace(mlp_of(config), activation="gelu_tanh")),
        norm=replace(config.norm, weight_offset=1.0),
        qkv_bias=has_bias,
        attention_output_bias=has_bias,
        embedding_scale=config.hidden_size**0.5,
    )


def read_gemma2(fields: ConfigFields) -> ModelConfig:
    """Read a Gemma 2 config.json: every second layer, from the first, has a window."""
    num_layers = fields.integer("num_hidden_layers")
    windows = read_windows(fields, fields.integer("sliding_window", 4096), [i % 2 == 0 for i in range(num_layers)])
    config = read_gemma(fields)
    return _with_norms_and_scale(config, fields, windows, [config.layers[0].rope] * num_layers)


def read_gemma3(fields: ConfigFields) -> ModelConfig:
    """Read the config.json of a Gemma 3 text model: five layers with a window, then one without."""
    num_layers = fields.integer("num_hidden_layers")
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    by_default = [(layer + 1) % pattern > 0 for layer in range(num_layers)]
    windows = read_windows(fields, fields.integer("sliding_window", 4096), by_default)
    base = _base_of_gemma3(fields)
    whole, local = _read_ropes(fields, base.layers[0].head_dim)
    ropes = [whole if window is None else local for window in windows]
    return replace(_with_norms_and_scale(base, fields, windows, ropes), has_query_key_norm=True)


def _base_of_gemma3(fields: ConfigFields) -> ModelConfig:
    """Read what Gemma 3 shares with Gemma; its rotary embeddings are per kind of layer, and read apart."""
    return read_gemma(ConfigFields({**fields.values, "rope_parameters": None, "rope_scaling": None}, fields.source))


def _read_ropes(fields: ConfigFields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary embedding of layers that see everything, and of layers with a window."""
    limit = fields.integer("max_position_embeddings", 131_072)
    parameters = fields.values.get("rope_parameters")
    if isinstance(parameters, dict) and "full_attention" in parameters:
        return read_rope(fields, head_dim, limit, layer_type="full_attention"), read_rope(
            fields, head_dim, limit, layer_type="sliding_attention"
        )
    return read_rope(fields, head_dim, limit), RopeConfig(fields.number("rope_local_base_freq", 10_000.0))


def _with_norms_and_scale(
    config: ModelConfig,
    fields: ConfigFields,
    windows: Sequence[int | None],
    ropes: Sequence[RopeConfig | None],
) -> ModelConfig:
    scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    soft_cap = fields.optional_number("attn_logit_softcapping")
    return replace(
        config,
        layers=tuple(
            replace(layer, attention=AttentionLayer(scale, window, soft_cap), rope=rope)
            for layer, window, rope in zip(config.layers, windows, ropes, strict=True)
        ),
        names=_SANDWICH_NAMES,
        has_output_norms=True,
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )
