"""Llama 1 to 3.x and its relatives: Mistral, Phi-3, Qwen2 and Qwen3, and the mixtures of experts among them.

Sources: Touvron et al. 2023, "LLaMA"; Jiang et al. 2023, "Mistral 7B"; 2024, "Mixtral of Experts"; Abdin et al. 2024,
"Phi-3 Technical Report"; Qwen Team 2024, "Qwen2 Technical Report"; 2025, "Qwen3 Technical Report".
"""

from collections.abc import Sequence
from dataclasses import replace

from executor_svc.models.config import ModelConfig, WeightNames
from executor_svc.models.families.common import mlp_of, read_decoder, read_experts, read_windows, with_experts
from executor_svc.models.fields import ConfigFields


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
