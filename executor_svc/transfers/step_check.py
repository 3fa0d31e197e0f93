"""What no step may do beside transfers that are pending: checked before anything of the step is written.

Blocks that are sent may be read, and not written, freed to nobody else or moved to; blocks that are received may be in
no block table, in no move and have no name. A step without transfers, while none is pending, is not looked at. Pure.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from executor_svc.transfers.pending import PendingTransfers
from octavo_shared.errors import InvalidStepError
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import (
    TRANSFER_SECRET_BYTES,
    Admission,
    BlockReceive,
    BlockSend,
    Int32Array,
    Step,
    find_repeated,
)

Index: TypeAlias = npt.NDArray[np.integer]


def check_transfers(
    step: Step,
    table: BatchTable,
    pending: PendingTransfers,
    *,
    num_blocks: int,
    max_transfers: int,
    windows: Sequence[int],
) -> None:
    """Accept a step as far as transfers are concerned.

    Args:
        step: Not yet applied to the table.
        table: As the last step has left it.
        pending: The transfers that earlier steps have begun.
        num_blocks: Device blocks of all pools.
        max_transfers: Most transfers that may be pending.
        windows: Of each group of the table, in tokens; 0: it has none.

    Raises: InvalidStepError: it begins a transfer that cannot be, or touches blocks of one that is pending.
    """
    begun: tuple[BlockSend | BlockReceive, ...] = (*step.blocks_to_send, *step.blocks_to_receive)
    for transfer_id in step.transfers_to_cancel:
        if transfer_id not in pending and not pending.was_told(transfer_id):
            raise InvalidStepError(f"step {step.step_id} cancels {named(transfer_id)}; there was none")
    if begun:
        _check_begun(step, begun, pending, num_blocks, max_transfers)
    elif not len(pending):
        return
    is_sent, is_received = np.zeros(num_blocks, np.bool_), np.zeros(num_blocks, np.bool_)
    for transfer in pending:
        (is_received if transfer.is_received else is_sent)[transfer.block_ids] = True
    for receive in step.blocks_to_receive:
        if (is_sent | is_received)[receive.block_ids].any():
            raise InvalidStepError(
                f"step {step.step_id} receives blocks of a pending transfer with {named(receive.transfer_id)}"
            )
        is_received[receive.block_ids] = True
    for send in step.blocks_to_send:
        if is_received[send.block_ids].any():
            raise InvalidStepError(
                f"step {step.step_id} sends blocks that have not arrived with {named(send.transfer_id)}"
            )
        is_sent[send.block_ids] = True
    uses = _Uses(step, table, num_blocks, windows)
    for what, block_ids in uses.of_any_kind():
        if len(wrong := block_ids[is_received[block_ids]]):
            raise InvalidStepError(f"step {step.step_id} {what} block {wrong[0]}, which a pending transfer fills")
    if is_sent.any():
        for what, block_ids in uses.writes():
            if len(wrong := block_ids[is_sent[block_ids]]):
                raise InvalidStepError(f"step {step.step_id} {what} block {wrong[0]}, which a pending transfer sends")


def named(transfer_id: int) -> str:
    """Return a transfer in words."""
    return f"transfer {transfer_id:016x}"


def _check_begun(
    step: Step,
    begun: tuple[BlockSend | BlockReceive, ...],
    pending: PendingTransfers,
    num_blocks: int,
    max_transfers: int,
) -> None:
    where, ids = f"step {step.step_id}", set()
    if len(pending) + len(begun) > max_transfers:
        raise InvalidStepError(
            f"{where} begins {len(begun)} transfers beside {len(pending)} pending ones; the limit is {max_transfers}"
        )
    for each in begun:
        which = named(each.transfer_id)
        if each.transfer_id in ids or each.transfer_id in pending or pending.was_told(each.transfer_id):
            raise InvalidStepError(f"{where} begins {which} twice")
        ids.add(each.transfer_id)
        if len(each.secret) != TRANSFER_SECRET_BYTES:
            raise InvalidStepError(
                f"{where} begins {which} with a secret of {len(each.secret)} bytes; a secret has "
                f"{TRANSFER_SECRET_BYTES}"
            )
        if not len(each.block_ids):
            raise InvalidStepError(f"{where} begins {which} without blocks")
        if len(outside := each.block_ids[(each.block_ids < 0) | (each.block_ids >= num_blocks)]):
            raise InvalidStepError(
                f"{where} begins {which} with device block {outside[0]}; there are {num_blocks} device blocks"
            )
        if (repeated := find_repeated(each.block_ids)) is not None:
            raise InvalidStepError(f"{where} begins {which} with block {repeated} twice")
        if isinstance(each, BlockSend) and not (each.address and each.instance_id):
            raise InvalidStepError(f"{where} sends {which} without the receiver's address and instance_id")


class _Uses:
    """Where a step, not yet applied, uses which blocks. Blocks outside the pools are left to other checks."""

    def __init__(self, step: Step, table: BatchTable, num_blocks: int, windows: Sequence[int]) -> None:
        self._step, self._table, self._num_blocks, self._windows = step, table, num_blocks, windows

    def of_any_kind(self) -> Iterator[tuple[str, Int32Array]]:
        """Yield what reads or writes blocks, or gives them a name or a place in a table, with the blocks."""
        yield from self._changes()
        step = self._step
        yield "names", self._inside(step.registered_blocks)
        yield "copies from", self._inside(step.blocks_to_copy[:, 0])
        yield "swaps out", self._inside(step.blocks_to_swap_out[:, 0])
        for admission in step.delta.admissions:
            what = f"admits slot {admission.slot} with"
            yield what, self._inside(np.concatenate([ids for _, ids in self._entries_of(admission)]))
            if admission.state_block is not None:
                yield what, self._inside(np.array([admission.state_block], np.int32))
        if step.blocks_to_receive:
            yield "receives into a block table's", self._inside(self._in_tables())

    def writes(self) -> Iterator[tuple[str, Int32Array]]:
        """Yield what writes blocks, or is going to, with the blocks."""
        yield from self._changes()
        yield "writes into", self._inside(np.concatenate(list(self._rows())))

    def _changes(self) -> Iterator[tuple[str, Int32Array]]:
        step = self._step
        yield "appends", self._inside(step.delta.appended_blocks[:, 1])
        yield "puts in place", self._inside(step.delta.replaced_blocks[:, 2])
        yield "copies to", self._inside(step.blocks_to_copy[:, 1])
        yield "swaps in", self._inside(step.blocks_to_swap_in[:, 1])
        yield "saves a state in", self._inside(step.states_to_save[:, 2])

    def _inside(self, block_ids: Int32Array) -> Int32Array:
        if not len(block_ids):
            return block_ids
        return block_ids[(block_ids >= 0) & (block_ids < self._num_blocks)]

    def _entries_of(self, admission: Admission) -> Iterator[tuple[int, Int32Array]]:
        """Yield the block table of an admission in each group: the index of the first entry in use, and from there."""
        ids = admission.block_ids
        ends = [tables.first_id + tables.num_device_blocks for tables in self._table.groups]
        group_of = np.searchsorted(ends, ids, side="right")
        for index, (tables, window) in enumerate(zip(self._table.groups, self._windows, strict=True)):
            first = _first_read(admission.num_computed_tokens, window) // tables.block_size
            yield first, ids[group_of == index][first:]

    def _in_tables(self) -> Int32Array:
        """Return the blocks in the tables of slots that live on, but for entries that fell out of the window."""
        table = self._table
        lives_on = table.live.copy()
        lives_on[self._within(self._step.delta.released_slots)] = False
        blocks = [np.empty(0, np.int32)]
        for tables, window in zip(table.groups, self._windows, strict=True):
            for slot in lives_on.nonzero()[0].tolist():
                first = _first_read(int(table.num_scheduled_tokens[slot]), window) // tables.block_size
                blocks.append(tables.of_slot(slot)[first:] + tables.first_id)
        return np.concatenate(blocks)

    def _rows(self) -> Iterator[Int32Array]:
        """Yield the blocks that the rows of the step write, but for those that it appends or puts in place."""
        delta, table = self._step.delta, self._table
        decodes = table.active.copy()
        for left in (delta.released_slots, delta.deactivated_slots):
            decodes[self._within(left)] = False
        slots = decodes.nonzero()[0]
        yield from self._of_slots(slots, slots, table.allowance[slots])
        admitted = {admission.slot: admission for admission in delta.admissions}
        others = [*((slot, 1) for slot in delta.activated_slots.tolist()), *delta.prefill_chunks.tolist()]
        for slot, length in others:
            source = slot
            for fork in reversed(delta.beam_forks):
                source = fork.parent_slot if fork.slot == source else source
            if source in admitted:
                yield from self._of_admitted(admitted[source], length)
            elif 0 <= source < table.max_num_seqs:
                yield from self._of_slots(np.array([slot]), np.array([source]), np.array([length]))

    def _of_slots(self, slots: Index, sources: Index, lengths: Index) -> Iterator[Int32Array]:
        """Yield the blocks that slots write, which have the tables and positions of `sources`, for each group."""
        begins = self._table.num_scheduled_tokens[sources].astype(np.intp)
        for tables in self._table.groups:
            firsts = begins // tables.block_size
            lasts = np.minimum((begins + lengths - 1) // tables.block_size, tables.counts[sources] - 1)
            counts = np.maximum(lasts - firsts + 1, 0)
            indices = np.arange(int(counts.sum())) + (firsts - (counts.cumsum() - counts)).repeat(counts)
            blocks = tables.block_ids[sources.repeat(counts), indices]
            if len(replaced := self._step.delta.replaced_blocks):
                own = replaced[(replaced[:, 2] - tables.first_id) // max(1, tables.num_device_blocks) == 0]
                is_replaced = (slots.repeat(counts)[:, None] == own[:, 0]) & (indices[:, None] == own[:, 1])
                blocks = blocks[~is_replaced.any(axis=1)]
            yield blocks + np.int32(tables.first_id)

    def _of_admitted(self, admission: Admission, length: int) -> Iterator[Int32Array]:
        begin = admission.num_computed_tokens
        for tables, (first, ids) in zip(self._table.groups, self._entries_of(admission), strict=True):
            size = tables.block_size
            yield ids[max(0, begin // size - first) : -(-(begin + length) // size) - first]

    def _within(self, slots: Int32Array) -> Int32Array:
        return slots[(slots >= 0) & (slots < self._table.max_num_seqs)]


def _first_read(position: int, window: int) -> int:
    """Return the first position that the token at a position sees; 0 as window: it sees all."""
    return max(0, position - window + 1) if window else 0
