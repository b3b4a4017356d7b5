/* Op chain: P_n = M_n ... M_1 in a number format, against a product that carries its own bound,
 * judged by math.md j.3 (subjects.h). */
#include "harness/verdict/bits.h"
#include "ref/arithmetic/dd.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"
#include "ref/bound/bound.h"
#include "subjects.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Truth of a chain: double-double products where they are affordable, else fp64. In both cases the
 * radius is the running normwise bound of math.md j.3 with the eta of that arithmetic. It begins
 * with r_1 = 0; r_j = mu_j r_(j-1) + eta | |M_j||P_(j-1)| |_F (+ eta |M_j| r_(j-1), since P is
 * computed). */
typedef struct {
    int n, K, dd, npoint, points[32];
    double *M, *mu;                   /* [n][K][K] factors as doubles, [n] */
    double *hi[32], *lo[32], rad[32]; /* truth at points[i] factors */
    /* npoint = 0: this regime forgets, or the truth is too short to read bits from */
    dp_bits_scale bits;
} chain_truth;

static double radius_step(int K, const double *M, const double *P, double mu, double eta,
                          double r) {
    const int64_t KK = (int64_t)K * K;
    DP_OWN double *a = dp_doubles(3 * KK);
    double *b = a + KK, *c = b + KK;
    for (int64_t i = 0; i < KK; i++) {
        a[i] = fabs(M[i]);
        b[i] = fabs(P[i]);
    }
    dp_mm(DP_FP64, 0, 0, K, K, K, a, b, c);
    r = (mu + eta * dp_norm_abs2_up(K, K, M)) * r + eta * dp_norm_fro(KK, c) * (1 + K * 0x1p-50) +
        3.0 * KK * 0x1p-1022;
    return r * (1 + 0x1p-50);
}

static void chain_truth_alloc(chain_truth *t, int n, int K) {
    *t = (chain_truth){.n = n,
                       .K = K,
                       .dd = (double)n * K * K * K <= 4e9,
                       .M = dp_doubles((int64_t)n * K * K),
                       .mu = dp_doubles(n)};
}

static void multiply(chain_truth *t) { /* from M and mu: the products */
    const int K = t->K, n = t->n;
    const int64_t KK = (int64_t)K * K;
    const double eta = t->dd ? DP_DD_ETA(K) : dp_eta(DP_FP64, K);
    DP_OWN double *h = dp_copy(t->M, KK), *l = dp_doubles(KK), *h2 = dp_doubles(KK),
                  *l2 = dp_doubles(KK);
    double r = 0;
    for (int j = 0; j < n; j++) {
        const double *M = t->M + j * KK;
        if (j > 0) {
            r = radius_step(K, M, h, t->mu[j], eta, r);
            if (t->dd)
                dp_dd_mm(K, K, K, M, NULL, h, l, h2, l2);
            else
                dp_mm(DP_FP64, 0, 0, K, K, K, M, h, h2);
            double *x = h;
            h = h2;
            h2 = x;
            x = l;
            l = l2;
            l2 = x;
        }
        if ((j & (j + 1)) == 0 || j == n - 1) {
            const int i = t->npoint++;
            t->points[i] = j + 1;
            t->rad[i] = r;
            t->hi[i] = dp_copy(h, KK);
            t->lo[i] = dp_copy(l, KK);
        }
    }
}

static void chain_truth_init(chain_truth *t, const dp_case *c) {
    const int K = c->ch.K, n = c->ch.n;
    DP_OWN float *f = dp_calloc((size_t)n * K * K, sizeof *f);
    chain_truth_alloc(t, n, K);
    dp_inputs_chain(c->ch.regime, n, K, c->spec.seed, f, t->mu);
    for (int64_t i = 0; i < (int64_t)n * K * K; i++)
        t->M[i] = f[i];
    multiply(t);
    if (c->ch.regime == DP_REGIME_REFLECT) dp_bits_scale_init(&t->bits, n, K, t->M);
}

