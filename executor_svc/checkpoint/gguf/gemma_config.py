"""What config.json would say of Gemma 1 to 4 in GGUF files; see `config.py`."""

from executor_svc.checkpoint.gguf.decoder_config import ROPE_FACTORS, Config, Tensors, decoder_config
from executor_svc.checkpoint.gguf.metadata import Metadata
from octavo_shared.errors import ModelLoadError


def read_gemma(metadata: Metadata, tensors: Tensors) -> Config:
    """Return a Gemma."""
    return decoder_config(metadata, tensors, "GemmaForCausalLM", hidden_activation="gelu_pytorch_tanh")


def read_gemma2(metadata: Metadata, tensors: Tensors) -> Config:
    """Return a Gemma 2; llama.cpp's code has its caps and its window where a file is silent."""
    config = decoder_config(metadata, tensors, "Gemma2ForCausalLM", hidden_activation="gelu_pytorch_tanh")
    return config | {
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _query_scalar(config, layers_of_largest=46),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def read_gemma3(metadata: Metadata, tensors: Tensors) -> Config:
    """Return a Gemma 3, whose layers with a window have a rotary embedding of their own."""
    config = decoder_config(metadata, tensors, "Gemma3ForCausalLM", hidden_activation="gelu_pytorch_tanh")
    local_theta = metadata.number("rope.freq_base_swa", 10_000.0)
    local = {"rope_type": "default", "rope_theta": local_theta}
    soft_cap = metadata.number("final_logit_softcapping") if metadata.has("final_logit_softcapping") else None
    return config | {
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "sliding_window": metadata.integer("attention.sliding_window"),
        "sliding_window_pattern": metadata.integer("attention.sliding_window_pattern", 6),
        "query_pre_attn_scalar": _query_scalar(config, layers_of_largest=62),
        "final_logit_softcapping": soft_cap,
    }


def read_gemma4(metadata: Metadata, tensors: Tensors) -> Config:
    """Return a Gemma 4; a layer without a window has other heads, and its values may be its keys."""
    pattern = "attention.sliding_window_pattern"
    windowed = metadata.flags(metadata.key(pattern))
    num_layers, num_shared = metadata.integer("block_count"), metadata.integer("attention.shared_kv_layers", 0)
    if len(windowed) != num_layers or {*windowed[: num_layers - num_shared]} != {True, False}:
        wanted = "a flag for each layer, with both kinds among those that have keys"
        raise metadata.wrong(metadata.key(pattern), windowed, wanted)
    num_kv_heads = _per_layer(metadata, "attention.head_count_kv", num_layers)
    sizes = _per_layer(metadata, "feed_forward_length", num_layers)
    of_window, of_whole = (num_kv_heads[windowed.index(kind)] for kind in (True, False))
    is_double = num_shared > 0 and sizes[-1] != sizes[0]
    expected_sizes = [sizes[0] * (1 + (is_double and layer >= num_layers - num_shared)) for layer in range(num_layers)]
    for key, values, expected in (
        ("attention.head_count_kv", num_kv_heads, [of_window if each else of_whole for each in windowed]),
        ("feed_forward_length", sizes, expected_sizes),
    ):
        if values != expected:
            raise metadata.wrong(metadata.key(key), values, f"{expected}, one number for each kind of layer")
    head_dim = metadata.integer("attention.key_length_swa")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if metadata.integer(key, head_dim) != head_dim:
            raise metadata.wrong(metadata.key(key), metadata.integer(key), f"the length of a key, {head_dim}")
    config = decoder_config(
        metadata,
        tensors,
        "Gemma4ForCausalLM",
        num_kv_heads=of_window,
        intermediate_size=sizes[0],
        hidden_activation="gelu_pytorch_tanh",
        num_kv_shared_layers=num_shared,
        use_double_wide_mlp=is_double,
        layer_types=["sliding_attention" if each else "full_attention" for each in windowed],
        sliding_window=metadata.integer("attention.sliding_window"),
        hidden_size_per_layer_input=metadata.integer("embedding_length_per_layer_input"),
        attention_k_eq_v=f"blk.{windowed.index(False)}.attn_v.weight" not in tensors,
    )
    if (factors := ROPE_FACTORS["factors"]) not in tensors:  # without them the heads would turn whole
        raise ModelLoadError(f"the tensor {factors} is missing from {metadata.path}")
    whole, local_theta = config["rope_parameters"], metadata.number("rope.freq_base_swa", 10_000.0)
    if num_experts := metadata.integer("expert_count", 0):
        config |= {"enable_moe_block": True, "num_experts": num_experts}
        config |= {"top_k_experts": metadata.integer("expert_used_count")}
        config |= {"moe_intermediate_size": metadata.integer("expert_feed_forward_length")}
    soft_cap = metadata.number("final_logit_softcapping") if metadata.has("final_logit_softcapping") else None
    local: Config = {"rope_type": "default", "rope_theta": local_theta}
    return config | {
        "head_dim": head_dim,
        "per_layer_config": {"full_attention": {"head_dim": config["head_dim"], "num_key_value_heads": of_whole}},
        "rope_parameters": {"full_attention": whole, "sliding_attention": local},
        "final_logit_softcapping": soft_cap,
    }


def _per_layer(metadata: Metadata, name: str, num_layers: int) -> list[int]:
    """Return a whole number of each layer, where the file may have one for all."""
    key = metadata.key(name)
    values = metadata.whole_numbers(key) if isinstance(metadata.values.get(key), list) else []
    values = values or [metadata.integer(name)] * num_layers
    if len(values) != num_layers:
        raise metadata.wrong(key, values, f"a number for each of {num_layers} layers")
    return values


def _query_scalar(config: Config, *, layers_of_largest: int) -> object:
    """Return what scales queries: the size of a head, but in the largest model, 27B, of the hidden state's share."""
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    assert isinstance(hidden_size, int)
    assert isinstance(num_heads, int)
    is_largest = config["num_hidden_layers"] == layers_of_largest
    return hidden_size // max(1, num_heads) if is_largest else config["head_dim"]
