"""The step: who computes what, with which blocks, and what came out of it.

A caller drives the core in a loop, with up to a few steps in flight:

    step = scheduler.schedule(now_s)         decide; None: nothing to do
    ... send it, run it, receive it ...
    updates = scheduler.process(result)      results come back in step order

and between those calls it may `finish` sequences whose text holds a stop string and `abort` groups
whose client left. New groups come from the queue, which belongs to the caller. One mechanism serves
prefill and decode: a sequence catches up with its tokens under the token budget of the step. Prefill
in chunks, prefix hits, and recomputing after a preemption or after a lost executor are all just a
sequence with some tokens computed and the rest not.

The order of a decision:

    1. decodes, and beams whose candidates are in; if blocks lack, the last groups are preempted
    2. running prefills, chunk by chunk
    3. swapped groups come back, unless somebody was preempted in this step
    4. groups of the queue are admitted, unless somebody was preempted or is still swapped out

With `PrefillMode.FIRST`, 2 and 4 go first, and decodes run only in steps without prefill chunks.

Because the executor runs steps strictly in order, blocks freed while one result is processed may be
given out in the next step that is sent, whatever is still in flight. A step's copies read their
sources before anything is written.

Invariants, asserted by `integrity.py` and tested after every step:
 1. Every block is free, cached, or named by exactly the block tables that its reference count says.
 2. A running sequence has a live slot; no two have the same one; every other slot is free.
 3. Blocks cover the computed tokens: num_scheduled_tokens <= num_blocks * block_size.
 4. A step computes at most max_num_batched_tokens.
 5. No sequence is longer than max_model_len or its max_tokens.
 6. Every group that was admitted ends exactly once: by the updates, a failure, `finish` or `abort`.
 7. A block that somebody writes into has one reference; those that a lead computes for its siblings are
    not read before they are full.
 8. A registered block holds what its hash says, in all tokens; only full blocks are registered.

Pure: no clock, no randomness, no transport. Read next: `growth.py`, `prefills.py`, `block_manager.py`,
then `shared/batch_table.py`.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.admission import AdmissionQueue, Admissions, GroupFailure, Obstacle, Wait
from scheduler_svc.core.batch import BY_ORDER, Batch, running_sequences
from scheduler_svc.core.beam_search import Candidates
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.growth import BlockNeeds, Decodes, Growth
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.limits import PrefillMode, SchedulerLimits
from scheduler_svc.core.policy import FcfsPolicy, Policy
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.prefills import Prefills
from scheduler_svc.core.searches import Searches
from scheduler_svc.core.sequence import FinishReason, Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.swapping import SwappedGroups
from shared.batch_table import StepLayout
from shared.errors import ExecutorFaultError
from shared.step import BoolArray, Int32Array, Step, StepResult


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


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was scheduled, at `scheduled_at_s`, and is not acknowledged.

    `num_left` counts the slots that were left before it: if none was since, all its rows are current.
    """

    step: Step
    layout: StepLayout
    scheduled_at_s: float
    num_left: int


