"""Prefill attention: rows of any number of tokens over the paged cache.

Source of the tiles and of the order of the loops: Dao 2023, "FlashAttention-2". A program takes a tile of consecutive
tokens of one row and one KV head: all query heads of its group for these tokens are the rows of its matrices, so that
keys and values are read once for the group. Which tile is which is a table made on the host. Where tiles are few, as
of a short prompt behind a long cached prefix, the keys of each are split over several programs, and `reduce_kernel`
joins the parts.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from executor_svc.attention.interface import AttentionLayer, LayerCache
from executor_svc.triton_kernels.cache_formats import INT8, numbers_of, operands_of
from executor_svc.triton_kernels.common import (
    LOG2_E,
    LOWEST_SCORE,
    add_distance_biases,
    add_sinks,
    block_ids_of,
    dot,
    first_numbers,
    query_tile_at,
    scale_offsets,
    shape_scores,
    slot_offsets,
    split_of_tiles,
    window_of_tile,
)
from executor_svc.triton_kernels.decode import PartialResults, reduce_kernel
from executor_svc.triton_kernels.tiles import WIDEST_WINDOW, QueryTile, groups_of, pad, reduce_room, reduce_warps
from octavo_shared.step_wire.step import Int32Array


@triton.jit
def attend_to_tiles(
    begin,
    end,
    state,
    q,
    q_first,
    keys,
    values,
    block_table,
    first_position,
    end_position,
    query_positions,
    slope,
    scale,
    soft_cap,
    window,
    dims,
    kv_head,
    key_scales,
    value_scales,
    heads,
    biases,
    num_distances,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_BEGIN: tl.constexpr,
    BEGIN_PADDED: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Go over some tiles of keys; return the running highest scores, totals and weighted values of the queries.

    Without a mask every query sees every key of these tiles. `VALUE_BEGIN` is not 0 of a latent cache; see
    `decode_kernel`.
    """
    VALUE_DIM: tl.constexpr = HEAD_DIM - VALUE_BEGIN
    cache_head = 0 if VALUE_BEGIN else kv_head
    # See `decode_kernel`.
    scales_values: tl.constexpr = FORMAT == INT8 and q.dtype == tl.float16
    highest, total, weighted = state
    for tile in tl.range(begin, end):
        positions = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
        # Whether any query sees the key; what none sees may be NaN, and 0 * NaN is NaN: it is not read.
        is_read = (positions >= first_position) & (positions < end_position)
        block_ids = block_ids_of(block_table, positions, is_read, BLOCK_SIZE)
        slots = slot_offsets(block_ids, positions, SLOT_STRIDE, BLOCK_SIZE, BLOCK_STRIDE)
        offsets = slots[:, None] + (cache_head * HEAD_DIM + VALUE_BEGIN + dims)[None, :]
        is_element = is_read[:, None] & (dims < VALUE_DIM)[None, :]
        key_elements = tl.load(keys + offsets, mask=is_element, other=0)
        value_elements = key_elements if VALUE_BEGIN else tl.load(values + offsets, mask=is_element, other=0)
        k = numbers_of(key_elements, q.dtype, FORMAT)
        products = tl.full([q.shape[0], TILE_KEYS], 0.0, tl.float32)
        if VALUE_BEGIN:
            first_elements = first_numbers(keys + slots, is_read, VALUE_BEGIN, BEGIN_PADDED)
            products = dot(q_first, tl.trans(numbers_of(first_elements, q.dtype, FORMAT)), products)
        products = dot(q, tl.trans(k), products)
        if FORMAT == INT8:
            scales = scale_offsets(block_ids, positions, cache_head, BLOCK_SIZE, BLOCK_STRIDE)
            products *= tl.load(key_scales + scales, mask=is_read, other=0.0)[None, :]
            of_values = tl.load(value_scales + scales, mask=is_read, other=0.0)
        if scales_values:
            v = (numbers_of(value_elements, tl.float32, FORMAT) * of_values[:, None]).to(q.dtype)
        else:
            v = numbers_of(value_elements, q.dtype, FORMAT)
        distances = positions[None, :] - query_positions[:, None]
        scores = shape_scores(products, distances.to(tl.float32), slope, scale, soft_cap, HAS_SOFT_CAP, HAS_ALIBI)
        if biases is not None:
            rows = biases + heads[:, None] * num_distances
            nearest = tl.min(query_positions) + 1 - (tile + 1) * TILE_KEYS
            scores = add_distance_biases(scores, distances, nearest, rows, num_distances)
        if IS_MASKED:
            is_visible = distances <= 0
            if HAS_WINDOW:
                is_visible = is_visible & (distances > -window)
            scores = tl.where(is_visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        correction = tl.exp2(highest - new_highest)
        total = total * correction + tl.sum(weights, 1)
        if FORMAT == INT8 and not scales_values:
            weights *= of_values[None, :]
        weighted = dot(weights.to(v.dtype), v, weighted * correction[:, None])
        highest = new_highest
    return highest, total, weighted


@triton.jit(do_not_specialize=["table_stride", "window", "num_splits"])
def prefill_kernel(
    query,
    query_stride,
    keys,
    values,
    block_tables,
    table_stride,
    tiles,
    slopes,
    output,
    partial_outputs,
    partial_scores,
    scale,
    soft_cap,
    window,
    num_splits,
    key_scales,
    value_scales,
    value_factor,
    sinks,
    biases,
    num_distances,
    IS_SPLIT: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_BEGIN: tl.constexpr,
    BEGIN_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Attend with one tile of queries of one group to one split of its keys; the grid is (KV heads, tiles, splits)."""
    VALUE_DIM: tl.constexpr = HEAD_DIM - VALUE_BEGIN
    kv_head = tl.program_id(0)
    index = tl.program_id(1)
    row = tl.load(tiles + index * 4)
    first_token, num_tokens, start = query_tile_at(tiles, index)
    queries = tl.arange(0, TILE_QUERIES)
    dims = tl.arange(0, DIM_PADDED)
    tokens = queries // GROUP
    heads = kv_head * GROUP + queries % GROUP
    is_query = (tokens < num_tokens)[:, None] & (dims < VALUE_DIM)[None, :]
    token_offsets = (first_token + tokens).to(tl.int64)
    query_rows = query + token_offsets * query_stride + heads * HEAD_DIM
    q = tl.load(query_rows[:, None] + (VALUE_BEGIN + dims)[None, :], mask=is_query, other=0.0)
    q_first = q
    if VALUE_BEGIN:
        q_first = first_numbers(query_rows, tokens < num_tokens, VALUE_BEGIN, BEGIN_PADDED)
    slope = 0.0
    if slopes is not None:
        slope = tl.load(slopes + heads)[:, None] * LOG2_E
    end_position = start + num_tokens
    first_position = 0
    begin = 0
    full_begin = 0
    if HAS_WINDOW:
        first_position = tl.maximum(start + 1 - window, 0)
        begin = first_position // TILE_KEYS
        # The first position that the last token sees, in whole tiles.
        full_begin = (tl.maximum(end_position - window, 0) + TILE_KEYS - 1) // TILE_KEYS
    end = (end_position + TILE_KEYS - 1) // TILE_KEYS
    # Up to here the first token sees whole tiles.
    full_end = (start + 1) // TILE_KEYS
    full_begin = tl.minimum(full_begin, end)
    full_end = tl.maximum(full_begin, full_end)
    if IS_SPLIT:
        # The three ranges below, as far as they are in the split.
        seen = window_of_tile(window, num_tokens, end_position)
        begin, end, _, _ = split_of_tiles(end_position, seen, tl.program_id(2), num_splits, TILE_KEYS)
        if begin >= end:
            return
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
        full_end = tl.minimum(tl.maximum(full_end, begin), end)
    state = (
        tl.full([TILE_QUERIES], LOWEST_SCORE, tl.float32),
        tl.full([TILE_QUERIES], 0.0, tl.float32),
        tl.full([TILE_QUERIES, DIM_PADDED], 0.0, tl.float32),
    )
    block_table = block_tables + row.to(tl.int64) * table_stride
    # Rows beyond the last token look where it does: some key is visible to each.
    query_positions = start + tl.minimum(tokens, num_tokens - 1)
    for part in tl.static_range(3):
        # Three ranges of tiles: where the window begins, what every query sees, where the queries stand.
        if HAS_WINDOW or part > 0:
            state = attend_to_tiles(
                begin if part == 0 else full_begin if part == 1 else full_end,
                full_begin if part == 0 else full_end if part == 1 else end,
                state,
                q,
                q_first,
                keys,
                values,
                block_table,
                first_position,
                end_position,
                query_positions,
                slope,
                scale,
                soft_cap,
                window,
                dims,
                kv_head,
                key_scales,
                value_scales,
                heads,
                biases,
                num_distances,
                IS_MASKED=part != 1,
                HAS_WINDOW=HAS_WINDOW,
                HAS_SOFT_CAP=HAS_SOFT_CAP,
                HAS_ALIBI=slopes is not None,
                HEAD_DIM=HEAD_DIM,
                VALUE_BEGIN=VALUE_BEGIN,
                BEGIN_PADDED=BEGIN_PADDED,
                SLOT_STRIDE=HEAD_DIM if VALUE_BEGIN else NUM_KV_HEADS * HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                BLOCK_STRIDE=BLOCK_STRIDE,
                FORMAT=FORMAT,
                TILE_KEYS=TILE_KEYS,
            )
    highest, total, weighted = state
    if sinks is not None and not IS_SPLIT:
        total, factor = add_sinks(highest, total, tl.load(sinks + heads))
        weighted *= factor[:, None]
    if IS_SPLIT:
        # A query may see no key of the split, which then counts for nothing.
        highest = tl.where(total > 0, highest, float("-inf"))
        total = tl.where(total > 0, total, 1.0)
    result = weighted / total[:, None]
    if value_factor is not None:
        result *= value_factor
    if IS_SPLIT:
        places = index.to(tl.int64) * (TILE_QUERIES // GROUP) + tokens
        partial = (places * (NUM_KV_HEADS * GROUP) + heads) * num_splits + tl.program_id(2)
        tl.store(partial_scores + partial, highest + tl.log2(total), mask=tokens < num_tokens)
        tl.store(partial_outputs + partial[:, None] * VALUE_DIM + dims[None, :], result, mask=is_query)
    else:
        output_rows = output + token_offsets * (NUM_KV_HEADS * GROUP * VALUE_DIM) + heads * VALUE_DIM
        tl.store(output_rows[:, None] + dims[None, :], result.to(output.dtype.element_ty), mask=is_query)


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The rows of a step that the prefill kernel takes."""

    tiles: torch.Tensor  # [num_tiles, 4] int32 of `query_tiles`, on the device
    block_tables: torch.Tensor  # [num_rows, max_num_blocks] int32, on the device
    tile: QueryTile  # what they were made for: up to tile.num_queries // group tokens
    num_keys: int  # positions up to the last query of the longest tile


def query_tiles(
    starts: Int32Array, lengths: Int32Array, first_tokens: npt.NDArray[np.int64], num_tokens: int
) -> Int32Array:
    """Cut rows into tiles of up to `num_tokens` tokens, tiles with the most keys first: they take the longest.

    Args:
        starts: Position of each row's first token, [num_rows].
        lengths: Tokens of each row, [num_rows].
        first_tokens: Index of each row's first token in the step, [num_rows].
        num_tokens: Of a tile.

    Returns:
        [num_tiles, 4]: row, index of the first token in the step, tokens, position of the first token.
    """
    num_tiles = -(-lengths // num_tokens)
    rows = np.repeat(np.arange(len(lengths)), num_tiles)
    offsets = (np.arange(len(rows)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * num_tokens
    tiles: npt.NDArray[np.int32] = np.empty((len(rows), 4), np.int32)
    tiles[:, 0] = rows
    tiles[:, 1] = first_tokens[rows] + offsets
    tiles[:, 2] = np.minimum(num_tokens, lengths[rows] - offsets)
    tiles[:, 3] = starts[rows] + offsets
    return tiles[np.argsort(-(tiles[:, 3] + tiles[:, 2]), kind="stable")]


def prefill(
    rows: PrefillRows,
    query: torch.Tensor,
    cache: LayerCache,
    layer: AttentionLayer,
    slopes: torch.Tensor | None,
    num_splits: int,
    partial: PartialResults | None,
    output: torch.Tensor,
) -> None:
    """Attend with rows of several tokens; launches one kernel, or two if keys are split.

    Args:
        rows: At least one tile.
        query: After rotation, [num_tokens, num_heads, head_dim]; its last two dimensions are contiguous.
        cache: The tokens' own keys and values are in it.
        layer: How to attend.
        slopes: Of the layer, [num_heads] float32 on the device; None: no ALiBi.
        num_splits: Parts of the keys of each tile, up to `MAX_SPLITS`.
        partial: Room for this many, with `tile.num_queries // group` rows a tile; None: `num_splits` is 1.
        output: [num_tokens, num_heads * value_dim]; the tokens of the rows are written.
    """
    num_heads, head_dim = query.shape[1:]
    num_groups, group = groups_of(num_heads, cache)
    tile = rows.tile
    operands = operands_of(cache)
    window = WIDEST_WINDOW if layer.window_tokens is None else min(layer.window_tokens, WIDEST_WINDOW)
    prefill_kernel[(num_groups, len(rows.tiles), num_splits)](
        query,
        query.stride(0),
        operands.keys,
        operands.values,
        rows.block_tables,
        rows.block_tables.stride(0),
        rows.tiles,
        slopes,
        output,
        None if partial is None else partial.outputs,
        None if partial is None else partial.scores,
        operands.key_factor * (layer.scale if layer.soft_cap is not None else layer.scale * LOG2_E.value),
        layer.soft_cap or 0.0,
        window,
        num_splits,
        operands.key_scales,
        operands.value_scales,
        operands.value_factor,
        layer.sinks,
        layer.distance_biases,
        0 if layer.distance_biases is None else layer.distance_biases.shape[1],
        IS_SPLIT=num_splits > 1,
        HAS_SOFT_CAP=layer.soft_cap is not None,
        HAS_WINDOW=layer.window_tokens is not None,
        GROUP=group,
        NUM_KV_HEADS=num_groups,
        HEAD_DIM=head_dim,
        DIM_PADDED=pad(cache.value_dim),
        VALUE_BEGIN=cache.value_begin,
        BEGIN_PADDED=pad(cache.value_begin),
        BLOCK_SIZE=cache.block_size,
        BLOCK_STRIDE=operands.block_stride,
        FORMAT=operands.format_number,
        TILE_QUERIES=tile.num_queries,
        TILE_KEYS=tile.num_keys,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if partial is not None:
        room = reduce_room(num_splits)
        tile_tokens = tile.num_queries // group
        reduce_kernel[(num_heads, len(rows.tiles) * tile_tokens)](
            partial.outputs,
            partial.scores,
            None,
            None,
            rows.tiles,
            output,
            window,
            num_splits,
            layer.sinks,
            NUM_HEADS=num_heads,
            HEAD_DIM=cache.value_dim,
            DIM_PADDED=pad(cache.value_dim),
            TILE_KEYS=tile.num_keys,
            TILE_TOKENS=tile_tokens,
            MAX_SPLITS=room,
            num_warps=reduce_warps(cache.value_dim, room),
        )
