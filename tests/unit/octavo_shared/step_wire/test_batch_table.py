"""What deltas and samples do to the batch table."""

from dataclasses import replace

import numpy as np

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import (
    NO_LOGPROBS,
    UNKNOWN_TOKEN,
    Adapter,
    AdapterLoad,
    Admission,
    Fork,
    GrammarLoad,
    Resources,
    SamplingRow,
    TableDelta,
    no_slots,
    pairs,
)
from octavo_shared.step_wire.token_rules import TokenRules
from tests.support.each_row import each_row
from tests.support.tables import admission, decoding_table, small_table


def slots(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(values, np.int32)


def test_a_new_table_is_empty() -> None:
    table = small_table()

    layout = table.apply(TableDelta())

    assert not table.live.any()
    assert layout.num_tokens == 0
    assert table.resolve(layout, no_slots()).tolist() == []


def test_an_admission_fills_its_slot_and_waits() -> None:
    table = small_table()
    sampling = SamplingRow(temperature=0.5, top_k=3, seed=2**63, num_logprobs=0)

    table.apply(TableDelta(admissions=(admission(slot=2, num_tokens=5, blocks=(7, 3), sampling=sampling),)))

    assert table.live.tolist() == [False, False, True, False]
    assert not table.active.any()
    assert table.tokens_of(2).tolist() == [100, 101, 102, 103, 104]
    assert table.blocks_of(2).tolist() == [7, 3]
    assert (table.num_scheduled_tokens[2], table.num_prompt_tokens[2], table.generation[2]) == (0, 5, 1)
    assert table.sampling[2].tolist() == sampling.as_tuple()


def test_a_chunk_that_ends_before_the_end_samples_nothing() -> None:
    table = small_table()

    layout = table.apply(TableDelta(admissions=(admission(num_tokens=5, blocks=(0, 1)),), prefill_chunks=pairs((0, 4))))

    assert (layout.starts.tolist(), layout.lengths.tolist()) == ([0], [4])
    assert layout.sample_slots.tolist() == []
    assert not table.active[0]
    assert table.num_scheduled_tokens[0] == 4


def test_a_chunk_that_reaches_the_end_samples_and_activates() -> None:
    table = small_table()

    layout = table.apply(TableDelta(admissions=(admission(),), prefill_chunks=pairs((0, 3))))

    assert (layout.sample_rows.tolist(), layout.sample_slots.tolist()) == ([0], [0])
    assert layout.sample_positions.tolist() == [3]
    assert table.active[0]
    assert table.tokens_of(0).tolist() == [100, 101, 102, UNKNOWN_TOKEN]


def test_computed_tokens_of_an_admission_are_not_computed_again() -> None:
    table = small_table()
    cached = admission(num_tokens=5, blocks=(0, 1), num_computed_tokens=4)

    layout = table.apply(TableDelta(admissions=(cached,), prefill_chunks=pairs((0, 1))))

    assert (layout.starts.tolist(), layout.lengths.tolist()) == ([4], [1])


def test_every_active_slot_decodes_before_the_chunks() -> None:
    table = decoding_table()

    layout = table.apply(TableDelta(prefill_chunks=pairs((1, 5))))

    assert layout.slots.tolist() == [0, 1]
    assert layout.starts.tolist() == [2, 0]
    assert layout.lengths.tolist() == [1, 5]
    assert layout.num_tokens == 6
    assert layout.sample_positions.tolist() == [3, 5]


def test_chunks_keep_their_order() -> None:
    table = small_table()
    entries = (admission(slot=0), admission(slot=1, blocks=(1,)))

    layout = table.apply(TableDelta(admissions=entries, prefill_chunks=pairs((1, 3), (0, 2))))

    assert layout.slots.tolist() == [1, 0]
    assert layout.sample_rows.tolist() == [0]


def test_a_deactivated_slot_rests_and_an_activated_one_goes_on_where_it_was() -> None:
    table = decoding_table()

    resting = table.apply(TableDelta(deactivated_slots=slots(0)))
    going_on = table.apply(TableDelta(activated_slots=slots(0)))

    assert resting.slots.tolist() == []
    assert (going_on.slots.tolist(), going_on.starts.tolist()) == ([0], [2])


def test_an_appended_token_is_known_at_once() -> None:
    table = decoding_table()

    table.apply(TableDelta(appended_tokens=pairs((1, 55), (1, 56)), deactivated_slots=slots(0)))

    assert table.tokens_of(1).tolist() == [100, 101, 102, 103, 104, 55, 56]


def test_appended_blocks_keep_their_order_also_twice_for_one_slot() -> None:
    table = decoding_table()

    table.apply(TableDelta(appended_blocks=pairs((0, 5), (1, 6), (0, 7))))

    assert table.blocks_of(0).tolist() == [0, 5, 7]
    assert table.blocks_of(1).tolist() == [1, 2, 6]


def test_a_replaced_block_leaves_its_neighbours() -> None:
    table = decoding_table()

    table.apply(TableDelta(replaced_blocks=pairs((1, 1, 6))))

    assert table.blocks_of(1).tolist() == [1, 6]


def test_a_shorter_successor_has_only_its_own_blocks() -> None:
    table = decoding_table()

    table.apply(TableDelta(released_slots=slots(1), admissions=(admission(slot=1, generation=2, blocks=(5,)),)))

    assert table.blocks_of(1).tolist() == [5]


def test_a_released_slot_runs_no_more() -> None:
    table = decoding_table()

    layout = table.apply(TableDelta(released_slots=slots(0)))

    assert layout.slots.tolist() == []
    assert not table.live[0]


def test_a_fork_shares_blocks_and_gets_its_own_token_from_the_parents_row() -> None:
    table = decoding_table()
    fork = Fork(parent_slot=0, slot=3, generation=1, sampling=SamplingRow(seed=9, output_index=1))

    layout = table.apply(TableDelta(forks=(fork,)))
    table.resolve(layout, slots(50, 60))

    assert (layout.slots.tolist(), layout.sample_rows.tolist(), layout.sample_slots.tolist()) == ([0], [0, 0], [0, 3])
    assert table.blocks_of(3).tolist() == table.blocks_of(0).tolist()
    assert table.tokens_of(0).tolist() == [100, 101, 42, 50]
    assert table.tokens_of(3).tolist() == [100, 101, 42, 60]
    assert table.active[3]
    assert table.sampling[3]["output_index"] == 1


CHILD = Fork(parent_slot=0, slot=3, generation=1, sampling=SamplingRow())


@each_row(TableDelta(forks=(CHILD,)), TableDelta(beam_forks=(CHILD,)))
def test_a_fork_has_the_salt_the_rules_and_the_slots_of_its_parent_and_answers_no_prompt(delta: TableDelta) -> None:
    table, rules = small_table(), TokenRules(banned_token_ids=slots(7))
    parent = admission(num_tokens=2)
    parent.cache_salt, parent.token_rules, parent.num_prompt_logprobs, parent.resources = 5, rules, 1, Resources(2, 1)
    loads = (GrammarLoad(2, Grammar(b"one")),)
    adapters = (AdapterLoad(1, Adapter("one")),)
    loaded = TableDelta(grammar_loads=loads, adapter_loads=adapters)
    table.apply(replace(loaded, admissions=(parent,), prefill_chunks=pairs((0, 2))))

    table.apply(delta)

    assert table.cache_salt[3] == 5
    assert table.token_rules[3] is rules
    assert (table.grammar_slot[3], table.adapter_slot[3]) == (2, 1)
    assert table.num_prompt_logprobs[3] == NO_LOGPROBS


def test_one_parent_may_fork_twice_in_one_step() -> None:
    table = decoding_table()
    forks = (Fork(0, 2, 1, SamplingRow()), Fork(0, 3, 1, SamplingRow()))

    layout = table.apply(TableDelta(forks=forks))

    assert layout.sample_rows.tolist() == [0, 0, 0]
    assert layout.sample_slots.tolist() == [0, 2, 3]


def test_a_fork_after_a_chunk_uses_the_chunks_row() -> None:
    table = decoding_table()

    layout = table.apply(TableDelta(prefill_chunks=pairs((1, 5)), forks=(Fork(1, 3, 1, SamplingRow()),)))

    assert layout.sample_rows.tolist() == [0, 1, 1]
    assert layout.sample_slots.tolist() == [0, 1, 3]


def test_tokens_recorded_late_land_at_their_positions() -> None:
    table = decoding_table()
    first, second = table.apply(TableDelta()), table.apply(TableDelta(appended_blocks=pairs((0, 5))))

    table.resolve(first, slots(50))
    table.resolve(second, slots(51))

    assert table.tokens_of(0).tolist() == [100, 101, 42, 50, 51]


def test_a_token_of_a_released_slot_is_dropped() -> None:
    table = decoding_table()
    layout = table.apply(TableDelta())
    table.apply(TableDelta(released_slots=slots(0)))

    assert table.resolve(layout, slots(50)).tolist() == [False]


def test_a_token_of_the_slots_last_user_does_not_reach_the_next_one() -> None:
    table = decoding_table()
    layout = table.apply(TableDelta(prefill_chunks=pairs((1, 5))))
    table.apply(TableDelta(released_slots=slots(0), admissions=(admission(slot=0, generation=2, num_tokens=8),)))

    assert table.resolve(layout, slots(50, 51)).tolist() == [False, True]
    assert table.tokens_of(0).tolist() == list(range(100, 108))
    assert table.tokens_of(1)[5] == 51


def test_views_are_copies() -> None:
    table = decoding_table()

    table.tokens_of(0)[:] = 0
    table.blocks_of(0)[:] = 6

    assert table.tokens_of(0).tolist() == [100, 101, 42]
    assert table.blocks_of(0).tolist() == [0]


@each_row(
    TableDelta(released_slots=slots(1)),
    TableDelta(appended_blocks=pairs((1, 5))),
    TableDelta(replaced_blocks=pairs((1, 0, 5))),
    TableDelta(appended_tokens=pairs((1, 5))),
    TableDelta(deactivated_slots=slots(0)),
    TableDelta(prefill_chunks=pairs((1, 1))),
    TableDelta(admissions=(admission(slot=2),)),
    TableDelta(forks=(Fork(0, 3, 1, SamplingRow()),)),
    TableDelta(grammar_drops=(1,)),
    TableDelta(grammar_loads=(GrammarLoad(2, Grammar(b"one")),)),
    TableDelta(grammar_drops=(1,), grammar_loads=(GrammarLoad(1, Grammar(b"other")),)),
    TableDelta(adapter_drops=(1,)),
    TableDelta(adapter_loads=(AdapterLoad(2, Adapter("one")),)),
    TableDelta(adapter_drops=(1,), adapter_loads=(AdapterLoad(1, Adapter("other")),)),
    TableDelta(adapter_drops=(1,), adapter_loads=(AdapterLoad(1, Adapter("two", bytes(32))),)),
)
def test_digest_differs_after_any_change(delta: TableDelta) -> None:
    changed, unchanged = decoding_table(), decoding_table()

    changed.apply(delta)
    unchanged.apply(TableDelta())

    assert changed.digest() != unchanged.digest()


@each_row(
    admission(slot=1),
    admission(num_prompt_tokens=2),
    admission(num_computed_tokens=1),
    admission(blocks=(1,)),
    admission(sampling=SamplingRow(seed=1)),
    replace(admission(), cache_salt=5),
    replace(admission(), token_rules=TokenRules(banned_token_ids=slots(7))),
    replace(admission(), num_prompt_logprobs=0),
    replace(admission(), resources=Resources(0)),
    replace(admission(), resources=Resources(None, 0)),
)
def test_digest_covers_each_part_of_an_admission(entry: Admission) -> None:
    table, other = small_table(), small_table()
    for loaded in (table, other):
        adapters = (AdapterLoad(0, Adapter("one")),)
        loaded.apply(TableDelta(grammar_loads=(GrammarLoad(0, Grammar(b"one")),), adapter_loads=adapters))

    table.apply(TableDelta(admissions=(admission(),)))
    other.apply(TableDelta(admissions=(entry,)))

    assert table.digest() != other.digest()


def test_digest_ignores_tokens_which_the_scheduler_learns_late() -> None:
    table, other = decoding_table(), decoding_table()
    layout = table.apply(TableDelta())
    other.apply(TableDelta())

    table.resolve(layout, slots(50))

    assert table.digest() == other.digest()


def test_digest_ignores_what_former_users_left_behind() -> None:
    used, fresh = small_table(), small_table()
    used.apply(TableDelta(admissions=(admission(slot=3, num_tokens=9, blocks=(4, 5, 6)),)))
    used.apply(TableDelta(released_slots=slots(3)))

    assert used.digest() == fresh.digest()


def test_digest_is_equal_in_tables_with_more_slots() -> None:
    small, large = small_table(), BatchTable(32, max_model_len=64, block_size=4, num_device_blocks=8)

    for table in (small, large):
        table.apply(TableDelta(admissions=(admission(slot=2),), prefill_chunks=pairs((2, 3))))

    assert small.digest() == large.digest()


def test_a_table_has_room_for_the_last_partial_block() -> None:
    assert BatchTable(1, max_model_len=9, block_size=4, num_device_blocks=3).block_tables.shape == (1, 3)


# Beams. In a beam table slot 0 is a beam slot whose prompt of 3 tokens was computed: it rests.

BEAM = SamplingRow(num_candidates=4)


def beam_table() -> BatchTable:
    table = small_table()
    table.apply(TableDelta(admissions=(admission(sampling=BEAM),), prefill_chunks=pairs((0, 3))))
    return table


def chosen(*appended_tokens: tuple[int, int], beam_forks: tuple[Fork, ...] = ()) -> TableDelta:
    """Append the tokens that the scheduler chose and let their slots decode."""
    activated = slots(*(slot for slot, _ in appended_tokens))
    return TableDelta(beam_forks=beam_forks, appended_tokens=pairs(*appended_tokens), activated_slots=activated)


def test_a_beam_row_samples_no_token_and_its_slot_rests() -> None:
    table = small_table()

    layout = table.apply(TableDelta(admissions=(admission(sampling=BEAM),), prefill_chunks=pairs((0, 3))))

    assert (layout.sample_slots.tolist(), layout.sample_positions.tolist()) == ([0], [3])
    assert layout.num_candidates is not None
    assert layout.num_candidates.tolist() == [4]
    assert (table.num_tokens[0], table.num_scheduled_tokens[0], table.active[0]) == (3, 3, False)
    assert table.apply(TableDelta()).slots.tolist() == []


def test_the_result_of_a_beam_row_is_current_but_not_recorded() -> None:
    table = beam_table()
    layout = table.apply(chosen((0, 55)))

    current = table.resolve(layout, slots(UNKNOWN_TOKEN))

    assert current.tolist() == [True]
    assert table.tokens_of(0).tolist() == [100, 101, 102, 55]
    assert table.token_ids[0, 4] == 0


def test_a_beam_decodes_the_token_that_was_chosen_and_rests_again() -> None:
    table = beam_table()

    layout = table.apply(chosen((0, 55)))

    assert (layout.num_decodes, layout.starts.tolist(), layout.sample_positions.tolist()) == (1, [3], [4])
    assert table.tokens_of(0).tolist() == [100, 101, 102, 55]
    assert (table.num_scheduled_tokens[0], table.active[0]) == (4, False)


def test_a_beam_fork_copies_its_parent_as_it_is_before_the_chosen_tokens() -> None:
    table = beam_table()
    children = (Fork(0, 2, 1, BEAM), Fork(0, 3, 1, SamplingRow(num_candidates=4, output_index=1)))

    layout = table.apply(chosen((0, 55), (2, 66), beam_forks=children))

    assert (layout.slots.tolist(), layout.sample_slots.tolist()) == ([0, 2], [0, 2])
    assert table.tokens_of(0).tolist() == [100, 101, 102, 55]
    assert table.tokens_of(2).tolist() == [100, 101, 102, 66]
    assert table.tokens_of(3).tolist() == [100, 101, 102]
    assert table.blocks_of(3).tolist() == table.blocks_of(0).tolist()
    assert table.live[3]
    assert not table.active[3]
    assert table.sampling[3]["output_index"] == 1


def test_a_beam_fork_takes_the_slot_that_a_pruned_beam_left_in_the_same_step() -> None:
    table = beam_table()
    table.apply(chosen((0, 55), (1, 56), beam_forks=(Fork(0, 1, 1, BEAM),)))
    delta = TableDelta(
        released_slots=slots(1),
        beam_forks=(Fork(0, 1, 2, BEAM),),
        replaced_blocks=pairs((1, 0, 5)),
        appended_tokens=pairs((0, 57), (1, 58)),
        appended_blocks=pairs((0, 6), (1, 7)),
        activated_slots=slots(0, 1),
    )

    layout = table.apply(delta)

    assert layout.slots.tolist() == [0, 1]
    assert table.tokens_of(1).tolist() == [100, 101, 102, 55, 58]
    assert (table.blocks_of(0).tolist(), table.blocks_of(1).tolist()) == ([0, 6], [5, 7])


def test_a_child_may_be_forked_in_the_step_that_makes_it() -> None:
    table = beam_table()

    table.apply(chosen((3, 66), beam_forks=(Fork(0, 2, 1, BEAM), Fork(2, 3, 1, BEAM))))

    assert table.tokens_of(3).tolist() == [100, 101, 102, 66]


def test_beams_and_sampled_rows_mix() -> None:
    table = beam_table()
    sampled = admission(slot=1, blocks=(1,))
    fork = Fork(1, 2, 1, SamplingRow(output_index=1))
    delta = TableDelta(
        admissions=(sampled,),
        appended_tokens=pairs((0, 55)),
        activated_slots=slots(0),
        prefill_chunks=pairs((1, 3)),
        forks=(fork,),
    )

    layout = table.apply(delta)
    table.resolve(layout, slots(UNKNOWN_TOKEN, 50, 60))

    assert layout.sample_slots.tolist() == [0, 1, 2]
    assert layout.num_candidates is not None
    assert layout.num_candidates.tolist() == [4, 0, 0]
    assert table.active.tolist() == [False, True, True, False]
    assert [table.tokens_of(slot)[-1] for slot in range(3)] == [55, 50, 60]


def test_a_step_without_beam_rows_has_no_candidates() -> None:
    table = beam_table()

    layout = table.apply(TableDelta(admissions=(admission(slot=1, blocks=(1,)),), prefill_chunks=pairs((1, 3))))

    assert layout.num_candidates is None


def test_decodes_come_first_and_are_counted() -> None:
    table = decoding_table()

    assert table.apply(TableDelta(prefill_chunks=pairs((1, 2)))).num_decodes == 1
    assert table.apply(TableDelta(prefill_chunks=pairs((1, 3)), appended_blocks=pairs((0, 5)))).num_decodes == 1
    assert table.apply(TableDelta()).num_decodes == 2


def test_a_layout_stays_what_it_was_while_later_steps_are_laid_out() -> None:
    table = decoding_table()
    layout = table.apply(TableDelta())
    before = {name: np.copy(getattr(layout, name)) for name in ("slots", "starts", "lengths", "sample_positions")}

    table.apply(TableDelta(prefill_chunks=pairs((1, 5)), appended_blocks=pairs((0, 5))))
    table.apply(TableDelta(released_slots=slots(0)))

    for name, values in before.items():
        np.testing.assert_array_equal(getattr(layout, name), values, err_msg=name)


def test_a_trusted_delta_is_applied_without_the_check() -> None:
    checked, trusted = decoding_table(), decoding_table()
    delta = TableDelta(appended_blocks=pairs((0, 5)), prefill_chunks=pairs((1, 5)))
    unknown_block = TableDelta(appended_blocks=pairs((0, 99)))

    checked.apply(delta)
    trusted.apply(delta, trusted=True)

    assert checked.digest() == trusted.digest()
    trusted.apply(unknown_block, trusted=True)
    assert trusted.blocks_of(0).tolist() == [0, 5, 99]
