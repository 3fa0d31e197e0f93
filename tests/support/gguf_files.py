"""Models of Hugging Face directories as GGUF files, as llama.cpp's converter would write them.

Names, permutations and the 1 that is added to Gemma's norms are written down here once more, from
https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py: nothing is taken from the code that reads them.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import load_file, save_file

Array = npt.NDArray[Any]
TypeOf = Callable[[str, Array], GGMLQuantizationType]

ARCHITECTURES = {
    "ArceeForCausalLM": "arcee",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Glm4MoeForCausalLM": "glm4moe",
    "Glm4MoeLiteForCausalLM": "deepseek2",
    "GraniteForCausalLM": "granite",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "NemotronHForCausalLM": "nemotron_h",
    "Phi3ForCausalLM": "phi3",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3NextForCausalLM": "qwen3next",
}
# Of which llama.cpp rotates neighbours.
INTERLEAVED = ("arcee", "granite", "granitehybrid", "llama", "smollm3")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
_NAMES_OF_HYBRIDS = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt_proj": "ssm_dt",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
# Where d and dmin stand in blocks of K formats.
HALVES_OF_K: Mapping[GGMLQuantizationType, tuple[int, ...]] = {
    GGMLQuantizationType.Q2_K: (80, 82),
    GGMLQuantizationType.Q3_K: (108,),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
}
_NAMES_OF_GRANITE = {
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"mamba.{part}": f"ssm_{part}" for part in ("conv1d", "norm")},
    "mamba.in_proj": "ssm_in",
    "mamba.dt_proj": "ssm_dt",
    "mamba.out_proj": "ssm_out",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
}
_NAMES_OF_LFM2 = {
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    **{f"conv.{part}": f"shortconv.{part}" for part in ("in_proj", "conv", "out_proj")},
    "ffn_norm": "ffn_norm",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b",
    **{f"feed_forward.{part}": f"ffn_{name}" for part, name in (("w1", "gate"), ("w3", "up"), ("w2", "down"))},
    "feed_forward.experts.w1": "ffn_gate_exps",
    "feed_forward.experts.w3": "ffn_up_exps",
    "feed_forward.experts.w2": "ffn_down_exps",
}
_NAMES_OF_DEEPSEEK = {
    "mlp.gate.e_score_correction": "exp_probs_b",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q_a", "q_b", "k_b", "v_b")},
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
}
_NAMES_OF_GPT_OSS = {"post_attention_layernorm": "post_attention_norm"}
_NAMES_OF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_NAMES_OF_GEMMA4 = {
    **_NAMES_OF_GEMMA,
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "layer_scalar": "layer_output_scale",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}


def of_type(kind: GGMLQuantizationType) -> TypeOf:
    """Return the rule of files of a type: matrices have it, vectors and routers stay in float32."""
    floats = GGMLQuantizationType.F32
    kept = re.compile(r"ffn_gate_inp|\.scale$|\.bias|ssm_conv1d|ssm_norm|ssm_[ad]$|shortconv\.conv")
    return lambda name, values: floats if values.ndim == 1 or kept.search(name) else kind


def write_gguf_of(
    directory: Path,
    path: Path,
    type_of: TypeOf,
    *,
    changes: Mapping[str, Any] | None = None,
    more_tensors: Mapping[str, Array | None] | None = None,
    split_after: int | None = None,
) -> Path:
    """Write the model of a directory as a GGUF file; return its path, or that of the first of two.

    Args:
        directory: As transformers saves it, in float32.
        path: Of the file.
        type_of: The type of a tensor by its name in the file.
        changes: Values of the header that are other ones; None leaves one out.
        more_tensors: What the file has beside; None leaves one out.
        split_after: How many tensors the first of two files has; None: there is one.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    architecture = ARCHITECTURES[config["architectures"][0]]
    if architecture == "nemotron_h":
        kinds = config["layers_block_type"]
        config |= {"num_hidden_layers": len(kinds), "rms_norm_eps": config["layer_norm_epsilon"]}
        architecture += "_moe" * ("moe" in kinds)
    tensors = _tensors(config, architecture, load_file(directory / "model.safetensors"))
    merged = {**tensors, **(more_tensors or {})}
    tensors = {name: tensor for name, tensor in merged.items() if tensor is not None}
    values = _values(config, architecture) | dict(changes or {})
    if split_after is None:
        _write(path, architecture, values, tensors, type_of)
        return path
    paths = [path.with_name(f"{path.stem}-{number:05}-of-00002.gguf") for number in (1, 2)]
    parts = [dict(list(tensors.items())[:split_after]), dict(list(tensors.items())[split_after:])]
    for number, (part_path, part) in enumerate(zip(paths, parts, strict=True)):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(tensors)}
        _write(part_path, architecture, split if number else values | split, part, type_of)
    return paths[0]


