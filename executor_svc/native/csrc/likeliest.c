// Rows fall into parts, so that all threads have some of a single row; parts begin at fixed places.
#include "likeliest.h"

#include <math.h>

#include "soft_cap.h"
#include "vec.h"

#define PART 8192          // scores that a thread looks at together
#define CHUNK (16 * LANES)  // scores of which the largest is found before the next ones are looked at

#define NOTHING -2  // in place of a token of a part: there is nothing but -infinity, as there may be

// The first of the largest of some scores, NOTHING, or NOT_FINITE.
static long largest_of(const float *scores, long size) {
    float top = -INFINITY;
    long found = 0;  // where its chunk begins
    vmask broken = vm_none();
    for (long begin = 0; begin < size; begin += CHUNK) {
        vfloat most[4] = {vf_all(-INFINITY), vf_all(-INFINITY), vf_all(-INFINITY), vf_all(-INFINITY)};
        float largest = -INFINITY;
        if (size - begin >= CHUNK) {
            for (long i = 0; i < CHUNK; i += 4 * LANES)
                for (long j = 0; j < 4; j++) {
                    vfloat x = vf_load(scores + begin + i + j * LANES);
                    most[j] = vf_max(x, most[j]);
                    broken = vm_or(broken, vf_not_below_infinity(x));
                }
            largest = vf_largest(vf_max(vf_max(most[0], most[1]), vf_max(most[2], most[3])));
        } else {
            for (long i = begin; i < size; i++) {
                if (!(scores[i] < INFINITY)) return NOT_FINITE;
                largest = scores[i] > largest ? scores[i] : largest;
            }
        }
        if (!(largest > top)) continue;
        top = largest;
        found = begin;
    }
    if (vm_any(broken)) return NOT_FINITE;
    if (top == -INFINITY) return NOTHING;
    while (scores[found] != top) found++;
    return found;
}

long first_largest(const float *scores, long size) {
    long found = largest_of(scores, size);
    return found < 0 ? NOT_FINITE : found;
}

// The first of the largest of a row, or NOT_FINITE; `found` has the result of largest_of for each part.
static long join_parts(const float *row, long size, const int32_t *found) {
    long likeliest = NOT_FINITE;
    for (long part = 0; part < ceil_div(size, PART); part++) {
        if (found[part] == NOT_FINITE) return NOT_FINITE;
        if (found[part] == NOTHING) continue;
        if (likeliest < 0 || row[found[part]] > row[likeliest]) likeliest = found[part];
    }
    return likeliest;
}

long likeliest_scratch_bytes(const Logits *logits) {
    return logits->num_rows * ceil_div(logits->size, PART) * (long)sizeof(int32_t);
}

void finish_logits(const Logits *logits, int32_t *memory, const Member *member) {
    if (logits->scale == 1 && !logits->soft_cap && !logits->likeliest) return;
    long num_parts = ceil_div(logits->size, PART);
    Phase parts = begin_phase(member, logits->num_rows * num_parts, ONCE);
    while (next_task(&parts)) {
        long begin = parts.task % num_parts * PART, count = least(PART, logits->size - begin);
        float *values = logits->values + parts.task / num_parts * logits->size + begin;
        if (logits->scale != 1)
            for (long i = 0; i < count; i++) values[i] *= logits->scale;
        if (logits->soft_cap) cap_values(count, logits->soft_cap, values);
        if (!logits->likeliest) continue;
        long found = largest_of(values, count);
        memory[parts.task] = (int32_t)(found < 0 ? found : begin + found);
    }
    if (!logits->likeliest) return;
    Phase rows = begin_phase(member, logits->num_rows, ONCE);
    while (next_task(&rows))
        logits->likeliest[rows.task] = (int32_t)join_parts(logits->values + rows.task * logits->size, logits->size,
                                                           memory + rows.task * num_parts);
}
