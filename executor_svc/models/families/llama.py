"""Llama 1 to 3.x and its relatives, such as Mistral, Phi-3, Qwen2 and 3, and those with experts.

Sources: Touvron et al. 2023, "LLaMA"; Jiang et al. 2023, "Mistral 7B"; 2024, "Mixtral of Experts"; Abdin et al. 2024,
"Phi-3 Technical Report"; Qwen Team 2024, "Qwen2 Technical Report"; 2025, "Qwen3 Technical Report"; Arcee AI 2025,
"AFM-4.5B"; ByteDance Seed Team 2025, "Seed-OSS"; Hugging Face 2025, "SmolLM3"; Baidu 2025, "ERNIE 4.5"; Meta 2025,
"CWM"; Mistral AI 2025, "Ministral 3".
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from executor_svc.models.config import ModelConfig, WeightNames
from executor_svc.models.families.common import (
    mlp_of,
    read_decoder,
    read_experts,
    read_windows,
    with_experts,
    with_interleaved_rotary,
)
from executor_svc.models.fields import ConfigFields
from executor_svc.models.rotary_embedding import rope_fields
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError

# Where config.json is silent, as in transformers.
_DEFAULTS_OF_CWM: Mapping[str, object] = MappingProxyType(
    {
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
)
_DEFAULTS_OF_MINISTRAL3: Mapping[str, object] = MappingProxyType(
    {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }
)


def read_llama(fields: ConfigFields) -> ModelConfig:
    """Read a Llama config.json."""
    fields.refuse({"sliding_window": None})
    config = read_decoder(fields)
    has_attention_bias = fields.flag("attention_bias")
    mlp = replace(mlp_of(config), has_bias=fields.flag("mlp_bias"))
    return replace(
        config.with_layers(mlp=mlp),
        qkv_bias=has_attention_bias,
        attention_output_bias=has_attention_bias,
    )


def read_arcee(fields: ConfigFields) -> ModelConfig:
    """Read an Arcee config.json: Llama with the square of ReLU in its MLP, and no gate."""
    config = read_llama(ConfigFields({"hidden_act": "relu2", **fields.values}, fields.source))
    names = replace(config.names, gate_up=config.names.gate_up[1:])
    return replace(config.with_layers(mlp=replace(mlp_of(config), is_gated=False)), names=names)


def read_seed_oss(fields: ConfigFields) -> ModelConfig:
    """Read a Seed-OSS config.json: Llama with a bias on q, k and v."""
    has_bias = fields.flag("attention_bias", True)
    config = read_llama(ConfigFields({"head_dim": 128, **fields.values}, fields.source))
    return replace(config, qkv_bias=has_bias, attention_output_bias=fields.flag("attention_out_bias"))


def read_smollm3(fields: ConfigFields) -> ModelConfig:
    """Read a SmolLM3 config.json: Llama where every fourth layer has no rotary embedding."""
    num_layers, interval = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval", 4)
    turns = fields.values.get("no_rope_layers")
    if turns is None:
        turns = [(layer + 1) % interval > 0 for layer in range(num_layers)]
    if not isinstance(turns, list) or len(turns) != num_layers:
        raise ModelLoadError(
            f"{fields.source} has no_rope_layers {shown(repr(turns))}; it must be a list of {num_layers}"
        )
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None
    windows = read_windows(fields, window, [window is not None and not turn for turn in turns])
    defaults = {"rope_theta": 2_000_000.0, "tie_word_embeddings": True}
    config = read_llama(ConfigFields({**defaults, **fields.values, "sliding_window": None}, fields.source))
    layers = (
        replace(layer, rope=layer.rope if turn else None, attention=replace(layer.attention, window_tokens=window))
        for layer, turn, window in zip(config.layers, turns, windows, strict=True)
    )
    return replace(config, layers=tuple(layers))


def read_cwm(fields: ConfigFields) -> ModelConfig:
    """Read a CWM config.json: Llama where three of four layers have a window."""
    window = fields.integer("sliding_window", 8192)
    windows = read_windows(fields, window, [index % 4 > 0 for index in range(fields.integer("num_hidden_layers"))])
    config = read_decoder(fields.with_defaults(_DEFAULTS_OF_CWM), windows=windows)
    return config.with_layers(mlp=replace(mlp_of(config), has_bias=fields.flag("mlp_bias")))


def read_ernie4_5(fields: ConfigFields) -> ModelConfig:
    """Read an ERNIE 4.5 config.json: Llama with pairs that turn side by side."""
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    defaults = {"head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "rope_parameters": rope}
    fields = fields.with_defaults(defaults)
    config, has_bias = read_decoder(fields, is_tied=True), fields.flag("use_bias")
    config = config.with_layers(mlp=replace(mlp_of(config), has_bias=has_bias))
    return replace(with_interleaved_rotary(config), qkv_bias=has_bias, attention_output_bias=has_bias)


def read_ministral(fields: ConfigFields) -> ModelConfig:
    """Read a Ministral config.json: Mistral with a window in some layers."""
    fields = ConfigFields({"sliding_window": 4096, "max_position_embeddings": 131_072, **fields.values}, fields.source)
    window, num_layers = fields.optional_integer("sliding_window"), fields.integer("num_hidden_layers")
    return read_decoder(fields, windows=read_windows(fields, window, [window is not None] * num_layers))


def read_ministral3(fields: ConfigFields) -> ModelConfig:
    """Read a Ministral 3 config.json: Mistral whose queries grow with their position."""
    fields = fields.with_defaults(_DEFAULTS_OF_MINISTRAL3)
    config = read_mistral(fields)
    rope, parameters = config.layers[0].rope, rope_fields(fields)
    growth = parameters.optional_number("llama_4_scaling_beta")
    if rope is None or growth is None:
        return config
    interval = parameters.integer("original_max_position_embeddings")
    if config.max_position_embeddings > 100_000 * interval:
        raise ModelLoadError(
            f"{fields.source} has original_max_position_embeddings {interval} for {config.max_position_embeddings} "
            "positions; it must be at least a hundred-thousandth of them"
        )
    return config.with_layers(rope=replace(rope, query_growth=growth, query_interval=interval))


def read_mistral(fields: ConfigFields) -> ModelConfig:
    """Read a Mistral config.json: Llama with a sliding window in every layer, or in none."""
    return read_decoder(fields, windows=_equal_windows(fields))


def read_phi3(fields: ConfigFields) -> ModelConfig:
    """Read a Phi-3 or Phi-4 config.json: Llama with q, k and v in one tensor, gate and up in another."""
    names = WeightNames(
        qkv=("model.layers.{layer}.self_attn.qkv_proj",),
        qkv_layout="merged",
        gate_up=("model.layers.{layer}.mlp.gate_up_proj",),
    )
    config = read_decoder(fields, windows=_equal_windows(fields), has_partial_rotary=True)
    return replace(config, names=names)


def read_qwen2(fields: ConfigFields) -> ModelConfig:
    """Read a Qwen2 or Qwen2.5 config.json: Llama with a bias on q, k and v."""
    return replace(read_decoder(fields, windows=_qwen_windows(fields)), qkv_bias=True)


def read_qwen3(fields: ConfigFields) -> ModelConfig:
    """Read a Qwen3 config.json: Llama with a norm on each query and key head."""
    return _with_query_key_norm(fields, _qwen_windows(fields))


def _with_query_key_norm(fields: ConfigFields, windows: Sequence[int | None]) -> ModelConfig:
    """Read what Qwen3 and Qwen3-MoE share; `windows` of each layer in tokens."""
    has_bias = fields.flag("attention_bias")
    return replace(
        read_decoder(fields, windows=windows),
        qkv_bias=has_bias,
        attention_output_bias=has_bias,
        has_query_key_norm=True,
    )


def _qwen_windows(fields: ConfigFields) -> list[int | None]:
    """Return the window of each layer: the first `max_window_layers` have none; 0: all have it."""
    num_layers = fields.integer("num_hidden_layers")
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None
    first = fields.integer("max_window_layers", 28, least=0)
    return read_windows(fields, window, [layer >= first for layer in range(num_layers)])


def read_mixtral(fields: ConfigFields) -> ModelConfig:
    """Read a Mixtral config.json."""
    moe = "model.layers.{layer}.block_sparse_moe"
    names = WeightNames(
        router=f"{moe}.gate",
        expert_gate_up=(f"{moe}.experts.{{expert}}.w1", f"{moe}.experts.{{expert}}.w3"),
        expert_down=f"{moe}.experts.{{expert}}.w2",
    )
    config = replace(read_decoder(fields, windows=_equal_windows(fields)), names=names)
    experts = read_experts(fields, "num_local_experts", mlp_of(config), is_normalized=True)
    return config.with_layers(mlp=experts)


def read_qwen2_moe(fields: ConfigFields) -> ModelConfig:
    """Read a Qwen2-MoE config.json: experts, and one that every token goes to, in every layer but those it names."""
    config = replace(read_qwen2(fields), qkv_bias=fields.flag("qkv_bias", True))
    mlp = replace(mlp_of(config), intermediate_size=fields.integer("moe_intermediate_size"))
    shared = replace(mlp, intermediate_size=fields.integer("shared_expert_intermediate_size"))
    experts = read_experts(fields, "num_experts", mlp, is_normalized=fields.flag("norm_topk_prob"))
    return with_experts(config, fields, replace(experts, shared=shared))


def read_qwen3_moe(fields: ConfigFields) -> ModelConfig:
    """Read a Qwen3-MoE config.json: every layer has experts, but those that config.json names."""
    # Unlike Qwen3 it has no max_window_layers: every layer has the window.
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None
    config = _with_query_key_norm(fields, [window] * fields.integer("num_hidden_layers"))
    mlp = replace(mlp_of(config), intermediate_size=fields.integer("moe_intermediate_size"))
    size_name = "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"
    experts = read_experts(fields, size_name, mlp, is_normalized=fields.flag("norm_topk_prob"))
    return with_experts(config, fields, experts)


def _equal_windows(fields: ConfigFields) -> list[int | None]:
    return [fields.optional_integer("sliding_window")] * fields.integer("num_hidden_layers")
