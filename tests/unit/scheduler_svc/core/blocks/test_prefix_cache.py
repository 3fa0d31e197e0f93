"""Hashes of blocks, and the table of what is cached."""

import numpy as np

from scheduler_svc.core.blocks.prefix_cache import BlockHasher, PrefixCache
from tests.support.each_row import each_row


def hashes_of(token_ids: list[int], *, key: bytes = b"key", salt: int = 0, block_size: int = 2) -> list[bytes]:
    hashes: list[bytes] = []
    BlockHasher(key, block_size).extend(hashes, np.array(token_ids, np.int32), salt)
    return hashes


# Hashes ------------------------------------------------------------------------------------------


def test_only_full_blocks_have_hashes_of_128_bits() -> None:
    assert [len(block_hash) for block_hash in hashes_of([1, 2, 3, 4, 5])] == [16, 16]


def test_equal_prefixes_have_equal_hashes_and_differ_from_the_first_difference_on() -> None:
    one, other = hashes_of([1, 2, 3, 4, 5, 6]), hashes_of([1, 2, 3, 9, 5, 6])

    assert [left == right for left, right in zip(one, other, strict=True)] == [True, False, False]


def test_equal_blocks_behind_different_prefixes_differ() -> None:
    assert hashes_of([1, 1, 7, 7])[1] != hashes_of([2, 2, 7, 7])[1]
    assert hashes_of([7, 7, 7, 7])[0] != hashes_of([7, 7, 7, 7])[1]


@each_row({"key": b"other"}, {"salt": 1}, {"salt": 2**64 - 1})
def test_hashes_depend_on_key_and_salt(choice: dict[str, int]) -> None:
    assert hashes_of([1, 2], **choice) != hashes_of([1, 2])  # type: ignore[arg-type]


def test_hashes_are_extended_from_where_they_end() -> None:
    hashes = hashes_of([1, 2, 3, 4])
    first = list(hashes)

    BlockHasher(b"key", 2).extend(hashes, np.array([1, 2, 3, 4, 5, 6], np.int32), 0)

    assert hashes[:2] == first
    assert hashes == hashes_of([1, 2, 3, 4, 5, 6])


def test_fewer_tokens_than_are_hashed_change_nothing() -> None:
    hashes = hashes_of([1, 2, 3, 4])

    BlockHasher(b"key", 2).extend(hashes, np.array([1, 2], np.int32), 0)

    assert hashes == hashes_of([1, 2, 3, 4])


# What is cached ----------------------------------------------------------------------------------

A, B, C = b"a", b"b", b"c"


def test_the_longest_registered_prefix_is_found() -> None:
    cache = PrefixCache(num_blocks=8)
    cache.register([A, B], [5, 3])

    assert cache.match([A, B, C], max_blocks=3).tolist() == [5, 3]
    assert cache.match([A, B, C], max_blocks=1).tolist() == [5]
    assert cache.match([C, A, B], max_blocks=3).tolist() == []


def test_the_chain_ends_at_the_first_block_that_is_missing() -> None:
    cache = PrefixCache(num_blocks=8)
    cache.register([A, C], [5, 3])

    assert cache.match([A, B, C], max_blocks=3).tolist() == [5]


def test_of_two_blocks_with_equal_content_the_first_one_is_kept() -> None:
    cache = PrefixCache(num_blocks=8)
    cache.register([A], [5])

    cache.register([A], [6])

    assert cache.match([A], max_blocks=1).tolist() == [5]
    assert (cache.is_registered[5:7].tolist(), len(cache)) == ([True, False], 1)


def test_a_block_that_was_forgotten_is_not_found() -> None:
    cache = PrefixCache(num_blocks=8)
    cache.register([A], [5])

    cache.forget(np.array([5], np.int32))

    assert cache.match([A], max_blocks=1).tolist() == []
    assert cache.hash_of(5) is None
    assert not cache.is_registered.any()
    cache.check_integrity()


# Blocks on their way -----------------------------------------------------------------------------


def test_a_block_is_being_written_until_its_step_is_acknowledged() -> None:
    cache = PrefixCache(num_blocks=8)
    cache.start_writing(0, [A, B])

    cache.stop_writing(0, 1)

    assert (cache.is_being_written(A), cache.is_being_written(B)) == (False, True)


def test_leaving_the_slot_voids_all_that_it_was_writing() -> None:
    cache = PrefixCache(num_blocks=8)
    cache.start_writing(0, [A, B])

    cache.stop_writing(0)

    assert not cache.is_being_written(A)
    assert not cache.is_being_written(B)


def test_a_slot_that_writes_nothing_stops_writing_nothing() -> None:
    cache = PrefixCache(num_blocks=8)
    cache.start_writing(1, [A])

    cache.stop_writing(0)

    assert cache.is_being_written(A)


def test_of_two_writers_of_a_block_the_first_one_is_waited_for() -> None:
    cache = PrefixCache(num_blocks=8)
    cache.start_writing(0, [A])
    cache.start_writing(1, [A])

    cache.stop_writing(1, 1)
    assert cache.is_being_written(A)

    cache.stop_writing(0, 1)
    assert not cache.is_being_written(A)
