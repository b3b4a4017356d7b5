#include "invariants.h"
#include "harness/bound/error_bound.h"
#include "harness/record/run.h"
#include "ref/inputs/inputs.h"
#include "repeat.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const dp_check_names[DP_NCHECKS] = {
    "repeat",  "causality", "causality-chunk", "anticausality", "heads",
    "packed",  "prefix",    "scale-v",         "scale-do",      "sign-q",
    "sign-kv", "ranks",     "transpose",       "ranks-bound"};
static const char *const PROMISE[DP_NCHECKS] = {"bitwise",
                                                "bitwise",
                                                "bitwise",
                                                "bitwise",
                                                "bitwise",
                                                "bitwise",
                                                "bitwise",
                                                "bitwise but for underflow",
                                                "bitwise but for underflow",
                                                "bitwise",
                                                "bitwise",
                                                "bitwise: nothing rounds",
                                                "bitwise: nothing rounds",
                                                "sum of both bounds"};

/* ---- problems made from others --------------------------------------------------------------- */

static double **input_at(dp_problem *p, int i) {
    double **a[] = {&p->q,    &p->k,     &p->v,       &p->g,  &p->beta,
                    &p->dout, &p->A_log, &p->dt_bias, &p->s0, &p->dstate};
    return a[i];
}
enum { IN_Q, IN_K, IN_V, IN_G, IN_BETA, IN_DO, IN_A_LOG, IN_DT_BIAS, IN_S0, IN_DSTATE, NINPUTS };

/* Entries of an input: a token's (the first six), or of the whole. */
static int64_t width_of(const dp_problem *p, int i) {
    const int64_t w[] = {(int64_t)p->H * p->K,
                         (int64_t)p->H * p->R * p->K,
                         (int64_t)p->HV * p->R * p->V,
                         (int64_t)p->HV * dp_Kg(p),
                         (int64_t)p->HV * p->R,
                         (int64_t)p->HV * p->V,
                         p->HV,
                         (int64_t)p->HV * dp_Kg(p),
                         (int64_t)p->Nseq * p->HV * p->K * p->V,
                         (int64_t)p->Nseq * p->HV * p->K * p->V};
    return w[i];
}

static dp_problem copy_of(const dp_problem *p, int backward) {
    dp_problem c = *p;
    for (int i = 0; i < NINPUTS; i++)
        *input_at(&c, i) = (i == IN_DO || i == IN_DSTATE) && !backward
                               ? NULL
                               : dp_copy(*input_at((dp_problem *)p, i),
                                         width_of(p, i) * (i < IN_A_LOG ? p->T : 1));
    c.cu = dp_calloc((size_t)p->Nseq + 1, sizeof *c.cu);
    memcpy(c.cu, p->cu, sizeof *p->cu * ((size_t)p->Nseq + 1));
    return c;
}

/* Tokens [a, b), which belong to one sequence: a problem of its own. s0, dstate: NULL, or
 * [HV][K][V]. */
static dp_problem slice(const dp_problem *p, int64_t a, int64_t b, const double *s0,
                        const double *dstate, int backward) {
    dp_problem c = *p;
    c.T = b - a;
    c.Nseq = 1;
    c.s0 = c.dstate = NULL;
    c.cu = dp_calloc(2, sizeof *c.cu);
    c.cu[1] = c.T;
    for (int i = 0; i < IN_S0; i++) {
        const double *x = *input_at((dp_problem *)p, i);
        *input_at(&c, i) = !x || (i == IN_DO && !backward) ? NULL
                           : i < IN_A_LOG ? dp_copy(x + a * width_of(p, i), c.T * width_of(p, i))
                                          : dp_copy(x, width_of(p, i));
    }
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    c.s0 = dp_copy(s0, n);
    c.dstate = backward ? dp_copy(dstate, n) : NULL;
    return c;
}

static int sequence_at(const dp_problem *p, int64_t t) {
    int i = 0;
    while (i < p->Nseq - 1 && p->cu[i + 1] <= t)
        i++;
    return i;
}

/* ---- the subject ----------------------------------------------------------------------------- */

typedef struct {
    dp_result r;
    double **M, **dM;
    int n, segments;
} outcome; /* segments: parts that a sequence was cut in, at most */

static void outcome_free(outcome *o) {
    for (int i = 0; i < o->n; i++) {
        free(o->M ? o->M[i] : NULL);
        free(o->dM ? o->dM[i] : NULL);
    }
    free(o->M);
    free(o->dM);
    dp_result_free(&o->r);
    *o = (outcome){0};
}

