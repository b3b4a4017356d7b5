/* The list of invariants, and all of them on one problem (invariants.h). */
#include "bisect.h"
#include "harness/mpi/mpi_ranks.h"
#include "harness/run/outputs.h"
#include "invariants_work.h"
#include "ref/inputs/inputs_large.h"
#include "ref/vocabulary/recurrence.h"
#include "ref/vocabulary/text.h"

#include <math.h>
#include <omp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- comparing ------------------------------------------------------------------------------- */

/* Where rows of one result stand, of the problem that got is of and of the one of want. */
typedef struct {
    int state, param, heads;
    int64_t rows, width, per, skip;
} rows_of;

static rows_of layout(const dp_check_work *w, int f, const dp_check_pair *x) {
    const dp_row_kind kind = dp_result_fields[f].kind;
    rows_of r = {.state = kind == DP_OF_SEQUENCES,
                 .param = kind == DP_OF_HEADS,
                 .heads = dp_result_heads(x->p, f),
                 .per = dp_result_rows_per_token(x->p, f)};
    dp_result_shape(x->p, f, &r.rows, &r.width);
    r.skip = r.state ? (int64_t)x->seq0 * w->p->HV : r.param ? 0 : x->t0 * r.heads * r.per;
    return r;
}

static dp_place place_of(const dp_check_work *w, const rows_of *l, const dp_check_pair *x,
                         int64_t row) {
    if (l->state || l->param)
        return (dp_place){.token = -1,
                          .head = (int)(row % x->p->HV),
                          .sequence = l->state ? (int)(row / x->p->HV) + x->seq0 : -1};
    const int64_t token = row / l->per / l->heads + x->t0;
    return (dp_place){.rank = (int)(token / (w->p->T / w->N)),
                      .token = token,
                      .head = (int)(row / l->per % l->heads),
                      .sequence = dp_sequence_of(w->p->cu, w->p->Nseq, token)};
}

static int kept(const dp_check_pair *x, int f, const dp_place *at) {
    return !x->keep || x->keep(x->ctx, f, at->token, at->head, at->sequence);
}

static void place_text(const dp_place *at, char *text, size_t size) {
    if (at->token >= 0)
        snprintf(text, size, "rank %d, head %d, token %lld", at->rank, at->head,
                 (long long)at->token);
    else
        snprintf(text, size, "head %d, sequence %d", at->head, at->sequence);
}

void dp_check_row_text(const dp_check_work *w, int f, int64_t row, char *text, size_t size) {
    const dp_check_pair own = {.p = w->p};
    const rows_of l = layout(w, f, &own);
    const dp_place at = place_of(w, &l, &own, row);
    place_text(&at, text, size);
}

/* Among rows that differ: the one with the largest difference relative to its bounds. */
static void hold_within_bounds(dp_check_work *w, int f, const dp_check_pair *x, const rows_of *l,
                               const char *first) {
    const double *a = x->got->out[f];
    const double *b = x->want->out[f];
    const double *bound = dp_check_bounds_of(w)->row[f];
    double most = -1, allowed = 0, off = 0;
    int64_t worst = 0;
    for (int64_t r = 0; r < (bound ? l->rows : 0); r++) {
        const dp_place at = place_of(w, l, x, r);
        double d2 = 0;
        if (!kept(x, f, &at)) continue;
        for (int64_t i = 0; i < l->width; i++) {
            const double u = a[r * l->width + i], v = x->factor * b[(r + l->skip) * l->width + i];
            if (u != v && !(isnan(u) && isnan(v))) d2 += (u - v) * (u - v);
        }
        const double limit =
            2 * fabs(x->factor) * bound[r + l->skip] + x->small * sqrt((double)l->width);
        const double ratio = d2 == 0 ? 0 : isnan(d2) ? INFINITY : sqrt(d2) / limit;
        if (ratio <= most) continue;
        most = ratio;
        worst = r;
        off = sqrt(d2);
        allowed = limit;
    }
    if (most <= 1 && bound) {
        w->c->within_bounds = 1;
        if (!*w->c->why)
            snprintf(w->c->why, sizeof w->c->why, "not bitwise (%s); within bounds, at most %.2g",
                     first, most);
        return;
    }
    char at[96];
    const dp_place place = place_of(w, l, x, worst);
    place_text(&place, at, sizeof at);
    w->c->verdict = DP_FAIL;
    if (bound)
        snprintf(w->c->why, sizeof w->c->why,
                 "%.16s: %s: differ by %.3g, both bounds allow %.3g (first difference: %s)",
                 dp_result_fields[f].name, at, off, allowed, first);
    else
        snprintf(w->c->why, sizeof w->c->why, "%s; it has no bound", first);
}

static void differ(dp_check_work *w, int f, const dp_check_pair *x, const rows_of *l,
                   int64_t first) {
    const double *a = x->got->out[f];
    const double *b = x->want->out[f];
    double got, want;
    dp_memory_get(x->got->memory, &got, a + first, 1);
    dp_memory_get(x->want->memory, &want, b + first + l->skip * l->width, 1);
    want *= x->factor;
    const dp_place at = place_of(w, l, x, first / l->width);
    char place[96], text[240], why[160];
    place_text(&at, place, sizeof place);
    snprintf(text, sizeof text, "%.16s: %s, entry %lld: got %.9g (%a), want %.9g (%a)",
             dp_result_fields[f].name, place, (long long)(first % l->width), got, got, want, want);
    if (!w->s->library || w->s->bitwise) {
        w->c->verdict = DP_FAIL;
        snprintf(w->c->why, sizeof w->c->why, "%s", text);
    } else if (dp_check_bounded(w, why, sizeof why)) {
        hold_within_bounds(w, f, x, l, text);
    } else {
        w->c->verdict = DP_SKIPPED;
        snprintf(w->c->why, sizeof w->c->why, "not bitwise (%s), and %s", text, why);
    }
}

/* A byte a row: is it compared? NULL: all are. */
static uint8_t *rows_kept(const dp_check_work *w, int f, const dp_check_pair *x, const rows_of *l) {
    if (!x->keep) return NULL;
    uint8_t *kept_rows = dp_alloc((size_t)l->rows, 1);
#pragma omp parallel for if (l->rows > 1 << 16)
    for (int64_t r = 0; r < l->rows; r++) {
        const dp_place at = place_of(w, l, x, r);
        kept_rows[r] = (uint8_t)kept(x, f, &at);
    }
    return kept_rows;
}

