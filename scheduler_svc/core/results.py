"""What a step brought: tokens for sequences, candidates for beams, blocks for the prefix cache.

A result may come after its sequence left the slot. Then the row is void, unless the sequence was
preempted and still waits for the token ("late tokens").
"""

from dataclasses import dataclass, field
from itertools import count

import numpy as np

from scheduler_svc.core.batch import Batch
from scheduler_svc.core.beam_search import Candidates
from scheduler_svc.core.endings import Endings
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.searches import Searches
from scheduler_svc.core.sequence import FinishReason, Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepInFlight
from shared.batch_table import StepLayout
from shared.step import BoolArray, StepResult


@dataclass(slots=True)
class StepUpdates:
    """What one processed step brought, as parallel lists.

    `finished` maps an index of those lists to the reason why that sequence ended with this token.
    `advanced_searches` are groups whose beams got their next tokens, `finished_searches` those whose
    search is over; `SequenceGroup.beams` has the hypotheses.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    logprobs: list[float] | None
    finished: dict[int, FinishReason]
    advanced_searches: list[SequenceGroup] = field(default_factory=list)
    finished_searches: list[SequenceGroup] = field(default_factory=list)


class Results:
    """Takes checked results into the batch.

    Args:
        batch: Slots and blocks.
        searches: Gets the candidates.
        preemption: Knows who waits for late tokens.
        endings: Ends what is complete.
    """

    def __init__(self, batch: Batch, searches: Searches, preemption: Preemption, endings: Endings) -> None:
        self._batch = batch
        self._searches = searches
        self._preemption = preemption
        self._endings = endings

    def take(self, sent: StepInFlight, result: StepResult) -> StepUpdates:
        """Take the result of a step that is not in flight any more; end what is complete."""
        layout, batch = sent.layout, self._batch
        is_current = self._current_rows(sent)
        self._acknowledge(layout, is_current)
        if is_current is None:
            current = None
            batch.table.record(layout, result.sampled_token_ids, all_current=True)
        else:
            current = batch.table.record(layout, result.sampled_token_ids)
            current &= ~batch.is_left[layout.sample_slots]
        updates = self._collect_updates(layout, result, current)
        if layout.num_candidates is not None:
            self._take_candidates(layout, result, current, updates)
        return updates

    def _current_rows(self, sent: StepInFlight) -> BoolArray | None:
        """Return which rows of a step still belong to the sequence they were sent for; None: all of them."""
        batch, layout = self._batch, sent.layout
        if sent.num_left == batch.num_left:
            return None
        current = batch.table.is_current(layout.slots, layout.generations)
        return current & ~batch.is_left[layout.slots]

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

    def _collect_updates(self, layout: StepLayout, result: StepResult, current: BoolArray | None) -> StepUpdates:
        """Say who got which token; end the sequences that are complete."""
        batch = self._batch
        slots = layout.sample_slots.astype(np.intp)
        positions, token_ids, logprobs = layout.sample_positions, result.sampled_token_ids, result.logprobs
        taken = current
        if layout.num_candidates is not None:
            is_sampled = layout.num_candidates == 0
            taken = is_sampled if current is None else current & is_sampled
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
        for index in updates.finished:
            self._endings.end_sequence(updates.sequences[index])
        if current is not None:
            self._take_late_tokens(layout, result, np.flatnonzero(~current).tolist(), updates)
        return updates

    def _take_late_tokens(self, layout: StepLayout, result: StepResult, rows: list[int], updates: StepUpdates) -> None:
        """Accept the tokens of sequences that were preempted after the step was sent; the other rows are void."""
        for row in rows:
            slot, generation = int(layout.sample_slots[row]), int(layout.sample_generations[row])
            sequence = self._preemption.late_sequence(slot, generation)
            if sequence is None:
                continue
            token_id = int(result.sampled_token_ids[row])
            sequence.append_late_token(token_id)
            reason = self._batch.stop_checker.finished_late(sequence)
            if reason is not None:
                updates.finished[len(updates.sequences)] = reason
                self._endings.end_sequence(sequence)
            elif not sequence.num_late_tokens:
                self._preemption.forget_late(sequence)
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
            candidates = Candidates(result.candidate_token_ids[span], result.candidate_logprobs[span])
            if self._searches.take(sequence, candidates):
                updates.finished_searches.append(sequence.group)
                self._endings.end_group(sequence.group)
            elif sequence.group in self._searches.ready:
                updates.advanced_searches.append(sequence.group)
