"""Qwen2 and Qwen3: Llama with a bias on q, k and v, or with a norm on each query and key head.

Source: Qwen Team 2024, "Qwen2 Technical Report"; 2025, "Qwen3 Technical Report".
"""

from collections.abc import Sequence
from dataclasses import replace

from executor_svc.models.config import ModelConfig
from executor_svc.models.families.common import read_decoder, read_windows
from executor_svc.models.fields import ConfigFields


def read_qwen2(fields: ConfigFields) -> ModelConfig:
    """Read a Qwen2 or Qwen2.5 config.json."""
    return replace(read_decoder(fields, windows=read_qwen_windows(fields)), qkv_bias=True)


def read_qwen3(fields: ConfigFields) -> ModelConfig:
    """Read a Qwen3 config.json."""
    return with_query_key_norm(fields, read_qwen_windows(fields))


def with_query_key_norm(fields: ConfigFields, windows: Sequence[int | None]) -> ModelConfig:
    """Read what Qwen3 and Qwen3-MoE share; `windows` of each layer in tokens."""
    has_bias = fields.flag("attention_bias")
    return replace(
        read_decoder(fields, windows=windows),
        qkv_bias=has_bias,
        attention_output_bias=has_bias,
        has_query_key_norm=True,
    )


def read_qwen_windows(fields: ConfigFields) -> list[int | None]:
    """Return the window of each layer: the first `max_window_layers` have none; 0: all have it."""
    num_layers = fields.integer("num_hidden_layers")
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None
    first = fields.integer("max_window_layers", 28, least=0)
    return read_windows(fields, window, [layer >= first for layer in range(num_layers)])
