// Paged attention of one layer that reads the cache in place; see octavo_attention.
//
// The keys of a sequence fall into parts of PART_KEYS positions, from position 0. The softmax of a query is summed part by
// part, each in blocks from its beginning (attention_block.h), and then over the parts in order. One thread may do all
// parts of a tile, or several threads some each: the sums are the same, to the bit.
#include <math.h>
#include <string.h>

#include "arena.h"
#include "attention_direct.h"
#include "attention_packed.h"
#include "layers.h"

// Tokens whose queries are fetched ahead of the tokens that are rotated.
#define FETCH_TOKENS 4

// Rows of the largest task; it is padded to whole vectors of rows and whole strips.
static long most_rows(const Step *step) {
    return round_up(most(step->most_tokens, step->direct_heads) * group_of(step), LANES) + STRIP_ROWS;
}

static float *take_floats(Arena *arena, long count) { return take(arena, count * (long)sizeof(float)); }

static Softmax take_softmax(const Step *step, Arena *arena) {
    long rows = most_rows(step);
    float *sums = take_floats(arena, rows * padded_values(step)), *largest = take_floats(arena, rows);
    return (Softmax){.sums = sums, .largest = largest, .weights = take_floats(arena, rows)};
}

// Lay out the memory of one thread at `address` (0: only measure); return its size in bytes.
static long lay_out(const Step *step, uintptr_t address, Work *work) {
    Arena arena = {address, address};
    work->queries = take_floats(&arena, most_rows(step) * padded_queries(step));
    work->scores = take_floats(&arena, most(step->direct_heads * group_of(step), 2 * STRIP_ROWS) * BLOCK_KEYS);
    work->shrink = take_floats(&arena, round_up(step->direct_heads * group_of(step), LANES) + LANES);
    work->block_sums = take_floats(&arena, step->direct_heads * group_of(step) * padded_values(step));
    work->keys = take_floats(&arena, BLOCK_KEYS * round_up(step->head_dim, CHAINS));
    work->values = take_floats(&arena, BLOCK_KEYS * round_up(step->head_dim, LANES));
    work->key_scales = take_floats(&arena, step->direct_heads * BLOCK_KEYS);
    work->value_scales = take_floats(&arena, step->direct_heads * BLOCK_KEYS);
    long num_rounded = step->in_bfloat16 ? 2 * BLOCK_KEYS * step->direct_heads * step->head_dim : 0;
    work->rounded = take(&arena, num_rounded * (long)sizeof(uint16_t));
    work->total = take_softmax(step, &arena);
    work->part = take_softmax(step, &arena);
    return used_bytes(&arena);
}

// Bytes of the softmax of one part, kept until all parts are there.
static long partial_bytes(const Step *step) {
    Arena arena = {0, 0};
    take_softmax(step, &arena);
    return used_bytes(&arena);
}

long octavo_attention_scratch_bytes(const Step *step) {
    return step->num_partials * step->num_kv_heads * partial_bytes(step);
}

long octavo_part_keys(void) { return PART_KEYS; }

// Turn one head of a token by the angles of its position: out = scale * (x * cos + swapped halves of x * sin). What is
// beyond its rotary dimensions stays as it is, but for the scale.
static void rotate(const Step *step, long token, const float *x, float scale, float *out) {
    const vfloat factor = vf_all(scale);
    long dim = step->head_dim, rotary_dim = step->rotary_dim, half = rotary_dim / 2;
    for (long i = 0; i < half; i += LANES) {
        const float *cos = step->cos + token * rotary_dim, *sin = step->sin + token * rotary_dim;
        long count = half - i;
        vfloat low = vf_load_part(x + i, count), high = vf_load_part(x + half + i, count);
        vfloat turned = vf_mul(low, vf_load_part(cos + i, count));
        turned = vf_add(turned, vf_mul(high, vf_load_part(sin + i, count)));
        vf_store_part(out + i, vf_mul(factor, turned), count);
        turned = vf_mul(high, vf_load_part(cos + half + i, count));
        turned = vf_add(turned, vf_mul(low, vf_load_part(sin + half + i, count)));
        vf_store_part(out + half + i, vf_mul(factor, turned), count);
    }
    for (long i = rotary_dim; i < dim; i += LANES)
        vf_store_part(out + i, vf_mul(factor, vf_load_part(x + i, dim - i)), dim - i);
}

