// Mamba-2. Source: Dao & Gu 2024, "Transformers are SSMs", in its recurrent form.
//
// Convolution and recurrence go token by token, and a sum runs over the rows of a state in their order: what a token
// gets depends on the tokens before it alone, not on chunks, other rows or threads. A task has all tokens of a row for
// some columns of a head's state, which stay in the core's cache meanwhile.
#include "mamba2.h"

#include "recurrence.h"

typedef struct {
    float *inputs;        // [num_heads][num_tokens][head_dim] convolved x; each becomes what the state says
    float *b, *c;         // [num_groups][num_tokens][state_size] convolved
    float *times, *decays;  // [num_tokens][num_heads]
    long num_tokens;
} Work;

static long take_work(const Mamba2 *mamba, long num_tokens, uintptr_t address, Work *work) {
    Arena arena = {address, address};
    long size = num_tokens * (long)sizeof(float);
    work->num_tokens = num_tokens;
    work->inputs = take(&arena, mamba2_width(mamba) * size);
    work->b = take(&arena, mamba->num_groups * mamba->state_size * size);
    work->c = take(&arena, mamba->num_groups * mamba->state_size * size);
    work->times = take(&arena, mamba->num_heads * size);
    work->decays = take(&arena, mamba->num_heads * size);
    return used_bytes(&arena);
}

static long conv_dim(const Mamba2 *mamba) { return mamba2_width(mamba) + 2 * mamba->num_groups * mamba->state_size; }
static long projected_dim(const Mamba2 *mamba) { return conv_dim(mamba) + mamba2_width(mamba) + mamba->num_heads; }

// How long each token counts for each head, and how much of the state stays meanwhile.
static void prepare_times(const Mamba2 *mamba, const Row *row, const float *projected, const Work *work) {
    long num_heads = mamba->num_heads;
    for (long token = row->first_token; token < row->first_token + row->length; token++) {
        const float *dt = projected + (token + 1) * projected_dim(mamba) - num_heads;
        for (long i = 0; i < num_heads; i += LANES) {
            long rest = num_heads - i;
            vfloat time = soft_plus(vf_add(vf_load_part(dt + i, rest), vf_load_part(mamba->dt_bias + i, rest)));
            vf_store_part(work->times + token * num_heads + i, time, rest);
            vf_store_part(work->decays + token * num_heads + i, decay_over(time, vf_load_part(mamba->a_log + i, rest)),
                          rest);
        }
    }
}

// All that comes before the recurrence: tasks are the heads, the groups and the times of each row.
static void prepare(const Mamba2 *mamba, const StepRows *rows, const float *projected, float *conv_states,
                    const OwnWork *own, const Work *work, const Member *member) {
    Convolution convolution = {mamba->conv_size, conv_dim(mamba), mamba->conv_weight, mamba->conv_bias};
    long width = projected_dim(mamba), num_units = mamba->num_heads + mamba->num_groups + 1;
    Phase phase = begin_phase(member, rows->num_rows * num_units, ONCE);
    while (next_task(&phase)) {
        Row row = row_at(rows, own, phase.task / num_units);
        long unit = phase.task % num_units, group = unit - mamba->num_heads;
        if (unit < mamba->num_heads) {
            convolve(&convolution, &row, unit * mamba->head_dim, mamba->head_dim, projected, width, conv_states,
                     work->inputs + (unit * work->num_tokens + row.first_token) * mamba->head_dim);
        } else if (group < mamba->num_groups) {
            long size = mamba->state_size, channel = mamba2_width(mamba) + group * size;
            long place = (group * work->num_tokens + row.first_token) * size;
            convolve(&convolution, &row, channel, size, projected, width, conv_states, work->b + place);
            convolve(&convolution, &row, channel + mamba->num_groups * size, size, projected, width, conv_states,
                     work->c + place);
        } else {
            prepare_times(mamba, &row, projected, work);
        }
    }
}

// to = decay * from + b x^T, told = to^T c, for some columns of a head; strides are between the rows of a state.
INLINE void advance(const bool is_whole, long count, long state_size, float decay, const float *b, const float *c,
                    const vfloat x[COLUMN_VECTORS], const float *from, long from_stride, float *to, long to_stride,
                    vfloat told[COLUMN_VECTORS]) {
    vfloat state[COLUMN_VECTORS], tolds[COLUMN_VECTORS] = {vf_zero(), vf_zero()}, stays = vf_all(decay);
    for (long i = 0; i < state_size; i++, from += from_stride, to += to_stride) {
        load_columns(from, is_whole, count, state);
        vfloat enters = vf_all(b[i]), asked = vf_all(c[i]);
#pragma GCC unroll 2
        for (long j = 0; j < COLUMN_VECTORS; j++) {
            state[j] = vf_fma(enters, x[j], vf_mul(state[j], stays));
            tolds[j] = vf_fma(state[j], asked, tolds[j]);
        }
        store_columns(to, is_whole, count, state);
    }
    memcpy(told, tolds, sizeof tolds);
}

