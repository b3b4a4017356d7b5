/* Which stage of the pipeline is wrong: all stages in their order (bisect.h). */
#include "bisect.h"
#include "harness/bound/error_bound.h"
#include "harness/bound/error_bound_impl.h"
#include "harness/simulated/ranks_stages.h"
#include "harness/verdict/expected.h"
#include "ref/vocabulary/recurrence.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* Errors of one tensor by cell: a chunk and head, a rank and head, a head. */
typedef struct {
    char name[16];
    int stage;
    int64_t n;
    double *e2, *err2, *want2, *rows;
    dp_bisect_entry *worst;
} dp_bisect_tally; /* e2 [draws][n] */
typedef struct {
    int draw, ndraw, n;
    dp_bisect_tally t[64];
} dp_bisect_tallies; /* draw: the one that is running, -1: the subject */

typedef struct {
    const dp_problem *p;
    dp_base base;
    dp_rounding r;    /* p = 2 */
    dp_sim s, t, ref; /* the subject; the same stages in fp64 on the subject's inputs; the whole
                         pipeline in fp64 */
    dp_chunk_bound *intra, *own; /* [ngroup][HV] */
    dp_bisect *out;
    int stage;
    int run;
    dp_bisect_tallies *tal; /* NULL: rows are held against their bounds */
    struct {
        int64_t n, cap, at;
        uint64_t *hash;
    } first[DP_NSTAGES]; /* the rows of the first run, in the order of judgement */
} dp_bisect_work;

typedef struct {
    dp_chunk *s, *t, *ref;
    dp_chunk_bound *intra, *own;
    dp_place at;
    int g, hv;
} dp_bisect_chunk;

#define FOR_CHUNKS_IN(C, BACK)                                                           \
    for (int g_ = 0, n_ = w->ref.ngroup; g_ < n_; g_++)                                  \
        for (int hv_ = 0; hv_ < w->p->HV; hv_++)                                         \
            for (dp_bisect_chunk C = bisect_chunk_of(w, (BACK) ? n_ - 1 - g_ : g_, hv_), \
                                 *once_ = &C;                                            \
                 once_; once_ = NULL)
#define FOR_CHUNKS(C) FOR_CHUNKS_IN(C, 0)

/* how a value is kept: in the base's arithmetic, or as it is stored */
enum { DP_BISECT_ARITH, DP_BISECT_STORE };

/* The rows [T][heads][per][n] of a tensor. */
typedef struct {
    const char *name;
    int heads, per, n;
} dp_bisect_rows;

/* ---- one row --------------------------------------------------------------------------------- */

/* Is this row what it was in the first run? */
static int steady(dp_bisect_work *w, int n, const double *got) {
    const uint64_t h = XXH3_64bits(got, sizeof *got * (size_t)n);
    if (w->run)
        return w->first[w->stage].at >= w->first[w->stage].n ||
               w->first[w->stage].hash[w->first[w->stage].at++] == h;
    if (w->first[w->stage].n == w->first[w->stage].cap) {
        w->first[w->stage].cap = w->first[w->stage].cap ? 2 * w->first[w->stage].cap : 1024;
        w->first[w->stage].hash =
            dp_realloc(w->first[w->stage].hash, sizeof h * (size_t)w->first[w->stage].cap);
    }
    w->first[w->stage].hash[w->first[w->stage].n++] = h;
    return 1;
}

/* Difference of a row of n numbers: 2-norm of the error, index of the largest error. If judged = 0,
 * the reference is not finite, and nothing is compared. */
typedef struct {
    double err;
    int index, judged;
} row_difference;

static row_difference difference(int n, const double *got, const double *want, int differs) {
    row_difference d = {0};
    double e2 = 0, top = -1, scale = 0;
    for (int i = 0; i < n; i++) {
        if (!isfinite(want[i]) && !differs) return d;
        const double e = fabs(got[i] - want[i]);
        if (!(e <= top)) {
            top = e;
            d.index = i;
        }
        if (isnan(e)) break;
        scale = fmax(scale, e);
    }
    for (int i = 0; i < n; i++)
        e2 += scale > 0 ? ((got[i] - want[i]) / scale) * ((got[i] - want[i]) / scale) : 0;
    d.err = isnan(top) ? NAN : scale * sqrt(e2);
    d.judged = 1;
    return d;
}

static double limit_of(int n, const double *D, double more) {
    double d2 = 0;
    for (int i = 0; i < n; i++)
        d2 += D ? D[i] : 0;
    return DP_LAMBDA * sqrt(d2) + more;
}

/* Notes a failing row of the stage's first failing tensor, the one to report. */
static void note_failure(dp_bisect_row *x, const dp_bisect_row *now, int differs) {
    if (!x->fails) {
        memcpy(x->tensor, now->tensor, sizeof x->tensor);
        x->first = now->first;
        x->ratio = now->ratio;
        x->run = now->run;
    }
    x->fails++;
    x->unsteady += differs;
    if (!(now->ratio <= x->ratio)) x->ratio = now->ratio;
    if (now->first.at.rank >= 0) x->rank[now->first.at.rank] = 1;
    if (now->first.at.head >= 0) x->head[now->first.at.head] = 1;
}

static dp_bisect_tally *tally_of(dp_bisect_work *w, const char *tensor) {
    dp_bisect_tallies *x = w->tal;
    for (int i = x->n - 1; i >= 0; i--)
        if (x->t[i].stage == (int)w->stage && !strcmp(x->t[i].name, tensor)) return &x->t[i];
    assert(x->n < (int)(sizeof x->t / sizeof *x->t));
    dp_bisect_tally *t = &x->t[x->n++];
    *t = (dp_bisect_tally){.stage = (int)w->stage,
                           .n = (int64_t)(w->ref.ngroup > w->ref.N ? w->ref.ngroup : w->ref.N) *
                                w->p->HV};
    snprintf(t->name, sizeof t->name, "%s", tensor);
    t->e2 = dp_doubles(t->n * x->ndraw);
    t->err2 = dp_doubles(t->n);
    t->want2 = dp_doubles(t->n);
    t->rows = dp_doubles(t->n);
    t->worst = dp_calloc((size_t)t->n, sizeof *t->worst);
    return t;
}

/* Adds a row's errors to the tally of its tensor. */
static void bisect_count(dp_bisect_work *w, const char *tensor, const dp_place *at, int row, int n,
                         const double *got, const double *want) {
    dp_bisect_tally *t = tally_of(w, tensor);
    const int64_t cell = (int64_t)(at->chunk >= 0  ? at->chunk
                                   : at->rank >= 0 ? at->rank
                                                   : 0) *
                             w->p->HV +
                         (at->head >= 0 ? at->head : 0);
    double e2 = 0, w2 = 0, top = -1;
    int index = 0;
    for (int i = 0; i < n; i++) {
        const double e = fabs(got[i] - want[i]);
        if (!isfinite(e)) return; /* bounds have nothing to say of it, either */
        e2 += e * e;
        w2 += want[i] * want[i];
        if (e > top) {
            top = e;
            index = i;
        }
    }
    if (w->tal->draw >= 0) {
        t->e2[w->tal->draw * t->n + cell] += e2;
        return;
    }
    t->err2[cell] += e2;
    t->want2[cell] += w2;
    t->rows[cell]++;
    if (t->rows[cell] == 1 || sqrt(e2) > t->worst[cell].err)
        t->worst[cell] = (dp_bisect_entry){*at, row, index, got[index], want[index], sqrt(e2), 0};
}

/* Holds a row of n numbers against its bound: D, squares of its entries' errors (NULL: 0), and
 * more, of the row as a whole. */
