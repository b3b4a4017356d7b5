#include "ranks.h"
#include "fault_effect.h"
#include "ref/arithmetic/mm.h"
#include "ref/chunk/gate.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const dp_stage_names[DP_NSTAGES] = {
    "gate",      "intra",  "solve",     "wy",      "pre_process_fwd", "merge_fwd",
    "state_fwd", "output", "recompute", "dAv",     "pre_process_bwd", "merge_bwd",
    "state_bwd", "wy_bwd", "intra_bwd", "gate_bwd"};

/* The design of a stage: the simulation's own, or the default of another base. */
static dp_design design_at(const dp_sim *s, dp_stage stage) {
    return s->at[stage] == s->design.base ? s->design : dp_design_of(s->at[stage]);
}

static void set_design(const dp_sim *s, dp_chunk *ch, dp_stage stage) {
    const dp_design d = design_at(s, stage);
    ch->base = d.base;
    ch->factors = d.factors;
    ch->out = d.out;
    ch->gated = d.gated;
}

/* The chunk, with the formats of a stage. */
static dp_chunk *chunk_at(const dp_sim *s, int gi, int hv, dp_stage stage) {
    dp_chunk *ch = dp_sim_chunk(s, gi, hv);
    set_design(s, ch, stage);
    return ch;
}

/* ---- gate, intra, wy ------------------------------------------------------------------------- */

static void activate(dp_sim *s) {
    const dp_problem *p = s->p;
    const int64_t nq = p->T * p->H * p->K, nk = nq * p->R;
    const dp_base base = s->at[DP_STAGE_GATE];
    free(s->q);
    free(s->k);
    free(s->g);
    free(s->beta);
    free(s->rstd_q);
    free(s->rstd_k);
    s->q = dp_doubles(nq);
    s->k = dp_doubles(nk);
    s->g = dp_doubles(p->T * p->HV * dp_Kg(p));
    s->beta = dp_doubles(p->T * p->HV * p->R);
    s->rstd_q = dp_doubles(p->T * p->H);
    s->rstd_k = dp_doubles(p->T * p->H * p->R);
    (base == DP_BASE_FP64 ? dp_activate : dp_activate_f32)(p, 0, p->T, s->q, s->k, s->g, s->beta,
                                                           s->rstd_q, s->rstd_k);
    if (base == DP_BASE_BF16 && p->l2norm) { /* the normalised q and k are stored like factors */
        const dp_format f = design_at(s, DP_STAGE_GATE).factors;
        for (int64_t i = 0; i < nq; i++)
            s->q[i] = dp_store(f, s->q[i]);
        for (int64_t i = 0; i < nk; i++)
            s->k[i] = dp_store(f, s->k[i]);
    }
    dp_effect_gate(s);
}

static void list_groups(dp_sim *s) {
    int64_t cap = 0;
    s->ngroup = 0;
    s->first = dp_calloc((size_t)s->N, sizeof *s->first);
    for (int r = 0; r < s->N; r++)
        cap += s->ctx[r].L / s->design.chunk + s->ctx[r].nlocal + 1;
    s->group = dp_calloc((size_t)cap, sizeof *s->group);
    for (int r = 0; r < s->N; r++) {
        const dp_context *c = &s->ctx[r];
        s->first[r] = dp_calloc((size_t)c->nlocal + 1, sizeof **s->first);
        for (int sub = 0; sub < c->nlocal; sub++) {
            s->first[r][sub] = s->ngroup;
            for (int64_t t = c->a + c->local_cu[sub], end = c->a + c->local_cu[sub + 1]; t < end;
                 t += s->design.chunk)
                s->group[s->ngroup++] =
                    (dp_group){.rank = r,
                               .sub = sub,
                               .c = (int)(end - t < s->design.chunk ? end - t : s->design.chunk),
                               .t0 = t};
        }
        s->first[r][c->nlocal] = s->ngroup;
    }
}

static dp_chunk_in chunk_in(const dp_sim *s, int gi, int hv) {
    const dp_problem *p = s->p;
    const int h = hv / dp_G(p), Kg = dp_Kg(p);
    const int64_t t = s->group[gi].t0;
    return (dp_chunk_in){.q = s->q + (t * p->H + h) * p->K,
                         .k = s->k + (t * p->H + h) * p->R * p->K,
                         .v = p->v + (t * p->HV + hv) * p->R * p->V,
                         .g = s->g + (t * p->HV + hv) * Kg,
                         .beta = s->beta + (t * p->HV + hv) * p->R,
                         .sq = (int64_t)p->H * p->K,
                         .sk = (int64_t)p->H * p->R * p->K,
                         .sv = (int64_t)p->HV * p->R * p->V,
                         .sg = (int64_t)p->HV * Kg,
                         .sb = (int64_t)p->HV * p->R,
                         .Kg = Kg};
}

static void intra(dp_sim *s, int gi, int hv) {
    const dp_problem *p = s->p;
    const dp_chunk_in in = chunk_in(s, gi, hv);
    dp_chunk *ch = dp_sim_chunk(s, gi, hv);
    dp_chunk_free(ch);
    dp_chunk_begin(ch, s->at[DP_STAGE_INTRA], s->group[gi].c, p->R, p->K, p->V, p->scale, &in);
    set_design(s, ch, DP_STAGE_INTRA);
    ch->by_inverse = s->by_inverse;
    ch->linear = s->linear;
    dp_chunk_intra(ch, &in);
    dp_effect_intra(s, gi, hv);
}

