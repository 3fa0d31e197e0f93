"""What a step brought: tokens for sequences, candidates for beams, blocks for the prefix cache.

A result may come after its sequence vacated the slot. Then the row is void, unless the sequence was
preempted and still waits for the token, which was in flight. A row with a flag has no token, and its group ends.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.step import BoolArray, RowFlag, RowFlags, StepResult
from scheduler_svc.core.beam_search import Candidates
from scheduler_svc.core.group_event import FlaggedGroup
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.admitted_groups import AdmittedGroups
from scheduler_svc.core.step.pooled_groups import PooledGroups
from scheduler_svc.core.step.preemption import PreemptedGroups
from scheduler_svc.core.step.running_groups import RunningGroups
from scheduler_svc.core.step.step_plan import StepInFlight
from scheduler_svc.request.outputs import Alternatives, FinishReason, Float32Array


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log-probabilities of the next tokens of a group's prompt, and their alternatives, maybe none."""

    group: SequenceGroup
    logprobs: list[float]
    alternatives: Alternatives


@dataclass(slots=True)
class StepUpdates:
    """What one processed step brought, as parallel lists.

    `finished` maps an index of those lists to the reason why that sequence ended with this token.
    `advanced_searches` are groups whose beams got their next tokens, `finished_searches` those whose
    search is over; `SequenceGroup.beams` has the hypotheses. `alternatives` maps an index of the lists to
    the likeliest tokens in that place, where they were asked for. `prompt_logprobs` come before all tokens.
    `failures`: groups that have a row with a flag, and where. They have ended, or wait elsewhere and are to be ended.
    `pooled`: groups that have ended with an answer, and their vectors or scores.
    `num_void_rows`: rows of sequences that had ended or lost their beam when the result came.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    logprobs: list[float] | None
    finished: dict[int, FinishReason]
    advanced_searches: list[SequenceGroup] = field(default_factory=list)
    finished_searches: list[SequenceGroup] = field(default_factory=list)
    alternatives: dict[int, Alternatives] = field(default_factory=dict)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    failures: list[FlaggedGroup] = field(default_factory=list)
    pooled: Seq[tuple[SequenceGroup, Float32Array]] = ()
    num_void_rows: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that it brought; of a search that goes on, one for each beam."""
        return len(self.sequences) + sum(group.num_slots for group in self.advanced_searches)


