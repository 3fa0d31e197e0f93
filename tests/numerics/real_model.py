"""A model twice: as our worker runs it, and as transformers does."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from executor_svc.config import ExecutorConfig
from executor_svc.worker.loading import load_worker
from executor_svc.worker.torch_worker import TorchWorker
from tests.numerics.driver import PoisonedCacheEngine


class RealModel:
    """A model in a directory, float32, or a GGUF file, with pools of `num_blocks` blocks on the device and on the host.

    The cache is full of NaN at first: whatever attention reads too much shows. `settings` are those of the executor.
    """

    def __init__(self, directory: Path, block_size_tokens: int, num_blocks: int, **settings: Any) -> None:
        self._directory = directory
        self.num_blocks = num_blocks
        self._settings = {"block_size_tokens": block_size_tokens, "max_num_seqs": 128, **settings}
        self._workers: dict[tuple[tuple[str, Any], ...], TorchWorker] = {}

    @cached_property
    def reference(self) -> Any:
        """The model of transformers."""
        return AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.float32)

    def new_worker(self, **settings: Any) -> TorchWorker:
        """Load the model once more: another instance, and nothing in its cache."""
        pools = {"num_device_blocks": self.num_blocks, "num_host_blocks": self.num_blocks}
        num_threads_before = torch.get_num_threads()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)
            config = {"model": str(self._directory), **pools, **self._settings, **settings}
            worker = load_worker(ExecutorConfig.model_validate(config))
        assert isinstance(worker, TorchWorker)
        torch.set_num_threads(num_threads_before)  # the kernels of the worker keep theirs
        return worker

    def worker(self, **settings: Any) -> TorchWorker:
        """Return the one worker of these settings as an Attach leaves it: an empty table, stale keys in the cache."""
        key = tuple(sorted(settings.items()))
        if key not in self._workers:
            self._workers[key] = self.new_worker(**settings)
        self._workers[key].reset()
        return self._workers[key]

    def logits(self, token_ids: Sequence[int], first: int) -> torch.Tensor:
        """Return what transformers says at each position from `first`: raw, [num_tokens - first, vocab_size]."""
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(torch.tensor([list(token_ids)])).logits[0, first:]
        return logits