static void solve(dp_sim *s, int gi, int hv) {
    dp_chunk_solve(chunk_at(s, gi, hv, DP_STAGE_SOLVE));
    dp_effect_solve(s, gi, hv);
}

static void wy(dp_sim *s, int gi, int hv) {
    dp_chunk *ch = chunk_at(s, gi, hv, DP_STAGE_WY);
    double *v =
        dp_effect_values(s, gi, hv); /* v as it should have been read, when a fault reads another */
    dp_chunk_wy(ch);
    if (v) {
        memcpy(ch->v, v, sizeof(double) * (size_t)((int64_t)ch->n * ch->V));
        free(v);
    }
    dp_effect_wy(s, gi, hv);
}

typedef void stage_fn(dp_sim *s, int gi, int hv);

static void each_chunk(dp_sim *s, stage_fn *f) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < (int64_t)s->ngroup * s->p->HV; i++)
        f(s, (int)(i / s->p->HV), (int)(i % s->p->HV));
}

/* What there is once a rank and head. */
static void alloc_ranks(dp_sim *s) {
    const int64_t n = (int64_t)s->N * s->p->HV;
    double ***a[] = {&s->S_in, &s->M, &s->H, &s->dS_out, &s->dM, &s->dH};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        *a[i] = dp_calloc((size_t)n, sizeof **a[i]);
    s->traj_rank = s->N >= 3 ? 1 : 0;
    s->traj = dp_calloc((size_t)DP_MAX_TRAJ * s->p->HV, sizeof *s->traj);
    s->hit_kept = dp_calloc((size_t)n, 1);
    memcpy(s->hit_kept, s->hit, (size_t)n);
}

static void free_list(double **a, int64_t n) {
    if (a)
        for (int64_t i = 0; i < n; i++)
            free(a[i]);
    free(a);
}

static void free_ranks(dp_sim *s) {
    const int64_t n = (int64_t)s->N * s->p->HV;
    double **a[] = {s->S_in, s->M, s->H, s->dS_out, s->dM, s->dH};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        free_list(a[i], n);
    free_list(s->traj, s->traj ? DP_MAX_TRAJ * s->p->HV : 0);
    if (s->first)
        for (int r = 0; r < s->N; r++)
            free(s->first[r]);
    for (int r = 0; r < s->N; r++)
        dp_context_free(&s->ctx[r]);
    free(s->first);
    free(s->group);
    free(s->ctx);
    free(s->hit);
    free(s->hit_kept);
}

typedef struct {
    int by_inverse;
    const dp_linear *linear;
} sim_options;

static dp_status open_sim(dp_sim *s, const dp_problem *p, const dp_design *design,
                          const dp_base at[DP_NSTAGES], sim_options o, int N, dp_fault fault,
                          dp_err *e) {
    *s = (dp_sim){.p = p,
                  .base = at[0],
                  .design = *design,
                  .N = N,
                  .fault = fault,
                  .linear = o.linear,
                  .by_inverse = o.by_inverse,
                  .given = p};
    s->hit = dp_calloc((size_t)N * p->HV, 1);
    s->by_inverse |= dp_effect_by_inverse(s);
    memcpy(s->at, at, sizeof s->at);
    s->ctx = dp_calloc((size_t)N, sizeof *s->ctx);
    for (int r = 0; r < N; r++) {
        dp_status st = dp_context_build(p->cu, p->Nseq, N, r, &s->ctx[r], e);
        if (st) {
            s->N = r;
            dp_sim_free(s);
            return st;
        }
    }
    s->p = p = dp_effect_inputs(s, p);
    dp_effect_contexts(s);
    activate(s);
    list_groups(s);
    const int64_t nch = (int64_t)s->ngroup * p->HV;
    s->ch = dp_calloc((size_t)nch, sizeof *s->ch);
    s->factor = dp_calloc((size_t)(2 * nch), sizeof *s->factor);
    each_chunk(s, intra);
    each_chunk(s, solve);
    each_chunk(s, wy);
    alloc_ranks(s);
    return DP_OK;
}

static dp_status open_uniform(dp_sim *s, const dp_problem *p, const dp_design *design,
                              const dp_linear *linear, int N, dp_fault fault, dp_err *e) {
    dp_base at[DP_NSTAGES];
    for (int i = 0; i < DP_NSTAGES; i++)
        at[i] = design->base;
    return open_sim(s, p, design, at, (sim_options){design->product, linear}, N, fault, e);
}

dp_status dp_sim_new_policy(dp_sim *s, const dp_problem *p, const dp_base at[DP_NSTAGES], int N,
                            dp_fault fault, dp_err *e) {
    const dp_design design = dp_design_of(at[0]);
    const int by_inverse = at[DP_STAGE_SOLVE] == DP_BASE_BF16 || at[DP_STAGE_WY] == DP_BASE_BF16;
    return open_sim(s, p, &design, at, (sim_options){by_inverse, &dp_linear_own}, N, fault, e);
}

dp_status dp_sim_new(dp_sim *s, const dp_problem *p, dp_base base, int N, dp_fault fault,
                     dp_err *e) {
    const dp_design design = dp_design_of(base);
    return open_uniform(s, p, &design, &dp_linear_own, N, fault, e);
}

dp_status dp_sim_new_lapack(dp_sim *s, const dp_problem *p, dp_base base, int N, dp_err *e) {
    const dp_design design = dp_design_of(base);
    return open_uniform(s, p, &design, &dp_linear_lapack, N, DP_FAULT_NONE, e);
}

