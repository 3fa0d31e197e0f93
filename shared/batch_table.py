"""The batch table: the live sequences as a structure of arrays, mirrored on both tiers.

The scheduler's copy is the truth, the executor's its mirror. Both start empty at Attach and change
in the same two ways only, so they cannot drift apart:

    layout = table.apply(delta)              the scheduler's decisions; lays out the step
    table.record(layout, sampled_token_ids)  the sampler's results

The executor records as soon as it has sampled; the scheduler records when the step is acknowledged,
which may be several steps later. Until then the token is `UNKNOWN_TOKEN` in the scheduler's copy.

Positions. Position p of a sequence holds its p-th token, counted from 0 over prompt and output. Its
keys and values are written by the step that *feeds* the token, into block p // block_size of the
slot's block table. A token that was just sampled has no place in the cache yet: a sequence of n
tokens whose last one was just sampled needs ceil((n - 1) / block_size) blocks, and its next step
needs one more exactly when n - 1 is a multiple of block_size.

Pure: imports NumPy, the step values and the error tree only. Read next: `scheduler_svc/core/scheduler.py`, which
makes the deltas, and `executor_svc/model_runner.py`, which runs the layouts.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.delta_check import check_delta
from shared.step import (
    NO_BLOCK,
    SAMPLING_ROW,
    UNKNOWN_TOKEN,
    Admission,
    BoolArray,
    Fork,
    Int32Array,
    TableDelta,
)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The rows of one step. Rows are sequences in the step: active slots ascending, then chunks.

    Sample rows are (logits row, slot) pairs: first the rows that reach the end of their sequence, in
    row order, then the forks.
    """

    slots: Int32Array  # [num_rows]
    generations: Int32Array  # [num_rows] generation of the slot
    starts: Int32Array  # [num_rows] position of the first token that the row computes
    lengths: Int32Array  # [num_rows] tokens that the row computes
    sample_rows: Int32Array  # [num_samples] row whose last token's logits are used
    sample_slots: Int32Array  # [num_samples] slot that gets the token
    sample_positions: Int32Array  # [num_samples] position of the token
    sample_generations: Int32Array  # [num_samples] generation of the slot

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.lengths.sum())


