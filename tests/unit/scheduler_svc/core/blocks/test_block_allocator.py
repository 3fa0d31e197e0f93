"""The pool of blocks."""

import numpy as np
import pytest

from octavo_shared.step_wire.batch_table import IndexArray
from scheduler_svc.core.blocks.block_allocator import BlockAllocator, EvictionOrder, OutOfBlocksError
from scheduler_svc.core.blocks.prefix_cache import PrefixCache


def test_a_new_pool_is_free_and_hands_out_block_0_first() -> None:
    allocator = BlockAllocator(3)

    assert (allocator.num_free_blocks, allocator.num_used_blocks) == (3, 0)
    assert allocator.allocate(2).tolist() == [0, 1]


def test_a_block_that_was_just_freed_is_the_next_to_be_used() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(3)

    allocator.free(np.array([1], np.int32))

    assert allocator.allocate(2).tolist() == [1, 3]


def test_allocating_nothing_is_fine_on_a_full_pool() -> None:
    allocator = BlockAllocator(1)
    allocator.allocate(1)

    assert allocator.allocate(0).tolist() == []


def test_out_of_blocks_changes_nothing() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate(1)

    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 of 3 free"):
        allocator.allocate(3)

    assert allocator.num_free_blocks == 2
    allocator.check_integrity()


def test_a_shared_block_is_free_after_its_last_user() -> None:
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    allocator.acquire(blocks, num_references=2)

    counts = []
    for _ in range(3):
        allocator.free(blocks)
        counts.append((int(allocator.ref_counts[0]), allocator.num_free_blocks))

    assert counts == [(2, 1), (1, 1), (0, 2)]


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


def test_a_cached_block_counts_as_free() -> None:
    allocator = with_cached_prefix()

    assert (allocator.num_free_blocks, allocator.num_cached_blocks, allocator.num_used_blocks) == (4, 2, 0)
    allocator.check_integrity()


def test_cached_blocks_are_given_out_last_and_the_tail_of_a_prefix_first() -> None:
    allocator = with_cached_prefix()

    assert allocator.allocate(2).tolist() == [2, 3]
    assert allocator.allocate(1).tolist() == [1]
    assert allocator.num_cached_blocks == 1


def test_an_evicted_block_is_not_found_any_more() -> None:
    allocator = with_cached_prefix()

    allocator.allocate(3)

    assert allocator.prefix_cache is not None
    assert allocator.prefix_cache.match([b"first", b"second"], max_blocks=2).tolist() == [0]
    allocator.check_integrity()


def test_of_two_prefixes_the_one_that_was_used_last_stays() -> None:
    allocator = with_cached_prefix(num_blocks=3)
    assert allocator.prefix_cache is not None
    other = allocator.allocate(1)
    allocator.prefix_cache.register([b"other"], other.tolist())
    allocator.free(other)
    both = np.array([0, 1], np.int32)
    allocator.acquire(both)
    allocator.free(both)

    assert allocator.allocate(1).tolist() == [2]


def test_a_cached_block_that_is_acquired_is_used_again() -> None:
    allocator = with_cached_prefix()

    allocator.acquire(np.array([0, 1], np.int32))

    assert (allocator.num_free_blocks, allocator.num_cached_blocks, allocator.num_used_blocks) == (2, 0, 2)
    assert allocator.allocate(2).tolist() == [2, 3]
    allocator.check_integrity()


def test_acquiring_used_and_cached_blocks_together_revives_the_cached_ones_only() -> None:
    allocator = with_cached_prefix()
    allocator.acquire(np.array([0], np.int32))

    allocator.acquire(np.array([0, 1], np.int32))

    assert allocator.ref_counts[:2].tolist() == [2, 1]
    assert allocator.num_cached_blocks == 0
    allocator.check_integrity()


def test_out_of_blocks_evicts_nothing() -> None:
    allocator = with_cached_prefix()

    with pytest.raises(OutOfBlocksError, match="5 blocks wanted, 4 of 4 free"):
        allocator.allocate(5)

    assert allocator.num_cached_blocks == 2


# The order of eviction ---------------------------------------------------------------------------


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
