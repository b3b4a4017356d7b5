/* ref/affine: the algebra of (M, H) against a step-by-step product written here with plain loops.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gt.h"
#include "ref/chunk/affine.h"
#include "ref/inputs/inputs.h"

static const int shapes[][2] = {{1, 1}, {3, 5}, {8, 4}, {16, 16}, {33, 7}};
enum { NSHAPE = sizeof shapes / sizeof *shapes };

static double at(const double *x, int i, int j, int n) { return x[i * n + j]; }

static void random_affine(dp_rng *g, int K, int V, dp_affine *a) {
    dp_affine_init(a, K, V);
    for (int i = 0; i < K * K; i++)
        a->M[i] = dp_rng_normal(g) / sqrt(K);
    for (int i = 0; i < K * V; i++)
        a->H[i] = dp_rng_normal(g);
}

static void random_row(dp_rng *g, int n, int K, int V, dp_affine *a) {
    for (int i = 0; i < n; i++)
        random_affine(g, K, V, &a[i]);
}

static void free_row(dp_affine *a, int n) {
    for (int i = 0; i < n; i++)
        dp_affine_free(&a[i]);
}

/* S <- M S + H and A <- |M| A + |H| in long double; A carries the magnitudes from which a rounding
 * bound follows. */
static void step(const dp_affine *a, long double *S, long double *A) {
    const int K = a->K, V = a->V;
    long double *s = calloc((size_t)K * V, sizeof *s), *m = calloc((size_t)K * V, sizeof *m);
    for (int i = 0; i < K; i++)
        for (int v = 0; v < V; v++) {
            s[i * V + v] = at(a->H, i, v, V);
            m[i * V + v] = fabs(at(a->H, i, v, V));
            for (int k = 0; k < K; k++) {
                s[i * V + v] += at(a->M, i, k, K) * S[k * V + v];
                m[i * V + v] += fabs(at(a->M, i, k, K)) * A[k * V + v];
            }
        }
    memcpy(S, s, (size_t)K * V * sizeof *s);
    memcpy(A, m, (size_t)K * V * sizeof *m);
    free(s);
    free(m);
}

/* Any evaluation of n steps (products of M first, or states first) is a sum over paths of products
 * of entries, each path passing at most n (K + 1) roundings: |error| <= gamma_(n (K+1)) A. Twice
 * that, because the oracle rounds too (in long double). */
static void check_state(const double *S, const long double *want, const long double *A, int n,
                        int K, int V, const char *what) {
    const double nu = n * (K + 1) * DBL_EPSILON / 2;
    for (int i = 0; i < K * V; i++)
        CHECK(fabsl(S[i] - want[i]) <= 2 * nu / (1 - nu) * A[i],
              "%s: K %d V %d n %d entry %d: %a want %La", what, K, V, n, i, S[i], want[i]);
}

DP_TEST(affine, identity_changes_nothing) {
    for (int s = 0; s < NSHAPE; s++) {
        const int K = shapes[s][0], V = shapes[s][1];
        dp_rng g;
        dp_rng_seed(&g, 1, (uint64_t)s);
        dp_affine a, id, b;
        random_affine(&g, K, V, &a);
        dp_affine_init(&id, K, V);
        dp_affine_chain(&a, 1, &b);
        dp_affine_compose(&b, &id);
        CHECK(!memcmp(b.M, a.M, (size_t)K * K * sizeof *a.M) &&
                  !memcmp(b.H, a.H, (size_t)K * V * sizeof *a.H),
              "a o 1, K %d V %d", K, V);
        dp_affine_compose(&id, &a);
        CHECK(!memcmp(id.M, a.M, (size_t)K * K * sizeof *a.M) &&
                  !memcmp(id.H, a.H, (size_t)K * V * sizeof *a.H),
              "1 o a, K %d V %d", K, V);
        dp_affine_free(&a);
        dp_affine_free(&id);
        dp_affine_free(&b);
    }
}

