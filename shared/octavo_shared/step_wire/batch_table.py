"""The batch table: the live sequences as a structure of arrays, mirrored on both tiers.

The scheduler's copy is the truth, the executor's its mirror. Both start empty at Attach and change
in the same two ways only, so they cannot drift apart:

    layout = table.apply(delta)                       the scheduler's decisions; lays out the step
    table.resolve(layout, sampled_token_ids, counts)  the sampler's results

The executor resolves as soon as it has sampled; the scheduler resolves when the step is acknowledged,
which may be several steps later. Until then the token is `UNKNOWN_TOKEN` in the scheduler's copy.

Allowances. An active slot gets 1 to `allowance` tokens in a step. `apply` counts all that it may get, `resolve` takes
back those that did not come. So until then the scheduler knows two lengths: the upper one in the columns, and the lower
one, without `num_open_tokens`. What is taken back does not depend on the order in which steps are applied and
resolved, and a row whose slot was vacated is void: so both copies end up equal.

Beam slots (`SamplingRow.num_candidates` above 0) get no token from the sampler. A row of theirs that
reaches the end of the sequence still has a sample row, which is answered by candidates;
`num_tokens` stays, and the slot is inactive until the scheduler sends the token that it chose and
activates it.

Positions. Position p of a sequence holds its p-th token, counted from 0 over prompt and output. Its
keys and values are written by the step that *feeds* the token, into block p // block_size of the
slot's block table. A token that was just sampled has no place in the cache yet: a sequence of n
tokens whose last one was just sampled needs ceil((n - 1) / block_size) blocks, and its next step
needs one more exactly when n - 1 is a multiple of block_size.

Sliding windows. Blocks that fell out of every window may be given away: the leading entries of a
block table are then stale, on both sides alike, and must not be read.

Pure. Read next: `scheduler_svc/core/step/executor_planner.py`, which makes the deltas, and
`executor_svc/worker/model_runner.py`, which runs the layouts.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from octavo_shared.step_wire.delta_check import check_delta
from octavo_shared.step_wire.step import (
    NO_LOGPROBS,
    UNKNOWN_TOKEN,
    Admission,
    BoolArray,
    Fork,
    Int32Array,
    TableDelta,
    TokenCounts,
    no_slots,
)
from octavo_shared.step_wire.step import IndexArray as IndexArray
from octavo_shared.step_wire.step_layout import StepLayout as StepLayout
from octavo_shared.step_wire.table_columns import (
    NO_ADAPTER,
    NO_GRAMMAR,
    BlockPool,
    BlockTables,
    EncoderPool,
    TableColumns,
)


@dataclass(slots=True)
class _Slots:
    """Some slots, and what a layout says of them. NumPy takes an index of intp up to four times faster than int32."""

    index: IndexArray
    slots: Int32Array
    generations: Int32Array
    num_candidates: Int32Array | None  # None: no beam slot
    num_alternatives: Int32Array | None  # None: no slot asks for any


class BatchTable(TableColumns):
    """The live sequences in dense slots, and the two ways in which they change."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_device_blocks: int,
        num_grammar_slots: int = 0,
        more_pools: Seq[BlockPool] = (),
        num_adapter_slots: int = 0,
        encoder_pool: EncoderPool | None = None,
    ) -> None:
        sizes = max_num_seqs, max_model_len, block_size, num_device_blocks
        super().__init__(*sizes, num_grammar_slots, more_pools, num_adapter_slots, encoder_pool)
        self._flat_token_ids: Int32Array = self.token_ids.reshape(-1)  # a view
        # What a step that only decodes needs each time. Layouts share it: it is never written to.
        self._decodes: _Slots | None = None  # the active slots; None: they changed
        self._counting_up = np.arange(max_num_seqs, dtype=np.int32)
        self._ones = np.ones(max_num_seqs, np.int32)
        self._all_true: BoolArray = np.ones(max_num_seqs, np.bool_)

    def apply(self, delta: TableDelta, *, trusted: bool = False) -> StepLayout:
        """Apply the scheduler's decisions and lay out the step.

        Args:
            delta: The decisions.
            trusted: Skip the check: the caller made the delta and vouches for it. An executor never does.

        Raises: InvalidStepError: the delta does not fit the table; nothing was changed.
        """
        if not trusted:
            check_delta(self, delta)
        if len(delta.released_slots):
            self.live[delta.released_slots] = False
            self._set_active(delta.released_slots, False)
        for grammar_slot in delta.grammar_drops:
            self.grammars[grammar_slot] = None
        for load in delta.grammar_loads:
            self.grammars[load.slot] = load.grammar
        for adapter_slot in delta.adapter_drops:
            self.adapters[adapter_slot] = None
        for adapter_load in delta.adapter_loads:
            self.adapters[adapter_load.slot] = adapter_load.adapter
        for admission in delta.admissions:
            self._admit(admission)
        for fork in delta.beam_forks:
            self._fork(fork)
        if len(delta.appended_tokens):
            self._append(delta.appended_tokens, self.token_ids, self.num_tokens)
            appended_to = delta.appended_tokens[:, 0]
            self.num_known_tokens[appended_to] = self.num_tokens[appended_to]
        if len(delta.replaced_blocks):
            for group, rows in self._by_group(delta.replaced_blocks):
                slots, indices, block_ids = rows.T
                group.block_ids[slots, indices] = block_ids
        if len(delta.appended_blocks):
            for group, rows in self._by_group(delta.appended_blocks):
                self._append(rows, group.block_ids, group.counts)
        if len(delta.deactivated_slots):
            self._set_active(delta.deactivated_slots, False)
        if len(delta.activated_slots):
            self._set_active(delta.activated_slots, True)
        if len(delta.allowances):
            slots, values = delta.allowances.T
            self.allowance[slots] = values
            self.has_allowances |= bool(np.count_nonzero(values > 1))
        return self._lay_out(delta)

    def resolve(
        self,
        layout: StepLayout,
        sampled_token_ids: Int32Array,
        counts: TokenCounts | None = None,
        *,
        all_current: bool = False,
    ) -> BoolArray:
        """Write the sampled tokens of a step; return which sample rows are current, [num_samples].

        Rows whose slot was released or given to another sequence since the layout are not; for these and for beam
        rows nothing is written.

        Args:
            layout: The step.
            sampled_token_ids: One for each sample row; with `counts` that many, one row after the other.
            counts: Tokens that each sample row got, [num_samples]; None: one each.
            all_current: Whether no slot was vacated since the layout, so that nothing has to be looked up.
        """
        slots, places = layout.sample_slots, layout.sample_places
        current = self._all_true[: len(slots)] if all_current else self.is_current(slots, layout.sample_generations)
        written = current if layout.num_candidates is None else current & (layout.num_candidates == 0)
        if counts is not None or layout.allowances is not None:
            self._resolve_spans(layout, sampled_token_ids, counts, written)
            return current
        index, ends = layout.sample_index, layout.sample_positions + 1
        has_all = all_current and layout.num_candidates is None
        if has_all or np.count_nonzero(written) == len(written):  # a third of the time of written.all()
            self._flat_token_ids[places] = sampled_token_ids
            self.num_known_tokens[index] = ends
        else:
            self._flat_token_ids[places[written]] = sampled_token_ids[written]
            self.num_known_tokens[index[written]] = ends[written]
        return current

    def _resolve_spans(
        self, layout: StepLayout, token_ids: Int32Array, counts: TokenCounts | None, written: BoolArray
    ) -> None:
        """Write the tokens of rows that may have several, behind the known ones; take back those that did not come."""
        slots = layout.sample_index
        num_entries = np.ones(len(slots), np.int32) if counts is None else counts.astype(np.int32)
        rows = np.arange(len(slots)).repeat(num_entries)
        offsets = np.arange(len(rows)) - (num_entries.cumsum() - num_entries)[rows]
        kept, rows = written[rows], rows[written[rows]]
        places = slots[rows] * self.max_model_len + self.num_known_tokens[slots[rows]] + offsets[kept]
        self._flat_token_ids[places] = token_ids[kept]
        slots, num_came, allowed = slots[written], num_entries[written], layout.most_tokens[written]
        self.num_known_tokens[slots] += num_came
        self.num_tokens[slots] -= allowed - num_came
        self.num_scheduled_tokens[slots] -= allowed - num_came
        self.num_open_tokens[slots] -= allowed - 1

    def _admit(self, admission: Admission) -> None:
        slot, num_tokens = admission.slot, len(admission.token_ids)
        self.live[slot] = True
        self.generation[slot] = admission.generation
        self.num_prompt_tokens[slot] = admission.num_prompt_tokens
        self.num_tokens[slot] = num_tokens
        self.num_scheduled_tokens[slot] = admission.num_computed_tokens
        self.num_known_tokens[slot] = num_tokens
        self.num_open_tokens[slot], self.allowance[slot] = 0, 1
        self.token_ids[slot, :num_tokens] = admission.token_ids
        for group, rows in self._by_group(admission.block_ids[:, None]):
            group.fill(slot, rows[:, 0])
        self.sampling[slot] = admission.sampling.as_tuple()
        self.cache_salt[slot] = admission.cache_salt
        self.token_rules[slot] = admission.token_rules
        self.num_prompt_logprobs[slot] = admission.num_prompt_logprobs
        grammar_slot, adapter_slot = admission.resources
        self.grammar_slot[slot] = NO_GRAMMAR if grammar_slot is None else grammar_slot
        self.adapter_slot[slot] = NO_ADAPTER if adapter_slot is None else adapter_slot
        if self.encoder is not None:
            given = admission.encoder_input
            block_ids = no_slots() if given is None else given.block_ids - np.int32(self.encoder.first_id)
            self.encoder.fill(slot, block_ids)
            self.num_encoder_tokens[slot] = 0 if given is None else given.num_tokens

    def _fork(self, fork: Fork) -> None:
        """Copy the parent as it is now; the child is inactive."""
        parent, child = fork.parent_slot, fork.slot
        num_tokens = self.num_tokens[parent]
        lengths = (self.num_tokens, self.num_scheduled_tokens, self.num_known_tokens)
        counters = (self.num_prompt_tokens, *lengths)
        self.num_open_tokens[child], self.allowance[child] = 0, 1
        for column in (*counters, self.cache_salt, self.token_rules, self.grammar_slot, self.adapter_slot):
            column[child] = column[parent]
        self.token_ids[child, :num_tokens] = self.token_ids[parent, :num_tokens]
        for group in self.groups:
            group.fill(child, group.block_ids[parent, : group.counts[parent]])
        if self.encoder is not None:
            self.encoder.fill(child, self.encoder.of_slot(parent))
            self.num_encoder_tokens[child] = self.num_encoder_tokens[parent]
        self.sampling[child] = fork.sampling.as_tuple()
        self.num_prompt_logprobs[child] = NO_LOGPROBS  # its parent answers them
        self.generation[child] = fork.generation
        self.live[child] = True

    def _by_group(self, rows: Int32Array) -> list[tuple[BlockTables, Int32Array]]:
        """Return for each cache group which of `rows`, [n, width], have blocks of it, numbered as in the cache group.

        The last column has block ids as on the wire.
        """
        if len(self.groups) == 1:
            return [(self.groups[0], rows)]
        found: list[tuple[BlockTables, Int32Array]] = []
        for group, places in zip(self.groups, self.places_by_group(rows[:, -1]), strict=True):
            own = rows[places].copy()
            own[:, -1] -= np.int32(group.first_id)
            found.append((group, own))
        return found

    def _append(self, appended: Int32Array, rows: Int32Array, lengths: Int32Array) -> None:
        """Append values to `rows`, [max_num_seqs, capacity], whose used `lengths` grow.

        `appended` is [n, 2]: slot, value. One slot may be there several times: its values keep their order.
        """
        slots, values = appended[:, 0].astype(np.intp), appended[:, 1]
        ends = lengths[slots]
        if np.count_nonzero(slots[1:] <= slots[:-1]):  # not ascending, so perhaps one slot several times
            ends += _num_equal_before(slots)
        rows[slots, ends] = values
        lengths[slots] = ends + 1  # the last of several ends of one slot stays

    def _set_active(self, slots: Int32Array | IndexArray, active: bool) -> None:
        self.active[slots] = active
        self._decodes = None

    def _lay_out(self, delta: TableDelta) -> StepLayout:
        if self._decodes is None:
            self._decodes = self._look_up(self.active.nonzero()[0])
        rows, num_decodes, has_chunks = self._decodes, len(self._decodes.index), len(delta.prefill_chunks) > 0
        allowances = self._allowances_of(rows) if self.has_allowances else None
        lengths = self._ones[:num_decodes] if allowances is None else np.maximum(allowances, 1)
        if has_chunks:
            rows = self._look_up(np.concatenate((rows.index, delta.prefill_chunks[:, 0])))
            lengths = np.concatenate((lengths, delta.prefill_chunks[:, 1]))
        starts = self.num_scheduled_tokens[rows.index]
        ends = starts + lengths
        self.num_scheduled_tokens[rows.index] = ends
        firsts = ends  # where a row samples, if it is at the end of its sequence
        if allowances is not None:  # a decode does so behind each of its tokens
            firsts = np.concatenate((starts[:num_decodes] + 1, ends[num_decodes:]))
        samples, sample_rows, positions = rows, self._counting_up[:num_decodes], firsts
        if has_chunks:
            sample_rows = (firsts == self.num_tokens[rows.index]).nonzero()[0].astype(np.int32)
            samples, positions = self._look_up(rows.index[sample_rows]), firsts[sample_rows]
        if delta.forks:
            parents = self._fork_samples(delta.forks, samples.slots)
            sample_rows, positions = (np.append(column, column[parents]) for column in (sample_rows, positions))
            samples = self._look_up(np.append(samples.index, [fork.slot for fork in delta.forks]))
        places = samples.index * self.max_model_len + positions
        if allowances is not None:  # chunks and forks get one token
            allowances = np.concatenate((allowances, self._ones[num_decodes : len(samples.index)]))
            if samples.num_candidates is not None:
                allowances[samples.num_candidates > 0] = 0
        self._expect_samples(samples, positions, places, allowances, were_active=samples is self._decodes)
        layout = StepLayout(
            slots=rows.slots,
            generations=rows.generations,
            starts=starts,
            lengths=lengths,
            sample_rows=sample_rows,
            sample_slots=samples.slots,
            sample_positions=positions,
            sample_generations=samples.generations,
            sample_places=places,
            sample_index=samples.index,
            num_decodes=num_decodes,
            num_candidates=samples.num_candidates,
            num_alternatives=samples.num_alternatives,
            allowances=allowances,
        )
        if has_chunks:
            layout.ask_for_prompt_logprobs(self.num_prompt_logprobs[rows.index], self.num_prompt_tokens[rows.index])
        return layout

    def _allowances_of(self, decodes: _Slots) -> Int32Array | None:
        """Return how many tokens each row may get, [num_decodes]; None: one, and no row before it is open."""
        allowances = self.allowance[decodes.index]
        if np.count_nonzero(allowances > 1) or np.count_nonzero(self.num_open_tokens[decodes.index]):
            return allowances
        return None

    def _look_up(self, index: IndexArray) -> _Slots:
        num_candidates = self.num_candidates[index]
        has_beams = np.count_nonzero(num_candidates) > 0
        num_alternatives: Int32Array | None = None
        asks = (self.num_logprobs[index] > 0) & (num_candidates == 0)
        if np.count_nonzero(asks):
            num_alternatives = np.where(asks, self.num_logprobs[index], 0).astype(np.int32)
        return _Slots(
            index,
            index.astype(np.int32),
            self.generation[index],
            num_candidates if has_beams else None,
            num_alternatives,
        )

    def _fork_samples(self, forks: tuple[Fork, ...], sample_slots: Int32Array) -> list[int]:
        """Make the children of `TableDelta.forks`; return the index of each one's parent in `sample_slots`."""
        index_of = {slot: index for index, slot in enumerate(sample_slots.tolist())}
        for fork in forks:
            self._fork(fork)
        return [index_of[fork.parent_slot] for fork in forks]

    def _expect_samples(
        self,
        samples: _Slots,
        positions: Int32Array,
        places: IndexArray,
        allowances: Int32Array | None,
        were_active: bool,
    ) -> None:
        """Make room for the tokens that the sample rows may get; beam slots get none and rest."""
        index = samples.index
        if samples.num_candidates is not None:
            self._set_active(index, False)
            is_sampled, were_active = samples.num_candidates == 0, False
            index, positions, places = index[is_sampled], positions[is_sampled], places[is_sampled]
            allowances = None if allowances is None else allowances[is_sampled]
        self._flat_token_ids[places] = UNKNOWN_TOKEN
        self.num_tokens[index] = positions + 1
        if allowances is not None:
            for place in range(1, int(allowances.max(initial=0))):
                self._flat_token_ids[places[allowances > place] + place] = UNKNOWN_TOKEN
            self.num_tokens[index] += allowances - 1
            self.num_open_tokens[index] += allowances - 1
        if not were_active:
            self._set_active(index, True)


def _num_equal_before(numbers: IndexArray) -> Int32Array:
    """Return how many equal entries come before each one, [n]."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    counts = np.empty(len(numbers), np.int32)
    counts[order] = np.arange(len(numbers)) - np.searchsorted(ordered, ordered)
    return counts