static dp_status run_sim(const dp_check_subject *s, const dp_problem *p, int N, int backward,
                         outcome *o, dp_err *e) {
    dp_sim sim;
    const int64_t KK = (int64_t)p->K * p->K;
    const dp_status st = dp_sim_new(&sim, p, s->base, N, s->fault, e);
    if (st) return st;
    dp_sim_run(&sim, s->chain, s->merge, backward);
    o->n = N * p->HV;
    o->M = dp_calloc((size_t)o->n, sizeof *o->M);
    o->dM = dp_calloc((size_t)o->n, sizeof *o->dM);
    for (int i = 0; i < o->n; i++) {
        o->M[i] = dp_copy(sim.M[i], KK);
        o->dM[i] = dp_copy(sim.dM[i], KK);
    }
    o->r = sim.out;
    sim.out = (dp_result){0};
    dp_sim_free(&sim);
    return DP_OK;
}

static dp_status run_cuda(const dp_check_subject *s, const dp_problem *p, int N, int backward,
                          outcome *o, dp_err *e) {
    dp_cuda_result c;
    const dp_status st =
        dp_cuda_run(p, s->bf16_inputs, s->base, s->chain, N, s->backend, backward, s->way, &c, e);
    if (st) return st;
    o->r = c.out;
    o->M = c.M;
    o->dM = c.dM;
    o->n = N * p->HV;
    o->segments = c.segments;
    c.out = (dp_result){0};
    c.M = c.dM = NULL;
    dp_cuda_result_free(&c, p->HV);
    return DP_OK;
}

static dp_status run(const dp_check_subject *s, const dp_problem *p, int N, int backward,
                     outcome *o, dp_err *e) {
    *o = (outcome){0};
    return (s->backend == DP_BACKEND_SIM ? run_sim : run_cuda)(s, p, N, backward && p->dout, o, e);
}

/* ---- comparing ------------------------------------------------------------------------------- */

typedef struct {
    const dp_problem *p;
    const dp_check_subject *s;
    int N, backward;
    dp_check *c;
    const outcome *base; /* the problem itself on N ranks */
    dp_err *e;
} work;

typedef int keep_fn(const void *ctx, int field, int64_t token, int head,
                    int seq); /* token: -1 for states and parameters */

static void differ(work *w, const char *name, int64_t token, int head, int seq, int64_t entry,
                   double got, double want) {
    const int64_t L = w->p->T / w->N;
    char at[96];
    w->c->verdict = DP_FAIL;
    if (token >= 0)
        snprintf(at, sizeof at, "rank %d, head %d, token %lld", (int)(token / L), head,
                 (long long)token);
    else
        snprintf(at, sizeof at, "head %d, sequence %d", head, seq);
    snprintf(w->c->why, sizeof w->c->why, "%.16s: %s, entry %lld: got %.9g (%a), want %.9g (%a)",
             name, at, (long long)entry, got, got, want, want);
}

/* got = want * factor for every row that keep() takes (NULL: all). Token row t of got stands for
 * token t + shift, state i for sequence i + seq_shift. */
static void same_field(work *w, const dp_problem *p, int f, dp_result *got, dp_result *want,
                       int64_t t0, int seq0, double factor, double small, keep_fn *keep,
                       const void *ctx) {
    int64_t rows, width;
    const double *a = *dp_result_at(got, f), *b = *dp_result_at(want, f);
    dp_result_shape(p, f, &rows, &width);
    if (!rows || !a || !b || w->c->verdict == DP_FAIL) return;
    const dp_result_kind kind = dp_result_fields[f].kind;
    const int state = kind == DP_OF_SEQUENCES, param = kind == DP_OF_HEADS;
    const int heads = dp_result_heads(p, f);
    const int64_t per = dp_result_rows_per_token(p, f);
    const int64_t skip = state ? (int64_t)seq0 * p->HV : param ? 0 : t0 * heads * per;
    int64_t first = INT64_MAX, compared = 0;
#pragma omp parallel for reduction(min : first) reduction(+ : compared) if (rows * width > 1 << 22)
    for (int64_t r = 0; r < rows; r++) {
        const int64_t token = state || param ? -1 : r / per / heads + t0;
        const int head = state || param ? (int)(r % p->HV) : (int)(r / per % heads),
                  seq = state   ? (int)(r / p->HV) + seq0
                        : param ? -1
                                : sequence_at(w->p, token);
        if (first < r * width || (keep && !keep(ctx, f, token, head, seq))) continue;
        compared += width;
        for (int64_t i = 0; i < width; i++) {
            const double x = a[r * width + i], y = factor * b[(r + skip) * width + i];
            if (x == y || (isnan(x) && isnan(y)) || fabs(x - y) <= small) continue;
            if (r * width + i < first) first = r * width + i;
            break;
        }
    }
    w->c->compared += compared;
    if (first == INT64_MAX) return;
    const int64_t r = first / width, token = state || param ? -1 : r / per / heads + t0;
    differ(w, dp_result_fields[f].name, token,
           state || param ? (int)(r % p->HV) : (int)(r / per % heads),
           state   ? (int)(r / p->HV) + seq0
           : param ? -1
                   : sequence_at(w->p, token),
           first % width, a[first], factor * b[first + skip * width]);
}

