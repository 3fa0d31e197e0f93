// What attention needs to know of a step: which tokens see which keys, and how the threads share the work.
#ifndef OCTAVO_STEP_H
#define OCTAVO_STEP_H

#include <stdbool.h>
#include <stdint.h>

#include "vec.h"

// Query heads of one token that are scored directly on the cache; for more, packing the keys pays.
#define MAX_DIRECT_HEADS 8

// Query tokens of one sequence that are worked on together, against the same keys.
typedef struct {
    int32_t row;             // of the block table
    int32_t first_token;     // in the step
    int32_t num_tokens;
    int32_t first_position;  // of the first token in its sequence
    int32_t num_partials;    // parts of its keys, if they are worked on apart; 0: one thread does them all
    int32_t first_partial;   // where the results of the parts go, if they are worked on apart
    int32_t end_position;    // behind the last key that its last token sees
} QueryTile;

// A tile, or one part of its keys, for KV head `head` and the next ones that are worked on together; heads_of.
typedef struct {
    int32_t tile, index;  // index: of the part in the tile, if parts are worked on apart
    int32_t head;
} Task;

// Where a layer has its keys and values; a latent cache has keys alone. Scales are factors of FP8 elements; else 1.
typedef struct {
    void *keys, *values;
    float key_scale, value_scale;
} LayerCache;

// A step, for the layers that attend in one way.
typedef struct {
    long num_heads, num_kv_heads, head_dim, block_size;
    long value_begin;   // values are the numbers of a key from there on (a latent cache); 0: they lie apart
    long rotary_dim;    // the first dimensions of a head, which turn; 0: none
    long qkv_stride;    // from one token of qkv to the next, in floats
    long block_stride;  // from one block of the cache to the next, in elements
    long cache_format;  // of keys and values; see cache_format.h
    long num_tokens, table_width;
    long window;                  // a token sees so many last positions, its own included, 1 or more
    long first;                   // a token sees no position before this one, but for its own
    float scale, soft_cap;        // of query . key; soft_cap 0: none
    const float *slopes;          // of ALiBi, [num_heads]; NULL: none
    // Added to scores, by query position - key position, [num_heads][num_distances]; NULL: none. The first is of distance
    // 0, where is_full of -(num_distances / 2); distances beyond the first and the last count as these.
    const float *distance_biases;
    long num_distances;
    const float *cos, *sin;       // [num_tokens][rotary_dim], the sines of the first half with a minus
    const int64_t *slot_mapping;  // [num_tokens] block * block_size + offset
    const int32_t *block_tables;  // [][table_width]
    const QueryTile *tiles;
    long num_tiles, most_tokens;  // of any tile
    const Task *tasks;
    long num_tasks, num_partials;
    long direct_heads;            // KV heads of a task whose tile is scored directly on the cache
    long in_bfloat16;             // whether queries, keys, weights and values are multiplied in bfloat16
    long reads_only;              // whether the tokens have queries alone: their keys and values are in the cache already
    long is_full;                 // whether a token sees all tokens of its row, later ones too; not with a window
} Step;

// Numbers of a value.
INLINE long value_dim(const Step *step) { return step->head_dim - step->value_begin; }

// Query heads that share a KV head.
INLINE long group_of(const Step *step) { return step->num_heads / step->num_kv_heads; }

// Whether a tile is scored directly on the cache.
INLINE bool is_direct(const Step *step, const QueryTile *tile) {
    return tile->num_tokens == 1 && group_of(step) <= MAX_DIRECT_HEADS;
}

// Behind the last position that a token of a tile sees.
INLINE long sight_end(const Step *step, const QueryTile *tile, long token) {
    return step->is_full ? tile->end_position : tile->first_position + token + 1;
}

// The first position that a token at a position sees.
INLINE long first_seen(const Step *step, long position) {
    return most(least(step->first, position), position + 1 - step->window);
}

// KV heads of a task, and the queries of one token in it.
INLINE long heads_of(const Step *step, const QueryTile *tile, long head) {
    return is_direct(step, tile) ? least(step->direct_heads, step->num_kv_heads - head) : 1;
}
INLINE long width_of(const Step *step, const QueryTile *tile, long head) {
    return heads_of(step, tile, head) * group_of(step);
}

#endif
