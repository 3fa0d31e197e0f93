// The first half of an MLP, and rows that each thread has for itself.
#include "mlp.h"

#include <string.h>

#include "bfloat16.h"

Rows own_rows(OwnPart part, long num_rows, long width, InputFormat format) {
    Arena arena = {0, 0};
    take_rows(&arena, num_rows, width, format);
    uintptr_t address = (uintptr_t)own_memory(part, used_bytes(&arena));
    arena = (Arena){address, address};
    return take_rows(&arena, num_rows, width, format);
}

// Round a panel of values to codes of rows; `num_padded` codes behind them become 0.
static void store_codes(const float *values, long num_rows, long num_columns, long num_padded, uint16_t *codes,
                        long stride) {
    for (long i = 0; i < num_rows; i++, values += PANEL_COLUMNS, codes += stride) {
        store_bfloat16(values, num_columns, codes);
        if (num_padded) memset(codes + num_columns, 0, (size_t)num_padded * sizeof *codes);
    }
}

void activate_panel(const Mlp *mlp, Activation activation, long panel, long next, const Rows *in, long first_row,
                    long num_rows, const Rows *activated, Phase *phase) {
    float values[TASK_ROWS * PANEL_COLUMNS], factors[TASK_ROWS * PANEL_COLUMNS];
    long num_columns = least(PANEL_COLUMNS, mlp->up.num_outputs - panel * PANEL_COLUMNS);
    long place = first_row * activated->stride + panel * PANEL_COLUMNS;
    bool is_gated = mlp->gate.num_outputs > 0, is_in_place = activated->values && !phase->may_repeat;
    float *out = is_in_place ? activated->values + place : values;
    long stride = is_in_place ? activated->stride : PANEL_COLUMNS;
    fetch_expand(&mlp->up, panel, first_row, num_rows);
    if (is_gated) fetch_expand(&mlp->gate, panel, first_row, num_rows);
    multiply(is_gated ? &mlp->gate : &mlp->up, panel, next, in, first_row, num_rows, out, stride, false);
    expand_panel(is_gated ? &mlp->gate : &mlp->up, panel, first_row, num_rows, out, stride);
    if (is_gated) {
        multiply(&mlp->up, panel, next, in, first_row, num_rows, factors, PANEL_COLUMNS, false);
        expand_panel(&mlp->up, panel, first_row, num_rows, factors, PANEL_COLUMNS);
    }
    for (long i = 0; i < num_rows; i++)
        activate_values(activation, out + i * stride, is_gated ? factors + i * PANEL_COLUMNS : NULL, num_columns);
    if (is_in_place || !claim_task(phase)) return;
    bool is_last = (panel + 1) * PANEL_COLUMNS >= mlp->up.num_outputs;
    if (activated->values)
        copy_columns(values, PANEL_COLUMNS, num_rows, num_columns, activated->values + place, activated->stride);
    else
        store_codes(values, num_rows, num_columns, is_last ? activated->stride - mlp->up.num_outputs : 0,
                    (uint16_t *)activated->codes + place, activated->stride);
}

void activate_rows(const Mlp *mlp, Activation activation, const Rows *in, const Rows *activated,
                   const Member *member) {
    long num_panels = ceil_div(mlp->up.num_outputs, PANEL_COLUMNS);
    Phase phase = begin_phase(member, num_panels * ceil_div(in->num_rows, TASK_ROWS),
                              in->num_rows <= REPEATED_ROWS ? REPEATABLE : ONCE);
    while (next_task(&phase)) {
        long panel = phase.task % num_panels, first = phase.task / num_panels * TASK_ROWS;
        activate_panel(mlp, activation, panel, upcoming_task(&phase) % num_panels, in, first,
                       least(TASK_ROWS, in->num_rows - first), activated, &phase);
    }
}
