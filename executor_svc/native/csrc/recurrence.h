// What recurrences over the tokens of a row share: the rows, a causal convolution, and columns of a state.
#ifndef OCTAVO_RECURRENCE_H
#define OCTAVO_RECURRENCE_H

#include <string.h>

#include "activation.h"
#include "arena.h"
#include "plan.h"
#include "team.h"

// Columns of a state that a task works on: vectors, and floats.
#define COLUMN_VECTORS 2
#define COLUMNS (COLUMN_VECTORS * LANES)

#define FETCH_TOKENS 6  // the inputs of so many tokens ahead are fetched

// What a thread has for itself.
typedef struct {
    int32_t *first_tokens;  // [num_rows] in the step
    float *tile;            // [rows of a state][COLUMNS]
} OwnWork;

// A row of the step.
typedef struct {
    long slot, start, length, first_token;
    long num_committed;  // tokens behind which the state is kept
} Row;

// A depthwise convolution and SiLU.
typedef struct {
    long size, num_channels;    // size: tokens that it sees, the last one included
    const float *weight, *bias;  // [size][num_channels]; [num_channels], NULL: none
} Convolution;

INLINE long take_own_work(const StepRows *rows, long state_rows, uintptr_t address, OwnWork *own) {
    Arena arena = {address, address};
    own->first_tokens = take(&arena, rows->num_rows * (long)sizeof(int32_t));
    own->tile = take(&arena, state_rows * COLUMNS * (long)sizeof(float));
    return used_bytes(&arena);
}

// Returns the tokens of the step.
INLINE long find_own_work(const StepRows *rows, long state_rows, OwnWork *own) {
    void *memory = own_memory(OWN_STATE, take_own_work(rows, state_rows, 0, own));
    take_own_work(rows, state_rows, (uintptr_t)memory, own);
    long num_tokens = 0;
    for (long row = 0; row < rows->num_rows; num_tokens += rows->lengths[row++])
        own->first_tokens[row] = (int32_t)num_tokens;
    return num_tokens;
}

INLINE Row row_at(const StepRows *rows, const OwnWork *own, long index) {
    return (Row){rows->tables[index], rows->starts[index], rows->lengths[index], own->first_tokens[index],
                 committed_tokens(rows, index)};
}

// out[length][size] = the convolution of `size` channels from `channel`, for the tokens of a row; keeps the
// last inputs of the committed ones.
//
// inputs [num_tokens][stride] of the step begin with the channels; conv_states [slots][size of it - 1][num_channels].
static inline void convolve(const Convolution *convolution, const Row *row, long channel, long size,
                            const float *inputs, long stride, float *conv_states, float *out) {
    long dim = convolution->num_channels, conv_size = convolution->size, num_kept = conv_size - 1;
    float *kept = conv_states + row->slot * num_kept * dim + channel;
    inputs += row->first_token * stride + channel;
    for (long index = 0; index < num_kept && !row->start; index++)
        memset(kept + index * dim, 0, (size_t)size * sizeof(float));
// Inputs are counted from the first one that is kept.
#define INPUT(index) ((index) < num_kept ? kept + (index) * dim : inputs + ((index) - num_kept) * stride)
    for (long token = 0; token < row->length; token++, out += size) {
        for (long i = 0; i < size; i += 16) __builtin_prefetch(inputs + (token + FETCH_TOKENS) * stride + i);
        for (long i = 0; i < size; i += LANES) {
            vfloat sum = convolution->bias ? vf_load_part(convolution->bias + channel + i, size - i) : vf_zero();
            for (long tap = 0; tap < conv_size; tap++) {
                vfloat weight = vf_load_part(convolution->weight + tap * dim + channel + i, size - i);
                sum = vf_fma(vf_load_part(INPUT(token + tap) + i, size - i), weight, sum);
            }
            vf_store_part(out + i, weigh_by_sigmoid(sum, sum), size - i);
        }
    }
    for (long index = 0; index < num_kept; index++)  // from the first one on: each comes from behind its new place
        memcpy(kept + index * dim, INPUT(row->num_committed + index), (size_t)size * sizeof(float));
#undef INPUT
}

// log(1 + exp(x)), relative error about 2e-7; NaN of NaN. Source: the series of 2 atanh(s) = log((1 + s) / (1 - s)).
INLINE vfloat soft_plus(vfloat x) {
    vfloat y = vf_exp(vf_sub(vf_zero(), vf_abs(x))), s = vf_div(y, vf_add(y, vf_all(2.0f))), square = vf_mul(s, s);
    vfloat p = vf_all(2.0f / 15);
    for (int i = 13; i > 0; i -= 2) p = vf_fma(p, square, vf_all(2.0f / (float)i));
    return vf_fma(p, s, vf_max(vf_zero(), x));
}

// exp(-exp(a_log) * time): how much of a state stays.
INLINE vfloat decay_over(vfloat time, vfloat a_log) {
    vfloat decay = vf_exp(vf_sub(vf_zero(), vf_mul(vf_exp(a_log), time)));
    return vf_add(decay, vf_sub(time, time));  // a NaN stays
}

// Columns of a state at p; `count` of them are there.
INLINE void load_columns(const float *p, const bool is_whole, long count, vfloat columns[COLUMN_VECTORS]) {
#pragma GCC unroll 2
    for (long j = 0; j < COLUMN_VECTORS; j++)
        columns[j] = is_whole ? vf_load(p + j * LANES) : vf_load_part(p + j * LANES, most(0, count - j * LANES));
}
INLINE void store_columns(float *p, const bool is_whole, long count, const vfloat columns[COLUMN_VECTORS]) {
#pragma GCC unroll 2
    for (long j = 0; j < COLUMN_VECTORS; j++) {
        if (is_whole) vf_store(p + j * LANES, columns[j]);
        else vf_store_part(p + j * LANES, columns[j], most(0, count - j * LANES));
    }
}

#endif
