// Products of int8 rows with matrices in the K formats.
//
// A block of a panel is unpacked once, into a byte a code and a float32 a scale, and stays in L1 for all rows. Products
// are summed exactly in int32 over the inputs that share a scale, in float32 over those; d * scale and dmin * minimum
// are exact. Codes of formats without minima are signed: they are multiplied with HALF_OFFSET added, and the sums start
// at what that adds. The sums of a row go from the first input to the last, whatever the other rows are.
#include <string.h>

#include "k_blocks.h"
#include "tile.h"

// Rows whose sums are kept while the blocks of a panel go by; half of L1 has them and a block.
#define K_ROWS 64

#define MOST_SCALES 16  // of a block

typedef struct {
    _Alignas(64) uint8_t codes[K_INPUTS * PANEL_COLUMNS];  // [input / 4][column][4]
    float scales[MOST_SCALES * PANEL_COLUMNS];
    float minima[MOST_SCALES * PANEL_COLUMNS];  // that a sum of values is multiplied with; of 16 inputs, half_offsets
} Unpacked;

// What stands in some bits of each lane at bit `from`, at bit `to`; the other bits must be masked.
INLINE vint move_bits(vint v, const int from, const int to) {
    return from < to ? vi_shift_left(v, to - from) : vi_shift_right(v, from - to);
}

INLINE void unpack_codes(const long format, const uint8_t *panel, const Fetch *fetch, long step, uint8_t *codes) {
    const vint nibble = vi_all(0x0f0f0f0f), pair = vi_all(0x03030303);
    const long stride = 4 * PANEL_COLUMNS;
    for (long group = 0; group < K_GROUPS; group++, panel += rows_of_group(format) * stride) {
        fetch_lines(fetch, step + group);
        const uint8_t *low = panel, *high = panel + (nibble_rows(format) ? nibble_rows(format) : pair_rows(format)) * stride;
#pragma GCC unroll 8
        for (int quad = 0; quad < QUADS; quad++, codes += stride)
#pragma GCC unroll 3
            for (int j = 0; j < PANEL_VECTORS; j++) {
                const long at = j * 4 * LANES;
                vint four = nibble_rows(format)
                                ? vi_and(move_bits(vi_load(low + quad / 2 * stride + at), quad % 2 * 4, 0), nibble)
                                : vi_and(move_bits(vi_load(low + quad / 4 * stride + at), quad % 4 * 2, 0), pair);
                if (format == Q3_K || format == Q5_K) {
                    const int to = format == Q3_K ? 2 : 4;
                    vint bit = move_bits(vi_load(high + at), quad, to);
                    four = vi_or(four, vi_and(bit, vi_all(0x01010101 << to)));
                }
                if (format == Q6_K) {
                    vint two = move_bits(vi_load(high + quad / 4 * stride + at), quad % 4 * 2, 4);
                    four = vi_or(four, vi_and(two, vi_all(0x30303030)));
                }
                if (format == Q3_K) four = vi_add_bytes(four, vi_all(0x01010101 * (HALF_OFFSET - 4)));
                vi_store(codes + at, four);
            }
    }
}

// Value i of those that pack_k.c has put six bits of into three words.
INLINE vint six_bits(const vint *words, const int i) {
    const vint low = vi_all(63);
    if (i < 15) return vi_and(vi_shift_right(words[i / 5], i % 5 * 6), low);
    vint first = vi_shift_right(words[0], 30), second = vi_shift_right(words[1], 30);
    return vi_or(vi_or(first, vi_shift_left(second, 2)), vi_shift_left(vi_shift_right(words[2], 30), 4));
}

