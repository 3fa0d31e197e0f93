// Paged attention of one layer that reads the cache in place; see octavo_attention.
#include <math.h>
#include <string.h>

#include "attention_block.h"
#include "layers.h"

static long most_rows(const Step *step) { return step->most_tokens * (step->num_heads / step->num_kv_heads); }

// Lay out the memory of one thread at `address` (0: only measure); return its size in floats, whole cache lines.
static long lay_out(const Step *step, uintptr_t address, Work *work) {
    long rows = most_rows(step), dim = step->head_dim, used = 0;
    const long sizes[] = {rows * dim, rows * BLOCK_KEYS, rows * dim, rows, rows, BLOCK_KEYS * dim,
                          BLOCK_KEYS * round_up(dim, TILE_COLUMNS)};
    float **const parts[] = {&work->queries, &work->scores,  &work->sums,  &work->largest,
                             &work->weights, &work->keys, &work->values};
    for (int i = 0; i < 7; i++) {
        *parts[i] = (float *)(address + (uintptr_t)used * sizeof(float));
        used += round_up(sizes[i], 16);
    }
    return used;
}

// Floats of one partial result: sums, largest and weights of all rows.
static long partial_size(const Step *step) { return most_rows(step) * (step->head_dim + 2); }

long octavo_attention_scratch_bytes(const Step *step, int num_threads) {
    Work work;
    long partials = step->num_partials * step->num_kv_heads * partial_size(step);
    return (lay_out(step, 0, &work) * num_threads + partials) * (long)sizeof(float);
}

// Turn one head of a token by the angles of its position: out = scale * (x * cos + swapped halves of x * sin).
static void rotate(const Step *step, long token, const float *x, float scale, float *out) {
    long dim = step->head_dim, half = dim / 2;
    if (!step->cos) {
        for (long i = 0; i < dim; i++) out[i] = scale * x[i];
        return;
    }
    const float *cos = step->cos + token * dim, *sin = step->sin + token * dim;
    for (long i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        out[i] = scale * (low * cos[i] + high * sin[i]);
        out[i + half] = scale * (high * cos[i + half] + low * sin[i + half]);
    }
}

// Rotate the keys of this thread's tokens and write them and the values into the cache.
static void write_cache(const Step *step, const float *qkv, float *keys, float *values, const Member *member) {
    long dim = step->head_dim, kv_size = step->num_kv_heads * dim, q_size = step->num_heads * dim, begin, end;
    share(member, step->num_tokens, &begin, &end);
    for (long t = begin; t < end; t++) {
        const float *key = qkv + t * (q_size + 2 * kv_size) + q_size;
        for (long head = 0; head < step->num_kv_heads; head++)
            rotate(step, t, key + head * dim, 1.0f, keys + step->slot_mapping[t] * kv_size + head * dim);
        memcpy(values + step->slot_mapping[t] * kv_size, key + kv_size, (size_t)kv_size * sizeof(float));
    }
}

// Where the vectors of one head lie in the cache for the positions [begin, end), at most BLOCK_KEYS + FETCH_KEYS of
// them; the last one is repeated, so that there are always so many.
static void find_slots(const Step *step, const QueryTile *tile, long head, long begin, long end, long *offsets) {
    const int32_t *table = step->block_tables + tile->row * step->table_width;
    long dim = step->head_dim, block = begin / step->block_size, offset = begin % step->block_size;
    long count = least(BLOCK_KEYS + FETCH_KEYS, end - begin), i = 0;
    for (; i < count; block++, offset = 0)
        for (; offset < step->block_size && i < count; offset++, i++)
            offsets[i] = ((table[block] * step->block_size + offset) * step->num_kv_heads + head) * dim;
    for (; i < BLOCK_KEYS + FETCH_KEYS; i++) offsets[i] = offsets[count - 1];
}

// The queries of a tile and one KV head against one part of their keys; the result stays in `work`.
static void attend_part(const Step *step, const QueryTile *tile, long split, long head, const float *qkv,
                        const float *keys, const float *values, const Work *work) {
    long dim = step->head_dim, group = step->num_heads / step->num_kv_heads, num_rows = tile->num_tokens * group;
    long qkv_size = (step->num_heads + 2 * step->num_kv_heads) * dim;
    for (long i = 0; i < num_rows; i++) {
        long token = tile->first_token + i / group;
        rotate(step, token, qkv + token * qkv_size + (head * group + i % group) * dim, step->scale,
               work->queries + i * dim);
        work->largest[i] = -INFINITY;
        work->weights[i] = 0;
    }
    memset(work->sums, 0, (size_t)(num_rows * dim) * sizeof(float));
    // What the tile sees: from what its first token sees first, to its last token.
    long lower = most(0, tile->first_position + 1 - step->window), upper = tile->first_position + tile->num_tokens;
    long size = ceil_div(upper - lower, tile->num_splits), offsets[BLOCK_KEYS + FETCH_KEYS];
    long end = least(upper, lower + (split + 1) * size);
    for (long begin = lower + split * size; begin < end; begin += BLOCK_KEYS) {
        long count = least(BLOCK_KEYS, end - begin);
        find_slots(step, tile, head, begin, end, offsets);
        if (tile->num_tokens == 1 && group <= MAX_DIRECT_HEADS)
            attend_direct(step, tile, head, keys, values, offsets, begin, count, work);
        else
            attend_packed(step, tile, head, keys, values, offsets, begin, count, work);
    }
}

