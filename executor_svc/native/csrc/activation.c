// Activations.
#include "activation.h"

// erf(x), absolute error below 2e-7.
// Source: Eigen, erf_float: an odd polynomial divided by an even one; beyond the bounds it is 1 in float32.
INLINE vfloat vf_erf(vfloat x) {
    x = vf_min(vf_max(x, vf_all(-4.0f)), vf_all(4.0f));
    vfloat square = vf_mul(x, x), p = vf_all(-2.72614225801306e-10f), q = vf_all(-1.45660718464996e-05f);
    p = vf_fma(p, square, vf_all(2.77068142495902e-08f));
    p = vf_fma(p, square, vf_all(-2.10102402082508e-06f));
    p = vf_fma(p, square, vf_all(-5.69250639462346e-05f));
    p = vf_fma(p, square, vf_all(-7.34990630326855e-04f));
    p = vf_fma(p, square, vf_all(-2.95459980854025e-03f));
    p = vf_fma(p, square, vf_all(-1.60960333262415e-02f));
    q = vf_fma(q, square, vf_all(-2.13374055278905e-04f));
    q = vf_fma(q, square, vf_all(-1.68282697438203e-03f));
    q = vf_fma(q, square, vf_all(-7.37332916720468e-03f));
    q = vf_fma(q, square, vf_all(-1.42647390514189e-02f));
    return vf_div(vf_mul(x, p), q);
}

// `activation` is a constant at each call.
// Source of both GELUs: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units"; (1 + tanh(y)) / 2 is sigmoid(2 y).
INLINE vfloat activate_vector(const Activation activation, vfloat x) {
    switch (activation) {
        case SILU: return weigh_by_sigmoid(x, x);
        case GELU: {
            vfloat half = vf_mul(x, vf_all(0.5f));
            return vf_fma(half, vf_erf(vf_mul(x, vf_all(0.70710678118654752f))), half);
        }
        case GELU_TANH: {
            vfloat cube = vf_mul(vf_mul(x, x), x);
            return weigh_by_sigmoid(x, vf_mul(vf_all(1.59576912160573071f), vf_fma(vf_all(0.044715f), cube, x)));
        }
        default: x = vf_max(vf_zero(), x);  // in this order a NaN stays
    }
    return activation == RELU2 ? vf_mul(x, x) : x;
}

// The gated activation of gpt-oss: x sigmoid(alpha x) (y + 1), with bounds. Source: https://github.com/openai/gpt-oss.
#define OAI_ALPHA 1.702f
#define OAI_LIMIT 7.0f
INLINE vfloat swiglu_oai(vfloat x, vfloat y) {
    vfloat limit = vf_all(OAI_LIMIT), lowest = vf_all(-OAI_LIMIT);
    x = vf_min(limit, x), y = vf_max(lowest, vf_min(limit, y));  // in this order a NaN stays
    return vf_mul(weigh_by_sigmoid(x, vf_mul(vf_all(OAI_ALPHA), x)), vf_add(y, vf_all(1.0f)));
}

INLINE void activate_all(const Activation activation, float *a, const float *b, long count) {
    for (long i = 0; i < count; i += LANES) {
        vfloat x = vf_load_part(a + i, count - i);
        if (activation == SWIGLU_OAI) {
            vf_store_part(a + i, swiglu_oai(x, vf_load_part(b + i, count - i)), count - i);
            continue;
        }
        x = activate_vector(activation, x);
        vf_store_part(a + i, b ? vf_mul(x, vf_load_part(b + i, count - i)) : x, count - i);
    }
}

void gate_values(float *values, const float *gates, long count) {
    for (long i = 0; i < count; i += LANES) {
        vfloat x = vf_load_part(values + i, count - i), gate = vf_load_part(gates + i, count - i);
        x = vf_add(x, vf_sub(gate, gate));  // a NaN stays
        vf_store_part(values + i, weigh_by_sigmoid(x, gate), count - i);
    }
}

// Gate rows of `size` values that lie one after the other; from gates to those of the next row are `stride` floats.
void octavo_gate_rows(long num_rows, long size, float *values, const float *gates, long stride) {
    for (long i = 0; i < num_rows; i++) gate_values(values + i * size, gates + i * stride, size);
}

void activate_values(Activation activation, float *a, const float *b, long count) {
    switch (activation) {
        case SILU: activate_all(SILU, a, b, count); break;
        case GELU: activate_all(GELU, a, b, count); break;
        case GELU_TANH: activate_all(GELU_TANH, a, b, count); break;
        case RELU: activate_all(RELU, a, b, count); break;
        case SWIGLU_OAI: activate_all(SWIGLU_OAI, a, b, count); break;
        case RELU2: activate_all(RELU2, a, b, count); break;
    }
}
