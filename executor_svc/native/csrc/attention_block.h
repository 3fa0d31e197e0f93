// What both ways to attend to a block of keys share: attention_direct.h, straight from the cache, and
// attention_packed.h.
//
// Both give the same bits. A block begins at a multiple of BLOCK_KEYS. For each query, a score is the sum of CHAINS sums,
// each over every CHAINS-th dimension in order; the weights of a block are summed by lanes from the block's beginning, and
// its weighted values over the keys in order. What a query does not see counts as exactly 0.
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

#endif