// out = sums / weights for the queries of a tile and one KV head.
static void finish(const Step *step, const QueryTile *tile, long head, const Work *work, float *out) {
    long dim = step->head_dim, group = step->num_heads / step->num_kv_heads;
    for (long i = 0; i < tile->num_tokens * group; i++) {
        float *to = out + ((tile->first_token + i / group) * step->num_heads + head * group + i % group) * dim;
        vfloat inverse = vf_all(1.0f / work->weights[i]);
        for (long d = 0; d < dim; d += LANES)
            vf_store_part(to + d, vf_mul(vf_load_part(work->sums + i * dim + d, dim - d), inverse), dim - d);
    }
}

// The partial result of one split of a tile and head; [sums][largest][weights].
static Work partial_of(const Step *step, const QueryTile *tile, long split, long head, float *partials) {
    float *memory = partials + ((tile->first_partial + split) * step->num_kv_heads + head) * partial_size(step);
    long rows = most_rows(step);
    return (Work){.sums = memory, .largest = memory + rows * step->head_dim,
                  .weights = memory + rows * (step->head_dim + 1)};
}

// Keep the result of one part until all are there.
static void save_partial(const Step *step, const QueryTile *tile, const Work *work, const Work *partial) {
    size_t rows = (size_t)tile->num_tokens * (size_t)(step->num_heads / step->num_kv_heads);
    memcpy(partial->sums, work->sums, rows * (size_t)step->head_dim * sizeof(float));
    memcpy(partial->largest, work->largest, rows * sizeof(float));
    memcpy(partial->weights, work->weights, rows * sizeof(float));
}

// Join the parts of a tile and head into the first of them.
static void merge(const Step *step, const QueryTile *tile, long head, float *partials, float *out) {
    long dim = step->head_dim, num_rows = tile->num_tokens * (step->num_heads / step->num_kv_heads);
    Work first = partial_of(step, tile, 0, head, partials);
    for (long split = 1; split < tile->num_splits; split++) {
        Work other = partial_of(step, tile, split, head, partials);
        for (long i = 0; i < num_rows; i++) {
            float now = fmaxf(first.largest[i], other.largest[i]);
            if (now == -INFINITY) continue;
            float a = expf(first.largest[i] - now), b = expf(other.largest[i] - now);
            first.largest[i] = now;
            first.weights[i] = first.weights[i] * a + other.weights[i] * b;
            for (long d = 0; d < dim; d++)
                first.sums[i * dim + d] = first.sums[i * dim + d] * a + other.sums[i * dim + d] * b;
        }
    }
    finish(step, tile, head, &first, out);
}

void run_attention(const Step *step, const float *qkv, float *keys, float *values, float *out, float *memory,
                   const Member *member) {
    Work work;
    long work_size = lay_out(step, (uintptr_t)memory, &work), num_heads = step->num_kv_heads;
    float *partials = memory + work_size * member->num_threads;
    lay_out(step, (uintptr_t)(memory + work_size * member->thread), &work);
    write_cache(step, qkv, keys, values, member);
    wait_for_all(member);
    for (long i = member->thread; i < step->num_tasks * num_heads; i = next_task(member)) {
        const Task *task = step->tasks + i / num_heads;
        const QueryTile *tile = step->tiles + task->tile;
        attend_part(step, tile, task->split, i % num_heads, qkv, keys, values, &work);
        if (tile->num_splits == 1) {
            finish(step, tile, i % num_heads, &work, out);
        } else {
            Work partial = partial_of(step, tile, task->split, i % num_heads, partials);
            save_partial(step, tile, &work, &partial);
        }
    }
    if (!step->num_partials) return;
    wait_for_all(member);
    for (long i = member->thread; i < step->num_tiles * num_heads; i = next_task(member))
        if (step->tiles[i / num_heads].num_splits > 1)
            merge(step, step->tiles + i / num_heads, i % num_heads, partials, out);
}

// One layer: rotate and write the keys and values of all tokens into the cache, then attend, causally and within
// the window.
//
// qkv [num_tokens][num_heads + 2 * num_kv_heads][head_dim] before rotation; keys and values
// [num_blocks][block_size][num_kv_heads][head_dim]; out [num_tokens][num_heads][head_dim]; memory has
// octavo_attention_scratch_bytes(step, team->num_threads), aligned to 64 bytes. Neither slots that nobody wrote
// nor entries of the block tables before the window are read.
void octavo_attention(const Step *step, const float *qkv, float *keys, float *values, float *out, float *memory,
                      Team *team) {
    Meeting meeting;
    open_meeting(&meeting, team);
#pragma omp parallel num_threads(team->size)
    {
        const Member member = join_meeting(&meeting);
        run_attention(step, qkv, keys, values, out, memory, &member);
        leave_meeting(&member);
    }
    close_meeting(&meeting);
}
