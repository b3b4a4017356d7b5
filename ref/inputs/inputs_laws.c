/* Laws over generated inputs: see inputs_laws.h. */
#include "inputs_laws.h"
#include "inputs.h"
#include "ref/vocabulary/design.h"

#include <math.h>
#include <string.h>

enum { STREAM_Q = 101, STREAM_K, STREAM_BETA, STREAM_K_SCALE };

#define LN_10 0x1.26bb1bbb55516p1

/* rows of n numbers each */
typedef struct {
    double *x;
    int64_t rows;
    int n;
} matrix;

/* 10^-u, u uniform in [0, decades) */
static double shrink(dp_rng *r, double decades) {
    return dp_exp_exact_bits(-decades * LN_10 * dp_rng_uniform(r));
}

/* most * u, u uniform in [0, 1) */
static double stretch(dp_rng *r, double most) { return most * dp_rng_uniform(r); }

/* Each row times a factor of its own, by(setting); a setting of 0 changes nothing. */
static void scale_rows(const matrix *m, double (*by)(dp_rng *, double), double setting,
                       dp_format dtype, uint64_t seed, int stream) {
    dp_rng r;
    dp_rng_seed(&r, seed, (uint64_t)stream);
    for (int64_t i = 0; i < m->rows && setting > 0; i++) {
        const double factor = by(&r, setting);
        for (int k = 0; k < m->n; k++)
            m->x[i * m->n + k] = dp_store(dtype, m->x[i * m->n + k] * factor);
    }
}

/* v [T][HV][R][V] towards the keys of its head; entry x of a key for entry x of v, again from 0
 * where V > K. */
static void values_from_keys(dp_problem *p, double rest, dp_format dtype) {
    for (int64_t i = 0; rest > 0 && i < p->T * p->HV * p->R; i++) {
        const int64_t t = i / (p->HV * p->R);
        const int64_t h = i / p->R % p->HV / dp_G(p);
        const double *k = p->k + ((t * p->H + h) * p->R + i % p->R) * p->K;
        double *v = p->v + i * p->V;
        for (int x = 0; x < p->V; x++)
            v[x] = dp_store(dtype, k[x % p->K] + rest * v[x]);
    }
}

/* x [T][row]: tokens of a group of `tokens` take the row of its first. */
static void hold(double *x, int64_t T, int64_t row, int tokens) {
    for (int64_t t = 0; tokens > 1 && t < T; t++)
        if (t % tokens) memcpy(x + t * row, x + (t - t % tokens) * row, sizeof *x * (size_t)row);
}

/* The nearest number of 9 significant bits whose last is set. */
static double tie(double x) {
    int e;
    if (x == 0) return 0;
    const double m = frexp(fabs(x), &e); /* in [1/2, 1) */
    return copysign(ldexp(floor(m * 256) + 0.5, e - 8), x);
}

void dp_inputs_apply_laws(dp_problem *p, const dp_inputs_laws *laws, dp_format dtype,
                          uint64_t seed) {
    const matrix q = {p->q, p->T * p->H, p->K};
    const matrix k = {p->k, p->T * p->H * p->R, p->K};
    const matrix beta = {p->beta, p->T * p->HV * p->R, 1};
    scale_rows(&q, shrink, laws->qk_decades, dtype, seed, STREAM_Q);
    scale_rows(&k, shrink, laws->qk_decades, dtype, seed, STREAM_K);
    scale_rows(&k, stretch, laws->k_scale, dtype, seed, STREAM_K_SCALE);
    scale_rows(&beta, shrink, laws->beta_decades, dtype, seed, STREAM_BETA);
    values_from_keys(p, laws->v_from_k, dtype);
    hold(p->g, p->T, (int64_t)p->HV * dp_Kg(p), laws->g_hold);
    hold(p->k, p->T, (int64_t)p->H * p->R * p->K, laws->repeat);
    hold(p->v, p->T, (int64_t)p->HV * p->R * p->V, laws->repeat);
    for (int64_t i = 0; laws->v_ties && i < p->T * p->HV * p->R * p->V; i++)
        p->v[i] = tie(p->v[i]);
    for (int h = 0; laws->has_A_log && p->A_log && h < p->HV; h++)
        p->A_log[h] = dp_store(dtype == DP_FP64 ? DP_FP64 : DP_FP32, laws->A_log);
}
