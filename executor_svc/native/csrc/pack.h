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

// Write a row in INT4_G32 or INT4_G128 from its blocks: a float32 scale, a zero, then codes, of inputs 2 * i and 2 * i + 1
// in the low and the high half of byte i.
void pack_zero_row(const Matrix *matrix, long row, const uint8_t *block);

// The same of GROUP inputs in MXFP4: the scale, then codes.
#define MXFP4_BLOCK_BYTES (1 + GROUP / 2)

// Write a row in MXFP4 from its blocks; return how many scales are NaN. Halves of byte i are the inputs 2 * i and 2 * i +
// 1 of a block with `is_paired`, else i and i + GROUP / 2.
long pack_mxfp4_row(const Matrix *matrix, long row, const uint8_t *block, bool is_paired);

// Write a row in NVFP4 from its blocks of GROUP inputs: the float32 factor, the same in all of them, two scales, then
// codes as `pack_zero_row` has them; return how many blocks have a scale that is NaN.
long pack_nvfp4_row(const Matrix *matrix, long row, const uint8_t *block);

#endif
