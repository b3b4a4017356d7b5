/* The runs of a case. Case and options become a plan, a row a run. The driver walks it: one truth,
 * then every subject of the operation on every number of ranks (subjects.h). First comes the
 * standard of a case (standard.h): its truth, draws, and what each rank must see. Then the begin
 * and the end of a run: options, tiers, the tensor that represents it (run.h). */
#include "harness/mpi/processes.h"
#include "ref/arithmetic/mm.h"
#include "ref/files/cache.h"
#include "subjects.h"

#include <float.h>
#include <limits.h>
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the subjects of an operation ------------------------------------------------------------ */

static const dp_subjects OF_RECURRENCE = {.subject = {&dp_on_simulated, &dp_on_processes,
                                                      &dp_on_lapack, &dp_on_library, &dp_on_cuda,
                                                      &dp_on_nccl}};
static const dp_subjects *const SUBJECTS[DP_NOPS] = {
    [DP_OP_RECURRENCE] = &OF_RECURRENCE, [DP_OP_STEP] = &OF_RECURRENCE,
    [DP_OP_SESSION] = &OF_RECURRENCE,    [DP_OP_STEP_SESSION] = &OF_RECURRENCE,
    [DP_OP_CONV] = &dp_subjects_of_conv, [DP_OP_CHAIN] = &dp_subjects_of_chain};

static const dp_subjects *subjects_of(const dp_case *c) { return SUBJECTS[c->op - dp_operations]; }

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
    DP_OWN int64_t *cut = dp_case_cuts(c, &ncut);
    if (!boundaries) ncut = 0;
    *s = (dp_standard){.c = c, .o = o, .boundaries = boundaries};
    for (int i = 0; i < DP_NQKV; i++)
        s->front.conv[i] = c->step.on[i] ? &c->step.conv[i] : NULL;
    const dp_truth_request rq = {.bits = c->bits,
                                 .backward = c->backward,
                                 .ncut = ncut,
                                 .cut = cut,
                                 .want_M = ncut > 0,
                                 .progress = o->progress};
    const dp_status st =
        dp_case_truth(c, rq, o->truth ? *o->truth : c->truth, o->cache, &s->truth, &s->note, e);
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

