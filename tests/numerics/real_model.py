"""A model twice: as our worker runs it, and as transformers does."""

from collections.abc import Sequence
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
    """A model in a directory, float32, with pools of `num_blocks` blocks on the device and on the host.

    The cache is full of NaN at first: whatever attention reads too much shows.
    """

    def __init__(self, directory: Path, block_size_tokens: int, num_blocks: int) -> None:
        self._directory = directory
        self._block_size_tokens = block_size_tokens
        self.num_blocks = num_blocks
        self.reference: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._worker = self.new_worker()

    def new_worker(self) -> TorchWorker:
        """Load the model once more: another instance, and nothing in its cache."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)
            return load_worker(
                ExecutorConfig(
                    model=str(self._directory),
                    block_size_tokens=self._block_size_tokens,
                    num_device_blocks=self.num_blocks,
                    num_host_blocks=self.num_blocks,
                    max_num_seqs=128,
                )
            )

    def worker(self) -> TorchWorker:
        """Return the one worker as an Attach leaves it: an empty table, stale keys and values in the cache."""
        self._worker.reset()
        return self._worker

    def logits(self, token_ids: Sequence[int], first: int) -> torch.Tensor:
        """Return what transformers says at each position from `first`: raw, [num_tokens - first, vocab_size]."""
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(torch.tensor([list(token_ids)])).logits[0, first:]
        return logits
