#define _GNU_SOURCE
#include "shrink.h"
#include "bisect.h"
#include "harness/run/blame.h"
#include "ref/files/output.h"
#include "ref/files/safetensors.h"

#include <assert.h>
#include <ctype.h>
#include <math.h>
#include <omp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the inputs of a case as a table of tensors over named axes ------------------------------ */

enum {
    TOK,
    SEQ,
    HEAD,
    GROUP,
    KEY,
    CHAN,
    COL,
    DIM,
    TAP,
    NAXES,
    RANK,
    LOCAL,
    NONE = -1
}; /* value head = HEAD * G + GROUP; RANK and LOCAL are cuts of TOK */

typedef struct {
    const char *name;
    double **x;
    int param, gradient, nax;
    int ax[5];
} tensor;
#define MAX_TENSORS 10

static int tensors(dp_case *c, tensor *t) {
    dp_problem *p = &c->p;
    dp_conv *v = &c->conv;
    const int chan = p->model == DP_GDN ? NONE : CHAN;
    const tensor conv[] = {{"x", &v->x, 0, 0, 2, {TOK, DIM}},
                           {"w", &v->w, 1, 0, 2, {DIM, TAP}},
                           {"bias", &v->bias, 1, 0, 1, {DIM}},
                           {"dy", &v->dy, 0, 1, 2, {TOK, DIM}}};
    const tensor rec[] = {{"q", &p->q, 0, 0, 3, {TOK, HEAD, CHAN}},
                          {"k", &p->k, 0, 0, 4, {TOK, HEAD, KEY, CHAN}},
                          {"v", &p->v, 0, 0, 5, {TOK, HEAD, GROUP, KEY, COL}},
                          {"g", &p->g, 0, 0, 4, {TOK, HEAD, GROUP, chan}},
                          {"beta", &p->beta, 0, 0, 4, {TOK, HEAD, GROUP, KEY}},
                          {"A_log", &p->A_log, 1, 0, 2, {HEAD, GROUP}},
                          {"dt_bias", &p->dt_bias, 1, 0, 3, {HEAD, GROUP, chan}},
                          {"s0", &p->s0, 1, 0, 5, {SEQ, HEAD, GROUP, CHAN, COL}},
                          {"do", &p->dout, 0, 1, 4, {TOK, HEAD, GROUP, COL}},
                          {"dstate", &p->dstate, 1, 1, 5, {SEQ, HEAD, GROUP, CHAN, COL}}};
    if (c->op == DP_OP_CHAIN) return 0;
    memcpy(t, c->op == DP_OP_CONV ? conv : rec, c->op == DP_OP_CONV ? sizeof conv : sizeof rec);
    return (int)((c->op == DP_OP_CONV ? sizeof conv : sizeof rec) / sizeof *conv);
}

static int64_t length(const dp_case *c, int ax) {
    const dp_problem *p = &c->p;
    const dp_conv *v = &c->conv;
    const int conv = c->op == DP_OP_CONV;
    switch (ax) {
    case TOK: return c->op == DP_OP_CHAIN ? c->ch.n : conv ? v->T : p->T;
    case SEQ: return c->op == DP_OP_CHAIN ? 1 : conv ? v->Nseq : p->Nseq;
    case HEAD: return conv || !p->H ? 1 : p->H;
    case GROUP: return conv || !p->H ? 1 : dp_G(p);
    case KEY: return conv || !p->R ? 1 : p->R;
    case CHAN: return c->op == DP_OP_CHAIN ? c->ch.K : conv ? 1 : p->K;
    case COL: return conv || !p->V ? 1 : p->V;
    case DIM: return conv ? v->D : 1;
    case TAP: return conv ? v->W : 1;
    case RANK: return c->op == DP_OP_CHAIN ? 1 : c->ranks[0];
    case LOCAL: return c->op == DP_OP_CHAIN ? 1 : length(c, TOK) / c->ranks[0];
    default: return 1;
    }
}

static int64_t count(const dp_case *c, const tensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->nax; i++)
        n *= length(c, t->ax[i]);
    return n;
}

int64_t dp_case_numbers(const dp_case *c, int64_t *nonzero) {
    tensor t[MAX_TENSORS];
    const int n = tensors((dp_case *)c, t);
    int64_t all = 0, some = 0;
    for (int i = 0; i < n; i++) {
        const int64_t m = *t[i].x ? count(c, &t[i]) : 0;
        all += m;
        for (int64_t j = 0; j < m; j++)
            some += (*t[i].x)[j] != 0;
    }
    if (c->op == DP_OP_CHAIN) all = some = (int64_t)c->ch.n * c->ch.K * c->ch.K;
    if (nonzero) *nonzero = some;
    return all;
}

