"""The pool of blocks."""

import numpy as np
import pytest

from octavo_shared.step_wire.batch_table import IndexArray
from scheduler_svc.core.blocks.block_allocator import BlockAllocator, EvictionOrder, OutOfBlocksError
from scheduler_svc.core.blocks.prefix_cache import PrefixCache


def test_out_of_blocks_changes_nothing() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate(1)

    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 of 3 free"):
        allocator.allocate(3)

    assert allocator.num_free_blocks == 2
    allocator.check_integrity()


def test_a_free_block_is_not_freed() -> None:
    allocator = BlockAllocator(2)

    with pytest.raises(AssertionError, match="cannot be freed again"):
        allocator.free(np.array([1], np.int32))

    assert allocator.num_free_blocks == 2
    allocator.check_integrity()


def test_handed_out_blocks_do_not_alias_the_free_list() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(2)

    blocks[:] = 2

    allocator.free(np.array([0, 1], np.int32))
    allocator.check_integrity()


# With a prefix cache -----------------------------------------------------------------------------


def with_cached_prefix(num_blocks: int = 4) -> BlockAllocator:
    """Return a pool in which blocks 0 and 1 are cached: a prefix of two blocks that nobody uses."""
    cache = PrefixCache(num_blocks)
    allocator = BlockAllocator(num_blocks, cache)
    blocks = allocator.allocate(2)
    cache.register([b"first", b"second"], blocks.tolist())
    allocator.free(blocks)
    return allocator


def test_acquiring_used_and_cached_blocks_together_revives_the_cached_ones_only() -> None:
    allocator = with_cached_prefix()
    allocator.acquire(np.array([0], np.int32))

    allocator.acquire(np.array([0, 1], np.int32))

    assert allocator.ref_counts[:2].tolist() == [2, 1]
    assert allocator.num_cached_blocks == 0
    allocator.check_integrity()


# The order of eviction ---------------------------------------------------------------------------


def blocks(*block_ids: int) -> IndexArray:
    return np.array(block_ids, np.intp)


def order_of(*block_ids: int, num_blocks: int = 6) -> EvictionOrder:
    order = EvictionOrder(num_blocks)
    order.append(blocks(*block_ids))
    return order


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
