"""Gemma 1 to 4: scaled embeddings, norms whose checkpoints hold the weight less 1, soft caps, alternating windows.

Gemma 4's norms hold the weight itself. Its layers without a window have heads of another size, and keys that may be
values; its last ones may read the keys and values of earlier ones; tokens may have embeddings for each layer.

Source: Gemma Team 2024, "Gemma"; "Gemma 2"; 2025, "Gemma 3 Technical Report"; 2026, "Gemma 4".
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from executor_svc.attention.interface import AttentionLayer
from executor_svc.models.config import LayerConfig, MlpConfig, ModelConfig, RopeConfig, WeightNames
from executor_svc.models.families.common import mlp_of, read_decoder, read_experts, read_kv_heads, read_windows
from executor_svc.models.fields import ConfigFields
from executor_svc.models.rotary_embedding import read_rope
from octavo_shared.errors import ModelLoadError

_LAYER = "model.layers.{layer}"
_EXPERT = f"{_LAYER}.experts.{{expert}}"
_SANDWICH_NAMES = WeightNames(
    attention_output_norm=f"{_LAYER}.post_attention_layernorm",
    mlp_norm=f"{_LAYER}.pre_feedforward_layernorm",
    mlp_output_norm=f"{_LAYER}.post_feedforward_layernorm",
)
# The MLP beside the experts is the shared one.
_NAMES_WITH_EXPERTS = replace(
    _SANDWICH_NAMES,
    router=f"{_LAYER}.router.proj",
    expert_gate_up=(f"{_EXPERT}.gate_proj", f"{_EXPERT}.up_proj"),
    expert_down=f"{_EXPERT}.down_proj",
    shared_gate_up=_SANDWICH_NAMES.gate_up,
    shared_down=_SANDWICH_NAMES.down,
)
# Where config.json is silent, as in transformers.
_DEFAULTS_OF_GEMMA4: Mapping[str, object] = MappingProxyType(
    {
        "head_dim": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        },
    }
)


def read_gemma(fields: ConfigFields) -> ModelConfig:
    """Read a Gemma config.json, whose `hidden_act` says gelu and means its tanh approximation."""
    fields.refuse({"use_bidirectional_attention": False})
    return _read_base(fields)


def _read_base(fields: ConfigFields) -> ModelConfig:
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
    fields.refuse({"use_bidirectional_attention": False})
    num_layers = fields.integer("num_hidden_layers")
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    by_default = [(layer + 1) % pattern > 0 for layer in range(num_layers)]
    windows = read_windows(fields, fields.integer("sliding_window", 4096), by_default)
    base = _base_of_gemma3(fields)
    whole, local = _read_ropes(fields, base.layers[0].head_dim)
    ropes = [whole if window is None else local for window in windows]
    return replace(_with_norms_and_scale(base, fields, windows, ropes), has_query_key_norm=True)


def read_gemma4(fields: ConfigFields) -> ModelConfig:
    """Read the config.json of a Gemma 4 text model."""
    fields.refuse({"use_bidirectional_attention": "vision", "attention_bias": False})
    num_layers, num_shared = fields.integer("num_hidden_layers"), fields.integer("num_kv_shared_layers", 0, least=0)
    by_default = [(layer + 1) % 6 > 0 for layer in range(num_layers)]
    windows = read_windows(fields, fields.integer("sliding_window", 512), by_default)
    windows[-1] = None  # whatever config.json says
    fields = fields.with_defaults(_DEFAULTS_OF_GEMMA4)
    base = _base_of_gemma3(fields)
    of_window, of_whole = _layers_of_gemma4(fields, base)
    layers: list[LayerConfig] = []
    first_shared = max(0, num_layers - num_shared)
    for index, window in enumerate(windows):
        layer = replace(of_whole if window is None else of_window, attention=AttentionLayer(1.0, window))
        layers.append(layer if index < first_shared else _with_cache_of(layer, fields, windows[:first_shared]))
    has_experts = fields.flag("enable_moe_block")
    if has_experts:
        layers = [_with_experts(layer, fields) for layer in layers]
    return replace(
        base,
        layers=tuple(layers),
        names=_NAMES_WITH_EXPERTS if has_experts else _SANDWICH_NAMES,
        norm=replace(base.norm, weight_offset=0.0),
        has_output_norms=True,
        has_query_key_norm=True,
        has_value_norm=True,
        has_layer_scales=True,
        per_layer_size=fields.integer("hidden_size_per_layer_input", 256, least=0),
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


def _layers_of_gemma4(fields: ConfigFields, base: ModelConfig) -> tuple[LayerConfig, LayerConfig]:
    """Return what layers with a window are like, and those without."""
    first, limit = base.layers[0], base.max_position_embeddings
    own = {"head_dim": fields.integer("global_head_dim", 512)}
    if fields.flag("attention_k_eq_v"):
        own["num_key_value_heads"] = fields.integer("num_global_key_value_heads", first.num_kv_heads)
    per_layer = fields.values.get("per_layer_config")  # as transformers 5 saves it
    if isinstance(per_layer, dict):
        own = next((each for each in per_layer.values() if isinstance(each, dict)), {})
    of_whole = ConfigFields({**fields.values, **own}, fields.source)
    head_dim = of_whole.integer("head_dim", first.head_dim)
    rope = read_rope(fields, head_dim, limit, layer_type="full_attention", has_partial_rotary=True)
    return replace(first, rope=read_rope(fields, first.head_dim, limit, layer_type="sliding_attention")), replace(
        first,
        head_dim=head_dim,
        num_kv_heads=read_kv_heads(of_whole, first.num_heads),
        rope=rope,
        keys_are_values=fields.flag("attention_k_eq_v"),
    )


def _with_cache_of(layer: LayerConfig, fields: ConfigFields, windows: Sequence[int | None]) -> LayerConfig:
    """Return a layer that reads what the last layer of its kind, among those with `windows`, has written."""
    window = layer.attention.window_tokens
    if window not in windows:
        kind = "without a window" if window is None else "with a window"
        raise ModelLoadError(
            f"{fields.source} has num_kv_shared_layers {fields.integer('num_kv_shared_layers')}, which leaves no layer "
            f"{kind} whose keys and values others could read"
        )
    mlp = layer.mlp
    if fields.flag("use_double_wide_mlp") and isinstance(mlp, MlpConfig):
        mlp = replace(mlp, intermediate_size=2 * mlp.intermediate_size)
    last = len(windows) - 1 - list(reversed(windows)).index(window)
    return replace(layer, cache_of=last, mlp=mlp, attention=replace(layer.attention, reads_only=True))


def read_gemma4_unified(fields: ConfigFields) -> ModelConfig:
    """Read the config.json of the text model of Gemma 4 12B: without embeddings for each layer, and without experts."""
    return read_gemma4(fields.with_defaults({"sliding_window": 1024, "hidden_size_per_layer_input": 0}))


def _with_experts(layer: LayerConfig, fields: ConfigFields) -> LayerConfig:
    """Return a layer with experts beside its MLP."""
    assert isinstance(layer.mlp, MlpConfig), "experts come now"
    mlp = replace(layer.mlp, intermediate_size=fields.integer("moe_intermediate_size"))
    experts = read_experts(fields, "num_experts", mlp, is_normalized=True, chosen_name="top_k_experts")
    experts = replace(experts, shared=layer.mlp, has_shared_gate=False, has_expert_scales=True, has_norms=True)
    return replace(layer, mlp=experts)


def _base_of_gemma3(fields: ConfigFields) -> ModelConfig:
    """Read what Gemma 3 shares with Gemma; its rotary embeddings are per kind of layer, and read apart."""
    return _read_base(ConfigFields({**fields.values, "rope_parameters": None, "rope_scaling": None}, fields.source))


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
