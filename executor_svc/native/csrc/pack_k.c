// K blocks of a file on their way into panels, and rows on their way back.
// Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, and dequantize_row_* of ggml-quants.c.
#include <string.h>

#include "k_blocks.h"

// The parts of a block in a file; a part that the format lacks is empty.
typedef struct {
    const uint8_t *low, *high;  // of codes
    const uint8_t *scales, *halves;
} FileBlock;

static FileBlock parts_of(long format, const uint8_t *block) {
    switch (format) {
        case Q2_K: return (FileBlock){block + 16, NULL, block, block + 80};
        case Q3_K: return (FileBlock){block + 32, block, block + 96, block + 108};
        case Q4_K: return (FileBlock){block + 16, NULL, block + 4, block};
        case Q5_K: return (FileBlock){block + 48, block + 16, block + 4, block};
        default: return (FileBlock){block, block + 128, block + 192, block + 208};  // Q6_K
    }
}

INLINE uint32_t load_word(const void *p) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

// Codes 4 * quad .. of a group, a byte each: the low bits, with the high bits above them.
INLINE uint32_t low_codes(long format, const FileBlock *block, long group, long quad) {
    switch (format) {
        case Q2_K:
        case Q3_K: return load_word(block->low + group / 4 * 32 + quad * 4) >> group % 4 * 2 & 0x03030303;
        case Q6_K:
            return load_word(block->low + group / 4 * 64 + group % 2 * 32 + quad * 4) >> group % 4 / 2 * 4 & 0x0f0f0f0f;
        default: return load_word(block->low + group / 2 * 32 + quad * 4) >> group % 2 * 4 & 0x0f0f0f0f;
    }
}
INLINE uint32_t high_codes(long format, const FileBlock *block, long group, long quad) {
    switch (format) {
        case Q3_K:
        case Q5_K: return load_word(block->high + quad * 4) >> group & 0x01010101;
        case Q6_K: return load_word(block->high + group / 4 * 32 + quad * 4) >> group % 4 * 2 & 0x03030303;
        default: return 0;
    }
}

// The 16 values of 6 bits in three words: five in each, the last one in what is left of them.
static void pack_six_bits(const uint8_t *values, uint32_t *words) {
    for (int i = 0; i < 15; i++) words[i / 5] |= (uint32_t)values[i] << i % 5 * 6;
    for (int i = 0; i < 3; i++) words[i] |= (uint32_t)(values[15] >> 2 * i & 3) << 30;
}

static void pack_scales(long format, const uint8_t *scales, uint32_t *words) {
    memset(words, 0, 4 * sizeof *words);
    uint8_t values[16];
    switch (format) {
        case Q2_K:
        case Q6_K: memcpy(words, scales, 16); return;
        case Q3_K:
            for (int i = 0; i < 16; i++)
                values[i] = (uint8_t)((scales[i % 8] >> i / 8 * 4 & 15) | (scales[8 + i % 4] >> i / 4 * 2 & 3) << 4);
            break;
        default:  // scales, then minima
            for (int i = 0; i < 4; i++) {
                values[i] = scales[i] & 63, values[8 + i] = scales[4 + i] & 63;
                values[4 + i] = (uint8_t)((scales[8 + i] & 15) | scales[i] >> 6 << 4);
                values[12 + i] = (uint8_t)(scales[8 + i] >> 4 | scales[4 + i] >> 6 << 4);
            }
    }
    pack_six_bits(values, words);
}

