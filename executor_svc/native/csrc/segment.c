// The dense work between two attentions as one parallel region; see octavo_segment.
#include <string.h>

#include "arena.h"
#include "layers.h"

typedef struct {
    Rows attended, mlp_inputs, activated, normed;  // `normed` is for the projection
    float *outputs;  // [num_rows][hidden_size], of attention and MLP where they are normed or scaled
    Rows gate_inputs, gated;  // of what a token has for the layer
    ExpertsScratch experts;
} Scratch;

// The first and the last matrix of an MLP, or of the first of several experts, which are alike.
static const Mlp *first_mlp(const LayerEnd *end) { return end->experts.num_experts ? end->experts.mlps : &end->mlp; }

static bool has_mlp(const LayerEnd *end) { return first_mlp(end)->up.num_outputs > 0; }

// The norm of what joins the residual stream, if that is normed or scaled first; NULL: it is added at once.
static const Norm *norm_apart(const LayerEnd *end, const Norm *norm) {
    return norm->weight || end->residual_scale != 1 ? norm : NULL;
}

// Return rows of `width` as the product with a matrix takes them, with the values that adapters take.
static Rows take_inputs_of(Arena *arena, long num_rows, long width, const Matrix *matrix, InputFormat format) {
    return (matrix->adapted ? take_rows : take_inputs)(arena, num_rows, width, format);
}

// Lay out the scratch memory at `address` (0: only measure); return its size in bytes.
static long lay_out(const Segment *segment, long num_rows, uintptr_t address, Scratch *scratch) {
    Arena arena = {address, address};
    const LayerEnd *end = &segment->end;
    bool has_projection = segment->projection.num_outputs > 0;
    InputFormat format = input_format(&segment->projection);
    if (segment->has_layer_end && has_mlp(end)) {
        // A router takes values.
        InputFormat mlp_format = input_format(&first_mlp(end)->up);
        scratch->mlp_inputs = end->experts.num_experts ? take_rows(&arena, num_rows, segment->hidden_size, mlp_format)
                                                       : take_inputs_of(&arena, num_rows, segment->hidden_size, &end->mlp.up, mlp_format);
        if (!has_projection) format = mlp_format;
    }
    scratch->normed = segment->has_layer_end && has_mlp(end) && format == scratch->mlp_inputs.format
                          ? scratch->mlp_inputs
                          : take_inputs_of(&arena, num_rows, segment->hidden_size, &segment->projection, format);
    if (!segment->has_layer_end) return used_bytes(&arena);
    scratch->attended = take_codes(&arena, num_rows, end->attention_output.num_inputs, input_format(&end->attention_output));
    if (!has_mlp(end))
        scratch->activated = (Rows){0};
    else if (end->experts.num_experts)
        lay_out_experts(&end->experts, num_rows, &arena, &scratch->experts);
    else
        scratch->activated = take_inputs_of(&arena, num_rows, end->mlp.down.num_inputs, &end->mlp.down,
                                            input_format(&end->mlp.down));
    const PerLayer *per_layer = &end->per_layer;
    bool has_per_layer = per_layer->gate.num_outputs > 0;
    if (has_per_layer || norm_apart(end, &end->attention_output_norm) || norm_apart(end, &end->mlp_output_norm))
        scratch->outputs = take(&arena, num_rows * most(segment->hidden_size, per_layer->gate.num_outputs) * (long)sizeof(float));
    if (has_per_layer) {
        scratch->gate_inputs = take_codes(&arena, num_rows, segment->hidden_size, input_format(&per_layer->gate));
        scratch->gated = take_rows(&arena, num_rows, per_layer->gate.num_outputs, input_format(&per_layer->projection));
    }
    return used_bytes(&arena);
}

long octavo_segment_scratch_bytes(const Segment *segment, long num_rows) {
    Scratch scratch;
    return lay_out(segment, num_rows, 0, &scratch);
}

// residual = norm(residual), and the result as a product takes it, maybe in `into`.
static Rows normalize_in_place(const Norm *norm, float *residual, long size, const Rows *into, const Member *member) {
    bool has_codes = into->format != FLOATS;
    Phase phase = begin_phase(member, into->num_rows, ONCE);
    while (next_task(&phase)) {
        normalize(norm, residual + phase.task * size, size, residual + phase.task * size);
        if (has_codes) quantize_rows(into, size, residual, size, phase.task, phase.task + 1);
    }
    if (has_codes) return *into;
    return (Rows){.num_rows = into->num_rows, .stride = size, .values = residual};
}

