"""Groups whose blocks are in the executor's host pools.

A group moves as a whole, out of all cache groups or out of none, and keeps its sharing: a block that
several of its sequences name becomes one host block with as many references. Blocks that other groups name too
stay on the device, with the references of this group. Only computed blocks inside the window move. The
sequences vacate their slots, and get new ones at swap-in.

The device blocks that a group leaves stay in the prefix cache like those of a group that ends. Blocks that are
still cached when the group comes back are used as they are; the others move, and are registered again; what they leave
behind on the host is a copy of a prefix from then on. States move with their sequences (`swapped_states.py`); the input
of an encoder stays in the cache, or is encoded again (`encoder_blocks.py`).
At swap-in each sequence gets a last, partial block of its own, read from the same host block:
they are about to write into it, so copying it now is copy-on-write in advance.

Source of the rules: Kwon et al. 2023, section 4.5 (all-or-nothing swapping of a group).
"""

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from octavo_shared.step_wire.batch_table import IndexArray
from octavo_shared.step_wire.step import BoolArray, Int32Array
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.group_blocks import GroupBlocks
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.batch import BY_ORDER, Batch
from scheduler_svc.core.step.step_plan import StepPlan
from scheduler_svc.core.step.swapped_states import SwappedStates

NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class SwappedTable:
    """The block table of a swapped sequence in a cache group; both arrays are [num_blocks].

    Each logical block is on the device or on the host; the other entry is NO_BLOCK. Both entries are NO_BLOCK where
    it fell out of the sliding window.
    """

    device_blocks: Int32Array
    host_blocks: Int32Array
    num_computed_tokens: int

    @property
    def num_skipped_blocks(self) -> int:
        """Leading blocks that fell out of the sliding window."""
        return int(np.count_nonzero((self.device_blocks == NO_BLOCK) & (self.host_blocks == NO_BLOCK)))


@dataclass(frozen=True, slots=True)
class _SwapInPlan:
    """What the swap-in of a group takes of a cache group, the same in every step in which it waits.

    Attributes:
        host_blocks: Host blocks that are full, each once, ascending, [n].
        hashes: Their names in the prefix cache, in the same order; empty: there is no prefix cache.
        num_own_blocks: Blocks to write into that the sequences get for themselves, next tokens included.
    """

    host_blocks: Int32Array
    hashes: list[bytes]
    num_own_blocks: int


@dataclass(frozen=True, slots=True)
class _SwapOutPlan:
    """What the swap-out of a group moves of a cache group.

    Attributes:
        held: The blocks of each sequence that hold computed tokens still in the window.
        moved: The blocks that no other group names, each once, [n].
        references: How many sequences of the group name each, [n].
    """

    held: list[Int32Array]
    moved: Int32Array
    references: IndexArray


@dataclass(frozen=True, slots=True)
class SwappedIn:
    """A sequence that is swapped in: `tables`, one a cache group, each [num_blocks], have room for its next token.

    The first `num_skipped_blocks` of each are out of the window: they are 0, and never read. Its state is in
    `state_block`, if the model has states.
    """

    sequence: Sequence
    tables: list[Int32Array]
    num_computed_tokens: int
    num_skipped_blocks: list[int]
    state_block: int | None = None


