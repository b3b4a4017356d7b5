/* harness/tests/oracle.h - a second, independent witness: the step recurrence and its adjoint in
 * 80-bit long double, one head and one sequence at a time. It is written as the formulas of math.md
 * b, c, d read. Accurate to about 1e-18, slow, for small problems only. */
#pragma once
#include "ref/vocabulary/problem.h"
void oracle_run(const dp_problem *p, dp_result *r,
                int backward); /* r allocated by dp_result_alloc */
/* A random problem with everything switched on that the arguments ask for; deterministic in seed.
 */
typedef struct {
    dp_model model;
    int64_t T;
    int H, HV, K, V, R, Nseq;
    const int64_t *cu; /* NULL: one sequence */
    dp_gate gate;
    dp_beta beta;
    int l2norm, s0, backward;
    double g_scale; /* typical |g| */
    uint64_t seed;
} oracle_spec;
void oracle_problem(dp_problem *p, const oracle_spec *s);
/* Four packed sequences of two value heads, V = 12, softplus gates, norms, states and gradients;
 * beta plain. cu [5] is to outlive it. */
oracle_spec oracle_packed(dp_model model, int K, const int64_t *cu, uint64_t seed);
double oracle_maxrel(const double *got, const double *want,
                     int64_t n); /* max |got - want| / max |want|; NaN gives inf */
