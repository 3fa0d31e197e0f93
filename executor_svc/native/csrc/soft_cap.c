#include "soft_cap.h"

#include "vec.h"

// Values that a thread caps or scales together, and that are worth a second thread.
#define PART 20000l

void cap_values(long count, float cap, float *values) {
    vfloat whole = vf_all(cap);
    for (long i = 0; i < count; i += LANES) {
        vfloat capped = vf_mul(whole, vf_tanh(vf_div(vf_load_part(values + i, count - i), whole)));
        vf_store_part(values + i, capped, count - i);
    }
}

// cap_values, by several threads.
void octavo_soft_cap(long count, float cap, float *values, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (count > PART)
    for (long begin = 0; begin < count; begin += PART) cap_values(least(PART, count - begin), cap, values + begin);
}

// values *= factor, by several threads.
void octavo_scale(long count, float factor, float *values, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (count > PART)
    for (long begin = 0; begin < count; begin += PART) {
        long end = least(begin + PART, count);
        for (long i = begin; i < end; i++) values[i] *= factor;
    }
}
