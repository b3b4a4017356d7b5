/* A simulation made for a problem, a design and a number of ranks (ranks.h). */
#include "ranks_stages.h"
#include "ref/chunk/gate.h"
#include "ref/vocabulary/recurrence.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* Arrays once a rank and head. */
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

static void free_ranks(dp_sim *s) {
    const int64_t n = (int64_t)s->N * s->p->HV;
    double **a[] = {s->S_in, s->M, s->H, s->dS_out, s->dM, s->dH};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        dp_sim_free_list(a[i], n);
    dp_sim_free_list(s->traj, s->traj ? DP_MAX_TRAJ * s->p->HV : 0);
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
    const unsigned char *first_of_call;
    const dp_peers *peers;
    int frame;
    dp_fault fault;
    dp_sim_after_fn *const *after; /* its functions; NULL: none */
} sim_options;
#define OWN ((sim_options){.linear = &dp_linear_own})

/* Keeps the rank of this process, whose tokens are all that there are. */
static void keep_own(dp_sim *s) {
    int64_t t = 0;
    for (int r = 0; r < s->N; r++) {
        dp_context *c = &s->ctx[r];
        if (!dp_sim_has(s, r)) continue;
        c->a = t;
        c->b = t += c->L;
    }
}

/* The part that no chain format changes. */
static void begin_chunks(dp_sim *s) {
    const int64_t nch = (int64_t)s->ngroup * s->p->HV;
    s->ch = dp_calloc((size_t)nch, sizeof *s->ch);
    s->factor = dp_calloc((size_t)(2 * nch), sizeof *s->factor);
    dp_sim_do(s, DP_STAGE_INTRA);
    dp_sim_do(s, DP_STAGE_SOLVE);
    dp_sim_do(s, DP_STAGE_WY);
}

/* exp(-g) of a gate has to be a number of every base (ref/chunk/gate.h). */
static int factors_overflow(const dp_sim *s, dp_err *e) {
    const dp_problem *p = s->p;
    for (int64_t i = 0; dp_by_rows(p) && dp_has_growth(p) && i < p->T * p->HV * dp_Kg(p); i++)
        if (s->g[i] < DP_FACTORS_GATE)
            return dp_fail(e, DP_EINPUT, "g: a log decay of %g: %s is computed down to %g", s->g[i],
                           dp_models[p->model].name, DP_FACTORS_GATE) != DP_OK;
    return 0;
}

static dp_status open_sim(dp_sim *s, const dp_problem *p, const dp_design *design,
                          const dp_base at[DP_NSTAGES], sim_options o, int N, dp_err *e) {
    *s = (dp_sim){.p = p,
                  .base = at[0],
                  .design = *design,
                  .N = N,
                  .peers = o.peers,
                  .fault = o.fault,
                  .linear = o.linear,
                  .first_of_call = o.first_of_call,
                  .by_inverse = o.by_inverse,
                  .payload = design->sending.payload,
                  .given = p};
    s->hit = dp_calloc((size_t)N * p->HV, 1);
    if (o.after) memcpy(s->after, o.after, sizeof s->after);
    memcpy(s->at, at, sizeof s->at);
    s->ctx = dp_calloc((size_t)N, sizeof *s->ctx);
    for (int r = 0; r < N; r++) {
        dp_status st = dp_context_of(p, N, r, &s->ctx[r], e);
        if (st) {
            s->N = r;
            dp_sim_free(s);
            return st;
        }
    }
    if (o.peers) keep_own(s);
    dp_sim_after(s, DP_AFTER_OPENING, (dp_sim_place){0});
    if (!o.frame) dp_sim_do(s, DP_STAGE_GATE);
    if (!o.frame && factors_overflow(s, e)) {
        dp_sim_free(s);
        return DP_EINPUT;
    }
    dp_sim_list_groups(s);
    if (!o.frame) begin_chunks(s);
    alloc_ranks(s);
    return DP_OK;
}

static dp_status open_uniform(dp_sim *s, const dp_problem *p, const dp_design *design,
                              sim_options o, int N, dp_err *e) {
    dp_base at[DP_NSTAGES];
    for (int i = 0; i < DP_NSTAGES; i++)
        at[i] = design->base;
    o.by_inverse = design->product != 0;
    return open_sim(s, p, design, at, o, N, e);
}

