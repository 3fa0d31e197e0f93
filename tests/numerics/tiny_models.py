"""Random Llama models of a few thousand weights, saved as transformers saves them."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 97
MAX_MODEL_LEN = 128

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "hidden_size": 45,
        "intermediate_size": 51,
    },
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "wide_heads": {"head_dim": 24},
}


@torch.no_grad()
def save_tiny_model(directory: Path, *, seed: int = 7, **overrides: object) -> LlamaForCausalLM:
    """Save a random model, float32, and return transformers' form of it."""
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_MODEL_LEN,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        # transformers starts biases at 0, norms at 1 and the rest near 0: too tame to show a mistake.
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        if "norm" in name:
            parameter.add_(1.0)
    model.eval()
    model.save_pretrained(directory)
    return model
