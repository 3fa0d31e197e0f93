"""One number for all that the scheduler writes into a batch table, so that both tiers can compare."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from shared.step import NO_LOGPROBS

if TYPE_CHECKING:
    from shared.batch_table import BatchTable


def digest_of(table: BatchTable) -> int:
    """Return a 64-bit hash of the columns that the scheduler writes, of all live slots."""
    slots = np.flatnonzero(table.live)
    hasher = hashlib.blake2b(slots.astype("<i4").tobytes(), digest_size=8)
    counters = (table.num_prompt_tokens, table.num_tokens, table.num_scheduled_tokens, table.num_blocks)
    for column in (table.generation, *counters, table.active, table.sampling, table.cache_salt):
        hasher.update(column[slots].tobytes())
    for slot in slots.tolist():
        hasher.update(table.block_tables[slot, : table.num_blocks[slot]].tobytes())
        if table.token_rules[slot] is not None:
            hasher.update(table.token_rules[slot].content())
    if (table.num_prompt_logprobs[slots] != NO_LOGPROBS).any():
        hasher.update(table.num_prompt_logprobs[slots].tobytes())
    return int.from_bytes(hasher.digest(), "little")
