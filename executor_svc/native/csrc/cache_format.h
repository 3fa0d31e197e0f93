// The formats of keys and values in the cache: how an element is written and read. Products and sums see float32.
//
// An element is rounded to nearest even as it is written, from its token alone. Scales are no part of an element: they
// multiply scores and weights (int8), or queries and sums (FP8), so that elements are read as they lie.
#ifndef OCTAVO_CACHE_FORMAT_H
#define OCTAVO_CACHE_FORMAT_H

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "bfloat16.h"
#include "vec.h"

// Numbers as in executor_svc/attention/cache_format.py.
enum {
    CACHE_FLOAT32,
    CACHE_BFLOAT16,
    CACHE_FLOAT16,
    CACHE_INT8,      // each token and KV head has a float32 scale, behind the elements of its block
    CACHE_FP8_E4M3,  // without infinities: 0x7f is NaN, 448 the largest
    CACHE_FP8_E5M2,  // the upper half of a float16
};
// A switch over the formats, each as a constant.
#define FORMAT_CASES(CASE) \
    CASE(CACHE_FLOAT32) CASE(CACHE_BFLOAT16) CASE(CACHE_FLOAT16) CASE(CACHE_INT8) CASE(CACHE_FP8_E4M3) CASE(CACHE_FP8_E5M2)

#define LARGEST_INT8 127.0f
#define LARGEST_E4M3 448.0f
#define LARGEST_E5M2 57344.0f

INLINE long element_bytes(const long format) { return format == CACHE_FLOAT32 ? 4 : format <= CACHE_FLOAT16 ? 2 : 1; }

INLINE const void *element_at(const long format, const void *elements, long index) {
    return (const char *)elements + index * element_bytes(format);
}

// Bytes from the begin of a block to its scales: [num_kv_heads][block_size] float32.
INLINE long scales_begin(long block_size, long num_kv_heads, long head_dim) {
    return round_up(block_size * num_kv_heads * head_dim, 4);
}

INLINE uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits = float_bits(x);
    if (isnan(x)) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// To FP8 with so many bits behind the point and a smallest step of 2 ** -`step`.
INLINE uint8_t to_fp8(float x, const int mantissa, const int step, const float largest, const uint8_t nan) {
    uint32_t bits = float_bits(x), sign = bits >> 24 & 0x80;
    if (isnan(x)) return (uint8_t)(sign | nan);
    float size = fminf(fabsf(x), largest);
    bits = float_bits(size);
    // Below the smallest normal number steps are equal: adding so large a number rounds to them.
    const float rounder = (float)(1 << 23) / (float)(1 << step);
    const int32_t bias = 127 - step + mantissa - 1, shift = 23 - mantissa;
    if ((int32_t)(bits >> 23) <= bias) return (uint8_t)(sign | (float_bits(size + rounder) - float_bits(rounder)));
    bits += (1u << (shift - 1)) - 1 + (bits >> shift & 1);
    return (uint8_t)(sign | ((bits >> shift) - ((uint32_t)bias << mantissa)));
}

// The divisor of a head of a token in int8: no number if one of its elements is NaN or infinite.
INLINE float int8_scale(const float *x, long count) {
    vfloat largest = vf_zero();
    vmask is_broken = vm_none();
    for (long i = 0; i < count; i += LANES) {
        vfloat size = vf_abs(vf_load_part(x + i, count - i));
        largest = vf_max(largest, size);
        is_broken = vm_or(is_broken, vf_not_below_infinity(size));
    }
    return vm_any(is_broken) ? NAN : vf_largest(largest) / LARGEST_INT8;
}

// Write one head of a token as int8; where there is no scale, zeros.
INLINE void store_int8(const float *x, long count, float scale, int8_t *elements) {
    const vfloat limit = vf_all(LARGEST_INT8), negative_limit = vf_all(-LARGEST_INT8);
    for (long i = 0; i < count; i += LANES) {
        vfloat code = scale > 0 ? vf_div(vf_load_part(x + i, count - i), vf_all(scale)) : vf_zero();
        // Where the scale is denormal, a quotient may be beyond the largest.
        code = vf_max(vf_min(code, limit), negative_limit);
        int32_t codes[LANES];
        vi_store(codes, vf_to_int(code));
        for (long j = 0; j < least(LANES, count - i); j++) elements[i + j] = (int8_t)codes[j];
    }
}

// Write one head of a token; its elements are divided by `scale` first.
INLINE void store_elements(const long format, const float *x, long count, float scale, void *elements) {
    if (format == CACHE_INT8) {
        store_int8(x, count, scale, elements);
        return;
    }
    for (long i = 0; i < count; i++) switch (format) {
        case CACHE_BFLOAT16: ((uint16_t *)elements)[i] = to_bfloat16(x[i]); break;
        case CACHE_FLOAT16: ((uint16_t *)elements)[i] = _cvtss_sh(x[i], _MM_FROUND_TO_NEAREST_INT); break;
        case CACHE_FP8_E4M3: ((uint8_t *)elements)[i] = to_fp8(x[i] / scale, 3, 9, LARGEST_E4M3, 0x7f); break;
        case CACHE_FP8_E5M2: ((uint8_t *)elements)[i] = to_fp8(x[i] / scale, 2, 16, LARGEST_E5M2, 0x7f); break;
    }
}

// LANES elements as floats, exactly.
INLINE vfloat load_elements(const long format, const void *p) {
    switch (format) {
        case CACHE_BFLOAT16: return vf_load_bfloat16(p);
        case CACHE_FLOAT16: return vf_load_half(p);
        case CACHE_INT8: return vf_load_bytes(p);
        case CACHE_FP8_E4M3: return vf_load_e4m3(p);
        case CACHE_FP8_E5M2: return vf_load_e5m2(p);
    }
    return vf_load(p);
}

// The first `count` of them, 0 to LANES; the rest is 0, and memory behind them is not touched.
INLINE vfloat load_elements_part(const long format, const void *p, long count) {
    if (format == CACHE_FLOAT32) return vf_load_part(p, count);
    if (count >= LANES) return load_elements(format, p);
    char room[LANES * 2] = {0};
    memcpy(room, p, (size_t)(count * element_bytes(format)));
    return load_elements(format, room);
}

// Elements as the nearest bfloat16; denormals become 0.
INLINE void round_elements(const long format, const void *elements, long count, uint16_t *out) {
    long i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES)
        vf_store((float *)(out + i), vf_pair_neighbours(load_elements(format, element_at(format, elements, i)),
                                                        load_elements(format, element_at(format, elements, i + LANES))));
    for (; i < count; i += 2 * LANES) {
        float pairs[LANES];
        vfloat low = load_elements_part(format, element_at(format, elements, i), count - i);
        long rest = most(0, count - i - LANES);
        vf_store(pairs, vf_pair_neighbours(low, load_elements_part(format, element_at(format, elements, count - rest), rest)));
        memcpy(out + i, pairs, (size_t)(count - i) * sizeof *out);
    }
}

// As vf_load_squares, of elements `stride` apart.
INLINE void load_squares(const long format, const void *p, long stride, vfloat out[LANES / 4]) {
    if (format == CACHE_FLOAT32) {
        vf_load_squares(p, stride, out);
        return;
    }
    vfloat rows[LANES / 4];
#pragma GCC unroll 4
    for (int i = 0; i < LANES / 4; i++) rows[i] = load_elements(format, element_at(format, p, i * stride));
    vf_squares(rows, out);
}

#endif
