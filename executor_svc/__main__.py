"""`python -m executor_svc`: the executor with a real model."""

import os
import sys

from executor_svc.config import ExecutorConfig
from executor_svc.errors import ModelLoadError
from executor_svc.service import run_executor
from executor_svc.worker import Worker
from shared.config import load_config_or_exit


def main() -> int:
    """Run the executor; return the exit code."""
    config = load_config_or_exit(ExecutorConfig, sys.argv[1:], os.environ)
    return run_executor(config, lambda: _load_worker(config))


def _load_worker(config: ExecutorConfig) -> Worker:
    """Load the model. Torch is imported here, so that the server answers before that is done."""
    _spin_less()
    try:
        from executor_svc.worker_loading import load_worker
    except ModuleNotFoundError as error:
        raise ModelLoadError(f"the package {error.name} is missing; install octavo[executor]") from error
    return load_worker(
        config.model,
        device=config.device,
        dtype=config.dtype,
        quantization=config.quantization,
        cpu_kernels=config.cpu_kernels,
        block_size_tokens=config.block_size_tokens,
        num_device_blocks=config.num_device_blocks,
        num_threads=config.num_threads,
        kv_cache_gib=config.kv_cache_gib,
        num_host_blocks=config.num_host_blocks,
        host_cache_gib=config.host_cache_gib,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_message_bytes=config.max_message_bytes,
        model_id=config.model_id,
    )


def _spin_less() -> None:
    """Let OpenMP's threads sleep soon when they wait for each other; it reads this when torch is imported.

    By default they spin for milliseconds, and where other work shares the cores they steal them from
    the very thread that they wait for. A token of the demo model beside 3 busy processes took 114 and
    120 ms with this, 507 ms without; alone on the machine 58 and 69 ms with, 57 ms without (Intel Xeon
    2.5 GHz, 2 cores, 2026-11-21). Who sets one of the variables decides.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


if __name__ == "__main__":
    sys.exit(main())
