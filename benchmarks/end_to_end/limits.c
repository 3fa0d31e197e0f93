/* What the machine can do at most: bytes read from memory, and float32 multiplications with additions, a second. */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#ifdef __AVX512F__
enum { VECTOR_BYTES = 64 };
#else
enum { VECTOR_BYTES = 32 };
#endif
enum { LANES = VECTOR_BYTES / 4, CHAINS = 12, MAX_THREADS = 256 };

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t Words __attribute__((vector_size(VECTOR_BYTES)));

typedef struct {
    const Words *begin, *end;
    int64_t steps;
    float result;
    pthread_barrier_t *start;
    double began_s, ended_s;
} Share;

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void *read_share(void *argument)
{
    Share *share = argument;
    Words sums[8] = {0};
    pthread_barrier_wait(share->start);
    share->began_s = now_s();
    for (const Words *at = share->begin; at + 8 <= share->end; at += 8)
        for (int i = 0; i < 8; i++) sums[i] ^= at[i];
    for (int i = 1; i < 8; i++) sums[0] ^= sums[i];
    share->result = (float)sums[0][0];
    share->ended_s = now_s();
    return NULL;
}

static void *multiply_share(void *argument)
{
    Share *share = argument;
    Floats chains[CHAINS], factor, term;
    for (int lane = 0; lane < LANES; lane++) {
        factor[lane] = 0.999f;
        term[lane] = 0.001f * (float)(share->steps & 1);
    }
    for (int i = 0; i < CHAINS; i++)
        for (int lane = 0; lane < LANES; lane++) chains[i][lane] = (float)i;
    pthread_barrier_wait(share->start);
    share->began_s = now_s();
    for (int64_t step = 0; step < share->steps; step++)
        for (int i = 0; i < CHAINS; i++) chains[i] = chains[i] * factor + term;
    for (int i = 1; i < CHAINS; i++) chains[0] += chains[i];
    share->result = chains[0][0];
    share->ended_s = now_s();
    return NULL;
}

/* Run `work` on each share in a thread of its own; return the seconds from the first start to the last end. */
static double run_all(void *(*work)(void *), Share *shares, int num_threads)
{
    pthread_t threads[MAX_THREADS];
    pthread_barrier_t start;
    pthread_barrier_init(&start, NULL, (unsigned)num_threads);
    for (int i = 0; i < num_threads; i++) {
        shares[i].start = &start;
        pthread_create(&threads[i], NULL, work, &shares[i]);
    }
    for (int i = 0; i < num_threads; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&start);
    double began_s = shares[0].began_s, ended_s = shares[0].ended_s;
    for (int i = 1; i < num_threads; i++) {
        if (shares[i].began_s < began_s) began_s = shares[i].began_s;
        if (shares[i].ended_s > ended_s) ended_s = shares[i].ended_s;
    }
    return ended_s - began_s;
}

/* Return the bytes read a second; `memory` is aligned to VECTOR_BYTES. */
double read_bytes_per_s(const void *memory, size_t num_bytes, int num_threads)
{
    Share shares[MAX_THREADS] = {0};
    size_t vectors = num_bytes / VECTOR_BYTES / (size_t)num_threads / 8 * 8;
    for (int i = 0; i < num_threads; i++) {
        shares[i].begin = (const Words *)memory + (size_t)i * vectors;
        shares[i].end = shares[i].begin + vectors;
    }
    double seconds = run_all(read_share, shares, num_threads);
    return (double)(vectors * VECTOR_BYTES * (size_t)num_threads) / seconds;
}

/* Return the multiplications and additions of float32 a second. */
double fma_flops_per_s(int64_t steps, int num_threads)
{
    Share shares[MAX_THREADS] = {0};
    for (int i = 0; i < num_threads; i++) shares[i].steps = steps;
    double seconds = run_all(multiply_share, shares, num_threads);
    return 2.0 * LANES * CHAINS * (double)steps * num_threads / seconds;
}