static void bisect_judge(dp_bisect_work *w, const char *tensor, dp_place at, int row, int n,
                         const double *got, const double *want, const double *D, double more) {
    dp_bisect_row *x = &w->out->stage[w->stage];
    if (w->tal) {
        bisect_count(w, tensor, &at, row, n, got, want);
        return;
    }
    const int differs = !steady(w, n, got);
    const row_difference d = difference(n, got, want, differs);
    const double limit = limit_of(n, D, more);
    if (!d.judged || (isnan(limit) && !differs)) { /* beside an infinite or NaN input of its chunk:
                                                      nothing bounds it, as in compare.h */
        x->skipped += !w->run;
        return;
    }
    const double ratio = d.err == 0 ? 0 : d.err / limit;
    x->judged += !w->run;
    if (!x->tensor[0]) snprintf(x->tensor, sizeof x->tensor, "%s", tensor);
    if (x->fails && strcmp(x->tensor, tensor)) return;
    if (d.err <= limit && !differs) {
        if (x->fails || !(ratio >= x->ratio)) return;
        x->ratio = ratio;
        snprintf(x->tensor, sizeof x->tensor, "%s", tensor);
        return;
    }
    dp_bisect_row now = {.first = {at, row, d.index, got[d.index], want[d.index], d.err, limit},
                         .ratio = ratio,
                         .run = w->run};
    snprintf(now.tensor, sizeof now.tensor, "%s", tensor);
    note_failure(x, &now, differs);
}

/* Judges rows of n numbers; tokens_R: rows a token from at.token on, 0: rows of a matrix. */
static void bisect_judge_rows(dp_bisect_work *w, const char *tensor, dp_place at, int tokens_R,
                              int rows, int n, const double *got, const double *want,
                              const double *D) {
    const int64_t t0 = at.token;
    for (int i = 0; i < rows; i++) {
        if (tokens_R) at.token = t0 + i / tokens_R;
        bisect_judge(w, tensor, at,
                     tokens_R == 1 ? -1
                     : tokens_R    ? i % tokens_R
                                   : i,
                     n, got + (int64_t)i * n, want + (int64_t)i * n, D ? D + (int64_t)i * n : NULL,
                     0);
    }
}

/* Where a chunk and value head lie. */
static dp_place bisect_chunk_place(const dp_bisect_work *w, int g, int hv) {
    const dp_group *gr = &w->ref.group[g];
    return (dp_place){.rank = gr->rank,
                      .head = hv,
                      .sequence = w->ref.ctx[gr->rank].local_seq[gr->sub],
                      .chunk = g,
                      .token = gr->t0};
}

/* A state or M of a whole rank: before (dir > 0: of its first, after: of its last) token. */
static dp_place bisect_rank_place(const dp_bisect_work *w, int r, int hv, int sub) {
    return dp_place_of(r, hv, w->ref.ctx[r].local_seq[sub]);
}

/* ---- copying true values into subject and twin ----------------------------------------------- */

/* Gives subject and twin n true values, as the base keeps them. */
static void bisect_give(dp_bisect_work *w, double *s, double *t, const double *ref, int64_t n,
                        int how) {
    for (int64_t i = 0; i < n; i++)
        s[i] = t[i] = how == DP_BISECT_STORE ? dp_round_store(w->base, ref[i])
                                             : dp_round_arith(w->base, ref[i]);
}

/* Gives them the true values of every rank and head that has some. */
static void bisect_give_ranks(dp_bisect_work *w, int which) {
    double **s = w->s.rank[which], **t = w->t.rank[which], **ref = w->ref.rank[which];
    for (int i = 0; i < w->ref.N * w->p->HV; i++)
        if (s[i] && t[i] && ref[i])
            bisect_give(w, s[i], t[i], ref[i], dp_rank_width(w->p, which), DP_BISECT_ARITH);
}

/* A chunk of subject, twin and reference, with its bounds. */
static dp_bisect_chunk bisect_chunk_of(dp_bisect_work *w, int g, int hv) {
    const int64_t z = (int64_t)g * w->p->HV + hv;
    return (dp_bisect_chunk){dp_sim_chunk(&w->s, g, hv),
                             dp_sim_chunk(&w->t, g, hv),
                             dp_sim_chunk(&w->ref, g, hv),
                             &w->intra[z],
                             &w->own[z],
                             bisect_chunk_place(w, g, hv),
                             g,
                             hv};
}

static void give_array(dp_bisect_work *w, const dp_bisect_chunk *c, dp_chunk_array x, int how) {
    bisect_give(w, c->s->array[x], c->t->array[x], c->ref->array[x], dp_chunk_numbers(c->ref, x),
                how);
}
#define GIVE(FIELD, HOW) give_array(w, &c, DP_OF_CHUNK_##FIELD, DP_BISECT_##HOW)

/* ---- the stages ------------------------------------------------------------------------------ */

/* Backwards in time. */
static void bisect_judge_tokens(dp_bisect_work *w, dp_bisect_rows x, const double *got,
                                const double *want, const double *bound) {
    for (int g = w->ref.ngroup - 1; g >= 0; g--)
        for (int h = 0; h < x.heads; h++)
            for (int t = w->ref.group[g].c - 1; t >= 0; t--)
                for (int j = 0; j < x.per; j++) {
                    dp_place at = bisect_chunk_place(w, g, h);
                    at.token += t;
                    const int64_t row = (at.token * x.heads + h) * x.per + j;
                    bisect_judge(w, x.name, at, x.per > 1 ? j : -1, x.n, got + row * x.n,
                                 want + row * x.n, NULL, DP_LAMBDA * sqrt(bound[row]));
                }
}

/* A state error of zeros, to be freed. */
static double *bisect_zeros_state(const dp_bisect_work *w) {
    return dp_doubles(dp_state_error_size(&w->r, w->p->K, w->p->V));
}

/* ---- gate ------------------------------------------------------------------------------------ */

/* erase o k and write o v of one token and value head; of factors, -lr_a exp(-g) and v of both of
 * its keys. */
static void judge_writes(dp_bisect_work *w, dp_place at, int64_t token, const dp_input_error *in,
                         double tiny) {
    const int K = w->p->K, V = w->p->V, R = dp_rows(w->p);
    static const char *const NAMES[2][2] = {{"-lr_a / decay", "v"}, {"erase k", "write v"}};
    const char *const *names = NAMES[dp_by_gates(w->p)];
    for (int j = 0; j < R; j++) {
        const int64_t row = token * R + j;
        const double *e = w->t.erasing + row * K, *v = w->t.values + row * V;
        bisect_judge(w, names[0], at, R > 1 ? j : -1, K, w->s.erasing + row * K, e, NULL,
                     (in->k + in->qk_row + in->erasing) * dp_norm_fro(K, e) + K * tiny);
        bisect_judge(w, names[1], at, R > 1 ? j : -1, V, w->s.values + row * V, v, NULL,
                     in->v * dp_norm_fro(V, v) + V * tiny);
    }
}

/* The error that the rotation of row j's key adds at token t. */
static double turned_key(const dp_problem *p, const double *dphi, int64_t t, int hv, int j,
                         double u) {
    const int key = dp_entry_rotated(dp_recurrence_of(p), dp_row_of(p, j)->write);
    return dp_turned_norm(p, dphi, key < 0 ? -1 : dp_factor_token(p, key, t), hv, u);
}

/* Errors of the activations. */
typedef struct {
    dp_rounding r;
    dp_input_error in;
    const double *dphi; /* of the angles; NULL: no rotation */
} gate_errors;

/* q and k of a query head of token `at`. */
static void judge_query_head(dp_bisect_work *w, const gate_errors *e, dp_place at) {
    const dp_problem *p = w->p;
    const int R = dp_rows(p), K = p->K;
    const int64_t q = (at.token * p->H + at.head) * K;
    const double turned = dp_turned_norm(p, e->dphi, at.token, at.head, e->r.u);
    bisect_judge(w, "q", at, -1, K, w->s.q + q, w->t.q + q, NULL,
                 (e->in.q + e->in.qk_row + turned) * dp_norm_fro(K, w->t.q + q) + K * e->r.tiny);
    for (int j = 0; j < R; j++) {
        const int64_t k = q * R + (int64_t)j * K;
        const double of_row = turned > 0 ? turned_key(p, e->dphi, at.token, at.head, j, e->r.u) : 0;
        bisect_judge(w, "k", at, R > 1 ? j : -1, K, w->s.k + k, w->t.k + k, NULL,
                     (e->in.k + e->in.qk_row + of_row) * dp_norm_fro(K, w->t.k + k) +
                         K * e->r.tiny);
    }
}