def write_mxfp4_gguf(directory: Path, path: Path) -> Path:
    """Write a gpt-oss of a directory, whose experts are in MXFP4, with the same codes and all else in float32."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    weights: dict[str, Array] = {}
    blocks: dict[str, Array] = {}
    for name, values in load_file(directory / "model.safetensors").items():
        if name.endswith("_blocks"):
            scales = load_file(directory / "model.safetensors")[name.replace("_blocks", "_scales")]
            codes = np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:-1], 32)
            halves = codes[..., :16] | codes[..., 16:] << 4
            rows = np.concatenate([scales[..., None], halves], -1).reshape(*values.shape[:2], -1)
            layer, part = name.split(".")[2], name.split(".")[-1].removesuffix("_proj_blocks")
            parts = {"down": rows} if part == "down" else {"gate": rows[:, ::2], "up": rows[:, 1::2]}
            blocks |= {f"blk.{layer}.ffn_{each}_exps.weight": own for each, own in parts.items()}
        elif not name.endswith("_scales"):
            weights[name] = values
    tensors = _tensors(config, "gpt-oss", weights) | blocks
    kinds = dict.fromkeys(blocks, GGMLQuantizationType.MXFP4)
    _write(
        path, "gpt-oss", _values(config, "gpt-oss"), tensors, lambda name, _: kinds.get(name, GGMLQuantizationType.F32)
    )
    return path


def write_small_gguf(path: Path, kind: GGMLQuantizationType, **changes: Any) -> Path:
    """Write a file with an embedding of 256 x 256, a norm, and no layers; for what is read of headers."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    shapes = {"model.embed_tokens.weight": (256, 256), "model.norm.weight": (256,)}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        save_file(weights, Path(directory) / "model.safetensors")
        return write_gguf_of(Path(directory), path, of_type(kind), changes=changes)


def pull_into_ollama(folder: Path, place: str, content: bytes) -> Path:
    """Put a file where Ollama would put that of a model, behind a manifest at `place`; return its path."""
    digest = hashlib.sha256(content).hexdigest()
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    blob = folder / "blobs" / f"sha256-{digest}"
    blob.write_bytes(content)
    layers = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}
        for kind in ("license", "model", "template")
    ]
    manifest = folder / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}), encoding="utf-8")
    return blob


