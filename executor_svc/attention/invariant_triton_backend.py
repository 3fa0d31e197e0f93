"""Paged attention whose bits do not depend on the schedule; see `executor_svc/triton_kernels/invariant_attention.py`.

The batch decides here which program computes a split of keys, never how the split is added up.
"""

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.attention.explicit_attention import slopes_on
from executor_svc.attention.interface import AttentionLayer, AttentionMetadata, DecodeBatch, LayerCache, Rotation
from executor_svc.attention.splits import multiprocessors_of, number_of_splits
from executor_svc.attention.triton_backend import Chunks, copy_at_once
from executor_svc.triton_kernels.invariant_attention import QueryTiles, SplitStates, attend
from executor_svc.triton_kernels.key_value_write import write_in_triton
from executor_svc.triton_kernels.prefill import query_tiles
from executor_svc.triton_kernels.tiles import SPLIT_KEYS, groups_of, invariant_tile

# Programs that a multiprocessor works on at once: 80 KiB of shared memory each, with heads of 128 numbers in 16 bits.
RESIDENT_PROGRAMS = 2
# Of tiles of several tokens, each of which leaves a state for every split: 64 tokens behind 32k take half of it.
MAX_STATE_BYTES = 128 * 2**20


class InvariantAttentionBackend:
    """Plans for caches on torch's current CUDA device. Steps run one after the other, on one stream.

    Args:
        num_multiprocessors: Of the device; None: ask it.
    """

    def __init__(self, num_multiprocessors: int | None = None) -> None:
        self._num_multiprocessors = num_multiprocessors
        self._memory: SplitMemory | None = None

    def plan(self, metadata: AttentionMetadata, cache: LayerCache) -> "InvariantAttentionPlan":
        """Prepare a step."""
        starts, lengths = metadata.starts, metadata.lengths
        first_tokens = np.cumsum(lengths) - lengths
        decodes = np.flatnonzero(lengths == 1)
        rows, firsts, counts, ends, tables = copy_at_once(
            [decodes, first_tokens[decodes], lengths[decodes], starts[decodes] + 1, metadata.block_tables],
            cache.keys.device,
        )
        decode_tiles = QueryTiles(rows, firsts, counts, ends, tables) if len(decodes) else None
        chunks = None if len(decodes) == len(starts) else Chunks(starts, lengths, first_tokens, tables)
        return InvariantAttentionPlan(metadata.slot_mapping, decode_tiles, chunks, self._split_memory(cache))

    def write(
        self, qkv: torch.Tensor, rotation: Rotation | None, slot_mapping: torch.Tensor, cache: LayerCache
    ) -> torch.Tensor:
        """Rotate, and write keys and values; see `CacheReader`."""
        return write_in_triton(qkv, rotation, slot_mapping, cache).query

    def decode_plan(self, batch: DecodeBatch, cache: LayerCache) -> "InvariantAttentionPlan":
        """Prepare decodes that depend on nothing on the host; see `DecodePlanner`.

        The backend must live as long as a CUDA graph of the plan.
        """
        rows = torch.arange(len(batch.num_visible_tokens), dtype=torch.int32, device=cache.keys.device)
        tiles = QueryTiles(rows, rows, torch.ones_like(rows), batch.num_visible_tokens, batch.block_tables)
        return InvariantAttentionPlan(batch.slot_mapping, tiles, None, self._split_memory(cache))

    def _split_memory(self, cache: LayerCache) -> "SplitMemory":
        if self._memory is None:
            device = cache.keys.device
            number = self._num_multiprocessors or multiprocessors_of(device)
            self._memory = SplitMemory(RESIDENT_PROGRAMS * number, device)
        return self._memory