/* g and beta of a value head of token `at`, or the entries that stand in place of beta. */
static void judge_value_head(dp_bisect_work *w, const gate_errors *e, dp_place at) {
    const dp_problem *p = w->p;
    const int Kg = dp_Kg(p), R = p->R;
    const int64_t row = at.token * p->HV + at.head, g = row * Kg, b = row * R;
    DP_OWN double *bound = dp_doubles(Kg);
    for (int c = 0; c < Kg; c++)
        bound[c] = dp_error_bound_gate(p, at.token, at.head, c, e->r.u).Dg + e->r.tiny;
    bisect_judge(w, "g", at, -1, Kg, w->s.g + g, w->t.g + g, NULL, dp_norm_fro(Kg, bound));
    if (w->ref.values)
        judge_writes(w, at, row, &e->in, e->r.tiny);
    else if (p->beta)
        bisect_judge(w, "beta", at, -1, R, w->s.beta + b, w->t.beta + b, NULL,
                     e->in.beta * dp_norm_fro(R, w->t.beta + b) + R * e->r.tiny);
}

static void give_activations(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    const int R = dp_rows(p), rounded = w->base == DP_BASE_BF16 ? DP_BISECT_STORE : DP_BISECT_ARITH,
              normed = p->l2norm ? rounded : DP_BISECT_ARITH;
    const int64_t rows = p->T * p->HV * R;
    if (w->ref.values) {
        bisect_give(w, w->s.erasing, w->t.erasing, w->ref.erasing, rows * p->K,
                    dp_by_rows(p) ? DP_BISECT_ARITH : rounded);
        bisect_give(w, w->s.values, w->t.values, w->ref.values, rows * p->V, rounded);
    }
    bisect_give(w, w->s.q, w->t.q, w->ref.q, p->T * p->H * p->K, normed);
    bisect_give(w, w->s.k, w->t.k, w->ref.k, p->T * p->H * R * p->K, normed);
    bisect_give(w, w->s.g, w->t.g, w->ref.g, p->T * p->HV * dp_Kg(p), DP_BISECT_ARITH);
    bisect_give(w, w->s.beta, w->t.beta, w->ref.beta, rows, DP_BISECT_ARITH);
    bisect_give(w, w->s.rstd_q, w->t.rstd_q, w->ref.rstd_q, p->T * p->H, DP_BISECT_ARITH);
    bisect_give(w, w->s.rstd_k, w->t.rstd_k, w->ref.rstd_k, p->T * p->H * R, DP_BISECT_ARITH);
}

static void bisect_stage_gate(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    const dp_rounding r = dp_rounding_of(w->base, 1);
    const int64_t L = p->T / w->ref.N;
    DP_OWN double *dphi = dp_error_bound_angles(p, w->base, &r);
    const gate_errors e = {r, dp_error_bound_inputs(p, w->base, &r), dphi};
    for (int64_t t = 0, g = 0; t < L * w->ref.N; t++) {
        while (g + 1 < w->ref.ngroup && w->ref.group[g + 1].t0 <= t)
            g++;
        dp_place at = bisect_chunk_place(w, (int)g, 0);
        at.token = t;
        for (at.head = 0; at.head < p->H; at.head++)
            judge_query_head(w, &e, at);
        for (at.head = 0; at.head < p->HV; at.head++)
            judge_value_head(w, &e, at);
    }
    give_activations(w);
}

/* ---- intra, solve, wy ------------------------------------------------------------------------ */

/* A decay below the smallest number of the format is 0 whatever its exponent: exponents are
 * compared down to there. */
static void judge_gcum(dp_bisect_work *w, const dp_bisect_chunk *c) {
    const double floor = dp_gate_floor(w->base);
    const int K = w->p->K;
    DP_OWN double *a = dp_doubles(2 * K);
    double *b = a + K;
    for (int t = 0; t < c->ref->c; t++) {
        dp_place at = c->at;
        at.token += t;
        for (int x = 0; x < K; x++) {
            const double got = c->s->gcum[t * K + x], want = c->t->gcum[t * K + x];
            a[x] = got < floor ? floor : got;
            b[x] = want < floor ? floor : want;
        }
        bisect_judge(w, "gcum", at, -1, K, a, b, c->intra->Dcum + t * K, 0);
    }
}

static void bisect_stage_intra(dp_bisect_work *w) {
    const int R = dp_rows(w->p);
    FOR_CHUNKS(c) judge_gcum(w, &c);
    FOR_CHUNKS(c)
    bisect_judge_rows(w, "L", c.at, R, c.ref->n, c.ref->n, c.s->L, c.t->L, c.intra->DL);
    FOR_CHUNKS(c)
    bisect_judge_rows(w, "Aqk", c.at, 1, c.ref->c, c.ref->n, c.s->Aqk, c.t->Aqk, c.intra->DAqk);
    FOR_CHUNKS(c) {
        GIVE(gcum, ARITH);
        GIVE(L, ARITH);
        GIVE(Aqk, STORE);
    }
}

static void bisect_stage_solve(dp_bisect_work *w) {
    if (!w->s.by_inverse) return;
    FOR_CHUNKS(c)
    bisect_judge_rows(w, "Akk", c.at, dp_rows(w->p), c.ref->n, c.ref->n, c.s->Akk, c.t->Akk,
                      c.own->DT);
    FOR_CHUNKS(c) GIVE(Akk, STORE);
}

static void bisect_stage_wy(dp_bisect_work *w) {
    const int K = w->p->K, V = w->p->V, R = dp_rows(w->p);
    FOR_CHUNKS(c) bisect_judge(w, "eC", c.at, -1, K, c.s->eC, c.t->eC, c.own->DeC, 0);
    FOR_CHUNKS(c) bisect_judge_rows(w, "kg", c.at, R, c.ref->n, K, c.s->kg, c.t->kg, c.own->Dkg);
    FOR_CHUNKS(c) bisect_judge_rows(w, "qg", c.at, 1, c.ref->c, K, c.s->qg, c.t->qg, c.own->Dqg);
    FOR_CHUNKS(c) bisect_judge_rows(w, "w", c.at, R, c.ref->n, K, c.s->w, c.t->w, c.own->Dw);
    FOR_CHUNKS(c) bisect_judge_rows(w, "u", c.at, R, c.ref->n, V, c.s->u, c.t->u, c.own->Du);
    FOR_CHUNKS(c) {
        GIVE(eC, ARITH);
        GIVE(kgam, ARITH);
        GIVE(kg, STORE);
        GIVE(qg, STORE);
        GIVE(w, STORE);
        GIVE(u, STORE);
    }
}

/* A gradient of one row a token, stored with a relative error of eps. */
static void judge_stored(dp_bisect_work *w, const dp_rounding *r, dp_result_id id, double eps) {
    const double *got = w->s.out.out[id], *want = w->t.out.out[id];
    int64_t rows, width;
    dp_result_shape(w->p, id, &rows, &width);
    DP_OWN double *bound = dp_doubles(rows);
    for (int64_t i = 0; i < rows; i++)
        bound[i] =
            dp_pw(&w->r, (eps * dp_norm_fro(width, want + i * width) + (double)width * r->tiny) /
                             DP_LAMBDA);
    bisect_judge_tokens(
        w, (dp_bisect_rows){dp_result_fields[id].name, dp_result_heads(w->p, id), 1, (int)width},
        got, want, bound);
}

/* dv, dwrite and derase: one product, rounded and stored. To k, the bounds of dk, it adds the part
 * through the erasing keys: G products and sums. */
