// Weights on their way in and back: sizes, packing and quantizing, and reading rows.
#include <math.h>
#include <string.h>

#include "dense.h"

#define LARGEST_INT8 127
#define LARGEST_INT4 15

// Inputs of a panel with what pads them.
static long padded_inputs(long format, long num_inputs) {
    return format == FLOAT32 ? num_inputs : round_up(num_inputs, format == BFLOAT16 ? 2 : GROUP);
}

// Bits of a weight, without scales.
static long num_bits(long format) { return format == FLOAT32 ? 32 : format == BFLOAT16 ? 16 : format == INT4 ? 4 : 8; }

long octavo_panels_bytes(long format, long num_outputs, long num_inputs) {
    return round_up(num_outputs, PANEL_COLUMNS) * padded_inputs(format, num_inputs) * num_bits(format) / 8;
}

long octavo_scales_bytes(long format, long num_outputs, long num_inputs) {
    if (format <= BFLOAT16) return 0;
    long num_groups = round_up(num_outputs, PANEL_COLUMNS) * padded_inputs(format, num_inputs) / GROUP;
    return num_groups * (format == INT4 ? 2 : 1) * (long)sizeof(uint16_t);
}

// Where weight (row, k) lies: the index of an element of the format's size. INT4: of a byte, half of which it is.
static long place_of(const Matrix *matrix, long row, long k) {
    long panel = row / PANEL_COLUMNS, column = row % PANEL_COLUMNS;
    long begin = panel * padded_inputs(matrix->format, matrix->num_inputs) * PANEL_COLUMNS;
    switch ((NumberFormat)matrix->format) {
        case FLOAT32: return begin + k * PANEL_COLUMNS + column;
        case BFLOAT16:
        case INT8: return begin + (k / 2 * PANEL_COLUMNS + column) * 2 + k % 2;
        case INT8_A8: return begin + (k / 4 * PANEL_COLUMNS + column) * 4 + k % 4;
        case INT4: return begin / 2 + (k / 8 * PANEL_COLUMNS + column) * 4 + k % 4;
    }
    return 0;
}

// Where the scale of weight (row, k) lies; a minimum lies PANEL_COLUMNS behind it.
static long scale_of(const Matrix *matrix, long row, long k) {
    long num_groups = padded_inputs(matrix->format, matrix->num_inputs) / GROUP;
    long group = row / PANEL_COLUMNS * num_groups + k / GROUP;
    return group * PANEL_COLUMNS * (matrix->format == INT4 ? 2 : 1) + row % PANEL_COLUMNS;
}

// The nearest bfloat16, of two the even one; NaN stays NaN.
static uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static long code_of(float x, float inverse, long smallest, long largest) {
    return most(smallest, least(largest, lrintf(x * inverse)));
}

static void pack_int8_group(const Matrix *matrix, long row, long k, const float *group, long count) {
    uint8_t *panels = (uint8_t *)matrix->panels;
    float largest = 0;
    for (long i = 0; i < count; i++) largest = fmaxf(largest, fabsf(group[i]));
    uint16_t half = _cvtss_sh(largest / LARGEST_INT8, _MM_FROUND_TO_NEAREST_INT);
    float scale = _cvtsh_ss(half), inverse = scale > 0 ? 1 / scale : 0;
    ((uint16_t *)matrix->scales)[scale_of(matrix, row, k)] = half;
    long offset = matrix->format == INT8_A8 ? 128 : 0;
    for (long i = 0; i < GROUP; i++) {
        long code = i < count ? code_of(group[i], inverse, -LARGEST_INT8, LARGEST_INT8) : 0;
        panels[place_of(matrix, row, k + i)] = (uint8_t)(code + offset);
    }
}

// Codes are those of the rounded scale and minimum, so that weights that were in such a format come back.
static void pack_int4_group(const Matrix *matrix, long row, long k, const float *group, long count) {
    uint8_t *panels = (uint8_t *)matrix->panels;
    float smallest = group[0], largest = group[0];
    for (long i = 1; i < count; i++) smallest = fminf(smallest, group[i]), largest = fmaxf(largest, group[i]);
    uint16_t half = _cvtss_sh((largest - smallest) / LARGEST_INT4, _MM_FROUND_TO_NEAREST_INT);
    uint16_t half_minimum = _cvtss_sh(smallest, _MM_FROUND_TO_NEAREST_INT);
    float scale = _cvtsh_ss(half), minimum = _cvtsh_ss(half_minimum), inverse = scale > 0 ? 1 / scale : 0;
    uint16_t *scales = (uint16_t *)matrix->scales + scale_of(matrix, row, k);
    scales[0] = half, scales[PANEL_COLUMNS] = half_minimum;
    for (long i = 0; i < GROUP; i++) {
        long code = i < count ? code_of(group[i] - minimum, inverse, 0, LARGEST_INT4) : 0;
        panels[place_of(matrix, row, k + i)] |= (uint8_t)(code << (i % 8 < 4 ? 0 : 4));
    }
}

static void pack_row(const Matrix *matrix, long row, const float *weight) {
    long num_inputs = matrix->num_inputs, format = matrix->format;
    if (format == FLOAT32)
        for (long k = 0; k < num_inputs; k++) ((float *)matrix->panels)[place_of(matrix, row, k)] = weight[k];
    else if (format == BFLOAT16)
        for (long k = 0; k < num_inputs; k++)
            ((uint16_t *)matrix->panels)[place_of(matrix, row, k)] = to_bfloat16(weight[k]);
    else
        for (long k = 0; k < num_inputs; k += GROUP)
            (format == INT4 ? pack_int4_group : pack_int8_group)(matrix, row, k, weight + k,
                                                                 least(GROUP, num_inputs - k));
}

// Write rows [first, first + num_rows) of a matrix from `weight` [num_rows][num_inputs].
// Parts may come in any order, each once; the memory must be 0 already.
void octavo_pack(const Matrix *matrix, long first, long num_rows, const float *weight, int num_threads) {
    long begin = first / PANEL_COLUMNS, end = ceil_div(first + num_rows, PANEL_COLUMNS);
#pragma omp parallel for num_threads(num_threads)
    for (long panel = begin; panel < end; panel++) {
        long last = least((panel + 1) * PANEL_COLUMNS, first + num_rows);
        for (long row = most(panel * PANEL_COLUMNS, first); row < last; row++)
            pack_row(matrix, row, weight + (row - first) * matrix->num_inputs);
    }
}

void read_row(const Matrix *matrix, long row, float *out) {
    for (long k = 0; k < matrix->num_inputs; k++) {
        long place = place_of(matrix, row, k);
        if (matrix->format == FLOAT32) {
            out[k] = ((const float *)matrix->panels)[place];
        } else if (matrix->format == BFLOAT16) {
            out[k] = from_bfloat16(((const uint16_t *)matrix->panels)[place]);
        } else {
            const uint16_t *scale = matrix->scales + scale_of(matrix, row, k);
            uint8_t byte = ((const uint8_t *)matrix->panels)[place];
            if (matrix->format == INT8) out[k] = (float)(int8_t)byte * _cvtsh_ss(*scale);
            if (matrix->format == INT8_A8) out[k] = (float)(byte - 128) * _cvtsh_ss(*scale);
            if (matrix->format == INT4)
                out[k] = (float)(k % 8 < 4 ? byte & 15 : byte >> 4) * _cvtsh_ss(*scale) +
                         _cvtsh_ss(scale[PANEL_COLUMNS]);
        }
    }
}
