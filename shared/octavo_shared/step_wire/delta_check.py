"""Check that a delta fits the batch table, before anything is written.

The delta is projected onto copies of the small per-slot columns, field by field in the order of
`apply`, and the invariants of the table are checked on the projection.
"""

from collections.abc import Sequence as Seq

import numpy as np

from octavo.values.wording import counted
from octavo_shared.errors import InvalidStepError
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.request_check import check_answerable, check_sampling
from octavo_shared.step_wire.step import (
    Adapter,
    Admission,
    BoolArray,
    EncoderInput,
    Fork,
    Int32Array,
    TableDelta,
    find_repeated,
    next_generation,
)
from octavo_shared.step_wire.table_columns import TableColumns


def check_delta(table: TableColumns, delta: TableDelta) -> None:
    """Raise InvalidStepError, naming slot and rule, unless `table.apply(delta)` is sound."""
    _Projection(table).check(delta)


# What an admission or a fork of beams writes.
_OF_A_SEQUENCE = (
    *("live", "active", "num_tokens", "num_scheduled_tokens", "num_open_tokens", "num_candidates"),
    "allowance",
)

# A count is a byte on the wire.
MAX_ALLOWANCE = 255

_NO_BLOCK, _TOO_LONG = "has no block for its next token", "is at max_model_len"


