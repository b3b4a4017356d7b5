/* ref/chunk/chunk_pair.h - the pairwise parts of the chunk form (ref/chunk/chunk.h), in fp64 for
 * base fp64 and in fp32 for the others; used by chunk.c alone.
 *
 * The order of operations is part of the definition. First e = exp(gcum_s - gcum_i) entry by entry
 * (ref/arithmetic/elementary.h), then ek = e k_i. A sum over the K channels is 16 running sums: sum
 * l over channels l, l + 16, .. from +0. They are added as sum l + sum (l + 8), + 4, + 2, + 1. Sums
 * over pairs run over s from last to first, i from first to s, m, then j. So the bits depend on
 * neither the CPU nor the width of its vectors. Error of a sum of K terms: at most gamma_(K+2) of
 * the sum of absolute values, as for any order.
 */
#pragma once
#include "chunk.h"

void dp_pair_fwd(dp_chunk *ch); /* L and Aqk */

/* Input:
 *   dL [n][n], dP [c][n] (adjoint of Aqk / scale, scale included)
 * Output:
 *   dq [c][K], dkr (read) and dkw (write) [n][K]: the in-chunk parts */
typedef struct {
    const double *dL, *dP;
    double *dq, *dkr, *dkw;
} dp_pair_adjoint;
/* Adds to dq, dkr and dkw. */
void dp_pair_bwd(const dp_chunk *ch, const dp_pair_adjoint *a);

void dp_pair_forget(dp_chunk *ch); /* frees ch->decay */
