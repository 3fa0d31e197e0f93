"""The pool and its prefix cache against a model: lists of block tables and of who was freed when."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.core.blocks.block_allocator import BlockAllocator, OutOfBlocksError
from scheduler_svc.core.blocks.prefix_cache import PrefixCache


def blocks_of(table: list[int]) -> Int32Array:
    return np.array(table, np.int32)


class PoolMachine(RuleBasedStateMachine):
    """Allocates, shares, registers, finds and frees block tables in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[int]] = []
        self.content: dict[bytes, int] = {}
        self.unused_registered: list[int] = []  # in the order in which they are to be evicted
        self.num_names = 0

    @initialize(num_blocks=st.integers(1, 10), has_cache=st.booleans())
    def start(self, num_blocks: int, has_cache: bool) -> None:
        self.cache = PrefixCache(num_blocks) if has_cache else None
        self.pool = BlockAllocator(num_blocks, self.cache)

    @property
    def ref_counts(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table)

    def pick(self, data: st.DataObject) -> list[int]:
        return self.tables[data.draw(st.integers(0, len(self.tables) - 1))]

    @rule(num_blocks=st.integers(0, 6))
    def allocate(self, num_blocks: int) -> None:
        num_free = self.pool.num_blocks - len(self.ref_counts)
        if num_blocks > num_free:
            with pytest.raises(OutOfBlocksError, match=f"{num_blocks} blocks wanted, {num_free} of"):
                self.pool.allocate(num_blocks)
            return
        num_evicted = max(0, num_blocks - (num_free - len(self.unused_registered)))
        for block in self.unused_registered[:num_evicted]:
            self.content = {name: held for name, held in self.content.items() if held != block}
        expected = set(self.unused_registered[:num_evicted])
        self.unused_registered = self.unused_registered[num_evicted:]

        table = self.pool.allocate(num_blocks).tolist()

        assert len(set(table)) == num_blocks
        assert not set(table) & set(self.ref_counts), "a block that is in use was given out"
        assert expected <= set(table), "the blocks that were unused for longest are evicted, and only as many as needed"
        assert not set(table) & set(self.unused_registered)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_references=st.integers(1, 2))
    def share(self, data: st.DataObject, num_references: int) -> None:
        table = self.pick(data)
        self.pool.acquire(blocks_of(table), num_references)
        self.tables += [list(table) for _ in range(num_references)]

    @precondition(lambda self: self.tables and self.cache is not None)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        assert self.cache is not None
        for block in self.pick(data):
            if block not in self.content.values():
                self.num_names += 1
                self.content[b"%d" % self.num_names] = block
                self.cache.register([b"%d" % self.num_names], [block])

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        assert self.cache is not None
        names = data.draw(st.lists(st.sampled_from(sorted(self.content)), unique=True, max_size=4))
        found = self.cache.match(names, len(names))
        assert found.tolist() == [self.content[name] for name in names], "registered content was not found"
        self.pool.acquire(found)
        self.tables.append(found.tolist())
        self.unused_registered = [block for block in self.unused_registered if block not in found.tolist()]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), goes_first=st.booleans())
    def free(self, data: st.DataObject, goes_first: bool) -> None:
        table = self.pick(data)
        self.tables.remove(table)
        self.pool.free(blocks_of(table), goes_first=goes_first)
        gone = [block for block in reversed(table) if not self.ref_counts[block] and block in self.content.values()]
        self.unused_registered = gone + self.unused_registered if goes_first else self.unused_registered + gone

    @precondition(lambda self: self.cache is not None)
    @rule(name=st.integers(1, 30))
    def nothing_is_found_that_was_evicted(self, name: int) -> None:
        assert self.cache is not None
        found = self.cache.match([b"%d" % name], 1).tolist()
        assert found == ([self.content[b"%d" % name]] if b"%d" % name in self.content else [])

    @invariant()
    def counts_agree(self) -> None:
        assert {block: count for block, count in enumerate(self.pool.ref_counts.tolist()) if count} == self.ref_counts
        assert self.pool.num_used_blocks == len(self.ref_counts)
        assert self.pool.num_cached_blocks == len(self.unused_registered)
        self.pool.check_integrity()
        if self.cache is not None:
            self.cache.check_integrity()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(settings.get_profile("quick"), stateful_step_count=40)