class SplitMemory:
    """Shares the splits of tiles out to programs, and keeps room for their states: CUDA graphs have its address.

    Args:
        num_places: Programs that the device runs at once.
        device: Where the room is.
    """

    def __init__(self, num_places: int, device: torch.device) -> None:
        self._num_places = num_places
        self._device = device
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = [self._make(1, 1)]

    def take(
        self, num_tiles: int, tile_tokens: int, num_groups: int, group: int, value_dim: int, num_positions: int
    ) -> SplitStates:
        """Return how tiles are shared out, and the room for it.

        Where there are as many tiles as places, each has one program: more would only wait. So it has where states of
        tiles of several tokens would take more than `MAX_STATE_BYTES`, which the first of them takes.

        Args:
            num_tiles: 1 or more.
            tile_tokens: Most tokens of a tile.
            num_groups: Of the layer; see `groups_of`.
            group: Query heads of one.
            value_dim: Of the layer.
            num_positions: Of the longest row that there can be.
        """
        most_splits = -(-num_positions // SPLIT_KEYS) + 1  # a window may begin and end inside of one
        num_programs = 1
        if num_tiles * num_groups < self._num_places:
            num_programs = min(most_splits, number_of_splits(num_tiles, num_groups, self._num_places))
        if tile_tokens == 1:
            # Enough for every number of tiles, so that it grows with the longest row alone. Each time it doubles: what
            # was outgrown is kept for the graphs that have its address.
            num_splits = 1 << (most_splits - 1).bit_length()
            most_states = self._num_places * group * num_splits
        else:
            num_splits, most_states = most_splits, MAX_STATE_BYTES // (4 * value_dim)
            if num_tiles * num_groups * tile_tokens * group * num_splits > most_states:
                num_programs = 1
        if num_programs == 1 and tile_tokens == 1:
            return SplitStates(1, 1, 1, *self._kept[0])
        outputs, scores = self._kept[-1]
        if len(outputs) < most_states * value_dim or len(scores) < most_states * 2:
            outputs, scores = self._make(most_states * value_dim, most_states * 2)
            self._kept.append((outputs, scores))
        return SplitStates(num_programs, num_splits, tile_tokens, outputs, scores)

    def _make(self, num_outputs: int, num_scores: int) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = torch.empty(num_outputs, dtype=torch.float32, device=self._device)
        return outputs, torch.empty(num_scores, dtype=torch.float32, device=self._device)


class InvariantAttentionPlan:
    """One step, prepared; see `executor_svc.attention.interface.AttentionPlan`."""

    def __init__(
        self, slot_mapping: torch.Tensor, decodes: QueryTiles | None, chunks: Chunks | None, memory: SplitMemory
    ) -> None:
        self._slot_mapping = slot_mapping
        self._decodes = decodes
        self._chunks = chunks
        self._memory = memory
        self._chunk_tiles: QueryTiles | None = None  # made by the first layer, which knows the number of heads

    def attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, cache: LayerCache, layer: AttentionLayer
    ) -> torch.Tensor:
        """Rotate, write the keys and values of all tokens into the cache, then attend; see `AttentionPlan`."""
        query = write_in_triton(qkv, rotation, self._slot_mapping, cache).query
        output = query.new_empty(len(query), query.shape[1] * cache.value_dim)
        self.read(query, cache, layer, output)
        return output

    def read(self, query: torch.Tensor, cache: LayerCache, layer: AttentionLayer, output: torch.Tensor) -> None:
        """Attend to what is in the cache; see `ReadPlan`."""
        num_heads = query.shape[1]
        num_groups, group = groups_of(num_heads, cache)
        shape = invariant_tile(cache.value_dim, group, max(query.dtype.itemsize, cache.keys.dtype.itemsize))
        slopes = None if layer.alibi_slopes is None else slopes_on(query.device, query.dtype, layer.alibi_slopes)
        if self._decodes is not None:
            num_positions = self._decodes.block_tables.shape[1] * cache.block_size
            states = self._memory.take(len(self._decodes.rows), 1, num_groups, group, cache.value_dim, num_positions)
            attend(self._decodes, shape, query, cache, layer, slopes, states, output)
        if self._chunks is not None:
            tile_tokens = shape.num_queries // group
            if self._chunk_tiles is None:
                self._chunk_tiles = tiles_of(self._chunks, tile_tokens)
            num_positions = self._chunks.block_tables.shape[1] * cache.block_size
            num_tiles = len(self._chunk_tiles.rows)
            states = self._memory.take(num_tiles, tile_tokens, num_groups, group, cache.value_dim, num_positions)
            attend(self._chunk_tiles, shape, query, cache, layer, slopes, states, output)


def tiles_of(chunks: Chunks, num_tokens: int) -> QueryTiles:
    """Cut the rows of several tokens into tiles of up to `num_tokens`."""
    several = np.flatnonzero(chunks.lengths > 1)
    found = query_tiles(chunks.starts[several], chunks.lengths[several], chunks.first_tokens[several], num_tokens)
    arrays: list[npt.NDArray[np.integer]] = [several[found[:, 0]], found[:, 1], found[:, 2], found[:, 3] + found[:, 2]]
    rows, first_tokens, num_tokens_of, ends = copy_at_once(arrays, chunks.block_tables.device)
    return QueryTiles(rows, first_tokens, num_tokens_of, ends, chunks.block_tables)