/* The first entry that differs, of arrays in memory of this process; -1: none does. */
static int64_t first_host(const dp_memory_pair *x) {
    int64_t first = INT64_MAX;
#pragma omp parallel for reduction(min : first) if (x->rows * x->width > 1 << 22)
    for (int64_t r = 0; r < x->rows; r++) {
        if (first < r * x->width || (x->kept && !x->kept[r])) continue;
        for (int64_t i = r * x->width; i < (r + 1) * x->width; i++) {
            const double u = x->got[i], v = x->factor * x->want[i];
            if (u == v || (isnan(u) && isnan(v)) || fabs(u - v) <= x->small) continue;
            if (i < first) first = i;
            break;
        }
    }
    return first == INT64_MAX ? -1 : first;
}

void dp_check_same_field(dp_check_work *w, int f, const dp_check_pair *x) {
    const double *a = x->got->out[f];
    const double *b = x->want->out[f];
    const rows_of l = layout(w, f, x);
    if (!l.rows || !a || !b || w->c->verdict != DP_PASS) return;
    DP_OWN uint8_t *kept_rows = rows_kept(w, f, x, &l);
    const dp_memory_pair pair = {.got = a,
                                 .want = b + l.skip * l.width,
                                 .kept = kept_rows,
                                 .rows = l.rows,
                                 .width = l.width,
                                 .factor = x->factor,
                                 .small = x->small};
    const int64_t first = (x->got->memory ? x->got->memory->first : first_host)(&pair);
    if (!kept_rows) w->c->compared += l.rows * l.width;
    for (int64_t r = 0; r < (kept_rows ? l.rows : 0); r++)
        w->c->compared += kept_rows[r] ? l.width : 0;
    if (first >= 0) differ(w, f, x, &l, first);
}

void dp_check_same(dp_check_work *w, const dp_check_pair *of) {
    for (int f = 0; f < DP_NRESULTS; f++)
        dp_check_same_field(w, f, of);
}

dp_check_subject dp_check_called_before(const dp_check_work *w) {
    dp_check_subject s = *w->s;
    if (s.library && !s.library->command) s.before = w->p; /* a program of --serve was, anyway */
    return s;
}

dp_status dp_check_changed(dp_check_work *w, const dp_check_subject *s, dp_problem *p,
                           const double factor[DP_NRESULTS], double small, dp_check_keep *keep,
                           const void *ctx) {
    dp_check_outcome o;
    const dp_status st = dp_check_run_problem(s, p, w->N, w->backward, &o, w->e);
    dp_check_pair x = {.p = w->p, .small = small, .keep = keep, .ctx = ctx};
    for (int f = 0; f < DP_NRESULTS && !st; f++) {
        x.got = &o.r;
        x.want = &w->base->r;
        x.factor = factor ? factor[f] : 1;
        if (x.factor) dp_check_same_field(w, f, &x);
    }
    if (!st) dp_check_outcome_free(&o);
    dp_problem_free(p);
    return st;
}

dp_status dp_check_skip(dp_check_work *w, const char *why) {
    w->c->verdict = DP_SKIPPED;
    snprintf(w->c->why, sizeof w->c->why, "%s", why);
    return DP_OK;
}

/* Kernels that cut a long sequence in segments by its length cut its parts elsewhere: then both are
 * right and their bits differ. */
int dp_check_cut(const dp_check_outcome *a, const dp_check_outcome *b) {
    return a->segments > 1 || b->segments > 1;
}

/* The tensor-core kernels anchor decays, and what underflows there (2^-150, of 16 pairs) is
 * multiplied by up to 2^110 again. */
static double check_underflow(const dp_check_work *w, double scale) {
    return scale * (!dp_backends[w->s->backend].simulated ? 0x1p-36
                    : w->s->run.base == DP_BASE_FP64      ? 0x1p-960
                                                          : 0x1p-100);
}

/* ---- problems made from others --------------------------------------------------------------- */

dp_problem dp_check_copy(const dp_problem *p, int backward) {
    dp_problem c = *p;
    dp_inputs_copy(&c, p, p->memory ? p->memory->copy : dp_copy);
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_fields[i].backward && !backward) {
            dp_free_of(p, c.in[i]);
            c.in[i] = NULL;
        }
    c.cu = dp_cu_copy(p);
    return c;
}

double *dp_check_own(dp_problem *p, int i) {
    double **x = &p->in[i];
    if (p->memory) *x = p->memory->own(*x, dp_input_count(p, i));
    return *x;
}

dp_problem dp_check_at_hand(const dp_problem *p) {
    dp_problem c = *p;
    c.memory = NULL;
    for (int i = 0; i < DP_NINPUTS; i++) {
        const int64_t n = dp_input_count(p, i);
        double **x = &c.in[i];
        if (!*x) continue;
        *x = dp_doubles(n);
        dp_memory_get(p->memory, *x, dp_input_of(p, i), n);
    }
    c.cu = dp_cu_copy(p);
    return c;
}

/* Tokens [a, b), which belong to one sequence: a problem of its own. s0, dstate: NULL, or
 * [HV][K][V]. */
dp_problem dp_check_slice(const dp_problem *p, int64_t a, int64_t b, const double *s0,
                          const double *dstate, int backward) {
    dp_problem c = *p;
    c.T = b - a;
    c.Nseq = 1;
    c.cu = dp_calloc(2, sizeof *c.cu);
    c.cu[1] = c.T;
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_tensor_field *f = &dp_input_fields[i];
        const int64_t first = f->kind == DP_OF_TOKENS ? a * dp_input_width(p, i) : 0;
        const double *x = i == DP_INPUT_S0 ? s0 : i == DP_INPUT_DSTATE ? dstate : dp_input_of(p, i);
        c.in[i] = x && (backward || !f->backward) ? dp_copy_of(p, x + first, dp_input_count(&c, i))
                                                  : NULL;
    }
    return c;
}

/* ---- the subject ----------------------------------------------------------------------------- */

void dp_check_outcome_free(dp_check_outcome *o) {
    for (int i = 0; i < o->n; i++) {
        free(o->M ? o->M[i] : NULL);
        free(o->dM ? o->dM[i] : NULL);
    }
    free(o->M);
    free(o->dM);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        free(o->stage[i]);
    dp_result_free(&o->r);
    *o = (dp_check_outcome){0};
}

