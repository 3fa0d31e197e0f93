// Gated delta nets. Source: Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule".
//
// Convolution and recurrence go token by token, and a sum runs over keys in their order: what a token gets depends on
// the tokens before it alone, not on chunks, other rows or threads. A task has all tokens of a row for a head, or for
// some columns of its state, which stay in the core's cache meanwhile.
#include "delta_net.h"

#include <math.h>

#include "recurrence.h"

#define UNIT_EPSILON 1e-6f  // of the squared length of a query or key

typedef struct {
    // Convolved, [heads][num_tokens][dimension]: head by head, since tokens far apart would share few lines of a cache.
    float *queries, *keys, *values;  // a value becomes what the state tells the query
    float *dots;                     // [num_tokens][num_key_heads] query . key
    float *decays, *betas;           // [num_tokens][num_value_heads]
    long num_tokens;
} Work;

static long take_work(const DeltaNet *net, long num_tokens, uintptr_t address, Work *work) {
    Arena arena = {address, address};
    long size = num_tokens * (long)sizeof(float);
    work->num_tokens = num_tokens;
    work->queries = take(&arena, net->num_key_heads * net->key_dim * size);
    work->keys = take(&arena, net->num_key_heads * net->key_dim * size);
    work->values = take(&arena, output_dim(net) * size);
    work->dots = take(&arena, net->num_key_heads * size);
    work->decays = take(&arena, net->num_value_heads * size);
    work->betas = take(&arena, net->num_value_heads * size);
    return used_bytes(&arena);
}

static long projected_dim(const DeltaNet *net) {
    return conv_dim(net) + output_dim(net) + 2 * net->num_value_heads;
}

static Convolution convolution_of(const DeltaNet *net) {
    return (Convolution){net->conv_size, conv_dim(net), net->conv_weight, NULL};
}

static float dot(const float *a, const float *b, long size) {
    vfloat sum = vf_zero();
    for (long i = 0; i < size; i += LANES)
        sum = vf_fma(vf_load_part(a + i, size - i), vf_load_part(b + i, size - i), sum);
    return vf_sum(sum);
}

// Give a query or key a length.
static void set_length(float *x, long size, float length) {
    vfloat factor = vf_all(length / sqrtf(dot(x, x, size) + UNIT_EPSILON));
    for (long i = 0; i < size; i += LANES)
        vf_store_part(x + i, vf_mul(vf_load_part(x + i, size - i), factor), size - i);
}

// The query and the key of a head, for the tokens of a row.
static void prepare_key_head(const DeltaNet *net, const Row *row, long head, const float *projected, float *conv_states,
                             const Work *work) {
    long size = net->key_dim, first_key = net->num_key_heads * size;
    float *query = work->queries + (head * work->num_tokens + row->first_token) * size;
    float *key = work->keys + (head * work->num_tokens + row->first_token) * size;
    Convolution convolution = convolution_of(net);
    long width = projected_dim(net);
    convolve(&convolution, row, head * size, size, projected, width, conv_states, query);
    convolve(&convolution, row, first_key + head * size, size, projected, width, conv_states, key);
    for (long token = row->first_token; token < row->first_token + row->length; token++, query += size, key += size) {
        set_length(query, size, 1 / sqrtf((float)size));
        set_length(key, size, 1);
        work->dots[token * net->num_key_heads + head] = dot(query, key, size);
    }
}

// How much of the state stays, and how much of a change enters, for each value head and the tokens of a row.
static void prepare_gates(const DeltaNet *net, const Row *row, const float *projected, const Work *work) {
    long num_heads = net->num_value_heads;
    for (long token = row->first_token; token < row->first_token + row->length; token++) {
        const float *b = projected + token * projected_dim(net) + conv_dim(net) + output_dim(net), *a = b + num_heads;
        for (long i = 0; i < num_heads; i += LANES) {
            long rest = num_heads - i;
            vfloat time = soft_plus(vf_add(vf_load_part(a + i, rest), vf_load_part(net->dt_bias + i, rest)));
            vfloat gate = vf_load_part(b + i, rest), one = vf_add(vf_all(1.0f), vf_sub(gate, gate));  // a NaN stays
            vf_store_part(work->decays + token * num_heads + i, decay_over(time, vf_load_part(net->a_log + i, rest)),
                          rest);
            vf_store_part(work->betas + token * num_heads + i, weigh_by_sigmoid(one, gate), rest);
        }
    }
}

