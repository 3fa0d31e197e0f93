// Products of low-rank adapters; see adapters.h.
#include "adapters.h"

// Rows and outputs whose sums are in registers together, and outputs of a task.
#define TILE 4
#define TASK_OUTPUTS 8

// Bytes of shrinking weights that are fetched ahead: A is read once, from memory.
#define FETCHED 4096l

// out[row][0 .. TILE) = in[row][size] @ a.T, of a tile. A sum has LANES parts, whatever the number of rows.
INLINE void shrink_tile(const float *a, long size, const long num_rows, const float *const *in, float *const *out) {
    vfloat sums[TILE][TILE];
    for (long row = 0; row < num_rows; row++)
        for (long i = 0; i < TILE; i++) sums[row][i] = vf_zero();
    for (long k = 0; k < size; k += LANES, a += TILE * LANES) {
        for (long byte = 0; byte < TILE * LANES * (long)sizeof *a; byte += 64)
            _mm_prefetch((const char *)a + FETCHED + byte, _MM_HINT_T0);
        vfloat x[TILE];
        for (long row = 0; row < num_rows; row++) x[row] = vf_load_part(in[row] + k, size - k);
        for (long i = 0; i < TILE; i++) {
            vfloat weights = vf_load(a + i * LANES);
            for (long row = 0; row < num_rows; row++) sums[row][i] = vf_fma(x[row], weights, sums[row][i]);
        }
    }
    for (long row = 0; row < num_rows; row++)
        for (long i = 0; i < TILE; i++) out[row][i] = vf_sum(sums[row][i]);
}

void shrink_rows(const Matrix *matrix, const float *values, long stride, const Member *member) {
    if (!is_adapted(matrix)) return;
    const AdapterRows *rows = matrix->adapted->rows;
    long size = matrix->num_inputs, tasks_of_run = ceil_div(rows->stride, TASK_OUTPUTS);
    Phase phase = begin_phase(member, rows->num_runs * tasks_of_run, ONCE);
    while (next_task(&phase)) {
        const AdapterRun *run = rows->runs + phase.task / tasks_of_run;
        const LowRank *low_rank = matrix->adapted->slots + run->slot;
        long begin = phase.task % tasks_of_run * TASK_OUTPUTS, end = least(begin + TASK_OUTPUTS, low_rank->num_shrunk);
        for (long first = run->begin; first < run->end; first += TILE) {
            long num_rows = least(TILE, run->end - first);
            const float *in[TILE];
            for (long row = 0; row < num_rows; row++) in[row] = values + rows->order[first + row] * stride;
            for (long output = begin; output < end; output += TILE) {
                float *out[TILE];
                for (long row = 0; row < num_rows; row++) out[row] = rows->shrunk + (first + row) * rows->stride + output;
                const float *a = low_rank->shrink + output * round_up(size, LANES);
                switch (num_rows) {
                    case 1: shrink_tile(a, size, 1, in, out); break;
                    case 2: shrink_tile(a, size, 2, in, out); break;
                    case 3: shrink_tile(a, size, 3, in, out); break;
                    default: shrink_tile(a, size, TILE, in, out); break;
                }
            }
        }
    }
}

// Whether a run lies in rows [first_row, first_row + num_rows) and its adapter has something for a panel.
INLINE bool has_expand(const AdapterRows *rows, const AdapterRun *run, const LowRank *low_rank, long panel,
                       long first_row, long num_rows) {
    long row = rows->order[run->begin];
    return row >= first_row && row < first_row + num_rows && low_rank->expand.num_outputs &&
           low_rank->ranges[2 * panel + 1] > low_rank->ranges[2 * panel];
}

// The weights of a panel's outputs for what it takes of the shrunk.
INLINE const float *expand_columns(const LowRank *low_rank, long panel) {
    const Matrix *expand = &low_rank->expand;
    return (const float *)expand->panels + (panel * expand->num_inputs + low_rank->ranges[2 * panel]) * PANEL_COLUMNS;
}

void fetch_expand(const Matrix *matrix, long panel, long first_row, long num_rows) {
    if (!is_adapted(matrix)) return;
    const AdapterRows *rows = matrix->adapted->rows;
    for (const AdapterRun *run = rows->runs; run < rows->runs + rows->num_runs; run++) {
        const LowRank *low_rank = matrix->adapted->slots + run->slot;
        if (!has_expand(rows, run, low_rank, panel, first_row, num_rows)) continue;
        const char *begin = (const char *)expand_columns(low_rank, panel);
        long size = low_rank->ranges[2 * panel + 1] - low_rank->ranges[2 * panel];
        for (long byte = 0; byte < size * PANEL_COLUMNS * (long)sizeof(float); byte += 64)
            _mm_prefetch(begin + byte, _MM_HINT_T1);
    }
}

// out[row][0 .. num_columns) += in[row][size] @ weights, of a panel's columns, one product after the other.
INLINE void expand_tile(const float *weights, long size, long num_columns, const long num_rows, const float *const *in,
                        float *const *out) {
    vfloat sums[TILE][PANEL_VECTORS];
    for (long row = 0; row < num_rows; row++)
        for (long i = 0; i < PANEL_VECTORS; i++)
            sums[row][i] = vf_load_part(out[row] + i * LANES, most(0, num_columns - i * LANES));
    for (long k = 0; k < size; k++, weights += PANEL_COLUMNS)
        for (long row = 0; row < num_rows; row++)
            for (long i = 0; i < PANEL_VECTORS; i++)
                sums[row][i] = vf_fma(vf_all(in[row][k]), vf_load(weights + i * LANES), sums[row][i]);
    for (long row = 0; row < num_rows; row++)
        for (long i = 0; i < PANEL_VECTORS; i++)
            vf_store_part(out[row] + i * LANES, sums[row][i], most(0, num_columns - i * LANES));
}

void expand_panel(const Matrix *matrix, long panel, long first_row, long num_rows, float *out, long out_stride) {
    if (!is_adapted(matrix)) return;
    const AdapterRows *rows = matrix->adapted->rows;
    long num_columns = least(PANEL_COLUMNS, matrix->num_outputs - panel * PANEL_COLUMNS);
    for (const AdapterRun *run = rows->runs; run < rows->runs + rows->num_runs; run++) {
        const LowRank *low_rank = matrix->adapted->slots + run->slot;
        if (!has_expand(rows, run, low_rank, panel, first_row, num_rows)) continue;
        const float *weights = expand_columns(low_rank, panel);
        long begin = low_rank->ranges[2 * panel], size = low_rank->ranges[2 * panel + 1] - begin;
        for (long first = run->begin; first < run->end; first += TILE) {
            long tile_rows = least(TILE, run->end - first);
            const float *in[TILE];
            float *to[TILE];
            for (long row = 0; row < tile_rows; row++) {
                in[row] = rows->shrunk + (first + row) * rows->stride + begin;
                to[row] = out + (rows->order[first + row] - first_row) * out_stride;
            }
            switch (tile_rows) {
                case 1: expand_tile(weights, size, num_columns, 1, in, to); break;
                case 2: expand_tile(weights, size, num_columns, 2, in, to); break;
                case 3: expand_tile(weights, size, num_columns, 3, in, to); break;
                default: expand_tile(weights, size, num_columns, TILE, in, to); break;
            }
        }
    }
}
