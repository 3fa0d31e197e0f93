"""How a running group makes room: its blocks are freed, or moved to the host pool.

RECOMPUTE keeps the tokens and frees the blocks; full ones stay in the prefix cache until their place
is needed. SWAP moves the blocks and keeps what is computed. A group goes as a whole. Either way it
carries its known tokens, those that sent steps are still to deliver are appended when they arrive,
and it comes back before newcomers do.
"""

import bisect

from scheduler_svc.core.batch import BY_ORDER, Batch
from scheduler_svc.core.group_event import EventKind
from scheduler_svc.core.limits import CoreLimits, PreemptionMode
from scheduler_svc.core.prefills import Prefills
from scheduler_svc.core.searches import Searches
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.swapping import SwappedGroups


class Preemption:
    """Takes groups out of the batch and knows those that wait for late tokens.

    Args:
        limits: The preemption mode.
        batch: Slots and blocks.
        prefills: What still catches up.
        searches: What is known of beams.
        swapped: The host pool.
    """

    def __init__(
        self, limits: CoreLimits, batch: Batch, prefills: Prefills, searches: Searches, swapped: SwappedGroups
    ) -> None:
        self._mode = limits.preemption_mode
        self._batch = batch
        self._prefills = prefills
        self._searches = searches
        self._swapped = swapped
        self.num_preemptions = dict.fromkeys(PreemptionMode, 0)
        # Groups that are to be computed again once their last late token is there.
        self.late_groups: list[SequenceGroup] = []
        self._late_sequences: dict[tuple[int, int], Sequence] = {}

    def preempt(self, plan: StepPlan, group: SequenceGroup) -> None:
        """Take a running group out of the batch; see `take_back` for when it may come back."""
        assert not self._searches.is_in_flight(group), "its candidates would be lost"
        group.num_preemptions += 1
        plan.preempted.append(group)
        moves = None
        if self._mode_for(group) is PreemptionMode.SWAP:
            moves = self._swapped.try_swap_out(group, self._searches.source_slots(group))
        mode = PreemptionMode.RECOMPUTE if moves is None else PreemptionMode.SWAP
        self.num_preemptions[mode] += 1
        if moves is None:
            self.free(group)
        else:
            plan.blocks_to_swap_out.extend(moves)
        self.leave(group, SequenceStatus.WAITING if moves is None else SequenceStatus.SWAPPED, keeps_late_tokens=True)
        plan.note(group, EventKind.PREEMPTED if moves is None else EventKind.SWAPPED_OUT)
        if moves is None:
            bisect.insort(self.late_groups, group, key=BY_ORDER)

    def free(self, group: SequenceGroup) -> None:
        """Free the blocks of a running group that leaves the batch."""
        for _, slot in self._searches.source_slots(group):
            self._batch.register_blocks(slot)
            self._batch.blocks.allocator.free(self._batch.held_blocks(slot))

    def leave(self, group: SequenceGroup, status: SequenceStatus, *, keeps_late_tokens: bool) -> None:
        """Take the sequences of a running group out of their slots; their blocks are gone already.

        Args:
            group: The group.
            status: What its live sequences are from now on.
            keeps_late_tokens: Whether tokens that sent steps deliver are still waited for.
        """
        batch, cache = self._batch, self._batch.blocks.prefix_cache
        for sequence in group.live_sequences:
            if sequence.has_slot:
                slot = sequence.slot
                if cache is not None:
                    cache.stop_writing(slot)
                if group.beams is None and status is not SequenceStatus.FINISHED:
                    sequence.token_ids = batch.known_tokens(slot)
                    self._expect_late_tokens(sequence, batch.num_late_tokens(slot) if keeps_late_tokens else 0)
                batch.leave(sequence)
            sequence.status = status
        if group.beams is not None:
            if status is not SequenceStatus.FINISHED:
                group.take_tokens_of_beams()
            self._searches.forget(group)
        self._prefills.drop(group)
        batch.part(group)

    def _expect_late_tokens(self, sequence: Sequence, num_late_tokens: int) -> None:
        if num_late_tokens:
            sequence.num_late_tokens = num_late_tokens
            self._late_sequences[sequence.slot, sequence.generation] = sequence

    # Late tokens ---------------------------------------------------------------------------------

    def late_sequence(self, slot: int, generation: int) -> Sequence | None:
        """Return the preempted sequence that had the slot at that generation and still waits for tokens."""
        return self._late_sequences.get((slot, generation))

    def forget_late(self, sequence: Sequence) -> None:
        """The last late token is there, or nobody waits for it any more."""
        self._late_sequences.pop((sequence.slot, sequence.generation), None)
        sequence.num_late_tokens = 0

    def take_back(self) -> list[SequenceGroup]:
        """Return the groups that may be queued again: none of their tokens is on its way any more."""
        if not self.late_groups:
            return []
        complete = [group for group in self.late_groups if not group.has_late_tokens]
        self.late_groups = [group for group in self.late_groups if group.has_late_tokens]
        return complete

    def _mode_for(self, group: SequenceGroup) -> PreemptionMode:
        """Return what is tried first: a group that has not caught up has little to save."""
        if not self._swapped.host.num_blocks or self._prefills.is_running(group):
            return PreemptionMode.RECOMPUTE
        if self._mode is not None:
            return self._mode
        return PreemptionMode.RECOMPUTE if len(group.live_sequences) == 1 else PreemptionMode.SWAP
