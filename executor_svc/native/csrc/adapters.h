// What low-rank adapters add to products: y += ((x @ A.T) @ B.T), each row by its own adapter, or none.
//
// Source: Hu et al. 2021, "LoRA"; Chen et al. 2023, "Punica": rows of one adapter are multiplied together, first to its
// rank (shrink), then to the outputs (expand). Both are sums in float32 whose order the sizes alone say, so the bits of a
// row depend on its own adapter and inputs alone.
#ifndef OCTAVO_ADAPTERS_H
#define OCTAVO_ADAPTERS_H

#include "dense.h"
#include "team.h"

// Most rows of a run. A run lies in the rows of one task of a product.
#define RUN_ROWS 32

// Rows of one adapter, which are multiplied together.
typedef struct {
    long slot;        // of the adapter
    long begin, end;  // places in `order`
} AdapterRun;

// The rows of a step that have an adapter; each step has its own.
typedef struct {
    long num_runs;  // 0: no row has one
    const AdapterRun *runs;
    const int32_t *order;  // [places] rows, those of a run in ascending order
    float *shrunk;         // [places][stride] of the product that goes on
    long stride;           // most numbers that any product shrinks one of these rows to
} AdapterRows;

// An adapter's part of a product.
typedef struct {
    // A of all tensors that take these inputs, one behind the other: [num_shrunk / 4][num_inputs / LANES, rounded up][4]
    // [LANES], with 0 behind the inputs.
    const float *shrink;
    long num_shrunk;        // a multiple of 4; 0: the first of the matrices has them, or the adapter has none
    Matrix expand;          // B times the scale, [outputs of the matrix][all that is shrunk]; no outputs: it has none
    const int32_t *ranges;  // [panels of `expand`][2] begin and end of the inputs of a panel; others are 0
} LowRank;

// What a matrix needs to know of adapters.
typedef struct Adapted {
    const LowRank *slots;  // of each slot
    const AdapterRows *rows;
} Adapted;

// Whether a row of the step has an adapter.
INLINE bool is_adapted(const Matrix *matrix) { return matrix->adapted && matrix->adapted->rows->num_runs; }

// Shrink the inputs of a product, [rows][stride], for the rows that have an adapter; shared by the threads of a region.
// `matrix` may be the first of several with the same inputs.
void shrink_rows(const Matrix *matrix, const float *values, long stride, const Member *member);

// Begin to fetch what expand_panel reads of a panel: the product with the panel itself takes longer.
void fetch_expand(const Matrix *matrix, long panel, long first_row, long num_rows);

// Add to one panel of a product what adapters have for rows [first_row, first_row + num_rows), those of a task. `out`
// points at the panel's first column in the first of them.
void expand_panel(const Matrix *matrix, long panel, long first_row, long num_rows, float *out, long out_stride);

#endif