// All that comes before the recurrence: tasks are the key heads, the value heads and the gates of each row.
static void prepare(const DeltaNet *net, const StepRows *rows, const float *projected, float *conv_states,
                    const OwnWork *own, const Work *work, const Member *member) {
    long num_units = net->num_key_heads + net->num_value_heads + 1;
    Convolution convolution = convolution_of(net);
    Phase phase = begin_phase(member, rows->num_rows * num_units, ONCE);
    while (next_task(&phase)) {
        Row row = row_at(rows, own, phase.task / num_units);
        long unit = phase.task % num_units, size = net->value_dim, head = unit - net->num_key_heads;
        if (unit < net->num_key_heads)
            prepare_key_head(net, &row, unit, projected, conv_states, work);
        else if (unit < num_units - 1)
            convolve(&convolution, &row, conv_dim(net) - output_dim(net) + head * size, size, projected,
                     projected_dim(net), conv_states, work->values + (head * work->num_tokens + row.first_token) * size);
        else
            prepare_gates(net, &row, projected, work);
    }
}

// A token of a row, for some columns of a head.
typedef struct {
    const float *query, *key;  // [key_dim]
    float decay;
    vfloat change[COLUMN_VECTORS];  // of the state: key change^T is added
} Token;

// tile = decay * (the state at `from`, and the change of the token before), known = tile^T key, told = tile^T query.
INLINE void decay_state(const bool has_before, const bool is_whole, const float *from, long stride, long count,
                        long key_dim, const Token *before, const Token *token, float *tile,
                        vfloat known[COLUMN_VECTORS], vfloat told[COLUMN_VECTORS]) {
    vfloat knowns[COLUMN_VECTORS] = {vf_zero(), vf_zero()}, tolds[COLUMN_VECTORS] = {vf_zero(), vf_zero()};
    vfloat change[COLUMN_VECTORS], decay = vf_all(token->decay), state[COLUMN_VECTORS];
    const float *before_key = before->key, *token_key = token->key, *token_query = token->query;
    memcpy(change, before->change, sizeof change);
    for (long i = 0; i < key_dim; i++, from += stride, tile += COLUMNS) {
        load_columns(from, is_whole, count, state);
        if (!has_before) __builtin_prefetch(from + COLUMNS);  // the next task's
        vfloat key = vf_all(token_key[i]), query = vf_all(token_query[i]);
#pragma GCC unroll 2
        for (long j = 0; j < COLUMN_VECTORS; j++) {
            if (has_before) state[j] = vf_fma(vf_all(before_key[i]), change[j], state[j]);
            state[j] = vf_mul(state[j], decay);
            knowns[j] = vf_fma(state[j], key, knowns[j]);
            tolds[j] = vf_fma(state[j], query, tolds[j]);
        }
        store_columns(tile, true, COLUMNS, state);
    }
    memcpy(known, knowns, sizeof knowns);
    memcpy(told, tolds, sizeof tolds);
}

// state = tile, and the change of the last committed token.
INLINE void keep_state(const bool is_whole, const float *tile, long key_dim, const Token *last, long count,
                       float *state, long stride) {
    for (long i = 0; i < key_dim; i++, tile += COLUMNS, state += stride) {
        vfloat columns[COLUMN_VECTORS];
        load_columns(tile, true, COLUMNS, columns);
#pragma GCC unroll 2
        for (long j = 0; j < COLUMN_VECTORS; j++)
            columns[j] = vf_fma(vf_all(last->key[i]), last->change[j], columns[j]);
        store_columns(state, is_whole, count, columns);
    }
}

