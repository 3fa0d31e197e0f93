// The heads of one token against a block of keys, straight from the cache.
//
// The keys of all KV heads of a task are scored side by side, LANES of them at a time, and then their values are added: the
// memory of a block is read in the order in which it lies.
#ifndef OCTAVO_ATTENTION_DIRECT_H
#define OCTAVO_ATTENTION_DIRECT_H

#include "attention_block.h"

// Vectors of quads of keys that are multiplied at once: more would need more addresses than there are registers.
#define QUAD_VECTORS 2
#define QUAD_KEYS (QUAD_VECTORS * LANES / 4)
// Vectors of a value for which the sums of 4 heads fit into the registers.
#define HEAD_VECTORS (LANES / 4)

// Query heads of a KV head that are worked on at once, and the cases of a switch over their number: each a constant.
INLINE long heads_at_once(long row, long group) { return least(4, group - row % group); }
#define HEAD_CASES(CASE) CASE(4) CASE(3) CASE(2) CASE(1)

// Vectors that are read soon. They are fetched in the order in which they lie in the cache: that wakes the prefetcher of
// the processor, which has more in flight than a program can.
typedef struct {
    const void *vectors;       // of the first head
    const long *offset, *end;  // of the next key, and behind the last one
    long head, num_heads;
} Ahead;

INLINE void fetch_ahead(const long format, Ahead *ahead, long dim) {
    if (ahead->offset == ahead->end) return;
    fetch_vector(element_at(format, ahead->vectors, *ahead->offset + ahead->head * dim), dim * element_bytes(format));
    if (++ahead->head == ahead->num_heads) ahead->head = 0, ahead->offset++;
}

// sums[heads] += queries * 4 dimensions, or pairs, of QUAD_KEYS keys, a quad of sums for each key.
INLINE void add_quads(const bool in_pairs, const int heads, const float *queries, long padded,
                      const vfloat quads[QUAD_VECTORS], vfloat sums[4][QUAD_VECTORS]) {
#pragma GCC unroll 4
    for (int j = 0; j < heads; j++) {
        vfloat query = vf_repeat_quad(queries + j * padded);
#pragma GCC unroll 4
        for (int v = 0; v < QUAD_VECTORS; v++) sums[j][v] = add_product(in_pairs, query, quads[v], sums[j][v]);
    }
}

// sums[heads][first ..]: the chains of QUAD_KEYS keys, a quad for each. Keys are floats or pairs, or whole vectors of `read`.
INLINE void score_quads(const long format, const bool in_pairs, const long read, const int heads, const float *queries,
                        long padded, const void *keys, long stride, Ahead *ahead, long dim, int first,
                        vfloat sums[4][4]) {
    vfloat own[4][QUAD_VECTORS];
    unsigned mode = begin_sums(in_pairs);
#pragma GCC unroll 4
    for (int j = 0; j < heads; j++)
#pragma GCC unroll 4
        for (int v = 0; v < QUAD_VECTORS; v++) own[j][v] = carried(in_pairs, vf_zero());
    long due = 0, d = 0, depth = head_floats(in_pairs, dim);
    for (; d + LANES <= depth; d += LANES) {
        for (due += LANES * QUAD_KEYS; due >= depth; due -= depth) fetch_ahead(format, ahead, dim);
        vfloat squares[QUAD_VECTORS][LANES / 4];
#pragma GCC unroll 4
        for (int v = 0; v < QUAD_VECTORS; v++)
            load_squares(read, element_at(read, keys, d + v * (LANES / 4) * stride), stride, squares[v]);
#pragma GCC unroll 4
        for (int quad = 0; quad < LANES / 4; quad++) {
            vfloat quads[QUAD_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < QUAD_VECTORS; v++) quads[v] = squares[v][quad];
            add_quads(in_pairs, heads, queries + d + quad * 4, padded, quads, own);
        }
    }
    for (; read == CACHE_FLOAT32 && d < depth; d += 4) {
        vfloat quads[QUAD_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < QUAD_VECTORS; v++)
            quads[v] = vf_load_quads((const float *)keys + d + v * (LANES / 4) * stride, stride, depth - d);
        add_quads(in_pairs, heads, queries + d, padded, quads, own);
    }
#pragma GCC unroll 4
    for (int j = 0; j < heads; j++)
#pragma GCC unroll 4
        for (int v = 0; v < QUAD_VECTORS; v++) sums[j][first + v] = carried(in_pairs, own[j][v]);
    end_sums(in_pairs, mode);
}

