// The rotary embedding of the tokens of a step. Source: Su et al. 2021, "RoFormer".
#include "rotation.h"

#include <math.h>
#include <stdint.h>

// Values that are worth a second thread.
#define ALONE 5000l

// cos and sin of x, 0 <= x < 2 ** 31: rounded to float32 they are exact, except in ties.
// Source: Cephes, sin and cos: polynomials on [-pi/4, pi/4]; pi/2 is subtracted in three parts.
static inline void turn(double x, float *cos, float *sin) {
    double n = rint(x * 0.63661977236758134308);
    double r = x - n * 1.57079625129699707031e0;
    r -= n * 7.54978941586159635335e-8;
    r -= n * 5.39030285815811905290e-15;
    double square = r * r, s = 1.58962301576546568060e-10, c = -1.13585365213876817300e-11;
    s = s * square - 2.50507477628578072866e-8;
    s = s * square + 2.75573136213857245213e-6;
    s = s * square - 1.98412698295895385996e-4;
    s = s * square + 8.33333333332211858878e-3;
    s = s * square - 1.66666666666666307295e-1;
    s = s * square * r + r;
    c = c * square + 2.08757008419747316778e-9;
    c = c * square - 2.75573141792967388112e-7;
    c = c * square + 2.48015872888517045348e-5;
    c = c * square - 1.38888888888730564116e-3;
    c = c * square + 4.16666666666665929218e-2;
    c = c * square * square - 0.5 * square + 1.0;
    int64_t quarter = (int64_t)n & 3;
    double sine = quarter & 1 ? c : s, cosine = quarter & 1 ? s : c;
    *sin = (float)(quarter & 2 ? -sine : sine);
    *cos = (float)((quarter + 1) & 2 ? -cosine : cosine);
}

void turn_by_position(long position, const float *frequencies, long half, float factor, float *cos, float *sin) {
    for (long i = 0; i < half; i++) {
        turn((float)position * frequencies[i], cos + i, sin + half + i);
        cos[half + i] = cos[i] *= factor;
        sin[i] = -(sin[half + i] *= factor);
    }
}

// cos and sin [num_tokens][2 * half] of tokens; see turn_by_position.
void octavo_rotations(long num_tokens, const int64_t *positions, const float *frequencies, long half, float factor,
                      float *cos, float *sin, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens * half >= ALONE)
    for (long token = 0; token < num_tokens; token++)
        turn_by_position(positions[token], frequencies, half, factor, cos + token * 2 * half, sin + token * 2 * half);
}