// The recurrence for the tokens of a row and the columns of a head from `column`.
INLINE void recur(const bool is_whole, const DeltaNet *net, const Row *row, long head, long column, float *states,
                  float *tile, const Work *work) {
    static const float zeros[COLUMNS];
    long key_dim = net->key_dim, value_dim = net->value_dim, num_heads = net->num_value_heads;
    long key_head = net->is_tiled ? head % net->num_key_heads : head / (num_heads / net->num_key_heads);
    long count = least(COLUMNS, value_dim - column);
    float *state = states + (row->slot * num_heads + head) * key_dim * value_dim + column;
    Token token = {0};
    long committed = row->first_token + row->num_committed, end = row->first_token + row->length;
    for (long t = row->first_token; t < end; t++) {
        Token before = token;
        if (t == committed) keep_state(is_whole, tile, key_dim, &before, count, state, value_dim);
        token.query = work->queries + (key_head * work->num_tokens + t) * key_dim;
        token.key = work->keys + (key_head * work->num_tokens + t) * key_dim;
        token.decay = work->decays[t * num_heads + head];
        vfloat known[COLUMN_VECTORS], told[COLUMN_VECTORS], value[COLUMN_VECTORS];
        if (t > row->first_token)
            decay_state(true, true, tile, COLUMNS, COLUMNS, key_dim, &before, &token, tile, known, told);
        else if (row->start)
            decay_state(false, is_whole, state, value_dim, count, key_dim, &before, &token, tile, known, told);
        else
            decay_state(false, true, zeros, 0, COLUMNS, key_dim, &before, &token, tile, known, told);
        float *place = work->values + (head * work->num_tokens + t) * value_dim + column;
        load_columns(place, is_whole, count, value);
        vfloat beta = vf_all(work->betas[t * num_heads + head]);
        vfloat dot = vf_all(work->dots[t * net->num_key_heads + key_head]);
        for (long j = 0; j < COLUMN_VECTORS; j++) {
            token.change[j] = vf_mul(vf_sub(value[j], known[j]), beta);
            told[j] = vf_fma(token.change[j], dot, told[j]);  // what the changed state tells the query
        }
        store_columns(place, is_whole, count, told);
    }
    if (committed == end) keep_state(is_whole, tile, key_dim, &token, count, state, value_dim);
}

void run_delta_net(const DeltaNet *net, const StepRows *rows, const float *projected, float *conv_states, float *states,
                   float *out, void *memory, const Member *member) {
    Work work;
    OwnWork own;
    long num_tokens = find_own_work(rows, net->key_dim, &own), num_heads = net->num_value_heads, value_dim = net->value_dim;
    take_work(net, num_tokens, (uintptr_t)memory, &work);
    prepare(net, rows, projected, conv_states, &own, &work, member);
    long num_blocks = ceil_div(value_dim, COLUMNS);
    Phase phase = begin_phase(member, rows->num_rows * num_heads * num_blocks, ONCE);
    while (next_task(&phase)) {
        Row row = row_at(rows, &own, phase.task / (num_heads * num_blocks));
        long head = phase.task / num_blocks % num_heads, column = phase.task % num_blocks * COLUMNS;
        if (column + COLUMNS <= value_dim)
            recur(true, net, &row, head, column, states, own.tile, &work);
        else
            recur(false, net, &row, head, column, states, own.tile, &work);
    }
    if (!out) return;
    phase = begin_phase(member, num_tokens * num_heads, ONCE);
    while (next_task(&phase)) {
        long token = phase.task / num_heads, head = phase.task % num_heads;
        const float *gate = projected + token * projected_dim(net) + conv_dim(net) + head * value_dim;
        float *to = out + phase.task * value_dim;
        normalize(&net->norm, work.values + (head * num_tokens + token) * value_dim, value_dim, to);
        for (long i = 0; i < value_dim; i += LANES) {
            vfloat z = vf_load_part(gate + i, value_dim - i), x = vf_mul(vf_load_part(to + i, value_dim - i), z);
            vf_store_part(to + i, weigh_by_sigmoid(x, z), value_dim - i);
        }
    }
}

long octavo_delta_net_scratch_bytes(const DeltaNet *net, long num_tokens) {
    Work work;
    return take_work(net, num_tokens, 0, &work);
}

typedef struct {
    const DeltaNet *net;
    const StepRows *rows;
    const float *projected;
    float *conv_states, *states, *out;
    void *memory;
} DeltaNetCall;

static void run_delta_net_call(const Member *member, void *argument) {
    const DeltaNetCall *call = argument;
    run_delta_net(call->net, call->rows, call->projected, call->conv_states, call->states, call->out, call->memory, member);
}

// A gated delta net over the tokens of a step.
//
// projected [num_tokens]: queries, keys, values and gates [heads][dimensions], then b and a [num_value_heads]. A row has
// its state at the slot that rows->tables names: conv_states [slots][conv_size - 1][conv_dim], the last inputs of the
// convolution, and states [slots][num_value_heads][key_dim][value_dim], written behind the committed tokens. What they
// hold before a row that starts at 0 is not read. out [num_tokens][num_value_heads][value_dim], NULL: not wanted; memory
// has octavo_delta_net_scratch_bytes(net, num_tokens).
void octavo_delta_net(const DeltaNet *net, const StepRows *rows, const float *projected, float *conv_states,
                      float *states, float *out, void *memory, Team *team) {
    run_region(team, run_delta_net_call, &(DeltaNetCall){net, rows, projected, conv_states, states, out, memory});
}