class Results:
    """Takes checked results into the batch.

    Args:
        running: Gets tokens and candidates.
        preempted: Get the tokens that were in flight.
        pooled: Get their answers.
        groups: Ends what is complete.
    """

    def __init__(
        self, running: RunningGroups, preempted: PreemptedGroups, pooled: PooledGroups, groups: AdmittedGroups
    ) -> None:
        self._batch = running.batch
        self._beam_batch = running.beam_batch
        self._preempted = preempted
        self._pooled = pooled
        self._groups = groups

    def take(self, sent: StepInFlight, result: StepResult) -> StepUpdates:
        """Take the result of a step that is not in flight any more; end what is complete."""
        layout, batch = sent.layout, self._batch
        prompt_logprobs, failures = _take_prompt_logprobs(sent, result)
        for failure in failures:
            self._end(failure.group)
        flags = result.row_flags
        is_flagged = None if flags is None else flags != 0
        is_current = self._current_rows(sent)
        self._acknowledge(layout, is_current)
        if is_current is None:
            current = None
            batch.table.record(layout, result.sampled_token_ids, all_current=True)
        else:
            current = batch.table.record(layout, result.sampled_token_ids)
            current &= ~batch.is_vacated[layout.sample_slots]
        if flags is not None:
            failures += self._failures(layout, current, flags)
        updates = self._collect_updates(layout, result, current, is_flagged)
        updates.prompt_logprobs, updates.failures = prompt_logprobs, failures
        if layout.num_candidates is not None:
            self._take_candidates(layout, result, current, updates)
        for failure in failures:
            self._end(failure.group)
        if sent.pooling_groups:
            updates.pooled, flagged = self._pooled.take(sent, result)
            updates.failures += flagged
        return updates

    def _failures(self, layout: StepLayout, current: BoolArray | None, flags: RowFlags) -> list[FlaggedGroup]:
        """Return the groups that have rows with a flag, each once; the rows of others are void."""
        failed: dict[SequenceGroup, FlaggedGroup] = {}
        for row in flags.nonzero()[0].tolist():
            slot, generation = int(layout.sample_slots[row]), int(layout.sample_generations[row])
            if current is None or current[row]:
                sequence: Sequence | None = self._batch.sequence_in_slot[slot]
            else:
                sequence = self._preempted.sequence_of(slot, generation)
            if sequence is not None and sequence.group not in failed:
                group = sequence.group
                token = int(layout.sample_positions[row]) - group.num_prompt_tokens
                what = "a beam" if group.beams is not None else f"output {sequence.index}"
                flag = RowFlag(flags[row])
                where = f"{what} are not finite" if flag is RowFlag.NOT_FINITE else what
                failed[group] = FlaggedGroup(group, flag, f"{where} at token {token}")
        return list(failed.values())

    def _end(self, group: SequenceGroup) -> None:
        """End a group, if it is here and has not ended."""
        if group in self._groups:
            self._groups.finish_group(group)

    def _current_rows(self, sent: StepInFlight) -> BoolArray | None:
        """Return which rows of a step still belong to the sequence they were sent for; None: all of them."""
        batch, layout = self._batch, sent.layout
        if sent.num_vacated == batch.num_vacated:
            return None
        current = batch.table.is_current(layout.slots, layout.generations)
        return current & ~batch.is_vacated[layout.slots]

    def _acknowledge(self, layout: StepLayout, current: BoolArray | None) -> None:
        """Count what was computed; register the blocks that prefill chunks filled."""
        batch, ends = self._batch, layout.starts + layout.lengths
        slots = layout.slots.astype(np.intp)
        if current is None:
            batch.num_computed_tokens[slots] = ends
        else:
            batch.num_computed_tokens[slots[current]] = ends[current]
        cache, size = batch.blocks.prefix_cache, batch.blocks.block_size
        if cache is None:
            return
        chunks = slice(layout.num_decodes, None)
        num_blocks = ends[chunks] // size - layout.starts[chunks] // size
        for row, slot, num_filled in zip(count(layout.num_decodes), slots[chunks].tolist(), num_blocks.tolist()):
            if current is None or current[row]:
                batch.register_blocks(slot)
                cache.stop_writing(slot, num_filled)

    def _collect_updates(
        self, layout: StepLayout, result: StepResult, current: BoolArray | None, is_flagged: BoolArray | None
    ) -> StepUpdates:
        """Say who got which token; end the sequences that are complete."""
        batch = self._batch
        slots = layout.sample_slots.astype(np.intp)
        positions, token_ids, logprobs = layout.sample_positions, result.sampled_token_ids, result.logprobs
        taken = current
        if layout.num_candidates is not None:
            is_sampled = layout.num_candidates == 0
            taken = is_sampled if current is None else current & is_sampled
        if is_flagged is not None:
            taken = ~is_flagged if taken is None else taken & ~is_flagged
        if taken is not None:
            slots, positions, token_ids = slots[taken], positions[taken], token_ids[taken]
            logprobs = None if logprobs is None else logprobs[taken]
        batch.num_known_tokens[slots] = positions + 1
        updates = StepUpdates(
            sequences=batch.sequence_in_slot[slots].tolist(),
            token_ids=token_ids.tolist(),
            logprobs=None if logprobs is None else logprobs.tolist(),
            finished=batch.stop_checker.finished(slots, positions, token_ids),
        )
        if layout.num_alternatives is not None:
            rows = range(len(layout.sample_slots)) if taken is None else taken.nonzero()[0].tolist()
            updates.alternatives = _alternatives_of(layout, result, rows)
        for index in updates.finished:
            self._groups.finish_sequence(updates.sequences[index])
        if current is not None:
            late = ~current if is_flagged is None else ~current & ~is_flagged
            self._take_inflight_tokens(layout, result, np.flatnonzero(late).tolist(), updates)
        return updates

    def _take_inflight_tokens(
        self, layout: StepLayout, result: StepResult, rows: list[int], updates: StepUpdates
    ) -> None:
        """Accept the tokens of sequences that were preempted after the step was sent; the other rows are void."""
        for row in rows:
            slot, generation = int(layout.sample_slots[row]), int(layout.sample_generations[row])
            sequence = self._preempted.sequence_of(slot, generation)
            if sequence is None:
                updates.num_void_rows += 1
                continue
            token_id = int(result.sampled_token_ids[row])
            sequence.append_inflight_token(token_id)
            reason = self._batch.stop_checker.finished_without_slot(
                sequence.token_ids, sequence.group.num_prompt_tokens, sequence.group.stop_conditions
            )
            if reason is not None:
                updates.finished[len(updates.sequences)] = reason
                self._groups.finish_sequence(sequence)
            elif not sequence.num_inflight_tokens:
                self._preempted.forget(sequence)
            if layout.num_alternatives is not None:
                updates.alternatives |= _alternatives_of(layout, result, [row], first_index=len(updates.sequences))
            updates.sequences.append(sequence)
            updates.token_ids.append(token_id)
            if updates.logprobs is not None and result.logprobs is not None:
                updates.logprobs.append(float(result.logprobs[row]))

    def _take_candidates(
        self, layout: StepLayout, result: StepResult, current: BoolArray | None, updates: StepUpdates
    ) -> None:
        """Give the candidates of beam rows to their searches; end those that are over."""
        assert layout.num_candidates is not None
        assert result.candidate_token_ids is not None
        assert result.candidate_logprobs is not None
        ends = np.cumsum(layout.num_candidates)
        for row in np.flatnonzero(layout.num_candidates).tolist():
            if current is not None and not current[row]:
                continue
            span = slice(int(ends[row] - layout.num_candidates[row]), int(ends[row]))
            sequence = self._batch.sequence_in_slot[layout.sample_slots[row]]
            if any(failure.group is sequence.group for failure in updates.failures):
                continue
            candidates = Candidates(result.candidate_token_ids[span], result.candidate_logprobs[span])
            if self._beam_batch.take(sequence, candidates):
                updates.finished_searches.append(sequence.group)
                self._groups.finish_group(sequence.group)
            elif sequence.group in self._beam_batch.ready:
                updates.advanced_searches.append(sequence.group)