static void same(work *w, outcome *got, const double factor[DP_NRESULTS], double small,
                 keep_fn *keep, const void *ctx) {
    for (int f = 0; f < DP_NRESULTS; f++)
        if (!factor || factor[f])
            same_field(w, w->p, f, &got->r, (dp_result *)&w->base->r, 0, 0, factor ? factor[f] : 1,
                       small, keep, ctx);
}

static void skip(work *w, const char *why) {
    w->c->verdict = DP_SKIPPED;
    snprintf(w->c->why, sizeof w->c->why, "%s", why);
}

/* Kernels that cut a long sequence in segments by its length cut its parts elsewhere: then both are
 * right and their bits differ. */
static int cut(const outcome *a, const outcome *b) { return a->segments > 1 || b->segments > 1; }
static const char *const CUT =
    "the kernels cut the sequence in segments, and its part elsewhere: not the same bits";

/* The tensor-core kernels anchor decays, and what underflows there (2^-150, of 16 pairs) is
 * multiplied by up to 2^110 again. */
static double underflow(const work *w, double scale) {
    return scale * (w->s->backend != DP_BACKEND_SIM ? 0x1p-36
                    : w->s->base == DP_BASE_FP64    ? 0x1p-960
                                                    : 0x1p-100);
}

/* ---- the checks ------------------------------------------------------------------------------ */

static dp_status check_repeat(work *w) {
    if (w->s->backend == DP_BACKEND_SIM) {
        dp_repeat x;
        const dp_status st = dp_repeat_sim(w->p, w->s->base, w->s->chain, w->s->merge, w->N,
                                           w->s->fault, w->backward, 3, &x, w->e);
        if (!st) free(x.hit);
        w->c->compared = w->p->T * w->p->HV * w->p->V;
        if (!st && x.differ) {
            w->c->verdict = DP_FAIL;
            snprintf(w->c->why, sizeof w->c->why,
                     "%d of 2 repetitions differ, first in %s, rank %d, head %d", x.differ,
                     dp_stage_names[x.stage], x.rank, x.head);
        }
        return st;
    }
    for (int i = 0; i < 2; i++) {
        outcome o;
        const dp_status st = run(w->s, w->p, w->N, w->backward, &o, w->e);
        if (st) return st;
        same(w, &o, NULL, 0, NULL, NULL);
        outcome_free(&o);
    }
    return DP_OK;
}

/* Three tokens: in the middle of a chunk, the first of the last rank, the first of the last
 * sequence that has one. */
static void edited_tokens(const work *w, int64_t t[3]) {
    const dp_problem *p = w->p;
    const int64_t L = p->T / w->N;
    int s = p->Nseq - 1;
    while (s > 0 && p->cu[s + 1] == p->cu[s])
        s--;
    t[0] = p->T / 2 + (p->T > 16 ? 5 : 0);
    t[1] = (w->N - 1) * L;
    t[2] = p->cu[s] + (p->cu[s] + 1 < p->T);
}

/* Another token's values, and another gate: a factor 2, or -1/2 where it is 0. */
static void edit(dp_problem *p, int from, int to, int64_t t) {
    const int64_t other = (t + p->T / 2 + 1) % p->T;
    for (int i = from; i <= to; i++) {
        double *x = *input_at(p, i);
        const int64_t n = width_of(p, i);
        if (!x) continue;
        if (i != IN_G) memmove(x + t * n, x + other * n, sizeof(double) * (size_t)n);
        for (int64_t z = 0; i == IN_G && z < n; z++)
            x[t * n + z] = x[t * n + z] == 0 ? -0.5 : 2 * x[t * n + z];
        for (int64_t z = 0; i == IN_DO && z < n; z++)
            x[t * n + z] *= 4;
    }
}

typedef struct {
    int64_t t, chunk;
    int seq;
} token_edit;

/* First token of the chunk that holds t, and the token behind its last one: chunks restart at
 * sequences and at ranks. */
