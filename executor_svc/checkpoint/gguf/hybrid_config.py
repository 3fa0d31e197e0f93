"""What config.json would say of hybrids in GGUF files, some layers of which keep a state; see `config.py`."""

from gguf import ExpertGatingFuncType

from executor_svc.checkpoint.gguf.decoder_config import (
    Config,
    Tensors,
    decoder_config,
    experts_of,
    factors_of_granite,
    shared_experts_of,
)
from executor_svc.checkpoint.gguf.metadata import Metadata


def read_qwen3_5(metadata: Metadata, tensors: Tensors) -> Config:
    """Return a Qwen3.5."""
    return _hybrid(metadata, tensors, "Qwen3_5ForCausalLM", is_tiled=True)


def read_qwen3_5_moe(metadata: Metadata, tensors: Tensors) -> Config:
    """Return a Qwen3.5 with experts."""
    return _hybrid(metadata, tensors, "Qwen3_5MoeForCausalLM", is_tiled=True, **shared_experts_of(metadata))


def read_qwen3_next(metadata: Metadata, tensors: Tensors) -> Config:
    """With its projections apart, as llama.cpp has them, it is a Qwen3.5 with experts."""
    return _hybrid(metadata, tensors, "Qwen3_5MoeForCausalLM", is_tiled=False, **shared_experts_of(metadata))


def _hybrid(metadata: Metadata, tensors: Tensors, architecture: str, *, is_tiled: bool, **more: object) -> Config:
    """Return a decoder with delta nets; its last layers predict further tokens, and are not read."""
    sections = "rope.dimension_sections"  # of the three parts of a position, equal for text
    if metadata.has(sections) and any(metadata.numbers(metadata.key(sections))[3:]):
        raise metadata.wrong(metadata.key(sections), metadata.values[metadata.key(sections)], "three sections")
    config = decoder_config(metadata, tensors, architecture)
    num_keys, num_values = metadata.integer("ssm.group_count"), metadata.integer("ssm.time_step_rank")
    rope, num_layers, head_dim = config["rope_parameters"], config["num_hidden_layers"], config["head_dim"]
    assert isinstance(rope, dict)
    assert isinstance(num_layers, int)
    assert isinstance(head_dim, int)
    num_layers -= metadata.integer("nextn_predict_layers", 0)
    return config | {
        "num_hidden_layers": num_layers,
        "layer_types": _layer_types(metadata, num_layers),
        "rope_parameters": {"rotary_dim": head_dim, **rope},
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": num_values,
        "linear_is_tiled": is_tiled and num_keys != num_values,
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": metadata.integer("ssm.inner_size") // max(1, num_values),
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        **more,
    }


def _layer_types(metadata: Metadata, num_layers: int) -> list[str]:
    interval, key = max(1, metadata.integer("full_attention_interval", 4)), "attention.recurrent_layers"
    is_recurrent = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if metadata.has(key):
        is_recurrent = metadata.flags(metadata.key(key))[:num_layers]
    return ["linear_attention" if each else "full_attention" for each in is_recurrent]


def read_lfm2(metadata: Metadata, tensors: Tensors, architecture: str = "Lfm2ForCausalLM", **more: object) -> Config:
    """LFM2: layers without KV heads have a short convolution."""
    key = metadata.key("attention.head_count_kv")
    heads = metadata.whole_numbers(key)
    if len({*heads} - {0}) != 1:
        raise metadata.wrong(key, heads, "a list of one number, with 0 for layers that do not attend")
    config = decoder_config(metadata, tensors, architecture, num_kv_heads=max(heads)) | more
    return config | {
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "layer_types": ["full_attention" if each else "conv" for each in heads],
    }


def read_lfm2_moe(metadata: Metadata, tensors: Tensors) -> Config:
    """LFM2-MoE: llama.cpp scales the weights of experts to 1, and has a bias for their choice in every file."""
    gating = metadata.integer("expert_gating_func")
    if gating != ExpertGatingFuncType.SIGMOID:
        raise metadata.wrong(metadata.key("expert_gating_func"), gating, "2 (sigmoid)")
    return read_lfm2(
        metadata,
        tensors,
        "Lfm2MoeForCausalLM",
        **experts_of(metadata),
        num_dense_layers=metadata.integer("leading_dense_block_count", 0),
    )


