"""Attention with sums that depend on the query's own position alone: one kernel for decodes and for chunks.

How a query adds up its keys:

1. Positions are cut into tiles, tiles into splits; both begin at fixed multiples, whatever the row, the chunk, the
   block size and the device.
2. Inside a split, a softmax that is corrected as it goes takes one tile after the other, beginning with nothing.
3. The splits of a query are folded into one result, from the first to the last, by `fold`.
4. Its sink, if there is one, comes last.

A tile or split of which a query sees nothing changes nothing in its state, to the bit: the weights are 0, the factors
are 1. So the other queries of a program have no say, and any program may fold: a program that goes over all splits of
its queries, or `fold_kernel`, to which many programs left one split each. So the number of programs that share a row is
free, and follows the batch and the device.

A decoded token is a chunk of one token: the same machine code, with tiles of the same size, computes both, since the
order inside a product of matrices belongs to the instruction, and that follows from the tile. Nothing is contracted to
fused operations (`enable_fp_fusion`): where that happens is up to the compiler, and kernels could differ.

Keys and values that a query does not see must be finite where another query of its chunk sees them.
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
    scale_offsets,
    shape_scores,
    slot_offsets,
)
from executor_svc.triton_kernels.tiles import (
    SPLIT_KEYS,
    WIDEST_WINDOW,
    QueryTile,
    groups_of,
    pad,
)


@triton.jit
def fold(state, part):
    """Return the state of queries that saw the keys of both states: highest scores, totals, weighted values."""
    highest, total, weighted = state
    part_highest, part_total, part_weighted = part
    new_highest = tl.maximum(highest, part_highest)
    factor = tl.exp2(highest - new_highest)
    part_factor = tl.exp2(part_highest - new_highest)
    return (
        new_highest,
        total * factor + part_total * part_factor,
        weighted * factor[:, None] + part_weighted * part_factor[:, None],
    )


@triton.jit
def nothing(NUM_QUERIES: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Return the state of queries that saw no key."""
    return (
        tl.full([NUM_QUERIES], LOWEST_SCORE, tl.float32),
        tl.full([NUM_QUERIES], 0.0, tl.float32),
        tl.full([NUM_QUERIES, DIM_PADDED], 0.0, tl.float32),
    )


@triton.jit
def result_of(state, sinks, heads):
    """Return what was attended. A zero is positive: a tile of which nothing is seen turns a negative zero."""
    highest, total, weighted = state
    if sinks is not None:
        total, factor = add_sinks(highest, total, tl.load(sinks + heads))
        weighted *= factor[:, None]
    return weighted / total[:, None] + 0.0