static dp_status run_sim(const dp_check_subject *s, const dp_problem *p, int N, int backward,
                         dp_check_outcome *o, dp_err *e) {
    dp_sim sim;
    const int64_t KK = (int64_t)p->K * p->K;
    const int peers = dp_backends[s->backend].peers;
    const int shows = s->shows && s->run.merge != DP_EXCHANGE_HEADS; /* else of other tokens */
    const dp_status st =
        peers ? dp_mpi_sim_open(&sim, p, s->run.base, N, e)
              : dp_sim_new_chunks(&sim, p, s->run.base, s->chunk ? s->chunk : DP_CHUNK, N,
                                  s->run.fault, e);
    if (st) return st;
    sim.payload = s->run.payload;
    (peers ? dp_mpi_sim_run : dp_sim_run)(&sim, s->run.chain, s->run.merge, backward);
    o->n = N * p->HV;
    o->M = dp_calloc((size_t)o->n, sizeof *o->M);
    o->dM = dp_calloc((size_t)o->n, sizeof *o->dM);
    for (int i = 0; i < o->n; i++) {
        o->M[i] = dp_copy(sim.M[i], KK);
        o->dM[i] = dp_copy(sim.dM[i], KK);
    }
    for (int i = 0; shows && i < DP_NSTAGE_TENSORS; i++)
        if ((backward || !dp_stage_tensors[i].backward) && (!s->like || s->like[i]) &&
            (!peers || dp_stage_tensors[i].kind == DP_PER_RANK))
            o->stage[i] = dp_stage_tensor_value(&sim, i);
    o->r = sim.out;
    sim.out = (dp_result){0};
    (peers ? dp_mpi_sim_close : dp_sim_free)(&sim);
    return DP_OK;
}

static dp_status run_cuda(const dp_check_subject *s, const dp_problem *p, int N, int backward,
                          dp_check_outcome *o, dp_err *e) {
    dp_cuda_result c;
    const dp_cuda_how how = {.backend = s->backend,
                             .N = N,
                             .base = s->run.base,
                             .chain = s->run.chain,
                             .variant = s->variant,
                             .sending = {s->run.merge, s->run.payload},
                             .bf16_inputs = s->input_dtype == DP_BF16,
                             .backward = backward,
                             .results_only = p->own.kind != DP_OWN_EVEN};
    const dp_status st = dp_cuda_run(p, &how, &c, e);
    if (st) return st;
    o->r = c.out;
    o->M = c.rank[DP_RANK_M];
    o->dM = c.rank[DP_RANK_DM];
    o->n = N * p->HV;
    o->segments = c.segments;
    c.out = (dp_result){0};
    c.rank[DP_RANK_M] = c.rank[DP_RANK_DM] = NULL;
    dp_cuda_result_free(&c, p->HV);
    return DP_OK;
}

/* The calls of one process. */
typedef struct {
    dp_subject_result r[2];
    int made;
} called;
static void called_free(called *c) {
    for (int i = 0; i < 2; i++)
        dp_subject_result_free(&c->r[i]);
}

/* DP_EINPUT: the library refuses this problem; DP_EDEVICE: it did not come to its end. */
static dp_status run_library(const dp_check_subject *s, const dp_problem *p, int N, int backward,
                             dp_check_outcome *o, dp_err *e) {
    DP_FREED(called_free) called c = {.made = 0};
    const dp_problem *const of[] = {s->before ? s->before : p, p};
    const dp_subject_call call = {.input_format = dp_formats[s->input_dtype].name,
                                  .N = N,
                                  .base = s->run.base,
                                  .chain = s->run.chain,
                                  .backward = backward,
                                  .chunk = s->chunk,
                                  .limit_s = s->limit_s > 0 ? s->limit_s : DP_SUBJECT_LIMIT_S};
    const dp_status st =
        dp_subject_run_calls(s->library, s->before ? 2 : 1, of, &call, c.r, &c.made, e);
    dp_subject_result *r = &c.r[c.made > 1];
    if (st) return st == DP_EINPUT ? st : DP_EIO;
    if (r->outcome == DP_SUBJECT_REFUSED)
        return dp_fail(e, DP_EINPUT, "%s refuses it: %s", s->library->name, r->why);
    if (r->outcome != DP_SUBJECT_RETURNED)
        return dp_fail(e, DP_EDEVICE, "%s%s", c.made > 1 ? "called again: " : "", r->why);
    o->r = r->r;
    r->r = (dp_result){0};
    for (int i = 0; s->shows && i < DP_NSTAGE_TENSORS; i++) {
        o->stage[i] = r->stage[i];
        r->stage[i] = NULL;
    }
    return DP_OK;
}

dp_status dp_check_run_problem(const dp_check_subject *s, const dp_problem *p, int N, int backward,
                               dp_check_outcome *o, dp_err *e) {
    *o = (dp_check_outcome){0};
    if (dp_reads_along(p) && !(backward && p->dout))
        return dp_fail(e, DP_EINPUT, "--forward: o of %s reads along values, which needs gradients",
                       dp_model_of(p)->name);
    return (s->library                          ? run_library
            : dp_backends[s->backend].simulated ? run_sim
                                                : run_cuda)(s, p, N, backward && p->dout, o, e);
}

/* ---- the allowed difference ------------------------------------------------------------------ */

/* Seconds of one core that the fp64 reference and its bounds take, about. */
static double reference_seconds(const dp_problem *p) {
    return 2e-8 * (double)p->T * p->HV * p->R * p->R * (DP_CHUNK + p->K) * (p->K + p->V);
}

#define AFFORDABLE 60 /* seconds */

int dp_check_bounds_there(const dp_check_subject *s, const dp_problem *p, char *why, size_t size) {
    const dp_design design = dp_check_design(s, p);
    const int tokens = dp_token_design_is_bounded(&design);
    const double cost = tokens ? dp_token_bounds_seconds(p) : reference_seconds(p);
    if (!tokens && !dp_bounds_are_derived(&design))
        snprintf(why, size, "no bound is derived for the design of this kernel");
    else if (cost > AFFORDABLE)
        snprintf(why, size, "the fp64 reference that bounds are taken from would take about %.0f s",
                 cost);
    else
        return 1;
    return 0;
}

int dp_check_bounded(const dp_check_work *w, char *why, size_t size) {
    return dp_check_bounds_there(w->s, w->p, why, size);
}

