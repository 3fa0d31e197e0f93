"""The decodes of a step. When there are too few blocks for all of them, the last groups make room.

In this order: preempt the last running group, unless it is the only one; wait for the steps in flight, which may
end a sequence; drop a swapped group, which may hold shared blocks; cancel transfers, and wait for their blocks; end the
group that has the pool for itself.
"""

import numpy as np

from octavo_shared.step_wire.step import BoolArray, Int32Array
from scheduler_svc.core.blocks.saved_states import SavedStates
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.admitted_groups import AdmittedGroups
from scheduler_svc.core.step.batch import BY_ORDER
from scheduler_svc.core.step.block_appender import BlockAppender, BlockNeeds, Decodes
from scheduler_svc.core.step.block_transfers import BlockTransfers
from scheduler_svc.core.step.preemption import Preemption
from scheduler_svc.core.step.running_groups import RunningGroups
from scheduler_svc.core.step.step_plan import StepPlan


class Decoding:
    """Decides the decodes of a step, and gives them blocks."""

    def __init__(
        self,
        limits: CoreLimits,
        running: RunningGroups,
        preemption: Preemption,
        groups: AdmittedGroups,
        transfers: BlockTransfers,
    ) -> None:
        self._limits = limits
        self._transfers = transfers
        self._batch = running.batch
        self._beam_batch = running.beam_batch
        self._prefills = running.prefills
        self._preemption = preemption
        self._groups = groups
        self._block_appender = BlockAppender(limits, running)

    def decide(self, plan: StepPlan) -> Decodes:
        """Decide which sequences decode, and give them blocks; preempt the last groups if there are too few."""
        batch, slots = self._batch, self._wanted_slots(plan)
        states = self._states_to_follow(slots) if self._limits.max_allowance > 1 else None
        if states is not None:
            slots &= ~self._waits_to_save(states)
        decodes = Decodes(slots, sorted(filter(plan.computes, self._beam_batch.ready), key=BY_ORDER))
        batch.slide_windows(slots)
        if self._limits.max_allowance > 1:
            decodes.allowances = self._allowances(plan, slots, states)
        needs = self._block_appender.blocks_needed(decodes)
        if decodes.allowances is not None and not self._has_blocks_for(needs):
            decodes.allowances = np.ones_like(decodes.allowances)  # no group is preempted for drafts
            needs = self._block_appender.blocks_needed(decodes)
        while not (plan.has_held_back or self._has_blocks_for(needs)):
            if self._make_room(plan):
                decodes.slots &= batch.is_decoding
                decodes.beam_groups = [group for group in decodes.beam_groups if group in self._beam_batch.ready]
            else:
                plan.has_held_back = True
                self._block_appender.hold_back(decodes)
            needs = self._block_appender.blocks_needed(decodes)
        plan.num_decodes = int(np.count_nonzero(decodes.slots)) + sum(
            len(self._beam_batch.ready[group]) for group in decodes.beam_groups
        )
        plan.token_budget -= plan.num_decodes
        if decodes.allowances is not None:
            plan.token_budget -= int((decodes.allowances[decodes.slots] - 1).sum())
            changed = (decodes.slots & (decodes.allowances != batch.table.allowance)).nonzero()[0]
            plan.allowances = np.column_stack((changed, decodes.allowances[changed])).astype(np.int32)
        self._block_appender.append_blocks(plan, decodes, needs)
        return decodes

    def is_wanted(self, plan: StepPlan) -> bool:
        """Return whether the step may compute a sequence that wants a token."""
        return any(map(plan.computes, self._beam_batch.ready)) or bool(np.count_nonzero(self._wanted_slots(plan)))

    def _wanted_slots(self, plan: StepPlan) -> BoolArray:
        """Return the slots that want a token and may get one, [max_num_seqs] bool; without slots of beams."""
        batch = self._batch
        slots = batch.is_decoding & ~batch.stop_checker.at_length_limit(batch.table.num_tokens)
        return slots if plan.solo is None else slots & batch.slots_of(plan.solo)

    def _allowances(self, plan: StepPlan, slots: BoolArray, states: SavedStates | None) -> Int32Array | None:
        """Return how many tokens each of `slots` may get, [max_num_seqs]; None: one, as before.

        No sequence passes its limit by them, nor the next place where its state is saved. They leave each slot a token
        of the budget, so that prompts go on. Those that may have drafts share what room there is, and none has any if
        it is less than one for each.
        """
        limits, batch = self._limits, self._batch
        wanting = slots & batch.speculates
        room = min(plan.token_budget, limits.max_sample_rows) - limits.max_num_seqs
        each = min(room // max(1, int(np.count_nonzero(wanting))), limits.max_allowance - 1)
        if each <= 0:
            return np.ones(len(slots), np.int32) if np.count_nonzero(batch.table.allowance > 1) else None
        num_left = batch.stop_checker.num_left(batch.table.num_tokens)
        if states is not None:
            num_left = np.minimum(num_left, states.num_left(batch.table.num_scheduled_tokens))
        allowances: Int32Array = np.where(wanting, np.clip(num_left, 1, each + 1), 1).astype(np.int32)
        return allowances

    def _states_to_follow(self, slots: BoolArray) -> SavedStates | None:
        """Return the saved states if those of the outputs in `slots` are among them; None: they are not."""
        states = self._batch.blocks.states
        return states if states is not None and states.follows(int(np.count_nonzero(slots))) else None

    def _waits_to_save(self, states: SavedStates) -> BoolArray:
        """Return the slots that are where their state is saved if all drafts were right: a step in flight will tell."""
        table = self._batch.table
        waits: BoolArray = (table.num_open_tokens > 0) & (table.num_scheduled_tokens % states.interval == 0)
        return waits

    def _has_blocks_for(self, needs: BlockNeeds) -> bool:
        """Return whether the blocks suffice for the decodes, and for one more for each prefill that is stuck."""
        for group, num_stuck in zip(self._batch.blocks.groups, self._prefills.num_without_room(), strict=True):
            if needs.num_blocks + num_stuck > group.allocator.num_free_blocks:
                return False
        return True

    def _make_room(self, plan: StepPlan) -> bool:
        """Free the blocks of one group; return False if the decodes have to wait for a result or a transfer."""
        *others, victim = self._batch.with_slots
        if self._beam_batch.is_in_flight(victim):
            return False
        if others:
            self._preemption.preempt(plan, victim)
        elif plan.has_steps_in_flight:
            return False  # a result may end a sequence
        elif not self._groups.recompute_last_swapped(plan):  # a swapped group may hold shared blocks
            if self._transfers:
                self._transfers.cancel_all()
                return False
            self._fail(plan, victim)
        return True

    def _fail(self, plan: StepPlan, group: SequenceGroup) -> None:
        """End a group that cannot grow although it has the pool for itself."""
        of = min(self._batch.blocks.groups, key=lambda of: of.allocator.num_free_blocks)
        num_used = of.allocator.num_used_blocks
        message = (
            f"{len(group.live_sequences)} sequences need more than the {of.allocator.num_blocks} blocks{of.words} of "
            f"{self._limits.block_size} tokens in the KV cache; {num_used} are in use, all by this request"
        )
        self._groups.finish_group(group)
        plan.fail(group, message)
