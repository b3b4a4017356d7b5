#include "bisect.h"
#include "harness/bound/error_bound.h"
#include "harness/verdict/expected.h"
#include "ref/arithmetic/mm.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* Errors of one tensor by cell: a chunk and head, a rank and head, a head. */
typedef struct {
    dp_place at;
    int row, index;
    double got, want, err;
} worst_row;
typedef struct {
    char name[16];
    int stage;
    int64_t n;
    double *e2, *err2, *want2, *rows;
    worst_row *worst;
} tally; /* e2 [draws][n] */
typedef struct {
    int draw, ndraw, n;
    tally t[64];
} tallies; /* draw: the one that is running, -1: the subject */

typedef struct {
    const dp_problem *p;
    dp_base base;
    dp_rounding r;    /* p = 2 */
    dp_sim s, t, ref; /* the subject; the same stages in fp64 on the subject's inputs; the whole
                         pipeline in fp64 */
    dp_chunk_bound *intra, *own; /* [ngroup][HV] */
    dp_bisect *out;
    dp_stage stage;
    int run;
    tallies *tal; /* NULL: rows are held against their budgets */
    struct {
        int64_t n, cap, at;
        uint64_t *hash;
    } first[DP_NSTAGES]; /* the rows of the first run, in the order of judgement */
} work;

/* Is this row what it was in the first run? */
static int steady(work *w, int n, const double *got) {
    const uint64_t h = XXH3_64bits(got, sizeof *got * (size_t)n);
    if (w->run)
        return w->first[w->stage].at >= w->first[w->stage].n ||
               w->first[w->stage].hash[w->first[w->stage].at++] == h;
    if (w->first[w->stage].n == w->first[w->stage].cap) {
        w->first[w->stage].cap = w->first[w->stage].cap ? 2 * w->first[w->stage].cap : 1024;
        w->first[w->stage].hash =
            realloc(w->first[w->stage].hash, sizeof h * (size_t)w->first[w->stage].cap);
        if (!w->first[w->stage].hash) abort();
    }
    w->first[w->stage].hash[w->first[w->stage].n++] = h;
    return 1;
}

/* ---- one row --------------------------------------------------------------------------------- */

static tally *tally_of(work *w, const char *tensor) {
    tallies *x = w->tal;
    for (int i = x->n - 1; i >= 0; i--)
        if (x->t[i].stage == (int)w->stage && !strcmp(x->t[i].name, tensor)) return &x->t[i];
    assert(x->n < (int)(sizeof x->t / sizeof *x->t));
    tally *t = &x->t[x->n++];
    *t = (tally){.stage = (int)w->stage,
                 .n = (int64_t)(w->ref.ngroup > w->ref.N ? w->ref.ngroup : w->ref.N) * w->p->HV};
    snprintf(t->name, sizeof t->name, "%s", tensor);
    t->e2 = dp_doubles(t->n * x->ndraw);
    t->err2 = dp_doubles(t->n);
    t->want2 = dp_doubles(t->n);
    t->rows = dp_doubles(t->n);
    t->worst = dp_calloc((size_t)t->n, sizeof *t->worst);
    return t;
}

static void count(work *w, const char *tensor, const dp_place *at, int row, int n,
                  const double *got, const double *want) {
    tally *t = tally_of(w, tensor);
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
        t->worst[cell] = (worst_row){*at, row, index, got[index], want[index], sqrt(e2)};
}

/* D [n]: squares of the entries' errors, NULL: none; more: on top of the row's bound. Rows come in
 * the order of execution. */
static void judge(work *w, const char *tensor, dp_place at, int row, int n, const double *got,
                  const double *want, const double *D, double more) {
    dp_bisect_row *x = &w->out->stage[w->stage];
    double d2 = 0, e2 = 0, top = -1, scale = 0;
    int index = 0;
    if (w->tal) {
        count(w, tensor, &at, row, n, got, want);
        return;
    }
    const int differs = !steady(w, n, got);
    for (int i = 0; i < n; i++) {
        if (!isfinite(want[i]) && !differs) {
            x->skipped += !w->run;
            return;
        }
        const double e = fabs(got[i] - want[i]);
        if (!(e <= top)) {
            top = e;
            index = i;
        }
        if (isnan(e)) break;
        scale = fmax(scale, e);
    }
    for (int i = 0; i < n; i++) {
        e2 += scale > 0 ? ((got[i] - want[i]) / scale) * ((got[i] - want[i]) / scale) : 0;
        d2 += D ? D[i] : 0;
    }
    const double err = isnan(top) ? NAN : scale * sqrt(e2), budget = DP_LAMBDA * sqrt(d2) + more;
    if (isnan(budget) && !differs) { /* beside an infinite or NaN input of its chunk: nothing bounds
                                        it, as in compare.h */
        x->skipped += !w->run;
        return;
    }
    const double ratio = err == 0 ? 0 : err / budget;
    const int bad = !(err <= budget) || differs;
    x->judged += !w->run;
    if (!x->tensor[0]) snprintf(x->tensor, sizeof x->tensor, "%s", tensor);
    if (x->fails && strcmp(x->tensor, tensor))
        return; /* the stage's first failing tensor is the one to report */
    if (!bad) {
        if (!x->fails && ratio >= x->ratio) {
            x->ratio = ratio;
            snprintf(x->tensor, sizeof x->tensor, "%s", tensor);
        }
        return;
    }
    if (!x->fails) {
        snprintf(x->tensor, sizeof x->tensor, "%s", tensor);
        x->at = at;
        x->row = row;
        x->index = index;
        x->got = got[index];
        x->want = want[index];
        x->err = err;
        x->budget = budget;
        x->ratio = ratio;
        x->run = w->run;
    }
    x->fails++;
    x->unsteady += differs;
    if (!(ratio <= x->ratio)) x->ratio = ratio;
    if (at.rank >= 0) x->rank[at.rank] = 1;
    if (at.head >= 0) x->head[at.head] = 1;
}

