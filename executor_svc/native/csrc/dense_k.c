// Products of int8 rows with matrices in the K formats.
//
// Products are summed exactly in int32 over the inputs that share a scale, in float32 over the scales; d * scale and
// dmin * minimum are exact. Codes of formats without minima are signed: they are multiplied with HALF_OFFSET added, and
// a sum starts at the difference. The sums of a row go from the first input to the last, whatever the other rows are.
//
// The scales of a panel's block are unpacked once for all rows; with many rows its codes too, a byte each. Both stay in
// L1.
#include <string.h>

#include "k_blocks.h"
#include "tile.h"

// Rows with sums that are kept while the blocks of a panel go by: L1 has room for them beside a block.
#define K_ROWS 64

#define MOST_SCALES 16  // of a block

typedef struct {
    _Alignas(64) uint8_t codes[K_INPUTS * PANEL_COLUMNS];  // [input / 4][column][4]
    float scales[MOST_SCALES * PANEL_COLUMNS];
    float minima[MOST_SCALES * PANEL_COLUMNS];  // factors of a sum of values; with 16 inputs, of half_offsets
} Unpacked;

// Move the bits of each lane from bit `from` to bit `to`; the other bits must be masked.
INLINE vint move_bits(vint v, const int from, const int to) {
    return from < to ? vi_shift_left(v, to - from) : vi_shift_right(v, from - to);
}

// Codes 4 * quad .. of a group in a vector of columns, a byte each. `panel` is the group's, at those columns.
INLINE vint load_codes(const long format, const uint8_t *panel, const int quad) {
    const long stride = 4 * PANEL_COLUMNS;
    const uint8_t *high = panel + (nibble_rows(format) ? nibble_rows(format) : pair_rows(format)) * stride;
    vint codes = nibble_rows(format)
                     ? vi_and(move_bits(vi_load(panel + quad / 2 * stride), quad % 2 * 4, 0), vi_all(0x0f0f0f0f))
                     : vi_and(move_bits(vi_load(panel + quad / 4 * stride), quad % 4 * 2, 0), vi_all(0x03030303));
    if (bit_rows(format)) {
        const int to = format == Q3_K ? 2 : 4;
        codes = vi_or(codes, vi_and(move_bits(vi_load(high), quad, to), vi_all(0x01010101 << to)));
    }
    if (format == Q6_K)
        codes = vi_or(codes, vi_and(move_bits(vi_load(high + quad / 4 * stride), quad % 4 * 2, 4), vi_all(0x30303030)));
    return format == Q3_K ? vi_add_bytes(codes, vi_all(0x01010101 * (HALF_OFFSET - 4))) : codes;
}

INLINE void unpack_codes(const long format, const uint8_t *panel, uint8_t *codes) {
    for (long group = 0; group < K_GROUPS; group++, panel += rows_of_group(format) * 4 * PANEL_COLUMNS) {
#pragma GCC unroll 8
        for (int quad = 0; quad < QUADS; quad++)
#pragma GCC unroll 3
            for (int j = 0; j < PANEL_VECTORS; j++, codes += 4 * LANES)
                vi_store(codes, load_codes(format, panel + j * 4 * LANES, quad));
    }
}

// Value i of the values that pack_k.c has put into three words, six bits each.
INLINE vint six_bits(const vint *words, const int i) {
    const vint low = vi_all(63);
    if (i < 15) return vi_and(vi_shift_right(words[i / 5], i % 5 * 6), low);
    vint first = vi_shift_right(words[0], 30), second = vi_shift_right(words[1], 30);
    return vi_or(vi_or(first, vi_shift_left(second, 2)), vi_shift_left(vi_shift_right(words[2], 30), 4));
}