def _alternatives_of(
    layout: StepLayout, result: StepResult, rows: Seq[int], first_index: int = 0
) -> dict[int, Alternatives]:
    """Return the alternatives of some sample rows by their place among `rows`, counted from `first_index`."""
    counts, token_ids, logprobs = layout.num_alternatives, result.alternative_token_ids, result.alternative_logprobs
    assert counts is not None
    assert token_ids is not None
    assert logprobs is not None
    ends = np.cumsum(counts)
    found: dict[int, Alternatives] = {}
    for index, row in enumerate(rows, first_index):
        if counts[row]:
            span = slice(int(ends[row] - counts[row]), int(ends[row]))
            found[index] = Alternatives(token_ids[span].tolist(), logprobs[span].tolist())
    return found


def _take_prompt_logprobs(sent: StepInFlight, result: StepResult) -> tuple[list[PromptLogprobs], list[FlaggedGroup]]:
    """Return what of the prompts' log-probabilities is new, and count it; and the groups that have one of NaN.

    They depend on the prompt alone, so that they are good whatever became of the slot since. What was
    handed out before, when the prompt was computed for the first time, is dropped.
    """
    layout, found, failures = sent.layout, [], []
    counts, num_alternatives = layout.num_prompt_logprobs, layout.num_prompt_alternatives
    if not sent.prompt_groups or counts is None or num_alternatives is None or result.prompt_logprobs is None:
        return [], []
    token_ends, alternative_ends = np.cumsum(counts), np.cumsum(counts * num_alternatives)
    for row, group in sent.prompt_groups:
        start, count, width = int(layout.starts[row]), int(counts[row]), int(num_alternatives[row])
        num_known = group.num_known_prompt_logprobs
        if not group.live_sequences or not start <= num_known < start + count:
            continue
        first = num_known - start  # among the tokens of this row
        span = slice(int(token_ends[row]) - count + first, int(token_ends[row]))
        logprobs = result.prompt_logprobs[span]
        if np.isnan(logprobs).any():
            token = num_known + 1 + int(np.isnan(logprobs).argmax())
            failures.append(FlaggedGroup(group, RowFlag.NOT_FINITE, f"the prompt are not finite at token {token}"))
            continue
        alternatives = Alternatives([], [])
        if width and result.prompt_alternative_token_ids is not None and result.prompt_alternative_logprobs is not None:
            wide = slice(int(alternative_ends[row]) - (count - first) * width, int(alternative_ends[row]))
            alternatives = Alternatives(
                result.prompt_alternative_token_ids[wide].tolist(), result.prompt_alternative_logprobs[wide].tolist()
            )
        found.append(PromptLogprobs(group, logprobs.tolist(), alternatives))
        group.num_known_prompt_logprobs = start + count
    return found, failures
