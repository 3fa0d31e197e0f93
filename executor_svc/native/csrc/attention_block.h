// Attention of a few queries to one block of keys: scores, running softmax, weighted values.
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
// How many keys ahead of the one that is scored a key is fetched.
#define FETCH_KEYS 8
// Query heads of one token that are scored directly on the cache; more of them pay for packing the keys.
#define MAX_DIRECT_HEADS 8

// Memory of one thread, and of the partial results.
typedef struct {
    float *queries;   // [most rows][head_dim] scaled
    float *scores;    // [most rows][BLOCK_KEYS]
    float *sums;      // [most rows][head_dim] values weighted by exp(score - largest)
    float *largest;   // [most rows]
    float *weights;   // [most rows] sum of exp(score - largest)
    float *keys;      // [BLOCK_KEYS / TILE_COLUMNS][head_dim][TILE_COLUMNS]
    float *values;    // [ceil(head_dim / TILE_COLUMNS)][BLOCK_KEYS][TILE_COLUMNS]
} Work;

// Fetch a vector of `dim` floats that is read soon: blocks are scattered, which the hardware does not foresee.
INLINE void fetch_vector(const float *vector, long dim) {
    for (long d = 0; d < dim; d += 16) _mm_prefetch((const char *)(vector + d), _MM_HINT_T0);
}

// tanh(x), relative error below 4e-7.
// Source: Eigen, ptanh_float: an odd polynomial divided by an even one; beyond the bounds it is 1 in float32.
INLINE vfloat vf_tanh(vfloat x) {
    x = vf_min(vf_max(x, vf_all(-7.90531110763549805f)), vf_all(7.90531110763549805f));
    vfloat square = vf_mul(x, x), p = vf_all(-2.76076847742355e-16f), q = vf_all(1.19825839466702e-06f);
    p = vf_fma(p, square, vf_all(2.00018790482477e-13f));
    p = vf_fma(p, square, vf_all(-8.60467152213735e-11f));
    p = vf_fma(p, square, vf_all(5.12229709037114e-08f));
    p = vf_fma(p, square, vf_all(1.48572235717979e-05f));
    p = vf_fma(p, square, vf_all(6.37261928875436e-04f));
    p = vf_fma(p, square, vf_all(4.89352455891786e-03f));
    q = vf_fma(q, square, vf_all(1.18534705686654e-04f));
    q = vf_fma(q, square, vf_all(2.26843463243900e-03f));
    q = vf_fma(q, square, vf_all(4.89352518554385e-03f));
    return vf_div(vf_mul(x, p), q);
}

