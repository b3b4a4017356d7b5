/* The standard of a case: its truth, and the errors that its number formats are expected to make.
 * Then the case over N ranks: what each must see, its fp64 reference, records of runs (standard.h).
 */
#include "standard.h"
#include "harness/record/run.h"
#include "outputs.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"
#include "ref/files/cache.h"

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
                                              .session = c->session.text ? &c->session : NULL,
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

/* ---- truth ----------------------------------------------------------------------------------- */

const char *const dp_truth_pick_names[DP_NTRUTH_PICKS] = {"auto", "mpfr", "dd"};

/* Entries of states that the recurrence passes through, an adjoint step counted as three more. MPFR
 * does about 4e6 a second on a core. */
static double steps(const dp_problem *p, const dp_truth_request *rq) {
    return (double)p->T * p->HV * p->K *
           (p->V * (rq->backward ? 4.0 : 1.0) + (rq->want_M ? p->K : 0));
}
#define MPFR_STEPS 1e7 /* auto: MPFR up to here, some 2.5 seconds of one core */
#define MPFR_MOST 1e11 /* steps times bits, where radii ask for more: minutes of one core */
#define BITS_MOST 8192

static int judges_fp64(const dp_case *c) {
    for (int i = 0; i < c->nbase; i++)
        if (c->base[i] == DP_BASE_FP64) return 1;
    return 0;
}
/* Squares of n numbers, or of the finite ones alone. */
static double sum2(const double *x, int64_t n, int finite) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += !finite || isfinite(x[i]) ? x[i] * x[i] : 0;
    return sum;
}

/* The balls that verdicts ask of a truth; sum: rows over tokens. */
#define NBALLS (DP_NRESULTS + 3)
static const dp_ball *ball_of(const dp_truth *t, int i, int *sum) {
    const dp_ball *const more[] = {&t->S_cut, &t->dS_cut, &t->M_seg};
    *sum = i < DP_NRESULTS && dp_result_fields[i].kind == DP_OF_HEADS;
    return i < DP_NRESULTS ? &t->field[i] : more[i - DP_NRESULTS];
}

int dp_truth_lacks_bits(const dp_problem *p, const dp_truth *t, double ulp, double least) {
    double most = 0;
    for (int i = 0; i < NBALLS; i++) {
        int sum;
        const dp_ball *b = ball_of(t, i, &sum);
        const double ulps = ulp * (sum ? sqrt((double)p->T) : 1);
        const double all = sum2(b->hi, b->rows * b->width, 1);
        for (int64_t r = 0; r < b->rows; r++) {
            const double row = sum2(b->hi + r * b->width, b->width, 0);
            const double fine = fmax(least, ulps * sqrt(row + all / (double)b->rows));
            if (isfinite(row) && !(b->rad[r] <= fine))
                most = fmax(most, isfinite(b->rad[r]) ? b->rad[r] / fine : INFINITY);
        }
    }
    return most <= 1 ? 0 : most < 0x1p1000 ? ilogb(most) + 1 : DP_BITS_LACKING;
}

/* Radii at most an eighth of a rounding of fp64, or 2^-6 of one of fp32. Radii of inputs that are
 * not finite, or that convolutions make, stay: fp64 takes MPFR then. */
static int lacks_bits(const dp_case *c, const dp_truth *t) {
    const int fp64 = judges_fp64(c), *on = c->step.on;
    const int stays = c->allow_nonfinite || on[0] || on[1] || on[2];
    if (stays && !(fp64 && t->kind == DP_TRUTH_DD)) return 0;
    const int lacks = fp64 ? dp_truth_lacks_bits(&c->p, t, 0x1p-58, 0x1p-1000)
                           : dp_truth_lacks_bits(&c->p, t, 0x1p-30, 0x1p-190);
    return stays && lacks ? 1 : lacks;
}

/* A radius that overflowed stands for a truth that is not known, as a large one does. */
static void cap_radii(dp_truth *t) {
    for (int i = 0, sum; i < NBALLS; i++) {
        const dp_ball *b = ball_of(t, i, &sum);
        for (int64_t r = 0; r < b->rows; r++)
            b->rad[r] = fmin(b->rad[r], DBL_MAX);
    }
}
#define AUDIT_COLUMNS 2
#define AUDIT_TOKENS 512 /* of each at most: a second on one core */