dp_status dp_sim_new_design(dp_sim *s, const dp_problem *p, const dp_design *design, int N,
                            dp_err *e) {
    assert(design->chunk > 0);
    return open_uniform(s, p, design, &dp_linear_own, N, DP_FAULT_NONE, e);
}

void dp_sim_free(dp_sim *s) {
    const int64_t nch = (int64_t)s->ngroup * s->p->HV;
    double *tokens[] = {s->q,      s->k,  s->g,  s->beta, s->rstd_q,
                        s->rstd_k, s->dq, s->dk, s->dg,   s->dbeta};
    free_list(s->factor, 2 * nch);
    if (s->ch)
        for (int64_t i = 0; i < nch; i++)
            dp_chunk_free(&s->ch[i]);
    free_ranks(s);
    dp_result_free(&s->out);
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        free(tokens[i]);
    free(s->ch);
    if (s->p != s->given) dp_problem_free(&s->own); /* inputs that a fault replaced */
    *s = (dp_sim){0};
}

static int same_chunks(const dp_sim *a, const dp_sim *b) {
    if (a->ngroup != b->ngroup) return 0;
    for (int i = 0; i < a->ngroup; i++)
        if (a->group[i].t0 != b->group[i].t0 || a->group[i].c != b->group[i].c) return 0;
    return 1;
}

int dp_sim_split(dp_sim *s, int N) {
    dp_sim next = {.p = s->p, .design = s->design, .N = N};
    dp_err e;
    assert(s->fault == DP_FAULT_NONE && s->p == s->given);
    next.ctx = dp_calloc((size_t)N, sizeof *next.ctx);
    next.hit = dp_calloc((size_t)N * s->p->HV, 1);
    for (int r = 0; r < N; r++) {
        const dp_status st = dp_context_build(s->p->cu, s->p->Nseq, N, r, &next.ctx[r], &e);
        assert(!st); /* the caller has split the problem this way already */
        (void)st;
    }
    list_groups(&next);
    alloc_ranks(&next);
    const int same = same_chunks(s, &next);
    if (same) {
        const dp_sim old = *s;
        s->N = N;
        s->ctx = next.ctx;
        s->first = next.first;
        s->group = next.group;
        s->hit = next.hit;
        s->hit_kept = next.hit_kept;
        s->S_in = next.S_in;
        s->M = next.M;
        s->H = next.H;
        s->dS_out = next.dS_out;
        s->dM = next.dM;
        s->dH = next.dH;
        s->traj = next.traj;
        s->traj_rank = next.traj_rank;
        s->ntraj = 0;
        s->have_forward = s->have_backward = 0;
        next = old;
    }
    free_ranks(&next);
    return same;
}

/* ---- shared by forward and backward ---------------------------------------------------------- */

static const double *factor(dp_sim *s, int gi, int hv, dp_stage stage) {
    const int64_t own = s->at[stage] != s->at[DP_STAGE_PRE_FWD];
    double **f = &s->factor[(own * s->ngroup + gi) * s->p->HV + hv];
    if (!*f) {
        *f = dp_doubles((int64_t)s->p->K * s->p->K);
        dp_chunk_M(chunk_at(s, gi, hv, stage), *f);
    }
    return *f;
}

const double *dp_sim_factor(dp_sim *s, int gi, int hv) {
    return factor(s, gi, hv, DP_STAGE_PRE_FWD);
}

static int starts_here(const dp_sim *s, int r, int sub) { return sub > 0 || s->ctx[r].is_first; }
static int ends_here(const dp_sim *s, int r, int sub) {
    return sub < s->ctx[r].nlocal - 1 || s->ctx[r].is_last;
}

const double *dp_sim_start(const dp_sim *s, int r, int sub) {
    if (!s->p->s0 || !starts_here(s, r, sub)) return NULL;
    return s->p->s0 + (int64_t)s->ctx[r].local_seq[sub] * s->p->HV * s->p->K * s->p->V;
}

static const double *end_gradient(const dp_sim *s, int r, int sub) {
    if (!s->p->dstate || !ends_here(s, r, sub)) return NULL;
    return s->p->dstate + (int64_t)s->ctx[r].local_seq[sub] * s->p->HV * s->p->K * s->p->V;
}

void dp_sim_gather_do(const dp_sim *s, int gi, int hv, double *dout) {
    const dp_problem *p = s->p;
    const dp_group *g = &s->group[gi];
    for (int t = 0; t < g->c; t++)
        memcpy(dout + (int64_t)t * p->V, p->dout + ((g->t0 + t) * p->HV + hv) * p->V,
               sizeof(double) * p->V);
}

static void replace(double **slot, double *x) {
    free(*slot);
    *slot = x;
}

/* The state as it is carried to the next chunk. */
static void round_state(const dp_sim *s, dp_stage stage, double *S) {
    const dp_design d = design_at(s, stage);
    if (d.state == dp_design_of(d.base).state) return;
    for (int64_t i = 0; i < (int64_t)s->p->K * s->p->V; i++)
        S[i] = dp_store(d.state, S[i]);
}

static void round_arith_all(dp_base b, double *x, int64_t n) {
    if (b != DP_BASE_FP64)
        for (int64_t i = 0; i < n; i++)
            x[i] = dp_round_arith(b, x[i]);
}

/* The chain of the factors of groups [g0, g1), first to last, from P = I (math.md g.1): P <- M_c P
 * in the format, so the first factor is rounded like the others.  trans: the adjoint chain dM <-
 * M_c' dM, last to first. */
