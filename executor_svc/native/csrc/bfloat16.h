// bfloat16 in vectors: rounding to it, and sums of products with the same bits on every processor.
#ifndef OCTAVO_BFLOAT16_H
#define OCTAVO_BFLOAT16_H

#include "vec.h"

// A pair of bfloat16 has an odd element and an even one. The instruction of AVX-512 BF16 adds the product of the odd ones
// to a sum, and then the product of the even ones. Each time it rounds to the nearest float, and takes denormals
// as 0, whatever the mode of the thread. Without it each product takes a turn, a fused operation in that mode.
#if LANES == 16 && defined(__AVX512BF16__)
#define TURNS 1
INLINE vfloat vf_of_turn(vint pairs, const int turn) { return _mm512_castsi512_ps(pairs); }
INLINE vfloat vf_add_products(vfloat sum, vfloat a, vfloat b) {
    // Not the intrinsic; see vf_accumulate.
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
INLINE unsigned begin_products(void) { return 0; }
INLINE void end_products(unsigned mode) {}
INLINE vfloat vf_between_products(vfloat sum) { return sum; }
#else
#define TURNS 2
INLINE vfloat vf_of_turn(vint pairs, const int turn) {
    return turn == 0 ? vf_high_bfloat16(pairs) : vf_low_bfloat16(pairs);
}
INLINE vfloat vf_add_products(vfloat sum, vfloat a, vfloat b) { return vf_accumulate(sum, a, b); }

#define DENORMALS_ARE_ZERO 0x8040u  // of MXCSR: for operands, and for results
INLINE unsigned begin_products(void) {
    unsigned mode;
    __asm__ volatile("stmxcsr %0" : "=m"(mode));
    unsigned changed = mode | DENORMALS_ARE_ZERO;
    __asm__ volatile("ldmxcsr %0" : : "m"(changed));
    return mode;
}
INLINE void end_products(unsigned mode) { __asm__ volatile("ldmxcsr %0" : : "m"(mode)); }
// A sum between begin_products and what is added, and between that and end_products: the compiler knows of no mode, and
// moves nothing over this.
INLINE vfloat vf_between_products(vfloat sum) {
#if LANES == 16
    __asm__ volatile("" : "+v"(sum));
#else
    __asm__ volatile("" : "+x"(sum));
#endif
    return sum;
}
#endif

// sum + the products of the odd elements + the products of the even ones of pairs, each pair in a lane.
INLINE vfloat vf_add_pairs(vfloat sum, vfloat a, vfloat b) {
#pragma GCC unroll 2
    for (int turn = 0; turn < TURNS; turn++)
        sum = vf_add_products(sum, vf_of_turn(vf_bits(a), turn), vf_of_turn(vf_bits(b), turn));
    return sum;
}

// The nearest bfloat16 of each lane, the even one of two; NaN stays NaN.
INLINE vfloat vf_round_bfloat16(vfloat v) {
    vint bits = vf_bits(v), is_odd = vi_and(vi_shift_right(bits, 16), vi_all(1));
    vfloat rounded = vf_high_bfloat16(vi_add(bits, vi_add(is_odd, vi_all(0x7fff))));
    return vf_where_less(vf_all(-1), vf_abs(v), rounded, vf_all(__builtin_nanf("")));
}

// The nearest bfloat16 of the lanes of a and then b, one behind the other: pairs of neighbours. Denormals become 0.
INLINE vfloat vf_pair_neighbours(vfloat a, vfloat b) {
#if TURNS == 1
    return (vfloat)_mm512_cvtne2ps_pbh(b, a);
#else
    const vfloat least = vf_all(0x1p-126f);
    a = vf_round_bfloat16(vf_where_less(vf_abs(a), least, vf_zero(), a));
    b = vf_round_bfloat16(vf_where_less(vf_abs(b), least, vf_zero(), b));
    return vi_as_float(vi_narrow(vi_shift_right(vf_bits(a), 16), vi_shift_right(vf_bits(b), 16)));
#endif
}

// out[count] = the nearest bfloat16 of values[count]; denormals become 0.
INLINE void store_bfloat16(const float *values, long count, uint16_t *out) {
    long i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES)
        vf_store((float *)(out + i), vf_pair_neighbours(vf_load(values + i), vf_load(values + i + LANES)));
    if (i == count) return;
    vfloat low = vf_load_part(values + i, count - i), high = vf_load_part(values + i + LANES, most(0, count - i - LANES));
    vi_store_halves_part(out + i, vf_bits(vf_pair_neighbours(low, high)), count - i);
}

// Pairs of a lane of a and a lane of b, which are bfloat16.
INLINE vfloat vf_pair_lanes(vfloat a, vfloat b) {
    return vi_as_float(vi_or(vi_shift_right(vf_bits(a), 16), vf_bits(b)));
}

#endif
