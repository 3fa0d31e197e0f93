"""Which sequences use which block: `GetBlockMap` and `GetBlock` of `AdminService`. Changes nothing."""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.encoder_blocks import EncoderBlocks
from scheduler_svc.core.blocks.group_blocks import GroupBlocks
from scheduler_svc.core.step.executor_planner import ExecutorPlanner

MAX_HOLDERS = 100


def block_states(allocator: BlockAllocator) -> NDArray[np.uint8]:
    """Return the `BlockState` of every block of a pool, [num_blocks] uint8."""
    states = np.full(allocator.num_blocks, admin_pb2.BLOCK_STATE_FREE, np.uint8)
    states[allocator.cached_block_ids] = admin_pb2.BLOCK_STATE_CACHED
    states[allocator.ref_counts == 1] = admin_pb2.BLOCK_STATE_USED
    states[allocator.ref_counts > 1] = admin_pb2.BLOCK_STATE_SHARED
    return states


def encoder_states(planner: ExecutorPlanner) -> bytes:
    """Return the `BlockState` of every block of the encoder's pool; empty: there is none."""
    encoder = planner.blocks.encoder
    return b"" if encoder is None else block_states(encoder.allocator).tobytes()


def num_blocks(planner: ExecutorPlanner) -> int:
    """Return how many blocks `describe_block` knows: those of the device pool, then those of the encoder."""
    return planner.limits.num_blocks + planner.limits.num_encoder_blocks


def describe_block(planner: ExecutorPlanner, block: int) -> pb.GetBlockResponse:
    """Return which sequences use a block of a planner's device pool.

    `block` must be in the pool, or behind it in that of the encoder: see `num_blocks`.
    """
    of: GroupBlocks | EncoderBlocks = planner.blocks.groups[0]
    if (is_of_encoder := block >= planner.limits.num_blocks) and planner.blocks.encoder is not None:
        of, block = planner.blocks.encoder, block - planner.limits.num_blocks
    allocator, cache = of.allocator, of.prefix_cache
    return pb.GetBlockResponse(
        state=cast("admin_pb2.BlockState.ValueType", int(block_states(allocator)[block])),
        num_references=int(allocator.ref_counts[block]),
        is_registered=cache is not None and bool(cache.is_registered[block]),
        holders=_holders(planner, of, block)[:MAX_HOLDERS],
        is_of_encoder=is_of_encoder,
    )


def _holders(planner: ExecutorPlanner, of: GroupBlocks | EncoderBlocks, block: int) -> list[admin_pb2.BlockHolder]:
    """Return the sequences in the batch whose block table names a block."""
    holders = []
    for group in planner.batch.running:
        # Until a forked beam has a slot of its own, it reads its parent's.
        for rank, (sequence, slot) in enumerate(planner.beam_batch.source_slots(group)):
            held, first = of.tables.of_slot(slot), 0
            if isinstance(of, GroupBlocks):
                held, first = of.held(slot), int(of.first_blocks[slot])
            index = np.flatnonzero(held == block)
            if len(index):
                holders.append(
                    admin_pb2.BlockHolder(
                        request_id=group.request_id,
                        output_index=sequence.index if group.beams is None else rank,
                        logical_block=int(index[0]) + first,
                    )
                )
    return holders
