// Tiles are query tokens of one sequence; a task is a tile, or one part of its keys, for one KV head, or for several
// side by side where their keys are read straight from the cache.
//
// The parts of a tile are tasks of their own only where it is a large part of the work: where there are too few tiles to
// keep the threads busy, or one sequence is much longer than the others. That changes no bit of the result: attention
// always sums part by part, and parts begin at fixed positions.
#include "plan.h"

#include <stdlib.h>

// Query vectors of a tile, tokens times heads of a group: enough to pay for packing the keys that they share, and no more
// than the cache of a core holds with their sums.
#define LEAST_TILE_QUERIES 96l
#define MOST_TILE_QUERIES 384l
// Tasks for each thread, enough to even out sequences of different length.
#define TASKS_PER_THREAD 4
// Floats of a key, of all KV heads that are read side by side: enough that memory is read in order, and few enough that
// the keys that are scored, the next ones and their values stay in the nearest cache.
#define DIRECT_FLOATS 256l

static double wanted_tasks(const Step *step, int num_threads) {
    return (double)num_threads * TASKS_PER_THREAD / (double)step->num_kv_heads;
}

// Tokens of a tile, so that the step falls into the wanted number of tiles.
static long tile_tokens(const StepRows *rows, const Step *step, double num_wanted) {
    long group = step->num_heads / step->num_kv_heads, num_tokens = 0;
    for (long row = 0; row < rows->num_rows; row++) num_tokens += rows->lengths[row];
    long queries = (long)((double)(num_tokens * group) / num_wanted);
    return most(1, most(LEAST_TILE_QUERIES, least(MOST_TILE_QUERIES, queries)) / group);
}

static long first_key(const Step *step, const QueryTile *tile) {
    return first_seen(step, tile->first_position);
}

static double work_of(const Step *step, const QueryTile *tile) {
    return (double)(tile->end_position - first_key(step, tile)) * tile->num_tokens;
}

static long parts_of(const Step *step, const QueryTile *tile) {
    return ceil_div(tile->end_position, octavo_part_keys()) - first_key(step, tile) / octavo_part_keys();
}

// KV heads of a direct task: several, if there are tasks enough.
static long direct_heads(const StepRows *rows, const Step *step, int num_threads) {
    long num_heads = least(step->num_kv_heads, most(1, DIRECT_FLOATS / most(1, step->head_dim))), num_parts = 0;
    for (long row = 0; row < rows->num_rows; row++) {
        const QueryTile tile = {
            .num_tokens = 1, .first_position = rows->starts[row], .end_position = rows->starts[row] + 1};
        if (rows->lengths[row] == 1) num_parts += parts_of(step, &tile);
    }
    return num_parts * step->num_kv_heads >= num_heads * num_threads * TASKS_PER_THREAD ? num_heads : 1;
}

// Cut the rows into equal tiles of at most so many tokens.
static void cut_tiles(const StepRows *rows, long most_tokens, Step *step, QueryTile *tiles) {
    long first_token = 0;
    for (long row = 0; row < rows->num_rows; row++) {
        long length = rows->lengths[row], size = ceil_div(length, ceil_div(length, most_tokens));
        for (long begin = 0; begin < length; begin += size) {
            long end = step->is_full ? length : least(begin + size, length);
            tiles[step->num_tiles++] = (QueryTile){
                .row = rows->tables[row],
                .first_token = (int32_t)(first_token + begin),
                .num_tokens = (int32_t)least(size, length - begin),
                .first_position = (int32_t)(rows->starts[row] + begin),
                .end_position = (int32_t)(rows->starts[row] + end),
            };
            step->most_tokens = most(step->most_tokens, least(size, length - begin));
        }
        first_token += length;
    }
}

