"""The seam between the executor's service and what runs the steps.

Two implementations: `executor_svc.torch_worker.TorchWorker` (the model) and
`executor_svc.fake_worker.FakeWorker` (no torch; checks every block table). The service calls a worker from
one thread only, so a worker needs no locks.
"""

from typing import Protocol

from shared.batch_table import BatchTable, StepLayout
from shared.errors import StepFailedError
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


def check_layout(step: Step, layout: StepLayout, table: BatchTable, max_num_batched_tokens: int) -> int | None:
    """Check a step once the table has laid it out; return the table's digest if the step has one.

    Raises: StepFailedError: the step computes too many tokens, or the scheduler's table is another one.
    """
    if layout.num_tokens > max_num_batched_tokens:
        raise StepFailedError(
            f"step {step.step_id} computes {layout.num_tokens} tokens; the limit is {max_num_batched_tokens}"
        )
    if step.table_digest is None:
        return None
    digest = table.digest()
    if digest != step.table_digest:
        raise StepFailedError(
            f"step {step.step_id}: the batch table has digest {digest:016x}, the scheduler's {step.table_digest:016x}"
        )
    return digest
