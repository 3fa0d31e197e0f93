"""Phi-3: Llama whose checkpoints hold q, k and v in one tensor, and gate and up in another.

Source: Abdin et al. 2024, "Phi-3 Technical Report".
"""

from dataclasses import replace

from executor_svc.models.config import ModelConfig, WeightNames
from executor_svc.models.families.common import read_decoder
from executor_svc.models.fields import ConfigFields


def read_phi3(fields: ConfigFields) -> ModelConfig:
    """Read a Phi-3 config.json without a long context (rope type longrope)."""
    windows = [fields.optional_integer("sliding_window")] * fields.integer("num_hidden_layers")
    names = WeightNames(
        qkv=("model.layers.{layer}.self_attn.qkv_proj",),
        qkv_layout="merged",
        gate_up=("model.layers.{layer}.mlp.gate_up_proj",),
    )
    return replace(read_decoder(fields, windows=windows), names=names)
