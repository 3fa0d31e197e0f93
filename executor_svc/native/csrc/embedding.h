// The embedding of tokens.
#ifndef OCTAVO_EMBEDDING_H
#define OCTAVO_EMBEDDING_H

#include "norm.h"

// What is done to the embedding of a token.
typedef struct {
    float scale;
    const float *positions;  // [position_offset + most positions][hidden_size], added; NULL: none
    long position_offset;
    Norm norm;
    long hidden_size;
} Embedding;

// x[hidden_size] = norm(x * scale + the embedding of its position).
void finish_embedding(const Embedding *embedding, long position, float *x);

#endif
