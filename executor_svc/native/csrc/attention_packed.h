// All queries of a tile against a block of keys, which is packed first.
//
// The rows of a tile, tokens times the heads of a group, fall into strips. A strip goes through a block at once: its
// scores, their softmax and the weighted values stay in the nearest cache, and all sums in registers.
#ifndef OCTAVO_ATTENTION_PACKED_H
#define OCTAVO_ATTENTION_PACKED_H

#include "attention_block.h"

// Their sums fit into the registers beside the vectors of a panel.
#define STRIP_ROWS 6
#define VALUE_VECTORS (LANES / 4)
#define KEY_VECTORS 2
#define PANEL_KEYS (KEY_VECTORS * LANES)
#define VALUE_COLUMNS (VALUE_VECTORS * LANES)

// The keys of a block that the rows of a strip see: row i sees [lower[i], upper[i]), all rows are within [first, last).
typedef struct {
    long first, last;
    long lower[STRIP_ROWS], upper[STRIP_ROWS];
} Sight;

INLINE Sight look(const Step *step, const QueryTile *tile, const KeyBlock *block, long first_row) {
    Sight sight = {.first = block->last, .last = block->first};
    long group = group_of(step), token = first_row / group, head = first_row % group;
    long first_end = sight_end(step, tile, token), last_end = sight_end(step, tile, (first_row + STRIP_ROWS - 1) / group);
    if (block->begin + block->last <= first_end && first_seen(step, last_end - 1) <= block->begin + block->first) {  // all see all
        for (long i = 0; i < STRIP_ROWS; i++) sight.lower[i] = block->first, sight.upper[i] = block->last;
        sight.first = block->first, sight.last = block->last;
        return sight;
    }
    for (long i = 0; i < STRIP_ROWS; i++) {
        long end = sight_end(step, tile, token), lower = first_seen(step, end - 1) - block->begin;
        sight.upper[i] = most(block->first, least(end - block->begin, block->last));
        sight.lower[i] = least(most(block->first, lower), sight.upper[i]);
        if (++head == group) head = 0, token++;
        if (sight.lower[i] == sight.upper[i]) continue;
        sight.first = least(sight.first, sight.lower[i]);
        sight.last = most(sight.last, sight.upper[i]);
    }
    return sight;
}

