// The two halves of a layer, as all threads of a parallel region run them together.
#ifndef OCTAVO_LAYERS_H
#define OCTAVO_LAYERS_H

#include "dense.h"
#include "step.h"
#include "team.h"

// One layer's end, and what reads its result. Names as in `LayerEnd` of models/dense.py.
typedef struct {
    Matrix attention_output, gate, up, down;  // used if has_layer_end
    const float *mlp_norm;                    // [hidden_size]
    Matrix projection;                        // the next layer's q, k and v, or the head; no outputs: nothing follows
    const float *norm;                        // [hidden_size], before the projection
    long hidden_size, intermediate_size;
    long has_layer_end;
    float norm_epsilon;
} Segment;

// Rows that one task multiplies with a panel: inputs of so many rows stay in L2 beside the panel.
#define TASK_ROWS 128

// out[num_rows][num_outputs] (=|+=) in @ matrix.T + bias, shared by the threads of a region. Nobody waits at the end.
void project(const Matrix *matrix, const Rows *in, float *out, bool add, const Member *member);

long octavo_segment_scratch_bytes(const Segment *segment, long num_rows);
long octavo_attention_scratch_bytes(const Step *step, int num_threads);

// As octavo_segment. Nobody waits at the end.
void run_segment(const Segment *segment, long num_rows, float *attended, float *residual, float *out, void *memory,
                 const Member *member);
// As octavo_attention. Nobody waits at the end.
void run_attention(const Step *step, const float *qkv, float *keys, float *values, float *out, float *memory,
                   const Member *member);

#endif