// Write one head of a token into its slot of the keys or values.
INLINE void write_head(const long format, const Step *step, const float *x, float scale, long slot, long head, void *pool) {
    long dim = step->head_dim, offset = slot % step->block_size, bytes = element_bytes(format);
    char *block = (char *)pool + slot / step->block_size * step->block_stride * bytes;
    if (format == CACHE_INT8) {
        scale = int8_scale(x, dim);
        float *scales = (float *)(block + scales_begin(step->block_size, step->num_kv_heads, dim));
        scales[head * step->block_size + offset] = scale;
    }
    store_elements(format, x, dim, scale, block + (offset * step->num_kv_heads + head) * dim * bytes);
}

// Rotate the keys of a token and write them and the values that lie apart into the cache; `rotated` has room for one head.
INLINE void write_token(const long format, const Step *step, long t, const float *qkv, const LayerCache *cache,
                        float *rotated) {
    long dim = step->head_dim, kv_size = step->num_kv_heads * dim;
    const float *key = qkv + t * step->qkv_stride + step->num_heads * dim;
    long slot = step->slot_mapping[t];
    if (format == CACHE_FLOAT32) {
        long at = slot / step->block_size * step->block_stride + slot % step->block_size * kv_size;
        for (long head = 0; head < step->num_kv_heads; head++)
            rotate(step, t, key + head * dim, 1.0f, (float *)cache->keys + at + head * dim);
        if (!step->value_begin) memcpy((float *)cache->values + at, key + kv_size, (size_t)kv_size * sizeof(float));
        return;
    }
    for (long head = 0; head < step->num_kv_heads; head++) {
        rotate(step, t, key + head * dim, 1.0f, rotated);
        write_head(format, step, rotated, cache->key_scale, slot, head, cache->keys);
        if (step->value_begin) continue;
        write_head(format, step, key + kv_size + head * dim, cache->value_scale, slot, head, cache->values);
    }
}

// Write the keys and values of a block as bfloat16, one key behind the other; fetch the next block's.
INLINE void round_block(const long format, const Step *step, long num_heads, const KeyBlock *block, uint16_t *keys,
                        uint16_t *values) {
    long size = num_heads * step->head_dim;
    for (long t = block->first; t < block->last; t++) {
        long offset = block->offsets[t], later = block->offsets[t + FETCH_KEYS];
        fetch_vector(element_at(format, block->keys, later), size * element_bytes(format));
        round_elements(format, element_at(format, block->keys, offset), size, keys + t * size);
        if (step->value_begin) continue;
        fetch_vector(element_at(format, block->values, later), size * element_bytes(format));
        round_elements(format, element_at(format, block->values, offset), size, values + t * size);
    }
}

// Functions made once for each format, with the format as a constant.
#define ATTEND_INSTANCES(name, format, in_pairs)                                                                   \
    APART void attend_direct_##name(const Step *step, const QueryTile *tile, long head, long num_rows,             \
                                    const KeyBlock *block, const Work *work, const Softmax *into) {                \
        attend_direct(format, in_pairs, step, tile, head, num_rows, block, work, into);                            \
    }                                                                                                              \
    APART void pack_##name(const Step *step, const KeyBlock *block, const Work *work) {                            \
        pack_keys(format, in_pairs, block, step->head_dim, work);                                                  \
        pack_values(format, in_pairs, block, value_dim(step), work);                                               \
    }
#define INSTANCES(format)                                                                                          \
    APART void write_##format(const Step *step, long t, const float *qkv, const LayerCache *cache,                 \
                              float *rotated) {                                                                    \
        write_token(format, step, t, qkv, cache, rotated);                                                         \
    }                                                                                                              \
    ATTEND_INSTANCES(format, format, false)                                                                        \
    APART void round_##format(const Step *step, long num_heads, const KeyBlock *block, uint16_t *keys,             \
                              uint16_t *values) {                                                                  \
        round_block(format, step, num_heads, block, keys, values);                                                 \
    }
FORMAT_CASES(INSTANCES)
ATTEND_INSTANCES(in_bfloat16, CACHE_BFLOAT16, true)

