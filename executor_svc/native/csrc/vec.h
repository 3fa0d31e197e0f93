// Vectors of floats: 16 with AVX-512, 8 with AVX2. The compiler's flags choose; all else is written once.
#ifndef OCTAVO_VEC_H
#define OCTAVO_VEC_H

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

INLINE long most(long a, long b) { return a > b ? a : b; }
INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }
INLINE long round_up(long a, long b) { return ceil_div(a, b) * b; }

// The first `count` of 4 floats; the rest is 0, and memory behind them is not touched.
INLINE __m128 load_quad(const float *p, long count) {
    if (count >= 4) return _mm_loadu_ps(p);
    return _mm_maskload_ps(p, _mm_cmpgt_epi32(_mm_set1_epi32((int)count), _mm_setr_epi32(0, 1, 2, 3)));
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#define LANES 16  // floats in a vector
typedef __m512 vfloat;
typedef __m512i vint;  // as many int32
typedef __mmask16 vmask;

INLINE vfloat vf_zero(void) { return _mm512_setzero_ps(); }
INLINE vfloat vf_all(float x) { return _mm512_set1_ps(x); }
INLINE vfloat vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vfloat v) { _mm512_storeu_ps(p, v); }
INLINE __mmask16 lane_mask(long count) { return (__mmask16)(count >= LANES ? 0xffff : (1u << count) - 1); }
// The first `count` lanes only, 0 to LANES; the rest is 0, and memory behind them is not touched.
INLINE vfloat vf_load_part(const float *p, long count) { return _mm512_maskz_loadu_ps(lane_mask(count), p); }
INLINE void vf_store_part(float *p, vfloat v, long count) { _mm512_mask_storeu_ps(p, lane_mask(count), v); }
INLINE vfloat vf_add(vfloat a, vfloat b) { return _mm512_add_ps(a, b); }
INLINE vfloat vf_sub(vfloat a, vfloat b) { return _mm512_sub_ps(a, b); }
INLINE vfloat vf_mul(vfloat a, vfloat b) { return _mm512_mul_ps(a, b); }
INLINE vfloat vf_div(vfloat a, vfloat b) { return _mm512_div_ps(a, b); }
INLINE vfloat vf_max(vfloat a, vfloat b) { return _mm512_max_ps(a, b); }
INLINE vfloat vf_min(vfloat a, vfloat b) { return _mm512_min_ps(a, b); }
INLINE vfloat vf_abs(vfloat a) { return _mm512_abs_ps(a); }
INLINE vfloat vf_fma(vfloat a, vfloat b, vfloat c) { return _mm512_fmadd_ps(a, b, c); }     // a * b + c
INLINE vfloat vf_fnma(vfloat a, vfloat b, vfloat c) { return _mm512_fnmadd_ps(a, b, c); }   // c - a * b
// sum + a * b. Not the intrinsic: among many sums GCC 12 copies registers at each use.
INLINE vfloat vf_accumulate(vfloat sum, vfloat a, vfloat b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
INLINE vfloat vf_round(vfloat a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE float vf_first(vfloat v) { return _mm512_cvtss_f32(v); }
INLINE float vf_sum(vfloat v) { return _mm512_reduce_add_ps(v); }
INLINE float vf_largest(vfloat v) { return _mm512_reduce_max_ps(v); }
INLINE vfloat vf_all_of(vfloat v, int lane) { return _mm512_permutexvar_ps(_mm512_set1_epi32(lane), v); }
// vf_sum, or vf_largest, of each of up to 8 vectors, in a lane each: the same bits with fewer steps.
INLINE vfloat vf_join(const int is_sum, vfloat a, vfloat b) { return is_sum ? _mm512_add_ps(a, b) : _mm512_max_ps(a, b); }
INLINE vfloat vf_reduce_rows(const int is_sum, const int rows, const vfloat *v) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14);
    vfloat halves[4], quads[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vfloat a = v[2 * i < rows ? 2 * i : 0], b = v[2 * i + 1 < rows ? 2 * i + 1 : 0];
        halves[i] = vf_join(is_sum, _mm512_shuffle_f32x4(a, b, 0xee), _mm512_shuffle_f32x4(a, b, 0x44));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        quads[i] = vf_join(is_sum, _mm512_shuffle_f32x4(halves[2 * i], halves[2 * i + 1], 0xdd),
                           _mm512_shuffle_f32x4(halves[2 * i], halves[2 * i + 1], 0x88));
    vfloat pairs = vf_join(is_sum, _mm512_shuffle_ps(quads[0], quads[1], 0x44), _mm512_shuffle_ps(quads[0], quads[1], 0xee));
    return _mm512_permutexvar_ps(order, vf_join(is_sum, pairs, _mm512_permute_ps(pairs, 0xb1)));
}
// Lanes of NaN or infinity; -infinity is a number here.
INLINE vmask vf_not_below_infinity(vfloat v) { return _mm512_cmp_ps_mask(v, vf_all(__builtin_inff()), _CMP_NLT_UQ); }
INLINE vmask vm_none(void) { return 0; }
INLINE vmask vm_or(vmask a, vmask b) { return (vmask)(a | b); }
INLINE int vm_any(vmask m) { return m != 0; }
INLINE vint vf_to_int(vfloat v) { return _mm512_cvtps_epi32(v); }
INLINE vfloat vi_to_float(vint v) { return _mm512_cvtepi32_ps(v); }
INLINE vint vi_zero(void) { return _mm512_setzero_si512(); }
INLINE vint vi_all(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vfloat vf_power_of_two(vint n) {  // 2 ** n for -126 <= n <= 127
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, vi_all(127)), 23));
}
INLINE vfloat vf_zero_below(vfloat v, vfloat x, float least) {  // v where x >= least, else 0
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, vf_all(least), _CMP_GE_OQ), v);
}
// v * 2 ** n for a whole n >= -126; 0 for smaller n or NaN. v is about 1.
INLINE vfloat vf_scale(vfloat v, vfloat n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, vf_all(-126.0f), _CMP_GE_OQ), v, n);
}
// v, but `fill` in lanes outside of [begin, end).
INLINE vfloat vf_fill_outside(vfloat v, long begin, long end, float fill) {
    return _mm512_mask_mov_ps(vf_all(fill), (__mmask16)(lane_mask(end < 0 ? 0 : end) & ~lane_mask(begin < 0 ? 0 : begin)), v);
}
// The 4 floats at p, p + stride, .. p + (LANES / 4 - 1) * stride side by side; the first `count`, 1 to 4, of each, the
// rest is 0.
INLINE vfloat vf_load_quads(const float *p, long stride, long count) {
    __m512 v = _mm512_castps128_ps512(load_quad(p, count));
    v = _mm512_mask_broadcast_f32x4(v, 0x00f0, load_quad(p + stride, count));
    v = _mm512_mask_broadcast_f32x4(v, 0x0f00, load_quad(p + 2 * stride, count));
    return _mm512_mask_broadcast_f32x4(v, 0xf000, load_quad(p + 3 * stride, count));
}
// Out[i] has quad i of each row.
INLINE void vf_squares(const vfloat rows[LANES / 4], vfloat out[LANES / 4]) {
    __m512 a = _mm512_shuffle_f32x4(rows[0], rows[1], 0x44), b = _mm512_shuffle_f32x4(rows[2], rows[3], 0x44);
    __m512 c = _mm512_shuffle_f32x4(rows[0], rows[1], 0xee), d = _mm512_shuffle_f32x4(rows[2], rows[3], 0xee);
    out[0] = _mm512_shuffle_f32x4(a, b, 0x88);
    out[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
    out[2] = _mm512_shuffle_f32x4(c, d, 0x88);
    out[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
}
// LANES floats each at p, p + stride, .. p + (LANES / 4 - 1) * stride; as vf_load_quads.
INLINE void vf_load_squares(const float *p, long stride, vfloat out[LANES / 4]) {
    vfloat rows[LANES / 4];
    for (int i = 0; i < LANES / 4; i++) rows[i] = vf_load(p + i * stride);
    vf_squares(rows, out);
}
INLINE vfloat vf_repeat_quad(const float *p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
// In[i] has quads of elements; out[j] has element j of each, in the order of in[0], in[1], ..
INLINE void vf_transpose_quads(const vfloat in[4], vfloat out[4]) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512 rows[4];  // element 0 of 4 quads, element 1, ..
    for (int i = 0; i < 4; i++) rows[i] = _mm512_permutexvar_ps(order, in[i]);
    __m512 a = _mm512_shuffle_f32x4(rows[0], rows[1], 0x44), b = _mm512_shuffle_f32x4(rows[0], rows[1], 0xee);
    __m512 c = _mm512_shuffle_f32x4(rows[2], rows[3], 0x44), d = _mm512_shuffle_f32x4(rows[2], rows[3], 0xee);
    out[0] = _mm512_shuffle_f32x4(a, c, 0x88);
    out[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
    out[2] = _mm512_shuffle_f32x4(b, d, 0x88);
    out[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}
// 2 * LANES bytes, each widened to 16 bits.
INLINE vint vi_load_bytes(const int8_t *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)); }
// LANES bytes as floats.
INLINE vfloat vf_load_bytes(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
// LANES bfloat16 as floats.
INLINE vfloat vf_load_bfloat16(const void *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
// LANES FP8 as floats, by float16. E4M3 has its point 8 binary places elsewhere, and NaN in place of its last number.
INLINE vfloat vf_load_e5m2(const void *p) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(p)), 8));
}
INLINE vfloat vf_load_e4m3(const void *p) {
    const __m256i all = _mm256_set1_epi16(0x3f80);
    __m256i v = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), 7), size = _mm256_and_si256(v, all);
    __m256i nan = _mm256_srli_epi16(_mm256_cmpeq_epi16(size, all), 1);
    v = _mm256_or_si256(_mm256_and_si256(v, _mm256_set1_epi16((short)0xbf80)), nan);
    return _mm512_mul_ps(_mm512_cvtph_ps(v), vf_all(256.0f));
}
// The same of E4M3 that is not NaN, divided by E4M3_UNIT.
#define E4M3_UNIT 256.0f
INLINE vfloat vf_load_e4m3_codes(const void *p) {
    __m256i v = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(v, _mm256_set1_epi16((short)0xbf80)));
}
INLINE vint vi_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void vi_store(void *p, vint v) { _mm512_storeu_si512(p, v); }
INLINE vint vi_add(vint a, vint b) { return _mm512_add_epi32(a, b); }
INLINE vint vi_add_bytes(vint a, vint b) { return _mm512_add_epi8(a, b); }
INLINE vint vi_and(vint a, vint b) { return _mm512_and_si512(a, b); }
INLINE vint vi_or(vint a, vint b) { return _mm512_or_si512(a, b); }
INLINE vint vi_shift_left(vint v, const int n) { return _mm512_slli_epi32(v, (unsigned)n); }
INLINE vint vi_shift_right(vint v, const int n) { return _mm512_srli_epi32(v, (unsigned)n); }
INLINE vint vi_shift_right_signed(vint v, const int n) { return _mm512_srai_epi32(v, (unsigned)n); }
INLINE vint vi_max(vint a, vint b) { return _mm512_max_epi32(a, b); }
INLINE int32_t vi_largest(vint v) { return _mm512_reduce_max_epi32(v); }
INLINE vint vf_bits(vfloat v) { return _mm512_castps_si512(v); }
INLINE vfloat vi_as_float(vint v) { return _mm512_castsi512_ps(v); }
// The lower halves of the lanes of a, then of b; they are no more than 16 bits.
INLINE vint vi_narrow(vint a, vint b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(a)), _mm512_cvtepi32_epi16(b), 1);
}
// The int16 of a and b by turns.
INLINE void vi_interleave(vint a, vint b, vint out[2]) {
    const vint counting = _mm512_set_epi32(  // 0 and 32, 1 and 33, ..
        0x2f000f, 0x2e000e, 0x2d000d, 0x2c000c, 0x2b000b, 0x2a000a, 0x290009, 0x280008,  //
        0x270007, 0x260006, 0x250005, 0x240004, 0x230003, 0x220002, 0x210001, 0x200000);
    out[0] = _mm512_permutex2var_epi16(a, counting, b);
    out[1] = _mm512_permutex2var_epi16(a, _mm512_add_epi16(counting, _mm512_set1_epi16(16)), b);
}
INLINE vfloat vf_load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void vf_store_half(uint16_t *p, vfloat v) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// x where a < b, else y.
INLINE vfloat vf_where_less(vfloat a, vfloat b, vfloat x, vfloat y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
// The two bfloat16 of each lane as floats.
INLINE vfloat vf_low_bfloat16(vint v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
INLINE vfloat vf_high_bfloat16(vint v) {
    return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)));
}
// The byte of a table that each byte of v names, 0 to 15.
INLINE vint vi_look_up(const void *table, vint v) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), v);
}
// LANES uint8.
INLINE vint vi_load_narrow(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE void vi_split_nibbles(vint v, vint *low, vint *high) {
    const __m512i mask = _mm512_set1_epi8(15);
    *high = _mm512_and_si512(_mm512_srli_epi16(v, 4), mask);
    *low = _mm512_and_si512(v, mask);
}
// sum + the four products of uint8 of a and int8 of b in each lane.
INLINE vint vi_dot_quads(vint sum, vint a, vint b) {
#ifdef __AVX512VNNI__
    // Not the intrinsic; see vi_dot_pairs.
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#else
    const __m512i low = _mm512_set1_epi16(255);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_and_si512(a, low), _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8)));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8)));