class Scheduler:
    """Decides the steps of one executor, from one Attach to its loss.

    Args:
        limits: The numbers and choices.
        queue: Where groups come from, and go back to when they are to be computed again.
            `takes_groups` False: none comes any more.
        policy: Puts groups on levels; the same as the queue's.
        epoch: Goes into every step.
        prefix_key: Secret of the prefix cache.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        queue: AdmissionQueue,
        policy: Policy | None = None,
        epoch: int = 1,
        prefix_key: bytes = b"",
    ) -> None:
        self.limits = limits
        self.epoch = epoch
        self.queue = queue
        self._policy = policy or FcfsPolicy()
        self.blocks = BlockManager(limits, prefix_key)
        self.batch = Batch(limits, self.blocks, self.order_of)
        self.table = self.batch.table
        self.swapped = SwappedGroups(self.batch, limits.num_host_blocks)
        self.searches = Searches(self.batch, limits.max_model_len, limits.vocab_size, limits.eos_token_ids)
        self.prefills = Prefills(limits, self.batch, self.searches, self._charge)
        self.preemption = Preemption(limits, self.batch, self.prefills, self.searches, self.swapped)
        self.admissions = Admissions(
            limits, queue, self.batch, self.prefills, self.searches, self.swapped, self.preemption
        )
        self._growth = Growth(limits, self.batch, self.searches)
        self.in_flight: deque[StepInFlight] = deque()
        self.now_s = 0.0
        self.takes_groups = True
        self.last_scheduled_step_id = 0
        self.last_processed_step_id = 0

    # The decision --------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> Step | None:
        """Decide the next step and apply it to the batch table; None if there is nothing to do.

        Groups that turn out to be unable ever to go on are in `take_failures` afterwards.
        """
        self.now_s = now_s
        plan = StepPlan(self.limits.max_num_batched_tokens, now_s)
        is_mixed = self.limits.prefill_mode is PrefillMode.CHUNKED
        if not is_mixed:
            self.prefills.continue_all(plan)
            self.admissions.admit(plan)
        if plan.prefill_chunks:
            decodes = Decodes(np.zeros_like(self.batch.is_decoding), [])
        else:
            decodes = self._decode(plan)
            if is_mixed:
                self.prefills.continue_all(plan)
            if not (plan.preempted or plan.has_held_back):
                self.admissions.swap_in(plan)
                if is_mixed:
                    self.admissions.admit(plan)
        return self._send(plan, decodes)

    def _decode(self, plan: StepPlan) -> Decodes:
        """Decide who decodes, and give them blocks; preempt the last groups if there are too few."""
        batch = self.batch
        slots = batch.is_decoding & ~batch.stop_checker.at_length_limit(self.table.num_tokens)
        decodes = Decodes(slots, sorted(self.searches.ready, key=BY_ORDER))
        if self.limits.sliding_window:
            for slot in np.flatnonzero(slots).tolist():
                batch.slide_window(slot, int(self.table.num_scheduled_tokens[slot]))
        needs = self._growth.needs_of(decodes)
        while not (plan.has_held_back or self._has_blocks_for(needs)):
            if self._make_room(plan):
                decodes.slots &= batch.is_decoding
                decodes.searches = [group for group in decodes.searches if group in self.searches.ready]
            else:
                plan.has_held_back = True
                self._growth.hold_back(decodes)
            needs = self._growth.needs_of(decodes)
        plan.num_decodes = int(np.count_nonzero(decodes.slots)) + sum(
            len(self.searches.ready[group]) for group in decodes.searches
        )
        plan.token_budget -= plan.num_decodes
        self._growth.take_blocks(plan, decodes, needs)
        self._charge_decodes(decodes)
        return decodes

    def _has_blocks_for(self, needs: BlockNeeds) -> bool:
        """Return whether the blocks suffice for decodes, and for one more of each prefill that is stuck."""
        return needs.num_blocks + len(self.prefills.without_room()) <= self.blocks.allocator.num_free_blocks

    def _make_room(self, plan: StepPlan) -> bool:
        """Free the blocks of one group; return False if the growth has to wait for a step in flight."""
        victim = self.batch.running[-1]
        if self.searches.is_in_flight(victim):
            return False
        if len(self.batch.running) > 1:
            self.preemption.preempt(plan, victim)
        elif self.in_flight:
            return False  # what comes in may end a sequence
        elif self.swapped.groups:
            self.admissions.recompute_swapped(self.swapped.groups[-1])  # it may hold shared blocks
        else:
            self._fail(victim)
        return True

    def _fail(self, group: SequenceGroup) -> None:
        """End a group that cannot grow although it has the pool for itself."""
        num_used = self.blocks.allocator.num_used_blocks
        message = (
            f"{len(group.live_sequences)} sequences need more than the {self.limits.num_blocks} blocks of "
            f"{self.limits.block_size} tokens of the KV cache; {num_used} are in use, all by this request"
        )
        self.admissions.failures.append(GroupFailure(group, message))
        self._end(group)

    def _send(self, plan: StepPlan, decodes: Decodes) -> Step | None:
        """Turn the plan into a step and apply it to the batch table."""
        plan.released_slots = self.batch.take_left_slots()
        changed = decodes.slots ^ self.table.active
        if len(plan.released_slots):
            changed[plan.released_slots] = False
        if np.count_nonzero(changed):
            plan.deactivated_slots = np.flatnonzero(changed & self.table.active).astype(np.int32)
            plan.activated_slots = np.flatnonzero(changed & decodes.slots).astype(np.int32)
        if plan.appended_tokens:
            beam_slots = np.array([slot for slot, _ in plan.appended_tokens], np.int32)
            plan.activated_slots = np.concatenate((plan.activated_slots, beam_slots))
            for slot in beam_slots.tolist():
                self.searches.expect_row(self.batch.sequence_in_slot[slot])
        if plan.is_empty:
            return None
        step = plan.to_step(self.epoch, self.last_scheduled_step_id + 1)
        layout = self.table.apply(step.delta, trusted=True)
        self.in_flight.append(StepInFlight(step, layout, plan.now_s, self.batch.num_left))
        self.last_scheduled_step_id = step.step_id
        for group in self.preemption.take_back():
            self.queue.add(group)
        return step

    # The result ----------------------------------------------------------------------------------

    def process(self, result: StepResult) -> StepUpdates:
        """Take the result of the oldest step in flight.

        Raises: ExecutorFaultError: it is not a result of that step; the executor must be given up.
        """
        self._check_result(result)
        sent = self.in_flight.popleft()
        layout, batch = sent.layout, self.batch
        self.last_processed_step_id = result.step_id
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
        for group in self.preemption.take_back():
            self.queue.add(group)
        return updates

    def _current_rows(self, sent: StepInFlight) -> BoolArray | None:
        """Return which rows of a step still belong to the sequence they were sent for; None: all of them."""
        if sent.num_left == self.batch.num_left:
            return None
        layout = sent.layout
        current = self.table.is_current(layout.slots, layout.generations)
        return current & ~self.batch.is_left[layout.slots]

    def _acknowledge(self, layout: StepLayout, current: BoolArray | None) -> None:
        """Count what was computed; register the blocks that prefill chunks filled."""
        batch, ends = self.batch, layout.starts + layout.lengths
        slots = layout.slots.astype(np.intp)
        if current is None:
            batch.num_computed_tokens[slots] = ends
        else:
            batch.num_computed_tokens[slots[current]] = ends[current]
        cache, size = self.blocks.prefix_cache, self.limits.block_size
        if cache is None:
            return
        for row in range(layout.num_decodes, len(layout.slots)):
            if current is None or current[row]:
                slot, start, end = int(layout.slots[row]), int(layout.starts[row]), int(ends[row])
                batch.register_blocks(slot)
                cache.stop_writing(slot, end // size - start // size)

    def _check_result(self, result: StepResult) -> None:
        if not self.in_flight:
            raise ExecutorFaultError(f"a result of step {result.step_id} came, and no step is in flight")
        expected = self.in_flight[0]
        if (result.epoch, result.step_id) != (self.epoch, expected.step.step_id):
            raise ExecutorFaultError(
                f"epoch {result.epoch} step {result.step_id} came instead of {self.epoch} {expected.step.step_id}"
            )
        layout, token_ids = expected.layout, result.sampled_token_ids
        num_rows, vocab_size = len(layout.sample_slots), self.limits.vocab_size
        if len(token_ids) != num_rows:
            raise ExecutorFaultError(f"step {result.step_id} has {len(token_ids)} sampled tokens for {num_rows} rows")
        if layout.num_candidates is not None:
            self._check_candidates(result, layout.num_candidates)
            token_ids = token_ids[layout.num_candidates == 0]
        if not _are_token_ids(token_ids, vocab_size):
            raise ExecutorFaultError(f"step {result.step_id} has token ids outside 0 to {vocab_size - 1}")
        if self.batch.slots_with_logprobs:
            self._check_logprobs(result, layout)

    def _check_logprobs(self, result: StepResult, layout: StepLayout) -> None:
        asked = np.isin(layout.sample_slots, list(self.batch.slots_with_logprobs))
        asked &= self.table.is_current(layout.sample_slots, layout.sample_generations)
        if asked.any() and (result.logprobs is None or np.isnan(result.logprobs[asked]).any()):
            raise ExecutorFaultError(f"step {result.step_id} lacks log-probabilities that were asked for")

    def _check_candidates(self, result: StepResult, num_candidates: Int32Array) -> None:
        token_ids, logprobs = result.candidate_token_ids, result.candidate_logprobs
        total = int(num_candidates.sum())
        if token_ids is None or logprobs is None or not len(token_ids) == len(logprobs) == total:
            num_sent = 0 if token_ids is None else len(token_ids)
            raise ExecutorFaultError(f"step {result.step_id} has {num_sent} beam candidates instead of {total}")
        if not _are_token_ids(token_ids, self.limits.vocab_size):
            raise ExecutorFaultError(f"step {result.step_id} has candidates outside 0 to {self.limits.vocab_size - 1}")
        if np.isnan(logprobs).any():
            raise ExecutorFaultError(f"step {result.step_id} has candidates whose log-probability is not a number")

    def _collect_updates(self, layout: StepLayout, result: StepResult, current: BoolArray | None) -> StepUpdates:
        """Say who got which token; end the sequences that are complete."""
        batch = self.batch
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
        for row in updates.finished:
            self._end_sequence(updates.sequences[row])
        if current is not None:
            for row in np.flatnonzero(~current).tolist():
                slot, generation = int(layout.sample_slots[row]), int(layout.sample_generations[row])
                late = self.preemption.late_sequence(slot, generation)
                if late is not None:
                    self._take_late_token(late, row, result, updates)
        return updates

    def _take_late_token(self, sequence: Sequence, row: int, result: StepResult, updates: StepUpdates) -> None:
        """Accept a token of a sequence that was preempted after the step was sent."""
        token_id = int(result.sampled_token_ids[row])
        sequence.append_late_token(token_id)
        reason = self.batch.stop_checker.finished_late(sequence)
        if reason is not None:
            updates.finished[len(updates.sequences)] = reason
            self._end_sequence(sequence)
        elif not sequence.num_late_tokens:
            self.preemption.forget_late(sequence)
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
            sequence = self.batch.sequence_in_slot[layout.sample_slots[row]]
            candidates = Candidates(result.candidate_token_ids[span], result.candidate_logprobs[span])
            if self.searches.take(sequence, candidates):
                updates.finished_searches.append(sequence.group)
                self._end(sequence.group)
            elif sequence.group in self.searches.ready:
                updates.advanced_searches.append(sequence.group)

    # Ends ----------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        """End a sequence whose text holds a stop string; its blocks are free at once, later tokens are dropped.

        Nothing happens if it has ended already.
        """
        if sequence.status is not SequenceStatus.FINISHED:
            self._end_sequence(sequence)

    def abort(self, group: SequenceGroup) -> None:
        """End a group that this scheduler has or that waits in its queue: its client left."""
        self._end(group)

    def evacuate(self) -> list[SequenceGroup]:
        """Return the groups that were admitted, in order, to be computed again; the executor is lost.

        Their sequences carry all tokens that are known. Nothing may be asked of this scheduler afterwards.
        """
        groups = [*self.batch.running, *self.swapped, *self.preemption.late_groups]
        for group in list(self.batch.running):
            self.preemption.leave(group, SequenceStatus.WAITING, keeps_late_tokens=False)
        for group in groups:
            for sequence in group.live_sequences:
                sequence.status = SequenceStatus.WAITING
                sequence.num_late_tokens = 0
                sequence.slot, sequence.generation = -1, 0  # elsewhere they would name somebody else's tokens
        self.in_flight.clear()
        return sorted(groups, key=BY_ORDER)

    def take_failures(self) -> list[GroupFailure]:
        """Return the groups that turned out to be unable ever to go on, since the last call; they have ended."""
        failures, self.admissions.failures = self.admissions.failures, []
        return failures

    def _end_sequence(self, sequence: Sequence) -> None:
        """End one sequence of a group, and the group with its last one."""
        group = sequence.group
        if len(group.live_sequences) == 1:
            self._end(group)
            return
        if sequence.status is SequenceStatus.RUNNING:
            self.batch.register_blocks(sequence.slot)
            self.blocks.allocator.free(self.batch.held_blocks(sequence.slot))
            self.batch.leave(sequence)
        else:
            self.swapped.drop_sequence(sequence)
        self.preemption.forget_late(sequence)
        sequence.status = SequenceStatus.FINISHED

    def _end(self, group: SequenceGroup) -> None:
        """End a group, wherever it is."""
        if group in self.batch:
            self.preemption.free(group)
            self.preemption.leave(group, SequenceStatus.FINISHED, keeps_late_tokens=False)
        elif group in self.swapped.groups:
            self.swapped.drop(group)
        elif group in self.preemption.late_groups:
            self.preemption.late_groups.remove(group)
        else:
            self.queue.remove(group)
        for sequence in group.sequences:
            if sequence.num_late_tokens:
                self.preemption.forget_late(sequence)
        group.end()

    # Order and shares ----------------------------------------------------------------------------

    def order_of(self, group: SequenceGroup) -> tuple[int, int]:
        """Return where a group stands: the smaller one goes first and is preempted last."""
        return self._policy.level(group), group.arrival

    def _charge(self, group: SequenceGroup, num_tokens: int) -> None:
        self.queue.charge(group.tenant, num_tokens)

    def _charge_decodes(self, decodes: Decodes) -> None:
        for tenant, num_tokens in self.batch.num_slots_by_tenant(decodes.slots).items():
            self.queue.charge(tenant, num_tokens)
        for group in decodes.searches:
            self.queue.charge(group.tenant, len(group.sequences))

    # For placement, people and tests -------------------------------------------------------------

    def can_ever_take(self, group: SequenceGroup) -> bool:
        """Return whether the group fits into the empty batch and the empty pool."""
        return self.admissions.can_ever_admit(group)

    def why_never(self, group: SequenceGroup) -> str:
        """Say why the group does not fit even into the empty batch, in one sentence."""
        return self.admissions.why_never(group)

    def obstacle(self, group: SequenceGroup, now_s: float) -> Obstacle | None:
        """Return why the next step would not admit the group if it stood first in the queue; None: it would.

        A core whose oldest step is overdue takes nothing: it may hang.
        """
        if not self.takes_groups:
            return Obstacle(Wait.IN_LINE, "the executor is leaving the fleet")
        if self.in_flight and now_s - self.in_flight[0].scheduled_at_s > self.limits.stall_after_s:
            return Obstacle(Wait.IN_LINE, f"a step has been running for more than {self.limits.stall_after_s:g} s")
        verdict = self.admissions.judge(group)
        return verdict if isinstance(verdict, Obstacle) else None

    def has(self, group: SequenceGroup) -> bool:
        """Return whether the group was admitted here and has not ended."""
        return group in self.batch or group in self.swapped.groups or group in self.preemption.late_groups

    def cost_of(self, group: SequenceGroup) -> int:
        """Return the tokens that are computed here before the group has its first one, and a step of the others."""
        num_running = sum(1 for _ in running_sequences(self.batch.running))
        return self.admissions.num_tokens_to_compute(group) + self.prefills.num_left + num_running

    @property
    def num_unfinished(self) -> int:
        """Groups that were admitted and have not ended."""
        return len(self.batch.running) + len(self.swapped) + len(self.preemption.late_groups)

    def check_integrity(self) -> None:
        """Assert the numbered invariants of this module."""
        check_integrity(self)


def _are_token_ids(numbers: Int32Array, vocab_size: int) -> bool:
    """Return whether all are 0 to `vocab_size` - 1. As unsigned numbers, negative ones are too large as well."""
    return not np.count_nonzero(numbers.view(np.uint32) >= vocab_size)
