"""What config.json would say of a GGUF file's model: its families read it like any other.

A file names an architecture of llama.cpp, and some numbers of it stand in llama.cpp's code alone; those are here.
Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-model.cpp.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from gguf import ExpertGatingFuncType

from executor_svc.checkpoint.gguf.decoder_config import ROPE_FACTORS, Config, Tensors, decoder_config
from executor_svc.checkpoint.gguf.metadata import Metadata, is_of_converter, warn_of_key
from octavo.values.wording import shown
from octavo_shared.errors import ModelLoadError

# Keys that families which do not read them may have with this value: with it they change nothing.
_UNREAD: Final[Mapping[str, float]] = MappingProxyType(
    {
        "attention.causal": True,
        "attention.clamp_kqv": 0,
        "attention.max_alibi_bias": 0,
        "attention.scale": 0,
        "embedding_scale": 1,
        "attention.sliding_window": 0,
        "expert_count": 0,
        "expert_used_count": 0,
        "expert_gating_func": 1,  # softmax
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_shared_count": 0,
        "expert_shared_feed_forward_length": 0,
        "expert_weights_norm": True,
        "expert_weights_scale": 1,
        "interleave_moe_layer_step": 1,
        "leading_dense_block_count": 0,
        "logit_scale": 1,
        "n_deepstack_layers": 0,
        "nextn_predict_layers": 0,
        "residual_scale": 1,
        "rope.scaling.attn_factor": 1,
        "rope.scaling.yarn_attn_factor": 1,
        "rope.scaling.yarn_ext_factor": 1,
        "rope.scaling.yarn_log_multiplier": 0,
    }
)
# Of other norms, of how a file was made, of what scaling was trained with, and what `GGUFModel.pooling` reads.
_WITHOUT_EFFECT: Final = frozenset(
    (
        "attention.layer_norm_epsilon",
        "pooling_type",
        "rope.scaling.factor",  # beside the type none
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "tensor_data_layout",
    )
)


def build_config(metadata: Metadata, tensors: Tensors) -> Config:
    """Return the content of config.json.

    Raises: ModelLoadError: the architecture is not known, or a value is missing, wrong, or contradicts a tensor.
    """
    if metadata.architecture not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise ModelLoadError(
            f"{metadata.path} has the architecture {shown(metadata.architecture)}; supported in GGUF files are "
            f"{supported}"
        )
    config = ARCHITECTURES[metadata.architecture](metadata, tensors)
    for key, value in metadata.unread().items():
        if key in _WITHOUT_EFFECT or (key in _UNREAD and not np.any(np.asarray(value) != _UNREAD[key])):
            continue
        if is_of_converter("{arch}." + key):
            raise ModelLoadError(
                f"{metadata.path} has {shown(metadata.key(key))} {shown(repr(value), 60)}, which is not supported"
            )
        warn_of_key(metadata.path, metadata.key(key))
    return config


def _llama(metadata: Metadata, tensors: Tensors) -> Config:
    """Llama, Mistral, SmolLM and Mixtral: for llama.cpp they are one."""
    window = metadata.integer("attention.sliding_window", 0)
    if num_experts := metadata.integer("expert_count", 0):
        experts = {"num_local_experts": num_experts, "num_experts_per_tok": metadata.integer("expert_used_count")}
        return decoder_config(metadata, tensors, "MixtralForCausalLM", **experts, sliding_window=window or None)
    if window:
        return decoder_config(metadata, tensors, "MistralForCausalLM", sliding_window=window)
    biases = {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    return decoder_config(metadata, tensors, "LlamaForCausalLM", **biases)


def _arcee(metadata: Metadata, tensors: Tensors) -> Config:
    return decoder_config(metadata, tensors, "ArceeForCausalLM")


def _granite(metadata: Metadata, tensors: Tensors) -> Config:
    config = decoder_config(metadata, tensors, "GraniteForCausalLM")
    metadata.flag(metadata.key("rope.scaling.finetuned"), True)
    return config | _factors_of_granite(metadata, config)


def _deepseek2(metadata: Metadata, tensors: Tensors) -> Config:
    """DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash; files without sizes of MLA have one map to keys and values."""
    rank, rotary_dim = metadata.integer("attention.kv_lora_rank"), metadata.integer("rope.dimension_count")
    is_apart = metadata.has("attention.key_length_mla")
    key_dim, value_dim = (metadata.integer(f"attention.{name}_length{'_mla' * is_apart}") for name in ("key", "value"))
    if key_dim <= rotary_dim:
        key = metadata.key("attention.key_length" + "_mla" * is_apart)
        raise metadata.wrong(key, key_dim, f"above rope.dimension_count, {rotary_dim}")
    sizes = {"head_count_kv": metadata.integer("attention.head_count")}
    if is_apart:
        sizes = {"head_count_kv": 1, "key_length": rank + rotary_dim, "value_length": rank}
    for name, wanted in sizes.items():
        if (found := metadata.integer(f"attention.{name}", wanted)) != wanted:
            raise metadata.wrong(metadata.key(f"attention.{name}"), found, f"{wanted}, beside its other sizes")
    # The first files of GLM-4.7-Flash do not say it, but have a bias.
    is_sigmoid = _is_sigmoid(metadata, any(name.endswith(".exp_probs_b.bias") for name in tensors))
    config = decoder_config(
        metadata,
        tensors,
        f"DeepseekV{2 + is_sigmoid}ForCausalLM",
        num_kv_heads=1,
        head_dim=rotary_dim,
        q_lora_rank=metadata.integer("attention.q_lora_rank") if "blk.0.attn_q_a.weight" in tensors else None,
        kv_lora_rank=rank,
        qk_rope_head_dim=rotary_dim,
        qk_nope_head_dim=key_dim - rotary_dim,
        v_head_dim=value_dim,
        has_latent_maps_apart=is_apart,
    )
    config |= _experts_in_groups(metadata)
    if not is_sigmoid and config["n_group"] != 1:
        config["topk_method"] = "group_limited_greedy"
    return config | {"rope_parameters": _with_log_multiplier(metadata, config["rope_parameters"])}


def _with_log_multiplier(metadata: Metadata, rope: object) -> Config:
    """Return a rotary embedding whose YaRN may scale queries too, by a tenth of mscale_all_dim, which mscale equals."""
    assert isinstance(rope, dict)
    key = "rope.scaling.yarn_log_multiplier"
    if rope["rope_type"] != "yarn" or not metadata.has(key) or not metadata.values[metadata.key(key)]:
        return rope
    more = rope["attention_factor"] / (1 + 0.1 * math.log(max(1.0, rope["factor"])))
    if more != 1:
        raise metadata.wrong(metadata.key("rope.scaling.attn_factor"), more, "1 beside a yarn_log_multiplier")
    return rope | {"attention_factor": 1.0, "mscale_all_dim": round(10 * metadata.number(key), 6)}


def _glm4_moe(metadata: Metadata, tensors: Tensors) -> Config:
    if not _is_sigmoid(metadata, True):
        raise metadata.wrong(metadata.key("expert_gating_func"), metadata.integer("expert_gating_func"), "2 (sigmoid)")
    config = decoder_config(
        metadata,
        tensors,
        "Glm4MoeForCausalLM",
        attention_bias="blk.0.attn_q.bias" in tensors,
        use_qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )
    rope = config["rope_parameters"]
    assert isinstance(rope, dict)
    rope = {"rotary_dim": config["head_dim"], **rope}
    return config | {"rope_parameters": rope} | _experts_in_groups(metadata)


def _is_sigmoid(metadata: Metadata, default: bool) -> bool:
    """Whether experts are chosen by sigmoids, and not by a softmax."""
    kinds = (ExpertGatingFuncType.SOFTMAX, ExpertGatingFuncType.SIGMOID)
    kind = metadata.integer("expert_gating_func", 0) or kinds[default]
    if kind not in kinds:
        raise metadata.wrong(metadata.key("expert_gating_func"), kind, "1 (softmax) or 2 (sigmoid)")
    return kind == ExpertGatingFuncType.SIGMOID


def _experts_in_groups(metadata: Metadata) -> Config:
    """Return experts behind the first layers; the last layers predict further tokens, and are not read."""
    return {
        "num_hidden_layers": metadata.integer("block_count") - metadata.integer("nextn_predict_layers", 0),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "n_routed_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
        "norm_topk_prob": metadata.flag(metadata.key("expert_weights_norm"), False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


def _seed_oss(metadata: Metadata, tensors: Tensors) -> Config:
    return decoder_config(metadata, tensors, "SeedOssForCausalLM", attention_bias="blk.0.attn_q.bias" in tensors)


def _smollm3(metadata: Metadata, tensors: Tensors) -> Config:
    return decoder_config(metadata, tensors, "SmolLM3ForCausalLM", no_rope_layer_interval=4)  # in llama.cpp's code


def _qwen2(metadata: Metadata, tensors: Tensors) -> Config:
    return decoder_config(metadata, tensors, "Qwen2ForCausalLM")


def _qwen2_moe(metadata: Metadata, tensors: Tensors) -> Config:
    return decoder_config(metadata, tensors, "Qwen2MoeForCausalLM", norm_topk_prob=False) | _shared_experts(metadata)


def _qwen3(metadata: Metadata, tensors: Tensors) -> Config:
    return decoder_config(metadata, tensors, "Qwen3ForCausalLM", attention_bias="blk.0.attn_q.bias" in tensors)


def _qwen3_moe(metadata: Metadata, tensors: Tensors) -> Config:
    config = decoder_config(metadata, tensors, "Qwen3MoeForCausalLM", norm_topk_prob=True)  # in llama.cpp's code
    return config | _experts(metadata)


def _qwen3_5(metadata: Metadata, tensors: Tensors) -> Config:
    return _hybrid(metadata, tensors, "Qwen3_5ForCausalLM", is_tiled=True)


def _qwen3_5_moe(metadata: Metadata, tensors: Tensors) -> Config:
    return _hybrid(metadata, tensors, "Qwen3_5MoeForCausalLM", is_tiled=True, **_shared_experts(metadata))


def _qwen3_next(metadata: Metadata, tensors: Tensors) -> Config:
    """With its projections apart, as llama.cpp has them, it is a Qwen3.5 with experts."""
    return _hybrid(metadata, tensors, "Qwen3_5MoeForCausalLM", is_tiled=False, **_shared_experts(metadata))


def _shared_experts(metadata: Metadata) -> Config:
    return _experts(metadata) | {
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
    }


def _experts(metadata: Metadata) -> Config:
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }


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


def _lfm2(metadata: Metadata, tensors: Tensors, architecture: str = "Lfm2ForCausalLM", **more: object) -> Config:
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


def _lfm2_moe(metadata: Metadata, tensors: Tensors) -> Config:
    """LFM2-MoE: llama.cpp scales the weights of experts to 1, and has a bias for their choice in every file."""
    gating = metadata.integer("expert_gating_func")
    if gating != ExpertGatingFuncType.SIGMOID:
        raise metadata.wrong(metadata.key("expert_gating_func"), gating, "2 (sigmoid)")
    return _lfm2(
        metadata,
        tensors,
        "Lfm2MoeForCausalLM",
        **_experts(metadata),
        num_dense_layers=metadata.integer("leading_dense_block_count", 0),
    )


def _gemma(metadata: Metadata, tensors: Tensors) -> Config:
    return decoder_config(metadata, tensors, "GemmaForCausalLM", hidden_activation="gelu_pytorch_tanh")


def _gemma2(metadata: Metadata, tensors: Tensors) -> Config:
    config = decoder_config(metadata, tensors, "Gemma2ForCausalLM", hidden_activation="gelu_pytorch_tanh")
    return config | {
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _query_scalar(config, layers_of_largest=46),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata, tensors: Tensors) -> Config:
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


def _gemma4(metadata: Metadata, tensors: Tensors) -> Config:
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


def _gpt_oss(metadata: Metadata, tensors: Tensors) -> Config:
    """Its YaRN is between parts of dimensions, as in OpenAI's code; llama.cpp rounds them to whole ones."""
    config = decoder_config(
        metadata,
        tensors,
        "GptOssForCausalLM",
        num_local_experts=metadata.integer("expert_count"),
        num_experts_per_tok=metadata.integer("expert_used_count"),
        sliding_window=metadata.integer("attention.sliding_window"),
    )
    rope, size = config["rope_parameters"], metadata.integer("expert_feed_forward_length")
    assert isinstance(rope, dict)
    return config | {"intermediate_size": size, "rope_parameters": {**rope, "truncate": False}}