/* Arrays and cu are the copy's own, names the original's. */
static dp_case copy_of(const dp_case *from) {
    dp_case c = *from;
    tensor t[MAX_TENSORS];
    const int n = tensors(&c, t);
    for (int i = 0; i < n; i++)
        *t[i].x = dp_copy(*t[i].x, count(from, &t[i]));
    int64_t **cu = c.op == DP_OP_CONV ? &c.conv.cu : &c.p.cu;
    if (*cu) {
        int64_t *own = dp_calloc((size_t)length(from, SEQ) + 1, sizeof *own);
        memcpy(own, *cu, sizeof *own * (size_t)(length(from, SEQ) + 1));
        *cu = own;
    }
    return c;
}

static void free_copy(dp_case *c) { dp_problem_free(&c->p), dp_conv_free(&c->conv); }

/* ---- taking away ----------------------------------------------------------------------------- */

static void gather(dp_case *c, int ax, const unsigned char *gone) {
    tensor t[MAX_TENSORS];
    const int n = tensors(c, t);
    const int64_t len = length(c, ax);
    for (int i = 0; i < n; i++) {
        int64_t outer = 1, inner = 1, m = 0;
        int at = -1;
        for (int d = 0; d < t[i].nax; d++) {
            if (t[i].ax[d] == ax)
                at = d;
            else
                *(at < 0 ? &outer : &inner) *= length(c, t[i].ax[d]);
        }
        if (!*t[i].x || at < 0) continue;
        for (int64_t o = 0; o < outer; o++)
            for (int64_t j = 0; j < len; j++)
                if (!gone[j]) {
                    memmove(*t[i].x + m, *t[i].x + (o * len + j) * inner,
                            sizeof(double) * (size_t)inner);
                    m += inner;
                }
    }
}

static void set_length(dp_case *c, int ax, int64_t n) {
    const int conv = c->op == DP_OP_CONV;
    switch (ax) {
    case TOK: *(conv ? &c->conv.T : &c->p.T) = n; break;
    case SEQ: *(conv ? &c->conv.Nseq : &c->p.Nseq) = (int)n; break;
    case HEAD:
        c->p.HV = (int)(n * dp_G(&c->p));
        c->p.H = (int)n;
        break;
    case GROUP: c->p.HV = (int)(c->p.H * n); break;
    case KEY: c->p.R = (int)n; break;
    case CHAN: c->p.K = (int)n; break;
    case COL: c->p.V = (int)n; break;
    case DIM: c->conv.D = (int)n; break;
    case TAP: c->conv.W = (int)n; break;
    default: assert(0);
    }
}

static void drop_tokens(dp_case *c, const unsigned char *gone) {
    int64_t *cu = c->op == DP_OP_CONV ? c->conv.cu : c->p.cu, T = length(c, TOK), kept = 0;
    const int64_t nseq = length(c, SEQ);
    gather(c, TOK, gone);
    for (int64_t t = 0, s = 0; t <= T; t++) {
        while (s <= nseq && cu[s] == t)
            cu[s++] = kept;
        kept += t < T && !gone[t];
    }
    set_length(c, TOK, kept);
}

/* Tokens of a sequence that goes belong to the one before it, those of the first to the next. */
static void drop_sequences(dp_case *c, const unsigned char *gone) {
    int64_t *cu = c->op == DP_OP_CONV ? c->conv.cu : c->p.cu, n = length(c, SEQ), kept = 0;
    const int64_t T = cu[n];
    gather(c, SEQ, gone);
    for (int64_t s = 0; s < n; s++)
        if (!gone[s]) {
            cu[kept] = kept ? cu[s] : 0;
            kept++;
        }
    cu[kept] = T;
    set_length(c, SEQ, kept);
}

