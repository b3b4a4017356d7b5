/* ref/chunk/chunk_factored.h - the chunk form as the note on chunkwise MKDA prints it (math.md
 * e.1):
 *     K_plus = exp(gcum) o k,   K_minus = exp(-gcum) o k,   L = K_plus K_minus', masked
 *     S_c = F_c o (S_0 + sum of K_minus' X),   F_c = exp(gcum of the last token)
 * products over the chunk's linear algebra, every step in the formats of the base. In exact
 * arithmetic this is right. It is as good as pairs until exp(-gcum) overflows. In fp32 gates of a
 * chunk may sum to -88.72, g = -1.386 a step over 64 tokens; in fp64 to -709, -11.09 a step. Behind
 * that an infinity, or 0 times one, stands in the results. */
#pragma once
#include "chunk.h"
#include "chunk_pair.h"

static inline int dp_is_factored(const dp_chunk *ch) {
    return ch->design.gated == DP_SCORES_FACTORED;
}

/* L and Aqk (before it is stored). */
void dp_factored_forward(dp_chunk *ch);
/* As dp_pair_bwd. */
void dp_factored_backward(const dp_chunk *ch, const dp_pair_adjoint *a);
/* K_minus [n][K], to be freed. */
double *dp_factored_minus(const dp_chunk *ch);
