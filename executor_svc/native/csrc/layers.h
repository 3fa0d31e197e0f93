// The two halves of a layer, as all threads of a parallel region run them together.
#ifndef OCTAVO_LAYERS_H
#define OCTAVO_LAYERS_H

#include "dense.h"
#include "mlp.h"
#include "norm.h"
#include "step.h"
#include "team.h"

// A layer behind its attention. Names as in `LayerEnd` of models/dense.py.
typedef struct {
    Matrix attention_output;     // no outputs: there is neither attention nor a state
    Norm attention_output_norm;  // of the attention's output
    Norm mlp_norm;
    Mlp mlp;          // used if there are no experts; no outputs of `up`: there is no MLP
    Experts experts;
    Norm mlp_output_norm;
    long activation;       // an Activation
    float residual_scale;  // of what joins the residual stream
} LayerEnd;

// Norms over each query head and each key head of a projection.
typedef struct {
    Norm query, key;
    long num_heads, num_kv_heads, head_dim;  // num_heads 0: there are none
} HeadNorms;

// One layer's end, and the projection behind it.
typedef struct {
    LayerEnd end;       // used if has_layer_end
    Norm norm;          // before the projection
    Matrix projection;  // the next layer's q, k and v, or the head; no outputs: nothing follows
    HeadNorms head_norms;
    long hidden_size;
    long has_layer_end;
    long is_post_norm;  // whether what the norms return is the residual stream from there on
} Segment;

// out[num_rows][all outputs] (=|+=) in @ matrix.T + bias, shared by the threads of a region.
void project(const Matrix *matrix, const Rows *in, float *out, bool add, const Member *member);

long octavo_segment_scratch_bytes(const Segment *segment, long num_rows);
long octavo_attention_scratch_bytes(const Step *step);

// As octavo_segment.
void run_segment(const Segment *segment, long num_rows, float *attended, float *residual, float *out, void *memory,
                 const Member *member);
// As octavo_attention.
void run_attention(const Step *step, const float *qkv, const LayerCache *cache, const float *sinks, float *out,
                   float *memory, const Member *member);

#endif
