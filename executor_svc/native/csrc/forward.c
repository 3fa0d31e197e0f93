// A whole step of a model in one parallel region, from the batch table to logits; see octavo_forward.
#include <string.h>

#include "activation.h"
#include "arena.h"
#include "delta_net.h"
#include "embedding.h"
#include "latent.h"
#include "layers.h"
#include "likeliest.h"
#include "mamba2.h"
#include "plan.h"
#include "rotation.h"
#include "short_conv.h"

// A rotation, and its values for the tokens of a step.
typedef struct {
    const float *frequencies;  // [rotary_dim / 2]
    long rotary_dim;
    float factor;      // of cos and sin
    const float *query_factors;  // of queries at positions of each interval; NULL: 1
    long query_interval;         // positions
    float *cos, *sin;  // [num_tokens][rotary_dim], as in Step
} Rotation;

// What layers share that attend and rotate alike.
typedef struct {
    Step step;                 // sizes, scale, cap and slopes are constant; each step fills in the rest
    long window;               // positions that a token sees, its own included; 0: all
    const Rotation *rotation;  // NULL: none
    long group;                // cache group
    long has_output_gate;      // whether qkv has gates of what is attended behind the values
    long attends_to_encoder;   // whether tokens see the encoder's input of their sequence alone
} AttentionKind;

// What comes before an attention or what a layer has in its place, and that, if there is one.
typedef struct {
    const Segment *segment;
    const AttentionKind *kind;  // NULL: it does not attend, but may have a state, of one of three kinds
    LayerCache cache;
    const float *sinks;         // [num_heads] logits; NULL: none
    const Latent *latent;       // NULL: the projection makes queries, keys and values
    const DeltaNet *delta_net;
    const ShortConv *short_conv;
    const Mamba2 *mamba2;
    float *conv_states, *states;
} Layer;

// What a token has for each layer: of its own, and of its embedding; see `PerLayerInputs` of models/dense.py.
typedef struct {
    Matrix tokens;              // [vocabulary][num_layers * size]
    const Segment *projection;  // of the embedding, its parts normed
    float token_scale, scale;   // of a row of `tokens`, and of the sum
    LayerInputs *inputs, *wanted_inputs;  // of the tokens of a step, and of the wanted ones; each step fills them in
} TokenInputs;

// A decoder on its cache; constant but for kinds, rotations, inputs of layers and what the last layer attends.
typedef struct {
    Matrix tokens;
    Embedding embedding;
    const Layer *layers;
    AttentionKind *kinds;
    Rotation *rotations;
    long num_layers, num_kinds, num_rotations;
    const Segment *last_segment, *head;
    // Of a head that drafts: it begins with the hidden state before each token beside the token. NULL: with tokens alone.
    const Segment *join_embedding, *join_hidden;
    const TokenInputs *token_inputs;  // NULL: none
    float logit_scale, logit_soft_cap;  // soft cap 0: none
    Step last_step;        // of the last layer: tasks of the wanted tokens only
} Model;

// The block tables of a cache group.
typedef struct {
    const int32_t *block_ids;  // [max_num_seqs][width]
    long width, block_size;
} BlockTables;

// A step: the rows of the batch table that it computes, and the results that are wanted.
typedef struct {
    const int32_t *token_ids;     // [max_num_seqs][max_model_len]
    const BlockTables *tables;    // of each cache group; behind `num_groups`, whose tables grow, that of an encoder
    long max_model_len, num_groups;
    StepRows rows;
    const int32_t *wanted;  // [num_wanted] tokens of the step whose hidden states are wanted
    long num_wanted, num_logit_rows;  // the first wanted ones get logits
    float *previous;                  // [num_tokens][hidden_size] normed hidden states before the tokens, for a join
    float *hidden;                    // [num_wanted][hidden_size]
    float *normed;                    // [num_wanted][hidden_size] the same behind the norm of the head; NULL: not wanted
    float *logits;                    // [num_logit_rows][size of the vocabulary]
    int32_t *likeliest;               // [num_logit_rows] first of the largest logits, or NOT_FINITE; NULL: not wanted
    // What each layer with a state takes for each token that is not committed, layer by layer; NULL: all are committed.
    float *draft_inputs;
    StepRows encoded;  // the tokens of the step as rows, each at the last position of an encoder's input
} Batch;

