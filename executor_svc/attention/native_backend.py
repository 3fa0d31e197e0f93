"""Paged attention in C that reads the cache in place: float32 on a CPU, any block size; see `executor_svc/native/`.

A plan cuts the step into tiles of query tokens of one sequence, and into tasks that the threads take in turn: a
tile and a KV head, or one part of its keys. The parts of a tile are tasks of their own only where there are too few
tiles to keep the threads busy, or one sequence is much longer than the others. That changes no bit of the result: the
library always sums part by part, and parts begin at fixed positions. Tasks cover the keys that a window leaves to see,
so they are planned once for each window, when the first layer asks for it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.attention.interface import AttentionLayer, AttentionMetadata, LayerCache, Rotation
from executor_svc.native.library import NativeLibrary
from executor_svc.native.model_structs import StepStruct
from shared.step import Int32Array

# Query vectors of a tile, tokens times heads of a group: enough to pay for packing the keys that they share, and no more
# than the cache of a core holds with their sums.
LEAST_TILE_QUERIES, MOST_TILE_QUERIES = 96, 384
# Tasks for each thread that even out sequences of different length.
TASKS_PER_THREAD = 4


class NativeAttentionBackend:
    """Plans for float32 caches on a CPU."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def plan(self, metadata: AttentionMetadata, cache: LayerCache) -> "NativeAttentionPlan":
        """Prepare a step."""
        return NativeAttentionPlan(self._library, metadata)


@dataclass(frozen=True, slots=True)
class _Tasks:
    """The work of a step under one window."""

    tiles: npt.NDArray[np.int32]  # [num_tiles, 6]
    tasks: npt.NDArray[np.int32]  # [num_tasks, 2]