INLINE void unpack_scales(const long format, const uint8_t *panel, Unpacked *block) {
    const uint8_t *word = panel + k_words_begin(format);
    const uint16_t *halves = (const uint16_t *)(const void *)(panel + k_halves_begin(format));
#pragma GCC unroll 3
    for (int j = 0; j < PANEL_VECTORS; j++) {
        vint words[4];
        for (int i = 0; i < words_of(format); i++) words[i] = vi_load(word + (i * PANEL_COLUMNS + j * LANES) * 4);
        vfloat d = vf_load_half(halves + j * LANES), dmin = vf_zero();
        if (halves_of(format) > 1)
            dmin = vf_mul(vf_load_half(halves + PANEL_COLUMNS + j * LANES),
                          vf_all(format == Q2_K ? 1.0f / HALF_OFFSET : -1.0f));
#pragma GCC unroll 16
        for (int i = 0; i < K_INPUTS / inputs_of_scale(format); i++) {
            vint scale = vi_zero(), minimum = vi_zero();
            if (format == Q2_K) {
                vint byte = vi_shift_right(words[i / 4], i % 4 * 8);
                scale = vi_and(byte, vi_all(15)), minimum = vi_and(vi_shift_right(byte, 4), vi_all(15));
            } else if (format == Q6_K) {
                scale = vi_shift_right_signed(vi_shift_left(words[i / 4], 24 - i % 4 * 8), 24);
            } else if (format == Q3_K) {
                scale = vi_add(six_bits(words, i), vi_all(-32));
            } else {
                scale = six_bits(words, i), minimum = six_bits(words, 8 + i);
            }
            vf_store(block->scales + i * PANEL_COLUMNS + j * LANES, vf_mul(d, vi_to_float(scale)));
            if (halves_of(format) > 1)
                vf_store(block->minima + i * PANEL_COLUMNS + j * LANES, vf_mul(dmin, vi_to_float(minimum)));
        }
    }
}

