"""The step: which sequences are computed, with which blocks, and what the results were.

A caller drives the planner in a loop, with up to a few steps in flight:

    decision = planner.schedule(now_s)     decide: a step, or none; which groups failed; events of groups
    ... send the step, run it, receive its result ...
    updates = planner.process(result)      results come back in step order

and between those calls it may `finish` sequences whose text holds a stop string and `abort` groups
whose client left. New groups come from the queue, which belongs to the caller. One mechanism serves
prefill and decode: a sequence catches up with its tokens under the token budget of the step. Prefill
in chunks, prefix hits, and recomputing after a preemption or after a lost executor are all just a
sequence with some tokens computed and the rest not.

The order of a decision:

    0. a draining planner gives away the groups that other planners have room for; one for prompts, those that have
       theirs
    1. decodes, and beams with all their candidates; if blocks lack, the last groups are preempted
    2. running prefills, chunk by chunk
    3. swapped groups come back, unless a group was preempted in this step
    4. groups of the queue are admitted, unless a group was preempted or is still swapped out; a text to be pooled
       is computed whole at once, in the rest of the budget

With `PrefillMode.FIRST`, 2 and 4 go first, and decodes run only in steps without prefill chunks; a step of decodes
follows after `MAX_PREFILL_STEPS` in a row that kept sequences from decoding.

A group that runs alone (`SequenceGroup.runs_alone`) is admitted when no step is in flight. Until it gets its token,
steps compute only this group; other running groups keep their blocks and wait.

Because the executor runs steps strictly in order, blocks freed while one result is processed may be
given out in the next step that is sent, whatever is still in flight. A step's copies read their
sources before anything is written.

Invariants, asserted by `integrity.py` and tested after every step:
 1. Every block is free, cached, or named by exactly the block tables that its reference count says.
 2. A running sequence has a live slot of its own; every other slot is free.
 3. Blocks cover the computed tokens: num_scheduled_tokens <= num_blocks * block_size.
 4. A step computes at most max_num_batched_tokens.
 5. No sequence is longer than max_model_len or its max_tokens.
 6. Every group that was admitted ends exactly once: by the updates, a failure, `finish` or `abort`.
 7. A block that is written into has one reference; blocks that a lead computes for its siblings are
    not read before they are full.
 8. A registered block holds what its hash says, in all tokens; only full blocks are registered.
 9. A live slot names READY things only, each in the slot that its admission named; a thing that is in use, or
    whose load has not ended, is not dropped.

Pure: no clock, no randomness, no transport. Read next: `decoding.py`, `block_appender.py`, `prefills.py`,
`results.py`, `block_manager.py`, then `octavo_shared/step_wire/batch_table.py`.
"""

from collections import deque
from dataclasses import replace

import numpy as np

from octavo_shared.errors import ExecutorFaultError
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import Step, StepResult
from scheduler_svc.core.blocks.block_holders import BlockHolders
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.blocks.prefix_cache import BlockHasher
from scheduler_svc.core.blocks.saved_states import SavedStates
from scheduler_svc.core.limits import MAX_PREFILL_STEPS, CoreLimits, PrefillMode, Role
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step.admission import Admissions
from scheduler_svc.core.step.admitted_groups import AdmissionQueue, AdmittedGroups
from scheduler_svc.core.step.batch import BY_ORDER, Batch
from scheduler_svc.core.step.block_appender import Decodes
from scheduler_svc.core.step.block_transfers import NOTHING_ENDED, BlockTransfers, Ended
from scheduler_svc.core.step.decoding import Decoding
from scheduler_svc.core.step.demand import HALF_OPEN, Obstacle, Wait
from scheduler_svc.core.step.oldest_step import OldestStep
from scheduler_svc.core.step.preemption import PreemptedGroups, Preemption
from scheduler_svc.core.step.result_check import check_result
from scheduler_svc.core.step.results import Results
from scheduler_svc.core.step.running_groups import RunningGroups
from scheduler_svc.core.step.step_cost import StepCost, StepPace
from scheduler_svc.core.step.step_plan import Decision, StepInFlight, StepPlan
from scheduler_svc.core.step.step_size import BYTES_OF_A_NAME
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.core.step.swapping import SwappedGroups
from scheduler_svc.core.waiting.policy import FcfsPolicy, Policy
from scheduler_svc.request.provenance import UNKNOWN, Numerics

