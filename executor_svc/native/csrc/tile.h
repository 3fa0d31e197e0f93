// The float32 inner product of the library: a few rows times one panel of columns.
#ifndef OCTAVO_TILE_H
#define OCTAVO_TILE_H

#include <stdbool.h>

#include "vec.h"

// Rows whose sums fit into the registers beside three (or two) vectors of a panel.
// The cases of a switch over the rows of a tile: as a constant each, so that the compiler unrolls over them.
#if LANES == 16
#define TILE_ROWS 8
#define TILE_CASES(CASE) CASE(8) CASE(7) CASE(6) CASE(5) CASE(4) CASE(3) CASE(2) CASE(1)
#else
#define TILE_ROWS 4
#define TILE_CASES(CASE) CASE(4) CASE(3) CASE(2) CASE(1)
#endif

// Steps of one tile between two fetches of the panel that comes next.
#define FETCH_STEPS 4

// c[rows][columns] = (add ? c : 0) + a[rows][depth] @ b[depth][vectors * LANES].
// `rows` and `vectors` are constants at each call, so that all sums stay in registers. `fetch` is memory that
// will be read later: every FETCH_STEPS steps of the depth, `fetch_lines` cache lines of it are fetched.
INLINE void tile_product(const int rows, const int vectors, long depth, const float *a, long a_stride, const float *b,
                         const char *fetch, int fetch_lines, float *c, long c_stride, long columns, bool add) {
    vfloat sum[TILE_ROWS][3];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < vectors; j++) sum[i][j] = vf_zero();
    long k = 0;
    for (; k + FETCH_STEPS <= depth; k += FETCH_STEPS) {
#pragma GCC unroll 1
        for (int line = 0; line < fetch_lines; line++, fetch += 64) _mm_prefetch(fetch, _MM_HINT_T1);
#pragma GCC unroll 4
        for (int step = 0; step < FETCH_STEPS; step++) {
            vfloat column[3];
#pragma GCC unroll 3
            for (int j = 0; j < vectors; j++) column[j] = vf_load(b + ((k + step) * vectors + j) * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                vfloat value = vf_all(a[i * a_stride + k + step]);
#pragma GCC unroll 3
                for (int j = 0; j < vectors; j++) sum[i][j] = vf_fma(value, column[j], sum[i][j]);
            }
        }
    }
    for (; k < depth; k++)
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            vfloat value = vf_all(a[i * a_stride + k]);
#pragma GCC unroll 3
            for (int j = 0; j < vectors; j++)
                sum[i][j] = vf_fma(value, vf_load(b + (k * vectors + j) * LANES), sum[i][j]);
        }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < vectors; j++) {
            float *p = c + i * c_stride + j * LANES;
            long count = columns - j * LANES;
            if (count >= LANES) {
                vf_store(p, add ? vf_add(vf_load(p), sum[i][j]) : sum[i][j]);
            } else if (count > 0) {
                vf_store_part(p, add ? vf_add(vf_load_part(p, count), sum[i][j]) : sum[i][j], count);
            }
        }
}

#endif