static void judge_writes_bwd(dp_bisect_work *w, const dp_rounding *r, double eps, double *k) {
    const dp_problem *p = w->p;
    const int HV = p->HV, G = dp_G(p);
    judge_stored(w, r, DP_RESULT_DV, 2 * r->u + r->us);
    judge_stored(w, r, DP_RESULT_DWRITE, 2 * r->u + r->us);
    judge_stored(w, r, DP_RESULT_DERASE, 2 * r->u + r->us);
    for (int64_t i = 0; i < p->T * HV; i++) {
        const int64_t key = i / HV * p->H + i % HV / G;
        double size = 0;
        for (int x = 0; x < p->K; x++)
            size += fabs(p->erase[i * p->K + x] * w->ref.derasing[i * p->K + x]);
        size += dp_norm_fro(p->K, w->ref.dk + key * p->K);
        k[key] += dp_pw(&w->r, w->ref.rstd_k[key] * (eps + (G + 3) * r->u) * size / DP_LAMBDA);
    }
}

/* dv, dlr_b and dk: stored without a change. dlr_a = -exp(-g) times the erasing key's gradient:
 * exp(-g) has the error of its gate and 3 roundings. */
static void judge_factors_bwd(dp_bisect_work *w, const dp_rounding *r) {
    const double erasing = dp_error_bound_inputs(w->p, w->base, r).erasing;
    judge_stored(w, r, DP_RESULT_DV, r->u + r->us);
    judge_stored(w, r, DP_RESULT_DLR_B, r->u + r->us);
    judge_stored(w, r, DP_RESULT_DK, r->u + r->us);
    judge_stored(w, r, DP_RESULT_DLR_A, erasing + 3 * r->u + r->us);
}

/* The gradient of a gate after the activation. With factors it has the part through exp(-g): lr_a
 * exp(-g) times the erasing key's gradient, with its roundings and that of the sum in D. */
static double gate_gradient(const dp_bisect_work *w, int64_t i, const dp_rounding *r,
                            double erasing, double *D) {
    const dp_problem *p = w->p;
    *D = 0;
    if (!dp_by_rows(p)) return w->ref.dg[i];
    const int64_t first = i / p->K * 2 * p->K + i % p->K;
    const double through = -w->ref.erasing[first] * w->ref.derasing[first];
    *D = (erasing + 3 * r->u) * fabs(through) + r->u * fabs(w->ref.dg[i] + through);
    return w->ref.dg[i] + through;
}

static void judge_beta_bwd(dp_bisect_work *w, const dp_rounding *r) {
    const dp_problem *p = w->p;
    const int plain = p->beta_form == DP_BETA_PLAIN;
    const int n = plain ? 1 : dp_curves[dp_betas[p->beta_form].curve].rounded[0] + 2;
    const double eps = n * r->u + r->us;
    const dp_bisect_rows rows = {"dbeta", p->HV, p->R, 1};
    DP_OWN double *bound = dp_doubles(p->T * p->HV * p->R);
    for (int64_t i = 0; i < p->T * p->HV * p->R; i++)
        bound[i] = dp_pw(&w->r, (eps * fabs(w->t.out.dbeta[i]) + r->tiny) / DP_LAMBDA);
    bisect_judge_tokens(w, rows, w->s.out.dbeta, w->t.out.dbeta, bound);
}

/* Bounds of single stages, whose inputs are without error. */
static dp_error_bound_base own_bounds(const dp_bisect_work *w) {
    return (dp_error_bound_base){.ref = (dp_sim *)&w->ref,
                                 .base = w->base,
                                 .sending = {w->s.merge, w->s.payload},
                                 .r = w->r,
                                 .b = w->own};
}

/* All gradients of a user's rows. Gradients of strengths have the errors of wy_bwd, too, which
 * nobody judges there. */
static void judge_rows_bwd(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    dp_error_bound_base own = own_bounds(w);
    dp_error_bound b;
    own.in = dp_error_bound_inputs(p, w->base, &w->r);
    own.Dphi = dp_error_bound_angles(p, w->base, &w->r);
    dp_error_bound_activations(&own, &b);
    for (int f = 0; f < DP_NRESULTS; f++) {
        const dp_tensor_field *x = &dp_result_fields[f];
        const double *got = w->s.out.out[f], *want = w->t.out.out[f];
        int64_t rows, width;
        dp_result_shape(p, f, &rows, &width);
        if (!got || !b.row[f] || x->role != DP_ROLE_GRADIENT || x->kind == DP_OF_SEQUENCES)
            continue;
        for (int64_t i = 0; i < rows && x->kind == DP_OF_TOKENS; i++)
            b.row[f][i] *= b.row[f][i] / (DP_LAMBDA * DP_LAMBDA);
        if (x->kind == DP_OF_TOKENS)
            bisect_judge_tokens(w, (dp_bisect_rows){x->name, p->HV, 1, (int)width}, got, want,
                                b.row[f]);
        for (int hv = 0; hv < p->HV && x->kind != DP_OF_TOKENS; hv++)
            bisect_judge(w, x->name, dp_place_of(-1, hv, -1), -1, (int)width, got + hv * width,
                         want + hv * width, NULL, b.row[f][hv]);
    }
    dp_error_bound_free(&b);
    free(own.Dphi);
}

/* Bounds of gradients of rows with a norm, each of relative error eps before it. */
static void through_norms(const dp_bisect_work *w, double eps, int64_t rows, const double *rstd,
                          const double *d, double *bound) {
    const int K = w->p->K;
    const double tiny = dp_rounding_of(w->base, 1).tiny;
    for (int64_t i = 0; i < rows; i++)
        bound[i] = dp_pw(&w->r, (eps * rstd[i] * dp_norm_fro(K, d + i * K) + K * tiny) / DP_LAMBDA);
}

/* dA_log and ddt_bias; A [HV] and B [HV][Kg] bound their errors. */
static void judge_head_sums(dp_bisect_work *w, const double *A, const double *B) {
    const dp_result *got = &w->s.out, *want = &w->t.out;
    const int Kg = dp_Kg(w->p);
    for (int hv = 0; hv < w->p->HV; hv++) {
        const dp_place at = dp_place_of(-1, hv, -1);
        if (got->dA_log)
            bisect_judge(w, "dA_log", at, -1, 1, got->dA_log + hv, want->dA_log + hv, NULL, A[hv]);
        if (got->ddt_bias)
            bisect_judge(w, "ddt_bias", at, -1, Kg, got->ddt_bias + hv * Kg,
                         want->ddt_bias + hv * Kg, NULL, dp_norm_fro(Kg, B + hv * Kg));
    }
}

/* Through the activations, as in error_bound.c with exact inputs (worst case). From dx = rstd (dy -
 * y <y, dy>): rstd (2 gamma_K + 6u) |dy|. Raw gate |dg/dx| (relative error of the derivative + u)
 * |dg|; beta 6u z s (1 - s) |dbeta|. Sums over tokens: gamma_T of the sum of absolute values. Each
 * is stored with u + us. */
