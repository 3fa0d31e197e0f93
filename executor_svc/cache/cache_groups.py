"""Layers with a window among layers without one: groups with pools of their own, in the memory that one pool has.

Layers with a recurrent state are the last group: the states of sequences lie at the slots of the batch table, and its
blocks are saved states. A window's group needs the blocks of the windows of all sequences, and of what one step
computes; as many again keep windows of earlier sequences for sequences that begin alike. The other layers get what is
left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from executor_svc.attention.interface import LayerCache
from executor_svc.cache.block_count import BlockCounts
from executor_svc.cache.cache_engine import BlockPools, CacheEngine, CacheShape
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind, split_moves
from octavo_shared.step_wire.step import Step


def size_groups(
    shape: CacheShape,
    windows: Sequence[int | None],
    blocks: BlockCounts,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    state_bytes: Mapping[int, int] = MappingProxyType({}),
) -> tuple[CacheGroup, ...]:
    """Return the cache groups of a model in the memory of `blocks` of all layers; none: all are alike, or it has none.

    Args:
        shape: What a block of all layers is.
        windows: Of each layer with attention, in tokens; None: it sees all.
        blocks: That one pool would have, and saved states.
        max_num_seqs: Most sequences that run at a time.
        max_num_batched_tokens: Most tokens of a step.
        state_bytes: Of a sequence in each layer with a state, by the number of the layer; the others attend.
    """
    attending = [layer for layer in range(len(windows) + len(state_bytes)) if layer not in state_bytes]
    layers_of = {
        window: [layer for layer, other in zip(attending, windows, strict=True) if other == window]
        for window in windows
    }
    if not blocks.device or (len(layers_of) == 1 and not state_bytes):
        return ()
    bytes_of_layer = shape.bytes_per_block // shape.num_layers
    num_blocks: dict[int | None, int] = {}
    num_layer_blocks = blocks.device * shape.num_layers
    for length in sorted(window for window in layers_of if window is not None):
        # Of a sequence, one more than a window fills: it begins and ends anywhere in a block.
        wanted = max_num_seqs * (-(-length // shape.block_size) + 1) - (-max_num_batched_tokens // shape.block_size)
        num_blocks[length] = min(2 * wanted, blocks.device)
        num_layer_blocks -= num_blocks[length] * len(layers_of[length])
    if None in layers_of:
        num_blocks = {None: num_layer_blocks // len(layers_of[None]), **num_blocks}
    groups: list[CacheGroup] = []
    for window, count in num_blocks.items():
        groups.append(
            CacheGroup(
                kind=CacheKind.FULL if window is None else CacheKind.WINDOW,
                layers=tuple(layers_of[window]),
                block_size_tokens=shape.block_size,
                num_device_blocks=count,
                num_host_blocks=blocks.host * count // blocks.device,
                bytes_per_block=bytes_of_layer * len(layers_of[window]),
                window_tokens=window or 0,
            )
        )
    if state_bytes:
        num_bytes, sizes = sum(state_bytes.values()), (shape.block_size, blocks.states, blocks.host_states)
        groups.append(CacheGroup(CacheKind.STATE, tuple(state_bytes), *sizes, bytes_per_block=num_bytes))
    return tuple(groups)


class GroupedCacheEngine:
    """Moves blocks of several groups, each in its own pools; see `CacheEngine`.

    Args:
        groups: Of the model.
        engines: One a group; that of a group with states holds saved ones.
    """

    def __init__(self, groups: Sequence[CacheGroup], engines: Sequence[BlockPools]) -> None:
        self._groups, self._engines = groups, engines
        cache_of = {
            layer: replace(cache, group=index)
            for index, (group, engine) in enumerate(zip(groups, engines, strict=True))
            if isinstance(engine, CacheEngine)
            for layer, cache in zip(group.layers, engine.layers, strict=True)
        }
        self.layers: tuple[LayerCache, ...] = tuple(cache_of[layer] for layer in sorted(cache_of))

    def move(self, step: Step) -> None:
        """Save states, swap out, swap in, copy, load states: in this order.

        Both ends of a move are blocks of one group.
        """
        for engine, own in zip(self._engines, split_moves(step, self._groups), strict=True):
            engine.move(own)
