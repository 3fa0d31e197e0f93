"""Cache groups: layers whose caches live alike, with a block table for each sequence and block pools of their own.

A model whose layers all see every token has one cache group, and so has a model whose layers all see the same window.
In a mixed model the layers with a window are a cache group of their own: it needs the window's blocks only.

Layers that keep a state of each sequence in place of keys and values are a cache group of kind STATE. The state lies
at the slot of the batch, so this cache group has no block table, and it stands behind those that have one. A row whose
first position is 0 begins with an empty state, and a fork has a copy of its parent's. A block of this cache group is
a saved state, behind so many tokens: an admission behind the first token names the block that it begins with.

Layers that attend to the output of an encoder are a cache group of kind ENCODER. Each sequence has a block table in it
too, but of a fixed length, that of the encoder's input: it comes with the admission and never changes. This cache group
stands behind those whose tables grow, and before that of states.

Blocks of all cache groups are numbered one after the other, group by group, those of the device and those of the host.
An id says which cache group a block is of, so a step has no more fields than with one. The batch table and the block
pools count from 0 in each cache group. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

import numpy as np

from octavo.values.wording import counted
from octavo_shared.step_wire.step import Int32Array, Step


class CacheKind(IntEnum):
    """What of a sequence a cache group keeps; the enum of the same name in capability.proto."""

    FULL = 1
    WINDOW = 2
    LATENT = 3
    STATE = 4
    ENCODER = 5


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Some layers of a model; `CacheGroup` in capability.proto describes each field."""

    kind: CacheKind
    layers: tuple[int, ...]
    block_size_tokens: int
    num_device_blocks: int
    num_host_blocks: int = 0
    bytes_per_block: int = 0
    window_tokens: int = 0

    @property
    def has_block_tables(self) -> bool:
        """Whether each sequence has a block table for its layers that grows with it."""
        return self.kind not in (CacheKind.STATE, CacheKind.ENCODER)


def firsts_of(groups: Sequence[CacheGroup], *, on_host: bool = False) -> Int32Array:
    """Return the id of the first block of each cache group's pool, then the number of all blocks, [num_groups + 1]."""
    counts = [group.num_host_blocks if on_host else group.num_device_blocks for group in groups]
    return np.cumsum([0, *counts], dtype=np.int32)


def split_moves(step: Step, groups: Sequence[CacheGroup]) -> list[Step]:
    """Return a step for each cache group with only its block moves, numbered as in its pools.

    Both ends of a move are blocks of one cache group.
    """
    num_moves = len(step.blocks_to_swap_out) + len(step.blocks_to_swap_in) + len(step.blocks_to_copy)
    if len(groups) == 1 or not num_moves:
        return [step] * len(groups)
    device, host = firsts_of(groups), firsts_of(groups, on_host=True)
    return [
        replace(
            step,
            blocks_to_swap_out=_moves_of(index, step.blocks_to_swap_out, device, host),
            blocks_to_swap_in=_moves_of(index, step.blocks_to_swap_in, host, device),
            blocks_to_copy=_moves_of(index, step.blocks_to_copy, device, device),
        )
        for index in range(len(groups))
    ]


def _moves_of(index: int, pairs: Int32Array, sources: Int32Array, destinations: Int32Array) -> Int32Array:
    if not len(pairs):
        return pairs
    is_own = (pairs[:, 0] >= sources[index]) & (pairs[:, 0] < sources[index + 1])
    own: Int32Array = pairs[is_own] - np.array([sources[index], destinations[index]], np.int32)
    return own


# Of kinds that stand behind those with block tables that grow.
_PLACES = {CacheKind.ENCODER: 1, CacheKind.STATE: 2}


def why_unusable(groups: Sequence[CacheGroup]) -> str:
    """Say why a scheduler cannot use an executor's cache groups, in one sentence; empty: it can."""
    layers = sorted(layer for group in groups for layer in group.layers)
    largest = max((group.block_size_tokens for group in groups), default=0)
    for index, group in enumerate(groups):
        if group.block_size_tokens < 1 or largest % group.block_size_tokens:
            return f"cache group {index} has blocks of {group.block_size_tokens} tokens, which do not divide {largest}"
        if group.num_device_blocks < 1 and group.kind is not CacheKind.STATE:
            return f"cache group {index} has no blocks"
        if (group.window_tokens > 0) != (group.kind is CacheKind.WINDOW):
            return f"cache group {index} is of kind {group.kind.name} and has a window of {group.window_tokens} tokens"
    places = [_PLACES.get(group.kind, 0) for group in groups]
    if places != sorted(places) or (places and places[0]) or places.count(1) > 1:
        return "its cache groups of kinds ENCODER, one at most, and STATE do not stand behind all others, in this order"
    repeated = next((one for one, other in pairwise(layers) if one == other), None)
    if repeated is not None:
        return f"layer {repeated} is in two cache groups"
    if layers != list(range(len(layers))):
        missing = next(layer for layer in range(len(layers) + 1) if layer not in layers)
        return f"layer {missing} is in no cache group, of {counted(len(groups), 'group')}"
    return ""