/* Takes indices [at, at + len) of an axis away. */
static void drop(dp_case *c, int ax, int64_t at, int64_t len) {
    const int64_t n = length(c, ax), T = length(c, TOK),
                  L = c->op == DP_OP_CHAIN ? T : T / c->ranks[0];
    if (c->op == DP_OP_CHAIN) {
        *(ax == TOK ? &c->ch.n : &c->ch.K) -= (int)len;
        return;
    }
    unsigned char *gone = dp_calloc((size_t)(T > n ? T : n), 1);
    if (ax == RANK || ax == LOCAL) {
        for (int64_t t = 0; t < T; t++) {
            const int64_t i = ax == RANK ? t / L : t % L;
            gone[t] = i >= at && i < at + len;
        }
        drop_tokens(c, gone);
        if (ax == RANK) c->ranks[0] -= (int)len;
    } else {
        memset(gone + at, 1, (size_t)len);
        if (ax == SEQ)
            drop_sequences(c, gone);
        else {
            gather(c, ax, gone);
            set_length(c, ax, n - len);
        }
    }
    free(gone);
}

/* ---- why it fails ---------------------------------------------------------------------------- */

int dp_failure_same(const dp_failure *a, const dp_failure *b) {
    return a->kind && a->kind == b->kind &&
           (a->kind != DP_FAILS_OUTCOME || a->outcome == b->outcome) &&
           !strcmp(a->stage, b->stage) && !strcmp(a->tensor, b->tensor) && a->red <= b->red;
}

void dp_failure_text(const dp_failure *f, char *out, size_t size) {
    static const char *const kind[] = {"nothing fails", "over its budget",
                                       "not finite",    "not the same in every run",
                                       "not written",   ""};
    const char *what =
        f->kind == DP_FAILS_OUTCOME ? dp_subject_outcomes[f->outcome] : kind[f->kind];
    int n = snprintf(out, size, "%s%s%s%s%s", f->stage, *f->stage ? ": " : "", f->tensor,
                     *f->tensor ? " " : "", what);
    if (f->rank >= 0 && n > 0 && (size_t)n < size)
        n += snprintf(out + n, size - (size_t)n, ", rank %d", f->rank);
    if (f->head >= 0 && n > 0 && (size_t)n < size)
        snprintf(out + n, size - (size_t)n, ", head %d", f->head);
}

static dp_failure_kind kind_of(const dp_judgement *t) {
    return strstr(t->why, "never written")                       ? DP_FAILS_UNWRITTEN
           : strstr(t->why, "NaN or Inf") || !isfinite(t->ratio) ? DP_FAILS_NOT_FINITE
                                                                 : DP_FAILS_OVER;
}

static dp_status one_run(const dp_case *c, const dp_shrink_options *o, dp_fault fault,
                         const char *cache, dp_runs *runs, dp_err *e) {
    const dp_backend sim[] = {DP_BACKEND_SIM}, lib[] = {DP_BACKEND_SUBJECT};
    const dp_run_options ro = {.nbackend = 1,
                               .backend = o->subject ? lib : sim,
                               .nbase = c->nbase,
                               .base = c->base,
                               .nchain = c->nchain,
                               .chain = c->chain,
                               .fault = fault,
                               .subject = o->subject,
                               .limit_s = o->limit_s,
                               .cache = cache};
    const dp_status st = dp_case_run(c, &ro, runs, e);
    return st || runs->n
               ? st
               : dp_fail(e, DP_EINPUT, "%s: no run with %d ranks, base %s, chain %s", c->name,
                         c->ranks[0], dp_base_names[c->base[0]], dp_formats[c->chain[0]].name);
}

/* By the verdict alone: the outcome, and the first tensor that fails. */
static void from_run(const dp_run *r, dp_failure *f) {
    f->red = r->verdict == DP_FAIL;
    if (r->verdict == DP_SKIPPED) snprintf(f->why, sizeof f->why, "%.199s", r->why);
    if (!f->red) return;
    const dp_judgement *t = dp_first_failing(r, &f->stage);
    f->kind = DP_FAILS_OUTCOME;
    f->outcome = DP_SUBJECT_RETURNED;
    for (int i = 0; r->outcome && i < DP_SUBJECT_NOUTCOMES; i++)
        if (!strcmp(r->outcome, dp_subject_outcomes[i])) f->outcome = (dp_subject_outcome)i;
    if (f->outcome != DP_SUBJECT_RETURNED || !t) {
        f->stage = "";
        snprintf(f->why, sizeof f->why, "%.199s", r->why);
        return;
    }
    f->kind = kind_of(t);
    f->ratio = t->ratio;
    f->rank = dp_judgement_row(t)->at.rank;
    f->head = dp_judgement_row(t)->at.head;
    snprintf(f->tensor, sizeof f->tensor, "%s", t->name);
}