static int64_t chunk_of(const work *w, int64_t t, int64_t *end) {
    const dp_problem *p = w->p;
    const int64_t L = p->T / w->N, rank = t / L * L, cu = p->cu[sequence_at(p, t)],
                  from = rank > cu ? rank : cu, start = from + (t - from) / DP_CHUNK * DP_CHUNK;
    int64_t stop = p->cu[sequence_at(p, t) + 1];
    if (stop > rank + L) stop = rank + L;
    *end = start + DP_CHUNK < stop ? start + DP_CHUNK : stop;
    return start;
}

static int keep_before(const void *ctx, int f, int64_t token, int head, int seq) {
    const token_edit *x = ctx;
    (void)head;
    return dp_result_fields[f].kind != DP_OF_HEADS &&
           (seq != x->seq || ((f == DP_RESULT_O || f == DP_RESULT_DQ) && token < x->chunk));
}

static int keep_behind(const void *ctx, int f, int64_t token, int head, int seq) {
    const token_edit *x = ctx;
    (void)head;
    if (f == DP_RESULT_O || f == DP_RESULT_FINAL_STATE) return 1;
    if (dp_result_fields[f].kind == DP_OF_HEADS) return 0;
    return seq != x->seq ||
           (f != DP_RESULT_DS0 && (f == DP_RESULT_DQ ? token != x->t : token > x->t));
}

static dp_status check_edits(work *w, int from, int to, keep_fn *keep) {
    int64_t t[3];
    edited_tokens(w, t);
    for (int i = 0; i < 3 && w->c->verdict != DP_FAIL; i++) {
        dp_problem p = copy_of(w->p, w->backward);
        outcome o;
        edit(&p, from, to, t[i]);
        const dp_status st = run(w->s, &p, w->N, w->backward, &o, w->e);
        int64_t end;
        const token_edit x = {t[i], chunk_of(w, t[i], &end), sequence_at(w->p, t[i])};
        if (!st) {
            same(w, &o, NULL, 0, keep, &x);
            outcome_free(&o);
        }
        if (w->c->verdict == DP_FAIL) {
            char why[sizeof w->c->why];
            snprintf(why, sizeof why, "%.260s, after token %lld changed", w->c->why,
                     (long long)t[i]);
            memcpy(w->c->why, why, sizeof why);
        }
        dp_problem_free(&p);
        if (st) return st;
    }
    return DP_OK;
}

/* Value heads [from, to) are changed, and all of q and k that no other head reads. */
typedef struct {
    int from, to, G;
} head_edit;

static int keep_others(const void *ctx, int f, int64_t token, int head, int seq) {
    const head_edit *x = ctx;
    (void)token;
    (void)seq;
    return f == DP_RESULT_DQ || f == DP_RESULT_DK
               ? (head + 1) * x->G <= x->from || head * x->G >= x->to
               : head < x->from || head >= x->to;
}

/* Exact in every format: gates of another strength, beta of another token, all else mirrored. */
static double edited(const dp_problem *p, int i, int64_t token, int64_t at, int64_t width) {
    const double *a = *input_at((dp_problem *)p, i), y = a[token * width + at];
    if (i == IN_G || i == IN_A_LOG || i == IN_DT_BIAS) return y == 0 ? -0.5 : 2 * y;
    return i == IN_BETA ? a[(p->T - 1 - token) * width + at] : -y;
}

static void edit_heads(const dp_problem *p0, dp_problem *p, const head_edit *x) {
    for (int i = 0; i < NINPUTS; i++) {
        double *a = *input_at(p, i);
        const int shared = i == IN_Q || i == IN_K, state = i == IN_S0 || i == IN_DSTATE,
                  heads = shared ? p0->H : p0->HV;
        const int from = shared ? (x->from + x->G - 1) / x->G : x->from,
                  to = shared ? x->to / x->G : x->to;
        const int64_t rows = state          ? p0->Nseq
                             : i < IN_A_LOG ? p0->T
                                            : 1,
                      width = width_of(p0, i) / (state ? p0->Nseq : 1), per = width / heads;
#pragma omp parallel for if (rows * width > 1 << 22)
        for (int64_t t = 0; t < (a ? rows : 0); t++)
            for (int64_t at = from * per; at < to * per; at++)
                a[t * width + at] = edited(p0, i, t, at, width);
    }
}