static void judge_rows(work *w, const char *tensor, dp_place at, int tokens_R, int rows, int n,
                       const double *got, const double *want, const double *D) {
    const int64_t t0 = at.token;
    for (int i = 0; i < rows; i++) {
        if (tokens_R) at.token = t0 + i / tokens_R;
        judge(w, tensor, at,
              tokens_R == 1 ? -1
              : tokens_R    ? i % tokens_R
                            : i,
              n, got + (int64_t)i * n, want + (int64_t)i * n, D ? D + (int64_t)i * n : NULL, 0);
    }
}

static dp_place chunk_place(const work *w, int g, int hv) {
    const dp_group *gr = &w->ref.group[g];
    return (dp_place){.rank = gr->rank,
                      .head = hv,
                      .sequence = w->ref.ctx[gr->rank].local_seq[gr->sub],
                      .chunk = g,
                      .token = gr->t0};
}

/* A state or M of a whole rank: before (dir > 0: of its first, after: of its last) token. */
static dp_place rank_place(const work *w, int r, int hv, int sub) {
    return (dp_place){
        .rank = r, .head = hv, .sequence = w->ref.ctx[r].local_seq[sub], .chunk = -1, .token = -1};
}

/* ---- copying true values into subject and twin ----------------------------------------------- */

enum { ARITH, STORE };
static void give(work *w, double *s, double *t, const double *ref, int64_t n, int how) {
    for (int64_t i = 0; i < n; i++)
        s[i] = t[i] =
            how == STORE ? dp_round_store(w->base, ref[i]) : dp_round_arith(w->base, ref[i]);
}

static void give_list(work *w, double **s, double **t, double *const *ref, int64_t n) {
    for (int i = 0; i < w->ref.N * w->p->HV; i++)
        if (s[i] && t[i] && ref[i]) give(w, s[i], t[i], ref[i], n, ARITH);
}

typedef struct {
    dp_chunk *s, *t, *ref;
    dp_chunk_bound *intra, *own;
    dp_place at;
    int g, hv;
} chunk;

static chunk chunk_of(work *w, int g, int hv) {
    const int64_t z = (int64_t)g * w->p->HV + hv;
    return (chunk){dp_sim_chunk(&w->s, g, hv),
                   dp_sim_chunk(&w->t, g, hv),
                   dp_sim_chunk(&w->ref, g, hv),
                   &w->intra[z],
                   &w->own[z],
                   chunk_place(w, g, hv),
                   g,
                   hv};
}

#define FOR_CHUNKS(C)                            \
    for (int g_ = 0; g_ < w->ref.ngroup; g_++)   \
        for (int hv_ = 0; hv_ < w->p->HV; hv_++) \
            for (chunk C = chunk_of(w, g_, hv_), *once_ = &C; once_; once_ = NULL)
#define FOR_CHUNKS_BACK(C)                          \
    for (int g_ = w->ref.ngroup - 1; g_ >= 0; g_--) \
        for (int hv_ = 0; hv_ < w->p->HV; hv_++)    \
            for (chunk C = chunk_of(w, g_, hv_), *once_ = &C; once_; once_ = NULL)

/* ---- gate ------------------------------------------------------------------------------------ */

static void stage_gate(work *w) {
    const dp_problem *p = w->p;
    const dp_rounding r = dp_rounding_of(w->base, 1);
    const dp_input_error in = dp_error_bound_inputs(p, w->base, &r);
    const int Kg = dp_Kg(p), store = p->l2norm && w->base == DP_BASE_BF16 ? STORE : ARITH;
    const int64_t L = p->T / w->ref.N;
    double *bound = dp_doubles(Kg);
    for (int r_ = 0, g = 0; r_ < w->ref.N; r_++)
        for (int64_t t = r_ * L; t < (r_ + 1) * L; t++) {
            while (g + 1 < w->ref.ngroup && w->ref.group[g + 1].t0 <= t)
                g++;
            dp_place at = chunk_place(w, g, 0);
            at.token = t;
            for (int h = 0; h < p->H; h++) {
                const int64_t iq = (t * p->H + h) * p->K;
                at.head = h;
                judge(w, "q", at, -1, p->K, w->s.q + iq, w->t.q + iq, NULL,
                      (in.q + in.qk_row) * dp_norm_fro(p->K, w->t.q + iq) + p->K * r.tiny);
                for (int j = 0; j < p->R; j++) {
                    const int64_t ik = iq * p->R + (int64_t)j * p->K;
                    judge(w, "k", at, p->R > 1 ? j : -1, p->K, w->s.k + ik, w->t.k + ik, NULL,
                          (in.k + in.qk_row) * dp_norm_fro(p->K, w->t.k + ik) + p->K * r.tiny);
                }
            }
            for (int hv = 0; hv < p->HV; hv++) {
                const int64_t ig = (t * p->HV + hv) * Kg, ib = (t * p->HV + hv) * p->R;
                at.head = hv;
                for (int c = 0; c < Kg; c++)
                    bound[c] = dp_error_bound_gate(p, t, hv, c, r.u).Dg + r.tiny;
                judge(w, "g", at, -1, Kg, w->s.g + ig, w->t.g + ig, NULL, dp_norm_fro(Kg, bound));
                judge(w, "beta", at, -1, p->R, w->s.beta + ib, w->t.beta + ib, NULL,
                      in.beta * dp_norm_fro(p->R, w->t.beta + ib) + p->R * r.tiny);
            }
        }
    free(bound);
    give(w, w->s.q, w->t.q, w->ref.q, p->T * p->H * p->K, store);
    give(w, w->s.k, w->t.k, w->ref.k, p->T * p->H * p->R * p->K, store);
    give(w, w->s.g, w->t.g, w->ref.g, p->T * p->HV * Kg, ARITH);
    give(w, w->s.beta, w->t.beta, w->ref.beta, p->T * p->HV * p->R, ARITH);
    give(w, w->s.rstd_q, w->t.rstd_q, w->ref.rstd_q, p->T * p->H, ARITH);
    give(w, w->s.rstd_k, w->t.rstd_k, w->ref.rstd_k, p->T * p->H * p->R, ARITH);
}

