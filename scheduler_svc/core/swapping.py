"""Groups whose blocks are in the executor's host pool.

A group moves as a whole and keeps its sharing: a block that several of its sequences name becomes one
host block with as many references. Blocks that others name too stay on the device, with the group's
references on them. Only what is computed moves; the slots are given up, and taken anew on the way back.

On the way back each sequence gets a last, partial block of its own, read from the same host block:
they are about to write into it, so copying it now is copy-on-write in advance.

Source of the rules: Kwon et al. 2023, section 4.5 (all-or-nothing swapping of a group).
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.batch import BY_ORDER, Batch
from scheduler_svc.core.block_allocator import BlockAllocator
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from shared.step import Int32Array

NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class SwappedTable:
    """The block table of a swapped sequence; both arrays are [num_blocks].

    Each logical block is on the device or on the host; the other entry is NO_BLOCK. Both are where it
    fell out of the sliding window.
    """

    device_blocks: Int32Array
    host_blocks: Int32Array
    num_computed_tokens: int

    @property
    def num_gone_blocks(self) -> int:
        """Leading blocks that fell out of the sliding window."""
        return int(np.count_nonzero((self.device_blocks == NO_BLOCK) & (self.host_blocks == NO_BLOCK)))


@dataclass(frozen=True, slots=True)
class SwappedIn:
    """A sequence on its way back: `block_ids`, [num_blocks], has room for its next token.

    The first `num_gone_blocks` are out of the window and named 0; nobody reads them.
    """

    sequence: Sequence
    block_ids: Int32Array
    num_computed_tokens: int
    num_gone_blocks: int


class SwappedGroups:
    """Owns the host pool and the groups that have their blocks in it.

    Args:
        batch: Slots, and the device pool.
        num_host_blocks: Size of the host pool.
    """

    def __init__(self, batch: Batch, num_host_blocks: int) -> None:
        self.host = BlockAllocator(num_host_blocks)
        self.groups: list[SequenceGroup] = []
        self.tables: dict[Sequence, SwappedTable] = {}
        self._batch = batch

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    # Out -----------------------------------------------------------------------------------------

    def try_swap_out(self, group: SequenceGroup, members: list[tuple[Sequence, int]]) -> list[tuple[int, int]] | None:
        """Move the blocks of a group to the host pool; `members` are its sequences and whose table each has.

        The device blocks are free at once: the step moves them before anything is written.

        Returns the (device block, host block) pairs of the step, None if the host pool is too full.
        """
        device, table = self._batch.blocks.allocator, self._batch.table
        num_computed = [int(table.num_scheduled_tokens[slot]) for _, slot in members]
        held = [self._held_blocks(slot, tokens) for (_, slot), tokens in zip(members, num_computed, strict=True)]
        distinct, num_references = np.unique(np.concatenate(held), return_counts=True)
        is_ours = device.ref_counts[distinct] == num_references
        moved, references = distinct[is_ours], num_references[is_ours]
        if len(moved) > self.host.num_free_blocks:
            return None
        host_blocks = self.host.allocate(len(moved))
        self.host.ref_counts[host_blocks] = references
        host_of = dict(zip(moved.tolist(), host_blocks.tolist(), strict=True))
        for (sequence, slot), tokens, blocks in zip(members, num_computed, held, strict=True):
            self.tables[sequence] = self._swapped_table(slot, tokens, blocks, host_of)
            all_held = self._batch.held_blocks(slot)
            stays = np.zeros(len(all_held), np.bool_)
            stays[: len(blocks)] = [block not in host_of for block in blocks.tolist()]
            device.free(all_held[~stays])
        bisect.insort(self.groups, group, key=BY_ORDER)
        return list(host_of.items())

    def _held_blocks(self, slot: int, num_computed_tokens: int) -> Int32Array:
        """Return the blocks of a slot that hold computed tokens still in the window."""
        num_blocks = self._batch.blocks.num_blocks_for(num_computed_tokens)
        return self._batch.table.block_tables[slot, self._batch.first_blocks[slot] : num_blocks].copy()

    def _swapped_table(
        self, slot: int, num_computed_tokens: int, blocks: Int32Array, host_of: dict[int, int]
    ) -> SwappedTable:
        first = int(self._batch.first_blocks[slot])
        device_blocks = np.full(first + len(blocks), NO_BLOCK, np.int32)
        host_blocks = device_blocks.copy()
        device_blocks[first:] = [NO_BLOCK if block in host_of else block for block in blocks.tolist()]
        host_blocks[first:] = [host_of.get(block, NO_BLOCK) for block in blocks.tolist()]
        return SwappedTable(device_blocks, host_blocks, num_computed_tokens)

    # In ------------------------------------------------------------------------------------------

    def num_blocks_to_swap_in(self, group: SequenceGroup) -> int:
        """Return the device blocks that the way back takes, the next token of each sequence included."""
        tables = [(sequence, self.tables[sequence]) for sequence in group.live_sequences]
        whole = [self._whole_blocks(table) for sequence, table in tables]
        num_shared = len(np.unique(np.concatenate(whole)))
        num_own = sum(self._num_blocks_needed(sequence) - self._num_whole_blocks(table) for sequence, table in tables)
        return num_shared + num_own

    def swap_in(self, group: SequenceGroup) -> tuple[list[tuple[int, int]], list[SwappedIn]]:
        """Take device blocks for a group and forget it here; there must be enough.

        Returns the (host block, device block) pairs of the step, and its sequences.
        """
        device = self._batch.blocks.allocator
        pairs: list[tuple[int, int]] = []
        device_of: dict[int, int] = {}

        def bring(host_block: int, *, is_shared: bool) -> int:
            if is_shared and host_block in device_of:
                device.acquire(np.array([device_of[host_block]], np.int32))
                return device_of[host_block]
            device_block = int(device.allocate(1)[0])
            pairs.append((host_block, device_block))
            if is_shared:
                device_of[host_block] = device_block
            return device_block

        sequences: list[SwappedIn] = []
        for sequence in group.live_sequences:
            table = self.tables.pop(sequence)
            block_ids = np.maximum(table.device_blocks, 0)
            num_whole = self._num_whole_blocks(table)
            for index in np.flatnonzero(table.host_blocks != NO_BLOCK).tolist():
                block_ids[index] = bring(int(table.host_blocks[index]), is_shared=index < num_whole)
            num_new = self._num_blocks_needed(sequence) - len(block_ids)
            block_ids = np.concatenate((block_ids, device.allocate(num_new)))
            sequences.append(SwappedIn(sequence, block_ids, table.num_computed_tokens, table.num_gone_blocks))
            self.host.free(table.host_blocks[table.host_blocks != NO_BLOCK])
        self.groups.remove(group)
        return pairs, sequences

    def _num_blocks_needed(self, sequence: Sequence) -> int:
        return self._batch.blocks.num_blocks_for(len(sequence.token_ids))

    def _num_whole_blocks(self, table: SwappedTable) -> int:
        """Return how many of its first blocks are never written again."""
        return min(table.num_computed_tokens // self._batch.blocks.block_size, len(table.host_blocks))

    def _whole_blocks(self, table: SwappedTable) -> Int32Array:
        whole = table.host_blocks[: self._num_whole_blocks(table)]
        on_host: Int32Array = whole[whole != NO_BLOCK]
        return on_host

    # Away ----------------------------------------------------------------------------------------

    def drop(self, group: SequenceGroup) -> None:
        """Free the blocks of a group, on both sides: it ends, or is computed again."""
        for sequence in group.sequences:
            self.drop_sequence(sequence)
        self.groups.remove(group)

    def drop_sequence(self, sequence: Sequence) -> None:
        """Free the blocks of one sequence, if it has any here."""
        table = self.tables.pop(sequence, None)
        if table is not None:
            self.host.free(table.host_blocks[table.host_blocks != NO_BLOCK])
            self._batch.blocks.allocator.free(table.device_blocks[table.device_blocks != NO_BLOCK])
