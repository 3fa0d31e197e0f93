// A product with one matrix, as a part of a segment or alone; see octavo_linear.
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

static long codes_bytes(const Matrix *matrix, long num_rows) {
    return round_up(num_rows * round_up(matrix->num_inputs, GROUP) * (long)sizeof(int16_t), 64);
}

long octavo_linear_scratch_bytes(const Matrix *matrix, long num_rows) {
    return matrix->scales ? codes_bytes(matrix, num_rows) + num_rows * (long)sizeof(float) : 0;
}

// out[num_rows][num_outputs] = in[num_rows][num_inputs] @ matrix.T + bias; for an int8 matrix each row of `in` is
// rounded to int16. memory has octavo_linear_scratch_bytes(...), aligned to 64 bytes.
void octavo_linear(const Matrix *matrix, long num_rows, float *in, float *out, char *memory, Team *team) {
    Team alone = {.num_threads = 1, .size = 1};
    if (num_rows * matrix->num_inputs * matrix->num_outputs < ALONE) team = &alone;
    Rows rows = {.num_rows = num_rows, .stride = matrix->num_inputs, .values = in};
    if (matrix->scales) {
        rows.stride = round_up(matrix->num_inputs, GROUP);
        rows.codes = (int16_t *)memory;
        rows.scales = (float *)(memory + codes_bytes(matrix, num_rows));
    }
    Meeting meeting;
    open_meeting(&meeting, team);
#pragma omp parallel num_threads(team->size)
    {
        const Member member = join_meeting(&meeting);
        if (matrix->scales) {
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