// Make the tasks. A tile falls into parts where its tasks would be larger than one of `num_wanted` equal ones for each
// KV head.
static void share_parts(Step *step, QueryTile *tiles, double num_wanted, Task *tasks) {
    double total = 0;
    for (long i = 0; i < step->num_tiles; i++) total += work_of(step, tiles + i);
    for (long i = 0; i < step->num_tiles; i++) {
        QueryTile *tile = tiles + i;
        long num_parts = parts_of(step, tile);
        if (num_parts > 1 && work_of(step, tile) * num_wanted * (double)heads_of(step, tile, 0) > total) {
            tile->first_partial = (int32_t)step->num_partials;
            tile->num_partials = (int32_t)num_parts;
            step->num_partials += num_parts;
        }
        for (long part = 0; part < most(1, tile->num_partials); part++)
            for (long head = 0; head < step->num_kv_heads; head += heads_of(step, tile, head))
                tasks[step->num_tasks++] = (Task){(int32_t)i, (int32_t)part, (int32_t)head};
    }
}

// A task, and its share of the work.
typedef struct {
    Task task;
    double work;
} WeighedTask;

static int compare_tasks(const void *left, const void *right) {
    const WeighedTask *a = left, *b = right;
    if (a->work != b->work) return a->work < b->work ? 1 : -1;
    if (a->task.tile != b->task.tile) return a->task.tile - b->task.tile;
    return a->task.index != b->task.index ? a->task.index - b->task.index : a->task.head - b->task.head;
}

// Put the largest tasks first, so that the threads end together.
static void sort_tasks(const Step *step, const QueryTile *tiles, WeighedTask *weighed, Task *tasks) {
    for (long i = 0; i < step->num_tasks; i++) {
        const QueryTile *tile = tiles + tasks[i].tile;
        double num_heads = (double)heads_of(step, tile, tasks[i].head);
        weighed[i] = (WeighedTask){tasks[i], work_of(step, tile) * num_heads / (double)most(1, tile->num_partials)};
    }
    qsort(weighed, (size_t)step->num_tasks, sizeof *weighed, compare_tasks);
    for (long i = 0; i < step->num_tasks; i++) tasks[i] = weighed[i].task;
}

void plan_attention(const StepRows *rows, int num_threads, Step *step, Arena *arena) {
    double num_wanted = wanted_tasks(step, num_threads);
    long most_tokens = tile_tokens(rows, step, num_wanted), num_tiles = 0, longest = 0;
    step->direct_heads = direct_heads(rows, step, num_threads);
    for (long row = 0; row < rows->num_rows; row++) {
        num_tiles += ceil_div(rows->lengths[row], most_tokens);
        longest = most(longest, rows->starts[row] + rows->lengths[row]);
    }
    // Fewer than `num_wanted` tiles can be larger than one of `num_wanted` equal tasks.
    long most_parts = ((long)num_wanted + 1) * step->direct_heads * (longest / octavo_part_keys() + 2);
    long most_tasks = (num_tiles + most_parts) * step->num_kv_heads;
    QueryTile *tiles = take(arena, num_tiles * (long)sizeof *tiles);
    Task *tasks = take(arena, most_tasks * (long)sizeof *tasks);
    WeighedTask *weighed = take(arena, most_tasks * (long)sizeof *weighed);
    if (!arena->begin) return;
    step->tiles = tiles, step->tasks = tasks;
    step->num_tiles = step->most_tokens = step->num_tasks = step->num_partials = 0;
    cut_tiles(rows, most_tokens, step, tiles);
    share_parts(step, tiles, num_wanted, tasks);
    if (step->most_tokens > 1) sort_tasks(step, tiles, weighed, tasks);
}

// plan_attention for rows of `tables`; memory has as many bytes as this returns, aligned to 64 bytes; NULL: only measure.
long octavo_plan_attention(Step *step, long num_rows, const int32_t *tables, const int32_t *starts,
                           const int32_t *lengths, int num_threads, char *memory) {
    StepRows rows = {num_rows, tables, starts, lengths, NULL};
    Arena arena = {(uintptr_t)memory, (uintptr_t)memory};
    plan_attention(&rows, num_threads, step, &arena);
    return used_bytes(&arena);
}
