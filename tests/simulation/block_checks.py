"""What no step may do to the blocks of an executor, whoever reads them: looked at in each step, of all live slots.

`FakeWorker` checks what the rows of a step read. Here all that the next token of each slot sees must be there too, in
each cache group, and all of its encoder's output; nobody writes into a block that another slot sees; and a name stands
for one content, that of a saved state for the tokens up to the block of the same name.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from executor_svc.fake.cache import Histories, HistoryCache
from executor_svc.fake.encoder import EncoderCache
from executor_svc.fake.states import SlotStates
from octavo_shared.errors import StepFailedError
from octavo_shared.step_wire.batch_table import BatchTable, IndexArray, StepLayout
from octavo_shared.step_wire.step import BLOCK_NAME_BYTES, Step
from octavo_shared.step_wire.table_columns import BlockTables


class BlockChecks:
    """Looks at the blocks of one executor process.

    Args:
        table: The batch table; empty.
        histories: What each slot ought to see.
        caches: The pools of each cache group.
        encoder: Those of the encoder's output; None: the model has no encoder.
        states: The saved states; None: the model has no states.
        contents: What each name stood for so far, at any executor of these weights: `content_key`.
    """

    def __init__(
        self,
        table: BatchTable,
        histories: Histories,
        caches: Sequence[HistoryCache],
        encoder: EncoderCache | None,
        states: SlotStates | None,
        contents: dict[bytes, bytes],
    ) -> None:
        self._table = table
        self._histories = histories
        self._groups = list(zip(caches, table.groups, strict=True))
        self._encoder = encoder
        self._states = states
        self._contents = contents
        # Slots whose blocks are written as far as they say: not those that share what another one is to compute.
        self._has_run = np.zeros(table.max_num_seqs, np.bool_)

    def before_step(self, step: Step) -> None:
        """Check the names that a step tells. Raises StepFailedError: a name stands for something else."""
        for place, block_id in enumerate(step.registered_blocks.tolist()):
            name = step.block_names[BLOCK_NAME_BYTES * place : BLOCK_NAME_BYTES * (place + 1)]
            key = content_key(name, self._histories)
            content, known = self._content_of(block_id), self._contents.get(key, b"")
            # A state tells of the last token alone; a block with the same name, of those before it too.
            num_bytes = min(len(content), len(known))
            if content[len(content) - num_bytes :] != known[len(known) - num_bytes :]:
                raise StepFailedError(f"step {step.step_id} gives block {block_id} the name of another content")
            self._contents[key] = max(content, known, key=len)

    def before_writes(self, step: Step, layout: StepLayout) -> None:
        """Check the writes of a step that was applied to the table, and whose blocks were moved.

        Raises: StepFailedError: a row writes into a block that another slot sees.
        """
        self._has_run[[admission.slot for admission in step.delta.admissions]] = False
        for fork in step.delta.beam_forks:
            self._has_run[fork.slot] = self._has_run[fork.parent_slot]
        self._has_run[[fork.slot for fork in step.delta.forks]] = False
        self._has_run &= self._table.live
        for index, (cache, tables) in enumerate(self._groups):
            self._check_writes(index, cache, tables, layout)

    def after_step(self, step: Step, layout: StepLayout) -> None:
        """Check what the next token of each slot sees. Raises StepFailedError: a place holds something else."""
        self._has_run[layout.slots] = True
        self._has_run[[fork.slot for fork in step.delta.forks]] = True
        slots = self._has_run.nonzero()[0].astype(np.int32)
        lengths = self._table.num_scheduled_tokens[slots]
        some = lengths > 0
        seen = replace(layout, slots=slots[some], starts=lengths[some], lengths=np.zeros_like(lengths[some]))
        if len(seen.slots):
            for cache, tables in self._groups:
                cache.check_reads(tables, seen, self._histories)
        if self._encoder is not None and self._table.encoder is not None:
            self._encoder.check_reads(self._table.encoder, self._table.num_encoder_tokens, slots)

    def _content_of(self, block_id: int) -> bytes:
        if self._states is not None and block_id >= self._states.first_id:
            return self._states.content_of(block_id)
        encoder = self._table.encoder
        if self._encoder is not None and encoder is not None and block_id >= encoder.first_id:
            content: bytes = self._encoder.device[block_id - encoder.first_id].tobytes()
            return content
        index = int(np.searchsorted([tables.first_id for _, tables in self._groups], block_id, side="right")) - 1
        cache, tables = self._groups[index]
        return cache.content_of(block_id - tables.first_id)

    def _check_writes(self, index: int, cache: HistoryCache, tables: BlockTables, layout: StepLayout) -> None:
        size, rows = tables.block_size, layout.slots.astype(np.intp)
        begins = self._table.num_scheduled_tokens.astype(np.intp)
        ends = begins.copy()
        begins[rows], ends[rows] = layout.starts, layout.starts + layout.lengths
        written = _blocks(tables, rows, begins[rows] // size, -(-ends[rows] // size))
        live = self._has_run.nonzero()[0]
        seen = _blocks(tables, live, cache.first_read(begins[live]) // size, -(-ends[live] // size))
        own = written[self._has_run[rows].repeat(-(-ends[rows] // size) - begins[rows] // size)]
        num_others = np.bincount(seen, minlength=tables.num_device_blocks)
        np.subtract.at(num_others, own, 1)
        num_writers = np.bincount(written, minlength=tables.num_device_blocks)
        if len(wrong := ((num_writers > 1) | ((num_writers > 0) & (num_others > 0))).nonzero()[0]):
            raise StepFailedError(f"block {wrong[0]} of cache group {index} is written, and another slot sees it")


def content_key(name: bytes, histories: Histories) -> bytes:
    """Return the key of a name: the first weights of each scheduler have one key (`block_naming.py`)."""
    return name + histories.weights.tobytes()


def _blocks(tables: BlockTables, slots: IndexArray, begins: IndexArray, ends: IndexArray) -> IndexArray:
    """Return the blocks at indices `begins` to `ends`, exclusive, of each of some slots, joined."""
    num_blocks = ends - begins
    firsts = num_blocks.cumsum() - num_blocks
    indices = np.arange(int(num_blocks.sum())) + (begins - firsts).repeat(num_blocks)
    blocks: IndexArray = tables.block_ids[slots.repeat(num_blocks), indices].astype(np.intp)
    return blocks
