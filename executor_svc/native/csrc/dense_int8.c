// int8 matrices: quantizing, reading rows back, and the product of int16 rows with one panel.
//
// A weight is int8 times the scale of its group of GROUP inputs; a row of inputs is int16 times its own scale.
// Products are summed exactly in int32 within a group (GROUP * 127 * 32767 < 2 ** 31), in float32 over groups.
#include <math.h>
#include <string.h>

#include "dense.h"
#include "tile.h"

#define LARGEST_WEIGHT 127
#define LARGEST_INPUT 32767

// Pairs of inputs of one tile between two fetches of the panel that comes next: they have a whole number of cache
// lines, so that no more than the panel is fetched. What lies behind it is another thread's.
#define FETCH_PAIRS 4

// Quantize rows [first, first + num_rows) of a matrix from `weight` [num_rows][num_inputs].
// Parts may come in any order; the padding must be 0 already.
void octavo_pack_int8(const Matrix *matrix, long first, long num_rows, const float *weight, int num_threads) {
    long num_inputs = matrix->num_inputs, padded = round_up(num_inputs, GROUP);
    int8_t *panels = (int8_t *)matrix->panels;
    float *scales = (float *)matrix->scales;
#pragma omp parallel for num_threads(num_threads)
    for (long row = 0; row < num_rows; row++) {
        long panel = (first + row) / PANEL_COLUMNS, column = (first + row) % PANEL_COLUMNS;
        for (long k = 0; k < num_inputs; k += GROUP) {
            const float *group = weight + row * num_inputs + k;
            long count = least(GROUP, num_inputs - k);
            float largest = 0;
            for (long i = 0; i < count; i++) largest = fmaxf(largest, fabsf(group[i]));
            float scale = largest / LARGEST_WEIGHT, inverse = largest > 0 ? LARGEST_WEIGHT / largest : 0;
            scales[(panel * padded + k) / GROUP * PANEL_COLUMNS + column] = scale;
            for (long i = 0; i < count; i++)
                panels[((panel * padded + k + i) / 2 * PANEL_COLUMNS + column) * 2 + i % 2] =
                    (int8_t)lrintf(group[i] * inverse);
        }
    }
}

// out[num_inputs] = a row of the matrix.
void read_row_int8(const Matrix *matrix, long row, float *out) {
    long num_inputs = matrix->num_inputs, padded = round_up(num_inputs, GROUP);
    long panel = row / PANEL_COLUMNS, column = row % PANEL_COLUMNS;
    const int8_t *codes = (const int8_t *)matrix->panels + (panel * padded / 2 * PANEL_COLUMNS + column) * 2;
    const float *scales = matrix->scales + panel * padded / GROUP * PANEL_COLUMNS + column;
    for (long k = 0; k < num_inputs; k++)
        out[k] = codes[k / 2 * PANEL_COLUMNS * 2 + k % 2] * scales[k / GROUP * PANEL_COLUMNS];
}

void quantize_rows(const Rows *rows, long num_values, const float *values, long value_stride, long begin, long end) {
    for (long row = begin; row < end; row++) {
        const float *from = values + row * value_stride;
        int16_t *codes = rows->codes + row * rows->stride;
        vfloat most = vf_zero();
        for (long k = 0; k < num_values; k += LANES)
            most = vf_max(most, vf_abs(vf_load_part(from + k, num_values - k)));
        float largest = vf_largest(most);
        rows->scales[row] = largest / LARGEST_INPUT;
        vfloat inverse = vf_all(largest > 0 ? LARGEST_INPUT / largest : 0);
        for (long k = 0; k < num_values; k += LANES)
            vi_store_int16_part(codes + k, vf_to_int(vf_mul(inverse, vf_load_part(from + k, num_values - k))),
                                num_values - k);
        memset(codes + num_values, 0, (size_t)(rows->stride - num_values) * sizeof *codes);
    }
}

