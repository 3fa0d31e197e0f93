// From scores to tokens: filters and draw of one row after the other, by whichever thread is free.
//
// executor_svc/sampler/filters.py and drawing.py say the same in torch, and what the filters mean. A row is read
// two or three times: for the maxima of its blocks, for the sum of its weights, and for its candidates, the tokens
// that a bound does not rule out. All filters work on the candidates.
#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdbool.h>
#include <string.h>

#include "select.h"
#include "vec.h"

#define BLOCK 32               // scores whose maximum is kept; BLOCK of likeliest.py
#define FLOOR -80.0f           // exp of less is 0; FLOOR of likeliest.py
#define MIN_TEMPERATURE 1e-6f  // MIN_TEMPERATURE of filters.py
#define MARGIN 0.5             // bounds of probabilities are so much lower than they need be, so that rounding is safe

// How a token is chosen from a row of scores: the filters of shared/sampling_parameters.py, in its order.
typedef struct {
    int64_t row;
    double draw;        // 0 to below 1
    float temperature;  // above 0
    int32_t top_k;      // 0: off
    float top_p;        // 1: off
    float min_p;        // 0: off
    float typical_p;    // 1: off
} Choice;

// What the caller compares with its own record.
long octavo_choice_bytes(void) { return (long)sizeof(Choice); }

// A thread's memory. A key is a score divided by the temperature; a weight is exp(key - top).
typedef struct {
    float *maxima;       // [num_blocks] of the scores
    float *sums;         // [num_blocks] of the weights
    double *buckets;     // [NUM_BUCKETS]
    long num_candidates;
    int32_t *token_ids;  // [size] of the candidates, rising; the others belong to them
    float *keys, *weights, *closeness;
} Scratch;

// The sum of some weights, and that of weight * (key - top).
typedef struct {
    double total, moment;
} Mass;