static double *chain(dp_sim *s, int g0, int g1, int hv, dp_format f, int trans, int record) {
    const int K = s->p->K, n = g1 - g0;
    const int64_t KK = (int64_t)K * K;
    double *P = dp_doubles(KK), *Q = dp_doubles(KK), *Mt = dp_doubles(KK);
    for (int x = 0; x < K; x++)
        P[(int64_t)x * K + x] = 1;
    for (int i = 0; i < n; i++) {
        const double *M =
            factor(s, trans ? g1 - 1 - i : g0 + i, hv, trans ? DP_STAGE_PRE_BWD : DP_STAGE_PRE_FWD);
        if (trans) {
            for (int a = 0; a < K; a++)
                for (int b = 0; b < K; b++)
                    Mt[(int64_t)a * K + b] = M[(int64_t)b * K + a];
            M = Mt;
        }
        dp_mm_by(s->linear, f, (dp_shape){0, 0, K, K, K}, M, P, Q);
        double *t = P;
        P = Q;
        Q = t;
        if (record && (i & (i + 1)) == 0 && s->ntraj < DP_MAX_TRAJ) { /* i + 1 is a power of two */
            replace(&s->traj[(int64_t)s->ntraj * s->p->HV + hv], dp_copy(P, KK));
            s->traj_chunks[s->ntraj++] = i + 1;
        }
    }
    free(Q);
    free(Mt);
    return P;
}

/* S <- M S + H in the accumulator of the base; S == NULL stands for zeros, which no M multiplies.
 * at: the rank and head that it is for. */
static void merge_step(const dp_sim *s, int at, dp_base b, const double *M, const double *H,
                       double **S) {
    const int K = s->p->K, V = s->p->V;
    const int64_t KV = (int64_t)K * V;
    double *x = dp_doubles(KV);
    if (*S) {
        const int rz = s->fault == DP_FAULT_MERGE_TF32RZ;
        if (rz) s->hit[at] = 1;
        dp_mm_by(s->linear,
                 rz                  ? DP_TF32RZ
                 : b == DP_BASE_FP64 ? DP_FP64
                                     : DP_FP32,
                 (dp_shape){0, 0, K, V, K}, M, *S, x);
        for (int64_t i = 0; i < KV; i++)
            x[i] = dp_round_arith(b, x[i] + H[i]);
    } else
        memcpy(x, H, sizeof(double) * KV);
    replace(S, x);
}

/* ---- forward --------------------------------------------------------------------------------- */

static void pre_process_fwd(dp_sim *s, int r, int hv) {
    const dp_context *c = &s->ctx[r];
    const int i = r * s->p->HV + hv,
              sub = s->fault == DP_FAULT_FWD_FIRST_SUBSEQ ? 0 : c->nlocal - 1;
    if (c->is_last) return;
    if (sub != c->nlocal - 1) dp_effect_hit(s, r, hv);
    replace(&s->M[i], chain(s, s->first[r][sub], s->first[r][sub + 1], hv,
                            dp_effect_chain(s, r, hv), 0, r == s->traj_rank && s->p->HV == 1));
    if (s->H[i]) return; /* does not depend on the chain's format */
    s->H[i] = dp_doubles((int64_t)s->p->K * s->p->V);
    for (int g = s->first[r][sub]; g < s->first[r][sub + 1]; g++) {
        dp_chunk_state(chunk_at(s, g, hv, DP_STAGE_PRE_FWD), s->H[i], NULL);
        round_state(s, DP_STAGE_PRE_FWD, s->H[i]);
    }
}

/* Every rank folds what it needs from the gathered pairs, farthest rank first. */
static void merge_fwd_allgather(dp_sim *s, int r, int hv) {
    const dp_context *c = &s->ctx[r];
    const int HV = s->p->HV, far = r - c->pre_num_ranks;
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    if (c->is_first) return;
    const double *start = dp_sim_start(s, far, s->ctx[far].nlocal - 1);
    double *S = start ? dp_copy(start + hv * KV, KV) : NULL;
    if (S) round_arith_all(s->at[DP_STAGE_MERGE_FWD], S, KV);
    if (s->fault == DP_FAULT_MERGE_NEAREST_FIRST && r - far > 1) dp_effect_hit(s, r, hv);
    if (s->fault == DP_FAULT_MERGE_NEAREST_FIRST)
        for (int j = r - 1; j >= far; j--)
            merge_step(s, r * HV + hv, s->at[DP_STAGE_MERGE_FWD], s->M[j * HV + hv],
                       s->H[j * HV + hv], &S);
    else
        for (int j = far; j < r; j++)
            merge_step(s, r * HV + hv, s->at[DP_STAGE_MERGE_FWD], s->M[j * HV + hv],
                       s->H[j * HV + hv], &S);
    dp_effect_state_in(s, r, hv, S);
    replace(&s->S_in[r * HV + hv], S);
}

/* Rank r waits for S, sends m_r S + h_r on (math.md g.3): a rank where the passed sequence starts
 * begins from its own start state. */
static void merge_fwd_ring(dp_sim *s, int hv) {
    const int HV = s->p->HV;
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    double *S = NULL;
    for (int r = 0; r < s->N; r++) {
        const dp_context *c = &s->ctx[r];
        if (!c->is_first) {
            replace(&s->S_in[r * HV + hv], dp_copy(S, KV));
            dp_effect_state_in(s, r, hv, s->S_in[r * HV + hv]);
        }
        if (c->is_last) continue;
        if (starts_here(s, r, c->nlocal - 1)) {
            const double *start = dp_sim_start(s, r, c->nlocal - 1);
            replace(&S, start ? dp_copy(start + hv * KV, KV) : NULL);
            if (S) round_arith_all(s->at[DP_STAGE_MERGE_FWD], S, KV);
        }
        merge_step(s, (r + 1) * HV + hv, s->at[DP_STAGE_MERGE_FWD], s->M[r * HV + hv],
                   s->H[r * HV + hv], &S);
    }
    free(S);
}

