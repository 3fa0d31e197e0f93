"""Models with random weights, made once by transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# By a name of ours: model type and what differs from SIZES.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral, window": ("mistral", {"sliding_window": 9, "head_dim": 16}),
    "qwen3, norms of queries and keys": ("qwen3", {"head_dim": 16}),
    "gemma2, soft caps and windows": (
        "gemma2",
        {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 20, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "bloom, ALiBi": ("bloom", {"n_head": 4, "n_layer": 2}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "mixtral, experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe, many experts": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32},
    ),
}
# Those whose steps are not replayed.
OTHER_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox, code of transformers": ("gpt_neox", {}),
}


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return a function from a name above to the model's directory and transformers' model, float32 on the CPU."""
    made: dict[str, tuple[Path, Any]] = {}

    def save(name: str) -> tuple[Path, Any]:
        if name not in made:
            model_type, changes = {**MODELS, **OTHER_MODELS}[name]
            torch.manual_seed(0)
            config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.mul_(4)  # logits that are far apart
            directory = tmp_path_factory.mktemp("models") / model_type
            model.save_pretrained(directory)
            made[name] = (directory, model)
        return made[name]

    return save
