// The processors, in the order and with the meaning of executor_svc/sampler/torch_backend.py.
#include <math.h>
#include <stdbool.h>

#include "processors.h"

// The sizes that the caller compares with its own records.
long octavo_processing_bytes(void) { return (long)sizeof(Processing); }

// Whether a token of a history is known: an unknown one is below 0.
static bool is_token(int32_t token_id, long size) { return token_id >= 0 && token_id < size; }

// Make every token of prompt and output less likely, once however often it is there.
static void penalize_repetition(float *scores, long size, const int32_t *history, long num_tokens, float penalty,
                                int32_t *counts) {
    for (long i = 0; i < num_tokens; i++)
        if (is_token(history[i], size)) counts[history[i]] = 1;
    for (long i = 0; i < num_tokens; i++) {
        int32_t id = history[i];
        if (!is_token(id, size) || !counts[id]) continue;
        counts[id] = 0;
        scores[id] = scores[id] < 0.0f ? scores[id] * penalty : scores[id] / penalty;
    }
}

// Make the tokens of the output less likely: each once for being there, and once for each time.
static void penalize_output(float *scores, long size, const int32_t *output, long num_tokens, float presence,
                            float frequency, int32_t *counts) {
    for (long i = 0; i < num_tokens; i++)
        if (is_token(output[i], size)) counts[output[i]] = 0;
    for (long i = 0; i < num_tokens; i++)
        if (is_token(output[i], size)) counts[output[i]]++;
    for (long i = 0; i < num_tokens; i++) {
        int32_t id = output[i];
        if (!is_token(id, size) || !counts[id]) continue;
        float penalty = frequency * (float)counts[id] + presence;
        counts[id] = 0;
        scores[id] -= penalty;
    }
}

// Set to -inf each token that would end an n-gram of `length` tokens that the history has already.
static void ban_repeated_ngrams(float *scores, long size, const int32_t *history, long num_tokens, long length) {
    const int32_t *last = history + num_tokens - (length - 1);
    for (long end = length - 1; end < num_tokens; end++) {
        const int32_t *begin = history + end - (length - 1);
        long i = 0;
        while (i < length - 1 && begin[i] == last[i]) i++;
        if (i == length - 1 && is_token(history[end], size)) scores[history[end]] = -INFINITY;
    }
}

// Set to -inf the tokens that are not in a list of allowed ones.
static void keep_allowed(float *scores, long size, const uint8_t *mask) {
    for (long byte = 0; byte < size / 8; byte++)
        for (int bit = 0; bit < 8; bit++) {
            float *score = scores + 8 * byte + bit;
            *score = mask[byte] >> bit & 1 ? *score : -INFINITY;
        }
    for (long id = size / 8 * 8; id < size; id++)
        if (!(mask[id / 8] >> id % 8 & 1)) scores[id] = -INFINITY;
}

void process_row(float *scores, long size, const Processing *how, const TokenLists *lists, int32_t *counts) {
    const int32_t *history = lists->histories + how->history_begin;
    const int32_t *biased = lists->biased_ids + how->biases_begin;
    const float *biases = lists->biases + how->biases_begin;
    const int32_t *forbidden = lists->forbidden_ids + how->forbidden_begin;
    for (long i = 0; i < how->num_biases; i++) scores[biased[i]] += biases[i];
    if (how->repetition_penalty != 1.0f)
        penalize_repetition(scores, size, history, how->num_tokens, how->repetition_penalty, counts);
    if (how->presence_penalty != 0.0f || how->frequency_penalty != 0.0f)
        penalize_output(scores, size, history + how->num_prompt_tokens, how->num_tokens - how->num_prompt_tokens,
                        how->presence_penalty, how->frequency_penalty, counts);
    if (how->no_repeat_ngram_size > 0 && how->no_repeat_ngram_size <= how->num_tokens)
        ban_repeated_ngrams(scores, size, history, how->num_tokens, how->no_repeat_ngram_size);
    for (long i = 0; i < how->num_forbidden; i++) scores[forbidden[i]] = -INFINITY;
    if (how->mask_begin >= 0) keep_allowed(scores, size, lists->masks + how->mask_begin);
}
