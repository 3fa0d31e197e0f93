// Products of int8 rows with matrices of codes of 4 to 8 bits.
//
// Both sides have a scale for each group of GROUP inputs. Products are summed exactly in int32 within a group, in
// float32 over groups. The instruction multiplies uint8 weights with int8 inputs; what that adds to a sum follows from
// the inputs alone: INT8_A8 starts a sum at -128 times the sum of the codes, and the others add a minimum times the
// sum of the values.
#include <string.h>

#include "dense.h"
#include "tile.h"

// Bytes of a panel that a group has.
#define GROUP_BYTES(format) (GROUP * PANEL_COLUMNS / ((format) == INT4 ? 2 : 1))

// The group's sums of `rows` rows; codes points at the group in the first row.
INLINE void sum_group(const long format, const int rows, const int8_t *codes, long code_stride, const uint8_t *panel,
                      vint sum[CODE_ROWS][PANEL_VECTORS]) {
    const int inputs = format == INT4 ? 8 : 4;  // of a step
#pragma GCC unroll 8
    for (int step = 0; step < GROUP / inputs; step++) {
        vint low[PANEL_VECTORS], high[PANEL_VECTORS];
#pragma GCC unroll 3
        for (int j = 0; j < PANEL_VECTORS; j++, panel += 4 * LANES) {
            low[j] = vi_load(panel);
            if (format == INT4) vi_split_nibbles(low[j], &low[j], &high[j]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            int32_t four[2];
            memcpy(four, codes + i * code_stride + step * inputs, (size_t)inputs);
            vint value = vi_all(four[0]);
#pragma GCC unroll 3
            for (int j = 0; j < PANEL_VECTORS; j++)
                sum[i][j] = has_minimum(format) ? vi_dot_small_quads(sum[i][j], low[j], value)
                                                : vi_dot_quads(sum[i][j], low[j], value);
            if (format != INT4) continue;
            value = vi_all(four[1]);
#pragma GCC unroll 3
            for (int j = 0; j < PANEL_VECTORS; j++) sum[i][j] = vi_dot_small_quads(sum[i][j], high[j], value);
        }
    }
}

// c[rows][columns] = (add ? c : 0) + rows of codes @ panel. `format` and `rows` are constants at each call, so
// that all sums stay in registers.
INLINE void tile_product_codes(const long format, const int rows, long num_groups, const Rows *in, long row,
                               const uint8_t *panel, const uint16_t *scales, const Fetch *fetch, float *c, long c_stride,
                               long columns, bool add) {
    const int8_t *codes = (const int8_t *)in->codes + row * in->stride;
    long first = row * num_groups;
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
            for (int j = 0; j < PANEL_VECTORS; j++)
                sum[i][j] = has_minimum(format) ? vi_zero() : vi_all(in->offsets[first + i * num_groups + group]);
        sum_group(format, rows, codes + group * GROUP, in->stride, panel + group * GROUP_BYTES(format), sum);
#pragma GCC unroll 3
        for (int j = 0; j < PANEL_VECTORS; j++) {
            vfloat scale = vf_load_half(scales + j * LANES);
            vfloat minimum = has_minimum(format) ? vf_load_half(scales + PANEL_COLUMNS + j * LANES) : vf_zero();
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) {
                long index = first + i * num_groups + group;
                vfloat exact = vf_mul(vi_to_float(sum[i][j]), vf_all(in->scales[index]));
                total[i][j] = vf_accumulate(total[i][j], exact, scale);
                if (has_minimum(format)) total[i][j] = vf_accumulate(total[i][j], minimum, vf_all(in->sums[index]));
            }
        }
        scales += (has_minimum(format) ? 2 : 1) * PANEL_COLUMNS;
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < PANEL_VECTORS; j++) {
            long count = columns - j * LANES;
            if (count <= 0) continue;
            float *p = c + i * c_stride + j * LANES;
            vf_store_part(p, add ? vf_add(vf_load_part(p, count), total[i][j]) : total[i][j], count);
        }
}

INLINE void multiply_format(const long format, const Matrix *matrix, long panel, long next, const Rows *in,
                            long first_row, long num_rows, float *out, long out_stride, bool add) {
    long num_groups = ceil_div(matrix->num_inputs, GROUP);
    long panel_bytes = num_groups * GROUP_BYTES(format), num_tiles = ceil_div(num_rows, CODE_ROWS);
    const uint8_t *columns = (const uint8_t *)matrix->panels + panel * panel_bytes;
    const uint16_t *scales = (const uint16_t *)matrix->scales + panel * num_groups * PANEL_COLUMNS * (has_minimum(format) ? 2 : 1);
    const uint8_t *upcoming = (const uint8_t *)matrix->panels + next * panel_bytes;
    long num_columns = least(PANEL_COLUMNS, matrix->num_outputs - panel * PANEL_COLUMNS);
    for (long tile = 0; tile < num_tiles; tile++) {
        long row = tile * CODE_ROWS;
        Fetch fetch = fetch_panel(columns, upcoming, num_groups, GROUP_BYTES(format), tile, num_tiles);
        switch (least(CODE_ROWS, num_rows - row)) {
#define ROWS(count)                                                                                         \
    case count:                                                                                             \
        tile_product_codes(format, count, num_groups, in, first_row + row, columns, scales, &fetch,         \
                           out + row * out_stride, out_stride, num_columns, add);                           \
        break;
            CODE_CASES(ROWS)
#undef ROWS
        }
    }
    add_bias(matrix, panel, num_rows, out, out_stride);
}

void multiply_codes(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows,
                    float *out, long out_stride, bool add) {
#define FORMAT(format) \
    case format: multiply_format(format, matrix, panel, next, in, first_row, num_rows, out, out_stride, add); break;
    switch (matrix->format) { FORMAT(INT4) FORMAT(Q5_1) FORMAT(INT8_A8) }
#undef FORMAT
}
