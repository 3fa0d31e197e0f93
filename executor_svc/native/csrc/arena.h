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

// Return rows of `width` values, with codes for int8.
INLINE Rows take_rows(Arena *arena, long num_rows, long width, bool is_int8) {
    Rows rows = {.num_rows = num_rows, .stride = round_up(width, GROUP)};
    rows.values = take(arena, num_rows * rows.stride * (long)sizeof(float));
    if (!is_int8) return rows;
    rows.codes = take(arena, num_rows * rows.stride * (long)sizeof(int16_t));
    rows.scales = take(arena, num_rows * (long)sizeof(float));
    return rows;
}

#endif
