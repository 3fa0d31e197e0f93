"""What the attention kernels share: dot products, the shape of scores, and which keys a program reads.

Scores are kept in units of log2(e), so that the softmax is of powers of two.
"""

import triton
import triton.language as tl

# The interpreter keeps bfloat16 as integers and multiplies those.
IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(1.4426950408889634)
# Below every score; finite, because the difference of two infinities is no number.
LOWEST_SCORE = tl.constexpr(-1.0e30)


@triton.jit
def dot(left, right, accumulator):
    """Return `accumulator + left @ right` in float32; float32 operands are multiplied as they are, not as TF32."""
    if IS_INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, accumulator, input_precision="ieee")


@triton.jit
def sum_products(x_rows, weight_rows, is_row, is_column, NUM_INPUTS: tl.constexpr, TILE_INPUTS: tl.constexpr):
    """Return x @ weight.T of a tile in float32, [num_rows, num_columns]: inputs from the first to the last, in tiles.

    Args:
        x_rows: Pointers to the rows of x, [num_rows, 1].
        weight_rows: Pointers to those of the weight, one an output, [num_columns, 1].
        is_row: Which rows are read, [num_rows]; the others are 0.
        is_column: The same of outputs, [num_columns].
        NUM_INPUTS: Of a row.
        TILE_INPUTS: That are multiplied at once.
    """
    IS_EVEN: tl.constexpr = NUM_INPUTS % TILE_INPUTS == 0
    sums = tl.full([x_rows.shape[0], weight_rows.shape[0]], 0.0, tl.float32)
    for begin in tl.range(0, NUM_INPUTS, TILE_INPUTS):
        inputs = begin + tl.arange(0, TILE_INPUTS)
        # What is beyond the last input adds zeros.
        is_input = tl.full([TILE_INPUTS], True, tl.int1) if IS_EVEN else inputs < NUM_INPUTS
        left = tl.load(x_rows + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        right = tl.load(weight_rows + inputs[None, :], mask=is_column[:, None] & is_input[None, :], other=0.0)
        sums = dot(left, tl.trans(right), sums)
    return sums


@triton.jit
def first_numbers(vectors, is_read, NUMBER: tl.constexpr, PADDED: tl.constexpr):
    """Return the first numbers of vectors at some pointers, [num_vectors, PADDED], 0 where there are none."""
    dims = tl.arange(0, PADDED)
    return tl.load(vectors[:, None] + dims[None, :], mask=is_read[:, None] & (dims < NUMBER)[None, :], other=0)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent with a relative error of about 1e-6, also near 0."""
    square = x * x
    # The Taylor series, where 1 - exp(-2 |x|) would cancel.
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0))))
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    quotient = (1.0 - decay) / (1.0 + decay)
    return tl.where(square < 0.04, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def shape_scores(products, distances, slopes, scale, soft_cap, HAS_SOFT_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr):
    """Return scores in units of log2(e) from `query . key`.

    Args:
        products: [num_queries, num_keys] float32.
        distances: Key position - query position, broadcastable to `products`.
        slopes: Of ALiBi times log2(e), [num_queries, 1]; anything without ALiBi.
        scale: Of the products; times log2(e) without a soft cap.
        soft_cap: See `AttentionLayer`; anything without one.
        HAS_SOFT_CAP: Whether scores are capped.
        HAS_ALIBI: Whether scores are shifted.
    """
    scores = products * scale
    if HAS_SOFT_CAP:
        scores = tanh(scores / soft_cap) * (soft_cap * LOG2_E)
    if HAS_ALIBI:
        scores += slopes * distances
    return scores


@triton.jit
def add_distance_biases(scores, distances, nearest, biases, num_distances):
    """Return scores in units of log2(e) with the biases of their distances.

    Args:
        scores: [num_queries, num_keys].
        distances: Key position - query position, int32, broadcastable to `scores`.
        nearest: Least query position - key position; far keys all have the last bias.
        biases: Pointers to the rows of the heads of the queries, [num_queries, 1]; see `AttentionLayer`.
        num_distances: Of a row.
    """
    last = num_distances - 1
    # Outside of a branch Triton would keep room in shared memory for the biases of some tiles ahead.
    if nearest < last:
        scores += tl.load(biases + tl.minimum(tl.maximum(-distances, 0), last)) * LOG2_E
    else:
        scores += tl.load(biases + last) * LOG2_E
    return scores


@triton.jit
def add_sinks(highest, total, sinks):
    """Return totals of queries with the sinks of their heads in the softmax, and the factor of their weighted values.

    Args:
        highest: Highest score of the keys, [num_queries].
        total: Sum of exp2(score - highest), [num_queries].
        sinks: [num_queries] logits, whose values are 0.
    """
    scores = sinks * LOG2_E
    new_highest = tl.maximum(highest, scores)
    factor = tl.exp2(highest - new_highest)
    return total * factor + tl.exp2(scores - new_highest), factor


@triton.jit
def block_ids_of(block_table, positions, is_read, BLOCK_SIZE: tl.constexpr):
    """Return the ids of the blocks of positions: int64, for pools exceed 2 ** 31 elements.

    Args:
        block_table: Pointer to the block ids of the row.
        positions: [num_keys].
        is_read: Whether a position is read; the ids of others are garbage, and are not read either.
        BLOCK_SIZE: Tokens in a block.
    """
    return tl.load(block_table + positions // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)


@triton.jit
def slot_offsets(block_ids, positions, SLOT_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr):
    """Return where the slots of positions begin in a pool, in elements.

    Args:
        block_ids: Of the positions, int64.
        positions: [num_keys].
        SLOT_STRIDE: Elements from a slot to the next.
        BLOCK_SIZE: Tokens in a block.
        BLOCK_STRIDE: Elements from a block to the next.
    """
    if BLOCK_STRIDE == BLOCK_SIZE * SLOT_STRIDE:
        return (block_ids * BLOCK_SIZE + positions % BLOCK_SIZE) * SLOT_STRIDE
    return block_ids * BLOCK_STRIDE + (positions % BLOCK_SIZE) * SLOT_STRIDE


@triton.jit
def scale_offsets(block_ids, positions, kv_head, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr):
    """Return where the scales of int8 are, in float32 numbers; `BLOCK_STRIDE` is in bytes."""
    return block_ids * (BLOCK_STRIDE // 4) + kv_head * BLOCK_SIZE + positions % BLOCK_SIZE


@triton.jit
def split_of_tiles(num_visible_tokens, window, split, num_splits, TILE_KEYS: tl.constexpr):
    """Return the tiles of keys of one split, first and end, the first visible position, and how many splits have any.

    It depends on the row's length where its keys begin and end, so that a launch does not.

    Args:
        num_visible_tokens: What the query sees without a window, 1 or more.
        window: What it sees at most.
        split: Index of the split.
        num_splits: Of each row.
        TILE_KEYS: Positions in a tile.
    """
    first_position = tl.maximum(num_visible_tokens - window, 0)
    first_tile = first_position // TILE_KEYS
    end_tile = (num_visible_tokens + TILE_KEYS - 1) // TILE_KEYS
    tiles_per_split = (end_tile - first_tile + num_splits - 1) // num_splits
    num_used_splits = (end_tile - first_tile + tiles_per_split - 1) // tiles_per_split
    begin = first_tile + split * tiles_per_split
    return begin, tl.minimum(begin + tiles_per_split, end_tile), first_position, num_used_splits


@triton.jit
def query_tile_at(tiles, index):
    """Return the first token of a tile of `query_tiles` in the step, its number of tokens, and its first position."""
    record = tiles + index * 4
    return tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)


@triton.jit
def window_of_tile(window, num_tokens, end_position):
    """Return how many positions before `end_position` the queries of a tile see together; it stays in int32."""
    return tl.minimum(window, end_position) + (num_tokens - 1)