static void chain_truth_free(chain_truth *t) {
    dp_bits_scale_free(&t->bits);
    for (int i = 0; i < t->npoint; i++) {
        free(t->hi[i]);
        free(t->lo[i]);
    }
    free(t->M);
    free(t->mu);
}

/* The chain in a format, with the a-posteriori normwise bound of math.md j.3 computed beside it
 * from the chain's own products:
 *   b_1 = 0 (u_store |M_1| where even one factor is stored short),
 *   b_j = mu_j b_(j-1) + eta | |M_j||P_hat_(j-1)| |_F + 3 K^2 2^-126 */
typedef struct {
    double *got, *bound; /* [npoint][K][K], [npoint] */
} chain;

static chain *chain_new(const chain_truth *t, dp_format claimed, dp_format actual) {
    const int K = t->K;
    const int64_t KK = (int64_t)K * K;
    chain *x = dp_calloc(1, sizeof *x);
    *x = (chain){dp_doubles(t->npoint * KK), dp_doubles(t->npoint)};
    DP_OWN double *P = dp_copy(t->M, KK), *Q = dp_doubles(KK), *a = dp_doubles(3 * KK);
    double *aP = a + KK, *L = aP + KK, b = 0;
    const double eta = dp_eta(claimed, K), tiny = claimed == DP_FP64 ? 0x1p-1022 : 0x1p-126;
    for (int j = 0, next = 0; j < t->n; j++) {
        if (j > 0) {
            const double *M = t->M + j * KK;
            for (int64_t i = 0; i < KK; i++) {
                a[i] = fabs(M[i]);
                aP[i] = fabs(P[i]);
            }
            dp_mm(DP_FP64, 0, 0, K, K, K, a, aP, L);
            b = t->mu[j] * b + (1 + K * 0x1p-50) * eta * dp_norm_fro(KK, L) + 3.0 * KK * tiny;
            dp_mm(actual, 0, 0, K, K, K, M, P, Q);
            double *was = P;
            P = Q;
            Q = was;
        }
        if (next < t->npoint && t->points[next] == j + 1) {
            memcpy(x->got + next * KK, P, sizeof(double) * KK);
            x->bound[next++] = b;
        }
    }
    return x;
}

static void chain_free(chain *x) { DP_FREE(x->got, x->bound, x); }

static void place_length(const void *ctx, int64_t row, dp_place *at) {
    const chain_truth *t = ctx;
    *at = dp_place_of(0, 0, 0);
    at->token = (int64_t)t->points[row] * DP_CHUNK - 1;
}

/* Least-squares slope of log rel over log chunks, 16..256 chunks. */
static double slope(const dp_run *r) {
    double sx = 0, sy = 0, sxx = 0, sxy = 0;
    int n = 0;
    for (int i = 0; i < r->npoint; i++) {
        const dp_chain_point *p = &r->point[i];
        if (p->chunks < 16 || p->chunks > 256 || !(p->rel > 0) || !isfinite(p->rel)) continue;
        const double x = dp_log(p->chunks), y = dp_log(p->rel);
        sx += x;
        sy += y;
        sxx += x * x;
        sxy += x * y;
        n++;
    }
    return n >= 3 ? (n * sxy - sx * sy) / (n * sxx - sx * sx) : NAN;
}

/* Errors and results at the lengths that bits are read from. An fp64 truth says nothing about an
 * fp64 chain. */
static void read_bits(const chain_truth *t, dp_format claimed, const double *got, dp_run *r) {
    const dp_bits_scale *s = &t->bits;
    const int64_t KK = (int64_t)t->K * t->K;
    if (!s->npoint || (claimed == DP_FP64 && !t->dd)) return;
    DP_OWN double *err = dp_doubles(2 * s->npoint * KK);
    double *at = err + s->npoint * KK;
    for (int i = 0, k = 0; i < t->npoint && k < s->npoint; i++) {
        if (t->points[i] != s->chunks[k]) continue;
        for (int64_t x = 0; x < KK; x++)
            err[k * KK + x] = (got[i * KK + x] - t->hi[i][x]) - t->lo[i][x];
        memcpy(at + k++ * KK, got + i * KK, sizeof(double) * (size_t)KK);
    }
    dp_bits_read(s, err, at, claimed, &r->bits);
}

