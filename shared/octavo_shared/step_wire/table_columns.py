"""The columns of the batch table, to be read: checking a delta, or comparing the two tiers, needs no more.

Pure. Read next: `batch_table.py`, which writes them.
"""

import hashlib
from collections.abc import Sequence as Seq
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.values.sampling_params_table import ROW_PARAMS
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.sampling_row import SAMPLING_ROW
from octavo_shared.step_wire.step import NO_LOGPROBS, Adapter, BoolArray, IndexArray, Int32Array

# A cache group's device pool: tokens in a block, and number of blocks.
BlockPool: TypeAlias = tuple[int, int]
# That of the output of an encoder: also the longest input in encoder tokens.
EncoderPool: TypeAlias = tuple[int, int, int]

NO_GRAMMAR = -1
NO_ADAPTER = -1

# The columns of release 0.1.0 are always in the digest, a later one only where it has a value, so that a peer of
# another release gets the same number until the column is used.
_NUM_FIRST = 13
_FIRST = [parameter.name for parameter in ROW_PARAMS[:_NUM_FIRST]]
_FIRST_ROW = np.dtype([(name, SAMPLING_ROW[name]) for name in _FIRST])
_LATER = ROW_PARAMS[_NUM_FIRST:]
_INT32 = np.dtype("<i4")


