// In a list of weights: the key, or the place, at which a sum is reached.
#ifndef OCTAVO_SELECT_H
#define OCTAVO_SELECT_H

#include <stdint.h>
#include <string.h>

#include "vec.h"

#define NUM_BUCKETS 2048

// Bits that order as integers the way the floats do.
INLINE uint32_t in_order(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

INLINE float from_order(uint32_t bits) {
    float x;
    bits = bits >> 31 ? bits & 0x7fffffffu : ~bits;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// The last key, from the largest one down, that it takes to reach a mass; the smallest with a weight if all do not.
// Weights NULL: 1 each. By radix: in which bucket of the first 11 bits the mass is reached, then of the next, the last.
INLINE float last_key(const float *keys, const float *weights, long count, double mass, double *buckets) {
    static const int shifts[] = {21, 10, 0}, widths[] = {11, 11, 10};
    uint32_t found = 0;  // the known bits, at their places
    double before = 0.0;
    for (int level = 0; level < 3; level++) {
        int shift = shifts[level], end = shift + widths[level];
        memset(buckets, 0, NUM_BUCKETS * sizeof *buckets);
        for (long i = 0; i < count; i++) {
            uint32_t key = in_order(keys[i]);
            if (level && (key ^ found) >> end) continue;
            buckets[key >> shift & ((1u << widths[level]) - 1)] += weights ? weights[i] : 1.0;
        }
        long bucket = 0;
        double sum = before;
        for (long i = (1l << widths[level]) - 1; i >= 0 && !(sum >= mass); i--) {
            if (!(buckets[i] > 0.0)) continue;
            bucket = i;
            before = sum;
            sum += buckets[i];
        }
        found |= (uint32_t)bucket << shift;
    }
    return from_order(found);
}

// The first index whose cumulative weight exceeds `target`, else the last with a weight; *before: the sum before it.
INLINE long pick(const float *weights, long count, double target, double *before) {
    long picked = 0;
    double sum = 0.0;
    *before = 0.0;
    for (long i = 0; i < count && !(sum > target); i++) {
        if (!(weights[i] > 0.0f)) continue;
        picked = i;
        *before = sum;
        sum += weights[i];
    }
    return picked;
}

#endif
