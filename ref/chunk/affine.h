/* ref/chunk/affine.h - the pair (M, H) of an affine state map S -> M S + H, in fp64 (math.md g.1).
 * M [K][K], H [K][V]. */
#ifndef DP_AFFINE_H
#define DP_AFFINE_H
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/problem.h"
#ifdef __cplusplus
extern "C" {
#endif

/* The format in which the chain of M is multiplied where `chain` is asked for: that one, but where
 * nothing is erased M is a diagonal, K numbers that no product of matrices need touch: they are
 * multiplied in the accumulator of the base, whatever is asked for. */
dp_format dp_chain_format(const dp_problem *p, dp_base base, dp_format chain);

typedef struct {
    int K, V;
    double *M, *H;
} dp_affine;
void dp_affine_init(dp_affine *a, int K, int V); /* the identity: M = I, H = 0 */
/* Frees what it holds; the struct is the caller's. */
void dp_affine_free(dp_affine *a);
void dp_affine_compose(
    dp_affine *later,
    const dp_affine *earlier); /* later <- later o earlier = (M2 M1, M2 H1 + H2) */
void dp_affine_apply(const dp_affine *a, const double *S,
                     double *out); /* out = M S + H; out may be S */
/* out (initialised here, freed by the caller) = maps [n-1] o ... o [1] o [0]; n >= 1. */
void dp_affine_chain(const dp_affine *first_to_last, int n, dp_affine *out);
/* S = 0; for j = from, from+step, ..., until (excluded, from != until): S <- M_j S + H_j. Start at
 * the FARTHEST rank: forward (r - pre, r, +1), backward (r + post, r, -1) on the adjoint pairs.
 * ranks[from].M is not read. */
void dp_affine_merge(const dp_affine *ranks, int from, int until, int step, double *S);

#ifdef __cplusplus
}
#endif
#endif