APART void attend_packed_floats(const Step *step, const QueryTile *tile, long head, const KeyBlock *block,
                                const Work *work, const Softmax *into) {
    attend_packed(step->cache_format, false, step, tile, head, block, work, into);
}
APART void attend_packed_pairs(const Step *step, const QueryTile *tile, long head, const KeyBlock *block,
                               const Work *work, const Softmax *into) {
    attend_packed(CACHE_BFLOAT16, true, step, tile, head, block, work, into);
}

// Write the keys and values of all tokens into the cache.
static void write_cache(const Step *step, const float *qkv, const LayerCache *cache, const Work *work,
                        const Member *member) {
    if (step->reads_only) return;
    Phase phase = begin_phase(member, step->num_tokens, ONCE);
    while (next_task(&phase)) switch (step->cache_format) {
#define WRITE(format) case format: write_##format(step, phase.task, qkv, cache, work->queries); break;
        FORMAT_CASES(WRITE)
#undef WRITE
    }
}

// Find the keys [first, last) of the block at `begin`; `end`: of the keys that may be fetched.
static void find_block(const Step *step, const QueryTile *tile, long head, long begin, long first, long last, long end,
                       long *offsets, KeyBlock *block) {
    const int32_t *table = step->block_tables + tile->row * step->table_width;
    long position = begin + first, index = position / step->block_size, offset = position % step->block_size, i = first;
    long num_fetched = is_direct(step, tile) ? FETCH_KEYS : BLOCK_KEYS;
    long upper = least(BLOCK_KEYS + num_fetched, end - begin), key_size = step->num_kv_heads * step->head_dim;
    block->stride = step->block_size % LANES ? 0 : key_size;
    block->begin = begin;
    block->first = first;
    block->last = last;
    block->offsets = offsets;
    for (; i < upper; index++, offset = 0) {
        long at = table[index] * step->block_stride + offset * key_size + head * step->head_dim;
        for (; offset < step->block_size && i < upper; offset++, i++, at += key_size) offsets[i] = at;
    }
    for (; i < round_up(last, LANES) + num_fetched; i++) offsets[i] = offsets[upper - 1];
    for (i = 0; i < first; i++) offsets[i] = offsets[first];
}

// The scales of int8 of a block for the heads of a task; fetches the next block's.
static void find_scales(const Step *step, const QueryTile *tile, long head, const Work *work, KeyBlock *block) {
    const int32_t *table = step->block_tables + tile->row * step->table_width;
    long begin = scales_begin(step->block_size, step->num_kv_heads, step->head_dim), size = step->block_size;
    long num_heads = heads_of(step, tile, head);
    long end = least(block->begin + 2 * BLOCK_KEYS, tile->end_position) - block->begin, i = block->first;
    block->key_scales = work->key_scales, block->value_scales = work->value_scales;
    for (long position = block->begin + i; i < end; position = block->begin + i) {
        long offset = position % size, count = least(size - offset, end - i);
        long at = table[position / size] * step->block_stride + begin + (head * size + offset) * (long)sizeof(float);
        const char *keys = (const char *)block->keys + at, *values = (const char *)block->values + at;
        if (i < block->last) {
            count = least(count, block->last - i);
            for (long h = 0; h < num_heads; h++) {
                long from = h * size * (long)sizeof(float), to = h * BLOCK_KEYS + i;
                memcpy(work->key_scales + to, keys + from, (size_t)count * sizeof(float));
                memcpy(work->value_scales + to, values + from, (size_t)count * sizeof(float));
            }
        } else {
            fetch_vector(keys, num_heads * size * (long)sizeof(float));
            fetch_vector(values, num_heads * size * (long)sizeof(float));
        }
        i += count;
    }
    for (long h = 0; h < num_heads; h++) {  // the other half of a pair that the range cuts
        if (block->first % 2) work->value_scales[h * BLOCK_KEYS + block->first - 1] = 0;
        if (block->last % 2) work->value_scales[h * BLOCK_KEYS + block->last] = 0;
    }
}

// Pairs of the dimensions of a query, each the nearest bfloat16; `out` may be the query.
static void pair_query(float *query, long dim, float *out) {
    for (long d = 0; d < dim; d += 2 * LANES) {
        vfloat low = vf_load_part(query + d, dim - d), high = vf_load_part(query + d + LANES, most(0, dim - d - LANES));
        vf_store_part(out + d / 2, vf_pair_neighbours(low, high), ceil_div(dim - d, 2));
    }
}

