"""StarCoder2, StableLM and Nemotron: LayerNorm beside a rotary embedding.

Sources: Lozhkov et al. 2024, "StarCoder 2 and The Stack v2"; Bellagente et al. 2024, "Stable LM 2 1.6B"; Parmar et al.
2024, "Nemotron-4 15B Technical Report".
"""

from dataclasses import replace
from typing import Final

from executor_svc.models.config import ModelConfig, NormConfig, WeightNames
from executor_svc.models.families.common import mlp_of, read_decoder
from executor_svc.models.fields import ConfigFields

_MLP: Final = "model.layers.{layer}.mlp"


def read_starcoder2(fields: ConfigFields) -> ModelConfig:
    """Read a StarCoder2 config.json: biases, an MLP without a gate, and a window in every layer, or in none."""
    fields = fields.with_defaults({"max_position_embeddings": 4096})
    window, has_bias = fields.optional_integer("sliding_window"), fields.flag("use_bias", True)
    windows = [window] * fields.integer("num_hidden_layers")
    config = read_decoder(fields, activation="gelu_tanh", is_tied=True, windows=windows)
    mlp = replace(mlp_of(config), is_gated=False, has_bias=has_bias)
    return replace(
        config.with_layers(mlp=mlp),
        norm=_norm(fields, "norm_epsilon"),
        names=WeightNames(gate_up=(f"{_MLP}.c_fc",), down=f"{_MLP}.c_proj"),
        qkv_bias=has_bias,
        attention_output_bias=has_bias,
    )


def read_stablelm(fields: ConfigFields) -> ModelConfig:
    """Read a StableLM config.json; a part of each head turns."""
    fields.refuse({"use_parallel_residual": False, "qk_layernorm": False})
    fields = fields.with_defaults({"partial_rotary_factor": 0.25, "max_position_embeddings": 4096})
    config = read_decoder(fields, has_partial_rotary=True)
    return replace(config, norm=_norm(fields, "layer_norm_eps"), qkv_bias=fields.flag("use_qkv_bias"))


def read_nemotron(fields: ConfigFields) -> ModelConfig:
    """Read a Nemotron or Minitron config.json: half of each head turns; an MLP without a gate, of squares of ReLU."""
    defaults = {"partial_rotary_factor": 0.5, "hidden_act": "relu2", "max_position_embeddings": 4096}
    fields = fields.with_defaults(defaults)
    config, has_bias = read_decoder(fields, has_partial_rotary=True), fields.flag("attention_bias")
    mlp = replace(mlp_of(config), is_gated=False, has_bias=fields.flag("mlp_bias"))
    return replace(
        config.with_layers(mlp=mlp),
        norm=replace(_norm(fields, "norm_eps"), weight_offset=1.0),
        names=WeightNames(gate_up=(f"{_MLP}.up_proj",)),
        qkv_bias=has_bias,
        attention_output_bias=has_bias,
    )


def _norm(fields: ConfigFields, name: str) -> NormConfig:
    return NormConfig(fields.number(name, 1e-5), is_layer_norm=True, has_bias=True)