INLINE void unpack_scales(const long format, const uint8_t *panel, Unpacked *block) {
    const uint16_t *halves = (const uint16_t *)(const void *)(panel + k_halves_begin(format));
#pragma GCC unroll 3
    for (int j = 0; j < PANEL_VECTORS; j++) {
        vint words[4];
        for (int i = 0; i < words_of(format); i++) words[i] = vi_load(panel + (i * PANEL_COLUMNS + j * LANES) * 4);
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

// A block on its way to products.
typedef struct {
    const uint8_t *codes;  // unpacked, or in the panel
    const float *scales, *minima;
    const Fetch *fetch;  // NULL: nothing is to be fetched
    long index;
} Block;

// Add to totals[rows][PANEL_COLUMNS] what rows from `row` on make of a block. `format`, `is_unpacked` and `rows` are
// constants at each call, so that all sums stay in registers.
INLINE void add_block(const long format, const bool is_unpacked, const int rows, const Block *block, const Rows *in,
                      long row, float *totals) {
    const bool has_minima = halves_of(format) > 1;
    const int parts = (int)(GROUP / inputs_of_scale(format)), quads = QUADS / parts;
    long num_groups = in->stride / GROUP, group = row * num_groups + block->index * K_GROUPS;
    const int8_t *inputs = (const int8_t *)in->codes + row * in->stride + block->index * K_INPUTS;
    const uint8_t *codes = block->codes;
    const float *scales = block->scales, *minima = block->minima;
    vfloat total[CODE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < PANEL_VECTORS; j++) total[i][j] = vf_load(totals + i * PANEL_COLUMNS + j * LANES);
    for (long k = 0; k < K_GROUPS; k++, group++, inputs += GROUP) {
        if (block->fetch) fetch_lines(block->fetch, block->index * K_GROUPS + k);
#pragma GCC unroll 2
        for (int part = 0; part < parts; part++) {
            vint sum[CODE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
                for (int j = 0; j < PANEL_VECTORS; j++)
                    sum[i][j] = has_minima ? vi_zero() : vi_all(in->half_offsets[2 * (group + i * num_groups) + part]);
#pragma GCC unroll 8
            for (int quad = part * quads; quad < (part + 1) * quads; quad++) {
                vint column[PANEL_VECTORS];
#pragma GCC unroll 3
                for (int j = 0; j < PANEL_VECTORS; j++)
                    column[j] = is_unpacked ? vi_load(codes + (quad * PANEL_COLUMNS + j * LANES) * 4)
                                            : load_codes(format, codes + j * 4 * LANES, quad);
#pragma GCC unroll 4
                for (int i = 0; i < rows; i++) {
                    int32_t four;
                    memcpy(&four, inputs + i * in->stride + 4 * quad, sizeof four);
                    vint value = vi_all(four);
#pragma GCC unroll 3
                    for (int j = 0; j < PANEL_VECTORS; j++) sum[i][j] = vi_dot_small_quads(sum[i][j], column[j], value);
                }
            }
#pragma GCC unroll 3
            for (int j = 0; j < PANEL_VECTORS; j++, scales += LANES, minima += LANES) {
                vfloat scale = vf_load(scales), minimum = has_minima ? vf_load(minima) : vf_zero();
#pragma GCC unroll 4
                for (int i = 0; i < rows; i++) {
                    long index = group + i * num_groups;
                    vfloat exact = vf_mul(vi_to_float(sum[i][j]), vf_all(in->scales[index]));
                    total[i][j] = vf_accumulate(total[i][j], exact, scale);
                    if (!has_minima) continue;
                    float value = parts == 1 ? in->sums[index] : in->scales[index] * (float)in->half_offsets[2 * index + part];
                    total[i][j] = vf_accumulate(total[i][j], minimum, vf_all(value));
                }
            }
        }
        codes += (is_unpacked ? QUADS : rows_of_group(format)) * 4 * PANEL_COLUMNS;
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < PANEL_VECTORS; j++) vf_store(totals + i * PANEL_COLUMNS + j * LANES, total[i][j]);
}

// Add a block's part to all rows; meanwhile the first rows fetch what is read next.
INLINE void add_rows(const long format, const bool is_unpacked, Block block, const Rows *in, long first_row,
                     long num_rows, float *totals) {
    for (long row = 0; row < num_rows; row += CODE_ROWS, totals += CODE_ROWS * PANEL_COLUMNS, block.fetch = NULL) {
        switch (least(CODE_ROWS, num_rows - row)) {
#define ROWS(count) \
    case count: add_block(format, is_unpacked, count, &block, in, first_row + row, totals); break;
            CODE_CASES(ROWS)
#undef ROWS
        }
    }
}

// As add_rows with unpacked codes; unpacked, Q6_K is like Q3_K.
#define ADD_UNPACKED(format)                                                                                     \
    static __attribute__((noinline, noclone)) void add_unpacked_##format(const Block *block, const Rows *in,     \
                                                                         long first_row, long num_rows,          \
                                                                         float *totals) {                        \
        add_rows(format, true, *block, in, first_row, num_rows, totals);                                         \
    }
ADD_UNPACKED(Q2_K)
ADD_UNPACKED(Q3_K)
ADD_UNPACKED(Q5_K)

// Whether unpacking codes for every CODE_ROWS rows takes no longer than writing them down.
INLINE bool is_in_place(const long format, long num_rows) {
    return format == Q4_K || num_rows <= CODE_ROWS * CODE_ROWS;
}

INLINE void multiply_format(const long format, const Matrix *matrix, long panel, long next, const Rows *in,
                            long first_row, long num_rows, float *totals) {
    long num_blocks = matrix->num_inputs / K_INPUTS, bytes = k_panel_bytes(format), turn = (num_blocks - 1) * K_GROUPS;
    // Always a block ahead: it is unpacked at once.
    Fetch fetch = {(const char *)k_block_of(matrix, panel, 0) + bytes,
                   (const char *)k_block_of(matrix, next, 0) - turn * (bytes / K_GROUPS), turn, bytes / K_GROUPS};
    bool in_place = is_in_place(format, num_rows);
    Unpacked unpacked;
    for (long index = 0; index < num_blocks; index++) {
        const uint8_t *place = k_block_of(matrix, panel, index);
        unpack_scales(format, place, &unpacked);
        place += k_codes_begin(format);
        Block block = {place, unpacked.scales, unpacked.minima, &fetch, index};
        if (in_place) {
            add_rows(format, false, block, in, first_row, num_rows, totals);
        } else {
            unpack_codes(format, place, unpacked.codes);
            block.codes = unpacked.codes;
            (format == Q2_K ? add_unpacked_Q2_K : format == Q5_K ? add_unpacked_Q5_K : add_unpacked_Q3_K)(
                &block, in, first_row, num_rows, totals);
        }
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
