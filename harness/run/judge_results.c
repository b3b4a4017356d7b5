/* Judgement of o, final_state and the gradients of one run against the truth. */
#include "harness/verdict/lost_state.h"
#include "harness/verdict/row_map.h"
#include "harness/verdict/source.h"
#include "harness/verdict/sums.h"
#include "limits.h"
#include "outputs.h"
#include "places.h"
#include "ref/arithmetic/elementary.h"
#include "ref/bound/drop.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- where a row stands ---------------------------------------------------------------------- */

static int sequence_of(const dp_problem *p, int64_t t) {
    int i = 0;
    while (i < p->Nseq - 1 && p->cu[i + 1] <= t)
        i++;
    return i;
}

static void token_row(const void *ctx, int64_t row, dp_place *at) {
    const dp_field_places *x = ctx;
    at->token = row / ((int64_t)x->heads * x->per);
    at->head = (int)(row / x->per % x->heads);
    at->rank = dp_own_part_of(x->p->own.kind, x->p->T, x->N, at->token);
    at->sequence = sequence_of(x->p, at->token);
    at->chunk = x->chunk_of[at->token];
}

/* [Nseq][HV]: on the rank of the sequence's last token, ds0 on that of its first. */
static void state_row(const void *ctx, int64_t row, dp_place *at) {
    const dp_field_places *x = ctx;
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

/* The ctx of dp_place_of_field; points to the arguments. */
static dp_field_places field_places_of(const dp_problem *p, int N, dp_result_id field,
                                       const int *chunk_of) {
    return (dp_field_places){.p = p,
                             .field = field,
                             .heads = dp_result_heads(p, field),
                             .per = dp_result_rows_per_token(p, field),
                             .N = N,
                             .chunk_of = chunk_of};
}

dp_place_fn *dp_place_of_field(dp_result_id field) {
    static dp_place_fn *const of[] = {
        [DP_OF_TOKENS] = token_row, [DP_OF_SEQUENCES] = state_row, [DP_OF_HEADS] = head_row};
    return of[dp_result_fields[field].kind];
}

void dp_place_rank_row(const void *ctx, int64_t row, dp_place *at) {
    const dp_rank_places *x = ctx;
    *at = (dp_place){.rank = x->pair[row] / x->HV,
                     .head = x->pair[row] % x->HV,
                     .sequence = -1,
                     .chunk = -1,
                     .token = -1};
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
    if (!dp_lost_state_find(p, field, &t->failed, got, run->design.drop, text, sizeof text)) return;
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
    const dp_field_places places = field_places_of(p, sp->N, field, sp->windows.window_of);
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
                              .place = dp_place_of_field(field),
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
