// The few heads of one token against a block of keys, straight from the cache.
#ifndef OCTAVO_ATTENTION_DIRECT_H
#define OCTAVO_ATTENTION_DIRECT_H

#include "attention_block.h"

// Vectors of quads of keys that are multiplied at once: more have more addresses than the processor has registers.
#define QUAD_VECTORS 2
#define QUAD_KEYS (QUAD_VECTORS * LANES / 4)
// Vectors of a value whose sums, for 4 heads, fit into the registers.
#define HEAD_VECTORS (LANES / 4)

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
INLINE void score_quads(const int heads, const float *queries, long padded, const float *keys, long stride,
                        const KeyBlock *block, const long *offsets, long dim, int first, vfloat sums[4][4]) {
    vfloat own[4][QUAD_VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < heads; j++)
#pragma GCC unroll 4
        for (int v = 0; v < QUAD_VECTORS; v++) own[j][v] = vf_zero();
    long due = 0;
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
INLINE void score_heads(const int heads, const float *queries, long padded, const KeyBlock *block, long dim, float *room,
                        float *scores) {
    for (long t = block->first / LANES * LANES; t < block->last; t += LANES) {
        long stride;
        const float *keys = find_keys(block, t, dim, room, &stride);
        vfloat sums[4][4];
#pragma GCC unroll 1
        for (int first = 0; first < 4; first += QUAD_VECTORS)
            score_quads(heads, queries, padded, keys + first * (LANES / 4) * stride, stride, block,
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
                           long dim, const float *shrink, float *sums) {
    const int used = vectors ? vectors : 1;
    long rest = dim - d, stride = round_up(dim, LANES);
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
            float *p = sums + j * stride + d + v * LANES;
            vf_store(p, vf_fma(vf_load(p), vf_all(shrink[j]), sum[j][v]));
        }
}

// sums[heads] = sums * shrink + scores[heads][keys] @ values, straight from the cache, up to 4 heads of one token.
INLINE void add_values(const int heads, const float *scores, const KeyBlock *block, long dim, const float *shrink,
                       float *sums) {
    long d = 0;
    for (; d + HEAD_VECTORS * LANES <= dim; d += HEAD_VECTORS * LANES)
        add_dimensions(heads, HEAD_VECTORS, scores, block, d, dim, shrink, sums);
    for (; d + LANES <= dim; d += LANES) add_dimensions(heads, 1, scores, block, d, dim, shrink, sums);
    if (d < dim) add_dimensions(heads, 0, scores, block, d, dim, shrink, sums);
}

// A block of keys, for up to 4 heads of one token from `row` on. `heads` is a constant at each call.
INLINE void attend_heads(const int heads, const Step *step, const QueryTile *tile, long head, const KeyBlock *block,
                         long row, const Work *work, const Softmax *into) {
    long dim = step->head_dim, begin = block->first / LANES * LANES, end = round_up(block->last, LANES);
    float *scores = work->scores, shrink[LANES];
    score_heads(heads, work->queries + row * padded_queries(step), padded_queries(step), block, dim, work->keys, scores);
    shape_rows(step, tile, head, block, row, heads, begin, end, scores);
    for (long i = 0; i < heads; i++) hide_scores(scores + i * BLOCK_KEYS, begin, end, block->first, block->last);
    soften(heads, scores, begin, end, into->largest + row, into->weights + row, shrink);
    add_values(heads, scores, block, dim, shrink, into->sums + row * padded_values(step));
}

// A block of keys, for the few heads of one token, which sees all of them.
static void attend_direct(const Step *step, const QueryTile *tile, long head, const KeyBlock *block, const Work *work,
                          const Softmax *into) {
    for (long row = 0; row < group_of(step); row += 4) {
        switch (least(4, group_of(step) - row)) {
            case 4: attend_heads(4, step, tile, head, block, row, work, into); break;
            case 3: attend_heads(3, step, tile, head, block, row, work, into); break;
            case 2: attend_heads(2, step, tile, head, block, row, work, into); break;
            case 1: attend_heads(1, step, tile, head, block, row, work, into); break;
        }
    }
}

#endif
