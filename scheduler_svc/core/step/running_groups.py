"""The running groups as wholes: slots and blocks, what is still to be prefilled, and beams.

A group joins the batch sequence by sequence, as admissions and forks go; it is taken out of it here, at once.
"""

from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.beam_batch import BeamBatch
from scheduler_svc.core.step.prefills import Prefills, Shares


class RunningGroups:
    """Owns what is known of running groups.

    Args:
        limits: The numbers and choices.
        batch: Slots and blocks.
        shares: Told of the tokens that a step computes for a tenant.
    """

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
        """Take the sequences of a group out of their slots; their blocks are gone already.

        Args:
            group: The group. Unless it has finished, it carries its known tokens from now on.
            status: What its live sequences are from now on.
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
