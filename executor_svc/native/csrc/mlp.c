// The first half of an MLP, and rows that each thread has for itself.
#include "mlp.h"

Rows own_rows(OwnPart part, long num_rows, long width, InputFormat format) {
    Arena arena = {0, 0};
    take_rows(&arena, num_rows, width, format);
    uintptr_t address = (uintptr_t)own_memory(part, used_bytes(&arena));
    arena = (Arena){address, address};
    return take_rows(&arena, num_rows, width, format);
}

void activate_panel(const Mlp *mlp, Activation activation, long panel, long next, const Rows *in, long first_row,
                    long num_rows, const Rows *activated, Phase *phase) {
    float values[REPEATED_ROWS * PANEL_COLUMNS], factors[TASK_ROWS * PANEL_COLUMNS];
    long num_columns = least(PANEL_COLUMNS, mlp->up.num_outputs - panel * PANEL_COLUMNS);
    float *target = activated->values + first_row * activated->stride + panel * PANEL_COLUMNS;
    bool is_gated = mlp->gate.num_outputs > 0;
    float *out = phase->may_repeat ? values : target;
    long stride = phase->may_repeat ? PANEL_COLUMNS : activated->stride;
    multiply(is_gated ? &mlp->gate : &mlp->up, panel, next, in, first_row, num_rows, out, stride, false);
    if (is_gated) multiply(&mlp->up, panel, next, in, first_row, num_rows, factors, PANEL_COLUMNS, false);
    for (long i = 0; i < num_rows; i++)
        activate_values(activation, out + i * stride, is_gated ? factors + i * PANEL_COLUMNS : NULL, num_columns);
    if (out != target && claim_task(phase))
        copy_columns(values, PANEL_COLUMNS, num_rows, num_columns, target, activated->stride);
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