class NativeAttentionPlan:
    """One step, prepared; see `executor_svc.attention.interface.AttentionPlan`."""

    def __init__(self, library: NativeLibrary, metadata: AttentionMetadata) -> None:
        self._library = library
        self._metadata = metadata
        self._block_tables = np.ascontiguousarray(metadata.block_tables, np.int32)
        self._longest = int((metadata.starts + metadata.lengths).max())
        self._structs: dict[AttentionLayer, StepStruct] = {}
        self._tasks: dict[int, _Tasks] = {}  # by window
        self._slopes: list[npt.NDArray[np.float32]] = []  # the structs have pointers into them

    def attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, cache: LayerCache, layer: AttentionLayer
    ) -> torch.Tensor:
        """Rotate, write the keys and values of all tokens into the cache, then attend."""
        num_tokens, num_vectors, head_dim = qkv.shape
        assert qkv.is_contiguous(), "tokens lie one after the other"
        num_heads = num_vectors - 2 * cache.keys.shape[2]
        struct = self._structs.get(layer)
        if struct is None:
            struct = self._structs[layer] = self.step_struct(num_tokens, num_heads, None, cache, layer)
        if rotation is None:
            struct.cos = struct.sin = None
        else:
            struct.cos, struct.sin = rotation.cos.data_ptr(), rotation.signed_sin.data_ptr()
        out = torch.empty(num_tokens, num_heads * head_dim)
        self._library.attention(struct, qkv, cache.keys, cache.values, out)
        return out

    def step_struct(
        self, num_tokens: int, num_heads: int, rotation: Rotation | None, cache: LayerCache, layer: AttentionLayer
    ) -> StepStruct:
        """Describe the step for layers that attend like this one.

        The struct has pointers into the plan and the rotation, which must live as long as it is used. Arguments as of
        `attend`; `cache` stands for all layers.
        """
        num_kv_heads, head_dim = cache.keys.shape[2:]
        window = self._longest if layer.window_tokens is None else min(layer.window_tokens, self._longest)
        tasks = self._tasks_under(window, num_tokens, num_heads, num_kv_heads)
        slopes: npt.NDArray[np.float32] | None = None
        if layer.alibi_slopes is not None:
            slopes = np.array(layer.alibi_slopes, np.float32)
            self._slopes.append(slopes)
        return StepStruct(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=cache.block_size,
            num_tokens=num_tokens,
            table_width=self._block_tables.shape[1],
            window=window,
            scale=layer.scale,
            soft_cap=layer.soft_cap or 0.0,
            slopes=None if slopes is None else slopes.ctypes.data,
            cos=None if rotation is None else rotation.cos.data_ptr(),
            sin=None if rotation is None else rotation.signed_sin.data_ptr(),
            slot_mapping=self._metadata.slot_mapping.data_ptr(),
            block_tables=self._block_tables.ctypes.data,
            tiles=tasks.tiles.ctypes.data,
            num_tiles=len(tasks.tiles),
            most_tokens=int(tasks.tiles[:, 2].max()),
            tasks=tasks.tasks.ctypes.data,
            num_tasks=len(tasks.tasks),
            num_partials=int(tasks.tiles[:, 4].sum()),
        )

    def _tasks_under(self, window: int, num_tokens: int, num_heads: int, num_kv_heads: int) -> _Tasks:
        """Return the work of layers whose tokens see the last `window` positions."""
        tasks = self._tasks.get(window)
        if tasks is None:
            group = num_heads // num_kv_heads
            num_wanted = self._library.num_threads * TASKS_PER_THREAD / num_kv_heads
            tile_queries = max(LEAST_TILE_QUERIES, min(MOST_TILE_QUERIES, int(num_tokens * group / num_wanted)))
            tiles = query_tiles(self._metadata.starts, self._metadata.lengths, max(1, tile_queries // group))
            tasks = self._tasks[window] = _Tasks(tiles, split_keys(tiles, num_wanted, window, self._library.part_keys))
        return tasks


def query_tiles(starts: Int32Array, lengths: Int32Array, tile_tokens: int) -> npt.NDArray[np.int32]:
    """Cut rows into tiles of at most `tile_tokens` tokens; return [num_tiles, 6], `QueryTile` of step.h.

    The columns are: row, first token in the step, tokens, position of the first token, then 0 and 0 for
    `split_keys` to fill in.
    """
    num_tiles = -(-lengths // tile_tokens)
    sizes = -(-lengths // num_tiles)  # of equal tiles
    rows = np.repeat(np.arange(len(lengths)), num_tiles)
    offsets = (np.arange(len(rows)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * sizes[rows]
    tiles = np.zeros((len(rows), 6), np.int32)
    tiles[:, 0] = rows
    tiles[:, 1] = (np.cumsum(lengths) - lengths)[rows] + offsets
    tiles[:, 2] = np.minimum(sizes[rows], lengths[rows] - offsets)
    tiles[:, 3] = starts[rows] + offsets
    return tiles


def split_keys(tiles: npt.NDArray[np.int32], num_wanted: float, window: int, part_keys: int) -> npt.NDArray[np.int32]:
    """Let threads share the parts of tiles that are a large part of the work; return the tasks, [num_tasks, 2].

    Args:
        tiles: Of `query_tiles`; the number of parts that are tasks of their own, and the place of their results, are
            filled in.
        num_wanted: Into how many equal tasks the whole should about fall.
        window: Positions that a token sees.
        part_keys: Positions of a part; the first begins at position 0.

    Returns:
        Tile, and which of its parts; 0 of a tile that is one task. Where there are chunks the largest tasks come first,
        so that threads end together.
    """
    ends = tiles[:, 3] + tiles[:, 2]
    begins = np.maximum(0, tiles[:, 3] + 1 - window)
    num_parts = -(-ends // part_keys) - begins // part_keys
    work = (ends - begins).astype(np.float64) * tiles[:, 2]
    is_split = (work * num_wanted > work.sum()) & (num_parts > 1)
    tiles[:, 4] = np.where(is_split, num_parts, 0)
    tiles[:, 5] = np.cumsum(tiles[:, 4]) - tiles[:, 4]
    num_tasks = np.maximum(tiles[:, 4], 1)
    tasks = np.empty((num_tasks.sum(), 2), np.int32)
    tasks[:, 0] = np.repeat(np.arange(len(tiles)), num_tasks)
    tasks[:, 1] = np.arange(len(tasks)) - np.repeat(np.cumsum(num_tasks) - num_tasks, num_tasks)
    if tiles[:, 2].max() > 1:
        tasks = tasks[np.argsort(-(work / num_tasks)[tasks[:, 0]], kind="stable")]
    return tasks
