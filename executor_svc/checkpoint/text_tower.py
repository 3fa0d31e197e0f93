"""The language model of a checkpoint that combines it with a vision tower: what is served of it, for text.

Its config.json has the text model's under `text_config` (Qwen2-VL's older ones beside the rest), and its tensors have
the tower's name in front. The three parts of a position (M-RoPE) are equal for text: it is the usual embedding.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# Of Gemma 3: published checkpoints leave out values that equal transformers' defaults.
_GEMMA3: Final[Mapping[str, object]] = MappingProxyType(
    {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
    }
)
# The architecture of the text model, and its values where the file has none.
_TEXT_MODELS: Final[Mapping[str, tuple[str, Mapping[str, object]]]] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", _GEMMA3),
        "Gemma4ForConditionalGeneration": ("Gemma4ForCausalLM", {}),
        "Gemma4UnifiedForConditionalGeneration": ("Gemma4UnifiedForCausalLM", {}),
        "Mistral3ForConditionalGeneration": ("MistralForCausalLM", {}),
        "Qwen2VLForConditionalGeneration": ("Qwen2ForCausalLM", {}),
        "Qwen2_5_VLForConditionalGeneration": ("Qwen2ForCausalLM", {}),
        "Qwen3VLForConditionalGeneration": ("Qwen3ForCausalLM", {}),
        "Qwen3_5ForConditionalGeneration": ("Qwen3_5ForCausalLM", {}),
        "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeForCausalLM", {}),
    }
)
_OTHER_TOWERS = tuple(
    f"{prefix}{name}."
    for prefix in ("", "model.")
    for name in (
        *("vision_tower", "vision_model", "multi_modal_projector", "visual"),
        *("audio_tower", "embed_vision", "embed_audio"),
    )
)


def combined_architecture(config: Mapping[str, object]) -> str | None:
    """Return the architecture in a config.json if its text model can be served alone; None: it is another."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name in _TEXT_MODELS else None


def text_config(config: dict[str, object]) -> dict[str, object]:
    """Return the config.json that the text model would have alone; of a model without towers the whole one."""
    combined = combined_architecture(config)
    if combined is None:
        return config
    architecture, defaults = _TEXT_MODELS[combined]
    nested = config.get("text_config")
    if isinstance(nested, dict) and nested.get("model_type") == "ministral3":
        architecture = "Ministral3ForCausalLM"
    shared = {key: value for key, value in config.items() if key not in ("text_config", "vision_config")}
    values = {**defaults, **shared, **(nested if isinstance(nested, dict) else {}), "architectures": [architecture]}
    if config.get("tie_word_embeddings") is not None:  # the head is the whole model's
        values["tie_word_embeddings"] = config["tie_word_embeddings"]
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key)
        if isinstance(rope, dict) and "mrope" in (rope.get("rope_type"), rope.get("type")):
            values[key] = {**rope, "rope_type": "default"}
    return values


def is_of_another_tower(name: str) -> bool:
    """Whether a tensor of such a checkpoint belongs to another part than the text model."""
    return name.startswith(_OTHER_TOWERS)


def possible_names(name: str) -> tuple[str, ...]:
    """Return what a tensor of the text model may be called in such a checkpoint, its own name first."""
    return (name, f"language_model.{name}", name.replace("model.", "model.language_model.", 1))
