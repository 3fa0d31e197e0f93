// Attention of a few queries to one block of keys: scores, running softmax, weighted values.
//
// There are two ways, straight from the cache and packed, and both give the same bits. A block begins at a multiple of
// BLOCK_KEYS. For each query, a score is the sum of CHAINS sums, each over every CHAINS-th dimension in order; the weights
// of a block are summed by lanes from the block's beginning, and its weighted values over the keys in order. What a
// query does not see counts as exactly 0.
#ifndef OCTAVO_ATTENTION_BLOCK_H
#define OCTAVO_ATTENTION_BLOCK_H

#include <math.h>
#include <string.h>

#include "step.h"
#include "tile.h"

// Keys that are scored at once. Both are multiples of every TILE_VECTORS * LANES.
#define BLOCK_KEYS 96
#define TILE_VECTORS 2
#define TILE_COLUMNS (TILE_VECTORS * LANES)
// Vectors of quads of keys that are multiplied at once: more have more addresses than the processor has registers.
#define QUAD_VECTORS 2
#define QUAD_KEYS (QUAD_VECTORS * LANES / 4)
// Vectors of a value whose sums, for 4 heads, fit into the registers.
#define VALUE_VECTORS (LANES / 4)
// Sums of which a score is the sum.
#define CHAINS 4
// Keys whose softmax is summed apart, a part; see attention.c.
#define PART_KEYS (4 * BLOCK_KEYS)
// Keys behind a block that are fetched while it is scored.
#define FETCH_KEYS LANES
// Query heads of one token that are scored directly on the cache; more of them pay for packing the keys.
#define MAX_DIRECT_HEADS 8

// The softmax of some queries over some keys, not divided yet.
typedef struct {
    float *sums;     // [most rows][head_dim] values weighted by exp(score - largest)
    float *largest;  // [most rows]
    float *weights;  // [most rows] sum of exp(score - largest)
} Softmax;

// Memory of one thread.
typedef struct {
    float *queries;       // [most rows][padded head_dim] scaled; packed: [most rows][CHAINS][padded head_dim / CHAINS]
    float *scores;        // [most rows][BLOCK_KEYS]
    float *keys;          // [BLOCK_KEYS / TILE_COLUMNS][CHAINS][padded head_dim / CHAINS][TILE_COLUMNS]
    float *values;        // [ceil(head_dim / TILE_COLUMNS)][BLOCK_KEYS][TILE_COLUMNS]
    Softmax total, part;  // over the parts so far, over one part
} Work;

// Some keys of a block, for one KV head. `offsets` are where they lie in the cache, from the beginning of the block, and
// FETCH_KEYS more; what is no key of these has the offset of one that is.
typedef struct {
    const float *keys, *values;
    long stride;       // from one key to the next in the cache, where LANES keys lie in one block of it; else 0
    long begin;        // position at which the block begins
    long first, last;  // keys from there: [first, last) of the block
    long offsets[BLOCK_KEYS + FETCH_KEYS];
} KeyBlock;

#define FETCH_LINE(d) _mm_prefetch((const char *)(vector + (d)), _MM_HINT_T0)

// Fetch a vector of `dim` floats that is read soon: blocks are scattered, which the hardware does not foresee.
INLINE void fetch_vector(const float *vector, long dim) {
    if (dim == 64) {  // of most models; a loop takes as long as its lines
        FETCH_LINE(0), FETCH_LINE(16), FETCH_LINE(32), FETCH_LINE(48);
        return;
    }
    for (long d = 0; d < dim; d += 16) FETCH_LINE(d);
}

