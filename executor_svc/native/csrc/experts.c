// A mixture of experts: each row goes to a few of many MLPs. Source: Shazeer et al. 2017, "Outrageously Large Neural
// Networks". Rows are gathered expert by expert, so that each matrix is read once; where a row lies among the others
// changes nothing about it.
#include <math.h>
#include <string.h>

#include "layers.h"

void lay_out_experts(const Experts *experts, long num_rows, Arena *arena, ExpertsScratch *scratch) {
    long num_chosen = num_rows * experts->num_chosen;
    const Mlp *first = experts->mlps;
    *scratch = (ExpertsScratch){
        .scores = take(arena, num_rows * experts->num_experts * (long)sizeof(float)),
        .chosen = take(arena, num_chosen * (long)sizeof(int32_t)),
        .weights = take(arena, num_chosen * (long)sizeof(float)),
        .gathered = take_rows(arena, num_chosen, first->up.num_inputs, input_format(&first->up)),
        .activated = take_inputs(arena, num_chosen, first->down.num_inputs, input_format(&first->down)),
        .outputs = take(arena, num_chosen * first->down.num_outputs * (long)sizeof(float)),
    };
    if (experts->router_norm.weight) {
        scratch->scored = take_rows(arena, num_rows, first->up.num_inputs, FLOATS);
        scratch->inputs = take_rows(arena, num_rows, first->up.num_inputs, input_format(&first->up));
    }
    const Mlp *shared = &experts->shared;
    if (!shared->up.num_outputs) return;
    scratch->shared_inputs = take_codes(arena, num_rows, shared->up.num_inputs, input_format(&shared->up));
    scratch->shared_activated = take_inputs(arena, num_rows, shared->down.num_inputs, input_format(&shared->down));
    scratch->shared_gates = take(arena, num_rows * (long)sizeof(float));
    scratch->shared_outputs = take(arena, num_rows * shared->down.num_outputs * (long)sizeof(float));
}

// scores = softmax(scores), one row.
static void soften_scores(float *scores, long count) {
    float largest = -INFINITY;
    for (long i = 0; i < count; i++) largest = fmaxf(largest, scores[i]);
    for (long i = 0; i < count; i += LANES)
        vf_store_part(scores + i, vf_exp(vf_sub(vf_load_part(scores + i, count - i), vf_all(largest))), count - i);
    float total = 0;
    for (long i = 0; i < count; i++) total += scores[i];
    for (long i = 0; i < count; i++) scores[i] /= total;
}

// scores = sigmoid(scores), one row.
static void squash_scores(float *scores, long count) {
    for (long i = 0; i < count; i += LANES)
        vf_store_part(scores + i, weigh_by_sigmoid(vf_all(1.0f), vf_load_part(scores + i, count - i)), count - i);
}

// Choose the experts of one row: the largest scores, of equal ones the first; chosen scores are struck out.
static void choose_experts(const Experts *experts, float *scores, int32_t *chosen, float *weights) {
    const float *bias = experts->correction_bias;
    if (experts->is_sigmoid) squash_scores(scores, experts->num_experts);
    else soften_scores(scores, experts->num_experts);
    float total = 0;
    for (long i = 0; i < experts->num_chosen; i++) {
        long best = -1;
        float highest = 0;
        for (long expert = 0; expert < experts->num_experts; expert++) {
            float corrected = bias ? scores[expert] + bias[expert] : scores[expert];
            if (scores[expert] == -INFINITY || (best >= 0 && !(corrected > highest))) continue;
            best = expert;
            highest = corrected;
        }
        chosen[i] = (int32_t)best;
        weights[i] = scores[best];
        total += scores[best];
        scores[best] = -INFINITY;
    }
    float divisor = experts->is_normalized ? total + experts->sum_epsilon : 1.0f;
    for (long i = 0; i < experts->num_chosen; i++) {
        weights[i] = weights[i] / divisor * experts->scale;
        if (experts->expert_scales) weights[i] *= experts->expert_scales[chosen[i]];
    }
}

// The places of the rows among their experts' rows; each thread finds them by itself.
typedef struct {
    int32_t *places;  // [num_rows][num_chosen] in the rows of all experts
    long *ends;       // [num_experts] of the rows of each
} Placement;

// Give each row a place with each of its experts.
static Placement place_rows(const Experts *experts, const int32_t *chosen, long num_chosen) {
    long num_experts = experts->num_experts, begin = 0;
    long *ends = own_memory(OWN_CHOICE, num_experts * (long)sizeof(long) + num_chosen * (long)sizeof(int32_t));
    int32_t *places = (int32_t *)(ends + num_experts);
    memset(ends, 0, (size_t)num_experts * sizeof *ends);
    for (long i = 0; i < num_chosen; i++) {
        int32_t expert = chosen[i];
        places[i] = expert >= 0 && expert < num_experts ? expert : 0;  // a late thread may read anything
        ends[places[i]]++;
    }
    for (long expert = 0; expert < num_experts; expert++) {
        long count = ends[expert];
        ends[expert] = begin;
        begin += count;
    }
    for (long i = 0; i < num_chosen; i++) places[i] = (int32_t)ends[places[i]]++;
    return (Placement){places, ends};
}

// Some rows of one expert times one panel of its matrices.
typedef struct {
    long expert, panel, next, first_row, num_rows;
} ExpertTask;

