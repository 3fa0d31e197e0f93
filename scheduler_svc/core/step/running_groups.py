"""The running groups: their slots and blocks, their prefills, and their beams.

A group joins the batch sequence by sequence, by admissions and forks. Here it is removed as a whole.
"""

from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.beam_batch import BeamBatch
from scheduler_svc.core.step.prefills import Prefills, Shares


class RunningGroups:
    """Owns the prefills and beams of running groups."""

    def __init__(self, limits: CoreLimits, batch: Batch, shares: Shares) -> None:
        self.batch = batch
        self.beam_batch = BeamBatch(batch, limits.max_model_len, limits.vocab_size, limits.eos_token_ids)
        self.prefills = Prefills(limits, batch, self.beam_batch, shares)

    def free_blocks(self, group: SequenceGroup) -> None:
        """Free the blocks of a group that is about to be removed."""
        for _, slot in self.beam_batch.source_slots(group):
            self.batch.register_blocks(slot)
            self.batch.free_blocks(slot)

    def remove(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """Take the sequences of a group out of their slots; their blocks must have been freed or moved.

        Args:
            group: The group. Unless it has finished, it carries its known tokens from now on.
            status: The new status of its live sequences.
        """
        batch = self.batch
        for sequence in group.live_sequences:
            if sequence.has_slot:
                if group.beams is None and status is not SequenceStatus.FINISHED:
                    sequence.token_ids = batch.known_tokens(sequence.slot)
                batch.vacate(sequence)
            sequence.status = status
        if group.beams is not None:
            if status is not SequenceStatus.FINISHED:
                group.take_tokens_of_beams()
            self.beam_batch.forget(group)
        self.prefills.drop(group)
        batch.remove(group)
