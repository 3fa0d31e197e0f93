"""What the scheduler calls the content of device blocks: names that outlive an attachment (docs/execution-wire.md).

A block has a name only while its content is what the name says. Names are set and cleared on the step thread, between
two steps, so a moment in between is never seen. Read next: `step_runner.py`.
"""

from collections.abc import Sequence

import numpy as np

from octavo.execution.v1 import step_pb2
from octavo_shared.errors import InvalidFieldError, InvalidStepError
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import BLOCK_NAME_BYTES, BoolArray, Int32Array, Step, find_repeated
from octavo_shared.step_wire.wire import encode_registered_blocks

NAMES_OF_A_PAGE = 65_536


class BlockNames:
    """The names of the blocks of all cache groups.

    Args:
        num_blocks: Of all device pools.

    Attributes:
        is_being_listed: Whether a scheduler is to read what was kept: no step may run before.
    """

    def __init__(self, num_blocks: int) -> None:
        self.is_being_listed = False
        self._is_named: BoolArray = np.zeros(num_blocks, np.bool_)
        self._names: dict[int, bytes] = {}
        self._kept: tuple[Int32Array, bytes] = np.empty(0, np.int32), b""

    def __len__(self) -> int:
        return len(self._names)

    def clear(self) -> None:
        """Forget all names."""
        self._is_named[:] = False
        self._names.clear()
        self.is_being_listed = False

    def check(self, step: Step) -> None:
        """Accept the names of a step. Raises InvalidStepError: they name what is no block, or one twice."""
        block_ids = step.registered_blocks
        outside = block_ids[(block_ids < 0) | (block_ids >= len(self._is_named))]
        if len(outside):
            raise InvalidStepError(
                f"step {step.step_id} names device block {outside[0]}; there are {len(self._is_named)} device blocks"
            )
        if (repeated := find_repeated(block_ids)) is not None:
            raise InvalidStepError(f"step {step.step_id} names block {repeated} twice")

    def follow(self, step: Step, table: BatchTable, was_active: BoolArray) -> None:
        """Set the names of a step, and clear the names of the blocks that it may write.

        Args:
            step: Checked, and applied to the table.
            table: As the step has left it.
            was_active: The slots that were active before it, [max_num_seqs].
        """
        if len(step.registered_blocks):
            self._is_named[step.registered_blocks] = True
            for place, block_id in enumerate(step.registered_blocks.tolist()):
                self._names[block_id] = step.block_names[BLOCK_NAME_BYTES * place : BLOCK_NAME_BYTES * (place + 1)]
        if not self._names:
            return
        for written in _written(step, table, was_active):
            if np.count_nonzero(named := self._is_named[written]):
                for block_id in written[named].tolist():
                    self._names.pop(block_id, None)  # it may be there twice
                self._is_named[written] = False

    def begin_listing(self) -> int:
        """Let the names be read, as they are now; return how many there are."""
        block_ids = np.array(sorted(self._names), np.int32)
        self._kept = block_ids, b"".join(self._names[block_id] for block_id in block_ids.tolist())
        self.is_being_listed = len(block_ids) > 0
        return len(block_ids)

    def page(self, begin: int) -> tuple[step_pb2.RegisteredBlocks, int]:
        """Return the page that begins at a name, and where the next one does; 0: it was the last.

        Raises: InvalidFieldError: there is no such page.
        """
        block_ids, names = self._kept
        if begin and not 0 < begin < len(block_ids):
            raise InvalidFieldError("page_token", begin, "what the answer before said, or 0")
        end = min(begin + NAMES_OF_A_PAGE, len(block_ids))
        if end == len(block_ids):
            self.is_being_listed = False
        page = encode_registered_blocks(block_ids[begin:end], names[BLOCK_NAME_BYTES * begin : BLOCK_NAME_BYTES * end])
        return page, 0 if end == len(block_ids) else end


def _written(step: Step, table: BatchTable, was_active: BoolArray) -> Sequence[Int32Array]:
    """Return the device blocks that a step, applied to a table, may write; a few too many do no harm."""
    decodes = was_active.copy()
    decodes[step.delta.released_slots] = False
    decodes |= table.active
    decodes[step.delta.activated_slots] = True  # a slot of a beam rests behind its row
    slots = decodes.nonzero()[0]
    positions = np.maximum(table.num_scheduled_tokens[slots] - 1, 0)
    if table.has_allowances:  # what did not come is taken back already: it wrote before this place, or behind it
        reach = table.allowance[slots].astype(np.intp) - 1
        slots, middles, widths = slots.repeat(2 * reach + 1), positions.repeat(2 * reach + 1), 2 * reach + 1
        offsets = np.arange(len(slots)) - (widths.cumsum() - widths + reach).repeat(widths)
        last = np.maximum(table.num_blocks[slots] * table.block_size - 1, 0)
        positions = np.clip(middles + offsets, 0, last)
    if len(step.delta.prefill_chunks):
        chunk_slots, lengths = step.delta.prefill_chunks.T.astype(np.intp)
        ends = table.num_scheduled_tokens[chunk_slots].astype(np.intp)
        slots = np.concatenate((slots, chunk_slots.repeat(lengths)))
        rows = [np.arange(end - length, end) for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
        positions = np.concatenate((positions, *rows))
    in_tables = [group.block_ids[slots, positions // group.block_size] + group.first_id for group in table.groups]
    received = [receive.block_ids for receive in step.blocks_to_receive]
    moved = step.blocks_to_swap_in[:, 1], step.blocks_to_copy[:, 1], step.states_to_save[:, 2]
    encoded = [given.block_ids for given in step.encoder_inputs]
    return *in_tables, *moved, *received, *encoded