/* ---- intra, solve, wy ------------------------------------------------------------------------ */

/* A decay below the smallest number of the format is 0 whatever its exponent: exponents are
 * compared down to there. */
static void judge_gcum(work *w, const chunk *c) {
    const double floor = dp_gate_floor(w->base);
    const int K = w->p->K;
    double *a = dp_doubles(2 * K), *b = a + K;
    for (int t = 0; t < c->ref->c; t++) {
        dp_place at = c->at;
        at.token += t;
        for (int x = 0; x < K; x++) {
            const double got = c->s->gcum[t * K + x], want = c->t->gcum[t * K + x];
            a[x] = got < floor ? floor : got;
            b[x] = want < floor ? floor : want;
        }
        judge(w, "gcum", at, -1, K, a, b, c->intra->Dcum + t * K, 0);
    }
    free(a);
}

static void stage_intra(work *w) {
    const int K = w->p->K, R = w->p->R;
    FOR_CHUNKS(c) judge_gcum(w, &c);
    FOR_CHUNKS(c) judge_rows(w, "L", c.at, R, c.ref->n, c.ref->n, c.s->L, c.t->L, c.intra->DL);
    FOR_CHUNKS(c)
    judge_rows(w, "Aqk", c.at, 1, c.ref->c, c.ref->n, c.s->Aqk, c.t->Aqk, c.intra->DAqk);
    FOR_CHUNKS(c) {
        give(w, c.s->gcum, c.t->gcum, c.ref->gcum, (int64_t)c.ref->c * K, ARITH);
        give(w, c.s->L, c.t->L, c.ref->L, (int64_t)c.ref->n * c.ref->n, ARITH);
        give(w, c.s->Aqk, c.t->Aqk, c.ref->Aqk, (int64_t)c.ref->c * c.ref->n, STORE);
    }
}

static void stage_solve(work *w) {
    if (!w->s.by_inverse) return;
    FOR_CHUNKS(c)
    judge_rows(w, "Akk", c.at, w->p->R, c.ref->n, c.ref->n, c.s->Akk, c.t->Akk, c.own->DT);
    FOR_CHUNKS(c) give(w, c.s->Akk, c.t->Akk, c.ref->Akk, (int64_t)c.ref->n * c.ref->n, STORE);
}

static void stage_wy(work *w) {
    const int K = w->p->K, V = w->p->V, R = w->p->R;
    FOR_CHUNKS(c) judge(w, "eC", c.at, -1, K, c.s->eC, c.t->eC, c.own->DeC, 0);
    FOR_CHUNKS(c) judge_rows(w, "kg", c.at, R, c.ref->n, K, c.s->kg, c.t->kg, c.own->Dkg);
    FOR_CHUNKS(c) judge_rows(w, "qg", c.at, 1, c.ref->c, K, c.s->qg, c.t->qg, c.own->Dqg);
    FOR_CHUNKS(c) judge_rows(w, "w", c.at, R, c.ref->n, K, c.s->w, c.t->w, c.own->Dw);
    FOR_CHUNKS(c) judge_rows(w, "u", c.at, R, c.ref->n, V, c.s->u, c.t->u, c.own->Du);
    FOR_CHUNKS(c) {
        const int64_t nK = (int64_t)c.ref->n * K;
        give(w, c.s->eC, c.t->eC, c.ref->eC, K, ARITH);
        give(w, c.s->kgam, c.t->kgam, c.ref->kgam, nK, ARITH);
        give(w, c.s->kg, c.t->kg, c.ref->kg, nK, STORE);
        give(w, c.s->qg, c.t->qg, c.ref->qg, (int64_t)c.ref->c * K, STORE);
        give(w, c.s->w, c.t->w, c.ref->w, nK, STORE);
        give(w, c.s->u, c.t->u, c.ref->u, (int64_t)c.ref->n * V, STORE);
    }
}

/* ---- pre-process and merge ------------------------------------------------------------------- */

static double *zeros_state(const work *w) {
    return dp_doubles(dp_state_error_size(&w->r, w->p->K, w->p->V));
}

/* The two parts of a state's error as one [K][V] of squares, in place. */
static const double *entries(const work *w, double *e) {
    const int64_t KV = (int64_t)w->p->K * w->p->V;
    for (int64_t i = 0; i < KV; i++) {
        e[i] += e[KV + i];
        e[KV + i] = 0;
    }
    return e;
}

static void judge_M(work *w, const char *name, int r, int hv, int sub, int trans, const double *got,
                    const double *want) {
    dp_sim *ref = &w->ref;
    const int K = w->p->K, g0 = ref->first[r][sub], g1 = ref->first[r][sub + 1];
    const int64_t KK = (int64_t)K * K;
    double *P = dp_doubles(KK), *Q = dp_doubles(KK), *M = dp_doubles(KK), *D = dp_doubles(KK),
           *b = dp_doubles(KK), bias = 0;
    for (int x = 0; x < K; x++)
        P[(int64_t)x * K + x] = 1;
    for (int i = 0; i < g1 - g0; i++) {
        const dp_chunk_bound *cb = &w->own[(int64_t)(trans ? g1 - 1 - i : g0 + i) * w->p->HV + hv];
        for (int x = 0; x < K; x++)
            for (int y = 0; y < K; y++) {
                const int64_t from = trans ? (int64_t)y * K + x : (int64_t)x * K + y;
                M[(int64_t)x * K + y] = cb->M[from];
                D[(int64_t)x * K + y] = cb->DM[from];
            }
        dp_bound_chain_step(&w->r, w->s.chain, K, M, D, cb->mu, P, b, &bias);
        dp_mm(DP_FP64, 0, 0, K, K, K, M, P, Q);
        double *swap = P;
        P = Q;
        Q = swap;
    }
    for (int x = 0; x < K; x++)
        judge(w, name, rank_place(w, r, hv, sub), x, K, got + (int64_t)x * K, want + (int64_t)x * K,
              b + (int64_t)x * K, bias);
    free(P);
    free(Q);
    free(M);
    free(D);
    free(b);
}

