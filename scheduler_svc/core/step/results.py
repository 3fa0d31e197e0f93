"""Takes results of steps: tokens for sequences, candidates for beams, blocks for the prefix cache.

A result may come after a sequence vacated its slot. Then its row is void, unless the sequence was
preempted and still waits for the token. A row with a flag has no token, and its group ends.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count

import numpy as np

from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.step import BoolArray, IndexArray, Int32Array, PoolingTask, RowFlag, RowFlags, StepResult
from scheduler_svc.core.beam_search import Candidates
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.admitted_groups import AdmittedGroups
from scheduler_svc.core.step.preemption import PreemptedGroups
from scheduler_svc.core.step.running_groups import RunningGroups
from scheduler_svc.core.step.step_plan import StepInFlight
from scheduler_svc.core.step.step_updates import FlaggedGroup, PromptLogprobs, StepUpdates
from scheduler_svc.request.outputs import Alternatives, FinishReason, Float32Array

_ANSWERS = {PoolingTask.EMBED: "the vector of the text", PoolingTask.SCORE: "the scores of the text"}


class Results:
    """Takes checked results into the batch."""

    def __init__(self, running: RunningGroups, preempted: PreemptedGroups, groups: AdmittedGroups) -> None:
        self._batch = running.batch
        self._beam_batch = running.beam_batch
        self._preempted = preempted
        self._groups = groups

    def take(self, sent: StepInFlight, result: StepResult) -> StepUpdates:
        """Take the result of a step; end sequences and groups that are complete."""
        layout, batch = sent.layout, self._batch
        prompt_logprobs, failures = _take_prompt_logprobs(sent, result)
        for failure in failures:
            self._end(failure.group)
        flags = result.row_flags
        is_flagged = None if flags is None else flags != 0
        is_current = self._current_rows(sent)
        has_spans = layout.allowances is not None or result.token_counts is not None
        begins = layout.sample_positions
        if has_spans:
            result, begins = with_counts(layout, result), batch.table.num_known_tokens[layout.sample_slots]
        if is_current is None:
            current = None
            batch.table.resolve(layout, result.sampled_token_ids, result.token_counts, all_current=True)
        else:
            current = batch.table.resolve(layout, result.sampled_token_ids, result.token_counts)
            current &= ~batch.is_vacated[layout.sample_slots]
        self._acknowledge(layout, is_current)
        if flags is not None:
            failures += self._failures(layout, current, flags, begins)
        if has_spans:
            updates = self._collect_spans(layout, result, current, begins)
        else:
            updates = self._collect_updates(layout, result, current, is_flagged)
        updates.prompt_logprobs, updates.failures = prompt_logprobs, failures
        if layout.num_candidates is not None:
            self._take_candidates(layout, result, current, updates)
        for failure in failures:
            self._end(failure.group)
        if sent.pooling_groups:
            self._take_answers(sent, result, updates)
        return updates

    def _failures(
        self, layout: StepLayout, current: BoolArray | None, flags: RowFlags, positions: Int32Array
    ) -> list[FlaggedGroup]:
        """Return the groups that have rows with a flag, each once; flags of void rows do not count."""
        failed: dict[SequenceGroup, FlaggedGroup] = {}
        for row in flags.nonzero()[0].tolist():
            slot, generation = int(layout.sample_slots[row]), int(layout.sample_generations[row])
            if current is None or current[row]:
                sequence: Sequence | None = self._batch.sequence_in_slot[slot]
            else:
                sequence = self._preempted.sequence_of(slot, generation)
            if sequence is not None and sequence.group not in failed:
                group = sequence.group
                token = int(positions[row]) - group.num_prompt_tokens
                what = "a beam" if group.beams is not None else f"output {sequence.index}"
                flag = RowFlag(flags[row])
                where = f"{what} are not finite" if flag is RowFlag.NOT_FINITE else what
                failed[group] = FlaggedGroup(group, flag, f"{where} at token {token}")
        return list(failed.values())

    def _end(self, group: SequenceGroup) -> None:
        if group in self._groups:
            self._groups.finish_group(group)

    def _current_rows(self, sent: StepInFlight) -> BoolArray | None:
        """Return which rows of a step still belong to the sequence that they were sent for; None: all of them."""
        batch, layout = self._batch, sent.layout
        if sent.num_vacated == batch.num_vacated:
            return None
        current = batch.table.is_current(layout.slots, layout.generations)
        return current & ~batch.is_vacated[layout.slots]

    def _acknowledge(self, layout: StepLayout, current: BoolArray | None) -> None:
        """Count computed tokens; register the blocks that prefill chunks filled."""
        batch, ends = self._batch, layout.starts + layout.lengths
        slots = layout.sample_index if layout.slots is layout.sample_slots else layout.slots.astype(np.intp)
        if layout.allowances is not None:  # a decode with drafts counts the accepted ones
            spans = layout.allowances[: layout.num_decodes].nonzero()[0]
            ends[spans] = batch.table.num_known_tokens[slots[spans]] - 1
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
        """Return which sequence got which token; end the sequences that are complete."""
        batch = self._batch
        slots = layout.sample_index
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

    def _collect_spans(
        self, layout: StepLayout, result: StepResult, current: BoolArray | None, begins: Int32Array
    ) -> StepUpdates:
        """Return which sequence got which tokens of a step with several tokens a row; end sequences that are complete.

        Args:
            layout: The step.
            result: Has counts.
            current: Which rows still belong to the sequence that they were sent for, [num_samples]; None: all.
            begins: How many tokens each row's slot had, [num_samples].
        """
        batch, counts = self._batch, result.token_counts
        assert counts is not None
        num_entries = counts.astype(np.intp)
        first_entries = num_entries.cumsum() - num_entries
        rows = (counts > 0 if current is None else current & (counts > 0)).nonzero()[0]
        slots, num_taken = layout.sample_index[rows], num_entries[rows]
        of_row = np.arange(len(rows)).repeat(num_taken)  # of each token, among `rows`
        places = np.arange(len(of_row)) - (num_taken.cumsum() - num_taken)[of_row]
        entries = first_entries[rows][of_row] + places
        found = batch.stop_checker.finished(
            slots[of_row], begins[rows][of_row] + places.astype(np.int32), result.sampled_token_ids[entries]
        )
        finished: dict[int, FinishReason] = {}
        for index, reason in found.items():
            if (row := int(of_row[index])) not in finished:  # what comes behind an end is cut off
                finished[row], num_taken[row] = reason, places[index] + 1
        if finished:
            entries = entries[places < num_taken[of_row]]
        updates = StepUpdates(
            sequences=batch.sequence_in_slot[slots].tolist(),
            token_ids=result.sampled_token_ids[entries].tolist(),
            logprobs=None if result.logprobs is None else result.logprobs[entries].tolist(),
            finished=finished,
            counts=num_taken.tolist(),
        )
        for row in (num_taken > 1).nonzero()[0].tolist():
            updates.sequences[row].group.num_draft_tokens += int(num_taken[row]) - 1
        taken = np.zeros(len(counts), np.intp)
        taken[rows] = num_taken
        late = () if current is None else ((counts > 0) & ~current).nonzero()[0].tolist()
        for row in late:
            taken[row] = self._take_late_span(layout, result, row, int(first_entries[row]), updates)
        if layout.num_alternatives is not None:
            order = [*rows.tolist(), *(row for row in late if taken[row])]
            updates.alternatives = _alternatives_of_spans(layout.num_alternatives, result, order, taken)
        for index in updates.finished:
            self._groups.finish_sequence(updates.sequences[index])
        return updates

    def _take_late_span(
        self, layout: StepLayout, result: StepResult, row: int, first_entry: int, updates: StepUpdates
    ) -> int:
        """Give a row's tokens to its sequence, which was preempted after the step was sent; return how many it took."""
        assert result.token_counts is not None
        assert updates.counts is not None
        slot, generation = int(layout.sample_slots[row]), int(layout.sample_generations[row])
        sequence = self._preempted.sequence_of(slot, generation)
        if sequence is None:
            updates.num_void_rows += 1
            return 0
        token_ids = result.sampled_token_ids[first_entry : first_entry + int(result.token_counts[row])]
        num_taken, reason = self._append_inflight_tokens(sequence, token_ids)
        if reason is not None:
            updates.finished[len(updates.sequences)] = reason
        sequence.group.num_draft_tokens += num_taken - 1
        updates.sequences.append(sequence)
        updates.counts.append(num_taken)
        updates.token_ids += token_ids[:num_taken].tolist()
        if updates.logprobs is not None and result.logprobs is not None:
            updates.logprobs += result.logprobs[first_entry : first_entry + num_taken].tolist()
        return num_taken

    def _append_inflight_tokens(self, sequence: Sequence, token_ids: Int32Array) -> tuple[int, FinishReason | None]:
        """Append a late row's tokens, up to the end, to a preempted sequence; return how many, and why it ends."""
        group, before = sequence.group, sequence.token_ids
        for num_taken in range(1, len(token_ids) + 1):
            known = np.concatenate((before, token_ids[:num_taken]))
            reason = self._batch.stop_checker.finished_without_slot(
                known, group.num_prompt_tokens, group.stop_conditions
            )
            if reason is not None:
                break
        sequence.append_inflight_tokens(token_ids[:num_taken])
        if reason is None and not sequence.num_inflight_rows:
            self._preempted.forget(sequence)
        return num_taken, reason

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
            _, reason = self._append_inflight_tokens(sequence, result.sampled_token_ids[row : row + 1])
            if reason is not None:
                updates.finished[len(updates.sequences)] = reason
                self._groups.finish_sequence(sequence)
            if layout.num_alternatives is not None:
                updates.alternatives |= _alternatives_of(layout, result, [row], first_index=len(updates.sequences))
            updates.sequences.append(sequence)
            updates.token_ids.append(token_id)
            if updates.logprobs is not None and result.logprobs is not None:
                updates.logprobs.append(float(result.logprobs[row]))

    def _take_candidates(
        self, layout: StepLayout, result: StepResult, current: BoolArray | None, updates: StepUpdates
    ) -> None:
        """Give the candidates of beam rows to their searches; end searches that are over."""
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
                self._end_search(sequence.group, int(layout.sample_positions[row]), updates)
            elif sequence.group in self._beam_batch.ready:
                updates.advanced_searches.append(sequence.group)

    def _end_search(self, group: SequenceGroup, position: int, updates: StepUpdates) -> None:
        """End a search that is over; it has failed if no beam had a token that is possible before any ended."""
        assert group.beams is not None
        if group.beams.finished_hypotheses():
            updates.finished_searches.append(group)
        else:
            where = f"a beam are not finite at token {position - group.num_prompt_tokens}"
            updates.failures.append(FlaggedGroup(group, RowFlag.NOT_FINITE, where))
        self._groups.finish_group(group)

    def _take_answers(self, sent: StepInFlight, result: StepResult, updates: StepUpdates) -> None:
        """End the texts of a step with their answers; drop answers to texts that have ended meanwhile."""
        pooled: list[tuple[SequenceGroup, Float32Array]] = []
        for group, output in zip(sent.pooling_groups, result.pooling_outputs, strict=True):
            if group not in self._groups:
                continue
            assert group.pooling is not None
            self._groups.finish_group(group)
            if output.flag:
                updates.failures.append(FlaggedGroup(group, RowFlag(output.flag), _ANSWERS[group.pooling]))
            else:
                pooled.append((group, output.values))
        updates.pooled = pooled


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


