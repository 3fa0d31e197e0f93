"""The states of swapped sequences, in the executor's host pool of states.

A state moves by way of a block of the device pool: the step that swaps a sequence out saves its state there, moves it
to the host and gives the block back; the step that swaps it in moves it to a block that its admission names. Sequences
that are about to fork off one slot share the state of that slot.
"""

import numpy as np

from octavo_shared.step_wire.batch_table import BatchTable
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.saved_states import Save, SavedStates
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.step_plan import StepPlan


class SwappedStates:
    """Owns the host pool of states.

    Args:
        table: Says what each slot has taken.
        states: The pools of both sides.

    Attributes:
        host: The host pool; a state has a reference for each sequence that has it.
        blocks: Where the state of each swapped sequence is.
    """

    def __init__(self, table: BatchTable, states: SavedStates) -> None:
        self.host: BlockAllocator = states.host.allocator
        self._table = table
        self.blocks: dict[Sequence, int] = {}
        self._states = states
        self._first_host_id = states.host.first_id

    def can_swap_out(self, members: list[tuple[Sequence, int]]) -> bool:
        """Return whether the states of some sequences, each with its slot, can move to the host.

        That takes room there, and in the device pool, and it must be known how many tokens each has taken.
        """
        slots = {slot for _, slot in members}
        has_room = len(slots) <= min(self.host.num_free_blocks, self._states.allocator.num_free_blocks)
        return has_room and not any(self._table.num_open_tokens[slot] for slot in slots)

    def swap_out(self, plan: StepPlan, members: list[tuple[Sequence, int]], num_computed: list[int]) -> None:
        """Move the states of sequences, each with its slot, to the host; there must be room."""
        block_of: dict[int, int] = {}
        for (sequence, slot), num_tokens in zip(members, num_computed, strict=True):
            if slot in block_of:
                self.host.acquire(np.array([block_of[slot]]))
            else:
                [block], [host_block] = self._states.allocator.allocate(1).tolist(), self.host.allocate(1).tolist()
                block_of[slot] = host_block
                plan.held_states += (block,)
                plan.moved_states += (Save(slot, num_tokens, block, b""),)
                plan.blocks_to_swap_out.append((self._states.first_id + block, self._first_host_id + host_block))
            self.blocks[sequence] = block_of[slot]

    def has_room_for_return_of(self, group: SequenceGroup) -> bool:
        """Return whether the states of a swapped group can move back; if not, states on their way will make room."""
        host_blocks = {self.blocks[sequence] for sequence in group.live_sequences}
        return len(host_blocks) <= self._states.allocator.num_free_blocks

    def swap_in(self, plan: StepPlan, group: SequenceGroup) -> dict[Sequence, int]:
        """Move the states of a group back, and forget them here; return the device block of each sequence's."""
        device_of: dict[int, int] = {}
        for sequence in group.live_sequences:
            host_block = self.blocks[sequence]
            if host_block not in device_of:
                [device_of[host_block]] = self._states.allocator.allocate(1).tolist()
                plan.held_states += (device_of[host_block],)
                ids = self._first_host_id + host_block, self._states.first_id + device_of[host_block]
                plan.blocks_to_swap_in.append(ids)
        found = {sequence: device_of[self.blocks[sequence]] for sequence in group.live_sequences}
        for sequence in group.live_sequences:
            self.drop_sequence(sequence)
        return found

    def drop_sequence(self, sequence: Sequence) -> None:
        """Free the state of a sequence, if it is here."""
        if (block := self.blocks.pop(sequence, None)) is not None:
            self.host.free(np.array([block], np.int32))
