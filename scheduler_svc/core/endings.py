"""How sequences and groups end, or leave for another executor, wherever they are.

A group is in exactly one place: it runs, it is swapped out, it waits for its last late tokens after a
preemption, or it stands in the queue. Each has its own things to give back.
"""

from scheduler_svc.core.admission import AdmissionQueue
from scheduler_svc.core.batch import BY_ORDER, Batch
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.swapping import SwappedGroups


class Endings:
    """Takes out of the core what ends.

    Args:
        batch: The groups that run.
        swapped: Those that are swapped out.
        preemption: Those that wait for late tokens.
        queue: Those that are to be admitted.
    """

    def __init__(self, batch: Batch, swapped: SwappedGroups, preemption: Preemption, queue: AdmissionQueue) -> None:
        self._batch = batch
        self._swapped = swapped
        self._preemption = preemption
        self._queue = queue

    def end_sequence(self, sequence: Sequence) -> None:
        """End one sequence of a group, and the group with its last one."""
        group = sequence.group
        if group.is_last(sequence):
            self.end_group(group)
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._batch.register_blocks(sequence.slot)
            self._batch.blocks.allocator.free(self._batch.held_blocks(sequence.slot))
            self._batch.leave(sequence)
        else:
            self._swapped.drop_sequence(sequence)
        self._preemption.forget_late(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._batch.give_up_claim(group)

    def end_group(self, group: SequenceGroup) -> None:
        """End a group."""
        if group in self._batch:
            self._preemption.free(group)
            self._preemption.leave(group, SequenceStatus.FINISHED, keeps_late_tokens=False)
        elif group in self._swapped.groups:
            self._swapped.drop(group)
        elif group in self._preemption.late_groups:
            self._preemption.late_groups.remove(group)
        else:
            self._queue.remove(group)
        for sequence in group.sequences:
            self._preemption.forget_late(sequence)
        group.end()

    def evacuate(self) -> list[SequenceGroup]:
        """Take out the groups that were admitted, in order, with all tokens that are known.

        Their blocks are not given back: the executor is lost, and the core goes with it.
        """
        groups = [*self._batch.running, *self._swapped, *self._preemption.late_groups]
        for group in list(self._batch.running):
            self._preemption.leave(group, SequenceStatus.WAITING, keeps_late_tokens=False)
        for group in groups:
            for sequence in group.live_sequences:
                sequence.status = SequenceStatus.WAITING
                sequence.num_late_tokens = 0
                sequence.slot, sequence.generation = -1, 0  # elsewhere they would name somebody else's tokens
        return sorted(groups, key=BY_ORDER)
