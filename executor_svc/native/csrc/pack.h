// Groups of codes on their way into panels.
#ifndef OCTAVO_PACK_H
#define OCTAVO_PACK_H

#include "blocks.h"

// Write a group of codes at the inputs from k of a row; false: the format of the matrix does not hold it exactly.
bool put_group(const Matrix *matrix, long row, long k, const BlockGroup *group);

// Bytes of FP8_INPUTS inputs of a row on their way: a float32 scale, and codes, of which those behind a row are left out.
#define FP8_BLOCK_BYTES ((long)sizeof(float) + FP8_INPUTS)

// Write a row in FP8 from its blocks.
void pack_fp8_row(const Matrix *matrix, long row, const uint8_t *block);

#endif