// As score_quads, for LANES keys that are floats or pairs.
INLINE void score_found(const long format, const bool in_pairs, const int heads, const float *queries, long padded,
                        const float *keys, long stride, Ahead *ahead, long dim, vfloat sums[4][4]) {
#pragma GCC unroll 1
    for (int first = 0; first < 4; first += QUAD_VECTORS)
        score_quads(format, in_pairs, CACHE_FLOAT32, heads, queries, padded, keys + first * (LANES / 4) * stride, stride,
                    ahead, dim, first, sums);
}

// For converted keys of any format: they do not lie as the fast way needs them.
APART void score_converted(long format, int heads, const float *queries, long padded, const float *keys, long stride,
                           Ahead *ahead, long dim, vfloat sums[4][4]) {
    switch (heads) {
#define SCORE(n) case n: score_found(format, false, n, queries, padded, keys, stride, ahead, dim, sums); break;
        HEAD_CASES(SCORE)
#undef SCORE
    }
}

// scores[heads][t ..] of up to 4 query heads of a KV head, LANES keys from t on. `heads` is a constant at each call.
INLINE void score_heads(const long format, const bool in_pairs, const bool is_scaled, const int heads, const float *queries, long padded,
                        const KeyBlock *block, long t, long dim, float *room, Ahead *ahead, float *scores) {
    vfloat sums[4][4];
    if (!in_pairs && format != CACHE_FLOAT32 && block->stride && dim % LANES == 0) {
        const void *keys = keys_in_place(format, block, t);
#pragma GCC unroll 1
        for (int first = 0; first < 4; first += QUAD_VECTORS)
            score_quads(format, in_pairs, format, heads, queries, padded,
                        element_at(format, keys, first * (LANES / 4) * block->stride), block->stride, ahead, dim, first,
                        sums);
    } else {
        long stride;
        const float *keys = find_keys(format, in_pairs, block, t, dim, room, &stride);
        if (in_pairs || format == CACHE_FLOAT32)
            score_found(format, in_pairs, heads, queries, padded, keys, stride, ahead, dim, sums);
        else
            score_converted(format, heads, queries, padded, keys, stride, ahead, dim, sums);
    }
#pragma GCC unroll 4
    for (int j = 0; j < heads; j++) {
        vfloat chains[4];
        vf_transpose_quads(sums[j], chains);
        vfloat score = vf_add(vf_add(vf_add(chains[0], chains[1]), chains[2]), chains[3]);
        if (is_scaled) score = vf_mul(score, vf_load(block->key_scales + t));
        vf_store(scores + j * BLOCK_KEYS + t, score);
    }
}

