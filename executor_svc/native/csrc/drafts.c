// Drafts by prompt lookup: what followed, earlier in a sequence, on the tokens that now end it.
//
// Source: Saxena 2023, "Prompt Lookup Decoding".
#include <stdbool.h>
#include <stdint.h>

#include "vec.h"

#define LEAST_MATCH 2     // tokens that have to stand there as at the end
#define LONGEST_MATCH 16  // the latest place with so many is taken
#define REACH 16384       // tokens that are looked through, from the end
#define AT_ONCE 16

// How many tokens before `end` are those before `num_tokens`.
static long match_length(const int32_t *tokens, long end, long num_tokens) {
    long length = 0, most = least(end, LONGEST_MATCH);
    while (length < most && tokens[end - 1 - length] == tokens[num_tokens - 1 - length]) length++;
    return length;
}

// Whether two tokens stand one behind the other where a place in [begin, end) is the second one's.
static bool has_pair(const int32_t *tokens, long begin, long end, int32_t first, int32_t second) {
    int32_t found = 0;
    for (long i = begin; i < end; i++) found |= (tokens[i - 1] == first) & (tokens[i] == second);
    return found;
}

// Where the longest match with the end of a sequence ends, of equal ones the latest; 0: there is none.
static long find_match(const int32_t *tokens, long num_tokens) {
    if (num_tokens <= LEAST_MATCH) return 0;
    const int32_t first = tokens[num_tokens - 2], second = tokens[num_tokens - 1];
    const long begin = most(1, num_tokens - REACH);
    long found = 0, longest = 0;
    for (long upper = num_tokens - 1; upper > begin; upper -= AT_ONCE) {
        long lower = most(begin, upper - AT_ONCE);
        if (!has_pair(tokens, lower, upper, first, second)) continue;
        for (long place = upper - 1; place >= lower; place--) {
            long length = match_length(tokens, place + 1, num_tokens);
            if (length < LEAST_MATCH || length <= longest) continue;
            found = place + 1, longest = length;
            if (length == LONGEST_MATCH) return found;
        }
    }
    return found;
}

// drafts[row][..] = up to most[row] tokens that may follow the num_tokens[row] of slot slots[row]; counts[row] of them.
// token_ids is [any][width], drafts [num_rows][stride].
void octavo_look_up_drafts(const int32_t *token_ids, long width, long num_rows, const int32_t *slots,
                           const int32_t *num_tokens, const int32_t *most, int32_t *drafts, long stride,
                           int32_t *counts) {
    for (long row = 0; row < num_rows; row++) {
        const int32_t *tokens = token_ids + slots[row] * width;
        long begin = most[row] ? find_match(tokens, num_tokens[row]) : 0;
        counts[row] = begin ? most[row] : 0;
        for (long i = 0; i < counts[row]; i++) {  // a match that reaches the end goes on with its own drafts
            long place = begin + i, behind = place - num_tokens[row];
            drafts[row * stride + i] = behind < 0 ? tokens[place] : drafts[row * stride + behind];
        }
    }
}