#endif
}
// The same of a less 128, where no byte of b is -128. If SHIFT_IS_OF_SUMS, the sum is to be less 128 times that of b before.
#define SHIFT_IS_OF_SUMS true
INLINE vint vi_dot_shifted_quads(vint sum, vint a, vint b) { return vi_dot_quads(sum, a, b); }
// The same where no byte of a is above 128, so that two products fit into an int16.
INLINE vint vi_dot_small_quads(vint sum, vint a, vint b) {
#ifdef __AVX512VNNI__
    return vi_dot_quads(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1)));
#endif
}
// sum + the same of a and b, and of c and d, where no byte of a and c is above 64: four products fit into an int16.
INLINE vint vi_dot_two_small_quads(vint sum, vint a, vint b, vint c, vint d) {
#ifdef __AVX512VNNI__
    return vi_dot_quads(vi_dot_quads(sum, a, b), c, d);
#else
    vint pairs = _mm512_add_epi16(_mm512_maddubs_epi16(a, b), _mm512_maddubs_epi16(c, d));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}
// 32 int32 as int8; larger ones become the largest.
INLINE __m256i vi_to_int8(const vint v[2]) {
    return _mm256_set_m128i(_mm512_cvtsepi32_epi8(v[1]), _mm512_cvtsepi32_epi8(v[0]));
}
// sum + a.even * b.even + a.odd * b.odd in each lane, even and odd being its two int16.
INLINE vint vi_dot_pairs(vint sum, vint a, vint b) {
#ifdef __AVX512VNNI__
    // Not the intrinsic: GCC 12 copies the sum at each use, which spills a tile's sums to memory.
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
// The first `count` int32 as int16; they must fit.
INLINE void vi_store_int16_part(int16_t *p, vint v, long count) {
    _mm512_mask_cvtepi32_storeu_epi16(p, lane_mask(count), v);
}
// The first `count` of the 2 * LANES int16 of a vector.
INLINE void vi_store_halves_part(uint16_t *p, vint v, long count) {
    _mm512_mask_storeu_epi16(p, (__mmask32)(count >= 2 * LANES ? 0xffffffff : (1u << count) - 1), v);
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#define LANES 8
typedef __m256 vfloat;
typedef __m256i vint;
typedef __m256 vmask;

INLINE vfloat vf_zero(void) { return _mm256_setzero_ps(); }
INLINE vfloat vf_all(float x) { return _mm256_set1_ps(x); }
INLINE vfloat vf_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vf_store(float *p, vfloat v) { _mm256_storeu_ps(p, v); }
INLINE __m256i lane_mask(long count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(count > LANES ? LANES : count)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE vfloat vf_load_part(const float *p, long count) { return _mm256_maskload_ps(p, lane_mask(count)); }
INLINE void vf_store_part(float *p, vfloat v, long count) { _mm256_maskstore_ps(p, lane_mask(count), v); }
INLINE vfloat vf_add(vfloat a, vfloat b) { return _mm256_add_ps(a, b); }
INLINE vfloat vf_sub(vfloat a, vfloat b) { return _mm256_sub_ps(a, b); }
INLINE vfloat vf_mul(vfloat a, vfloat b) { return _mm256_mul_ps(a, b); }
INLINE vfloat vf_div(vfloat a, vfloat b) { return _mm256_div_ps(a, b); }
INLINE vfloat vf_max(vfloat a, vfloat b) { return _mm256_max_ps(a, b); }
INLINE vfloat vf_min(vfloat a, vfloat b) { return _mm256_min_ps(a, b); }
INLINE vfloat vf_abs(vfloat a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vfloat vf_fma(vfloat a, vfloat b, vfloat c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vfloat vf_fnma(vfloat a, vfloat b, vfloat c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE vfloat vf_accumulate(vfloat sum, vfloat a, vfloat b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}
INLINE vfloat vf_round(vfloat a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE float vf_first(vfloat v) { return _mm256_cvtss_f32(v); }
INLINE float vf_sum(vfloat v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float vf_largest(vfloat v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
INLINE vfloat vf_all_of(vfloat v, int lane) { return _mm256_permutevar8x32_ps(v, _mm256_set1_epi32(lane)); }
INLINE vfloat vf_reduce_rows(const int is_sum, const int rows, const vfloat *v) {
    float reduced[LANES] = {0};
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) reduced[i] = is_sum ? vf_sum(v[i]) : vf_largest(v[i]);
    return vf_load(reduced);
}
INLINE vmask vf_not_below_infinity(vfloat v) { return _mm256_cmp_ps(v, vf_all(__builtin_inff()), _CMP_NLT_UQ); }
INLINE vmask vm_none(void) { return _mm256_setzero_ps(); }
INLINE vmask vm_or(vmask a, vmask b) { return _mm256_or_ps(a, b); }
INLINE int vm_any(vmask m) { return _mm256_movemask_ps(m) != 0; }
INLINE vint vf_to_int(vfloat v) { return _mm256_cvtps_epi32(v); }
INLINE vfloat vi_to_float(vint v) { return _mm256_cvtepi32_ps(v); }
INLINE vint vi_zero(void) { return _mm256_setzero_si256(); }
INLINE vint vi_all(int32_t x) { return _mm256_set1_epi32(x); }
INLINE vfloat vf_power_of_two(vint n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, vi_all(127)), 23));
}
INLINE vfloat vf_zero_below(vfloat v, vfloat x, float least) {
    return _mm256_and_ps(v, _mm256_cmp_ps(x, vf_all(least), _CMP_GE_OQ));
}
INLINE vfloat vf_scale(vfloat v, vfloat n) {
    vfloat is_normal = _mm256_cmp_ps(n, vf_all(-126.0f), _CMP_GE_OQ);
    return _mm256_and_ps(_mm256_mul_ps(v, vf_power_of_two(_mm256_cvtps_epi32(n))), is_normal);
}
INLINE vfloat vf_fill_outside(vfloat v, long begin, long end, float fill) {
    __m256i inside = _mm256_andnot_si256(lane_mask(begin), lane_mask(end));
    return _mm256_blendv_ps(vf_all(fill), v, _mm256_castsi256_ps(inside));
}
INLINE vfloat vf_load_quads(const float *p, long stride, long count) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(load_quad(p, count)), load_quad(p + stride, count), 1);
}
INLINE void vf_squares(const vfloat rows[LANES / 4], vfloat out[LANES / 4]) {
    out[0] = _mm256_permute2f128_ps(rows[0], rows[1], 0x20);
    out[1] = _mm256_permute2f128_ps(rows[0], rows[1], 0x31);
}
INLINE void vf_load_squares(const float *p, long stride, vfloat out[LANES / 4]) {
    vfloat rows[LANES / 4];
    for (int i = 0; i < LANES / 4; i++) rows[i] = vf_load(p + i * stride);
    vf_squares(rows, out);
}
INLINE vfloat vf_repeat_quad(const float *p) { return _mm256_broadcast_ps((const __m128 *)p); }
INLINE void vf_transpose_quads(const vfloat in[4], vfloat out[4]) {
    __m256 rows[4];  // quads 0 and 4, 1 and 5, ..
    for (int i = 0; i < 2; i++) {
        rows[2 * i] = _mm256_permute2f128_ps(in[i], in[i + 2], 0x20);
        rows[2 * i + 1] = _mm256_permute2f128_ps(in[i], in[i + 2], 0x31);
    }
    __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(rows[0], rows[1]));
    __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(rows[0], rows[1]));
    __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(rows[2], rows[3]));
    __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(rows[2], rows[3]));
    out[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
    out[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
    out[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
    out[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
}
INLINE vint vi_load_bytes(const int8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
INLINE vfloat vf_load_bytes(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE vfloat vf_load_bfloat16(const void *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
INLINE vfloat vf_load_e5m2(const void *p) {
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(p)), 8));
}
INLINE vfloat vf_load_e4m3(const void *p) {
    const __m128i all = _mm_set1_epi16(0x3f80);
    __m128i v = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(p)), 7), size = _mm_and_si128(v, all);
    __m128i nan = _mm_srli_epi16(_mm_cmpeq_epi16(size, all), 1);
    v = _mm_or_si128(_mm_and_si128(v, _mm_set1_epi16((short)0xbf80)), nan);
    return _mm256_mul_ps(_mm256_cvtph_ps(v), vf_all(256.0f));
}
#define E4M3_UNIT 256.0f
INLINE vfloat vf_load_e4m3_codes(const void *p) {
    __m128i v = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(p)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(v, _mm_set1_epi16((short)0xbf80)));
}
INLINE vint vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void vi_store(void *p, vint v) { _mm256_storeu_si256((__m256i *)p, v); }
INLINE vint vi_add(vint a, vint b) { return _mm256_add_epi32(a, b); }
INLINE vint vi_add_bytes(vint a, vint b) { return _mm256_add_epi8(a, b); }
INLINE vint vi_and(vint a, vint b) { return _mm256_and_si256(a, b); }
INLINE vint vi_or(vint a, vint b) { return _mm256_or_si256(a, b); }
INLINE vint vi_shift_left(vint v, const int n) { return _mm256_slli_epi32(v, n); }
INLINE vint vi_shift_right(vint v, const int n) { return _mm256_srli_epi32(v, n); }
INLINE vint vi_shift_right_signed(vint v, const int n) { return _mm256_srai_epi32(v, n); }
INLINE vint vi_max(vint a, vint b) { return _mm256_max_epi32(a, b); }
INLINE int32_t vi_largest(vint v) {
    __m128i s = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
INLINE vint vf_bits(vfloat v) { return _mm256_castps_si256(v); }
INLINE vfloat vi_as_float(vint v) { return _mm256_castsi256_ps(v); }
INLINE vint vi_narrow(vint a, vint b) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8); }
INLINE void vi_interleave(vint a, vint b, vint out[2]) {
    vint low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
    out[0] = _mm256_permute2x128_si256(low, high, 0x20);
    out[1] = _mm256_permute2x128_si256(low, high, 0x31);
}
INLINE vfloat vf_load_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void vf_store_half(uint16_t *p, vfloat v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE vfloat vf_where_less(vfloat a, vfloat b, vfloat x, vfloat y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
INLINE vfloat vf_low_bfloat16(vint v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
INLINE vfloat vf_high_bfloat16(vint v) {
    return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000)));
}
INLINE vint vi_look_up(const void *table, vint v) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), v);
}
INLINE vint vi_load_narrow(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE void vi_split_nibbles(vint v, vint *low, vint *high) {
    const __m256i mask = _mm256_set1_epi8(15);
    *high = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
    *low = _mm256_and_si256(v, mask);
}
INLINE vint vi_dot_quads(vint sum, vint a, vint b) {
#ifdef __AVXVNNI__
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
#else
    const __m256i low = _mm256_set1_epi16(255);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8)));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8)));
