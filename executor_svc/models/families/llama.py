"""Llama 1 to 3.x and Mistral: the plain decoder.

Source: Touvron et al. 2023, "LLaMA"; Jiang et al. 2023, "Mistral 7B".
"""

from dataclasses import replace

from executor_svc.models.config import ModelConfig
from executor_svc.models.families.common import read_decoder
from executor_svc.models.fields import ConfigFields


def read_llama(fields: ConfigFields) -> ModelConfig:
    """Read a Llama config.json."""
    fields.refuse({"sliding_window": None})
    config = read_decoder(fields)
    has_attention_bias = fields.flag("attention_bias")
    return replace(
        config,
        mlp=replace(config.mlp, has_bias=fields.flag("mlp_bias")),
        qkv_bias=has_attention_bias,
        attention_output_bias=has_attention_bias,
    )


def read_mistral(fields: ConfigFields) -> ModelConfig:
    """Read a Mistral config.json: Llama with a sliding window in every layer, or in none."""
    windows = [fields.optional_integer("sliding_window")] * fields.integer("num_hidden_layers")
    return read_decoder(fields, windows=windows)