// Add to totals[rows][PANEL_COLUMNS] what rows from `row` on make of a block. `shared`, `has_minima` and `rows` are
// constants at each call, so that all sums stay in registers.
INLINE void add_block(const long shared, const bool has_minima, const int rows, const Unpacked *unpacked, long block,
                      const Rows *in, long row, float *totals) {
    long num_groups = in->stride / GROUP, first = row * num_groups + block * K_GROUPS;
    const int8_t *inputs = (const int8_t *)in->codes + row * in->stride + block * K_INPUTS;
    const uint8_t *codes = unpacked->codes;
    vfloat total[CODE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < PANEL_VECTORS; j++) total[i][j] = vf_load(totals + i * PANEL_COLUMNS + j * LANES);
    for (long part = 0; part < K_INPUTS / shared; part++) {
        vint sum[CODE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
            for (int j = 0; j < PANEL_VECTORS; j++)
                sum[i][j] = has_minima ? vi_zero() : vi_all(in->half_offsets[2 * (first + i * num_groups) + part]);
#pragma GCC unroll 8
        for (int quad = 0; quad < shared / 4; quad++, inputs += 4, codes += 4 * PANEL_COLUMNS) {
            vint column[PANEL_VECTORS];
#pragma GCC unroll 3
            for (int j = 0; j < PANEL_VECTORS; j++) column[j] = vi_load(codes + 4 * j * LANES);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) {
                int32_t four;
                memcpy(&four, inputs + i * in->stride, sizeof four);
                vint value = vi_all(four);
#pragma GCC unroll 3
                for (int j = 0; j < PANEL_VECTORS; j++) sum[i][j] = vi_dot_small_quads(sum[i][j], column[j], value);
            }
        }
        long of_group = first + part * shared / GROUP;
#pragma GCC unroll 3
        for (int j = 0; j < PANEL_VECTORS; j++) {
            vfloat scale = vf_load(unpacked->scales + part * PANEL_COLUMNS + j * LANES);
            vfloat minimum = has_minima ? vf_load(unpacked->minima + part * PANEL_COLUMNS + j * LANES) : vf_zero();
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) {
                long index = of_group + i * num_groups;
                vfloat exact = vf_mul(vi_to_float(sum[i][j]), vf_all(in->scales[index]));
                total[i][j] = vf_accumulate(total[i][j], exact, scale);
                if (!has_minima) continue;
                float value = in->sums[index];
                if (shared < GROUP)
                    value = in->scales[index] * (float)in->half_offsets[2 * (first + i * num_groups) + part];
                total[i][j] = vf_accumulate(total[i][j], minimum, vf_all(value));
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < PANEL_VECTORS; j++) vf_store(totals + i * PANEL_COLUMNS + j * LANES, total[i][j]);
}

// Add what all rows make of a block.
INLINE void add_rows(const long shared, const bool has_minima, const Unpacked *unpacked, long block, const Rows *in,
                     long first_row, long num_rows, float *totals) {
    for (long row = 0; row < num_rows; row += CODE_ROWS, totals += CODE_ROWS * PANEL_COLUMNS) {
        switch (least(CODE_ROWS, num_rows - row)) {
#define ROWS(count) \
    case count: add_block(shared, has_minima, count, unpacked, block, in, first_row + row, totals); break;
            CODE_CASES(ROWS)
#undef ROWS
        }
    }
}

typedef void AddRows(const Unpacked *unpacked, long block, const Rows *in, long first_row, long num_rows, float *totals);
static void add_with_minima(const Unpacked *unpacked, long block, const Rows *in, long first_row, long num_rows,
                            float *totals) {
    add_rows(32, true, unpacked, block, in, first_row, num_rows, totals);
}
static void add_halves_with_minima(const Unpacked *unpacked, long block, const Rows *in, long first_row, long num_rows,
                                   float *totals) {
    add_rows(16, true, unpacked, block, in, first_row, num_rows, totals);
}
static void add_halves(const Unpacked *unpacked, long block, const Rows *in, long first_row, long num_rows,
                       float *totals) {
    add_rows(16, false, unpacked, block, in, first_row, num_rows, totals);
}

INLINE void multiply_format(const long format, const Matrix *matrix, long panel, long next, const Rows *in,
                            long first_row, long num_rows, float *totals) {
    AddRows *add = zero_of(format) ? add_halves : inputs_of_scale(format) == 32 ? add_with_minima : add_halves_with_minima;
    long num_blocks = matrix->num_inputs / K_INPUTS, bytes = k_panel_bytes(format);
    Fetch fetch = fetch_panel(k_block_of(matrix, panel, 0), k_block_of(matrix, next, 0), num_blocks * K_GROUPS,
                              bytes / K_GROUPS, 0, 1);
    Unpacked unpacked;
    for (long block = 0; block < num_blocks; block++) {
        const uint8_t *place = k_block_of(matrix, panel, block);
        unpack_codes(format, place, &fetch, block * K_GROUPS, unpacked.codes);
        unpack_scales(format, place, &unpacked);
        add(&unpacked, block, in, first_row, num_rows, totals);
    }
}

static void multiply_rows(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows,
                          float *totals) {
    switch (matrix->format) {
#define FORMAT(format) \
    case format: multiply_format(format, matrix, panel, next, in, first_row, num_rows, totals); break;
        K_FORMATS(FORMAT)
#undef FORMAT
    }
}

void multiply_k(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows, float *out,
                long out_stride, bool add) {
    long num_columns = least(PANEL_COLUMNS, matrix->num_outputs - panel * PANEL_COLUMNS);
    for (long begin = 0; begin < num_rows; begin += K_ROWS) {
        long count = least(K_ROWS, num_rows - begin);
        float totals[K_ROWS * PANEL_COLUMNS];
        memset(totals, 0, (size_t)(count * PANEL_COLUMNS) * sizeof *totals);
        multiply_rows(matrix, panel, begin + K_ROWS < num_rows ? panel : next, in, first_row + begin, count, totals);
        for (long i = 0; i < count; i++)
            for (long j = 0; j < num_columns; j++) {
                float *p = out + (begin + i) * out_stride + j, total = totals[i * PANEL_COLUMNS + j];
                *p = add ? *p + total : total;
            }
    }
    add_bias(matrix, panel, num_rows, out, out_stride);
}
