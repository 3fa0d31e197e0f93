"""The step: who computes what, with which blocks, and what came out of it.

A caller drives the core in a loop, with up to a few steps in flight:

    step = scheduler.schedule()              decide; None: nothing to do
    ... send it, run it, receive it ...
    updates = scheduler.process(result)      results come back in step order

and between those calls it may `add` groups, and `finish` sequences whose client left or whose text
holds a stop string. One mechanism serves prefill and decode: a sequence catches up with its tokens under the
token budget of the step. Prefill in chunks, and recomputing after a preemption or after a lost
executor, are all just a sequence with many tokens to catch up with.

The order of a decision: decodes first (they always fit), then running prefills, then admissions, in
order of arrival. A decode that finds no free block preempts the sequence that arrived last.

Because the executor runs steps strictly in order, blocks freed while one result is processed may be
given out in the next step that is sent, whatever is still in flight.

Invariants, asserted by `check_integrity` and tested after every step:
 1. Every block is free or named by exactly the block tables that its reference count says.
 2. A running sequence has a live slot; no two have the same one; every other slot is free.
 3. Blocks cover the computed tokens: num_scheduled_tokens <= num_blocks * block_size.
 4. A step computes at most max_num_batched_tokens.
 5. No sequence is longer than max_model_len or its max_tokens.
 6. Every sequence that was added ends exactly once: in `StepUpdates.finished`, or by `finish`.

Pure: no clock, no randomness, no transport. Read next: `block_manager.py`, then `shared/batch_table.py`.
"""

import bisect
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from scheduler_svc.core.block_manager import AllocStatus, BlockManager
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.sequence import FinishReason, Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.stopping import StopChecker
from shared.batch_table import BatchTable, StepLayout
from shared.errors import ExecutorFaultError
from shared.step import Admission, BoolArray, Int32Array, Step, StepResult

BY_ARRIVAL = attrgetter("arrival")


@dataclass(frozen=True, slots=True)
class StepUpdates:
    """What one processed step brought, as parallel lists in sample-row order.

    `finished` maps an index of those lists to the reason why that sequence ended with this token.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    logprobs: list[float] | None
    finished: dict[int, FinishReason]


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was scheduled and is not acknowledged."""

    step: Step
    layout: StepLayout