/* One local sub-sequence, from its initial state; h and v_new are kept in the chunks. lost: start
 * from zeros instead (a fault). */
static void state_fwd(dp_sim *s, int r, int hv, int sub, int lost) {
    const dp_problem *p = s->p;
    const int64_t KV = (int64_t)p->K * p->V;
    const double *start = dp_sim_start(s, r, sub);
    double *S = start ? dp_copy(start + hv * KV, KV) : dp_doubles(KV);
    round_arith_all(s->at[DP_STAGE_STATE_FWD], S, KV);
    if (!starts_here(s, r, sub) && lost) dp_effect_hit(s, r, hv);
    if (!starts_here(s, r, sub) && !lost) memcpy(S, s->S_in[r * p->HV + hv], sizeof(double) * KV);
    for (int g = s->first[r][sub]; g < s->first[r][sub + 1]; g++) {
        dp_chunk *ch = chunk_at(s, g, hv, DP_STAGE_STATE_FWD);
        memcpy(ch->h, S, sizeof(double) * KV);
        if (s->fault == DP_FAULT_DECAY_BEFORE_USE) {
            double *D = dp_copy(S, KV);
            for (int x = 0; x < p->K; x++)
                for (int v = 0; v < p->V; v++)
                    D[(int64_t)x * p->V + v] *= ch->eC[x];
            dp_chunk_state(
                ch, D,
                ch->v_new); /* X from the decayed state; the state itself still decays once */
            for (int x = 0; x < p->K; x++)
                for (int v = 0; v < p->V; v++)
                    D[(int64_t)x * p->V + v] +=
                        (1 - ch->eC[x]) * ch->eC[x] * S[(int64_t)x * p->V + v];
            memcpy(S, D, sizeof(double) * KV);
            free(D);
            dp_effect_hit(s, r, hv);
        } else
            dp_chunk_state(ch, S, ch->v_new);
        round_state(s, DP_STAGE_STATE_FWD, S);
        dp_effect_state(s, g, hv, S);
    }
    if (ends_here(s, r, sub) && !lost)
        memcpy(s->out.final_state + (s->ctx[r].local_seq[sub] * (int64_t)p->HV + hv) * KV, S,
               sizeof(double) * KV);
    free(S);
}

static void output(dp_sim *s, int gi, int hv) {
    const dp_problem *p = s->p;
    const dp_group *g = &s->group[gi];
    if (dp_effect_output(s, gi, hv)) return;
    double *o = dp_doubles((int64_t)g->c * p->V);
    dp_chunk_output(chunk_at(s, gi, hv, DP_STAGE_OUTPUT), o);
    for (int t = 0; t < g->c; t++)
        memcpy(s->out.o + ((g->t0 + t) * p->HV + hv) * p->V, o + (int64_t)t * p->V,
               sizeof(double) * p->V);
    free(o);
}

/* Sequences without tokens hand their initial state on; the gradient of the final state likewise.
 */
static void empty_sequences(dp_sim *s) {
    const dp_problem *p = s->p;
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    for (int i = 0; i < p->Nseq; i++) {
        if (p->cu[i + 1] > p->cu[i]) continue;
        for (int64_t z = 0; z < n; z++) {
            s->out.final_state[i * n + z] = p->s0 ? p->s0[i * n + z] : 0;
            if (s->out.ds0) s->out.ds0[i * n + z] = p->dstate ? p->dstate[i * n + z] : 0;
        }
    }
}

static int same(double **a, double **b, int n, int64_t size) {
    for (int i = 0; i < n; i++) {
        if (!a[i] != !b[i]) return 0;
        if (a[i] && memcmp(a[i], b[i], sizeof(double) * (size_t)size)) return 0;
    }
    return 1;
}

static double **copy_list(double **a, int n, int64_t size) {
    double **b = dp_calloc((size_t)n, sizeof *b);
    for (int i = 0; i < n; i++)
        b[i] = dp_copy(a[i], size);
    return b;
}

static void states_fwd(dp_sim *s, int lost) {
    const int HV = s->p->HV;
#pragma omp parallel for schedule( \
    dynamic, 1) if (s->fault != DP_FAULT_CU_DIVIDED) /* several ranks own a sequence's end then */
    for (int i = 0; i < s->N * HV; i++)
        for (int sub = 0; sub < s->ctx[i / HV].nlocal; sub++) {
            const int drop = s->fault == DP_FAULT_STATE_LOST ||
                             (s->fault == DP_FAULT_STATE_LATE && s->ctx[i / HV].nlocal > 1);
            state_fwd(s, i / HV, i % HV, sub, lost && drop);
        }
}

static void pre_fwd(dp_sim *s) {
    s->ntraj = 0;
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < s->N * s->p->HV; i++)
        pre_process_fwd(s, i / s->p->HV, i % s->p->HV);
}

static void merge_fwd(dp_sim *s) {
    const int HV = s->p->HV;
    if (s->merge == DP_MERGE_RING)
        for (int hv = 0; hv < HV; hv++)
            merge_fwd_ring(s, hv);
    else
        for (int i = 0; i < s->N * HV; i++)
            merge_fwd_allgather(s, i / HV, i % HV);
}

