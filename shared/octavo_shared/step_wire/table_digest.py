"""One number for all that the scheduler writes into a batch table, so that both tiers can compare."""

import hashlib

import numpy as np

from octavo.values.sampling_params_table import NO_LOGPROBS, ROW_PARAMS
from octavo_shared.step_wire.sampling_row import SAMPLING_ROW
from octavo_shared.step_wire.table_columns import NO_GRAMMAR, TableColumns

# The columns of release 0.1.0 are always in the digest, a later one only where it has a value, so that a peer of
# another release gets the same number until the column is used.
_NUM_FIRST = 13
_FIRST = [parameter.name for parameter in ROW_PARAMS[:_NUM_FIRST]]
_FIRST_ROW = np.dtype([(name, SAMPLING_ROW[name]) for name in _FIRST])
_LATER = ROW_PARAMS[_NUM_FIRST:]
_INT32 = np.dtype("<i4")


def digest_of(table: TableColumns) -> int:
    """Return a 64-bit hash of the columns that the scheduler writes, of all live slots.

    Lengths are included until `TableColumns.has_allowances`.
    """
    slots = table.live.nonzero()[0]
    hasher = hashlib.blake2b(slots.astype(_INT32).tobytes(), digest_size=8)
    lengths = () if table.has_allowances else (table.num_tokens, table.num_scheduled_tokens)
    counters = (table.num_prompt_tokens, *lengths, table.num_blocks)
    sampling = table.sampling[slots]
    for column in (table.generation, *counters, table.active, *(group.counts for group in table.groups[1:])):
        hasher.update(column[slots].tobytes())
    hasher.update((sampling[_FIRST].astype(_FIRST_ROW) if _LATER else sampling).tobytes())
    hasher.update(table.cache_salt[slots].tobytes())
    for parameter in _LATER:
        if np.count_nonzero(sampling[parameter.name] != parameter.row_value):
            hasher.update(parameter.name.encode() + sampling[parameter.name].tobytes())
    for slot in slots.tolist():
        for group in table.groups:
            hasher.update(group.block_ids[slot, : group.counts[slot]].tobytes())
        if table.token_rules[slot] is not None:
            hasher.update(table.token_rules[slot].content())
    if np.count_nonzero(table.num_prompt_logprobs[slots] != NO_LOGPROBS):
        hasher.update(table.num_prompt_logprobs[slots].tobytes())
    if np.count_nonzero((grammar_slots := table.grammar_slot[slots]) != NO_GRAMMAR):
        hasher.update(b"grammar_slot" + grammar_slots.tobytes())
    if table.has_allowances:
        hasher.update(b"allowance" + table.allowance[slots].tobytes())
    for grammar_slot, grammar in enumerate(table.grammars):
        if grammar is not None:
            hasher.update(b"grammar" + grammar_slot.to_bytes(4, "little") + grammar.digest)
    return int.from_bytes(hasher.digest(), "little")
