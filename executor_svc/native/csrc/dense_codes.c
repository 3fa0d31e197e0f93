// Products of int8 rows with matrices of codes of 4 to 8 bits.
//
// Both sides have a scale for each group of GROUP inputs; weights in NVFP4 have one for each half of it. Products are
// summed exactly in int32 over the inputs that share scales, in float32 over scales. The instruction multiplies uint8 weights
// with int8 inputs; what that adds to a sum follows from the inputs alone: INT8_A8 starts a sum at -128 times the sum of
// the codes (unless SHIFT_IS_OF_SUMS is false), MXFP4 and NVFP4 at -16 times; INT4_G32 and INT4_G128 subtract their zero
// times that sum, which is exact in float32, and the others add a minimum times the sum of the values.
#include <string.h>

#include "dense.h"
#include "tile.h"

// Bytes of a panel that a group has.
#define GROUP_BYTES(format) (GROUP * PANEL_COLUMNS / (has_nibbles(format) ? 2 : 1))

// Bytes of scales, and minima or zeros, that it has, or several groups together.
#define SCALE_BYTES(format) \
    (PANEL_COLUMNS * ((format) == MXFP4 ? 1 : has_zero(format) ? 5 : has_minimum(format) ? 4 : 2))

// Bytes of factors that a panel has behind them.
#define FACTOR_BYTES(format) ((format) == NVFP4 ? PANEL_COLUMNS * (long)sizeof(float) : 0)

// Parts of a group that have a scale each.
#define PARTS(format) ((format) == NVFP4 ? 2 : 1)

