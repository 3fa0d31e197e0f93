// Short convolutions: c * convolution(b * x). Source: Liquid AI 2025, "LFM2 Technical Report".
//
// A sum runs over the tokens that it sees in their order: what a token gets depends on the tokens before it alone, not
// on chunks, other rows or threads. A task has all tokens for some channels.
#include "short_conv.h"

#include <string.h>

#define CHANNELS 32  // of a task

// Inputs b * x of a row, counted from the first one that is kept, for the channels from `channel` on.
INLINE vfloat input_at(const ShortConv *conv, const float *kept, const float *projected, long index, long channel,
                       long count) {
    long num_kept = conv->conv_size - 1;
    if (index < num_kept) return vf_load_part(kept + index * conv->size + channel, count);
    const float *b = projected + (index - num_kept) * 3 * conv->size + channel;
    return vf_mul(vf_load_part(b, count), vf_load_part(b + 2 * conv->size, count));
}

// The tokens of a row, for the channels from `begin` to `end`; keeps the last inputs of the committed ones.
static void convolve(const ShortConv *conv, long begin, long end, long start, long length, long num_committed,
                     const float *projected, float *kept, float *out) {
    long size = conv->size, num_kept = conv->conv_size - 1;
    for (long index = 0; index < num_kept && !start; index++)
        memset(kept + index * size + begin, 0, (size_t)(end - begin) * sizeof(float));
    for (long token = 0; token < length && out; token++)
        for (long i = begin; i < end; i += LANES) {
            long count = end - i;
            vfloat sum = conv->bias ? vf_load_part(conv->bias + i, count) : vf_zero();
            for (long tap = 0; tap < conv->conv_size; tap++)
                sum = vf_fma(input_at(conv, kept, projected, token + tap, i, count),
                             vf_load_part(conv->conv_weight + tap * size + i, count), sum);
            vfloat c = vf_load_part(projected + (token * 3 + 1) * size + i, count);
            vf_store_part(out + token * size + i, vf_mul(c, sum), count);
        }
    for (long index = 0; index < num_kept; index++)  // from the first one on: each comes from behind its new place
        for (long i = begin; i < end; i += LANES)
            vf_store_part(kept + index * size + i,
                          input_at(conv, kept, projected, num_committed + index, i, end - i), end - i);
}

void run_short_conv(const ShortConv *conv, const StepRows *rows, const float *projected, float *conv_states, float *out,
                    const Member *member) {
    long size = conv->size;
    Phase phase = begin_phase(member, ceil_div(size, CHANNELS), ONCE);
    while (next_task(&phase)) {
        long begin = phase.task * CHANNELS, end = least(begin + CHANNELS, size), token = 0;
        for (long row = 0; row < rows->num_rows; token += rows->lengths[row++])
            convolve(conv, begin, end, rows->starts[row], rows->lengths[row], committed_tokens(rows, row),
                     projected + token * 3 * size, conv_states + rows->tables[row] * (conv->conv_size - 1) * size,
                     out ? out + token * size : NULL);
    }
}

typedef struct {
    const ShortConv *conv;
    const StepRows *rows;
    const float *projected;
    float *conv_states, *out;
} ShortConvCall;

static void run_short_conv_call(const Member *member, void *argument) {
    const ShortConvCall *call = argument;
    run_short_conv(call->conv, call->rows, call->projected, call->conv_states, call->out, member);
}

// A short convolution over the tokens of a step.
//
// projected [num_tokens]: b, c and x [size]. A row has its state at the slot that rows->tables names: conv_states
// [slots][conv_size - 1][size], the last b * x, written behind the committed tokens. What it holds before a row
// that starts at 0 is not read. out [num_tokens][size]; NULL: not wanted.
void octavo_short_conv(const ShortConv *conv, const StepRows *rows, const float *projected, float *conv_states,
                       float *out, Team *team) {
    run_region(team, run_short_conv_call, &(ShortConvCall){conv, rows, projected, conv_states, out});
}