static void judge_H(work *w, int r, int hv, int sub, const double *got, const double *want) {
    const dp_problem *p = w->p;
    double *H = dp_doubles((int64_t)p->K * p->V), *e = zeros_state(w);
    for (int g = w->ref.first[r][sub]; g < w->ref.first[r][sub + 1]; g++) {
        dp_bound_state(&w->own[(int64_t)g * p->HV + hv], H, e, NULL);
        dp_chunk_state(dp_sim_chunk(&w->ref, g, hv), H, NULL);
    }
    judge_rows(w, "H", rank_place(w, r, hv, sub), 0, p->K, p->V, got, want, entries(w, e));
    free(H);
    free(e);
}

static void judge_dH(work *w, int r, int hv, const double *got, const double *want) {
    const dp_problem *p = w->p;
    double *H = dp_doubles((int64_t)p->K * p->V), *e = zeros_state(w),
           *dout = dp_doubles((int64_t)DP_CHUNK * p->V);
    for (int g = w->ref.first[r][1] - 1; g >= w->ref.first[r][0]; g--) {
        dp_sim_gather_do(&w->ref, g, hv, dout);
        dp_bound_state_bwd(&w->own[(int64_t)g * p->HV + hv], dout, H, e, NULL);
        dp_chunk_state_bwd(dp_sim_chunk(&w->ref, g, hv), dout, H, NULL);
    }
    judge_rows(w, "dH", rank_place(w, r, hv, 0), 0, p->K, p->V, got, want, entries(w, e));
    free(H);
    free(e);
    free(dout);
}

static void stage_pre(work *w, int backward) {
    const dp_problem *p = w->p;
    const int HV = p->HV, N = w->ref.N;
    dp_sim *s = &w->s, *t = &w->t, *ref = &w->ref;
    double **sM = backward ? s->dM : s->M, **tM = backward ? t->dM : t->M,
           **sH = backward ? s->dH : s->H, **tH = backward ? t->dH : t->H;
    for (int what = 0; what < 2; what++)
        for (int k = 0; k < N; k++)
            for (int hv = 0; hv < HV; hv++) {
                const int r = backward ? N - 1 - k : k, i = r * HV + hv,
                          sub = backward ? 0 : ref->ctx[r].nlocal - 1;
                if (!tM[i]) continue;
                if (!what)
                    judge_M(w, backward ? "dM" : "M", r, hv, sub, backward, sM[i], tM[i]);
                else if (backward)
                    judge_dH(w, r, hv, sH[i], tH[i]);
                else
                    judge_H(w, r, hv, sub, sH[i], tH[i]);
            }
    give_list(w, sM, tM, backward ? ref->dM : ref->M, (int64_t)p->K * p->K);
    give_list(w, sH, tH, backward ? ref->dH : ref->H, (int64_t)p->K * p->V);
}

static void stage_merge(work *w, int backward) {
    const dp_problem *p = w->p;
    const int HV = p->HV, K = p->K, V = p->V, N = w->ref.N, dir = backward ? -1 : 1;
    const int64_t KV = (int64_t)K * V;
    dp_sim *s = &w->s, *t = &w->t, *ref = &w->ref;
    double *zM = dp_doubles(dp_chain_error_size(&w->r, K)), *zH = zeros_state(w),
           *zero = dp_doubles(KV);
    for (int k = 0; k < N; k++)
        for (int hv = 0; hv < HV; hv++) {
            const int r = backward ? N - 1 - k : k, i = r * HV + hv,
                      far =
                          backward ? r + ref->ctx[r].post_num_ranks : r - ref->ctx[r].pre_num_ranks;
            if (backward ? ref->ctx[r].is_last : ref->ctx[r].is_first) continue;
            const int seq = backward ? ref->ctx[far].local_seq[0]
                                     : ref->ctx[far].local_seq[ref->ctx[far].nlocal - 1];
            const double *start = backward ? p->dstate : p->s0;
            double *e = zeros_state(w);
            for (int j = far; j != r; j += dir) {
                const int z = j * HV + hv;
                const double *M = (backward ? ref->dM : ref->M)[z],
                             *H = (backward ? ref->dH : ref->H)[z],
                             *S = j != far ? (backward ? ref->dS_out : ref->S_in)[z] : NULL;
                if (!S) S = start ? start + ((int64_t)seq * HV + hv) * KV : zero;
                if (S != zero)
                    dp_bound_merge_step(&w->r, K, V, M, dp_norm2_up(K, K, M), zM, 0, S, H, zH, e);
            }
            judge_rows(w, backward ? "dS_out" : "S_in",
                       rank_place(w, r, hv, backward ? ref->ctx[r].nlocal - 1 : 0), 0, K, V,
                       (backward ? s->dS_out : s->S_in)[i], (backward ? t->dS_out : t->S_in)[i],
                       entries(w, e));
            free(e);
        }
    if (backward)
        give_list(w, s->dS_out, t->dS_out, ref->dS_out, KV);
    else
        give_list(w, s->S_in, t->S_in, ref->S_in, KV);
    free(zM);
    free(zH);
    free(zero);
}

/* ---- state, output --------------------------------------------------------------------------- */

/* D [n][V] += squares of (a [n][K]) (error e of a state) */
static void through(const work *w, const double *a, int n, const double *e, double *D) {
    const int K = w->p->K, V = w->p->V;
    for (int i = 0; i < n; i++)
        for (int x = 0; x < K; x++) {
            const double a2 = a[(int64_t)i * K + x] * a[(int64_t)i * K + x];
            for (int v = 0; a2 > 0 && v < V; v++)
                D[(int64_t)i * V + v] += a2 * (e[(int64_t)x * V + v] + e[((int64_t)K + x) * V + v]);
        }
}