static void bisect_stage_gate_bwd(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    if (p->model == DP_USER) {
        judge_rows_bwd(w);
        return;
    }
    const dp_rounding r = dp_rounding_of(w->base, 1);
    const int Kg = dp_Kg(p), H = p->H, HV = p->HV, R = p->R, K = p->K;
    const double eps = (p->l2norm ? 2 * dp_gamma(K, r.u) + 6 * r.u : 0) + r.u + r.us,
                 sums = dp_gamma((int)fmin((double)p->T + Kg + w->ref.N, 1 << 22), r.u),
                 erasing = dp_error_bound_inputs(p, w->base, &r).erasing;
    DP_OWN double *q = dp_doubles(p->T * H), *k = dp_doubles(p->T * H * R),
                  *g = dp_doubles(p->T * HV), *A = dp_doubles(HV),
                  *B = dp_doubles((int64_t)HV * Kg);
    through_norms(w, eps, p->T * H, w->ref.rstd_q, w->ref.dq, q);
    through_norms(w, eps, p->T * H * R, w->ref.rstd_k, w->ref.dk, k);
    for (int64_t i = 0; i < p->T * HV; i++) {
        double row = 0, D;
        for (int c = 0; c < Kg; c++) {
            const dp_gate_error ge = dp_error_bound_gate(p, i / HV, (int)(i % HV), c, r.u);
            const double v = fabs(gate_gradient(w, i * Kg + c, &r, erasing, &D));
            const double x = fabs(ge.dx) * v, y = fabs(ge.dA) * v;
            const double d = (ge.Ddx + 2 * r.u + r.us) * x + fabs(ge.dx) * D + r.tiny;
            row += d * d;
            B[(i % HV) * Kg + c] += (ge.Ddx + r.u + sums) * x + fabs(ge.dx) * D + r.tiny;
            A[i % HV] += (ge.Ddx + 3 * r.u + sums) * y + fabs(ge.dA) * D +
                         (dp_gate_inside(p) ? 0 : ge.Dg * v) + r.tiny;
        }
        g[i] = row / (DP_LAMBDA * DP_LAMBDA);
    }
    if (dp_by_gates(p)) judge_writes_bwd(w, &r, eps, k);
    if (dp_by_rows(p)) judge_factors_bwd(w, &r);
    bisect_judge_tokens(w, (dp_bisect_rows){"dq", H, 1, K}, w->s.out.dq, w->t.out.dq, q);
    if (!dp_by_rows(p))
        bisect_judge_tokens(w, (dp_bisect_rows){"dk", H, R, K}, w->s.out.dk, w->t.out.dk, k);
    bisect_judge_tokens(w, (dp_bisect_rows){"dg", HV, 1, Kg}, w->s.out.dg, w->t.out.dg, g);
    if (p->beta) judge_beta_bwd(w, &r);
    judge_head_sums(w, A, B);
}

/* ---- gradients of a chunk -------------------------------------------------------------------- */

/* Gradients of the activated inputs in the order of judgement: dv, dbeta (wy_bwd), then dq, dk, dg
 * (intra_bwd). Value heads of a group are summed in dq and dk, channels in dg of GDN. With erase
 * and write in place of beta: the gradients of write o v and of erase o k. With lr_a and lr_b: of
 * the values and of the erasing parts of both keys of a token. */
typedef struct {
    dp_result_id id;
    dp_stage stage;
    size_t offset; /* of its array in dp_sim */
    int by_key;    /* 1: each key is a row, though the tensor holds a token's keys side by side */
    int given;     /* 1: gate_bwd starts from it */
    unsigned only; /* as of an input */
} grad_row;
#define GRAD(ID, STAGE, FIELD) .id = ID, .stage = STAGE, .offset = offsetof(dp_sim, FIELD)
#define OWN_WRITES (1u << DP_BY_GATES | 1u << DP_BY_FACTORS | 1u << DP_BY_ROWS)
static const grad_row GRADS[] = {
    {GRAD(DP_RESULT_DV, DP_STAGE_WY_BWD, out.dv), .only = 1u << DP_BY_BETA | 1u << DP_BY_NOTHING},
    {GRAD(DP_RESULT_DBETA, DP_STAGE_WY_BWD, dbeta), .by_key = 1, .given = 1,
     .only = 1u << DP_BY_BETA},
    {GRAD(DP_RESULT_DWRITE, DP_STAGE_WY_BWD, dvalues), .given = 1, .only = OWN_WRITES},
    {GRAD(DP_RESULT_DERASE, DP_STAGE_INTRA_BWD, derasing), .given = 1, .only = OWN_WRITES},
    {GRAD(DP_RESULT_DQ, DP_STAGE_INTRA_BWD, dq), .given = 1},
    {GRAD(DP_RESULT_DK, DP_STAGE_INTRA_BWD, dk), .given = 1},
    {GRAD(DP_RESULT_DG, DP_STAGE_INTRA_BWD, dg), .given = 1}};
#define NGRADS ((int)(sizeof GRADS / sizeof *GRADS))

static double *array_of(const dp_sim *s, const grad_row *g) {
    return *(double *const *)((const char *)s + g->offset);
}

static int is_of(const dp_problem *p, const grad_row *g) {
    return !g->only || g->only >> dp_model_of(p)->strength & 1;
}

/* rows of [T][heads][per][n] */
static dp_bisect_rows rows_of(const dp_problem *p, const grad_row *g) {
    const dp_tensor_field *f = &dp_result_fields[g->id];
    int64_t rows, width;
    if (dp_by_rows(p) && g->id != DP_RESULT_DQ && g->id != DP_RESULT_DG)
        return (dp_bisect_rows){f->name, p->HV, dp_rows(p),
                                g->id == DP_RESULT_DWRITE ? p->V : p->K};
    dp_result_shape(p, g->id, &rows, &width);
    if (g->by_key) return (dp_bisect_rows){f->name, dp_result_heads(p, g->id), p->R, 1};
    return (dp_bisect_rows){f->name, dp_result_heads(p, g->id), dp_result_rows_per_token(p, g->id),
                            (int)width};
}

/* dg of one token, from its channels. */
static double dg_bound(const dp_bisect_work *w, const double *dg, const double *vdg) {
    const dp_rounding *r = &w->r;
    const int K = w->p->K;
    double sum = 0, abs = 0, each = 0;
    for (int k = 0; k < K; k++) {
        sum += dg[k];
        abs += fabs(vdg[k]);
        each += dp_pw(r, r->u * vdg[k]);
    }
    return sum + each + (dp_Kg(w->p) == 1 ? dp_pw(r, dp_sum_error(r, K) * abs) : 0);
}

/* Adds a chunk's to the bounds [by result] of all rows. */
static void add_chunk(const dp_bisect_work *w, const dp_bisect_chunk *c, const dp_grad_bound *b,
                      double *const *o) {
    const dp_problem *p = w->p;
    const dp_rounding *r = &w->r;
    const int R = dp_rows(p), G = dp_G(p), h = c->hv / G;
    for (int t = 0; t < c->ref->c; t++) {
        const int64_t tok = c->at.token + t;
        o[DP_RESULT_DQ][tok * p->H + h] += b->dq[t] + dp_pw(r, G * r->u * b->ndq[t]);
        o[DP_RESULT_DG][tok * p->HV + c->hv] = dg_bound(w, b->dg + t * p->K, b->vdg + t * p->K);
    }
    for (int i = 0; i < c->ref->n; i++) {
        const int64_t tok = c->at.token + i / R, row = (tok * p->HV + c->hv) * R + i % R;
        o[DP_RESULT_DK][(tok * p->H + h) * R + i % R] += b->dk[i] + dp_pw(r, G * r->u * b->ndk[i]);
        if (b->ederasing) {
            o[DP_RESULT_DWRITE][row] = b->dv[i];
            for (int x = 0; x < p->K; x++)
                o[DP_RESULT_DERASE][row] += b->ederasing[(int64_t)i * p->K + x];
            continue;
        }
        o[DP_RESULT_DV][row] = b->dv[i] + dp_pw(r, (r->u + r->us) * b->ndv[i]);
        if (dp_has_beta(p)) o[DP_RESULT_DBETA][row] = b->dbeta[i];
    }
}

static void grad_bounds(dp_bisect_work *w, double *const *o) {
    const dp_problem *p = w->p;
    DP_OWN double *e = bisect_zeros_state(w),
                  *DX = dp_doubles((int64_t)DP_CHUNK * dp_rows(p) * p->V),
                  *dout = dp_doubles((int64_t)DP_CHUNK * p->V);
    FOR_CHUNKS(c) {
        double *all;
        dp_grad_bound b =
            dp_grad_bound_new(c.ref->c, c.ref->n, p->K, p->V, 0, w->ref.values != NULL, &all);
        dp_sim_gather_do(&w->ref, c.g, c.hv, dout);
        dp_bound_grads(c.own, dout, e, e, DX, DX, &b);
        add_chunk(w, &c, &b, o);
        free(all);
    }
}

