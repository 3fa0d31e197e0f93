// Groups of codes on their way into panels.
#ifndef OCTAVO_PACK_H
#define OCTAVO_PACK_H

#include "blocks.h"

// Write a group of codes at the inputs from k of a row; false: the format of the matrix does not hold it exactly.
bool put_group(const Matrix *matrix, long row, long k, const BlockGroup *group);

// Bytes of BLOCK_INPUTS inputs of a row on their way: a float32 scale, and codes, of which those behind a row are left out.
#define SCALED_BLOCK_BYTES ((long)sizeof(float) + BLOCK_INPUTS)

// Write a row in FP8 or INT8_A32 from its blocks.
void pack_scaled_row(const Matrix *matrix, long row, const uint8_t *block);

#endif
