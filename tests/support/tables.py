"""Small batch tables, deltas and comparisons for the tests of the table and its wire."""

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import (
    Adapter,
    AdapterLoad,
    Admission,
    GrammarLoad,
    Resources,
    SamplingRow,
    TableDelta,
    pairs,
)

COLUMNS = (
    "live",
    "active",
    "generation",
    "num_prompt_tokens",
    "num_tokens",
    "num_scheduled_tokens",
    "allowance",
    "num_blocks",
    "block_tables",
    "token_ids",
    "sampling",
    "cache_salt",
    "token_rules",
    "num_prompt_logprobs",
    "grammar_slot",
    "adapter_slot",
)


def small_table() -> BatchTable:
    """Return an empty table: 4 slots, 16 tokens a sequence, 4 tokens a block, 8 blocks, 3 slots of each kind."""
    return BatchTable(4, 16, 4, 8, num_grammar_slots=3, num_adapter_slots=3)


def admission(
    slot: int = 0,
    generation: int = 1,
    num_tokens: int = 3,
    blocks: tuple[int, ...] = (0,),
    num_prompt_tokens: int | None = None,
    num_computed_tokens: int = 0,
    sampling: SamplingRow | None = None,
    grammar_slot: int | None = None,
    adapter_slot: int | None = None,
) -> Admission:
    """Return an admission with tokens 100, 101, ..."""
    return Admission(
        slot=slot,
        generation=generation,
        token_ids=np.arange(100, 100 + num_tokens, dtype=np.int32),
        num_prompt_tokens=num_tokens if num_prompt_tokens is None else num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=np.array(blocks, np.int32),
        sampling=sampling or SamplingRow(),
        resources=Resources(grammar_slot, adapter_slot),
    )


def decoding_table() -> BatchTable:
    """Return a table where slot 0 decodes (3 tokens, the last one sampled) and slot 1 waits (5 tokens).

    Slot 0 follows the grammar in grammar slot 0; grammar slot 1 has one that nobody uses, grammar slot 2 is empty. The
    same is true of adapters.
    """
    table = small_table()
    decoding, waiting = (
        admission(num_tokens=2, grammar_slot=0, adapter_slot=0),
        admission(slot=1, num_tokens=5, blocks=(1, 2)),
    )
    loads = (GrammarLoad(0, Grammar(b"one")), GrammarLoad(1, Grammar(b"two")))
    adapters = (AdapterLoad(0, Adapter("one")), AdapterLoad(1, Adapter("two")))
    delta = TableDelta(
        grammar_loads=loads, adapter_loads=adapters, admissions=(decoding, waiting), prefill_chunks=pairs((0, 2))
    )
    layout = table.apply(delta)
    table.resolve(layout, np.array([42], np.int32))
    return table


def columns(table: BatchTable) -> dict[str, npt.NDArray[Any]]:
    """Return a copy of every column."""
    copies = {name: getattr(table, name).copy() for name in COLUMNS}
    copies["grammars"] = np.array([grammar.body if grammar else b"" for grammar in table.grammars])
    copies["adapters"] = np.array([adapter.source if adapter else "" for adapter in table.adapters])
    copies["token_rules"] = np.array([rules.content() if rules else b"" for rules in table.token_rules])
    return copies


def assert_columns_equal(actual: dict[str, npt.NDArray[Any]], expected: dict[str, npt.NDArray[Any]]) -> None:
    """Fail, naming the column, unless all columns are equal in all slots."""
    for name in (*COLUMNS, "grammars", "adapters"):
        assert_same(name, actual[name], expected[name])


def assert_same(name: str, actual: object, expected: object) -> None:
    """Fail, naming the value, unless two arrays or numbers are equal; ten times faster than NumPy's own."""
    assert np.array_equal(actual, expected), f"{name} is {actual}, not {expected}"  # type: ignore[arg-type]
