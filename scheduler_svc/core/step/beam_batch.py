"""The beam searches of the running groups: candidates come in, the next tokens of the beams go out.

`beam_search.py` decides which beams live on; this module turns that into slots, forks and references
to blocks. Between two of its steps a search is in one of these states:

    computing ── every live beam has its candidates ──> ready ── the next step ──> computing
                          └───────── the search is over ──> finished

A ready search holds one `Continuation` for each new live beam. The first continuation of a former beam keeps
its slot; further ones get theirs when the step is made. Every continuation has its references to blocks already.
"""

from dataclasses import dataclass, replace

from octavo_shared.step_wire.step import Fork, SamplingRow
from scheduler_svc.core.beam_search import BeamSearch, Candidates
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Continuation:
    """One live beam of a ready search: the former beam in `parent_slot`, then `token_id`.

    `sequence` has this slot itself, or none yet (-1).
    """

    sequence: Sequence
    parent_slot: int
    token_id: int


class BeamBatch:
    """Owns the received candidates and the continuations that the next step sends."""

    def __init__(self, batch: Batch, max_model_len: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._batch = batch
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._candidates: dict[SequenceGroup, dict[Sequence, Candidates]] = {}
        self._num_rows_in_flight: dict[SequenceGroup, int] = {}
        self.ready: dict[SequenceGroup, list[Continuation]] = {}

    def start(self, group: SequenceGroup) -> None:
        """Begin the search of an admitted group, or go on with it under the length limit of this executor."""
        assert group.beam_search is not None
        conditions = group.stop_conditions
        max_num_tokens = conditions.length_limit(group.num_prompt_tokens, self._max_model_len)
        if group.beams is not None:
            group.beams.limit_length(max_num_tokens)
            return
        stop_token_ids = conditions.stop_token_ids
        if not conditions.ignore_eos:
            stop_token_ids |= self._eos_token_ids
        group.beams = BeamSearch(
            group.beam_search,
            group.num_prompt_tokens,
            max_num_tokens,
            stop_token_ids,
            vocab_size=self._vocab_size,
        )

    def sampling_of(self, group: SequenceGroup) -> SamplingRow:
        """Return the row of every beam slot of the group."""
        assert group.beams is not None
        return replace(group.sampling, num_candidates=group.beams.num_candidates)

    def is_in_flight(self, group: SequenceGroup) -> bool:
        """Return whether a sent step is still to deliver candidates: then the group cannot be preempted."""
        return group in self._num_rows_in_flight

    def source_slots(self, group: SequenceGroup) -> list[tuple[Sequence, int]]:
        """Return each running sequence of a group with the slot that has its block table.

        That is its own slot; for forks of a ready search, it is their parent's.
        """
        if group in self.ready:
            return [(continuation.sequence, continuation.parent_slot) for continuation in self.ready[group]]
        return [(sequence, sequence.slot) for sequence in group.sequences if sequence.has_slot]

    def forget(self, group: SequenceGroup) -> None:
        """Drop the candidates and continuations of a group that leaves the batch."""
        self.ready.pop(group, None)
        self._num_rows_in_flight.pop(group, None)
        self._candidates.pop(group, None)

    # A step goes out -----------------------------------------------------------------------------

    def expect_row(self, sequence: Sequence) -> None:
        """Note that a step with a row of this beam is sent."""
        self._num_rows_in_flight[sequence.group] = self._num_rows_in_flight.get(sequence.group, 0) + 1

    def continue_beams(self, plan: StepPlan, group: SequenceGroup) -> list[tuple[int, int]]:
        """Put the continuations of a ready search into the step.

        Returns for each beam its slot, and the slot that has its block table until the step is applied.
        """
        batch, writers = self._batch, []
        for continuation in self.ready.pop(group):
            sequence, parent_slot = continuation.sequence, continuation.parent_slot
            num_tokens = int(batch.table.num_tokens[parent_slot])
            if sequence.slot < 0:
                slot = batch.enter(sequence, num_tokens, batch.first_blocks_of(parent_slot))
                batch.num_registered_blocks[slot] = batch.num_registered_blocks[parent_slot]
                plan.beam_forks.append(Fork(parent_slot, slot, sequence.generation, self.sampling_of(group)))
            plan.appended_tokens.append((sequence.slot, continuation.token_id))
            writers.append((sequence.slot, parent_slot))
        return writers

    # Candidates come in --------------------------------------------------------------------------

    def take(self, sequence: Sequence, candidates: Candidates) -> bool:
        """Take the candidates of a beam; return whether the search is over."""
        group = sequence.group
        self._num_rows_in_flight[group] -= 1
        if not self._num_rows_in_flight[group]:
            del self._num_rows_in_flight[group]
        candidates_of = self._candidates.setdefault(group, {})
        candidates_of[sequence] = candidates
        if len(candidates_of) < len(group.sequences):
            return False
        assert group.beams is not None
        del self._candidates[group]
        chosen = group.beams.advance([candidates_of[beam] for beam in group.sequences])
        if chosen:
            self._branch(group, chosen)
        return not chosen

    def _branch(self, group: SequenceGroup, chosen: list[tuple[int, int]]) -> None:
        """Make the chosen continuations the sequences of the group: forks first, then frees."""
        former, batch = group.sequences, self._batch
        for beam in former:  # before forks share the blocks
            batch.slide_window(beam.slot, int(batch.table.num_scheduled_tokens[beam.slot]))
        continuations: list[Continuation] = []
        kept: set[int] = set()
        for parent, token_id in chosen:
            slot = former[parent].slot
            if parent in kept:
                sequence = Sequence(group, 0, former[parent].token_ids, SequenceStatus.RUNNING)
                sequence.share_hashes_of(former[parent])
                batch.share_blocks(slot)
            else:
                kept.add(parent)
                sequence = former[parent]
            continuations.append(Continuation(sequence, slot, token_id))
        for index, beam in enumerate(former):
            if index not in kept:
                batch.free_blocks(beam.slot)
                batch.vacate(beam)
                beam.status = SequenceStatus.FINISHED
        group.sequences = [continuation.sequence for continuation in continuations]
        self.ready[group] = continuations
