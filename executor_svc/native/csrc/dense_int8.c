// Products of int16 rows with int8 matrices.
//
// A row has one scale, a weight its group's, of GROUP inputs. Products are summed exactly in int32 within a group
// (GROUP * 127 * 32767 < 2 ** 31), in float32 over groups.
#include <string.h>

#include "dense.h"
#include "tile.h"

// Bytes of a panel that a group has.
#define GROUP_BYTES (GROUP * PANEL_COLUMNS)

// c[rows][columns] = (add ? c : 0) + rows of codes @ panel. Pairs of inputs lie together, so that one instruction
// multiplies both. `rows` is a constant at each call, so that all sums stay in registers.
INLINE void tile_product_int8(const int rows, long num_groups, const Rows *in, long row, const int8_t *panel,
                              const uint16_t *scales, const Fetch *fetch, float *c, long c_stride, long columns,
                              bool add) {
    const int16_t *codes = (const int16_t *)in->codes + row * in->stride;
    vfloat total[CODE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < PANEL_VECTORS; j++) total[i][j] = vf_zero();
    for (long group = 0; group < num_groups; group++) {
        fetch_lines(fetch, group);
        vint sum[CODE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
            for (int j = 0; j < PANEL_VECTORS; j++) sum[i][j] = vi_zero();
#pragma GCC unroll 4
        for (int pair = 0; pair < GROUP / 2; pair++) {
            vint column[PANEL_VECTORS];
#pragma GCC unroll 3
            for (int j = 0; j < PANEL_VECTORS; j++, panel += 2 * LANES) column[j] = vi_load_bytes(panel);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) {
                int32_t two;
                memcpy(&two, codes + i * in->stride + group * GROUP + 2 * pair, sizeof two);
                vint value = vi_all(two);
#pragma GCC unroll 3
                for (int j = 0; j < PANEL_VECTORS; j++) sum[i][j] = vi_dot_pairs(sum[i][j], value, column[j]);
            }
        }
#pragma GCC unroll 3
        for (int j = 0; j < PANEL_VECTORS; j++, scales += LANES) {
            vfloat scale = vf_load_half(scales);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++)
                total[i][j] = vf_accumulate(total[i][j], vi_to_float(sum[i][j]), scale);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < PANEL_VECTORS; j++) {
            long count = columns - j * LANES;
            if (count <= 0) continue;
            float *p = c + i * c_stride + j * LANES;
            vfloat before = add ? vf_load_part(p, count) : vf_zero();
            vf_store_part(p, vf_fma(total[i][j], vf_all(in->scales[row + i]), before), count);
        }
}

void multiply_int8(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows,
                   float *out, long out_stride, bool add) {
    long num_groups = ceil_div(matrix->num_inputs, GROUP), panel_bytes = num_groups * GROUP_BYTES;
    const int8_t *columns = (const int8_t *)matrix->panels + panel * panel_bytes;
    const int8_t *upcoming = (const int8_t *)matrix->panels + next * panel_bytes;
    const uint16_t *scales = (const uint16_t *)matrix->scales + panel * num_groups * PANEL_COLUMNS;
    long num_columns = least(PANEL_COLUMNS, matrix->num_outputs - panel * PANEL_COLUMNS);
    long num_tiles = ceil_div(num_rows, CODE_ROWS);
    for (long tile = 0; tile < num_tiles; tile++) {
        long row = tile * CODE_ROWS;
        Fetch fetch = fetch_panel(columns, upcoming, num_groups, GROUP_BYTES, tile, num_tiles);
        switch (least(CODE_ROWS, num_rows - row)) {
#define ROWS(count)                                                                                           \
    case count:                                                                                               \
        tile_product_int8(count, num_groups, in, first_row + row, columns, scales, &fetch,                    \
                          out + row * out_stride, out_stride, num_columns, add);                              \
        break;
            CODE_CASES(ROWS)
#undef ROWS
        }
    }
    add_bias(matrix, panel, num_rows, out, out_stride);
}