static void stage_state(work *w, int recompute) {
    const dp_problem *p = w->p;
    const int K = p->K, V = p->V;
    const int64_t KV = (int64_t)K * V;
    double *all = dp_doubles((int64_t)w->ref.ngroup * p->HV * 2 * KV);
    FOR_CHUNKS(c) { /* the error before each chunk, and after the last one */
        const int r = c.at.rank, sub = w->ref.group[c.g].sub;
        double *e = all + ((int64_t)c.g * p->HV + c.hv) * 2 * KV, *next = dp_copy(e, 2 * KV),
               *DX = dp_doubles((int64_t)c.ref->n * V);
        judge_rows(w, "h", c.at, 0, K, V, c.s->h, c.t->h, entries(w, e));
        dp_bound_state(c.own, c.ref->h, next, DX);
        through(w, c.ref->w, c.ref->n, e, DX);
        judge_rows(w, "v_new", c.at, p->R, c.ref->n, V, c.s->v_new, c.t->v_new, DX);
        if (c.g + 1 < w->ref.first[r][sub + 1])
            memcpy(all + ((int64_t)(c.g + 1) * p->HV + c.hv) * 2 * KV, next,
                   sizeof(double) * 2 * KV);
        else if (!recompute && (sub < w->ref.ctx[r].nlocal - 1 || w->ref.ctx[r].is_last)) {
            const int64_t z = (c.at.sequence * (int64_t)p->HV + c.hv) * KV;
            judge_rows(w, "final_state", c.at, 0, K, V, w->s.out.final_state + z,
                       w->t.out.final_state + z, entries(w, next));
        }
        free(next);
        free(DX);
    }
    FOR_CHUNKS(c) {
        give(w, c.s->h, c.t->h, c.ref->h, KV, ARITH);
        give(w, c.s->v_new, c.t->v_new, c.ref->v_new, (int64_t)c.ref->n * V, STORE);
    }
    free(all);
}

static void stage_output(work *w) {
    const dp_problem *p = w->p;
    double *e = zeros_state(w), *DX = dp_doubles((int64_t)DP_CHUNK * p->R * p->V), row[DP_CHUNK];
    FOR_CHUNKS(c) {
        dp_bound_output(c.own, e, DX, row);
        for (int t = 0; t < c.ref->c; t++) {
            const int64_t z = ((c.at.token + t) * p->HV + c.hv) * p->V;
            dp_place at = c.at;
            at.token += t;
            judge(w, "o", at, -1, p->V, w->s.out.o + z, w->t.out.o + z, NULL,
                  DP_LAMBDA * sqrt(row[t]));
        }
    }
    free(e);
    free(DX);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* dvl = Aqk' do: (uo |Aqk|)^2 |do|^2 + (sum_error |Aqk|'|do|)^2 + (us dvl)^2 */
static void stage_dAv(work *w) {
    const dp_problem *p = w->p;
    const int V = p->V;
    double *dout = dp_doubles((int64_t)DP_CHUNK * V);
    FOR_CHUNKS(c) {
        const int n = c.ref->n, m = c.ref->c;
        double *D = dp_doubles((int64_t)n * V);
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
                             store = (w->r.us + w->r.u) * c.ref->dvl[(int64_t)i * V + v],
                             tiny = (m + 1) * w->r.tiny;
                D[(int64_t)i * V + v] =
                    w->r.uo * w->r.uo * sq + sum * sum + store * store + tiny * tiny;
            }
        judge_rows(w, "dvl", c.at, p->R, n, V, c.s->dvl, c.t->dvl, D);
        free(D);
    }
    FOR_CHUNKS(c) give(w, c.s->dvl, c.t->dvl, c.ref->dvl, (int64_t)c.ref->n * V, STORE);
    free(dout);
}

static void stage_state_bwd(work *w) {
    const dp_problem *p = w->p;
    const int K = p->K, V = p->V;
    const int64_t KV = (int64_t)K * V;
    double *all = dp_doubles((int64_t)w->ref.ngroup * p->HV * 2 * KV),
           *dout = dp_doubles((int64_t)DP_CHUNK * V);
    FOR_CHUNKS_BACK(c) {
        const int r = c.at.rank, sub = w->ref.group[c.g].sub;
        double *e = all + ((int64_t)c.g * p->HV + c.hv) * 2 * KV, *next = dp_copy(e, 2 * KV),
               *DdX = dp_doubles((int64_t)c.ref->n * V);
        judge_rows(w, "dh", c.at, 0, K, V, c.s->dh, c.t->dh, entries(w, e));
        dp_sim_gather_do(&w->ref, c.g, c.hv, dout);
        dp_bound_state_bwd(c.own, dout, c.ref->dh, next, DdX);
        through(w, c.ref->kg, c.ref->n, e, DdX);
        judge_rows(w, "dX", c.at, p->R, c.ref->n, V, c.s->dX, c.t->dX, DdX);
        if (c.g > w->ref.first[r][sub])
            memcpy(all + ((int64_t)(c.g - 1) * p->HV + c.hv) * 2 * KV, next,
                   sizeof(double) * 2 * KV);
        else if (sub > 0 || w->ref.ctx[r].is_first) {
            const int64_t z = (c.at.sequence * (int64_t)p->HV + c.hv) * KV;
            if (w->s.out.ds0)
                judge_rows(w, "ds0", c.at, 0, K, V, w->s.out.ds0 + z, w->t.out.ds0 + z,
                           entries(w, next));
        }
        free(next);
        free(DdX);
    }
    FOR_CHUNKS(c) {
        give(w, c.s->dh, c.t->dh, c.ref->dh, KV, ARITH);
        give(w, c.s->dX, c.t->dX, c.ref->dX, (int64_t)c.ref->n * V, STORE);
    }
    free(all);
    free(dout);
}

/* dv, dbeta (wy_bwd), then dq, dk, dg (intra_bwd) of the activated inputs; dq, dk summed over the
 * value heads of a group, dg of GDN over channels. */
