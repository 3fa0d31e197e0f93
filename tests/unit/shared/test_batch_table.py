"""What deltas and samples do to the batch table."""

import numpy as np
import pytest

from shared.batch_table import BatchTable
from shared.step import NO_BLOCK, UNKNOWN_TOKEN, Admission, Fork, SamplingRow, TableDelta, no_slots, pairs
from tests.support.tables import admission, decoding_table, small_table


def slots(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(values, np.int32)


def test_a_new_table_is_empty() -> None:
    table = small_table()

    layout = table.apply(TableDelta())

    assert not table.live.any()
    assert layout.num_tokens == 0
    assert table.record(layout, no_slots()).tolist() == []


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


def test_a_shorter_successor_leaves_no_old_blocks_in_the_table() -> None:
    table = decoding_table()

    table.apply(TableDelta(released_slots=slots(1), admissions=(admission(slot=1, generation=2, blocks=(5,)),)))

    assert table.block_tables[1].tolist() == [5, NO_BLOCK, NO_BLOCK, NO_BLOCK]


def test_a_released_slot_runs_no_more() -> None:
    table = decoding_table()

    layout = table.apply(TableDelta(released_slots=slots(0)))

    assert layout.slots.tolist() == []
    assert not table.live[0]


def test_a_fork_shares_blocks_and_gets_its_own_token_from_the_parents_row() -> None:
    table = decoding_table()
    fork = Fork(parent_slot=0, slot=3, generation=1, sampling=SamplingRow(seed=9, output_index=1))

    layout = table.apply(TableDelta(forks=(fork,)))
    table.record(layout, slots(50, 60))

    assert (layout.slots.tolist(), layout.sample_rows.tolist(), layout.sample_slots.tolist()) == ([0], [0, 0], [0, 3])
    assert table.blocks_of(3).tolist() == table.blocks_of(0).tolist()
    assert table.tokens_of(0).tolist() == [100, 101, 42, 50]
    assert table.tokens_of(3).tolist() == [100, 101, 42, 60]
    assert table.active[3]
    assert table.sampling[3]["output_index"] == 1


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

    table.record(first, slots(50))
    table.record(second, slots(51))

    assert table.tokens_of(0).tolist() == [100, 101, 42, 50, 51]


def test_a_token_of_a_released_slot_is_dropped() -> None:
    table = decoding_table()
    layout = table.apply(TableDelta())
    table.apply(TableDelta(released_slots=slots(0)))

    assert table.record(layout, slots(50)).tolist() == [False]


def test_a_token_of_the_slots_last_user_does_not_reach_the_next_one() -> None:
    table = decoding_table()
    layout = table.apply(TableDelta(prefill_chunks=pairs((1, 5))))
    table.apply(TableDelta(released_slots=slots(0), admissions=(admission(slot=0, generation=2, num_tokens=8),)))

    assert table.record(layout, slots(50, 51)).tolist() == [False, True]
    assert table.tokens_of(0).tolist() == list(range(100, 108))
    assert table.tokens_of(1)[5] == 51


def test_views_are_copies() -> None:
    table = decoding_table()

    table.tokens_of(0)[:] = 0
    table.blocks_of(0)[:] = 6

    assert table.tokens_of(0).tolist() == [100, 101, 42]
    assert table.blocks_of(0).tolist() == [0]


@pytest.mark.parametrize(
    "delta",
    [
        TableDelta(released_slots=slots(1)),
        TableDelta(appended_blocks=pairs((1, 5))),
        TableDelta(replaced_blocks=pairs((1, 0, 5))),
        TableDelta(appended_tokens=pairs((1, 5))),
        TableDelta(deactivated_slots=slots(0)),
        TableDelta(prefill_chunks=pairs((1, 1))),
        TableDelta(admissions=(admission(slot=2),)),
        TableDelta(forks=(Fork(0, 3, 1, SamplingRow()),)),
    ],
    ids=["release", "append block", "replace block", "append token", "deactivate", "chunk", "admit", "fork"],
)
def test_digest_differs_after_any_change(delta: TableDelta) -> None:
    changed, unchanged = decoding_table(), decoding_table()

    changed.apply(delta)
    unchanged.apply(TableDelta())

    assert changed.digest() != unchanged.digest()


@pytest.mark.parametrize(
    "entry",
    [
        admission(slot=1),
        admission(num_prompt_tokens=2),
        admission(num_computed_tokens=1),
        admission(blocks=(1,)),
        admission(sampling=SamplingRow(seed=1)),
        Admission(0, 1, np.arange(3, dtype=np.int32), 3, 0, slots(0), SamplingRow(), cache_salt=5),
    ],
    ids=["slot", "prompt", "computed", "blocks", "sampling", "salt"],
)
def test_digest_covers_each_part_of_an_admission(entry: Admission) -> None:
    table, other = small_table(), small_table()

    table.apply(TableDelta(admissions=(admission(),)))
    other.apply(TableDelta(admissions=(entry,)))

    assert table.digest() != other.digest()


def test_digest_ignores_tokens_which_the_scheduler_learns_late() -> None:
    table, other = decoding_table(), decoding_table()
    layout = table.apply(TableDelta())
    other.apply(TableDelta())

    table.record(layout, slots(50))

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
