// What the dense files share: weight matrices in panels, and products of rows with them.
#ifndef OCTAVO_DENSE_H
#define OCTAVO_DENSE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "vec.h"

#define PANEL_VECTORS 3
#define PANEL_COLUMNS (PANEL_VECTORS * LANES)
#define GROUP 32  // inputs that share a scale
#define BLOCK_INPUTS 128  // the same of FP8 and INT8_A32

// How weights are stored, and what their products take; `NumberFormat` of structs.py.
typedef enum {
    FLOAT32,   // floats
    BFLOAT16,  // floats, summed as with float32
    BFLOAT16_A16,  // bfloat16
    INT8,      // int16 codes
    INT8_A8,   // int8 codes
    INT4,      // int8 codes
    Q5_1,      // int8 codes
    Q2_K,      // int8 codes, as the formats below; see k_blocks.h
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    FP8,       // floats
    MXFP4,     // int8 codes
    INT8_A32,  // floats
    INT4_G32,  // int8 codes
    INT4_G128, // int8 codes
    NVFP4,     // int8 codes
} NumberFormat;
#define K_FORMATS(CASE) CASE(Q2_K) CASE(Q3_K) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K)
INLINE bool is_k_format(long format) { return format >= Q2_K && format <= Q6_K; }

// The weight of a linear map, [num_outputs][num_inputs], cut into panels of PANEL_COLUMNS outputs. P is num_inputs,
// rounded up to a whole GROUP; G is P / GROUP. What pads a panel or the inputs is 0.
//   FLOAT32:  [panel][num_inputs][PANEL_COLUMNS] float
//   BFLOAT16, BFLOAT16_A16: [panel][num_inputs / 2, rounded up][PANEL_COLUMNS][2] bfloat16
//   INT8:     [panel][P / 2][PANEL_COLUMNS][2] int8; weight = code * scale
//   INT8_A8:  [panel][P / 4][PANEL_COLUMNS][4] uint8, code + 128; weight = code * scale
//   INT4:     [panel][P / 8][PANEL_COLUMNS][4] uint8, of which each has input i in its low half and input i + 4 in
//             its high half; weight = code * scale + minimum
//   MXFP4:    as INT4; weight = value of the code (E2M1) * scale
//   NVFP4:    as INT4; weight = value of the code (E2M1) * scale * factor
//   INT4_G32, INT4_G128: as INT4; weight = (code - zero) * scale
//   Q5_1:     [panel][P / 4][PANEL_COLUMNS][4] uint8; weight = code * scale + minimum
//   Q*_K:     as k_blocks.h has it, with its scales
//   FP8:      [panel][num_inputs][PANEL_COLUMNS] E4M3, none of them NaN; weight = code * scale
//   INT8_A32: [panel][num_inputs][PANEL_COLUMNS] int8; weight = code * scale
// Scales are float16, [panel][G][PANEL_COLUMNS]; with minima [panel][G][2][PANEL_COLUMNS], scales and minima. Those of
// FP8 and INT8_A32 are float32, [panel][num_inputs / BLOCK_INPUTS, rounded up][PANEL_COLUMNS]; of FP8 times E4M3_UNIT.
// Those of MXFP4 are E8M0, none of them NaN: [panel][G][PANEL_COLUMNS] uint8, of which each is 2 ** (scale - 127).
// Those of NVFP4 are E4M3, none of them NaN, for 16 inputs: [panel][2 * G][PANEL_COLUMNS] uint8, and behind those of a
// panel float32 factors [PANEL_COLUMNS], times E4M3_UNIT / 2.
// INT4_G32 has a scale for 32 inputs, INT4_G128 for 128: [panel][P / 32 or P / 128, rounded up], of which each has
// float32 scales [PANEL_COLUMNS], then zeros [PANEL_COLUMNS] uint8.
typedef struct Matrix {
    long format;  // a NumberFormat
    long num_outputs, num_inputs;
    const void *panels;
    const void *scales;         // NULL: there are none
    const float *bias;          // [num_outputs], or NULL
    const struct Matrix *rest;  // further outputs, in another format that takes the same inputs; NULL: none
    const struct Adapted *adapted;  // see adapters.h; NULL: no adapters
} Matrix;

// The inputs of a product.
typedef enum { FLOATS, BFLOAT16_CODES, INT16_CODES, INT8_CODES } InputFormat;

// The left side of a product, [num_rows][stride]. `stride` counts values or codes; with codes it is a multiple of
// GROUP, and what pads a row of codes is 0.
//   BFLOAT16_CODES: bfloat16
//   INT16_CODES: int16, and scales [num_rows]; value = code * scale
//   INT8_CODES:  int8, and scales, sums and offsets [num_rows][stride / GROUP], half_offsets twice as many;
//                value = code * scale
typedef struct {
    long num_rows, stride;
    InputFormat format;
    float *values;
    void *codes;
    float *scales;
    float *sums;       // of a group: the sum of its values as the codes say
    int32_t *offsets;  // of a group: the sum of its codes times -128
    int32_t *half_offsets;  // of half a group: the sum of its codes times -HALF_OFFSET
} Rows;
#define HALF_OFFSET 32

// Whether a group has a minimum beside its scale.
INLINE bool has_minimum(long format) { return format == INT4 || format == Q5_1; }

