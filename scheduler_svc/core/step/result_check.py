"""Checks that a result fits the step that was sent.

The twin of `octavo_shared/step_wire/delta_check.py`: there an executor refuses a step that does not fit its table, here
the scheduler refuses a result that does not fit the step. No part of a refused result is used; the
executor is given up, and its sequences are computed again on another one.
"""

import numpy as np

from octavo_shared.errors import ExecutorFaultError
from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.step import (
    BoolArray,
    Float32Array,
    Int32Array,
    PoolingTask,
    RowFlag,
    RowFlags,
    StepResult,
    TokenCounts,
)
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.slot_pool import SlotState
from scheduler_svc.core.step.step_plan import StepInFlight

# 0: the row has a token.
_FLAGS = (0, RowFlag.NOT_FINITE)
_FLAGS_OF_GRAMMARS = (0, *RowFlag)


def check_result(result: StepResult, sent: StepInFlight, batch: Batch, limits: CoreLimits) -> None:
    """Accept a result of the oldest step in flight.

    Args:
        result: The result.
        sent: The step.
        batch: Knows which slots asked for log-probabilities.
        limits: Token ids are 0 to `vocab_size` - 1. Without `flags_rows` all rows have numbers.

    Raises: ExecutorFaultError: it is not a result of that step.
    """
    step, layout, token_ids, vocab_size = sent.step, sent.layout, result.sampled_token_ids, limits.vocab_size
    if (result.epoch, result.step_id) != (step.epoch, step.step_id):
        raise ExecutorFaultError(
            f"epoch {result.epoch} step {result.step_id} came instead of {step.epoch} {step.step_id}"
        )
    num_rows = len(layout.sample_slots)
    if result.token_counts is not None:
        _check_counts(result, result.token_counts, layout)
    elif result.draft_counts is not None:
        raise ExecutorFaultError(f"step {result.step_id} has draft counts without token counts")
    elif len(token_ids) != num_rows:
        raise ExecutorFaultError(f"step {result.step_id} has {len(token_ids)} sampled tokens for {num_rows} rows")
    if result.row_flags is not None:
        _check_flags(result.row_flags, num_rows, result.step_id, limits)
    if layout.num_candidates is not None:
        found = result.candidate_token_ids, result.candidate_logprobs
        means = _repeated(result.row_flags, layout.num_candidates)
        _check_tokens("beam candidates", *found, means, result.step_id, vocab_size)
        if result.token_counts is None:
            token_ids = token_ids[layout.num_candidates == 0]
    if not _are_token_ids(token_ids, vocab_size):
        raise ExecutorFaultError(f"step {result.step_id} has token ids outside 0 to {vocab_size - 1}")
    if np.count_nonzero(batch.wants_logprobs):
        _check_logprobs(result, layout, batch)
    if layout.num_alternatives is not None:
        found = result.alternative_token_ids, result.alternative_logprobs
        if result.token_counts is None:
            means = _repeated(result.row_flags, layout.num_alternatives)
        else:
            means = np.ones(int((layout.num_alternatives * result.token_counts).sum()), np.bool_)
        _check_tokens("alternatives", *found, means, result.step_id, vocab_size)
    if layout.num_prompt_logprobs is not None:
        _check_prompt_logprobs(result, layout, limits)
    if sent.pooling_groups or result.pooling_outputs:
        _check_pooled(result, sent, limits)
    if (result.grammars_loaded and limits.tells_loads) or result.adapters_loaded:  # else the wire lets none through
        _check_loads(result, batch)
    _refuse_unrequested(result, layout)