// scores[STRIP_ROWS][PANEL_KEYS] of a strip and a panel of keys.
INLINE void score_panel(const bool in_pairs, long depth, const float *queries, long chain_stride, const float *panel,
                        float *scores) {
    vfloat total[STRIP_ROWS][KEY_VECTORS];
#pragma GCC unroll 4
    for (int chain = 0; chain < CHAINS; chain++) {
        vfloat sum[STRIP_ROWS][KEY_VECTORS];
        unsigned mode = begin_sums(in_pairs);
#pragma GCC unroll 8
        for (int i = 0; i < STRIP_ROWS; i++)
#pragma GCC unroll 4
            for (int v = 0; v < KEY_VECTORS; v++) sum[i][v] = carried(in_pairs, vf_zero());
        const float *query = queries + chain * chain_stride;
        for (long k = 0; k < depth; k++, panel += PANEL_KEYS) {
            vfloat keys[KEY_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < KEY_VECTORS; v++) keys[v] = vf_load(panel + v * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < STRIP_ROWS; i++) {
                vfloat element = vf_all(query[i * CHAINS * chain_stride + k]);
#pragma GCC unroll 4
                for (int v = 0; v < KEY_VECTORS; v++) sum[i][v] = add_product(in_pairs, element, keys[v], sum[i][v]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < STRIP_ROWS; i++)
#pragma GCC unroll 4
            for (int v = 0; v < KEY_VECTORS; v++) sum[i][v] = carried(in_pairs, sum[i][v]);
        end_sums(in_pairs, mode);
#pragma GCC unroll 8
        for (int i = 0; i < STRIP_ROWS; i++)
#pragma GCC unroll 4
            for (int v = 0; v < KEY_VECTORS; v++) total[i][v] = chain ? vf_add(total[i][v], sum[i][v]) : sum[i][v];
    }
#pragma GCC unroll 8
    for (int i = 0; i < STRIP_ROWS; i++)
#pragma GCC unroll 4
        for (int v = 0; v < KEY_VECTORS; v++) vf_store(scores + i * BLOCK_KEYS + v * LANES, total[i][v]);
}

// sums[STRIP_ROWS] = sums * shrink + weights[STRIP_ROWS][count] @ values, for some columns. `vectors` is a constant.
INLINE void add_columns(const bool in_pairs, const int vectors, long count, const float *weights, const float *values,
                        const float *shrink, float *sums, long stride) {
    vfloat sum[STRIP_ROWS][VALUE_VECTORS];
    unsigned mode = begin_sums(in_pairs);
#pragma GCC unroll 8
    for (int i = 0; i < STRIP_ROWS; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[i][v] = carried(in_pairs, vf_zero());
    for (long t = 0; t < count; t++, values += vectors * LANES) {
        vfloat value[VALUE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) value[v] = vf_load(values + v * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < STRIP_ROWS; i++) {
            vfloat weight = vf_all(weights[i * BLOCK_KEYS + t]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[i][v] = add_product(in_pairs, weight, value[v], sum[i][v]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < STRIP_ROWS; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[i][v] = carried(in_pairs, sum[i][v]);
    end_sums(in_pairs, mode);
#pragma GCC unroll 8
    for (int i = 0; i < STRIP_ROWS; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *p = sums + i * stride + v * LANES;
            vf_store(p, vf_fma(vf_load(p), vf_all(shrink[i]), sum[i][v]));
        }
}

// As add_columns, for all columns and the keys [first, last) of a block.
INLINE void add_strip(const bool in_pairs, long dim, long first, long last, const float *weights, const float *values,
                      const float *shrink, float *sums) {
    long stride = round_up(dim, LANES);
    if (in_pairs) first = first / 2, last = ceil_div(last, 2);
    for (long d = 0; d < stride; d += VALUE_COLUMNS, values += BLOCK_KEYS * VALUE_COLUMNS) {
#define COLUMNS(n) \
    add_columns(in_pairs, n, last - first, weights + first, values + first * (n) * LANES, shrink, sums + d, stride)
        switch (least(VALUE_VECTORS, (stride - d) / LANES)) {
#if VALUE_VECTORS == 4
            case 4: COLUMNS(4); break;
            case 3: COLUMNS(3); break;
#endif
            case 2: COLUMNS(2); break;
            case 1: COLUMNS(1); break;
        }
#undef COLUMNS
    }
}

#define PANEL_WAYS(name, in_pairs)                                                                                   \
    APART void score_panel_##name(long depth, const float *queries, long chain_stride, const float *panel,           \
                                  float *scores) {                                                                   \
        score_panel(in_pairs, depth, queries, chain_stride, panel, scores);                                          \
    }                                                                                                                \
    APART void add_strip_##name(long dim, long first, long last, const float *weights, const float *values,          \
                                const float *shrink, float *sums) {                                                  \
        add_strip(in_pairs, dim, first, last, weights, values, shrink, sums);                                        \
    }
PANEL_WAYS(float32, false)
PANEL_WAYS(bfloat16, true)

// Pack the keys of a block: LANES of them side by side, and their dimensions, or pairs of them, chain by chain.
INLINE void pack_keys(const long format, const bool in_pairs, const KeyBlock *block, long dim, const Work *work) {
    long num_floats = head_floats(in_pairs, dim), depth = ceil_div(num_floats, CHAINS);
    for (long t = block->first / LANES * LANES; t < block->last; t += LANES) {
        float *panel = work->keys + t / PANEL_KEYS * PANEL_KEYS * CHAINS * depth + t % PANEL_KEYS;
        long stride;
        const float *keys = find_keys(format, in_pairs, block, t, dim, work->values, &stride);
        for (long d = 0; d < num_floats; d += CHAINS) {
            vfloat quads[4], chains[4];
            for (int v = 0; v < 4; v++)
                quads[v] = vf_load_quads(keys + d + v * (LANES / 4) * stride, stride, num_floats - d);
            vf_transpose_quads(quads, chains);
            for (long chain = 0; chain < CHAINS; chain++)
                vf_store(panel + (chain * depth + d / CHAINS) * PANEL_KEYS, chains[chain]);
        }
    }
}

// Pack the values of a block: some columns of all keys, or pairs, then the next; zeros behind the last dimension.
INLINE void pack_values(const long format, const bool in_pairs, const KeyBlock *block, long dim, const Work *work) {
    long stride = round_up(dim, LANES);
    for (long d = 0; d < stride; d += VALUE_COLUMNS) {
        long width = least(VALUE_COLUMNS, stride - d);
        float *panel = work->values + d * BLOCK_KEYS;
        for (long t = block->first / 2 * 2; in_pairs && t < block->last; t += 2)
            for (long i = 0; i < width; i += LANES)
                vf_store(panel + t / 2 * width + i, load_value_pair(block, t, d + i, least(LANES, dim - d - i)));
        if (in_pairs) continue;
        for (long t = block->first; t < block->last; t++) {
            const void *value = element_at(format, block->values, block->offsets[t] + d);
            for (long i = 0; i < width; i += LANES)
                vf_store(panel + t * width + i,
                         load_elements_part(format, element_at(format, value, i), least(LANES, dim - d - i)));
        }
    }
}

// One row of queries, which is [padded], by chains; see Work.
INLINE void split_query(const float *query, long padded, float *chains) {
    for (long d = 0; d < padded; d += CHAINS * LANES) {
        vfloat quads[4], split[4];
        for (int v = 0; v < 4; v++) quads[v] = vf_load(query + d + v * LANES);
        vf_transpose_quads(quads, split);
        for (int chain = 0; chain < CHAINS; chain++) vf_store(chains + (chain * padded + d) / CHAINS, split[chain]);
    }
}

// A strip on its way through a block.
typedef struct {
    Sight sight;
    long begin, end;  // vectors of its scores
    float *scores;    // [STRIP_ROWS][BLOCK_KEYS]
} Strip;

// The scores of the strip from `row` on.
INLINE void score_strip(long format, const bool in_pairs, const Step *step, const QueryTile *tile, long head,
                        const KeyBlock *block, long row, const Work *work, float *scores, Strip *strip) {
    long depth = ceil_div(head_floats(in_pairs, step->head_dim), CHAINS), padded = query_stride(in_pairs, step);
    strip->sight = look(step, tile, block, row);
    strip->scores = scores;
    if (strip->sight.first >= strip->sight.last) return;
    long begin = strip->begin = strip->sight.first / LANES * LANES, end = strip->end = round_up(strip->sight.last, LANES);
    for (long t = begin / PANEL_KEYS * PANEL_KEYS; t < end; t += PANEL_KEYS)
        (in_pairs ? score_panel_bfloat16 : score_panel_float32)(depth, work->queries + row * padded, padded / CHAINS,
                                                                work->keys + t * CHAINS * depth, scores + t);
    if (has_scales(format, in_pairs, step)) scale_scores(STRIP_ROWS, scores, begin, end, block->key_scales);
    shape_rows(step, tile, head, block, row, STRIP_ROWS, begin, end, scores);
    for (long i = 0; i < STRIP_ROWS; i++)
        hide_scores(scores + i * BLOCK_KEYS, begin, end, strip->sight.lower[i], strip->sight.upper[i]);
}

// A block of keys that is packed, for all queries of a tile.
INLINE void attend_packed(long format, const bool in_pairs, const Step *step, const QueryTile *tile, long head,
                          const KeyBlock *block, const Work *work, const Softmax *into) {
    long dim = step->head_dim, num_rows = tile->num_tokens * group_of(step), fetched = block->last;
    long bytes = dim * element_bytes(format);
    bool is_scaled = has_scales(format, in_pairs, step);
    Strip strips[2];
    score_strip(format, in_pairs, step, tile, head, block, 0, work, work->scores, strips);
    for (long row = 0, turn = 0; row < num_rows; row += STRIP_ROWS, turn ^= 1) {
        for (; fetched < block->last + BLOCK_KEYS && (fetched - block->last) * num_rows <= row * BLOCK_KEYS; fetched++) {
            fetch_vector(element_at(format, block->keys, block->offsets[fetched]), bytes);
            fetch_vector(element_at(format, block->values, block->offsets[fetched]), bytes);
        }
        const Strip *strip = strips + turn;
        float shrink[LANES];
        bool is_seen = strip->sight.first < strip->sight.last;
#define SOFTEN(is_paired)                                                                                           \
    soften(is_paired, STRIP_ROWS, strip->scores, strip->begin, strip->end, into->largest + row, into->weights + row, \
           shrink)
        if (is_seen && in_pairs && !is_scaled)
            SOFTEN(true);
        else if (is_seen)
            SOFTEN(false);
#undef SOFTEN
        // The next scores need nothing of this softmax: the processor works on both.
        if (row + STRIP_ROWS < num_rows)
            score_strip(format, in_pairs, step, tile, head, block, row + STRIP_ROWS, work,
                        work->scores + (turn ^ 1) * STRIP_ROWS * BLOCK_KEYS, strips + (turn ^ 1));
        if (is_seen && is_scaled) {
            scale_scores(STRIP_ROWS, strip->scores, strip->begin, strip->end, block->value_scales);
            if (in_pairs) pair_weights(STRIP_ROWS, strip->scores, strip->begin, strip->end);
        }
        if (is_seen)
            (in_pairs ? add_strip_bfloat16 : add_strip_float32)(value_dim(step), strip->sight.first, strip->sight.last, strip->scores,
                                                                work->values, shrink,
                                                                into->sums + row * padded_values(step));
    }
}

#endif
