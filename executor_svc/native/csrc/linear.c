// A product with one matrix, as a part of a segment or alone; see octavo_linear.
#include "arena.h"
#include "layers.h"

// Multiplications that are worth a second thread: it takes about as long to wake one.
#define ALONE 200000l

void multiply_panel(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows,
                    float *out, long stride, bool add, Phase *phase) {
    long num_columns = least(PANEL_COLUMNS, matrix->num_outputs - panel * PANEL_COLUMNS);
    float *target = out + panel * PANEL_COLUMNS;
    fetch_expand(matrix, panel, first_row, num_rows);
    if (!phase->may_repeat) {
        multiply(matrix, panel, next, in, first_row, num_rows, target, stride, add);
        expand_panel(matrix, panel, first_row, num_rows, target, stride);
        return;
    }
    float products[REPEATED_ROWS * PANEL_COLUMNS];
    if (add) copy_columns(target, stride, num_rows, num_columns, products, PANEL_COLUMNS);
    multiply(matrix, panel, next, in, first_row, num_rows, products, PANEL_COLUMNS, add);
    expand_panel(matrix, panel, first_row, num_rows, products, PANEL_COLUMNS);
    if (claim_task(phase)) copy_columns(products, PANEL_COLUMNS, num_rows, num_columns, target, stride);
}

void project(const Matrix *matrix, const Rows *in, float *out, bool add, const Member *member) {
    long num_panels = all_panels(matrix), stride = all_outputs(matrix);
    Phase phase = begin_phase(member, num_panels * ceil_div(in->num_rows, TASK_ROWS),
                              in->num_rows <= REPEATED_ROWS ? REPEATABLE : ONCE);
    while (next_task(&phase)) {
        long first = phase.task / num_panels * TASK_ROWS, num_rows = least(TASK_ROWS, in->num_rows - first);
        long panel = phase.task % num_panels, next = upcoming_task(&phase) % num_panels;
        const Matrix *part = matrix;
        float *target = out + first * stride;
        for (; panel >= panels_of(part); part = part->rest) {
            panel -= panels_of(part), next -= panels_of(part);
            target += part->num_outputs;
        }
        if (next < 0 || next >= panels_of(part)) next = panel;  // that one is fetched when it is read
        multiply_panel(part, panel, next, in, first, num_rows, target, stride, add, &phase);
    }
}

// Codes of the rows that a product takes, laid out at `address` (0: only measured); their bytes go to *num_bytes.
static Rows lay_out_codes(const Matrix *matrix, long num_rows, uintptr_t address, long *num_bytes) {
    Arena arena = {address, address};
    Rows rows = take_codes(&arena, num_rows, matrix->num_inputs, input_format(matrix));
    *num_bytes = used_bytes(&arena);
    return rows;
}

long octavo_linear_scratch_bytes(const Matrix *matrix, long num_rows) {
    long num_bytes;
    lay_out_codes(matrix, num_rows, 0, &num_bytes);
    return num_bytes;
}

typedef struct {
    const Matrix *matrix;
    Rows rows;
    float *in, *out;
} Product;

static void run_product(const Member *member, void *argument) {
    const Product *product = argument;
    long num_inputs = product->matrix->num_inputs;
    if (product->rows.format != FLOATS) {
        Phase phase = begin_phase(member, product->rows.num_rows, ONCE);
        while (next_task(&phase))
            quantize_rows(&product->rows, num_inputs, product->in, num_inputs, phase.task, phase.task + 1);
    }
    shrink_rows(product->matrix, product->in, num_inputs, member);
    project(product->matrix, &product->rows, product->out, false, member);
}

// out[num_rows][all outputs] = in[num_rows][num_inputs] @ matrix.T + bias; inputs are turned into codes first where the
// product takes codes. memory has octavo_linear_scratch_bytes(...), aligned to 64 bytes.
void octavo_linear(const Matrix *matrix, long num_rows, float *in, float *out, char *memory, Team *team) {
    Team alone = {.num_threads = 1, .size = 1};
    if (num_rows * matrix->num_inputs * all_outputs(matrix) < ALONE) team = &alone;
    long num_bytes;
    Rows rows = lay_out_codes(matrix, num_rows, (uintptr_t)memory, &num_bytes);
    rows.values = in;
    if (rows.format == FLOATS) rows.stride = matrix->num_inputs;
    run_region(team, run_product, &(Product){matrix, rows, in, out});
}
