"""Which sequences use which block: `GetBlockMap` and `GetBlock` of `AdminService`. Changes nothing."""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.step.executor_planner import ExecutorPlanner

MAX_HOLDERS = 100


def block_states(allocator: BlockAllocator) -> NDArray[np.uint8]:
    """Return the `BlockState` of every block of a pool, [num_blocks] uint8."""
    states = np.full(allocator.num_blocks, admin_pb2.BLOCK_STATE_FREE, np.uint8)
    states[allocator.cached_block_ids] = admin_pb2.BLOCK_STATE_CACHED
    states[allocator.ref_counts == 1] = admin_pb2.BLOCK_STATE_USED
    states[allocator.ref_counts > 1] = admin_pb2.BLOCK_STATE_SHARED
    return states


def describe_block(planner: ExecutorPlanner, block: int) -> pb.GetBlockResponse:
    """Return which sequences use a block of a planner's device pool; `block` must be in the pool."""
    allocator = planner.blocks.allocator
    cache = allocator.prefix_cache
    return pb.GetBlockResponse(
        state=cast("admin_pb2.BlockState.ValueType", int(block_states(allocator)[block])),
        num_references=int(allocator.ref_counts[block]),
        is_registered=cache is not None and bool(cache.is_registered[block]),
        holders=_holders(planner, block)[:MAX_HOLDERS],
    )


def _holders(planner: ExecutorPlanner, block: int) -> list[admin_pb2.BlockHolder]:
    """Return the sequences in the batch whose block table names a block."""
    holders = []
    for group in planner.batch.running:
        # Until a forked beam has a slot of its own, it reads its parent's.
        for rank, (sequence, slot) in enumerate(planner.beam_batch.source_slots(group)):
            held = planner.blocks.groups[0].held(slot)
            index = np.flatnonzero(held == block)
            if len(index):
                holders.append(
                    admin_pb2.BlockHolder(
                        request_id=group.request_id,
                        output_index=sequence.index if group.beams is None else rank,
                        logical_block=int(index[0]) + int(planner.blocks.groups[0].first_blocks[slot]),
                    )
                )
    return holders
