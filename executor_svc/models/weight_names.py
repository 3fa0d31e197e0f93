"""What the weights of a decoder are called in a checkpoint."""

from dataclasses import dataclass
from typing import Literal

# How one tensor holds q, k and v: "merged" is all queries, all keys, all values; "interleaved" is, head by head, a
# query, a key and a value.
QkvLayout = Literal["apart", "merged", "interleaved"]


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of tensors without `.weight` and `.bias`; `{layer}` and `{expert}` are numbers. Defaults: Llama."""

    embedding: str = "model.embed_tokens"
    embedding_norm: str = ""
    position_embedding: str = ""
    attention_norm: str = "model.layers.{layer}.input_layernorm"
    qkv: tuple[str, ...] = (
        "model.layers.{layer}.self_attn.q_proj",
        "model.layers.{layer}.self_attn.k_proj",
        "model.layers.{layer}.self_attn.v_proj",
    )
    qkv_layout: QkvLayout = "apart"
    query_norm: str = "model.layers.{layer}.self_attn.q_norm"
    key_norm: str = "model.layers.{layer}.self_attn.k_norm"
    attention_output: str = "model.layers.{layer}.self_attn.o_proj"
    attention_output_norm: str = ""
    mlp_norm: str = "model.layers.{layer}.post_attention_layernorm"
    router: str = ""
    # Gate, then up; one name: one tensor holds both, in this order; without a gate: up alone.
    gate_up: tuple[str, ...] = ("model.layers.{layer}.mlp.gate_proj", "model.layers.{layer}.mlp.up_proj")
    down: str = "model.layers.{layer}.mlp.down_proj"
    mlp_output_norm: str = ""
    norm: str = "model.norm"
    head: str = "lm_head"
    # What some checkpoints leave out at the front of every name.
    optional_prefix: str = ""