typedef struct {
    double *dv, *dbeta, *dq, *dk, *dg;
} grad_rows;

static void grad_bounds(work *w, grad_rows *o) {
    const dp_problem *p = w->p;
    const dp_rounding *r = &w->r;
    const int K = p->K, R = p->R, Kg = dp_Kg(p), G = dp_G(p);
    double *e = zeros_state(w), *DX = dp_doubles((int64_t)DP_CHUNK * R * p->V),
           *dout = dp_doubles((int64_t)DP_CHUNK * p->V);
    FOR_CHUNKS(c) {
        const int m = c.ref->c, n = c.ref->n, h = c.hv / G;
        double *buf = dp_doubles(2 * m + 6 * (int64_t)n + 2 * (int64_t)m * K), *x = buf;
        dp_grad_bound b = {0};
        b.dq = x;
        x += m;
        b.ndq = x;
        x += m;
        b.dk = x;
        x += n;
        b.ndk = x;
        x += n;
        b.dv = x;
        x += n;
        b.ndv = x;
        x += n;
        b.dbeta = x;
        x += n;
        b.vdbeta = x;
        x += n;
        b.dg = x;
        x += m * K;
        b.vdg = x;
        dp_sim_gather_do(&w->ref, c.g, c.hv, dout);
        dp_bound_grads(c.own, dout, e, e, DX, DX, &b);
        for (int t = 0; t < m; t++) {
            const int64_t tok = c.at.token + t;
            o->dq[tok * p->H + h] += b.dq[t] + dp_pw(r, G * r->u * b.ndq[t]);
            double sum = 0, abs = 0, each = 0;
            for (int k = 0; k < K; k++) {
                sum += b.dg[t * K + k];
                abs += fabs(b.vdg[t * K + k]);
                each += dp_pw(r, r->u * b.vdg[t * K + k]);
            }
            o->dg[tok * p->HV + c.hv] =
                sum + each + (Kg == 1 ? dp_pw(r, dp_sum_error(r, K) * abs) : 0);
        }
        for (int i = 0; i < n; i++) {
            const int64_t tok = c.at.token + i / R, row = (tok * p->HV + c.hv) * R + i % R;
            o->dk[(tok * p->H + h) * R + i % R] += b.dk[i] + dp_pw(r, G * r->u * b.ndk[i]);
            o->dv[row] = b.dv[i] + dp_pw(r, (r->u + r->us) * b.ndv[i]);
            o->dbeta[row] = b.dbeta[i];
        }
        free(buf);
    }
    free(e);
    free(DX);
    free(dout);
}

/* rows of [T][heads][per][n], backwards in time */
static void judge_tokens(work *w, const char *name, int heads, int per, int n, const double *got,
                         const double *want, const double *bound) {
    for (int g = w->ref.ngroup - 1; g >= 0; g--)
        for (int h = 0; h < heads; h++)
            for (int t = w->ref.group[g].c - 1; t >= 0; t--)
                for (int j = 0; j < per; j++) {
                    dp_place at = chunk_place(w, g, h);
                    at.token += t;
                    const int64_t row = (at.token * heads + h) * per + j;
                    judge(w, name, at, per > 1 ? j : -1, n, got + row * n, want + row * n, NULL,
                          DP_LAMBDA * sqrt(bound[row]));
                }
}

static void stage_grads(work *w) {
    const dp_problem *p = w->p;
    const int64_t T = p->T;
    const int Kg = dp_Kg(p);
    grad_rows b = {dp_doubles(T * p->HV * p->R), dp_doubles(T * p->HV * p->R), dp_doubles(T * p->H),
                   dp_doubles(T * p->H * p->R), dp_doubles(T * p->HV)};
    grad_bounds(w, &b);
    w->stage = DP_STAGE_WY_BWD;
    judge_tokens(w, "dv", p->HV, p->R, p->V, w->s.out.dv, w->t.out.dv, b.dv);
    judge_tokens(w, "dbeta", p->HV, p->R, 1, w->s.dbeta, w->t.dbeta, b.dbeta);
    w->stage = DP_STAGE_INTRA_BWD;
    judge_tokens(w, "dq", p->H, 1, p->K, w->s.dq, w->t.dq, b.dq);
    judge_tokens(w, "dk", p->H, p->R, p->K, w->s.dk, w->t.dk, b.dk);
    judge_tokens(w, "dg", p->HV, 1, Kg, w->s.dg, w->t.dg, b.dg);
    give(w, w->s.dq, w->t.dq, w->ref.dq, T * p->H * p->K, ARITH);
    give(w, w->s.dk, w->t.dk, w->ref.dk, T * p->H * p->R * p->K, ARITH);
    give(w, w->s.dg, w->t.dg, w->ref.dg, T * p->HV * Kg, ARITH);
    give(w, w->s.dbeta, w->t.dbeta, w->ref.dbeta, T * p->HV * p->R, ARITH);
    free(b.dv);
    free(b.dbeta);
    free(b.dq);
    free(b.dk);
    free(b.dg);
}

/* Through the activations, as in error_bound.c with exact inputs (worst case):  dx = rstd (dy - y
 * <y, dy>): rstd (2 gamma_K + 6u) |dy|; raw gate |dg/dx| (relative error of the derivative + u)
 * |dg|;  beta 6u z s (1 - s) |dbeta|;  sums over tokens gamma_T of the sum of absolute values; each
 * stored with u + us. */