# How often an executor that computes nothing is asked about the loads and transfers that it does.
POLL_INTERVAL_S = 0.02
# Why a group leaves a planner, for people.
DRAINING = "its executor is draining"
BLOCKS_ARE_OLD = "the weights have changed, or the cache was given up"
PROMPT_IS_COMPUTED = "its executor is for prompts, and another one has its blocks"


class ExecutorPlanner:
    """Decides the steps of one executor, from one Attach to its loss.

    Args:
        limits: The numbers and choices.
        queue: Groups come from it, and go back to it when they are to be computed again.
        policy: Puts groups on levels; the same as the queue's.
        epoch: Goes into every step.
        prefix_key: Secret of the prefix cache.
        holders: The fleet's index of registered blocks; None: there is no fleet.
        name: The address of the executor.
        numerics: The numerics of the executor.
        info: What the executor said of itself, for people; None: it was not asked.

    Attributes:
        numerics: As above; its weights may change.
        is_probing: Whether it is in doubt that the executor works: it has at most one group, until the caller has
            seen a step finish and clears this.
        is_draining: Whether it gives its groups to other planners with room, so that its executor can be ended.
        pace: What its steps take at least.
        transfers: Blocks on their way to other executors, and from them.
        ended_transfers: Those that the last result has told as ended.
        takes_groups: Whether new groups may be dispatched to it.
        oldest_step: Tells whether the oldest step in flight is late.
    """

    def __init__(
        self,
        limits: CoreLimits,
        queue: AdmissionQueue,
        policy: Policy | None = None,
        epoch: int = 1,
        prefix_key: bytes = b"",
        holders: BlockHolders | None = None,
        name: str = "",
        numerics: Numerics = UNKNOWN,
        info: ExecutorInfo | None = None,
    ) -> None:
        self.name = name
        self.numerics = numerics
        self.info = info
        self.is_probing = self.is_draining = False
        self.pace = StepPace(limits.max_num_batched_tokens)
        self.limits = limits
        self.epoch = epoch
        self.queue = queue
        # No part below refers to the planner, so a lost planner is freed at once, with its tables.
        self.blocks = BlockManager(limits, prefix_key, holders)
        self._copies_to_host = self.blocks.has_host_prefixes
        self._hands_over = limits.role is Role.PREFILL and limits.max_transfers > 0
        self.ended_transfers: Ended = NOTHING_ENDED
        self.batch = Batch(limits, self.blocks, policy or FcfsPolicy())
        self.table = self.batch.table
        running = RunningGroups(limits, self.batch, queue)
        self.prefills, self.beam_batch = running.prefills, running.beam_batch
        self.swapped = SwappedGroups(limits, self.batch)
        self.preempted = PreemptedGroups()
        self.groups = AdmittedGroups(running, self.swapped, self.preempted, queue)
        self.preemption = Preemption(limits, running, self.swapped, self.preempted)
        self.admissions = Admissions(limits, queue, running, self.swapped, self.groups, numerics)
        self.transfers = BlockTransfers(self.blocks)
        self._decoding = Decoding(limits, running, self.preemption, self.groups, self.transfers)
        self._results = Results(running, self.preempted, self.groups)
        self.in_flight: deque[StepInFlight] = self.batch.in_flight
        self.now_s = 0.0
        self.oldest_step = OldestStep(self.blocks, self.in_flight, limits.stall_after_s)
        self._num_prefill_steps = 0  # in a row that kept sequences from decoding
        self._to_recompute: set[SequenceGroup] = set()
        self._keeps_live = False  # until the next step
        self.takes_groups = True
        self.last_scheduled_step_id = 0
        self.last_processed_step_id = 0

    # The decision --------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> Decision:
        """Decide the next step, if there is something to do, and apply it to the batch table."""
        self.now_s = now_s
        self.oldest_step.note_decision(now_s)
        if self.batch.things.adapters.failed_at_s:
            self.batch.things.adapters.retry_failed(now_s)
        limits = self.limits
        plan = StepPlan(limits.max_num_batched_tokens, now_s, limits.max_admitted_bytes, bool(self.in_flight))
        if self._to_recompute:
            self._recompute(plan)
        elif self.is_draining or self._hands_over:
            self._give_away(plan)
        plan.solo = self.solo
        is_mixed = limits.prefill_mode is PrefillMode.CHUNKED
        plan.is_closed = plan.solo is not None
        has_solo = self.queue.has_solo and not plan.is_closed
        if has_solo:
            if self.in_flight:
                return Decision(None, [], plan.events)  # the group is admitted when their results are in
            self.admissions.admit_solo(plan)
            has_solo = plan.is_closed = not plan.failures  # one that fails keeps nobody waiting
        if not (has_solo or is_mixed):
            self._prefill_first(plan)
        elif not has_solo and self.admissions.unit_needs_step:
            self.admissions.admit_units(plan)
        if plan.prefill_chunks or plan.pooling_groups or plan.encodings:
            decodes = Decodes(np.zeros_like(self.batch.is_decoding), [])
        else:
            decodes = self._decoding.decide(plan)
            self._charge_decodes(decodes)
            if is_mixed:
                self.prefills.continue_all(plan)
            if not (plan.preempted or plan.has_held_back or plan.is_closed):
                self.admissions.swap_in(plan)
                if is_mixed:
                    self.admissions.admit(plan)
        return Decision(self._send(plan, decodes), plan.failures, plan.events)

    def change_weights(
        self, weights_digest: str, hasher: BlockHasher, era: int, *, keeps_live: bool
    ) -> list[SequenceGroup]:
        """Go on with other weights; no step is in flight.

        Args:
            weights_digest: Of the new weights.
            hasher: Names blocks from now on.
            era: Of the hasher; see `BlockManager`.
            keeps_live: Whether running groups go on with their blocks. Else all groups are computed again.

        Returns: the groups that go on with their blocks.
        """
        assert not self.in_flight, "a step in flight has the old weights"
        self.numerics = self.admissions.numerics = self.numerics._replace(weights_digest=weights_digest)
        if self.info is not None:
            self.info = replace(self.info, weights_digest=weights_digest)
        if not keeps_live:
            self._to_recompute.update(self.batch.with_slots)
        kept = [group for group in self.batch.with_slots if group not in self._to_recompute]
        for group in kept:
            group.keep_to_itself(era)
            progress = self.batch.as_waiting(group).progress
            group.provenance.go_on(self.numerics._replace(keeps_cache=True), progress, group.adapter)
        self.rename_blocks(hasher, era)
        self._keeps_live = bool(kept)
        return kept

    def rename_blocks(self, hasher: BlockHasher, era: int) -> None:
        """Let no block be found that has a name; see `change_weights`. What is in the host pool is computed again."""
        self._to_recompute.update(self.swapped.groups)
        self.batch.rename_blocks(hasher, era)

    def _recompute(self, plan: StepPlan) -> None:
        """Free the blocks of groups that are to be computed again, as far as no row of them is in flight."""
        for group in self.movable:
            if group not in self._to_recompute:
                continue
            if group in self.batch:
                self.preemption.preempt(plan, group, BLOCKS_ARE_OLD)
            else:
                self.groups.recompute_swapped(plan, group, BLOCKS_ARE_OLD)
            self._to_recompute.remove(group)
        self._to_recompute = {group for group in self._to_recompute if group in self.groups}

    def _give_away(self, plan: StepPlan) -> None:
        """Give groups, in order, to other executors with room, which compute what they do not get of them."""
        cause = DRAINING if self.is_draining else PROMPT_IS_COMPUTED
        for group in self.queue.wanted_elsewhere(self.movable, plan.now_s):
            if group in self.batch:
                self.preemption.preempt(plan, group, cause)
            else:
                self.groups.recompute_swapped(plan, group, cause)

    def _prefill_first(self, plan: StepPlan) -> None:
        """Give the step to prefills if there are some, and to decodes when it is their turn."""
        wants_decode = self._decoding.is_wanted(plan)
        if not wants_decode or self._num_prefill_steps < MAX_PREFILL_STEPS:
            if self.admissions.unit_needs_step:
                self.admissions.admit_units(plan)
            if not plan.prefill_chunks:  # a unit may have begun one, whose chunk this is
                self.prefills.continue_all(plan)
            if not plan.is_closed:
                self.admissions.admit(plan)
        has_chunks = plan.prefill_chunks or plan.pooling_groups or plan.encodings
        self._num_prefill_steps = self._num_prefill_steps + 1 if has_chunks and wants_decode else 0

    def _send(self, plan: StepPlan, decodes: Decodes) -> StepInFlight | None:
        """Turn the plan into a step and apply it to the batch table; None: the plan is empty."""
        plan.released_slots = self.batch.take_vacated_slots()
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
                self.beam_batch.expect_row(self.batch.sequence_in_slot[slot])
        if (states := self.blocks.states) is not None:
            self._save_outputs(plan, decodes, states)
            states.release(plan.held_states)
        if self._copies_to_host:
            self._copy_to_host(plan)
        is_poll_due = (due_s := self.poll_due_s) is not None and plan.now_s >= due_s
        if plan.is_empty and not (is_poll_due or self.transfers.has_news):
            return None
        step = plan.to_step(self.epoch, self.last_scheduled_step_id + 1, self.blocks.first_state)
        step.keeps_live, self._keeps_live = self._keeps_live, False
        if self.transfers.has_news:
            plan.num_admissible_bytes = self.transfers.put_into(step, plan.num_admissible_bytes)
        if self.limits.names_blocks:
            self._name_blocks(step, plan)
        layout = self.table.apply(step.delta, trusted=True)
        prompt_groups = self.batch.groups_with_prompt_logprobs(layout)
        num_chunk_tokens = layout.num_tokens - len(layout.slots)
        if plan.pooling_groups:
            num_chunk_tokens += sum(group.num_prompt_tokens for group in plan.pooling_groups)
        if plan.encodings:
            num_chunk_tokens += sum(encoding.num_tokens for encoding in plan.encodings)
        has_moves = plan.blocks_to_swap_out or plan.blocks_to_swap_in
        in_flight = StepInFlight(
            step,
            layout,
            plan.now_s,
            self.batch.num_vacated,
            prompt_groups,
            num_chunk_tokens,
            plan.pooling_groups,
            plan.saves,
            plan.copies,
            plan.encodings,
            self.blocks.num_moved_bytes(plan.blocks_to_swap_out, plan.blocks_to_swap_in) if has_moves else 0,
        )
        self.in_flight.append(in_flight)
        self.last_scheduled_step_id = step.step_id
        self.groups.requeue()
        return in_flight

    def _save_outputs(self, plan: StepPlan, decodes: Decodes, states: SavedStates) -> None:
        """Save the states of decodes that have filled so many blocks more, if the pool is large enough for all."""
        positions = self.table.num_scheduled_tokens
        is_due = decodes.slots & (positions % states.interval == 0) & (self.table.num_open_tokens == 0)
        due = is_due.nonzero()[0]
        if len(due) and states.follows(int(np.count_nonzero(decodes.slots))):
            saves = (states.save(slot, int(positions[slot]), is_rolling=True) for slot in due.tolist())
            plan.saves += tuple(save for save in saves if save is not None)

    def _copy_to_host(self, plan: StepPlan) -> None:
        """Copy named blocks that nobody uses to the host, unless the step swaps in or only waits for others."""
        waits = self.in_flight and plan.is_empty
        if not (plan.blocks_to_swap_in or waits or self.is_draining):
            plan.copies, pairs = self.blocks.copy_to_host(plan.num_tokens)
            plan.blocks_to_swap_out += pairs

    def _name_blocks(self, step: Step, plan: StepPlan) -> None:
        """Tell the executor the names of newly registered blocks, as many as the step's message holds."""
        if self.blocks.prefix_cache is not None:
            written = {block_id for _, block_id in plan.blocks_to_swap_in}
            max_names = plan.num_admissible_bytes // BYTES_OF_A_NAME
            step.registered_blocks, step.block_names = self.blocks.take_unsent_names(max_names, written)

    # The result ----------------------------------------------------------------------------------

    def process(self, result: StepResult) -> StepUpdates:
        """Take the result of the oldest step in flight.

        Raises: ExecutorFaultError: it is not a result of that step; the executor must be given up.
        """
        if not self.in_flight:
            raise ExecutorFaultError(f"a result of step {result.step_id} arrived, but no step is in flight")
        check_result(result, self.in_flight[0], self.batch, self.limits)
        if self.limits.max_transfers:
            self.transfers.check(result)
            self.ended_transfers = self.transfers.take(result)
        self.last_processed_step_id = result.step_id
        sent = self.in_flight[0]
        workload = sent.workload if sent.pooling_groups or sent.encodings else sent.layout
        duration_s = result.execute_duration_us * 1e-6
        self.blocks.step_cost.learn(workload, duration_s, sent.num_moved_bytes, result.move_duration_us * 1e-6)
        self.pace.learn(workload, duration_s)
        self.oldest_step.was_processed = True
        for save in sent.saves:
            self.batch.take_saved_state(save)
        for copy in sent.copies:
            copy.host.take(copy)
        if self.blocks.encoder is not None:
            for encoding in sent.encodings:
                self.blocks.encoder.take(encoding)
        if result.grammars_loaded or result.adapters_loaded:  # `check_result` has accepted them
            self.batch.things.end_loads(result, self.now_s)
        updates = self._results.take(self.in_flight.popleft(), result)
        if updates.counts is not None:  # each row was charged for one token when it was decided
            for sequence, num_tokens in zip(updates.sequences, updates.counts, strict=True):
                if num_tokens > 1:
                    self.queue.charge(sequence.group.tenant, num_tokens - 1)
        self.groups.requeue()
        return updates

    # Ends ----------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        """End a sequence whose text holds a stop string; its blocks are free at once, later tokens are dropped.

        Nothing happens if it has ended already.
        """
        if sequence.status is not SequenceStatus.FINISHED:
            self.groups.finish_sequence(sequence)

    def abort(self, group: SequenceGroup) -> None:
        """End a group that this planner has or that waits in its queue."""
        self.groups.finish_group(group)

    def evacuate(self) -> list[SequenceGroup]:
        """Return the admitted groups, in order, to be computed again; the executor is lost.

        Their sequences carry all known tokens. This planner must not be used afterwards.
        """
        self.in_flight.clear()
        return self.groups.evacuate()

    def _charge_decodes(self, decodes: Decodes) -> None:
        for tenant, num_tokens in self.batch.num_slots_by_tenant(decodes.slots).items():
            self.queue.charge(tenant, num_tokens)
        for group in decodes.beam_groups:
            self.queue.charge(group.tenant, len(group.sequences))

    # For placement, people and tests -------------------------------------------------------------

    @property
    def step_cost(self) -> StepCost:
        """What its steps take at most, and what their parts cost; may be replaced by that of an earlier attachment."""
        return self.blocks.step_cost

    @step_cost.setter
    def step_cost(self, step_cost: StepCost) -> None:
        self.blocks.step_cost = step_cost

    @property
    def poll_due_s(self) -> float | None:
        """When an empty step is sent, so that an idle executor can tell of loads and transfers; None: never."""
        transfers, oldest = self.transfers, self.oldest_step
        if (
            self.in_flight
            or oldest.was_processed
            or not (self.batch.things.num_loading or transfers.sending or transfers.receiving)
        ):
            return None
        return oldest.progress_at_s + POLL_INTERVAL_S

    @property
    def solo(self) -> SequenceGroup | None:
        """The group that is computed alone now; None: all are."""
        solo = self.batch.solo
        return solo if solo is not None and solo.runs_alone else None

    @property
    def movable(self) -> list[SequenceGroup]:
        """The groups that can be given away now, in order: no candidates or late tokens of them are in flight."""
        running = (group for group in self.batch.with_slots if not self.beam_batch.is_in_flight(group))
        swapped = (group for group in self.swapped if not group.has_inflight_rows)
        return sorted([*running, *swapped], key=BY_ORDER)

    @property
    def groups_in_flight(self) -> set[SequenceGroup | None]:
        """The groups that the steps in flight compute; None stands for groups that have left."""
        groups: set[SequenceGroup | None] = set()
        for sent in self.in_flight:
            is_current = self.table.is_current(sent.layout.slots, sent.layout.generations)
            slots = sent.layout.slots[is_current].tolist()
            groups.update(self.batch.sequence_in_slot[slot].group for slot in slots)
            if len(slots) < len(is_current):
                groups.add(None)
            groups.update(group if group in self.batch else None for group in sent.pooling_groups)
        return groups

    def offers(self, group: SequenceGroup) -> bool:
        """Return whether the executor does the group's task: it generates, or pools texts for this task."""
        return self.limits.is_generative if group.pooling is None else group.pooling in self.limits.pooling_tasks

    def obstacle(self, group: SequenceGroup, now_s: float) -> Obstacle | None:
        """Return why the next step would not admit the group if it stood first in the queue; None: it would.

        A planner whose oldest step is overdue takes nothing: it may hang.
        """
        stalled_s = self.oldest_step.stalled_s(now_s)
        if stalled_s is not None:
            return Obstacle(Wait.IN_LINE, f"a step has been running for {stalled_s:.1f} s")
        if self.is_probing and self.groups:
            return HALF_OPEN
        verdict = self.admissions.judge(group)
        return verdict if isinstance(verdict, Obstacle) else None

    @property
    def num_claimed_tokens(self) -> int:
        """Tokens that running sequences still want of the budget: the rest of prefills, and one for each slot."""
        return self.prefills.num_remaining_tokens + self.limits.max_num_seqs - len(self.batch.free_slots)

    @property
    def load(self) -> int:
        """Tokens computed here before a newcomer's: those that running sequences want, and the chunks in flight.

        A chunk counts until its result is in, even if its client has left: the executor computes it.
        """
        return self.num_claimed_tokens + sum(in_flight.num_chunk_tokens for in_flight in self.in_flight)
