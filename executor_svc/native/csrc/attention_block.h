// What both ways to attend to a block of keys share: attention_direct.h, straight from the cache, and
// attention_packed.h.
//
// Both give the same bits. A block begins at a multiple of BLOCK_KEYS. For each query, a score is the sum of CHAINS sums,
// each over every CHAINS-th dimension in order; the weights of a block are summed by lanes from the block's beginning, and
// its weighted values over the keys in order. What a query does not see counts as exactly 0. Scores are logarithms to
// the base 2, which are scaled by log2(e) before they are made: 2 ** x takes fewer steps than exp(x).
//
// In bfloat16 a pair of dimensions, or of keys, is what is multiplied at once (bfloat16.h). It takes the place of a float
// in all memory, so that the same code moves both. A pair of keys begins at an even position; a key of it that no query
// of the tile sees has the value 0. Maxima, weights and their sums are float32, and weights are rounded after that.
#ifndef OCTAVO_ATTENTION_BLOCK_H
#define OCTAVO_ATTENTION_BLOCK_H

#include <math.h>
#include <string.h>

#include "cache_format.h"
#include "step.h"
#include "vec.h"

// Keys that are scored at once: a multiple of every PANEL_KEYS.
#define BLOCK_KEYS 96
// Sums that make up a score.
#define CHAINS 4
// Keys whose softmax is summed apart, a part; see attention.c.
#define PART_KEYS (4 * BLOCK_KEYS)
// Keys that are fetched ahead of direct scoring. While a block is packed and scored, the next is fetched.
#define FETCH_KEYS LANES

// A function of its own: for all registers, or so that the formats share it.
#define APART static __attribute__((noinline, noclone))

#define LOG2_E 1.44269504088896341f

// The softmax of some queries over some keys, not divided yet.
typedef struct {
    float *sums;     // [most rows][padded_values] values weighted by 2 ** (score - largest)
    float *largest;  // [most rows]
    float *weights;  // [most rows] sum of 2 ** (score - largest)
} Softmax;

// Memory of one thread.
typedef struct {
    float *queries;       // [most rows][query_stride] scaled; packed: [most rows][CHAINS][query_stride / CHAINS]
    float *scores;        // direct: [most rows][BLOCK_KEYS]; packed: [2][STRIP_ROWS][BLOCK_KEYS]
    float *shrink;        // direct: [most rows]
    float *block_sums;    // direct: [most rows][padded_values]
    float *keys;          // [BLOCK_KEYS / PANEL_KEYS][CHAINS][ceil(head_floats / CHAINS)][PANEL_KEYS]
    float *values;        // [ceil(value_dim / VALUE_COLUMNS)][BLOCK_KEYS][VALUE_COLUMNS], the last one narrower
    float *key_scales, *value_scales;  // of int8, [direct_heads][BLOCK_KEYS]
    uint16_t *rounded;                 // in bfloat16, keys and then values of another cache, [2][BLOCK_KEYS][direct_heads][head_dim]
    Softmax total, part;  // over the parts so far, over one part
} Work;

// Some keys of a block, of the first KV head of a task; the keys of the next head lie behind them. `offsets` are where
// they lie in the cache, from the beginning of the block, and behind them the offsets of the keys to fetch; a place
// without a key has the offset of a key.
typedef struct {
    const void *keys, *values;
    const float *key_scales, *value_scales;  // of int8, BLOCK_KEYS for each head
    long stride;       // from one key to the next in the cache, where LANES keys lie in one block of it; else 0
    long begin;        // position at which the block begins
    long first, last;  // keys from there: [first, last) of the block
    const long *offsets;  // [2 * BLOCK_KEYS]
} KeyBlock;

// Floats or pairs of a head's dimensions.
INLINE long head_floats(const bool in_pairs, long dim) { return in_pairs ? ceil_div(dim, 2) : dim; }

// Floats of a query, and of its sums, in whole vectors.
INLINE long padded_queries(const Step *step) { return round_up(step->head_dim, CHAINS * LANES); }
INLINE long query_stride(const bool in_pairs, const Step *step) {
    return round_up(head_floats(in_pairs, step->head_dim), CHAINS * LANES);
}
INLINE long padded_values(const Step *step) { return round_up(value_dim(step), LANES); }

// The factor of a query that makes its scores logarithms to the base 2. Under a cap they become so after it.
INLINE float query_scale(const Step *step) { return step->soft_cap == 0 ? step->scale * LOG2_E : step->scale; }