static dp_status audited(const dp_case *c, const dp_truth_request *rq, const char *cache,
                         const dp_truth *t, dp_truth_audit *a, dp_err *e) {
    const int64_t what[4] = {rq->kind, rq->backward, AUDIT_COLUMNS, AUDIT_TOKENS};
    const dp_key key = dp_problem_key(&c->p, what, sizeof what);
    dp_part part = {a, sizeof *a};
    uint64_t seed;
    memcpy(&seed, key.byte, sizeof seed);
    if (cache && dp_cache_load(cache, DP_CACHE_AUDIT, key, &part, 1)) return DP_OK;
    const dp_status st = dp_truth_audit_columns(&c->p, t, seed, AUDIT_COLUMNS, AUDIT_TOKENS, a, e);
    if (!st && cache) dp_cache_save(cache, DP_CACHE_AUDIT, key, &part, 1);
    return st;
}

dp_status dp_case_truth(const dp_case *c, dp_truth_request rq, dp_truth_pick pick,
                        const char *cache, dp_truth *t, dp_truth_note *note, dp_err *e) {
    *note = (dp_truth_note){0};
    if (pick == DP_PICK_DD) rq.kind = DP_TRUTH_DD;
    if (pick == DP_PICK_AUTO)
        rq.kind = steps(&c->p, &rq) > MPFR_STEPS && !dp_truth_dd_refuses(&c->p) ? DP_TRUTH_DD
                                                                                : DP_TRUTH_MPFR;
    if (rq.kind == DP_TRUTH_DD && !rq.backward) rq.device = dp_cuda_truth(&c->p);
    dp_err why = {0};
    dp_status st = dp_truth_cached(&c->p, &rq, cache, t, &note->cached, &why);
    for (int lacks, before = INT_MAX; !st && pick != DP_PICK_DD; before = lacks) {
        lacks = lacks_bits(c, t);
        if (!lacks || (lacks >= before && lacks < DP_BITS_LACKING)) break;
        const int bits = (t->bits + lacks + 63) / 64 * 64;
        if (steps(&c->p, &rq) * bits > MPFR_MOST || bits > BITS_MOST) break;
        dp_truth_free(t);
        rq.kind = DP_TRUTH_MPFR;
        rq.bits = bits > c->bits ? bits : c->bits;
        rq.device = NULL;
        st = dp_truth_cached(&c->p, &rq, cache, t, &note->cached, &why);
    }
    if (!st && !c->allow_nonfinite) cap_radii(t);
    if (!st && rq.kind == DP_TRUTH_DD) {
        note->device = rq.device && !note->cached ? dp_cuda_device() : NULL;
        st = audited(c, &rq, cache, t, &note->audit, &why);
        if (st) dp_truth_free(t);
    }
    return st ? dp_fail(e, st, "%s: %s", c->path, why.msg) : DP_OK;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static dp_status true_ranks(dp_sharding *sp, int boundaries, dp_err *e) {
    const dp_problem *p = &sp->c->p;
    if (boundaries) sp->at = dp_calloc((size_t)sp->N * p->HV, sizeof *sp->at);
    for (int r = 0; r < sp->N; r++) {
        dp_context c;
        const dp_status st = dp_context_of(p, sp->N, r, &c, e);
        if (st) return st;
        for (int hv = 0; boundaries && hv < p->HV; hv++)
            dp_truth_at_rank(sp->truth, p, &c, hv, &sp->at[r * p->HV + hv]);
        dp_context_free(&c);
    }
    return DP_OK;
}

dp_status dp_sharding_open(dp_sharding *sp, dp_standard *std, int N, int boundaries, dp_err *e) {
    *sp = (dp_sharding){.std = std, .c = std->c, .N = N};
    if (std->other) return DP_OK;
    sp->truth = &std->truth;
    const dp_status st = true_ranks(sp, boundaries, e);
    if (st) return st;
    sp->windows = dp_windows_of(&sp->c->p, N);
    if (sp->c->session.text) {
        sp->first_of_call = dp_calloc((size_t)sp->c->p.T, 1);
        dp_session_firsts(&sp->c->session, sp->c->p.cu, sp->c->p.Nseq, sp->first_of_call);
        return DP_OK; /* the systems of its chunks are none of those that the condition is of */
    }
    return dp_condition_cached(&sp->c->p, N, NULL, std->o->cache, &sp->cond, e);
}

void dp_sharding_close(dp_sharding *sp) {
    for (int i = 0; sp->at && i < sp->N * sp->c->p.HV; i++)
        dp_truth_rank_free(&sp->at[i]);
    for (int i = 0; sp->traj && i < DP_MAX_TRAJ; i++)
        free(sp->traj[i]);
    if (sp->have_fp64) dp_error_bound_base_free(&sp->fp64);
    if (sp->have_ref) dp_sim_free(&sp->ref);
    dp_windows_free(&sp->windows);
    free(sp->at);
    free(sp->traj);
    free(sp->first_of_call);
}

/* ---- the fp64 reference ---------------------------------------------------------------------- */

dp_sim *dp_sharding_reference(dp_sharding *sp) {
    if (sp->have_ref) return &sp->ref;
    dp_sharding_reference_of(sp, DP_CHUNK, &sp->ref);
    sp->have_ref = 1;
    return &sp->ref;
}

void dp_sharding_reference_of(const dp_sharding *sp, int chunk, dp_sim *ref) {
    dp_design exact = dp_design_of(DP_BASE_FP64);
    exact.chunk = chunk;
    const dp_sim_options o = {.first_of_call = sp->first_of_call};
    dp_must(dp_sim_open(ref, &sp->c->p, &exact, sp->first_of_call ? 1 : sp->N, &o, NULL));
    dp_sim_run(ref, DP_FP64, DP_EXCHANGE_ALLGATHER, sp->c->backward);
}

dp_error_bound_base *dp_sharding_fp64(dp_sharding *sp) {
    if (!sp->have_fp64)
        dp_error_bound_base_init(&sp->fp64, dp_sharding_reference(sp), DP_BASE_FP64, 1,
                                 sp->c->backward);
    sp->have_fp64 = 1;
    return &sp->fp64;
}

void dp_sharding_prefixes(dp_sharding *sp) {
    const dp_truth *t = sp->truth;
    const dp_problem *p = &sp->c->p;
    if (sp->traj || p->own.kind || p->HV != 1 || p->Nseq != 1 || !t->M_seg.rows) return;
    const int64_t KK = (int64_t)p->K * p->K, L = p->T / sp->N, a = sp->N >= 3 ? L : 0;
    double *P = NULL, *Q = dp_doubles(KK);
    sp->traj = dp_calloc(DP_MAX_TRAJ, sizeof *sp->traj);
    for (int i = 0; i + 1 < t->nmark; i++) {
        const double *segment = t->M_seg.hi + (int64_t)i * KK;
        if (t->mark[i] < a || t->mark[i] >= a + L) continue;
        if (P) {
            dp_mm(DP_FP64, 0, 0, p->K, p->K, p->K, segment, P, Q);
            double *was = P;
            P = Q;
            Q = was;
        } else {
            P = dp_copy(segment, KK);
        }
        for (int x = 0; x < DP_MAX_TRAJ; x++)
            if (a + ((int64_t)DP_CHUNK << x) == t->mark[i + 1]) sp->traj[x] = dp_copy(P, KK);
    }
    free(P);
    free(Q);
}

/* ---- runs on it ------------------------------------------------------------------------------ */

dp_claim dp_run_claim(const dp_run *r) {
    dp_claim c = {r->parts ? r->parts : r->ranks, r->design, r->chain, 0};
    c.design.drop = 0; /* draws drop nothing */
    return c;
}

void dp_sharding_expect(dp_sharding *sp, int stages, const dp_run *r) {
    dp_claim claim = dp_run_claim(r);
    claim.stages = stages;
    dp_standard_expect(sp->std, r->set, 1, &claim);
}

const dp_expected *dp_sharding_expected(const dp_sharding *sp, const dp_run *r) {
    const dp_claim claim = dp_run_claim(r);
    return dp_expectations_find(&sp->std->expect, &claim, r->set);
}

/* Says in the record which truth judges it. */
static void note_truth(const dp_sharding *sp, dp_run *r) {
    const dp_truth_note *note = &sp->std->note;
    r->truth_kind = dp_truth_kind_names[sp->truth->kind];
    r->truth_bits = sp->truth->bits;
    r->truth_cached = note->cached;
    r->truth_device = note->device;
    r->truth_audit = note->audit;
    r->truth_radius = sp->std->radius;
    r->cond = sp->cond;
}

dp_run *dp_sharding_record(const dp_sharding *sp, const dp_how *how, dp_runs *out) {
    dp_run *r = dp_runs_add(out, sp->c);
    r->backend = how->backend;
    r->ranks = sp->N;
    const dp_owners own = dp_op_of(sp->c)->has_conv ? sp->c->conv.own : sp->c->p.own;
    r->own = own.kind;
    if (r->own) {
        r->ranks = own.ranks;
        r->parts = sp->N;
    }
    r->base = how->base;
    r->chain = how->chain;
    r->design = how->design;
    if (sp->std->o->drop) r->design.drop = sp->std->o->drop;
    r->let_unjudged = sp->std->o->unjudged;
    r->has_base = r->has_chain = 1;
    if (sp->first_of_call && dp_session_rolls_back(&sp->c->session))
        r->rollback = "accepted tokens run again";
    if (sp->truth) note_truth(sp, r);
    return r;
}
