// What attention needs to know of a step: which tokens see which keys, and how the threads share the work.
#ifndef OCTAVO_STEP_H
#define OCTAVO_STEP_H

#include <stdint.h>

// Query tokens of one sequence that are worked on together, all of them against the same keys.
typedef struct {
    int32_t row;             // of the block table
    int32_t first_token;     // in the step
    int32_t num_tokens;
    int32_t first_position;  // of the first token in its sequence
    int32_t num_partials;    // parts of its keys, if they are worked on apart; 0: one thread does them all
    int32_t first_partial;   // where the results of the parts go, if they are worked on apart
} QueryTile;

typedef struct {
    int32_t tile, index;  // index: of the part among those of the tile, if they are worked on apart
} Task;

// A step, for the layers that attend in one way.
typedef struct {
    long num_heads, num_kv_heads, head_dim, block_size;
    long num_tokens, table_width;
    long window;                  // a token sees so many last positions, its own included, 1 or more
    float scale, soft_cap;        // of query . key; soft_cap 0: none
    const float *slopes;          // of ALiBi, [num_heads]; NULL: none
    const float *cos, *sin;       // [num_tokens][head_dim], the sines of the first half with a minus; NULL: none
    const int64_t *slot_mapping;  // [num_tokens] block * block_size + offset
    const int32_t *block_tables;  // [][table_width]
    const QueryTile *tiles;
    long num_tiles, most_tokens;  // of any tile
    const Task *tasks;            // for each KV head
    long num_tasks, num_partials;
} Step;

#endif