class SwappedGroups:
    """Owns the host pools, one for each cache group, and the swapped groups."""

    def __init__(self, limits: CoreLimits, batch: Batch) -> None:
        self.groups: list[SequenceGroup] = []
        self.pools = [HostPool(batch, of) for of in batch.blocks.groups]
        self.states: SwappedStates | None = None
        if (states := batch.blocks.states) is not None and limits.num_host_state_blocks:
            self.states = SwappedStates(batch.table, states)
        has_room_for_states = self.states is not None or not limits.has_states
        self.is_possible = has_room_for_states and all(pool.num_host_blocks for pool in limits.groups)
        self._batch = batch

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def host(self) -> BlockAllocator:
        """The host blocks of the first cache group."""
        return self.pools[0].host

    @property
    def tables(self) -> dict[Sequence, SwappedTable]:
        """The block tables of swapped sequences in the first cache group."""
        return self.pools[0].tables

    def try_swap_out(self, plan: StepPlan, group: SequenceGroup, members: list[tuple[Sequence, int]]) -> bool:
        """Move the blocks of a group to the host pools; return False if one is too full.

        `members` are its sequences, each with the slot of its block table. The device blocks are free at once: the
        step moves them before it writes any block.
        """
        scheduled = self._batch.num_surely_scheduled()
        num_computed = [int(scheduled[slot]) for _, slot in members]
        planned = [pool.plan_swap_out(members, num_computed) for pool in self.pools]
        if any(len(out.moved) > pool.host.num_free_blocks for pool, out in zip(self.pools, planned, strict=True)):
            return False
        if self.states is not None and not self.states.can_swap_out(members):
            return False
        for pool, out in zip(self.pools, planned, strict=True):
            plan.blocks_to_swap_out += pool.swap_out(out, members, num_computed)
        if self.states is not None:
            self.states.swap_out(plan, members, num_computed)
        if (encoder := self._batch.blocks.encoder) is not None:
            for _, slot in members:
                encoder.free(slot)
        bisect.insort(self.groups, group, key=BY_ORDER)
        return True

    def num_blocks_to_swap_in(self, group: SequenceGroup) -> list[int]:
        """Return the free device blocks that the swap-in takes of each cache group, with those for next tokens."""
        return [pool.num_blocks_to_swap_in(group) for pool in self.pools]

    def can_states_return(self, group: SequenceGroup) -> bool:
        """Return whether there is room for the states of a group; if not, those on their way will make some."""
        return self.states is None or self.states.has_room_for_return_of(group)

    def swap_in(self, plan: StepPlan, group: SequenceGroup) -> list[SwappedIn]:
        """Take device blocks for a group and forget it here; return its sequences.

        There must be enough, and no token of it in flight.
        """
        states = {} if self.states is None else self.states.swap_in(plan, group)
        sequences = [
            SwappedIn(one, [], self.tables[one].num_computed_tokens, [], states.get(one))
            for one in group.live_sequences
        ]
        for pool in self.pools:
            plan.blocks_to_swap_in += pool.swap_in(group, sequences)
        self.groups.remove(group)
        return sequences

    def drop(self, group: SequenceGroup) -> None:
        """Free the blocks of a group, on both sides: it ends, or is computed again."""
        for sequence in group.sequences:
            self.drop_sequence(sequence)
        self.groups.remove(group)

    def drop_sequence(self, sequence: Sequence) -> None:
        """Free the blocks of one sequence, if it has any here."""
        for pool in self.pools:
            pool.drop_sequence(sequence)
        if self.states is not None:
            self.states.drop_sequence(sequence)


