"""Paged attention in our own Triton kernels (`executor_svc/triton_kernels/`): any CUDA device from 8.0 on.

A plan parts the rows of a step: rows of one token go to the decode kernel, longer ones to the prefill kernel. What
depends on no layer is made and copied to the device once a step.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.attention.explicit_attention import slopes_on
from executor_svc.attention.interface import AttentionLayer, AttentionMetadata, DecodeBatch, LayerCache, Rotation
from executor_svc.attention.splits import MAX_WAVES, multiprocessors_of, number_of_splits
from executor_svc.device.transfer import to_device
from executor_svc.triton_kernels.decode import DecodeRows, PartialResults, decode
from executor_svc.triton_kernels.key_value_write import write_in_triton
from executor_svc.triton_kernels.prefill import PrefillRows, prefill, query_tiles
from executor_svc.triton_kernels.tiles import (
    MAX_RESIDENT_PROGRAMS,
    groups_of,
    prefill_tile,
    resident_programs,
)

# Of a tile of queries: with fewer keys a split writes and reads more of its results than it reads keys and values.
MIN_SPLIT_KEYS: Final = 256
# Arrays in one copy begin at multiples of 16 bytes: the compiler makes one kernel for aligned addresses only.
ALIGNMENT: Final = 4


def number_of_prefill_splits(num_tiles: int, num_groups: int, num_keys: int, num_multiprocessors: int) -> int:
    """Return into how many parts the prefill kernel cuts the keys of each tile of queries.

    A program fills a multiprocessor, or nearly. Where there is one for each, more would only wait.

    Args:
        num_tiles: 1 or more.
        num_groups: Programs of a tile; see `groups_of`.
        num_keys: That the longest tile sees.
        num_multiprocessors: Of the device.
    """
    if num_tiles * num_groups >= num_multiprocessors:
        return 1
    most = max(1, num_keys // MIN_SPLIT_KEYS)
    return min(most, number_of_splits(num_tiles, num_groups, num_multiprocessors))


class TritonAttentionBackend:
    """Plans for caches on torch's current CUDA device. Steps run one after the other, on one stream.

    It keeps the memory in which the splits of a decode leave their results: CUDA graphs have its address.

    Args:
        num_multiprocessors: Of the device; None: ask it.
    """

    def __init__(self, num_multiprocessors: int | None = None) -> None:
        self._num_multiprocessors = num_multiprocessors
        self._memory: SplitMemory | None = None

    def plan(self, metadata: AttentionMetadata, cache: LayerCache) -> "TritonAttentionPlan":
        """Prepare a step."""
        device = cache.keys.device
        starts, lengths, tables = metadata.starts, metadata.lengths, metadata.block_tables
        first_tokens = np.cumsum(lengths) - lengths
        is_decode = lengths == 1
        num_decodes = int(is_decode.sum())
        rest = np.flatnonzero(~is_decode)
        visible, token_ids, decode_tables, chunk_tables = copy_at_once(
            [
                starts[is_decode] + 1,
                first_tokens[is_decode],
                tables[is_decode] if len(rest) else tables,
                tables[rest],
            ],
            device,
        )
        decodes = chunks = None
        if num_decodes:
            decodes = DecodeRows(visible, decode_tables, token_ids if len(rest) else None)
        if len(rest):
            chunks = Chunks(starts[rest], lengths[rest], first_tokens[rest], chunk_tables)
        return TritonAttentionPlan(metadata.slot_mapping, decodes, chunks, self._splits(num_decodes, cache))

    def write(
        self, qkv: torch.Tensor, rotation: Rotation | None, slot_mapping: torch.Tensor, cache: LayerCache
    ) -> torch.Tensor:
        """Rotate, and write keys and values; see `CacheReader`."""
        return write_in_triton(qkv, rotation, slot_mapping, cache).query

    def decode_plan(self, batch: DecodeBatch, cache: LayerCache) -> "TritonAttentionPlan":
        """Prepare decodes that depend on nothing on the host; see `DecodePlanner`.

        The backend must live as long as a CUDA graph of the plan.
        """
        rows = DecodeRows(batch.num_visible_tokens, batch.block_tables, None)
        return TritonAttentionPlan(batch.slot_mapping, rows, None, self._splits(len(batch.num_visible_tokens), cache))

    def _splits(self, num_rows: int, cache: LayerCache) -> "Splits":
        """Return how decodes of so many rows are split."""
        if self._memory is None:
            self._memory = SplitMemory(self._num_multiprocessors or multiprocessors_of(cache.keys.device))
        if not num_rows:
            return Splits(1, self._memory)
        num_kv_heads = cache.keys.shape[2]
        num_resident = resident_programs(cache.value_dim, cache.keys.dtype.itemsize, _capability(cache.keys.device))
        num_places = num_resident * self._memory.num_multiprocessors
        return Splits(number_of_splits(num_rows, num_kv_heads, num_places), self._memory)


class SplitMemory:
    """The results of splits, until they are joined: room for as many as there can ever be, made at first use.

    Args:
        num_multiprocessors: Of the device.
    """

    def __init__(self, num_multiprocessors: int) -> None:
        self.num_multiprocessors = num_multiprocessors
        self._partial: dict[tuple[int, int], PartialResults] = {}

    def take(self, num_queries: int, num_resident: int, value_dim: int, device: torch.device) -> PartialResults:
        """Return the room for `MAX_WAVES` of programs; all callers get the same.

        Args:
            num_queries: Of a program: heads of a decode, tokens times heads of a tile.
            num_resident: Most programs of a multiprocessor.
            value_dim: Of the layer.
            device: Where the room is.
        """
        key = num_queries * num_resident, value_dim
        partial = self._partial.get(key)
        if partial is None:
            num_parts = MAX_WAVES * self.num_multiprocessors * num_queries * num_resident
            outputs = torch.empty(num_parts * value_dim, dtype=torch.float32, device=device)
            scores = torch.empty(num_parts, dtype=torch.float32, device=device)
            partial = self._partial[key] = PartialResults(outputs, scores)
        return partial


@dataclass(frozen=True, slots=True)
class Splits:
    """How the decodes of a step are split."""

    number: int
    memory: SplitMemory


@dataclass(frozen=True, slots=True)
class Chunks:
    """Rows of several tokens; for the invariant attention all rows. The arrays are on the host, [num_rows]."""

    starts: npt.NDArray[np.int32]  # position of the first token
    lengths: npt.NDArray[np.int32]
    first_tokens: npt.NDArray[np.int64]  # index of the first token in the step
    block_tables: torch.Tensor  # [num_rows, max_num_blocks] int32, on the device


class TritonAttentionPlan:
    """One step, prepared; see `executor_svc.attention.interface.AttentionPlan`."""

    def __init__(
        self,
        slot_mapping: torch.Tensor,
        decodes: DecodeRows | None,
        chunks: Chunks | None,
        splits: Splits,
    ) -> None:
        self._slot_mapping = slot_mapping
        self._decodes = decodes
        self._chunks = chunks
        self._splits = splits
        self._prefill_rows: PrefillRows | None = None  # made by the first layer, which knows the number of heads

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
        slopes = layer.alibi_slopes
        slopes_tensor = None if slopes is None else slopes_on(query.device, query.dtype, slopes)
        if self._decodes is not None:
            partial = None
            if self._splits.number > 1:
                group = num_heads // cache.keys.shape[2]
                partial = self._splits.memory.take(group, MAX_RESIDENT_PROGRAMS, cache.value_dim, query.device)
            decode(self._decodes, query, cache, layer, slopes_tensor, self._splits.number, partial, output)
        if self._chunks is not None:
            if self._prefill_rows is None:
                self._prefill_rows = prefill_rows(self._chunks, query, cache)
            self._prefill(self._prefill_rows, query, cache, layer, slopes_tensor, output)

    def _prefill(
        self,
        rows: PrefillRows,
        query: torch.Tensor,
        cache: LayerCache,
        layer: AttentionLayer,
        slopes: torch.Tensor | None,
        output: torch.Tensor,
    ) -> None:
        """Attend with the rows of several tokens, their keys split where tiles are few."""
        memory, tile = self._splits.memory, rows.tile
        num_groups, group = groups_of(query.shape[1], cache)
        num_keys = rows.num_keys
        if layer.window_tokens is not None:
            num_keys = min(num_keys, layer.window_tokens + tile.num_queries // group - 1)
        number = number_of_prefill_splits(len(rows.tiles), num_groups, num_keys, memory.num_multiprocessors)
        room = memory.take(tile.num_queries, 1, cache.value_dim, query.device)  # so that the largest steps have it
        partial = None if number == 1 else room
        prefill(rows, query, cache, layer, slopes, number, partial, output)


def prefill_rows(chunks: Chunks, query: torch.Tensor, cache: LayerCache) -> PrefillRows:
    """Cut rows into tiles for a query, [num_tokens, num_heads, head_dim], and a cache."""
    _, group = groups_of(query.shape[1], cache)
    itemsizes = query.dtype.itemsize, cache.keys.dtype.itemsize
    tile = prefill_tile(cache.value_dim, group, *itemsizes, _capability(query.device))
    tiles = query_tiles(chunks.starts, chunks.lengths, chunks.first_tokens, tile.num_queries // group)
    num_keys = int(tiles[0, 2] + tiles[0, 3])  # the longest tile is the first
    return PrefillRows(to_device(tiles, query.device), chunks.block_tables, tile, num_keys)


def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability; the interpreter has no device, and any is right there."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def copy_at_once(arrays: list[npt.NDArray[np.integer]], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to a device in one piece, int32, without waiting."""
    ends = np.cumsum([-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
    begins = [0, *ends[:-1]]
    packed: npt.NDArray[np.int32] = np.empty(ends[-1], np.int32)
    for begin, array in zip(begins, arrays, strict=True):
        packed[begin : begin + array.size].reshape(array.shape)[...] = array
    on_device = to_device(packed, device)
    return [
        on_device[begin : begin + array.size].view(array.shape) for begin, array in zip(begins, arrays, strict=True)
    ]
