// Mamba-2: what a layer with a selective state space does in place of attention.
#ifndef OCTAVO_MAMBA2_H
#define OCTAVO_MAMBA2_H

#include "norm.h"
#include "plan.h"
#include "team.h"

// The heads of a group, as many in each, share B and C and are normed together.
typedef struct {
    long num_heads, num_groups, head_dim, state_size;
    long conv_size;                         // tokens that the convolution sees, the last one included
    const float *conv_weight, *conv_bias;   // [conv_size][channels of the convolution]; [channels], NULL: none
    const float *a_log, *dt_bias, *d;       // [num_heads]
    Norm norm;                              // of the gated outputs; its weight [num_heads][head_dim]
} Mamba2;

// Numbers that it returns for a token; as many as it has gates.
INLINE long mamba2_width(const Mamba2 *mamba) { return mamba->num_heads * mamba->head_dim; }

long octavo_mamba2_scratch_bytes(const Mamba2 *mamba, long num_tokens);

// As octavo_mamba2.
void run_mamba2(const Mamba2 *mamba, const StepRows *rows, const float *projected, float *conv_states, float *states,
                float *out, void *memory, const Member *member);

#endif
