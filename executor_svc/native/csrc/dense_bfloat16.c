// Products of bfloat16 rows with bfloat16 matrices, summed in float32: the same bits on every processor.
#include <string.h>

#include "bfloat16.h"
#include "dense.h"
#include "tile.h"

// Inputs of a panel that are multiplied at once; see DEPTH of dense_float.c, which has as many bytes.
#define DEPTH 256

#define STEP_PAIRS (STEP_INPUTS / 2)
#define PAIR_BYTES (PANEL_COLUMNS * 4l)

// sum[rows][] += pair `pair` of each row * a pair of inputs of the panel.
INLINE void add_pair(const int rows, const uint16_t *a, long a_stride, long pair, const char *panel,
                     vfloat sum[TILE_ROWS][PANEL_VECTORS]) {
#pragma GCC unroll 2
    for (int turn = 0; turn < TURNS; turn++) {
        vfloat column[PANEL_VECTORS];
#pragma GCC unroll 3
        for (int j = 0; j < PANEL_VECTORS; j++) column[j] = vf_of_turn(vi_load(panel + j * LANES * 4), turn);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            float two;
            memcpy(&two, a + i * a_stride + 2 * pair, sizeof two);
            vfloat value = vf_of_turn(vf_bits(vf_all(two)), turn);
#pragma GCC unroll 3
            for (int j = 0; j < PANEL_VECTORS; j++) sum[i][j] = vf_add_products(sum[i][j], value, column[j]);
        }
        // Else GCC splits both turns' elements at once, and the sums no longer fit into the registers.
        if (TURNS > 1) __asm__ volatile("" ::: "memory");
    }
}

// c[rows][columns] = (add ? c : 0) + a[rows][2 * num_pairs] @ panel; as format_product of tile.h.
INLINE void tile_product(const int rows, long num_pairs, const uint16_t *a, long a_stride, const char *panel,
                         const Fetch *fetch, long first_step, float *c, long c_stride, long columns, bool add) {
    vfloat sum[TILE_ROWS][PANEL_VECTORS];
    unsigned mode = begin_products();
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < PANEL_VECTORS; j++) sum[i][j] = vf_between_products(vf_zero());
    long pair = 0;
    for (; pair + STEP_PAIRS <= num_pairs; pair += STEP_PAIRS) {
        fetch_lines(fetch, first_step + pair / STEP_PAIRS);
#pragma GCC unroll 2
        for (int i = 0; i < STEP_PAIRS; i++, panel += PAIR_BYTES) add_pair(rows, a, a_stride, pair + i, panel, sum);
    }
    for (; pair < num_pairs; pair++, panel += PAIR_BYTES) add_pair(rows, a, a_stride, pair, panel, sum);
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < PANEL_VECTORS; j++) sum[i][j] = vf_between_products(sum[i][j]);
    end_products(mode);
    store_sums(rows, PANEL_VECTORS, sum, c, c_stride, columns, add);
}

void multiply_bfloat16(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows,
                       float *out, long out_stride, bool add) {
    long num_pairs = ceil_div(matrix->num_inputs, 2), num_tiles = ceil_div(num_rows, TILE_ROWS);
    long num_columns = least(PANEL_COLUMNS, matrix->num_outputs - panel * PANEL_COLUMNS);
    const char *columns = (const char *)matrix->panels + panel * num_pairs * PAIR_BYTES;
    const char *upcoming = (const char *)matrix->panels + next * num_pairs * PAIR_BYTES;
    for (long pair = 0; pair < num_pairs; pair += DEPTH / 2, add = true)
        for (long tile = 0; tile < num_tiles; tile++) {
            long row = tile * TILE_ROWS, depth = least(DEPTH / 2, num_pairs - pair);
            const uint16_t *from = (const uint16_t *)in->codes + (first_row + row) * in->stride + 2 * pair;
            Fetch fetch = fetch_panel(columns, upcoming, num_pairs / STEP_PAIRS, STEP_PAIRS * PAIR_BYTES, tile, num_tiles);
            switch (least(TILE_ROWS, num_rows - row)) {
#define ROWS(count)                                                                                      \
    case count:                                                                                          \
        tile_product(count, depth, from, in->stride, columns + pair * PAIR_BYTES, &fetch,                \
                     pair / STEP_PAIRS, out + row * out_stride, out_stride, num_columns, add);           \
        break;
                TILE_CASES(ROWS)
#undef ROWS
            }
        }
    add_bias(matrix, panel, num_rows, out, out_stride);
}
