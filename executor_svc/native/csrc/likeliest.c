// Rows fall into parts, so that all threads have some of a single row; parts begin at fixed places.
#include "likeliest.h"

#include <math.h>

#include "soft_cap.h"
#include "vec.h"

#define PART 8192          // scores that a thread looks at together
#define CHUNK (16 * LANES)  // scores of which the largest is found before the next ones are looked at

long first_largest(const float *scores, long size) {
    float top = -INFINITY;
    long found = 0;  // where the chunk begins that has it
    for (long begin = 0; begin < size; begin += CHUNK) {
        vfloat most[4] = {vf_all(-INFINITY), vf_all(-INFINITY), vf_all(-INFINITY), vf_all(-INFINITY)};
        float largest = -INFINITY;
        if (size - begin >= CHUNK) {
            for (long i = 0; i < CHUNK; i += 4 * LANES)
                for (long j = 0; j < 4; j++) most[j] = vf_max(vf_load(scores + begin + i + j * LANES), most[j]);
            largest = vf_largest(vf_max(vf_max(most[0], most[1]), vf_max(most[2], most[3])));
        } else {
            for (long i = begin; i < size; i++) largest = scores[i] > largest ? scores[i] : largest;
        }
        if (!(largest > top)) continue;
        top = largest;
        found = begin;
    }
    for (long i = found; i < size; i++)
        if (scores[i] == top) return i;
    return 0;
}

// The first of the largest of a row; `found` has that of each part.
static long join_parts(const float *row, long size, const int32_t *found) {
    float top = -INFINITY;
    long likeliest = -1;
    for (long part = 0; part < ceil_div(size, PART); part++) {
        if (!(row[found[part]] > top)) continue;
        top = row[found[part]];
        likeliest = found[part];
    }
    return likeliest < 0 ? first_largest(row, size) : likeliest;  // no number above -inf: looked at as a whole
}

long likeliest_scratch_bytes(const Logits *logits) {
    return logits->num_rows * ceil_div(logits->size, PART) * (long)sizeof(int32_t);
}

void finish_logits(const Logits *logits, int32_t *memory, const Member *member) {
    if (!logits->soft_cap && !logits->likeliest) return;
    long num_parts = ceil_div(logits->size, PART);
    Phase parts = begin_phase(member, logits->num_rows * num_parts, ONCE);
    while (next_task(&parts)) {
        long begin = parts.task % num_parts * PART, count = least(PART, logits->size - begin);
        float *values = logits->values + parts.task / num_parts * logits->size + begin;
        if (logits->soft_cap) cap_values(count, logits->soft_cap, values);
        if (logits->likeliest) memory[parts.task] = (int32_t)(begin + first_largest(values, count));
    }
    if (!logits->likeliest) return;
    Phase rows = begin_phase(member, logits->num_rows, ONCE);
    while (next_task(&rows))
        logits->likeliest[rows.task] = (int32_t)join_parts(logits->values + rows.task * logits->size, logits->size,
                                                           memory + rows.task * num_parts);
}