// c[rows][columns] = (add ? c : 0) + code rows @ panel. Pairs of inputs lie together, so that one instruction
// multiplies both. `rows` is a constant at each call; the float sums live in memory, they are needed once a group.
INLINE void tile_product_int8(const int rows, long num_groups, const int16_t *codes, long code_stride,
                              const float *code_scales, const int8_t *panel, const float *scales, const char *fetch,
                              int fetch_lines, float *c, long c_stride, long columns, bool add) {
    vfloat total[TILE_ROWS][PANEL_VECTORS];
    memset(total, 0, sizeof total);
    for (long group = 0; group < num_groups; group++) {
        vint sum[TILE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
            for (int j = 0; j < PANEL_VECTORS; j++) sum[i][j] = vi_zero();
#pragma GCC unroll 4
        for (int pair = 0; pair < GROUP / 2; pair++) {
            if (pair % FETCH_PAIRS == 0)
#pragma GCC unroll 1
                for (int line = 0; line < fetch_lines; line++, fetch += 64) _mm_prefetch(fetch, _MM_HINT_T1);
            vint column[PANEL_VECTORS];
#pragma GCC unroll 3
            for (int j = 0; j < PANEL_VECTORS; j++, panel += 2 * LANES) column[j] = vi_load_bytes(panel);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                int32_t two;
                memcpy(&two, codes + i * code_stride + group * GROUP + 2 * pair, sizeof two);
                vint value = vi_all(two);
#pragma GCC unroll 3
                for (int j = 0; j < PANEL_VECTORS; j++) sum[i][j] = vi_dot_pairs(sum[i][j], value, column[j]);
            }
        }
#pragma GCC unroll 3
        for (int j = 0; j < PANEL_VECTORS; j++, scales += LANES)
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++)
                total[i][j] = vf_fma(vi_to_float(sum[i][j]), vf_load(scales), total[i][j]);
        // The compiler must not hold the totals in registers: the sums of the next group need them all.
        __asm__ volatile("" : : "r"(total) : "memory");
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < PANEL_VECTORS; j++) {
            long count = columns - j * LANES;
            if (count <= 0) continue;
            float *p = c + i * c_stride + j * LANES;
            vfloat before = add ? vf_load_part(p, count) : vf_zero();
            vf_store_part(p, vf_fma(total[i][j], vf_all(code_scales[i]), before), count);
        }
}

// All rows times a panel; see tile_product_int8.
static void multiply_tiles(long num_groups, const int16_t *codes, long code_stride, const float *code_scales,
                           long num_rows, const int8_t *panel, const float *scales, const char *fetch, int fetch_lines,
                           float *out, long out_stride, long num_columns, bool add) {
    for (long row = 0; row < num_rows; row += TILE_ROWS) {
#define ROWS(count)                                                                                           \
    case count:                                                                                               \
        tile_product_int8(count, num_groups, codes + row * code_stride, code_stride, code_scales + row,       \
                          panel, scales, fetch, fetch_lines, out + row * out_stride, out_stride, num_columns, \
                          add);                                                                               \
        break;
        switch (least(TILE_ROWS, num_rows - row)) {
            TILE_CASES(ROWS)
        }
#undef ROWS
        fetch += num_groups * (GROUP / 2 / FETCH_PAIRS) * fetch_lines * 64;
    }
}

void multiply_int8(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows,
                   float *out, long out_stride, bool add) {
    long padded = round_up(matrix->num_inputs, GROUP), num_groups = padded / GROUP;
    const int8_t *columns = (const int8_t *)matrix->panels + panel * padded * PANEL_COLUMNS;
    const char *fetch = (const char *)matrix->panels + next * padded * PANEL_COLUMNS;
    const float *scales = matrix->scales + panel * num_groups * PANEL_COLUMNS;
    long num_columns = least(PANEL_COLUMNS, matrix->num_outputs - panel * PANEL_COLUMNS);
    const int16_t *codes = in->codes + first_row * in->stride;
    // The panel has PANEL_COLUMNS * 2 bytes for each of the padded / 2 pairs of each tile.
    int fetch_lines = (int)ceil_div(PANEL_COLUMNS * 2 * FETCH_PAIRS / 64, ceil_div(num_rows, TILE_ROWS));
    multiply_tiles(num_groups, codes, in->stride, in->scales + first_row, num_rows, columns, scales, fetch, fetch_lines,
                   out, out_stride, num_columns, add);
    if (!matrix->bias) return;
    for (long i = 0; i < num_rows; i++)
        for (long j = 0; j < num_columns; j++) out[i * out_stride + j] += matrix->bias[panel * PANEL_COLUMNS + j];
}