/* The first head alone, the last one alone, all but the first. */
static dp_status check_heads(work *w) {
    const dp_problem *p0 = w->p;
    if (p0->HV < 2) {
        w->c->verdict = DP_SKIPPED;
        snprintf(w->c->why, sizeof w->c->why, "one head");
        return DP_OK;
    }
    for (int z = 0; z < 3 && w->c->verdict != DP_FAIL; z++) {
        const head_edit x = {z == 0 ? 0 : z == 1 ? p0->HV - 1 : 1, z ? p0->HV : 1, dp_G(p0)};
        dp_problem p = copy_of(p0, w->backward);
        outcome o;
        edit_heads(p0, &p, &x);
        const dp_status st = run(w->s, &p, w->N, w->backward, &o, w->e);
        if (!st) {
            same(w, &o, NULL, 0, keep_others, &x);
            outcome_free(&o);
        }
        if (w->c->verdict == DP_FAIL) {
            char why[sizeof w->c->why];
            snprintf(why, sizeof why, "%.250s, after head%s %d%s changed", w->c->why,
                     z == 2 ? "s" : "", x.from, z == 2 ? " and up" : "");
            memcpy(w->c->why, why, sizeof why);
        }
        dp_problem_free(&p);
        if (st) return st;
    }
    return DP_OK;
}

/* The problem itself when it is packed, else cut in three. */
static dp_problem packed(const dp_problem *p, int backward) {
    dp_problem c = copy_of(p, backward);
    if (p->Nseq > 1 || p->T < 8) return c;
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    free(c.cu);
    c.Nseq = 3;
    c.cu = dp_calloc(4, sizeof *c.cu);
    c.cu[1] = p->T / 3;
    c.cu[2] = p->T / 3 + p->T / 8;
    c.cu[3] = p->T;
    for (int i = IN_S0; i <= IN_DSTATE; i++) {
        double *x = *input_at(&c, i), *y = x ? dp_doubles(3 * n) : NULL;
        for (int s = 0; x && s < 3; s++)
            memcpy(y + s * n, x, sizeof(double) * (size_t)n);
        free(x);
        *input_at(&c, i) = y;
    }
    return c;
}

static int not_sums(const void *ctx, int f, int64_t token, int head, int seq) {
    (void)ctx;
    (void)token;
    (void)head;
    (void)seq;
    return dp_result_fields[f].kind != DP_OF_HEADS;
}

static dp_status check_packed(work *w) {
    dp_problem all = packed(w->p, w->backward);
    outcome whole;
    const int64_t n = (int64_t)all.HV * all.K * all.V;
    work v = *w;
    int elsewhere = 0;
    v.p = &all;
    v.N = 1;
    dp_status st = run(w->s, &all, 1, w->backward, &whole, w->e);
    for (int i = 0; i < all.Nseq && !st && w->c->verdict != DP_FAIL; i++) {
        if (all.cu[i + 1] == all.cu[i]) continue;
        dp_problem one = slice(&all, all.cu[i], all.cu[i + 1], all.s0 ? all.s0 + i * n : NULL,
                               all.dstate ? all.dstate + i * n : NULL, w->backward);
        outcome o;
        st = run(w->s, &one, 1, w->backward, &o, w->e);
        for (int f = 0; f < DP_NRESULTS && !st && !cut(&o, &whole); f++)
            same_field(&v, &one, f, &o.r, &whole.r, all.cu[i], i, 1, 0, not_sums, NULL);
        if (!st && cut(&o, &whole)) elsewhere = 1;
        if (!st) outcome_free(&o);
        dp_problem_free(&one);
    }
    if (elsewhere && w->c->verdict == DP_PASS && !w->c->compared) skip(w, CUT);
    outcome_free(&whole);
    dp_problem_free(&all);
    return st;
}

/* First sequence with more than one chunk, cut at a chunk in its middle. */
static dp_status check_prefix(work *w) {
    const dp_problem *p = w->p;
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    int i = 0;
    while (i < p->Nseq && p->cu[i + 1] - p->cu[i] <= DP_CHUNK)
        i++;
    if (i == p->Nseq) {
        w->c->verdict = DP_SKIPPED;
        snprintf(w->c->why, sizeof w->c->why, "no sequence of more than one chunk");
        return DP_OK;
    }
    const int64_t a = p->cu[i], b = p->cu[i + 1],
                  mid = a + ((b - a - 1) / DP_CHUNK + 1) / 2 * DP_CHUNK;
    const double *s0 = p->s0 ? p->s0 + i * n : NULL, *ds = p->dstate ? p->dstate + i * n : NULL;
    dp_problem all = slice(p, a, b, s0, ds, w->backward), late, early;
    outcome whole, first, second, back;
    work v = *w;
    v.p = &all;
    v.N = 1;
    dp_status st = run(w->s, &all, 1, w->backward, &whole, w->e);
    if (st) goto none;
    early = slice(p, a, mid, s0, NULL, w->backward);
    if ((st = run(w->s, &early, 1, 0, &first, w->e))) goto one;
    if (cut(&whole, &first)) {
        skip(w, CUT);
        outcome_free(&first);
        goto one;
    }
    late = slice(p, mid, b, first.r.final_state, ds, w->backward);
    if ((st = run(w->s, &late, 1, w->backward, &second, w->e))) goto two;
    for (int f = 0; f < DP_NRESULTS; f++)
        if (f != DP_RESULT_DS0)
            same_field(&v, &late, f, &second.r, &whole.r, mid - a, 0, 1, 0, not_sums, NULL);
    if (second.r.ds0 && w->backward) {
        early.dstate = dp_copy(second.r.ds0, n);
        st = run(w->s, &early, 1, 1, &back, w->e);
        for (int f = 0; f < DP_NRESULTS && !st; f++)
            if (f != DP_RESULT_FINAL_STATE)
                same_field(&v, &early, f, &back.r, &whole.r, 0, 0, 1, 0, not_sums, NULL);
        if (!st) outcome_free(&back);
    }
    outcome_free(&second);
two:
    dp_problem_free(&late), outcome_free(&first);
one:
    dp_problem_free(&early), outcome_free(&whole);
none:
    dp_problem_free(&all);
    return st;
}