// The drafts of a step that were right.
typedef struct {
    StepRows rows;                // that have some: the position of the first one, and how many they are
    const int32_t *first_drafts;  // [num_rows] which of the drafts of the step that is
    long num_drafts;              // of the step
    float *inputs;                // as the step has kept them
} AcceptedDrafts;

// Where the tokens of a step are, and all that it computes on the way.
typedef struct {
    long num_tokens;
    int32_t *slots, *positions;       // of each token
    char *is_wanted;                  // of each token
    int32_t *drafts;                  // tokens that are not committed
    long num_drafts;
    Task *last_tasks;                 // of the last layer
    int64_t *slot_mapping;            // of each cache group, one after the other
    float *residual;
    float *joined;                    // of tokens and of the hidden states before them, [2][num_tokens][hidden_size]
    float *token_inputs, *wanted_token_inputs;
    float *qkv, *attended;            // or what a layer with a state takes, and returns
    float *latent_queries, *latents;  // that layers with a latent cache attend with, and that they attended
    float *wanted_attended;           // of the wanted tokens
    char *segment_memory;
    float *attention_memory;          // of parts of attention, or of layers with a state
    int32_t *likeliest_memory;
} Work;

static float *take_floats(Arena *arena, long rows, long columns) {
    return take(arena, rows * columns * (long)sizeof(float));
}

static Logits logits_of(const Model *model, const Batch *batch) {
    return (Logits){
        .values = batch->logits,
        .num_rows = batch->num_logit_rows,
        .size = model->head->projection.num_outputs,
        .scale = model->logit_scale,
        .soft_cap = model->logit_soft_cap,
        .likeliest = batch->likeliest,
    };
}

static const Layer *last_layer(const Model *model) { return model->layers + model->num_layers - 1; }

static bool has_state(const Layer *layer) { return layer->delta_net || layer->short_conv || layer->mamba2; }

// Numbers that a layer attends for a token, or returns with its state.
static long attended_width(const Layer *layer) {
    if (layer->latent) return layer->latent->num_heads * layer->latent->value_dim;
    if (layer->kind) return layer->kind->step.num_heads * layer->kind->step.head_dim;
    if (layer->mamba2) return mamba2_width(layer->mamba2);
    if (layer->short_conv) return layer->short_conv->size;
    return layer->delta_net ? output_dim(layer->delta_net) : 0;
}

// Numbers that a layer takes for a token.
static long taken_width(const Layer *layer) { return all_outputs(&layer->segment->projection); }

// Tokens of rows that are not committed.
static long count_drafts(const StepRows *rows) {
    long num_drafts = 0;
    for (long row = 0; row < rows->num_rows; row++) num_drafts += rows->lengths[row] - committed_tokens(rows, row);
    return num_drafts;
}

// Memory of any layer with a state or a latent cache, for so many tokens.
static long layer_scratch_bytes(const Model *model, long num_tokens) {
    long bytes = 0;
    for (const Layer *layer = model->layers; layer <= last_layer(model); layer++) {
        if (layer->delta_net) bytes = most(bytes, octavo_delta_net_scratch_bytes(layer->delta_net, num_tokens));
        if (layer->mamba2) bytes = most(bytes, octavo_mamba2_scratch_bytes(layer->mamba2, num_tokens));
        if (layer->latent) bytes = most(bytes, octavo_latent_scratch_bytes(layer->latent, num_tokens));
    }
    return bytes;
}

static long longest_of(const StepRows *rows) {
    long longest = 0;
    for (long row = 0; row < rows->num_rows; row++) longest = most(longest, rows->starts[row] + rows->lengths[row]);
    return longest;
}

// Plan the attention of every kind of layer.
static void plan(const Model *model, const Batch *batch, int num_threads, Arena *arena) {
    long longest_row = longest_of(&batch->rows), longest_input = longest_of(&batch->encoded);
    for (long i = 0; i < model->num_kinds; i++) {
        bool is_encoded = model->kinds[i].attends_to_encoder;
        long longest = is_encoded ? longest_input : longest_row;
        Step *step = &model->kinds[i].step;
        step->window = model->kinds[i].window ? least(model->kinds[i].window, longest) : longest;
        plan_attention(is_encoded ? &batch->encoded : &batch->rows, num_threads, step, arena);
    }
}