def _refuse_unrequested(result: StepResult, layout: StepLayout) -> None:
    """Refuse values that were not requested: results are kept for a while, and these would be kept unchecked."""
    unasked = (
        ("beam candidates", layout.num_candidates, result.candidate_token_ids),
        ("alternatives", layout.num_alternatives, result.alternative_token_ids),
        ("log-probabilities of prompts", layout.num_prompt_logprobs, result.prompt_logprobs),
        ("alternatives of prompts", layout.num_prompt_logprobs, result.prompt_alternative_token_ids),
    )
    for what, asked, found in unasked:
        if asked is None and found is not None:
            raise ExecutorFaultError(f"step {result.step_id} has {len(found)} {what}, but none were requested")


def _check_loads(result: StepResult, batch: Batch) -> None:
    for pool, ends in batch.things.told(result):
        due = {slot for slot, state in enumerate(pool.states) if state is SlotState.LOADING}
        told = [end.slot for end in ends]
        unasked = [slot for slot in told if slot not in due or told.count(slot) > 1]
        if unasked:
            raise ExecutorFaultError(
                f"step {result.step_id} tells of a load into {pool.kind} {unasked[0]} that is not due"
            )
    for loaded in result.adapters_loaded:
        adapter = batch.things.adapters.keys[loaded.slot]
        if adapter is not None and adapter.digest and loaded.digest not in (b"", adapter.digest):
            raise ExecutorFaultError(
                f"step {result.step_id} tells of an adapter with the SHA-256 {loaded.digest.hex()} in adapter slot "
                f"{loaded.slot}; {adapter.digest.hex()} was to be loaded"
            )


def _check_counts(result: StepResult, counts: TokenCounts, layout: StepLayout) -> None:
    """Accept counts within the allowances, 0 only for beams and flagged rows, that add up to the tokens."""
    step_id, num_rows, num_tokens = result.step_id, len(layout.sample_slots), int(counts.sum())
    if len(counts) != num_rows:
        raise ExecutorFaultError(f"step {step_id} has {len(counts)} token counts for {num_rows} rows")
    most = layout.most_tokens
    if len(above := (counts > most).nonzero()[0]):
        row = above[0]
        raise ExecutorFaultError(f"step {step_id} has {counts[row]} tokens for a row that may get {most[row]}")
    has_none = most == 0 if result.row_flags is None else (most == 0) | (result.row_flags != 0)
    if np.count_nonzero((counts == 0) != has_none):
        raise ExecutorFaultError(f"step {step_id} has a row without tokens and without a flag, or with both")
    if len(result.sampled_token_ids) != num_tokens:
        raise ExecutorFaultError(
            f"step {step_id} has {len(result.sampled_token_ids)} sampled tokens where its counts add up to {num_tokens}"
        )
    drafts = result.draft_counts
    if drafts is not None and (len(drafts) != num_rows or np.count_nonzero((drafts >= most) & (drafts > 0))):
        raise ExecutorFaultError(f"step {step_id} has draft counts that do not fit its rows and their allowances")
    if drafts is not None and np.count_nonzero(counts > drafts + 1):
        raise ExecutorFaultError(f"step {step_id} has a row with more tokens than one and its drafts")
    if result.logprobs is not None and len(result.logprobs) != num_tokens:
        raise ExecutorFaultError(
            f"step {step_id} has {len(result.logprobs)} log-probabilities where its counts add up to {num_tokens}"
        )


def _check_flags(flags: RowFlags, num_rows: int, step_id: int, limits: CoreLimits) -> None:
    if not limits.flags_rows or len(flags) != num_rows:
        raise ExecutorFaultError(f"step {step_id} has {len(flags)} row flags for {num_rows} rows")
    unknown = flags[~np.isin(flags, _FLAGS_OF_GRAMMARS if limits.num_grammar_slots else _FLAGS)]
    if len(unknown):
        raise ExecutorFaultError(f"step {step_id} has the row flag {unknown[0]}, which was not negotiated")


