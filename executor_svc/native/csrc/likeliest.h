// The likeliest token of each row of logits, and whether there is one.
#ifndef OCTAVO_LIKELIEST_H
#define OCTAVO_LIKELIEST_H

#include <stdint.h>

#include "team.h"

// In place of a token: the row has NaN or infinity, or nothing but -infinity.
#define NOT_FINITE -1

// Logits [num_rows][size] of a step, and what is wanted of them.
typedef struct {
    float *values;
    long num_rows, size;
    float scale;         // of the values, before they are capped
    float soft_cap;      // values become cap * tanh(value / cap); 0: they stay
    int32_t *likeliest;  // [num_rows] the first of the largest of each row, or NOT_FINITE; NULL: not wanted
} Logits;

// The first of the largest scores, or NOT_FINITE.
long first_largest(const float *scores, long size);

long likeliest_scratch_bytes(const Logits *logits);
// Scale and cap logits and find the likeliest, shared by the threads of a region; memory has likeliest_scratch_bytes(...). No
// thread waits at the end.
void finish_logits(const Logits *logits, int32_t *memory, const Member *member);

#endif