// residual += scale * norm(outputs), unless `output_norm` is NULL, and then norm(residual), as a product takes it, maybe
// in `into`.
static Rows normalize_residual(const Segment *segment, const Norm *output_norm, float *outputs, const Norm *norm,
                               float *residual, const Rows *into, const Member *member) {
    long num_rows = into->num_rows, size = segment->hidden_size;
    if (segment->is_post_norm) return normalize_in_place(norm, residual, size, into, member);
    if (!output_norm && is_for_each(num_rows, member)) {
        Rows own = own_rows(OWN_ROWS, num_rows, size, into->format);
        normalize_rows(norm, residual, size, &own, 0, num_rows);
        return own;
    }
    Phase phase = begin_phase(member, num_rows, ONCE);
    while (next_task(&phase)) {
        long row = phase.task;
        if (output_norm)
            add_normed_rows(output_norm, segment->end.residual_scale, outputs, size, residual, row, row + 1);
        normalize_rows(norm, residual, size, into, row, row + 1);
    }
    return *into;
}

// `values` as a product takes them: themselves, or codes in `shared`.
static Rows quantize_for(const Matrix *matrix, float *values, long stride, const Rows *shared,
                         const Member *member) {
    long num_rows = shared->num_rows, num_inputs = matrix->num_inputs;
    if (shared->format == FLOATS) return (Rows){.num_rows = num_rows, .stride = stride, .values = values};
    if (is_for_each(num_rows, member)) {
        Rows own = own_rows(OWN_ROWS, num_rows, num_inputs, shared->format);
        quantize_rows(&own, num_inputs, values, stride, 0, num_rows);
        return own;
    }
    Phase phase = begin_phase(member, num_rows, ONCE);
    while (next_task(&phase)) quantize_rows(shared, num_inputs, values, stride, phase.task, phase.task + 1);
    return *shared;
}

// out (=|+=) attended @ attention_output.T
static void end_attention(const Segment *segment, float *attended, const Scratch *scratch, float *out, bool add,
                          const Member *member) {
    const Matrix *matrix = &segment->end.attention_output;
    shrink_rows(matrix, attended, matrix->num_inputs, member);
    Rows rows = quantize_for(matrix, attended, matrix->num_inputs, &scratch->attended, member);
    project(matrix, &rows, out, add, member);
}

// out (=|+=) mlp(in).
static void run_one_mlp(const Mlp *mlp, Activation activation, const Rows *in, const Rows *activated, float *out,
                        bool add, const Member *member) {
    shrink_rows(mlp->gate.num_outputs ? &mlp->gate : &mlp->up, in->values, in->stride, member);
    activate_rows(mlp, activation, in, activated, member);
    Rows rows = *activated;
    shrink_rows(&mlp->down, rows.values, rows.stride, member);
    if (rows.values) rows = quantize_for(&mlp->down, rows.values, rows.stride, activated, member);
    project(&mlp->down, &rows, out, add, member);
}

// out += sigmoid(gate(in)) * mlp(in), of the expert that every row goes to; without a gate out += mlp(in), or with norms
// out = norm(out) + norm(mlp(in)).
static void add_shared_expert(const Experts *experts, Activation activation, const Rows *in,
                              const ExpertsScratch *scratch, float *out, const Member *member) {
    long num_rows = in->num_rows, size = experts->shared.down.num_outputs;
    bool has_gate = experts->shared_gate.num_outputs > 0;
    if (has_gate) project(&experts->shared_gate, in, scratch->shared_gates, false, member);
    Rows inputs = *in;
    if (scratch->shared_inputs.format != FLOATS && scratch->shared_inputs.format != in->format) {
        inputs = scratch->shared_inputs;
        Phase phase = begin_phase(member, num_rows, ONCE);
        while (next_task(&phase))
            quantize_rows(&inputs, experts->shared.up.num_inputs, in->values, in->stride, phase.task, phase.task + 1);
    }
    float *outputs = scratch->shared_outputs;
    run_one_mlp(&experts->shared, activation, &inputs, &scratch->shared_activated, outputs, false, member);
    Phase phase = begin_phase(member, num_rows, ONCE);
    while (next_task(&phase)) {
        float *values = outputs + phase.task * size, *sums = out + phase.task * size;
        if (experts->output_norm.weight) {
            normalize(&experts->output_norm, sums, size, sums);
            normalize(&experts->shared_output_norm, values, size, values);
        }
        for (long i = 0; i < size; i += LANES) {
            vfloat weighed = vf_load_part(values + i, size - i);
            if (has_gate) weighed = weigh_by_sigmoid(weighed, vf_all(scratch->shared_gates[phase.task]));
            vf_store_part(sums + i, vf_add(vf_load_part(sums + i, size - i), weighed), size - i);
        }
    }
}