// The queries of a task, rotated and scaled, laid out for the way in which its tile is scored.
static void load_queries(const Step *step, const QueryTile *tile, long head, const float *qkv, float key_scale,
                         const Work *work) {
    long dim = step->head_dim, width = width_of(step, tile, head);
    long padded = query_stride(step->in_bfloat16, step), num_floats = head_floats(step->in_bfloat16, dim);
    long num_rows = tile->num_tokens * width;
    bool is_packed = !is_direct(step, tile);
    for (long i = 0; i < num_rows; i++) {
        long token = tile->first_token + i / width;
        const float *from = qkv + token * step->qkv_stride + (head * group_of(step) + i % width) * dim;
        float *query = work->queries + i * padded, *rotated = is_packed || step->in_bfloat16 ? work->values : query;
        if (is_packed) fetch_vector(from + FETCH_TOKENS * step->qkv_stride, dim * (long)sizeof(float));
        rotate(step, token, from, query_scale(step) * key_scale, rotated);
        if (step->in_bfloat16) pair_query(rotated, dim, is_packed ? rotated : query);
        float *laid_out = is_packed ? rotated : query;
        for (long d = num_floats; d < padded; d++) laid_out[d] = 0;
        if (is_packed) split_query(rotated, padded, query);
    }
    long missing = is_packed ? round_up(num_rows, STRIP_ROWS) - num_rows : 0;
    memset(work->queries + num_rows * padded, 0, (size_t)(missing * padded) * sizeof(float));
}

// The first position that a tile sees, by its first token, and the end of its last token.
static long lower_of(const Step *step, const QueryTile *tile) {
    return first_seen(step, tile->first_position);
}
static long upper_of(const QueryTile *tile) { return tile->end_position; }

// A block of a cache in another format, as bfloat16 in `room`.
static KeyBlock in_rounded(const Step *step, long num_heads, const KeyBlock *block, long *offsets, uint16_t *room) {
    uint16_t *values = room + step->direct_heads * BLOCK_KEYS * step->head_dim;
    KeyBlock rounded = *block;
    switch (step->cache_format) {
#define ROUND(format) case format: round_##format(step, num_heads, block, room, values); break;
        FORMAT_CASES(ROUND)
#undef ROUND
    }
    rounded.keys = room, rounded.values = step->value_begin ? room + step->value_begin : values;
    rounded.offsets = offsets, rounded.stride = num_heads * step->head_dim;
    for (long t = 0; t < 2 * BLOCK_KEYS; t++) offsets[t] = least(t, block->last - 1) * rounded.stride;
    return rounded;
}

// The queries of a task against one part of their keys.
static void attend_part(const Step *step, const QueryTile *tile, long part, long head, const LayerCache *cache,
                        const Work *work, const Softmax *into) {
    long num_rows = round_up(tile->num_tokens * width_of(step, tile, head), STRIP_ROWS);
    for (long i = 0; i < num_rows; i++) {
        into->largest[i] = -INFINITY;
        into->weights[i] = 0;
    }
    memset(into->sums, 0, (size_t)(num_rows * padded_values(step)) * sizeof(float));
    long lower = lower_of(step, tile), upper = upper_of(tile);
    long offsets[2 * BLOCK_KEYS];  // not initialised: that would take as long as many a block
    KeyBlock block = {.keys = cache->keys};
    bool direct = is_direct(step, tile);
    for (long begin = part * PART_KEYS; begin < (part + 1) * PART_KEYS && begin < upper; begin += BLOCK_KEYS) {
        if (begin + BLOCK_KEYS <= lower) continue;
        find_block(step, tile, head, begin, most(0, lower - begin), least(BLOCK_KEYS, upper - begin), upper, offsets,
                   &block);
        block.values = cache->values;
        if (step->cache_format == CACHE_INT8) find_scales(step, tile, head, work, &block);
        block.values = element_at(step->cache_format, cache->values, step->value_begin);
#define ATTEND(name, numbers, block)                                                                \
    if (direct) {                                                                                   \
        attend_direct_##name(step, tile, head, width_of(step, tile, head), block, work, into);      \
    } else {                                                                                        \
        pack_##name(step, block, work);                                                             \
        attend_packed_##numbers(step, tile, head, block, work, into);                               \
    }
        if (step->in_bfloat16) {
            long rounded_offsets[2 * BLOCK_KEYS];
            KeyBlock rounded = block;
            if (step->cache_format != CACHE_BFLOAT16)
                rounded = in_rounded(step, heads_of(step, tile, head), &block, rounded_offsets, work->rounded);
            ATTEND(in_bfloat16, pairs, &rounded)
            continue;
        }
        switch (step->cache_format) {
#define ATTEND_CASE(format) case format: ATTEND(format, floats, &block) break;
            FORMAT_CASES(ATTEND_CASE)
#undef ATTEND_CASE
#undef ATTEND
        }
    }
}

