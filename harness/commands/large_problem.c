/* A case at another size (large_problem.h). */
#include "large_problem.h"
#include "ref/arithmetic/elementary.h"
#include "ref/inputs/inputs_large.h"

#include <math.h>
#include <stdlib.h>

/* Rows of a tensor by their law. */
static void fill_host(double *x, const dp_large_law *l, int64_t rows) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        if (l->kind != DP_LARGE_LOG) dp_large_row(l, r, x + r * l->width);
        for (int64_t i = r * l->width; i < (r + 1) * l->width && l->kind == DP_LARGE_LOG; i++)
            x[i] =
                dp_large_rounded(l->b * dp_log1p(-dp_large_uniform(l->seed, (uint64_t)i)), l->bf16);
    }
}

/* NULL: p has none. A law that the memory does not know is made here. */
static void fill(const dp_problem *p, double *x, const dp_large_law *l, int64_t rows) {
    if (!x || (p->memory && p->memory->fill(x, l, rows))) return;
    double *host = p->memory ? dp_doubles(rows * l->width) : x;
    fill_host(host, l, rows);
    if (!p->memory) return;
    p->memory->put(x, host, rows * l->width);
    free(host);
}

/* The law of beta, erase or write. */
static dp_large_law strength_of(const dp_case *c, const dp_problem *p, uint64_t seed,
                                int64_t width) {
    const dp_inputs_spec *s = &c->spec;
    const int plain = p->beta_form == DP_BETA_PLAIN;
    return (dp_large_law){.kind = plain ? DP_LARGE_UNIFORM : DP_LARGE_NORMAL,
                          .seed = seed,
                          .width = width,
                          .a = s->beta_lo,
                          .b = plain ? s->beta_hi - s->beta_lo : s->beta_hi,
                          .bf16 = c->input_dtype == DP_BF16};
}

/* As in a problem of the case's own size (ref/inputs/inputs.c), lr_a = -u, a unit vector, and lr_b
 * = u o r. The law of beta gives r. */
static void fill_factors(const dp_case *c, const dp_problem *p, uint64_t seed) {
    const int K = p->K, round = c->input_dtype == DP_BF16;
    const int64_t rows = p->T * p->HV;
    const dp_large_law law = strength_of(c, p, seed + 20, (int64_t)p->HV * K);
    DP_OWN double *lr_a = dp_doubles(rows * K), *lr_b = dp_doubles(rows * K);
    fill_host(lr_b, &law, p->T);
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        double *a = lr_a + r * K, *b = lr_b + r * K, n = 0;
        for (int x = 0; x < K; x++) {
            a[x] = dp_large_normal(seed + 21, (uint64_t)(r * K + x));
            n += a[x] * a[x];
        }
        for (int x = 0; x < K; x++) {
            const double u = a[x] / sqrt(n), ur = u * b[x];
            a[x] = -dp_large_rounded(u, round);
            b[x] = dp_large_rounded(ur, round);
        }
    }
    dp_memory_put(p->memory, p->lr_a, lr_a, rows * K);
    dp_memory_put(p->memory, p->lr_b, lr_b, rows * K);
}

/* first + step (i mod every). NULL: p has none. */
static void fill_steps(const dp_problem *p, double *x, int64_t n, double first, double step,
                       int every) {
    DP_OWN double *host = dp_doubles(n);
    for (int64_t i = 0; i < n; i++)
        host[i] = dp_fp32(first + step * (double)(i % every));
    if (x) dp_memory_put(p->memory, x, host, n);
}

/* Inputs of a large problem: unit keys and queries unless the kernel normalises them, gates and
 * betas by the case's law. */
static void fill_large(dp_problem *p, const dp_case *c, uint64_t seed) {
    const dp_inputs_spec *s = &c->spec;
    const int Kg = dp_Kg(p), K = p->K, V = p->V, log = p->gate == DP_GATE_LOG;
    const dp_large_kind key = p->l2norm ? DP_LARGE_NORMAL : DP_LARGE_UNIT;
    const int64_t heads = p->T * p->HV;
    fill(p, p->q, &(dp_large_law){key, seed, K, 0, 1, 1}, p->T * p->H);
    fill(p, p->k, &(dp_large_law){key, seed + 1, K, 0, 1, 1}, p->T * p->H * p->R);
    fill(p, p->v, &(dp_large_law){DP_LARGE_NORMAL, seed + 2, V, 0, 1, 1}, heads * p->R);
    const dp_large_law gate = {.kind = log ? DP_LARGE_LOG : DP_LARGE_NORMAL,
                               .seed = seed + 3,
                               .width = Kg,
                               .a = s->g_mean,
                               .b = s->g_scale,
                               .bf16 = c->input_dtype == DP_BF16};
    fill(p, p->g, &gate, heads);
    double *const strength[] = {p->beta, p->erase, p->write};
    const int64_t width[] = {p->R, p->K, p->V};
    for (int z = 0; z < 3; z++) {
        const dp_large_law law = strength_of(c, p, seed + (z ? 10 + (uint64_t)z : 4), width[z]);
        fill(p, strength[z], &law, heads);
    }
    if (p->lr_a) fill_factors(c, p, seed);
    fill_steps(p, p->A_log, p->HV, 0.5, 0.125, 8);
    fill_steps(p, p->dt_bias, (int64_t)p->HV * Kg, -3, 0.03125, 32);
    fill(p, p->dout, &(dp_large_law){DP_LARGE_NORMAL, seed + 5, V, 0, 1, 1}, heads);
}

dp_problem dp_large_problem(const dp_case *c, int64_t tokens, int heads, int backward,
                            uint64_t seed, const dp_memory *memory) {
    dp_problem p = c->p;
    p.T = tokens ? tokens : c->p.T;
    p.H = p.HV = heads;
    p.cu = NULL;
    p.s0 = p.dstate = p.A_log = p.dt_bias = p.dout = NULL;
    p.memory = memory;
    dp_problem_alloc(&p);
    if (c->p.A_log) p.A_log = dp_doubles_of(&p, heads);
    if (c->p.dt_bias) p.dt_bias = dp_doubles_of(&p, (int64_t)heads * dp_Kg(&p));
    if (c->p.dout && backward) p.dout = dp_doubles_of(&p, p.T * heads * p.V);
    fill_large(&p, c, seed);
    return p;
}
