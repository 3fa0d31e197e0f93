"""From logits to the answer of a step: sampled tokens, beam candidates, log-probabilities.

`launched_answer.py` does the same on a device that the host is ahead of.
"""

import numpy as np
import torch

from executor_svc.models.language_model import LanguageModel
from executor_svc.sampler.sample_rows import SampleRows
from executor_svc.sampler.sampler import Sampled, Sampler, flags_of_candidates, prompt_spans
from executor_svc.worker.model_runner import SampleLogits
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.step import (
    UNKNOWN_TOKEN,
    Int32Array,
    RowFlag,
    RowFlags,
    Step,
    StepResult,
)


def no_answer(step: Step, layout: StepLayout) -> StepResult:
    """Return an answer without tokens yet."""
    return StepResult(step.epoch, step.step_id, np.full(len(layout.sample_slots), UNKNOWN_TOKEN, np.int32))


def answer_step(
    step: Step,
    table: BatchTable,
    layout: StepLayout,
    rows: SampleRows,
    computed: SampleLogits,
    model: LanguageModel,
    sampler: Sampler,
) -> StepResult:
    """Return the sampled tokens, the candidates of the beam rows, and the log-probabilities asked for."""
    logits = computed.logits
    assert logits is not None, "this is rank 0"
    if layout.num_candidates is None:
        sampled = sampler.sample(logits, computed.logit_rows, rows, computed.likeliest)
        result = StepResult(step.epoch, step.step_id, sampled.token_ids, sampled.logprobs, row_flags=sampled.row_flags)
        _add_alternatives(result, sampled)
    else:
        result = no_answer(step, layout)
        _answer_beams(result, layout.num_candidates, rows, computed, sampler)
    if computed.prompt_hidden is not None:
        _answer_prompt(result, table, layout, computed.prompt_hidden, model, sampler)
    return result


def flag_guided_rows(
    result: StepResult, rows: SampleRows, flags: RowFlags | None, logits: torch.Tensor, logit_rows: Int32Array
) -> None:
    """Add the flags of rows in which the grammar ends the output.

    Args:
        result: Of the step; it has a flag where a row had no token to choose.
        rows: The sample rows.
        flags: Of rows without a mask, [num_samples]; None: all have one.
        logits: Raw, [num_logit_rows, vocab_size].
        logit_rows: The row of `logits` that each sample row uses, [num_samples].
    """
    assert rows.is_guided is not None
    if result.row_flags is not None:
        # With numbers to choose by, it was the mask, and what else the row rules out, that left nothing.
        for row in ((result.row_flags == RowFlag.NOT_FINITE) & rows.is_guided).nonzero()[0].tolist():
            row_logits = logits[int(logit_rows[row])]
            if not (row_logits.isnan() | row_logits.isposinf()).any() and not row_logits.isneginf().all():
                result.row_flags[row] = RowFlag.NO_TOKEN_ALLOWED
    if flags is not None:
        flag_ended_rows(result, flags)


def flag_ended_rows(result: StepResult, flags: RowFlags) -> None:
    """Add the flags of rows without a mask, [num_samples], which go before others."""
    result.row_flags = flags if result.row_flags is None else np.where(flags, flags, result.row_flags)


def _answer_beams(
    result: StepResult, num_candidates: Int32Array, rows: SampleRows, computed: SampleLogits, sampler: Sampler
) -> None:
    """Add the candidates of the beam rows, and what is sampled in the others, if there are any."""
    logits, logit_rows, beams = computed.logits, computed.logit_rows, num_candidates > 0
    assert logits is not None, "this is rank 0"
    row_flags = np.zeros(len(rows), np.uint8)
    if not beams.all():
        sampled = sampler.sample(logits, logit_rows[~beams], rows[~beams])
        result.sampled_token_ids[~beams] = sampled.token_ids
        if sampled.logprobs is not None:
            result.logprobs = np.full(len(rows), np.nan, np.float32)
            result.logprobs[~beams] = sampled.logprobs
        if sampled.row_flags is not None:
            row_flags[~beams] = sampled.row_flags
        _add_alternatives(result, sampled)
    candidates = sampler.candidates(logits, logit_rows[beams], rows[beams], num_candidates[beams])
    result.candidate_token_ids, result.candidate_logprobs = candidates.token_ids, candidates.logprobs
    row_flags[beams] = flags_of_candidates(candidates, num_candidates[beams])
    result.row_flags = row_flags if row_flags.any() else None


def _add_alternatives(result: StepResult, sampled: Sampled) -> None:
    if sampled.alternatives is not None:
        result.alternative_token_ids = sampled.alternatives.token_ids
        result.alternative_logprobs = sampled.alternatives.logprobs


def follow_answer(computed: SampleLogits, model: LanguageModel) -> None:
    """Do, on a rank that has no logits, its part of what rank 0 does in `answer_step`."""
    if computed.prompt_hidden is not None:
        for span in prompt_spans(len(computed.prompt_hidden)):
            model.logits(computed.prompt_hidden[span])


def _answer_prompt(
    result: StepResult,
    table: BatchTable,
    layout: StepLayout,
    hidden: torch.Tensor,
    model: LanguageModel,
    sampler: Sampler,
) -> None:
    """Add the log-probabilities of prompt tokens; `hidden` has the states of the tokens before them."""
    token_ids, num_alternatives = prompt_tokens(table, layout)

    def to_logits(some_hidden: torch.Tensor) -> torch.Tensor:
        logits = model.logits(some_hidden)
        assert logits is not None, "this is rank 0"
        return logits

    result.prompt_logprobs, alternatives = sampler.prompt_logprobs(hidden, to_logits, token_ids, num_alternatives)
    if alternatives is not None:
        result.prompt_alternative_token_ids = alternatives.token_ids
        result.prompt_alternative_logprobs = alternatives.logprobs


def prompt_tokens(table: BatchTable, layout: StepLayout) -> tuple[Int32Array, Int32Array]:
    """Return the prompt tokens with wanted log-probabilities, [num_tokens], and how many of the likeliest of each."""
    counts, num_alternatives = layout.num_prompt_logprobs, layout.num_prompt_alternatives
    assert counts is not None
    assert num_alternatives is not None
    spans = zip(layout.slots.tolist(), layout.starts.tolist(), counts.tolist(), strict=True)
    token_ids = [table.token_ids[slot, start + 1 : start + 1 + count] for slot, start, count in spans]
    return np.concatenate(token_ids), np.repeat(num_alternatives, counts)
