"""Runs steps of a log on an executor, one after the other, in an attachment of their own.

The executor's table begins empty. So the epoch, the step ids and the generations of slots are counted anew; nothing
that a model computes depends on them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from octavo_shared.errors import OctavoServiceError
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.step import (
    Admission,
    EncoderInput,
    Fork,
    Int32Array,
    SamplingRow,
    Step,
    StepResult,
    TableDelta,
    next_generation,
    no_slots,
    pairs,
)
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.swapping import NO_BLOCK, SwappedTable
from scheduler_svc.executors.session import ExecutorSession

_SCRATCH = SamplingRow()
FOLLOWS_GRAMMARS = "its requests follow grammars, which octavo replay --executor does not run"
HAS_ADAPTERS = "its requests have adapters, which octavo replay --executor does not run"
_Entry = TypeVar("_Entry", Admission, Fork)


class CannotRunError(OctavoServiceError):
    """What a snapshot holds, or a step, cannot be computed on this executor; the message says why."""


class Player:
    """An executor that runs the steps of one attachment of a log.

    Args:
        session: Just opened.
    """

    def __init__(self, session: ExecutorSession) -> None:
        info = session.info
        self.session = session
        self._budget = info.max_num_batched_tokens
        self._step_id = 0
        pools = [(group.block_size_tokens, group.num_device_blocks) for group in info.groups(agreed=True)]
        self.table = BatchTable(
            info.max_num_seqs,
            info.max_model_len,
            *pools[0],
            more_pools=pools[1:],
            encoder_pool=info.encoder_pool(agreed=True),
        )
        # Slots that decode in the next step of the log, as those of a snapshot do.
        self._to_activate: list[int] = []
        # Blocks that hold a cached prefix at the snapshot, and nothing here yet; host blocks that hold a copy there.
        self._unfilled: set[int] = set()
        self._unfilled_on_host: set[int] = set()
        # Blocks that hold the output of the encoder here.
        self._encoded: set[int] = set()

    async def run(self, step: Step, encoder_token_ids: Mapping[int, Int32Array]) -> tuple[StepLayout, StepResult]:
        """Run a step of the log; return its rows and the answer.

        Args:
            step: The step.
            encoder_token_ids: What the encoder reads for sequences that the step admits, by slot.

        Raises: CannotRunError: it has grammars or adapters.
        """
        admissions, delta = step.delta.admissions, step.delta
        _require_no_things(delta)
        step = self._without_unfilled_moves(step)
        for admission in admissions:
            await self._fill(admission, step, encoder_token_ids.get(admission.slot))
        if self._to_activate:
            gone = {*delta.released_slots.tolist(), *delta.deactivated_slots.tolist()}
            activated = [slot for slot in self._to_activate if slot not in gone]
            delta = replace(delta, activated_slots=np.array([*activated, *delta.activated_slots.tolist()], np.int32))
            self._to_activate = []
        layout, result = await self._send(replace(step, delta=delta))
        written = (step.blocks_to_copy[:, 1], step.blocks_to_swap_in[:, 1], *self._written_blocks(layout))
        self._unfilled.difference_update(*(blocks.tolist() for blocks in written))
        return layout, result

    def _without_unfilled_moves(self, step: Step) -> Step:
        """Return a step without transfers, and without swap-ins of what is not here.

        Their blocks are filled like others that an admission finds.
        """
        self._unfilled.update(*(receive.block_ids.tolist() for receive in step.blocks_to_receive))
        if step.blocks_to_send or step.blocks_to_receive or step.transfers_to_cancel:
            step = replace(step, blocks_to_send=(), blocks_to_receive=(), transfers_to_cancel=())
        for block, host_block in step.blocks_to_swap_out.tolist():
            keep = self._unfilled_on_host.add if block in self._unfilled else self._unfilled_on_host.discard
            keep(host_block)
        swap_ins = step.blocks_to_swap_in
        is_here = [host_block not in self._unfilled_on_host for host_block in swap_ins[:, 0].tolist()]
        if all(is_here):
            return step
        here = np.array(is_here, np.bool_)
        self._unfilled.update(swap_ins[~here, 1].tolist())
        return replace(step, blocks_to_swap_in=swap_ins[here])

    def _written_blocks(self, layout: StepLayout) -> list[Int32Array]:
        size = self.table.block_size
        ends = layout.starts + layout.lengths
        return [
            self.table.block_tables[slot, start // size : -(-end // size)]
            for slot, start, end in zip(layout.slots.tolist(), layout.starts.tolist(), ends.tolist(), strict=True)
        ]

    async def _send(self, step: Step) -> tuple[StepLayout, StepResult]:
        self._step_id += 1
        delta = self._renumbered(step.delta)
        step = replace(step, epoch=self.session.epoch, step_id=self._step_id, delta=delta, table_digest=None)
        layout = self.table.apply(delta)
        await self.session.send(step)
        result = await self.session.receive()
        self.table.resolve(layout, result.sampled_token_ids, result.token_counts)
        self._encoded.update(*(given.block_ids.tolist() for given in step.encoder_inputs))
        return layout, result

    def _with_input(self, given: EncoderInput | None, token_ids: Int32Array | None) -> EncoderInput | None:
        """Return what a sequence attends to, with the tokens if it was not encoded here."""
        if given is None or self._encoded.issuperset(given.block_ids.tolist()):
            return given
        return replace(given, token_ids=token_ids)

    def _renumbered(self, delta: TableDelta) -> TableDelta:
        def anew(entries: tuple[_Entry, ...]) -> tuple[_Entry, ...]:
            return tuple(replace(entry, generation=self._generation(entry.slot)) for entry in entries)

        admissions, beam_forks, forks = anew(delta.admissions), anew(delta.beam_forks), anew(delta.forks)
        return replace(delta, admissions=admissions, beam_forks=beam_forks, forks=forks)

    def _generation(self, slot: int) -> int:
        return next_generation(int(self.table.generation[slot]))

    # A snapshot ----------------------------------------------------------------------------------

    async def load(self, table: BatchTable, planner: "LoadedCore") -> None:
        """Compute what a planner's live sequences have in the cache: swapped ones first, then those with a slot.

        Args:
            table: Of the planner, with all tokens known.
            planner: What else there is.
        """
        for swapped in planner.swapped:
            await self._load_swapped(swapped, planner.reserved_blocks)
        live, vacated = table.live.nonzero()[0].tolist(), planner.vacated_slots
        for slot in filter(vacated.__contains__, live):
            await self._load_slot(table, slot, self._scratch_input(np.zeros(1, np.int32)), is_vacated=True)
        self._encoded.clear()  # none of it is read again
        for slot in live:
            if slot not in vacated:
                await self._load_slot(table, slot, planner.encoder_inputs.get(slot), is_vacated=False)
        self._to_activate = [slot for slot in table.active.nonzero()[0].tolist() if slot not in planner.vacated_slots]
        self._unfilled = planner.registered_blocks - planner.filled_blocks
        self._unfilled_on_host = planner.copies_on_host

    async def _load_slot(
        self, table: BatchTable, slot: int, encoder_input: EncoderInput | None, *, is_vacated: bool
    ) -> None:
        row = table.sampling[slot].item()
        admission = Admission(
            slot,
            0,
            table.tokens_of(slot),
            int(table.num_prompt_tokens[slot]),
            0,
            table.blocks_of(slot),
            SamplingRow(*row),
            int(table.cache_salt[slot]),
            table.token_rules[slot],
            int(table.num_prompt_logprobs[slot]),
            encoder_input=encoder_input and self._with_input(encoder_input, encoder_input.token_ids),
        )
        num_computed = 0 if is_vacated else int(table.num_scheduled_tokens[slot])
        await self._compute(admission, num_computed)

    async def _load_swapped(self, sequence: "SwappedSequence", reserved: set[int]) -> None:
        swapped = sequence.table
        blocks = swapped.device_blocks.copy()
        missing = (blocks == NO_BLOCK).nonzero()[0]
        scratch = [block for block in range(self.table.num_device_blocks) if block not in reserved][: len(missing)]
        if len(scratch) < len(missing):
            raise CannotRunError("the host pool of the snapshot holds more than the device can compute at once")
        blocks[missing] = scratch
        slot = self._free_slot(no_slots())
        # One token more, which is not computed: nothing is sampled. Of beams all others may be.
        known = np.append(sequence.token_ids, np.int32(0))
        encoder_input = self._scratch_input(sequence.encoder_token_ids)
        admission = Admission(slot, 0, known, 1, 0, blocks, _SCRATCH, sequence.cache_salt, encoder_input=encoder_input)
        await self._compute(admission, swapped.num_computed_tokens)
        moved = (swapped.host_blocks != NO_BLOCK).nonzero()[0]
        moves = pairs(*zip(blocks[moved].tolist(), swapped.host_blocks[moved].tolist(), strict=True))
        release = TableDelta(released_slots=np.array([slot], np.int32))
        await self._send(Step(0, 0, release, blocks_to_swap_out=moves))

    def _scratch_input(self, token_ids: Int32Array | None) -> EncoderInput | None:
        """Return an input in the first blocks of its pool, before anything else is there; None: there is no encoder."""
        if token_ids is None or (tables := self.table.encoder) is None:
            return None
        num_blocks = -(-len(token_ids) // tables.block_size)
        block_ids = np.arange(tables.first_id, tables.first_id + num_blocks, dtype=np.int32)
        return EncoderInput(len(token_ids), block_ids, token_ids)

    async def _fill(self, admission: Admission, step: Step, encoder_token_ids: Int32Array | None) -> None:
        """Compute what was there before the log and an admission finds: a cached prefix, an encoded input."""
        encoder_input = self._with_input(admission.encoder_input, encoder_token_ids)
        num_blocks = admission.num_computed_tokens // self.table.block_size
        found = set(admission.block_ids[:num_blocks].tolist())
        if not found & self._unfilled:
            if encoder_input is admission.encoder_input:
                return
            num_blocks, found = 0, set()
        taken = [other.slot for other in step.delta.admissions]
        slot = self._free_slot(step.delta.released_slots, taken)
        known = num_blocks * self.table.block_size  # a swap-in brings the partial block behind them
        prefix = Admission(
            slot,
            0,
            admission.token_ids[: known + 1],
            min(admission.num_prompt_tokens, known + 1),
            0,
            admission.block_ids[:num_blocks],
            _SCRATCH,
            admission.cache_salt,
            encoder_input=encoder_input,
        )
        await self._compute(prefix, known)
        await self._send(Step(0, 0, TableDelta(released_slots=np.array([slot], np.int32))))
        self._unfilled -= found

    def _free_slot(self, leaving: Int32Array, taken: list[int] | None = None) -> int:
        """Return a slot that nobody has, one that a step is about to take if there is no other."""
        free = (~self.table.live).nonzero()[0].tolist()
        if not free:
            raise CannotRunError("all slots of the executor are in use; raise its --max-num-seqs")
        return next((slot for slot in free if slot not in (taken or [])), free[0])

    async def _compute(self, admission: Admission, num_tokens: int) -> None:
        """Admit a sequence and compute its first tokens, in chunks; active slots rest meanwhile."""
        active = self.table.active.nonzero()[0].astype(np.int32)
        done, is_first, given = 0, True, admission.encoder_input
        while done < num_tokens or is_first:
            num_encoded = given.num_tokens if is_first and given is not None and given.is_computed else 0
            length = min(self._budget - num_encoded, num_tokens - done)
            delta = TableDelta(
                admissions=(admission,) if is_first else (),
                deactivated_slots=active if is_first else no_slots(),
                prefill_chunks=pairs((admission.slot, length)) if length else TableDelta().prefill_chunks,
            )
            await self._send(Step(0, 0, delta))
            done, is_first = done + length, False
        self._to_activate += [slot for slot in active.tolist() if slot not in self._to_activate]


@dataclass(slots=True)
class SwappedSequence:
    """A sequence in the host pool; tokens that were in flight at the snapshot are for a slot that it had."""

    token_ids: Int32Array
    table: SwappedTable
    slot: int
    generation: int
    cache_salt: int
    encoder_token_ids: Int32Array | None


class LoadedCore:
    """What of a planner in a snapshot is not in its batch table.

    Attributes:
        encoder_inputs: What slots attend to besides, by slot, with tokens where the encoder's output is used.
    """

    def __init__(self, planner: ExecutorPlanner) -> None:
        cache = planner.blocks.prefix_cache
        self.vacated_slots = set(planner.batch.is_vacated.nonzero()[0].tolist())
        self.registered_blocks: set[int] = set() if cache is None else set(cache.is_registered.nonzero()[0].tolist())
        host = planner.blocks.groups[0].host
        self.copies_on_host = {copy.host_block for sent in planner.in_flight for copy in sent.copies}
        if host.names is not None:
            self.copies_on_host.update(host.names.is_registered.nonzero()[0].tolist())
        slots = [slot for slot in planner.table.live.nonzero()[0].tolist() if slot not in self.vacated_slots]
        self.swapped = [
            SwappedSequence(
                sequence.token_ids,
                planner.swapped.tables[sequence],
                sequence.slot,
                sequence.generation,
                group.block_salt,
                group.encoder_token_ids,
            )
            for group in planner.swapped.groups
            for sequence in group.sequences
            if sequence in planner.swapped.tables
        ]
        self.reserved_blocks = {block for swapped in self.swapped for block in swapped.table.device_blocks.tolist()}
        running = [planner.blocks.groups[0].held(slot).tolist() for slot in slots]
        self.filled_blocks = self.reserved_blocks.union(*running)
        self.encoder_inputs: dict[int, EncoderInput] = {}
        for slot in slots if planner.table.encoder is not None else ():
            self.encoder_inputs[slot] = _input_of_slot(planner, slot)

    def record(self, layout: StepLayout, sampled_token_ids: Int32Array) -> None:
        """Take the tokens of a step that was in flight at the snapshot."""
        for swapped in self.swapped:
            is_its = (layout.sample_slots == swapped.slot) & (layout.sample_generations == swapped.generation)
            if layout.num_candidates is not None:
                is_its &= layout.num_candidates == 0
            swapped.token_ids = np.append(swapped.token_ids, sampled_token_ids[is_its]).astype(np.int32)


def _input_of_slot(planner: ExecutorPlanner, slot: int) -> EncoderInput:
    tables = planner.table.encoder
    assert tables is not None
    block_ids = tables.of_slot(slot).astype(np.int32) + np.int32(tables.first_id)
    token_ids = planner.batch.sequence_in_slot[slot].group.encoder_token_ids
    return EncoderInput(int(planner.table.num_encoder_tokens[slot]), block_ids, token_ids)


def _require_no_things(delta: TableDelta) -> None:
    """Accept a delta without slotted things. Raises CannotRunError."""
    named = [admission.resources for admission in delta.admissions]
    if delta.grammar_loads or delta.grammar_drops or any(each.grammar_slot is not None for each in named):
        raise CannotRunError(FOLLOWS_GRAMMARS)
    if delta.adapter_loads or delta.adapter_drops or any(each.adapter_slot is not None for each in named):
        raise CannotRunError(HAS_ADAPTERS)