/* Largest entry of o and final_state in fp64; 0: too costly to know. */
static double check_largest(const dp_check_work *w) {
    dp_err e = {0};
    double most = 0;
    if (reference_seconds(w->p) > AFFORDABLE) return 0;
    DP_FREED(dp_problem_free) dp_problem here = dp_check_at_hand(w->p);
    DP_FREED(dp_sim_free) dp_sim ref;
    if (dp_sim_reference(&ref, &here, DP_CHUNK, w->N, NULL, 0, &e)) return 0;
    for (int f = DP_RESULT_O; f <= DP_RESULT_FINAL_STATE; f++) {
        const double *x = ref.out.out[f];
        const int64_t n = x ? dp_result_count(w->p, f) : 0;
        for (int64_t i = 0; i < n; i++)
            most = isnan(x[i]) ? INFINITY : fmax(most, fabs(x[i]));
    }
    return most;
}

/* The design that the library claims, else the plain one of its base. */
static dp_design claimed(const dp_check_subject *s) {
    dp_design d = dp_design_of(s->run.base);
    if (s->library && s->library->design)
        dp_design_parse(s->library->design, s->run.base, &d, NULL);
    return d;
}

int dp_check_drops(const dp_check_subject *s) { return claimed(s).drop > 0; }

dp_design dp_check_design(const dp_check_subject *s, const dp_problem *p) {
    dp_design d = claimed(s);
    const dp_sending asked = {.exchange = s->run.merge, .payload = s->run.payload};
    if (!s->library && dp_backends[s->backend].simulated)
        d.sending = dp_sending_of(s->run.merge, s->run.payload, DP_SENDERS);
    if (!s->library && dp_backends[s->backend].on_device)
        d.sending = dp_cuda_sending(asked, DP_SENDERS);
    if (!s->library && dp_backends[s->backend].on_device && dp_cuda_by_tokens(p)) d.chunk = 0;
    d.drop = 0;
    if (s->chunk) d.chunk = s->chunk;
    return d;
}

/* Adds one store of each result in the format that it leaves in. */
static void add_store(const dp_problem *p, const dp_design *bounded, const dp_design *own,
                      dp_result *r, dp_error_bound *b) {
    const double *want[DP_NRESULTS];
    for (int i = 0; i < DP_NRESULTS; i++)
        want[i] = r->out[i];
    dp_bounds_store(p, bounded, own, want, b);
}

static void make_of_pass(const dp_check_subject *s, const dp_problem *p, const dp_design *own,
                         int N, int backward, double *const *of, dp_error_bound *b,
                         double **stage) {
    DP_FREED(dp_sim_free) dp_sim ref;
    DP_FREED(dp_error_bound_base_free) dp_error_bound_base base;
    const dp_design design = own->chunk ? *own : dp_token_design(own);
    if (design.sending.exchange == DP_EXCHANGE_HEADS) N = 1; /* computes as one rank does */
    dp_must(dp_sim_reference(&ref, p, design.chunk, N, NULL, backward,
                             NULL)); /* it was run on these ranks */
    dp_error_bound_base_init(&base, &ref, &design, 2, backward, NULL);
    dp_error_bound_run(&base, s->run.chain, backward, b);
    for (int i = 0; of && i < DP_NSTAGE_TENSORS; i++)
        if (of[i] && dp_stage_tensors[i].kind != DP_PER_RANK) stage[i] = dp_stage_bound(&base, i);
    const dp_design plain = dp_design_of(design.base);
    add_store(p, &plain, own, &ref.out, b);
}

void dp_check_bounds_make(const dp_check_subject *s, const dp_problem *there, int N, int backward,
                          double *const *of, dp_error_bound *b, double **stage) {
    DP_FREED(dp_problem_free) dp_problem here = dp_check_at_hand(there);
    const dp_design own = dp_check_design(s, &here);
    const dp_design pass[2] = {dp_design_of_pass(&own, 0), dp_design_of_pass(&own, 1)};
    const int two = backward && !dp_design_same(&pass[0], &pass[1]);
    dp_error_bound gradients;
    make_of_pass(s, &here, &pass[0], N, backward, of, b, stage);
    if (two) {
        make_of_pass(s, &here, &pass[1], N, backward, NULL, &gradients, NULL);
        dp_error_bound_swap_backward(b, &gradients);
        dp_error_bound_free(&gradients);
    }
}

const dp_error_bound *dp_check_bounds_of(dp_check_work *w) {
    const int i = w->p != w->whole;
    dp_check_bounds *b = w->bounds;
    if (b->made[i] && (!i || b->made[i] == w->c)) return &b->of[i];
    if (b->made[i]) dp_error_bound_free(&b->of[i]);
    dp_check_bounds_make(w->s, w->p, w->N, w->backward, NULL, &b->of[i], NULL);
    b->made[i] = w->c;
    return &b->of[i];
}

static void check_bounds_free(dp_check_bounds *b) {
    for (int i = 0; i < 2; i++)
        if (b->made[i]) dp_error_bound_free(&b->of[i]);
}

/* ---- factors and signs ----------------------------------------------------------------------- */

/* The factor of each result; 0: not compared. */
typedef struct {
    double of[DP_NRESULTS];
} factors;
static factors all_times(double c) {
    factors f;
    for (int i = 0; i < DP_NRESULTS; i++)
        f.of[i] = c;
    return f;
}

static int has_gradients(dp_check_work *w) {
    const int has = w->backward && (dp_backends[w->s->backend].simulated || w->base->r.dq);
    if (!has) dp_check_skip(w, "no gradients");
    return has;
}

/* Inputs of a row, the first bit of a set that of the first. */
#define ID_OF(ID, ...) DP_INPUT_##ID,
static const dp_input_id ROWS_OF[] = {DP_INPUT_V, DP_INPUT_K,
                                      DP_ROW_VALUES(ID_OF) DP_ROW_KEYS(ID_OF)};
enum { NROWS_OF = sizeof ROWS_OF / sizeof *ROWS_OF };

static int times_in(dp_entry e, int set) {
    int n = 0;
    for (int i = 0; i < NROWS_OF; i++)
        n += set >> i & 1 ? dp_entry_has(e, ROWS_OF[i]) + dp_entry_has(e, ROWS_OF[i] | DP_PREVIOUS)
                          : 0;
    return n;
}

/* The first set of inputs, that of `least` among them, of which each row is as the check needs it;
 * 0: there is none. */