#if LANES == 16
INLINE uint32_t at_least(vfloat a, vfloat b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }  // a bit a lane
INLINE vfloat zero_below(vfloat v, vfloat x, float least) {  // v where x >= least, else 0
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, vf_all(least), _CMP_GE_OQ), v);
}
#else
INLINE uint32_t at_least(vfloat a, vfloat b) { return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
INLINE vfloat zero_below(vfloat v, vfloat x, float least) {
    return _mm256_and_ps(v, _mm256_cmp_ps(x, vf_all(least), _CMP_GE_OQ));
}
#endif

INLINE vfloat weights_of(vfloat shifted) { return zero_below(vf_exp(shifted), shifted, FLOOR); }

// The next `num_bytes` from an address, which moves on.
INLINE void *take(uintptr_t *address, long num_bytes) {
    void *taken = (void *)*address;
    *address += (uintptr_t)round_up(num_bytes, 64);
    return taken;
}

// Lay out a thread's scratch memory at `address` (0: only measure); return its size in bytes.
static long lay_out(long size, uintptr_t address, Scratch *scratch) {
    uintptr_t begin = address;
    scratch->maxima = take(&address, 4 * ceil_div(size, BLOCK));
    scratch->sums = take(&address, 4 * ceil_div(size, BLOCK));
    scratch->buckets = take(&address, 8 * NUM_BUCKETS);
    scratch->token_ids = take(&address, 4 * size);
    scratch->keys = take(&address, 4 * size);
    scratch->weights = take(&address, 4 * size);
    scratch->closeness = take(&address, 4 * size);
    return (long)(address - begin);
}

long octavo_choose_scratch_bytes(long size, int num_threads) {
    Scratch scratch;
    return lay_out(size, 0, &scratch) * num_threads;
}

// A block of a row; the last one, if it is short, in `padded`, filled up with -inf.
INLINE const float *block_of(const float *scores, long size, long block, float *padded) {
    long count = size - block * BLOCK;
    if (count >= BLOCK) return scores + block * BLOCK;
    for (long i = 0; i < BLOCK; i++) padded[i] = i < count ? scores[block * BLOCK + i] : -INFINITY;
    return padded;
}

// Write the maxima of the blocks; return the largest. NaN is passed over.
static float find_maxima(const float *scores, long size, float *maxima) {
    float padded[BLOCK], top = -INFINITY;
    for (long block = 0; block < ceil_div(size, BLOCK); block++) {
        const float *p = block_of(scores, size, block, padded);
        vfloat most = vf_all(-INFINITY);
        for (long i = 0; i < BLOCK; i += LANES) most = vf_max(vf_load(p + i), most);
        maxima[block] = vf_largest(most);
        top = maxima[block] > top ? maxima[block] : top;
    }
    return top;
}

// Sum up the weights of a row. with_moment: the moment too; sums: NULL, or the blocks' sums are written there.
INLINE Mass weigh_row(const float *scores, long size, float temperature, float top, const float *maxima,
                      bool with_moment, float *sums) {
    Mass mass = {0.0, 0.0};
    float padded[BLOCK];
    vfloat sum = vf_zero(), moment = vf_zero();
    long num_blocks = ceil_div(size, BLOCK);
    for (long block = 0; block < num_blocks; block++) {
        if (maxima[block] / temperature - top >= FLOOR) {
            const float *p = block_of(scores, size, block, padded);
            for (long i = 0; i < BLOCK; i += LANES) {
                vfloat shifted = vf_sub(vf_div(vf_load(p + i), vf_all(temperature)), vf_all(top));
                vfloat weights = weights_of(shifted);
                sum = vf_add(sum, weights);
                if (with_moment) moment = vf_fma(weights, vf_max(shifted, vf_all(FLOOR)), moment);
            }
        }
        // Few floats are added up before the sum goes on in double.
        if (!sums && (block + 1) % 16 && block + 1 < num_blocks) continue;
        float total = vf_sum(sum);
        mass.total += total;
        if (with_moment) mass.moment += vf_sum(moment);
        if (sums) sums[block] = total;
        sum = moment = vf_zero();
    }
    return mass;
}

static Mass weigh_candidates(const Scratch *scratch, float top) {
    Mass mass = {0.0, 0.0};
    for (long i = 0; i < scratch->num_candidates; i++) {
        mass.total += scratch->weights[i];
        mass.moment += (double)scratch->weights[i] * (scratch->keys[i] - top);
    }
    return mass;
}

// Make candidates of the tokens whose keys are at least `least`.
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

// Keep the candidates whose `keys`, one for each, are at least `least`.
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

// Keep the candidates whose information is nearest to the entropy; the mass is of all that previous filters left.
static void keep_typical(Scratch *scratch, float top, Mass mass, double typical_p) {
    float log_total = (float)log(mass.total), entropy = (float)(log(mass.total) - mass.moment / mass.total);
    for (long i = 0; i < scratch->num_candidates; i++)
        scratch->closeness[i] = -fabsf(scratch->keys[i] - top - log_total + entropy);
    keep(scratch, scratch->closeness,
         last_key(scratch->closeness, scratch->weights, scratch->num_candidates, typical_p * mass.total,
                  scratch->buckets));
}

// A key that no token below it can survive the filters. `mass`: of the row, unless a top-k comes first.
static double least_key(const Choice *how, long size, bool limits_number, float temperature, float top, Mass mass,
                        Scratch *scratch) {
    long num_blocks = ceil_div(size, BLOCK);
    if (limits_number) {  // the k blocks with the largest maxima have k tokens that reach the least of these
        if (how->top_k > num_blocks) return -FLT_MAX;
        return last_key(scratch->maxima, NULL, num_blocks, how->top_k, scratch->buckets) / temperature;
    }
    if (how->top_p >= 1.0f && how->min_p > 0.0f) return top + logf(how->min_p);
    // Tokens less likely than (1 - p) / size weigh less than 1 - p together, so that a nucleus of p has none of them.
    double p = how->top_p < 1.0f ? how->top_p : how->typical_p, log_total = log(mass.total);
    double depth = log((double)size / (1.0 - p));
    // Typical tokens lie in a band around minus the entropy. Once it reaches down to twice that it reaches up to 0,
    // so that at this depth, if not before, it holds such a nucleus.
    if (how->top_p >= 1.0f) depth = fmax(depth, 2.0 * (log_total - mass.moment / mass.total));
    return top + log_total - depth + log(MARGIN);
}

static long choose(const float *scores, long size, const Choice *how, Scratch *scratch) {
    bool limits_number = how->top_k > 0 && how->top_k < size;
    bool has_nucleus = how->top_p < 1.0f, has_least = how->min_p > 0.0f, is_typical = how->typical_p < 1.0f;
    float temperature = how->temperature > MIN_TEMPERATURE ? how->temperature : MIN_TEMPERATURE;
    float top = find_maxima(scores, size, scratch->maxima) / temperature;
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
    if (has_least) keep(scratch, scratch->keys, top + logf(how->min_p));
    if (is_typical) {
        if (has_nucleus || has_least) mass = weigh_candidates(scratch, top);
        keep_typical(scratch, top, mass, how->typical_p);
    }
    if (!scratch->num_candidates) return 0;  // all scores are -inf or NaN
    double target = how->draw * weigh_candidates(scratch, top).total, before;
    return scratch->token_ids[pick(scratch->weights, scratch->num_candidates, target, &before)];
}

// Choose a token for each of `num_choices`. scores: [any, size]; token_ids: [num_choices], written.
void octavo_choose(const float *scores, long size, long num_choices, const Choice *choices, int32_t *token_ids,
                   void *scratch_memory, int num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
        Scratch scratch;
        long bytes = lay_out(size, 0, &scratch);
        lay_out(size, (uintptr_t)scratch_memory + (uintptr_t)(bytes * omp_get_thread_num()), &scratch);
#pragma omp for schedule(dynamic)
        for (long i = 0; i < num_choices; i++)
            token_ids[i] = (int32_t)choose(scores + choices[i].row * size, size, choices + i, &scratch);
    }
}

// Write for each row of scores, [num_rows, size], the maxima of its blocks, [num_rows, num_blocks], and the logarithm
// of the sum of exp(score), [num_rows].
void octavo_log_totals(const float *scores, long size, long num_rows, float *maxima, double *log_totals,
                       int num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (long row = 0; row < num_rows; row++) {
        float *own = maxima + row * ceil_div(size, BLOCK), top = find_maxima(scores + row * size, size, own);
        log_totals[row] = log(weigh_row(scores + row * size, size, 1.0f, top, own, false, NULL).total) + top;
    }
}

// Set to -inf what is not in a row's list of allowed tokens.
// rows: [num_rows] of scores, each once; masks: a bit a token, the lowest first, [num_rows, ceil(size / 8)].
void octavo_keep_allowed(float *scores, long size, long num_rows, const int64_t *rows, const uint8_t *masks,
                         int num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (long i = 0; i < num_rows; i++) {
        float *own = scores + rows[i] * size;
        const uint8_t *mask = masks + i * ceil_div(size, 8);
        for (long byte = 0; byte < size / 8; byte++)
            for (int bit = 0; bit < 8; bit++) {
                float *score = own + 8 * byte + bit;
                *score = mask[byte] >> bit & 1 ? *score : -INFINITY;
            }
        for (long id = size / 8 * 8; id < size; id++)
            if (!(mask[id / 8] >> id % 8 & 1)) own[id] = -INFINITY;
    }
}