// Cap the scores of one query and shift them by ALiBi, in whole vectors; `distance` is the position of the block minus
// the position of the query.
static void shape_scores(float *scores, long begin, long end, float soft_cap, float slope, long distance) {
    const float counting_up[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vfloat lanes = vf_load(counting_up), cap = vf_all(soft_cap), largest = vf_all(soft_cap * LOG2_E);
    for (long t = begin; t < end; t += LANES) {
        vfloat score = vf_load(scores + t);
        if (soft_cap != 0) score = vf_mul(largest, vf_tanh(vf_div(score, cap)));
        score = vf_fma(vf_all(slope * LOG2_E), vf_add(lanes, vf_all((float)(distance + t))), score);
        vf_store(scores + t, score);
    }
}

// Add the biases of a head to the scores of one query, in whole vectors; `distance` is the position of the query minus the
// position of the block.
static void add_distance_biases(const Step *step, float *scores, long begin, long end, long head, long distance) {
    const long first = step->is_full ? -(step->num_distances / 2) : 0, last = first + step->num_distances - 1;
    const float *biases = step->distance_biases + head * step->num_distances - first;  // [distance]
    for (long t = begin; t < end; t += LANES) {
        float of_keys[LANES];
        vfloat bias = vf_all(biases[last]);
        if (distance - t - (LANES - 1) < last) {
            for (long i = 0; i < LANES; i++) of_keys[i] = biases[most(first, least(distance - t - i, last))];
            bias = vf_load(of_keys);
        }
        vf_store(scores + t, vf_fma(vf_all(LOG2_E), bias, vf_load(scores + t)));
    }
}

// As shape_scores and add_distance_biases, for rows [first_row, first_row + num_rows) of a tile and one KV head, where the layer asks for it.
INLINE void shape_rows(const Step *step, const QueryTile *tile, long head, const KeyBlock *block, long first_row,
                       long num_rows, long begin, long end, float *scores) {
    bool is_shaped = step->soft_cap != 0 || step->slopes;
    if (!is_shaped && !step->distance_biases) return;
    long group = group_of(step);
    for (long i = 0; i < num_rows; i++) {
        long row = first_row + i;
        long query_head = head * group + row % group, distance = tile->first_position + row / group - block->begin;
        float slope = step->slopes ? step->slopes[query_head] : 0;
        if (is_shaped) shape_scores(scores + i * BLOCK_KEYS, begin, end, step->soft_cap, slope, -distance);
        if (step->distance_biases)
            add_distance_biases(step, scores + i * BLOCK_KEYS, begin, end, query_head, distance);
    }
}

#define FETCH_LINE(d) _mm_prefetch((const char *)vector + (d), _MM_HINT_T0)

// Fetch a vector that is read soon: blocks are scattered, which the hardware does not foresee.
INLINE void fetch_vector(const void *vector, long num_bytes) {
    if (num_bytes == 256) {  // of most models; a loop takes as long as its lines
        FETCH_LINE(0), FETCH_LINE(64), FETCH_LINE(128), FETCH_LINE(192);
        return;
    }
    for (long d = 0; d < num_bytes; d += 64) FETCH_LINE(d);
}

// A block, as a KV head of the task has it; `index` counts them.
INLINE KeyBlock block_of_head(const long format, const KeyBlock *block, long index, long dim) {
    KeyBlock of_head = *block;
    of_head.keys = element_at(format, block->keys, index * dim);
    of_head.values = element_at(format, block->values, index * dim);
    of_head.key_scales += index * BLOCK_KEYS, of_head.value_scales += index * BLOCK_KEYS;
    return of_head;
}

// LANES keys from one of a block on, in the cache, where they are block->stride apart.
INLINE const void *keys_in_place(const long format, const KeyBlock *block, long t) {
    // The keys before the first one in its block of the cache may be anything, as may their scores.
    long before = most(0, block->first - t) * block->stride;
    return element_at(format, block->keys, block->offsets[most(t, block->first)] - before);
}

// LANES keys from one of a block on as floats or pairs, `*stride` apart: in the cache, or copied to `room`.
INLINE const float *find_keys(const long format, const bool in_pairs, const KeyBlock *block, long t, long dim,
                              float *room, long *stride) {
    *stride = in_pairs ? block->stride / 2 : block->stride;
    bool as_they_lie = in_pairs ? dim % 2 == 0 : format == CACHE_FLOAT32;
    if (as_they_lie && *stride) return keys_in_place(format, block, t);
    *stride = head_floats(in_pairs, dim);
    for (long i = 0; i < LANES; i++) {
        const void *key = element_at(format, block->keys, block->offsets[t + i]);
        if (in_pairs) {
            room[(i + 1) * *stride - 1] = 0;  // an odd number of dimensions leaves half a pair
            memcpy(room + i * *stride, key, (size_t)dim * sizeof(uint16_t));
            continue;
        }
        if (format == CACHE_FLOAT32) {
            memcpy(room + i * dim, key, (size_t)dim * sizeof(float));
            continue;
        }
        for (long d = 0; d < dim; d += LANES)
            vf_store_part(room + i * dim + d, load_elements_part(format, element_at(format, key, d), dim - d), dim - d);
    }
    return room;
}

// sum + a * b, of floats or of pairs.
INLINE vfloat add_product(const bool in_pairs, vfloat a, vfloat b, vfloat sum) {
    return in_pairs ? vf_add_pairs(sum, a, b) : vf_fma(a, b, sum);
}

// The mode in which products are summed, and a sum on its way into it and out of it; see bfloat16.h.
INLINE unsigned begin_sums(const bool in_pairs) { return in_pairs ? begin_products() : 0; }
INLINE void end_sums(const bool in_pairs, unsigned mode) {
    if (in_pairs) end_products(mode);
}
INLINE vfloat carried(const bool in_pairs, vfloat sum) { return in_pairs ? vf_between_products(sum) : sum; }

// The weights of `rows` queries as pairs of keys, in place, from one vector of a block to another.
INLINE void pair_weights(long rows, float *weights, long begin, long end) {
    for (long i = 0; i < rows; i++)
        for (long t = begin / (2 * LANES) * (2 * LANES); t < end; t += 2 * LANES) {
            float *row = weights + i * BLOCK_KEYS;
            vf_store(row + t / 2, vf_pair_neighbours(vf_load(row + t), vf_load(row + t + LANES)));
        }
}

// LANES dimensions of the values of a pair of keys, `count` of them there are; t is even.
INLINE vfloat load_value_pair(const KeyBlock *block, long t, long d, long count) {
    vfloat pair[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        bool is_seen = block->first <= t + i && t + i < block->last;
        const void *value = element_at(CACHE_BFLOAT16, block->values, block->offsets[t + i] + d);
        pair[i] = is_seen ? load_elements_part(CACHE_BFLOAT16, value, count) : vf_zero();
    }
    return vf_pair_lanes(pair[0], pair[1]);
}

// Whether scores and weights have scales of their keys. In pairs, elements are bfloat16, whatever the cache has.
INLINE bool has_scales(long format, const bool in_pairs, const Step *step) {
    return (in_pairs ? step->cache_format : format) == CACHE_INT8;
}

// Multiply vectors of the scores of `rows` queries, or of their weights, by the scales of their keys.
INLINE void scale_scores(long rows, float *scores, long begin, long end, const float *scales) {
    for (long i = 0; i < rows; i++)
        for (long t = i * BLOCK_KEYS + begin; t < i * BLOCK_KEYS + end; t += LANES)
            vf_store(scores + t, vf_mul(vf_load(scores + t), vf_load(scales + t - i * BLOCK_KEYS)));
}

// In the vectors [begin, end) of one query's scores, those outside of the keys [lower, upper) that it sees become -inf.
INLINE void hide_scores(float *scores, long begin, long end, long lower, long upper) {
    if (lower <= begin && end <= upper) return;
    for (long t = begin; t < end; t += LANES)
        vf_store(scores + t, vf_fill_outside(vf_load(scores + t), lower - t, upper - t, -INFINITY));
}

// Take the vectors [begin, end) of the scores of some queries into their running softmax: scores become 2 ** (score -
// largest), or pairs as pair_weights makes them, and `shrink` the factor of the sums of older keys.
// `rows` and `is_paired` are constants at each call.
// Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
INLINE void soften(const bool is_paired, const int rows, float *scores, long begin, long end, float *largest,
                   float *weights, float *shrink) {
    vfloat peaks[MAX_DIRECT_HEADS], totals[MAX_DIRECT_HEADS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) peaks[i] = vf_all(largest[i]), totals[i] = vf_zero();
    for (long t = begin; t < end; t += LANES)
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) peaks[i] = vf_max(peaks[i], vf_load(scores + i * BLOCK_KEYS + t));
    const vfloat now = vf_reduce_rows(false, rows, peaks);
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) peaks[i] = vf_all_of(now, i);
    const long size = is_paired ? 2 * LANES : LANES;
    for (long t = begin / size * size; t < end; t += size)
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            float *row = scores + i * BLOCK_KEYS;
            vfloat weight[2] = {vf_zero(), vf_zero()};
