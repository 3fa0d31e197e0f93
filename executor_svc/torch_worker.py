"""The worker that runs a real model: batch table, model runner, cache engine and sampler of one rank.

`executor_svc/worker_loading.py` makes it. Read next: `executor_svc/model_runner.py`.
"""

import time
from dataclasses import replace

import torch

from executor_svc.cache_engine import CacheEngine
from executor_svc.model_runner import ModelRunner
from executor_svc.parallel.group import TensorParallelGroup
from executor_svc.sampler import Sampler
from executor_svc.step_answer import answer_step, follow_answer
from executor_svc.worker import check_layout, check_step
from shared.batch_table import BatchTable, StepLayout
from shared.errors import InvalidStepError, StepFailedError
from shared.executor_info import ExecutorInfo, TokenizerFile
from shared.step import Step, StepResult, no_slots


class TorchWorker:
    """Runs steps on the model; see `executor_svc.worker.Worker`.

    Owns the batch table and, through the cache engine, the KV cache. Not thread-safe. In a group of several ranks
    all run the same steps; rank 0 samples, and all record its tokens.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        model_runner: ModelRunner,
        cache_engine: CacheEngine,
        sampler: Sampler,
        tokenizer_files: tuple[TokenizerFile, ...],
        group: TensorParallelGroup,
    ) -> None:
        self._info = info
        self._model_runner = model_runner
        self._cache_engine = cache_engine
        self._sampler = sampler
        self._tokenizer_files = tokenizer_files
        self._group = group
        self.reset()

    @property
    def info(self) -> ExecutorInfo:
        """What this executor is; constant over its life."""
        return self._info

    @property
    def table(self) -> BatchTable:
        """The batch table; replaced by `reset`."""
        return self._table

    def reset(self) -> None:
        """Empty the batch table: a scheduler has attached. The cache contents stay."""
        info = self._info
        self._table = BatchTable(info.max_num_seqs, info.max_model_len, info.block_size_tokens, info.num_device_blocks)

    def execute(self, step: Step) -> StepResult:
        """Apply the step to the table, run it, record and return the sampled tokens.

        Raises:
            InvalidStepError: the step does not fit the table or the cache; nothing was written.
            StepFailedError: it failed while it ran; the cache contents are in doubt.
        """
        check_step(step, self._info)
        try:
            return self._execute(step)
        except (InvalidStepError, StepFailedError):
            raise
        except Exception as error:
            # Torch fails with many types (RuntimeError, IndexError, out of memory); all mean the same here.
            raise StepFailedError(f"step {step.step_id} failed: {type(error).__name__}: {error}") from error

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return tokenizer.json and its companions; empty if the model has no tokenizer.json."""
        return self._tokenizer_files

    @torch.inference_mode()
    def _execute(self, step: Step) -> StepResult:
        begin_s = time.perf_counter()
        table = self._table
        layout = table.apply(step.delta)
        digest = check_layout(step, layout, table, self._info.max_num_batched_tokens)
        self._cache_engine.move(step)
        result = StepResult(step.epoch, step.step_id, no_slots())
        if layout.num_tokens:
            result = self._compute(step, layout)
            table.record(layout, result.sampled_token_ids)
        duration_us = round((time.perf_counter() - begin_s) * 1e6)
        return replace(result, execute_duration_us=duration_us, table_digest=digest)

    def _compute(self, step: Step, layout: StepLayout) -> StepResult:
        """Run the model and sample; on every rank the result has the tokens of rank 0."""
        computed = self._model_runner.run(self._table, layout)
        model = self._model_runner.model
        if self._group.rank == 0:
            result = answer_step(step, self._table, layout, computed, model, self._sampler)
        else:
            result = follow_answer(step, layout, computed, model)
        token_ids = torch.from_numpy(result.sampled_token_ids)
        result.sampled_token_ids = self._group.broadcast(token_ids).numpy()
        return result
