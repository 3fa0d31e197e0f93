// The MLP of a layer: one, or a mixture of experts.
#ifndef OCTAVO_MLP_H
#define OCTAVO_MLP_H

#include "activation.h"
#include "arena.h"
#include "dense.h"
#include "team.h"

// Rows that one task multiplies with a panel: inputs of so many rows stay in L2 beside the panel.
#define TASK_ROWS 128

// down(activation(gate(x)) * up(x)); without a gate down(activation(up(x))).
typedef struct {
    Matrix gate;  // no outputs: there is none
    Matrix up, down;
} Mlp;

// A router, and the experts that it chooses for each row.
typedef struct {
    Matrix router;  // float32
    const Mlp *mlps;
    long num_experts;  // 0: there is no mixture
    long num_chosen;
    long is_normalized;  // whether the weights of those that are chosen are scaled to a sum of 1
} Experts;

// Which expert has which rows, and what they are given and return.
typedef struct {
    float *scores;            // [num_rows][num_experts]
    int32_t *chosen;          // [num_rows][num_chosen]
    float *weights;           // [num_rows][num_chosen]
    int32_t *places;          // [num_rows][num_chosen] in the rows below
    long *ends;               // [num_experts]
    Rows gathered, activated; // [num_rows * num_chosen], expert by expert
    float *outputs;           // [num_rows * num_chosen][hidden_size]
} ExpertsScratch;

// activated = activation(in @ gate.T) * (in @ up.T), one panel of it for num_rows rows from first_row.
void activate_panel(const Mlp *mlp, Activation activation, long panel, long next, const Rows *in, long first_row,
                    long num_rows, const Rows *activated);

// activated = activation(in @ gate.T) * (in @ up.T), shared by the threads of a region.
void activate_rows(const Mlp *mlp, Activation activation, const Rows *in, const Rows *activated, const Member *member);

void lay_out_experts(const Experts *experts, long num_rows, Arena *arena, ExpertsScratch *scratch);

// out (=|+=) for each row the weighted sum of what its experts make of `in`, in the order in which it chose them.
// Both have the values of their rows, and their codes if they have some. Nobody waits at the end.
void run_experts(const Experts *experts, Activation activation, const Rows *in, const ExpertsScratch *scratch,
                 float *out, bool add, const Member *member);

#endif
