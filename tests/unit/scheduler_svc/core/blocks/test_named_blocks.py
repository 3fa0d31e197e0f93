"""Names of cached blocks on their way to the executor, and back from it."""

import numpy as np

from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.prefix_cache import PrefixCache

NUM_BLOCKS = 8


def name(block_id: int) -> bytes:
    return bytes([65 + block_id]) * 16


def cache_with(*block_ids: int) -> PrefixCache:
    """Return a cache whose blocks were just registered."""
    cache = PrefixCache(NUM_BLOCKS, sends_names=True)
    cache.register([name(block_id) for block_id in block_ids], list(block_ids))
    return cache


def taken(cache: PrefixCache, max_names: int = 100, written: set[int] | None = None) -> list[int]:
    """Return the blocks whose names are sent with the next step."""
    block_ids, names = cache.take_unsent_names(max_names, written or set())
    assert names == b"".join(map(name, block_ids.tolist()))
    return [int(block_id) for block_id in block_ids]


def ids(*block_ids: int) -> Int32Array:
    return np.array(block_ids, np.int32)


def test_a_name_is_sent_once_in_the_next_step() -> None:
    cache = cache_with(3, 5)
    assert taken(cache) == [3, 5]
    assert taken(cache) == []


def test_what_a_message_cannot_hold_waits_for_the_next() -> None:
    cache = cache_with(3, 5, 6)
    assert [taken(cache, 2), taken(cache, 2)] == [[3, 5], [6]]


def test_a_block_that_a_step_swaps_in_gets_its_name_with_the_one_after() -> None:
    cache = cache_with(3, 5)
    assert taken(cache, written={3}) == [5]
    assert taken(cache) == [3]


def test_a_block_that_is_evicted_before_is_never_named() -> None:
    cache = cache_with(3, 5)
    cache.forget(np.array([3]))
    assert taken(cache) == [5]


def test_a_second_block_with_the_same_content_has_no_name() -> None:
    cache = cache_with(3)
    cache.register([name(3)], [4])
    assert taken(cache) == [3]


def test_without_an_executor_that_keeps_them_no_name_is_sent() -> None:
    cache = PrefixCache(NUM_BLOCKS)
    cache.register([name(3)], [3])
    assert taken(cache) == []


def test_what_an_executor_has_kept_is_cached_and_not_told_again() -> None:
    cache = PrefixCache(NUM_BLOCKS, sends_names=True)
    allocator = BlockAllocator(NUM_BLOCKS, cache)
    adopted = cache.adopt(ids(5, 2, 7), name(5) + name(2) + name(5))
    allocator.adopt(adopted)
    allocator.check_integrity()
    cache.check_integrity()
    assert sorted(adopted.tolist()) == [2, 5], "of two blocks with one name, one"
    assert allocator.cached_block_ids.tolist() == adopted.tolist()
    assert cache.match([name(5)], 9).tolist() == [5]
    assert taken(cache) == []
    assert sorted(allocator.allocate(NUM_BLOCKS).tolist()) == list(range(NUM_BLOCKS)), "they make room when they must"
    assert len(cache) == 0
