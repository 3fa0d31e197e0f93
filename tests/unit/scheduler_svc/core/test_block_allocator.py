"""The pool of blocks."""

import numpy as np
import pytest

from scheduler_svc.core.block_allocator import BlockAllocator, OutOfBlocksError


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
    allocator.share(blocks)

    allocator.free(blocks)
    assert (allocator.ref_count(0), allocator.num_free_blocks) == (1, 1)

    allocator.free(blocks)
    assert (allocator.ref_count(0), allocator.num_free_blocks) == (0, 2)


def test_a_free_block_is_neither_shared_nor_freed() -> None:
    allocator = BlockAllocator(2)

    with pytest.raises(AssertionError, match="cannot be shared"):
        allocator.share(np.array([1], np.int32))
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