static void stage_gate_bwd(work *w) {
    const dp_problem *p = w->p;
    const dp_rounding r = dp_rounding_of(w->base, 1);
    const int Kg = dp_Kg(p), H = p->H, HV = p->HV, R = p->R, K = p->K;
    const double eps = (p->l2norm ? 2 * dp_gamma(K, r.u) + 6 * r.u : 0) + r.u + r.us,
                 sums = dp_gamma((int)fmin((double)p->T + Kg + w->ref.N, 1 << 22), r.u);
    double *q = dp_doubles(p->T * H), *k = dp_doubles(p->T * H * R), *g = dp_doubles(p->T * HV),
           *b = dp_doubles(p->T * HV * R), *A = dp_doubles(HV), *B = dp_doubles(HV);
    double *Bc = dp_doubles((int64_t)HV * Kg);
    for (int64_t i = 0; i < p->T * H; i++)
        q[i] =
            dp_pw(&w->r, (eps * w->ref.rstd_q[i] * dp_norm_fro(K, w->ref.dq + i * K) + K * r.tiny) /
                             DP_LAMBDA);
    for (int64_t i = 0; i < p->T * H * R; i++)
        k[i] =
            dp_pw(&w->r, (eps * w->ref.rstd_k[i] * dp_norm_fro(K, w->ref.dk + i * K) + K * r.tiny) /
                             DP_LAMBDA);
    for (int64_t i = 0; i < p->T * HV; i++) {
        double row = 0;
        for (int c = 0; c < Kg; c++) {
            const dp_gate_error ge = dp_error_bound_gate(p, i / HV, (int)(i % HV), c, r.u);
            const double v = fabs(w->ref.dg[i * Kg + c]), x = fabs(ge.dx) * v, y = fabs(ge.dA) * v;
            const double d = (ge.Ddx + 2 * r.u + r.us) * x + r.tiny;
            row += d * d;
            Bc[(i % HV) * Kg + c] += (ge.Ddx + r.u + sums) * x + r.tiny;
            A[i % HV] += (ge.Ddx + 3 * r.u + sums) * y +
                         (p->gate == DP_GATE_SOFTPLUS ? ge.Dg * v : 0) + r.tiny;
        }
        g[i] = row / (DP_LAMBDA * DP_LAMBDA);
    }
    for (int64_t i = 0; i < p->T * HV * R; i++)
        b[i] = dp_pw(&w->r, ((p->beta_form == DP_BETA_PLAIN ? r.u + r.us : 8 * r.u + r.us) *
                                 fabs(w->t.out.dbeta[i]) +
                             r.tiny) /
                                DP_LAMBDA);
    judge_tokens(w, "dq", H, 1, K, w->s.out.dq, w->t.out.dq, q);
    judge_tokens(w, "dk", H, R, K, w->s.out.dk, w->t.out.dk, k);
    judge_tokens(w, "dg", HV, 1, Kg, w->s.out.dg, w->t.out.dg, g);
    judge_tokens(w, "dbeta", HV, R, 1, w->s.out.dbeta, w->t.out.dbeta, b);
    for (int hv = 0; hv < HV; hv++) {
        const dp_place at = {.rank = -1, .head = hv, .sequence = -1, .chunk = -1, .token = -1};
        if (w->s.out.dA_log)
            judge(w, "dA_log", at, -1, 1, w->s.out.dA_log + hv, w->t.out.dA_log + hv, NULL, A[hv]);
        if (w->s.out.ddt_bias)
            judge(w, "ddt_bias", at, -1, Kg, w->s.out.ddt_bias + hv * Kg,
                  w->t.out.ddt_bias + hv * Kg, NULL, dp_norm_fro(Kg, Bc + hv * Kg));
    }
    free(q);
    free(k);
    free(g);
    free(b);
    free(A);
    free(B);
    free(Bc);
}

/* ---- all stages ------------------------------------------------------------------------------ */

static void judge_stage(work *w) {
    switch (w->stage) {
    case DP_STAGE_GATE: stage_gate(w); break;
    case DP_STAGE_INTRA: stage_intra(w); break;
    case DP_STAGE_SOLVE: stage_solve(w); break;
    case DP_STAGE_WY: stage_wy(w); break;
    case DP_STAGE_PRE_FWD: stage_pre(w, 0); break;
    case DP_STAGE_MERGE_FWD: stage_merge(w, 0); break;
    case DP_STAGE_STATE_FWD: stage_state(w, 0); break;
    case DP_STAGE_OUTPUT: stage_output(w); break;
    case DP_STAGE_RECOMPUTE: stage_state(w, 1); break;
    case DP_STAGE_DAV: stage_dAv(w); break;
    case DP_STAGE_PRE_BWD: stage_pre(w, 1); break;
    case DP_STAGE_MERGE_BWD: stage_merge(w, 1); break;
    case DP_STAGE_STATE_BWD: stage_state_bwd(w); break;
    case DP_STAGE_WY_BWD: stage_grads(w); break;
    case DP_STAGE_INTRA_BWD: break; /* came with wy_bwd */
    case DP_STAGE_GATE_BWD: stage_gate_bwd(w); break;
    default: assert(0);
    }
}

