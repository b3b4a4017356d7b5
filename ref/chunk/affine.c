/* The pair (M, H) of an affine state map S -> M S + H (math.md g.1), fp64.
 *
 * Composition is associative but not commutative: the later map stands on the left. Both merges
 * therefore start at the farthest rank, whose own M multiplies the zero state and is never read.
 */
#include "affine.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "ref/arithmetic/product.h"
#include "ref/vocabulary/problem.h"

dp_format dp_chain_format(const dp_problem *p, dp_base base, dp_format chain) {
    if (dp_erases(p)) return chain;
    return base == DP_BASE_FP64 ? DP_FP64 : DP_FP32;
}

void dp_affine_init(dp_affine *a, int K, int V) {
    assert(K > 0 && V > 0);
    a->K = K;
    a->V = V;
    a->M = dp_doubles((int64_t)K * K);
    a->H = dp_doubles((int64_t)K * V);
    for (int i = 0; i < K; i++)
        a->M[(size_t)i * K + i] = 1;
}

void dp_affine_free(dp_affine *a) {
    free(a->M);
    free(a->H);
    memset(a, 0, sizeof *a);
}

/* out [K][n] = M X (+ out). out must not alias X. */
static void times(const double *M, const double *X, int K, int n, int accumulate, double *out) {
    const dp_shape s = {.m = K, .n = n, .k = K};
    if (accumulate)
        dp_add_mul_f64(s, 1, M, X, out);
    else
        dp_mul_f64(s, M, X, out);
}

void dp_affine_compose(dp_affine *later, const dp_affine *earlier) {
    const int K = later->K, V = later->V;
    assert(earlier != later && earlier->K == K && earlier->V == V);
    double *M = dp_doubles((int64_t)K * K);
    times(later->M, earlier->M, K, K, 0, M);
    times(later->M, earlier->H, K, V, 1, later->H);
    free(later->M);
    later->M = M;
}

void dp_affine_apply(const dp_affine *a, const double *S, double *out) {
    const size_t n = (size_t)a->K * a->V;
    double *S2 = dp_copy(a->H, (int64_t)n);
    times(a->M, S, a->K, a->V, 1, S2);
    memcpy(out, S2, n * sizeof *out);
    free(S2);
}

void dp_affine_chain(const dp_affine *first_to_last, int n, dp_affine *out) {
    assert(n >= 1);
    dp_affine_init(out, first_to_last->K, first_to_last->V);
    for (int i = 0; i < n; i++) {
        dp_affine next;
        dp_affine_init(&next, out->K, out->V);
        memcpy(next.M, first_to_last[i].M, (size_t)out->K * out->K * sizeof *next.M);
        memcpy(next.H, first_to_last[i].H, (size_t)out->K * out->V * sizeof *next.H);
        dp_affine_compose(&next, out);
        dp_affine_free(out);
        *out = next;
    }
}

void dp_affine_merge(const dp_affine *ranks, int from, int until, int step, double *S) {
    assert(step && (until - from) % step == 0 && (until - from) / step > 0);
    memcpy(S, ranks[from].H, (size_t)ranks[from].K * ranks[from].V * sizeof *S);
    for (int j = from + step; j != until; j += step)
        dp_affine_apply(&ranks[j], S, S);
}
