"""LFM2 and LFM2-MoE: layers with a short convolution among those that attend.

Source: Liquid AI 2025, "LFM2 Technical Report".
"""

from dataclasses import replace
from typing import Final

from executor_svc.models.config import MlpConfig, ModelConfig, WeightNames
from executor_svc.models.families.common import mlp_of, read_decoder, read_experts, read_layer_types
from executor_svc.models.fields import ConfigFields
from executor_svc.models.state_config import ShortConvConfig
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError

_NAMES: Final = WeightNames(
    attention_norm="model.layers.{layer}.operator_norm",
    query_norm="model.layers.{layer}.self_attn.q_layernorm",
    key_norm="model.layers.{layer}.self_attn.k_layernorm",
    attention_output="model.layers.{layer}.self_attn.out_proj",
    state="model.layers.{layer}.conv",
    mlp_norm="model.layers.{layer}.ffn_norm",
    router="model.layers.{layer}.feed_forward.gate",
    correction_bias="model.layers.{layer}.feed_forward.expert_bias",
    gate_up=("model.layers.{layer}.feed_forward.w1", "model.layers.{layer}.feed_forward.w3"),
    down="model.layers.{layer}.feed_forward.w2",
    expert_gate_up=(
        "model.layers.{layer}.feed_forward.experts.{expert}.w1",
        "model.layers.{layer}.feed_forward.experts.{expert}.w3",
    ),
    expert_down="model.layers.{layer}.feed_forward.experts.{expert}.w2",
    norm="model.embedding_norm",
)


def read_lfm2(fields: ConfigFields) -> ModelConfig:
    """Read an LFM2 config.json, under the names of its first files too."""
    return _read_hybrid(fields, _read_intermediate_size(fields))


def read_lfm2_moe(fields: ConfigFields) -> ModelConfig:
    """Read an LFM2-MoE config.json: all layers but the first ones have experts."""
    config = _read_hybrid(fields, fields.integer("intermediate_size"))
    mlp = replace(mlp_of(config), intermediate_size=fields.integer("moe_intermediate_size"))
    experts = replace(
        read_experts(fields, "num_experts", mlp, is_normalized=fields.flag("norm_topk_prob", True)),
        scoring="sigmoid",
        has_correction_bias=fields.flag("use_expert_bias", True),
        sum_epsilon=1e-6,  # in transformers' code
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    num_dense = fields.integer("num_dense_layers", 2, least=0)
    layers = config.layers[:num_dense] + tuple(replace(layer, mlp=experts) for layer in config.layers[num_dense:])
    return replace(config, layers=layers)


def _read_hybrid(fields: ConfigFields, size: int) -> ModelConfig:
    """Read a decoder whose MLPs have such a size."""
    known = {name: value for name, value in fields.values.items() if value is not None}
    own = {
        "intermediate_size": size,
        "rms_norm_eps": fields.number("norm_eps", 1e-5),
        "tie_word_embeddings": fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True)),
    }
    defaults = {"rope_theta": 1_000_000.0, "max_position_embeddings": 128_000}
    config = read_decoder(ConfigFields({**defaults, **known, **own}, fields.source))
    config = config.with_layers(mlp=MlpConfig(size))
    conv = ShortConvConfig(
        size=config.hidden_size,
        conv_size=fields.integer("conv_L_cache", 3, least=2),
        has_bias=fields.flag("conv_bias"),
    )
    kinds = read_layer_types(fields, "conv", _attends_by_default(fields, len(config.layers)))
    layers = (
        replace(layer, rope=None, attends=False, state=conv) if kind == "conv" else layer
        for layer, kind in zip(config.layers, kinds, strict=True)
    )
    return replace(config, layers=tuple(layers), names=_NAMES, has_query_key_norm=True)


def _read_intermediate_size(fields: ConfigFields) -> int:
    """Read the size of the MLPs: two thirds of what config.json has, in whole blocks, unless it says otherwise."""
    size = fields.integer("intermediate_size" if fields.values.get("block_ff_dim") is None else "block_ff_dim")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.integer("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def _attends_by_default(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Read which layers attend where config.json has no `layer_types`; all, if it does not say."""
    found = fields.values.get("full_attn_idxs")
    if found is None:
        return [True] * num_layers
    if not isinstance(found, list):
        raise ModelLoadError(f"{fields.source} has full_attn_idxs {shown(repr(found))}; it must be a list of layers")
    return [layer in found for layer in range(num_layers)]
