"""Models of a known shape with random weights, made on the device: no files."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from executor_svc.checkpoint.weight_map import TensorTarget
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.models.families import parse_config
from executor_svc.models.selection import choose_decoder
from executor_svc.worker.assembly import ModelIdentity, assemble_worker
from executor_svc.worker.torch_worker import TorchWorker

if TYPE_CHECKING:
    from executor_svc.config import ExecutorConfig

# By the names of config.json.
LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128_256,
}
LLAMA_1B: Mapping[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
TINY: Mapping[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}


class RandomWeights:
    """Stands for a checkpoint: normally distributed numbers, small enough that nothing overflows."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        # One block of numbers, cut to size: drawing billions of them would take longer than the check.
        self._block = torch.randn(2**22, generator=generator, device=device) * 0.02

    def load_into(
        self, targets: Mapping[str, TensorTarget], is_redundant: Callable[[str], bool], optional_prefix: str = ""
    ) -> None:
        """Fill the targets; see `executor_svc.checkpoint.weights.Checkpoint.load_into`."""
        for target in targets.values():
            size = math.prod(target.shape)
            repeated = self._block.repeat(-(-size // len(self._block)))
            target.fill(repeated[:size].view(tuple(target.shape)))


def random_worker(model: Mapping[str, Any], config: "ExecutorConfig", device: torch.device) -> TorchWorker:
    """Return the worker of a model with random weights, made as for a model that has files."""
    model_config = parse_config(dict(model), Path("config.json"))
    chosen = choose_decoder(model_config, config, device)
    chosen.load(cast("Checkpoint", RandomWeights(device)))
    return assemble_worker(chosen, ModelIdentity("random", "", model["max_position_embeddings"]), config, device)


def num_weight_bytes(settings: Mapping[str, int], bytes_per_weight: int) -> int:
    """Return what one decode step must read of the weights: all but the embedding, of which it reads a row."""
    hidden, num_layers = settings["hidden_size"], settings["num_hidden_layers"]
    head_dim = hidden // settings["num_attention_heads"]
    attention = hidden * head_dim * 2 * (settings["num_attention_heads"] + settings["num_key_value_heads"])
    mlp = 3 * hidden * settings["intermediate_size"]
    head = hidden * settings["vocab_size"]
    return bytes_per_weight * (num_layers * (attention + mlp) + head)
