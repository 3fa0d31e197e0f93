// Tiles are query tokens of one sequence; a task is a tile, or one part of its keys, for each KV head.
//
// The parts of a tile are tasks of their own only where it is a large part of the work: where there are too few tiles to
// keep the threads busy, or one sequence is much longer than the others. That changes no bit of the result: attention
// always sums part by part, and parts begin at fixed positions.
#include "plan.h"

// Query vectors of a tile, tokens times heads of a group: enough to pay for packing the keys that they share.
#define TILE_QUERIES 128
// Tasks for each thread that even out sequences of different length.
#define TASKS_PER_THREAD 4

static long tile_tokens(const Step *step) { return most(1, TILE_QUERIES / (step->num_heads / step->num_kv_heads)); }

static long first_key(const Step *step, const QueryTile *tile) {
    return most(0, tile->first_position + 1 - step->window);
}

static long end_key(const QueryTile *tile) { return tile->first_position + tile->num_tokens; }

static double work_of(const Step *step, const QueryTile *tile) {
    return (double)(end_key(tile) - first_key(step, tile)) * tile->num_tokens;
}

static long parts_of(const Step *step, const QueryTile *tile) {
    return ceil_div(end_key(tile), octavo_part_keys()) - first_key(step, tile) / octavo_part_keys();
}

// Cut the rows into equal tiles.
static void cut_tiles(const StepRows *rows, Step *step, QueryTile *tiles) {
    long first_token = 0;
    for (long row = 0; row < rows->num_rows; row++) {
        long length = rows->lengths[row], size = ceil_div(length, ceil_div(length, tile_tokens(step)));
        for (long begin = 0; begin < length; begin += size) {
            tiles[step->num_tiles++] = (QueryTile){
                .row = rows->tables[row],
                .first_token = (int32_t)(first_token + begin),
                .num_tokens = (int32_t)least(size, length - begin),
                .first_position = (int32_t)(rows->starts[row] + begin),
            };
            step->most_tokens = most(step->most_tokens, least(size, length - begin));
        }
        first_token += length;
    }
}

// Share the parts of the tiles that are more than one of `num_wanted` equal tasks.
static void share_parts(Step *step, QueryTile *tiles, double num_wanted, Task *tasks) {
    double total = 0;
    for (long i = 0; i < step->num_tiles; i++) total += work_of(step, tiles + i);
    for (long i = 0; i < step->num_tiles; i++) {
        QueryTile *tile = tiles + i;
        long num_parts = parts_of(step, tile);
        if (num_parts > 1 && work_of(step, tile) * num_wanted > total) {
            tile->first_partial = (int32_t)step->num_partials;
            tile->num_partials = (int32_t)num_parts;
            step->num_partials += num_parts;
        }
        for (long part = 0; part < most(1, tile->num_partials); part++)
            tasks[step->num_tasks++] = (Task){(int32_t)i, (int32_t)part};
    }
}

void plan_attention(const StepRows *rows, int num_threads, Step *step, Arena *arena) {
    double num_wanted = (double)num_threads * TASKS_PER_THREAD / (double)step->num_kv_heads;
    long num_tiles = 0, longest = 0;
    for (long row = 0; row < rows->num_rows; row++) {
        num_tiles += ceil_div(rows->lengths[row], tile_tokens(step));
        longest = most(longest, rows->starts[row] + rows->lengths[row]);
    }
    // Fewer than `num_wanted` tiles can each be more than one of as many equal tasks.
    long most_parts = ((long)num_wanted + 1) * (longest / octavo_part_keys() + 2);
    QueryTile *tiles = take(arena, num_tiles * (long)sizeof *tiles);
    Task *tasks = take(arena, (num_tiles + most_parts) * (long)sizeof *tasks);
    if (!arena->begin) return;
    step->tiles = tiles, step->tasks = tasks;
    step->num_tiles = step->most_tokens = step->num_tasks = step->num_partials = 0;
    cut_tiles(rows, step, tiles);
    share_parts(step, tiles, num_wanted, tasks);
}
