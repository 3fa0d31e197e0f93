// Attention on a latent cache: what comes before it and behind it.
//
// One vector of each token is what all heads make their keys and values of. Source: DeepSeek-AI 2024, "DeepSeek-V2",
// multi-head latent attention (MLA). The maps are "absorbed": a head multiplies its query with the map of its keys, and
// what it attended with the map of its values, so that the cache is read as it lies.
#ifndef OCTAVO_LATENT_H
#define OCTAVO_LATENT_H

#include "layers.h"

// A vector of the cache has the rotary numbers of a key, which all heads share, and then the latent.
typedef struct {
    long num_heads, rank;        // rank: numbers of the latent
    long rotary_dim, key_dim;    // numbers of a query that are rotated, and others
    long value_dim;
    long query_rank;             // numbers of the vector that queries are made of; 0: the projection makes queries
    Norm norm, query_norm;       // of the latent, and of that vector
    Matrix queries;              // from that vector to queries; as the projection has them without it
    const Matrix *keys, *values; // [num_heads] from the other numbers of a query to rank; from rank to value_dim
} Latent;

// Numbers of a vector of the cache, and of a query for it.
INLINE long vector_dim(const Latent *latent) { return latent->rotary_dim + latent->rank; }

// Numbers of the queries and of the vector that attention takes of a token.
INLINE long latent_width(const Latent *latent) { return (latent->num_heads + 1) * vector_dim(latent); }

long octavo_latent_scratch_bytes(const Latent *latent, long num_tokens);

// As octavo_latent_queries and octavo_latent_values.
void make_latent_queries(const Latent *latent, long num_tokens, float *projected, float *out, void *memory,
                         const Member *member);
void make_latent_values(const Latent *latent, long num_tokens, float *attended, float *out, void *memory,
                        const Member *member);

#endif
