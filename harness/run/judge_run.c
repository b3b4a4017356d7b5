/* The judgement of one run: its parts in order, and a second set of draws where it is marginal. */
#include "harness/verdict/source.h"
#include "harness/verdict/sums.h"
#include "limits.h"
#include "outputs.h"
#include "ref/arithmetic/elementary.h"
#include "ref/bound/drop.h"
#include "ref/chunk/gate.h"
#include "ref/vocabulary/context.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the state that a row lacks -------------------------------------------------------------- */

#define EXPLAINED 0.1 /* of the error may stay */

/* A problem and its inputs after their activations. */
typedef struct {
    const dp_problem *p;
    dp_activated in;
} inputs;

/* sum [V] += what token t wrote, as y [K] reads the state after it; y <- as it reads the one
 * before. */
static void step_back(const inputs *x, int64_t t, int hv, double *y, double *sum) {
    const dp_problem *p = x->p;
    const int Kg = dp_Kg(p);
    const int64_t at = t * p->HV + hv;
    const double *k = x->in.k + (t * p->H + hv / dp_G(p)) * dp_rows(p) * p->K;
    const double *erasing = dp_erasing_at(p, x->in.k, x->in.erasing, t, hv);
    const double *values = dp_values_at(p, x->in.values, t, hv);
    double *through = dp_doubles(dp_rows(p));
    for (int n = dp_keys_at_once(p), first = dp_rows(p) - n; first >= 0; first -= n) {
        for (int j = first; j < first + n; j++) {
            for (int i = 0; i < p->K; i++)
                through[j] += k[(int64_t)j * p->K + i] * y[i];
            through[j] *= x->in.beta[at * dp_rows(p) + j];
            for (int v = 0; v < p->V; v++)
                sum[v] += through[j] * values[j * p->V + v];
        }
        for (int j = first; j < first + n; j++)
            for (int i = 0; i < p->K; i++)
                y[i] -= through[j] * erasing[(int64_t)j * p->K + i];
    }
    for (int i = 0; i < p->K; i++)
        y[i] *= dp_exp(x->in.g[at * Kg + (Kg == 1 ? 0 : i)]);
    free(through);
}

/* |a - b|; b NULL: |a| */
static double distance(const double *a, const double *b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) {
        const double d = b ? a[i] - b[i] : a[i];
        sum += d * d;
    }
    return sqrt(sum);
}

/* One row of V numbers that a vector y reads from the state after token `last`. */
typedef struct {
    int64_t first, last;
    int hv;
    const double *got;
    double *y;
} reading;

static reading reading_of(const inputs *x, int field, const dp_row *row, const double *got) {
    const dp_problem *p = x->p;
    reading r = {.hv = row->at.head, .y = dp_doubles(p->K)};
    if (field == DP_RESULT_O) {
        const int64_t t = row->at.token;
        const int seq = dp_sequence_of(p->cu, p->Nseq, t);
        r.first = p->cu[seq];
        r.last = t;
        r.got = got + (t * p->HV + r.hv) * p->V;
        for (int i = 0; i < p->K; i++)
            r.y[i] = p->scale * x->in.q[(t * p->H + r.hv / dp_G(p)) * p->K + i];
    } else {
        const int channel = row->index / p->V;
        const int64_t state = (int64_t)row->at.sequence * p->HV + r.hv;
        r.first = p->cu[row->at.sequence];
        r.last = p->cu[row->at.sequence + 1] - 1;
        r.got = got + (state * p->K + channel) * p->V;
        r.y[channel] = 1;
    }
    return r;
}

/* A power of two, for one decimal: never -0.0. */
static double shown(double power) { return round(10 * power) / 10 + 0.0; }

/* field: DP_RESULT_O or DP_RESULT_FINAL_STATE; row: the failed one; got: the whole tensor. drop:
 * bits that are claimed, 0: none. Writes text and returns 1 where a missing state explains nine
 * tenths of the row's error, else 0. */
