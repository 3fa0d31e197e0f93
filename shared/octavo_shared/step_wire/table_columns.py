"""The columns of the batch table, to be read: who checks a delta, or compares the two tiers, needs no more.

Pure. Read next: `batch_table.py`, which writes them.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.sampling_row import SAMPLING_ROW
from octavo_shared.step_wire.step import NO_LOGPROBS, BoolArray, Int32Array
from octavo_shared.step_wire.step_layout import IndexArray
from octavo_shared.step_wire.token_rules import TokenRules

# What of a table has a value of fixed size for each slot; views of others, and what is long, are left out.
_COPIED_COLUMNS = (
    *("live", "active", "generation", "num_prompt_tokens", "num_tokens", "num_scheduled_tokens", "num_blocks"),
    *("num_known_tokens", "num_open_tokens", "allowance"),
    *("sampling", "num_prompt_logprobs", "cache_salt", "grammar_slot"),
)
_Row: TypeAlias = tuple[Int32Array, Int32Array, TokenRules | None]
_State: TypeAlias = tuple[dict[str, npt.NDArray[np.generic]], dict[int, _Row], list[Grammar | None], bool]

NO_GRAMMAR = -1


class TableColumns:
    """The live sequences in dense slots. All columns have one entry a slot and are public to read.

    A slot is live from its admission or fork to its release. `generation` counts its uses. Counters
    are int32:

    - `num_prompt_tokens`: the original prompt; survives preemption.
    - `num_tokens`: tokens of the sequence, with those that sent steps may sample at most.
    - `num_scheduled_tokens`: tokens whose keys and values the cache holds after the sent steps, at most.
    - `num_open_tokens`: of both, those that may not come; with all steps resolved there are none.
    - `num_known_tokens`: tokens whose values are here.
    - `num_blocks`: entries of `block_tables` in use; what lies beyond is garbage.

    An active slot has num_scheduled_tokens == num_tokens - 1: it decodes 1 to `allowance` tokens in every step.
    `has_allowances`: whether any slot ever had an allowance above 1. From then on lengths depend on what the two
    tiers know at different times, so the digest leaves them out.

    `grammars` has an entry a grammar slot, None while it is empty; `grammar_slot` of a sequence is which of them its
    output follows, or `NO_GRAMMAR`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_device_blocks: int,
        num_grammar_slots: int = 0,
    ) -> None:
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
        self.num_open_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_known_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.allowance: Int32Array = np.ones(max_num_seqs, np.int32)
        self.has_allowances = False
        self.num_blocks: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.block_tables: Int32Array = np.zeros((max_num_seqs, max_num_blocks), np.int32)
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.sampling = np.zeros(max_num_seqs, SAMPLING_ROW)
        self.num_candidates: Int32Array = self.sampling["num_candidates"]  # a view
        self.num_logprobs: Int32Array = self.sampling["num_logprobs"]  # a view
        self.token_rules = np.full(max_num_seqs, None, np.object_)  # of `TokenRules`, mostly None
        self.num_prompt_logprobs: Int32Array = np.full(max_num_seqs, NO_LOGPROBS, np.int32)
        self.cache_salt: npt.NDArray[np.uint64] = np.zeros(max_num_seqs, np.uint64)
        self.grammar_slot: Int32Array = np.full(max_num_seqs, NO_GRAMMAR, np.int32)
        self.grammars: list[Grammar | None] = [None] * num_grammar_slots

    def __reduce__(self) -> tuple[object, ...]:
        """Reduce to the sizes and what the live slots hold: the rest is garbage, and views are made anew."""
        columns = {name: getattr(self, name) for name in _COPIED_COLUMNS}
        slots = self.live.nonzero()[0].tolist()
        rows = {slot: (self.tokens_of(slot), self.blocks_of(slot), self.token_rules[slot]) for slot in slots}
        sizes = self.max_num_seqs, self.max_model_len, self.block_size, self.num_device_blocks, len(self.grammars)
        return type(self), sizes, (columns, rows, self.grammars, self.has_allowances)

    def __setstate__(self, state: _State) -> None:
        columns, rows, self.grammars, self.has_allowances = state
        for name, column in columns.items():
            getattr(self, name)[:] = column
        for slot, (token_ids, block_ids, rules) in rows.items():
            self.token_ids[slot, : len(token_ids)] = token_ids
            self.block_tables[slot, : len(block_ids)] = block_ids
            self.token_rules[slot] = rules

    def is_current(self, slots: Int32Array | IndexArray, generations: Int32Array) -> BoolArray:
        """Return which slots still belong to the sequence that had them at that generation."""
        index = slots.astype(np.intp, copy=False)
        current: BoolArray = self.live[index] & (self.generation[index] == generations)
        return current

    def tokens_of(self, slot: int) -> Int32Array:
        """Return a copy of the tokens of a slot, [num_tokens], unknown ones included."""
        return self.token_ids[slot, : self.num_tokens[slot]].copy()

    def blocks_of(self, slot: int) -> Int32Array:
        """Return a copy of the block table of a slot, [num_blocks]."""
        return self.block_tables[slot, : self.num_blocks[slot]].copy()