def _granite_hybrid(metadata: Metadata, tensors: Tensors) -> Config:
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
    return config | _factors_of_granite(metadata, config)


def _factors_of_granite(metadata: Metadata, config: Config) -> Config:
    head_dim = config["head_dim"]
    assert isinstance(head_dim, int)
    return {
        "attention_multiplier": metadata.number("attention.scale", max(1, head_dim) ** -0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _nemotron_h(metadata: Metadata, tensors: Tensors) -> Config:
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


def _phi3(metadata: Metadata, tensors: Tensors) -> Config:
    return decoder_config(
        metadata, tensors, "Phi3ForCausalLM", sliding_window=metadata.integer("attention.sliding_window", 0) or None
    )


ARCHITECTURES: Final[Mapping[str, Callable[[Metadata, Tensors], Config]]] = MappingProxyType(
    {
        "arcee": _arcee,
        "deepseek2": _deepseek2,
        "gemma": _gemma,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "gemma4": _gemma4,
        "glm4moe": _glm4_moe,
        "gpt-oss": _gpt_oss,
        "granite": _granite,
        "granitehybrid": _granite_hybrid,
        "lfm2": _lfm2,
        "lfm2moe": _lfm2_moe,
        "llama": _llama,
        "nemotron_h": _nemotron_h,
        "nemotron_h_moe": _nemotron_h,
        "phi3": _phi3,
        "qwen2": _qwen2,
        "qwen2moe": _qwen2_moe,
        "qwen3": _qwen3,
        "qwen35": _qwen3_5,
        "qwen35moe": _qwen3_5_moe,
        "qwen3moe": _qwen3_moe,
        "qwen3next": _qwen3_next,
        "seed_oss": _seed_oss,
        "smollm3": _smollm3,
    }
)


def has_interleaved_heads(architecture: str) -> bool:
    """Whether queries and keys lie as llama.cpp rotates them: neighbours, where transformers rotates halves."""
    return architecture in ("arcee", "granite", "granitehybrid", "llama", "smollm3")