static dp_status from_bisect(const dp_case *c, dp_fault fault, int runs, dp_failure *f, dp_err *e) {
    dp_bisect b;
    const dp_status st = dp_bisect_sim(&c->p, c->base[0], c->chain[0], c->merge[0], c->ranks[0],
                                       fault, c->backward, runs, 0, &b, e);
    if (st) return st;
    if (b.first >= 0) {
        const dp_bisect_row *x = &b.stage[b.first];
        f->kind = x->unsteady == x->fails          ? DP_FAILS_UNSTEADY
                  : isnan(x->got) || isinf(x->got) ? DP_FAILS_NOT_FINITE
                                                   : DP_FAILS_OVER;
        f->stage = dp_stage_names[b.first];
        f->ratio = x->ratio;
        f->rank = x->at.rank;
        f->head = x->at.head;
        snprintf(f->tensor, sizeof f->tensor, "%s", x->tensor);
    }
    dp_bisect_free(&b);
    return st;
}

static dp_status failure_of(const dp_case *c, const dp_shrink_options *o, int runs, int red,
                            dp_failure *f, dp_err *e) {
    dp_runs all = {0};
    *f = (dp_failure){.stage = "", .rank = -1, .head = -1, .ratio = NAN};
    if (c->op == DP_OP_RECURRENCE && !o->subject) {
        dp_status st = from_bisect(c, o->fault, runs, f, e);
        if (st || !red || !f->kind) return st;
        st = one_run(c, o, o->fault, o->cache, &all, e);
        for (int i = 0; i < all.n; i++)
            f->red |= all.run[i].verdict == DP_FAIL;
        dp_runs_free(&all);
        return st;
    }
    const dp_status st = one_run(c, o, o->fault, o->cache, &all, e);
    if (!st) from_run(&all.run[0], f);
    dp_runs_free(&all);
    return st;
}

dp_status dp_failure_of(const dp_case *c, const dp_shrink_options *o, int runs, int red,
                        dp_failure *f, dp_err *e) {
    const int threads = omp_get_max_threads();
    if (dp_case_numbers(c, NULL) < 1 << 15)
        omp_set_num_threads(1); /* thousands of loops of microseconds each */
    const dp_status st = failure_of(c, o, runs, red, f, e);
    omp_set_num_threads(threads);
    return st;
}

/* ---- trying ---------------------------------------------------------------------------------- */

typedef struct {
    const dp_shrink_options *o;
    dp_shrink_options small; /* without the cache: every candidate is another problem */
    dp_case *c;
    const dp_failure *want;
    int runs, tries;
    dp_err *e;
    dp_status st;
} work;

static int spent(const work *w) {
    return w->st || (w->o->max_tries && w->tries >= w->o->max_tries);
}

/* Does it fail for the same reason, and not without the fault? */
static int fails_alike(work *w, const dp_case *c) {
    dp_failure f;
    dp_err e = {0};
    w->tries++;
    if (c->op == DP_OP_RECURRENCE && dp_problem_check(&c->p, c->allow_nonfinite, &e)) return 0;
    if (dp_failure_of(c, &w->small, w->runs, 0, &f, &e))
        return 0; /* a library may leave a run out: no failure */
    if (w->want->red && !f.red && c->op == DP_OP_RECURRENCE && !w->o->subject) {
        dp_failure g = f;
        g.red = 1;
        if (!dp_failure_same(w->want, &g) || dp_failure_of(c, &w->small, w->runs, 1, &f, &e))
            return 0;
    }
    if (!dp_failure_same(w->want, &f)) return 0;
    if (!w->o->fault || c->op != DP_OP_RECURRENCE) return 1;
    dp_failure clean = {.stage = ""};
    const dp_shrink_options none = {0};
    return !dp_failure_of(c, &none, 1, 0, &clean, &e) && !clean.kind;
}

