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

from executor_svc.checkpoint.gguf.decoder_config import (
    Config,
    Tensors,
    decoder_config,
    experts_of,
    factors_of_granite,
    shared_experts_of,
)
from executor_svc.checkpoint.gguf.gemma_config import read_gemma, read_gemma2, read_gemma3, read_gemma4
from executor_svc.checkpoint.gguf.hybrid_config import (
    read_granite_hybrid,
    read_lfm2,
    read_lfm2_moe,
    read_nemotron_h,
    read_qwen3_5,
    read_qwen3_5_moe,
    read_qwen3_next,
)
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
    return config | factors_of_granite(metadata, config)


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
    return decoder_config(metadata, tensors, "Qwen2MoeForCausalLM", norm_topk_prob=False) | shared_experts_of(metadata)


def _qwen3(metadata: Metadata, tensors: Tensors) -> Config:
    return decoder_config(metadata, tensors, "Qwen3ForCausalLM", attention_bias="blk.0.attn_q.bias" in tensors)


def _qwen3_moe(metadata: Metadata, tensors: Tensors) -> Config:
    config = decoder_config(metadata, tensors, "Qwen3MoeForCausalLM", norm_topk_prob=True)  # in llama.cpp's code
    return config | experts_of(metadata)


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


def _phi3(metadata: Metadata, tensors: Tensors) -> Config:
    return decoder_config(
        metadata, tensors, "Phi3ForCausalLM", sliding_window=metadata.integer("attention.sliding_window", 0) or None
    )


ARCHITECTURES: Final[Mapping[str, Callable[[Metadata, Tensors], Config]]] = MappingProxyType(
    {
        "arcee": _arcee,
        "deepseek2": _deepseek2,
        "gemma": read_gemma,
        "gemma2": read_gemma2,
        "gemma3": read_gemma3,
        "gemma4": read_gemma4,
        "glm4moe": _glm4_moe,
        "gpt-oss": _gpt_oss,
        "granite": _granite,
        "granitehybrid": read_granite_hybrid,
        "lfm2": read_lfm2,
        "lfm2moe": read_lfm2_moe,
        "llama": _llama,
        "nemotron_h": read_nemotron_h,
        "nemotron_h_moe": read_nemotron_h,
        "phi3": _phi3,
        "qwen2": _qwen2,
        "qwen2moe": _qwen2_moe,
        "qwen3": _qwen3,
        "qwen35": read_qwen3_5,
        "qwen35moe": read_qwen3_5_moe,
        "qwen3moe": _qwen3_moe,
        "qwen3next": read_qwen3_next,
        "seed_oss": _seed_oss,
        "smollm3": _smollm3,
    }
)


def has_interleaved_heads(architecture: str) -> bool:
    """Whether queries and keys lie as llama.cpp rotates them: neighbours, where transformers rotates halves."""
    return architecture in ("arcee", "granite", "granitehybrid", "llama", "smollm3")