/* A chain that has fewer bits than it claims, or a bias that its format has not, fails even within
 * the worst-case bound. */
static void close_run(dp_run *r) {
    char why[sizeof r->why];
    dp_run_close(r);
    if (!r->bits.npoint || !r->bits.wrong) return;
    snprintf(why, sizeof why, "%s%s%.380s", r->bits.says, r->why[0] ? "; " : "", r->why);
    memcpy(r->why, why, sizeof why);
    r->verdict = DP_FAIL;
}

static int is_read(const dp_bits *b, int chunks) {
    for (int i = 0; i < b->npoint; i++)
        if (b->chunks[i] == chunks) return 1;
    return 0;
}

/* Lengths whose bound is not below the product are judged by their bits, where these are read. */
static void pass_by_bits(const chain_truth *t, const double *bound, dp_run *r) {
    dp_judgement *j = &r->tensor[0];
    if (j->verdict != DP_UNJUDGED || !r->bits.npoint) return;
    for (int i = 0; i < t->npoint; i++)
        if (!(bound[i] < r->point[i].norm) && !is_read(&r->bits, t->points[i])) return;
    j->verdict = DP_PASS;
    j->tier = "bits";
    j->why[0] = 0;
}

static void judge_chain(const chain_truth *t, chain *x, dp_format claimed, dp_run *r) {
    const int64_t KK = (int64_t)t->K * t->K;
    DP_OWN double *want = dp_doubles(t->npoint * KK), *lo = dp_doubles(t->npoint * KK);
    double *got = x->got, *bound = x->bound;
    r->point = dp_calloc((size_t)t->npoint, sizeof *r->point);
    for (int i = 0; i < t->npoint; i++) {
        memcpy(want + i * KK, t->hi[i], sizeof(double) * KK);
        memcpy(lo + i * KK, t->lo[i], sizeof(double) * KK);
        DP_OWN double *d = dp_doubles(KK);
        for (int64_t x = 0; x < KK; x++)
            d[x] = (got[i * KK + x] - want[i * KK + x]) - lo[i * KK + x];
        const double err = dp_norm_fro(KK, d), norm = dp_norm_fro(KK, want + i * KK);
        /* relative to a product that has vanished (math.md j.5, below 1e-30) an error means nothing
         */
        r->point[r->npoint++] = (dp_chain_point){.chunks = t->points[i],
                                                 .abs = err,
                                                 .norm = norm,
                                                 .rel = norm > 1e-30 ? err / norm : NAN,
                                                 .bound = norm > 1e-30 ? bound[i] / norm : NAN,
                                                 .effect = NAN};
        /* more than |I|_F: says nothing about a chain of contractions */
        if (bound[i] > sqrt(t->K)) bound[i] = INFINITY;
    }
    r->slope = slope(r);
    read_bits(t, claimed, got, r);
    r->tensor = dp_calloc(1, sizeof *r->tensor);
    /* a chain in fp64 cannot be judged by an fp64 truth */
    const int own = claimed == DP_FP64 && !t->dd;
    const dp_compare_in in = {.name = "M",
                              .N = 1,
                              .heads = 1,
                              .rows = t->npoint,
                              .width = KK,
                              .got = got,
                              .want = want,
                              .want_lo = lo,
                              .rad = t->rad,
                              .bound = own ? NULL : bound,
                              .place = place_length,
                              .ctx = t,
                              .why_unjudged = "the truth of a chain this long is fp64 itself"};
    dp_compare(&in, &r->tensor[r->ntensor++]);
    pass_by_bits(t, bound, r);
}

