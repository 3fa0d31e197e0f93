// What an MLP applies to each value between its matrices.
#ifndef OCTAVO_ACTIVATION_H
#define OCTAVO_ACTIVATION_H

#include "vec.h"

// x / (1 + exp(-y))
INLINE vfloat weigh_by_sigmoid(vfloat x, vfloat y) {
    return vf_div(x, vf_add(vf_all(1.0f), vf_exp(vf_sub(vf_zero(), y))));
}

typedef enum { SILU, GELU, GELU_TANH, RELU, SWIGLU_OAI, RELU2 } Activation;

// a[i] = activation(a[i]) * b[i]; `b` NULL: without the factor. SWIGLU_OAI has one, to which it adds 1, and bounds both.
void activate_values(Activation activation, float *a, const float *b, long count);

// values[i] *= sigmoid(gates[i])
void gate_values(float *values, const float *gates, long count);

#endif