static void bounds(work *w) {
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
static int same_chunks(work *w) {
    const int n = w->ref.ngroup < w->s.ngroup ? w->ref.ngroup : w->s.ngroup;
    w->stage = DP_STAGE_INTRA;
    for (int g = 0; g < n; g++) {
        const dp_group *a = &w->s.group[g], *b = &w->ref.group[g];
        const double got[2] = {(double)a->t0, a->c}, want[2] = {(double)b->t0, b->c};
        judge(w, "chunks", chunk_place(w, g, -1), -1, 2, got, want, NULL, 0);
    }
    if (w->ref.ngroup > n)
        judge(w, "chunks", chunk_place(w, n, -1), -1, 1, &(double){NAN},
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

static void work_free(work *w) {
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
static dp_status work_new(work *w, const dp_problem *p, dp_base base, dp_format chain,
                          dp_merge merge, int N, dp_fault fault, int by_inverse, int backward,
                          dp_err *e) {
    w->p = p;
    w->base = base;
    w->r = dp_rounding_of(base, 2);
    dp_status st = dp_sim_new(&w->ref, p, DP_BASE_FP64, N, DP_FAULT_NONE, e);
    if (st) return st;
    st = dp_sim_new(&w->t, p, DP_BASE_FP64, N, DP_FAULT_NONE, e);
    if (!st) st = dp_sim_new(&w->s, p, base, N, fault, e);
    assert(!st);
    w->s.by_inverse |= by_inverse;
    w->t.by_inverse = w->s.by_inverse;
    w->r.inverse |= w->s.by_inverse;
    dp_sim_run(&w->ref, DP_FP64, DP_MERGE_ALLGATHER, backward);
    dp_sim_begin(&w->t, DP_FP64, merge, backward);
    dp_sim_begin(&w->s, chain, merge, backward);
    bounds(w);
    return st;
}

dp_status dp_bisect_sim(const dp_problem *p, dp_base base, dp_format chain, dp_merge merge, int N,
                        dp_fault fault, int backward, int runs, int all, dp_bisect *out,
                        dp_err *e) {
    work w = {.out = out};
    *out = (dp_bisect){.first = -1, .N = N, .HV = p->HV};
    const dp_status st = work_new(&w, p, base, chain, merge, N, fault, 0, backward, e);
    if (st) return st;
    for (int i = 0; i < DP_NSTAGES; i++) {
        out->stage[i].rank = dp_calloc((size_t)N, 1);
        out->stage[i].head = dp_calloc((size_t)p->HV, 1);
    }
    for (int i = 0; i < 2; i++) {
        out->conv[i].rank = dp_calloc((size_t)N, 1);
        out->conv[i].head = dp_calloc((size_t)p->HV, 1);
    }
    const int64_t nch = (int64_t)w.ref.ngroup * p->HV;
    const int last = same_chunks(&w) ? backward ? DP_NSTAGES : DP_STAGE_RECOMPUTE : 0;
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
            judge_stage(&w);
        }
        if (out->stage[i].fails && !all) break;
    }
    for (int i = DP_NSTAGES - 1; i >= 0; i--) {
        dp_bisect_row *x = &out->stage[i];
        if (x->fails) out->first = i;
        for (int r = 0; r < N; r++)
            x->nrank += x->rank[r];
        for (int h = 0; h < p->HV; h++)
            x->nhead += x->head[h];
    }
    work_free(&w);
    return DP_OK;
}

/* ---- against draws --------------------------------------------------------------------------- */

static void run_tallied(work *w, int backward) {
    const int64_t nch = (int64_t)w->ref.ngroup * w->p->HV;
    for (int i = 0; i < (backward ? DP_NSTAGES : DP_STAGE_RECOMPUTE); i++) {
        if (i == DP_STAGE_PRE_FWD)
            for (int64_t z = 0; z < nch; z++)
                dp_bound_exact(&w->own[z]);
        w->stage = i;
        dp_sim_stage(&w->s, w->stage);
        dp_sim_stage(&w->t, w->stage);
        judge_stage(w);
    }
}

/* One rounding of what stands there, and of the head's typical row: where rows cancel to nothing
 * that is no error. */
static double *floors(const tally *t, int HV) {
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
static void hold(const tally *t, int ndraw, int HV, dp_bisect *out) {
    dp_bisect_row *x = &out->stage[t->stage];
    double *floor2 = floors(t, HV);
    int32_t *unit = dp_calloc((size_t)t->n, sizeof *unit),
            *window = dp_calloc((size_t)t->n, sizeof *window);
    dp_excess ex;
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
                             .allowance = {1.2, 0}};
    dp_levels_judge(&in, &ex);
    if (ex.excess > 1 && !x->fails && ex.row >= 0) {
        const worst_row *r = &t->worst[ex.row];
        const dp_level_result *l = &ex.at[ex.level];
        snprintf(x->tensor, sizeof x->tensor, "%s", t->name);
        x->fails = x->expected = 1;
        x->ratio = l->ratio;
        x->budget = l->limit;
        x->at = r->at;
        x->row = r->row;
        x->index = r->index;
        x->got = r->got;
        x->want = r->want;
        x->err = r->err;
        if (r->at.rank >= 0) {
            x->rank[r->at.rank] = 1;
            x->nrank = 1;
        }
        if (r->at.head >= 0) {
            x->head[r->at.head] = 1;
            x->nhead = 1;
        }
    }
    free(floor2);
    free(unit);
    free(window);
}

dp_status dp_bisect_expected(const dp_problem *p, dp_base base, dp_format chain, dp_merge merge,
                             int N, dp_fault fault, int backward, dp_format dtype, dp_bisect *out,
                             dp_err *e) {
    tallies tal = {.draw = -1, .ndraw = dp_expected_count(p)};
    work w = {.out = out, .tal = &tal};
    if (base == DP_BASE_FP64 || out->first >= 0) return DP_OK;
    const dp_status st = work_new(&w, p, base, chain, merge, N, fault, 0, backward, e);
    if (st) return st;
    const int by_inverse = w.s.by_inverse, same = w.s.ngroup == w.ref.ngroup;
    if (same) run_tallied(&w, backward);
    work_free(&w);
    for (int d = 0; d < tal.ndraw && same; d++) {
        dp_problem y = dp_nearby_problem(p, &(dp_mover){(uint64_t)d, dtype});
        work one = {.out = out, .tal = &tal};
        tal.draw = d;
        if (!work_new(&one, &y, base, chain, merge, N, DP_FAULT_NONE, by_inverse, backward, e)) {
            run_tallied(&one, backward);
            work_free(&one);
        }
        dp_problem_free(&y);
    }
    for (int i = 0; i < tal.n; i++) {
        hold(&tal.t[i], tal.ndraw, p->HV, out);
        free(tal.t[i].e2);
        free(tal.t[i].err2);
        free(tal.t[i].want2);
        free(tal.t[i].rows);
        free(tal.t[i].worst);
    }
    for (int i = DP_NSTAGES - 1; i >= 0; i--)
        if (out->stage[i].fails) out->first = i;
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
    for (int i = 0; i < DP_NSTAGES; i++) {
        free(b->stage[i].rank);
        free(b->stage[i].head);
    }
    for (int i = 0; i < 2; i++) {
        free(b->conv[i].rank);
        free(b->conv[i].head);
    }
    *b = (dp_bisect){.first = -1};
}