static int lost_state_of(const dp_problem *p, int field, const dp_row *row, const double *got,
                         int drop, char *text, size_t size) {
    inputs x = {.p = p, .in = dp_activated_new(p)};
    reading r = reading_of(&x, field, row, got);
    double *sum = dp_doubles(p->V), best = INFINITY;
    int64_t cut = r.first;
    for (int64_t c = r.last; c >= r.first; c--) {
        step_back(&x, c, r.hv, r.y, sum);
        const double off = distance(r.got, sum, p->V);
        if ((c == r.first && !p->s0) || !(off < best)) continue;
        best = off;
        cut = c;
    }
    for (int i = 0; p->s0 && i < p->K; i++)
        for (int v = 0; v < p->V; v++)
            sum[v] += r.y[i] * p->s0[((int64_t)row->at.sequence * p->HV + r.hv) * p->K * p->V +
                                     (int64_t)i * p->V + v];
    const double error = distance(r.got, sum, p->V);
    const int found = error > 0 && isfinite(error) && best <= EXPLAINED * error;
    if (found) {
        const dp_attenuation a = dp_attenuation_of(p, &x.in, r.hv, cut, r.last + 1);
        int n = snprintf(
            text, size,
            "lacks the state before token %lld (%lld tokens back), %.2g of the row: "
            "at most 2^%.1f of a state is left from there, by the largest gate of each "
            "token (the largest channel sum, which bounds nothing, says 2^%.1f)",
            (long long)cut, (long long)(r.last - cut),
            error / fmax(distance(sum, NULL, p->V), 1e-300), shown(a.bound), shown(a.channel));
        if (drop && n > 0 && (size_t)n < size)
            snprintf(text + n, size - (size_t)n, "; 2^-%d is claimed", drop);
    }
    dp_activated_free(&x.in);
    free(r.y);
    free(sum);
    return found;
}

/* ---- where a row stands ---------------------------------------------------------------------- */

/* Context of place_of_field's functions. */
typedef struct {
    const dp_problem *p;
    dp_result_id field;
    int heads, per;      /* rows of a token: [heads][per] */
    int N;               /* ranks */
    const int *chunk_of; /* [T]: index of the chunk that holds a token */
} field_places;

static void token_row(const void *ctx, int64_t row, dp_place *at) {
    const field_places *x = ctx;
    at->token = row / ((int64_t)x->heads * x->per);
    at->head = (int)(row / x->per % x->heads);
    at->rank = dp_own_part_of(x->p->own.kind, x->p->T, x->N, at->token);
    at->sequence = dp_sequence_of(x->p->cu, x->p->Nseq, at->token);
    at->chunk = x->chunk_of[at->token];
}

/* [Nseq][HV]: on the rank of the sequence's last token, ds0 on that of its first. */
static void state_row(const void *ctx, int64_t row, dp_place *at) {
    const field_places *x = ctx;
    const dp_problem *p = x->p;
    const int seq = (int)(row / p->HV);
    int64_t t = x->field == DP_RESULT_FINAL_STATE ? p->cu[seq + 1] - 1 : p->cu[seq];
    if (t < 0) t = 0;
    if (t >= p->T) t = p->T - 1;
    *at = (dp_place){.rank = dp_own_part_of(p->own.kind, p->T, x->N, t),
                     .head = (int)(row % p->HV),
                     .sequence = seq,
                     .chunk = -1,
                     .token = -1};
}

static void head_row(const void *ctx, int64_t row, dp_place *at) {
    (void)ctx;
    *at = (dp_place){.rank = 0, .head = (int)row, .sequence = -1, .chunk = -1, .token = -1};
}

static field_places field_places_of(const dp_problem *p, int N, dp_result_id field,
                                    const int *chunk_of) {
    return (field_places){.p = p,
                          .field = field,
                          .heads = dp_result_heads(p, field),
                          .per = dp_result_rows_per_token(p, field),
                          .N = N,
                          .chunk_of = chunk_of};
}

/* The function that maps a row of the result to rank, head, sequence and token. */
static dp_place_fn *place_of_field(dp_result_id field) {
    static dp_place_fn *const of[] = {
        [DP_OF_TOKENS] = token_row, [DP_OF_SEQUENCES] = state_row, [DP_OF_HEADS] = head_row};
    return of[dp_result_fields[field].kind];
}

/* ---- judgement ------------------------------------------------------------------------------- */

