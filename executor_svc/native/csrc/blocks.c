// Blocks of quantized weights as a GGUF file has them: their codes are copied into panels, never searched again.
// Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
#include "blocks.h"

#include <string.h>

#include "k_blocks.h"
#include "pack.h"

// Numbers of ggml; `GGMLQuantizationType` of the package gguf.
enum { TYPE_Q4_0 = 2, TYPE_Q4_1 = 3, TYPE_Q5_0 = 6, TYPE_Q5_1 = 7, TYPE_Q8_0 = 8, FIRST_K = 10, TYPE_IQ4_NL = 20, TYPE_MXFP4 = 39 };
// Beside them: codes of safetensors, with their scales; `KINDS` of executor_svc/checkpoint/scaled_codes.py.
enum { TYPE_FP8 = 1000, TYPE_INT8 = 1001, TYPE_PAIRED_MXFP4 = 1002, TYPE_UINT4_G32 = 1003, TYPE_UINT4_G128 = 1004, TYPE_NVFP4 = 1005 };

// Whether a format takes blocks of a type, where one of them has no other.
static bool is_of_format(long format, long type) {
    switch (format) {
        case FP8: return type == TYPE_FP8;
        case INT8_A32: return type == TYPE_INT8;
        case INT4_G32: return type == TYPE_UINT4_G32;
        case INT4_G128: return type == TYPE_UINT4_G128;
        case NVFP4: return type == TYPE_NVFP4;
        case MXFP4: return type == TYPE_MXFP4 || type == TYPE_PAIRED_MXFP4;
        default: return type < TYPE_FP8 && type != TYPE_MXFP4;
    }
}

// What the codes of IQ4_NL stand for.
static const int8_t NON_LINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

long block_bytes(long type) {
    switch (type) {
        case TYPE_Q4_0:
        case TYPE_IQ4_NL: return 2 + GROUP / 2;
        case TYPE_Q4_1: return 4 + GROUP / 2;
        case TYPE_Q5_0: return 2 + 4 + GROUP / 2;
        case TYPE_Q5_1: return 4 + 4 + GROUP / 2;
        case TYPE_Q8_0: return 2 + GROUP;
    }
    return 0;
}

// Half bytes: the low ones are the first weights of a block, the high ones the rest.
static void read_nibbles(const uint8_t *bytes, int *codes) {
    for (int i = 0; i < GROUP / 2; i++) codes[i] = bytes[i] & 15, codes[i + GROUP / 2] = bytes[i] >> 4;
}

// The same with a bit above each, the first one in the first bit.
static void read_five_bits(const uint8_t *bits, const uint8_t *bytes, int *codes) {
    uint32_t fifth;
    memcpy(&fifth, bits, 4);
    read_nibbles(bytes, codes);
    for (int i = 0; i < GROUP; i++) codes[i] |= (int)(fifth >> i & 1) << 4;
}

static void look_up(const int8_t *values, int *codes) {
    for (int i = 0; i < GROUP; i++) codes[i] = values[codes[i]];
}

bool read_block(long type, const uint8_t *block, BlockGroup *group) {
    group->offset = 0, group->minimum = 0;
    memcpy(&group->scale, block, 2);
    switch (type) {
        case TYPE_Q4_0: group->offset = -8, read_nibbles(block + 2, group->codes); return true;
        case TYPE_Q4_1:
            memcpy(&group->minimum, block + 2, 2);
            read_nibbles(block + 4, group->codes);
            return true;
        case TYPE_Q5_0: group->offset = -16, read_five_bits(block + 2, block + 6, group->codes); return true;
        case TYPE_Q5_1:
            memcpy(&group->minimum, block + 2, 2);
            read_five_bits(block + 4, block + 8, group->codes);
            return true;
        case TYPE_Q8_0:
            for (int i = 0; i < GROUP; i++) group->codes[i] = (int8_t)block[2 + i];
            return true;
        case TYPE_IQ4_NL: read_nibbles(block + 2, group->codes), look_up(NON_LINEAR, group->codes); return true;
    }
    return false;
}

// Write rows [first, first + num_rows) of a quantized matrix from blocks of a type; row i is the row order[i] of
// `blocks`, or its row i without an order. Rows of `blocks` are `row_bytes` apart.
// Return how many groups the format of the matrix cannot hold exactly, or -1: not this type. As with octavo_pack,
// parts may come in any order, and the memory must be 0 already.
long octavo_pack_blocks(const Matrix *matrix, long first, long num_rows, long type, const uint8_t *blocks,
                        long row_bytes, const int64_t *order, int num_threads) {
    long bytes = block_bytes(type), num_inexact = 0;
    bool is_k = is_k_format(matrix->format), is_mxfp4 = matrix->format == MXFP4;
    bool has_zeros = has_zero(matrix->format), is_scaled = has_block_scales(matrix->format) || has_zeros || matrix->format == NVFP4;
    if (!is_of_format(matrix->format, type))
        return is_scaled || is_mxfp4 || type < TYPE_FP8 || type == TYPE_PAIRED_MXFP4 ? -1 : num_rows;
    if (is_k ? type != FIRST_K + matrix->format - Q2_K : !is_scaled && !is_mxfp4 && (!bytes || matrix->format <= BFLOAT16_A16))
        return -1;
    if (!is_scaled && matrix->num_inputs % (is_k ? K_INPUTS : GROUP)) return -1;
    long begin = first / PANEL_COLUMNS, end = ceil_div(first + num_rows, PANEL_COLUMNS);
#pragma omp parallel for num_threads(num_threads) reduction(+ : num_inexact)
    for (long panel = begin; panel < end; panel++) {
        long last = least((panel + 1) * PANEL_COLUMNS, first + num_rows), row = most(panel * PANEL_COLUMNS, first);
        if (is_k) {
            num_inexact += pack_k_rows(matrix, row, last, blocks, row_bytes, order, first);
            continue;
        }
        for (; row < last; row++) {
            const uint8_t *block = blocks + (order ? order[row - first] : row - first) * row_bytes;
            if (has_zeros) pack_zero_row(matrix, row, block);
            else if (type == TYPE_NVFP4) num_inexact += pack_nvfp4_row(matrix, row, block);
            else if (is_scaled) pack_scaled_row(matrix, row, block);
            else if (is_mxfp4) num_inexact += pack_mxfp4_row(matrix, row, block, type == TYPE_PAIRED_MXFP4);
            for (long k = 0; !is_scaled && !is_mxfp4 && k < matrix->num_inputs; k += GROUP, block += bytes) {
                BlockGroup group;
                read_block(type, block, &group);
                num_inexact += !put_group(matrix, row, k, &group);
            }
        }
    }
    return num_inexact;
}
