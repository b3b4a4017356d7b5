/* Errors of states between passes: first those that an exchange brings to each rank
 * (ref/vocabulary/exchange.h), then those that are stored (state_bound.h).
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
#include "state_bound.h"
#include "error_bound_impl.h"
#include "ref/arithmetic/mm.h"
#include "ref/bound/carried.h"
#include "ref/chunk/payload.h"
#include "ref/chunk/state.h"
#include "ref/vocabulary/stored.h"

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
    DP_FREE(a->M, a->H, a->e, a->b.b);
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
    DP_OWN element *a = dp_calloc((size_t)N, sizeof *a);
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
        DP_OWN double *H = sent_H(x, i, g.eH[i]);
        dp_bound_sent_state(r, dp_payloads[payload].state, p->K, p->V, H, g.eH[i]);
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

/* ---- stored states: gradients of a row's factors --------------------------------------------- */

/* A row of a token and value head. */
typedef struct {
    const dp_problem *p;
    const dp_activated *in;
    int64_t at;
} row_place;

static double beside(const row_place *a, dp_entry e, int of, int x) {
    return fabs(dp_entry_beside(a->p, e, of, a->at, x));
}

/* The error of an entry's factor `of`: of K channels, or of a number, which adds channels up. */
static double through(const row_place *a, dp_entry e, int of, double error) {
    const int has = e.sign ? dp_entry_has(e, of) : 0,
              number = of == DP_INPUT_BETA || of == DP_INPUT_NUMBER;
    double most = 0, sum = 0;
    for (int x = 0; x < a->p->K && has; x++) {
        const double y = beside(a, e, of, x);
        most = fmax(most, y);
        sum += y * y;
    }
    return has ? has * (number ? sqrt(sum) : most) * error : 0;
}

static double of_strength(const row_place *a, dp_entry e, int of, double error) {
    const int has = dp_entry_has(e, of);
    return has ? has * beside(a, e, of, 0) * error : 0;
}

/* Adds those of row j to the bounds of gradients of its factors; at: of tokens and heads. Returns
 * the error that log gates get through exp(+-g). */
static double store_row(const dp_problem *p, const dp_activated *in, int64_t at, int j,
                        dp_row_errors of, double *const *row) {
    const row_place a = {&in->units.p, in, at};
    const dp_token_row *r = dp_row_of(p, j);
    const dp_entry read = dp_chunk_read(p, j);
    const double *k = in->k + (at * dp_rows(p) + j) * p->K,
                 *e = in->erasing + (at * dp_rows(p) + j) * p->K;
    for (int f = 0; f < DP_NRESULTS; f++) {
        const int x = (int)dp_result_fields[f].of;
        if (!row[f] || dp_result_fields[f].role != DP_ROLE_GRADIENT || dp_is_value(x) ||
            x == DP_INPUT_Q || x == DP_INPUT_G || dp_result_fields[f].kind != DP_OF_TOKENS)
            continue;
        const double rstd = in->units.rstd[x] ? in->units.rstd[x][at] * dp_norm_across(p) : 1;
        row[f][at] += rstd * (through(&a, r->write, x, of.write) + through(&a, read, x, of.read));
        if (x == DP_INPUT_BETA || x == DP_INPUT_NUMBER)
            row[f][at] += of_strength(&a, r->strength, x, of.strength);
    }
    return fabs(dp_entry_gates(r->write)) * dp_norm_fro(p->K, k) * of.write +
           fabs(dp_entry_gates(read)) * dp_norm_fro(p->K, e) * of.read;
}

/* ---- states ---------------------------------------------------------------------------------- */

/* A state, or H or M of a rank. All heads stand side by side, since they may share a scale. off
 * [HV]: bound of the error. */
typedef struct {
    const dp_problem *p; /* V columns of it */
    dp_activated in;
    double *S, *off;
} carried;

typedef struct {
    const dp_problem *p;
    int N, n;
    const dp_stores *at;
    dp_carried_head s;
    carried state, H, M;
    dp_problem square; /* M as a state: V = K, no values */
    double *o, *write, *more;
    /* [HV] of one rank: bound of |M|; |S| and off at its first token */
    double *grown, *size, *entered;
    double *behind, *read; /* [T][HV] off behind each token, and as o and dq read the state */
    int pairs;
    dp_error_bound *b;
} work;

static carried carried_new(const dp_problem *p, dp_activated in, const double *S) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    return (carried){p, in, S ? dp_copy(S, n) : dp_doubles(n), dp_doubles(p->HV)};
}

