// Short convolutions: what a layer with a small state does in place of attention.
#ifndef OCTAVO_SHORT_CONV_H
#define OCTAVO_SHORT_CONV_H

#include "plan.h"
#include "team.h"

typedef struct {
    long size;                 // channels
    long conv_size;            // tokens that the convolution sees, the last one included
    const float *conv_weight;  // [conv_size][size]
    const float *bias;         // [size]; NULL: none
} ShortConv;

// As octavo_short_conv.
void run_short_conv(const ShortConv *conv, const StepRows *rows, const float *projected, float *conv_states, float *out,
                    const Member *member);

#endif