def check_encoder_input(table: TableColumns, slot: int, given: EncoderInput) -> None:
    """Require a table of a length that the encoder has, and an input of that length.

    Raises: InvalidStepError: the admission to `slot` has another.
    """
    if (tables := table.encoder) is None:
        raise InvalidStepError(f"slot {slot} has an encoder input; the model has no encoder")
    if not 1 <= given.num_tokens <= table.max_encoder_tokens:
        limit = table.max_encoder_tokens
        raise InvalidStepError(f"slot {slot} has {given.num_tokens} encoder tokens; it may have 1 to {limit}")
    num_blocks, first, end = -(-given.num_tokens // tables.block_size), tables.first_id, tables.end_id
    if len(given.block_ids) != num_blocks:
        count = len(given.block_ids)
        raise InvalidStepError(f"slot {slot} has {counted(count, 'encoder block')}; its input takes {num_blocks}")
    is_own = (given.block_ids >= first) & (given.block_ids < end)
    if np.count_nonzero(is_own) < num_blocks:
        block_id = given.block_ids[~is_own][0]
        raise InvalidStepError(f"slot {slot} has encoder block {block_id}; encoder blocks are {first} to {end - 1}")
    repeated = find_repeated(given.block_ids)
    if repeated is not None:
        raise InvalidStepError(f"slot {slot} has encoder block {repeated} twice")
    if given.token_ids is not None and len(given.token_ids) != given.num_tokens:
        count = len(given.token_ids)
        raise InvalidStepError(f"slot {slot} has {counted(count, 'token')} for {given.num_tokens} encoder tokens")
    if given.features is not None and not np.isfinite(given.features).all():
        raise InvalidStepError(f"slot {slot} has features that are not finite numbers")


class _Projection:
    """The per-slot columns as they will be after the fields that were checked so far.

    A column is the table's own until something is written to it: most deltas write to few columns, or to none.
    """

    def __init__(self, table: TableColumns) -> None:
        self.table = table
        self.live = table.live
        self.active = table.active
        self.num_tokens = table.num_tokens
        self.num_scheduled_tokens = table.num_scheduled_tokens
        self.num_open_tokens = table.num_open_tokens
        self.num_blocks = table.block_counts
        self.num_candidates = table.num_candidates
        self.allowance = table.allowance
        # By slot of grammars and adapters: whether it holds one, once a load or a drop was checked.
        self.is_loaded: dict[str, list[bool]] = {}
        self._copied: set[str] = set()

    def check(self, delta: TableDelta) -> None:
        if len(delta.released_slots):
            self._release(delta.released_slots)
        if delta.grammar_drops or delta.grammar_loads:
            loads = [load.slot for load in delta.grammar_loads]
            self._change_things("grammar", delta.grammar_drops, loads, self.table.grammar_slot)
        if delta.adapter_drops or delta.adapter_loads:
            loads = [load.slot for load in delta.adapter_loads]
            self._change_things("adapter", delta.adapter_drops, loads, self.table.adapter_slot)
        for admission in delta.admissions:
            self._admit(admission)
        for fork in delta.beam_forks:
            self._fork_beam(fork)
        if len(delta.appended_tokens):
            self._append_tokens(delta.appended_tokens)
        if len(delta.replaced_blocks):
            self._replace_blocks(delta.replaced_blocks)
        if len(delta.appended_blocks):
            self._append_blocks(delta.appended_blocks)
        if len(delta.deactivated_slots) or len(delta.activated_slots):
            self._activate(delta.deactivated_slots, delta.activated_slots)
        if len(delta.activated_slots) or len(delta.appended_tokens):
            # All active slots, not only the new ones: an active slot may have been given a token.
            caught_up = self.num_scheduled_tokens == self.num_tokens - 1
            self._require_of_active(caught_up, "cannot decode: more than one token is not computed")
        if len(delta.allowances):
            self._allow(delta.allowances)
        if len(delta.prefill_chunks):
            self._check_chunks(delta.prefill_chunks)
        self._check_decodes(has_allowances=self.table.has_allowances or len(delta.allowances) > 0)
        if delta.forks:
            self._fork(delta.forks, delta.prefill_chunks)

    def _write_to(self, *names: str) -> None:
        """Copy columns of the table, unless they are copies already."""
        for name in names:
            if name not in self._copied:
                self._copied.add(name)
                setattr(self, name, getattr(self, name).copy())

    def _write_to_blocks(self) -> None:
        """Copy the numbers of blocks, unless they are copies already."""
        if "num_blocks" not in self._copied:
            self._copied.add("num_blocks")
            self.num_blocks = [counts.copy() for counts in self.num_blocks]

    def _room(self) -> Int32Array:
        """Return for how many tokens each slot has blocks in every cache group, [max_num_seqs]."""
        rooms = [counts * group.block_size for counts, group in zip(self.num_blocks, self.table.groups, strict=True)]
        return rooms[0] if len(rooms) == 1 else np.minimum.reduce(rooms)

    def _release(self, slots: Int32Array) -> None:
        self._require_live(slots, "released")
        self._require_distinct(slots, "released")
        self._write_to("live", "active")
        self.live[slots] = False
        self.active[slots] = False

    def _change_things(self, kind: str, drops: Seq[int], loads: Seq[int], used: Int32Array) -> None:
        """Check drops from and loads into slots of a kind; `used`, [max_num_seqs]: the one that each sequence uses."""
        is_loaded = self.is_loaded[kind] = [thing is not None for thing in self._things(kind)]
        for thing_slot in drops:
            self._require_thing_slot(kind, thing_slot, "dropped")
            users = (self.live & (used == thing_slot)).nonzero()[0]
            if len(users):
                raise InvalidStepError(f"{kind} slot {thing_slot} is dropped but slot {users[0]} uses it")
            if not is_loaded[thing_slot]:
                raise InvalidStepError(f"{kind} slot {thing_slot} is dropped but empty")
            is_loaded[thing_slot] = False
        for thing_slot in loads:
            self._require_thing_slot(kind, thing_slot, "loaded into")
            if is_loaded[thing_slot]:
                raise InvalidStepError(f"{kind} slot {thing_slot} is loaded into but not empty")
            is_loaded[thing_slot] = True

    def _things(self, kind: str) -> Seq[Grammar | Adapter | None]:
        return self.table.grammars if kind == "grammar" else self.table.adapters

    def _require_thing_slot(self, kind: str, thing_slot: int, what: str) -> None:
        num_slots = len(self._things(kind))
        if not 0 <= thing_slot < num_slots:
            raise InvalidStepError(f"{kind} slot {thing_slot} is {what}; there are {counted(num_slots, 'slot')}")

    def _require_thing(self, kind: str, slot: int, thing_slot: int) -> None:
        """Require that a slot may use what is in a slot of a kind."""
        what = f"used by slot {slot}"
        self._require_thing_slot(kind, thing_slot, what)
        loaded = self.is_loaded.get(kind)
        if not (self._things(kind)[thing_slot] is not None if loaded is None else loaded[thing_slot]):
            raise InvalidStepError(f"{kind} slot {thing_slot} is {what} but empty")

    def _admit(self, admission: Admission) -> None:
        table, slot, num_tokens = self.table, admission.slot, len(admission.token_ids)
        self._require_free(slot, admission.generation, "admitted")
        check_sampling(f"slot {slot}", admission.sampling)
        check_answerable(f"slot {slot}", admission.num_prompt_logprobs, admission.token_rules)
        if not 1 <= num_tokens <= table.max_model_len:
            raise InvalidStepError(f"slot {slot} has {num_tokens} tokens; the limit is {table.max_model_len}")
        if not 1 <= admission.num_prompt_tokens <= num_tokens:
            raise InvalidStepError(f"slot {slot} has {admission.num_prompt_tokens} prompt tokens of {num_tokens}")
        if not 0 <= admission.num_computed_tokens < num_tokens:
            raise InvalidStepError(f"slot {slot} has {admission.num_computed_tokens} computed tokens of {num_tokens}")
        self._require_blocks(np.full_like(admission.block_ids, slot), admission.block_ids)
        num_blocks = [len(admission.block_ids[own]) for own in table.places_by_group(admission.block_ids)]
        for group, count in zip(table.groups, num_blocks, strict=True):
            if admission.num_computed_tokens > count * group.block_size:
                raise InvalidStepError(f"slot {slot} has more computed tokens than its blocks hold")
            if count > group.block_ids.shape[1]:
                raise InvalidStepError(f"slot {slot} has {count} blocks, more than a table holds")
        if (grammar_slot := admission.resources.grammar_slot) is not None:
            self._require_thing("grammar", slot, grammar_slot)
        if (adapter_slot := admission.resources.adapter_slot) is not None:
            self._require_thing("adapter", slot, adapter_slot)
        if admission.encoder_input is not None:
            check_encoder_input(table, slot, admission.encoder_input)
        self._write_to(*_OF_A_SEQUENCE)
        self._write_to_blocks()
        self.live[slot], self.active[slot] = True, False
        self.num_tokens[slot] = num_tokens
        self.num_scheduled_tokens[slot] = admission.num_computed_tokens
        for counts, count in zip(self.num_blocks, num_blocks, strict=True):
            counts[slot] = count
        self.num_candidates[slot] = admission.sampling.num_candidates
        self.num_open_tokens[slot], self.allowance[slot] = 0, 1

    def _fork_beam(self, fork: Fork) -> None:
        parent, child = fork.parent_slot, fork.slot
        self._require_in_range(parent, "forked")
        if not self.live[parent]:
            raise InvalidStepError(f"slot {parent} is forked but not live")
        self._require_resolved(parent)
        self._require_free(child, fork.generation, "forked into")
        check_sampling(f"slot {child}", fork.sampling)
        self._write_to(*_OF_A_SEQUENCE)
        self._write_to_blocks()
        self.live[child], self.active[child] = True, False
        for column in (self.num_tokens, self.num_scheduled_tokens, *self.num_blocks):
            column[child] = column[parent]
        self.num_candidates[child] = fork.sampling.num_candidates
        self.num_open_tokens[child], self.allowance[child] = 0, 1

    def _append_tokens(self, appended_tokens: Int32Array) -> None:
        slots = appended_tokens[:, 0]
        self._require_live(slots, "given a token")
        self._require(slots, self.num_open_tokens[slots] == 0, "is given a token behind others that may not come")
        self._write_to("num_tokens")
        np.add.at(self.num_tokens, slots, 1)
        self._require(slots, self.num_tokens[slots] <= self.table.max_model_len, "would be longer than max_model_len")

    def _replace_blocks(self, replaced_blocks: Int32Array) -> None:
        slots, indices, block_ids = replaced_blocks.T
        self._require_live(slots, "given another block")
        self._require_blocks(slots, block_ids)
        for counts, own in zip(self.num_blocks, self.table.places_by_group(block_ids), strict=True):
            has_block = (indices[own] >= 0) & (indices[own] < counts[slots[own]])
            self._require(slots[own], has_block, "has no block to replace there")

    def _append_blocks(self, appended_blocks: Int32Array) -> None:
        slots, block_ids = appended_blocks.T
        self._require_live(slots, "given a block")
        self._require_blocks(slots, block_ids)
        self._write_to_blocks()
        for group, counts, own in zip(
            self.table.groups, self.num_blocks, self.table.places_by_group(block_ids), strict=True
        ):
            np.add.at(counts, slots[own], 1)
            fits = counts[slots[own]] <= group.block_ids.shape[1]
            self._require(slots[own], fits, "would have more blocks than a block table holds")

    def _activate(self, deactivated: Int32Array, activated: Int32Array) -> None:
        self._require_live(deactivated, "deactivated")
        self._require_live(activated, "activated")
        self._write_to("active")
        self.active[deactivated] = False
        self.active[activated] = True

    def _allow(self, allowances: Int32Array) -> None:
        slots, values = allowances.T
        self._require_live(slots, "given an allowance")
        self._require_distinct(slots, "given an allowance")
        self._require(slots, self.num_candidates[slots] == 0, "is given an allowance, but it is a beam slot")
        self._require(
            slots, (values >= 1) & (values <= MAX_ALLOWANCE), f"has an allowance outside 1 to {MAX_ALLOWANCE}"
        )
        self._write_to("allowance")
        self.allowance[slots] = values

    def _check_chunks(self, prefill_chunks: Int32Array) -> None:
        slots, lengths = prefill_chunks.T
        self._require_live(slots, "given a prefill chunk")
        self._require_distinct(slots, "given a prefill chunk")
        self._require(slots, ~self.active[slots], "is active and has a prefill chunk")
        self._require(slots, self.num_open_tokens[slots] == 0, "has a prefill chunk behind tokens that may not come")
        self._require(slots, lengths >= 1, "has an empty prefill chunk")
        # Before anything is added to the lengths: near 2^31 the sum would wrap.
        num_left = self.num_tokens[slots] - self.num_scheduled_tokens[slots]
        self._require(slots, lengths <= num_left, "would compute more tokens than it has")
        ends, num_tokens = self.num_scheduled_tokens[slots] + lengths, self.num_tokens[slots]
        self._require(slots, ends <= self._room()[slots], _NO_BLOCK)
        self._require(slots, (ends < num_tokens) | (num_tokens < self.table.max_model_len), _TOO_LONG)

    def _check_decodes(self, *, has_allowances: bool) -> None:
        """Check the active slots: each feeds its last token. This is done in every step, so of all slots at once."""
        num_tokens = self.num_tokens + self.allowance - 1 if has_allowances else self.num_tokens  # with drafts
        most_tokens = np.minimum(room := self._room(), self.table.max_model_len - 1)
        if np.count_nonzero((num_tokens > most_tokens) & self.active):
            self._require_of_active(num_tokens <= room, _NO_BLOCK)
            self._require_of_active(num_tokens < self.table.max_model_len, _TOO_LONG)

    def _fork(self, forks: tuple[Fork, ...], prefill_chunks: Int32Array) -> None:
        chunk_slots, chunk_lengths = prefill_chunks.T
        ends = self.num_scheduled_tokens[chunk_slots] + chunk_lengths
        sampled_slots = chunk_slots[ends == self.num_tokens[chunk_slots]]
        parents = {*self.active.nonzero()[0].tolist(), *sampled_slots.tolist()}
        self._write_to("live")
        for fork in forks:
            self._require_in_range(fork.parent_slot, "forked")
            if fork.parent_slot not in parents:
                raise InvalidStepError(f"slot {fork.parent_slot} is forked but has no sample row in this step")
            self._require_resolved(fork.parent_slot)
            if self.active[fork.parent_slot] and self.allowance[fork.parent_slot] > 1:
                raise InvalidStepError(f"slot {fork.parent_slot} is forked to sample, but has an allowance above 1")
            if self.num_candidates[fork.parent_slot]:
                raise InvalidStepError(f"slot {fork.parent_slot} is forked to sample, but it is a beam slot")
            self._require_free(fork.slot, fork.generation, "forked into")
            check_sampling(f"slot {fork.slot}", fork.sampling)
            if fork.sampling.num_candidates:
                raise InvalidStepError(f"slot {fork.slot} is forked into to sample, but it asks for candidates")
            self.live[fork.slot] = True

    def _require_resolved(self, parent: int) -> None:
        """Require that no token of a fork's parent may be taken back: the copy would keep it."""
        if self.num_open_tokens[parent]:
            raise InvalidStepError(f"slot {parent} is forked while a step with its allowance is not resolved")

    def _require(self, slots: Int32Array, holds: BoolArray, rule: str) -> None:
        if np.count_nonzero(holds) < len(holds):  # a fifth of the time of holds.all()
            raise InvalidStepError(f"slot {slots[~holds][0]} {rule}")

    def _require_of_active(self, holds: BoolArray, rule: str) -> None:
        active = self.active.nonzero()[0].astype(np.int32)
        self._require(active, holds[active], rule)

    def _require_live(self, slots: Int32Array, what: str) -> None:
        in_range = (slots >= 0) & (slots < len(self.live))
        if np.count_nonzero(in_range) < len(in_range):
            raise InvalidStepError(f"slot {slots[~in_range][0]} is {what}; slots are 0 to {len(self.live) - 1}")
        self._require(slots, self.live[slots], f"is {what} but not live")

    def _require_distinct(self, slots: Int32Array, what: str) -> None:
        repeated = find_repeated(slots)
        if repeated is not None:
            raise InvalidStepError(f"slot {repeated} is {what} twice")

    def _require_in_range(self, slot: int, what: str) -> None:
        if not 0 <= slot < len(self.live):
            raise InvalidStepError(f"slot {slot} is {what}; slots are 0 to {len(self.live) - 1}")

    def _require_free(self, slot: int, generation: int, what: str) -> None:
        self._require_in_range(slot, what)
        if self.live[slot]:
            raise InvalidStepError(f"slot {slot} is {what} but live")
        if generation != next_generation(int(self.table.generation[slot])):
            raise InvalidStepError(
                f"slot {slot} is {what} with generation {generation} after {self.table.generation[slot]}"
            )

    def _require_blocks(self, slots: Int32Array, block_ids: Int32Array) -> None:
        """Require that the blocks, one for each of `slots`, exist."""
        exists = (block_ids >= 0) & (block_ids < self.table.num_block_ids)
        if np.count_nonzero(exists) < len(exists):
            slot, block_id = slots[~exists][0], block_ids[~exists][0]
            last = self.table.num_block_ids - 1
            raise InvalidStepError(f"slot {slot} is given block {block_id}; blocks are 0 to {last}")
