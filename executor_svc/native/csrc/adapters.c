// Products of low-rank adapters; see adapters.h.
#include "adapters.h"

// Rows and outputs whose sums are in registers together, and outputs of a task.
#define TILE 4
#define TASK_OUTPUTS 8

// out[row][0 .. TILE) = in[row][size] @ a[TILE][size].T. A sum has LANES parts, whatever the number of rows.
INLINE void shrink_tile(const float *a, long size, const long num_rows, const float *const *in, float *const *out) {
    vfloat sums[TILE][TILE];
    for (long row = 0; row < num_rows; row++)
        for (long i = 0; i < TILE; i++) sums[row][i] = vf_zero();
    for (long k = 0; k < size; k += LANES) {
        vfloat x[TILE];
        for (long row = 0; row < num_rows; row++) x[row] = vf_load_part(in[row] + k, size - k);
        for (long i = 0; i < TILE; i++) {
            vfloat weights = vf_load_part(a + i * size + k, size - k);
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
                const float *a = low_rank->shrink + output * size;
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

void expand_panel(const Matrix *matrix, long panel, long first_row, long num_rows, float *out, long out_stride) {
    if (!is_adapted(matrix)) return;
    const AdapterRows *rows = matrix->adapted->rows;
    float products[RUN_ROWS * PANEL_COLUMNS];
    for (const AdapterRun *run = rows->runs; run < rows->runs + rows->num_runs; run++) {
        const int32_t *order = rows->order + run->begin;
        if (order[0] < first_row || order[0] >= first_row + num_rows) continue;
        const LowRank *low_rank = matrix->adapted->slots + run->slot;
        if (!low_rank->expand.num_outputs) continue;
        long begin = low_rank->ranges[2 * panel], size = low_rank->ranges[2 * panel + 1] - begin;
        if (!size) continue;
        const Matrix *expand = &low_rank->expand;
        long num_columns = least(PANEL_COLUMNS, expand->num_outputs - panel * PANEL_COLUMNS);
        Matrix one = {
            .format = FLOAT32,
            .num_outputs = num_columns,
            .num_inputs = size,
            .panels = (const float *)expand->panels + (panel * expand->num_inputs + begin) * PANEL_COLUMNS,
        };
        Rows in = {.stride = rows->stride, .values = rows->shrunk + run->begin * rows->stride + begin};
        in.num_rows = run->end - run->begin;
        multiply_float(&one, 0, 0, &in, 0, in.num_rows, products, PANEL_COLUMNS, false);
        for (long i = 0; i < in.num_rows; i++) {
            float *to = out + (order[i] - first_row) * out_stride;
            for (long j = 0; j < num_columns; j++) to[j] += products[i * PANEL_COLUMNS + j];
        }
    }
}
