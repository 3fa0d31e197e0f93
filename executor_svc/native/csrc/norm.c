// Norms. A row is summed in as many parts as a vector has lanes, whatever the other rows.
#include "norm.h"

#include <math.h>
#include <string.h>

#include "bfloat16.h"

// Values that are worth a second thread.
#define ALONE 20000l

static float mean_of(const float *x, long size) {
    vfloat sum = vf_zero();
    for (long i = 0; i < size; i += LANES) sum = vf_add(sum, vf_load_part(x + i, size - i));
    return vf_sum(sum) / (float)size;
}

// The mean of (x - center) ** 2.
static float mean_square(const float *x, long size, float center) {
    vfloat sum = vf_zero(), middle = vf_all(center);
    long i = 0;
    for (; i + LANES <= size; i += LANES) {
        vfloat distance = vf_sub(vf_load(x + i), middle);
        sum = vf_fma(distance, distance, sum);
    }
    if (i < size) {  // the padding must not count
        float rest[LANES] = {0};
        for (long j = 0; j < size - i; j++) rest[j] = x[i + j] - center;
        vfloat distance = vf_load(rest);
        sum = vf_fma(distance, distance, sum);
    }
    return vf_sum(sum) / (float)size;
}

// out[size] = the normed values [begin, begin + size) of a row.
INLINE void normalize_part(const Norm *norm, const float *in, float mean, float scale, long begin, long size, float *out) {
    vfloat middle = vf_all(mean), factor = vf_all(scale);
    for (long i = 0; i < size; i += LANES) {
        vfloat normed = vf_mul(vf_sub(vf_load_part(in + begin + i, size - i), middle), factor);
        normed = vf_mul(normed, vf_load_part(norm->weight + begin + i, size - i));
        if (norm->bias) normed = vf_add(normed, vf_load_part(norm->bias + begin + i, size - i));
        vf_store_part(out + i, normed, size - i);
    }
}

static float mean_of_norm(const Norm *norm, const float *in, long size) {
    return norm->is_layer_norm ? mean_of(in, size) : 0;
}

static float scale_of_norm(const Norm *norm, const float *in, long size, float mean) {
    return 1.0f / sqrtf(mean_square(in, size, mean) + norm->epsilon);
}

void normalize(const Norm *norm, const float *in, long size, float *out) {
    float mean = mean_of_norm(norm, in, size);
    normalize_part(norm, in, mean, scale_of_norm(norm, in, size, mean), 0, size, out);
}

// Values of a row that are normed at once where the result is not kept.
#define NORMED_AT_ONCE 512l

// The codes of norm(in[size]), of rows without values.
static void normalize_to_codes(const Norm *norm, const float *in, long size, const Rows *out, long row) {
    uint16_t *codes = (uint16_t *)out->codes + row * out->stride;
    float mean = mean_of_norm(norm, in, size), scale = scale_of_norm(norm, in, size, mean), values[NORMED_AT_ONCE];
    for (long i = 0; i < size; i += NORMED_AT_ONCE) {
        long count = least(NORMED_AT_ONCE, size - i);
        normalize_part(norm, in, mean, scale, i, count, values);
        store_bfloat16(values, count, codes + i);
    }
    memset(codes + size, 0, (size_t)(out->stride - size) * sizeof *codes);
}

void normalize_rows(const Norm *norm, const float *in, long size, const Rows *out, long begin, long end) {
    if (!out->values) {
        for (long row = begin; row < end; row++) normalize_to_codes(norm, in + row * size, size, out, row);
        return;
    }
    for (long row = begin; row < end; row++) normalize(norm, in + row * size, size, out->values + row * out->stride);
    quantize_rows(out, size, out->values, out->stride, begin, end);
}

void add_normed_rows(const Norm *norm, float scale, float *in, long size, float *residual, long begin, long end) {
    for (long row = begin; row < end; row++) {
        float *from = in + row * size, *to = residual + row * size;
        if (norm->weight) normalize(norm, from, size, from);
        for (long i = 0; i < size; i += LANES)
            vf_store_part(to + i, vf_fma(vf_load_part(from + i, size - i), vf_all(scale), vf_load_part(to + i, size - i)),
                          size - i);
    }
}

// residual[num_rows][size] += scale * norm(sum of parts[num_parts][num_rows][size]), added in their order; `parts` is
// overwritten.
void octavo_add_parts(const Norm *norm, float scale, long num_parts, long num_rows, long size, float *parts, float *residual,
                      int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_parts * num_rows * size >= ALONE)
    for (long row = 0; row < num_rows; row++) {
        float *sum = parts + row * size;
        for (long part = 1; part < num_parts; part++)
            for (long i = 0; i < size; i++) sum[i] += sum[part * num_rows * size + i];
        add_normed_rows(norm, scale, sum, size, residual + row * size, 0, 1);
    }
}
