"""How a running group makes room: its blocks are freed, or moved to the host pool.

RECOMPUTE keeps the tokens and frees the blocks; full blocks stay in the prefix cache until they are
evicted. SWAP moves the blocks and keeps what is computed. A group is preempted as a whole. Either way it
carries its known tokens, and comes back before newcomers. Tokens that sent steps are still to deliver are
appended when they arrive.
"""

import bisect

from scheduler_svc.core.limits import CoreLimits, PreemptionMode
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step.batch import BY_ORDER, Batch
from scheduler_svc.core.step.running_groups import RunningGroups
from scheduler_svc.core.step.step_plan import StepPlan
from scheduler_svc.core.step.swapping import SwappedGroups
from scheduler_svc.request.life import EventKind


class PreemptedGroups:
    """Preempted sequences that wait for tokens in flight, and the groups that are queued again after the last token.

    Attributes:
        groups: Groups that are to be computed again, in order; swapped groups are in `SwappedGroups`.
    """

    def __init__(self) -> None:
        self.groups: list[SequenceGroup] = []
        self._waiting_sequences: dict[tuple[int, int], Sequence] = {}

    def expect_tokens(self, group: SequenceGroup, batch: Batch) -> None:
        """Let the sequences of a group that still runs wait for the tokens that sent steps deliver to them."""
        if group.beams is not None:
            return
        for sequence in group.live_sequences:
            if sequence.has_slot and (num_rows := batch.num_inflight_rows(sequence)):
                sequence.num_inflight_rows = num_rows
                self._waiting_sequences[sequence.slot, sequence.generation] = sequence

    def take(self, group: SequenceGroup, running: RunningGroups) -> None:
        """Take a running group out of the batch; it is computed again once its tokens in flight have arrived."""
        self.expect_tokens(group, running.batch)
        running.free_blocks(group)
        running.remove(group, SequenceStatus.WAITING)
        bisect.insort(self.groups, group, key=BY_ORDER)

    def sequence_of(self, slot: int, generation: int) -> Sequence | None:
        """Return the sequence that had the slot at that generation and still waits for tokens."""
        return self._waiting_sequences.get((slot, generation))

    def forget(self, sequence: Sequence) -> None:
        """Let a sequence wait for tokens no more: the last one has arrived, or the sequence has ended."""
        place = sequence.slot, sequence.generation  # on another planner, if it ran there: here it may be another's
        if self._waiting_sequences.get(place) is sequence:
            del self._waiting_sequences[place]
        sequence.num_inflight_rows = 0

    def take_complete(self) -> list[SequenceGroup]:
        """Remove and return the groups that may be queued again: none of their tokens is in flight any more."""
        if not self.groups:
            return []
        complete = [group for group in self.groups if not group.has_inflight_rows]
        self.groups = [group for group in self.groups if group.has_inflight_rows]
        return complete


class Preemption:
    """Preempts groups, and counts preemptions."""

    def __init__(
        self, limits: CoreLimits, running: RunningGroups, swapped: SwappedGroups, preempted: PreemptedGroups
    ) -> None:
        self._mode = limits.preemption_mode
        self._running = running
        self._swapped = swapped
        self._preempted = preempted
        self.num_preemptions = dict.fromkeys(PreemptionMode, 0)

    def preempt(self, plan: StepPlan, group: SequenceGroup, cause_to_move: str = "") -> None:
        """Take a running group out of the batch.

        `cause_to_move`: why another executor is to compute it again, in words; empty: it makes room.
        """
        assert not self._running.beam_batch.is_in_flight(group), "its candidates would be lost"
        group.num_preemptions += 1
        plan.preempted.append(group)
        wants_swap = not cause_to_move and self._mode_for(group) is PreemptionMode.SWAP
        members = self._running.beam_batch.source_slots(group) if wants_swap else []
        is_swapped = wants_swap and self._swapped.try_swap_out(plan, group, members)
        if not is_swapped:
            self._preempted.take(group, self._running)
            plan.note(group, EventKind.PREEMPTED, cause=cause_to_move)
        else:
            self._preempted.expect_tokens(group, self._running.batch)
            self._running.remove(group, SequenceStatus.SWAPPED)
            plan.note(group, EventKind.SWAPPED_OUT)
        self.num_preemptions[PreemptionMode.SWAP if is_swapped else PreemptionMode.RECOMPUTE] += 1

    def _mode_for(self, group: SequenceGroup) -> PreemptionMode:
        """Return the mode to try first: a group that has not caught up has little to save.

        What several weights have computed is computed again.
        """
        has_little = self._running.prefills.is_running(group)
        if not self._swapped.is_possible or has_little or group.is_kept_to_itself:
            return PreemptionMode.RECOMPUTE
        if self._mode is not None:
            return self._mode
        return PreemptionMode.RECOMPUTE if len(group.live_sequences) == 1 else PreemptionMode.SWAP