void dp_judge_tensor(const dp_judging *j, const dp_compare_in *in, dp_run *r) {
    dp_judgement *t = &r->tensor[r->ntensor++];
    dp_source s;
    dp_compare(in, t);
    if (!r->exact || t->rel_fro == 0) return;
    dp_source_find(&j->sp->c->p, in, &s);
    memcpy(t->source, s.says, sizeof s.says);
}

/* Where o or final_state failed for lack of a state, its verdict says so. */
static void name_lost_state(const dp_problem *p, dp_result_id field, const double *got,
                            dp_run *run) {
    dp_judgement *t = &run->tensor[run->ntensor - 1];
    const int reads_state = field == DP_RESULT_O || field == DP_RESULT_FINAL_STATE;
    char text[320];
    if (!reads_state || t->verdict != DP_FAIL || run->exact || t->failed.at.rank < 0) return;
    if (!lost_state_of(p, field, &t->failed, got, run->design.drop, text, sizeof text)) return;
    const size_t n = strlen(t->why);
    snprintf(t->why + n, sizeof t->why - n, "; %s", text);
}

/* Where o failed in a session, its verdict says in which call. */
static void name_call(const dp_case *c, dp_result_id field, dp_run *run) {
    dp_judgement *t = &run->tensor[run->ntensor - 1];
    const dp_session *s = &c->session;
    if (!s->text || field != DP_RESULT_O || t->verdict != DP_FAIL || t->failed.at.token < 0) return;
    const int64_t call = dp_session_call_of(s, t->failed.at.token - c->p.cu[t->failed.at.sequence]);
    const dp_session_call x = dp_session_at(s, call);
    const size_t n = strlen(t->why);
    snprintf(t->why + n, sizeof t->why - n,
             "; in call %lld of its sequence: %lld drafted, %lld accepted%s", (long long)call + 1,
             (long long)x.drafted, (long long)x.accepted,
             s->prefix && call == dp_session_call_of(s, s->prefix)
                 ? ", the first behind the shared prefix"
                 : "");
}

/* dg of a first token without an initial state is a sum of pairs that cancel. Kernels that round
 * the operands of dq and dk separately leave one rounding of an operand (FLA: 0.7% of its head's
 * rows). So are dA_log and ddt_bias of a head of such tokens alone. */
static double cancelled(const dp_run *run, dp_result_id field) {
    const int sums =
        field == DP_RESULT_DG || field == DP_RESULT_DA_LOG || field == DP_RESULT_DDT_BIAS;
    return sums && run->base == DP_BASE_BF16 ? dp_run_storing(run, 0x1p-8) : 0;
}

/* One rounding of the arithmetic over a bound, where rows of the recurrence cancel. There fused
 * kernels and those with other orders of summation made up to 1/12 of their bound. */
static double terms(const dp_run *run, const dp_problem *p) {
    const int wide = run->base != DP_BASE_BF16 || dp_tokens_are_bounded(&run->design, p);
    return dp_rows_cancel(dp_recurrence_of(p)) ? (wide ? 1 : 0x1p-16) / 32 : 0;
}

/* Loss of a number near zero by its file's format or, in fp16, by its own. */
static double tiny_of(const dp_judging *j, const dp_run *run, dp_result_id field) {
    const double file = j->out->stored ? j->out->stored->tiny[field] : 0;
    return run->design.out[field] == DP_FP16 ? fmax(file, 0x1p-25) : file;
}

/* A factor of 1.5 of outputs and of the gradients of rows and states is seen; 0: of no other. */
static double seen_most(dp_result_id field) {
    switch (field) {
    case DP_RESULT_O:
    case DP_RESULT_DQ:
    case DP_RESULT_DK:
    case DP_RESULT_DV:
    case DP_RESULT_FINAL_STATE:
    case DP_RESULT_DS0: return 1.5;
    default: return 0;
    }
}

/* The truth of an exact run. An entry that is the truth rounded once to the result's format, whose
 * unit roundoff is u, is right: 257 in bf16 is 256. */
static double *truth_as_stored(const dp_ball *want, const double *got, double u) {
    const int64_t n = want->rows * want->width;
    double *w = dp_doubles(n);
    for (int64_t i = 0; i < n; i++) {
        const double stored = want->hi[i] + dp_rounding_error(want->hi[i], u);
        w[i] = got[i] == stored ? stored : want->hi[i];
    }
    return w;
}

