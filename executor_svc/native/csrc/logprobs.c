// Log-probabilities of rows of logits: of one token, of the likeliest ones, and of beams, which are processed.
//
// All are the logit less the logarithm of the row's sum, in double, then rounded: the same token always has the same
// log-probability.
#include <stdlib.h>

#include "processors.h"
#include "scores.h"

// What is wanted of a row of logits.
typedef struct {
    int64_t row;
    int64_t begin;       // of its likeliest tokens in the results
    int64_t processing;  // of a beam: which of the records; -1: nothing changes the row
    int32_t token_id;
    int32_t count;  // how many of the likeliest
} Wanted;

// The size that the caller compares with its own record.
long octavo_wanted_bytes(void) { return (long)sizeof(Wanted); }

// + 0.0f makes a 0 of -0.
INLINE float logprob_of(float logit, double log_total) { return (float)((double)logit - log_total) + 0.0f; }

// The logarithm of the sum of exp(score); NaN if the row is not finite. Writes the maxima of the blocks.
static double log_total_of(const float *scores, long size, float *maxima) {
    float top = find_maxima(scores, size, maxima);
    if (!is_finite(top)) return NAN;
    return log_of(weigh_row(scores, size, 1.0f, top, maxima, false, NULL).total) + top;
}

static int compare(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

// Write the `count` largest scores of a row, falling, and their ids; equal ones by id. NaN is like -inf.
// scratch: has the maxima of the blocks.
static void find_likeliest(const float *scores, long size, long count, Scratch *scratch, int32_t *token_ids,
                           float *values) {
    if (!count) return;
    long num_blocks = ceil_div(size, BLOCK), num_found = 0;
    float *keys = scratch->keys, padded[BLOCK], least = -INFINITY;
    // There are as many blocks as wanted tokens, and each has a token that reaches the least of their maxima.
    if (count <= num_blocks) least = last_key(scratch->maxima, NULL, num_blocks, (double)count, scratch->buckets);
    for (long block = 0; block < num_blocks; block++) {
        if (!(scratch->maxima[block] >= least)) continue;
        const float *p = block_of(scores, size, block, padded);
        for (long i = 0; i < BLOCK && block * BLOCK + i < size; i++) {
            if (!(p[i] >= least) && least > -INFINITY) continue;
            scratch->token_ids[num_found] = (int32_t)(block * BLOCK + i);
            keys[num_found++] = p[i] >= least ? p[i] + 0.0f : -INFINITY;  // 0 and -0 are equal
        }
    }
    least = last_key(keys, NULL, num_found, (double)count, scratch->buckets);
    long num_equal = count, num_sorted = 0;  // how many tokens equal to the least one fit
    for (long i = 0; i < num_found; i++) num_equal -= keys[i] > least;
    for (long i = 0; i < num_found; i++) {
        if (keys[i] < least || (keys[i] == least && num_equal-- <= 0)) continue;
        scratch->sorted[num_sorted++] = (uint64_t)~in_order(keys[i]) << 32 | (uint32_t)scratch->token_ids[i];
    }
    qsort(scratch->sorted, (size_t)count, sizeof *scratch->sorted, compare);
    for (long i = 0; i < count; i++) {
        token_ids[i] = (int32_t)(scratch->sorted[i] & 0xffffffffu);
        values[i] = from_order(~(uint32_t)(scratch->sorted[i] >> 32));
    }
}

typedef struct {
    const float *logits;
    long size, num_rows;
    const Wanted *wanted;
    const Processing *processings;
    const TokenLists *lists;
    float *logprobs;
    int32_t *token_ids;
    float *likeliest;
    void *scratch_memory;
} LogprobsCall;

static void run_logprobs(const Member *member, void *argument) {
    const LogprobsCall *call = argument;
    Scratch scratch = own_scratch(call->size, call->scratch_memory, member);
    Phase phase = begin_phase(member, call->num_rows, ONCE);
    while (next_task(&phase)) {
        const Wanted *wanted = call->wanted + phase.task;
        const float *scores = call->logits + wanted->row * call->size;
        double log_total = log_total_of(scores, call->size, scratch.maxima);
        float *values = call->likeliest + wanted->begin;
        call->logprobs[phase.task] = logprob_of(scores[wanted->token_id], log_total);
        find_likeliest(scores, call->size, wanted->count, &scratch, call->token_ids + wanted->begin, values);
        for (long j = 0; j < wanted->count; j++) values[j] = logprob_of(values[j], log_total);
    }
}

// Write the log-probability of a token of each row, [num_rows], and its likeliest tokens with theirs.
// logits: [any, size]; token_ids, likeliest: as many as the counts add up to.
void octavo_logprobs(const float *logits, long size, long num_rows, const Wanted *wanted, float *logprobs,
                     int32_t *token_ids, float *likeliest, void *scratch_memory, Team *team) {
    Team alone = {.num_threads = 1, .size = 1};
    if (num_rows * size < ALONE) team = &alone;
    run_region(team, run_logprobs,
               &(LogprobsCall){logits, size, num_rows, wanted, NULL, NULL, logprobs, token_ids, likeliest,
                               scratch_memory});
}

static void run_candidates(const Member *member, void *argument) {
    const LogprobsCall *call = argument;
    long size = call->size;
    Scratch scratch = own_scratch(size, call->scratch_memory, member);
    Phase phase = begin_phase(member, call->num_rows, ONCE);
    while (next_task(&phase)) {
        const Wanted *wanted = call->wanted + phase.task;
        const float *scores = call->logits + wanted->row * size;
        float *logprobs = scratch.processed;
        double log_total = log_total_of(scores, size, scratch.maxima);
        for (long id = 0; id < size; id++) logprobs[id] = logprob_of(scores[id], log_total);
        if (wanted->processing >= 0)
            process_row(logprobs, size, call->processings + wanted->processing, call->lists, scratch.counts);
        find_maxima(logprobs, size, scratch.maxima);
        find_likeliest(logprobs, size, wanted->count, &scratch, call->token_ids + wanted->begin,
                       call->likeliest + wanted->begin);
    }
}

// Write the likeliest tokens of beams: of the log-probabilities of a row after the processors, not normalised again.
// processings: the records that `wanted` names; the rest as in octavo_logprobs.
void octavo_candidates(const float *logits, long size, long num_rows, const Wanted *wanted,
                       const Processing *processings, const TokenLists *lists, int32_t *token_ids, float *likeliest,
                       void *scratch_memory, Team *team) {
    Team alone = {.num_threads = 1, .size = 1};
    if (num_rows * size < ALONE) team = &alone;
    run_region(team, run_candidates,
               &(LogprobsCall){logits, size, num_rows, wanted, processings, lists, NULL, token_ids, likeliest,
                               scratch_memory});
}
