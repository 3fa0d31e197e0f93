"""The block manager against a model: a dictionary of block tables, nothing else."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from scheduler_svc.core.block_allocator import OutOfBlocksError
from scheduler_svc.core.block_manager import AllocStatus, BlockManager


class BlockManagerMachine(RuleBasedStateMachine):
    """Allocates, grows, shares and frees block tables in any order."""

    table_ids: Bundle[int] = Bundle("table_ids")

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, list[int]] = {}
        self.num_tables = 0

    def new_table(self, blocks: list[int]) -> int:
        self.num_tables += 1
        self.tables[self.num_tables] = blocks
        return self.num_tables

    @property
    def ref_counts(self) -> Counter[int]:
        return Counter(block for table in self.tables.values() for block in table)

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - len(self.ref_counts)

    @initialize(
        num_blocks=st.integers(1, 12), block_size=st.integers(1, 5), watermark=st.sampled_from([0.0, 0.01, 0.4])
    )
    def start(self, num_blocks: int, block_size: int, watermark: float) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.manager = BlockManager(num_blocks, block_size, watermark)

    @rule(target=table_ids, num_tokens=st.integers(1, 40))
    def try_allocate(self, num_tokens: int) -> int | MultipleResults[int]:
        needed = len(range(0, num_tokens, self.block_size))
        reserve = self.manager.num_watermark_blocks if self.tables else 0
        free_before = self.num_free_blocks

        status, blocks = self.manager.try_allocate(num_tokens)

        if needed > self.num_blocks:
            assert status is AllocStatus.NEVER
        elif needed + reserve > free_before:
            assert status is AllocStatus.LATER
        else:
            assert status is AllocStatus.OK
            assert len(blocks) == needed
            assert not set(blocks.tolist()) & set(self.ref_counts), "a used block was handed out"
            return self.new_table(blocks.tolist())
        assert len(blocks) == 0
        return multiple()

    @rule(table_ids=st.lists(table_ids, max_size=4, unique=True))
    def append_blocks(self, table_ids: list[int]) -> None:
        if len(table_ids) > self.num_free_blocks:
            with pytest.raises(OutOfBlocksError):
                self.manager.append_blocks(np.array(table_ids, np.int32))
            return
        used = set(self.ref_counts)

        appended = self.manager.append_blocks(np.array(table_ids, np.int32))

        assert appended[:, 0].tolist() == table_ids
        assert not set(appended[:, 1].tolist()) & used, "a used block was handed out"
        for table_id, block in appended.tolist():
            self.tables[table_id].append(block)

    @rule(target=table_ids, parent=table_ids)
    def share(self, parent: int) -> int:
        self.manager.allocator.share(np.array(self.tables[parent], np.int32))
        return self.new_table(list(self.tables[parent]))

    @rule(table_id=consumes(table_ids))
    def free(self, table_id: int) -> None:
        self.manager.free(np.array(self.tables.pop(table_id), np.int32))

    @invariant()
    def every_block_is_free_or_counted_right(self) -> None:
        if not hasattr(self, "manager"):
            return
        allocator, counts = self.manager.allocator, self.ref_counts
        allocator.check_integrity()
        assert [allocator.ref_count(block) for block in range(self.num_blocks)] == [
            counts[block] for block in range(self.num_blocks)
        ]
        assert allocator.num_free_blocks == self.num_free_blocks
        assert allocator.num_free_blocks + allocator.num_used_blocks == self.num_blocks

    def teardown(self) -> None:
        """Free all: everything is free, and every block can be had again, once."""
        if not hasattr(self, "manager"):
            return
        for blocks in self.tables.values():
            self.manager.free(np.array(blocks, np.int32))
        allocator = self.manager.allocator
        assert allocator.num_free_blocks == self.num_blocks
        assert sorted(allocator.allocate(self.num_blocks).tolist()) == list(range(self.num_blocks))


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(stateful_step_count=30)


@pytest.mark.parametrize("watermark", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("num_blocks", [1, 2, 7])
def test_whatever_the_watermark_a_sequence_alone_gets_the_whole_pool(num_blocks: int, watermark: float) -> None:
    status, blocks = BlockManager(num_blocks, block_size=4, watermark=watermark).try_allocate(num_blocks * 4)

    assert status is AllocStatus.OK
    assert len(blocks) == num_blocks