static void judge_field(const dp_judging *j, dp_result_id field, const dp_drop *lost, dp_run *run) {
    const dp_sharding *sp = j->sp;
    const dp_problem *p = &sp->c->p;
    const dp_ball *want = &sp->truth->field[field];
    const dp_stored_results *stored = j->out->stored;
    const dp_expected *x = j->expected;
    const dp_row_kind kind = dp_result_fields[field].kind;
    const double *got = *dp_result_at((dp_result *)j->out->results, field);
    int64_t rows, width;
    dp_result_shape(p, field, &rows, &width);
    if (!rows || !got || !want->rows) return;
    assert(want->rows == rows && want->width == width);
    const field_places places = field_places_of(p, sp->N, field, sp->windows.window_of);
    double *freedom = dp_row_freedom_new(p, field);
    const double own = dp_own_storage(&run->design, field);
    const double u = stored && stored->u[field] > own ? stored->u[field] : 0;
    const int wide = kind != DP_OF_TOKENS && !run->design.out[field]; /* fp32 unless declared */
    double *exact = run->exact ? truth_as_stored(want, got, wide ? u : fmax(u, own)) : NULL;
    dp_compare_in in = dp_run_comparing(run, sp, (int)field, u, tiny_of(j, run, field));
    in.name = dp_result_fields[field].name;
    in.heads = dp_result_heads(p, field);
    in.rows = rows;
    in.width = width;
    in.got = got;
    in.want = exact ? exact : want->hi;
    in.want_lo = want->lo;
    in.rad = want->rad;
    in.bound = j->bound->row[field];
    in.lost = lost->row[field];
    in.place = place_of_field(field);
    in.ctx = &places;
    in.tokens = kind == DP_OF_TOKENS ? p->T : 0;
    in.subrows = kind == DP_OF_SEQUENCES ? p->K : 1;
    in.draws = x && x->field[field].err2 ? &x->field[field] : NULL;
    in.freedom = freedom;
    in.bound_shown = !dp_run_results_bounded(run, p);
    in.file_unit = u;
    in.seen_most = seen_most(field);
    in.cancelled = cancelled(run, field);
    in.terms = terms(run, p);
    in.of_heads = kind == DP_OF_HEADS;
    dp_judge_tensor(j, &in, run);
    free(freedom);
    free(exact);
    name_lost_state(p, field, got, run);
    name_call(sp->c, field, run);
}

static dp_judgement *judgement_of(const dp_run *run, dp_result_id field) {
    for (int i = 0; i < run->ntensor; i++)
        if (!strcmp(run->tensor[i].name, dp_result_fields[field].name)) return &run->tensor[i];
    return NULL;
}

/* o .. ds0, row by row; sums against the addends. */
static void judge_results(const dp_judging *j, dp_run *run) {
    dp_drop lost = {{NULL}};
    const dp_case *c = j->sp->c;
    if (run->design.drop) dp_drop_allowance(&c->p, run->design.drop, c->backward, &lost);
    for (int i = 0; i < DP_NRESULTS; i++)
        judge_field(j, i, &lost, run);
    dp_drop_free(&lost);
    if (run->exact) return;
    const dp_sums_in in = {.p = &j->sp->c->p,
                           .got = j->out->results,
                           .arithmetic = dp_base_roundoff(run->base),
                           .tiny_dg = tiny_of(j, run, DP_RESULT_DG),
                           .tiny_dA_log = tiny_of(j, run, DP_RESULT_DA_LOG),
                           .tiny_ddt_bias = tiny_of(j, run, DP_RESULT_DDT_BIAS),
                           .dg = judgement_of(run, DP_RESULT_DG),
                           .dA_log = judgement_of(run, DP_RESULT_DA_LOG),
                           .ddt_bias = judgement_of(run, DP_RESULT_DDT_BIAS)};
    dp_sums_judge(&in);
}

/* ---- one run --------------------------------------------------------------------------------- */

/* The content of one tensor; partial: entries of it need not be written. x NULL: neither a result
 * nor a stage. */
typedef struct {
    const double *x;
    int64_t n;
    int partial;
} content;

