// Rows in codes: the inputs of products with quantized weights.
#include <string.h>

#include "bfloat16.h"
#include "dense.h"

#define LARGEST_INT16 32767
#define LARGEST_INT8 127

// The largest magnitude, or NaN if there is one: as integers, the bits of NaN are larger than a number's.
INLINE vint vi_magnitude(vint largest, vfloat x) { return vi_max(largest, vf_bits(vf_abs(x))); }

INLINE float largest_of(vint largest) {
    int32_t bits = vi_largest(largest);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// The sums of both halves of GROUP int8.
INLINE void sum_halves(__m256i codes, int32_t sums[2]) {
    __m256i bytes = _mm256_sad_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    for (int half = 0; half < 2; half++) {
        __m128i quarters = half ? _mm256_extracti128_si256(bytes, 1) : _mm256_castsi256_si128(bytes);
        sums[half] = _mm_cvtsi128_si32(quarters) + _mm_extract_epi32(quarters, 2) - GROUP / 2 * 128;
    }
}

static void round_to_bfloat16(const Rows *rows, long row, long num_values, const float *values) {
    uint16_t *codes = (uint16_t *)rows->codes + row * rows->stride;
    store_bfloat16(values, num_values, codes);
    memset(codes + num_values, 0, (size_t)(rows->stride - num_values) * sizeof *codes);
}

static void quantize_to_int16(const Rows *rows, long row, long num_values, const float *values) {
    int16_t *codes = (int16_t *)rows->codes + row * rows->stride;
    vint magnitude = vi_zero();
    for (long k = 0; k < num_values; k += LANES)
        magnitude = vi_magnitude(magnitude, vf_load_part(values + k, num_values - k));
    float largest = largest_of(magnitude);
    rows->scales[row] = largest / LARGEST_INT16;
    vfloat inverse = vf_all(largest > 0 ? LARGEST_INT16 / largest : 0);
    for (long k = 0; k < num_values; k += LANES)
        vi_store_int16_part(codes + k, vf_to_int(vf_mul(inverse, vf_load_part(values + k, num_values - k))),
                            num_values - k);
    memset(codes + num_values, 0, (size_t)(rows->stride - num_values) * sizeof *codes);
}

static void quantize_to_int8(const Rows *rows, long row, long num_values, const float *values) {
    int8_t *codes = (int8_t *)rows->codes + row * rows->stride;
    long num_groups = rows->stride / GROUP;
    float *scales = rows->scales + row * num_groups, *sums = rows->sums + row * num_groups;
    int32_t *offsets = rows->offsets + row * num_groups, *half_offsets = rows->half_offsets + 2 * row * num_groups;
    for (long group = 0; group < num_groups; group++, codes += GROUP) {
        vfloat x[GROUP / LANES];
        vint magnitude = vi_zero();
        for (long i = 0; i < GROUP / LANES; i++) {
            long k = group * GROUP + i * LANES;
            x[i] = k + LANES <= num_values ? vf_load(values + k) : vf_load_part(values + k, most(0, num_values - k));
            magnitude = vi_magnitude(magnitude, x[i]);
        }
        float largest = largest_of(magnitude), scale = largest / LARGEST_INT8;
        vfloat inverse = vf_all(largest > 0 ? LARGEST_INT8 / largest : 0);
        vint rounded[GROUP / LANES];
        for (long i = 0; i < GROUP / LANES; i++) rounded[i] = vf_to_int(vf_mul(inverse, x[i]));
        __m256i group_codes = vi_to_int8(rounded);
        _mm256_storeu_si256((__m256i *)codes, group_codes);
        int32_t halves[2];
        sum_halves(group_codes, halves);
        int32_t sum = halves[0] + halves[1];
        scales[group] = scale;
        sums[group] = scale * (float)sum;
        offsets[group] = -128 * sum;
        half_offsets[2 * group] = -HALF_OFFSET * halves[0], half_offsets[2 * group + 1] = -HALF_OFFSET * halves[1];
    }
}

void quantize_rows(const Rows *rows, long num_values, const float *values, long value_stride, long begin, long end) {
    for (long row = begin; row < end; row++) {
        if (rows->format == BFLOAT16_CODES) round_to_bfloat16(rows, row, num_values, values + row * value_stride);
        if (rows->format == INT16_CODES) quantize_to_int16(rows, row, num_values, values + row * value_stride);
        if (rows->format == INT8_CODES) quantize_to_int8(rows, row, num_values, values + row * value_stride);
    }
}

void copy_row(const Rows *in, long row, const Rows *out, long place) {
    long stride = in->stride, num_groups = stride / GROUP;
#define COPY(type, array, count)                                                              \
    memcpy((type *)out->array + place * (count), (const type *)in->array + row * (count), \
           (size_t)(count) * sizeof(type))
    switch (in->format) {
        case FLOATS: COPY(float, values, stride); break;
        case BFLOAT16_CODES: COPY(uint16_t, codes, stride); break;
        case INT16_CODES:
            COPY(int16_t, codes, stride);
            COPY(float, scales, 1);
            break;
        case INT8_CODES:
            COPY(int8_t, codes, stride);
            COPY(float, scales, num_groups);
            COPY(float, sums, num_groups);
            COPY(int32_t, offsets, num_groups);
            COPY(int32_t, half_offsets, 2 * num_groups);
            break;
    }
#undef COPY
}