static int first_set(const dp_problem *p, int least, int (*holds)(const dp_token_row *r, int set)) {
    const dp_recurrence *a = dp_recurrence_of(p);
    for (int set = least; set < 1 << NROWS_OF; set++) {
        int all = (set & least) == least;
        for (int j = 0; j < a->n && all; j++)
            all = holds(&a->row[j], set);
        if (all) return set;
    }
    return 0;
}

static int is_linear(const dp_token_row *r, int set) {
    return !times_in(r->write, set) && !times_in(r->read, set) &&
           (!r->value.sign || times_in(r->value, set) == 1);
}

static int keeps_signs(const dp_token_row *r, int set) {
    const int n = times_in(r->write, set);
    return !(r->read.sign && (n + times_in(r->read, set)) % 2) &&
           !(r->value.sign && (n + times_in(r->value, set)) % 2);
}

/* A difference means nothing where a multiple of the right results, or of states behind them,
 * overflows. */
static void unless_it_overflows(dp_check_work *w) {
    const double room = w->s->run.base == DP_BASE_FP64 ? 0x1p900 : 0x1p90;
    char why[96];
    if (w->c->verdict != DP_FAIL) return;
    const double most = check_largest(w);
    if (most <= room) return;
    snprintf(why, sizeof why, "right results of up to %.3g may overflow when they are scaled",
             most);
    dp_check_skip(w, why);
}

/* Inputs of the set times c, and more of them; their gradients are as `by` has them, times own. */
static dp_status times_set(dp_check_work *w, int set, int more, double c, double own, factors *by) {
    int input[NROWS_OF + 1], n = 0;
    if (!set) return dp_check_skip(w, "the rows of this recurrence have no such inputs");
    for (int i = 0; i < NROWS_OF; i++)
        if (set >> i & 1) input[n++] = ROWS_OF[i];
    if (more >= 0) input[n++] = more;
    for (int i = 0; i < n; i++)
        if (dp_gradient_of(input[i]) >= 0) by->of[dp_gradient_of(input[i])] = own;
    const dp_status st = dp_check_factor(w, input, n, c, by->of, c < 0 ? 0 : check_underflow(w, c));
    if (!st && c > 1) unless_it_overflows(w);
    return st;
}

static dp_status scale_v(dp_check_work *w) {
    factors by = all_times(8);
    int set = first_set(w->p, 1, is_linear);
    if (!set) set = first_set(w->p, 4, is_linear);
    return times_set(w, set, DP_INPUT_S0, 8, 1, &by);
}

static dp_status scale_do(dp_check_work *w) {
    static const int input[] = {DP_INPUT_DO, DP_INPUT_DSTATE};
    factors by = all_times(8);
    by.of[DP_RESULT_O] = by.of[DP_RESULT_FINAL_STATE] = 1;
    if (!has_gradients(w)) return DP_OK;
    return dp_check_factor(w, input, 2, 8, by.of, check_underflow(w, 8));
}

static dp_status sign_q(dp_check_work *w) {
    static const int input[] = {DP_INPUT_Q};
    factors by = all_times(w->p->dstate ? 0 : -1);
    by.of[DP_RESULT_O] = -1;
    by.of[DP_RESULT_FINAL_STATE] = by.of[DP_RESULT_DQ] = 1;
    return dp_check_factor(w, input, 1, -1, by.of, 0);
}

static dp_status sign_kv(dp_check_work *w) {
    factors by = all_times(1);
    int set = first_set(w->p, 3, keeps_signs);
    if (!set) set = first_set(w->p, 1, keeps_signs);
    return times_set(w, set, -1, -1, -1, &by);
}

/* ---- the checks ------------------------------------------------------------------------------ */

/* Among so many calls a race of one call in 50 shows in 95 of 100 checks. */
enum { LEAST_REPETITIONS = 2, MOST_REPETITIONS = 150 };
static const double REPEATED_S = 5;

static dp_status repeat_runs(dp_check_work *w) {
    char why[sizeof w->c->why] = "";
    const double t0 = omp_get_wtime();
    const int most = w->s->library ? MOST_REPETITIONS : LEAST_REPETITIONS;
    const dp_check_subject again = dp_check_called_before(w);
    int differ = 0, i;
    for (i = 0; i < LEAST_REPETITIONS || (i < most && !differ && omp_get_wtime() - t0 < REPEATED_S);
         i++) {
        dp_check_outcome o;
        const dp_status st =
            dp_check_run_problem(i ? w->s : &again, w->p, w->N, w->backward, &o, w->e);
        if (st) return st;
        dp_check_same(w,
                      &(dp_check_pair){.p = w->p, .got = &o.r, .want = &w->base->r, .factor = 1});
        dp_check_outcome_free(&o);
        if (w->c->verdict != DP_FAIL) continue;
        if (!differ++) memcpy(why, w->c->why, sizeof why);
        w->c->verdict = DP_PASS;
    }
    if (!differ) return DP_OK;
    w->c->verdict = DP_FAIL;
    snprintf(w->c->why, sizeof w->c->why, "not repeatable, %d of %d: %.440s", differ, i, why);
    return DP_OK;
}