// Lay out all memory except the plans'; the attention is planned.
static void lay_out(const Model *model, const Batch *batch, Arena *arena, Work *work) {
    long num_tokens = 0, qkv_width = 0, width = 0, queries_width = 0, latents_width = 0;
    for (long row = 0; row < batch->rows.num_rows; row++) num_tokens += batch->rows.lengths[row];
    work->num_tokens = num_tokens;
    work->slots = take(arena, num_tokens * (long)sizeof(int32_t));
    work->positions = take(arena, num_tokens * (long)sizeof(int32_t));
    work->slot_mapping = take(arena, batch->num_groups * num_tokens * (long)sizeof(int64_t));
    work->is_wanted = take(arena, num_tokens);
    work->num_drafts = batch->draft_inputs ? count_drafts(&batch->rows) : 0;
    work->drafts = take(arena, work->num_drafts * (long)sizeof(int32_t));
    const AttentionKind *last_kind = last_layer(model)->kind;
    work->last_tasks = take(arena, last_kind ? last_kind->step.num_tasks * (long)sizeof(Task) : 0);
    for (Rotation *rotation = model->rotations; rotation < model->rotations + model->num_rotations; rotation++) {
        rotation->cos = take_floats(arena, num_tokens, rotation->rotary_dim);
        rotation->sin = take_floats(arena, num_tokens, rotation->rotary_dim);
    }
    work->residual = take_floats(arena, num_tokens, model->embedding.hidden_size);
    work->joined = take_floats(arena, model->join_hidden ? 2 * num_tokens : 0, model->embedding.hidden_size);
    if (model->token_inputs) {
        const TokenInputs *token_inputs = model->token_inputs;
        work->token_inputs = take_floats(arena, num_tokens, token_inputs->inputs->stride);
        work->wanted_token_inputs = take_floats(arena, batch->num_wanted, token_inputs->inputs->stride);
        token_inputs->inputs->values = work->token_inputs;
        token_inputs->wanted_inputs->values = work->wanted_token_inputs;
    }
    for (const Layer *layer = model->layers; layer <= last_layer(model); layer++) {
        qkv_width = most(qkv_width, taken_width(layer));
        width = most(width, attended_width(layer));
        if (!layer->latent) continue;
        queries_width = most(queries_width, latent_width(layer->latent));
        latents_width = most(latents_width, layer->latent->num_heads * layer->latent->rank);
    }
    if (model->token_inputs) qkv_width = most(qkv_width, model->token_inputs->inputs->stride);
    work->qkv = take_floats(arena, num_tokens, qkv_width);
    work->attended = take_floats(arena, num_tokens, width);
    work->latent_queries = take_floats(arena, num_tokens, queries_width);
    work->latents = take_floats(arena, num_tokens, latents_width);
    work->wanted_attended = take_floats(arena, batch->num_wanted, attended_width(last_layer(model)));
    long bytes = most(octavo_segment_scratch_bytes(model->last_segment, batch->num_wanted),
                      octavo_segment_scratch_bytes(model->head, batch->num_logit_rows));
    for (long i = 0; i < model->num_layers; i++)
        bytes = most(bytes, octavo_segment_scratch_bytes(model->layers[i].segment, num_tokens));
    if (model->token_inputs)
        bytes = most(bytes, octavo_segment_scratch_bytes(model->token_inputs->projection, num_tokens));
    if (model->join_hidden) {
        bytes = most(bytes, octavo_segment_scratch_bytes(model->join_embedding, num_tokens));
        bytes = most(bytes, octavo_segment_scratch_bytes(model->join_hidden, num_tokens));
    }
    work->segment_memory = take(arena, bytes);
    bytes = 0;
    for (long i = 0; i < model->num_kinds; i++)
        bytes = most(bytes, octavo_attention_scratch_bytes(&model->kinds[i].step));
    work->attention_memory = take(arena, most(bytes, layer_scratch_bytes(model, num_tokens)));
    Logits logits = logits_of(model, batch);
    work->likeliest_memory = take(arena, likeliest_scratch_bytes(&logits));
}