// The recurrence for the tokens of a row and the columns of a head from `column`.
INLINE void recur(const bool is_whole, const Mamba2 *mamba, const Row *row, long head, long column, float *states,
                  float *tile, const Work *work) {
    static const float zeros[COLUMNS];
    long head_dim = mamba->head_dim, state_size = mamba->state_size, num_heads = mamba->num_heads;
    long group = head / (num_heads / mamba->num_groups), count = least(COLUMNS, head_dim - column);
    float *state = states + (row->slot * num_heads + head) * state_size * head_dim + column;
    const float *from = row->start ? state : zeros;  // behind the first token where that was written
    long from_stride = row->start ? head_dim : 0, end = row->first_token + row->length;
    vfloat skip = vf_all(mamba->d[head]);
    for (long t = row->first_token; t < end; t++) {
        float *place = work->inputs + (head * work->num_tokens + t) * head_dim + column;
        const float *b = work->b + (group * work->num_tokens + t) * state_size;
        const float *c = work->c + (group * work->num_tokens + t) * state_size;
        vfloat x[COLUMN_VECTORS], change[COLUMN_VECTORS], told[COLUMN_VECTORS];
        load_columns(place, is_whole, count, x);
        for (long j = 0; j < COLUMN_VECTORS; j++) change[j] = vf_mul(x[j], vf_all(work->times[t * num_heads + head]));
        bool is_kept = t + 1 == row->first_token + row->num_committed;
        float *to = is_kept ? state : tile;
        long to_stride = is_kept ? head_dim : COLUMNS;
        advance(is_whole, count, state_size, work->decays[t * num_heads + head], b, c, change, from, from_stride, to,
                to_stride, told);
        from = to, from_stride = to_stride;
        for (long j = 0; j < COLUMN_VECTORS; j++) told[j] = vf_fma(x[j], skip, told[j]);
        store_columns(place, is_whole, count, told);
    }
}

// out = norm(what the states say * silu(gate)), for a group of heads of a token.
static void gate_group(const Mamba2 *mamba, long token, long group, const float *projected, const Work *work,
                       float *out) {
    long head_dim = mamba->head_dim, num_heads = mamba->num_heads / mamba->num_groups, size = num_heads * head_dim;
    const float *gates = projected + token * projected_dim(mamba) + conv_dim(mamba) + group * size;
    for (long head = 0; head < num_heads; head++) {
        const float *told = work->inputs + ((group * num_heads + head) * work->num_tokens + token) * head_dim;
        for (long i = 0; i < head_dim; i += LANES) {
            long place = head * head_dim + i, rest = head_dim - i;
            vfloat gate = vf_load_part(gates + place, rest), x = vf_mul(vf_load_part(told + i, rest), gate);
            vf_store_part(out + place, weigh_by_sigmoid(x, gate), rest);
        }
    }
    if (!mamba->norm.weight) return;
    Norm norm = mamba->norm;
    norm.weight += group * size;
    normalize(&norm, out, size, out);
}

void run_mamba2(const Mamba2 *mamba, const StepRows *rows, const float *projected, float *conv_states, float *states,
                float *out, void *memory, const Member *member) {
    Work work;
    OwnWork own;
    long num_tokens = find_own_work(rows, mamba->state_size, &own), num_heads = mamba->num_heads;
    take_work(mamba, num_tokens, (uintptr_t)memory, &work);
    prepare(mamba, rows, projected, conv_states, &own, &work, member);
    long num_blocks = ceil_div(mamba->head_dim, COLUMNS);
    Phase phase = begin_phase(member, rows->num_rows * num_heads * num_blocks, ONCE);
    while (next_task(&phase)) {
        Row row = row_at(rows, &own, phase.task / (num_heads * num_blocks));
        long head = phase.task / num_blocks % num_heads, column = phase.task % num_blocks * COLUMNS;
        if (column + COLUMNS <= mamba->head_dim)
            recur(true, mamba, &row, head, column, states, own.tile, &work);
        else
            recur(false, mamba, &row, head, column, states, own.tile, &work);
    }
    if (!out) return;
    long num_groups = mamba->num_groups, size = mamba2_width(mamba) / num_groups;
    phase = begin_phase(member, num_tokens * num_groups, ONCE);
    while (next_task(&phase))
        gate_group(mamba, phase.task / num_groups, phase.task % num_groups, projected, &work, out + phase.task * size);
}

long octavo_mamba2_scratch_bytes(const Mamba2 *mamba, long num_tokens) {
    Work work;
    return take_work(mamba, num_tokens, 0, &work);
}

typedef struct {
    const Mamba2 *mamba;
    const StepRows *rows;
    const float *projected;
    float *conv_states, *states, *out;
    void *memory;
} Mamba2Call;

static void run_mamba2_call(const Member *member, void *argument) {
    const Mamba2Call *call = argument;
    run_mamba2(call->mamba, call->rows, call->projected, call->conv_states, call->states, call->out, call->memory, member);
}

// A Mamba-2 layer over the tokens of a step.
//
// projected [num_tokens]: x [num_heads][head_dim], B and C [num_groups][state_size], gates as x, dt [num_heads]. A row
// has its state at the slot that rows->tables names: conv_states [slots][conv_size - 1][channels of the convolution], its
// last inputs, and states [slots][num_heads][state_size][head_dim], written behind the committed tokens. What they hold
// before a row that starts at 0 is not read. out [num_tokens][num_heads][head_dim], normed if the norm has a weight; NULL:
// only the state is wanted. memory has
// octavo_mamba2_scratch_bytes(mamba, num_tokens).
void octavo_mamba2(const Mamba2 *mamba, const StepRows *rows, const float *projected, float *conv_states,
                   float *states, float *out, void *memory, Team *team) {
    run_region(team, run_mamba2_call, &(Mamba2Call){mamba, rows, projected, conv_states, states, out, memory});
}