// Cap the scores of one query and shift them by ALiBi, in whole vectors; `distance` is the position of the first key
// less that of the query.
static void shape_scores(float *scores, long count, float soft_cap, float slope, long distance) {
    const float counting_up[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vfloat lanes = vf_load(counting_up), cap = vf_all(soft_cap);
    for (long t = 0; t < count; t += LANES) {
        vfloat score = vf_load(scores + t);
        if (soft_cap != 0) score = vf_mul(cap, vf_tanh(vf_div(score, cap)));
        score = vf_fma(vf_all(slope), vf_add(lanes, vf_all((float)(distance + t))), score);
        vf_store(scores + t, score);
    }
}

// As shape_scores, for all queries of a tile and one KV head, where the layer asks for it.
static void shape_tile(const Step *step, const QueryTile *tile, long head, long begin, long count, float *scores) {
    if (step->soft_cap == 0 && !step->slopes) return;
    long group = step->num_heads / step->num_kv_heads;
    for (long i = 0; i < tile->num_tokens * group; i++) {
        float slope = step->slopes ? step->slopes[head * group + i % group] : 0;
        shape_scores(scores + i * BLOCK_KEYS, count, step->soft_cap, slope, begin - tile->first_position - i / group);
    }
}

// scores[heads][keys] of up to 4 heads of one token, straight from the cache; the values of the keys are fetched
// meanwhile. `heads` is a constant at each call.
INLINE void score_heads(const int heads, const float *queries, const float *keys, const float *values,
                        const long *offsets, long count, long dim, float *scores) {
    for (long t = 0; t < count; t++) {
        const float *key = keys + offsets[t];
        fetch_vector(keys + offsets[t + FETCH_KEYS], dim);
        fetch_vector(values + offsets[t], dim);
        vfloat sum[4];
#pragma GCC unroll 4
        for (int j = 0; j < heads; j++) sum[j] = vf_zero();
        long d = 0;
        for (; d + LANES <= dim; d += LANES) {
            vfloat part = vf_load(key + d);
#pragma GCC unroll 4
            for (int j = 0; j < heads; j++) sum[j] = vf_fma(part, vf_load(queries + j * dim + d), sum[j]);
        }
        if (d < dim) {
            vfloat part = vf_load_part(key + d, dim - d);
#pragma GCC unroll 4
            for (int j = 0; j < heads; j++)
                sum[j] = vf_fma(part, vf_load_part(queries + j * dim + d, dim - d), sum[j]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < heads; j++) scores[j * BLOCK_KEYS + t] = vf_sum(sum[j]);
    }
}

// Some dimensions of add_values: `vectors` whole ones, or with 0 the `rest` that is no whole vector.
INLINE void add_dimensions(const int heads, const int vectors, const float *scores, const float *values,
                           const long *offsets, long count, long dim, long rest, float *sums) {
    const int used = vectors ? vectors : 1;
    vfloat sum[4][4];
#pragma GCC unroll 4
    for (int j = 0; j < heads; j++)
#pragma GCC unroll 4
        for (int v = 0; v < used; v++)
            sum[j][v] = vectors ? vf_load(sums + j * dim + v * LANES) : vf_load_part(sums + j * dim, rest);
    for (long t = 0; t < count; t++) {
        const float *value = values + offsets[t];
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
        for (int v = 0; v < used; v++)
            if (vectors)
                vf_store(sums + j * dim + v * LANES, sum[j][v]);
            else
                vf_store_part(sums + j * dim, sum[j][v], rest);
}

#if LANES == 16
#define VALUE_VECTORS 4  // sums of 4 heads and a value fit into 32 registers
#else
#define VALUE_VECTORS 2  // into 16
#endif

// sums[heads][dim] += scores[heads][keys] @ values, straight from the cache, up to 4 heads of one token.
INLINE void add_values(const int heads, const float *scores, const float *values, const long *offsets, long count,
                       long dim, float *sums) {
    long d = 0;
    for (; d + VALUE_VECTORS * LANES <= dim; d += VALUE_VECTORS * LANES)
        add_dimensions(heads, VALUE_VECTORS, scores, values + d, offsets, count, dim, 0, sums + d);
    for (; d + LANES <= dim; d += LANES)
        add_dimensions(heads, 1, scores, values + d, offsets, count, dim, 0, sums + d);
    if (d < dim) add_dimensions(heads, 0, scores, values + d, offsets, count, dim, dim - d, sums + d);
}

// Take new scores of one query into its running softmax: scores become exp(score - largest), older sums shrink.
// Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
static void soften(float *scores, long count, long dim, float *largest, float *weight, float *sums) {
    if (!count) return;
    vfloat peak = vf_all(*largest);
    long t = 0;
    for (; t + LANES <= count; t += LANES) peak = vf_max(peak, vf_load(scores + t));
    for (; t < count; t++) peak = vf_max(peak, vf_all(scores[t]));  // what pads a vector must not count
    float now = vf_largest(peak);
    vfloat total = vf_zero();
    for (t = 0; t + LANES <= count; t += LANES) {
        vfloat weights = vf_exp(vf_sub(vf_load(scores + t), vf_all(now)));
        vf_store(scores + t, weights);
        total = vf_add(total, weights);
    }
    if (t < count) {
        vf_store_part(scores + t, vf_exp(vf_sub(vf_load_part(scores + t, count - t), vf_all(now))), count - t);
        total = vf_add(total, vf_load_part(scores + t, count - t));
    }
    float shrink = *largest == -INFINITY ? 0.0f : expf(*largest - now);
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

// One block of keys, from position `begin`, for the few heads of one token, which sees all of them. `offsets` has
// FETCH_KEYS more than `count`.
static void attend_direct(const Step *step, const QueryTile *tile, long head, const float *keys, const float *values,
                          const long *offsets, long begin, long count, const Work *work) {
    long dim = step->head_dim, num_rows = step->num_heads / step->num_kv_heads;
#define SCORE(n) \
    score_heads(n, work->queries + j * dim, keys, values, offsets, count, dim, work->scores + j * BLOCK_KEYS)
    FOR_HEADS(SCORE)
    shape_tile(step, tile, head, begin, count, work->scores);
    for (long i = 0; i < num_rows; i++)
        soften(work->scores + i * BLOCK_KEYS, count, dim, work->largest + i, work->weights + i, work->sums + i * dim);
#define ADD(n) add_values(n, work->scores + j * BLOCK_KEYS, values, offsets, count, dim, work->sums + j * dim)
    FOR_HEADS(ADD)
}

// c[num_rows][columns] (=|+=) a @ packed panels of TILE_COLUMNS.
static void multiply_packed(long num_rows, long depth, const float *a, long a_stride, const float *panels, float *c,
                            long c_stride, long columns, bool add) {
    for (long column = 0; column < columns; column += TILE_COLUMNS) {
        const float *b = panels + column * depth;
        for (long i = 0; i < num_rows; i += TILE_ROWS) {
            const float *from = a + i * a_stride;
            float *to = c + i * c_stride + column;
#define TILE(n)                                                                                                  \
    case n:                                                                                                      \
        tile_product(n, TILE_VECTORS, depth, from, a_stride, b, NULL, 0, to, c_stride, columns - column, add);    \
        break;
            switch (least(TILE_ROWS, num_rows - i)) {
                TILE_CASES(TILE)
            }
#undef TILE
        }
    }
}

// One block of keys, from position `begin`, for all queries of a tile: packed, so that they are read in order.
static void attend_packed(const Step *step, const QueryTile *tile, long head, const float *keys, const float *values,
                          const long *offsets, long begin, long count, const Work *work) {
    long dim = step->head_dim, group = step->num_heads / step->num_kv_heads, num_rows = tile->num_tokens * group;
    long columns = round_up(count, LANES);
    for (long t = 0; t < count; t++) {
        const float *key = keys + offsets[t], *value = values + offsets[t];
        float *key_column = work->keys + t / TILE_COLUMNS * TILE_COLUMNS * dim + t % TILE_COLUMNS;
        for (long d = 0; d < dim; d++) key_column[d * TILE_COLUMNS] = key[d];
        for (long d = 0; d < dim; d += TILE_COLUMNS)
            memcpy(work->values + d * count + t * TILE_COLUMNS, value + d,
                   (size_t)least(TILE_COLUMNS, dim - d) * sizeof(float));
    }
    multiply_packed(num_rows, dim, work->queries, dim, work->keys, work->scores, BLOCK_KEYS, columns, false);
    shape_tile(step, tile, head, begin, count, work->scores);
    for (long i = 0; i < num_rows; i++) {
        float *scores = work->scores + i * BLOCK_KEYS;
        long position = tile->first_position + i / group;
        long upper = most(0, least(position + 1 - begin, count));
        long lower = least(most(0, position + 1 - step->window - begin), upper);
        soften(scores + lower, upper - lower, dim, work->largest + i, work->weights + i, work->sums + i * dim);
        for (long t = 0; t < lower; t++) scores[t] = 0;
        for (long t = upper; t < count; t++) scores[t] = 0;
    }
    multiply_packed(num_rows, count, work->scores, BLOCK_KEYS, work->values, work->sums, dim, dim, true);
}

#endif