// out (=|+=) mlp(in), of one MLP or of experts; `in` is the norm of `residual`, and experts may take others. With those
// `out` is not added to.
static void run_mlp(const Segment *segment, const Rows *in, const float *residual, const Scratch *scratch, float *out,
                    bool add, const Member *member) {
    const LayerEnd *layer = &segment->end;
    const Experts *experts = &layer->experts;
    Activation activation = (Activation)layer->activation;
    if (!experts->num_experts) {
        run_one_mlp(&layer->mlp, activation, in, &scratch->activated, out, add, member);
        return;
    }
    Rows scored = *in, inputs = *in;
    if (experts->router_norm.weight) {
        scored = scratch->experts.scored, inputs = scratch->experts.inputs;
        Phase phase = begin_phase(member, in->num_rows, ONCE);
        while (next_task(&phase)) {
            normalize_rows(&experts->router_norm, residual, segment->hidden_size, &scored, phase.task, phase.task + 1);
            normalize_rows(&experts->input_norm, residual, segment->hidden_size, &inputs, phase.task, phase.task + 1);
        }
    }
    run_experts(experts, activation, &scored, &inputs, &scratch->experts, out, add, member);
    if (experts->shared.up.num_outputs) add_shared_expert(experts, activation, in, &scratch->experts, out, member);
}

// End a layer behind its MLP: residual += scale * norm(outputs), unless `output_norm` is NULL, then what the tokens have
// for this layer, then the scale of all that.
static void end_layer(const Segment *segment, const Norm *output_norm, const Scratch *scratch, float *residual,
                      const Member *member) {
    const LayerEnd *layer = &segment->end;
    const PerLayer *per_layer = &layer->per_layer;
    long num_rows = scratch->mlp_inputs.num_rows, size = segment->hidden_size, width = per_layer->gate.num_outputs;
    float *outputs = scratch->outputs, residual_scale = layer->residual_scale;
    if (width) {
        if (output_norm) {
            Phase phase = begin_phase(member, num_rows, ONCE);
            while (next_task(&phase))
                add_normed_rows(output_norm, residual_scale, outputs, size, residual, phase.task, phase.task + 1);
        }
        Rows rows = quantize_for(&per_layer->gate, residual, size, &scratch->gate_inputs, member);
        float *gated = scratch->gated.values;
        long stride = scratch->gated.stride;
        project(&per_layer->gate, &rows, outputs, false, member);
        Phase phase = begin_phase(member, num_rows, ONCE);
        while (next_task(&phase)) {
            float *row = gated + phase.task * stride;
            memcpy(row, outputs + phase.task * width, (size_t)width * sizeof *row);
            activate_values((Activation)layer->activation, row,
                            per_layer->inputs->values + phase.task * per_layer->inputs->stride + per_layer->begin, width);
            if (scratch->gated.format != FLOATS)
                quantize_rows(&scratch->gated, width, gated, stride, phase.task, phase.task + 1);
        }
        project(&per_layer->projection, &scratch->gated, outputs, false, member);
        output_norm = &per_layer->norm, residual_scale = 1;
    }
    Phase phase = begin_phase(member, num_rows, ONCE);
    while (next_task(&phase)) {
        if (output_norm)
            add_normed_rows(output_norm, residual_scale, outputs, size, residual, phase.task, phase.task + 1);
        if (!layer->layer_scale) continue;
        float *row = residual + phase.task * size;
        for (long i = 0; i < size; i++) row[i] *= *layer->layer_scale;
    }
}

// Norm the query and key heads of rows [begin, end) of a projection, in place, and the value heads where they have a norm.
static void normalize_heads(const HeadNorms *norms, long num_outputs, float *out, long begin, long end) {
    long dim = norms->head_dim, first_value = norms->num_heads + norms->num_kv_heads;
    long num_normed = first_value + (norms->value.weight ? norms->num_kv_heads : 0);
    for (long i = begin * num_normed; i < end * num_normed; i++) {
        long head = i % num_normed;
        float *values = out + i / num_normed * num_outputs + head * dim;
        const Norm *norm = head < norms->num_heads ? &norms->query : head < first_value ? &norms->key : &norms->value;
        normalize(norm, values, dim, values);
    }
}

