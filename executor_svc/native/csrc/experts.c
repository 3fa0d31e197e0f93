// A mixture of experts: each row goes to a few of many MLPs. Source: Shazeer et al. 2017, "Outrageously Large Neural
// Networks". Rows are gathered expert by expert, so that each matrix is read once; where a row lies among the others
// changes nothing about it.
#include <math.h>
#include <string.h>

#include "layers.h"

void lay_out_experts(const Experts *experts, long num_rows, Arena *arena, ExpertsScratch *scratch) {
    long num_chosen = num_rows * experts->num_chosen;
    const Mlp *first = experts->mlps;
    InputFormat format = input_format(&first->up);
    *scratch = (ExpertsScratch){
        .scores = take(arena, num_rows * experts->num_experts * (long)sizeof(float)),
        .chosen = take(arena, num_chosen * (long)sizeof(int32_t)),
        .weights = take(arena, num_chosen * (long)sizeof(float)),
        .places = take(arena, num_chosen * (long)sizeof(int32_t)),
        .ends = take(arena, experts->num_experts * (long)sizeof(long)),
        .gathered = take_rows(arena, num_chosen, first->up.num_inputs, format),
        .activated = take_rows(arena, num_chosen, first->down.num_inputs, format),
        .outputs = take(arena, num_chosen * first->down.num_outputs * (long)sizeof(float)),
    };
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

// Choose the experts of one row: the largest scores, of equal ones the first; what is chosen is struck out.
static void choose_experts(const Experts *experts, float *scores, int32_t *chosen, float *weights) {
    soften_scores(scores, experts->num_experts);
    float total = 0;
    for (long i = 0; i < experts->num_chosen; i++) {
        long best = -1;
        for (long expert = 0; expert < experts->num_experts; expert++)
            if (scores[expert] != -INFINITY && (best < 0 || scores[expert] > scores[best])) best = expert;
        chosen[i] = (int32_t)best;
        weights[i] = scores[best];
        total += scores[best];
        scores[best] = -INFINITY;
    }
    if (!experts->is_normalized) return;
    for (long i = 0; i < experts->num_chosen; i++) weights[i] /= total;
}

// Give each row a place with each of its experts.
static void place_rows(const Experts *experts, long num_chosen, const ExpertsScratch *scratch) {
    long *ends = scratch->ends, begin = 0;
    memset(ends, 0, (size_t)experts->num_experts * sizeof *ends);
    for (long i = 0; i < num_chosen; i++) ends[scratch->chosen[i]]++;
    for (long expert = 0; expert < experts->num_experts; expert++) {
        long count = ends[expert];
        ends[expert] = begin;
        begin += count;
    }
    for (long i = 0; i < num_chosen; i++) scratch->places[i] = (int32_t)ends[scratch->chosen[i]]++;
}

// Some rows of one expert times one panel of its matrices.
typedef struct {
    long expert, panel, next, first_row, num_rows;
} ExpertTask;

// Finds the tasks of a phase; they are asked for in rising order.
typedef struct {
    const long *ends;
    long num_panels;
    long expert, first;  // the expert of the last task, and its first task
} TaskFinder;

// Return a task, or one without rows behind the last.
static ExpertTask find_task(TaskFinder *finder, const Experts *experts, long task) {
    for (; finder->expert < experts->num_experts; finder->expert++) {
        long expert = finder->expert, begin = expert ? finder->ends[expert - 1] : 0, end = finder->ends[expert];
        long num_tasks = finder->num_panels * ceil_div(end - begin, TASK_ROWS), index = task - finder->first;
        if (index < num_tasks) {
            long panel = index % finder->num_panels, first_row = begin + index / finder->num_panels * TASK_ROWS;
            long next = least(panel + 1, finder->num_panels - 1);
            return (ExpertTask){expert, panel, next, first_row, least(TASK_ROWS, end - first_row)};
        }
        finder->first += num_tasks;
    }
    return (ExpertTask){0};
}

static void activate_experts(const Experts *experts, Activation activation, const ExpertsScratch *scratch,
                             const Member *member) {
    TaskFinder finder = {scratch->ends, ceil_div(experts->mlps->up.num_outputs, PANEL_COLUMNS), 0, 0};
    for (long i = member->thread;; i = next_task(member)) {
        ExpertTask task = find_task(&finder, experts, i);
        if (!task.num_rows) return;
        activate_panel(experts->mlps + task.expert, activation, task.panel, task.next, &scratch->gathered,
                       task.first_row, task.num_rows, &scratch->activated);
    }
}

static void run_down(const Experts *experts, const ExpertsScratch *scratch, const Member *member) {
    long num_outputs = experts->mlps->down.num_outputs;
    TaskFinder finder = {scratch->ends, ceil_div(num_outputs, PANEL_COLUMNS), 0, 0};
    for (long i = member->thread;; i = next_task(member)) {
        ExpertTask task = find_task(&finder, experts, i);
        if (!task.num_rows) return;
        multiply(&experts->mlps[task.expert].down, task.panel, task.next, &scratch->activated, task.first_row,
                 task.num_rows, scratch->outputs + task.first_row * num_outputs + task.panel * PANEL_COLUMNS,
                 num_outputs, false);
    }
}

// out (=|+=) the weighted sum of the outputs of its experts, one row.
static void sum_outputs(const Experts *experts, const ExpertsScratch *scratch, long row, float *out, bool add) {
    long size = experts->mlps->down.num_outputs, num_chosen = experts->num_chosen;
    const int32_t *places = scratch->places + row * num_chosen;
    const float *weights = scratch->weights + row * num_chosen;
    for (long i = 0; i < size; i += LANES) {
        vfloat sum = vf_zero();
        for (long j = 0; j < num_chosen; j++)
            sum = vf_fma(vf_all(weights[j]), vf_load_part(scratch->outputs + places[j] * size + i, size - i), sum);
        vf_store_part(out + i, add ? vf_add(vf_load_part(out + i, size - i), sum) : sum, size - i);
    }
}

void run_experts(const Experts *experts, Activation activation, const Rows *in, const ExpertsScratch *scratch,
                 float *out, bool add, const Member *member) {
    long num_rows = in->num_rows, num_chosen = experts->num_chosen, hidden_size = experts->mlps->down.num_outputs;
    long begin, end;
    project(&experts->router, in, scratch->scores, false, member);
    wait_for_all(member);
    share(member, num_rows, &begin, &end);
    for (long row = begin; row < end; row++)
        choose_experts(experts, scratch->scores + row * experts->num_experts, scratch->chosen + row * num_chosen,
                       scratch->weights + row * num_chosen);
    wait_for_all(member);
    if (member->thread == 0) place_rows(experts, num_rows * num_chosen, scratch);
    wait_for_all(member);
    for (long i = begin * num_chosen; i < end * num_chosen; i++)
        copy_row(in, i / num_chosen, &scratch->gathered, scratch->places[i]);
    wait_for_all(member);
    activate_experts(experts, activation, scratch, member);
    wait_for_all(member);
    const Rows *activated = &scratch->activated;
    if (activated->format != FLOATS) {
        long first, last;
        share(member, num_rows * num_chosen, &first, &last);
        quantize_rows(activated, experts->mlps->down.num_inputs, activated->values, activated->stride, first, last);
        wait_for_all(member);
    }
    run_down(experts, scratch, member);
    wait_for_all(member);
    for (long row = begin; row < end; row++) sum_outputs(experts, scratch, row, out + row * hidden_size, add);
}
