// Products of float32 rows with matrices in float32, bfloat16, FP8 or INT8_A32: the same sums in the same order.
//
// Codes are widened in registers; a sum of BLOCK_INPUTS products of codes is then multiplied by their scale.
#include "dense.h"
#include "tile.h"

// Inputs of a panel that are multiplied at once: a part of PANEL_COLUMNS * DEPTH weights stays in L1 for all
// rows, and sums of at most DEPTH products keep rounding errors small. A multiple of STEP_INPUTS.
#define DEPTH 128
_Static_assert(DEPTH == BLOCK_INPUTS, "a sum has one scale");

// Bytes of one step of a panel.
#define STEP_BYTES(format) (STEP_INPUTS * PANEL_COLUMNS * WEIGHT_BYTES(format))

// Rows [0, num_rows) times `depth` inputs of a panel, from input k on: `part`, in `format`. `columns` is where the panel
// begins, which is `stored` in another format if codes were widened.
INLINE void multiply_depth(const long stored, const long format, long k, long depth, const Rows *in, long first_row,
                           long num_rows, const char *columns, const void *part, const float *scales,
                           const char *upcoming, long num_steps, float *out, long out_stride, long num_columns,
                           bool add) {
    long num_tiles = ceil_div(num_rows, TILE_ROWS);
    for (long tile = 0; tile < num_tiles; tile++) {
        long row = tile * TILE_ROWS;
        const float *from = in->values + (first_row + row) * in->stride + k;
        Fetch fetch = fetch_panel(columns, upcoming, num_steps, STEP_BYTES(stored), tile, num_tiles);
        switch (least(TILE_ROWS, num_rows - row)) {
#define ROWS(count)                                                                                              \
    case count:                                                                                                  \
        format_product(format, count, PANEL_VECTORS, depth, from, in->stride, part, scales, &fetch,              \
                       k / STEP_INPUTS, out + row * out_stride, out_stride, num_columns, add);                   \
        break;
            TILE_CASES(ROWS)
#undef ROWS
        }
    }
}

INLINE void multiply_format(const long format, const Matrix *matrix, long panel, long next, const Rows *in,
                            long first_row, long num_rows, float *out, long out_stride, bool add) {
    long num_inputs = matrix->num_inputs, stored = format == BFLOAT16 ? round_up(num_inputs, 2) : num_inputs;
    long panel_bytes = stored * PANEL_COLUMNS * WEIGHT_BYTES(format);
    const char *columns = (const char *)matrix->panels + panel * panel_bytes;
    const char *upcoming = (const char *)matrix->panels + next * panel_bytes;
    const float *scales = NULL;
    if (has_block_scales(format)) scales = (const float *)matrix->scales + panel * num_blocks_of(matrix) * PANEL_COLUMNS;
    long num_columns = least(PANEL_COLUMNS, matrix->num_outputs - panel * PANEL_COLUMNS);
    for (long k = 0; k < num_inputs; k += DEPTH, add = true) {
        long depth = least(DEPTH, num_inputs - k);
        const char *part = columns + k / STEP_INPUTS * STEP_BYTES(format);
#define PART(as, part)                                                                                              \
    multiply_depth(format, as, k, depth, in, first_row, num_rows, columns, part, scales, upcoming,                  \
                   num_inputs / STEP_INPUTS, out, out_stride, num_columns, add)
        if (has_block_scales(format) && num_rows > TILE_ROWS) {  // codes are widened once for all tiles: the same products
            float widened[DEPTH * PANEL_COLUMNS];
            for (long i = 0; i < depth * PANEL_COLUMNS; i += LANES)
                vf_store(widened + i, widen_codes(format, part + i));
            PART(FLOAT32, widened);
        } else {
            PART(format, part);
        }
#undef PART
        if (has_block_scales(format)) scales += PANEL_COLUMNS;
    }
}

void multiply_float(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows,
                    float *out, long out_stride, bool add) {
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
#define FORMAT(format) \
    case format: multiply_format(format, matrix, panel, next, in, first_row, num_rows, out, out_stride, add); break;
    switch (matrix->format) { FORMAT(FLOAT32) FORMAT(BFLOAT16) FORMAT(FP8) FORMAT(INT8_A32) }
#undef FORMAT
}
