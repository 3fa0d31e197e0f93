// A product with one matrix, as a part of a segment or alone; see octavo_linear.
#include "arena.h"
#include "layers.h"

// Multiplications that are worth a second thread: it takes about as long to wake one.
#define ALONE 200000l

void project(const Matrix *matrix, const Rows *in, float *out, bool add, const Member *member) {
    long num_panels = ceil_div(matrix->num_outputs, PANEL_COLUMNS);
    long num_tasks = num_panels * ceil_div(in->num_rows, TASK_ROWS);
    for (long task = member->thread, next; task < num_tasks; task = next) {
        next = next_task(member);
        long panel = task % num_panels, first = task / num_panels * TASK_ROWS;
        multiply(matrix, panel, next < num_tasks ? next % num_panels : panel, in, first,
                 least(TASK_ROWS, in->num_rows - first), out + first * matrix->num_outputs + panel * PANEL_COLUMNS,
                 matrix->num_outputs, add);
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

// out[num_rows][num_outputs] = in[num_rows][num_inputs] @ matrix.T + bias; what a product does not take as it is, is
// turned into codes first. memory has octavo_linear_scratch_bytes(...), aligned to 64 bytes.
void octavo_linear(const Matrix *matrix, long num_rows, float *in, float *out, char *memory, Team *team) {
    Team alone = {.num_threads = 1, .size = 1};
    if (num_rows * matrix->num_inputs * matrix->num_outputs < ALONE) team = &alone;
    long num_bytes;
    Rows rows = lay_out_codes(matrix, num_rows, (uintptr_t)memory, &num_bytes);
    rows.values = in;
    if (rows.format == FLOATS) rows.stride = matrix->num_inputs;
    Meeting meeting;
    open_meeting(&meeting, team);
#pragma omp parallel num_threads(team->size)
    {
        const Member member = join_meeting(&meeting);
        if (rows.format != FLOATS) {
            long begin, end;
            share(&member, num_rows, &begin, &end);
            quantize_rows(&rows, matrix->num_inputs, in, matrix->num_inputs, begin, end);
            wait_for_all(&member);
        }
        project(matrix, &rows, out, false, &member);
        leave_meeting(&member);
    }
    close_meeting(&meeting);
}
