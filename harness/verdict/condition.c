/* Condition numbers of the triangular systems of a problem (condition.h). */
#include "condition.h"
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
    double *T = dp_calloc((size_t)n * n, sizeof *T), *col = dp_doubles(n);
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
    free(col);
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

dp_status dp_condition_cached(const dp_problem *p, int N, const dp_sim *ref, const char *cache,
                              dp_condition *c, dp_err *e) {
    const int32_t what[] = {N, 0x636f6e64};
    dp_part part[] = {{c, sizeof *c}};
    dp_key key = {{0}};
    memset(c, 0, sizeof *c); /* padding, too, is part of a cache entry */
    if (cache) {
        key = dp_problem_key(p, what, sizeof what);
        if (dp_cache_load(cache, DP_CACHE_CONDITION, key, part, 1)) return DP_OK;
    }
    if (ref)
        dp_condition_of(ref, c);
    else {
        dp_sim s;
        const dp_status st = dp_sim_new(&s, p, DP_BASE_FP64, N, DP_FAULT_NONE, e);
        if (st) return st;
        dp_condition_of(&s, c);
        dp_sim_free(&s);
    }
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