// Fill in what all kinds of layers share.
static void place_tokens(const Model *model, const Batch *batch, const Work *work) {
    long token = 0, draft = 0;
    for (long row = 0; row < batch->rows.num_rows; row++) {
        long slot = batch->rows.tables[row], position = batch->rows.starts[row];
        long num_committed = committed_tokens(&batch->rows, row);
        for (long i = 0; i < batch->rows.lengths[row]; i++, token++, position++) {
            work->slots[token] = (int32_t)slot;
            work->positions[token] = (int32_t)position;
            if (work->num_drafts && i >= num_committed) work->drafts[draft++] = (int32_t)token;
        }
    }
    for (long group = 0; group < batch->num_groups; group++) {
        const BlockTables *tables = batch->tables + group;
        int64_t *mapping = work->slot_mapping + group * work->num_tokens;
        for (token = 0; token < work->num_tokens; token++) {
            long position = work->positions[token], block = position / tables->block_size;
            mapping[token] = (int64_t)tables->block_ids[work->slots[token] * tables->width + block] * tables->block_size +
                             position % tables->block_size;
        }
    }
    for (long i = 0; i < model->num_kinds; i++) {
        Step *step = &model->kinds[i].step;
        const Rotation *rotation = model->kinds[i].rotation;
        if (rotation) step->cos = rotation->cos, step->sin = rotation->sin, step->rotary_dim = rotation->rotary_dim;
        step->num_tokens = work->num_tokens;
        step->slot_mapping = work->slot_mapping + model->kinds[i].group * work->num_tokens;
        step->block_tables = batch->tables[model->kinds[i].group].block_ids;
        step->table_width = batch->tables[model->kinds[i].group].width;
    }
}

// Of the last layer only the wanted tokens go on: its other tiles need not attend.
static void plan_last_layer(Model *model, const Batch *batch, const Work *work) {
    if (!last_layer(model)->kind) return;
    Step *step = &model->last_step;
    *step = last_layer(model)->kind->step;
    memset(work->is_wanted, 0, (size_t)work->num_tokens);
    for (long i = 0; i < batch->num_wanted; i++) work->is_wanted[batch->wanted[i]] = 1;
    long num_kept = 0;
    for (long i = 0; i < step->num_tasks; i++) {
        const QueryTile *tile = step->tiles + step->tasks[i].tile;
        if (memchr(work->is_wanted + tile->first_token, 1, (size_t)tile->num_tokens))
            work->last_tasks[num_kept++] = step->tasks[i];
    }
    step->tasks = work->last_tasks;
    step->num_tasks = num_kept;
}

// The first residual stream, and the rotations of the tokens.
static void embed(const Model *model, const Batch *batch, const Work *work, const Member *member) {
    long size = model->embedding.hidden_size;
    Phase phase = begin_phase(member, work->num_tokens, ONCE);
    while (next_task(&phase)) {
        long token = phase.task, position = work->positions[token];
        long token_id = batch->token_ids[work->slots[token] * batch->max_model_len + position];
        read_row(&model->tokens, token_id, work->residual + token * size);
        finish_embedding(&model->embedding, position, work->residual + token * size);
        for (const Rotation *rotation = model->rotations; rotation < model->rotations + model->num_rotations; rotation++)
            turn_by_position(position, rotation->frequencies, rotation->rotary_dim / 2, rotation->factor,
                             rotation->cos + token * rotation->rotary_dim,
                             rotation->sin + token * rotation->rotary_dim);
    }
}

// residual = what the embeddings of the tokens and the hidden states before them are together.
static void join(const Model *model, const Batch *batch, const Work *work, const Member *member) {
    long num_tokens = work->num_tokens, size = model->embedding.hidden_size;
    float *of_tokens = work->joined, *of_hidden = work->joined + num_tokens * size;
    run_segment(model->join_embedding, num_tokens, NULL, work->residual, of_tokens, work->segment_memory, member);
    run_segment(model->join_hidden, num_tokens, NULL, batch->previous, of_hidden, work->segment_memory, member);
    Phase phase = begin_phase(member, num_tokens, ONCE);
    while (next_task(&phase))
        for (long i = phase.task * size; i < (phase.task + 1) * size; i++) work->residual[i] = of_tokens[i] + of_hidden[i];
}

// What the tokens have for each layer.
static void take_token_inputs(const Model *model, const Batch *batch, const Work *work, const Member *member) {
    const TokenInputs *token_inputs = model->token_inputs;
    long width = token_inputs->inputs->stride;
    run_segment(token_inputs->projection, work->num_tokens, NULL, work->residual, work->token_inputs,
                work->segment_memory, member);
    Phase phase = begin_phase(member, work->num_tokens, ONCE);
    while (next_task(&phase)) {
        long token = phase.task;
        float *sum = work->token_inputs + token * width, *own = work->qkv + token * width;
        read_row(&token_inputs->tokens,
                 batch->token_ids[work->slots[token] * batch->max_model_len + work->positions[token]], own);
        for (long i = 0; i < width; i++) sum[i] = (sum[i] + own[i] * token_inputs->token_scale) * token_inputs->scale;
    }
    phase = begin_phase(member, batch->num_wanted, ONCE);
    while (next_task(&phase))
        memcpy(work->wanted_token_inputs + phase.task * width, work->token_inputs + batch->wanted[phase.task] * width,
               (size_t)width * sizeof(float));
}

