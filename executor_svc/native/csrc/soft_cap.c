// The soft cap of logits.
#include "vec.h"

// Values that are worth a second thread.
#define ALONE 20000l

// values[count] = cap * tanh(values / cap)
void octavo_soft_cap(long count, float cap, float *values, int num_threads) {
    vfloat whole = vf_all(cap);
#pragma omp parallel for num_threads(num_threads) if (count >= ALONE)
    for (long i = 0; i < count; i += LANES) {
        vfloat capped = vf_mul(whole, vf_tanh(vf_div(vf_load_part(values + i, count - i), whole)));
        vf_store_part(values + i, capped, count - i);
    }
}