static content content_of(const dp_judging *j, const char *name) {
    const dp_problem *p = &j->sp->c->p;
    const int field = dp_result_find(name);
    if (field >= 0) {
        int64_t rows, width;
        dp_result_shape(p, field, &rows, &width);
        return (content){*dp_result_at((dp_result *)j->out->results, field), rows * width, 0};
    }
    const int stage = dp_stage_tensor_find(name);
    if (stage < 0) return (content){0};
    return (content){j->out->stage[stage], dp_stage_tensor_size(p, j->sp->N, stage),
                     stage == DP_AKK || stage == DP_AQK ||
                         dp_stage_tensors[stage].kind == DP_PER_RANK};
}

static void name_flaws(const dp_judging *j, dp_run *run) {
    for (int i = 0; i < run->ntensor; i++) {
        dp_judgement *t = &run->tensor[i];
        const content c = content_of(j, t->name);
        char text[sizeof t->why];
        if (!c.x) continue;
        const int64_t unwritten = dp_subject_flaws(c.x, c.n, text, sizeof text);
        if (!*text) continue;
        if (t->verdict != DP_FAIL && (c.partial || !unwritten)) continue;
        t->verdict = DP_FAIL;
        t->flaw = unwritten ? DP_FLAW_UNWRITTEN : DP_FLAW_NOT_FINITE;
        snprintf(t->why, sizeof t->why, "%s", text);
    }
}

/* ---- the parts in their order ---------------------------------------------------------------- */

/* Does anything but the tensors of ranks need draws of its own? */
static int inner_stages(const dp_outputs *out) {
    int any = 0;
    for (int i = 0; out->stage && i < DP_NSTAGE_TENSORS; i++)
        any |= dp_stage_is_inner(out->stage, i);
    return any;
}

static void judge_step(const dp_judging *j, dp_run *r) {
    const dp_sharding *sp = j->sp;
    const dp_step_expected x = {j->expected, sp->windows.window_of,
                                dp_run_comparing(r, sp, -1, 0, 0)};
    dp_err e = {0};
    if (!sp->step) return;
    if (!dp_step_judge(sp->c, sp->truth, sp->step, j->out->results, j->bound, &x, r, &e)) return;
    fprintf(stderr, "deltaproof: %s: %s\n", sp->c->name, e.msg);
    exit(2); /* the convolution ran before: a device that died since */
}

/* The sum over the keys of token t of strength times |k| |erasing key|, largest of its heads. A
 * step contracts where that is at most 2. */
static double strength_of(const dp_problem *p, const dp_activated *a, int64_t t) {
    double most = 0;
    for (int hv = 0; hv < p->HV; hv++) {
        double sum = 0;
        for (int r = 0; r < p->R; r++) {
            const double *e = dp_erasing_at(p, a->k, a->erasing, t, hv) + (int64_t)r * p->K,
                         *k = dp_erasing_at(p, a->k, NULL, t, hv) + (int64_t)r * p->K;
            double ee = 0, kk = 0;
            for (int x = 0; x < p->K; x++) {
                ee += e[x] * e[x];
                kk += k[x] * k[x];
            }
            sum += fabs(a->beta ? a->beta[(t * p->HV + hv) * p->R + r] : 1) * sqrt(ee * kk);
        }
        most = fmax(most, sum);
    }
    return most;
}

/* "; the state grows: .." where keys or gates make it grow, or "". */
static void growth_text(const dp_problem *p, char *text, size_t size) {
    dp_activated a = dp_activated_new(p);
    int64_t at = 0;
    int head = 0;
    double most = 0, sum = 0;
    const int keys = dp_has_beta(p) || dp_by_gates(p);
    *text = 0;
    for (int64_t t = 0; t < p->T && keys; t++) {
        const double x = strength_of(p, &a, t);
        if (!(x > most)) continue;
        most = x;
        at = t;
    }
    for (int h = 0; h < p->HV; h++) {
        double grown = 0;
        for (int64_t t = 0; t < p->T; t++)
            grown += fmax(0, dp_largest_gate(p, a.g + (t * p->HV + h) * dp_Kg(p)));
        if (!(grown > sum)) continue;
        sum = grown;
        head = h;
    }
    dp_activated_free(&a);
    if (most > 2.01) /* what rounding adds to 2 */
        snprintf(text, size,
                 "; the state grows: sum of beta |k|^2 is %.3g at token %lld, at most 2 contracts: "
                 "normalise keys",
                 most, (long long)at);
    else if (sum > 0)
        snprintf(
            text, size,
            "; the state grows: log decays above 0 add up to %.3g in head %d (fp32 ends at 88)",
            sum, head);
}

