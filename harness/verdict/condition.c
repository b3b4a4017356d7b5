/* Condition numbers of the triangular systems of a problem (condition.h). */
#include "condition.h"
#include "ref/chunk/gate.h"
#include "ref/files/cache.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    double inverse, entry, condition;
} sizes;

static sizes of_chunk(const dp_chunk *ch) {
    const int n = ch->n;
    double *T = dp_calloc((size_t)n * n, sizeof *T);
    sizes s = {1, 1, 1};
    double A1 = 1;
    for (int i = 0; i < n; i++)
        T[(int64_t)i * n + i] = 1; /* T by rows: T_i = e_i - sum over k < i of A_ik T_k */
    for (int i = 0; i < n; i++)
        for (int k = 0; dp_chunk_reads(ch, i, k); k++) {
            const double a = ch->beta[i] * ch->L[(int64_t)i * n + k];
            for (int j = 0; a != 0 && j <= k; j++)
                T[(int64_t)i * n + j] -= a * T[(int64_t)k * n + j];
        }
    for (int j = 0; j < n; j++) {
        double a = 1, t = 0;
        for (int i = 0; i < n; i++) {
            if (dp_chunk_reads(ch, i, j)) a += fabs(ch->beta[i] * ch->L[(int64_t)i * n + j]);
            t += fabs(T[(int64_t)i * n + j]);
            s.entry = fmax(s.entry, fabs(T[(int64_t)i * n + j]));
        }
        A1 = fmax(A1, a);
        s.inverse = fmax(s.inverse, t);
    }
    s.condition = A1 * s.inverse;
    free(T);
    return s;
}

void dp_condition_of(const dp_sim *ref, dp_condition *c) {
    const int HV = ref->p->HV;
    const int64_t n = (int64_t)ref->ngroup * HV;
    sizes *s = dp_calloc((size_t)n, sizeof *s);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; i++)
        s[i] = of_chunk(&ref->ch[i]);
    *c = (dp_condition){1, 1, 0, -1, -1, -1};
    for (int64_t i = 0; i < n; i++) {
        c->inverse = fmax(c->inverse, s[i].inverse);
        c->entry = fmax(c->entry, s[i].entry);
        if (!(s[i].condition > c->condition)) continue;
        const dp_group *g = &ref->group[i / HV];
        c->condition = s[i].condition;
        c->rank = g->rank;
        c->head = (int)(i % HV);
        c->token = g->t0;
    }
    free(s);
}

dp_status dp_condition_cached(const dp_problem *p, int N, const char *cache, dp_condition *c,
                              dp_err *e) {
    const int32_t what[] = {N, 0x636f6e64};
    dp_part part[] = {{c, sizeof *c}};
    dp_key key = {{0}};
    memset(c, 0, sizeof *c); /* padding, too, is part of a cache entry */
    if (cache) {
        key = dp_problem_key(p, what, sizeof what);
        if (dp_cache_load(cache, DP_CACHE_CONDITION, key, part, 1)) return DP_OK;
    }
    const dp_design exact = dp_design_of(DP_BASE_FP64);
    dp_sim s;
    const dp_status st = dp_sim_open(&s, p, &exact, N, NULL, e);
    if (st) return st;
    dp_condition_of(&s, c);
    dp_sim_free(&s);
    if (cache) dp_cache_save(cache, DP_CACHE_CONDITION, key, part, 1);
    return DP_OK;
}

int dp_ill_conditioned(const dp_condition *c, dp_base b) {
    return c->condition >= (b == DP_BASE_FP64 ? 0x1p26 : 0x1p12);
}

void dp_condition_explain(const dp_condition *c, dp_base b, dp_verdict v, char *why, size_t size) {
    const size_t n = strlen(why);
    const char *sep = n ? "; " : "";
    if (n + 1 >= size) return;
    if (dp_ill_conditioned(c, b))
        snprintf(why + n, size - n,
                 "%sthe problem's condition number is %.2g (inverse up to %.2g; rank %d, head %d, "
                 "chunk at token %lld): the error is %s",
                 sep, c->condition, c->entry, c->rank, c->head, (long long)c->token,
                 v == DP_FAIL ? "more than it explains" : "within what it explains");
    else if (v == DP_FAIL)
        snprintf(why + n, size - n, "%sthe inputs are well-conditioned (condition number %.2g)",
                 sep, c->condition);
}

/* ---- a state that grows ---------------------------------------------------------------------- */

/* The sum over the keys of token t of strength times |k| |erasing key|, largest of its heads. A
 * step contracts where that is at most 2. */
static double strength_of(const dp_problem *p, const dp_activated *a, int64_t t) {
    double most = 0;
    for (int hv = 0; hv < p->HV; hv++) {
        double sum = 0;
        for (int r = 0; r < p->R; r++) {
            const double *e = dp_erasing_at(p, a->k, a->erasing, t, hv) + (int64_t)r * p->K,
                         *k = dp_erasing_at(p, a->k, NULL, t, hv) + (int64_t)r * p->K;
            double ee = 0, kk = 0;
            for (int x = 0; x < p->K; x++) {
                ee += e[x] * e[x];
                kk += k[x] * k[x];
            }
            sum += fabs(a->beta ? a->beta[(t * p->HV + hv) * p->R + r] : 1) * sqrt(ee * kk);
        }
        most = fmax(most, sum);
    }
    return most;
}

void dp_growth_explain(const dp_problem *p, char *text, size_t size) {
    dp_activated a = dp_activated_new(p);
    int64_t at = 0;
    int head = 0;
    double most = 0, sum = 0;
    const int keys = dp_has_beta(p) || dp_by_gates(p);
    *text = 0;
    for (int64_t t = 0; t < p->T && keys; t++) {
        const double x = strength_of(p, &a, t);
        if (!(x > most)) continue;
        most = x;
        at = t;
    }
    for (int h = 0; h < p->HV; h++) {
        double grown = 0;
        for (int64_t t = 0; t < p->T; t++)
            grown += fmax(0, dp_largest_gate(p, a.g + (t * p->HV + h) * dp_Kg(p)));
        if (!(grown > sum)) continue;
        sum = grown;
        head = h;
    }
    dp_activated_free(&a);
    if (most > 2.01) /* what rounding adds to 2 */
        snprintf(text, size,
                 "; the state grows: sum of beta |k|^2 is %.3g at token %lld, at most 2 contracts: "
                 "normalise keys",
                 most, (long long)at);
    else if (sum > 0)
        snprintf(
            text, size,
            "; the state grows: log decays above 0 add up to %.3g in head %d (fp32 ends at 88)",
            sum, head);
}