#endif
}
#ifdef __AVXVNNI__
#define SHIFT_IS_OF_SUMS true
INLINE vint vi_dot_shifted_quads(vint sum, vint a, vint b) { return vi_dot_quads(sum, a, b); }
#else
#define SHIFT_IS_OF_SUMS false
INLINE vint vi_dot_shifted_quads(vint sum, vint a, vint b) {
    const __m256i weights = _mm256_xor_si256(a, _mm256_set1_epi8(-128));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(b, weights));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
INLINE vint vi_dot_small_quads(vint sum, vint a, vint b) {
#ifdef __AVXVNNI__
    return vi_dot_quads(sum, a, b);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
#endif
}
INLINE vint vi_dot_two_small_quads(vint sum, vint a, vint b, vint c, vint d) {
#ifdef __AVXVNNI__
    return vi_dot_quads(vi_dot_quads(sum, a, b), c, d);
#else
    vint pairs = _mm256_add_epi16(_mm256_maddubs_epi16(a, b), _mm256_maddubs_epi16(c, d));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}
INLINE __m256i vi_to_int8(const vint v[4]) {
    __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
INLINE vint vi_dot_pairs(vint sum, vint a, vint b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
INLINE void vi_store_int16_part(int16_t *p, vint v, long count) {
    int32_t values[LANES];
    _mm256_storeu_si256((__m256i *)values, v);
    for (long i = 0; i < count && i < LANES; i++) p[i] = (int16_t)values[i];
}
INLINE void vi_store_halves_part(uint16_t *p, vint v, long count) {
    uint16_t values[2 * LANES];
    _mm256_storeu_si256((__m256i *)values, v);
    for (long i = 0; i < count && i < 2 * LANES; i++) p[i] = values[i];
}

#else
#error "needs AVX2, FMA and F16C, or AVX-512 F, BW, VL and DQ"
#endif

// exp(x), relative error about 1e-7; below -87.3 it stays at about 1e-38, above 88.3 at about 2e38.
// Source: Cephes, expf: 2 ** n * p(r) with x = n * ln 2 + r.
INLINE vfloat vf_exp(vfloat x) {
    x = vf_min(vf_max(x, vf_all(-87.3f)), vf_all(88.3f));
    vfloat n = vf_round(vf_mul(x, vf_all(1.44269504088896341f)));
    x = vf_fnma(n, vf_all(0.693359375f), x);
    x = vf_fnma(n, vf_all(-2.12194440e-4f), x);
    vfloat p = vf_all(1.9875691500e-4f);
    p = vf_fma(p, x, vf_all(1.3981999507e-3f));
    p = vf_fma(p, x, vf_all(8.3334519073e-3f));
    p = vf_fma(p, x, vf_all(4.1665795894e-2f));
    p = vf_fma(p, x, vf_all(1.6666665459e-1f));
    p = vf_fma(p, x, vf_all(5.0000001201e-1f));
    p = vf_fma(p, vf_mul(x, x), vf_add(x, vf_all(1.0f)));
    return vf_mul(p, vf_power_of_two(vf_to_int(n)));
}

// 2 ** x for x <= 0, a weight of a softmax: relative error below 2e-7, 1 for 0, 0 below -126 and for NaN.
// Source: minimax polynomial of 2 ** r for |r| <= 1 / 2, with the constant 1.
INLINE vfloat vf_weight(vfloat x) {
    vfloat n = vf_round(x), r = vf_sub(x, n), p = vf_all(1.326472731e-3f);
    p = vf_fma(p, r, vf_all(9.671512991e-3f));
    p = vf_fma(p, r, vf_all(5.550733581e-2f));
    p = vf_fma(p, r, vf_all(2.402224243e-1f));
    p = vf_fma(p, r, vf_all(6.931470037e-1f));
    p = vf_fma(p, r, vf_all(1.0f));
    return vf_scale(p, n);
}

// tanh(x), relative error below 4e-7; NaN of NaN: min and max return the second operand then.
// Source: Eigen, ptanh_float: an odd polynomial divided by an even one; beyond the bounds it is 1 in float32.
INLINE vfloat vf_tanh(vfloat x) {
    x = vf_min(vf_all(7.90531110763549805f), vf_max(vf_all(-7.90531110763549805f), x));
    vfloat square = vf_mul(x, x), p = vf_all(-2.76076847742355e-16f), q = vf_all(1.19825839466702e-06f);
    p = vf_fma(p, square, vf_all(2.00018790482477e-13f));
    p = vf_fma(p, square, vf_all(-8.60467152213735e-11f));
    p = vf_fma(p, square, vf_all(5.12229709037114e-08f));
    p = vf_fma(p, square, vf_all(1.48572235717979e-05f));
    p = vf_fma(p, square, vf_all(6.37261928875436e-04f));
    p = vf_fma(p, square, vf_all(4.89352455891786e-03f));
    q = vf_fma(q, square, vf_all(1.18534705686654e-04f));
    q = vf_fma(q, square, vf_all(2.26843463243900e-03f));
    q = vf_fma(q, square, vf_all(4.89352518554385e-03f));
    return vf_div(vf_mul(x, p), q);
}

#endif