// Cap the scores of one query and shift them by ALiBi, in whole vectors; `distance` is the position of the block less
// that of the query.
static void shape_scores(float *scores, long first, long last, float soft_cap, float slope, long distance) {
    const float counting_up[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vfloat lanes = vf_load(counting_up), cap = vf_all(soft_cap);
    for (long t = first / LANES * LANES; t < last; t += LANES) {
        vfloat score = vf_load(scores + t);
        if (soft_cap != 0) score = vf_mul(cap, vf_tanh(vf_div(score, cap)));
        score = vf_fma(vf_all(slope), vf_add(lanes, vf_all((float)(distance + t))), score);
        vf_store(scores + t, score);
    }
}

// As shape_scores, for all queries of a tile and one KV head, where the layer asks for it.
static void shape_tile(const Step *step, const QueryTile *tile, long head, const KeyBlock *block, float *scores) {
    if (step->soft_cap == 0 && !step->slopes) return;
    long group = step->num_heads / step->num_kv_heads;
    for (long i = 0; i < tile->num_tokens * group; i++) {
        float slope = step->slopes ? step->slopes[head * group + i % group] : 0;
        shape_scores(scores + i * BLOCK_KEYS, block->first, block->last, step->soft_cap, slope,
                     block->begin - tile->first_position - i / group);
    }
}

// Whether a tile is scored directly on the cache.
INLINE bool is_direct(const Step *step, const QueryTile *tile) {
    return tile->num_tokens == 1 && step->num_heads / step->num_kv_heads <= MAX_DIRECT_HEADS;
}

INLINE long padded_dim(const Step *step) { return round_up(step->head_dim, CHAINS); }

// LANES keys from one of a block on, `*stride` apart: in the cache, or copied to `room`.
INLINE const float *find_keys(const KeyBlock *block, long t, long dim, float *room, long *stride) {
    *stride = block->stride;
    // What lies before the first key in its block of the cache may be anything, as may its score.
    if (*stride) return block->keys + block->offsets[most(t, block->first)] - most(0, block->first - t) * *stride;
    *stride = dim;
    for (long i = 0; i < LANES; i++)
        memcpy(room + i * dim, block->keys + block->offsets[t + i], (size_t)dim * sizeof(float));
    return room;
}

// sums[heads] += queries * the dimensions d to d + 3 (`count` of them) of QUAD_KEYS keys, a quad of sums for each key.
INLINE void add_quads(const int heads, const float *queries, const float *keys, long stride, long d, long count,
                      long padded, vfloat sums[4][QUAD_VECTORS]) {
    vfloat quads[QUAD_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < QUAD_VECTORS; v++)
        quads[v] = vf_load_quads(keys + d + v * (LANES / 4) * stride, stride, count);
#pragma GCC unroll 4
    for (int j = 0; j < heads; j++) {
        vfloat query = vf_repeat_quad(queries + j * padded + d);
#pragma GCC unroll 4
        for (int v = 0; v < QUAD_VECTORS; v++) sums[j][v] = vf_fma(query, quads[v], sums[j][v]);
    }
}

// sums[heads][first ..]: the chains of QUAD_KEYS keys, a quad for each. Their values, and later keys, are fetched.
INLINE void score_quads(const int heads, const float *queries, const float *keys, long stride, const KeyBlock *block,
                        const long *offsets, long dim, int first, vfloat sums[4][4]) {
    vfloat own[4][QUAD_VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < heads; j++)
#pragma GCC unroll 4
        for (int v = 0; v < QUAD_VECTORS; v++) own[j][v] = vf_zero();
    long padded = round_up(dim, CHAINS), due = 0;
    for (long d = 0; d < dim; d += 4) {
        for (due += 4 * QUAD_KEYS; due >= dim; due -= dim, offsets++) {
            fetch_vector(block->keys + offsets[FETCH_KEYS], dim);
            fetch_vector(block->values + offsets[0], dim);
        }
        if (dim - d >= 4)
            add_quads(heads, queries, keys, stride, d, 4, padded, own);
        else
            add_quads(heads, queries, keys, stride, d, dim - d, padded, own);
    }
#pragma GCC unroll 4
    for (int j = 0; j < heads; j++)
#pragma GCC unroll 4
        for (int v = 0; v < QUAD_VECTORS; v++) sums[j][first + v] = own[j][v];
}

// scores[heads][keys] of up to 4 heads of one token, straight from the cache. `heads` is a constant at each call.
INLINE void score_heads(const int heads, const float *queries, const KeyBlock *block, long dim, float *room,
                        float *scores) {
    for (long t = block->first / LANES * LANES; t < block->last; t += LANES) {
        long stride;
        const float *keys = find_keys(block, t, dim, room, &stride);
        vfloat sums[4][4];
#pragma GCC unroll 1
        for (int first = 0; first < 4; first += QUAD_VECTORS)
            score_quads(heads, queries, keys + first * (LANES / 4) * stride, stride, block,
                        block->offsets + t + first * (LANES / 4), dim, first, sums);
#pragma GCC unroll 4
        for (int j = 0; j < heads; j++) {
            vfloat chains[4];
            vf_transpose_quads(sums[j], chains);
            vf_store(scores + j * BLOCK_KEYS + t, vf_add(vf_add(vf_add(chains[0], chains[1]), chains[2]), chains[3]));
        }
    }
}

// Some dimensions of add_values: `vectors` whole ones, or with 0 the `rest` that is no whole vector.
INLINE void add_dimensions(const int heads, const int vectors, const float *scores, const KeyBlock *block, long d,
                           long dim, float *sums) {
    const int used = vectors ? vectors : 1;
    long rest = dim - d;
    vfloat sum[4][4];
#pragma GCC unroll 4
    for (int j = 0; j < heads; j++)
#pragma GCC unroll 4
        for (int v = 0; v < used; v++) sum[j][v] = vf_zero();
    for (long t = block->first; t < block->last; t++) {
        const float *value = block->values + block->offsets[t] + d;
        vfloat part[4];
#pragma GCC unroll 4
        for (int v = 0; v < used; v++) part[v] = vectors ? vf_load(value + v * LANES) : vf_load_part(value, rest);
#pragma GCC unroll 4
        for (int j = 0; j < heads; j++) {
            vfloat weight = vf_all(scores[j * BLOCK_KEYS + t]);
#pragma GCC unroll 4
            for (int v = 0; v < used; v++) sum[j][v] = vf_fma(weight, part[v], sum[j][v]);
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < heads; j++)
#pragma GCC unroll 4
        for (int v = 0; v < used; v++) {
            float *p = sums + j * dim + d + v * LANES;
            if (vectors)
                vf_store(p, vf_add(vf_load(p), sum[j][v]));
            else
                vf_store_part(p, vf_add(vf_load_part(p, rest), sum[j][v]), rest);
        }
}

// sums[heads][dim] += scores[heads][keys] @ values, straight from the cache, up to 4 heads of one token.
INLINE void add_values(const int heads, const float *scores, const KeyBlock *block, long dim, float *sums) {
    long d = 0;
    for (; d + VALUE_VECTORS * LANES <= dim; d += VALUE_VECTORS * LANES)
        add_dimensions(heads, VALUE_VECTORS, scores, block, d, dim, sums);
    for (; d + LANES <= dim; d += LANES) add_dimensions(heads, 1, scores, block, d, dim, sums);
    if (d < dim) add_dimensions(heads, 0, scores, block, d, dim, sums);
}

// Take the scores [lower, upper) of one query into its running softmax: they become exp(score - largest), older sums
// shrink. In the vectors that hold them the other scores become 0.
// Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
static void soften(float *scores, long lower, long upper, long dim, float *largest, float *weight, float *sums) {
    if (lower >= upper) return;
    long begin = lower / LANES * LANES, end = round_up(upper, LANES);
    for (long t = begin; t < lower; t++) scores[t] = -INFINITY;
    for (long t = upper; t < end; t++) scores[t] = -INFINITY;
    vfloat peak = vf_all(*largest), total = vf_zero();
    for (long t = begin; t < end; t += LANES) peak = vf_max(peak, vf_load(scores + t));
    float now = vf_largest(peak);
    for (long t = begin; t < end; t += LANES) {
        vfloat weights = vf_weight(vf_sub(vf_load(scores + t), vf_all(now)));
        vf_store(scores + t, weights);
        total = vf_add(total, weights);
    }
    float shrink = weight_of(*largest - now);
    *weight = *weight * shrink + vf_sum(total);
    *largest = now;
    if (shrink == 1.0f) return;
    for (long d = 0; d < dim; d += LANES)
        vf_store_part(sums + d, vf_mul(vf_load_part(sums + d, dim - d), vf_all(shrink)), dim - d);
}

#define FOR_HEADS(call)                              \
    for (long j = 0; j < num_rows; j += 4) {         \
        switch (least(4, num_rows - j)) {            \
            case 4: call(4); break;                  \
            case 3: call(3); break;                  \
            case 2: call(2); break;                  \
            case 1: call(1); break;                  \
        }                                            \
    }

// A block of keys, for the few heads of one token, which sees all of them.
static void attend_direct(const Step *step, const QueryTile *tile, long head, const KeyBlock *block, const Work *work,
                          const Softmax *into) {
    long dim = step->head_dim, padded = padded_dim(step), num_rows = step->num_heads / step->num_kv_heads;
#define SCORE(n) score_heads(n, work->queries + j * padded, block, dim, work->keys, work->scores + j * BLOCK_KEYS)
    FOR_HEADS(SCORE)
    shape_tile(step, tile, head, block, work->scores);
    for (long i = 0; i < num_rows; i++)
        soften(work->scores + i * BLOCK_KEYS, block->first, block->last, dim, into->largest + i, into->weights + i,
               into->sums + i * dim);
#define ADD(n) add_values(n, work->scores + j * BLOCK_KEYS, block, dim, into->sums + j * dim)
    FOR_HEADS(ADD)
}

// c[rows][columns of a panel] (=|+=) a @ panel, for up to TILE_ROWS rows.
INLINE void multiply_tile(long num_rows, long depth, const float *a, long a_stride, const float *panel, float *c,
                          long c_stride, long columns, bool add) {
#define TILE(n)                                                                                                    \
    case n:                                                                                                        \
        tile_product(n, TILE_VECTORS, depth, a, a_stride, panel, NULL, 0, c, c_stride, columns, add);               \
        break;
    switch (num_rows) {
        TILE_CASES(TILE)
    }
#undef TILE
}

// The scores of all queries of a tile, in the vectors of the keys [first, last).
static void score_packed(const Step *step, long num_rows, long first, long last, const Work *work) {
    long padded = padded_dim(step), depth = padded / CHAINS;
    for (long column = first / TILE_COLUMNS * TILE_COLUMNS; column < last; column += TILE_COLUMNS)
        for (long i = 0; i < num_rows; i += TILE_ROWS)
            for (long chain = 0; chain < CHAINS; chain++)
                multiply_tile(least(TILE_ROWS, num_rows - i), depth, work->queries + i * padded + chain * depth, padded,
                              work->keys + column * padded + chain * depth * TILE_COLUMNS,
                              work->scores + i * BLOCK_KEYS + column, BLOCK_KEYS, TILE_COLUMNS, chain > 0);
}

// sums[num_rows][dim] += scores[num_rows][count] @ values.
static void add_packed(long num_rows, long count, const float *scores, long dim, const Work *work, float *sums) {
    for (long d = 0; d < dim; d += TILE_COLUMNS)
        for (long i = 0; i < num_rows; i += TILE_ROWS)
            multiply_tile(least(TILE_ROWS, num_rows - i), count, scores + i * BLOCK_KEYS, BLOCK_KEYS,
                          work->values + d * count, sums + i * dim + d, dim, dim - d, true);
}

// Pack the keys and values of a block, so that they are read in order.
static void pack_block(const KeyBlock *block, long dim, const Work *work) {
    long padded = round_up(dim, CHAINS), depth = padded / CHAINS;
    for (long t = block->first / LANES * LANES; t < block->last; t += LANES) {
        float *panel = work->keys + t / TILE_COLUMNS * TILE_COLUMNS * padded + t % TILE_COLUMNS;
        long stride;
        const float *keys = find_keys(block, t, dim, work->values, &stride);
        for (long d = 0; d < dim; d += 4) {
            vfloat quads[4], chains[4];
            for (int v = 0; v < 4; v++)
                quads[v] = vf_load_quads(keys + d + v * (LANES / 4) * stride, stride, dim - d);
            vf_transpose_quads(quads, chains);
            for (long chain = 0; chain < CHAINS; chain++)
                vf_store(panel + (chain * depth + d / 4) * TILE_COLUMNS, chains[chain]);
        }
    }
    long count = block->last - block->first;
    for (long t = 0; t < count; t++) {
        const float *value = block->values + block->offsets[block->first + t];
        for (long d = 0; d < dim; d += TILE_COLUMNS)
            memcpy(work->values + d * count + t * TILE_COLUMNS, value + d,
                   (size_t)least(TILE_COLUMNS, dim - d) * sizeof(float));
    }
}

// A block of keys, for all queries of a tile, packed.
static void attend_packed(const Step *step, const QueryTile *tile, long head, const KeyBlock *block, const Work *work,
                          const Softmax *into) {
    long dim = step->head_dim, group = step->num_heads / step->num_kv_heads, num_rows = tile->num_tokens * group;
    long first = block->first, last = block->last;
    pack_block(block, dim, work);
    score_packed(step, num_rows, first, last, work);
    shape_tile(step, tile, head, block, work->scores);
    for (long i = 0; i < num_rows; i++) {
        float *scores = work->scores + i * BLOCK_KEYS;
        long position = tile->first_position + i / group;
        long upper = most(first, least(position + 1 - block->begin, last));
        long lower = least(most(first, position + 1 - step->window - block->begin), upper);
        soften(scores, lower, upper, dim, into->largest + i, into->weights + i, into->sums + i * dim);
        for (long t = first; t < lower; t++) scores[t] = 0;
        for (long t = upper; t < last; t++) scores[t] = 0;
    }
    add_packed(num_rows, last - first, work->scores + first, dim, work, into->sums);
}

#endif
