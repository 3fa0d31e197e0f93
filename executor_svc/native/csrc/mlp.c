// The first half of an MLP.
#include "mlp.h"

void activate_panel(const Mlp *mlp, Activation activation, long panel, long next, const Rows *in, long first_row,
                    long num_rows, const Rows *activated) {
    float factors[TASK_ROWS * PANEL_COLUMNS];
    long stride = activated->stride, num_columns = least(PANEL_COLUMNS, mlp->up.num_outputs - panel * PANEL_COLUMNS);
    float *out = activated->values + first_row * stride + panel * PANEL_COLUMNS;
    bool is_gated = mlp->gate.num_outputs > 0;
    multiply(is_gated ? &mlp->gate : &mlp->up, panel, next, in, first_row, num_rows, out, stride, false);
    if (is_gated) multiply(&mlp->up, panel, next, in, first_row, num_rows, factors, PANEL_COLUMNS, false);
    for (long i = 0; i < num_rows; i++)
        activate_values(activation, out + i * stride, is_gated ? factors + i * PANEL_COLUMNS : NULL, num_columns);
}

void activate_rows(const Mlp *mlp, Activation activation, const Rows *in, const Rows *activated,
                   const Member *member) {
    long num_panels = ceil_div(mlp->up.num_outputs, PANEL_COLUMNS);
    long num_tasks = num_panels * ceil_div(in->num_rows, TASK_ROWS);
    for (long task = member->thread, next; task < num_tasks; task = next) {
        next = next_task(member);
        long panel = task % num_panels, first = task / num_panels * TASK_ROWS;
        activate_panel(mlp, activation, panel, next < num_tasks ? next % num_panels : panel, in, first,
                       least(TASK_ROWS, in->num_rows - first), activated);
    }
}