/* Judges stages wy_bwd and intra_bwd. */
static void bisect_stage_grads(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    double *bound[DP_NRESULTS] = {NULL};
    for (int i = 0; i < NGRADS; i++) {
        const dp_bisect_rows x = rows_of(p, &GRADS[i]);
        if (is_of(p, &GRADS[i])) bound[GRADS[i].id] = dp_doubles(p->T * x.heads * x.per);
    }
    grad_bounds(w, bound);
    for (int i = 0; i < NGRADS; i++) {
        if (!is_of(p, &GRADS[i])) continue;
        w->stage = GRADS[i].stage;
        bisect_judge_tokens(w, rows_of(p, &GRADS[i]), array_of(&w->s, &GRADS[i]),
                            array_of(&w->t, &GRADS[i]), bound[GRADS[i].id]);
    }
    for (int i = 0; i < NGRADS; i++) {
        const dp_bisect_rows x = rows_of(p, &GRADS[i]);
        if (GRADS[i].given && is_of(p, &GRADS[i]))
            bisect_give(w, array_of(&w->s, &GRADS[i]), array_of(&w->t, &GRADS[i]),
                        array_of(&w->ref, &GRADS[i]), p->T * x.heads * x.per * x.n,
                        DP_BISECT_ARITH);
        free(bound[GRADS[i].id]);
    }
}

/* ---- pre-process and merge ------------------------------------------------------------------- */

/* The two parts of a state's error as one [K][V] of squares, in place. */
static const double *entries(const dp_bisect_work *w, double *e) {
    const int64_t KV = (int64_t)w->p->K * w->p->V;
    for (int64_t i = 0; i < KV; i++) {
        e[i] += e[KV + i];
        e[KV + i] = 0;
    }
    return e;
}

static void judge_M(dp_bisect_work *w, int back, int r, int hv, int sub, const double *got,
                    const double *want) {
    const int K = w->p->K, *first = w->ref.first[r];
    const dp_error_bound_base own = own_bounds(w);
    const dp_chain_span span = {first[sub], first[sub + 1], hv, back, w->s.chain};
    const dp_chain_error e = dp_chain_error_of(&own, span, NULL);
    for (int x = 0; x < K; x++)
        bisect_judge(w, back ? "dM" : "M", bisect_rank_place(w, r, hv, sub), x, K,
                     got + (int64_t)x * K, want + (int64_t)x * K, e.b + (int64_t)x * K,
                     e.bias * DP_LAMBDA);
    free(e.b);
}

static void judge_H(dp_bisect_work *w, int back, int r, int hv, int sub, const double *got,
                    const double *want) {
    const dp_error_bound_base own = own_bounds(w);
    DP_OWN double *e = dp_error_bound_H(&own, back, r, hv);
    bisect_judge_rows(w, back ? "dH" : "H", bisect_rank_place(w, r, hv, sub), 0, w->p->K, w->p->V,
                      got, want, entries(w, e));
}

/* Judges stage pre_fwd or pre_bwd. */
static void bisect_stage_pre(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    const int HV = p->HV, N = w->ref.N, backward = dp_stage_is_backward(w->stage);
    const int of[] = {backward ? DP_RANK_DM : DP_RANK_M, backward ? DP_RANK_DH : DP_RANK_H};
    for (int what = 0; what < 2; what++)
        for (int k = 0; k < N; k++)
            for (int hv = 0; hv < HV; hv++) {
                const int r = backward ? N - 1 - k : k, i = r * HV + hv,
                          sub = backward ? 0 : w->ref.ctx[r].nlocal - 1;
                if (w->t.rank[of[0]][i])
                    (what ? judge_H : judge_M)(w, backward, r, hv, sub, w->s.rank[of[what]][i],
                                               w->t.rank[of[what]][i]);
            }
    bisect_give_ranks(w, of[0]);
    bisect_give_ranks(w, of[1]);
}

/* The roundings of the exchange itself: pairs, and the inputs of passes, are without error. */
static double **exchange_errors(const dp_bisect_work *w, int dir) {
    const int64_t n = (int64_t)w->ref.N * w->p->HV;
    DP_OWN dp_chain_error *bM = dp_calloc((size_t)n, sizeof *bM);
    double **eH = dp_calloc((size_t)n, sizeof *eH);
    const dp_error_bound_base own = own_bounds(w);
    for (int64_t i = 0; i < n; i++) {
        bM[i].b = dp_doubles(dp_chain_error_size(&w->r, w->p->K));
        eH[i] = bisect_zeros_state(w);
    }
    double **e = dp_exchange_errors(&own, dir, w->s.chain, bM, eH, NULL);
    for (int64_t i = 0; i < n; i++)
        free(bM[i].b);
    dp_free_list(eH, n);
    return e;
}

/* Judges stage merge_fwd or merge_bwd. */
static void bisect_stage_merge(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    const int HV = p->HV, N = w->ref.N, backward = dp_stage_is_backward(w->stage),
              which = backward ? DP_RANK_DS_OUT : DP_RANK_S_IN;
    double **e = exchange_errors(w, backward ? -1 : 1);
    for (int k = 0; k < N; k++)
        for (int hv = 0; hv < HV; hv++) {
            const int r = backward ? N - 1 - k : k, i = r * HV + hv;
            if (!e[i]) continue;
            const int sub = backward ? w->ref.ctx[r].nlocal - 1 : 0;
            bisect_judge_rows(w, dp_rank_name(which), bisect_rank_place(w, r, hv, sub), 0, p->K,
                              p->V, w->s.rank[which][i], w->t.rank[which][i], entries(w, e[i]));
        }
    bisect_give_ranks(w, which);
    dp_free_list(e, (int64_t)N * HV);
}

/* ---- state, output --------------------------------------------------------------------------- */

/* D [n][V] += squares of (a [n][K]) (error e of a state) */
static void through(const dp_bisect_work *w, const double *a, int n, const double *e, double *D) {
    const int K = w->p->K, V = w->p->V;
    for (int i = 0; i < n; i++)
        for (int x = 0; x < K; x++) {
            const double a2 = a[(int64_t)i * K + x] * a[(int64_t)i * K + x];
            for (int v = 0; a2 > 0 && v < V; v++)
                D[(int64_t)i * V + v] += a2 * (e[(int64_t)x * V + v] + e[((int64_t)K + x) * V + v]);
        }
}

/* Judges stage state_fwd, its recomputation in the backward, or state_bwd. */
static void bisect_stage_state(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    const int K = p->K, V = p->V, recompute = w->stage == DP_STAGE_RECOMPUTE,
              back = dp_stage_is_backward(w->stage) && !recompute;
    const int64_t KV = (int64_t)K * V, size = dp_state_error_size(&w->r, K, V);
    const dp_error_bound_base own = own_bounds(w);
    const dp_chunk_array h = back ? DP_OF_CHUNK_dh : DP_OF_CHUNK_h,
                         x = back ? DP_OF_CHUNK_dv_new : DP_OF_CHUNK_v_new;
    const dp_result_id last = back ? DP_RESULT_DS0 : DP_RESULT_FINAL_STATE;
    const double *last_s = w->s.out.out[last], *last_t = w->t.out.out[last];
    DP_OWN double *all = dp_doubles((int64_t)w->ref.ngroup * p->HV * size);
    FOR_CHUNKS_IN(c, back) { /* the error that enters each chunk, and behind the last one */
        const int r = c.at.rank, sub = w->ref.group[c.g].sub, next_g = c.g + (back ? -1 : 1);
        const int inside = next_g >= w->ref.first[r][sub] && next_g < w->ref.first[r][sub + 1];
        double *e = all + ((int64_t)c.g * p->HV + c.hv) * size;
        DP_OWN double *next = dp_copy(e, size), *DX = dp_doubles((int64_t)c.ref->n * V);
        bisect_judge_rows(w, back ? "dh" : "h", c.at, 0, K, V, c.s->array[h], c.t->array[h],
                          entries(w, e));
        dp_error_bound_step(&own, back, c.g, c.hv, NULL, next, DX);
        through(w, back ? c.ref->kg : c.ref->w, c.ref->n, e, DX);
        bisect_judge_rows(w, back ? "dv_new" : "v_new", c.at, dp_rows(p), c.ref->n, V,
                          c.s->array[x], c.t->array[x], DX);
        if (inside)
            memcpy(all + ((int64_t)next_g * p->HV + c.hv) * size, next,
                   sizeof(double) * (size_t)size);
        else if (!recompute && last_s &&
                 (back ? dp_sim_starts_here : dp_sim_ends_here)(&w->ref, r, sub)) {
            const int64_t z = (c.at.sequence * (int64_t)p->HV + c.hv) * KV;
            bisect_judge_rows(w, dp_result_fields[last].name, c.at, 0, K, V, last_s + z, last_t + z,
                              entries(w, next));
        }
    }
    FOR_CHUNKS(c) {
        give_array(w, &c, h, DP_BISECT_ARITH);
        give_array(w, &c, x, DP_BISECT_STORE);
    }
}

