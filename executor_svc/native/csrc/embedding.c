// From token ids and positions to the first residual stream.
#include "embedding.h"

#include <string.h>

// Values that are worth a second thread.
#define ALONE 20000l

// out[i][num_inputs] = row ids[i] - first_id of the matrix, or zeros if it has no such row: another rank has it.
void octavo_read_rows(const Matrix *matrix, long first_id, long num_ids, const int64_t *ids, float *out,
                      int num_threads) {
    long num_inputs = matrix->num_inputs;
#pragma omp parallel for num_threads(num_threads) if (num_ids * num_inputs >= ALONE)
    for (long i = 0; i < num_ids; i++) {
        long row = ids[i] - first_id;
        if (row >= 0 && row < matrix->num_outputs)
            read_row(matrix, row, out + i * num_inputs);
        else
            memset(out + i * num_inputs, 0, (size_t)num_inputs * sizeof *out);
    }
}

void finish_embedding(const Embedding *embedding, long position, float *x) {
    long size = embedding->hidden_size;
    for (long i = 0; i < size; i++) x[i] *= embedding->scale;
    if (embedding->positions) {
        const float *added = embedding->positions + (position + embedding->position_offset) * size;
        for (long i = 0; i < size; i++) x[i] += added[i];
    }
    if (embedding->norm.weight) normalize(&embedding->norm, x, size, x);
}

// finish_embedding of each row of residual [num_rows][hidden_size].
void octavo_finish_embedding(const Embedding *embedding, long num_rows, const int64_t *positions, float *residual,
                             int num_threads) {
    long size = embedding->hidden_size;
#pragma omp parallel for num_threads(num_threads) if (num_rows * size >= ALONE)
    for (long row = 0; row < num_rows; row++) finish_embedding(embedding, positions[row], residual + row * size);
}