static void times(dp_problem *p, int i, double c) {
    double *x = *input_at(p, i);
    const int64_t n = width_of(p, i) * (i < IN_A_LOG ? p->T : 1);
#pragma omp parallel for if (n > 1 << 22)
    for (int64_t z = 0; z < (x ? n : 0); z++)
        x[z] *= c;
}

/* Inputs [n] times c: results times factor. */
static dp_status check_factor(work *w, const int *input, int n, double c,
                              const double factor[DP_NRESULTS], double small) {
    dp_problem p = copy_of(w->p, w->backward);
    outcome o;
    for (int i = 0; i < n; i++)
        times(&p, input[i], c);
    const dp_status st = run(w->s, &p, w->N, w->backward, &o, w->e);
    if (!st) {
        same(w, &o, factor, small, NULL, NULL);
        outcome_free(&o);
    }
    dp_problem_free(&p);
    return st;
}

/* The shape and packing of the problem with inputs on which nothing rounds; 0: this shape has none.
 */
static int exact_inputs(const dp_problem *p, int backward, dp_problem *x) {
    if (p->K % p->R || p->K % 4) return 0;
    *x = *p;
    x->gate = DP_GATE_LOG;
    x->beta_form = DP_BETA_PLAIN;
    x->l2norm = 0;
    x->scale = 0.25;
    x->A_log = x->dt_bias = x->s0 = x->dout = x->dstate = NULL;
    x->cu = dp_calloc((size_t)p->Nseq + 1, sizeof *x->cu);
    memcpy(x->cu, p->cu, sizeof *p->cu * ((size_t)p->Nseq + 1));
    dp_problem_alloc(x);
    if (p->s0) x->s0 = dp_doubles(width_of(p, IN_S0));
    if (backward) x->dout = dp_doubles(p->T * width_of(p, IN_DO));
    const dp_inputs_spec s = {
        .seed = 2, .dtype = DP_BF16, .keys = DP_KEYS_EXACT, .s0_scale = p->s0 ? 1 : 0};
    dp_inputs_fill_exact(x, &s);
    if (backward) dp_inputs_fill_exact_gradients(x, &s);
    return 1;
}

static dp_status check_ranks(work *w, int transpose) {
    dp_problem p;
    outcome one = {0}, many;
    if (w->N < 2) {
        skip(w, "one rank");
        return DP_OK;
    }
    if (!exact_inputs(w->p, w->backward, &p)) {
        skip(w, "K is no multiple of 4 and of R: no exact inputs");
        return DP_OK;
    }
    work v = *w;
    v.p = &p;
    dp_status st = run(w->s, &p, w->N, w->backward, &many, w->e);
    if (!st && !transpose) st = run(w->s, &p, 1, w->backward, &one, w->e);
    for (int f = 0; f < DP_NRESULTS && !st && !transpose; f++)
        same_field(&v, &p, f, &many.r, &one.r, 0, 0, 1, 0, NULL, NULL);
    for (int i = 0; transpose && !st && i < many.n; i++) {
        const int K = p.K;
        dp_context c; /* M is of the last local sub-sequence, dM of the first */
        if ((st = dp_context_build(p.cu, p.Nseq, w->N, i / p.HV, &c, w->e))) break;
        const int parts = c.nlocal;
        dp_context_free(&c);
        if (parts > 1) continue;
        for (int x = 0;
             many.M && many.dM && many.M[i] && many.dM[i] && x < K * K && w->c->verdict != DP_FAIL;
             x++) {
            const double a = many.dM[i][x], b = many.M[i][(int64_t)(x % K) * K + x / K];
            w->c->compared++;
            if (a == b) continue;
            w->c->verdict = DP_FAIL;
            snprintf(w->c->why, sizeof w->c->why,
                     "dM: rank %d, head %d, entry (%d, %d): %.9g, M' has %.9g", i / p.HV, i % p.HV,
                     x / K, x % K, a, b);
        }
    }
    if (!st && transpose && !w->c->compared)
        skip(w, w->s->backend == DP_BACKEND_SIM && w->backward ? "no rank has both M and dM"
                                                               : "the subject gives no M and dM");
    if (!st) outcome_free(&many);
    outcome_free(&one);
    dp_problem_free(&p);
    return st;
}

