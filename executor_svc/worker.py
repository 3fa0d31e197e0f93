"""The seam between the executor's service and what runs the steps.

Two implementations: `executor_svc.torch_worker.TorchWorker` (the model) and
`executor_svc.fake_worker.FakeWorker` (no torch; checks every block table). The service calls a worker from
one thread only, so a worker needs no locks.
"""

from typing import Protocol

from shared.batch_table import BatchTable
from shared.executor_info import ExecutorInfo, TokenizerFile
from shared.step import Step, StepResult


class Worker(Protocol):
    """Runs steps on a batch table and a KV cache that it owns."""

    @property
    def info(self) -> ExecutorInfo:
        """What this executor is; constant over its life."""

    @property
    def table(self) -> BatchTable:
        """The batch table; replaced by `reset`."""

    def reset(self) -> None:
        """Empty the batch table: a scheduler has attached. The cache contents stay."""

    def execute(self, step: Step) -> StepResult:
        """Apply the step to the table, run it, record and return the sampled tokens.

        Raises:
            InvalidStepError: the step does not fit the table or the cache; nothing was written.
            StepFailedError: it failed while it ran; the cache contents are in doubt.
        """

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return tokenizer.json and its companions; empty if the model has no tokenizer.json."""