// Tasks of a phase: tasks of an expert lie side by side.
static long num_tasks_of(const Experts *experts, const long *ends, long num_panels) {
    long num_tasks = 0;
    for (long expert = 0, begin = 0; expert < experts->num_experts; begin = ends[expert++])
        num_tasks += num_panels * ceil_div(ends[expert] - begin, TASK_ROWS);
    return num_tasks;
}

static ExpertTask find_task(const long *ends, long num_panels, const Phase *phase) {
    long expert = 0, begin = 0, first = 0, num_tasks;
    for (;; first += num_tasks, begin = ends[expert++]) {
        num_tasks = num_panels * ceil_div(ends[expert] - begin, TASK_ROWS);
        if (phase->task < first + num_tasks) break;
    }
    long index = phase->task - first, first_row = begin + index / num_panels * TASK_ROWS;
    long next = upcoming_task(phase) - first;
    return (ExpertTask){
        .expert = expert,
        .panel = index % num_panels,
        .next = next < num_tasks ? next % num_panels : index % num_panels,
        .first_row = first_row,
        .num_rows = least(TASK_ROWS, ends[expert] - first_row),
    };
}

static void activate_experts(const Experts *experts, Activation activation, const long *ends, const Rows *gathered,
                             const Rows *activated, Repetition repetition, const Member *member) {
    long num_panels = ceil_div(experts->mlps->up.num_outputs, PANEL_COLUMNS);
    Phase phase = begin_phase(member, num_tasks_of(experts, ends, num_panels), repetition);
    while (next_task(&phase)) {
        ExpertTask task = find_task(ends, num_panels, &phase);
        activate_panel(experts->mlps + task.expert, activation, task.panel, task.next, gathered, task.first_row,
                       task.num_rows, activated, &phase);
    }
}

static void run_down(const Experts *experts, const long *ends, const Rows *activated, float *outputs,
                     Repetition repetition, const Member *member) {
    long num_outputs = experts->mlps->down.num_outputs, num_panels = ceil_div(num_outputs, PANEL_COLUMNS);
    Phase phase = begin_phase(member, num_tasks_of(experts, ends, num_panels), repetition);
    while (next_task(&phase)) {
        ExpertTask task = find_task(ends, num_panels, &phase);
        multiply_panel(&experts->mlps[task.expert].down, task.panel, task.next, activated, task.first_row,
                       task.num_rows, outputs, num_outputs, false, &phase);
    }
}

// out (=|+=) the weighted sum of the outputs of its experts, one row.
static void sum_outputs(const Experts *experts, const Placement *placement, const ExpertsScratch *scratch, long row,
                        float *out, bool add) {
    long size = experts->mlps->down.num_outputs, num_chosen = experts->num_chosen;
    const int32_t *places = placement->places + row * num_chosen;
    const float *weights = scratch->weights + row * num_chosen;
    for (long i = 0; i < size; i += LANES) {
        vfloat sum = vf_zero();
        for (long j = 0; j < num_chosen; j++)
            sum = vf_fma(vf_all(weights[j]), vf_load_part(scratch->outputs + places[j] * size + i, size - i), sum);
        vf_store_part(out + i, add ? vf_add(vf_load_part(out + i, size - i), sum) : sum, size - i);
    }
}

void run_experts(const Experts *experts, Activation activation, const Rows *scored, const Rows *in,
                 const ExpertsScratch *scratch, float *out, bool add, const Member *member) {
    long num_chosen = experts->num_chosen, num_places = in->num_rows * num_chosen;
    long hidden_size = experts->mlps->down.num_outputs, num_inputs = experts->mlps->down.num_inputs;
    Repetition repetition = in->num_rows <= REPEATED_ROWS ? REPEATABLE : ONCE;
    project(&experts->router, scored, scratch->scores, false, member);
    Phase choices = begin_phase(member, in->num_rows, ONCE);
    while (next_task(&choices))
        choose_experts(experts, scratch->scores + choices.task * experts->num_experts,
                       scratch->chosen + choices.task * num_chosen, scratch->weights + choices.task * num_chosen);
    Placement placement = place_rows(experts, scratch->chosen, num_places);
    Rows gathered = scratch->gathered, activated = scratch->activated;
    if (is_for_each(in->num_rows, member)) {
        gathered = own_rows(OWN_GATHERED, num_places, experts->mlps->up.num_inputs, gathered.format);
        for (long i = 0; i < num_places; i++) copy_row(in, i / num_chosen, &gathered, placement.places[i]);
    } else {
        Phase copies = begin_phase(member, num_places, ONCE);
        while (next_task(&copies))
            copy_row(in, copies.task / num_chosen, &gathered, placement.places[copies.task]);
    }
    activate_experts(experts, activation, placement.ends, &gathered, &activated, repetition, member);
    if (activated.format != FLOATS && activated.values) {
        Phase phase = begin_phase(member, num_places, ONCE);
        while (next_task(&phase))
            quantize_rows(&activated, num_inputs, activated.values, activated.stride, phase.task, phase.task + 1);
    }
    run_down(experts, placement.ends, &activated, scratch->outputs, repetition, member);
    Phase sums = begin_phase(member, in->num_rows, ONCE);
    while (next_task(&sums))
        sum_outputs(experts, &placement, scratch, sums.task, out + sums.task * hidden_size, add);
}