/* The same run again gives the same bits. */
static dp_status check_repeat(dp_check_work *w) {
    if (dp_backends[w->s->backend].faulty) {
        dp_repeat x;
        dp_sim_policy how = w->s->run;
        how.N = w->N;
        how.backward = w->backward;
        const dp_status st = dp_repeat_sim(w->p, &how, 3, &x, w->e);
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
    return repeat_runs(w);
}

enum { EDITED_TOKENS = 4 };

/* First token of the chunk that holds t, and the token behind its last one: chunks restart at
 * sequences and at ranks. */
static int64_t chunk_of(const dp_check_work *w, int64_t t, int64_t *end) {
    const dp_problem *p = w->p;
    const int64_t L = p->T / w->N, rank = t / L * L, cu = p->cu[dp_sequence_of(p->cu, p->Nseq, t)],
                  from = rank > cu ? rank : cu, start = from + (t - from) / DP_CHUNK * DP_CHUNK;
    int64_t stop = p->cu[dp_sequence_of(p->cu, p->Nseq, t) + 1];
    if (stop > rank + L) stop = rank + L;
    *end = start + DP_CHUNK < stop ? start + DP_CHUNK : stop;
    return start;
}

/* The edited tokens: t[0] is in the middle of a chunk, t[3] begins that chunk, t[1] the last rank.
 * The second token of the last sequence with tokens is t[2]. */
static void edited_tokens(const dp_check_work *w, int64_t t[EDITED_TOKENS]) {
    const dp_problem *p = w->p;
    const int64_t L = p->T / w->N;
    int64_t end;
    int s = p->Nseq - 1;
    while (s > 0 && p->cu[s + 1] == p->cu[s])
        s--;
    t[0] = p->T / 2 + (p->T > 16 ? 5 : 0);
    t[1] = (w->N - 1) * L;
    t[2] = p->cu[s] + (p->cu[s] + 1 < p->T);
    t[3] = chunk_of(w, t[0], &end);
}

/* Another gate, exact in every format. With exp(-g): a weaker one, since a strong one is refused
 * (DP_FACTORS_GATE). */
static dp_edit edit_of_gate(const dp_problem *p) {
    return dp_has_growth(p) ? DP_EDIT_WEAKER_GATE : DP_EDIT_GATE;
}

/* Inputs of tokens that have a role: another token's values, and another gate. */
static void edit(dp_problem *p, dp_role role, int64_t t) {
    const int64_t other = (t + p->T / 2 + 1) % p->T;
    for (int i = 0; i < DP_NINPUTS; i++) {
        const int64_t n = dp_input_width(p, i);
        const dp_tensor_field *f = &dp_input_fields[i];
        if (!dp_input_of(p, i) || f->role != role || f->kind != DP_OF_TOKENS) continue;
        DP_OWN double *row = dp_doubles(n);
        double *x = dp_check_own(p, i);
        dp_memory_get(p->memory, row, x + (i == DP_INPUT_G ? t : other) * n, n);
        for (int64_t z = 0; i == DP_INPUT_G && z < n; z++)
            row[z] = dp_edited(edit_of_gate(p), row[z], 0);
        for (int64_t z = 0; i == DP_INPUT_DO && z < n; z++)
            row[z] *= 4;
        dp_memory_put(p->memory, x + t * n, row, n);
    }
}

typedef struct {
    int64_t t, chunk;
    int seq;
} token_edit;

/* Rows that an edited token comes after. */
static int check_keep_before(const void *ctx, int f, int64_t token, DP_UNUSED int head, int seq) {
    const token_edit *x = ctx;
    return dp_result_fields[f].kind != DP_OF_HEADS &&
           (seq != x->seq || ((f == DP_RESULT_O || f == DP_RESULT_DQ) && token < x->chunk));
}

/* Rows that an edited token's gradients do not reach. */
static int check_keep_behind(const void *ctx, int f, int64_t token, DP_UNUSED int head, int seq) {
    const token_edit *x = ctx;
    if (f == DP_RESULT_O || f == DP_RESULT_FINAL_STATE) return 1;
    if (dp_result_fields[f].kind == DP_OF_HEADS) return 0;
    return seq != x->seq ||
           (f != DP_RESULT_DS0 && (f == DP_RESULT_DQ ? token != x->t : token > x->t));
}

void dp_check_say(dp_check_work *w, const char *format, ...) {
    const size_t used = strnlen(w->c->why, 260);
    va_list more;
    if (w->c->verdict != DP_FAIL) return;
    va_start(more, format);
    vsnprintf(w->c->why + used, sizeof w->c->why - used, format, more);
    va_end(more);
}

/* Adds to a failure which tokens or heads were changed. */
static void say_changed(dp_check_work *w, const char *what, int64_t n, const char *which) {
    dp_check_say(w, ", after %s %lld%s changed", what, (long long)n, which);
}

/* Edits, at some tokens, of the inputs of that role leave the rows of keep as they are. */
static dp_status check_edits(dp_check_work *w, dp_role role, dp_check_keep *keep) {
    int64_t t[EDITED_TOKENS], end;
    dp_status st = DP_OK;
    edited_tokens(w, t);
    for (int i = 0; i < EDITED_TOKENS && !st && w->c->verdict == DP_PASS; i++) {
        dp_problem p = dp_check_copy(w->p, w->backward);
        const token_edit x = {t[i], chunk_of(w, t[i], &end),
                              dp_sequence_of(w->p->cu, w->p->Nseq, t[i])};
        edit(&p, role, t[i]);
        st = dp_check_changed(w, w->s, &p, NULL, 0, keep, &x);
        say_changed(w, "token", t[i], "");
    }
    return st;
}

/* Value heads [from, to) are changed, and all of q and k that no other head reads. */
typedef struct {
    int from, to, G;
} head_edit;

static int keep_others(const void *ctx, int f, DP_UNUSED int64_t token, int head,
                       DP_UNUSED int seq) {
    const head_edit *x = ctx;
    return f == DP_RESULT_DQ || f == DP_RESULT_DK
               ? (head + 1) * x->G <= x->from || head * x->G >= x->to
               : head < x->from || head >= x->to;
}

/* Exact in every format: gates of another strength, beta (erase, write) of another token, all else
 * mirrored. */
static dp_edit edit_of(const dp_problem *p, int i) {
    if (i == DP_INPUT_G || dp_input_fields[i].role == DP_ROLE_GATE) return edit_of_gate(p);
    const int of_strength = dp_input_fields[i].role == DP_ROLE_REQUIRED && i > DP_INPUT_G;
    return of_strength ? DP_EDIT_MIRRORED : DP_EDIT_SIGN;
}

static void edit_host(const dp_memory_edit *e) {
#pragma omp parallel for if (e->rows * e->width > 1 << 22)
    for (int64_t t = 0; t < e->rows; t++)
        for (int64_t at = e->from; at < e->to; at++)
            e->into[t * e->width + at] = dp_edited(e->edit, e->of[t * e->width + at],
                                                   e->of[(e->rows - 1 - t) * e->width + at]);
}

static void edit_heads(const dp_problem *p0, dp_problem *p, const head_edit *x) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        const int heads = dp_input_heads(p0, i), group = p0->HV / heads;
        const int from = (x->from + group - 1) / group, to = x->to / group;
        const int64_t width = dp_input_width(p0, i), per = width / heads;
        if (!dp_input_of(p, i) || from >= to) continue; /* p: gradients come in backward alone */
        const dp_memory_edit e = {.into = dp_check_own(p, i),
                                  .of = dp_input_of(p0, i),
                                  .rows = dp_input_count(p0, i) / width,
                                  .width = width,
                                  .from = from * per,
                                  .to = to * per,
                                  .edit = edit_of(p0, i)};
        (p0->memory ? p0->memory->edit : edit_host)(&e);
    }
}