static bool is_number(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// Write a block into a column of a panel; false: a float16 of it is no number.
INLINE bool pack_block(const long format, const uint8_t *file_block, uint8_t *panel, long column) {
    FileBlock block = parts_of(format, file_block);
    uint32_t *codes = (uint32_t *)(void *)(panel + k_codes_begin(format)) + column;
    for (long group = 0; group < K_GROUPS; group++) {
        uint32_t rows[GROUP / 8 + 2] = {0}, *high = rows + (nibble_rows(format) ? GROUP / 8 : GROUP / 16);
        for (long quad = 0; quad < QUADS; quad++) {
            uint32_t four = low_codes(format, &block, group, quad);
            if (nibble_rows(format))
                rows[quad / 2] |= four << quad % 2 * 4;
            else
                rows[quad / 4] |= four << quad % 4 * 2;
            if (format == Q6_K) high[quad / 4] |= high_codes(format, &block, group, quad) << quad % 4 * 2;
            if (bit_rows(format)) high[0] |= high_codes(format, &block, group, quad) << quad;
        }
        for (long row = 0; row < rows_of_group(format); row++, codes += PANEL_COLUMNS) *codes = rows[row];
    }
    uint32_t words[4], *place = (uint32_t *)(void *)panel + column;
    pack_scales(format, block.scales, words);
    for (long i = 0; i < words_of(format); i++, place += PANEL_COLUMNS) *place = words[i];
    bool is_good = true;
    uint16_t *halves = (uint16_t *)(void *)(panel + k_halves_begin(format)) + column;
    for (long i = 0; i < halves_of(format); i++, halves += PANEL_COLUMNS) {
        memcpy(halves, block.halves + 2 * i, 2);
        is_good = is_good && is_number(*halves);
    }
    return is_good;
}

INLINE long pack_format(const long format, const Matrix *matrix, long row, long last, const uint8_t *blocks,
                        long row_bytes, const int64_t *order, long first) {
    long num_bad = 0, begin = row;
    for (long block = 0; block < matrix->num_inputs / K_INPUTS; block++) {
        uint8_t *place = k_block_of(matrix, begin / PANEL_COLUMNS, block);
        for (row = begin; row < last; row++) {
            long from = order ? order[row - first] : row - first;
            const uint8_t *file_block = blocks + from * row_bytes + block * k_block_bytes(format);
            num_bad += !pack_block(format, file_block, place, row % PANEL_COLUMNS);
        }
    }
    return num_bad;
}

long pack_k_rows(const Matrix *matrix, long row, long last, const uint8_t *blocks, long row_bytes, const int64_t *order,
                 long first) {
    switch (matrix->format) {
#define FORMAT(format) \
    case format: return pack_format(format, matrix, row, last, blocks, row_bytes, order, first);
        K_FORMATS(FORMAT)
#undef FORMAT
    }
    return -1;
}

// Code i of a group; `codes` are the rows of its column.
static int code_at(long format, const uint8_t *codes, long i) {
    long quad = i / 4, stride = PANEL_COLUMNS * 4;
    const uint8_t *high = codes + (nibble_rows(format) ? nibble_rows(format) : pair_rows(format)) * stride + i % 4;
    codes += i % 4;
    if (format <= Q3_K) {
        int low = codes[quad / 4 * stride] >> quad % 4 * 2 & 3;
        return format == Q3_K ? low | (high[0] >> quad & 1) << 2 : low;
    }
    int low = codes[quad / 2 * stride] >> quad % 2 * 4 & 15;
    if (format == Q5_K) return low | (high[0] >> quad & 1) << 4;
    if (format == Q6_K) return low | (high[quad / 4 * stride] >> quad % 4 * 2 & 3) << 4;
    return low;
}

// Value i of pack_six_bits.
static int six_bits(const uint32_t *words, long i) {
    if (i < 15) return (int)(words[i / 5] >> i % 5 * 6 & 63);
    return (int)(words[0] >> 30 | words[1] >> 30 << 2 | words[2] >> 30 << 4);
}

// Scale and minimum i of a block.
static void scale_at(long format, const uint32_t *words, long i, int *scale, int *minimum) {
    int byte = (int)(words[i / 4] >> i % 4 * 8 & 255);
    *minimum = 0;
    switch (format) {
        case Q2_K: *scale = byte & 15, *minimum = byte >> 4; break;
        case Q3_K: *scale = six_bits(words, i) - 32; break;
        case Q6_K: *scale = (int8_t)byte; break;
        default: *scale = six_bits(words, i), *minimum = six_bits(words, 8 + i);
    }
}

void read_k_row(const Matrix *matrix, long row, float *out) {
    long format = matrix->format, column = row % PANEL_COLUMNS, shared = inputs_of_scale(format);
    for (long block = 0; block < matrix->num_inputs / K_INPUTS; block++) {
        const uint8_t *panel = k_block_of(matrix, row / PANEL_COLUMNS, block);
        const uint16_t *halves = (const uint16_t *)(const void *)(panel + k_halves_begin(format)) + column;
        float d = _cvtsh_ss(halves[0]), dmin = halves_of(format) > 1 ? _cvtsh_ss(halves[PANEL_COLUMNS]) : 0;
        uint32_t words[4] = {0};
        for (long i = 0; i < words_of(format); i++)
            words[i] = load_word(panel + (i * PANEL_COLUMNS + column) * 4);
        for (long k = 0; k < K_INPUTS; k++) {
            const uint8_t *codes =
                panel + k_codes_begin(format) + (k / GROUP * rows_of_group(format) * PANEL_COLUMNS + column) * 4;
            int scale, minimum;
            scale_at(format, words, k / shared, &scale, &minimum);
            float weight = d * (float)scale * (float)(code_at(format, codes, k % GROUP) - (int)zero_of(format));
            *out++ = zero_of(format) ? weight : weight - dmin * (float)minimum;
        }
    }
}
