/* Which draws are known, cached and missing. */
#include "expectations.h"

#include <stdlib.h>
#include <string.h>

/* ---- what is the same ------------------------------------------------------------------------ */

/* One rank forms no M, and neither do a recurrent design and some exchanges: its chain's format
 * means nothing. */
static dp_format chain_of(const dp_claim *c) {
    const int pairs = dp_exchanges[c->design.sending.exchange].pairs;
    return c->N == 1 || !c->design.chunk || !pairs ? DP_FP32 : c->chain;
}

static int same(const dp_claim *a, const dp_claim *b) {
    return a->N == b->N && chain_of(a) == chain_of(b) && dp_design_same(&a->design, &b->design);
}

static const dp_expectation *find(const dp_expectations *e, const dp_claim *c, int set,
                                  int stages) {
    for (int i = 0; i < e->n; i++) {
        const dp_expectation *k = &e->known[i];
        if (k->set == set && k->claim.stages >= stages && same(&k->claim, c)) return k;
    }
    return NULL;
}

const dp_expected *dp_expectations_find(const dp_expectations *e, const dp_claim *claim, int set) {
    const dp_expectation *with = find(e, claim, set, 1);
    const dp_expectation *k = with ? with : find(e, claim, set, 0);
    return k ? &k->x : NULL;
}

static dp_expectation *append(dp_expectations *e, const dp_claim *c, int set) {
    e->known = dp_realloc(e->known, sizeof *e->known * (size_t)(e->n + 1));
    dp_expectation *k = &e->known[e->n++];
    *k = (dp_expectation){.claim = *c, .set = set};
    return k;
}

/* ---- the cache ------------------------------------------------------------------------------- */

typedef struct {
    char *bytes;
    size_t size;
} text;

DP_NOT_SO("-Wanalyzer-malloc-leak") /* the text has the bytes */
static void put(text *t, const void *x, size_t size) {
    t->bytes = dp_realloc(t->bytes, t->size + size + 1);
    memcpy(t->bytes + t->size, x, size);
    t->size += size;
}

static void put_conv(text *t, int i, const dp_conv *v) {
    const int32_t form[] = {i, v->silu, v->bias != NULL};
    put(t, form, sizeof form);
    put(t, v->x, sizeof *v->x * (size_t)(v->T * v->D));
    put(t, v->w, sizeof *v->w * (size_t)(v->D * v->W));
    if (v->bias) put(t, v->bias, sizeof *v->bias * (size_t)v->D);
}

/* Inputs of draws besides the problem. */
static dp_key key_of(const dp_expectations *e, const dp_claim *c, int set) {
    const dp_expected_request *rq = &e->request;
    const int32_t what[] = {c->N,
                            rq->backward,
                            (int32_t)rq->dtype,
                            c->stages,
                            set,
                            dp_expected_count(rq->p),
                            (int32_t)chain_of(c)};
    char design[DP_DESIGN_TEXT] = {0};
    text t = {0};
    dp_design_text(&c->design, design);
    put(&t, what, sizeof what);
    put(&t, &c->design.base, sizeof c->design.base);
    put(&t, design, sizeof design);
    if (!c->design.chunk) put(&t, "pairs", 6); /* not in those of older caches */
    if (rq->session) put(&t, rq->session->text, strlen(rq->session->text) + 1);
    if (rq->session) put(&t, &rq->session->kept, sizeof rq->session->kept);
    if (rq->session && rq->session->stagger) /* not in those of older caches */
        put(&t, &rq->session->stagger, sizeof rq->session->stagger);
    for (int i = 0; rq->front && i < 3; i++)
        if (rq->front->conv[i]) put_conv(&t, i, rq->front->conv[i]);
    const dp_key key = dp_problem_key(rq->p, t.bytes, t.size);
    free(t.bytes);
    return key;
}

static dp_expected_request request_of(const dp_expectations *e, int set) {
    dp_expected_request rq = e->request;
    rq.set = set;
    return rq;
}

static dp_expected_policy policy_of(const dp_claim *c) {
    return (dp_expected_policy){c->N, c->design, chain_of(c), c->stages};
}

static int load(dp_expectations *e, const dp_claim *c, int set) {
    const dp_expected_request rq = request_of(e, set);
    const dp_expected_policy policy = policy_of(c);
    dp_part part[DP_EXPECTED_PARTS];
    dp_expected x;
    if (!e->cache) return 0;
    dp_expected_alloc(&rq, &policy, &x);
    const int n = dp_expected_parts(&x, part);
    const dp_key key = key_of(e, c, set);
    if (!dp_cache_load(e->cache, DP_CACHE_EXPECTED, key, part, n)) {
        dp_expected_free(&x);
        return 0;
    }
    append(e, c, set)->x = x;
    return 1;
}

static void save(const dp_expectations *e, dp_expectation *k) {
    dp_part part[DP_EXPECTED_PARTS];
    if (!e->cache) return;
    const int n = dp_expected_parts(&k->x, part);
    const dp_key key = key_of(e, &k->claim, k->set);
    dp_cache_save(e->cache, DP_CACHE_EXPECTED, key, part, n);
}

/* ---- drawing --------------------------------------------------------------------------------- */

void dp_expectations_want(dp_expectations *e, int set, int n, const dp_claim *claim) {
    const dp_expected_request rq = request_of(e, set);
    dp_expected_policy *policy = dp_calloc((size_t)n, sizeof *policy);
    dp_expected *made = dp_calloc((size_t)n, sizeof *made);
    const int first = e->n;
    int missing = 0;
    for (int i = 0; i < n; i++) {
        if (find(e, &claim[i], set, claim[i].stages) || load(e, &claim[i], set)) continue;
        append(e, &claim[i], set);
    }
    for (int i = first; i < e->n; i++) {
        const dp_expectation *k = &e->known[i];
        if (!k->x.field[DP_RESULT_O].err2)
            policy[missing++] = policy_of(&k->claim); /* not cached */
    }
    if (missing) dp_expected_run(&rq, missing, policy, made);
    for (int i = first, m = 0; i < e->n; i++) {
        dp_expectation *k = &e->known[i];
        if (k->x.field[DP_RESULT_O].err2) continue;
        k->x = made[m++];
        save(e, k);
    }
    free(policy);
    free(made);
}

void dp_expectations_free(dp_expectations *e) {
    for (int i = 0; i < e->n; i++)
        dp_expected_free(&e->known[i].x);
    free(e->known);
    *e = (dp_expectations){0};
}
