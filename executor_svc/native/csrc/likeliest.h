// The likeliest token of each row of logits.
#ifndef OCTAVO_LIKELIEST_H
#define OCTAVO_LIKELIEST_H

#include <stdint.h>

#include "team.h"

// Logits [num_rows][size] of a step, and what is made of them.
typedef struct {
    float *values;
    long num_rows, size;
    float soft_cap;      // values become cap * tanh(value / cap); 0: they stay
    int32_t *likeliest;  // [num_rows] the first of the largest of each row; NULL: nobody asks
} Logits;

// The first of the largest scores. NaN is passed over; 0 if there is no number.
long first_largest(const float *scores, long size);

long likeliest_scratch_bytes(const Logits *logits);
// Cap logits and find the likeliest, shared by the threads of a region; memory has likeliest_scratch_bytes(...). Nobody
// waits at the end.
void finish_logits(const Logits *logits, int32_t *memory, const Member *member);

#endif