static void forward(dp_sim *s) {
    const int HV = s->p->HV, nr = s->N * HV;
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    double **before = copy_list(s->S_in, nr, KV);
    pre_fwd(s);
    merge_fwd(s);
    if (!s->have_forward || !same(before, s->S_in, nr, KV) || s->fault) {
        states_fwd(s, 0);
        each_chunk(s, output);
        s->have_forward = 1;
        s->have_backward = 0;
    }
    free_list(before, nr);
}

/* ---- backward -------------------------------------------------------------------------------- */

static void dAv(dp_sim *s, int gi, int hv) {
    dp_chunk *ch = chunk_at(s, gi, hv, DP_STAGE_DAV);
    double *dout = dp_doubles((int64_t)ch->c * ch->V);
    dp_sim_gather_do(s, gi, hv, dout);
    dp_chunk_dAv(ch, dout);
    free(dout);
}

/* dS over groups [g0, g1), last to first; keeps dh and dX in the chunks when keep. */
static void scan_bwd(dp_sim *s, int g0, int g1, int hv, int keep, double *dS) {
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    double *dout = dp_doubles((int64_t)s->design.chunk * s->p->V);
    for (int g = g1 - 1; g >= g0; g--) {
        dp_chunk *ch = chunk_at(s, g, hv, keep ? DP_STAGE_STATE_BWD : DP_STAGE_PRE_BWD), alias;
        dp_sim_gather_do(s, g, hv, dout);
        if (keep) {
            replace(&ch->dh, dp_copy(dS, KV));
            if (!ch->dX) ch->dX = dp_doubles((int64_t)ch->n * ch->V);
        } else if (dp_effect_decay(s, g, hv)) {
            alias = *ch;
            alias.eC = (double *)dp_effect_decay(s, g, hv);
            ch = &alias;
        }
        dp_chunk_state_bwd(ch, dout, dS, keep ? ch->dX : NULL);
    }
    free(dout);
}

static void pre_process_bwd(dp_sim *s, int r, int hv) {
    const dp_context *c = &s->ctx[r];
    const int i = r * s->p->HV + hv, sub = s->fault == DP_FAULT_BWD_LAST_SUBSEQ ? c->nlocal - 1 : 0;
    if (c->is_first) return;
    if (sub) dp_effect_hit(s, r, hv);
    replace(&s->dM[i],
            chain(s, s->first[r][sub], s->first[r][sub + 1], hv, dp_effect_chain(s, r, hv), 1, 0));
    if (s->dH[i]) return;
    s->dH[i] = dp_doubles((int64_t)s->p->K * s->p->V);
    scan_bwd(s, s->first[r][sub], s->first[r][sub + 1], hv, 0, s->dH[i]);
}

static void merge_bwd_allgather(dp_sim *s, int r, int hv) {
    const dp_context *c = &s->ctx[r];
    const int HV = s->p->HV, far = r + c->post_num_ranks;
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    if (c->is_last) return;
    const double *end = end_gradient(s, far, 0);
    double *S = end ? dp_copy(end + hv * KV, KV) : NULL;
    if (S) round_arith_all(s->at[DP_STAGE_MERGE_BWD], S, KV);
    if (s->fault == DP_FAULT_MERGE_NEAREST_FIRST && far - r > 1) dp_effect_hit(s, r, hv);
    if (s->fault == DP_FAULT_MERGE_NEAREST_FIRST)
        for (int j = r + 1; j <= far; j++)
            merge_step(s, r * HV + hv, s->at[DP_STAGE_MERGE_BWD], s->dM[j * HV + hv],
                       s->dH[j * HV + hv], &S);
    else
        for (int j = far; j > r; j--)
            merge_step(s, r * HV + hv, s->at[DP_STAGE_MERGE_BWD], s->dM[j * HV + hv],
                       s->dH[j * HV + hv], &S);
    replace(&s->dS_out[r * HV + hv], S);
}

static void merge_bwd_ring(dp_sim *s, int hv) {
    const int HV = s->p->HV;
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    double *S = NULL;
    for (int r = s->N - 1; r >= 0; r--) {
        const dp_context *c = &s->ctx[r];
        if (!c->is_last) replace(&s->dS_out[r * HV + hv], dp_copy(S, KV));
        if (c->is_first) continue;
        if (ends_here(s, r, 0)) {
            const double *end = end_gradient(s, r, 0);
            replace(&S, end ? dp_copy(end + hv * KV, KV) : NULL);
            if (S) round_arith_all(s->at[DP_STAGE_MERGE_BWD], S, KV);
        }
        merge_step(s, (r - 1) * HV + hv, s->at[DP_STAGE_MERGE_BWD], s->dM[r * HV + hv],
                   s->dH[r * HV + hv], &S);
    }
    free(S);
}

static void state_bwd(dp_sim *s, int r, int hv, int sub) {
    const dp_problem *p = s->p;
    const int64_t KV = (int64_t)p->K * p->V;
    const double *end = end_gradient(s, r, sub);
    double *dS = end ? dp_copy(end + hv * KV, KV) : dp_doubles(KV);
    round_arith_all(s->at[DP_STAGE_STATE_BWD], dS, KV);
    if (!ends_here(s, r, sub)) memcpy(dS, s->dS_out[r * p->HV + hv], sizeof(double) * KV);
    scan_bwd(s, s->first[r][sub], s->first[r][sub + 1], hv, 1, dS);
    if (starts_here(s, r, sub))
        memcpy(s->out.ds0 + (s->ctx[r].local_seq[sub] * (int64_t)p->HV + hv) * KV, dS,
               sizeof(double) * KV);
    free(dS);
}

