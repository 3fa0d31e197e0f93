"""Who gets how many blocks."""

import numpy as np
import pytest

from scheduler_svc.core.block_allocator import OutOfBlocksError
from scheduler_svc.core.block_manager import AllocStatus, BlockManager
from tests.support.tables import decoding_table


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_num_blocks_for_block_boundaries(num_tokens: int, num_blocks: int) -> None:
    assert BlockManager(8, block_size=4, watermark=0.0).num_blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize("num_tokens", [1, 4, 5])
def test_ok_hands_out_as_many_blocks_as_the_tokens_need(num_tokens: int) -> None:
    manager = BlockManager(8, block_size=4, watermark=0.0)

    status, blocks = manager.try_allocate(num_tokens)

    assert status is AllocStatus.OK
    assert blocks.tolist() == list(range(manager.num_blocks_for(num_tokens)))


def test_never_status_says_that_the_whole_pool_is_too_small() -> None:
    manager = BlockManager(3, block_size=4, watermark=0.0)

    assert manager.try_allocate(13)[0] is AllocStatus.NEVER
    assert manager.try_allocate(12)[0] is AllocStatus.OK


def test_later_takes_nothing() -> None:
    manager = BlockManager(3, block_size=4, watermark=0.0)
    manager.try_allocate(8)

    status, blocks = manager.try_allocate(5)

    assert status is AllocStatus.LATER
    assert blocks.tolist() == []
    assert manager.allocator.num_free_blocks == 1


def test_never_comes_before_later() -> None:
    manager = BlockManager(3, block_size=4, watermark=0.0)
    manager.try_allocate(12)

    assert manager.try_allocate(13)[0] is AllocStatus.NEVER


def test_watermark_keeps_blocks_back_from_admissions() -> None:
    manager = BlockManager(10, block_size=4, watermark=0.15)
    manager.try_allocate(4)

    assert manager.num_watermark_blocks == 2
    assert manager.try_allocate(8 * 4)[0] is AllocStatus.LATER
    assert manager.try_allocate(7 * 4)[0] is AllocStatus.OK


def test_watermark_does_not_hold_back_a_sequence_alone() -> None:
    manager = BlockManager(10, block_size=4, watermark=0.5)

    assert manager.try_allocate(40)[0] is AllocStatus.OK


def test_running_sequences_may_use_the_watermark() -> None:
    manager = BlockManager(2, block_size=4, watermark=0.5)
    manager.try_allocate(4)

    assert manager.append_blocks(np.array([3], np.int32)).tolist() == [[3, 1]]


def test_append_blocks_gives_all_or_nothing() -> None:
    manager = BlockManager(3, block_size=4, watermark=0.0)
    manager.try_allocate(8)

    with pytest.raises(OutOfBlocksError):
        manager.append_blocks(np.array([0, 1], np.int32))

    assert manager.allocator.num_free_blocks == 1


def test_append_blocks_for_nobody_is_an_empty_list_of_pairs() -> None:
    pairs = BlockManager(3, block_size=4, watermark=0.0).append_blocks(np.empty(0, np.int32))

    assert pairs.shape == (0, 2)
    assert pairs.dtype == np.int32


@pytest.mark.parametrize(("num_scheduled_tokens", "without_room"), [(3, []), (4, [0]), (5, []), (8, [0])])
def test_slots_without_room_are_those_at_a_block_boundary(num_scheduled_tokens: int, without_room: list[int]) -> None:
    manager, table = BlockManager(8, block_size=4, watermark=0.0), decoding_table()
    table.num_scheduled_tokens[0] = num_scheduled_tokens
    table.num_blocks[0] = manager.num_blocks_for(num_scheduled_tokens)

    assert manager.slots_without_room(table, np.array([0, 1], np.int32)).tolist() == without_room
