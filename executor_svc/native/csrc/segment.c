// The dense work between two attentions as one parallel region; see octavo_segment.
#include <math.h>
#include <string.h>

#include "layers.h"

typedef struct {
    Rows attended, normed, activated;
} Scratch;

// All matrices of a segment have one number format.
static bool has_int8(const Segment *segment) {
    return (segment->has_layer_end ? &segment->attention_output : &segment->projection)->scales != NULL;
}

// Lay out the scratch memory at `address` (0: only measure); return its size in bytes.
static long lay_out(const Segment *segment, long num_rows, uintptr_t address, Scratch *scratch) {
    bool is_int8 = has_int8(segment);
    long used = 0;
    const long widths[] = {segment->has_layer_end ? segment->attention_output.num_inputs : 0, segment->hidden_size,
                           segment->has_layer_end ? segment->intermediate_size : 0};
    Rows *const rows[] = {&scratch->attended, &scratch->normed, &scratch->activated};
    for (int i = 0; i < 3; i++) {
        long stride = round_up(widths[i], GROUP);
        *rows[i] = (Rows){.num_rows = num_rows, .stride = stride};
        rows[i]->values = (float *)(address + (uintptr_t)used);
        used += round_up(num_rows * stride * (long)sizeof(float), 64);
        if (!is_int8) continue;
        rows[i]->codes = (int16_t *)(address + (uintptr_t)used);
        used += round_up(num_rows * stride * (long)sizeof(int16_t), 64);
        rows[i]->scales = (float *)(address + (uintptr_t)used);
        used += round_up(num_rows * (long)sizeof(float), 64);
    }
    return used;
}

long octavo_segment_scratch_bytes(const Segment *segment, long num_rows) {
    Scratch scratch;
    return lay_out(segment, num_rows, 0, &scratch);
}

// a[i] = silu(a[i]) * b[i], silu(x) = x / (1 + exp(-x))
static void gate_values(float *a, const float *b, long count) {
    for (long i = 0; i < count; i += LANES) {
        vfloat x = vf_load_part(a + i, count - i);
        vfloat silu = vf_div(x, vf_add(vf_all(1.0f), vf_exp(vf_sub(vf_zero(), x))));
        vf_store_part(a + i, vf_mul(silu, vf_load_part(b + i, count - i)), count - i);
    }
}

// activated = silu(normed @ gate.T) * (normed @ up.T), shared by the threads of a region.
static void activate(const Segment *segment, const Rows *normed, const Rows *activated, const Member *member) {
    long num_outputs = segment->intermediate_size, num_panels = ceil_div(num_outputs, PANEL_COLUMNS);
    long num_tasks = num_panels * ceil_div(normed->num_rows, TASK_ROWS);
    float up[TASK_ROWS * PANEL_COLUMNS];
    for (long task = member->thread, next; task < num_tasks; task = next) {
        next = next_task(member);
        long panel = task % num_panels, first = task / num_panels * TASK_ROWS;
        long num_rows = least(TASK_ROWS, normed->num_rows - first);
        long num_columns = least(PANEL_COLUMNS, num_outputs - panel * PANEL_COLUMNS);
        long upcoming = next < num_tasks ? next % num_panels : panel;
        float *out = activated->values + first * activated->stride + panel * PANEL_COLUMNS;
        multiply(&segment->gate, panel, upcoming, normed, first, num_rows, out, activated->stride, false);
        multiply(&segment->up, panel, upcoming, normed, first, num_rows, up, PANEL_COLUMNS, false);
        for (long i = 0; i < num_rows; i++)
            gate_values(out + i * activated->stride, up + i * PANEL_COLUMNS, num_columns);
    }
}

// out = residual / rms(residual) * weight, the rows [begin, end); in int8 also their codes.
static void normalize(const float *residual, const float *weight, long size, float epsilon, bool is_int8,
                      const Rows *out, long begin, long end) {
    for (long row = begin; row < end; row++) {
        const float *x = residual + row * size;
        float *y = out->values + row * out->stride;
        vfloat squares = vf_zero();
        for (long i = 0; i < size; i += LANES) {
            vfloat v = vf_load_part(x + i, size - i);
            squares = vf_fma(v, v, squares);
        }
        vfloat scale = vf_all(1.0f / sqrtf(vf_sum(squares) / (float)size + epsilon));
        for (long i = 0; i < size; i += LANES) {
            vfloat normed = vf_mul(vf_load_part(x + i, size - i), scale);
            vf_store_part(y + i, vf_mul(normed, vf_load_part(weight + i, size - i)), size - i);
        }
    }
    if (is_int8) quantize_rows(out, size, out->values, out->stride, begin, end);
}

void run_segment(const Segment *segment, long num_rows, float *attended, float *residual, float *out, void *memory,
                 const Member *member) {
    Scratch scratch;
    lay_out(segment, num_rows, (uintptr_t)memory, &scratch);
    bool is_int8 = has_int8(segment);
    long hidden_size = segment->hidden_size, width = segment->attention_output.num_inputs, begin, end;
    share(member, num_rows, &begin, &end);
    if (segment->has_layer_end) {
        if (is_int8) {
            quantize_rows(&scratch.attended, width, attended, width, begin, end);
            wait_for_all(member);
        } else {
            scratch.attended = (Rows){num_rows, width, attended, NULL, NULL};
        }
        project(&segment->attention_output, &scratch.attended, residual, true, member);
        wait_for_all(member);
        normalize(residual, segment->mlp_norm, hidden_size, segment->norm_epsilon, is_int8, &scratch.normed, begin,
                  end);
        wait_for_all(member);
        activate(segment, &scratch.normed, &scratch.activated, member);
        wait_for_all(member);
        if (is_int8) {
            quantize_rows(&scratch.activated, segment->intermediate_size, scratch.activated.values,
                          scratch.activated.stride, begin, end);
            wait_for_all(member);
        }
        project(&segment->down, &scratch.activated, residual, true, member);
    }
    if (!segment->projection.num_outputs) return;
    if (segment->has_layer_end) wait_for_all(member);
    normalize(residual, segment->norm, hidden_size, segment->norm_epsilon, is_int8, &scratch.normed, begin, end);
    wait_for_all(member);
    project(&segment->projection, &scratch.normed, out, false, member);
}

// Run a segment on rows of tokens:
//   residual += attended @ attention_output.T                                        with a layer's end only
//   residual += (silu(h @ gate.T) * (h @ up.T)) @ down.T, h = rms_norm(residual)       with a layer's end only
//   out = rms_norm(residual) @ projection.T                                          with a projection only
//
// attended [num_rows][inputs of attention_output], residual [num_rows][hidden_size], out [num_rows][outputs of
// projection]; scratch has octavo_segment_scratch_bytes(...), aligned to 64 bytes.
void octavo_segment(const Segment *segment, long num_rows, float *attended, float *residual, float *out, void *memory,
                    Team *team) {
    Meeting meeting;
    open_meeting(&meeting, team);
#pragma omp parallel num_threads(team->size)
    {
        const Member member = join_meeting(&meeting);
        run_segment(segment, num_rows, attended, residual, out, memory, &member);
        leave_meeting(&member);
    }
    close_meeting(&meeting);
}

// Columns of a panel, and floats in a vector: what the packing side needs to know.
long octavo_panel_columns(void) { return PANEL_COLUMNS; }
long octavo_lanes(void) { return LANES; }