/* Gradients of the activated inputs of one chunk position, all value heads in order: dq and dk are
 * sums over the heads of a group. dv leaves in the inputs' type. */
static void grads(dp_sim *s, int gi) {
    const dp_problem *p = s->p;
    const dp_group *g = &s->group[gi];
    const int Kg = dp_Kg(p);
    double *dout = dp_doubles((int64_t)g->c * p->V);
    for (int i = 0; i < p->HV; i++) {
        const int hv = dp_effect_order(s, i, p->HV), h = hv / dp_G(p);
        const dp_base b = s->at[DP_STAGE_INTRA_BWD];
        const dp_format out = design_at(s, DP_STAGE_WY_BWD).out;
        dp_chunk *ch = dp_sim_chunk(s, gi, hv);
        dp_chunk_grad x;
        dp_chunk_grad_alloc(&x, ch);
        dp_sim_gather_do(s, gi, hv, dout);
        set_design(s, ch, DP_STAGE_WY_BWD);
        dp_chunk_wy_bwd(ch, &x);
        set_design(s, ch, DP_STAGE_INTRA_BWD);
        dp_chunk_intra_bwd(ch, dout, 0, &x);
        dp_effect_grads(s, gi, hv, &x);
        for (int t = 0; t < g->c; t++) {
            const int64_t tok = g->t0 + t;
            for (int k = 0; k < p->K; k++) {
                double *y = s->dq + (tok * p->H + h) * p->K + k;
                *y = dp_round_arith(b, *y + x.dq[t * p->K + k]);
                y = s->dg + (tok * p->HV + hv) * Kg + (Kg == 1 ? 0 : k);
                *y = dp_round_arith(b, *y + x.dg[t * p->K + k]);
            }
            for (int64_t k = 0; k < (int64_t)p->R * p->K; k++) {
                double *y = s->dk + (tok * p->H + h) * p->R * p->K + k;
                *y = dp_round_arith(b, *y + x.dk[(int64_t)t * p->R * p->K + k]);
            }
            memcpy(s->dbeta + (tok * p->HV + hv) * p->R, x.dbeta + t * p->R, sizeof(double) * p->R);
            for (int64_t i = 0; i < (int64_t)p->R * p->V; i++)
                s->out.dv[(tok * p->HV + hv) * p->R * p->V + i] =
                    dp_store(out, x.dv[(int64_t)t * p->R * p->V + i]);
        }
        dp_chunk_grad_free(&x);
    }
    free(dout);
}

/* Through the activations, rank by rank; dA_log and ddt_bias are per-rank partial sums, then
 * all-reduced in rank order. */
static void gate_bwd(dp_sim *s) {
    const dp_problem *p = s->p;
    const dp_base base = s->at[DP_STAGE_GATE_BWD];
    const dp_format out = design_at(s, DP_STAGE_GATE_BWD).out;
    const double *dq = s->dq, *dk = s->dk, *dg = s->dg, *dbeta = s->dbeta;
    const int Kg = dp_Kg(p);
    double *A = s->out.dA_log, *B = s->out.ddt_bias;
    if (A) memset(A, 0, sizeof(double) * p->HV);
    if (B) memset(B, 0, sizeof(double) * p->HV * Kg);
    double *nq = dp_effect_normalised(s, s->q, p->T * p->H * p->K),
           *nk = dp_effect_normalised(s, s->k, p->T * p->H * p->R * p->K);
    for (int i = 0; i < s->N; i++) {
        const int r = dp_effect_order(s, i, s->N);
        const int64_t a = s->ctx[r].a, b = s->ctx[r].b;
        dp_result part = s->out;
        part.dA_log = A ? dp_doubles(p->HV) : NULL;
        part.ddt_bias = B ? dp_doubles((int64_t)p->HV * Kg) : NULL;
        (base == DP_BASE_FP64 ? dp_activate_bwd : dp_activate_bwd_f32)(
            p, a, b, (nq ? nq : s->q) + a * p->H * p->K, (nk ? nk : s->k) + a * p->H * p->R * p->K,
            s->rstd_q + a * p->H, s->rstd_k + a * p->H * p->R, dq + a * p->H * p->K,
            dk + a * p->H * p->R * p->K, dg + a * p->HV * Kg, dbeta + a * p->HV * p->R, &part);
        const int keep = s->fault != DP_FAULT_GATE_GRAD_PARTIAL || r == 0;
        for (int hv = 0; !keep && hv < p->HV; hv++)
            dp_effect_hit(s, r, hv);
        for (int i = 0; A && keep && i < p->HV; i++)
            A[i] = dp_round_arith(base, A[i] + part.dA_log[i]);
        for (int i = 0; B && keep && i < p->HV * Kg; i++)
            B[i] = dp_round_arith(base, B[i] + part.ddt_bias[i]);
        free(part.dA_log);
        free(part.ddt_bias);
    }
    free(nq);
    free(nk);
    const struct {
        double *x;
        int64_t n;
    } st[] = {{s->out.dq, p->T * p->H * p->K},
              {s->out.dk, p->T * p->H * p->K * p->R},
              {s->out.dg, p->T * p->HV * Kg},
              {s->out.dbeta, p->T * p->HV * p->R}};
    for (size_t i = 0; i < sizeof st / sizeof *st; i++) /* gradients leave in the inputs' type */
        for (int64_t j = 0; j < st[i].n; j++)
            st[i].x[j] = dp_store(out, st[i].x[j]);
}

