"""Layers with a window among layers without one: groups with pools of their own, in the memory that one pool has.

Layers with a recurrent state are the last group: the states of sequences lie at the slots of the batch table, and its
blocks are saved states. A window's group needs the blocks of the windows of all sequences, and of what one step
computes; as many again keep windows of earlier sequences for sequences that begin alike. The other layers get what is
left; those that attend to an encoder get as many blocks as those that attend to the sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from executor_svc.attention.interface import CachedLayer, LayerCache
from executor_svc.cache.block_count import BlockCounts
from executor_svc.cache.cache_engine import BlockPools, CacheEngine, CacheShape
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind, firsts_of, split_moves
from octavo_shared.step_wire.step import Int32Array, Step


def size_groups(
    shape: CacheShape,
    caches: Sequence[CachedLayer],
    blocks: BlockCounts,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    state_bytes: Mapping[int, int] = MappingProxyType({}),
) -> tuple[CacheGroup, ...]:
    """Return the cache groups of a model in the memory of `blocks` of all layers; none: all are alike, or it has none.

    Args:
        shape: What a block of all layers is.
        caches: What each layer with keys and values keeps; alike ones are a group.
        blocks: That one pool would have, and saved states.
        max_num_seqs: Most sequences that run at a time.
        max_num_batched_tokens: Most tokens of a step.
        state_bytes: Of a sequence in each layer with a state, by the number of the layer; the others attend.
    """
    attending = [layer for layer in range(len(caches) + len(state_bytes)) if layer not in state_bytes]
    layers_of: dict[CachedLayer, list[int]] = {}
    for layer, cache in zip(attending, caches, strict=True):
        layers_of.setdefault(cache, []).append(layer)
    if not blocks.device or (len(layers_of) == 1 and not state_bytes):
        return ()
    bytes_of = {
        kind: shape.of(len(layers), kind.num_kv_heads, kind.head_dim).bytes_per_block
        for kind, layers in layers_of.items()
    }
    num_blocks: dict[CachedLayer, int] = {}
    num_bytes = blocks.device * shape.bytes_per_block
    for kind in sorted(layers_of, key=lambda each: each.window or 0):
        if not kind.window:
            continue
        # Of a sequence, one more than a window fills: it begins and ends anywhere in a block.
        of_sequence = -(-kind.window // shape.block_size) + 1
        wanted = max_num_seqs * of_sequence - (-max_num_batched_tokens // shape.block_size)
        num_blocks[kind] = min(2 * wanted, blocks.device)
        num_bytes -= num_blocks[kind] * bytes_of[kind]
    whole = [kind for kind in layers_of if not kind.window]
    of_whole = num_bytes // max(1, sum(bytes_of[kind] for kind in whole))
    groups: list[CacheGroup] = []
    for kind, count in {**dict.fromkeys(whole, of_whole), **num_blocks}.items():
        groups.append(
            CacheGroup(
                kind=_kind_of(kind),
                layers=tuple(layers_of[kind]),
                block_size_tokens=shape.block_size,
                num_device_blocks=count,
                num_host_blocks=blocks.host * count // blocks.device,
                bytes_per_block=bytes_of[kind],
                window_tokens=kind.window or 0,
            )
        )
    if state_bytes:
        num_bytes, sizes = sum(state_bytes.values()), (shape.block_size, blocks.states, blocks.host_states)
        groups.append(CacheGroup(CacheKind.STATE, tuple(state_bytes), *sizes, bytes_per_block=num_bytes))
    return tuple(groups)


def _kind_of(layer: CachedLayer) -> CacheKind:
    if layer.is_of_encoder:
        return CacheKind.ENCODER
    return CacheKind.WINDOW if layer.window else CacheKind.LATENT if layer.value_begin else CacheKind.FULL


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

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """The bytes of a block of each group."""
        return tuple(num_bytes for engine in self._engines for num_bytes in engine.block_bytes)

    def begin_transfers(self) -> None:
        """See `executor_svc.worker.interface.Worker`; so do the others."""
        for engine in self._engines:
            engine.begin_transfers()

    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the content of blocks of one group, [n, bytes of a block]."""
        index, places = self._in_group(block_ids)
        return self._engines[index].read_blocks(places)

    def write_blocks(self, block_ids: Int32Array, content: npt.NDArray[np.uint8]) -> None:
        """Make `content`, [n, bytes of a block], that of blocks of one group."""
        index, places = self._in_group(block_ids)
        self._engines[index].write_blocks(places, content)

    def _in_group(self, block_ids: Int32Array) -> tuple[int, Int32Array]:
        """Return the group of blocks, and their numbers in its pool."""
        firsts = firsts_of(self._groups)
        index = int(np.searchsorted(firsts, block_ids[0], side="right")) - 1
        return index, block_ids - firsts[index]


class JoinedCacheEngine:
    """Layers whose heads have several sizes, for a scheduler that knows of no groups: each block is there for all.

    Args:
        engines: Of each size, and which of the layers it has.
    """

    def __init__(self, engines: Sequence[tuple[CacheEngine, Sequence[int]]]) -> None:
        self._engines = [engine for engine, _ in engines]
        layers = {place: cache for engine, own in engines for place, cache in zip(own, engine.layers, strict=True)}
        self.layers: tuple[LayerCache, ...] = tuple(layers[place] for place in sorted(layers))

    def move(self, step: Step) -> None:
        """Move the blocks of all layers; see `CacheEngine.move`."""
        for engine in self._engines:
            engine.move(step)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """The bytes of a block over all layers."""
        return (sum(num_bytes for engine in self._engines for num_bytes in engine.block_bytes),)

    def begin_transfers(self) -> None:
        """See `executor_svc.worker.interface.Worker`; so do the others."""
        for engine in self._engines:
            engine.begin_transfers()

    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the content of blocks, [n, bytes of a block]."""
        return np.concatenate([engine.read_blocks(block_ids) for engine in self._engines], axis=1)

    def write_blocks(self, block_ids: Int32Array, content: npt.NDArray[np.uint8]) -> None:
        """Make `content`, [n, bytes of a block], that of blocks."""
        ends = np.cumsum([engine.block_bytes[0] for engine in self._engines])[:-1]
        for engine, own in zip(self._engines, np.split(content, ends, axis=1), strict=True):
            engine.write_blocks(block_ids, own)