@triton.jit(do_not_specialize=["table_stride", "window", "num_programs", "num_splits", "tile_tokens"])
def attend_kernel(
    query,
    query_stride,
    keys,
    values,
    block_tables,
    table_stride,
    rows,
    first_tokens,
    num_tokens,
    end_positions,
    slopes,
    output,
    partial_outputs,
    partial_scores,
    scale,
    soft_cap,
    window,
    num_programs,
    num_splits,
    tile_tokens,
    key_scales,
    value_scales,
    value_factor,
    sinks,
    biases,
    num_distances,
    HAS_SOFT_CAP: tl.constexpr,
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
    SPLIT_KEYS: tl.constexpr,
):
    """Attend with a tile of queries of one group to every `num_programs`-th split of its keys.

    The grid is (KV heads, tiles of queries, `num_programs`). One program a tile writes the result; several leave the
    state of each split, with `tile_tokens` places a tile. `VALUE_BEGIN`: see `decode_kernel`.
    """
    kv_head = tl.program_id(0)
    cache_head = 0 if VALUE_BEGIN else kv_head
    index = tl.program_id(1)
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    VALUE_DIM: tl.constexpr = HEAD_DIM - VALUE_BEGIN
    SLOT_STRIDE: tl.constexpr = HEAD_DIM if VALUE_BEGIN else NUM_KV_HEADS * HEAD_DIM
    count = tl.load(num_tokens + index)
    end_position = tl.load(end_positions + index)
    start = end_position - count
    queries = tl.arange(0, TILE_QUERIES)
    dims = tl.arange(0, DIM_PADDED)
    is_dim = dims < VALUE_DIM
    tokens = queries // GROUP
    heads = kv_head * GROUP + queries % GROUP
    is_query = (tokens < count)[:, None] & is_dim[None, :]
    token_offsets = (tl.load(first_tokens + index) + tokens).to(tl.int64)
    query_rows = query + token_offsets * query_stride + heads * HEAD_DIM
    q = tl.load(query_rows[:, None] + (VALUE_BEGIN + dims)[None, :], mask=is_query, other=0.0)
    if VALUE_BEGIN:
        q_first = first_numbers(query_rows, tokens < count, VALUE_BEGIN, BEGIN_PADDED)
    slope = 0.0
    if slopes is not None:
        slope = tl.load(slopes + heads)[:, None] * LOG2_E
    block_table = block_tables + tl.load(rows + index).to(tl.int64) * table_stride
    # Rows beyond the last token look where it does: some key is visible to each.
    query_positions = start + tl.minimum(tokens, count - 1)
    first_position = tl.maximum(start + 1 - window, 0)
    first_split = first_position // SPLIT_KEYS
    state = nothing(TILE_QUERIES, DIM_PADDED)
    for split in tl.range(first_split + tl.program_id(2), tl.cdiv(end_position, SPLIT_KEYS), num_programs):
        begin = tl.maximum(split * (SPLIT_KEYS // TILE_KEYS), first_position // TILE_KEYS)
        end = tl.minimum((split + 1) * (SPLIT_KEYS // TILE_KEYS), tl.cdiv(end_position, TILE_KEYS))
        highest, total, weighted = nothing(TILE_QUERIES, DIM_PADDED)
        for tile in tl.range(begin, end):
            positions = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
            # Whether any query sees the key; what none sees may be NaN, and 0 * NaN is NaN: it is not read.
            is_read = (positions >= first_position) & (positions < end_position)
            block_ids = block_ids_of(block_table, positions, is_read, BLOCK_SIZE)
            slots = slot_offsets(block_ids, positions, SLOT_STRIDE, BLOCK_SIZE, BLOCK_STRIDE)
            offsets = slots[:, None] + (cache_head * HEAD_DIM + VALUE_BEGIN + dims)[None, :]
            is_element = is_read[:, None] & is_dim[None, :]
            key_elements = tl.load(keys + offsets, mask=is_element, other=0)
            value_elements = key_elements if VALUE_BEGIN else tl.load(values + offsets, mask=is_element, other=0)
            k = numbers_of(key_elements, q.dtype, FORMAT)
            products = tl.full([TILE_QUERIES, TILE_KEYS], 0.0, tl.float32)
            if VALUE_BEGIN:
                first_elements = first_numbers(keys + slots, is_read, VALUE_BEGIN, BEGIN_PADDED)
                products = dot(q_first, tl.trans(numbers_of(first_elements, q.dtype, FORMAT)), products)
            products = dot(q, tl.trans(k), products)
            if FORMAT == INT8:
                scales = scale_offsets(block_ids, positions, cache_head, BLOCK_SIZE, BLOCK_STRIDE)
                products *= tl.load(key_scales + scales, mask=is_read, other=0.0)[None, :]
                of_values = tl.load(value_scales + scales, mask=is_read, other=0.0)
                v = (numbers_of(value_elements, tl.float32, FORMAT) * of_values[:, None]).to(q.dtype)
            else:
                v = numbers_of(value_elements, q.dtype, FORMAT)
            distances = positions[None, :] - query_positions[:, None]
            scores = shape_scores(
                products, distances.to(tl.float32), slope, scale, soft_cap, HAS_SOFT_CAP, slopes is not None
            )
            if biases is not None:
                bias_rows = biases + heads[:, None] * num_distances
                nearest = start + 1 - (tile + 1) * TILE_KEYS
                scores = add_distance_biases(scores, distances, nearest, bias_rows, num_distances)
            scores = tl.where((distances <= 0) & (distances > -window), scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_highest[:, None])
            correction = tl.exp2(highest - new_highest)
            total = total * correction + tl.sum(weights, 1)
            weighted = dot(weights.to(v.dtype), v, weighted * correction[:, None])
            highest = new_highest
        if value_factor is not None:
            weighted *= value_factor
        if num_programs == 1:
            state = fold(state, (highest, total, weighted))
        else:
            # Only where the split begins is a wide number: one for each query would fill the registers.
            first = (index.to(tl.int64) * num_splits + (split - first_split)) * (tile_tokens * NUM_HEADS)
            partial = tokens * NUM_HEADS + heads
            is_head = tokens < count
            split_scores, split_outputs = partial_scores + first * 2, partial_outputs + first * VALUE_DIM
            tl.store(split_scores + partial * 2, highest, mask=is_head)
            tl.store(split_scores + partial * 2 + 1, total, mask=is_head)
            tl.store(split_outputs + (partial[:, None] * VALUE_DIM + dims[None, :]), weighted, mask=is_query)
    if num_programs == 1:
        output_rows = output + token_offsets * (NUM_HEADS * VALUE_DIM) + heads * VALUE_DIM
        result = result_of(state, sinks, heads).to(output.dtype.element_ty)
        tl.store(output_rows[:, None] + dims[None, :], result, mask=is_query)


@triton.jit(do_not_specialize=["window", "num_splits", "tile_tokens"])
def fold_kernel(
    partial_outputs,
    partial_scores,
    first_tokens,
    num_tokens,
    end_positions,
    output,
    window,
    num_splits,
    tile_tokens,
    sinks,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):
    """Fold the splits of one head of one token; the grid is (heads, tiles * `tile_tokens`).

    It takes all splits of the tile: one of which the token sees nothing changes nothing.
    """
    head = tl.program_id(0)
    place = tl.program_id(1)
    index, token = place // tile_tokens, place % tile_tokens
    count = tl.load(num_tokens + index)
    if token >= count:
        return
    end_position = tl.load(end_positions + index)
    first_split = tl.maximum(end_position - count + 1 - window, 0) // SPLIT_KEYS
    num_used_splits = tl.cdiv(end_position, SPLIT_KEYS) - first_split
    dims = tl.arange(0, DIM_PADDED)
    is_dim = (dims < HEAD_DIM)[None, :]
    one = tl.arange(0, 1)
    first = index.to(tl.int64) * num_splits * (tile_tokens * NUM_HEADS) + token * NUM_HEADS + head
    state = nothing(1, DIM_PADDED)
    for split in tl.range(0, num_used_splits):
        partial = first + split * (tile_tokens * NUM_HEADS) + one
        highest = tl.load(partial_scores + partial * 2)
        total = tl.load(partial_scores + partial * 2 + 1)
        weighted = tl.load(partial_outputs + partial[:, None] * HEAD_DIM + dims[None, :], mask=is_dim, other=0.0)
        state = fold(state, (highest, total, weighted))
    output_row = output + ((tl.load(first_tokens + index) + token).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    result = result_of(state, sinks, head + one).to(output.dtype.element_ty)
    tl.store(output_row + (one[:, None] + dims[None, :]), result, mask=is_dim)


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Consecutive tokens of rows that a program takes together, on the device; each array begins at 16 bytes."""

    rows: torch.Tensor  # [num_tiles] int32 of the block tables
    first_tokens: torch.Tensor  # [num_tiles] int32 index of the first token in the step
    num_tokens: torch.Tensor  # [num_tiles] int32, 1 or more
    end_positions: torch.Tensor  # [num_tiles] int32: behind the last token
    block_tables: torch.Tensor  # [num_rows or more, max_num_blocks] int32


@dataclass(frozen=True, slots=True)
class SplitStates:
    """How the splits of each tile are shared out, and room for their states; of one program it is not used."""

    num_programs: int  # of each tile and KV head
    num_splits: int  # most of a tile
    tile_tokens: int  # most of a tile
    outputs: torch.Tensor  # [num_tiles * num_splits * tile_tokens * num_heads * value_dim] or more float32
    scores: torch.Tensor  # [num_tiles * num_splits * tile_tokens * num_heads * 2] or more float32: highest score, total


def attend(
    tiles: QueryTiles,
    shape: QueryTile,
    query: torch.Tensor,
    cache: LayerCache,
    layer: AttentionLayer,
    slopes: torch.Tensor | None,
    states: SplitStates,
    output: torch.Tensor,
) -> None:
    """Attend with some tiles of queries; launches one kernel, or two if several programs share a tile.

    Args:
        tiles: At least one.
        shape: Of a tile; `tiles` have up to `shape.num_queries // group` tokens.
        query: After rotation, [num_tokens, num_heads, head_dim]; its last two dimensions are contiguous.
        cache: The tokens' own keys and values are in it.
        layer: How to attend.
        slopes: Of the layer, [num_heads] float32 on the device; None: no ALiBi.
        states: How the splits are shared out.
        output: [num_tokens, num_heads * value_dim]; the tokens of the tiles are written.
    """
    num_tiles = len(tiles.rows)
    num_heads, head_dim = query.shape[1:]
    num_groups, group = groups_of(num_heads, cache)
    dim_padded = pad(cache.value_dim)
    operands = operands_of(cache)
    window = WIDEST_WINDOW if layer.window_tokens is None else min(layer.window_tokens, WIDEST_WINDOW)
    attend_kernel[(num_groups, num_tiles, states.num_programs)](
        query,
        query.stride(0),
        operands.keys,
        operands.values,
        tiles.block_tables,
        tiles.block_tables.stride(0),
        tiles.rows,
        tiles.first_tokens,
        tiles.num_tokens,
        tiles.end_positions,
        slopes,
        output,
        states.outputs,
        states.scores,
        operands.key_factor * (layer.scale if layer.soft_cap is not None else layer.scale * LOG2_E.value),
        layer.soft_cap or 0.0,
        window,
        states.num_programs,
        states.num_splits,
        states.tile_tokens,
        operands.key_scales,
        operands.value_scales,
        operands.value_factor,
        layer.sinks,
        layer.distance_biases,
        0 if layer.distance_biases is None else layer.distance_biases.shape[1],
        HAS_SOFT_CAP=layer.soft_cap is not None,
        GROUP=group,
        NUM_KV_HEADS=num_groups,
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        VALUE_BEGIN=cache.value_begin,
        BEGIN_PADDED=pad(cache.value_begin),
        BLOCK_SIZE=cache.block_size,
        BLOCK_STRIDE=operands.block_stride,
        FORMAT=operands.format_number,
        TILE_QUERIES=shape.num_queries,
        TILE_KEYS=shape.num_keys,
        SPLIT_KEYS=SPLIT_KEYS,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        enable_fp_fusion=False,
    )
    if states.num_programs > 1:
        fold_kernel[(num_heads, num_tiles * states.tile_tokens)](
            states.outputs,
            states.scores,
            tiles.first_tokens,
            tiles.num_tokens,
            tiles.end_positions,
            output,
            window,
            states.num_splits,
            states.tile_tokens,
            layer.sinks,
            NUM_HEADS=num_heads,
            HEAD_DIM=cache.value_dim,
            DIM_PADDED=dim_padded,
            SPLIT_KEYS=SPLIT_KEYS,
            num_warps=1,
            enable_fp_fusion=False,
        )