/* Seconds of one core that the fp64 reference and its bounds take, about. */
static double reference_seconds(const dp_problem *p) {
    return 2e-8 * (double)p->T * p->HV * p->R * p->R * (DP_CHUNK + p->K) * (p->K + p->V);
}

static dp_status bounds_of(const work *w, const dp_problem *p, int N, int backward,
                           dp_error_bound *b) {
    dp_sim ref;
    dp_error_bound_base base;
    const dp_status st = dp_sim_new(&ref, p, DP_BASE_FP64, N, DP_FAULT_NONE, w->e);
    if (st) return st;
    dp_sim_run(&ref, DP_FP64, DP_MERGE_ALLGATHER, backward);
    dp_error_bound_base_init(&base, &ref, w->s->base, 2, backward);
    dp_error_bound_run(&base, w->s->chain, backward, b);
    dp_error_bound_base_free(&base);
    dp_sim_free(&ref);
    return DP_OK;
}

/* The chunk of the first edited token as a sequence of its own, on one rank; every seventh of its
 * tokens is edited in turn. */
static dp_status check_chunk(work *w) {
    int64_t t[3], end;
    edited_tokens(w, t);
    const int64_t start = chunk_of(w, t[0], &end);
    if (end - start < 2) {
        skip(w, "the chunk has one token");
        return DP_OK;
    }
    dp_problem a = slice(w->p, start, end, NULL, NULL, w->backward);
    outcome x;
    work v = *w;
    v.p = &a;
    dp_status st = run(w->s, &a, 1, w->backward, &x, w->e);
    const int ran = !st;
    for (token_edit z = {(end - start - 1) % 7 ? (end - start - 1) % 7 : 7, 0, 0};
         z.t < end - start && !st && w->c->verdict != DP_FAIL; z.t += 7) {
        dp_problem b = copy_of(&a, w->backward);
        outcome y;
        z.chunk = z.t;
        edit(&b, IN_Q, IN_BETA, z.t);
        st = run(w->s, &b, 1, w->backward, &y, w->e);
        for (int f = 0; f < DP_NRESULTS && !st; f++)
            same_field(&v, &a, f, &y.r, &x.r, 0, 0, 1, 0, keep_before, &z);
        if (!st) outcome_free(&y);
        if (w->c->verdict == DP_FAIL) {
            char why[sizeof w->c->why];
            snprintf(why, sizeof why, "%.240s, after token %lld of its chunk changed", w->c->why,
                     (long long)z.t);
            memcpy(w->c->why, why, sizeof why);
        }
        dp_problem_free(&b);
    }
    if (ran) outcome_free(&x);
    dp_problem_free(&a);
    return st;
}

static dp_status check_ranks_bound(work *w) {
    outcome one;
    dp_error_bound a, b;
    char why[120];
    if (w->N < 2) {
        skip(w, "one rank");
        return DP_OK;
    }
    if (reference_seconds(w->p) > 60) {
        snprintf(why, sizeof why,
                 "the fp64 reference that bounds are taken from would take about %.0f s",
                 reference_seconds(w->p));
        {
            skip(w, why);
            return DP_OK;
        }
    }
    dp_status st = run(w->s, w->p, 1, w->backward, &one, w->e);
    if (st) return st;
    if (!(st = bounds_of(w, w->p, 1, w->backward, &a))) {
        if (!(st = bounds_of(w, w->p, w->N, w->backward, &b))) {
            double top = 0;
            for (int f = 0; f < DP_NRESULTS; f++) {
                int64_t rows, width;
                dp_result_shape(w->p, f, &rows, &width);
                const double *x = *dp_result_at(&one.r, f),
                             *y = *dp_result_at((dp_result *)&w->base->r, f);
                for (int64_t r = 0; x && y && a.row[f] && b.row[f] && r < rows; r++) {
                    double d2 = 0;
                    for (int64_t i = 0; i < width; i++)
                        d2 += (x[r * width + i] - y[r * width + i]) *
                              (x[r * width + i] - y[r * width + i]);
                    const double limit = a.row[f][r] + b.row[f][r];
                    w->c->compared += width;
                    if (sqrt(d2) <= limit || w->c->verdict == DP_FAIL) {
                        if (sqrt(d2) > top * limit) top = sqrt(d2) / limit;
                        continue;
                    }
                    w->c->verdict = DP_FAIL;
                    snprintf(w->c->why, sizeof w->c->why,
                             "%s, row %lld: %d ranks and one differ by %.3g, the bounds allow %.3g",
                             dp_result_fields[f].name, (long long)r, w->N, sqrt(d2), limit);
                }
            }
            if (w->c->verdict == DP_PASS)
                snprintf(w->c->why, sizeof w->c->why,
                         "largest difference %.2g of the sum of both bounds", top);
            dp_error_bound_free(&b);
        }
        dp_error_bound_free(&a);
    }
    outcome_free(&one);
    return st;
}

