"""The order in which cached blocks are evicted."""

import numpy as np
import pytest

from octavo_shared.step_wire.batch_table import IndexArray
from scheduler_svc.core.blocks.eviction_order import EvictionOrder


def blocks(*block_ids: int) -> IndexArray:
    return np.array(block_ids, np.intp)


def order_of(*block_ids: int, num_blocks: int = 6) -> EvictionOrder:
    order = EvictionOrder(num_blocks)
    order.append(blocks(*block_ids))
    return order


def test_the_block_that_was_put_there_first_is_taken_first() -> None:
    order = order_of(4, 0)
    order.append(blocks(2))

    assert order.take_first(2).tolist() == [4, 0]
    assert order.block_ids.tolist() == [2]
    assert len(order) == 1


def test_a_block_that_was_removed_is_passed_over() -> None:
    order = order_of(0, 1, 2, 3, 4)

    order.remove(blocks(0, 1, 3))

    assert len(order) == 2
    assert order.take_first(1).tolist() == [2]
    assert order.take_first(1).tolist() == [4]


def test_a_block_that_comes_back_stands_at_the_end() -> None:
    order = order_of(0, 1, 2)
    order.remove(blocks(0))

    order.append(blocks(0))

    assert order.block_ids.tolist() == [1, 2, 0]


def test_more_than_there_are_cannot_be_taken() -> None:
    order = order_of(0, 1)
    order.remove(blocks(1))

    with pytest.raises(AssertionError, match="fewer blocks are cached"):
        order.take_first(2)

    assert order.block_ids.tolist() == [0]


def test_however_often_blocks_come_and_go_the_order_is_that_of_a_list() -> None:
    generator, order, expected = np.random.default_rng(0), EvictionOrder(8), list[int]()
    for _ in range(300):
        absent = [block for block in range(8) if block not in expected]
        added = generator.permutation(absent)[: generator.integers(0, 4)].astype(np.intp)
        goes_first = generator.random() < 0.5
        (order.prepend if goes_first else order.append)(added)
        expected = [*added.tolist(), *expected] if goes_first else [*expected, *added.tolist()]
        removed = generator.permutation(expected)[: generator.integers(0, 3)].astype(np.intp)
        order.remove(removed)
        expected = [block for block in expected if block not in removed]
        if expected and generator.random() < 0.3:
            assert order.take_first(1).tolist() == [expected.pop(0)]
        assert order.block_ids.tolist() == expected
        assert len(order) == len(expected)
