/* Errors of the states that an exchange brings to each rank (ref/vocabulary/exchange.h).
 *
 * All exchanges make the same states, S_(r+1) = M_r S_r + H_r from the first rank of a sequence on.
 * They differ in their roundings.
 *   fold    allgather, ring: one merge step (ref/bound/bound.h) a rank, from the farthest one on,
 *           with the errors of computed M and H. A rank that sends the state which leaves it in
 *           place of its pair (dp_sending.begins) has made the step by itself.
 *   scan    the same states as H of products of pairs: with e the error of H1, b1 and b2 those of
 *           M1 and M2, one composition makes H = M2 H1 + H2, a merge step of "state" H1, and
 *           M = M2 M1 in the format of the chain (dp_bound_compose). M that came out of a
 *           composition carries its error into the next one.
 *   serial  no pair is formed: the error that enters a rank goes through the rank's own pass,
 *           chunk by chunk, as the passes of error_bound.c.
 * A payload adds a rounding of the sent numbers (dp_bound_sent_state, dp_bound_sent_M). An
 * all-gather rounds every pair once, ring and serial the state at every rank. A scan rounds the
 * earlier pair of every composition and the sent state.
 */
#include "error_bound_impl.h"
#include "ref/arithmetic/mm.h"
#include "ref/chunk/payload.h"

#include <stdlib.h>
#include <string.h>

/* One direction: the reference's pairs and states, and the errors of computed pairs. */
typedef struct {
    const dp_error_bound_base *w;
    int dir; /* rank r sends to rank r + dir */
    dp_format chain;
    double **M, **H, **in, **eH, *mu;
    const double *start; /* of sequences; NULL: zeros */
    const dp_chain_error *bM;
} way;

static const dp_context *context(const way *x, int r) { return &x->w->ref->ctx[r]; }
static int gets(const way *x, int r) {
    return x->dir > 0 ? !context(x, r)->is_first : !context(x, r)->is_last;
}
static int gives(const way *x, int r) {
    return x->dir > 0 ? !context(x, r)->is_last : !context(x, r)->is_first;
}
static int farthest(const way *x, int r) {
    return x->dir > 0 ? r - context(x, r)->pre_num_ranks : r + context(x, r)->post_num_ranks;
}
static int passed(const way *x, int r) { return x->dir > 0 ? context(x, r)->nlocal - 1 : 0; }
static int begins(const way *x, int r) { return context(x, r)->nlocal > 1 || !gets(x, r); }

static int64_t error_size(const way *x) {
    return dp_state_error_size(&x->w->r, x->w->ref->p->K, x->w->ref->p->V);
}

/* Reference initial state of the sequence that rank r sends; NULL: zeros. */
static const double *start_of(const way *x, int r, int hv) {
    const dp_problem *p = x->w->ref->p;
    const int64_t seq = context(x, r)->local_seq[passed(x, r)];
    return x->start ? x->start + (seq * p->HV + hv) * p->K * p->V : NULL;
}

/* e, of S, becomes that of M S + H of rank j. S NULL: zeros, of which only H arrives, as it is. */
static void step(const way *x, int j, int hv, const double *S, double *e) {
    const dp_problem *p = x->w->ref->p;
    const int z = j * p->HV + hv;
    if (!S)
        memcpy(e, x->eH[z], sizeof *e * (size_t)error_size(x));
    else
        dp_bound_merge_step(&x->w->r, p->K, p->V, x->M[z], x->mu[z], x->bM[z].b, x->bM[z].bias, S,
                            x->H[z], x->eH[z], e);
}

/* e, of the state that enters rank r, as a state that is sent. */
static void sent(const way *x, int r, int hv, double *e) {
    const dp_problem *p = x->w->ref->p;
    dp_bound_sent_state(&x->w->r, dp_payloads[x->w->sending.payload].state, p->K, p->V,
                        x->in[r * p->HV + hv], e);
}

/* ---- all-gather, ring ------------------------------------------------------------------------ */

static void fold(const way *x, int hv, double **e) {
    const dp_sim *s = x->w->ref;
    const int HV = s->p->HV;
    for (int r = 0; r < s->N; r++) {
        if (!gets(x, r)) continue;
        const int far = farthest(x, r), i = r * HV + hv;
        e[i] = dp_doubles(error_size(x));
        for (int j = far; j != r; j += x->dir) {
            const double *S = j != far ? x->in[j * HV + hv] : NULL;
            const double *start = x->w->sending.begins ? NULL : start_of(x, far, hv);
            step(x, j, hv, S ? S : start, e[i]);
            if (x->w->sending.exchange == DP_EXCHANGE_RING) sent(x, j + x->dir, hv, e[i]);
        }
    }
}

/* ---- scan ------------------------------------------------------------------------------------ */

/* The map of a run of ranks on the state that enters it, and its errors. M NULL: that state does
 * not matter; H NULL: nothing leaves the last rank. */
typedef struct {
    double *M, *H, *e;
    dp_chain_error b;
} element;

