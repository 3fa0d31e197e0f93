// RMSNorm and LayerNorm of rows.
#ifndef OCTAVO_NORM_H
#define OCTAVO_NORM_H

#include "dense.h"

// out = (x - mean) / deviation * weight + bias; of RMSNorm the mean is taken as 0.
typedef struct {
    const float *weight;  // NULL: there is no such norm
    const float *bias;    // NULL: none
    long is_layer_norm;
    float epsilon;
} Norm;

// out[size] = norm(in[size]); `out` may be `in`.
void normalize(const Norm *norm, const float *in, long size, float *out);

// out = norm(in[num_rows][size]) for the rows [begin, end); with their codes, if they have some.
void normalize_rows(const Norm *norm, const float *in, long size, const Rows *out, long begin, long end);

// residual += scale * norm(in), both [num_rows][size], for the rows [begin, end); `in` is overwritten. Without a norm in
// itself is added.
void add_normed_rows(const Norm *norm, float scale, float *in, long size, float *residual, long begin, long end);

#endif