static void describe_truth(const chain_truth *t, dp_run *r) {
    const double norm = dp_norm_fro((int64_t)t->K * t->K, t->hi[t->npoint - 1]);
    r->truth_kind = t->dd ? "double-double" : "fp64";
    r->truth_bits = t->dd ? 106 : 53;
    r->truth_radius = norm > 1e-30 ? t->rad[t->npoint - 1] / norm : NAN;
}

void dp_run_stored_chain(const dp_case *c, const double *factors, const double *products,
                         dp_format claimed, dp_runs *out) {
    const double t0 = omp_get_wtime();
    const int K = c->ch.K, n = c->ch.n;
    const int64_t KK = (int64_t)K * K;
    DP_FREED(chain_truth_free) chain_truth t;
    chain_truth_alloc(&t, n, K);
    memcpy(t.M, factors, sizeof(double) * (size_t)(n * KK));
    for (int j = 0; j < n; j++)
        t.mu[j] = dp_norm2_up(K, K, factors + j * KK);
    multiply(&t);
    /* Bits can be read only where nothing is forgotten (bits.h): the product must be as large at
     * the end as at the beginning. */
    if (dp_norm_fro(KK, t.hi[t.npoint - 1]) > 0.9 * dp_norm_fro(KK, t.hi[0]))
        dp_bits_scale_init(&t.bits, n, K, t.M);
    dp_run *r = dp_runs_add(out, c);
    r->backend = DP_BACKEND_FILE;
    r->chain = claimed;
    r->has_chain = 1;
    describe_truth(&t, r);
    r->id = dp_run_id(r);
    chain *x = chain_new(&t, claimed, claimed);
    for (int i = 0; i < t.npoint; i++)
        memcpy(x->got + i * KK, products + (t.points[i] - 1) * KK, sizeof(double) * (size_t)KK);
    judge_chain(&t, x, claimed, r);
    chain_free(x);
    close_run(r);
    r->seconds = omp_get_wtime() - t0;
}

/* ---- the subject ----------------------------------------------------------------------------- */

static dp_status plan(const dp_subject_kind *k, const dp_asked *a, dp_plan *to,
                      DP_UNUSED dp_err *e) {
    for (int i = 0; i < a->nchain; i++)
        dp_plan_add(to, k, a->N, (dp_base)0, a->chain[i]);
    return DP_OK;
}

static void *open_truth(const dp_case *c) {
    chain_truth *t = dp_calloc(1, sizeof *t);
    chain_truth_init(t, c);
    return t;
}

static void close_truth(void *truth) {
    chain_truth_free(truth);
    free(truth);
}

static void note(const dp_sharding *sp, DP_UNUSED const dp_made *m, dp_run *r) {
    r->has_base = 0;
    r->fault = sp->std->o->fault;
    describe_truth(sp->std->other, r);
}

static dp_status compute(const dp_planned *x, dp_sharding *sp, DP_UNUSED void **kept, dp_made *m,
                         DP_UNUSED dp_err *e) {
    const dp_fault fault = sp->std->o->fault;
    m->own = chain_new(sp->std->other, x->chain,
                       fault == DP_FAULT_CHAIN_BF16     ? DP_BF16ST
                       : fault == DP_FAULT_CHAIN_TF32RZ ? DP_TF32RZ
                                                        : x->chain);
    return DP_OK;
}

static void judge(const dp_sharding *sp, dp_made *m, dp_run *r) {
    judge_chain(sp->std->other, m->own, r->chain, r);
    close_run(r);
}

static void free_own(DP_UNUSED const dp_case *c, dp_made *m) { chain_free(m->own); }

static const dp_subject_kind ON_SIMULATED = {.backend = DP_BACKEND_SIM,
                                             .side_by_side = 1,
                                             .plan = plan,
                                             .compute = compute,
                                             .note = note,
                                             .judge = judge,
                                             .free = free_own};
const dp_subjects dp_subjects_of_chain = {
    {&ON_SIMULATED}, .truth = open_truth, .close = close_truth};
