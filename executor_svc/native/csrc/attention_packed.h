// All queries of a tile against a block of keys, which is packed first.
#ifndef OCTAVO_ATTENTION_PACKED_H
#define OCTAVO_ATTENTION_PACKED_H

#include "attention_block.h"

// c[rows][columns of a panel] (=|+=) a @ panel, for up to TILE_ROWS rows.
INLINE void multiply_tile(long num_rows, long depth, const float *a, long a_stride, const float *panel, float *c,
                          long c_stride, long columns, bool add) {
#define TILE(n)                                                                                                    \
    case n:                                                                                                        \
        tile_product(n, TILE_VECTORS, depth, a, a_stride, panel, c, c_stride, columns, add);                        \
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
