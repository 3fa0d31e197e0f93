"""Hashes of blocks, and the table of what is cached."""

import numpy as np

from scheduler_svc.core.blocks.prefix_cache import BlockHasher, PrefixCache
from tests.support.each_row import each_row


def hashes_of(token_ids: list[int], *, key: bytes = b"key", salt: int = 0, block_size: int = 2) -> list[bytes]:
    hashes: list[bytes] = []
    BlockHasher(key, block_size).extend(hashes, np.array(token_ids, np.int32), salt)
    return hashes


# Hashes ------------------------------------------------------------------------------------------


@each_row({"key": b"other"}, {"salt": 1}, {"salt": 2**64 - 1})
def test_hashes_depend_on_key_and_salt(choice: dict[str, int]) -> None:
    assert hashes_of([1, 2], **choice) != hashes_of([1, 2])  # type: ignore[arg-type]


# What is cached ----------------------------------------------------------------------------------

A, B, C = b"a", b"b", b"c"


# Blocks on their way -----------------------------------------------------------------------------


def test_of_two_writers_of_a_block_the_first_one_is_waited_for() -> None:
    cache = PrefixCache(num_blocks=8)
    cache.start_writing(0, [A])
    cache.start_writing(1, [A])

    cache.stop_writing(1, 1)
    assert cache.is_being_written(A)

    cache.stop_writing(0, 1)
    assert not cache.is_being_written(A)
