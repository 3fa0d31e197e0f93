// The two halves of a layer, as all threads of a parallel region run them together.
#ifndef OCTAVO_LAYERS_H
#define OCTAVO_LAYERS_H

#include "dense.h"
#include "mlp.h"
#include "norm.h"
#include "step.h"
#include "team.h"

// What each token has for each layer, [num_tokens][stride]; the numbers of a layer lie together.
typedef struct {
    const float *values;  // of the tokens of a step; each step has its own
    long stride;
} LayerInputs;

// What a layer takes of them, behind its MLP: residual += norm(projection(activation(gate(residual)) * input)).
typedef struct {
    Matrix gate, projection;  // no outputs: nothing
    Norm norm;
    const LayerInputs *inputs;
    long begin;  // where those of the layer begin in a row
} PerLayer;

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
    PerLayer per_layer;
    const float *layer_scale;  // [1], of the residual stream behind all that; NULL: 1
} LayerEnd;

// Norms over each query head and each key head of a projection.
typedef struct {
    Norm query, key, value;  // without a weight values are not normed
    long num_heads, num_kv_heads, head_dim;  // num_heads 0: there are none
} HeadNorms;

// One layer's end, and the projection behind it.
typedef struct {
    LayerEnd end;       // used if has_layer_end
    Norm norm;          // before the projection; without a weight there is none
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