// Twice what the codes of E2M1 stand for, plus 16.
static const uint8_t SHIFTED_FP4[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

// What the sum of a part of a group starts with.
INLINE int32_t first_of_sum(const long format, const Rows *in, long group, const int part) {
    if (format == INT8_A8) return SHIFT_IS_OF_SUMS ? in->offsets[group] : 0;
    if (format == NVFP4) return in->half_offsets[2 * group + part] / (HALF_OFFSET / 16);
    return format == MXFP4 ? in->offsets[group] >> 3 : 0;
}

// LANES scales; those of MXFP4 are 2 ** (scale - 128), which is denormal for 0 and 1, of NVFP4 divided by E4M3_UNIT.
INLINE vfloat load_scales(const long format, const uint8_t *scales, const int j) {
    if (has_zero(format)) return vf_load((const float *)(const void *)scales + j * LANES);
    if (format == NVFP4) return vf_load_e4m3_codes(scales + j * LANES);
    if (format != MXFP4) return vf_load_half((const uint16_t *)scales + j * LANES);
    vint scale = vi_load_narrow(scales + j * LANES);
    vint normal = vi_shift_left(vi_add(scale, vi_all(-1)), 23), denormal = vi_shift_left(vi_add(scale, vi_all(1)), 21);
    return vi_as_float(vi_max(normal, denormal));
}

// LANES zeros.
INLINE vfloat load_zeros(const uint8_t *scales, const int j) {
    return vi_to_float(vi_load_narrow(scales + PANEL_COLUMNS * sizeof(float) + j * LANES));
}

// The sums of `rows` rows over a part of a group, at which codes points in the first row.
INLINE void sum_group(const long format, const int rows, const int8_t *codes, long code_stride, const uint8_t *panel,
                      vint sum[CODE_ROWS][PANEL_VECTORS]) {
    const int inputs = has_nibbles(format) ? 8 : 4;  // of a step
#pragma GCC unroll 8
    for (int step = 0; step < GROUP / PARTS(format) / inputs; step++) {
        vint low[PANEL_VECTORS], high[PANEL_VECTORS];
#pragma GCC unroll 3
        for (int j = 0; j < PANEL_VECTORS; j++, panel += 4 * LANES) {
            low[j] = vi_load(panel);
            if (has_nibbles(format)) vi_split_nibbles(low[j], &low[j], &high[j]);
            if (has_fp4(format)) low[j] = vi_look_up(SHIFTED_FP4, low[j]), high[j] = vi_look_up(SHIFTED_FP4, high[j]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            int32_t four[2];
            memcpy(four, codes + i * code_stride + step * inputs, (size_t)inputs);
            vint value = vi_all(four[0]), second = has_nibbles(format) ? vi_all(four[1]) : vi_zero();
#pragma GCC unroll 3
            for (int j = 0; j < PANEL_VECTORS; j++)
                sum[i][j] = format == INT8_A8 ? vi_dot_shifted_quads(sum[i][j], low[j], value)
                            : has_nibbles(format)
                                ? vi_dot_two_small_quads(sum[i][j], low[j], value, high[j], second)
                                : vi_dot_small_quads(sum[i][j], low[j], value);
        }
    }
}

// c[rows][columns] = (add ? c : 0) + rows of codes @ panel. `format` and `rows` are constants at each call, so
// that all sums stay in registers.
INLINE void tile_product_codes(const long format, const int rows, long num_groups, const Rows *in, long row,
                               const uint8_t *panel, const uint8_t *scales, const Fetch *fetch, float *c, long c_stride,
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
#pragma GCC unroll 2
        for (int part = 0; part < PARTS(format); part++) {
            vint sum[CODE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
                for (int j = 0; j < PANEL_VECTORS; j++)
                    sum[i][j] = vi_all(first_of_sum(format, in, first + i * num_groups + group, part));
            sum_group(format, rows, codes + group * GROUP + part * (GROUP / 2), in->stride,
                      panel + group * GROUP_BYTES(format) + part * (GROUP_BYTES(format) / 2), sum);
#pragma GCC unroll 3
            for (int j = 0; j < PANEL_VECTORS; j++) {
                vfloat scale = load_scales(format, scales + part * PANEL_COLUMNS, j);
                vfloat minimum = has_minimum(format) ? load_scales(format, scales, PANEL_VECTORS + j) : vf_zero();
                vfloat zero = has_zero(format) ? load_zeros(scales, j) : vf_zero();
#pragma GCC unroll 4
                for (int i = 0; i < rows; i++) {
                    long index = first + i * num_groups + group;
                    vfloat exact = vi_to_float(sum[i][j]);
                    if (has_zero(format)) exact = vf_accumulate(exact, zero, vf_all((float)in->offsets[index] * (1.0f / 128)));
                    exact = vf_mul(exact, vf_all(in->scales[index]));
                    total[i][j] = vf_accumulate(total[i][j], exact, scale);
                    if (has_minimum(format)) total[i][j] = vf_accumulate(total[i][j], minimum, vf_all(in->sums[index]));
                }
            }
        }
        if (format != INT4_G128 || group % (128 / GROUP) == 128 / GROUP - 1) scales += SCALE_BYTES(format);
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < PANEL_VECTORS; j++) {
            long count = columns - j * LANES;
            if (count <= 0) continue;
            if (format == NVFP4) total[i][j] = vf_mul(total[i][j], vf_load((const float *)(const void *)scales + j * LANES));
            float *p = c + i * c_stride + j * LANES;
            vf_store_part(p, add ? vf_add(vf_load_part(p, count), total[i][j]) : total[i][j], count);
        }
}

INLINE void multiply_format(const long format, const Matrix *matrix, long panel, long next, const Rows *in,
                            long first_row, long num_rows, float *out, long out_stride, bool add) {
    long num_groups = ceil_div(matrix->num_inputs, GROUP);
    long panel_bytes = num_groups * GROUP_BYTES(format), num_tiles = ceil_div(num_rows, CODE_ROWS);
    const uint8_t *columns = (const uint8_t *)matrix->panels + panel * panel_bytes;
    long num_scales = has_zero(format) ? ceil_div(matrix->num_inputs, inputs_of_zero(format)) : num_groups;
    const uint8_t *scales = (const uint8_t *)matrix->scales + panel * (num_scales * SCALE_BYTES(format) + FACTOR_BYTES(format));
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
    switch (matrix->format) { FORMAT(INT4) FORMAT(Q5_1) FORMAT(INT8_A8) FORMAT(MXFP4) FORMAT(INT4_G32) FORMAT(INT4_G128)
        FORMAT(NVFP4) }
#undef FORMAT
}