static element element_of(const way *x, int r, int hv) {
    const dp_problem *p = x->w->ref->p;
    const int64_t K = p->K, KV = K * p->V;
    const int z = r * p->HV + hv;
    if (!gives(x, r)) return (element){0};
    element a = {.H = dp_doubles(KV), .e = dp_doubles(error_size(x))};
    if (begins(x, r)) {
        const double *S = start_of(x, r, hv);
        step(x, r, hv, S, a.e);
        memcpy(a.H, x->H[z], sizeof *a.H * (size_t)KV);
        if (S) dp_add_mul_f64((dp_shape){0, 0, p->K, p->V, p->K}, 1, x->M[z], S, a.H);
        return a;
    }
    memcpy(a.H, x->H[z], sizeof *a.H * (size_t)KV);
    memcpy(a.e, x->eH[z], sizeof *a.e * (size_t)error_size(x));
    a.M = dp_copy(x->M[z], K * K);
    a.b = x->bM[z];
    a.b.b = dp_copy(x->bM[z].b, dp_chain_error_size(&x->w->r, p->K));
    return a;
}

static void element_free(element *a) {
    free(a->M);
    free(a->H);
    free(a->e);
    free(a->b.b);
    *a = (element){0};
}

/* A copy of what is sent of it. */
static element sent_element(const way *x, const element *a) {
    const dp_problem *p = x->w->ref->p;
    const dp_rounding *r = &x->w->r;
    const dp_payload payload = x->w->sending.payload;
    const int64_t K = p->K;
    element y = {.H = dp_copy(a->H, K * p->V), .e = dp_copy(a->e, error_size(x)), .b = a->b};
    dp_bound_sent_state(r, dp_payloads[payload].state, p->K, p->V, a->H, y.e);
    if (!a->M) return y;
    y.M = dp_copy(a->M, K * K);
    y.b.b = dp_copy(a->b.b, dp_chain_error_size(r, p->K));
    dp_bound_sent_M(r, payload, p->K, a->M, y.b.b);
    return y;
}

/* later o earlier. */
static element composed(const way *x, const element *later, const element *earlier) {
    const dp_problem *p = x->w->ref->p;
    const dp_rounding *r = &x->w->r;
    const int K = p->K;
    const int64_t KV = (int64_t)K * p->V;
    const double mu = dp_norm2_up(K, K, later->M);
    element a = {.H = dp_copy(later->H, KV), .e = dp_copy(earlier->e, error_size(x))};
    dp_bound_merge_step(r, K, p->V, later->M, mu, later->b.b, later->b.bias, earlier->H, later->H,
                        later->e, a.e);
    dp_add_mul_f64((dp_shape){0, 0, K, p->V, K}, 1, later->M, earlier->H, a.H);
    if (!earlier->M) return a;
    a.M = dp_doubles((int64_t)K * K);
    dp_mm(DP_FP64, 0, 0, K, K, K, later->M, earlier->M, a.M);
    a.b.b = dp_copy(earlier->b.b, dp_chain_error_size(r, K));
    double bias = earlier->b.bias * DP_LAMBDA;
    const dp_computed_product M = {later->M, mu, later->b.b, later->b.bias * DP_LAMBDA};
    dp_bound_compose(r, x->chain, K, &M, earlier->M, a.b.b, &bias);
    a.b.bias = bias / DP_LAMBDA;
    return a;
}

static void scan(const way *x, int hv, double **e) {
    const dp_sim *s = x->w->ref;
    const int N = s->N, HV = s->p->HV;
    element *a = dp_calloc((size_t)N, sizeof *a);
    for (int r = 0; r < N; r++)
        a[r] = element_of(x, r, hv);
    for (int d = 1; d < N; d *= 2)
        for (int i = 0; i < N; i++) { /* the last first: its source is still of the round before */
            const int r = x->dir > 0 ? N - 1 - i : i, source = r - d * x->dir;
            if (source < 0 || source >= N || !a[r].M) continue;
            element earlier = sent_element(x, &a[source]);
            const element next = composed(x, &a[r], &earlier);
            element_free(&earlier);
            element_free(&a[r]);
            a[r] = next;
        }
    for (int r = 0; r < N; r++)
        if (gets(x, r)) {
            e[r * HV + hv] = dp_copy(a[r - x->dir].e, error_size(x));
            sent(x, r, hv, e[r * HV + hv]);
        }
    for (int r = 0; r < N; r++)
        element_free(&a[r]);
    free(a);
}

/* ---- serial ---------------------------------------------------------------------------------- */

/* e through the pass of the sub-sequence whose state rank r sends. */
static void pass(const way *x, int r, int hv, double *e) {
    const dp_sim *s = x->w->ref;
    const int sub = passed(x, r), back = x->dir < 0;
    for (int i = 0; i < s->first[r][sub + 1] - s->first[r][sub]; i++)
        dp_error_bound_step(x->w, back, dp_error_bound_turn(s, back, r, sub, i), hv, NULL, e, NULL);
}

