// What comes before and behind the attention on a latent cache; see latent.h.
#include "latent.h"

#include <string.h>

#include "arena.h"

typedef struct {
    Rows vectors;         // that queries are made of
    float *queries;       // of these vectors, [num_tokens][num_heads * (key_dim + rotary_dim)]
    Rows keys, values;    // codes of what the maps of heads take, [num_heads][num_tokens]
} Scratch;

// Numbers of all queries of a token.
static long queries_width(const Latent *latent) { return latent->num_heads * (latent->key_dim + latent->rotary_dim); }

static long lay_out(const Latent *latent, long num_tokens, uintptr_t address, Scratch *scratch) {
    Arena arena = {address, address};
    long num_rows = latent->num_heads * num_tokens;
    if (latent->query_rank) {
        scratch->vectors = take_codes(&arena, num_tokens, latent->query_rank, input_format(&latent->queries));
        scratch->queries = take(&arena, num_tokens * queries_width(latent) * (long)sizeof(float));
    }
    scratch->keys = take_codes(&arena, num_rows, latent->key_dim, input_format(latent->keys));
    scratch->values = take_codes(&arena, num_rows, latent->rank, input_format(latent->values));
    return used_bytes(&arena);
}

long octavo_latent_scratch_bytes(const Latent *latent, long num_tokens) {
    Scratch scratch;
    return lay_out(latent, num_tokens, 0, &scratch);
}

// The codes of what the map of each head takes of a token: in[head], `width` numbers each.
static void quantize_heads(const Rows *rows, long num_heads, long num_tokens, long token, const float *in, long width) {
    if (rows->format == FLOATS) return;
    for (long head = 0; head < num_heads; head++) {
        long row = head * num_tokens + token;
        quantize_rows(rows, width, in + head * width, 0, row, row + 1);
    }
}

// out[token][head] = map[head] of in[token][head], or of its codes. Tokens of `in` are in_stride apart, of `out`
// out_stride, heads of `out` head_stride.
static void map_heads(const Matrix *maps, long num_heads, long num_tokens, const Rows *codes, float *in, long in_stride,
                      float *out, long out_stride, long head_stride, const Member *member) {
    long num_panels = panels_of(maps), num_tasks = num_panels * ceil_div(num_tokens, TASK_ROWS);
    Phase phase = begin_phase(member, num_heads * num_tasks, num_tokens <= REPEATED_ROWS ? REPEATABLE : ONCE);
    while (next_task(&phase)) {
        long head = phase.task / num_tasks, task = phase.task % num_tasks, next = upcoming_task(&phase) - head * num_tasks;
        long first = task / num_panels * TASK_ROWS, num_rows = least(TASK_ROWS, num_tokens - first);
        next = next < num_tasks ? next % num_panels : task % num_panels;
        float *target = out + first * out_stride + head * head_stride;
        Rows rows = *codes;
        long first_row = head * num_tokens + first;
        if (codes->format == FLOATS)
            rows.values = in + head * maps->num_inputs, rows.stride = in_stride, first_row = first;
        multiply_panel(maps + head, task % num_panels, next, &rows, first_row, num_rows, target, out_stride, false, &phase);
    }
}

void make_latent_queries(const Latent *latent, long num_tokens, float *projected, float *out, void *memory,
                         const Member *member) {
    Scratch scratch;
    lay_out(latent, num_tokens, (uintptr_t)memory, &scratch);
    long num_heads = latent->num_heads, rotary_dim = latent->rotary_dim, query_rank = latent->query_rank;
    long dim = vector_dim(latent), first_vector = query_rank ? query_rank : queries_width(latent);
    long stride = first_vector + dim, queries_stride = query_rank ? queries_width(latent) : stride;
    float *queries = query_rank ? scratch.queries : projected;
    Phase phase = begin_phase(member, num_tokens, ONCE);
    while (next_task(&phase)) {
        float *row = projected + phase.task * stride, *vector = out + phase.task * latent_width(latent) + num_heads * dim;
        memcpy(vector, row + first_vector, (size_t)rotary_dim * sizeof(float));
        normalize(&latent->norm, row + first_vector + rotary_dim, latent->rank, vector + rotary_dim);
        if (!query_rank) continue;
        normalize(&latent->query_norm, row, query_rank, row);
        if (scratch.vectors.format != FLOATS)
            quantize_rows(&scratch.vectors, query_rank, projected, stride, phase.task, phase.task + 1);
    }
    if (query_rank) {
        Rows vectors = scratch.vectors;
        if (vectors.format == FLOATS) vectors = (Rows){.num_rows = num_tokens, .stride = stride, .values = projected};
        project(&latent->queries, &vectors, queries, false, member);
    }
    phase = begin_phase(member, num_tokens, ONCE);
    while (next_task(&phase)) {
        const float *row = queries + phase.task * queries_stride, *turning = row + num_heads * latent->key_dim;
        float *to = out + phase.task * latent_width(latent);
        for (long head = 0; head < num_heads; head++)
            memcpy(to + head * dim, turning + head * rotary_dim, (size_t)rotary_dim * sizeof(float));
        quantize_heads(&scratch.keys, num_heads, num_tokens, phase.task, row, latent->key_dim);
    }
    map_heads(latent->keys, num_heads, num_tokens, &scratch.keys, queries, queries_stride, out + rotary_dim,
              latent_width(latent), dim, member);
}

void make_latent_values(const Latent *latent, long num_tokens, float *attended, float *out, void *memory,
                        const Member *member) {
    Scratch scratch;
    lay_out(latent, num_tokens, (uintptr_t)memory, &scratch);
    long num_heads = latent->num_heads, stride = num_heads * latent->rank;
    if (scratch.values.format != FLOATS) {
        Phase phase = begin_phase(member, num_tokens, ONCE);
        while (next_task(&phase))
            quantize_heads(&scratch.values, num_heads, num_tokens, phase.task, attended + phase.task * stride, latent->rank);
    }
    map_heads(latent->values, num_heads, num_tokens, &scratch.values, attended, stride, out,
              num_heads * latent->value_dim, latent->value_dim, member);
}

typedef struct {
    const Latent *latent;
    long num_tokens;
    float *in, *out;
    void *memory;
} LatentCall;

static void run_queries(const Member *member, void *argument) {
    const LatentCall *call = argument;
    make_latent_queries(call->latent, call->num_tokens, call->in, call->out, call->memory, member);
}

static void run_values(const Member *member, void *argument) {
    const LatentCall *call = argument;
    make_latent_values(call->latent, call->num_tokens, call->in, call->out, call->memory, member);
}

// What attention takes of what the projection made.
//
// projected [num_tokens]: the numbers of all queries that are not rotated [num_heads][key_dim] and the others
// [num_heads][rotary_dim], or the vector that queries are made of [query_rank], which is overwritten; then the rotary
// numbers of the key and the latent. out [num_tokens][num_heads + 1][rotary_dim + rank]: queries, then the vector for the
// cache, none of them rotated. memory has octavo_latent_scratch_bytes(latent, num_tokens), aligned to 64 bytes.
void octavo_latent_queries(const Latent *latent, long num_tokens, float *projected, float *out, void *memory, Team *team) {
    run_region(team, run_queries, &(LatentCall){latent, num_tokens, projected, out, memory});
}

// out [num_tokens][num_heads][value_dim] = what heads make of the latents that they attended, [num_tokens][num_heads][rank].
void octavo_latent_values(const Latent *latent, long num_tokens, float *attended, float *out, void *memory, Team *team) {
    run_region(team, run_values, &(LatentCall){latent, num_tokens, attended, out, memory});
}
