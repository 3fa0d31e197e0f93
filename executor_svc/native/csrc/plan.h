// How the work of an attention falls into tiles and tasks; see plan_attention.
#ifndef OCTAVO_PLAN_H
#define OCTAVO_PLAN_H

#include "arena.h"
#include "step.h"

// The rows of a step: sequences, whose tokens lie one row after the other.
typedef struct {
    long num_rows;
    const int32_t *tables;   // [num_rows] row of the block tables
    const int32_t *starts;   // [num_rows] position of the first token
    const int32_t *lengths;  // [num_rows] tokens, 1 or more
    const int32_t *commits;  // [num_rows] tokens, 1 or more, behind which a state is kept; NULL: all
} StepRows;

INLINE long committed_tokens(const StepRows *rows, long row) {
    return rows->commits ? rows->commits[row] : rows->lengths[row];
}

// Take memory for the plan of a step from an arena, and unless that only measures, fill in its tiles and tasks. The
// step has its heads and its window.
void plan_attention(const StepRows *rows, int num_threads, Step *step, Arena *arena);

// Positions whose keys are a part; see attention.c.
long octavo_part_keys(void);

#endif