class BlockTables:
    """The block tables of one cache group. Blocks are numbered from 0 here, whatever their ids are on the wire.

    `block_ids`, [max_num_seqs, most blocks of a sequence], has `counts`, [max_num_seqs], entries in use for each slot;
    the rest is garbage. On the wire blocks have the ids `first_id` to `end_id` less 1.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, pool: BlockPool, first_id: int) -> None:
        self.block_size, self.num_device_blocks = pool
        self.first_id, self.end_id = first_id, first_id + self.num_device_blocks
        # np.zeros maps memory lazily: a row costs memory only up to its longest sequence.
        self.block_ids: Int32Array = np.zeros((max_num_seqs, -(-max_model_len // self.block_size)), np.int32)
        self.counts: Int32Array = np.zeros(max_num_seqs, np.int32)

    def of_slot(self, slot: int) -> Int32Array:
        """Return a copy of the block table of a slot, [counts[slot]]."""
        return self.block_ids[slot, : self.counts[slot]].copy()

    def places_of(self, slots: Int32Array | IndexArray, positions: Int32Array | IndexArray) -> npt.NDArray[np.int64]:
        """Return where tokens at some positions are in the pool: block * block_size + offset in the block, [n]."""
        blocks = self.block_ids[slots, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def fill(self, slot: int, block_ids: Int32Array) -> None:
        """Make these the block table of a slot."""
        self.block_ids[slot, : len(block_ids)] = block_ids
        self.counts[slot] = len(block_ids)


class TableColumns:
    """The live sequences in dense slots. All columns have one entry a slot and are public to read.

    A slot is live from its admission or fork to its release. `generation` counts its uses. Counters
    are int32:

    - `num_prompt_tokens`: the original prompt; survives preemption.
    - `num_tokens`: tokens of the sequence, with those that sent steps may sample at most.
    - `num_scheduled_tokens`: tokens whose keys and values the cache holds after the sent steps, at most.
    - `num_open_tokens`: of both, tokens that may not come; with all steps resolved there are none.
    - `num_known_tokens`: tokens whose values are here.

    An active slot has num_scheduled_tokens == num_tokens - 1: it decodes 1 to `allowance` tokens in every step.
    `has_allowances`: whether any slot ever had an allowance above 1. From then on the two tiers know lengths
    at different times, so the digest leaves them out.

    `groups` has the block tables of each cache group, `block_counts` their `counts`; `block_tables` and `num_blocks`
    are those of the first one.

    `grammars` has an entry for each grammar slot, None while it is empty; `grammar_slot` of a sequence is the grammar
    slot that its output follows, or `NO_GRAMMAR`. `adapters` and `adapter_slot` are the same for adapters; an adapter
    is there from the step that begins to load it.

    `encoder` has the block tables of what sequences attend to besides themselves, the output of an encoder; its
    length for each slot is `num_encoder_tokens`, 0: nothing. None: the model has no encoder.
    """

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
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_device_blocks = num_device_blocks
        self.more_pools = tuple(more_pools)
        self.groups: list[BlockTables] = []
        for pool in ((block_size, num_device_blocks), *self.more_pools):
            first_id = sum(group.num_device_blocks for group in self.groups)
            self.groups.append(BlockTables(max_num_seqs, max_model_len, pool, first_id))
        self.block_counts = [group.counts for group in self.groups]
        self.encoder_pool = encoder_pool
        self.encoder: BlockTables | None = None
        self.max_encoder_tokens = 0
        if encoder_pool is not None:
            *sizes, self.max_encoder_tokens = encoder_pool
            pool = sizes[0], sizes[1]
            self.encoder = BlockTables(max_num_seqs, self.max_encoder_tokens, pool, self.num_block_ids)
        self.num_encoder_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.live: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self.active: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self.generation: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_scheduled_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_open_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_known_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.allowance: Int32Array = np.ones(max_num_seqs, np.int32)
        self.has_allowances = False
        self.num_blocks = self.groups[0].counts
        self.block_tables = self.groups[0].block_ids
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.sampling = np.zeros(max_num_seqs, SAMPLING_ROW)
        self.num_candidates: Int32Array = self.sampling["num_candidates"]  # a view
        self.num_logprobs: Int32Array = self.sampling["num_logprobs"]  # a view
        self.token_rules = np.full(max_num_seqs, None, np.object_)  # of `TokenRules`, mostly None
        self.num_prompt_logprobs: Int32Array = np.full(max_num_seqs, NO_LOGPROBS, np.int32)
        self.cache_salt: npt.NDArray[np.uint64] = np.zeros(max_num_seqs, np.uint64)
        self.grammar_slot: Int32Array = np.full(max_num_seqs, NO_GRAMMAR, np.int32)
        self.grammars: list[Grammar | None] = [None] * num_grammar_slots
        self.adapter_slot: Int32Array = np.full(max_num_seqs, NO_ADAPTER, np.int32)
        self.adapters: list[Adapter | None] = [None] * num_adapter_slots

    @property
    def all_tables(self) -> Seq[BlockTables]:
        """The block tables of all cache groups that have some, also of fixed length."""
        return self.groups if self.encoder is None else [*self.groups, self.encoder]

    def is_current(self, slots: Int32Array | IndexArray, generations: Int32Array) -> BoolArray:
        """Return which slots still belong to the sequence that had them at that generation."""
        index = slots.astype(np.intp, copy=False)
        current: BoolArray = self.live[index] & (self.generation[index] == generations)
        return current

    @property
    def num_block_ids(self) -> int:
        """Blocks of all pools with tables that grow: their ids on the wire are 0 to this less 1."""
        return self.groups[-1].end_id

    def places_by_group(self, block_ids: Int32Array) -> list[IndexArray | slice]:
        """Return for each cache group which of `block_ids`, [n] as on the wire, are of its pool."""
        if len(self.groups) == 1:
            return [slice(None)]
        firsts = [group.first_id for group in self.groups]
        index_of = np.searchsorted(firsts, block_ids, side="right") - 1
        return [(index_of == index).nonzero()[0] for index in range(len(firsts))]

    def tokens_of(self, slot: int) -> Int32Array:
        """Return a copy of the tokens of a slot, [num_tokens], unknown ones included."""
        return self.token_ids[slot, : self.num_tokens[slot]].copy()

    def blocks_of(self, slot: int) -> Int32Array:
        """Return a copy of the block table of a slot in the first cache group, [num_blocks]."""
        return self.groups[0].of_slot(slot)

    def digest(self) -> int:
        """Return a 64-bit hash of what the scheduler writes for all live slots, so that both tiers can compare.

        It does not depend on the number of slots: the scheduler may use fewer than the executor has. Lengths are
        included until `has_allowances`.
        """
        slots = self.live.nonzero()[0]
        hasher = hashlib.blake2b(slots.astype(_INT32).tobytes(), digest_size=8)
        lengths = () if self.has_allowances else (self.num_tokens, self.num_scheduled_tokens)
        counters = (self.num_prompt_tokens, *lengths, self.num_blocks)
        sampling = self.sampling[slots]
        for column in (self.generation, *counters, self.active, *(group.counts for group in self.groups[1:])):
            hasher.update(column[slots].tobytes())
        hasher.update((sampling[_FIRST].astype(_FIRST_ROW) if _LATER else sampling).tobytes())
        hasher.update(self.cache_salt[slots].tobytes())
        for parameter in _LATER:
            if np.count_nonzero(sampling[parameter.name] != parameter.row_value):
                hasher.update(parameter.name.encode() + sampling[parameter.name].tobytes())
        for slot in slots.tolist():
            for group in self.groups:
                hasher.update(group.block_ids[slot, : group.counts[slot]].tobytes())
            if self.token_rules[slot] is not None:
                hasher.update(self.token_rules[slot].content())
        if np.count_nonzero(self.num_prompt_logprobs[slots] != NO_LOGPROBS):
            hasher.update(self.num_prompt_logprobs[slots].tobytes())
        if np.count_nonzero((grammar_slots := self.grammar_slot[slots]) != NO_GRAMMAR):
            hasher.update(b"grammar_slot" + grammar_slots.tobytes())
        if np.count_nonzero((adapter_slots := self.adapter_slot[slots]) != NO_ADAPTER):
            hasher.update(b"adapter_slot" + adapter_slots.tobytes())
        if self.encoder is not None and np.count_nonzero(lengths_of_inputs := self.num_encoder_tokens[slots]):
            hasher.update(b"encoder" + lengths_of_inputs.tobytes())
            for slot in slots.tolist():
                hasher.update(self.encoder.of_slot(slot).tobytes())
        if self.has_allowances:
            hasher.update(b"allowance" + self.allowance[slots].tobytes())
        for grammar_slot, grammar in enumerate(self.grammars):
            if grammar is not None:
                hasher.update(b"grammar" + grammar_slot.to_bytes(4, "little") + grammar.digest)
        for adapter_slot, adapter in enumerate(self.adapters):
            if adapter is not None:
                source = adapter.source.encode()
                sizes = b"".join(size.to_bytes(4, "little") for size in (adapter_slot, len(source)))
                hasher.update(b"adapter" + sizes + source + adapter.digest)
        return int.from_bytes(hasher.digest(), "little")
