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

// scores[heads][keys] of up to 4 heads of one token, straight from the cache. `heads` is a constant at each call.
INLINE void score_heads(const int heads, const float *queries, const float *keys, const long *offsets, long count,
                        long dim, float *scores) {
    for (long t = 0; t < count; t++) {
        const float *key = keys + offsets[t];
        vfloat sum[4];
#pragma GCC unroll 4
        for (int j = 0; j < heads; j++) sum[j] = vf_zero();
        for (long d = 0; d < dim; d += LANES) {
            vfloat part = vf_load_part(key + d, dim - d);
#pragma GCC unroll 4
            for (int j = 0; j < heads; j++)
                sum[j] = vf_fma(part, vf_load_part(queries + j * dim + d, dim - d), sum[j]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < heads; j++) scores[j * BLOCK_KEYS + t] = vf_sum(sum[j]);
    }
}

// sums[heads][dim] += scores[heads][keys] @ values, straight from the cache, up to 4 heads of one token.
INLINE void add_values(const int heads, const float *scores, const float *values, const long *offsets, long count,
                       long dim, float *sums) {
    for (long d = 0; d < dim; d += 2 * LANES) {
        vfloat sum[4][2];
#pragma GCC unroll 4
        for (int j = 0; j < heads; j++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++)
                sum[j][v] = vf_load_part(sums + j * dim + d + v * LANES, dim - d > v * LANES ? dim - d - v * LANES : 0);
        for (long t = 0; t < count; t++) {
            const float *value = values + offsets[t] + d;
            vfloat first = vf_load_part(value, dim - d);
            vfloat second = dim - d > LANES ? vf_load_part(value + LANES, dim - d - LANES) : vf_zero();
#pragma GCC unroll 4
            for (int j = 0; j < heads; j++) {
                vfloat weight = vf_all(scores[j * BLOCK_KEYS + t]);
                sum[j][0] = vf_fma(weight, first, sum[j][0]);
                sum[j][1] = vf_fma(weight, second, sum[j][1]);
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < heads; j++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++)
                if (dim - d > v * LANES)
                    vf_store_part(sums + j * dim + d + v * LANES, sum[j][v], dim - d - v * LANES);
    }
}

// Take new scores of one query into its running softmax: scores become exp(score - largest), older sums shrink.
// Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
static void soften(float *scores, long count, long dim, float *largest, float *weight, float *sums) {
    vfloat most = vf_all(*largest);
    for (long t = 0; t < count; t += LANES) {
        vfloat part = vf_load_part(scores + t, count - t);
        if (count - t < LANES) {  // what pads the last vector must not count
            for (long i = t; i < count; i++) most = vf_max(most, vf_all(scores[i]));
        } else {
            most = vf_max(most, part);
        }
    }
    float now = vf_largest(most);
    if (now == -INFINITY) {  // no key so far may be seen
        memset(scores, 0, (size_t)count * sizeof(float));
        return;
    }
    vfloat total = vf_zero();
    for (long t = 0; t < count; t += LANES) {
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

// One block of keys for the few heads of one token.
static void attend_direct(long dim, long num_rows, const float *keys, const float *values, const long *offsets,
                          long count, const Work *work) {
#define SCORE(n) score_heads(n, work->queries + j * dim, keys, offsets, count, dim, work->scores + j * BLOCK_KEYS)
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
        for (long t = num_visible > 0 ? num_visible : 0; t < count; t++) scores[t] = -INFINITY;
        soften(scores, count, dim, work->largest + i, work->weights + i, work->sums + i * dim);
    }
    multiply_packed(num_rows, count, work->scores, BLOCK_KEYS, work->values, work->sums, dim, dim, true);
}

#endif