static void report(const work *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void report(const work *w, const char *fmt, ...) {
    char what[200];
    va_list ap;
    if (!w->o->step) return;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    w->o->step(what, w->c, w->c->ranks[0], dp_case_numbers(w->c, NULL), w->tries, w->o->arg);
}

/* The candidate is taken in place of the problem, or freed. */
static int offer(work *w, dp_case *cand) {
    const int yes = fails_alike(w, cand);
    dp_case *loser = yes ? w->c : cand;
    free_copy(loser);
    if (yes) *w->c = *cand;
    return yes;
}

static const char *const AXIS_NAMES[] = {[TOK] = "chunks",
                                         [SEQ] = "sequences",
                                         [HEAD] = "key heads",
                                         [GROUP] = "value heads a key head",
                                         [KEY] = "keys a token",
                                         [CHAN] = "K",
                                         [COL] = "V",
                                         [DIM] = "D",
                                         [TAP] = "W",
                                         [RANK] = "ranks",
                                         [LOCAL] = "tokens a rank"};

static int shrink_axis(work *w, int ax) {
    const int64_t before = length(w->c, ax), least = w->c->op == DP_OP_CHAIN && ax == TOK ? 2 : 1;
    const int blind =
        w->c->op == DP_OP_CHAIN; /* indices of an axis that is generated are all alike */
    for (int64_t size = before / 2; size >= 1 && !spent(w); size /= 2)
        for (int64_t at = 0; at < length(w->c, ax) && !spent(w);) {
            const int64_t n = length(w->c, ax), len = size < n - at ? size : n - at;
            if (n - len < least) break;
            dp_case cand = copy_of(w->c);
            drop(&cand, ax, at, len);
            if (!offer(w, &cand)) {
                if (blind) break;
                at += len;
            }
        }
    const int64_t now = length(w->c, ax);
    if (now < before)
        report(w, "%s %lld -> %lld", AXIS_NAMES[ax], (long long)before, (long long)now);
    return now < before;
}

/* The same tokens over fewer ranks. */
static int fewer_ranks(work *w) {
    const int before = w->c->ranks[0];
    for (int n = 1; n < before && w->c->op != DP_OP_CHAIN && w->c->ranks[0] == before && !spent(w);
         n++) {
        if (length(w->c, TOK) % n) continue;
        dp_case cand = copy_of(w->c);
        cand.ranks[0] = n;
        offer(w, &cand);
    }
    if (w->c->ranks[0] < before)
        report(w, "the same tokens on %d ranks instead of %d", w->c->ranks[0], before);
    return w->c->ranks[0] < before;
}

static int without(work *w, const char *what, void (*change)(dp_case *)) {
    dp_case cand = copy_of(w->c);
    change(&cand);
    if (!offer(w, &cand)) return 0;
    report(w, "%s", what);
    return 1;
}

static void release(double **x) { free(*x), *x = NULL; }
static void no_backward(dp_case *c) {
    c->backward = 0;
    release(&c->p.dout);
    release(&c->p.dstate);
    release(&c->conv.dy);
}
static void no_dstate(dp_case *c) { release(&c->p.dstate); }
static void no_s0(dp_case *c) { release(&c->p.s0); }
static void no_bias(dp_case *c) { release(&c->conv.bias); }
static void no_params(dp_case *c) { release(&c->p.A_log), release(&c->p.dt_bias); }
static void no_norm(dp_case *c) { c->p.l2norm = 0; }
static void unit_scale(dp_case *c) { c->p.scale = 1; }

static int optional_parts(work *w) {
    const dp_case *c = w->c;
    int n = 0;
    if (c->op == DP_OP_CHAIN) return 0;
    if (c->backward && !spent(w)) n += without(w, "forward alone", no_backward);
    if (c->p.dstate && !spent(w)) n += without(w, "no gradient of the final state", no_dstate);
    if (c->p.s0 && !spent(w)) n += without(w, "no initial state", no_s0);
    if (c->conv.bias && !spent(w)) n += without(w, "no bias", no_bias);
    if ((c->p.A_log || c->p.dt_bias) && !spent(w)) n += without(w, "no A_log, dt_bias", no_params);
    if (c->p.l2norm && !spent(w)) n += without(w, "no L2 norm", no_norm);
    if (c->op == DP_OP_RECURRENCE && c->p.scale != 1 && !spent(w))
        n += without(w, "scale = 1", unit_scale);
    return n;
}

/* ---- values ---------------------------------------------------------------------------------- */

static double to_zero(double x) { return x * 0; }
static double to_one(double x) { return x == 0 ? x : copysign(1, x); }

/* The power of two that is nearest on a logarithmic scale. */
static double to_power(double x) {
    int e;
    const double m = frexp(fabs(x), &e);
    return x == 0 || !isfinite(x) ? x : copysign(ldexp(1, m < 0x1.6a09e667f3bcdp-1 ? e - 1 : e), x);
}

/* Sets index list[from .. from+len) of a tensor; what is not finite stays. Nothing changes: 0. */
static int try_values(work *w, int which, const int64_t *list, int64_t from, int64_t len,
                      double (*f)(double)) {
    tensor t[MAX_TENSORS];
    dp_case cand = copy_of(w->c);
    int changed = 0;
    tensors(&cand, t);
    for (int64_t i = from; i < from + len; i++) {
        double *x = &(*t[which].x)[list[i]];
        if (isfinite(*x) && f(*x) != *x) {
            *x = f(*x) + 0.0;
            changed = 1;
        }
    }
    if (changed) return offer(w, &cand);
    free_copy(&cand);
    return 0;
}

/* One tensor: all of it, then halves of it, down to single numbers as long as those are few. */
static int64_t simplify(work *w, int which, double (*f)(double)) {
    tensor t[MAX_TENSORS];
    tensors(w->c, t);
    if (!*t[which].x) return 0;
    const int64_t n = count(w->c, &t[which]);
    int64_t *list = dp_calloc((size_t)n, sizeof *list), m = 0, taken = 0;
    for (int64_t i = 0; i < n; i++)
        if (isfinite((*t[which].x)[i]) && f((*t[which].x)[i]) != (*t[which].x)[i]) list[m++] = i;
    for (int64_t size = m; size >= 1 && m > 0 && m / size <= 512 && !spent(w);
         size = size > 1 ? (size + 1) / 2 : 0)
        for (int64_t at = 0; at < m && !spent(w);) {
            const int64_t len = size < m - at ? size : m - at;
            if (try_values(w, which, list, at, len, f)) {
                taken += len;
                memmove(list + at, list + at + len, sizeof *list * (size_t)(m - at - len));
                m -= len;
            } else
                at += len;
        }
    free(list);
    return taken;
}

static int simplify_all(work *w) {
    static const struct {
        double (*f)(double);
        const char *what;
    } how[] = {
        {to_zero, "set to zero"}, {to_one, "set to 1 or -1"}, {to_power, "set to powers of two"}};
    tensor t[MAX_TENSORS];
    const int n = tensors(w->c, t);
    int changed = 0;
    for (size_t h = 0; h < sizeof how / sizeof *how; h++)
        for (int i = 0; i < n; i++) {
            if (spent(w)) return changed;
            const int64_t k = simplify(w, i, how[h].f);
            if (k) {
                report(w, "%lld numbers of %s %s", (long long)k, t[i].name, how[h].what);
                changed = 1;
            }
        }
    return changed;
}

/* ---- all of it ------------------------------------------------------------------------------- */

static int shrink_shape(work *w) {
    static const int order[] = {HEAD, GROUP, COL, CHAN, RANK, LOCAL, SEQ, KEY, DIM, TAP};
    int changed = optional_parts(w);
    if (w->c->op == DP_OP_CHAIN) {
        changed |= shrink_axis(w, TOK);
        return changed;
    }
    for (size_t i = 0; i < sizeof order / sizeof *order; i++)
        changed |= shrink_axis(w, order[i]);
    return changed | fewer_ranks(w);
}

dp_status dp_shrink(const dp_case *c, const dp_shrink_options *o, dp_shrunk *out, dp_err *e) {
    if (c->op != DP_OP_RECURRENCE && c->op != DP_OP_CHAIN && c->op != DP_OP_CONV)
        return dp_fail(e, DP_EINPUT,
                       "%s: op = %s cannot be shrunk: shrink the recurrence or the convolution "
                       "that fails in it",
                       c->name, c->op_name);
    *out = (dp_shrunk){.c = copy_of(c), .numbers_before = dp_case_numbers(c, NULL)};
    dp_case *s = &out->c;
    s->ranks[0] = o->ranks;
    s->base[0] = o->base;
    s->chain[0] = o->chain;
    s->merge[0] = o->merge;
    s->nranks = s->nbase = s->nchain = s->nmerge = 1;
    work w = {.o = o, .small = *o, .c = s, .want = &out->before, .runs = DP_BISECT_RUNS, .e = e};
    w.small.cache = NULL;
    w.st = dp_failure_of(s, o, DP_BISECT_RUNS, 1, &out->before, e);
    if (!w.st && !out->before.kind && out->before.why[0])
        w.st =
            dp_fail(e, DP_EINPUT, "%s: not run with %d ranks, base %s, chain %s: %s", c->name,
                    o->ranks, dp_base_names[o->base], dp_formats[o->chain].name, out->before.why);
    else if (!w.st && !out->before.kind)
        w.st = dp_fail(
            e, DP_EINPUT, "%s: %s with %d ranks, base %s, chain %s: there is nothing to shrink",
            c->name,
            c->op == DP_OP_RECURRENCE && !o->subject ? "no stage is wrong" : "nothing fails",
            o->ranks, dp_base_names[o->base], dp_formats[o->chain].name);
    if (out->before.kind != DP_FAILS_UNSTEADY) w.runs = 1;
    for (int more = 1; more && !spent(&w);) {
        more = shrink_shape(&w);
        if (dp_case_numbers(s, NULL) <= 1 << 16) more |= simplify_all(&w);
    }
    out->numbers = dp_case_numbers(s, &out->nonzero);
    out->tries = w.tries;
    if (!w.st) w.st = dp_failure_of(s, &w.small, w.runs, 1, &out->after, e);
    if (w.st) dp_shrink_free(out);
    return w.st;
}

void dp_shrink_free(dp_shrunk *s) { free_copy(&s->c); }

/* ---- the case as a file ---------------------------------------------------------------------- */

#define TEXT_NUMBERS 600

static void print_number(FILE *f, double x) {
    char b[40];
    snprintf(b, sizeof b, "%.9g", x);
    if (strtod(b, NULL) == x || isnan(x))
        fputs(b, f);
    else
        fprintf(f, "%a", x);
}

/* The most frequent value for all of a tensor, then every number that differs. */
static void print_poke(FILE *f, const dp_case *c, const tensor *t, int *any) {
    const double *x = *t->x;
    const int64_t n = count(c, t);
    int64_t shape[5], best = -1, often = 0;
    int nd = 0;
    for (int i = 0; i < t->nax; i++) {
        const int64_t len = length(c, t->ax[i]);
        if (t->ax[i] == GROUP)
            shape[nd - 1] *= len;
        else
            shape[nd++] = len;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t m = 0;
        for (int64_t j = 0; j < n; j++)
            m += !memcmp(&x[i], &x[j], sizeof *x);
        if (m > often) {
            often = m;
            best = i;
        }
    }
    fprintf(f, "%s%s[", (*any)++ ? ", " : "", t->name);
    for (int d = 0; d < nd; d++)
        fputs(d ? ",*" : "*", f);
    fputs("] ", f);
    print_number(f, x[best]);
    for (int64_t i = 0; i < n; i++) {
        if (!memcmp(&x[i], &x[best], sizeof *x)) continue;
        int64_t rest = n, at = i;
        fprintf(f, ", %s[", t->name);
        for (int d = 0; d < nd; d++) {
            rest /= shape[d];
            fprintf(f, "%s%lld", d ? "," : "", (long long)(at / rest));
            at %= rest;
        }
        fputs("] ", f);
        print_number(f, x[i]);
    }
}

static dp_status write_tensors(dp_case *c, const char *path, dp_err *e) {
    tensor t[MAX_TENSORS];
    const int n = tensors(c, t);
    dp_tensorfile f = {0};
    for (int i = 0; i < n; i++) {
        int64_t shape[5], len;
        int nd = 0;
        for (int d = 0; d < t[i].nax; d++) {
            len = length(c, t[i].ax[d]);
            if (t[i].ax[d] == GROUP)
                shape[nd - 1] *= len;
            else if (t[i].ax[d] != KEY || len > 1)
                shape[nd++] = len; /* one key a token: no axis for it in a file */
        }
        const dp_format fmt = t[i].param && c->input_dtype == DP_BF16 ? DP_FP32 : c->input_dtype;
        if (*t[i].x)
            dp_tensorfile_add(&f, t[i].name,
                              fmt == DP_BF16   ? "BF16"
                              : fmt == DP_FP32 ? "F32"
                                               : "F64",
                              nd, shape, *t[i].x);
    }
    const dp_status st = dp_safetensors_write(path, &f, e);
    dp_tensorfile_free(&f);
    return st;
}

static void print_settings(FILE *f, const dp_case *c) {
    static const char *const gates[] = {"log", "softplus", "lower_bound"}, *const betas[] = {
                                                                               "plain", "sigmoid",
                                                                               "sigmoid2"};
    const dp_problem *p = &c->p;
    const int64_t *cu = c->op == DP_OP_CONV ? c->conv.cu : p->cu;
    if (c->op == DP_OP_CHAIN) {
        fprintf(f, "regime = %s\nchunks = %d\nK = %d\nseed = %llu\nchain = %s\n",
                dp_regime_names[c->ch.regime], c->ch.n, c->ch.K, (unsigned long long)c->spec.seed,
                dp_formats[c->chain[0]].name);
        return;
    }
    fprintf(f, "T = %lld\n", (long long)length(c, TOK));
    if (c->op == DP_OP_CONV)
        fprintf(f, "D = %d\nW = %d\nactivation = %s\n", c->conv.D, c->conv.W,
                c->conv.silu ? "silu" : "none");
    else {
        fprintf(f,
                "H = %d\nHV = %d\nK = %d\nV = %d\nR = %d\nscale = %.17g\ngate = %s\nbeta = "
                "%s\nl2norm = %s\n",
                p->H, p->HV, p->K, p->V, p->R, p->scale, gates[p->gate], betas[p->beta_form],
                p->l2norm ? "yes" : "no");
        if (p->gate == DP_GATE_LOWER_BOUND) fprintf(f, "lower_bound = %.17g\n", p->lower_bound);
        fprintf(f, "chain = %s\nmerge = %s\n", dp_formats[c->chain[0]].name,
                dp_merge_names[c->merge[0]]);
        if (p->dstate) fputs("dstate = yes\n", f);
    }
    if (length(c, SEQ) > 1) {
        fprintf(f, "cu_seqlens = 0");
        for (int64_t s = 1; s <= length(c, SEQ); s++)
            fprintf(f, ",%lld", (long long)cu[s]);
        fputc('\n', f);
    }
    fprintf(f, "backward = %s\nranks = %d\nbase = %s\n", c->backward ? "yes" : "no", c->ranks[0],
            dp_base_names[c->base[0]]);
    if (c->allow_nonfinite) fputs("nonfinite = allow\n", f);
    if (c->truth) fprintf(f, "truth = %s\n", dp_truth_pick_names[c->truth]);
}

/* What the generator makes of a case's text has these tensors, so that pokes can replace their
 * values. */
static int as_text(const dp_case *c) {
    const dp_problem *p = &c->p;
    return dp_case_numbers(c, NULL) <= TEXT_NUMBERS && !p->A_log == !p->dt_bias;
}

static void print_tensors(FILE *f, const dp_case *c, tensor *t, int n) {
    int any = 0;
    fprintf(f, "dtype = %s\n", dp_formats[c->input_dtype].name);
    if (c->op == DP_OP_CONV) fprintf(f, "bias = %s\n", c->conv.bias ? "yes" : "no");
    if (c->op != DP_OP_CONV && c->p.s0) fputs("s0_scale = 1\n", f);
    if (c->op != DP_OP_CONV && c->p.gate != DP_GATE_LOG)
        fprintf(f, "gate_params = %s\n", c->p.A_log ? "yes" : "no");
    fputs("poke = ", f);
    for (int i = 0; i < n; i++)
        if (*t[i].x) print_poke(f, c, &t[i], &any);
    fputc('\n', f);
}

dp_status dp_case_write(const dp_case *c, const char *reason, const char *source, const char *path,
                        dp_err *e) {
    tensor t[MAX_TENSORS];
    const int n = tensors((dp_case *)c, t), in_text = as_text(c);
    const size_t len = strlen(path);
    dp_output out;
    char *data;
    if (len < 6 || strcmp(path + len - 5, ".case"))
        return dp_fail(e, DP_EINPUT, "%s: the name of a case file ends in .case", path);
    if (strstr(path, " #"))
        return dp_fail(e, DP_EINPUT, "%s: ' #' would begin a comment where the case names its data",
                       path);
    if (asprintf(&data, "%.*s.safetensors", (int)(len - 5), path) < 0) abort();
    dp_status st = dp_output_open(&out, path, e);
    if (!st) {
        fprintf(out.f, "reason = %s\nsource = %s\nop = %s\nbits = %d\n", reason, source, c->op_name,
                c->bits);
        print_settings(out.f, c);
        if (c->op != DP_OP_CHAIN && in_text)
            print_tensors(out.f, c, t, n);
        else if (c->op != DP_OP_CHAIN) {
            const char *base = strrchr(data, '/');
            fprintf(out.f, "data = %s\n", base ? base + 1 : data);
            st = write_tensors((dp_case *)c, data, e);
        }
        const dp_status closed = dp_output_close(&out, st != DP_OK, e);
        if (!st) st = closed;
    }
    free(data);
    return st;
}