def _check_pooled(result: StepResult, sent: StepInFlight, limits: CoreLimits) -> None:
    texts, outputs = sent.step.pooling_inputs, result.pooling_outputs
    if [output.number for output in outputs] != [text.number for text in texts]:
        raise ExecutorFaultError(
            f"step {result.step_id} has {len(outputs)} answers to {len(texts)} texts, or to others"
        )
    for text, output in zip(texts, outputs, strict=True):
        num_values = limits.embedding_size if text.task is PoolingTask.EMBED else limits.num_scores
        if len(output.values) != num_values:
            raise ExecutorFaultError(
                f"step {result.step_id} has {len(output.values)} values for a text instead of {num_values}"
            )
        if output.flag not in ((0, RowFlag.NOT_FINITE) if limits.flags_rows else (0,)):
            raise ExecutorFaultError(f"step {result.step_id} has the flag {output.flag} for a text")
        if not output.flag and not np.isfinite(output.values).all():
            raise ExecutorFaultError(f"step {result.step_id} has a value for a text that is not finite, and no flag")


def _check_logprobs(result: StepResult, layout: StepLayout, batch: Batch) -> None:
    asked = batch.wants_logprobs[layout.sample_slots]
    asked &= batch.table.is_current(layout.sample_slots, layout.sample_generations)
    if result.row_flags is not None:
        asked &= result.row_flags == 0
    if result.token_counts is not None:
        asked = asked.repeat(result.token_counts)
    if asked.any() and (result.logprobs is None or np.isnan(result.logprobs[asked]).any()):
        raise ExecutorFaultError(f"step {result.step_id} lacks the requested log-probabilities")


def _check_prompt_logprobs(result: StepResult, layout: StepLayout, limits: CoreLimits) -> None:
    counts, num_alternatives = layout.num_prompt_logprobs, layout.num_prompt_alternatives
    assert counts is not None
    assert num_alternatives is not None
    logprobs, total = result.prompt_logprobs, int(counts.sum())
    num_sent = 0 if logprobs is None else len(logprobs)
    is_no_number = np.isnan(logprobs) if logprobs is not None else np.zeros(total, np.bool_)
    if num_sent != total or (is_no_number.any() and not limits.flags_rows):
        raise ExecutorFaultError(
            f"step {result.step_id} has {num_sent} log-probabilities of prompts instead of {total}"
        )
    found = result.prompt_alternative_token_ids, result.prompt_alternative_logprobs
    means = ~is_no_number.repeat(num_alternatives.repeat(counts))
    _check_tokens("alternatives of prompts", *found, means, result.step_id, limits.vocab_size)


def _repeated(flags: RowFlags | None, counts: Int32Array) -> BoolArray:
    """Return which tokens have a meaning, [sum of counts]; tokens of a flagged row have none."""
    return np.ones(int(counts.sum()), np.bool_) if flags is None else (flags == 0).repeat(counts)


def _check_tokens(
    what: str,
    token_ids: Int32Array | None,
    logprobs: Float32Array | None,
    means: BoolArray,
    step_id: int,
    vocab_size: int,
) -> None:
    """Accept tokens with log-probabilities, [len(means)], that are numbers where `means`; None stands for no token."""
    expected = len(means)
    if token_ids is None and logprobs is None and not expected:
        return
    if token_ids is None or logprobs is None or not len(token_ids) == len(logprobs) == expected:
        num_sent = 0 if token_ids is None else len(token_ids)
        raise ExecutorFaultError(f"step {step_id} has {num_sent} {what} instead of {expected}")
    if not _are_token_ids(token_ids, vocab_size):
        raise ExecutorFaultError(f"step {step_id} has {what} outside 0 to {vocab_size - 1}")
    if (np.isnan(logprobs) & means).any():
        raise ExecutorFaultError(f"step {step_id} has {what} whose log-probability is not a number")


def _are_token_ids(numbers: Int32Array, vocab_size: int) -> bool:
    """Return whether all are 0 to `vocab_size` - 1. As unsigned numbers, negative ones are too large."""
    return not np.count_nonzero(numbers.view(np.uint32) >= vocab_size)