static void bisect_stage_output(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    DP_OWN double *e = bisect_zeros_state(w),
                  *DX = dp_doubles((int64_t)DP_CHUNK * dp_rows(p) * p->V);
    double row[DP_CHUNK];
    FOR_CHUNKS(c) {
        dp_bound_output(c.own, e, DX, row);
        for (int t = 0; t < c.ref->c; t++) {
            const int64_t z = ((c.at.token + t) * p->HV + c.hv) * p->V;
            dp_place at = c.at;
            at.token += t;
            bisect_judge(w, "o", at, -1, p->V, w->s.out.o + z, w->t.out.o + z, NULL,
                         DP_LAMBDA * sqrt(row[t]));
        }
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* dv_local = Aqk' do: (uo |Aqk|)^2 |do|^2 + (sum_error |Aqk|'|do|)^2 + (us dv_local)^2 */
static void bisect_stage_dAv(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    const int V = p->V;
    DP_OWN double *dout = dp_doubles((int64_t)DP_CHUNK * V);
    FOR_CHUNKS(c) {
        const int n = c.ref->n, m = c.ref->c;
        DP_OWN double *D = dp_doubles((int64_t)n * V);
        dp_sim_gather_do(&w->ref, c.g, c.hv, dout);
        for (int i = 0; i < n; i++)
            for (int v = 0; v < V; v++) {
                double abs = 0, sq = 0;
                for (int t = 0; t < m; t++) {
                    const double x =
                        fabs(c.ref->Aqk[(int64_t)t * n + i] * dout[(int64_t)t * V + v]);
                    abs += x;
                    sq += x * x;
                }
                const double sum = dp_sum_error(&w->r, m) * abs,
                             store = (w->r.us + w->r.u) * c.ref->dv_local[(int64_t)i * V + v],
                             tiny = (m + 1) * w->r.tiny;
                D[(int64_t)i * V + v] =
                    w->r.uo * w->r.uo * sq + sum * sum + store * store + tiny * tiny;
            }
        bisect_judge_rows(w, "dv_local", c.at, dp_rows(p), n, V, c.s->dv_local, c.t->dv_local, D);
    }
    FOR_CHUNKS(c) GIVE(dv_local, STORE);
}

static void bisect_stage_with_last(DP_UNUSED dp_bisect_work *w) {} /* with the stage before it */

/* Judges w->stage, on true inputs. */
static void bisect_judge_stage(dp_bisect_work *w) {
    switch (w->stage) {
#define ROW(ID, NAME, SENDS, JUDGED, ...) \
    case DP_STAGE_##ID:                   \
        bisect_stage_##JUDGED(w);         \
        break;
#include "ref/chunk/stages.inc"
    default: assert(0);
    }
}

static void bounds(dp_bisect_work *w) {
    const int64_t n = (int64_t)w->ref.ngroup * w->p->HV;
    w->intra = dp_calloc((size_t)n, sizeof *w->intra);
    w->own = dp_calloc((size_t)n, sizeof *w->own);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; i++) {
        const dp_input_error exact = {0};
        dp_chunk_inverse(&w->ref.ch[i]);
        dp_bound_intra(&w->intra[i], &w->ref.ch[i], w->r, &exact);
        dp_bound_own(&w->own[i], &w->ref.ch[i], w->r);
    }
}

/* Does the subject cut its tokens into the chunks that they must be cut into? If not, no later
 * stage can be compared. */
static int same_chunks(dp_bisect_work *w) {
    const int n = w->ref.ngroup < w->s.ngroup ? w->ref.ngroup : w->s.ngroup;
    w->stage = DP_STAGE_INTRA;
    for (int g = 0; g < n; g++) {
        const dp_group *a = &w->s.group[g], *b = &w->ref.group[g];
        const double got[2] = {(double)a->t0, a->c}, want[2] = {(double)b->t0, b->c};
        bisect_judge(w, "chunks", bisect_chunk_place(w, g, -1), -1, 2, got, want, NULL, 0);
    }
    if (w->ref.ngroup > n)
        bisect_judge(w, "chunks", bisect_chunk_place(w, n, -1), -1, 1, &(double){NAN},
                     &(double){(double)w->ref.group[n].t0}, NULL, 0);
    dp_bisect_row *x = &w->out->stage[DP_STAGE_INTRA];
    const int same = !x->fails;
    if (same) {
        x->judged = 0;
        x->tensor[0] = 0;
        w->first[DP_STAGE_INTRA].n = 0;
    }
    return same;
}

/* Frees what bisect_work_new made. */
static void bisect_work_free(dp_bisect_work *w) {
    const int64_t n = (int64_t)w->ref.ngroup * w->p->HV;
    for (int64_t i = 0; w->own && i < n; i++) {
        dp_bound_free(&w->intra[i]);
        dp_bound_free(&w->own[i]);
    }
    free(w->intra);
    free(w->own);
    for (int i = 0; i < DP_NSTAGES; i++)
        free(w->first[i].hash);
    dp_sim_free(&w->s);
    dp_sim_free(&w->t);
    dp_sim_free(&w->ref);
}

/* by_inverse: even if the fault does not ask for it. */
static dp_status bisect_work_new(dp_bisect_work *w, const dp_problem *p, const dp_sim_policy *how,
                                 int by_inverse, dp_err *e) {
    const dp_exchange merge = dp_fault_exchange(how->fault, how->merge);
    const int shared = merge == DP_EXCHANGE_HEADS, N = shared ? 1 : how->N;
    w->p = p;
    w->base = how->base;
    w->r = dp_rounding_of(how->base, 2);
    dp_status st = dp_sim_new(&w->ref, p, DP_BASE_FP64, N, DP_FAULT_NONE, e);
    if (st) return st;
    st = dp_sim_new(&w->t, p, DP_BASE_FP64, N, DP_FAULT_NONE, e);
    if (!st) st = dp_sim_new(&w->s, p, how->base, N, how->fault, e);
    assert(!st);
    w->s.by_inverse |= by_inverse;
    w->t.by_inverse = w->s.by_inverse;
    w->r.inverse |= w->s.by_inverse;
    dp_sim_run(&w->ref, DP_FP64, DP_EXCHANGE_ALLGATHER, how->backward);
    if (shared) w->s.sharers = how->N;
    w->s.payload = shared ? DP_PAYLOAD_FULL : dp_fault_payload(how->fault, how->payload);
    dp_sim_begin(&w->t, DP_FP64, shared ? DP_EXCHANGE_ALLGATHER : merge, how->backward);
    dp_sim_begin(&w->s, how->chain, shared ? DP_EXCHANGE_ALLGATHER : merge, how->backward);
    bounds(w);
    return st;
}

dp_problem dp_bisect_owned(const dp_problem *p, dp_own kind, int ranks, int *parts) {
    dp_problem q = *p;
    *parts = ranks;
    if (!kind) return q;
    q.own = (dp_owners){kind, ranks};
    *parts = dp_own_parts(kind, p->T, ranks);
    return q;
}

