// What changes a row of scores by what came before it and by its rules; executor_svc/sampler/torch_backend.py in torch.
#ifndef OCTAVO_PROCESSORS_H
#define OCTAVO_PROCESSORS_H

#include <stdint.h>

// One row. Begins are places in the lists of `TokenLists`.
typedef struct {
    int64_t history_begin;
    int64_t mask_begin;  // -1: every token is allowed
    int64_t biases_begin, num_biases;
    int64_t forbidden_begin, num_forbidden;
    int32_t num_tokens;         // of the history: prompt, then output
    int32_t num_prompt_tokens;
    // The processors of octavo/values/sampling_params_table.py, in its order.
    float repetition_penalty;  // 1: off
    float presence_penalty;    // 0: off
    float frequency_penalty;   // 0: off
    int32_t no_repeat_ngram_size;  // 0: off
} Processing;

// The lists of the rows of a call, one row after the other.
typedef struct {
    const int32_t *histories;
    const uint8_t *masks;  // a bit for each token, the lowest first
    const int32_t *biased_ids;  // distinct in a row
    const float *biases;
    const int32_t *forbidden_ids;
} TokenLists;

// Change a row of `size` scores. counts: [size], overwritten.
void process_row(float *scores, long size, const Processing *how, const TokenLists *lists, int32_t *counts);

#endif
