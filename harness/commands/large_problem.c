/* A case at another size (large_problem.h). */
#include "large_problem.h"
#include "ref/arithmetic/elementary.h"

#include <math.h>
#include <stddef.h>

/* splitmix64: the same bits for any number of threads. */
static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Sum of four 16-bit uniforms, mean 0, variance 1: near enough to normal where only the size
 * matters. */
static double near_normal(uint64_t seed, uint64_t i) {
    const uint64_t h = mix(seed ^ mix(i));
    return ((double)((h & 0xffff) + (h >> 16 & 0xffff) + (h >> 32 & 0xffff) + (h >> 48)) -
            2 * 65535.0) /
           (65536 * 0.57735026918962576);
}

/* beta, erase or write, x [T][width]; NULL: p has none. */
static void fill_strength(const dp_case *c, const dp_problem *p, uint64_t seed, int64_t width,
                          double *x) {
    const dp_inputs_spec *s = &c->spec;
    const int round = c->input_dtype == DP_BF16;
#pragma omp parallel for
    for (int64_t i = 0; i < (x ? p->T * width : 0); i++) {
        const double u = (double)(mix(seed ^ mix((uint64_t)i)) >> 11) * 0x1p-53;
        const double b = p->beta_form == DP_BETA_PLAIN
                             ? s->beta_lo + (s->beta_hi - s->beta_lo) * u
                             : s->beta_lo + s->beta_hi * near_normal(seed, i);
        x[i] = round ? dp_bf16d(b) : dp_fp32(b);
    }
}

/* As in a problem of the case's own size (ref/inputs/inputs.c), lr_a = -u, a unit vector, and lr_b
 * = u o r. The law of beta gives r. */
static void fill_factors(const dp_case *c, dp_problem *p, uint64_t seed) {
    const int K = p->K, round = c->input_dtype == DP_BF16;
    fill_strength(c, p, seed + 20, (int64_t)p->HV * K, p->lr_b);
#pragma omp parallel for
    for (int64_t r = 0; r < p->T * p->HV; r++) {
        double *a = p->lr_a + r * K, *b = p->lr_b + r * K, n = 0;
        for (int x = 0; x < K; x++) {
            a[x] = near_normal(seed + 21, r * K + x);
            n += a[x] * a[x];
        }
        for (int x = 0; x < K; x++) {
            const double u = a[x] / sqrt(n), ur = u * b[x];
            a[x] = round ? -dp_bf16d(u) : -dp_fp32(u);
            b[x] = round ? dp_bf16d(ur) : dp_fp32(ur);
        }
    }
}

/* Inputs of a large problem: unit keys and queries unless the kernel normalises them, gates and
 * betas by the case's law. */
static void fill_large(dp_problem *p, const dp_case *c, uint64_t seed) {
    const dp_inputs_spec *s = &c->spec;
    const int round = c->input_dtype == DP_BF16, Kg = dp_Kg(p), K = p->K;
    double *const key[] = {p->q, p->k};
    for (int z = 0; z < 2; z++) {
        const int64_t rows = p->T * p->H * (z ? p->R : 1);
#pragma omp parallel for
        for (int64_t r = 0; r < rows; r++) {
            double n = 0;
            for (int x = 0; x < K; x++) {
                key[z][r * K + x] = near_normal(seed + z, r * K + x);
                n += key[z][r * K + x] * key[z][r * K + x];
            }
            for (int x = 0; x < K; x++)
                key[z][r * K + x] = dp_bf16d(key[z][r * K + x] / (p->l2norm ? 1 : sqrt(n)));
        }
    }
#pragma omp parallel for
    for (int64_t i = 0; i < p->T * p->HV * p->R * p->V; i++)
        p->v[i] = dp_bf16d(near_normal(seed + 2, i));
#pragma omp parallel for
    for (int64_t i = 0; i < p->T * p->HV * Kg; i++) {
        const double u = (double)(mix((seed + 3) ^ mix((uint64_t)i)) >> 11) * 0x1p-53,
                     g = p->gate == DP_GATE_LOG ? s->g_scale * dp_log1p(-u)
                                                : s->g_mean + s->g_scale * near_normal(seed + 3, i);
        p->g[i] = round ? dp_bf16d(g) : dp_fp32(g);
    }
    double *const strength[] = {p->beta, p->erase, p->write};
    const int64_t width[] = {p->R, p->K, p->V};
    for (int z = 0; z < 3; z++)
        fill_strength(c, p, seed + (z ? 10 + (uint64_t)z : 4), p->HV * width[z], strength[z]);
    if (p->lr_a) fill_factors(c, p, seed);
    for (int64_t i = 0; p->A_log && i < p->HV; i++)
        p->A_log[i] = dp_fp32(0.5 + 0.125 * (double)(i % 8));
    for (int64_t i = 0; p->dt_bias && i < (int64_t)p->HV * Kg; i++)
        p->dt_bias[i] = dp_fp32(-3 + 0.03125 * (double)(i % 32));
#pragma omp parallel for
    for (int64_t i = 0; i < (p->dout ? p->T * p->HV * p->V : 0); i++)
        p->dout[i] = dp_bf16d(near_normal(seed + 5, i));
}

dp_problem dp_large_problem(const dp_case *c, int64_t tokens, int heads, int backward,
                            uint64_t seed) {
    dp_problem p = c->p;
    p.T = tokens ? tokens : c->p.T;
    p.H = p.HV = heads;
    p.cu = NULL;
    p.s0 = p.dstate = p.A_log = p.dt_bias = p.dout = NULL;
    dp_problem_alloc(&p);
    if (c->p.A_log) p.A_log = dp_doubles(heads);
    if (c->p.dt_bias) p.dt_bias = dp_doubles((int64_t)heads * dp_Kg(&p));
    if (c->p.dout && backward) p.dout = dp_doubles(p.T * heads * p.V);
    fill_large(&p, c, seed);
    return p;
}
