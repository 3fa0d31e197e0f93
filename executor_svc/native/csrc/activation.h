// What an MLP applies to each value between its matrices.
#ifndef OCTAVO_ACTIVATION_H
#define OCTAVO_ACTIVATION_H

typedef enum { SILU, GELU, GELU_TANH, RELU, SWIGLU_OAI } Activation;

// a[i] = activation(a[i]) * b[i]; `b` NULL: without the factor. SWIGLU_OAI has one, to which it adds 1, and bounds both.
void activate_values(Activation activation, float *a, const float *b, long count);

#endif