/* Zeros of it would pass, or it overflowed. */
static int has_no_size(const dp_judgement *t) {
    return (t->verdict == DP_UNJUDGED && t->seen_head > 2) ||
           (t->verdict == DP_FAIL && (!isfinite(t->rel_fro) || isinf(t->over.bound)));
}

/* Where that is because the state grows: what the inputs would need. */
static void say_growth(const dp_problem *p, dp_run *r) {
    int any = 0;
    char text[200];
    for (int i = 0; i < r->ntensor; i++)
        any |= has_no_size(&r->tensor[i]);
    if (!any) return;
    growth_text(p, text, sizeof text);
    for (int i = 0; i < r->ntensor; i++) {
        dp_judgement *t = &r->tensor[i];
        const size_t n = strlen(t->why);
        if (has_no_size(t)) snprintf(t->why + n, sizeof t->why - n, "%s", text);
    }
}

static void judge_all(const dp_judging *of, dp_run *r) {
    const dp_judging j = {of->sp, of->bases, of->bound, of->out, dp_sharding_expected(of->sp, r)};
    const int most = DP_NRESULTS + DP_STEP_TENSORS + DP_RANK_TENSORS + DP_NSTAGE_TENSORS;
    r->tensor = dp_calloc((size_t)most, sizeof *r->tensor);
    judge_results(&j, r);
    judge_step(&j, r);
    dp_judge_stages(&j, r);
    if (j.out->stage) name_flaws(&j, r);
    say_growth(&j.sp->c->p, r);
}

static void forget(dp_run *r) {
    for (int i = 0; i < r->ntensor; i++)
        dp_judgement_free(&r->tensor[i]);
    free(r->tensor);
    free(r->point);
}

/* r as it was before its judgement, to be judged by another design. */
static dp_run fresh(const dp_run *r, const dp_design *design) {
    dp_run x = *r;
    x.tensor = NULL;
    x.ntensor = 0;
    x.point = NULL;
    x.npoint = 0;
    x.why[0] = 0;
    x.settled = 0;
    x.design = *design;
    return x;
}

/* ---- settling what is marginal --------------------------------------------------------------- */

/* Does fp32 round the sum of n numbers x? */
static int sum_rounds(const double *x, int64_t n, int64_t step) {
    float sum = 0;
    for (int64_t t = 0; t < n; t++) {
        const double next = sum + x[t * step];
        sum = (float)next;
        if (sum != next && isfinite(next)) return 1;
    }
    return 0;
}

/* Does it round one over a chunk of so many tokens (0: none), of x [T][width]? */
static int sums_round(const dp_problem *p, const double *x, int64_t width, int64_t chunk) {
    for (int s = 0; x && chunk && s < p->Nseq; s++)
        for (int64_t t = p->cu[s]; t < p->cu[s + 1]; t += chunk) {
            const int64_t left = p->cu[s + 1] - t, n = left < chunk ? left : chunk;
            for (int64_t i = 0; i < width; i++)
                if (sum_rounds(x + t * width + i, n, width)) return 1;
        }
    return 0;
}

/* Log gates and angles of a short format: fp32 rounds few of their sums and holds the others
 * exactly. Draws that keep the format seldom round the same ones. Angles add up over sequences. */
static int has_ties(const dp_run *r, const dp_case *c) {
    const dp_problem *p = &c->p;
    const double *gates = p->gate == DP_GATE_LOG ? p->g : NULL;
    if (r->design.base == DP_BASE_BF16 ||
        dp_formats[c->input_dtype].u_op <= dp_formats[DP_FP32].u_op)
        return 0;
    return sums_round(p, gates, (int64_t)p->HV * dp_Kg(p), r->design.chunk) ||
           sums_round(p, p->angle, p->angle ? dp_input_width(p, DP_INPUT_ANGLE) : 0, p->T);
}

