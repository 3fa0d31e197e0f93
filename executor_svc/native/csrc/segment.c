// The dense work between two attentions as one parallel region; see octavo_segment.
#include "arena.h"
#include "layers.h"

typedef struct {
    Rows attended, normed, activated;
    float *outputs;  // [num_rows][hidden_size], of attention and MLP where they are normed or weighed
    ExpertsScratch experts;
} Scratch;

// The matrices of a segment take one format, but for a router.
static InputFormat format_of(const Segment *segment) {
    return input_format(segment->has_layer_end ? &segment->end.attention_output : &segment->projection);
}

// Lay out the scratch memory at `address` (0: only measure); return its size in bytes.
static long lay_out(const Segment *segment, long num_rows, uintptr_t address, Scratch *scratch) {
    Arena arena = {address, address};
    const LayerEnd *end = &segment->end;
    InputFormat format = format_of(segment);
    scratch->normed = take_rows(&arena, num_rows, segment->hidden_size, format);
    if (!segment->has_layer_end) return used_bytes(&arena);
    scratch->attended = take_codes(&arena, num_rows, end->attention_output.num_inputs, format);
    if (end->experts.num_experts)
        lay_out_experts(&end->experts, num_rows, &arena, &scratch->experts);
    else
        scratch->activated = take_rows(&arena, num_rows, end->mlp.down.num_inputs, format);
    if (end->attention_output_norm.weight || end->mlp_output_norm.weight)
        scratch->outputs = take(&arena, num_rows * segment->hidden_size * (long)sizeof(float));
    return used_bytes(&arena);
}

long octavo_segment_scratch_bytes(const Segment *segment, long num_rows) {
    Scratch scratch;
    return lay_out(segment, num_rows, 0, &scratch);
}

// residual += norm(attended @ attention_output.T)
static void end_attention(const Segment *segment, float *attended, float *residual, Scratch *scratch, long begin,
                          long end, const Member *member) {
    const Matrix *matrix = &segment->end.attention_output;
    const Norm *norm = &segment->end.attention_output_norm;
    scratch->attended.values = attended;
    if (scratch->attended.format != FLOATS) {
        quantize_rows(&scratch->attended, matrix->num_inputs, attended, matrix->num_inputs, begin, end);
        wait_for_all(member);
    } else {
        scratch->attended.stride = matrix->num_inputs;
    }
    project(matrix, &scratch->attended, norm->weight ? scratch->outputs : residual, !norm->weight, member);
    wait_for_all(member);
    if (norm->weight) add_normed_rows(norm, scratch->outputs, segment->hidden_size, residual, begin, end);
}

// out (=|+=) mlp(norm(residual)), of one MLP or of experts.
static void run_mlp(const Segment *segment, const float *residual, const Scratch *scratch, float *out, bool add,
                    long begin, long end, const Member *member) {
    const LayerEnd *layer = &segment->end;
    normalize_rows(&layer->mlp_norm, residual, segment->hidden_size, &scratch->normed, begin, end);
    wait_for_all(member);
    if (layer->experts.num_experts) {
        run_experts(&layer->experts, (Activation)layer->activation, &scratch->normed, &scratch->experts, out, add,
                    member);
        return;
    }
    const Rows *activated = &scratch->activated;
    activate_rows(&layer->mlp, (Activation)layer->activation, &scratch->normed, activated, member);
    wait_for_all(member);
    if (activated->format != FLOATS) {
        quantize_rows(activated, layer->mlp.down.num_inputs, activated->values, activated->stride, begin, end);
        wait_for_all(member);
    }
    project(&layer->mlp.down, activated, out, add, member);
}

// Norm the query and key heads of rows [begin, end) of a projection, in place.
static void normalize_heads(const HeadNorms *norms, long num_outputs, float *out, long begin, long end) {
    long dim = norms->head_dim, num_normed = norms->num_heads + norms->num_kv_heads;
    for (long i = begin * num_normed; i < end * num_normed; i++) {
        long head = i % num_normed;
        float *values = out + i / num_normed * num_outputs + head * dim;
        normalize(head < norms->num_heads ? &norms->query : &norms->key, values, dim, values);
    }
}

void run_segment(const Segment *segment, long num_rows, float *attended, float *residual, float *out, void *memory,
                 const Member *member) {
    Scratch scratch;
    lay_out(segment, num_rows, (uintptr_t)memory, &scratch);
    long begin, end;
    share(member, num_rows, &begin, &end);
    if (segment->has_layer_end) {
        const Norm *norm = &segment->end.mlp_output_norm;
        end_attention(segment, attended, residual, &scratch, begin, end, member);
        run_mlp(segment, residual, &scratch, norm->weight ? scratch.outputs : residual, !norm->weight, begin, end,
                member);
        if (norm->weight) {
            wait_for_all(member);
            add_normed_rows(norm, scratch.outputs, segment->hidden_size, residual, begin, end);
        }
    }
    if (!segment->projection.num_outputs) return;
    if (segment->has_layer_end) wait_for_all(member);
    normalize_rows(&segment->norm, residual, segment->hidden_size, &scratch.normed, begin, end);
    wait_for_all(member);
    project(&segment->projection, &scratch.normed, out, false, member);
    if (!segment->head_norms.num_heads) return;
    wait_for_all(member);
    normalize_heads(&segment->head_norms, segment->projection.num_outputs, out, begin, end);
}

// Run a segment on rows of tokens; each norm is there if it has a weight:
//   residual += norm(attended @ attention_output.T)                   with a layer's end only
//   residual += norm(mlp(norm(residual)))                             with a layer's end only
//   out = norm(residual) @ projection.T, its heads normed             with a projection only
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

// out[num_rows][hidden_size] = mlp(norm(residual)), of a segment with a layer's end: what one of several ranks has of it.
// scratch as of octavo_segment.
void octavo_mlp(const Segment *segment, long num_rows, const float *residual, float *out, void *memory, Team *team) {
    Scratch scratch;
    lay_out(segment, num_rows, (uintptr_t)memory, &scratch);
    Meeting meeting;
    open_meeting(&meeting, team);
#pragma omp parallel num_threads(team->size)
    {
        const Member member = join_meeting(&meeting);
        long begin, end;
        share(&member, num_rows, &begin, &end);
        run_mlp(segment, residual, &scratch, out, false, begin, end, &member);
        leave_meeting(&member);
    }
    close_meeting(&meeting);
}

// Columns of a panel, and floats in a vector: what the packing side needs to know.
long octavo_panel_columns(void) { return PANEL_COLUMNS; }
long octavo_lanes(void) { return LANES; }