static void serial(const way *x, int hv, double **e) {
    const dp_sim *s = x->w->ref;
    const int HV = s->p->HV;
    for (int i = 0; i < s->N; i++) {
        const int r = x->dir > 0 ? i : s->N - 1 - i, from = r - x->dir;
        if (!gets(x, r)) continue;
        double *was = begins(x, from) ? NULL : e[from * HV + hv];
        e[r * HV + hv] = was ? dp_copy(was, error_size(x)) : dp_doubles(error_size(x));
        pass(x, from, hv, e[r * HV + hv]);
        sent(x, r, hv, e[r * HV + hv]);
    }
}

/* ---- all of them ----------------------------------------------------------------------------- */

static way way_of(const dp_error_bound_base *w, int dir, dp_format chain, const dp_chain_error *bM,
                  double **eH) {
    const dp_sim *s = w->ref;
    way x = dir > 0 ? (way){.M = s->M, .H = s->H, .in = s->S_in, .start = s->p->s0}
                    : (way){.M = s->dM, .H = s->dH, .in = s->dS_out, .start = s->p->dstate};
    x.w = w;
    x.dir = dir;
    x.chain = dp_chain_format(s->p, w->base, chain);
    x.bM = bM;
    x.eH = eH;
    return x;
}

/* Errors of the pairs that an all-gather sends, in place of those of x. */
typedef struct {
    dp_chain_error *bM;
    double **eH;
} gathered;

/* H of pair i as it is sent, to be freed; e, of the pair's, becomes that of it. */
static double *sent_H(const way *x, int i, double *e) {
    const dp_problem *p = x->w->ref->p;
    const int r = i / p->HV, hv = i % p->HV;
    const int is_state = x->w->sending.begins && gives(x, r) && begins(x, r);
    const double *S = is_state ? start_of(x, r, hv) : NULL;
    double *H = dp_copy(x->H[i], (int64_t)p->K * p->V);
    if (!S) return H;
    memset(e, 0, sizeof *e * (size_t)error_size(x));
    step(x, r, hv, S, e);
    dp_add_mul_f64((dp_shape){0, 0, p->K, p->V, p->K}, 1, x->M[i], S, H);
    return H;
}

static gathered gather(way *x) {
    const dp_problem *p = x->w->ref->p;
    const dp_rounding *r = &x->w->r;
    const dp_payload payload = x->w->sending.payload;
    const int n = x->w->ref->N * p->HV;
    gathered g = {0};
    if (!payload || x->w->sending.exchange != DP_EXCHANGE_ALLGATHER) return g;
    g.bM = dp_calloc((size_t)n, sizeof *g.bM);
    g.eH = dp_calloc((size_t)n, sizeof *g.eH);
    for (int i = 0; i < n; i++) {
        if (!x->M[i] || !x->eH[i]) continue;
        g.bM[i] = x->bM[i];
        g.bM[i].b = dp_copy(x->bM[i].b, dp_chain_error_size(r, p->K));
        g.eH[i] = dp_copy(x->eH[i], error_size(x));
        dp_bound_sent_M(r, payload, p->K, x->M[i], g.bM[i].b);
        double *H = sent_H(x, i, g.eH[i]);
        dp_bound_sent_state(r, dp_payloads[payload].state, p->K, p->V, H, g.eH[i]);
        free(H);
    }
    x->bM = g.bM;
    x->eH = g.eH;
    return g;
}

static void gathered_free(gathered *g, int n) {
    for (int i = 0; g->bM && i < n; i++)
        free(g->bM[i].b);
    free(g->bM);
    dp_free_list(g->eH, n);
}

double **dp_exchange_errors(const dp_error_bound_base *w, int dir, dp_format chain,
                            const dp_chain_error *bM, double **eH, double *fro) {
    static void (*const OF[DP_NRUN_EXCHANGES])(const way *x, int hv, double **e) = {
        [DP_EXCHANGE_ALLGATHER] = fold,
        [DP_EXCHANGE_RING] = fold,
        [DP_EXCHANGE_SCAN] = scan,
        [DP_EXCHANGE_SERIAL] = serial,
        [DP_EXCHANGE_HEADS] = fold /* of no use: no state comes to a rank */};
    const int K = w->ref->p->K, HV = w->ref->p->HV, n = w->ref->N * HV;
    way x = way_of(w, dir, chain, bM, eH);
    double **e = dp_calloc((size_t)n, sizeof *e);
    x.mu = dp_doubles(n);
    for (int i = 0; i < n; i++)
        if (x.M[i]) x.mu[i] = dp_norm2_up(K, K, x.M[i]);
    gathered g = gather(&x);
#pragma omp parallel for schedule(dynamic, 1)
    for (int hv = 0; hv < HV; hv++)
        OF[w->sending.exchange](&x, hv, e);
    for (int i = 0; i < n && fro; i++)
        if (e[i]) fro[i] = dp_state_error_norm(&w->r, K, w->ref->p->V, e[i]);
    free(x.mu);
    gathered_free(&g, n);
    return e;
}
