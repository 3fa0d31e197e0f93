// From scores to tokens: processors, filters and draw, row by row, each on any free thread.
//
// executor_svc/sampler/filters.py says the same in torch, and what the filters mean. A row is read
// two or three times: for the maxima of its blocks, for the sum of its weights, and for its candidates, the tokens
// that a bound does not rule out. All filters work on the candidates.
#include <float.h>

#include "likeliest.h"
#include "processors.h"
#include "scores.h"

#define MIN_TEMPERATURE 1e-6f  // MIN_TEMPERATURE of filters.py
#define MARGIN 0.5             // bounds of probabilities are so much lower than they need be, so that rounding is safe

// How a token is chosen from a row of scores: the filters of octavo/values/sampling_params_table.py, in its order.
typedef struct {
    int64_t row;
    int64_t processing;  // which of the records; -1: nothing changes the row
    double draw;         // 0 to below 1
    float temperature;   // 0: the likeliest token
    int32_t top_k;      // 0: off
    float top_p;        // 1: off
    float min_p;        // 0: off
    float typical_p;    // 1: off
} Choice;

// The size that the caller compares with its own record.
long octavo_choice_bytes(void) { return (long)sizeof(Choice); }

static Mass weigh_candidates(const Scratch *scratch, float top) {
    Mass mass = {0.0, 0.0};
    for (long i = 0; i < scratch->num_candidates; i++) {
        mass.total += scratch->weights[i];
        mass.moment += (double)scratch->weights[i] * (scratch->keys[i] - top);
    }
    return mass;
}

// Make candidates of the tokens with a key of at least `least`.
static void gather(const float *scores, long size, float temperature, float top, float least, Scratch *scratch) {
    long count = 0;
    float padded[BLOCK];
    for (long block = 0; block < ceil_div(size, BLOCK); block++) {
        if (!(scratch->maxima[block] / temperature >= least)) continue;
        const float *p = block_of(scores, size, block, padded);
        for (long i = 0; i < BLOCK; i += LANES) {
            uint32_t found = at_least(vf_div(vf_load(p + i), vf_all(temperature)), vf_all(least));
            for (; found; found &= found - 1) {
                long offset = i + __builtin_ctz(found);
                scratch->token_ids[count] = (int32_t)(block * BLOCK + offset);
                scratch->keys[count++] = p[offset] / temperature;
            }
        }
    }
    for (long i = 0; i < count; i += LANES) {
        vfloat shifted = vf_sub(vf_load_part(scratch->keys + i, count - i), vf_all(top));
        vf_store_part(scratch->weights + i, weights_of(shifted), count - i);
    }
    scratch->num_candidates = count;
}

// Keep the candidates with a key in `keys`, one for each, of at least `least`.
static void keep(Scratch *scratch, const float *keys, float least) {
    long count = 0;
    for (long i = 0; i < scratch->num_candidates; i++) {
        if (!(keys[i] >= least)) continue;
        scratch->token_ids[count] = scratch->token_ids[i];
        scratch->weights[count] = scratch->weights[i];
        scratch->keys[count++] = scratch->keys[i];
    }
    scratch->num_candidates = count;
}

// Draw from a whole row: first the block, then the token in it.
static long draw_from_row(const float *scores, long size, float temperature, float top, double total, double draw,
                          const float *sums) {
    double before, inside;
    float padded[BLOCK], weights[BLOCK];
    long block = pick(sums, ceil_div(size, BLOCK), draw * total, &before);
    const float *p = block_of(scores, size, block, padded);
    for (long i = 0; i < BLOCK; i += LANES)
        vf_store(weights + i, weights_of(vf_sub(vf_div(vf_load(p + i), vf_all(temperature)), vf_all(top))));
    return block * BLOCK + pick(weights, BLOCK, draw * total - before, &inside);
}

// Keep the candidates with information nearest to the entropy; the mass is of all that previous filters left.
static void keep_typical(Scratch *scratch, float top, Mass mass, double typical_p) {
    double log_total = log_of(mass.total);
    float entropy = (float)(log_total - mass.moment / mass.total);
    for (long i = 0; i < scratch->num_candidates; i++)
        scratch->closeness[i] = -fabsf(scratch->keys[i] - top - (float)log_total + entropy);
    keep(scratch, scratch->closeness,
         last_key(scratch->closeness, scratch->weights, scratch->num_candidates, typical_p * mass.total,
                  scratch->buckets));
}

// A key below which no token can survive the filters. `mass`: of the row, unless a top-k comes first.
static double least_key(const Choice *how, long size, bool limits_number, float temperature, float top, Mass mass,
                        Scratch *scratch) {
    long num_blocks = ceil_div(size, BLOCK);
    if (limits_number) {  // the k blocks with the largest maxima have k tokens that reach the least maximum
        if (how->top_k > num_blocks) return -FLT_MAX;
        return last_key(scratch->maxima, NULL, num_blocks, how->top_k, scratch->buckets) / temperature;
    }
    if (how->top_p >= 1.0f && how->min_p > 0.0f) return top + (float)log_of(how->min_p);
    // Tokens less likely than (1 - p) / size weigh less than 1 - p together, so a nucleus of p needs none of them.
    double p = how->top_p < 1.0f ? how->top_p : how->typical_p, log_total = log_of(mass.total);
    double depth = log_of((double)size / (1.0 - p));
    // Typical tokens lie in a band around minus the entropy. When it reaches down to twice that, it reaches up to 0, so
    // it holds such a nucleus at this depth at the latest.
    if (how->top_p >= 1.0f) depth = fmax(depth, 2.0 * (log_total - mass.moment / mass.total));
    return top + log_total - depth + log_of(MARGIN);
}