// Copy what the last layer attended and the residual stream of the wanted tokens.
static void take_wanted(const Model *model, const Batch *batch, const Work *work, const Member *member) {
    long width = attended_width(last_layer(model)), size = model->embedding.hidden_size;
    Phase phase = begin_phase(member, batch->num_wanted, ONCE);
    while (next_task(&phase)) {
        long i = phase.task;
        memcpy(work->wanted_attended + i * width, work->attended + batch->wanted[i] * width,
               (size_t)width * sizeof(float));
        memcpy(batch->hidden + i * size, work->residual + batch->wanted[i] * size, (size_t)size * sizeof(float));
    }
}

// normed [num_wanted][hidden_size] = hidden as the head norms it.
static void norm_wanted(const Model *model, const Batch *batch, const Member *member) {
    long size = model->embedding.hidden_size;
    Phase phase = begin_phase(member, batch->num_wanted, ONCE);
    while (next_task(&phase))
        normalize(&model->head->norm, batch->hidden + phase.task * size, size, batch->normed + phase.task * size);
}

// What a layer with a state does for the tokens of some rows; out NULL: only the state is wanted.
static void run_state(const Layer *layer, const StepRows *rows, const float *taken, float *out, void *memory,
                      const Member *member) {
    if (layer->delta_net)
        run_delta_net(layer->delta_net, rows, taken, layer->conv_states, layer->states, out, memory, member);
    else if (layer->mamba2)
        run_mamba2(layer->mamba2, rows, taken, layer->conv_states, layer->states, out, memory, member);
    else
        run_short_conv(layer->short_conv, rows, taken, layer->conv_states, out, member);
}

// kept [num_drafts] = what a layer takes for the drafts.
static void keep_inputs(const Layer *layer, const Work *work, float *kept, const Member *member) {
    long width = taken_width(layer);
    Phase phase = begin_phase(member, work->num_drafts, ONCE);
    while (next_task(&phase))
        memcpy(kept + phase.task * width, work->qkv + work->drafts[phase.task] * width, (size_t)width * sizeof(float));
}

// Multiply queries by the factors of their positions.
static void grow_queries(const Rotation *rotation, const Work *work, const Step *step, const Member *member) {
    long width = step->num_heads * step->head_dim;
    Phase phase = begin_phase(member, work->num_tokens, ONCE);
    while (next_task(&phase)) {
        float factor = rotation->query_factors[work->positions[phase.task] / rotation->query_interval];
        float *queries = work->qkv + phase.task * step->qkv_stride;
        for (long i = 0; factor != 1 && i < width; i++) queries[i] *= factor;
    }
}

// The attention of a layer, or what it has in its place.
static void attend(const Model *model, const Batch *batch, const Work *work, const Layer *layer, const Member *member) {
    if (has_state(layer)) run_state(layer, &batch->rows, work->qkv, work->attended, work->attention_memory, member);
    if (!layer->kind) return;
    const Step *step = layer == last_layer(model) ? &model->last_step : &layer->kind->step;
    const Rotation *rotation = layer->kind->rotation;
    if (rotation && rotation->query_factors) grow_queries(rotation, work, step, member);
    const Latent *latent = layer->latent;
    if (latent) {
        long num_tokens = work->num_tokens;
        make_latent_queries(latent, num_tokens, work->qkv, work->latent_queries, work->attention_memory, member);
        run_attention(step, work->latent_queries, &layer->cache, layer->sinks, work->latents, work->attention_memory, member);
        make_latent_values(latent, num_tokens, work->latents, work->attended, work->attention_memory, member);
        return;
    }
    run_attention(step, work->qkv, &layer->cache, layer->sinks, work->attended, work->attention_memory, member);
    if (!layer->kind->has_output_gate) return;
    long width = attended_width(layer);
    Phase phase = begin_phase(member, work->num_tokens, ONCE);
    while (next_task(&phase))
        gate_values(work->attended + phase.task * width, work->qkv + (phase.task + 1) * step->qkv_stride - width, width);
}

