"""Blocks for the next tokens of decoding sequences.

A writer needs a block when its next token opens one, and a copy when the block that it writes into has
other references: of several forks that share their last block, all but the last writer get a copy.
With an allowance it writes into further blocks, which it does not share: only a slot without open tokens is forked.
It keeps the blocks that it did not need.

The needs of a step are known before any block is taken, so that no group is preempted half-way, and no copy
reads a block that the same step gives to another sequence.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from octavo_shared.step_wire.batch_table import IndexArray
from octavo_shared.step_wire.step import BoolArray, Int32Array
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.running_groups import RunningGroups
from scheduler_svc.core.step.step_plan import StepPlan


@dataclass(slots=True)
class Decodes:
    """The decodes of a step: slots, [max_num_seqs] bool, and groups whose beams are ready.

    `allowances`: how many tokens each slot may get, [max_num_seqs]; None: one.
    """

    slots: BoolArray
    beam_groups: list[SequenceGroup]
    allowances: Int32Array | None = None


@dataclass(slots=True)
class BlockNeeds:
    """The blocks that the next tokens of decodes take of each cache group: `num_blocks`, copies and beams included.

    `short_slots`, ascending, have each slot as often as it needs a block at its end.
    """

    num_blocks: int
    short_slots: IndexArray


class BlockAppender:
    """Says how many blocks decodes need, and gives them out."""

    def __init__(self, limits: CoreLimits, running: RunningGroups) -> None:
        self._limits = limits
        self._batch = running.batch
        self._beam_batch = running.beam_batch

    def blocks_needed(self, decodes: Decodes) -> BlockNeeds:
        """Return the blocks that the next tokens of `decodes` take."""
        short_slots = self._short_slots(decodes)
        num_needed = len(short_slots)
        if self._batch.shares_last_block:
            num_needed += self._num_copies(self._sharing_slots(decodes.slots))
        for group in decodes.beam_groups:
            num_needed += self._num_blocks_of_beams(group)
        return BlockNeeds(num_needed, short_slots)

    def append_blocks(self, plan: StepPlan, decodes: Decodes, needs: BlockNeeds) -> None:
        """Give out the blocks that `decodes` need; there must be enough. Beams that are ready go on."""
        if num_appended := len(needs.short_slots):
            groups = self._batch.blocks.groups
            plan.appended_blocks = np.empty((num_appended * len(groups), 2), np.int32)
            for index, of in enumerate(groups):
                rows = plan.appended_blocks[index * num_appended : (index + 1) * num_appended]
                rows[:, 0] = needs.short_slots
                rows[:, 1] = of.allocator.allocate(num_appended)
                rows[:, 1] += of.first_id
        for slot in self._sharing_slots(decodes.slots):
            self._copy_if_shared(plan, slot, slot)
            self._batch.shares_last_block.discard(slot)
        appended: list[tuple[int, int]] = []
        for group in decodes.beam_groups:
            for slot, parent_slot in self._beam_batch.continue_beams(plan, group):
                if self._opens_block(parent_slot):
                    groups = self._batch.blocks.groups
                    appended += [(slot, of.first_id + int(of.allocator.allocate(1)[0])) for of in groups]
                else:
                    self._copy_if_shared(plan, slot, parent_slot)
        if appended:
            plan.appended_blocks = np.concatenate((plan.appended_blocks, np.array(appended, np.int32)))

    def hold_back(self, decodes: Decodes) -> None:
        """Remove decodes from `decodes`, last groups first, until the free blocks suffice."""
        num_free = min(of.allocator.num_free_blocks for of in self._batch.blocks.groups)
        needs = Counter(self._short_slots(decodes).tolist())
        needs.update(self._sharing_slots(decodes.slots))
        for group in self._batch.running:
            if group in decodes.beam_groups:
                num_needed = self._num_blocks_of_beams(group)
                if num_needed > num_free:
                    decodes.beam_groups.remove(group)
                else:
                    num_free -= num_needed
                continue
            for sequence in group.sequences:
                if sequence.slot in needs and self._batch.sequence_in_slot[sequence.slot] is sequence:
                    if needs[sequence.slot] > num_free:
                        decodes.slots[sequence.slot] = False
                    else:
                        num_free -= needs[sequence.slot]

    def _short_slots(self, decodes: Decodes) -> IndexArray:
        table, size, slots = self._batch.table, self._limits.block_size, decodes.slots
        if decodes.allowances is not None:
            num_blocks = -(-(table.num_scheduled_tokens + decodes.allowances) // size)
            return np.arange(len(slots)).repeat(np.where(slots, np.maximum(num_blocks - table.num_blocks, 0), 0))
        return (slots & (table.num_blocks * size <= table.num_scheduled_tokens)).nonzero()[0]

    def _sharing_slots(self, slots: BoolArray) -> list[int]:
        """Return which of `slots` write into a block that was shared when they were forked."""
        return [slot for slot in sorted(self._batch.shares_last_block) if slots[slot]]

    def _num_copies(self, source_slots: list[int]) -> int:
        """Return the copies that writers into the last blocks of these slots take."""
        writers = Counter(self._last_block(slot) for slot in source_slots if not self._opens_block(slot))
        ref_counts = self._batch.blocks.allocator.ref_counts
        return sum(min(num_writers, int(ref_counts[block]) - 1) for block, num_writers in writers.items())

    def _num_blocks_of_beams(self, group: SequenceGroup) -> int:
        parents = [continuation.parent_slot for continuation in self._beam_batch.ready[group]]
        return sum(map(self._opens_block, parents)) + self._num_copies(parents)

    def _opens_block(self, slot: int) -> bool:
        table = self._batch.table
        return int(table.num_scheduled_tokens[slot]) == int(table.num_blocks[slot]) * self._limits.block_size

    def _last_block(self, slot: int) -> int:
        table = self._batch.table
        return int(table.block_tables[slot, table.num_scheduled_tokens[slot] // self._limits.block_size])

    def _copy_if_shared(self, plan: StepPlan, slot: int, parent_slot: int) -> None:
        """Give `slot`, whose block table is that of `parent_slot`, a last block of its own."""
        if self._opens_block(parent_slot):
            return
        if self._batch.blocks.allocator.ref_counts[self._last_block(parent_slot)] == 1:
            return
        index = int(self._batch.table.num_scheduled_tokens[parent_slot]) // self._limits.block_size
        for group in self._batch.blocks.groups:
            shared, own = int(group.tables.block_ids[parent_slot, index]), int(group.allocator.allocate(1)[0])
            group.allocator.free(np.array([shared], np.int32))
            plan.blocks_to_copy.append((group.first_id + shared, group.first_id + own))
            plan.replaced_blocks.append((slot, index, group.first_id + own))