def read_granite_hybrid(metadata: Metadata, tensors: Tensors) -> Config:
    """Return a Granite 4.0; a layer without KV heads has a state."""
    key = metadata.key("attention.head_count_kv")
    counts = metadata.whole_numbers(key)
    num_kv_heads = max(counts, default=0)
    if len(counts) != metadata.integer("block_count") or {*counts} - {0, num_kv_heads}:
        raise metadata.wrong(key, counts, "0 or the same number for each layer")
    num_heads, num_experts = metadata.integer("ssm.time_step_rank"), metadata.integer("expert_count", 0)
    attending, others = (counts.index(each) if each in counts else 0 for each in (num_kv_heads, 0))
    shared = "expert_shared_feed_forward_length"
    config = decoder_config(
        metadata,
        tensors,
        "GraniteMoeHybridForCausalLM",
        num_kv_heads=num_kv_heads,
        layer_types=["full_attention" if count else "linear_attention" for count in counts],
        position_embedding_type="rope" if metadata.flag(metadata.key("rope.scaling.finetuned"), True) else None,
        attention_bias=f"blk.{attending}.attn_q.bias" in tensors,
        num_local_experts=num_experts,
        num_experts_per_tok=metadata.integer("expert_used_count", 0),
        shared_intermediate_size=metadata.integer(shared if num_experts else "feed_forward_length"),
        has_gates_apart=True,
        mamba_n_heads=num_heads,
        mamba_n_groups=metadata.integer("ssm.group_count"),
        mamba_d_head=metadata.integer("ssm.inner_size") // max(1, num_heads),
        mamba_d_state=metadata.integer("ssm.state_size"),
        mamba_d_conv=metadata.integer("ssm.conv_kernel"),
        mamba_conv_bias=f"blk.{others}.ssm_conv1d.bias" in tensors,
        mamba_proj_bias=f"blk.{others}.ssm_in.bias" in tensors,
    )
    metadata.has(shared)  # beside a single MLP it says the same
    return config | factors_of_granite(metadata, config)


def read_nemotron_h(metadata: Metadata, tensors: Tensors) -> Config:
    """Return a Nemotron-H; layers with KV heads attend, those with a length have an MLP or experts, others a state."""
    lists = [metadata.whole_numbers(metadata.key(name)) for name in ("attention.head_count_kv", "feed_forward_length")]
    num_kv_heads, size = (max(counts, default=0) for counts in lists)
    num_experts, of_mlp = metadata.integer("expert_count", 0), "mlp"
    experts: Config = {}
    if num_experts:
        of_mlp = "moe"
        experts = {
            "n_routed_experts": num_experts,
            "num_experts_per_tok": metadata.integer("expert_used_count"),
            "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
            "n_shared_experts": metadata.integer("expert_shared_count"),
            "norm_topk_prob": metadata.flag(metadata.key("expert_weights_norm"), False),
            "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        }
    kinds = {(0, 0): "linear_attention", (num_kv_heads, 0): "full_attention", (0, size): of_mlp}
    layers = [*zip(*lists, strict=False)]
    if {len(counts) for counts in lists} != {metadata.integer("block_count")} or not {*layers} <= {*kinds}:
        key = metadata.key("attention.head_count_kv")
        raise metadata.wrong(key, lists[0], f"0 or one number for each layer, beside {lists[1]} of feed_forward_length")
    num_heads = metadata.integer("ssm.time_step_rank")
    config = decoder_config(
        metadata,
        tensors,
        "NemotronHForCausalLM",
        num_kv_heads=num_kv_heads,
        intermediate_size=size,
        layers_block_type=[kinds[layer] for layer in layers],
        layer_norm_epsilon=metadata.number("attention.layer_norm_rms_epsilon"),
        mamba_num_heads=num_heads,
        mamba_head_dim=metadata.integer("ssm.inner_size") // max(1, num_heads),
        n_groups=metadata.integer("ssm.group_count"),
        ssm_state_size=metadata.integer("ssm.state_size"),
        conv_kernel=metadata.integer("ssm.conv_kernel"),
        use_conv_bias=any(name.endswith(".ssm_conv1d.bias") for name in tensors),
    )
    return config | experts