class Scheduler:
    """Decides the steps of one executor, from one Attach to its loss.

    Args:
        limits: The numbers.
        epoch: Goes into every step.
    """

    def __init__(self, limits: SchedulerLimits, epoch: int = 1) -> None:
        self.limits = limits
        self.epoch = epoch
        self.table = BatchTable(limits.max_num_seqs, limits.max_model_len, limits.block_size, limits.num_blocks)
        self.block_manager = BlockManager(limits.num_blocks, limits.block_size, limits.watermark)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.in_flight: deque[StepInFlight] = deque()
        self.num_preemptions = 0
        self.last_scheduled_step_id = 0
        self.last_processed_step_id = 0
        # Tokens whose values are known, and whose keys and values are computed, as acknowledged.
        self.num_known_tokens: Int32Array = np.zeros(limits.max_num_seqs, np.int32)
        self.num_computed_tokens: Int32Array = np.zeros(limits.max_num_seqs, np.int32)
        self._stop_checker = StopChecker(limits.max_num_seqs, limits.max_model_len, limits.eos_token_ids)
        self._sequence_in_slot: dict[int, Sequence] = {}
        self.free_slots: list[int] = list(range(limits.max_num_seqs - 1, -1, -1))
        # Slots that were left since the last step; the next one releases them in the batch table.
        self._slots_to_release: list[int] = []
        self._prefilling: list[Sequence] = []
        self._late_sequences: dict[tuple[int, int], Sequence] = {}

    # Requests come and go ------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> AllocStatus:
        """Queue a group by its arrival; return NEVER, and queue nothing, if the pool is too small."""
        sequence = group.sequence
        assert sequence.status is SequenceStatus.WAITING
        num_tokens = len(sequence.token_ids)
        if num_tokens >= self.limits.max_model_len or not self.block_manager.can_ever_allocate(num_tokens):
            return AllocStatus.NEVER
        bisect.insort(self.waiting, sequence, key=BY_ARRIVAL)
        return AllocStatus.OK

    def finish(self, sequence: Sequence) -> None:
        """End a sequence from outside: its client left, or its text holds a stop string.

        Its blocks are free at once; tokens that arrive later are dropped.
        """
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            self._late_sequences.pop((sequence.slot, sequence.generation), None)
        elif sequence.status is SequenceStatus.RUNNING:
            self._leave_slot(sequence)
        sequence.status = SequenceStatus.FINISHED

    def evacuate(self) -> list[SequenceGroup]:
        """Return all live groups, by arrival, to be computed again elsewhere; the executor is lost.

        Their sequences wait and carry all tokens that are known. Steps in flight are forgotten.
        """
        for sequence in list(self.running):
            self._stop_running(sequence)
        for sequence in self.waiting:
            sequence.num_late_tokens = 0
            sequence.slot, sequence.generation = -1, 0  # elsewhere they would name somebody else's tokens
        groups = [sequence.group for sequence in self.waiting]
        self.waiting.clear()
        self.in_flight.clear()
        self._late_sequences.clear()
        return groups

    # The decision --------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Decide the next step and apply it to the batch table; None if there is nothing to do."""
        plan = StepPlan(token_budget=self.limits.max_num_batched_tokens)
        plan.released_slots, self._slots_to_release = self._slots_to_release, []
        decode_slots = self._decode_slots(plan)
        self._make_room_to_grow(plan, decode_slots)
        self._continue_prefills(plan)
        if not plan.preempted:
            self._admit(plan)
        if plan.is_empty:
            return None
        step = plan.to_step(self.epoch, self.last_scheduled_step_id + 1)
        layout = self.table.apply(step.delta)
        self._prefilling = [sequence for sequence in self._prefilling if not self.table.active[sequence.slot]]
        self.in_flight.append(StepInFlight(step, layout))
        self.last_scheduled_step_id = step.step_id
        return step

    def _decode_slots(self, plan: StepPlan) -> Int32Array:
        """Return the slots that decode; hold back those whose last token is on its way already."""
        slots = np.flatnonzero(self.table.active).astype(np.int32)
        if plan.released_slots:
            slots = np.setdiff1d(slots, np.array(plan.released_slots, np.int32), assume_unique=True)
        at_limit = self._stop_checker.at_length_limit(slots, self.table.num_tokens[slots])
        plan.deactivated_slots = slots[at_limit]
        return slots[~at_limit]

    def _make_room_to_grow(self, plan: StepPlan, decode_slots: Int32Array) -> None:
        """Give each decode the block that its token needs; preempt the last arrivals for it."""
        growing = self.block_manager.slots_without_room(self.table, decode_slots)
        while len(growing) > self.block_manager.allocator.num_free_blocks:
            victim = self.running[-1]
            self._preempt(plan, victim)
            growing = growing[growing != victim.slot]
            decode_slots = decode_slots[decode_slots != victim.slot]
        plan.deactivated_slots = np.setdiff1d(plan.deactivated_slots, plan.released_slots).astype(np.int32)
        plan.appended_blocks = self.block_manager.append_blocks(growing)
        plan.num_decodes = len(decode_slots)
        plan.token_budget -= len(decode_slots)

    def _preempt(self, plan: StepPlan, victim: Sequence) -> None:
        """Free the victim's slot and blocks; it waits, in its order of arrival, to be recomputed."""
        num_unknown_tokens = int(self.table.num_tokens[victim.slot] - self.num_known_tokens[victim.slot])
        self._stop_running(victim)
        self._slots_to_release.remove(victim.slot)
        plan.released_slots.append(victim.slot)
        plan.preempted.append(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        victim.num_late_tokens = num_unknown_tokens
        if num_unknown_tokens:
            self._late_sequences[victim.slot, victim.generation] = victim

    def _continue_prefills(self, plan: StepPlan) -> None:
        """Go on with running sequences that have more than one token to catch up with."""
        for sequence in self._prefilling:
            slot = sequence.slot
            plan.take_chunk(slot, int(self.table.num_tokens[slot] - self.table.num_scheduled_tokens[slot]))

    def _admit(self, plan: StepPlan) -> None:
        """Admit waiting sequences in order, while slots, budget and blocks last."""
        while self.waiting and self.free_slots and plan.token_budget:
            sequence = self.waiting[0]
            if sequence.num_late_tokens:
                return
            status, block_ids = self.block_manager.try_allocate(len(sequence.token_ids))
            if status is not AllocStatus.OK:
                assert status is AllocStatus.LATER, "a sequence that can never fit was queued"
                return
            self.waiting.popleft()
            self._enter_slot(plan, sequence, block_ids)

    def _enter_slot(self, plan: StepPlan, sequence: Sequence, block_ids: Int32Array) -> None:
        group, slot = sequence.group, self.free_slots.pop()
        token_ids = sequence.token_ids
        sequence.slot, sequence.generation = slot, int(self.table.generation[slot]) + 1
        sequence.status = SequenceStatus.RUNNING
        sequence.token_ids = token_ids[:0]
        self._sequence_in_slot[slot] = sequence
        self._stop_checker.set_slot(slot, group.num_prompt_tokens, group.stop_conditions)
        self.num_known_tokens[slot] = len(token_ids)
        self.num_computed_tokens[slot] = 0
        bisect.insort(self.running, sequence, key=BY_ARRIVAL)
        bisect.insort(self._prefilling, sequence, key=BY_ARRIVAL)
        plan.admissions.append(
            Admission(
                slot=slot,
                generation=sequence.generation,
                token_ids=token_ids,
                num_prompt_tokens=group.num_prompt_tokens,
                num_computed_tokens=0,
                block_ids=block_ids,
                sampling=group.sampling,
            )
        )
        plan.take_chunk(slot, len(token_ids))

    # The result ----------------------------------------------------------------------------------

    def process(self, result: StepResult) -> StepUpdates:
        """Take the result of the oldest step in flight.

        Raises: ExecutorFaultError: it is not a result of that step; the executor must be given up.
        """
        self._check_result(result)
        layout = self.in_flight.popleft().layout
        self.last_processed_step_id = result.step_id
        rows_current = self.table.is_current(layout.slots, layout.generations)
        slots = layout.slots[rows_current]
        self.num_computed_tokens[slots] = (layout.starts + layout.lengths)[rows_current]
        current = self.table.record(layout, result.sampled_token_ids)
        if self._slots_to_release:
            current &= ~np.isin(layout.sample_slots, self._slots_to_release)
        self.num_known_tokens[layout.sample_slots[current]] = layout.sample_positions[current] + 1
        return self._collect_updates(layout, result, current)

    def _check_result(self, result: StepResult) -> None:
        if not self.in_flight:
            raise ExecutorFaultError(f"a result of step {result.step_id} came, and no step is in flight")
        expected = self.in_flight[0]
        if (result.epoch, result.step_id) != (self.epoch, expected.step.step_id):
            raise ExecutorFaultError(
                f"epoch {result.epoch} step {result.step_id} came instead of {self.epoch} {expected.step.step_id}"
            )
        num_rows, token_ids = len(expected.layout.sample_slots), result.sampled_token_ids
        if len(token_ids) != num_rows:
            raise ExecutorFaultError(f"step {result.step_id} has {len(token_ids)} sampled tokens for {num_rows} rows")
        if num_rows and not (token_ids.min() >= 0 and token_ids.max() < self.limits.vocab_size):
            raise ExecutorFaultError(f"step {result.step_id} has token ids outside 0 to {self.limits.vocab_size - 1}")

    def _collect_updates(self, layout: StepLayout, result: StepResult, current: BoolArray) -> StepUpdates:
        """Say who got which token; end the sequences that are complete."""
        slots, token_ids = layout.sample_slots[current], result.sampled_token_ids[current]
        sequences = self._sequence_in_slot
        updates = StepUpdates(
            sequences=[sequences[slot] for slot in slots.tolist()],
            token_ids=token_ids.tolist(),
            logprobs=None if result.logprobs is None else result.logprobs[current].tolist(),
            finished=self._stop_checker.finished(slots, layout.sample_positions[current], token_ids),
        )
        for row in updates.finished:
            self._leave_slot(updates.sequences[row])
            updates.sequences[row].status = SequenceStatus.FINISHED
        for row in np.flatnonzero(~current).tolist():
            key = int(layout.sample_slots[row]), int(layout.sample_generations[row])
            if key in self._late_sequences:
                self._take_late_token(self._late_sequences[key], row, result, updates)
        return updates

    def _take_late_token(self, sequence: Sequence, row: int, result: StepResult, updates: StepUpdates) -> None:
        """Accept a token of a sequence that was preempted after the step was sent."""
        token_id = int(result.sampled_token_ids[row])
        sequence.append_late_token(token_id)
        reason = self._stop_checker.finished_late(sequence)
        if reason is not None:
            updates.finished[len(updates.sequences)] = reason
            self.finish(sequence)
        elif not sequence.num_late_tokens:
            del self._late_sequences[sequence.slot, sequence.generation]
        updates.sequences.append(sequence)
        updates.token_ids.append(token_id)
        if updates.logprobs is not None and result.logprobs is not None:
            updates.logprobs.append(float(result.logprobs[row]))

    # Slots ---------------------------------------------------------------------------------------

    def _stop_running(self, sequence: Sequence) -> None:
        """Make a running sequence wait, with all tokens that are known."""
        sequence.token_ids = self.table.token_ids[sequence.slot, : self.num_known_tokens[sequence.slot]].copy()
        self._leave_slot(sequence)
        sequence.status = SequenceStatus.WAITING
        bisect.insort(self.waiting, sequence, key=BY_ARRIVAL)

    def _leave_slot(self, sequence: Sequence) -> None:
        """Free the slot and the blocks of a running sequence; the next step releases the slot."""
        slot = sequence.slot
        self.block_manager.free(self.table.blocks_of(slot))
        self.running.remove(sequence)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        self.free_slots.append(slot)
        self._slots_to_release.append(slot)

    # For people and tests ------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait."""
        return len(self.running) + len(self.waiting)

    def check_integrity(self) -> None:
        """Assert the numbered invariants of this module."""
        check_integrity(self)