static void carried_free(carried *x) {
    free(x->S);
    free(x->off);
    *x = (carried){0};
}

static void store(const work *w, dp_format f, carried *x) {
    const dp_problem *p = x->p;
    for (int h = 0; h < p->HV; h++)
        w->more[h] = dp_stored_error(f, p->HV, p->K, p->V, x->S, x->off, h);
    for (int h = 0; h < p->HV; h++)
        x->off[h] += w->more[h];
}

/* Before token t. */
static void store_all(work *w, int64_t t) {
    for (int i = 0; i < w->n; i++) {
        const dp_stores *at = &w->at[i];
        if (!at->before[t]) continue;
        store(w, at->format, &w->state);
        if (w->H.S && at->of_pairs) store(w, at->format, &w->H);
        if (w->M.S && at->of_M) store(w, at->format, &w->M);
    }
}

static void advance(const work *w, carried *x, int64_t t, int hv, double grows) {
    dp_carried_head s = {x->p, x->in, hv, 0, x->p->T};
    dp_carried_advance(&s, t, x->S + (int64_t)hv * x->p->K * x->p->V, w->o, w->write);
    x->off[hv] *= grows;
    if (!(x->off[hv] < INFINITY)) x->off[hv] = INFINITY;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static void rank_begins(work *w) {
    const dp_problem *p = w->p;
    const int64_t KV = (int64_t)p->K * p->V;
    for (int h = 0; h < p->HV; h++) {
        w->grown[h] = 1;
        w->size[h] = dp_norm_fro(KV, w->state.S + h * KV);
        w->entered[h] = w->state.off[h];
    }
    if (!w->pairs) return;
    carried_free(&w->H);
    carried_free(&w->M);
    w->H = carried_new(p, w->state.in, NULL);
    dp_activated none = w->state.in;
    none.values = w->square.v;
    w->M = carried_new(&w->square, none, NULL);
    for (int64_t i = 0; i < (int64_t)p->HV * p->K; i++)
        w->M.S[i * p->K + i % p->K] = 1;
}

/* The state goes from rank r to the next. */
static void rank_ends(work *w, int r) {
    const int HV = w->p->HV;
    for (int h = 0; h < HV; h++) {
        double *off = &w->state.off[h];
        if (w->pairs) {
            const double M = w->M.off[h], H = w->H.off[h];
            *off = fmax(*off, (w->grown[h] + M) * w->entered[h] + M * w->size[h] + H);
            w->b->rank[DP_RANK_H][r * HV + h] += H;
            w->b->rank[DP_RANK_M][r * HV + h] += M;
        }
        w->b->rank[DP_RANK_S_IN][(r + 1) * HV + h] += *off;
    }
}

static int rank_of(const work *w, int64_t t) {
    return w->N == 1 ? 0 : dp_own_part_of(w->p->own.kind, w->p->T, w->N, t);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* off [HV] of the state that o and dq of a token read. */
static void read_errors(const work *w, double *read) {
    const dp_problem *p = w->p;
    memcpy(read, w->state.off, sizeof *read * (size_t)p->HV);
    for (int i = 0; i < w->n; i++)
        for (int h = 0; h < p->HV && w->at[i].read; h++)
            read[h] +=
                dp_stored_error(w->at[i].format, p->HV, p->K, p->V, w->state.S, w->state.off, h);
}

static void token(work *w, int64_t t) {
    const dp_problem *p = w->p;
    for (int hv = 0; hv < p->HV; hv++) {
        const dp_carried_head s = {p, w->s.in, hv, 0, p->T};
        const double grows = dp_carried_grows(&s, t);
        advance(w, &w->state, t, hv, grows);
        if (w->H.S) advance(w, &w->H, t, hv, grows);
        if (w->M.S) advance(w, &w->M, t, hv, grows);
        w->grown[hv] *= grows;
        w->behind[t * p->HV + hv] = w->state.off[hv];
    }
    read_errors(w, w->read + t * p->HV);
    for (int hv = 0; hv < p->HV; hv++) {
        const double *q = w->s.in.q + (t * p->H + hv / dp_G(p)) * p->K;
        const double off = w->read[t * p->HV + hv];
        if (off > 0 && w->b->row[DP_RESULT_O])
            w->b->row[DP_RESULT_O][t * p->HV + hv] += fabs(p->scale) * dp_norm_fro(p->K, q) * off;
    }
}

static void sequence(work *w, int i) {
    const dp_problem *p = w->p;
    const int64_t first = p->cu[i], end = p->cu[i + 1];
    w->state = carried_new(p, w->s.in, p->s0 ? p->s0 + i * (int64_t)p->HV * p->K * p->V : NULL);
    for (int64_t t = first; t < end; t++) {
        const int r = rank_of(w, t), begins = t > first && r != rank_of(w, t - 1);
        if (t > first || p->s0) store_all(w, t);
        if (begins) rank_ends(w, rank_of(w, t - 1));
        if (begins || t == first) rank_begins(w);
        token(w, t);
    }
    for (int k = 0; k < w->n; k++)
        if (w->at[k].behind[i]) store(w, w->at[k].format, &w->state);
    for (int h = 0; h < p->HV; h++)
        w->b->row[DP_RESULT_FINAL_STATE][i * p->HV + h] += w->state.off[h];
    carried_free(&w->state);
    carried_free(&w->H);
    carried_free(&w->M);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* One head at token t; G [K][V]: the gradient of its state. */
typedef struct {
    const work *w;
    int hv;
    int64_t t;
    double *G, *dU;
    const double *dx, *dA; /* slopes of gates [T][HV][Kg] */
    double gate;           /* of the log gates, through exp(+-g) in rows of their own */
} adjoint;

static double *row_of(const adjoint *a, int field) { return a->w->b->row[field]; }
static void add(const adjoint *a, int field, int64_t row, double error) {
    if (row_of(a, field)) row_of(a, field)[row] += error;
}
static void of_query(const adjoint *a, double off) {
    const dp_problem *p = a->w->p;
    const double *q = a->w->s.in.q + (a->t * p->H + a->hv / dp_G(p)) * p->K,
                 *dout = p->dout + (a->t * p->HV + a->hv) * p->V;
    const int64_t row = a->t * p->H + a->hv / dp_G(p);
    const double across = dp_is_normed(p, DP_INPUT_Q) ? dp_norm_across(p) : 1;
    add(a, DP_RESULT_DQ, row,
        across * a->w->s.in.rstd_q[row] * fabs(p->scale) * dp_norm_fro(p->V, dout) * off);
    dp_state_write(p, p->scale, q, dout, a->G);
}

/* Adds the errors of key j and its dU [V]; returns the square of dbeta's error. */
static double of_key(adjoint *a, int j, const double *dU, double off) {
    const dp_problem *p = a->w->p;
    const dp_activated *in = &a->w->s.in;
    const int64_t at = a->t * p->HV + a->hv, key = a->t * p->H + a->hv / dp_G(p);
    const double *e = dp_erasing_at(p, in->k, in->erasing, a->t, a->hv) + (int64_t)j * p->K;
    const double beta = in->beta[at * dp_rows(p) + j], ne = dp_norm_fro(p->K, e) * off;
    const double read = fabs(beta) * dp_norm_fro(p->V, dU) * (dp_erases(p) ? off : 0),
                 write = dp_norm_fro((int64_t)p->K * p->V, a->G) * fabs(beta) * ne;
    const double *erase = p->erase ? p->erase + at * p->K : NULL;
    if (dp_by_rows(p)) {
        const dp_row_errors row = {write, read, dp_norm_fro(p->V, dU) * ne};
        a->gate += store_row(p, in, at, j, row, a->w->b->row);
        return 0;
    }
    add(a, DP_RESULT_DK, key * dp_rows(p) + j,
        in->rstd_k[key * dp_rows(p) + j] * (write + read * (erase ? dp_norm_max(p->K, erase) : 1)));
    if (erase) add(a, DP_RESULT_DERASE, at, dp_norm_max(p->K, in->k + key * p->K) * read);
    if (!dp_has_beta(p)) return 0;
    const double d =
        dp_error_bound_beta(p, p->beta[at * p->R + j]).slope * dp_norm_fro(p->V, dU) * ne;
    return d * d;
}

static void of_keys(adjoint *a, double off) {
    const dp_problem *p = a->w->p;
    const dp_activated *in = &a->w->s.in;
    const int64_t at = a->t * p->HV + a->hv;
    const double *k = in->k + (a->t * p->H + a->hv / dp_G(p)) * dp_rows(p) * p->K,
                 *e = dp_erasing_at(p, in->k, in->erasing, a->t, a->hv);
    double dbeta = 0;
    a->gate = 0;
    for (int n = dp_keys_at_once(p), first = dp_rows(p) - n; first >= 0; first -= n) {
        for (int j = first; j < first + n; j++) {
            dp_state_read(p, a->G, k + (int64_t)j * p->K, a->dU + (int64_t)j * p->V);
            dbeta += of_key(a, j, a->dU + (int64_t)j * p->V, off);
        }
        for (int j = first; j < first + n; j++)
            dp_state_write(p, -in->beta[at * dp_rows(p) + j], e + (int64_t)j * p->K,
                           a->dU + (int64_t)j * p->V, a->G);
    }
    if (dp_has_beta(p)) add(a, DP_RESULT_DBETA, at, sqrt(dbeta));
}

static void of_gate(const adjoint *a, double off) {
    const dp_problem *p = a->w->p;
    const int Kg = dp_Kg(p);
    const int64_t at = (a->t * p->HV + a->hv) * Kg, n = (int64_t)p->K * p->V / Kg;
    const double dx = dp_norm_max(Kg, a->dx + at) * a->gate,
                 dA = dp_norm_max(Kg, a->dA + at) * a->gate;
    double most = 0, sum = 0;
    for (int x = 0; x < Kg; x++) {
        const double G = dp_norm_fro(n, a->G + x * n);
        most = fmax(most, fabs(a->dx[at + x]) * G);
        sum += pow(a->dA[at + x] * G, 2);
    }
    add(a, DP_RESULT_DG, a->t * p->HV + a->hv, most * off + dx);
    add(a, DP_RESULT_DA_LOG, a->hv, sqrt(sum) * off + dA);
    add(a, DP_RESULT_DDT_BIAS, a->hv, most * off + dx);
    dp_state_decay(p, a->w->s.in.g + at, a->G);
}

static void head_back(const work *w, int i, int hv, const double *dx, const double *dA) {
    const dp_problem *p = w->p;
    const int64_t KV = (int64_t)p->K * p->V, state = ((int64_t)i * p->HV + hv) * KV;
    adjoint a = {.w = w, .hv = hv, .dx = dx, .dA = dA};
    a.G = p->dstate ? dp_copy(p->dstate + state, KV) : dp_doubles(KV);
    a.dU = dp_doubles((int64_t)dp_rows(p) * p->V);
    for (a.t = p->cu[i + 1] - 1; a.t >= p->cu[i]; a.t--) {
        const double off = w->behind[a.t * p->HV + hv];
        of_query(&a, w->read[a.t * p->HV + hv]);
        of_keys(&a, off);
        of_gate(&a, off);
    }
    free(a.G);
    free(a.dU);
}

static void backward_pass(const work *w) {
    const dp_problem *p = w->p;
    const int64_t n = p->T * p->HV * dp_Kg(p);
    DP_OWN double *dx = dp_doubles(n), *dA = dp_doubles(n);
    dp_gate_slopes(p, dx, dA);
    for (int i = 0; i < p->Nseq; i++)
        for (int hv = 0; hv < p->HV; hv++)
            head_back(w, i, hv, dx, dA);
}

/* ---- all of it ------------------------------------------------------------------------------- */

int dp_store_has_gradients(const dp_problem *p) { return !dp_has_halo(p); }

void dp_store_bounds(const dp_problem *p, int N, dp_sending sending, int n, const dp_stores *at,
                     int backward, dp_error_bound *b) {
    const int64_t widest = (int64_t)dp_rows(p) * (p->K > p->V ? p->K : p->V);
    work w = {.p = p, .N = N, .n = n, .at = at, .square = *p, .b = b};
    if (sending.exchange == DP_EXCHANGE_HEADS) w.N = 1;
    w.pairs = w.N > 1 && dp_exchanges[sending.exchange].pairs;
    w.s = (dp_carried_head){.p = p, .in = dp_activated_new(p)};
    w.square.V = p->K;
    w.square.v = dp_doubles(p->T * p->HV * dp_rows(p) * p->K);
    w.o = dp_doubles(widest);
    w.write = dp_doubles(widest);
    w.behind = dp_doubles(p->T * p->HV);
    w.read = dp_doubles(p->T * p->HV);
    double **const of_heads[] = {&w.more, &w.grown, &w.size, &w.entered};
    for (int i = 0; i < 4; i++)
        *of_heads[i] = dp_doubles(p->HV);
    for (int i = 0; i < p->Nseq; i++)
        sequence(&w, i);
    if (backward && dp_store_has_gradients(p)) backward_pass(&w);
    for (int i = 0; i < 4; i++)
        free(*of_heads[i]);
    DP_FREE(w.square.v, w.o, w.write, w.behind, w.read);
    dp_activated_free(&w.s.in);
}