def _stored(name: str, values: Array, kind: GGMLQuantizationType) -> Array:
    """Return the blocks of a tensor; some types have random codes, since gguf has no search for them."""
    halves = HALVES_OF_K.get(kind, (0,) if kind.name.startswith("IQ") else ())
    if kind not in (GGMLQuantizationType.NVFP4, GGMLQuantizationType.Q8_1) and (
        not halves or kind == GGMLQuantizationType.IQ4_NL
    ):
        return quantize(values, kind)
    block_inputs, block_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(len(name))
    blocks = generator.integers(0, 256, (values.size // block_inputs, block_bytes), np.uint8)
    for begin in halves:  # the size of weights is about a tenth
        blocks[:, begin : begin + 2] = np.full((len(blocks), 1), 2e-4, np.float16).view(np.uint8)
    if kind == GGMLQuantizationType.IQ1_M:  # its float16 is the upper four bits of the last four pairs of bytes
        upper = int(np.float16(2e-4).view(np.uint16))
        for number, place in enumerate(range(block_bytes - 7, block_bytes, 2)):
            blocks[:, place] = blocks[:, place] % 16 + (upper >> 4 * number) % 16 * 16
    return blocks.reshape(*values.shape[:-1], -1)


def _values(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps") or config["norm_eps"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": rope.get("rope_theta"),
        "attention.sliding_window": config.get("sliding_window"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "expert_count": config.get("num_experts") or config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config["intermediate_size"]
        if architecture == "gpt-oss"
        else config.get("moe_intermediate_size"),
    }
    if architecture == "granitehybrid":
        values |= _values_of_granite(config)
    if architecture in ("granite", "granitehybrid"):
        values |= {
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    if architecture == "gemma4":
        values |= _values_of_gemma4(config)
    if architecture in ("deepseek2", "glm4moe"):
        values |= _values_of_deepseek(config, architecture, head_dim, rope)
    if architecture == "qwen2moe":
        values["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if architecture.startswith("nemotron_h"):
        values |= _values_of_nemotron(config)
    if "linear_num_key_heads" in config:
        values |= _values_of_hybrid(config, architecture, head_dim, rope)
    if "conv_L_cache" in config:
        counts = {"conv": 0, "full_attention": config["num_key_value_heads"]}
        values |= {
            "attention.head_count_kv": [counts[kind] for kind in config["layer_types"]],
            "shortconv.l_cache": config["conv_L_cache"],
            "leading_dense_block_count": config.get("num_dense_layers"),
            "expert_gating_func": 2 if architecture == "lfm2moe" else None,
        }
    if rope.get("rope_type") == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    return {f"{architecture}.{key}": value for key, value in values.items() if value is not None}


def _values_of_deepseek(
    config: Mapping[str, Any], architecture: str, head_dim: int, rope: Mapping[str, Any]
) -> dict[str, Any]:
    kinds = config.get("mlp_layer_types") or []
    is_sigmoid = config["architectures"] != ["DeepseekV2ForCausalLM"]
    values = {
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_gating_func": 1 + is_sigmoid,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"] or None if is_sigmoid else None,
        "leading_dense_block_count": kinds.count("dense") or config.get("first_k_dense_replace"),
    }
    if architecture == "glm4moe":
        return {**values, "rope.dimension_count": int(head_dim * rope["partial_rotary_factor"])}
    rank, rotary_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        **values,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotary_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary_dim,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotary_dim,
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"] if "mscale_all_dim" in rope else None,
    }


def _of_deepseek(config: Mapping[str, Any], weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return the weights of a DeepSeek with experts, and the maps to keys, transposed, and to values, apart."""
    found: dict[str, Array] = {}
    for name, values in weights.items():
        if name.endswith(".kv_b_proj.weight"):
            heads = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
            keys, values_of = np.split(heads, [config["qk_nope_head_dim"]], 1)
            found[name.replace("kv_b_proj", "k_b_proj")] = np.ascontiguousarray(keys.swapaxes(1, 2))
            found[name.replace("kv_b_proj", "v_b_proj")] = values_of
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = values
    return found


def _values_of_gemma4(config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, size = config["num_hidden_layers"], config["intermediate_size"]
    is_windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    whole = next(iter(config["per_layer_config"].values()))
    num_own = num_layers - config["num_kv_shared_layers"]
    num_kv_heads, of_whole = config["num_key_value_heads"], whole.get("num_key_value_heads")
    has_experts = config["enable_moe_block"]
    return {
        "attention.key_length": whole["head_dim"],
        "attention.value_length": whole["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "rope.dimension_count": whole["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "attention.sliding_window_pattern": is_windowed,
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "attention.head_count_kv": [num_kv_heads if each else of_whole for each in is_windowed]
        if of_whole
        else num_kv_heads,
        "feed_forward_length": [size * (1 + (layer >= num_own)) for layer in range(num_layers)]
        if config["use_double_wide_mlp"]
        else size,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "expert_count": config["num_experts"] if has_experts else None,
        "expert_used_count": config["top_k_experts"] if has_experts else None,
    }


def _of_gemma4(config: Mapping[str, Any], weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return the weights of a Gemma 4 with the suffixes of llama.cpp, and what divides its rotary frequencies."""
    whole, suffixes = config["rope_parameters"]["full_attention"], (".gate_up_proj", ".down_proj", ".layer_scalar")
    num_pairs = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
    num_turning = int(num_pairs * whole["partial_rotary_factor"])
    factors = np.array([1.0] * num_turning + [1e30] * (num_pairs - num_turning), np.float32)
    found = {"rope_freqs.weight": factors}
    for name, values in weights.items():
        own = name.replace("router.scale", "router.proj.scale")
        own = own.replace("router.per_expert_scale", "experts.down_proj.scale")
        found[f"{own}.weight" if own.endswith(suffixes) else own] = values
    return found


def _values_of_granite(config: Mapping[str, Any]) -> dict[str, Any]:
    num_kv_heads, kinds = config["num_key_value_heads"], config["layer_types"]
    return {
        "attention.head_count_kv": [num_kv_heads * (kind == "full_attention") for kind in kinds],
        "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
    }


def _values_of_nemotron(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds, num_kv_heads = config["layers_block_type"], config["num_key_value_heads"]
    has_experts = "moe" in kinds
    size = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    experts = {
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": size,
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"],
    }
    return {
        "attention.head_count_kv": [num_kv_heads * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [size * (kind in ("mlp", "moe")) for kind in kinds],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        **{name: value if has_experts else None for name, value in experts.items()},
    }


def _values_of_hybrid(
    config: Mapping[str, Any], architecture: str, head_dim: int, rope: Mapping[str, Any]
) -> dict[str, Any]:
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 0.25))
    sizes = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        "rope.dimension_count": rotary_dim,
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    if architecture == "qwen3next":
        return sizes
    num_pairs = rotary_dim // 2  # by turns of the three parts of a position
    sections = [(num_pairs + 2) // 3, (num_pairs + 1) // 3, num_pairs // 3, 0]
    return {**sizes, "rope.dimension_sections": sections}


def _tensors(config: Mapping[str, Any], architecture: str, weights: Mapping[str, Array]) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    experts: dict[str, list[Array]] = {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    has_norms_less_1 = architecture in ("gemma", "gemma2", "gemma3")
    names = {**_NAMES, **(_NAMES_OF_GEMMA if architecture in ("gemma2", "gemma3") else {})}
    if architecture == "gpt-oss":
        names |= _NAMES_OF_GPT_OSS
        weights = _apart(weights)
    if "conv_L_cache" in config:
        names |= _NAMES_OF_LFM2
        weights = {
            re.sub(r"\.expert_bias$", ".expert_bias.bias", name): each.squeeze(1) if ".conv.conv." in name else each
            for name, each in weights.items()
        }
    if "linear_num_key_heads" in config:
        names |= _NAMES_OF_HYBRIDS
        weights = _of_hybrid(config, architecture, weights)
    if architecture == "gemma4":
        names |= {**_NAMES_OF_GEMMA4, "rope_freqs": "rope_freqs"}
        weights = _of_gemma4(config, weights)
    if architecture in ("deepseek2", "glm4moe"):
        names |= _NAMES_OF_DEEPSEEK | (_NAMES_OF_GPT_OSS if architecture == "glm4moe" else {})
        weights = _of_deepseek(config, weights)
    if architecture == "seed_oss":
        names |= _NAMES_OF_GPT_OSS
    if architecture == "qwen2moe":
        names |= {name: each for name, each in _NAMES_OF_HYBRIDS.items() if "shared_expert" in name}
    if architecture == "granitehybrid":
        names |= _NAMES_OF_GRANITE
        weights = _of_granite(config, weights)
    if architecture.startswith("nemotron_h"):
        names |= {**_NAMES_OF_GRANITE, "mlp.expert_bias": "exp_probs_b"}
        granite = {"num_local_experts": 1, "mamba_n_groups": config["n_groups"]}
        weights = _of_granite(granite, {_name_of_nemotron(name): values for name, values in weights.items()})
    for name, values in sorted(weights.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])[:2]]):
        module, suffix = name.rsplit(".", 1)
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", module)
        part = layer[2] if layer else module
        if architecture in INTERLEAVED and part.endswith(tuple(heads)):
            values = _interleaved(values, heads[part.rpartition(".")[2]])
        if layer and part.endswith(("A_log", ".D")):
            tensors[f"blk.{layer[1]}.{'ssm_d' if part.endswith('.D') else 'ssm_a'}"] = values
            continue
        if (has_norms_less_1 or "linear_num_key_heads" in config) and "norm" in part and part != "linear_attn.norm":
            values = values + np.float32(1)
        expert = re.sub(r"\.experts\.\d+\.", ".experts.", part)
        found = f"blk.{layer[1]}.{names[expert]}.{suffix}" if layer else f"{names[part]}.{suffix}"
        if expert != part:
            experts.setdefault(found, []).append(values)
        else:
            tensors[found] = values
    return tensors | {name: np.stack(each) for name, each in experts.items()}


def _of_hybrid(config: Mapping[str, Any], architecture: str, weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return the weights of a hybrid, its delta nets as llama.cpp computes them."""
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim, ratio = config["linear_key_head_dim"], config["linear_value_head_dim"], num_values // num_keys
    key_size = num_keys * key_dim

    def tiled(values: Array, dim: int) -> Array:
        """Put the value heads of key heads by turns."""
        if architecture == "qwen3next":
            return values
        return values.reshape(num_keys, ratio, dim, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)

    def with_keys(values: Array) -> Array:
        return np.concatenate([values[: 2 * key_size], tiled(values[2 * key_size :], value_dim)])

    found: dict[str, Array] = {}
    for name, values in weights.items():
        if ".in_proj_qkvz." in name:
            heads = values.reshape(num_keys, -1, values.shape[1])
            ends = np.cumsum([key_dim, key_dim, ratio * value_dim])
            *qkv, z = (each.reshape(-1, values.shape[1]) for each in np.split(heads, ends, 1))
            found |= {name.replace("qkvz", "qkv"): np.concatenate(qkv), name.replace("qkvz", "z"): z}
        elif ".in_proj_qkv." in name:
            found[name] = with_keys(values)
        elif ".conv1d." in name:
            found[name] = with_keys(values.squeeze(1))
        elif ".in_proj_z." in name:
            found[name] = tiled(values, value_dim)
        elif ".in_proj_b." in name or ".in_proj_a." in name:
            found[name] = tiled(values, 1)
        elif name.endswith(".A_log"):
            found[f"{name}.weight"] = -np.exp(tiled(values, 1).astype(np.float64)).astype(np.float32)
        elif name.endswith(".dt_bias"):
            found[name.replace(".dt_bias", ".dt_proj.bias")] = tiled(values, 1)
        elif ".linear_attn.out_proj." in name:
            found[name] = tiled(values.T, value_dim).T
        else:
            found[name] = values
    return found


def _of_granite(config: Mapping[str, Any], weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return the weights of a Granite 4.0, gate and up apart, its Mamba-2 layers as llama.cpp computes them."""
    modules = {"block_sparse_moe": "mlp.experts", "shared_mlp": "mlp.shared_expert"}
    if not config["num_local_experts"]:
        modules["shared_mlp"] = "mlp"
    found: dict[str, Array] = {}
    for name, values in weights.items():
        module = next((each for each in modules if f".{each}." in name), "")
        renamed = name.replace(module, modules.get(module, ""))
        if ".input_linear." in name:
            for part, half in zip(("gate", "up"), np.split(values, 2, -2), strict=True):
                found[renamed.replace("input_linear", f"{part}_proj")] = half
        elif ".output_linear." in name:
            found[renamed.replace("output_linear", "down_proj")] = values
        elif ".conv1d.weight" in name:
            found[name] = values.squeeze(1)
        elif name.endswith(".A_log"):
            found[f"{name}.weight"] = -np.exp(values.astype(np.float64)).astype(np.float32)[:, None]
        elif name.endswith(".D"):
            found[f"{name}.weight"] = values[:, None]
        elif name.endswith(".dt_bias"):
            found[name.replace(".dt_bias", ".dt_proj.bias")] = values
        elif name.endswith(".mamba.norm.weight"):
            found[name] = values.reshape(config["mamba_n_groups"], -1)
        else:
            found[name] = values
    return found


def _name_of_nemotron(name: str) -> str:
    """Return what other families call a tensor of a Nemotron-H."""
    name = name.replace("backbone.", "model.").replace("e_score_correction_bias", "e_score_correction.bias")
    for part, other in (
        (r"model\.embeddings", "model.embed_tokens"),
        (r"model\.norm_f", "model.norm"),
        (r"(\d+)\.norm", r"\1.input_layernorm"),
        (r"mixer\.(._proj)", r"self_attn.\1"),
        (r"mixer\.gate\.e_score_correction", "mlp.expert_bias"),
        (r"mixer\.shared_experts", "mlp.shared_expert"),
        (r"mixer\.(experts|gate|up_proj|down_proj)", r"mlp.\1"),
        (r"mixer\.", "mamba."),
    ):
        name = re.sub(part, other, name)
    return name


def _apart(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return the weights of gpt-oss with experts, and their gates, apart; outputs come before inputs."""
    found: dict[str, Array] = {}
    for name, values in weights.items():
        module, part = name.rsplit(".", 1)
        if not module.endswith(".experts"):
            found[f"{name}.weight" if part == "sinks" else name] = values
            continue
        suffix = "bias" if part.endswith("_bias") else "weight"
        for expert, own in enumerate(values):
            own = own.T  # of a vector nothing
            parts = {"down_proj": own} if part.startswith("down") else {"gate_proj": own[::2], "up_proj": own[1::2]}
            found |= {f"{module}.{expert}.{each}.{suffix}": part_of for each, part_of in parts.items()}
    return found


def _interleaved(values: Array, num_heads: int) -> Array:
    """Put row i and row i + head_dim / 2 of each head next to each other."""
    heads = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


def _write(
    path: Path, architecture: str, values: Mapping[str, Any], tensors: Mapping[str, Array], type_of: TypeOf
) -> None:
    writer = GGUFWriter(path, architecture)
    writer.data_alignment = values.get("general.alignment", writer.data_alignment)
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        kind = type_of(name, tensor)
        stored = tensor if tensor.dtype == np.uint8 else _stored(name, tensor.astype(np.float32), kind)
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