static dp_status one_check(work *w, int i) {
    static const int v_s0[] = {IN_V, IN_S0}, do_ds[] = {IN_DO, IN_DSTATE}, q[] = {IN_Q},
                     kv[] = {IN_K, IN_V};
    /* o final dq dk dv dg dbeta dA_log ddt_bias ds0; 0: not compared */
    static const double by_v[] = {8, 8, 8, 8, 1, 8, 8, 8, 8, 1},
                        by_do[] = {1, 1, 8, 8, 8, 8, 8, 8, 8, 8},
                        by_q[] = {-1, 1, 1, -1, -1, -1, -1, -1, -1, -1},
                        by_q_dstate[] = {-1, 1, 1, 0, 0, 0, 0, 0, 0, 0},
                        by_kv[] = {1, 1, 1, -1, -1, 1, 1, 1, 1, 1};
    const int grads = w->backward && (w->s->backend == DP_BACKEND_SIM || w->base->r.dq);
    switch (i) {
    case 0: return check_repeat(w);
    case 1: return check_edits(w, IN_Q, IN_BETA, keep_before);
    case 2: return check_chunk(w);
    case 3:
        return grads ? check_edits(w, IN_DO, IN_DO, keep_behind) : (skip(w, "no gradients"), DP_OK);
    case 4: return check_heads(w);
    case 5: return check_packed(w);
    case 6: return check_prefix(w);
    case 7: return check_factor(w, v_s0, 2, 8, by_v, underflow(w, 8));
    case 8:
        return grads ? check_factor(w, do_ds, 2, 8, by_do, underflow(w, 8))
                     : (skip(w, "no gradients"), DP_OK);
    case 9: return check_factor(w, q, 1, -1, w->p->dstate ? by_q_dstate : by_q, 0);
    case 10: return check_factor(w, kv, 2, -1, by_kv, 0);
    case 11: return check_ranks(w, 0);
    case 12: return check_ranks(w, 1);
    default: return check_ranks_bound(w);
    }
}

/* Is the name one of a list with commas? */
static int listed(const char *list, const char *name) {
    const size_t n = strlen(name);
    for (const char *at = strstr(list, name); at; at = strstr(at + 1, name))
        if ((at == list || at[-1] == ',') && (at[n] == 0 || at[n] == ',')) return 1;
    return 0;
}

dp_status dp_checks_run(const dp_problem *p, const dp_check_subject *s, int N, int backward,
                        const char *only, dp_checks *out, dp_err *e) {
    outcome base;
    *out = (dp_checks){0};
    dp_status st = run(s, p, N, backward, &base, e);
    for (int i = 0; i < DP_NCHECKS && !st; i++) {
        const double t0 = dp_now();
        if (only && !listed(only, dp_check_names[i])) continue;
        dp_check *c = &out->c[out->n++];
        *c = (dp_check){.name = dp_check_names[i], .promise = PROMISE[i], .verdict = DP_PASS};
        work w = {
            .p = p, .s = s, .N = N, .backward = backward && p->dout, .c = c, .base = &base, .e = e};
        if (!strcmp(c->name, "prefix") && s->backend != DP_BACKEND_SIM) w.backward = 0;
        st = one_check(&w, i);
        if (!st && c->verdict == DP_PASS && !c->compared)
            skip(&w, "nothing of this problem could be compared");
        c->seconds = dp_now() - t0;
        if (s->progress)
            fprintf(stderr, "  %s: %s, %.2f s\n", c->name,
                    st ? "cannot be run" : dp_verdict_names[c->verdict], c->seconds);
    }
    outcome_free(&base);
    return st;
}
