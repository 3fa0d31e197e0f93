// Attention of a few queries to one block of keys: scores, running softmax, weighted values.
#ifndef OCTAVO_ATTENTION_BLOCK_H
#define OCTAVO_ATTENTION_BLOCK_H

#include <math.h>
#include <string.h>

#include "tile.h"

// Keys that are scored at once. Both are multiples of every TILE_VECTORS * LANES.
#define BLOCK_KEYS 96
#define TILE_VECTORS 2
#define TILE_COLUMNS (TILE_VECTORS * LANES)
// How many keys ahead of the one that is scored a key is fetched.
#define FETCH_KEYS 8
// Query heads of one token that are scored directly on the cache; more of them pay for packing the keys.
#define MAX_DIRECT_HEADS 8

// Query tokens of one sequence that are worked on together, all of them against the same keys.
typedef struct {
    int32_t row;             // of the block table
    int32_t first_token;     // in the step
    int32_t num_tokens;
    int32_t first_position;  // of the first token in its sequence
    int32_t num_splits;      // parts of the keys that are worked on apart
    int32_t first_partial;   // where the results of the parts go, if there are several
} QueryTile;

typedef struct {
    int32_t tile, split;
} Task;

// A step; the same for all layers.
typedef struct {
    long num_heads, num_kv_heads, head_dim, block_size;
    long num_tokens, table_width;
    const float *cos, *sin;       // [num_tokens][head_dim], the sines of the first half with a minus
    const int64_t *slot_mapping;  // [num_tokens] block * block_size + offset
    const int32_t *block_tables;  // [][table_width]
    const QueryTile *tiles;
    long num_tiles, most_tokens;  // of any tile
    const Task *tasks;            // for each KV head
    long num_tasks, num_partials;
} Step;

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
    vfloat most = vf_all(*largest);
    long t = 0;
    for (; t + LANES <= count; t += LANES) most = vf_max(most, vf_load(scores + t));
    for (; t < count; t++) most = vf_max(most, vf_all(scores[t]));  // what pads a vector must not count
    float now = vf_largest(most);
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

// One block of keys for the few heads of one token. `offsets` has FETCH_KEYS more than `count`.
static void attend_direct(long dim, long num_rows, const float *keys, const float *values, const long *offsets,
                          long count, const Work *work) {
#define SCORE(n) \
    score_heads(n, work->queries + j * dim, keys, values, offsets, count, dim, work->scores + j * BLOCK_KEYS)
    FOR_HEADS(SCORE)
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
#if TILE_ROWS == 8
                TILE(8)
                TILE(7)
                TILE(6)
                TILE(5)
#endif
                TILE(4)
                TILE(3)
                TILE(2)
                TILE(1)
            }
#undef TILE
        }
    }
}

// One block of keys, from position `begin`, for all queries of a tile: packed, so that they are read in order.
static void attend_packed(const QueryTile *tile, long dim, long group, long num_rows, const float *keys,
                          const float *values, const long *offsets, long begin, long count, const Work *work) {
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
    for (long i = 0; i < num_rows; i++) {
        float *scores = work->scores + i * BLOCK_KEYS;
        long num_visible = tile->first_position + i / group + 1 - begin;
        num_visible = num_visible < 0 ? 0 : least(num_visible, count);
        soften(scores, num_visible, dim, work->largest + i, work->weights + i, work->sums + i * dim);
        for (long t = num_visible; t < count; t++) scores[t] = 0;
    }
    multiply_packed(num_rows, count, work->scores, BLOCK_KEYS, work->values, work->sums, dim, dim, true);
}

#endif