void run_segment(const Segment *segment, long num_rows, float *attended, float *residual, float *out, void *memory,
                 const Member *member) {
    Scratch scratch;
    lay_out(segment, num_rows, (uintptr_t)memory, &scratch);
    const Norm *output_norm = NULL;
    if (segment->has_layer_end) {
        const LayerEnd *layer = &segment->end;
        if (layer->attention_output.num_outputs) {
            output_norm = norm_apart(layer, &layer->attention_output_norm);
            end_attention(segment, attended, &scratch, output_norm ? scratch.outputs : residual, !output_norm, member);
        }
        if (has_mlp(layer)) {
            Rows normed = normalize_residual(segment, output_norm, scratch.outputs, &layer->mlp_norm, residual,
                                             &scratch.mlp_inputs, member);
            output_norm = norm_apart(layer, &layer->mlp_output_norm);
            run_mlp(segment, &normed, residual, &scratch, output_norm ? scratch.outputs : residual, !output_norm, member);
        }
        if (layer->layer_scale || layer->per_layer.gate.num_outputs) {
            end_layer(segment, output_norm, &scratch, residual, member);
            output_norm = NULL;
        }
    }
    if (segment->projection.num_outputs && !segment->norm.weight) {
        shrink_rows(&segment->projection, residual, segment->hidden_size, member);
        Rows rows = quantize_for(&segment->projection, residual, segment->hidden_size, &scratch.normed, member);
        project(&segment->projection, &rows, out, false, member);
    } else if (segment->projection.num_outputs) {
        Rows normed = normalize_residual(segment, output_norm, scratch.outputs, &segment->norm, residual,
                                         &scratch.normed, member);
        shrink_rows(&segment->projection, normed.values, normed.stride, member);
        project(&segment->projection, &normed, out, false, member);
    } else if (segment->is_post_norm && segment->norm.weight) {
        normalize_residual(segment, output_norm, scratch.outputs, &segment->norm, residual, &scratch.normed, member);
    } else if (output_norm) {
        Phase phase = begin_phase(member, num_rows, ONCE);
        while (next_task(&phase))
            add_normed_rows(output_norm, segment->end.residual_scale, scratch.outputs, segment->hidden_size, residual,
                            phase.task, phase.task + 1);
    }
    if (!segment->head_norms.num_heads) return;
    Phase phase = begin_phase(member, num_rows, ONCE);
    while (next_task(&phase))
        normalize_heads(&segment->head_norms, all_outputs(&segment->projection), out, phase.task, phase.task + 1);
}

typedef struct {
    const Segment *segment;
    long num_rows;
    float *attended, *residual, *out;
    void *memory;
} SegmentCall;

static void run_segment_call(const Member *member, void *argument) {
    const SegmentCall *call = argument;
    run_segment(call->segment, call->num_rows, call->attended, call->residual, call->out, call->memory, member);
}

// Run a segment on rows of tokens; each norm is there if it has a weight:
//   residual += residual_scale * norm(attended @ attention_output.T)  with the end of a layer that has it
//   residual += residual_scale * norm(mlp(norm(residual)))            with the end of a layer that has an MLP
//   out = norm(residual) @ projection.T, its heads normed             with a projection only
// With is_post_norm residual = norm(residual) in front of the MLP and of the projection, or where a projection would be,
// where the norm has a weight.
//
// attended [num_rows][inputs of attention_output], residual [num_rows][hidden_size], out [num_rows][outputs of
// projection]; scratch has octavo_segment_scratch_bytes(...), aligned to 64 bytes.
void octavo_segment(const Segment *segment, long num_rows, float *attended, float *residual, float *out, void *memory,
                    Team *team) {
    run_region(team, run_segment_call, &(SegmentCall){segment, num_rows, attended, residual, out, memory});
}

static void run_mlp_call(const Member *member, void *argument) {
    const SegmentCall *call = argument;
    Scratch scratch;
    lay_out(call->segment, call->num_rows, (uintptr_t)call->memory, &scratch);
    const Norm *norm = &call->segment->end.mlp_norm;
    Rows normed = normalize_residual(call->segment, NULL, NULL, norm, call->residual, &scratch.mlp_inputs, member);
    run_mlp(call->segment, &normed, call->residual, &scratch, call->out, false, member);
}

// out[num_rows][hidden_size] = mlp(norm(residual)), of a segment with a layer's end: the part of one of several ranks. With
// is_post_norm residual = norm(residual) besides.
// scratch as of octavo_segment.
void octavo_mlp(const Segment *segment, long num_rows, float *residual, float *out, void *memory, Team *team) {
    run_region(team, run_mlp_call, &(SegmentCall){segment, num_rows, NULL, residual, out, memory});
}

static void run_end_call(const Member *member, void *argument) {
    const SegmentCall *call = argument;
    Scratch scratch;
    lay_out(call->segment, call->num_rows, (uintptr_t)call->memory, &scratch);
    end_layer(call->segment, NULL, &scratch, call->residual, member);
}

// What follows on the MLP of a segment's layer end: residual [num_rows][hidden_size] takes what the tokens have for the
// layer, and is scaled. scratch as of octavo_segment.
void octavo_end_layer(const Segment *segment, long num_rows, float *residual, void *memory, Team *team) {
    const LayerEnd *layer = &segment->end;
    if (!layer->layer_scale && !layer->per_layer.gate.num_outputs) return;
    run_region(team, run_end_call, &(SegmentCall){segment, num_rows, NULL, residual, NULL, memory});
}

// Columns of a panel, and floats in a vector: what the packing side needs to know.
long octavo_panel_columns(void) { return PANEL_COLUMNS; }
long octavo_lanes(void) { return LANES; }