DP_TEST(affine, chain_merge_and_compose_equal_the_step_product) {
    enum { n = 6 };
    for (int s = 0; s < NSHAPE; s++) {
        const int K = shapes[s][0], V = shapes[s][1], KV = K * V;
        dp_rng g;
        dp_rng_seed(&g, 2, (uint64_t)s);
        dp_affine a[n], all, left, right;
        random_row(&g, n, K, V, a);
        double *S0 = dp_doubles(KV), *S = dp_doubles(KV);
        long double *want = calloc((size_t)KV, sizeof *want), *A = calloc((size_t)KV, sizeof *A);
        for (int i = 0; i < KV; i++) {
            S0[i] = dp_rng_normal(&g);
            want[i] = S0[i];
            A[i] = fabs(S0[i]);
        }
        for (int i = 0; i < n; i++)
            step(&a[i], want, A);
        dp_affine_chain(a, n, &all);
        dp_affine_apply(&all, S0, S);
        check_state(S, want, A, n, K, V, "chain");
        dp_affine_chain(a, 2, &left); /* ((5 4 3 2) (1 0)) */
        dp_affine_chain(a + 2, 4, &right);
        dp_affine_compose(&right, &left);
        dp_affine_apply(&right, S0, S);
        check_state(S, want, A, n, K, V, "associativity");
        memcpy(S, S0, (size_t)KV * sizeof *S);
        for (int i = 0; i < n; i++)
            dp_affine_apply(&a[i], S, S); /* in place */
        check_state(S, want, A, n, K, V, "apply in place");
        memset(want, 0, (size_t)KV * sizeof *want);
        memset(A, 0, (size_t)KV * sizeof *A);
        for (int i = 1; i < n; i++)
            step(&a[i], want, A);
        dp_affine_merge(a, 1, n, 1, S);
        check_state(S, want, A, n, K, V, "merge");
        free_row(a, n);
        dp_affine_free(&all);
        dp_affine_free(&left);
        dp_affine_free(&right);
        free(S0);
        free(S);
        free(want);
        free(A);
    }
}

/* Backward merges run from the last rank down; the farthest rank's M must not matter, be it NaN. */
DP_TEST(affine, merge_runs_backward_and_never_reads_the_farthest_M) {
    enum { n = 5, K = 8, V = 4 };
    dp_rng g;
    dp_rng_seed(&g, 3, 0);
    dp_affine a[n];
    random_row(&g, n, K, V, a);
    for (int i = 0; i < K * K; i++)
        a[n - 1].M[i] = NAN;
    double S[K * V];
    long double want[K * V] = {0}, A[K * V] = {0};
    for (int i = 0; i < K * V; i++)
        A[i] = fabsl(want[i] = a[n - 1].H[i]);
    for (int j = n - 2; j > 0; j--)
        step(&a[j], want, A);
    dp_affine_merge(a, n - 1, 0, -1, S);
    check_state(S, want, A, n, K, V, "backward");
    dp_affine_merge(a, 2, 3, 1, S);
    CHECK(!memcmp(S, a[2].H, sizeof S), "a merge of one rank is its H");
    free_row(a, n);
}

static double distance(const double *x, const double *y, int n) {
    double d = 0, s = 0;
    for (int i = 0; i < n; i++) {
        d += (x[i] - y[i]) * (x[i] - y[i]);
        s += x[i] * x[i];
    }
    return sqrt(d / s);
}

/* The order matters for generic maps: nearest-first is off by the size of the result itself, so a
 * wrong order cannot hide. */
DP_TEST(affine, the_reversed_order_is_a_different_map) {
    enum { n = 4, K = 16, V = 8 };
    dp_rng g;
    dp_rng_seed(&g, 4, 0);
    dp_affine a[n], b[n], fwd, rev;
    random_row(&g, n, K, V, a);
    for (int i = 0; i < n; i++)
        b[i] = a[n - 1 - i];
    dp_affine_chain(a, n, &fwd);
    dp_affine_chain(b, n, &rev);
    CHECK(distance(fwd.M, rev.M, K * K) > 0.1, "M: %g", distance(fwd.M, rev.M, K * K));
    double S[K * V], Sr[K * V];
    dp_affine_merge(a, 0, n, 1, S);
    dp_affine_merge(a, n - 1, -1, -1, Sr);
    CHECK(distance(S, Sr, K * V) > 0.1, "S: %g", distance(S, Sr, K * V));
    CHECK(distance(S, fwd.H, K * V) < 1e-13, "merge over a whole row is the chain's H: %g",
          distance(S, fwd.H, K * V));
    free_row(a, n);
    dp_affine_free(&fwd);
    dp_affine_free(&rev);
}

/* dM = M' : the adjoint chain, taken last to first over transposed factors, is the transpose of the
 * forward chain. */
DP_TEST(affine, adjoint_chain_is_the_transpose) {
    enum { n = 5, K = 12, V = 3 };
    dp_rng g;
    dp_rng_seed(&g, 5, 0);
    dp_affine a[n], t[n], fwd, adj;
    random_row(&g, n, K, V, a);
    random_row(&g, n, K, V, t);
    for (int i = 0; i < n; i++)
        for (int r = 0; r < K; r++)
            for (int c = 0; c < K; c++)
                t[n - 1 - i].M[r * K + c] = a[i].M[c * K + r];
    dp_affine_chain(a, n, &fwd);
    dp_affine_chain(t, n, &adj);
    double M[K * K];
    for (int r = 0; r < K; r++)
        for (int c = 0; c < K; c++)
            M[r * K + c] = adj.M[c * K + r];
    CHECK(distance(fwd.M, M, K * K) < 1e-13, "%g", distance(fwd.M, M, K * K));
    free_row(a, n);
    free_row(t, n);
    dp_affine_free(&fwd);
    dp_affine_free(&adj);
}
