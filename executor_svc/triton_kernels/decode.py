"""Decode attention: one query token a row, its keys split over several programs.

A program takes the query heads that share a KV head, so that keys and values are read once, and one part of the keys;
a softmax that is corrected as it goes (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax")
needs one pass over them. A second kernel joins the parts (Flash-Decoding, Dao et al. 2023). How many
parts there are does not depend on lengths: a CUDA graph launches the same programs at each replay, and programs
for which a row is too short end at once.
"""

from dataclasses import dataclass

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
from executor_svc.triton_kernels.tiles import WIDEST_WINDOW, decode_tile, groups_of, pad, reduce_room, reduce_warps


@triton.jit(do_not_specialize=["table_stride", "window", "num_splits"])
def decode_kernel(
    query,
    query_stride,
    keys,
    values,
    block_tables,
    table_stride,
    num_visible_tokens,
    token_ids,
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
    HAS_SOFT_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_BEGIN: tl.constexpr,
    BEGIN_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Attend with the heads of one group of one row to one split of its keys; the grid is (KV heads, rows, splits).

    Of a latent cache, `VALUE_BEGIN` is not 0: a vector is read once, in two parts, and the second is its value as well.
    All groups share it.
    """
    kv_head = tl.program_id(0)
    cache_head = 0 if VALUE_BEGIN else kv_head
    row = tl.program_id(1)
    split = tl.program_id(2)
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    VALUE_DIM: tl.constexpr = HEAD_DIM - VALUE_BEGIN
    SLOT_STRIDE: tl.constexpr = HEAD_DIM if VALUE_BEGIN else NUM_KV_HEADS * HEAD_DIM
    visible = tl.load(num_visible_tokens + row)
    begin, end, first_position, _ = split_of_tiles(visible, window, split, num_splits, TILE_KEYS)
    if begin >= end:
        return
    token = row
    if token_ids is not None:
        token = tl.load(token_ids + row)
    dims = tl.arange(0, DIM_PADDED)
    heads = tl.arange(0, GROUP_PADDED)
    is_dim = dims < VALUE_DIM
    is_query = (heads < GROUP)[:, None] & is_dim[None, :]
    query_offsets = (kv_head * GROUP + heads)[:, None] * HEAD_DIM + (VALUE_BEGIN + dims)[None, :]
    query_row = query + token.to(tl.int64) * query_stride
    q = tl.load(query_row + query_offsets, mask=is_query, other=0.0)
    if VALUE_BEGIN:
        q_first = first_numbers(
            query_row + (kv_head * GROUP + heads) * HEAD_DIM, heads < GROUP, VALUE_BEGIN, BEGIN_PADDED
        )
    slope = 0.0
    if slopes is not None:
        slope = tl.load(slopes + kv_head * GROUP + heads, mask=heads < GROUP, other=0.0)[:, None] * LOG2_E
    block_table = block_tables + row.to(tl.int64) * table_stride
    dim_offsets = cache_head * HEAD_DIM + VALUE_BEGIN + dims
    highest = tl.full([GROUP_PADDED], LOWEST_SCORE, tl.float32)
    total = tl.full([GROUP_PADDED], 0.0, tl.float32)
    weighted = tl.full([GROUP_PADDED, DIM_PADDED], 0.0, tl.float32)
    # Otherwise weights are: there are fewer of them than values. In float16 the product could be too small.
    scales_values: tl.constexpr = FORMAT == INT8 and q.dtype == tl.float16
    for tile in tl.range(begin, end):
        positions = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
        is_visible = (positions >= first_position) & (positions < visible)
        block_ids = block_ids_of(block_table, positions, is_visible, BLOCK_SIZE)
        slots = slot_offsets(block_ids, positions, SLOT_STRIDE, BLOCK_SIZE, BLOCK_STRIDE)
        offsets = slots[:, None] + dim_offsets[None, :]
        is_read = is_visible[:, None] & is_dim[None, :]
        # What is hidden may be NaN, and 0 * NaN is NaN: it is not read.
        key_elements = tl.load(keys + offsets, mask=is_read, other=0)
        value_elements = key_elements if VALUE_BEGIN else tl.load(values + offsets, mask=is_read, other=0)
        k = numbers_of(key_elements, q.dtype, FORMAT)
        products = tl.full([GROUP_PADDED, TILE_KEYS], 0.0, tl.float32)
        if VALUE_BEGIN:
            first_elements = first_numbers(keys + slots, is_visible, VALUE_BEGIN, BEGIN_PADDED)
            products = dot(q_first, tl.trans(numbers_of(first_elements, q.dtype, FORMAT)), products)
        products = dot(q, tl.trans(k), products)
        if FORMAT == INT8:
            scales = scale_offsets(block_ids, positions, cache_head, BLOCK_SIZE, BLOCK_STRIDE)
            products *= tl.load(key_scales + scales, mask=is_visible, other=0.0)[None, :]
            of_values = tl.load(value_scales + scales, mask=is_visible, other=0.0)
        if scales_values:
            v = (numbers_of(value_elements, tl.float32, FORMAT) * of_values[:, None]).to(q.dtype)
        else:
            v = numbers_of(value_elements, q.dtype, FORMAT)
        distances = (positions - (visible - 1))[None, :]
        scores = shape_scores(
            products, distances.to(tl.float32), slope, scale, soft_cap, HAS_SOFT_CAP, slopes is not None
        )
        if biases is not None:
            rows = biases + (kv_head * GROUP + tl.minimum(heads, GROUP - 1))[:, None] * num_distances
            nearest = visible - (tile + 1) * TILE_KEYS
            scores = add_distance_biases(scores, distances, nearest, rows, num_distances)
        scores = tl.where(is_visible[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        correction = tl.exp2(highest - new_highest)
        total = total * correction + tl.sum(weights, 1)
        if FORMAT == INT8 and not scales_values:
            weights *= of_values[None, :]
        weighted = dot(weights.to(v.dtype), v, weighted * correction[:, None])
        highest = new_highest
    if sinks is not None and not IS_SPLIT:
        of_heads = tl.load(sinks + kv_head * GROUP + heads, mask=heads < GROUP, other=0.0)
        total, factor = add_sinks(highest, total, of_heads)
        weighted *= factor[:, None]
    result = weighted / total[:, None]
    if value_factor is not None:
        result *= value_factor
    if IS_SPLIT:
        partial = (row.to(tl.int64) * NUM_HEADS + kv_head * GROUP + heads) * num_splits + split
        tl.store(partial_scores + partial, highest + tl.log2(total), mask=heads < GROUP)
        tl.store(partial_outputs + partial[:, None] * VALUE_DIM + dims[None, :], result, mask=is_query)
    else:
        output_row = output + token.to(tl.int64) * (NUM_HEADS * VALUE_DIM)
        offsets = (kv_head * GROUP + heads)[:, None] * VALUE_DIM + dims[None, :]
        tl.store(output_row + offsets, result.to(output.dtype.element_ty), mask=is_query)


@triton.jit(do_not_specialize=["window", "num_splits"])
def reduce_kernel(
    partial_outputs,
    partial_scores,
    num_visible_tokens,
    token_ids,
    tiles,
    output,
    window,
    num_splits,
    sinks,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Join the splits of one head of one token; the grid is (heads, rows).

    With `tiles`, of `query_tiles`, a row is one of the `TILE_TOKENS` places of a tile; without, it is a decode.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    if tiles is not None:
        place = row % TILE_TOKENS
        first_token, num_tokens, start = query_tile_at(tiles, row // TILE_TOKENS)
        if place >= num_tokens:
            return
        token = first_token + place
        visible = start + num_tokens
        window = window_of_tile(window, num_tokens, visible)
    else:
        visible = tl.load(num_visible_tokens + row)
        token = row
        if token_ids is not None:
            token = tl.load(token_ids + row)
    _, _, _, num_used_splits = split_of_tiles(visible, window, 0, num_splits, TILE_KEYS)
    splits = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, DIM_PADDED)
    is_used = splits < num_used_splits
    first = (row.to(tl.int64) * NUM_HEADS + head) * num_splits
    scores = tl.load(partial_scores + first + splits, mask=is_used, other=float("-inf"))
    offsets = (first + splits)[:, None] * HEAD_DIM + dims[None, :]
    is_read = is_used[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partial_outputs + offsets, mask=is_read, other=0.0)
    highest = tl.max(scores, 0)
    weights = tl.exp2(scores - highest)
    total, weighted = tl.sum(weights, 0), tl.sum(parts * weights[:, None], 0)
    if sinks is not None:
        total, factor = add_sinks(highest, total, tl.load(sinks + head))
        weighted *= factor
    result = weighted / total
    output_row = output + (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(output_row + dims, result.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of a step that have one token, on the device."""

    num_visible_tokens: torch.Tensor  # [num_rows] int32, 1 or more
    block_tables: torch.Tensor  # [num_rows or more, max_num_blocks] int32, rows in this order
    token_ids: torch.Tensor | None  # [num_rows] int32 index of the row's token in the step; None: the row


@dataclass(frozen=True, slots=True)
class PartialResults:
    """Room for what the splits leave to the reduction."""

    outputs: torch.Tensor  # [num_rows * num_heads * num_splits * value_dim] or more, float32
    scores: torch.Tensor  # [num_rows * num_heads * num_splits] or more, float32: log2 of the sum of exp2(scores)


def decode(
    rows: DecodeRows,
    query: torch.Tensor,
    cache: LayerCache,
    layer: AttentionLayer,
    slopes: torch.Tensor | None,
    num_splits: int,
    partial: PartialResults | None,
    output: torch.Tensor,
) -> None:
    """Attend with rows of one token; launches one kernel, or two if keys are split.

    Args:
        rows: At least one.
        query: After rotation, [num_tokens, num_heads, head_dim]; its last two dimensions are contiguous.
        cache: The tokens' own keys and values are in it.
        layer: How to attend.
        slopes: Of the layer, [num_heads] float32 on the device; None: no ALiBi.
        num_splits: Parts of the keys of each row, up to `MAX_SPLITS`.
        partial: Room for this many; None: `num_splits` is 1.
        output: [num_tokens, num_heads * value_dim]; the tokens of the rows are written.
    """
    num_rows = len(rows.num_visible_tokens)
    num_heads, head_dim = query.shape[1:]
    num_groups, group = groups_of(num_heads, cache)
    value_dim, dim_padded = cache.value_dim, pad(cache.value_dim)
    tile = decode_tile(value_dim, group, query.dtype.itemsize, cache.keys.dtype.itemsize)
    operands = operands_of(cache)
    window = WIDEST_WINDOW if layer.window_tokens is None else min(layer.window_tokens, WIDEST_WINDOW)
    decode_kernel[(num_groups, num_rows, num_splits)](
        query,
        query.stride(0),
        operands.keys,
        operands.values,
        rows.block_tables,
        rows.block_tables.stride(0),
        rows.num_visible_tokens,
        rows.token_ids,
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
        HAS_SOFT_CAP=layer.soft_cap is not None,
        IS_SPLIT=num_splits > 1,
        GROUP=group,
        GROUP_PADDED=pad(group),
        NUM_KV_HEADS=num_groups,
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        VALUE_BEGIN=cache.value_begin,
        BEGIN_PADDED=pad(cache.value_begin),
        BLOCK_SIZE=cache.block_size,
        BLOCK_STRIDE=operands.block_stride,
        FORMAT=operands.format_number,
        TILE_KEYS=tile.num_keys,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if partial is not None:
        room = reduce_room(num_splits)
        reduce_kernel[(num_heads, num_rows)](
            partial.outputs,
            partial.scores,
            rows.num_visible_tokens,
            rows.token_ids,
            None,
            output,
            window,
            num_splits,
            layer.sinks,
            NUM_HEADS=num_heads,
            HEAD_DIM=value_dim,
            DIM_PADDED=dim_padded,
            TILE_KEYS=tile.num_keys,
            TILE_TOKENS=1,
            MAX_SPLITS=room,
            num_warps=reduce_warps(value_dim, room),
        )
