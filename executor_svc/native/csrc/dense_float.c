// float32 matrices: packing, reading rows back, and the product of rows with one panel.
#include <string.h>

#include "dense.h"
#include "tile.h"

// Inputs of a panel that are multiplied at once: a part of PANEL_COLUMNS * DEPTH floats stays in L1 for all
// rows, and sums of at most DEPTH products keep rounding errors small.
#define DEPTH 128

// Write rows [first, first + num_rows) of a matrix from `weight` [num_rows][num_inputs].
// Parts may come in any order; the padding must be 0 already.
void octavo_pack_float(const Matrix *matrix, long first, long num_rows, const float *weight, int num_threads) {
    long num_inputs = matrix->num_inputs;
    float *panels = (float *)matrix->panels;
    long begin = first / PANEL_COLUMNS, end = ceil_div(first + num_rows, PANEL_COLUMNS);
#pragma omp parallel for num_threads(num_threads)
    for (long panel = begin; panel < end; panel++) {
        float *columns = panels + panel * num_inputs * PANEL_COLUMNS;
        for (long k = 0; k < num_inputs; k++)
            for (long j = 0; j < PANEL_COLUMNS; j++) {
                long row = panel * PANEL_COLUMNS + j - first;
                if (row >= 0 && row < num_rows) columns[k * PANEL_COLUMNS + j] = weight[row * num_inputs + k];
            }
    }
}

// out[num_inputs] = a row of the matrix.
void read_row_float(const Matrix *matrix, long row, float *out) {
    long num_inputs = matrix->num_inputs;
    const float *column =
        (const float *)matrix->panels + row / PANEL_COLUMNS * num_inputs * PANEL_COLUMNS + row % PANEL_COLUMNS;
    for (long k = 0; k < num_inputs; k++) out[k] = column[k * PANEL_COLUMNS];
}

// Rows [0, num_rows) times `depth` inputs of a panel; see tile_product.
static void multiply_depth(long depth, const float *in, long in_stride, long num_rows, const float *columns,
                           const char *fetch, int fetch_lines, float *out, long out_stride, long num_columns,
                           bool add) {
    for (long row = 0; row < num_rows; row += TILE_ROWS) {
        switch (least(TILE_ROWS, num_rows - row)) {
#define ROWS(count)                                                                                                \
    case count:                                                                                                    \
        tile_product(count, PANEL_VECTORS, depth, in + row * in_stride, in_stride, columns, fetch, fetch_lines,    \
                     out + row * out_stride, out_stride, num_columns, add);                                        \
        break;
            TILE_CASES(ROWS)
#undef ROWS
        }
        fetch += depth / FETCH_STEPS * fetch_lines * 64;
    }
}

// Cache lines of the next panel to fetch in FETCH_STEPS steps, so that all of it is there after all tiles.
INLINE int lines_to_fetch(long num_tiles) {
    int lines = PANEL_COLUMNS * (int)sizeof(float) * FETCH_STEPS / 64;
    return (int)ceil_div(lines, num_tiles);
}

void multiply_float(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows,
                    float *out, long out_stride, bool add) {
    long num_inputs = matrix->num_inputs, size = num_inputs * PANEL_COLUMNS;
    const float *columns = (const float *)matrix->panels + panel * size;
    const float *upcoming = (const float *)matrix->panels + next * size;
    long num_columns = least(PANEL_COLUMNS, matrix->num_outputs - panel * PANEL_COLUMNS);
    const float *bias = matrix->bias ? matrix->bias + panel * PANEL_COLUMNS : NULL;
    if (bias) {
        for (long i = 0; i < num_rows; i++)
            for (long j = 0; j < num_columns; j++) {
                float *p = out + i * out_stride + j;
                *p = add ? *p + bias[j] : bias[j];
            }
        add = true;
    }
    int fetch_lines = lines_to_fetch(ceil_div(num_rows, TILE_ROWS));
    for (long k = 0; k < num_inputs; k += DEPTH, add = true) {
        long depth = least(DEPTH, num_inputs - k);
        const float *from = in->values + first_row * in->stride + k;
        const char *fetch = (const char *)(upcoming + k * PANEL_COLUMNS);
        multiply_depth(depth, from, in->stride, num_rows, columns + k * PANEL_COLUMNS, fetch, fetch_lines, out,
                       out_stride, num_columns, add);
    }
}
