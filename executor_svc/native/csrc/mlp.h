// The MLP of a layer: one, or a mixture of experts.
#ifndef OCTAVO_MLP_H
#define OCTAVO_MLP_H

#include "activation.h"
#include "adapters.h"
#include "arena.h"
#include "dense.h"
#include "norm.h"
#include "team.h"

// Rows that one task multiplies with a panel: inputs of so many rows stay in L2 beside the panel.
#define TASK_ROWS 128

// Up to so many rows a task is repeatable: more rows take too long to copy.
#define REPEATED_ROWS 64

// Up to so many rows each thread makes the product's inputs for itself: that is faster than a wait.
#define ROWS_FOR_EACH 2
INLINE bool is_for_each(long num_rows, const Member *member) {
    return num_rows <= ROWS_FOR_EACH && member->num_threads > 1;
}
Rows own_rows(OwnPart part, long num_rows, long width, InputFormat format);

// to[num_rows][num_columns] = from[num_rows][num_columns]
INLINE void copy_columns(const float *from, long from_stride, long num_rows, long num_columns, float *to,
                         long to_stride) {
    for (long i = 0; i < num_rows; i++)
        for (long j = 0; j < num_columns; j++) to[i * to_stride + j] = from[i * from_stride + j];
}

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
    long is_normalized;  // whether the weights of the chosen ones are scaled to a sum of 1
    long is_sigmoid;     // whether scores are sigmoids; else their softmax
    const float *correction_bias;  // [num_experts], added to scores for the choice alone; NULL: there is none
    float sum_epsilon;             // added to the sum that weights are divided by
    float scale;                   // of the weights
    long num_groups, num_chosen_groups;  // see `ExpertsConfig`
    const float *expert_scales;    // [num_experts], of the weights too; NULL: 1
    // With these the router and the experts take norms of the residual stream, the shared expert that of the layer, and
    // what both return is normed before it is added; without weights all take that of the layer.
    Norm router_norm, input_norm, output_norm, shared_output_norm;
    Mlp shared;          // for every row, times the sigmoid of its gate; no outputs: there is none
    Matrix shared_gate;  // float32, one output; none: the factor is 1
} Experts;

// The rows of each expert, with their inputs and results.
typedef struct {
    Rows scored, inputs;      // of the router and of the experts where they have norms
    float *scores;            // [num_rows][num_experts]
    int32_t *chosen;          // [num_rows][num_chosen]
    float *weights;           // [num_rows][num_chosen]
    Rows gathered, activated; // [num_rows * num_chosen], expert by expert
    float *outputs;           // [num_rows * num_chosen][hidden_size]
    // Of the shared expert.
    Rows shared_inputs, shared_activated;
    float *shared_gates;      // [num_rows]
    float *shared_outputs;    // [num_rows][hidden_size]
} ExpertsScratch;

// out[num_rows][stride] (=|+=) in[first_row ..] @ matrix.T, one panel of it: a task of `phase`.
void multiply_panel(const Matrix *matrix, long panel, long next, const Rows *in, long first_row, long num_rows,
                    float *out, long stride, bool add, Phase *phase);

// activated = activation(in @ gate.T) * (in @ up.T), one panel of it for num_rows rows from first_row: a task of `phase`.
// Its values, or codes where it has no values.
void activate_panel(const Mlp *mlp, Activation activation, long panel, long next, const Rows *in, long first_row,
                    long num_rows, const Rows *activated, Phase *phase);

// activated = activation(in @ gate.T) * (in @ up.T), shared by the threads of a region.
void activate_rows(const Mlp *mlp, Activation activation, const Rows *in, const Rows *activated, const Member *member);

void lay_out_experts(const Experts *experts, long num_rows, Arena *arena, ExpertsScratch *scratch);

// out (=|+=) for each row the weighted sum of its experts' outputs for `in`, in the order in which it chose them by
// `scored`, which has the values of its rows.
void run_experts(const Experts *experts, Activation activation, const Rows *scored, const Rows *in,
                 const ExpertsScratch *scratch, float *out, bool add, const Member *member);

#endif
