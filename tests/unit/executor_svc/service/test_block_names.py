"""Names of device blocks: set before the step, cleared where it may write."""

from dataclasses import replace

import numpy as np
import pytest

from executor_svc.service.block_names import BlockNames
from octavo_shared.errors import InvalidFieldError, InvalidStepError
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import Admission, SamplingRow, Step, TableDelta, pairs
from tests.support.each_row import each_row

BLOCK_SIZE, NUM_BLOCKS = 4, 12
NO_SLOTS = np.zeros(3, np.bool_)


def name(block_id: int) -> bytes:
    return bytes([block_id]) * 16


def naming(*block_ids: int, delta: TableDelta | None = None) -> Step:
    """Return a step that names blocks."""
    return Step(
        1,
        1,
        delta or TableDelta(),
        registered_blocks=np.array(block_ids, np.int32),
        block_names=b"".join(map(name, block_ids)),
    )


def table() -> BatchTable:
    return BatchTable(3, 40, BLOCK_SIZE, NUM_BLOCKS)


def admitted(num_tokens: int, *block_ids: int, chunk: int, num_candidates: int = 0) -> TableDelta:
    """Return what admits a sequence to slot 0 and computes a chunk of it."""
    tokens, blocks = np.arange(num_tokens, dtype=np.int32), np.array(block_ids, np.int32)
    entered = Admission(0, 1, tokens, num_tokens, 0, blocks, SamplingRow(num_candidates=num_candidates))
    return TableDelta(admissions=(entered,), prefill_chunks=pairs((0, chunk)))


def named(names: BlockNames) -> set[int]:
    """Return the blocks that have a name, which must be theirs."""
    names.begin_listing()
    page, _ = names.page(0)
    block_ids = list(page.block_ids)
    assert page.names == b"".join(map(name, block_ids))
    return set(block_ids)


@pytest.fixture
def all_named() -> BlockNames:
    names = BlockNames(NUM_BLOCKS)
    names.follow(naming(*range(NUM_BLOCKS)), table(), NO_SLOTS)
    return names


def test_a_chunk_clears_the_names_of_its_blocks_and_of_no_others(all_named: BlockNames) -> None:
    batch, delta = table(), admitted(11, 3, 5, 7, chunk=6)
    batch.apply(delta)
    all_named.follow(naming(delta=delta), batch, NO_SLOTS)
    assert named(all_named) == set(range(NUM_BLOCKS)) - {3, 5}


def test_a_decode_clears_the_name_of_the_block_that_it_writes() -> None:
    batch, names = table(), BlockNames(NUM_BLOCKS)
    batch.apply(admitted(8, 3, 5, 7, chunk=8))
    was_active = batch.active.copy()
    batch.apply(TableDelta())
    names.follow(naming(3, 5, 7), batch, was_active)
    assert named(names) == {3, 5}


def test_a_beam_that_rests_behind_its_row_has_written() -> None:
    batch, names = table(), BlockNames(NUM_BLOCKS)
    batch.apply(admitted(8, 3, 5, 7, chunk=8, num_candidates=2))
    delta = TableDelta(appended_tokens=pairs((0, 9)), activated_slots=np.array([0], np.int32))
    batch.apply(delta)
    assert not batch.active[0]
    names.follow(naming(3, 5, 7, delta=delta), batch, NO_SLOTS)
    assert named(names) == {3, 5}


def test_moves_clear_the_names_of_where_they_go_to(all_named: BlockNames) -> None:
    saved = np.array([[2, 5, 8]], np.int32)
    step = replace(naming(), blocks_to_swap_in=pairs((0, 4)), blocks_to_copy=pairs((1, 6)), states_to_save=saved)
    all_named.follow(step, table(), NO_SLOTS)
    assert named(all_named) == set(range(NUM_BLOCKS)) - {4, 6, 8}


def test_a_name_is_true_of_what_was_there_before_the_step() -> None:
    names = BlockNames(NUM_BLOCKS)
    names.follow(replace(naming(4, 5), blocks_to_copy=pairs((1, 4))), table(), NO_SLOTS)
    assert named(names) == {5}


@each_row(
    ((1, NUM_BLOCKS), f"step 1 names device block {NUM_BLOCKS}; there are {NUM_BLOCKS} device blocks"),
    ((-1,), f"step 1 names device block -1; there are {NUM_BLOCKS} device blocks"),
    ((2, 1, 2), "step 1 names block 2 twice"),
)
def test_names_of_what_is_no_block_are_refused(block_ids: tuple[int, ...], words: str) -> None:
    step = replace(naming(), registered_blocks=np.array(block_ids, np.int32), block_names=bytes(16 * len(block_ids)))
    with pytest.raises(InvalidStepError) as refused:
        BlockNames(NUM_BLOCKS).check(step)
    assert str(refused.value) == words


def test_names_are_listed_page_by_page(all_named: BlockNames, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_svc.service.block_names.NAMES_OF_A_PAGE", 5)
    assert all_named.begin_listing() == NUM_BLOCKS
    listed: list[int] = []
    states = []
    for begin in (0, 5, 10):
        states.append(all_named.is_being_listed)
        page, following = all_named.page(begin)
        assert following == (begin + 5 if begin < 10 else 0)
        listed += page.block_ids
    assert listed == list(range(NUM_BLOCKS))
    assert [*states, all_named.is_being_listed] == [True, True, True, False]
    with pytest.raises(InvalidFieldError, match="page_token is 12; it must be what the answer before said"):
        all_named.page(NUM_BLOCKS)


def test_a_pool_without_names_has_nothing_to_list() -> None:
    names = BlockNames(NUM_BLOCKS)
    assert names.begin_listing() == 0
    assert not names.is_being_listed


@each_row(1, 2, 4)
def test_a_decode_with_an_allowance_clears_the_names_of_all_blocks_that_it_writes_whatever_came(count: int) -> None:
    batch, names = table(), BlockNames(NUM_BLOCKS)
    layout = batch.apply(admitted(6, 3, 5, 7, 8, chunk=6))
    batch.resolve(layout, np.array([1], np.int32))
    was_active, delta = batch.active.copy(), TableDelta(allowances=pairs((0, 4)))
    layout = batch.apply(delta)  # it computes the positions 6 to 9
    batch.resolve(layout, np.ones(count, np.int32), np.array([count], np.uint8))

    names.follow(naming(*range(NUM_BLOCKS), delta=delta), batch, was_active)

    assert not named(names) & {5, 7}
    assert named(names) >= set(range(NUM_BLOCKS)) - {3, 5, 7, 8}
