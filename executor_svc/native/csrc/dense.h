// What the dense files share: weight matrices in panels, and products of rows with them.
#ifndef OCTAVO_DENSE_H
#define OCTAVO_DENSE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "vec.h"

#define PANEL_VECTORS 3
#define PANEL_COLUMNS (PANEL_VECTORS * LANES)
#define GROUP 32  // inputs that share a scale in int8

// The weight of a linear map, [num_outputs][num_inputs], cut into panels of PANEL_COLUMNS outputs.
//   float32: [panel][num_inputs][PANEL_COLUMNS] float
//   int8:    [panel][padded_inputs / 2][PANEL_COLUMNS][2] int8, padded_inputs a multiple of GROUP,
//            and scales [panel][padded_inputs / GROUP][PANEL_COLUMNS] float: weight = int8 * scale
// What pads a panel or the inputs is 0.
typedef struct {
    long num_outputs, num_inputs;
    const void *panels;
    const float *scales;  // NULL: float32
    const float *bias;    // [num_outputs], or NULL
} Matrix;

// The left side of a product, [num_rows][stride].
//   float32: values
//   int8:    codes and scales[num_rows]; value = code * scale. `stride` counts codes and is a multiple of GROUP;
//            what pads a row is 0.
typedef struct {
    long num_rows, stride;
    float *values;
    int16_t *codes;
    float *scales;
} Rows;

// out[rows][columns of the panel] (=|+=) in[first_row ..] @ panel; `next` is the panel to fetch meanwhile.
// `out` points at the panel's first column in the first row.
void multiply_float(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows,
                    float *out, long out_stride, bool add);
void multiply_int8(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows,
                   float *out, long out_stride, bool add);

INLINE void multiply(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows,
                     float *out, long out_stride, bool add) {
    if (matrix->scales)
        multiply_int8(matrix, panel, next, in, first_row, num_rows, out, out_stride, add);
    else
        multiply_float(matrix, panel, next, in, first_row, num_rows, out, out_stride, add);
}

// out[num_inputs] = a row of the matrix.
void read_row_float(const Matrix *matrix, long row, float *out);
void read_row_int8(const Matrix *matrix, long row, float *out);

INLINE void read_row(const Matrix *matrix, long row, float *out) {
    if (matrix->scales)
        read_row_int8(matrix, row, out);
    else
        read_row_float(matrix, row, out);
}

// Fill codes and scales from values[num_values], for the rows [begin, end); `stride` of `values` is `value_stride`.
void quantize_rows(const Rows *rows, long num_values, const float *values, long value_stride, long begin, long end);

#endif
