"""Models of a known shape with random weights, made on the device, and their attention backends: no files.

The executor's settings are here without the library that checks them, which a machine that only measures may lack.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from executor_svc.attention.interface import AttentionBackend, AttentionLayer, DecodePlanner
from executor_svc.attention.rules import AttentionNeeds
from executor_svc.attention.selection import CUDA_BACKENDS, choose_backend
from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.checkpoint.weight_map import TensorTarget
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.models.families import parse_config
from executor_svc.models.selection import choose_decoder
from executor_svc.worker.assembly import ModelIdentity, assemble_worker
from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.errors import ModelLoadError

if TYPE_CHECKING:
    from executor_svc.config import ExecutorConfig

# The settings of `executor_svc.config.ExecutorConfig` that a worker reads, with its defaults; a test compares the two.
DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "auto",
    "quantization": "none",
    "allow_requantization": False,
    "compute_dtype": "float32",
    "kv_cache_dtype": "auto",
    "cpu_kernels": "auto",
    "numerics": "fast",
    "attention_backend": "auto",
    "cuda_graphs": "auto",
    "tp": 1,
    "num_threads": None,
    "kv_cache_gib": None,
    "state_cache_gib": None,
    "gpu_memory_utilization": 0.9,
    "num_device_blocks": None,
    "host_cache_gib": 0.5,
    "num_host_blocks": None,
    "max_model_len": None,
    "block_size_tokens": None,
    "max_grammar_slots": 256,
    "max_draft_tokens": 7,
    "draft_method": "prompt-lookup",
    "max_num_seqs": 256,
    "pooling": "auto",
    "max_num_batched_tokens": 2048,
    "max_message_bytes": 64 * 2**20,
    "max_transfers": 16,
    "role": "both",
    "lora": (),
    "lora_dir": (),
    "weights_dir": (),
    "max_adapter_slots": 8,
    "max_adapter_rank": 64,
}


def executor_settings(**changes: Any) -> "ExecutorConfig":
    """Return settings that differ from the defaults as named. Raises: TypeError: there is no such setting."""
    unknown = changes.keys() - DEFAULTS.keys() - {"model"}
    if unknown:
        raise TypeError(f"no settings of an executor: {', '.join(sorted(unknown))}")
    return cast("ExecutorConfig", SimpleNamespace(**{"model": "", "num_adapter_slots": 0, **DEFAULTS, **changes}))


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


def usable_backends(device: torch.device, dtype: torch.dtype) -> dict[str, tuple[AttentionBackend, int]]:
    """Return each backend that can run a plain model in a number format, by name, and the block size it prefers.

    On a CPU these are torch and our Triton kernels, in Triton's interpreter.
    """
    if device.type == "cpu":
        from executor_svc.attention.triton_backend import TritonAttentionBackend

        return {"triton": (TritonAttentionBackend(num_multiprocessors=4), 16), "torch": (TorchAttentionBackend(), 16)}
    needs = AttentionNeeds(dtype, 32, 8, 128, [AttentionLayer(1.0)], torch.cuda.get_device_capability(device))
    usable: dict[str, tuple[AttentionBackend, int]] = {}
    for name in CUDA_BACKENDS:
        try:
            chosen = choose_backend(name, needs)
            usable[name] = (chosen.make(), chosen.block_size)
        except ModelLoadError:
            continue
    return usable


def decode_planners(device: torch.device, dtype: torch.dtype) -> dict[str, DecodePlanner]:
    """Return the backends with decodes that a CUDA graph can hold."""
    backends = {name: backend for name, (backend, _) in usable_backends(device, dtype).items()}
    return {name: backend for name, backend in backends.items() if isinstance(backend, DecodePlanner)}
