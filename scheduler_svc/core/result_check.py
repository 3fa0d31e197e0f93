"""Whether what came back is the result of the step that was sent.

The twin of `shared/delta_check.py`: there an executor refuses a step that does not fit its table, here
the scheduler refuses a result that does not fit the step. Nothing of a refused result is used; the
executor is given up, and its sequences are computed again elsewhere.
"""

import numpy as np

from scheduler_svc.core.batch import Batch
from scheduler_svc.core.step_plan import StepInFlight
from shared.batch_table import StepLayout
from shared.errors import ExecutorFaultError
from shared.step import Int32Array, StepResult


def check_result(result: StepResult, sent: StepInFlight, batch: Batch, vocab_size: int) -> None:
    """Accept a result of the oldest step in flight.

    Args:
        result: What came.
        sent: The step.
        batch: Knows who asked for log-probabilities.
        vocab_size: Token ids are 0 to `vocab_size` - 1.

    Raises: ExecutorFaultError: it is not a result of that step.
    """
    step, layout, token_ids = sent.step, sent.layout, result.sampled_token_ids
    if (result.epoch, result.step_id) != (step.epoch, step.step_id):
        raise ExecutorFaultError(
            f"epoch {result.epoch} step {result.step_id} came instead of {step.epoch} {step.step_id}"
        )
    num_rows = len(layout.sample_slots)
    if len(token_ids) != num_rows:
        raise ExecutorFaultError(f"step {result.step_id} has {len(token_ids)} sampled tokens for {num_rows} rows")
    if layout.num_candidates is not None:
        _check_candidates(result, layout.num_candidates, vocab_size)
        token_ids = token_ids[layout.num_candidates == 0]
    if not _are_token_ids(token_ids, vocab_size):
        raise ExecutorFaultError(f"step {result.step_id} has token ids outside 0 to {vocab_size - 1}")
    if batch.slots_with_logprobs:
        _check_logprobs(result, layout, batch)


def _check_logprobs(result: StepResult, layout: StepLayout, batch: Batch) -> None:
    asked = np.isin(layout.sample_slots, list(batch.slots_with_logprobs))
    asked &= batch.table.is_current(layout.sample_slots, layout.sample_generations)
    if asked.any() and (result.logprobs is None or np.isnan(result.logprobs[asked]).any()):
        raise ExecutorFaultError(f"step {result.step_id} lacks log-probabilities that were asked for")


def _check_candidates(result: StepResult, num_candidates: Int32Array, vocab_size: int) -> None:
    token_ids, logprobs = result.candidate_token_ids, result.candidate_logprobs
    total = int(num_candidates.sum())
    if token_ids is None or logprobs is None or not len(token_ids) == len(logprobs) == total:
        num_sent = 0 if token_ids is None else len(token_ids)
        raise ExecutorFaultError(f"step {result.step_id} has {num_sent} beam candidates instead of {total}")
    if not _are_token_ids(token_ids, vocab_size):
        raise ExecutorFaultError(f"step {result.step_id} has candidates outside 0 to {vocab_size - 1}")
    if np.isnan(logprobs).any():
        raise ExecutorFaultError(f"step {result.step_id} has candidates whose log-probability is not a number")


def _are_token_ids(numbers: Int32Array, vocab_size: int) -> bool:
    """Return whether all are 0 to `vocab_size` - 1. As unsigned numbers, negative ones are too large as well."""
    return not np.count_nonzero(numbers.view(np.uint32) >= vocab_size)