def _alternatives_of_spans(
    widths: Int32Array, result: StepResult, rows: Seq[int], taken: IndexArray
) -> dict[int, Alternatives]:
    """Return the alternatives of the tokens that rows took, in this order of rows, by their place among the tokens.

    Args:
        widths: How many each token of a row has, [num_samples].
        result: Has counts.
        rows: In the order of their tokens.
        taken: How many tokens each row took, the first ones, [num_samples].
    """
    token_ids, logprobs, counts = result.alternative_token_ids, result.alternative_logprobs, result.token_counts
    if token_ids is None or logprobs is None or counts is None:
        return {}
    begins = (counts * widths).cumsum() - counts * widths
    found: dict[int, Alternatives] = {}
    index = 0
    for row in rows:
        width, num_taken = int(widths[row]), int(taken[row])
        for place in range(num_taken) if width else ():
            span = slice(int(begins[row]) + place * width, int(begins[row]) + (place + 1) * width)
            found[index + place] = Alternatives(token_ids[span].tolist(), logprobs[span].tolist())
        index += num_taken
    return found


def with_counts(layout: StepLayout, result: StepResult) -> StepResult:
    """Return a result with counts: without the entries of beam rows and of rows with a flag."""
    if result.token_counts is not None:
        return result
    has_token = layout.most_tokens > 0
    if result.row_flags is not None:
        has_token &= result.row_flags == 0
    answer = replace(result, token_counts=has_token.astype(np.uint8))
    answer.sampled_token_ids = result.sampled_token_ids[has_token]
    answer.logprobs = None if result.logprobs is None else result.logprobs[has_token]
    widths = layout.num_alternatives
    if widths is not None and result.alternative_token_ids is not None and result.alternative_logprobs is not None:
        kept = has_token.repeat(widths)
        answer.alternative_token_ids = result.alternative_token_ids[kept]
        answer.alternative_logprobs = result.alternative_logprobs[kept]
    return answer


def _take_prompt_logprobs(sent: StepInFlight, result: StepResult) -> tuple[list[PromptLogprobs], list[FlaggedGroup]]:
    """Return the new log-probabilities of prompts, and count them; and the groups with one that is NaN.

    They depend on the prompt alone, so they are valid even if the slot was vacated since. Values that were
    handed out before, when the prompt was computed for the first time, are dropped.
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