/* Does the run fail by draws alone, in each tensor so that other draws may say otherwise? */
static int may_settle(const dp_run *r, int ties) {
    int any = 0;
    for (int i = 0; i < r->ntensor; i++) {
        const dp_judgement *t = &r->tensor[i];
        if (t->verdict != DP_FAIL) continue;
        if (strcmp(t->tier, "expected")) return 0;
        if (!dp_judgement_marginal(t) && !ties) return 0;
        any = 1;
    }
    return any;
}

/* Judgements of the second set replace failed ones, and keep the texts of the first. */
static void replace_failures(dp_run *r, dp_run *again) {
    for (int i = 0; i < r->ntensor; i++) {
        dp_judgement *now = &r->tensor[i], *later = &again->tensor[i];
        if (now->verdict != DP_FAIL) continue;
        const dp_judgement first = *now;
        *now = *later;
        *later = first;
        now->before = first.expected;
    }
}

/* A run may fail by draws alone, each time within DP_MARGIN of its limit or by gates or angles
 * whose sums tie. Then a second, independent set of draws decides. Both stay in the record. */
static void settle(const dp_judging *j, int stages, dp_run *r) {
    const int ties = has_ties(r, j->sp->c);
    if (r->exact || !may_settle(r, ties)) return;
    dp_run again = fresh(r, &r->design);
    again.set = ties ? DP_SET_OFF_LATTICE : 1;
    dp_sharding_expect(j->sp, stages, &again);
    judge_all(j, &again);
    replace_failures(r, &again);
    forget(&again);
    r->settled = 1;
}

/* ---- a run that does not say how it computes ------------------------------------------------- */

/* How many tensors fail, and the largest of their errors over its limit. */
static double worst_of(const dp_run *r, int *failed) {
    double worst = 0;
    *failed = 0;
    for (int i = 0; i < r->ntensor; i++) {
        if (r->tensor[i].verdict != DP_FAIL) continue;
        ++*failed;
        if (!(r->tensor[i].times <= worst)) worst = r->tensor[i].times;
    }
    return worst;
}

/* Does b explain more than a? A pass before all, then the fewest tensors that fail; a failure says
 * more than what is unjudged by a design that sees less. */
static int explains_more(const dp_run *a, const dp_run *b) {
    if (a->verdict == DP_PASS || b->verdict == DP_PASS) return b->verdict == DP_PASS;
    if (a->verdict != DP_FAIL || b->verdict != DP_FAIL) return 0;
    int failed_a, failed_b;
    const double worst_a = worst_of(a, &failed_a), worst_b = worst_of(b, &failed_b);
    return failed_b != failed_a ? failed_b < failed_a : worst_b < worst_a;
}

typedef struct {
    dp_sharding *sp;
    dp_bound_bases *bases;
    const dp_outputs *out;
    int stages;
} undeclared_run;

/* A result may be stored in a format with unit roundoff u and spacing 2 tiny among its subnormals.
 * It is then off by u |x| + tiny an entry, x the value before: |x| <= |want| + bound for the row.
 * Only a format coarser than the base's own adds to it. */
static void widen_for_storage(const dp_sharding *sp, const dp_design *d, const dp_stored_results *g,
                              dp_error_bound *b) {
    const dp_problem *p = &sp->c->p;
    for (int i = 0; i < DP_NRESULTS; i++) {
        const double u = g->u[i] > dp_own_storage(d, i) ? g->u[i] : 0;
        const double *want = sp->truth->field[i].hi;
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (!b->row[i] || !*dp_result_at((dp_result *)&g->r, i)) continue;
        for (int64_t r = 0; r < rows; r++)
            b->row[i][r] += u * (dp_norm_fro(width, want + r * width) + b->row[i][r]) +
                            sqrt((double)width) * g->tiny[i];
    }
}

/* Bounds of r's design, to be freed. */
static dp_error_bound bounds_of(const undeclared_run *x, const dp_run *r) {
    dp_error_bound bound;
    dp_run_bounds(x->sp, &r->design, r->chain, x->bases, &bound);
    if (x->out->stored) widen_for_storage(x->sp, &r->design, x->out->stored, &bound);
    return bound;
}