#pragma GCC unroll 2
            for (int half = 0; half < (is_paired ? 2 : 1); half++) {
                if (is_paired && half ? t + LANES >= end : t < begin) continue;
                weight[half] = vf_weight(vf_sub(vf_load(row + t + half * LANES), peaks[i]));
                totals[i] = vf_add(totals[i], weight[half]);
            }
            if (is_paired)
                vf_store(row + t / 2, vf_pair_neighbours(weight[0], weight[1]));
            else
                vf_store(row + t, weight[0]);
        }
    vfloat factors = vf_weight(vf_sub(vf_load_part(largest, rows), now));
    vf_store_part(shrink, factors, rows);
    vf_store_part(largest, now, rows);
    vfloat sums = vf_reduce_rows(true, rows, totals);
    vf_store_part(weights, vf_add(vf_mul(vf_load_part(weights, rows), factors), sums), rows);
}

// What makes the sums of a query its result: value_scale / weights. Here its head's sink enters the softmax, as one more
// score, whose value is 0; NULL: there is none.
INLINE vfloat result_factor(const Softmax *softmax, long row, float value_scale, const float *sink) {
    vfloat factor = vf_all(value_scale), weights = vf_all(softmax->weights[row]);
    if (sink && softmax->weights[row] > 0) {  // 0: no score is a number, and so the result is none
        vfloat score = vf_all(*sink * LOG2_E), largest = vf_all(softmax->largest[row]);
        vfloat now = vf_max(score, largest), shrink = vf_weight(vf_sub(largest, now));
        weights = vf_fma(weights, shrink, vf_weight(vf_sub(score, now)));
        factor = vf_mul(factor, shrink);
    }
    return vf_div(factor, weights);
}

#endif
