// Weights on their way in and back: sizes, packing and quantizing, and reading rows.
#include <math.h>
#include <string.h>

#include "k_blocks.h"
#include "pack.h"

#define LARGEST_INT8 127
#define LARGEST_INT4 15

// The search for scales of INT4 tries so many steps of its scale up and down, each such a part of it.
#define FIT_STEPS 5
#define FIT_STEP (1.0f / 32)

static bool is_bfloat16(long format) { return format == BFLOAT16 || format == BFLOAT16_A16; }

// Inputs of a panel, with padding.
static long padded_inputs(long format, long num_inputs) {
    return format == FLOAT32 || has_block_scales(format) ? num_inputs : round_up(num_inputs, is_bfloat16(format) ? 2 : GROUP);
}

// Bytes of a float32 scale and a zero.
#define ZERO_BYTES ((long)sizeof(float) + 1)

// Bits of a weight, without scales.
static long num_bits(long format) {
    return format == FLOAT32 ? 32 : is_bfloat16(format) ? 16 : has_nibbles(format) ? 4 : 8;
}

long octavo_panels_bytes(long format, long num_outputs, long num_inputs) {
    if (is_k_format(format)) return ceil_div(num_outputs, PANEL_COLUMNS) * (num_inputs / K_INPUTS) * k_panel_bytes(format);
    return round_up(num_outputs, PANEL_COLUMNS) * padded_inputs(format, num_inputs) * num_bits(format) / 8;
}

long octavo_scales_bytes(long format, long num_outputs, long num_inputs) {
    if (format <= BFLOAT16_A16 || is_k_format(format)) return 0;
    if (has_block_scales(format))
        return round_up(num_outputs, PANEL_COLUMNS) * ceil_div(num_inputs, BLOCK_INPUTS) * (long)sizeof(float);
    if (has_zero(format)) return round_up(num_outputs, PANEL_COLUMNS) * ceil_div(num_inputs, inputs_of_zero(format)) * ZERO_BYTES;
    long num_groups = round_up(num_outputs, PANEL_COLUMNS) * padded_inputs(format, num_inputs) / GROUP;
    if (format == NVFP4) return 2 * num_groups + round_up(num_outputs, PANEL_COLUMNS) * (long)sizeof(float);
    return num_groups * (format == MXFP4 ? 1 : has_minimum(format) ? 4 : 2);
}

// Where weight (row, k) lies: the index of an element of the format's size. With two codes in a byte: of the byte.
static long place_of(const Matrix *matrix, long row, long k) {
    long panel = row / PANEL_COLUMNS, column = row % PANEL_COLUMNS;
    long begin = panel * padded_inputs(matrix->format, matrix->num_inputs) * PANEL_COLUMNS;
    switch (matrix->format) {
        case FLOAT32:
        case FP8:
        case INT8_A32: return begin + k * PANEL_COLUMNS + column;
        case BFLOAT16:
        case BFLOAT16_A16:
        case INT8: return begin + (k / 2 * PANEL_COLUMNS + column) * 2 + k % 2;
        case INT8_A8:
        case Q5_1: return begin + (k / 4 * PANEL_COLUMNS + column) * 4 + k % 4;
        case INT4:
        case INT4_G32:
        case INT4_G128:
        case MXFP4:
        case NVFP4: return begin / 2 + (k / 8 * PANEL_COLUMNS + column) * 4 + k % 4;
    }
    return 0;
}

// Where the scale of weight (row, k) lies; a minimum lies PANEL_COLUMNS behind it.
static long scale_of(const Matrix *matrix, long row, long k) {
    long num_groups = padded_inputs(matrix->format, matrix->num_inputs) / GROUP;
    long group = row / PANEL_COLUMNS * num_groups + k / GROUP;
    return group * PANEL_COLUMNS * (has_minimum(matrix->format) ? 2 : 1) + row % PANEL_COLUMNS;
}

// The float32 scale of weight (row, k).
static float *block_scale_of(const Matrix *matrix, long row, long k) {
    long block = row / PANEL_COLUMNS * num_blocks_of(matrix) + k / BLOCK_INPUTS;
    return (float *)matrix->scales + block * PANEL_COLUMNS + row % PANEL_COLUMNS;
}

// The scales of weight (row, k) and of the other columns of its panel; zeros lie behind them.
static float *zero_scales_of(const Matrix *matrix, long row, long k) {
    long inputs = inputs_of_zero(matrix->format), num_groups = ceil_div(matrix->num_inputs, inputs);
    long group = row / PANEL_COLUMNS * num_groups + k / inputs;
    return (float *)(void *)((uint8_t *)matrix->scales + group * PANEL_COLUMNS * ZERO_BYTES);
}