/* The same, but of the run before where those are r's. */
static const dp_error_bound *bounds_kept(const undeclared_run *x, const dp_run *r) {
    dp_bound_bases *w = x->bases;
    if (w->bounded && w->chain == r->chain && dp_design_same(&w->design, &r->design))
        return &w->bound;
    if (w->bounded) dp_error_bound_free(&w->bound);
    w->bound = bounds_of(x, r);
    w->design = r->design;
    w->chain = r->chain;
    w->bounded = 1;
    return &w->bound;
}

/* Judges r by these bounds, and by its draws where they are known. */
static void judge_by(const undeclared_run *x, const dp_error_bound *bound, dp_run *r, int settled) {
    const dp_judging j = {x->sp, x->bases, bound, x->out, NULL};
    judge_all(&j, r);
    if (settled) settle(&j, x->stages, r);
    dp_run_close(r);
}

/* Chunks of half the length hold the longest sequence, too: the same design. */
static int is_another(const undeclared_run *x, const dp_design *d) {
    const dp_problem *p = &x->sp->c->p;
    int64_t longest = 0;
    for (int s = 0; s < p->Nseq; s++)
        if (p->cu[s + 1] - p->cu[s] > longest) longest = p->cu[s + 1] - p->cu[s];
    if (x->stages) return d->chunk == DP_CHUNK; /* whose stages they are */
    return d->chunk <= 16 || d->chunk / 2 < longest;
}

/* A design that may explain it, and its bounds. */
typedef struct {
    dp_design design;
    dp_error_bound bound;
} trial;

/* The common designs but for the first whose bounds hold all of it; their draws are made. Returns
 * their number. */
static int trials_of(const undeclared_run *x, const dp_run *r, trial t[DP_COMMON_DESIGNS]) {
    dp_design all[DP_COMMON_DESIGNS];
    dp_claim claim[DP_COMMON_DESIGNS];
    const int most = dp_design_common(&r->design, all);
    int n = 0;
    for (int i = 1; i < most; i++) {
        if (!is_another(x, &all[i])) continue;
        dp_run bounded = fresh(r, &all[i]);
        t[n] = (trial){all[i], bounds_of(x, &bounded)};
        judge_by(x, &t[n].bound, &bounded, 0);
        if (bounded.verdict == DP_FAIL) {
            dp_error_bound_free(&t[n].bound);
        } else {
            claim[n] = dp_run_claim(&bounded);
            claim[n++].stages = x->stages;
        }
        forget(&bounded);
    }
    if (n) dp_standard_expect(x->sp->std, r->set, n, claim);
    return n;
}

static void take(dp_run *r, dp_run *better) {
    forget(r);
    *r = *better;
}

/* Did it fail, or does the first design leave rows without a limit? Where limits are above the
 * truth, those of other designs are, too. */
static int may_be_explained(const dp_run *r) {
    int open = 0;
    for (int i = 0; i < r->ntensor; i++)
        open |= r->tensor[i].verdict == DP_UNJUDGED && !(r->tensor[i].seen_head > 2);
    return r->verdict == DP_FAIL || (r->verdict == DP_UNJUDGED && open);
}

/* One after the other until one passes. */
static void try_others(const undeclared_run *x, dp_run *r) {
    trial t[DP_COMMON_DESIGNS];
    const int n = trials_of(x, r, t);
    for (int i = 0; i < n && r->verdict != DP_PASS; i++) {
        dp_run other = fresh(r, &t[i].design);
        judge_by(x, &t[i].bound, &other, 1);
        if (explains_more(r, &other))
            take(r, &other);
        else
            forget(&other);
    }
    for (int i = 0; i < n; i++)
        dp_error_bound_free(&t[i].bound);
}

void dp_judge_outputs(dp_sharding *sp, dp_bound_bases *bases, const dp_outputs *out, dp_run *r) {
    const undeclared_run x = {sp, bases, out, inner_stages(out)};
    const dp_design declared = r->design;
    const dp_design *explained = out->stored ? out->stored->explained : NULL;
    dp_design common[DP_COMMON_DESIGNS];
    dp_design_common(&declared, common);
    if (r->undeclared) r->design = explained ? *explained : common[0];
    dp_sharding_expect(sp, x.stages, r);
    judge_by(&x, bounds_kept(&x, r), r, 1);
    if (r->undeclared && !explained && !r->exact && may_be_explained(r)) try_others(&x, r);
    r->explained = r->design;
    if (r->undeclared) r->design = declared;
}
