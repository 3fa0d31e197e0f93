"""Every delta that does not fit is refused, in one sentence, and changes nothing."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from octavo_shared.errors import InvalidStepError
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import (
    Adapter,
    AdapterLoad,
    EncoderInput,
    Fork,
    GrammarLoad,
    SamplingRow,
    TableDelta,
    pairs,
)
from octavo_shared.step_wire.token_rules import TokenRules
from tests.support.each_row import each_row
from tests.support.sampling_ranges import AT_THE_ENDS, OUT_OF_RANGE
from tests.support.tables import admission, assert_columns_equal, columns, decoding_table


def slots(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(values, np.int32)


def admitting(**changes: object) -> TableDelta:
    """Return a delta that admits slot 2, with `changes`."""
    return TableDelta(admissions=(admission(**{"slot": 2, "blocks": (5,), **changes}),))  # type: ignore[arg-type]


def loading(*grammar_slots: int) -> TableDelta:
    return TableDelta(grammar_loads=tuple(GrammarLoad(slot, Grammar(b"new")) for slot in grammar_slots))


def loading_adapters(*adapter_slots: int) -> TableDelta:
    return TableDelta(adapter_loads=tuple(AdapterLoad(slot, Adapter("new")) for slot in adapter_slots))


def forking(parent_slot: int = 0, slot: int = 3, generation: int = 1) -> TableDelta:
    return TableDelta(forks=(Fork(parent_slot, slot, generation, SamplingRow()),))


def beam_forking(parent_slot: int = 0, slot: int = 3, generation: int = 1) -> TableDelta:
    return TableDelta(beam_forks=(Fork(parent_slot, slot, generation, SamplingRow(num_candidates=2)),))


def table_at_max_model_len() -> BatchTable:
    """Return a table whose slot 0 has 15 of 16 tokens and decodes its last-but-one position."""
    table = BatchTable(max_num_seqs=4, max_model_len=16, block_size=4, num_device_blocks=8)
    entry = admission(num_tokens=15, blocks=(0, 1, 2, 3))
    layout = table.apply(TableDelta(admissions=(entry,), prefill_chunks=pairs((0, 15))))
    table.resolve(layout, slots(1))
    return table


# In the table of these tests slot 0 decodes (3 tokens, 1 block), slot 1 waits (5 tokens, 2 blocks), 2 and 3 are free.
REFUSED = {
    "release beyond the slots": (TableDelta(released_slots=slots(4)), "slot 4 is released; slots are 0 to 3"),
    "release of a negative slot": (TableDelta(released_slots=slots(-1)), "slot -1 is released; slots are 0 to 3"),
    "release of a free slot": (TableDelta(released_slots=slots(2)), "slot 2 is released but not live"),
    "release twice": (TableDelta(released_slots=slots(1, 1)), "slot 1 is released twice$"),
    "admission to a live slot": (admitting(slot=1, generation=2), "slot 1 is admitted but live"),
    "admission twice": (TableDelta(admissions=(admission(slot=2), admission(slot=2))), "slot 2 is admitted but live"),
    "admission beyond the slots": (admitting(slot=4), "slot 4 is admitted; slots are 0 to 3"),
    "admission to a negative slot": (admitting(slot=-1), "slot -1 is admitted; slots are 0 to 3"),
    "admission with an old generation": (admitting(generation=0), "slot 2 is admitted with generation 0 after 0"),
    "admission with a skipped generation": (admitting(generation=2), "slot 2 is admitted with generation 2 after 0"),
    "admission without tokens": (admitting(num_tokens=0), "slot 2 has 0 tokens; the limit is 16"),
    "admission of too many tokens": (admitting(num_tokens=17), "slot 2 has 17 tokens; the limit is 16"),
    "admission without prompt": (admitting(num_prompt_tokens=0), "slot 2 has 0 prompt tokens of 3"),
    "admission of a longer prompt than tokens": (admitting(num_prompt_tokens=4), "slot 2 has 4 prompt tokens of 3"),
    "admission with all computed": (admitting(num_computed_tokens=3), "slot 2 has 3 computed tokens of 3"),
    "admission with negative computed": (admitting(num_computed_tokens=-1), "slot 2 has -1 computed tokens of 3"),
    "admission computed beyond its blocks": (
        admitting(num_computed_tokens=1, blocks=()),
        "slot 2 has more computed tokens than its blocks hold",
    ),
    "admission with too many blocks": (
        admitting(blocks=(3, 4, 5, 6, 7)),
        "slot 2 has 5 blocks, more than a table holds",
    ),
    "admission with an unknown block": (admitting(blocks=(8,)), "slot 2 is given block 8; blocks are 0 to 7$"),
    "admission with several unknown blocks": (
        admitting(blocks=(5, 9, 8)),
        "slot 2 is given block 9; blocks are 0 to 7$",
    ),
    "admission with a negative block": (admitting(blocks=(-1,)), "slot 2 is given block -1; blocks are 0 to 7$"),
    "token for a free slot": (TableDelta(appended_tokens=pairs((2, 9))), "slot 2 is given a token but not live"),
    "token beyond the slots": (TableDelta(appended_tokens=pairs((4, 9))), "slot 4 is given a token; slots are 0 to 3"),
    "tokens beyond max_model_len": (
        TableDelta(appended_tokens=pairs(*[(1, 9)] * 12)),
        "slot 1 would be longer than max_model_len",
    ),
    "token for a slot that goes on decoding": (TableDelta(appended_tokens=pairs((0, 9))), "slot 0 cannot decode"),
    "replacement in a free slot": (
        TableDelta(replaced_blocks=pairs((2, 0, 5))),
        "slot 2 is given another block but not live",
    ),
    "replacement beyond the table": (
        TableDelta(replaced_blocks=pairs((1, 2, 5))),
        "slot 1 has no block to replace there",
    ),
    "replacement at a negative index": (
        TableDelta(replaced_blocks=pairs((1, -1, 5))),
        "slot 1 has no block to replace there",
    ),
    "replacement by an unknown block": (
        TableDelta(replaced_blocks=pairs((1, 0, 8))),
        "slot 1 is given block 8; blocks are 0 to 7$",
    ),
    "block for a free slot": (TableDelta(appended_blocks=pairs((2, 5))), "slot 2 is given a block but not live"),
    "unknown block": (TableDelta(appended_blocks=pairs((0, 5), (1, 8))), "slot 1 is given block 8; blocks are 0 to 7$"),
    "more blocks than a table holds": (
        TableDelta(appended_blocks=pairs((1, 5), (1, 6), (1, 7))),
        "slot 1 would have more blocks than a block table holds",
    ),
    "deactivation of a free slot": (TableDelta(deactivated_slots=slots(2)), "slot 2 is deactivated but not live"),
    "activation of a free slot": (TableDelta(activated_slots=slots(2)), "slot 2 is activated but not live"),
    "activation with tokens to catch up": (
        TableDelta(activated_slots=slots(1)),
        "slot 1 cannot decode: more than one token is not computed",
    ),
    "chunk of a free slot": (TableDelta(prefill_chunks=pairs((2, 1))), "slot 2 is given a prefill chunk but not live"),
    "chunk twice": (TableDelta(prefill_chunks=pairs((1, 1), (1, 1))), "slot 1 is given a prefill chunk twice$"),
    "chunk of an active slot": (TableDelta(prefill_chunks=pairs((0, 1))), "slot 0 is active and has a prefill chunk"),
    "empty chunk": (TableDelta(prefill_chunks=pairs((1, 0))), "slot 1 has an empty prefill chunk"),
    "negative chunk": (TableDelta(prefill_chunks=pairs((1, -1))), "slot 1 has an empty prefill chunk"),
    "chunk beyond the tokens": (
        TableDelta(prefill_chunks=pairs((1, 6))),
        "slot 1 would compute more tokens than it has",
    ),
    "chunk so long that its end is beyond int32": (
        TableDelta(
            admissions=(admission(slot=2, num_computed_tokens=1, blocks=(5,)),), prefill_chunks=pairs((2, 2**31 - 1))
        ),
        "slot 2 would compute more tokens than it has",
    ),
    "chunk beyond the blocks": (
        TableDelta(admissions=(admission(slot=2, num_tokens=5, blocks=(5,)),), prefill_chunks=pairs((2, 5))),
        "slot 2 has no block for its next token",
    ),
    "chunk that would sample at max_model_len": (
        TableDelta(admissions=(admission(slot=2, num_tokens=16, blocks=(4, 5, 6, 7)),), prefill_chunks=pairs((2, 16))),
        "slot 2 is at max_model_len",
    ),
    "allowance of a free slot": (TableDelta(allowances=pairs((2, 2))), "slot 2 is given an allowance but not live"),
    "allowance beyond the slots": (TableDelta(allowances=pairs((4, 2))), "slot 4 is given an allowance; slots are 0"),
    "allowance twice": (TableDelta(allowances=pairs((0, 2), (0, 1))), "slot 0 is given an allowance twice$"),
    "allowance of nothing": (TableDelta(allowances=pairs((0, 0))), "slot 0 has an allowance outside 1 to 255"),
    "allowance above a byte": (TableDelta(allowances=pairs((1, 256))), "slot 1 has an allowance outside 1 to 255"),
    "allowance of a beam slot": (
        replace(admitting(sampling=SamplingRow(num_candidates=2)), allowances=pairs((2, 2))),
        "slot 2 is given an allowance, but it is a beam slot",
    ),
    "allowance beyond the blocks": (TableDelta(allowances=pairs((0, 3))), "slot 0 has no block for its next token"),
    "allowance beyond max_model_len": (
        TableDelta(appended_blocks=pairs((0, 1), (0, 2), (0, 3)), allowances=pairs((0, 14))),
        "slot 0 is at max_model_len",
    ),
    "fork of a slot with an allowance": (
        replace(forking(), allowances=pairs((0, 2))),
        "slot 0 is forked to sample, but has an allowance above 1",
    ),
    "fork of a free slot": (forking(parent_slot=2), "slot 2 is forked but has no sample row"),
    "fork of a negative slot": (forking(parent_slot=-1), "slot -1 is forked; slots are 0 to 3"),
    "fork of a slot beyond int32": (forking(parent_slot=2**31), f"slot {2**31} is forked; slots are 0 to 3"),
    "fork of a slot without a sample row": (
        forking(parent_slot=1),
        "slot 1 is forked but has no sample row in this step",
    ),
    "fork into a live slot": (forking(slot=1, generation=2), "slot 1 is forked into but live"),
    "fork into itself": (forking(slot=0, generation=2), "slot 0 is forked into but live"),
    "fork beyond the slots": (forking(slot=4), "slot 4 is forked into; slots are 0 to 3"),
    "fork with an old generation": (forking(generation=0), "slot 3 is forked into with generation 0 after 0"),
    "fork that asks for candidates": (
        TableDelta(forks=(Fork(0, 3, 1, SamplingRow(num_candidates=2)),)),
        "slot 3 is forked into to sample, but it asks for candidates",
    ),
    "fork of a beam slot": (
        TableDelta(
            admissions=(admission(slot=2, blocks=(5,), sampling=SamplingRow(num_candidates=2)),),
            prefill_chunks=pairs((2, 3)),
            forks=(Fork(2, 3, 1, SamplingRow()),),
        ),
        "slot 2 is forked to sample, but it is a beam slot",
    ),
    "beam fork of a free slot": (beam_forking(parent_slot=2), "slot 2 is forked but not live"),
    "beam fork of a negative slot": (beam_forking(parent_slot=-1), "slot -1 is forked; slots are 0 to 3"),
    "beam fork of a slot released in the same step": (
        TableDelta(released_slots=slots(1), beam_forks=(Fork(1, 3, 1, SamplingRow()),)),
        "slot 1 is forked but not live",
    ),
    "beam fork into a live slot": (beam_forking(slot=1, generation=2), "slot 1 is forked into but live"),
    "beam fork into itself": (beam_forking(slot=0, generation=2), "slot 0 is forked into but live"),
    "beam fork beyond the slots": (beam_forking(slot=4), "slot 4 is forked into; slots are 0 to 3"),
    "beam fork with an old generation": (beam_forking(generation=0), "slot 3 is forked into with generation 0 after 0"),
    "two beam forks into one slot": (
        TableDelta(beam_forks=(Fork(0, 3, 1, SamplingRow()), Fork(0, 3, 1, SamplingRow()))),
        "slot 3 is forked into but live",
    ),
    "activation of a beam that has more to compute": (
        TableDelta(
            admissions=(admission(slot=2, num_tokens=4, blocks=(5,), num_computed_tokens=3),),
            beam_forks=(Fork(2, 3, 1, SamplingRow(num_candidates=2)),),
            appended_tokens=pairs((3, 9)),
            activated_slots=slots(3),
        ),
        "slot 3 cannot decode: more than one token is not computed",
    ),
    "two forks into one slot": (
        TableDelta(forks=(Fork(0, 3, 1, SamplingRow()), Fork(0, 3, 1, SamplingRow()))),
        "slot 3 is forked into but live",
    ),
    "load into a grammar slot that is not empty": (loading(1), "grammar slot 1 is loaded into but not empty"),
    "load twice": (loading(2, 2), "grammar slot 2 is loaded into but not empty"),
    "load beyond the grammar slots": (loading(3), "grammar slot 3 is loaded into; there are 3 slots"),
    "drop of a grammar that a slot uses": (
        TableDelta(grammar_drops=(0,)),
        "grammar slot 0 is dropped but slot 0 uses it",
    ),
    "drop of an empty grammar slot": (TableDelta(grammar_drops=(2,)), "grammar slot 2 is dropped but empty"),
    "drop twice": (TableDelta(grammar_drops=(1, 1)), "grammar slot 1 is dropped but empty"),
    "drop of a negative grammar slot": (
        TableDelta(grammar_drops=(-1,)),
        "grammar slot -1 is dropped; there are 3 slots",
    ),
    "admission with an empty grammar slot": (admitting(grammar_slot=2), "grammar slot 2 is used by slot 2 but empty"),
    "admission with a dropped grammar": (
        replace(admitting(grammar_slot=1), grammar_drops=(1,)),
        "grammar slot 1 is used by slot 2 but empty",
    ),
    "admission with an unknown grammar slot": (
        admitting(grammar_slot=3),
        "grammar slot 3 is used by slot 2; there are 3 slots",
    ),
    "load into an adapter slot that is not empty": (
        loading_adapters(1),
        "adapter slot 1 is loaded into but not empty",
    ),
    "load beyond the adapter slots": (loading_adapters(3), "adapter slot 3 is loaded into; there are 3 slots"),
    "drop of an adapter that a slot uses": (
        TableDelta(adapter_drops=(0,)),
        "adapter slot 0 is dropped but slot 0 uses it",
    ),
    "drop of an empty adapter slot": (TableDelta(adapter_drops=(2,)), "adapter slot 2 is dropped but empty"),
    "admission with an empty adapter slot": (admitting(adapter_slot=2), "adapter slot 2 is used by slot 2 but empty"),
    "admission with a dropped adapter": (
        replace(admitting(adapter_slot=1), adapter_drops=(1,)),
        "adapter slot 1 is used by slot 2 but empty",
    ),
}


@each_row(*REFUSED)
def test_refused_delta_names_slot_and_rule_and_changes_nothing(case: str) -> None:
    delta, message = REFUSED[case]
    table = decoding_table()
    before, digest = columns(table), table.digest()

    with pytest.raises(InvalidStepError, match=f"^{message}"):
        table.apply(delta)

    assert_columns_equal(columns(table), before)
    assert table.digest() == digest


def attending(num_tokens: int, blocks: tuple[int, ...], **values: Any) -> TableDelta:
    """Return a delta that admits slot 0 with an input of the encoder, whose blocks are 8 to 12."""
    given = EncoderInput(num_tokens, np.array(blocks, np.int32), **values)
    return TableDelta(admissions=(replace(admission(), encoder_input=given),))


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        (attending(0, ()), "slot 0 has 0 encoder tokens; it may have 1 to 10"),
        (attending(11, (8, 9, 10)), "slot 0 has 11 encoder tokens; it may have 1 to 10"),
        (attending(5, (8,)), "slot 0 has 1 encoder block; its input takes 2"),
        (attending(5, (8, 13)), "slot 0 has encoder block 13; encoder blocks are 8 to 12"),
        (attending(5, (7, 8)), "slot 0 has encoder block 7; encoder blocks are 8 to 12"),
        (attending(5, (8, 8)), "slot 0 has encoder block 8 twice"),
        (attending(5, (8, 9), token_ids=slots(1, 2)), "slot 0 has 2 tokens for 5 encoder tokens"),
        (attending(1, (8,), features=np.array([np.nan], np.float32)), "slot 0 has features that are not finite"),
        (TableDelta(admissions=(admission(blocks=(8,)),)), "slot 0 is given block 8; blocks are 0 to 7"),
    ],
)
def test_inputs_of_an_encoder_that_cannot_be_are_refused(delta: TableDelta, message: str) -> None:
    table = BatchTable(4, 16, 4, 8, encoder_pool=(4, 5, 10))
    with pytest.raises(InvalidStepError, match=f"^{re.escape(message)}"):
        table.apply(delta)
    with pytest.raises(InvalidStepError, match=r"^slot 0 has an encoder input; the model has no encoder"):
        BatchTable(4, 16, 4, 8).apply(attending(5, (8, 9)))


def test_a_fork_has_its_parents_encoder_table_and_the_digest_has_both() -> None:
    table = BatchTable(4, 16, 4, 8, encoder_pool=(4, 5, 10))
    table.apply(replace(attending(6, (12, 9)), prefill_chunks=pairs((0, 3))))
    before = table.digest()
    assert table.encoder is not None
    table.apply(forking(0, 2))
    assert [list(table.encoder.of_slot(slot)) for slot in (0, 2)] == [[4, 1]] * 2
    assert list(table.num_encoder_tokens) == [6, 0, 6, 0]
    table.num_encoder_tokens[0] = 5
    assert table.digest() != before
    table.apply(replace(TableDelta(released_slots=slots(0, 2)), admissions=(admission(generation=2),)))
    assert table.num_encoder_tokens[0] == table.encoder.counts[0] == 0


@each_row(*product([SamplingRow(**row) for row in OUT_OF_RANGE], [2, 3]))
def test_sampling_params_out_of_range_are_refused_in_admissions_and_forks(sampling: SamplingRow, slot: int) -> None:
    table = decoding_table()
    before = columns(table)
    forks = TableDelta(forks=(Fork(0, 3, 1, sampling),))

    with pytest.raises(InvalidStepError, match=f"^slot {slot} has sampling parameters out of range"):
        table.apply(admitting(sampling=sampling) if slot == 2 else forks)

    assert_columns_equal(columns(table), before)


@each_row(*[SamplingRow(**row) for row in AT_THE_ENDS])
def test_sampling_params_at_the_ends_of_their_ranges_are_taken(sampling: SamplingRow) -> None:
    table = decoding_table()

    table.apply(admitting(sampling=sampling))

    assert table.sampling[2].item() == pytest.approx(sampling.as_tuple())


def ids(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(values, np.int32)


@each_row(
    ({"num_prompt_logprobs": -2}, "slot 2 asks for -2 alternatives of its prompt"),
    ({"num_prompt_logprobs": 2**31}, f"slot 2 asks for {2**31} alternatives of its prompt"),
    (
        {"token_rules": TokenRules(biased_token_ids=ids(1, 2), biases=np.ones(1, np.float32))},
        "slot 2 has 1 biases for 2 biased tokens",
    ),
    (
        {"token_rules": TokenRules(biased_token_ids=ids(1), biases=np.array([np.inf], np.float32))},
        "slot 2 has a bias that is not a finite number",
    ),
    (
        {"token_rules": TokenRules(biased_token_ids=ids(4, 1, 4), biases=np.ones(3, np.float32))},
        "slot 2 has two biases for token 4",
    ),
)
def test_rules_that_cannot_be_applied_are_refused(changes: dict[str, object], message: str) -> None:
    table = decoding_table()
    before = columns(table)
    entry = replace(admission(slot=2, blocks=(5,)), **changes)  # type: ignore[arg-type]

    with pytest.raises(InvalidStepError, match=f"^{message}"):
        table.apply(TableDelta(admissions=(entry,)))

    assert_columns_equal(columns(table), before)


def test_a_beam_that_rests_cannot_be_activated_without_a_token() -> None:
    table = decoding_table()
    beam = admission(slot=2, blocks=(5,), sampling=SamplingRow(num_candidates=2))
    table.apply(TableDelta(admissions=(beam,), prefill_chunks=pairs((2, 3))))

    with pytest.raises(InvalidStepError, match="slot 2 cannot decode"):
        table.apply(TableDelta(activated_slots=slots(2)))


def test_what_comes_before_the_refused_part_is_not_applied_either() -> None:
    table = decoding_table()
    before = columns(table)
    delta = TableDelta(
        released_slots=slots(1),
        admissions=(admission(slot=1, generation=2), admission(slot=2)),
        appended_blocks=pairs((0, 6)),
        prefill_chunks=pairs((2, 3)),
        forks=(Fork(1, 3, 1, SamplingRow()),),
    )

    with pytest.raises(InvalidStepError, match="slot 1 is forked but has no sample row"):
        table.apply(delta)

    assert_columns_equal(columns(table), before)


def test_a_decode_without_room_in_its_blocks_is_refused() -> None:
    table = decoding_table()
    table.apply(TableDelta())
    table.apply(TableDelta())  # positions 2 and 3 fill the only block
    before = columns(table)

    with pytest.raises(InvalidStepError, match="slot 0 has no block for its next token"):
        table.apply(TableDelta())

    assert_columns_equal(columns(table), before)


def test_a_decode_at_max_model_len_is_refused_unless_it_is_held_back() -> None:
    table = table_at_max_model_len()
    before = columns(table)

    with pytest.raises(InvalidStepError, match="slot 0 is at max_model_len"):
        table.apply(TableDelta())

    assert_columns_equal(columns(table), before)
    assert table.apply(TableDelta(deactivated_slots=slots(0))).slots.tolist() == []


def test_a_chunk_below_max_model_len_is_accepted() -> None:
    table = decoding_table()
    entry = admission(slot=2, num_tokens=16, blocks=(4, 5, 6, 7))

    layout = table.apply(TableDelta(admissions=(entry,), prefill_chunks=pairs((2, 15))))

    assert layout.slots.tolist() == [0, 2]


def test_a_grammar_may_be_dropped_with_its_last_user_and_another_loaded_in_its_place_in_one_delta() -> None:
    table = decoding_table()
    delta = replace(
        admitting(grammar_slot=0), released_slots=slots(0), grammar_drops=(0,), grammar_loads=loading(0).grammar_loads
    )

    table.apply(delta)

    assert table.grammars == [Grammar(b"new"), Grammar(b"two"), None]
    assert table.grammar_slot[2] == 0


def test_a_slot_may_be_released_and_given_out_in_one_delta() -> None:
    table = decoding_table()

    table.apply(TableDelta(released_slots=slots(1), admissions=(admission(slot=1, generation=2),)))

    assert table.generation[1] == 2


def test_a_released_slot_cannot_be_used_in_the_same_delta() -> None:
    with pytest.raises(InvalidStepError, match="slot 1 is given a prefill chunk but not live"):
        decoding_table().apply(TableDelta(released_slots=slots(1), prefill_chunks=pairs((1, 1))))


OPEN = {
    "a fork": (forking(), "slot 0 is forked while a step with its allowance is not resolved"),
    "a fork of beams": (beam_forking(), "slot 0 is forked while a step with its allowance is not resolved"),
    "a token": (TableDelta(appended_tokens=pairs((0, 9))), "slot 0 is given a token behind others that may not come"),
    "a chunk": (
        TableDelta(deactivated_slots=slots(0), prefill_chunks=pairs((0, 1))),
        "slot 0 has a prefill chunk behind tokens that may not come",
    ),
}


@each_row(*OPEN)
def test_nothing_hangs_on_the_length_of_a_slot_that_is_not_resolved(what: str) -> None:
    delta, message = OPEN[what]
    table = decoding_table()
    layout = table.apply(TableDelta(appended_blocks=pairs((0, 5), (0, 6)), allowances=pairs((0, 2))))
    one_again = TableDelta(allowances=pairs((0, 1)))

    with pytest.raises(InvalidStepError, match=message):
        table.apply(replace(delta, allowances=one_again.allowances))

    table.resolve(layout, slots(50), np.array([1], np.uint8))
    if delta.forks:
        table.apply(replace(delta, allowances=one_again.allowances))