/* The first head alone, the last one alone, all but the first. */
static dp_status check_heads(dp_check_work *w) {
    const dp_problem *p0 = w->p;
    dp_status st = DP_OK;
    if (p0->HV < 2) return dp_check_skip(w, "one head");
    for (int z = 0; z < 3 && !st && w->c->verdict == DP_PASS; z++) {
        const head_edit x = {z == 0 ? 0 : z == 1 ? p0->HV - 1 : 1, z ? p0->HV : 1, dp_G(p0)};
        dp_problem p = dp_check_copy(p0, w->backward);
        edit_heads(p0, &p, &x);
        st = dp_check_changed(w, w->s, &p, NULL, 0, keep_others, &x);
        say_changed(w, z == 2 ? "heads" : "head", x.from, z == 2 ? " and up" : "");
    }
    return st;
}

/* Runs the chunk of the first edited token as a sequence of its own, on one rank. Each run edits
 * another one of every seventh token. */
static dp_status check_chunk(dp_check_work *w) {
    int64_t t[EDITED_TOKENS], end;
    edited_tokens(w, t);
    const int64_t start = chunk_of(w, t[0], &end);
    if (end - start < 2) return dp_check_skip(w, "the chunk has one token");
    dp_problem a = dp_check_slice(w->p, start, end, NULL, NULL, w->backward);
    dp_check_outcome x;
    dp_check_work v = *w;
    v.p = &a;
    v.N = 1;
    dp_status st = dp_check_run_problem(w->s, &a, 1, w->backward, &x, w->e);
    const int ran = !st;
    for (token_edit z = {(end - start - 1) % 7 ? (end - start - 1) % 7 : 7, 0, 0};
         z.t < end - start && !st && w->c->verdict == DP_PASS; z.t += 7) {
        dp_problem b = dp_check_copy(&a, w->backward);
        dp_check_outcome y;
        z.chunk = z.t;
        edit(&b, DP_ROLE_REQUIRED, z.t);
        st = dp_check_run_problem(w->s, &b, 1, w->backward, &y, w->e);
        if (!st) {
            dp_check_same(&v, &(dp_check_pair){.p = &a,
                                               .got = &y.r,
                                               .want = &x.r,
                                               .factor = 1,
                                               .keep = check_keep_before,
                                               .ctx = &z});
            dp_check_outcome_free(&y);
        }
        say_changed(w, "token", z.t, " of its chunk");
        dp_problem_free(&b);
    }
    if (ran) dp_check_outcome_free(&x);
    dp_problem_free(&a);
    return st;
}

/* No initial state and one of zeros give the same bits. */
static dp_status check_no_state(dp_check_work *w) {
    DP_FREED(dp_problem_free) dp_problem none = dp_check_copy(w->p, w->backward);
    dp_free_of(&none, none.s0);
    none.s0 = NULL;
    DP_FREED(dp_problem_free) dp_problem zeros = dp_check_copy(&none, w->backward);
    zeros.s0 = dp_doubles_of(&zeros, dp_input_count(&zeros, DP_INPUT_S0));
    dp_check_work v = *w;
    v.p = &none;
    DP_FREED(dp_check_outcome_free) dp_check_outcome want = {0}, got = {0};
    dp_status st = dp_check_run_problem(w->s, &none, w->N, w->backward, &want, w->e);
    if (!st) st = dp_check_run_problem(w->s, &zeros, w->N, w->backward, &got, w->e);
    if (!st)
        dp_check_same(&v,
                      &(dp_check_pair){.p = &zeros, .got = &got.r, .want = &want.r, .factor = 1});
    return st;
}

/* ---- the others ------------------------------------------------------------------------------ */

static dp_status causality(dp_check_work *w) {
    return check_edits(w, DP_ROLE_REQUIRED, check_keep_before);
}

static dp_status anticausality(dp_check_work *w) {
    return has_gradients(w) ? check_edits(w, DP_ROLE_INCOMING, check_keep_behind) : DP_OK;
}

static dp_status ranks(dp_check_work *w) { return dp_check_ranks(w, 0); }

static dp_status transpose(dp_check_work *w) { return dp_check_ranks(w, 1); }

/* ---- the list -------------------------------------------------------------------------------- */

#define BITS "bitwise"
#define BITS_BUT_UNDERFLOW "bitwise but for underflow"
#define BITS_EXACT "bitwise: nothing rounds"
#define BOUNDS "sum of both bounds"

#define NAME(name, promise, run) name,
#define ROW(name, promise, run) {promise, run},
const char *const dp_check_names[DP_NCHECKS] = {DP_CHECKS(NAME)};
static const struct {
    const char *promise;
    dp_status (*run)(dp_check_work *w);
} CHECKS[DP_NCHECKS] = {DP_CHECKS(ROW)};

/* A library's refusal skips a check, its death fails it; what else goes wrong ends the checks. */
static dp_status settle(dp_status st, const dp_check_subject *s, dp_check *c, dp_err *e) {
    if (!s->library || (st != DP_EINPUT && st != DP_EDEVICE)) return st;
    c->verdict = st == DP_EINPUT ? DP_SKIPPED : DP_FAIL;
    snprintf(c->why, sizeof c->why, "%.300s", e->msg);
    *e = (dp_err){0};
    return DP_OK;
}

static int any_not_finite(const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i])) return 1;
    return 0;
}

static int all_zero(const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (x[i] != 0) return 0;
    return 1;
}

static int zero_in(const dp_problem *p, const double *o, int head) {
    int zero = 1;
    for (int64_t t = 0; t < p->T && zero; t++)
        zero = all_zero(o + (t * p->HV + head) * p->V, p->V);
    return zero;
}

/* The first head of o that is zero where the reference is not, or costs too much; -1: none. */
static int zero_head(const dp_problem *p, int N, const double *o) {
    dp_err e = {0};
    DP_FREED(dp_sim_free) dp_sim ref = {0};
    int known = reference_seconds(p) > AFFORDABLE ? -1 : 0;
    for (int h = 0; h < p->HV; h++) {
        if (!zero_in(p, o, h)) continue;
        if (!known) known = dp_sim_reference(&ref, p, DP_CHUNK, N, NULL, 0, &e) ? -1 : 1;
        if (known < 0 || !zero_in(p, ref.out.out[DP_RESULT_O], h)) return h;
    }
    return -1;
}