// Add the softmax of one more part to the parts before it. A part that a query does not see changes nothing.
static void add_part(const Step *step, const Softmax *total, const Softmax *part, long num_rows) {
    long stride = padded_values(step);
    float a[LANES], b[LANES];  // factors of the sums of a row
    for (long i = 0; i < num_rows; i++) {
        if (i % LANES == 0) {
            vfloat before = vf_load(total->largest + i), other = vf_load(part->largest + i), now = vf_max(before, other);
            vfloat factor = vf_weight(vf_sub(before, now)), other_factor = vf_weight(vf_sub(other, now));
            vf_store(a, factor), vf_store(b, other_factor);
            vf_store(total->largest + i, now);
            vfloat weights = vf_mul(vf_load(total->weights + i), factor);
            vf_store(total->weights + i, vf_add(weights, vf_mul(vf_load(part->weights + i), other_factor)));
        }
        for (long d = i * stride; d < (i + 1) * stride; d += LANES) {
            vfloat added = vf_mul(vf_load(part->sums + d), vf_all(b[i % LANES]));
            vf_store(total->sums + d, vf_fma(vf_load(total->sums + d), vf_all(a[i % LANES]), added));
        }
    }
}

// out = sums * value_scale / weights for the queries of a task, behind the last of their parts.
static void finish(const Step *step, const QueryTile *tile, long head, const Softmax *softmax, float value_scale,
                   const float *sinks, float *out) {
    long dim = value_dim(step), width = width_of(step, tile, head), stride = padded_values(step);
    for (long i = 0; i < tile->num_tokens * width; i++) {
        long token = tile->first_token + i / width, query_head = head * group_of(step) + i % width;
        float *to = out + (token * step->num_heads + query_head) * dim;
        vfloat factor = result_factor(softmax, i, value_scale, sinks ? sinks + query_head : NULL);
        for (long d = 0; d < dim; d += LANES)
            vf_store_part(to + d, vf_mul(vf_load(softmax->sums + i * stride + d), factor), dim - d);
    }
}

// All parts of a tile in turn, into work->total.
static void attend_tile(const Step *step, const QueryTile *tile, long head, const LayerCache *cache,
                        const Work *work) {
    long first = lower_of(step, tile) / PART_KEYS;
    attend_part(step, tile, first, head, cache, work, &work->total);
    for (long part = first + 1; part * PART_KEYS < upper_of(tile); part++) {
        attend_part(step, tile, part, head, cache, work, &work->part);
        add_part(step, &work->total, &work->part, tile->num_tokens * width_of(step, tile, head));
    }
}

// Where the softmax of a task that is one part of a tile is kept; `index` counts the parts of the tile.
static Softmax partial_of(const Step *step, const QueryTile *tile, long index, long head, char *partials) {
    uintptr_t address =
        (uintptr_t)(partials + ((tile->first_partial + index) * step->num_kv_heads + head) * partial_bytes(step));
    return take_softmax(step, &(Arena){address, address});
}

// Join the parts of a tile, for the heads of a task, in order, into the first of them.
static void join_parts(const Step *step, const QueryTile *tile, long head, char *partials, float value_scale,
                       const float *sinks, float *out) {
    Softmax total = partial_of(step, tile, 0, head, partials);
    for (long index = 1; index < tile->num_partials; index++) {
        Softmax part = partial_of(step, tile, index, head, partials);
        add_part(step, &total, &part, tile->num_tokens * width_of(step, tile, head));
    }
    finish(step, tile, head, &total, value_scale, sinks, out);
}

