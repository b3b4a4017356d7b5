/* Judgement of o, final_state and the gradients of one run against the truth, and the state that a
 * wrong row lacks.
 */
#include "harness/verdict/draws.h"
#include "harness/verdict/source.h"
#include "harness/verdict/sums.h"
#include "limits.h"
#include "outputs.h"
#include "ref/arithmetic/elementary.h"
#include "ref/bound/drop.h"
#include "ref/chunk/gate.h"

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
        int seq = 0;
        while (p->cu[seq + 1] <= t)
            seq++;
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

static int sequence_of(const dp_problem *p, int64_t t) {
    int i = 0;
    while (i < p->Nseq - 1 && p->cu[i + 1] <= t)
        i++;
    return i;
}

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
    at->sequence = sequence_of(x->p, at->token);
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
    const dp_session *s = dp_case_session(c);
    if (!s || field != DP_RESULT_O || t->verdict != DP_FAIL || t->failed.at.token < 0) return;
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

static dp_allowance allowance_of(const dp_judging *j, dp_result_id field, const dp_run *run) {
    const dp_session *s = dp_case_session(j->sp->c);
    dp_allowance a = dp_run_allowance(run);
    dp_allow_stored(run, s ? s->kept : DP_FP64, field, &a);
    return a;
}

static void judge_field(const dp_judging *j, dp_result_id field, const dp_drop *lost, dp_run *run) {
    const dp_sharding *sp = j->sp;
    const dp_problem *p = &sp->c->p;
    const dp_ball *want = &sp->truth->field[field];
    const dp_stored_results *stored = j->out->stored;
    const dp_expected *x = dp_sharding_expected(sp, run);
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
    const double tiny = tiny_of(j, run, field);
    const int wide = kind != DP_OF_TOKENS && !run->design.out[field]; /* fp32 unless declared */
    double *exact = run->exact ? truth_as_stored(want, got, wide ? u : fmax(u, own)) : NULL;
    const dp_compare_in in = {.name = dp_result_fields[field].name,
                              .N = sp->N,
                              .heads = dp_result_heads(p, field),
                              .rows = rows,
                              .width = width,
                              .got = got,
                              .want = exact ? exact : want->hi,
                              .want_lo = want->lo,
                              .rad = want->rad,
                              .bound = j->bound->row[field],
                              .lost = lost->row[field],
                              .place = place_of_field(field),
                              .ctx = &places,
                              .tokens = kind == DP_OF_TOKENS ? p->T : 0,
                              .subrows = kind == DP_OF_SEQUENCES ? p->K : 1,
                              .draws = x && x->field[field].err2 ? &x->field[field] : NULL,
                              .freedom = freedom,
                              .allowance = allowance_of(j, field, run),
                              .bound_shown = !dp_run_results_bounded(run, p),
                              .unit = dp_base_roundoff(run->base),
                              .store = dp_run_storing(run, u),
                              .file_unit = u,
                              .seen_most = seen_most(field),
                              .cancelled = cancelled(run, field),
                              .of_heads = kind == DP_OF_HEADS,
                              .tiny = dp_hypot(dp_base_smallest(run->base, p->K), tiny)};
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

void dp_judge_results(const dp_judging *j, dp_run *run) {
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