class BatchTable:
    """The live sequences in dense slots. All columns have one entry a slot and are public to read.

    A slot is live from its admission or fork to its release. `generation` counts its uses. Counters
    are int32:

    - `num_prompt_tokens`: the original prompt; survives preemption.
    - `num_tokens`: tokens of the sequence, with those that sent steps will sample.
    - `num_scheduled_tokens`: tokens whose keys and values the cache holds after the sent steps.
    - `num_blocks`: entries of `block_tables` in use; the rest is `NO_BLOCK`.

    An active slot has num_scheduled_tokens == num_tokens - 1: it decodes one token in every step.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_device_blocks: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_device_blocks = num_device_blocks
        max_num_blocks = -(-max_model_len // block_size)
        # np.zeros maps memory lazily: a row costs memory only up to its longest sequence.
        self.live: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self.active: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self.generation: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_scheduled_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_blocks: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.block_tables: Int32Array = np.full((max_num_seqs, max_num_blocks), NO_BLOCK, np.int32)
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.sampling = np.zeros(max_num_seqs, SAMPLING_ROW)
        self.cache_salt: npt.NDArray[np.uint64] = np.zeros(max_num_seqs, np.uint64)

    def apply(self, delta: TableDelta) -> StepLayout:
        """Apply the scheduler's decisions and lay out the step.

        Raises: InvalidStepError: the delta does not fit the table; nothing was changed.
        """
        check_delta(self, delta)
        self.live[delta.released_slots] = False
        self.active[delta.released_slots] = False
        for admission in delta.admissions:
            self._admit(admission)
        for slot, token_id in delta.appended_tokens.tolist():
            self.token_ids[slot, self.num_tokens[slot]] = token_id
            self.num_tokens[slot] += 1
        if len(delta.replaced_blocks):
            slots, indices, block_ids = delta.replaced_blocks.T
            self.block_tables[slots, indices] = block_ids
        self._append_blocks(delta.appended_blocks)
        self.active[delta.deactivated_slots] = False
        self.active[delta.activated_slots] = True
        return self._lay_out(delta.prefill_chunks, delta.forks)

    def record(self, layout: StepLayout, sampled_token_ids: Int32Array) -> BoolArray:
        """Write the sampled tokens of a step; return which sample rows were written, [num_samples].

        Rows whose slot was released or given to another sequence since the layout are dropped.
        """
        slots, positions = layout.sample_slots, layout.sample_positions
        current = self.is_current(slots, layout.sample_generations)
        if current.all():
            self.token_ids[slots, positions] = sampled_token_ids
        else:
            self.token_ids[slots[current], positions[current]] = sampled_token_ids[current]
        return current

    def is_current(self, slots: Int32Array, generations: Int32Array) -> BoolArray:
        """Return which slots still belong to the sequence that had them at that generation."""
        current: BoolArray = self.live[slots] & (self.generation[slots] == generations)
        return current

    def tokens_of(self, slot: int) -> Int32Array:
        """Return a copy of the tokens of a slot, [num_tokens], unknown ones included."""
        return self.token_ids[slot, : self.num_tokens[slot]].copy()

    def blocks_of(self, slot: int) -> Int32Array:
        """Return a copy of the block table of a slot, [num_blocks]."""
        return self.block_tables[slot, : self.num_blocks[slot]].copy()

    def digest(self) -> int:
        """Return a 64-bit hash of the columns that the scheduler writes, of all live slots.

        It does not depend on the number of slots: the scheduler may use fewer than the executor has.
        """
        slots = np.flatnonzero(self.live)
        hasher = hashlib.blake2b(slots.astype("<i4").tobytes(), digest_size=8)
        for column in (self.generation, self.num_prompt_tokens, self.num_tokens, self.num_scheduled_tokens):
            hasher.update(column[slots].tobytes())
        for bits in (self.num_blocks, self.active, self.sampling, self.cache_salt):
            hasher.update(bits[slots].tobytes())
        for slot in slots.tolist():
            hasher.update(self.block_tables[slot, : self.num_blocks[slot]].tobytes())
        return int.from_bytes(hasher.digest(), "little")

    def _admit(self, admission: Admission) -> None:
        slot, num_tokens, num_blocks = admission.slot, len(admission.token_ids), len(admission.block_ids)
        self.live[slot] = True
        self.active[slot] = False
        self.generation[slot] = admission.generation
        self.num_prompt_tokens[slot] = admission.num_prompt_tokens
        self.num_tokens[slot] = num_tokens
        self.num_scheduled_tokens[slot] = admission.num_computed_tokens
        self.token_ids[slot, :num_tokens] = admission.token_ids
        self.block_tables[slot] = NO_BLOCK
        self.block_tables[slot, :num_blocks] = admission.block_ids
        self.num_blocks[slot] = num_blocks
        self.sampling[slot] = admission.sampling.as_tuple()
        self.cache_salt[slot] = admission.cache_salt

    def _append_blocks(self, appended_blocks: Int32Array) -> None:
        slots, block_ids = appended_blocks.T
        if len(np.unique(slots)) == len(slots):
            self.block_tables[slots, self.num_blocks[slots]] = block_ids
            self.num_blocks[slots] += 1
            return
        for slot, block_id in appended_blocks.tolist():
            self.block_tables[slot, self.num_blocks[slot]] = block_id
            self.num_blocks[slot] += 1

    def _lay_out(self, prefill_chunks: Int32Array, forks: tuple[Fork, ...]) -> StepLayout:
        decode_slots = np.flatnonzero(self.active).astype(np.int32)
        chunk_slots, chunk_lengths = prefill_chunks.T
        slots = np.concatenate((decode_slots, chunk_slots))
        lengths = np.concatenate((np.ones(len(decode_slots), np.int32), chunk_lengths))
        starts = self.num_scheduled_tokens[slots]
        self.num_scheduled_tokens[slots] = starts + lengths
        sample_rows = np.flatnonzero(starts + lengths == self.num_tokens[slots]).astype(np.int32)
        sample_slots = slots[sample_rows]
        if forks:
            row_of = {slot: row for row, slot in zip(sample_rows.tolist(), sample_slots.tolist(), strict=True)}
            for fork in forks:
                self._fork(fork)
            sample_rows = np.append(sample_rows, np.array([row_of[f.parent_slot] for f in forks], np.int32))
            sample_slots = np.append(sample_slots, np.array([f.slot for f in forks], np.int32))
        positions = self.num_tokens[sample_slots]
        self.token_ids[sample_slots, positions] = UNKNOWN_TOKEN
        self.num_tokens[sample_slots] = positions + 1
        self.active[sample_slots] = True
        return StepLayout(
            slots=slots,
            generations=self.generation[slots],
            starts=starts,
            lengths=lengths,
            sample_rows=sample_rows,
            sample_slots=sample_slots,
            sample_positions=positions,
            sample_generations=self.generation[sample_slots],
        )

    def _fork(self, fork: Fork) -> None:
        """Copy the parent, as it is before its own token of this step is counted."""
        parent, child = fork.parent_slot, fork.slot
        num_tokens = self.num_tokens[parent]
        for column in (self.num_prompt_tokens, self.num_tokens, self.num_scheduled_tokens, self.num_blocks):
            column[child] = column[parent]
        self.cache_salt[child] = self.cache_salt[parent]
        self.token_ids[child, :num_tokens] = self.token_ids[parent, :num_tokens]
        self.block_tables[child] = self.block_tables[parent]
        self.sampling[child] = fork.sampling.as_tuple()
        self.generation[child] = fork.generation
        self.live[child] = True