static long choose(const float *scores, long size, const Choice *how, Scratch *scratch) {
    bool limits_number = how->top_k > 0 && how->top_k < size;
    bool has_nucleus = how->top_p < 1.0f, has_least = how->min_p > 0.0f, is_typical = how->typical_p < 1.0f;
    float temperature = how->temperature > MIN_TEMPERATURE ? how->temperature : MIN_TEMPERATURE;
    float top = find_maxima(scores, size, scratch->maxima);
    if (!is_finite(top)) return NOT_FINITE;
    top /= temperature;
    Mass mass = {0.0, 0.0};
    if (!limits_number && !has_nucleus && !has_least && !is_typical) {
        mass = weigh_row(scores, size, temperature, top, scratch->maxima, false, scratch->sums);
        return draw_from_row(scores, size, temperature, top, mass.total, how->draw, scratch->sums);
    }
    if (!limits_number && (has_nucleus || !has_least))
        mass = weigh_row(scores, size, temperature, top, scratch->maxima, !has_nucleus, NULL);
    double least = least_key(how, size, limits_number, temperature, top, mass, scratch);
    gather(scores, size, temperature, top, (float)fmax(least, -FLT_MAX), scratch);
    if (limits_number) {
        keep(scratch, scratch->keys,
             last_key(scratch->keys, NULL, scratch->num_candidates, how->top_k, scratch->buckets));
        mass = weigh_candidates(scratch, top);
    }
    if (has_nucleus)
        keep(scratch, scratch->keys,
             last_key(scratch->keys, scratch->weights, scratch->num_candidates, how->top_p * mass.total,
                      scratch->buckets));
    if (has_least) keep(scratch, scratch->keys, top + (float)log_of(how->min_p));
    if (is_typical) {
        if (has_nucleus || has_least) mass = weigh_candidates(scratch, top);
        keep_typical(scratch, top, mass, how->typical_p);
    }
    if (!scratch->num_candidates) return NOT_FINITE;  // a tiny temperature makes infinity of huge scores
    double target = how->draw * weigh_candidates(scratch, top).total, before;
    return scratch->token_ids[pick(scratch->weights, scratch->num_candidates, target, &before)];
}

// Copy a row; return whether it is free of NaN and infinity, which the processors may hide.
static bool copy_finite(const float *from, long size, float *to) {
    vmask broken = vm_none();
    for (long i = 0; i < size; i += LANES) {
        vfloat x = vf_load_part(from + i, size - i);
        broken = vm_or(broken, vf_not_below_infinity(x));
        vf_store_part(to + i, x, size - i);
    }
    return !vm_any(broken);
}

typedef struct {
    const float *scores;
    long size, num_choices;
    const Choice *choices;
    const Processing *processings;
    const TokenLists *lists;
    int32_t *token_ids;
    void *scratch_memory;
} ChooseCall;

static void run_choose(const Member *member, void *argument) {
    const ChooseCall *call = argument;
    long size = call->size;
    Scratch scratch = own_scratch(size, call->scratch_memory, member);
    Phase phase = begin_phase(member, call->num_choices, ONCE);
    while (next_task(&phase)) {
        const Choice *choice = call->choices + phase.task;
        const float *row = call->scores + choice->row * size;
        if (choice->processing >= 0) {
            if (!copy_finite(row, size, scratch.processed)) {
                call->token_ids[phase.task] = NOT_FINITE;
                continue;
            }
            row = scratch.processed;
            process_row(scratch.processed, size, call->processings + choice->processing, call->lists, scratch.counts);
        }
        bool is_greedy = choice->temperature <= 0.0f;
        call->token_ids[phase.task] = (int32_t)(is_greedy ? first_largest(row, size) : choose(row, size, choice, &scratch));
    }
}

// Choose a token for each of `num_choices`. scores: [any, size]; token_ids: [num_choices], written; NOT_FINITE: the
// row has NaN or infinity, or after the processors nothing but -infinity.
void octavo_choose(const float *scores, long size, long num_choices, const Choice *choices,
                   const Processing *processings, const TokenLists *lists, int32_t *token_ids, void *scratch_memory,
                   Team *team) {
    Team alone = {.num_threads = 1, .size = 1};
    if (num_choices * size < ALONE) team = &alone;
    run_region(team, run_choose,
               &(ChooseCall){scores, size, num_choices, choices, processings, lists, token_ids, scratch_memory});
}

long octavo_sampling_scratch_bytes(long size, int num_threads) {
    Scratch scratch;
    return lay_out(size, 0, &scratch) * num_threads;
}
