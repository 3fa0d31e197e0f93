"""The executor's settings without the library that checks them, which a machine that only measures may lack."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from executor_svc.config import ExecutorConfig

# Those of `executor_svc.config.ExecutorConfig` that a worker reads, with its defaults; a test compares the two.
DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "quantization": "none",
    "compute_dtype": "float32",
    "cpu_kernels": "auto",
    "numerics": "fast",
    "attention_backend": "auto",
    "cuda_graphs": "auto",
    "tp": 1,
    "num_threads": None,
    "kv_cache_gib": None,
    "gpu_memory_utilization": 0.9,
    "num_device_blocks": None,
    "host_cache_gib": 0.5,
    "num_host_blocks": None,
    "max_model_len": None,
    "block_size_tokens": None,
    "max_grammar_slots": 256,
    "max_num_seqs": 256,
    "pooling": "auto",
    "max_num_batched_tokens": 2048,
    "max_message_bytes": 64 * 2**20,
}


def executor_settings(**changes: Any) -> "ExecutorConfig":
    """Return settings that differ from the defaults as named. Raises: TypeError: there is no such setting."""
    unknown = changes.keys() - DEFAULTS.keys() - {"model"}
    if unknown:
        raise TypeError(f"no settings of an executor: {', '.join(sorted(unknown))}")
    return cast("ExecutorConfig", SimpleNamespace(**{"model": "", **DEFAULTS, **changes}))