// Whether it has a zero, the code of weight 0, beside a float32 scale.
INLINE bool has_zero(long format) { return format == INT4_G32 || format == INT4_G128; }

// Inputs that share a scale and a zero.
INLINE long inputs_of_zero(long format) { return format == INT4_G128 ? 128 : GROUP; }

// Whether codes are in E2M1.
INLINE bool has_fp4(long format) { return format == MXFP4 || format == NVFP4; }

// Whether a byte has two codes.
INLINE bool has_nibbles(long format) { return format == INT4 || has_fp4(format) || has_zero(format); }

// Whether BLOCK_INPUTS codes of a row share a float32 scale.
INLINE bool has_block_scales(long format) { return format == FP8 || format == INT8_A32; }

INLINE InputFormat input_format(const Matrix *matrix) {
    if (matrix->format == BFLOAT16_A16) return BFLOAT16_CODES;
    if (matrix->format <= BFLOAT16 || has_block_scales(matrix->format)) return FLOATS;
    return matrix->format == INT8 ? INT16_CODES : INT8_CODES;
}

// Float32 scales that a column of a panel has.
INLINE long num_blocks_of(const Matrix *matrix) { return ceil_div(matrix->num_inputs, BLOCK_INPUTS); }

INLINE long panels_of(const Matrix *matrix) { return ceil_div(matrix->num_outputs, PANEL_COLUMNS); }

// Outputs and panels of a matrix and its rest.
INLINE long all_outputs(const Matrix *matrix) {
    long num_outputs = 0;
    for (; matrix; matrix = matrix->rest) num_outputs += matrix->num_outputs;
    return num_outputs;
}
INLINE long all_panels(const Matrix *matrix) {
    long num_panels = 0;
    for (; matrix; matrix = matrix->rest) num_panels += panels_of(matrix);
    return num_panels;
}

// Memory that is read soon, fetched while a product goes on. A panel is read in steps, once for each tile of rows. With
// one tile the product waits for memory: it fetches AHEAD in the panel, and at the end the beginning of the next one.
// With several tiles, of which only the first one waits, each fetches its part of the next panel.
#define AHEAD 6144l
typedef struct {
    const char *here, *there;  // of step 0, before the step `turn` and from there on
    long turn;
    long step_bytes;
} Fetch;

INLINE Fetch fetch_panel(const void *panel, const void *next, long num_steps, long step_bytes, long tile,
                         long num_tiles) {
    if (num_tiles == 1) {
        long turn = most(0, num_steps - ceil_div(AHEAD, step_bytes));
        return (Fetch){(const char *)panel + (num_steps - turn) * step_bytes, (const char *)next - turn * step_bytes,
                       turn, step_bytes};
    }
    long bytes = round_up(ceil_div(step_bytes, num_tiles), 64);
    return (Fetch){NULL, (const char *)next + tile * num_steps * bytes, 0, bytes};
}

INLINE void fetch_lines(const Fetch *fetch, long step) {
    const char *line = (step < fetch->turn ? fetch->here : fetch->there) + step * fetch->step_bytes;
    const char *end = line + fetch->step_bytes;
#pragma GCC unroll 1
    for (; line < end; line += 64) _mm_prefetch(line, _MM_HINT_T0);
}

// out[rows][columns of the panel] (=|+=) in[first_row ..] @ panel; `next` is the panel to fetch meanwhile.
// `out` points at the panel's first column in the first row.
typedef void Multiply(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows,
                      float *out, long out_stride, bool add);
Multiply multiply_float, multiply_bfloat16, multiply_int8, multiply_codes, multiply_k;

INLINE void multiply(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows,
                     float *out, long out_stride, bool add) {
    switch (input_format(matrix)) {
        case FLOATS: multiply_float(matrix, panel, next, in, first_row, num_rows, out, out_stride, add); break;
        case BFLOAT16_CODES: multiply_bfloat16(matrix, panel, next, in, first_row, num_rows, out, out_stride, add); break;
        case INT16_CODES: multiply_int8(matrix, panel, next, in, first_row, num_rows, out, out_stride, add); break;
        case INT8_CODES:
            (is_k_format(matrix->format) ? multiply_k : multiply_codes)(matrix, panel, next, in, first_row, num_rows,
                                                                        out, out_stride, add);
            break;
    }
}

// Add the bias of a panel to the rows of `out`, if the matrix has one.
INLINE void add_bias(const Matrix *matrix, long panel, long num_rows, float *out, long out_stride) {
    if (!matrix->bias) return;
    long first = panel * PANEL_COLUMNS, num_columns = least(PANEL_COLUMNS, matrix->num_outputs - first);
    for (long i = 0; i < num_rows; i++)
        for (long j = 0; j < num_columns; j++) out[i * out_stride + j] += matrix->bias[first + j];
}

// out[num_inputs] = a row of the matrix.
void read_row(const Matrix *matrix, long row, float *out);

// Fill the codes of rows [begin, end) from values[][num_values], rows of `value_stride`. Does nothing for FLOATS.
void quantize_rows(const Rows *rows, long num_values, const float *values, long value_stride, long begin, long end);

// Copy a row to a row of the same format and stride elsewhere: its codes, or its values if it has none.
void copy_row(const Rows *in, long row, const Rows *out, long place);

#endif