static void standard_expect(dp_standard *s, int set, int n, const dp_claim *claim) {
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

/* The first that a subject offers. */
static const dp_truth_device *device_of(const dp_problem *p) {
    const dp_truth_device *d = NULL;
    for (const dp_subject_kind *const *k = OF_RECURRENCE.subject; *k && !d; k++)
        if ((*k)->truth) d = (*k)->truth(p);
    return d;
}

dp_status dp_case_truth(const dp_case *c, dp_truth_request rq, dp_truth_pick pick,
                        const char *cache, dp_truth *t, dp_truth_note *note, dp_err *e) {
    *note = (dp_truth_note){0};
    if (pick == DP_PICK_DD) rq.kind = DP_TRUTH_DD;
    if (pick == DP_PICK_AUTO)
        rq.kind = steps(&c->p, &rq) > MPFR_STEPS && !dp_truth_dd_refuses(&c->p) ? DP_TRUTH_DD
                                                                                : DP_TRUTH_MPFR;
    if (rq.kind == DP_TRUTH_DD && !rq.backward) rq.device = device_of(&c->p);
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
        note->device = rq.device && !note->cached ? rq.device->name() : NULL;
        st = audited(c, &rq, cache, t, &note->audit, &why);
        if (st) dp_truth_free(t);
    }
    return st ? dp_fail(e, st, "%s: %s", c->path, why.msg) : DP_OK;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static dp_status true_ranks(dp_sharding *sp, dp_err *e) {
    const dp_problem *p = &sp->c->p;
    const int boundaries = sp->std->boundaries;
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

void dp_condition_of(const dp_sim *ref, dp_condition *c) {
    const int HV = ref->p->HV;
    const int64_t n = (int64_t)ref->ngroup * HV;
    DP_OWN dp_condition *s = dp_calloc((size_t)n, sizeof *s);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; i++)
        s[i] = dp_chunk_condition(&ref->ch[i]);
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
}

/* Makes the reference where nothing is cached. */
static dp_status condition_cached(const dp_problem *p, int N, const char *cache, dp_condition *c,
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
    DP_FREED(dp_sim_free) dp_sim s;
    const dp_status st = dp_sim_open(&s, p, &exact, N, NULL, e);
    if (st) return st;
    dp_condition_of(&s, c);
    if (cache) dp_cache_save(cache, DP_CACHE_CONDITION, key, part, 1);
    return DP_OK;
}

dp_status dp_sharding_open(dp_sharding *sp, dp_standard *std, int N, dp_err *e) {
    *sp = (dp_sharding){.std = std, .c = std->c, .N = N};
    if (std->other) return DP_OK;
    sp->truth = &std->truth;
    const dp_status st = true_ranks(sp, e);
    if (st) return st;
    sp->windows = dp_windows_of(&sp->c->p, N);
    if (sp->c->session.text) {
        sp->first_of_call = dp_calloc((size_t)sp->c->p.T, 1);
        dp_session_firsts(&sp->c->session, sp->c->p.cu, sp->c->p.Nseq, sp->first_of_call);
        return DP_OK; /* the systems of its chunks are none of those that the condition is of */
    }
    return condition_cached(&sp->c->p, N, std->o->cache, &sp->cond, e);
}

void dp_sharding_close(dp_sharding *sp) {
    for (int i = 0; sp->at && i < sp->N * sp->c->p.HV; i++)
        dp_truth_rank_free(&sp->at[i]);
    for (int i = 0; sp->traj && i < DP_MAX_TRAJ; i++)
        free(sp->traj[i]);
    if (sp->fp64.ref) dp_error_bound_base_free(&sp->fp64);
    if (sp->ref.p) dp_sim_free(&sp->ref);
    dp_windows_free(&sp->windows);
    DP_FREE(sp->at, sp->traj, sp->first_of_call);
}

/* ---- the fp64 reference ---------------------------------------------------------------------- */

dp_sim *dp_sharding_reference(dp_sharding *sp) {
    if (sp->ref.p) return &sp->ref;
    dp_must(dp_sim_reference(&sp->ref, &sp->c->p, DP_CHUNK, sp->first_of_call ? 1 : sp->N,
                             sp->first_of_call, sp->c->backward, NULL));
    return &sp->ref;
}

void dp_sharding_prefixes(dp_sharding *sp) {
    const dp_truth *t = sp->truth;
    const dp_problem *p = &sp->c->p;
    if (sp->traj || p->own.kind || p->HV != 1 || p->Nseq != 1 || !t->M_seg.rows) return;
    const int64_t KK = (int64_t)p->K * p->K, L = p->T / sp->N, a = sp->N >= 3 ? L : 0;
    DP_OWN double *P = NULL, *Q = dp_doubles(KK);
    sp->traj = dp_calloc(DP_MAX_TRAJ, sizeof *sp->traj);
    for (int i = 0; i + 1 < t->nmark; i++) {
        const double *segment = t->M_seg.hi + (int64_t)i * KK;
        if (t->mark[i] < a || t->mark[i] >= a + L) continue;
        if (P) {
            dp_mm(DP_FP64, 0, 0, p->K, p->K, p->K, segment, P, Q);
            dp_swap(&P, &Q);
        } else {
            P = dp_copy(segment, KK);
        }
        for (int x = 0; x < DP_MAX_TRAJ; x++)
            if (a + ((int64_t)DP_CHUNK << x) == t->mark[i + 1]) sp->traj[x] = dp_copy(P, KK);
    }
}

/* ---- runs on it ------------------------------------------------------------------------------ */

static dp_claim claim_of(const dp_run *r, const dp_design *design, int stages) {
    dp_claim c = {r->parts ? r->parts : r->ranks, *design, r->chain, stages};
    c.design.drop = 0; /* draws drop nothing */
    return c;
}

void dp_sharding_expect(dp_sharding *sp, const dp_run *r, int stages, int n,
                        const dp_design *design) {
    dp_claim claim[DP_COMMON_DESIGNS];
    for (int i = 0; i < n; i++)
        claim[i] = claim_of(r, &design[i], stages);
    if (n) standard_expect(sp->std, r->set, n, claim);
}

const dp_expected *dp_sharding_expected(dp_sharding *sp, const dp_run *r, int stages, int draw) {
    const dp_claim claim = claim_of(r, &r->design, stages);
    if (draw) standard_expect(sp->std, r->set, 1, &claim);
    return dp_expectations_find(&sp->std->expect, &claim, r->set);
}

/* ---- what options leave of a case ------------------------------------------------------------ */

/* Do the options select the backend? NCCL only by name, since it takes a device a rank. */
static int options_want(const dp_run_options *o, dp_backend b) {
    const dp_values *only = &o->only[DP_ID_BACKEND];
    for (int i = 0; i < only->n; i++)
        if (only->of[i] == (int)b) return 1;
    return !only->n && dp_backends[b].by_default;
}

const char *dp_unavailable(dp_backend b, int N) {
    return dp_backends[b].peers ? dp_mpi_unavailable(N) : dp_cuda_unavailable(b, N);
}

static dp_run *add_run(const dp_case *c, dp_backend b, dp_runs *out) {
    dp_run *r = dp_runs_add(out, c);
    r->backend = b;
    return r;
}

static void identify(dp_run *r) {
    if (!r->id) r->id = dp_run_id(r);
}

static void run_done(dp_run *r, const dp_run_options *o) {
    if (o->done) o->done(r, o->arg);
}

/* Tells of a run that was not made, for this reason. Sets its ID where it has none. */
static void skip_run(dp_run *r, const char *why, const dp_run_options *o) {
    identify(r);
    r->verdict = DP_SKIPPED;
    snprintf(r->why, sizeof r->why, "%s", why);
    run_done(r, o);
}

int dp_select(int ncase, const int *in_case, const dp_values *want, int *out) {
    int n = 0;
    for (int i = 0; i < ncase; i++) {
        int keep = want->n == 0;
        for (int j = 0; j < want->n; j++)
            keep |= want->of[j] == in_case[i];
        if (keep) out[n++] = in_case[i];
    }
    return n;
}

/* A case with the numbers of ranks that are asked for. */
typedef struct {
    const dp_case *c;
    const dp_run_options *o;
    int n, ranks[DP_MAX_RANK_COUNTS];
    void *truth; /* of an operation without a recurrence */
} selection;

static dp_asked asked_on(const selection *x, int N) {
    const dp_case *c = x->c;
    const dp_run_options *o = x->o;
    dp_asked a = {.c = c, .o = o, .N = N, .most = N};
    int all = o->only[DP_ID_CHAIN].n > 0; /* who asks for one gets it */
    a.nbase = dp_select(c->nbase, (const int *)c->base, &o->only[DP_ID_BASE], (int *)a.base);
    a.nchain = dp_select(c->nchain, (const int *)c->chain, &o->only[DP_ID_CHAIN], (int *)a.chain);
    for (int i = 0; i < c->nranks; i++)
        all |= c->ranks[i] == N && c->all_chains[i];
    for (int i = 0; i < x->n; i++)
        if (x->ranks[i] > a.most) a.most = x->ranks[i];
    a.few = a.nchain > 1 && (N == 1 || !all) ? 1 : a.nchain;
    return a;
}

/* A library is the caller's own: it is there where the options have one. */
static int is_asked_for(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o) {
    const dp_backend b = k->backend;
    return b >= DP_NCHOSEN_BACKENDS ||
           (options_want(o, b) && c->op->backends >> b & 1 &&
            (!o->fault || dp_backends[b].faulty) && !(k->absent && k->absent(b, 1)));
}

dp_values dp_values_of(int n, const void *x) {
    dp_values v = {n, {0}};
    memcpy(v.of, x, sizeof *v.of * (size_t)n);
    return v;
}

/* That of a fault, those that are asked for, those of the case. */
static dp_values asked_or(unsigned fault, const dp_values *asked, int n, const void *of_case) {
    if (fault) return (dp_values){1, {(int)fault}};
    return asked->n ? *asked : dp_values_of(n, of_case);
}

dp_ways dp_ways_of(const dp_case *c, const dp_run_options *o, int which) {
    const dp_fault_info *f = &dp_faults[o->fault];
    const dp_values merge = asked_or(f->exchange, &o->only[DP_ID_MERGE], c->nmerge, c->merge),
                    payload =
                        asked_or(f->payload, &o->only[DP_ID_PAYLOAD], c->npayload, c->payload);
    const int np = payload.n;
    dp_ways w = {0};
    for (int i = 0; i < merge.n * np; i++) {
        const dp_sending x = {.exchange = (dp_exchange)merge.of[i / np],
                              .payload = (dp_payload)payload.of[i % np]};
        const dp_exchange_info *info = &dp_exchanges[x.exchange];
        if ((which && !info->pairs) || (i % np && !info->states)) continue;
        w.way[w.n++] = info->states ? x : (dp_sending){.exchange = x.exchange};
    }
    return w;
}

/* Which rank owns which tokens: what is asked for, whatever the case says, else what it says. */
static int owns_of(const dp_case *c, const dp_run_options *o, int own[DP_NOWNS]) {
    const dp_values asked = asked_or(0, &o->only[DP_ID_OWN], c->nown, c->own);
    int n = 0;
    for (int i = 0; i < asked.n; i++) {
        own[n] = asked.of[i] ? asked.of[i] : (int)dp_faults[o->fault].own;
        if (!n || own[n] != own[n - 1]) n++;
    }
    return n;
}

/* ---- the plan -------------------------------------------------------------------------------- */

dp_planned *dp_plan_add(dp_plan *plan, const dp_subject_kind *k, int N, dp_base base,
                        dp_format chain) {
    if (plan->n == plan->cap) {
        plan->cap = plan->cap ? 2 * plan->cap : 16;
        plan->row = dp_realloc(plan->row, sizeof *plan->row * (size_t)plan->cap);
    }
    dp_planned *x = &plan->row[plan->n++];
    *x =
        (dp_planned){.kind = k, .N = N, .base = base, .chain = chain, .design = dp_design_of(base)};
    return x;
}

static dp_status plan_of(const selection *x, dp_plan *plan, dp_err *e) {
    dp_status st = DP_OK;
    for (int i = 0; i < x->n; i++) {
        const dp_asked a = asked_on(x, x->ranks[i]);
        for (const dp_subject_kind *const *k = subjects_of(x->c)->subject; *k && !st; k++)
            if (is_asked_for(*k, x->c, x->o)) st = (*k)->plan(*k, &a, plan, e);
    }
    return st;
}

static dp_status can_be_sharded(const selection *x, dp_err *e) {
    const dp_problem *p = &x->c->p;
    for (int i = 0; i < x->n; i++) {
        dp_context context;
        const dp_status st = dp_context_of(p, x->ranks[i], 0, &context, e);
        if (st) return st;
        dp_context_free(&context);
    }
    return DP_OK;
}

/* A claim replaces one that differs from it only by its stages. On one rank it replaces one that
 * differs by the format of the chain, which does not exist there. The same draws serve both. */
static int add_claim(const dp_claim *claim, dp_claim *list, int n) {
    int i = 0;
    for (; i < n; i++) {
        const dp_claim *x = &list[i];
        if (x->N == claim->N && x->design.base == claim->design.base &&
            !memcmp(&x->design.sending, &claim->design.sending, sizeof x->design.sending) &&
            (claim->N == 1 || x->chain == claim->chain))
            break;
    }
    list[i] = *claim;
    return n + (i == n);
}

/* Claims that are known before: asked for at once, so that every draw is made once. */
static void expect_all(const dp_plan *plan, dp_standard *std) {
    DP_OWN dp_claim *list = dp_calloc((size_t)plan->n, sizeof *list);
    int n = 0;
    for (int i = 0; i < plan->n; i++) {
        const dp_planned *x = &plan->row[i];
        const dp_claim claim = {x->N, x->design, x->chain, x->stages};
        if (x->claimed) n = add_claim(&claim, list, n);
    }
    standard_expect(std, 0, n, list);
}

/* ---- the driver ------------------------------------------------------------------------------ */

static double since(double from) { return omp_get_wtime() - from; }

static void free_made(const dp_planned *x, const dp_case *c, dp_made *m) {
    if (m->own) x->kind->free(c, m);
    dp_calls_seen_free(&m->seen);
}

static dp_status compute(const dp_planned *x, dp_sharding *sp, void **kept, dp_made *m, dp_err *e) {
    *m = (dp_made){.design = x->design, .from = since(0)};
    const dp_status st = x->kind->compute(x, sp, kept, m, e);
    if (st) free_made(x, sp->c, m);
    return st;
}

/* Keeps the result of a row that runs later. The wait does not count as time of the run. */
static void keep_made(dp_planned *x, const dp_made *m) {
    x->made = dp_alloc(1, sizeof *m);
    *x->made = *m;
    x->made->from = since(m->from); /* its time so far */
}

static dp_made take_made(dp_planned *x) {
    dp_made m = *x->made;
    free(x->made);
    x->made = NULL;
    m.from = since(m.from);
    return m;
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

dp_run *dp_planned_record(const dp_planned *x, const dp_sharding *sp, const dp_made *m,
                          dp_runs *out) {
    const dp_owners own = sp->c->p.own;
    dp_run *r = add_run(sp->c, x->kind->backend, out);
    r->own = own.kind;
    r->ranks = own.kind ? own.ranks : sp->N;
    r->parts = own.kind ? sp->N : 0;
    r->base = x->base;
    r->chain = x->chain;
    r->design = m ? m->design : x->design;
    if (sp->std->o->drop) r->design.drop = sp->std->o->drop;
    r->let_unjudged = sp->std->o->unjudged;
    if (sp->first_of_call && sp->c->session.rolls_back) r->rollback = "accepted tokens run again";
    r->variant = x->variant;
    r->merge = x->way.exchange;
    r->payload = x->way.payload;
    r->has_base = 1;
    r->has_merge = x->says_way;
    r->has_chain = !x->bare;
    if (sp->truth) note_truth(sp, r);
    if (x->kind->note) x->kind->note(sp, m, r);
    identify(r);
    return r;
}

static void note_failure(const dp_made *m, dp_run *r) {
    r->verdict = m->verdict;
    r->seconds = since(m->from);
    snprintf(r->why, sizeof r->why, "%s", m->why);
}

static dp_status judge(const dp_planned *x, dp_sharding *sp, dp_made *m, dp_bound_bases *bases,
                       dp_run *r, dp_err *e) {
    if (*m->why) {
        note_failure(m, r);
        return DP_OK;
    }
    if (x->kind->judge) {
        x->kind->judge(sp, m, r);
        return DP_OK;
    }
    sp->step = m->front;
    dp_status st = dp_judge_calls(sp, &m->out, &m->seen, bases, r, e);
    if (!st && x->kind->after) st = x->kind->after(x, sp, m, bases, r, e);
    sp->step = NULL;
    return st;
}

/* Rows of one subject on N ranks in one base. They share a part of their bounds, and the arrays
 * that the subject keeps. */
typedef struct {
    dp_sharding *sp;
    dp_bound_bases bases;
    void *kept;
} driver;

static dp_status run_row(driver *d, dp_planned *x, dp_runs *out, dp_err *e) {
    const dp_run_options *o = d->sp->std->o;
    dp_made m;
    dp_status st = DP_OK;
    if (*x->no) {
        skip_run(dp_planned_record(x, d->sp, NULL, out), x->no, o);
        return DP_OK;
    }
    if (x->made)
        m = take_made(x);
    else
        st = compute(x, d->sp, &d->kept, &m, e);
    if (st) return st;
    dp_run *r = dp_planned_record(x, d->sp, &m, out);
    st = judge(x, d->sp, &m, &d->bases, r, e);
    r->seconds = since(m.from);
    run_done(r, o);
    free_made(x, d->sp->c, &m);
    return st;
}

/* Computes a row before the walk comes to it. */
static void compute_aside(dp_planned *x, dp_sharding *sp) {
    dp_made m;
    if (*x->no || compute(x, sp, NULL, &m, NULL)) return;
    keep_made(x, &m);
}

/* The n rows of one number of ranks. */
static dp_status run_on(dp_standard *std, dp_planned *x, int n, dp_runs *out, dp_err *e) {
    DP_FREED(dp_sharding_close) dp_sharding sp;
    dp_status st = dp_sharding_open(&sp, std, x->N, e);
    for (int i = 0, k; i < n && !st; i = k) {
        driver d = {.sp = &sp};
        for (k = i; k < n && x[k].kind == x[i].kind && x[k].base == x[i].base;)
            k++;
#pragma omp parallel for schedule(dynamic, 1)
        for (int j = i; j < (x[i].kind->side_by_side ? k : i); j++)
            compute_aside(&x[j], &sp);
        for (int j = i; j < k && !st; j++)
            st = run_row(&d, &x[j], out, e);
        dp_bound_bases_free(&d.bases);
        if (d.kept) x[i].kind->close(&x[i], std->c, d.kept);
    }
    return st;
}

/* ---- results that were computed elsewhere ---------------------------------------------------- */

static void note_given(DP_UNUSED const dp_sharding *sp, const dp_made *m, dp_run *r) {
    const dp_stored_results *g = m->out.stored;
    r->other_design = !g->same_design;
    r->undeclared = g->explained || m->design.undeclared || (!g->design && !g->same_design);
}

static const dp_subject_kind OF_FILES = {.backend = DP_BACKEND_FILE, .note = note_given};

/* Is anything there that ranks exchange? */
static int exchanged(const dp_stored_results *g) {
    int any = 0;
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        any |= g->stage[i] && dp_stage_tensors[i].kind == DP_PER_RANK;
    return any;
}

dp_status dp_run_stored(const dp_case *c, const dp_run_options *o, const dp_stored_results *g,
                        dp_runs *out, dp_err *e) {
    dp_planned row = {
        .kind = &OF_FILES, .N = c->ranks[0], .base = c->base[0], .chain = c->chain[0]};
    const dp_made m = {.out = {.results = &g->r, .stage = g->stage, .stored = g},
                       .design = g->design ? *g->design : dp_design_of(row.base),
                       .from = since(0)};
    DP_FREED(dp_standard_close) dp_standard std;
    keep_made(&row, &m);
    dp_status st = dp_standard_open(&std, c, o, exchanged(g), e);
    if (!st) st = run_on(&std, &row, 1, out, e);
    if (row.made) take_made(&row);
    return st;
}

/* ---- all subjects ---------------------------------------------------------------------------- */

/* Does the subject alone compute here? */
static int is_alone(const dp_plan *plan) {
    int others = 0;
    for (int i = 0; i < plan->n; i++)
        others |= plan->row[i].kind != &dp_on_library;
    return !others;
}

/* Computes rows, before there is a truth, until the subject serves one. 0: it serves none, the
 * records that say why are in *out, and there is nothing to judge. */
static dp_status serves_any(dp_standard *std, const dp_plan *plan, dp_runs *out, int *any,
                            dp_err *e) {
    unsigned char session = std->c->session.text != NULL; /* that it is one */
    dp_runs refused = {0};
    dp_status st = DP_OK;
    *any = 0;
    for (int i = 0; i < plan->n && !*any && !st; i++) {
        dp_planned *x = &plan->row[i];
        dp_sharding sp = {
            .std = std, .c = std->c, .N = x->N, .first_of_call = session ? &session : NULL};
        dp_made m;
        if ((st = compute(x, &sp, NULL, &m, e))) break;
        *any = !*m.why || m.verdict != DP_SKIPPED;
        if (*any) {
            keep_made(x, &m);
        } else {
            note_failure(&m, dp_planned_record(x, &sp, &m, &refused));
            free_made(x, std->c, &m);
        }
    }
    for (int i = 0; i < refused.n && !*any && !st; i++)
        run_done(&refused.run[i], std->o);
    if (*any || st)
        dp_runs_free(&refused);
    else
        dp_runs_move(out, &refused);
    return st;
}

static dp_status open_standard(dp_standard *std, const selection *x, const dp_plan *plan,
                               dp_err *e) {
    if (x->truth) return DP_OK;
    dp_status st = dp_standard_open(std, x->c, x->o, 1, e);
    if (!st) st = can_be_sharded(x, e);
    if (!st) st = dp_sim_takes(&x->c->p, e);
    if (!st) expect_all(plan, std);
    return st;
}

static dp_status run_plan(const selection *x, const dp_plan *plan, dp_runs *out, dp_err *e) {
    dp_standard std = {.c = x->c, .o = x->o, .other = x->truth};
    int any = 1;
    dp_status st = is_alone(plan) ? serves_any(&std, plan, out, &any, e) : DP_OK;
    if (st || !any) return st;
    st = open_standard(&std, x, plan, e);
    for (int i = 0, k; i < plan->n && !st; i = k) {
        for (k = i; k < plan->n && plan->row[k].N == plan->row[i].N;)
            k++;
        st = run_on(&std, &plan->row[i], k - i, out, e);
    }
    for (int i = 0; i < plan->n; i++)
        if (plan->row[i].made) {
            dp_made m = take_made(&plan->row[i]);
            free_made(&plan->row[i], x->c, &m);
        }
    dp_standard_close(&std);
    return st;
}

static dp_status run_selection(const selection *x, dp_runs *out, dp_err *e) {
    dp_plan plan = {0};
    dp_status st = plan_of(x, &plan, e);
    if (!st && plan.n) st = run_plan(x, &plan, out, e);
    free(plan.row);
    return st;
}

/* ---- which rank owns which tokens ------------------------------------------------------------ */

/* A row that says why nothing runs where ranks own their tokens so. */
static void skip_owned(const dp_case *c, const dp_run_options *o, dp_own kind, const char *why,
                       dp_runs *out) {
    dp_run *r = add_run(c, DP_BACKEND_SIM, out);
    r->own = kind;
    r->fault = o->fault;
    r->design = dp_design_of(r->base);
    skip_run(r, why, o);
}

/* Can T tokens not be cut so? Adds a row that says it. */
static int owns_nothing(const dp_case *c, const dp_run_options *o, dp_own kind, int64_t T,
                        int ranks, dp_runs *out) {
    char why[120];
    if (dp_own_parts(kind, T, ranks)) return 0;
    snprintf(why, sizeof why, "T = %lld: a part of %d ranks would have no token", (long long)T,
             ranks);
    skip_owned(c, o, kind, why, out);
    return 1;
}

/* Each number of ranks is a case of its own, whose ranks are the parts that those own: the truth
 * keeps the states between them. */
static dp_status run_owned(const selection *x, dp_own kind, dp_runs *out, dp_err *e) {
    dp_run_options o = *x->o;
    dp_values *owns = &o.only[DP_ID_BACKEND];
    dp_status st = DP_OK;
    owns->n = 0;
    for (int b = 0; b < DP_NBACKENDS; b++)
        if (dp_backends[b].owns && options_want(x->o, b)) owns->of[owns->n++] = b;
    const char *why = dp_faults[o.fault].even ? "this fault is of ranks that own T / N tokens each"
                      : x->c->session.text || x->c->op->has_front
                          ? "ranks of a session, and of a whole step, own T / N tokens each"
                          : NULL;
    if (!owns->n) return DP_OK;
    if (why) {
        skip_owned(x->c, &o, kind, why, out);
        return DP_OK;
    }
    o.only[DP_ID_RANKS].n = 0;
    for (int i = 0; i < x->n && !st; i++) {
        const int64_t T = x->c->op->dims(x->c).of[DP_AXIS_T]; /* it has ranks */
        if (owns_nothing(x->c, &o, kind, T, x->ranks[i], out)) continue;
        const int parts = dp_own_parts(kind, T, x->ranks[i]);
        dp_case c = *x->c;
        c.p.own = c.conv.own = (dp_owners){kind, x->ranks[i]};
        c.nranks = 1;
        c.ranks[0] = parts;
        c.all_chains[0] = 1;
        const selection one = {.c = &c, .o = &o, .n = 1, .ranks = {parts}, .truth = x->truth};
        st = run_selection(&one, out, e);
    }
    return st;
}

/* A row that says why the subject cannot run here, where it is asked for and cannot. */
static void say_absent(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o,
                       dp_runs *out) {
    const dp_values *only = o->only;
    const int whole = !only[DP_ID_RANKS].n && !only[DP_ID_BASE].n && !only[DP_ID_CHAIN].n &&
                      !only[DP_ID_MERGE].n && !o->fault;
    if (!k->absent || !options_want(o, k->backend) || !(whole || only[DP_ID_BACKEND].n)) return;
    const char *no = k->absent(k->backend, 1);
    if (!no) return;
    dp_run *r = add_run(c, k->backend, out);
    r->ranks = 0;
    r->design = dp_design_of(r->base);
    skip_run(r, no, o);
}

static dp_status run_subjects(const dp_case *c, const dp_run_options *o, dp_runs *out, dp_err *e) {
    const dp_subjects *of = subjects_of(c);
    int own[DP_NOWNS] = {DP_OWN_EVEN};
    selection x = {.c = c, .o = o, .n = 1, .ranks = {1}};
    const int nown = c->op->has_ranks ? owns_of(c, o, own) : 1;
    if (c->op->has_ranks) x.n = dp_select(c->nranks, c->ranks, &o->only[DP_ID_RANKS], x.ranks);
    dp_status st = DP_OK;
    if (of->truth) x.truth = of->truth(c);
    for (int i = 0; i < nown && !st; i++)
        st = own[i] ? run_owned(&x, (dp_own)own[i], out, e) : run_selection(&x, out, e);
    for (const dp_subject_kind *const *k = of->subject; *k && !st; k++)
        say_absent(*k, c, o, out);
    if (of->close) of->close(x.truth);
    return st;
}

/* ---- a case ---------------------------------------------------------------------------------- */

static dp_status skip_case(const dp_case *c, const dp_run_options *o, dp_backend b,
                           const char *path, const char *why, dp_runs *out) {
    dp_run *r = add_run(c, b, out);
    r->path = path;
    skip_run(r, why, o);
    return DP_OK;
}

/* Backends were named, and none of them computes this. */
static int none_computes(const dp_case *c, const dp_values *b) {
    unsigned named = 0;
    for (int i = 0; i < b->n; i++)
        named |= 1U << b->of[i];
    return named && !(named & c->op->backends);
}

static const char *why_none(const dp_case *c, const dp_run_options *o) {
    const dp_values *b = &o->only[DP_ID_BACKEND];
    const int lapack = b->n == 1 && b->of[0] == DP_BACKEND_LAPACK;
    return lapack || !c->op->why_none
               ? "the chunk solver over LAPACKE computes the recurrence, and no more"
               : c->op->why_none;
}

void dp_case_only(dp_case *c, const dp_sim_policy *run) {
    c->nranks = c->nbase = c->nchain = c->nmerge = c->npayload = 1;
    c->ranks[0] = run->N;
    c->base[0] = run->base;
    c->chain[0] = run->chain;
    c->merge[0] = run->merge;
    c->payload[0] = run->payload;
}

dp_status dp_case_run(const dp_case *c, const dp_run_options *o, dp_runs *out, dp_err *e) {
    static const dp_values subject = {1, {DP_BACKEND_SUBJECT}};
    char why[128];
    snprintf(why, sizeof why, "a subject computes the recurrence, this case is op = %s",
             c->op_name);
    if (o->subject && none_computes(c, &subject))
        return skip_case(c, o, DP_BACKEND_SUBJECT, o->subject->name, why, out);
    if (none_computes(c, &o->only[DP_ID_BACKEND]))
        return skip_case(c, o, (dp_backend)o->only[DP_ID_BACKEND].of[0], NULL, why_none(c, o), out);
    return run_subjects(c, o, out, e);
}
