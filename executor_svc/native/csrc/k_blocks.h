// Matrices in the K formats of llama.cpp, with the codes and scales of a file.
//
// A block has K_INPUTS inputs of a row. Its groups have a scale of few bits each, some a minimum too; the block has one
// or two float16 factors for these:
//   weight = d * scale * (code - zero)            Q6_K, Q3_K
//   weight = d * scale * code - dmin * minimum    Q5_K, Q4_K, Q2_K
// A matrix has a block of each column of a panel side by side, PANEL_COLUMNS of them; [column] below is
// [PANEL_COLUMNS]:
//   of the block           [words][column] uint32, its scales and minima
//                          [halves][column] float16: d, dmin; what pads them to a cache line
//   of each GROUP inputs   [nibble rows][column][4], as with INT4: a byte has input i and input i + 4 of eight
//                          [pair rows][column][4]: a byte has two bits of the inputs i, i + 4, i + 8, i + 12
//                          [bit rows][column][4]: a byte has a bit of the inputs i, i + 4, .. i + 28
// As many bytes as in the file, plus the padding.
#ifndef OCTAVO_K_BLOCKS_H
#define OCTAVO_K_BLOCKS_H

#include "dense.h"

#define K_INPUTS 256  // of a block
#define K_GROUPS (K_INPUTS / GROUP)
#define QUADS (GROUP / 4)  // of a group

// Where the codes of a group lie: rows of each kind.
INLINE long nibble_rows(long format) { return format >= Q4_K ? GROUP / 8 : 0; }
INLINE long pair_rows(long format) { return format == Q6_K || format <= Q3_K ? GROUP / 16 : 0; }
INLINE long bit_rows(long format) { return format == Q5_K || format == Q3_K ? GROUP / 32 : 0; }
INLINE long rows_of_group(long format) { return nibble_rows(format) + pair_rows(format) + bit_rows(format); }

// Inputs that share a scale, and the zero of a code; 0: there are minima.
INLINE long inputs_of_scale(long format) { return format == Q4_K || format == Q5_K ? 32 : 16; }
INLINE long zero_of(long format) { return format == Q6_K ? 32 : format == Q3_K ? 4 : 0; }

INLINE long words_of(long format) { return format == Q2_K || format == Q6_K ? 4 : 3; }
INLINE long halves_of(long format) { return zero_of(format) ? 1 : 2; }

// Bytes of a block in a file.
INLINE long k_block_bytes(long format) {
    return K_GROUPS * rows_of_group(format) * 4 + words_of(format) * 4 + halves_of(format) * 2;
}

// Where the parts of a panel's blocks begin behind their words, and where they end.
INLINE long k_halves_begin(long format) { return words_of(format) * 4 * PANEL_COLUMNS; }
INLINE long k_codes_begin(long format) {
    return round_up(k_halves_begin(format) + halves_of(format) * 2 * PANEL_COLUMNS, 64);
}
INLINE long k_panel_bytes(long format) {
    return k_codes_begin(format) + K_GROUPS * rows_of_group(format) * 4 * PANEL_COLUMNS;
}

INLINE uint8_t *k_block_of(const Matrix *matrix, long panel, long block) {
    long index = panel * (matrix->num_inputs / K_INPUTS) + block;
    return (uint8_t *)matrix->panels + index * k_panel_bytes(matrix->format);
}

// Write rows [row, last) of one panel from a file's blocks, `row_bytes` apart: row i of the matrix is row order[i -
// first] of them, or i - first without an order. Returns how many blocks have a d or a dmin that is no number.
long pack_k_rows(const Matrix *matrix, long row, long last, const uint8_t *blocks, long row_bytes, const int64_t *order,
                 long first);

// out[num_inputs] = a row of the matrix.
void read_k_row(const Matrix *matrix, long row, float *out);

#endif
