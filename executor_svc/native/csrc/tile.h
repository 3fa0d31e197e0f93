// The product of the library in floats: a few rows times one panel of columns.
#ifndef OCTAVO_TILE_H
#define OCTAVO_TILE_H

#include <stdbool.h>

#include "dense.h"

// Rows for which sums fit into the registers beside three vectors of a panel.
// The cases of a switch over the rows of a tile: as a constant each, so that the compiler unrolls over them.
#if LANES == 16
#define TILE_ROWS 8
#define TILE_CASES(CASE) CASE(8) CASE(7) CASE(6) CASE(5) CASE(4) CASE(3) CASE(2) CASE(1)
#else
#define TILE_ROWS 4
#define TILE_CASES(CASE) CASE(4) CASE(3) CASE(2) CASE(1)
#endif

// The same for codes, with sums in int32 and in float32.
#if LANES == 16
#define CODE_ROWS 4
#define CODE_CASES(CASE) CASE(4) CASE(3) CASE(2) CASE(1)
#else
#define CODE_ROWS 2
#define CODE_CASES(CASE) CASE(2) CASE(1)
#endif

// Inputs of one step of a panel that is fetched meanwhile.
#define STEP_INPUTS 4

// Bytes of a weight, without its scale.
#define WEIGHT_BYTES(format) ((format) == FLOAT32 ? 4 : has_block_scales(format) ? 1 : 2)

// LANES codes as floats, which the scales of a matrix are for.
INLINE vfloat widen_codes(const long format, const void *codes) {
    return format == FP8 ? vf_load_e4m3_codes(codes) : vf_load_bytes(codes);
}

// The vectors of columns of input `k`, counted from `panel`, a pair of inputs or its begin.
INLINE void load_columns(const long format, const int vectors, const void *panel, int k, vfloat *columns) {
#pragma GCC unroll 3
    for (int j = 0; j < vectors; j++) {
        if (format == FLOAT32) {
            columns[j] = vf_load((const float *)panel + (k * vectors + j) * LANES);
        } else if (has_block_scales(format)) {
            columns[j] = widen_codes(format, (const uint8_t *)panel + (k * vectors + j) * LANES);
        } else {
            vint pair = vi_load((const int32_t *)panel + (k / 2 * vectors + j) * LANES);
            columns[j] = k % 2 ? vf_high_bfloat16(pair) : vf_low_bfloat16(pair);
        }
    }
}

// As store_sums, for fewer columns.
static __attribute__((noinline, noclone, unused)) void store_some(int rows, int vectors, vfloat sum[TILE_ROWS][3],
                                                                  float *c, long c_stride, long columns, bool add) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) {
            float *p = c + i * c_stride + j * LANES;
            long count = least(LANES, columns - j * LANES);
            if (count > 0) vf_store_part(p, add ? vf_add(vf_load_part(p, count), sum[i][j]) : sum[i][j], count);
        }
}

// c[rows][columns] = (add ? c : 0) + sum; `rows` and `vectors` are constants at each call.
INLINE void store_sums(const int rows, const int vectors, vfloat sum[TILE_ROWS][3], float *c, long c_stride,
                       long columns, bool add) {
    if (columns < vectors * LANES) {
        vfloat kept[TILE_ROWS][3];  // the sums themselves stay in registers
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
            for (int j = 0; j < vectors; j++) kept[i][j] = sum[i][j];
        store_some(rows, vectors, kept, c, c_stride, columns, add);
        return;
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < vectors; j++) {
            float *p = c + i * c_stride + j * LANES;
            vf_store(p, add ? vf_add(vf_load(p), sum[i][j]) : sum[i][j]);
        }
}

// c[rows][columns] = (add ? c : 0) + a[rows][depth] @ b[depth][vectors * LANES], in the order of the inputs, whatever
// their format; codes have the `scales` of their columns, the others NULL. `format`, `rows` and `vectors` are constants at
// each call, so that all sums stay in registers. `fetch` is fetched from its step `first_step` on.
INLINE void format_product(const long format, const int rows, const int vectors, long depth, const float *a,
                           long a_stride, const void *b, const float *scales, const Fetch *fetch, long first_step,
                           float *c, long c_stride, long columns, bool add) {
    const long step_bytes = STEP_INPUTS * vectors * LANES * WEIGHT_BYTES(format);
    const char *panel = b;
    vfloat sum[TILE_ROWS][3];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < vectors; j++) sum[i][j] = vf_zero();
    long k = 0;
    for (; k + STEP_INPUTS <= depth; k += STEP_INPUTS, panel += step_bytes) {
        fetch_lines(fetch, first_step + k / STEP_INPUTS);
#pragma GCC unroll 4
        for (int input = 0; input < STEP_INPUTS; input++) {
            vfloat column[3];
            load_columns(format, vectors, panel, input, column);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                vfloat value = vf_all(a[i * a_stride + k + input]);
#pragma GCC unroll 3
                for (int j = 0; j < vectors; j++) sum[i][j] = vf_accumulate(sum[i][j], value, column[j]);
            }
        }
    }
#pragma GCC unroll 1
    for (int input = 0; k < depth; k++, input++) {
        vfloat column[3];
        load_columns(format, vectors, panel, input, column);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
            for (int j = 0; j < vectors; j++) sum[i][j] = vf_fma(vf_all(a[i * a_stride + k]), column[j], sum[i][j]);
    }
    if (scales) {
#pragma GCC unroll 3
        for (int j = 0; j < vectors; j++) {
            vfloat scale = vf_load(scales + j * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) sum[i][j] = vf_mul(sum[i][j], scale);
        }
    }
    store_sums(rows, vectors, sum, c, c_stride, columns, add);
}

#endif
