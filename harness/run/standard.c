/* The truth of a case, and the errors that its number formats are expected to make. */
#include "standard.h"

#include <math.h>
#include <stdlib.h>

/* ---- which tokens the truth keeps states at -------------------------------------------------- */

static int compare_i64(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Boundaries of N ranks, and prefixes of the chain of the rank that dp_sim records. */
static int add_cuts(const dp_problem *p, int N, int64_t *x) {
    const int64_t L = p->T / N, a = N >= 3 ? L : 0;
    int n = 0;
    if (N == 1 || (!p->own.kind && p->T % N)) return 0;
    for (int r = 1; r < N; r++)
        x[n++] = dp_own_cut(p->own.kind, p->T, N, r);
    if (p->Nseq == 1 && p->HV == 1 && !p->own.kind)
        for (int64_t s = DP_CHUNK; s < L; s *= 2)
            x[n++] = a + s;
    return n;
}

int64_t *dp_case_cuts(const dp_case *c, int *n) {
    const dp_problem *p = &c->p;
    int cap = 64, m = 0;
    for (int i = 0; i < c->nranks; i++)
        cap += c->ranks[i] + 64;
    int64_t *x = dp_calloc((size_t)cap, sizeof *x);
    for (int i = 0; i < c->nranks; i++)
        m += add_cuts(p, c->ranks[i], x + m);
    qsort(x, (size_t)m, sizeof *x, compare_i64);
    *n = 0;
    for (int i = 0; i < m; i++)
        if (x[i] > 0 && x[i] < p->T && (*n == 0 || x[i] != x[*n - 1])) x[(*n)++] = x[i];
    return x;
}

/* ---- the standard ---------------------------------------------------------------------------- */

static double largest_radius(const dp_truth *t) {
    double top = 0;
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_ball *b = &t->field[i];
        if (!b->rows) continue;
        const double n = dp_norm_fro(b->rows * b->width, b->hi), r = dp_norm_fro(b->rows, b->rad);
        if (n > 0 && !(r / n <= top)) top = r / n;
    }
    return top;
}

dp_status dp_standard_open(dp_standard *s, const dp_case *c, const dp_run_options *o,
                           int boundaries, dp_err *e) {
    int ncut;
    int64_t *cut = dp_case_cuts(c, &ncut);
    if (!boundaries) ncut = 0;
    *s = (dp_standard){.c = c, .o = o, .front = dp_step_front(c)};
    const dp_truth_request rq = {.bits = c->bits,
                                 .backward = c->backward,
                                 .ncut = ncut,
                                 .cut = cut,
                                 .want_M = ncut > 0,
                                 .progress = o->progress};
    const dp_status st =
        dp_case_truth(c, rq, o->truth ? *o->truth : c->truth, o->cache, &s->truth, &s->note, e);
    free(cut);
    if (st) {
        s->truth = (dp_truth){0};
        return st;
    }
    s->radius = largest_radius(&s->truth);
    s->expect = (dp_expectations){.request = {.p = &c->p,
                                              .front = &s->front,
                                              .session = dp_case_session(c),
                                              .dtype = c->input_dtype,
                                              .backward = c->backward},
                                  .cache = o->cache};
    return DP_OK;
}

void dp_standard_close(dp_standard *s) {
    dp_expectations_free(&s->expect);
    dp_truth_free(&s->truth);
}

/* Inputs on which nothing rounds have no draws. */
static int nothing_rounds(const dp_case *c) { return c->spec.keys == DP_KEYS_EXACT && !c->data; }

void dp_standard_expect(dp_standard *s, int set, int n, const dp_claim *claim) {
    if (!nothing_rounds(s->c)) dp_expectations_want(&s->expect, set, n, claim);
}