// Some dimensions of add_values: `vectors` whole vectors, or with 0 the `rest` that fills none.
INLINE void add_dimensions(const long format, const int heads, const int vectors, const float *scores,
                           const KeyBlock *block, long begin, long end, long d, long dim, Ahead *ahead, float *sums) {
    const int used = vectors ? vectors : 1;
    long rest = dim - d, stride = round_up(dim, LANES);
    vfloat sum[4][4];
#pragma GCC unroll 4
    for (int j = 0; j < heads; j++)
#pragma GCC unroll 4
        for (int v = 0; v < used; v++) sum[j][v] = vf_load(sums + j * stride + d + v * LANES);
    for (long t = begin; t < end; t++) {
        if (d == 0) fetch_ahead(format, ahead, dim);
        const void *value = element_at(format, block->values, block->offsets[t] + d);
        vfloat part[4];
#pragma GCC unroll 4
        for (int v = 0; v < used; v++)
            part[v] = vectors ? load_elements(format, element_at(format, value, v * LANES))
                              : load_elements_part(format, value, rest);
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
        for (int v = 0; v < used; v++) vf_store(sums + j * stride + d + v * LANES, sum[j][v]);
}

// 2 * LANES dimensions of the values of a pair of keys, which are bfloat16; NULL: its value is 0.
INLINE void interleave_values(const void *first, const void *second, vfloat out[2]) {
    vint pairs[2];
    vi_interleave(first ? vi_load(first) : vi_zero(), second ? vi_load(second) : vi_zero(), pairs);
    out[0] = vi_as_float(pairs[0]), out[1] = vi_as_float(pairs[1]);
}

// As add_dimensions, in pairs of keys; `begin` is even.
INLINE void add_dimension_pairs(const int heads, const int vectors, const float *weights,
                                const KeyBlock *block, long begin, long end, long d, long dim, Ahead *ahead,
                                float *sums) {
    const int used = vectors ? vectors : 1;
    long stride = round_up(dim, LANES);
    vfloat sum[4][4];
    unsigned mode = begin_products();
#pragma GCC unroll 4
    for (int j = 0; j < heads; j++)
#pragma GCC unroll 4
        for (int v = 0; v < used; v++) sum[j][v] = vf_between_products(vf_load(sums + j * stride + d + v * LANES));
    for (long t = begin; t < end; t += 2) {
        if (d == 0) fetch_ahead(CACHE_BFLOAT16, ahead, dim), fetch_ahead(CACHE_BFLOAT16, ahead, dim);
        vfloat pairs[4];
        if (vectors && vectors % 2 == 0) {
            bool has_first = block->first <= t, has_second = t + 1 < block->last;
            const uint16_t *values = (const uint16_t *)block->values + d;
#pragma GCC unroll 4
            for (int v = 0; v < used; v += 2)
                interleave_values(has_first ? values + block->offsets[t] + v * LANES : NULL,
                                  has_second ? values + block->offsets[t + 1] + v * LANES : NULL, pairs + v);
        } else {
#pragma GCC unroll 4
            for (int v = 0; v < used; v++)
                pairs[v] = load_value_pair(block, t, d + v * LANES, vectors ? LANES : dim - d);
        }
#pragma GCC unroll 4
        for (int j = 0; j < heads; j++) {
            vfloat weight = vf_all(weights[j * BLOCK_KEYS + t / 2]);
#pragma GCC unroll 4
            for (int v = 0; v < used; v++) sum[j][v] = vf_add_pairs(sum[j][v], weight, pairs[v]);
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < heads; j++)
#pragma GCC unroll 4
        for (int v = 0; v < used; v++) vf_store(sums + j * stride + d + v * LANES, vf_between_products(sum[j][v]));
    end_products(mode);
}

// sums[heads] += scores[heads][keys] @ values of the keys [begin, end) of a block, up to 4 query heads of a KV head.
INLINE void add_values(const long format, const bool in_pairs, const int heads, const float *scores,
                       const KeyBlock *block, long begin, long end, long dim, Ahead *ahead, float *sums) {
#define ADD_DIMENSIONS(vectors)                                                                                \
    (in_pairs ? add_dimension_pairs(heads, vectors, scores, block, begin, end, d, dim, ahead, sums)    \
              : add_dimensions(format, heads, vectors, scores, block, begin, end, d, dim, ahead, sums))
    long d = 0;
    for (; d + HEAD_VECTORS * LANES <= dim; d += HEAD_VECTORS * LANES) ADD_DIMENSIONS(HEAD_VECTORS);
    for (; d + LANES <= dim; d += LANES) ADD_DIMENSIONS(1);
    if (d < dim) ADD_DIMENSIONS(0);
#undef ADD_DIMENSIONS
}

// The scores of all queries of a task, row by row, and a block of keys. Later keys are fetched.
INLINE void score_block(const long format, const bool in_pairs, const Step *step, const KeyBlock *block, long num_rows,
                        const Work *work) {
    long dim = step->head_dim, padded = query_stride(in_pairs, step), group = group_of(step);
    bool is_scaled = has_scales(format, in_pairs, step);
    for (long t = block->first / LANES * LANES; t < block->last; t += LANES) {
        const long *later = block->offsets + t + FETCH_KEYS;
        Ahead ahead = {block->keys, later, later + LANES, 0, num_rows / group};
        for (long row = 0; row < num_rows; row += heads_at_once(row, group)) {
            const KeyBlock of_head = block_of_head(format, block, row / group, dim);
            const float *queries = work->queries + row * padded;
            float *scores = work->scores + row * BLOCK_KEYS;
            switch (heads_at_once(row, group)) {
#define SCORE(n)                                                                                                 \
    case n:                                                                                                      \
        score_heads(format, in_pairs, is_scaled, n, queries, padded, &of_head, t, dim, work->keys, &ahead, scores); \
        break;
                HEAD_CASES(SCORE)
#undef SCORE
            }
        }
    }
}

// The running softmax of all queries of a task; see soften.
APART void soften_block(const Step *step, const QueryTile *tile, long head, const KeyBlock *block, long num_rows,
                        const Work *work, const Softmax *into) {
    long group = group_of(step), begin = block->first / LANES * LANES, end = round_up(block->last, LANES);
    for (long row = 0; row < num_rows; row += heads_at_once(row, group)) {
        float *scores = work->scores + row * BLOCK_KEYS, *largest = into->largest + row;
        float *weights = into->weights + row, *shrink = work->shrink + row;
        long num_heads = heads_at_once(row, group);
        shape_rows(step, tile, head + row / group, block, row % group, num_heads, begin, end, scores);
        for (long i = 0; i < num_heads; i++)
            hide_scores(scores + i * BLOCK_KEYS, begin, end, block->first, block->last);
        switch (num_heads) {
#define SOFTEN(n) case n: soften(false, n, scores, begin, end, largest, weights, shrink); break;
            HEAD_CASES(SOFTEN)
#undef SOFTEN
        }
    }
}

// The weighted values of a block for all queries of a task. Later values are fetched.
INLINE void add_block(const long format, const bool in_pairs, const Step *step, const KeyBlock *block, long num_rows,
                      const Work *work, const Softmax *into) {
    long dim = value_dim(step), stride = padded_values(step), group = group_of(step);
    memset(work->block_sums, 0, (size_t)(num_rows * stride) * sizeof(float));
    for (long t = in_pairs ? block->first / 2 * 2 : block->first, end; t < block->last; t = end) {
        end = least(t + LANES, block->last);
        Ahead ahead = {block->values, block->offsets + end, block->offsets + least(end + LANES, block->last), 0,
                       num_rows / group};
        for (long row = 0; row < num_rows; row += heads_at_once(row, group)) {
            const KeyBlock of_head = block_of_head(format, block, row / group, dim);
            const float *weights = work->scores + row * BLOCK_KEYS;
            float *sums = work->block_sums + row * stride;
            switch (heads_at_once(row, group)) {
#define ADD(n) case n: add_values(format, in_pairs, n, weights, &of_head, t, end, dim, &ahead, sums); break;
                HEAD_CASES(ADD)
#undef ADD
            }
        }
    }
    for (long row = 0; row < num_rows; row++)
        for (long d = row * stride; d < (row + 1) * stride; d += LANES) {
            vfloat sum = vf_fma(vf_load(into->sums + d), vf_all(work->shrink[row]), vf_load(work->block_sums + d));
            vf_store(into->sums + d, sum);
        }
}

// A block of keys for `num_rows` queries of one token, which sees all keys; the first queries are of KV head `head`.
INLINE void attend_direct(const long format, const bool in_pairs, const Step *step, const QueryTile *tile, long head,
                          long num_rows, const KeyBlock *block, const Work *work, const Softmax *into) {
    long group = group_of(step), num_heads = num_rows / group;
    score_block(format, in_pairs, step, block, num_rows, work);
    for (long t = block->first; t < least(block->first + LANES, block->last); t++)
        fetch_vector(element_at(format, block->values, block->offsets[t]),
                     num_heads * step->head_dim * element_bytes(format));
    soften_block(step, tile, head, block, num_rows, work, into);
    for (long i = 0; has_scales(format, in_pairs, step) && i < num_heads; i++)
        scale_scores(group, work->scores + i * group * BLOCK_KEYS, block->first / LANES * LANES,
                     round_up(block->last, LANES), block->value_scales + i * BLOCK_KEYS);
    if (in_pairs) pair_weights(num_rows, work->scores, block->first, block->last);
    add_block(format, in_pairs, step, block, num_rows, work, into);
}

#endif