typedef struct {
    const Model *model;
    const Batch *batch;
    const Work *work;
} ForwardCall;

static void run_model(const Member *member, void *argument) {
    const ForwardCall *call = argument;
    const Model *model = call->model;
    const Batch *batch = call->batch;
    const Work *work = call->work;
    float *draft_inputs = batch->draft_inputs;
    embed(model, batch, work, member);
    if (model->join_hidden) join(model, batch, work, member);
    if (model->token_inputs) take_token_inputs(model, batch, work, member);
    for (const Layer *layer = model->layers; layer <= last_layer(model); layer++) {
        run_segment(layer->segment, work->num_tokens, work->attended, work->residual, work->qkv, work->segment_memory,
                    member);
        if (work->num_drafts && has_state(layer)) {
            keep_inputs(layer, work, draft_inputs, member);
            draft_inputs += work->num_drafts * taken_width(layer);
        }
        attend(model, batch, work, layer, member);
    }
    if (!batch->num_wanted) return;
    take_wanted(model, batch, work, member);
    run_segment(model->last_segment, batch->num_wanted, work->wanted_attended, batch->hidden, NULL,
                work->segment_memory, member);
    if (batch->normed) norm_wanted(model, batch, member);
    if (!batch->num_logit_rows) return;
    run_segment(model->head, batch->num_logit_rows, NULL, batch->hidden, batch->logits, work->segment_memory, member);
    Logits logits = logits_of(model, batch);
    finish_logits(&logits, work->likeliest_memory, member);
}

// Compute a step: keys and values of all tokens enter the cache, hidden states and logits are written.
//
// memory has num_bytes, aligned to 64 bytes. Returns 0, or if that is too little, the bytes for the next try, which may
// be too few again; nothing is written then.
long octavo_forward(Model *model, const Batch *batch, char *memory, long num_bytes, Team *team) {
    int num_threads = (int)team->num_threads;
    Arena plans = {0, 0};
    plan(model, batch, num_threads, &plans);
    if (used_bytes(&plans) > num_bytes) return used_bytes(&plans);
    Arena arena = {(uintptr_t)memory, (uintptr_t)memory};
    plan(model, batch, num_threads, &arena);
    Work work;
    lay_out(model, batch, &arena, &work);
    if (used_bytes(&arena) > num_bytes) return used_bytes(&arena);
    place_tokens(model, batch, &work);
    plan_last_layer(model, batch, &work);
    run_region(team, run_model, &(ForwardCall){model, batch, &work});
    return 0;
}

typedef struct {
    const Model *model;
    const AcceptedDrafts *accepted;
    void *memory;
} AcceptCall;

// Put what a layer took for the accepted drafts side by side, in front of what it took for all.
static void gather_accepted(const AcceptedDrafts *accepted, long width, float *inputs) {
    float *next = inputs;
    for (long row = 0; row < accepted->rows.num_rows; row++) {
        long size = accepted->rows.lengths[row] * width;
        memmove(next, inputs + accepted->first_drafts[row] * width, (size_t)size * sizeof(float));
        next += size;
    }
}

static void accept_drafts(const Member *member, void *argument) {
    const AcceptCall *call = argument;
    const AcceptedDrafts *accepted = call->accepted;
    float *inputs = accepted->inputs;
    for (const Layer *layer = call->model->layers; layer <= last_layer(call->model); layer++) {
        if (!has_state(layer)) continue;
        Phase phase = begin_phase(member, 1, ONCE);
        while (next_task(&phase)) gather_accepted(accepted, taken_width(layer), inputs);
        run_state(layer, &accepted->rows, inputs, NULL, call->memory, member);
        inputs += accepted->num_drafts * taken_width(layer);
    }
}

// Let the states take the drafts of the last step that were right, in the order and with the bits of a token a step.
//
// memory has num_bytes, aligned to 64 bytes. Returns 0, or if that is too little, the bytes that are needed; nothing is
// written then. What the step has kept is overwritten.
long octavo_accept_drafts(const Model *model, const AcceptedDrafts *accepted, char *memory, long num_bytes, Team *team) {
    long num_tokens = 0;
    for (long row = 0; row < accepted->rows.num_rows; row++) num_tokens += accepted->rows.lengths[row];
    long needed = layer_scratch_bytes(model, num_tokens);
    if (needed > num_bytes) return needed;
    run_region(team, accept_drafts, &(AcceptCall){model, accepted, memory});
    return 0;
}