class HostPool:
    """The blocks of swapped sequences in a cache group, on both sides.

    Args:
        batch: Slots.
        of: The cache group.
    """

    def __init__(self, batch: Batch, of: GroupBlocks) -> None:
        self.host: BlockAllocator = of.host.allocator
        self.tables: dict[Sequence, SwappedTable] = {}
        self.first_id = of.host.first_id
        self._swap_in_plans: dict[SequenceGroup, _SwapInPlan] = {}
        self._batch = batch
        self._group = of

    # Out -----------------------------------------------------------------------------------------

    def plan_swap_out(self, members: list[tuple[Sequence, int]], num_computed: list[int]) -> _SwapOutPlan:
        """Return which blocks of a group would move; nothing is taken yet.

        Args:
            members: Its sequences, each with the slot of its block table.
            num_computed: Tokens of each sequence that the cache is sure to hold.
        """
        held = [self._held_blocks(slot, tokens) for (_, slot), tokens in zip(members, num_computed, strict=True)]
        distinct, num_references = np.unique(np.concatenate(held), return_counts=True)
        is_ours = self._group.allocator.ref_counts[distinct] == num_references
        return _SwapOutPlan(held, distinct[is_ours], num_references[is_ours])

    def swap_out(
        self, plan: _SwapOutPlan, members: list[tuple[Sequence, int]], num_computed: list[int]
    ) -> list[tuple[int, int]]:
        """Move the blocks of a plan to host blocks, which must be free; return the pairs, as on the wire."""
        device, host_blocks = self._group.allocator, self.host.allocate(len(plan.moved))
        self.host.ref_counts[host_blocks] = plan.references
        host_of = dict(zip(plan.moved.tolist(), host_blocks.tolist(), strict=True))
        for (sequence, slot), tokens, blocks in zip(members, num_computed, plan.held, strict=True):
            self.tables[sequence] = self._swapped_table(slot, tokens, blocks, host_of)
            self._batch.register_blocks(slot)
            all_held = self._group.held(slot)
            stays = np.zeros(len(all_held), np.bool_)
            stays[: len(blocks)] = [block not in host_of for block in blocks.tolist()]
            device.free(all_held[~stays])
        for block in host_of:
            self._group.host.unwant(block)  # it is on the host already
        return self._as_on_wire(host_of.items(), self._group.first_id, self.first_id)

    def _held_blocks(self, slot: int, num_computed_tokens: int) -> Int32Array:
        """Return the blocks of a slot that hold computed tokens still in the window."""
        num_blocks = self._batch.blocks.num_blocks_for(num_computed_tokens)
        return self._group.tables.block_ids[slot, self._group.first_blocks[slot] : num_blocks].copy()

    def _swapped_table(
        self, slot: int, num_computed_tokens: int, blocks: Int32Array, host_of: dict[int, int]
    ) -> SwappedTable:
        first = int(self._group.first_blocks[slot])
        device_blocks = np.full(first + len(blocks), NO_BLOCK, np.int32)
        host_blocks = device_blocks.copy()
        device_blocks[first:] = [NO_BLOCK if block in host_of else block for block in blocks.tolist()]
        host_blocks[first:] = [host_of.get(block, NO_BLOCK) for block in blocks.tolist()]
        return SwappedTable(device_blocks, host_blocks, num_computed_tokens)

    # In ------------------------------------------------------------------------------------------

    def num_blocks_to_swap_in(self, group: SequenceGroup) -> int:
        """Return the free device blocks that the swap-in takes, with those for next tokens."""
        swap_in_plan = self._swap_in_plan_of(group)
        found = self._find_on_device(swap_in_plan)
        num_moved = int(np.count_nonzero(found == NO_BLOCK))
        distinct = np.unique(found[found != NO_BLOCK])
        num_revived = len(distinct) - int(np.count_nonzero(self._group.allocator.ref_counts[distinct]))
        return num_moved + num_revived + swap_in_plan.num_own_blocks

    def swap_in(self, group: SequenceGroup, sequences: list[SwappedIn]) -> list[tuple[int, int]]:
        """Take device blocks for a group and forget it here; put the block tables into its `sequences`.

        Returns the (host block, device block) pairs, as on the wire.
        """
        device, swap_in_plan = self._group.allocator, self._swap_in_plan_of(group)
        device_blocks, moved = self._bring_whole_blocks(swap_in_plan)
        pairs = list(zip(swap_in_plan.host_blocks[moved].tolist(), device_blocks[moved].tolist(), strict=True))
        for swapped_in in sequences:
            sequence, table = swapped_in.sequence, self.tables[swapped_in.sequence]
            block_ids, num_whole = np.maximum(table.device_blocks, 0), self._num_whole_blocks(sequence)
            is_on_host = table.host_blocks != NO_BLOCK
            shared = is_on_host[:num_whole].nonzero()[0]
            block_ids[shared] = device_blocks[np.searchsorted(swap_in_plan.host_blocks, table.host_blocks[shared])]
            device.acquire(block_ids[shared])
            own = device.allocate(self._num_blocks_needed(sequence) - num_whole)
            num_partial = len(block_ids) - num_whole
            pairs += zip(table.host_blocks[num_whole:].tolist(), own[:num_partial].tolist(), strict=True)
            swapped_in.tables.append(np.concatenate((block_ids[:num_whole], own)))
            swapped_in.num_skipped_blocks.append(table.num_skipped_blocks)
        device.free(np.unique(device_blocks).astype(np.int32))
        for swapped_in in sequences:
            self._forget(swapped_in.sequence)
        return self._as_on_wire(pairs, self.first_id, self._group.first_id)

    def _bring_whole_blocks(self, swap_in_plan: _SwapInPlan) -> tuple[IndexArray, BoolArray]:
        """Return the device block for each host block, and which have to be moved there. The caller frees each once."""
        device, cache = self._group.allocator, self._group.prefix_cache
        device_blocks = self._find_on_device(swap_in_plan)
        moved: BoolArray = device_blocks == NO_BLOCK
        device.acquire(np.unique(device_blocks[~moved]))  # first of all: the allocation must not evict them
        device_blocks[moved] = device.allocate(int(np.count_nonzero(moved)))
        if cache is not None:
            hashes = [swap_in_plan.hashes[index] for index in moved.nonzero()[0].tolist()]
            cache.register(hashes, device_blocks[moved].tolist())
            self._group.host.keep(swap_in_plan.hashes, swap_in_plan.host_blocks.tolist())
        return device_blocks, moved

    def _find_on_device(self, swap_in_plan: _SwapInPlan) -> IndexArray:
        """Return the cached device blocks with the content of the host blocks, NO_BLOCK where there is none, [n]."""
        cache, num_blocks = self._group.prefix_cache, len(swap_in_plan.host_blocks)
        return np.full(num_blocks, NO_BLOCK, np.intp) if cache is None else cache.blocks_of(swap_in_plan.hashes)

    def _swap_in_plan_of(self, group: SequenceGroup) -> _SwapInPlan:
        swap_in_plan = self._swap_in_plans.get(group)
        if swap_in_plan is None:
            swap_in_plan = self._plan_swap_in(group)
            if not group.has_inflight_rows:
                self._swap_in_plans[group] = swap_in_plan
        return swap_in_plan

    def _plan_swap_in(self, group: SequenceGroup) -> _SwapInPlan:
        num_own_blocks = 0
        host_blocks: list[Int32Array] = []
        hashes: list[bytes] = []
        for sequence in group.live_sequences:
            num_whole = self._num_whole_blocks(sequence)
            num_own_blocks += self._num_blocks_needed(sequence) - num_whole
            host_blocks.append(self.tables[sequence].host_blocks[:num_whole])
            hashes += self._batch.blocks.hash_blocks(sequence)[:num_whole]
        distinct, places = np.unique(np.concatenate(host_blocks), return_index=True)
        on_host = distinct != NO_BLOCK
        names = [hashes[place] for place in places[on_host].tolist()] if hashes else []
        return _SwapInPlan(distinct[on_host], names, num_own_blocks)

    def _num_blocks_needed(self, sequence: Sequence) -> int:
        return self._batch.blocks.num_blocks_for(len(sequence.token_ids))

    def _num_whole_blocks(self, sequence: Sequence) -> int:
        """Return how many of its first blocks are full of computed, known tokens."""
        num_tokens = min(self.tables[sequence].num_computed_tokens, len(sequence.token_ids))
        return num_tokens // self._batch.blocks.block_size

    # Away ----------------------------------------------------------------------------------------

    def drop_sequence(self, sequence: Sequence) -> None:
        """Free the blocks of one sequence, if it has any here."""
        if sequence in self.tables:
            device_blocks = self.tables[sequence].device_blocks
            self._group.allocator.free(device_blocks[device_blocks != NO_BLOCK])
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Forget the table of a sequence, and free its host blocks."""
        host_blocks = self.tables.pop(sequence).host_blocks
        self.host.free(host_blocks[host_blocks != NO_BLOCK])
        self._swap_in_plans.pop(sequence.group, None)

    @staticmethod
    def _as_on_wire(pairs: Iterable[tuple[int, int]], source: int, target: int) -> list[tuple[int, int]]:
        """Return pairs of blocks, numbered from the first ids of both pools."""
        return list(pairs) if source == target == 0 else [(source + one, target + other) for one, other in pairs]