// Fetch the first keys of a task that comes soon: nothing before it reads them.
static void fetch_first_keys(const Step *step, const Task *task, const char *keys) {
    const QueryTile *tile = step->tiles + task->tile;
    const int32_t *table = step->block_tables + tile->row * step->table_width;
    long first = lower_of(step, tile), key_size = step->num_kv_heads * step->head_dim;
    long bytes = element_bytes(step->cache_format), num_heads = heads_of(step, tile, task->head);
    first = most(first, (first / PART_KEYS + task->index) * PART_KEYS);
    long index = first / step->block_size, offset = first % step->block_size, upper = upper_of(tile);
    for (long position = first; position < least(first + FETCH_KEYS, upper); index++, offset = 0) {
        long at = table[index] * step->block_stride + offset * key_size + task->head * step->head_dim;
        for (; offset < step->block_size && position < first + FETCH_KEYS; offset++, position++, at += key_size)
            fetch_vector(keys + at * bytes, num_heads * step->head_dim * bytes);
    }
}

void run_attention(const Step *step, const float *qkv, const LayerCache *cache, const float *sinks, float *out,
                   float *memory, const Member *member) {
    Work work;
    // Not in `memory`: a late thread still writes it when the others are at a later layer.
    void *own = own_memory(OWN_ATTENTION, lay_out(step, 0, &work));
    lay_out(step, (uintptr_t)own, &work);
    char *partials = (char *)memory;
    write_cache(step, qkv, cache, &work, member);
    Phase phase = begin_phase(member, step->num_tasks, step->num_partials ? ONCE : REPEATABLE);
    while (next_task(&phase)) {
        const Task *task = step->tasks + phase.task;
        const QueryTile *tile = step->tiles + task->tile;
        long head = task->head;
        if (is_direct(step, tile)) fetch_first_keys(step, step->tasks + upcoming_task(&phase), cache->keys);
        load_queries(step, tile, head, qkv, cache->key_scale, &work);
        if (!tile->num_partials) {
            attend_tile(step, tile, head, cache, &work);
            if (claim_task(&phase)) finish(step, tile, head, &work.total, cache->value_scale, sinks, out);
            continue;
        }
        Softmax partial = partial_of(step, tile, task->index, head, partials);
        attend_part(step, tile, lower_of(step, tile) / PART_KEYS + task->index, head, cache, &work, &partial);
    }
    if (!step->num_partials) return;
    phase = begin_phase(member, step->num_tasks, ONCE);
    while (next_task(&phase)) {
        const Task *task = step->tasks + phase.task;
        const QueryTile *tile = step->tiles + task->tile;
        if (tile->num_partials && task->index == 0)
            join_parts(step, tile, task->head, partials, cache->value_scale, sinks, out);
    }
}

typedef struct {
    const Step *step;
    const float *qkv;
    const LayerCache *cache;
    const float *sinks;
    float *out, *memory;
} AttentionCall;

static void run_attention_call(const Member *member, void *argument) {
    const AttentionCall *call = argument;
    run_attention(call->step, call->qkv, call->cache, call->sinks, call->out, call->memory, member);
}

// One layer: rotate and write the keys and values of all tokens into the cache, then attend, causally and within
// the window, or where step->is_full over all tokens of a row.
//
// qkv [num_tokens][num_heads + 2 * num_kv_heads][head_dim] before rotation, tokens step->qkv_stride apart, without values
// where those are parts of keys; the keys and values of the cache [num_blocks][block_size][num_kv_heads][head_dim], blocks
// step->block_stride apart, of int8 with scales behind each (cache_format.h); sinks [num_heads], or NULL: there are none;
// out [num_tokens][num_heads][value_dim];
// memory has octavo_attention_scratch_bytes(step), aligned to 64 bytes. Neither unwritten slots nor entries of the block
// tables before the window are read.
void octavo_attention(const Step *step, const float *qkv, const LayerCache *cache, const float *sinks, float *out,
                      float *memory, Team *team) {
    run_region(team, run_attention_call, &(AttentionCall){step, qkv, cache, sinks, out, memory});
}