/* All stages, then both convolutions. */
static dp_bisect_row *bisect_row_at(dp_bisect *b, int i) {
    return i < DP_NSTAGES ? &b->stage[i] : &b->conv[i - DP_NSTAGES];
}

dp_status dp_bisect_sim(const dp_problem *p, const dp_sim_policy *how, int runs, int all,
                        dp_bisect *out, dp_err *e) {
    const int N = how->N;
    dp_bisect_work w = {.out = out};
    *out = (dp_bisect){.first = -1, .N = N, .HV = p->HV};
    const dp_status st = bisect_work_new(&w, p, how, 0, e);
    if (st) return st;
    for (int i = 0; i < DP_NSTAGES + 2; i++) {
        bisect_row_at(out, i)->rank = dp_calloc((size_t)N, 1);
        bisect_row_at(out, i)->head = dp_calloc((size_t)p->HV, 1);
    }
    const int64_t nch = (int64_t)w.ref.ngroup * p->HV;
    const int last = same_chunks(&w) ? dp_stages_of(how->backward) : 0;
    for (int i = 0; i < last; i++) {
        if (i == DP_STAGE_PRE_FWD)
            for (int64_t z = 0; z < nch; z++)
                dp_bound_exact(&w.own[z]);
        for (w.run = 0; w.run < runs; w.run++) {
            w.stage = i;
            w.s.runs = w.run;
            w.first[i].at = 0;
            w.first[i + (i == DP_STAGE_WY_BWD)].at = 0;
            dp_sim_stage(&w.s, w.stage);
            dp_sim_stage(&w.t, w.stage);
            bisect_judge_stage(&w);
        }
        if (out->stage[i].fails && !all) break;
    }
    for (int i = DP_NSTAGES - 1; i >= 0; i--) {
        dp_bisect_row *x = &out->stage[i];
        if (x->fails) out->first = i;
        if (w.s.sharers) x->first.at.rank = -1; /* who has a head, not who has a token */
        for (int r = 0; r < N; r++)
            x->nrank += x->rank[r];
        for (int h = 0; h < p->HV; h++)
            x->nhead += x->head[h];
    }
    bisect_work_free(&w);
    return DP_OK;
}

const char *const dp_bisect_conv_names[2] = {"conv_fwd", "conv_bwd"};

const dp_bisect_row *dp_bisect_first(const dp_bisect *b, const char **name) {
    const int conv = b->conv[0].fails ? 0 : b->first < 0 && b->conv[1].fails ? 1 : -1;
    *name = conv >= 0       ? dp_bisect_conv_names[conv]
            : b->first >= 0 ? dp_stage_names[b->first]
                            : NULL;
    return conv >= 0 ? &b->conv[conv] : b->first >= 0 ? &b->stage[b->first] : NULL;
}

void dp_bisect_free(dp_bisect *b) {
    for (int i = 0; i < DP_NSTAGES + 2; i++) {
        free(bisect_row_at(b, i)->rank);
        free(bisect_row_at(b, i)->head);
    }
    *b = (dp_bisect){.first = -1};
}

/* ---- against draws --------------------------------------------------------------------------- */

static void run_tallied(dp_bisect_work *w, int backward) {
    const int64_t nch = (int64_t)w->ref.ngroup * w->p->HV;
    for (int i = 0; i < dp_stages_of(backward); i++) {
        if (i == DP_STAGE_PRE_FWD)
            for (int64_t z = 0; z < nch; z++)
                dp_bound_exact(&w->own[z]);
        w->stage = i;
        dp_sim_stage(&w->s, w->stage);
        dp_sim_stage(&w->t, w->stage);
        bisect_judge_stage(w);
    }
}

/* One rounding of what stands there, and of the head's typical row: where rows cancel to nothing
 * that is no error. */
static double *floors(const dp_bisect_tally *t, int HV) {
    double *f = dp_doubles(t->n);
    for (int h = 0; h < HV; h++) {
        double want = 0, rows = 0;
        for (int64_t i = h; i < t->n; i += HV) {
            want += t->want2[i];
            rows += t->rows[i];
        }
        for (int64_t i = h; i < t->n; i += HV)
            f[i] = 0x1p-48 * (t->want2[i] + (rows > 0 ? want / rows * t->rows[i] : 0)) +
                   0x1p-200 * t->rows[i];
    }
    return f;
}

/* The draws of a stage's tensor: each cell is a row and a window of its own. */
static void hold(const dp_bisect_tally *t, int ndraw, int HV, dp_bisect *out) {
    dp_bisect_row *x = &out->stage[t->stage];
    DP_OWN double *floor2 = floors(t, HV);
    DP_OWN int32_t *unit = dp_calloc((size_t)t->n, sizeof *unit),
                   *window = dp_calloc((size_t)t->n, sizeof *window);
    dp_levels_result ex;
    for (int64_t i = 0; i < t->n; i++) {
        unit[i] = (t->worst[i].at.rank > 0 ? t->worst[i].at.rank : 0) * HV + (int)(i % HV);
        window[i] = t->rows[i] > 0 ? (int32_t)i : -1;
    }
    const dp_draws draws = {
        .ndraw = ndraw, .rows = t->n, .windows = t->n, .width = 1, .err2 = t->e2};
    const dp_levels_in in = {.draws = &draws,
                             .err2 = t->err2,
                             .want2 = t->want2,
                             .floor2 = floor2,
                             .rows = t->rows,
                             .window = window,
                             .unit = unit,
                             .heads = HV,
                             .units = out->N * HV,
                             .allowance = {1.2, 1.2, 0}};
    dp_levels_judge(&in, &ex);
    if (ex.excess > 1 && !x->fails && ex.row >= 0) {
        const dp_bisect_entry *r = &t->worst[ex.row];
        const dp_level_result *l = &ex.at[ex.level];
        snprintf(x->tensor, sizeof x->tensor, "%s", t->name);
        x->fails = x->expected = 1;
        x->ratio = l->ratio;
        x->first = *r;
        x->first.limit = l->limit;
        if (r->at.rank >= 0) {
            x->rank[r->at.rank] = 1;
            x->nrank = 1;
        }
        if (r->at.head >= 0) {
            x->head[r->at.head] = 1;
            x->nhead = 1;
        }
    }
}

dp_status dp_bisect_expected(const dp_problem *p, const dp_sim_policy *how, dp_format dtype,
                             dp_bisect *out, dp_err *e) {
    dp_sim_policy right = *how;
    dp_bisect_tallies tal = {.draw = -1, .ndraw = dp_expected_count(p)};
    dp_bisect_work w = {.out = out, .tal = &tal};
    right.merge = dp_fault_exchange(how->fault, how->merge);
    right.payload = dp_fault_payload(how->fault, how->payload);
    right.fault = DP_FAULT_NONE;
    if (how->base == DP_BASE_FP64 || out->first >= 0) return DP_OK;
    const dp_status st = bisect_work_new(&w, p, how, 0, e);
    if (st) return st;
    const int by_inverse = w.s.by_inverse, same = w.s.ngroup == w.ref.ngroup;
    if (same) run_tallied(&w, how->backward);
    bisect_work_free(&w);
    for (int d = 0; d < tal.ndraw && same; d++) {
        dp_problem y = dp_nearby_problem(p, &(dp_mover){(uint64_t)d, dtype, dtype});
        dp_bisect_work one = {.out = out, .tal = &tal};
        tal.draw = d;
        if (!bisect_work_new(&one, &y, &right, by_inverse, e)) {
            run_tallied(&one, how->backward);
            bisect_work_free(&one);
        }
        dp_problem_free(&y);
    }
    for (int i = 0; i < tal.n; i++) {
        hold(&tal.t[i], tal.ndraw, p->HV, out);
        DP_FREE(tal.t[i].e2, tal.t[i].err2, tal.t[i].want2, tal.t[i].rows, tal.t[i].worst);
    }
    for (int i = DP_NSTAGES - 1; i >= 0; i--)
        if (out->stage[i].fails) out->first = i;
    return DP_OK;
}
