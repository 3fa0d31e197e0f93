// A row of scores: its blocks and their maxima, the sum of its weights, and a thread's memory to work in.
//
// Every sum here runs over the blocks of one row, in their order: it knows neither other rows nor threads.
#ifndef OCTAVO_SCORES_H
#define OCTAVO_SCORES_H

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "arena.h"
#include "select.h"
#include "team.h"
#include "vec.h"

#define BLOCK 32      // scores that share a maximum; BLOCK of likeliest.py
#define FLOOR -80.0f  // exp of less is 0; FLOOR of likeliest.py
#define ALONE 131072  // up to so many scores one thread is faster

// A thread's memory. A key is a score divided by the temperature; a weight is exp(key - top).
typedef struct {
    float *maxima;       // [num_blocks] of the scores
    float *sums;         // [num_blocks] of the weights
    double *buckets;     // [NUM_BUCKETS]
    long num_candidates;
    int32_t *token_ids;  // [size] of the candidates, rising; the others belong to them
    float *keys, *weights, *closeness;
    float *processed;    // [size] a row that the processors have changed
    int32_t *counts;     // [size] how often each token was there; anything outside of process_row
    uint64_t *sorted;    // [size]
} Scratch;

// The sum of some weights, and the sum of weight * (key - top).
typedef struct {
    double total, moment;
} Mass;

#if LANES == 16
INLINE uint32_t at_least(vfloat a, vfloat b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }  // a bit a lane
#else
INLINE uint32_t at_least(vfloat a, vfloat b) { return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
#endif

INLINE vfloat weights_of(vfloat shifted) { return vf_zero_below(vf_exp(shifted), shifted, FLOOR); }

// The natural logarithm, to a few units in the last place. Ours: the C library's differs between its versions.
INLINE double log_of(double x) {
    if (!(x > 0.0)) return x == 0.0 ? -INFINITY : NAN;
    if (x == INFINITY) return x;
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    // x = 2 ** exponent * fraction, the fraction between the roots of 1 / 2 and 2.
    int64_t exponent = ((int64_t)bits - 0x3fe6a09e667f3bcdl) >> 52;
    bits -= (uint64_t)exponent << 52;
    double fraction, sum = 0.0;
    memcpy(&fraction, &bits, sizeof fraction);
    double s = (fraction - 1.0) / (fraction + 1.0);  // log(fraction) = 2 * (s + s ** 3 / 3 + s ** 5 / 5 + ...)
    for (int power = 23; power > 1; power -= 2) sum = sum * (s * s) + 1.0 / power;
    return (double)exponent * 0.69314718055994530942 + 2.0 * (s + s * (s * s) * sum);
}

// Lay out a thread's scratch memory at `address` (0: only measure); return its size in bytes.
INLINE long lay_out(long size, uintptr_t address, Scratch *scratch) {
    Arena arena = {address, address};
    scratch->maxima = take(&arena, 4 * ceil_div(size, BLOCK));
    scratch->sums = take(&arena, 4 * ceil_div(size, BLOCK));
    scratch->buckets = take(&arena, 8 * NUM_BUCKETS);
    scratch->token_ids = take(&arena, 4 * size);
    scratch->keys = take(&arena, 4 * size);
    scratch->weights = take(&arena, 4 * size);
    scratch->closeness = take(&arena, 4 * size);
    scratch->processed = take(&arena, 4 * size);
    scratch->counts = take(&arena, 4 * size);
    scratch->sorted = take(&arena, 8 * size);
    return used_bytes(&arena);
}

// The scratch memory of a thread of a region.
INLINE Scratch own_scratch(long size, void *memory, const Member *member) {
    Scratch scratch;
    long bytes = lay_out(size, 0, &scratch);
    lay_out(size, (uintptr_t)memory + (uintptr_t)(bytes * member->thread), &scratch);
    return scratch;
}

// A block of a row; the last one, if it is short, in `padded`, filled up with -inf.
INLINE const float *block_of(const float *scores, long size, long block, float *padded) {
    long count = size - block * BLOCK;
    if (count >= BLOCK) return scores + block * BLOCK;
    for (long i = 0; i < BLOCK; i++) padded[i] = i < count ? scores[block * BLOCK + i] : -INFINITY;
    return padded;
}

// Write the maxima of the blocks, without NaN; return the largest, or infinity for a row with NaN.
INLINE float find_maxima(const float *scores, long size, float *maxima) {
    float padded[BLOCK], top = -INFINITY;
    vmask broken = vm_none();
    for (long block = 0; block < ceil_div(size, BLOCK); block++) {
        const float *p = block_of(scores, size, block, padded);
        vfloat most = vf_all(-INFINITY);
        for (long i = 0; i < BLOCK; i += LANES) {
            vfloat x = vf_load(p + i);
            most = vf_max(x, most);
            broken = vm_or(broken, vf_not_below_infinity(x));
        }
        maxima[block] = vf_largest(most);
        top = maxima[block] > top ? maxima[block] : top;
    }
    return vm_any(broken) ? INFINITY : top;
}

// Whether a row has something to choose from, by the result of find_maxima.
INLINE bool is_finite(float top) { return top > -INFINITY && top < INFINITY; }

// Sum up the weights of a row. with_moment: the moment too; sums: NULL, or the blocks' sums are written there.
INLINE Mass weigh_row(const float *scores, long size, float temperature, float top, const float *maxima,
                      bool with_moment, float *sums) {
    Mass mass = {0.0, 0.0};
    float padded[BLOCK];
    vfloat sum = vf_zero(), moment = vf_zero();
    long num_blocks = ceil_div(size, BLOCK);
    for (long block = 0; block < num_blocks; block++) {
        if (maxima[block] / temperature - top >= FLOOR) {
            const float *p = block_of(scores, size, block, padded);
            for (long i = 0; i < BLOCK; i += LANES) {
                vfloat shifted = vf_sub(vf_div(vf_load(p + i), vf_all(temperature)), vf_all(top));
                vfloat weights = weights_of(shifted);
                sum = vf_add(sum, weights);
                if (with_moment) moment = vf_fma(weights, vf_max(shifted, vf_all(FLOOR)), moment);
            }
        }
        // Few floats are added up before the sum goes on in double.
        if (!sums && (block + 1) % 16 && block + 1 < num_blocks) continue;
        float total = vf_sum(sum);
        mass.total += total;
        if (with_moment) mass.moment += vf_sum(moment);
        if (sums) sums[block] = total;
        sum = moment = vf_zero();
    }
    return mass;
}

#endif