static int inputs_are_finite(const dp_problem *p) {
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_of(p, i) && any_not_finite(dp_input_of(p, i), dp_input_count(p, i))) return 0;
    return 1;
}

/* Why results of foreign code prove nothing: zeros, and numbers that are none, keep every property
 * whatever else is wrong. "": they may. */
static void proves_nothing(const dp_check_subject *s, const dp_problem *p, int N,
                           const dp_result *r, char *why, size_t size) {
    *why = 0;
    if (!s->library || r->memory || !inputs_are_finite(p)) return;
    for (int f = 0; f < DP_NRESULTS && !*why; f++) {
        const double *x = r->out[f];
        const char *name = dp_result_fields[f].name;
        const int never_zero =
            f == DP_RESULT_O || f == DP_RESULT_DQ || f == DP_RESULT_DK || f == DP_RESULT_DV;
        int head;
        if (!x) continue;
        const int64_t n = dp_result_count(p, f);
        if (never_zero && all_zero(x, n))
            snprintf(why, size, "%s is zero", name);
        else if (f == DP_RESULT_O && (head = zero_head(p, N, x)) >= 0)
            snprintf(why, size, "o of head %d is zero", head);
        else if (any_not_finite(x, n))
            snprintf(why, size, "%s has entries that are not finite", name);
    }
}

/* The i-th check, as w is set up for it. */
static dp_status run_check(int i, dp_check_work w, dp_check *c) {
    *c = (dp_check){.name = dp_check_names[i], .promise = CHECKS[i].promise, .verdict = DP_PASS};
    w.c = c;
    const dp_status st = settle(CHECKS[i].run(&w), w.s, c, w.e);
    if (!st && c->verdict == DP_PASS && !c->compared)
        dp_check_skip(&w, "nothing of this problem could be compared");
    return st;
}

/* ---- failures that do not come again ------------------------------------------------------- */

enum { MOST_TRIES = 6 };

/* Repeats a failed check of foreign code, with the run that it compares with. It stops when a
 * repetition fails with the same message. It also stops, with *differ = 1, when a repetition
 * passes, or when a kernel that claims equal bits fails with another message. The number of
 * repetitions goes to *tries. */
static dp_status try_again(int i, dp_check_work w, const dp_check *c, int *differ, int *tries) {
    dp_status st = DP_OK;
    *differ = *tries = 0;
    for (int more = 1; more && !st && *tries < MOST_TRIES; ++*tries) {
        dp_check_outcome base;
        dp_check_bounds bounds = {0};
        dp_check again = {.verdict = DP_FAIL};
        w.base = &base;
        w.bounds = &bounds;
        st = dp_check_run_problem(w.s, w.p, w.N, w.backward, &base, w.e);
        if (!st) st = run_check(i, w, &again);
        const int other = strcmp(again.why, c->why) != 0;
        *differ = again.verdict != DP_FAIL || (w.s->bitwise && other);
        more = other && !*differ;
        check_bounds_free(&bounds);
        dp_check_outcome_free(&base);
    }
    return settle(st, w.s, &(dp_check){0}, w.e);
}

/* Said on the check itself, or, where there is one, on `repeat`: the cause is not what the check
 * is about. */
static void blame_repeat(dp_check *c, dp_check *repeat, int differ, int tries) {
    char why[sizeof c->why];
    snprintf(why, sizeof why, "not repeatable, %d of %d: %s failed once: %.380s", differ, tries,
             c->name, c->why);
    if (repeat && repeat->verdict != DP_FAIL) {
        repeat->verdict = DP_FAIL;
        memcpy(repeat->why, why, sizeof why);
    }
    c->verdict = repeat ? DP_SKIPPED : DP_FAIL;
    memcpy(c->why, why, sizeof why);
}

/* The check that failed, a library's: is it the library that gives other results each time? */
static dp_status look_again(int i, const dp_check_work *w, dp_check *c, dp_check *repeat) {
    int differ, tries;
    if (c == repeat || !w->s->library) return DP_OK;
    if (repeat && repeat->verdict == DP_FAIL) {
        c->verdict = DP_SKIPPED;
        snprintf(c->why, sizeof c->why, "the same run does not give the same (repeat)");
        return DP_OK;
    }
    const dp_status st = try_again(i, *w, c, &differ, &tries);
    if (!st && differ) blame_repeat(c, repeat, differ, tries);
    return st;
}

dp_status dp_checks_run(const dp_problem *p, const dp_check_subject *s, int N, int backward,
                        const char *only, dp_checks *out, dp_err *e) {
    DP_FREED(dp_check_outcome_free) dp_check_outcome base = {0};
    DP_FREED(check_bounds_free) dp_check_bounds bounds = {0};
    *out = (dp_checks){0};
    dp_status st = dp_check_run_problem(s, p, N, backward, &base, e);
    if (st == DP_EDEVICE && s->library) { /* died on the problem itself: no check is needed */
        out->c[out->n++] = (dp_check){.name = dp_check_names[0], .promise = CHECKS[0].promise};
        return settle(st, s, &out->c[0], e);
    }
    char nothing[96] = "";
    if (!st) proves_nothing(s, p, N, &base.r, nothing, sizeof nothing);
    for (int i = 0; i < DP_NCHECKS && !st; i++) {
        const double t0 = omp_get_wtime();
        if (only && !dp_is_listed(dp_check_names[i], only, ',')) continue;
        dp_check *c = &out->c[out->n++], *first = &out->c[0];
        const dp_check_work w = {.p = p,
                                 .whole = p,
                                 .s = s,
                                 .N = N,
                                 .backward = backward && p->dout,
                                 .base = &base,
                                 .bounds = &bounds,
                                 .e = e};
        st = run_check(i, w, c);
        if (!st && c->verdict == DP_PASS && *nothing) {
            c->verdict = DP_SKIPPED;
            memcpy(c->why, nothing, sizeof nothing);
        }
        if (!st && c->verdict == DP_FAIL)
            st = look_again(i, &w, c, first->name == dp_check_names[0] ? first : NULL);
        c->seconds = omp_get_wtime() - t0;
        if (s->progress)
            fprintf(stderr, "  %s: %s, %.2f s\n", c->name,
                    st ? "cannot be run" : dp_verdict_names[c->verdict], c->seconds);
    }
    return st;
}
