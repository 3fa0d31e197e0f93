// Gated delta nets: what a layer with a recurrent state does in place of attention.
#ifndef OCTAVO_DELTA_NET_H
#define OCTAVO_DELTA_NET_H

#include "norm.h"
#include "plan.h"
#include "team.h"

// Each key head serves as many value heads. Dimensions are those of one head.
typedef struct {
    long num_key_heads, num_value_heads, key_dim, value_dim;
    long conv_size;                // tokens that the convolution sees, the last one included
    long is_tiled;                 // the value heads of a key head are num_key_heads apart; else side by side
    const float *conv_weight;      // [conv_size][channels of the convolution]
    const float *a_log, *dt_bias;  // [num_value_heads]
    Norm norm;                     // of each value head
} DeltaNet;

// Numbers that it returns for a token; as many as it has gates.
INLINE long output_dim(const DeltaNet *net) { return net->num_value_heads * net->value_dim; }

// Channels of the convolution: queries, keys and values.
INLINE long conv_dim(const DeltaNet *net) { return 2 * net->num_key_heads * net->key_dim + output_dim(net); }

long octavo_delta_net_scratch_bytes(const DeltaNet *net, long num_tokens);

// As octavo_delta_net.
void run_delta_net(const DeltaNet *net, const StepRows *rows, const float *projected, float *conv_states, float *states,
                   float *out, void *memory, const Member *member);

#endif