void dp_sim_open_whole(const dp_sim *s, const dp_problem *p, dp_sim *whole) {
    const sim_options o = {
        .linear = s->linear, .by_inverse = s->by_inverse, .fault = s->fault, .after = s->after};
    const dp_status st = open_sim(whole, p, &s->design, s->at, o, 1, NULL);
    assert(!st); /* one rank has all tokens */
    (void)st;
}

dp_status dp_sim_new_policy(dp_sim *s, const dp_problem *p, const dp_base at[DP_NSTAGES], int N,
                            dp_err *e) {
    const dp_design design = dp_design_of(at[0]);
    const int by_inverse = at[DP_STAGE_SOLVE] == DP_BASE_BF16 || at[DP_STAGE_WY] == DP_BASE_BF16;
    sim_options o = OWN;
    o.by_inverse = by_inverse;
    return open_sim(s, p, &design, at, o, N, e);
}

dp_status dp_sim_new_faulty(dp_sim *s, const dp_problem *p, const dp_design *design, int N,
                            dp_fault fault, dp_sim_after_fn *const after[DP_NAFTER], dp_err *e) {
    sim_options o = OWN;
    o.fault = fault;
    o.after = after;
    return open_uniform(s, p, design, o, N, e);
}

dp_status dp_sim_new_lapack(dp_sim *s, const dp_problem *p, const dp_design *design, int N,
                            dp_err *e) {
    return open_uniform(s, p, design, (sim_options){.linear = &dp_linear_lapack}, N, e);
}

dp_status dp_sim_new_rank(dp_sim *s, const dp_problem *part, dp_base base, const dp_peers *peers,
                          dp_err *e) {
    const dp_design design = dp_design_of(base);
    sim_options o = OWN;
    if (dp_has_halo(part))
        return dp_fail(e, DP_EINPUT,
                       "%s: its ranks need more of the tokens before theirs than the state: not "
                       "computed by processes",
                       dp_models[part->model].name);
    o.peers = peers;
    const int64_t T = part->cu[part->Nseq];
    const int N = part->own.kind ? dp_own_parts(part->own.kind, T, part->own.ranks) : peers->N;
    return open_uniform(s, part, &design, o, N, e);
}

dp_status dp_sim_new_frame(dp_sim *s, const dp_problem *p, dp_base base, int N, dp_err *e) {
    const dp_design design = dp_design_of(base);
    sim_options o = OWN;
    o.frame = 1;
    return open_uniform(s, p, &design, o, N, e);
}

dp_status dp_sim_new_design(dp_sim *s, const dp_problem *p, const dp_design *design, int N,
                            dp_err *e) {
    assert(design->chunk > 0);
    return open_uniform(s, p, design, OWN, N, e);
}

dp_status dp_sim_new_calls(dp_sim *s, const dp_problem *p, const dp_design *design,
                           const unsigned char *first_of_call, dp_err *e) {
    sim_options o = OWN;
    assert(design->chunk > 0);
    o.first_of_call = first_of_call;
    return open_uniform(s, p, design, o, 1, e);
}

void dp_sim_free(dp_sim *s) {
    const int64_t nch = (int64_t)s->ngroup * s->p->HV;
    if (s->heads) {
        dp_sim_free(&s->heads->sim);
        if (s->peers) dp_problem_free(&s->heads->p);
        free(s->heads);
    }
    dp_sim_free_list(s->factor, 2 * nch);
    if (s->ch)
        for (int64_t i = 0; i < nch; i++)
            dp_chunk_free(&s->ch[i]);
    free_ranks(s);
    dp_result_free(&s->out);
    dp_units_free(&s->units);
    for (int i = 0; i < DP_NSIM_ARRAYS; i++)
        free(*dp_sim_array(s, i));
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
        const dp_status st = dp_context_of(s->p, N, r, &next.ctx[r], &e);
        assert(!st); /* the caller has split the problem so already */
        (void)st;
    }
    dp_sim_list_groups(&next);
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
