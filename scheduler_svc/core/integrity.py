"""The invariants of the scheduler's docstring as assertions, for tests and debugging."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scheduler_svc.core.scheduler import Scheduler


def check_integrity(scheduler: "Scheduler") -> None:
    """Assert every invariant that can be seen between two calls."""
    allocator, table = scheduler.block_manager.allocator, scheduler.table
    allocator.check_integrity()
    slots = [sequence.slot for sequence in scheduler.running]
    named = np.concatenate([table.blocks_of(slot) for slot in slots]) if slots else np.empty(0, np.int32)
    block_ids, counts = np.unique(named, return_counts=True)
    assert len(block_ids) == allocator.num_used_blocks, "a used block is in no block table"
    assert all(allocator.ref_count(b) == n for b, n in zip(block_ids.tolist(), counts.tolist(), strict=True))
    assert len(set(slots)) == len(slots), "two running sequences share a slot"
    assert set(slots) | set(scheduler.free_slots) == set(range(scheduler.limits.max_num_seqs)), "a slot got lost"
    assert not set(slots) & set(scheduler.free_slots), "a free slot is in use"
    held = np.array(slots, np.int32)
    assert table.live[held].all(), "a running sequence has no live slot"
    room = table.num_blocks[held] * scheduler.limits.block_size
    assert (table.num_scheduled_tokens[held] <= room).all(), "tokens were computed without a block"
    assert (table.num_tokens[held] <= scheduler.limits.max_model_len).all(), "a sequence is too long"
    assert all(step.layout.num_tokens <= scheduler.limits.max_num_batched_tokens for step in scheduler.in_flight)
    assert [s.arrival for s in scheduler.running] == sorted(s.arrival for s in scheduler.running)
    assert [s.arrival for s in scheduler.waiting] == sorted(s.arrival for s in scheduler.waiting)