static void all_grads(dp_sim *s) {
    const dp_problem *p = s->p;
    const struct {
        double **x;
        int64_t n;
    } a[] = {{&s->dq, p->T * p->H * p->K},
             {&s->dk, p->T * p->H * p->K * p->R},
             {&s->dg, p->T * p->HV * dp_Kg(p)},
             {&s->dbeta, p->T * p->HV * p->R}};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        replace(a[i].x, dp_doubles(a[i].n));
#pragma omp parallel for schedule(dynamic, 1)
    for (int g = 0; g < s->ngroup; g++)
        grads(s, g);
}

static void pre_bwd(dp_sim *s) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < s->N * s->p->HV; i++)
        pre_process_bwd(s, i / s->p->HV, i % s->p->HV);
}

static void merge_bwd(dp_sim *s) {
    const int HV = s->p->HV;
    if (s->merge == DP_MERGE_RING)
        for (int hv = 0; hv < HV; hv++)
            merge_bwd_ring(s, hv);
    else
        for (int i = 0; i < s->N * HV; i++)
            merge_bwd_allgather(s, i / HV, i % HV);
}

static void states_bwd(dp_sim *s) {
    const int HV = s->p->HV;
#pragma omp parallel for schedule(dynamic, 1) if (s->fault != DP_FAULT_CU_DIVIDED)
    for (int i = 0; i < s->N * HV; i++)
        for (int sub = 0; sub < s->ctx[i / HV].nlocal; sub++)
            state_bwd(s, i / HV, i % HV, sub);
}

static void dAv_once(dp_sim *s, int gi, int hv) {
    if (!dp_sim_chunk(s, gi, hv)->dvl) dAv(s, gi, hv);
}

static void backward(dp_sim *s) {
    const int HV = s->p->HV, nr = s->N * HV;
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    double **before = copy_list(s->dS_out, nr, KV);
    if (s->fault == DP_FAULT_STATE_LOST || s->fault == DP_FAULT_STATE_LATE) states_fwd(s, 1);
    each_chunk(s, dAv_once);
    pre_bwd(s);
    merge_bwd(s);
    const int known = s->have_backward && same(before, s->dS_out, nr, KV);
    free_list(before, nr);
    if (known && !s->fault) return;
    states_bwd(s);
    all_grads(s);
    gate_bwd(s);
    s->have_backward = 1;
}

static void clear(double **a, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        replace(&a[i], NULL);
}

void dp_sim_begin(dp_sim *s, dp_format chain_format, dp_merge merge, int with_backward) {
    assert(!with_backward || s->p->dout);
    s->chain = chain_format;
    s->merge = merge;
    if (s->fault != DP_FAULT_RACE && s->fault != DP_FAULT_ORDER_BY_RUN)
        memcpy(s->hit, s->hit_kept, (size_t)s->N * s->p->HV);
    if (!s->out.o || (with_backward && !s->out.dq)) {
        dp_result_free(&s->out);
        dp_result_alloc(&s->out, s->p, with_backward);
        s->have_forward = s->have_backward = 0;
    }
    empty_sequences(s);
}

void dp_sim_stage(dp_sim *s, dp_stage stage) {
    const int64_t nch = (int64_t)s->ngroup * s->p->HV, nr = (int64_t)s->N * s->p->HV;
    switch (stage) {
    case DP_STAGE_GATE: activate(s); break;
    case DP_STAGE_INTRA: each_chunk(s, intra); break;
    case DP_STAGE_SOLVE: each_chunk(s, solve); break;
    case DP_STAGE_WY: each_chunk(s, wy); break;
    case DP_STAGE_PRE_FWD:
        clear(s->factor, 2 * nch);
        clear(s->M, nr);
        clear(s->H, nr);
        pre_fwd(s);
        break;
    case DP_STAGE_MERGE_FWD: merge_fwd(s); break;
    case DP_STAGE_STATE_FWD: states_fwd(s, 0); break;
    case DP_STAGE_OUTPUT: each_chunk(s, output); break;
    case DP_STAGE_RECOMPUTE: states_fwd(s, 1); break;
    case DP_STAGE_DAV: each_chunk(s, dAv); break;
    case DP_STAGE_PRE_BWD:
        clear(s->factor, 2 * nch);
        clear(s->dM, nr);
        clear(s->dH, nr);
        pre_bwd(s);
        break;
    case DP_STAGE_MERGE_BWD: merge_bwd(s); break;
    case DP_STAGE_STATE_BWD: states_bwd(s); break;
    case DP_STAGE_WY_BWD: all_grads(s); break;
    case DP_STAGE_INTRA_BWD: break; /* came with wy_bwd */
    case DP_STAGE_GATE_BWD: gate_bwd(s); break;
    default: assert(0);
    }
    s->have_forward = s->have_backward = 0;
}

void dp_sim_run(dp_sim *s, dp_format chain_format, dp_merge merge, int with_backward) {
    dp_sim_begin(s, chain_format, merge, with_backward);
    forward(s);
    if (with_backward) backward(s);
    dp_effect_results(s);
}

void dp_sim_run_ranks(dp_sim *s, dp_format chain_format, dp_merge merge, int with_backward) {
    dp_sim_begin(s, chain_format, merge, with_backward);
    pre_fwd(s);
    merge_fwd(s);
    if (!with_backward) return;
    each_chunk(s, dAv_once);
    pre_bwd(s);
    merge_bwd(s);
}
