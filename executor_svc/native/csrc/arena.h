// Scratch memory in parts: laid out once to measure it, and once more at its address.
#ifndef OCTAVO_ARENA_H
#define OCTAVO_ARENA_H

#include "dense.h"

typedef struct {
    uintptr_t begin, next;  // begin 0: only measure
} Arena;

INLINE long used_bytes(const Arena *arena) { return (long)(arena->next - arena->begin); }

// Return the next part, aligned to 64 bytes.
INLINE void *take(Arena *arena, long num_bytes) {
    void *part = (void *)arena->next;
    arena->next += (uintptr_t)round_up(num_bytes, 64);
    return part;
}

// Return rows of `width` codes without values; of floats they are empty.
INLINE Rows take_codes(Arena *arena, long num_rows, long width, InputFormat format) {
    Rows rows = {.num_rows = num_rows, .stride = round_up(width, GROUP), .format = format};
    long num_groups = num_rows * (rows.stride / GROUP);
    if (format == BFLOAT16_CODES) {
        rows.codes = take(arena, num_rows * rows.stride * (long)sizeof(uint16_t));
    } else if (format == INT16_CODES) {
        rows.codes = take(arena, num_rows * rows.stride * (long)sizeof(int16_t));
        rows.scales = take(arena, num_rows * (long)sizeof(float));
    } else if (format == INT8_CODES) {
        rows.codes = take(arena, num_rows * rows.stride);
        rows.scales = take(arena, num_groups * (long)sizeof(float));
        rows.sums = take(arena, num_groups * (long)sizeof(float));
        rows.offsets = take(arena, num_groups * (long)sizeof(int32_t));
        rows.half_offsets = take(arena, 2 * num_groups * (long)sizeof(int32_t));
    }
    return rows;
}

// Return rows of `width` values, with their codes.
INLINE Rows take_rows(Arena *arena, long num_rows, long width, InputFormat format) {
    Rows rows = take_codes(arena, num_rows, width, format);
    rows.values = take(arena, num_rows * rows.stride * (long)sizeof(float));
    return rows;
}

// Return rows of `width` as a product takes them; of bfloat16, with codes made value by value, without values.
INLINE Rows take_inputs(Arena *arena, long num_rows, long width, InputFormat format) {
    return format == BFLOAT16_CODES ? take_codes(arena, num_rows, width, format) : take_rows(arena, num_rows, width, format);
}

#endif