// The scale of weight (row, k) in NVFP4, and the factor of a row.
static uint8_t *fp4_scale_of(const Matrix *matrix, long row, long k) {
    long num_scales = padded_inputs(NVFP4, matrix->num_inputs) / (GROUP / 2);
    uint8_t *scales = (uint8_t *)matrix->scales + row / PANEL_COLUMNS * PANEL_COLUMNS * (num_scales + (long)sizeof(float));
    return scales + k / (GROUP / 2) * PANEL_COLUMNS + row % PANEL_COLUMNS;
}
static float *factor_of(const Matrix *matrix, long row) {
    long column = row % PANEL_COLUMNS, num_inputs = padded_inputs(NVFP4, matrix->num_inputs);
    return (float *)(void *)fp4_scale_of(matrix, row - column, num_inputs) + column;
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

// LANES groups of the same inputs, one of each row: lane i of a vector is row i.
typedef struct {
    long count;  // inputs of a group
    vfloat weights[GROUP];
    vfloat importance[GROUP];  // of the error of a weight
    vfloat total_importance, weighted_sum;
} Groups;

// What weights of a group become: code * scale + minimum, both as float16 has them.
typedef struct {
    vfloat scale, minimum, inverse;  // inverse of the scale
    vfloat error;                    // sum of importance * square
} Fit;

static vfloat round_half(vfloat x) {
    uint16_t half[LANES];
    vf_store_half(half, x);
    return vf_load_half(half);
}

INLINE vfloat code_lanes(vfloat weight, vfloat minimum, vfloat inverse) {
    vfloat code = vf_round(vf_mul(vf_sub(weight, minimum), inverse));
    return vf_min(vf_max(code, vf_zero()), vf_all(LARGEST_INT4));
}

static void load_groups(Groups *groups, const float *weight, long stride, long num_rows, long count) {
    float values[GROUP][LANES] = {0};
    for (long row = 0; row < num_rows; row++)
        for (long k = 0; k < count; k++) values[k][row] = weight[row * stride + k];
    vfloat size = vf_zero(), total = vf_zero(), sum = vf_zero();
    for (long k = 0; k < count; k++) {
        groups->weights[k] = vf_load(values[k]);
        size = vf_add(size, vf_abs(groups->weights[k]));
    }
    size = vf_div(size, vf_all((float)count));
    for (long k = 0; k < count; k++) {
        groups->importance[k] = vf_add(vf_abs(groups->weights[k]), size);
        total = vf_add(total, groups->importance[k]);
        sum = vf_add(sum, vf_mul(groups->importance[k], groups->weights[k]));
    }
    groups->count = count, groups->total_importance = total, groups->weighted_sum = sum;
}

static Fit try_fit(const Groups *groups, vfloat scale, vfloat minimum) {
    Fit fit = {.scale = round_half(scale), .minimum = round_half(minimum), .error = vf_zero()};
    fit.inverse = vf_where_less(vf_zero(), fit.scale, vf_div(vf_all(1), fit.scale), vf_zero());
    for (long k = 0; k < groups->count; k++) {
        vfloat code = code_lanes(groups->weights[k], fit.minimum, fit.inverse);
        vfloat error = vf_sub(vf_add(vf_mul(code, fit.scale), fit.minimum), groups->weights[k]);
        fit.error = vf_add(fit.error, vf_mul(vf_mul(groups->importance[k], error), error));
    }
    return fit;
}

// The scale and the minimum of least error for the codes of another scale and minimum.
static Fit refit(const Groups *groups, vfloat minimum, vfloat inverse) {
    vfloat codes = vf_zero(), squares = vf_zero(), products = vf_zero();
    for (long k = 0; k < groups->count; k++) {
        vfloat code = code_lanes(groups->weights[k], minimum, inverse), part = vf_mul(groups->importance[k], code);
        codes = vf_add(codes, part);
        squares = vf_add(squares, vf_mul(part, code));
        products = vf_add(products, vf_mul(part, groups->weights[k]));
    }
    vfloat total = groups->total_importance, sum = groups->weighted_sum;
    vfloat determinant = vf_sub(vf_mul(total, squares), vf_mul(codes, codes));
    vfloat scale = vf_sub(vf_mul(total, products), vf_mul(codes, sum));
    vfloat least = vf_sub(vf_mul(squares, sum), vf_mul(codes, products));
    return try_fit(groups, vf_div(scale, determinant), vf_div(least, determinant));
}

// From the smallest to the largest weight, or a better range: most weights may gain what the outermost lose. Weights
// that were in such a format come back. Where all codes are equal no result is a number, and none is better.
// Every sum goes from the first input to the last, without fused operations: the bits do not depend on LANES.
// Source: after the search of llama.cpp for its K-quants.
static Fit fit_groups(const Groups *groups) {
    vfloat smallest = groups->weights[0], largest = groups->weights[0];
    for (long k = 1; k < groups->count; k++) {
        smallest = vf_min(smallest, groups->weights[k]);
        largest = vf_max(largest, groups->weights[k]);
    }
    Fit best = try_fit(groups, vf_div(vf_sub(largest, smallest), vf_all(LARGEST_INT4)), smallest);
    vfloat inverse = best.inverse;
    for (int step = -FIT_STEPS; step <= FIT_STEPS; step++) {
        Fit fit = refit(groups, smallest, vf_mul(inverse, vf_all(1 + FIT_STEP * (float)step)));
        best.scale = vf_where_less(fit.error, best.error, fit.scale, best.scale);
        best.minimum = vf_where_less(fit.error, best.error, fit.minimum, best.minimum);
        best.inverse = vf_where_less(fit.error, best.error, fit.inverse, best.inverse);
        best.error = vf_where_less(fit.error, best.error, fit.error, best.error);
    }
    return best;
}

// Write inputs [k, k + count) of at most LANES rows of a panel.
static void pack_int4_groups(const Matrix *matrix, long row, long num_rows, long k, const float *weight, long count) {
    Groups groups;
    load_groups(&groups, weight, matrix->num_inputs, num_rows, count);
    Fit fit = fit_groups(&groups);
    uint16_t *scales = (uint16_t *)matrix->scales + scale_of(matrix, row, k), halves[2][LANES];
    vf_store_half(halves[0], fit.scale), vf_store_half(halves[1], fit.minimum);
    memcpy(scales, halves[0], (size_t)num_rows * sizeof *scales);
    memcpy(scales + PANEL_COLUMNS, halves[1], (size_t)num_rows * sizeof *scales);
    for (long i = 0; i < count; i++) {
        float codes[LANES];
        vf_store(codes, code_lanes(groups.weights[i], fit.minimum, fit.inverse));
        uint8_t *place = (uint8_t *)matrix->panels + place_of(matrix, row, k + i);
        // The low halves come first: they replace what older weights have left.
        for (long column = 0; column < num_rows; column++)
            if (i % 8 < 4) place[column * 4] = (uint8_t)(long)codes[column];
            else place[column * 4] |= (uint8_t)((long)codes[column] << 4);
    }
}

static void pack_int4_rows(const Matrix *matrix, long row, long end, const float *weight) {
    for (; row < end; row += LANES, weight += LANES * matrix->num_inputs)
        for (long k = 0; k < matrix->num_inputs; k += GROUP)
            pack_int4_groups(matrix, row, least(LANES, end - row), k, weight + k, least(GROUP, matrix->num_inputs - k));
}

static void pack_row(const Matrix *matrix, long row, const float *weight) {
    long num_inputs = matrix->num_inputs, format = matrix->format;
    if (format == FLOAT32)
        for (long k = 0; k < num_inputs; k++) ((float *)matrix->panels)[place_of(matrix, row, k)] = weight[k];
    else if (is_bfloat16(format))
        for (long k = 0; k < num_inputs; k++)
            ((uint16_t *)matrix->panels)[place_of(matrix, row, k)] = to_bfloat16(weight[k]);
    else
        for (long k = 0; k < num_inputs; k += GROUP)
            pack_int8_group(matrix, row, k, weight + k, least(GROUP, num_inputs - k));
}

static bool is_number(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// Write a group's codes plus an offset, of which so many neighbours of a row lie side by side; `run` is a constant.
INLINE void put_codes(uint8_t *place, const int run, const int *codes, long offset) {
    for (int i = 0; i < GROUP; i += run, place += run * PANEL_COLUMNS)
        for (int j = 0; j < run; j++) place[j] = (uint8_t)(codes[i + j] + offset);
}

bool put_group(const Matrix *matrix, long row, long k, const BlockGroup *group) {
    uint8_t *place = (uint8_t *)matrix->panels + place_of(matrix, row, k);
    uint16_t *scales = (uint16_t *)matrix->scales + scale_of(matrix, row, k), minimum = group->minimum;
    *scales = group->scale;
    if (!is_number(group->scale) || !is_number(minimum)) return false;
    if (matrix->format != INT4) {
        long offset = group->offset + (matrix->format == INT8_A8 ? 128 : 0);
        if (matrix->format == INT8) put_codes(place, 2, group->codes, offset);
        else put_codes(place, 4, group->codes, offset);
        if (matrix->format != Q5_1) return !(minimum & 0x7fff);
        scales[PANEL_COLUMNS] = minimum;
        return true;
    }
    if (group->offset) {
        float wanted = _cvtsh_ss(group->scale) * (float)group->offset;
        minimum = _cvtss_sh(wanted, _MM_FROUND_TO_NEAREST_INT);
        if (_cvtsh_ss(minimum) != wanted) return false;
    }
    scales[PANEL_COLUMNS] = minimum;
    for (int i = 0; i < GROUP; i += 8, place += 4 * PANEL_COLUMNS)
        for (int j = 0; j < 4; j++) place[j] = (uint8_t)(group->codes[i + j] | group->codes[i + j + 4] << 4);
    return true;
}

void pack_scaled_row(const Matrix *matrix, long row, const uint8_t *block) {
    for (long k = 0; k < matrix->num_inputs; k += BLOCK_INPUTS, block += SCALED_BLOCK_BYTES) {
        float *scale = block_scale_of(matrix, row, k);
        memcpy(scale, block, sizeof *scale);
        if (matrix->format == FP8) *scale *= E4M3_UNIT;
        uint8_t *place = (uint8_t *)matrix->panels + place_of(matrix, row, k);
        for (long i = 0; i < least(BLOCK_INPUTS, matrix->num_inputs - k); i++, place += PANEL_COLUMNS)
            *place = block[sizeof(float) + i];
    }
}

// Twice what the codes of E2M1 stand for.
static const int8_t DOUBLED_FP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

#define LOW_NIBBLES 0x0f0f0f0f0f0f0f0full

// Eight codes, each in a byte: of four bytes with two neighbours in each.
static uint64_t part_pairs(const uint8_t *bytes) {
    uint32_t four;
    memcpy(&four, bytes, sizeof four);
    uint64_t apart = (four & 0xffff) | (uint64_t)(four >> 16) << 32;  // two bytes in each half
    apart = (apart | apart << 8) & 0x00ff00ff00ff00ffull;
    return (apart | apart << 4) & LOW_NIBBLES;
}

// The same of eight bytes, of each the low or the high half.
static uint64_t part_halves(const uint8_t *bytes, int shift) {
    uint64_t eight;
    memcpy(&eight, bytes, sizeof eight);
    return eight >> shift & LOW_NIBBLES;
}

long pack_mxfp4_row(const Matrix *matrix, long row, const uint8_t *block, bool is_paired) {
    long num_wrong = 0;
    for (long k = 0; k < matrix->num_inputs; k += GROUP, block += MXFP4_BLOCK_BYTES) {
        uint8_t *place = (uint8_t *)matrix->panels + place_of(matrix, row, k);
        for (int i = 0; i < 4; i++, place += 4 * PANEL_COLUMNS) {
            uint64_t codes = is_paired ? part_pairs(block + 1 + 4 * i) : part_halves(block + 1 + i % 2 * 8, i / 2 * 4);
            uint32_t joined = (uint32_t)(codes | codes >> 28);
            memcpy(place, &joined, sizeof joined);
        }
        ((uint8_t *)matrix->scales)[scale_of(matrix, row, k)] = *block;
        num_wrong += *block == 255;
    }
    return num_wrong;
}

void pack_zero_row(const Matrix *matrix, long row, const uint8_t *block) {
    long inputs = inputs_of_zero(matrix->format), num_inputs = padded_inputs(matrix->format, matrix->num_inputs);
    for (long k = 0; k < matrix->num_inputs; k += inputs, block += ZERO_BYTES + inputs / 2) {
        float *scales = zero_scales_of(matrix, row, k);
        memcpy(scales + row % PANEL_COLUMNS, block, sizeof *scales);
        ((uint8_t *)(scales + PANEL_COLUMNS))[row % PANEL_COLUMNS] = block[sizeof *scales];
        uint8_t *place = (uint8_t *)matrix->panels + place_of(matrix, row, k);
        for (long i = 0; i < least(inputs, num_inputs - k) / 8; i++, place += 4 * PANEL_COLUMNS) {
            uint64_t codes = part_pairs(block + ZERO_BYTES + 4 * i);
            uint32_t joined = (uint32_t)(codes | codes >> 28);
            memcpy(place, &joined, sizeof joined);
        }
    }
}

long pack_nvfp4_row(const Matrix *matrix, long row, const uint8_t *block) {
    long num_wrong = 0;
    for (long k = 0; k < matrix->num_inputs; k += GROUP) {
        float factor;
        memcpy(&factor, block, sizeof factor);
        *factor_of(matrix, row) = factor * (E4M3_UNIT / 2);
        block += sizeof factor;
        for (int half = 0; half < 2; half++, block++) {
            *fp4_scale_of(matrix, row, k + half * (GROUP / 2)) = *block;
            num_wrong += (*block & 127) == 127;
        }
        uint8_t *place = (uint8_t *)matrix->panels + place_of(matrix, row, k);
        for (int i = 0; i < 4; i++, block += 4, place += 4 * PANEL_COLUMNS) {
            uint64_t codes = part_pairs(block);
            uint32_t joined = (uint32_t)(codes | codes >> 28);
            memcpy(place, &joined, sizeof joined);
        }
    }
    return num_wrong;
}

// Write rows [first, first + num_rows) of a matrix from `weight` [num_rows][num_inputs].
// Parts may come in any order, each once; the memory must be 0 already.
void octavo_pack(const Matrix *matrix, long first, long num_rows, const float *weight, int num_threads) {
    long begin = first / PANEL_COLUMNS, end = ceil_div(first + num_rows, PANEL_COLUMNS);
#pragma omp parallel for num_threads(num_threads)
    for (long panel = begin; panel < end; panel++) {
        long last = least((panel + 1) * PANEL_COLUMNS, first + num_rows);
        long row = most(panel * PANEL_COLUMNS, first);
        if (matrix->format == INT4) {
            pack_int4_rows(matrix, row, last, weight + (row - first) * matrix->num_inputs);
            continue;
        }
        for (; row < last; row++) pack_row(matrix, row, weight + (row - first) * matrix->num_inputs);
    }
}

// E4M3 that is not NaN, divided by E4M3_UNIT.
static float from_e4m3(uint8_t code) { return _cvtsh_ss((uint16_t)((int8_t)code * 128) & 0xbf80); }

void read_row(const Matrix *matrix, long row, float *out) {
    if (is_k_format(matrix->format)) {
        read_k_row(matrix, row, out);
        return;
    }
    for (long k = 0; k < matrix->num_inputs; k++) {
        long place = place_of(matrix, row, k);
        if (matrix->format == FLOAT32) {
            out[k] = ((const float *)matrix->panels)[place];
        } else if (is_bfloat16(matrix->format)) {
            out[k] = from_bfloat16(((const uint16_t *)matrix->panels)[place]);
        } else if (matrix->format == FP8) {
            out[k] = from_e4m3(((const uint8_t *)matrix->panels)[place]) * *block_scale_of(matrix, row, k);
        } else if (matrix->format == INT8_A32) {
            out[k] = (float)((const int8_t *)matrix->panels)[place] * *block_scale_of(matrix, row, k);
        } else if (has_zero(matrix->format)) {
            uint8_t byte = ((const uint8_t *)matrix->panels)[place], code = k % 8 < 4 ? byte & 15 : byte >> 4;
            const float *scales = zero_scales_of(matrix, row, k);
            int zero = ((const uint8_t *)(scales + PANEL_COLUMNS))[row % PANEL_COLUMNS];
            out[k] = (float)(code - zero) * scales[row % PANEL_COLUMNS];
        } else if (matrix->format == NVFP4) {
            uint8_t byte = ((const uint8_t *)matrix->panels)[place], code = k % 8 < 4 ? byte & 15 : byte >> 4;
            out[k] = (float)DOUBLED_FP4[code] * from_e4m3(*fp4_scale_of(matrix, row, k)) * *factor_of(matrix, row);
        } else if (matrix->format == MXFP4) {
            uint8_t byte = ((const uint8_t *)matrix->panels)[place], code = k % 8 < 4 ? byte & 15 : byte >> 4;
            out[k] = ldexpf(DOUBLED_FP4[code], ((const uint8_t *)matrix->scales)[scale_of(matrix, row, k)] - 128);
        } else {
            const uint16_t *scale = (const uint16_t *)matrix->scales + scale_of(matrix, row, k);
            uint8_t byte = ((const uint8_t *)matrix->panels)[place];
            if (matrix->format == INT8) out[k] = (float)(int8_t)byte * _cvtsh_ss(*scale);
            if (matrix->format == INT8_A8) out[k] = (float)(byte - 128) * _cvtsh_ss(*scale);
            if (matrix->format == Q5_1) out[k] = (float)byte * _cvtsh_ss(*scale) + _cvtsh_ss(scale[PANEL_COLUMNS]);
            if (matrix->format == INT4)
                out[k] = (float)(k % 8 < 4 ? byte & 15 : byte >> 4) * _cvtsh_ss(*scale) +
                         _cvtsh_ss(scale[PANEL_COLUMNS]);
        }
    }
}
