"""What all decoders in GGUF files have in common: sizes, vocabulary, rotary embedding; `config.py` has what differs."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from executor_svc.checkpoint.gguf.header import GGUFTensor
from executor_svc.checkpoint.gguf.metadata import Metadata
from octavo_shared.errors import ModelLoadError

Config = dict[str, object]
Tensors = Mapping[str, GGUFTensor]

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# What divides rotary frequencies, by its name in config.json: of Llama 3.1; of Phi-3 and Phi-4.
ROPE_FACTORS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "factors": "rope_freqs.weight",
        "short_factor": "rope_factors_short.weight",
        "long_factor": "rope_factors_long.weight",
    }
)


def decoder_config(
    metadata: Metadata,
    tensors: Tensors,
    architecture: str,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    **more: object,
) -> Config:
    """Return what all architectures share, and more. A size that is None is the same in all layers, and values."""
    hidden_size, num_heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    if head_dim is None:
        head_dim = metadata.integer("attention.key_length", hidden_size // max(1, num_heads))
        if metadata.integer("attention.value_length", head_dim) != head_dim:
            key = "attention.value_length"
            raise metadata.wrong(metadata.key(key), metadata.integer(key), f"the length of a key, {head_dim}")
    if num_kv_heads is None:
        num_kv_heads = metadata.integer("attention.head_count_kv", num_heads)
    if intermediate_size is None:
        of_experts = metadata.integer("expert_feed_forward_length", 0)
        intermediate_size = metadata.integer("feed_forward_length", of_experts)
    return {
        "architectures": [architecture],
        "hidden_size": hidden_size,
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(metadata, tensors, head_dim),
        "tie_word_embeddings": HEAD not in tensors,
        "vocab_size": _vocab_size(metadata, tensors),
        **more,
    }


def _vocab_size(metadata: Metadata, tensors: Tensors) -> int:
    """Return the rows of the embedding, which all else must agree with."""
    if EMBEDDING not in tensors:
        raise ModelLoadError(f"the tensor {EMBEDDING} is missing from {metadata.path}")
    num_rows = tensors[EMBEDDING].shape[0]
    tokens = metadata.values.get("tokenizer.ggml.tokens")
    counts = {metadata.key("vocab_size"): metadata.integer("vocab_size", num_rows)}
    if isinstance(tokens, list):
        counts["tokenizer.ggml.tokens"] = len(tokens)
    for key, count in counts.items():
        if count != num_rows:
            raise ModelLoadError(f"{metadata.path} has {key} for {count} tokens, but {EMBEDDING} has {num_rows} rows")
    return num_rows


def _rope(metadata: Metadata, tensors: Tensors, head_dim: int) -> Config:
    """Return the rotary embedding; factors of frequencies are tensors, which the weights bring."""
    rope: Config = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 10_000.0)}
    rotary_dim = metadata.integer("rope.dimension_count", head_dim)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        key = metadata.key("rope.dimension_count")
        raise metadata.wrong(key, rotary_dim, f"an even number up to the length of a key, {head_dim}")
    if rotary_dim < head_dim:
        rope["rotary_dim"] = rotary_dim
    # As for llama.cpp, a factor without a type is linear.
    scaling = metadata.text(metadata.key("rope.scaling.type"), "linear")
    name = "rope.scaling.factor" if metadata.has("rope.scaling.factor") else "rope.scale_linear"
    is_long = ROPE_FACTORS["short_factor"] in tensors or ROPE_FACTORS["long_factor"] in tensors
    if is_long and scaling != "yarn" and not metadata.has(name):
        return rope | {"rope_type": "longrope"} | _original(metadata, metadata.number("rope.scaling.attn_factor", 1.0))
    if is_long or scaling not in ("none", "linear", "yarn"):
        wanted = f"none, linear or yarn, or longrope with {ROPE_FACTORS['short_factor']} and without a factor"
        raise metadata.wrong(metadata.key("rope.scaling.type"), scaling, wanted)
    if scaling == "yarn":
        return rope | _yarn(metadata)
    if scaling == "linear" and metadata.has(name):
        return rope | {"rope_type": "linear", "factor": metadata.number(name)}
    return rope | ({"rope_type": "factors"} if ROPE_FACTORS["factors"] in tensors else {})


def _yarn(metadata: Metadata) -> Config:
    """Return YaRN; an attention factor of the file comes on top of that which follows from the other factor."""
    factor = metadata.number("rope.scaling.factor")
    more = metadata.number("rope.scaling.attn_factor", 1.0) * metadata.number("rope.scaling.yarn_attn_factor", 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
        **_original(metadata, more * (1 + 0.1 * math.log(max(1.0, factor)))),
    }


def _original(metadata: Metadata, attention_factor: float) -> Config:
    original = metadata.integer("rope.scaling.original_context_length", metadata.integer("context_length"))
    return {"original_max_position_embeddings": original, "attention_factor": attention_factor}


def experts_of(metadata: Metadata) -> Config:
    """Return how many experts there are, how many a token goes to, and their size."""
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }


def shared_experts_of(metadata: Metadata) -> Config:
    """Return the same, and the size of the one that every token goes to."""
    return experts_of(metadata) | {
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
    }


def factors_of_granite(metadata: Metadata, config: Config) -> Config:
    """Return what multiplies scores, embeddings, the residual stream and logits."""
    head_dim = config["head_dim"]
    assert isinstance(head_dim, int)
    return {
        "attention_multiplier": metadata.number("attention.scale", max(1, head_dim) ** -0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }
