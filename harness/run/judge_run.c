/* The judgement of one run (outputs.h). First its limits by its design: claim and allowance, bounds
 * and their cache. Then the parts in their order: results, tensors that ranks exchange, M along the
 * chunks of one rank, stages. Last a second set of draws where it is marginal. */
#include "harness/verdict/compare.h"
#include "harness/verdict/source.h"
#include "outputs.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"
#include "ref/arithmetic/norms.h"
#include "ref/bound/carried.h"
#include "ref/bound/drop.h"
#include "ref/chunk/gate.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/stored.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- claim, allowance, whether bounds are derived -------------------------------------------- */

/* The kind of subject, and its allowance for errors that draws cannot show (reports/verdicts.md).
 * Kinds: the pipeline that was drawn; the same with other orders of summation; kernels that declare
 * their design; others. */
typedef enum { DRAWN, OTHER_SUMS, DECLARED, UNDECLARED, NWHO } who;
static const dp_allowance ALLOWANCE[NWHO][2] = {
    /* arithmetic fp32 or fp64; bf16 */
    [DRAWN] = {{1.2, 1.2, 0.1}, {1.2, 1.2, 0.1}},
    [OTHER_SUMS] = {{1.5, 1.5, 0.15}, {1.4, 1.4, 0.1}},
    [DECLARED] = {{2.1, 2.1, 0.3}, {1.25, 1.4, 0.15}},
    [UNDECLARED] = {{2.1, 4, 0.6}, {1.25, 2, 0.3}},
};

static who who_computes(const dp_run *r) {
    /* one that names a format of its own for factors (fp16) says how it rounds, if not in what
     * order */
    const int says_factors = r->design.factors != dp_design_of(r->base).factors;
    if (r->undeclared && !says_factors) return UNDECLARED;
    if (r->other_design || r->backend == DP_BACKEND_LAPACK)
        return DECLARED; /* its solves, too, have another order */
    return dp_backends[r->backend].simulated && r->base != DP_BASE_FP64 ? DRAWN : OTHER_SUMS;
}

/* Powers that make an inverse cancel, in fp32 by more than they do in another order. */
#define PRODUCT_MORE 1.15

dp_allowance dp_run_allowance(const dp_run *r) {
    dp_allowance a = ALLOWANCE[who_computes(r)][r->base == DP_BASE_BF16];
    if (r->design.product && r->base != DP_BASE_BF16) {
        a.factor *= PRODUCT_MORE;
        a.local *= PRODUCT_MORE;
    }
    return a;
}

/* A short state makes errors from this share of its unit roundoff on. Measured: e4m3 2.3% of a
 * state, bf16 0.17%, fp16 0.02%. */
#define FROM 0.125

/* Adds to a the allowance of units whose error a short state makes. kept: the format in which a
 * session keeps its state. */
static void allow_stored(const dp_run *r, dp_format kept, int field, dp_allowance *a) {
    const dp_format f[] = {kept, r->design.final_state, r->design.state};
    const dp_tensor_field *x = &dp_result_fields[field];
    const int has_part = !(x->role == DP_ROLE_GRADIENT && dp_is_value(x->of)) &&
                         field != DP_RESULT_DS0; /* state_bound.h */
    double u = 0;
    for (int i = 0; i < 3; i++)
        if (dp_formats[f[i]].bits <= 11) u = fmax(u, ldexp(1, -(int)dp_formats[f[i]].bits));
    if (!u || !has_part || r->base == DP_BASE_BF16) return;
    const dp_allowance *as_bf16 = &ALLOWANCE[who_computes(r)][1];
    a->stored = FROM * u;
    a->stored_factor = fmin(a->factor, as_bf16->factor);
    a->stored_local = fmin(a->local, as_bf16->local);
}

double dp_state_far(const dp_design *d) {
    const dp_format f[] = {d->final_state, d->state};
    double far = dp_formats[d->factors].bits < 24 ? 0.05 : 0.005;
    for (int i = 0; i < 2; i++)
        far = fmax(far, ldexp(2, -(int)dp_formats[f[i]].bits));
    return far;
}

/* Unit roundoff of the base's arithmetic. */
static double base_roundoff(dp_base b) { return b == DP_BASE_FP64 ? 0x1p-53 : 0x1p-24; }

/* The smallest normal number of the base's arithmetic, times K. */
static double smallest(dp_base b, int K) { return K * (b == DP_BASE_FP64 ? 0x1p-1022 : 0x1p-126); }

#define ROUNDING_RMS 0.42466 /* sqrt(1/(8 ln 2)), over u, of log-uniform significands (bits.h) */
/* The rms of one rounding that a result in a coarser format (u: its unit roundoff) adds to every
 * error. That is known, so nobody is allowed more of it than the pipeline that was drawn: limits
 * grow with the allowance, this does not. */
static double storing(const dp_run *r, double u) {
    return ROUNDING_RMS * u * ALLOWANCE[DRAWN][0].factor / dp_run_allowance(r).factor;
}

/* The comparison of a result (field; -1: of another tensor) of a run, as far as the run decides:
 * ranks, allowance, arithmetic. A file may store the tensor in a coarser format, with unit roundoff
 * u and smallest numbers tiny apart; else both are 0. */
static dp_compare_in comparing(const dp_run *r, const dp_sharding *sp, int field, double u,
                               double tiny) {
    const dp_session *session = &sp->c->session;
    dp_compare_in in = {.N = sp->N,
                        .allowance = dp_run_allowance(r),
                        .finite = !sp->c->allow_nonfinite,
                        .unit = base_roundoff(r->base),
                        .store = storing(r, u),
                        .tiny = dp_hypot(smallest(r->base, sp->c->p.K), tiny)};
    if (field >= 0) allow_stored(r, session->text ? session->kept : DP_FP64, field, &in.allowance);
    return in;
}

/* The rms of one rounding of a number of size 1 in the format of the chain of M. */
static double chain_rounding(const dp_run *r) {
    const dp_format_info *f = &dp_formats[r->chain];
    return r->has_chain ? fmax(f->u_op, f->u_store) / sqrt(12) : 0;
}

/* ---- where a row stands ---------------------------------------------------------------------- */

/* Context of PLACES. */
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
    *at = dp_place_of(dp_own_part_of(p->own.kind, p->T, x->N, t), (int)(row % p->HV), seq);
}

static void head_row(DP_UNUSED const void *ctx, int64_t row, dp_place *at) {
    *at = dp_place_of(0, (int)row, -1);
}

/* They map a row of a result to rank, head, sequence and token. */
static dp_place_fn *const PLACES[] = {
    [DP_OF_TOKENS] = token_row, [DP_OF_SEQUENCES] = state_row, [DP_OF_HEADS] = head_row};

/* ---- judgement ------------------------------------------------------------------------------- */

/* Arguments of a judgement. */
typedef struct {
    dp_sharding *sp;
    dp_bound_bases *bases;
    const dp_known_bound *known;
    const dp_outputs *out;
    const dp_expected *expected; /* the draws of the run; NULL: none */
    int stages;                  /* 1: intermediates are judged, too */
    int draw;                    /* 1: draws that are not known are made */
} judging;

/* Adds the judgement of one tensor; exact cases: whose data stands there instead. */
static void judge_tensor(const judging *j, const dp_compare_in *in, dp_run *r) {
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
    if (!dp_lost_state(p, field, &t->failed, got, run->design.drop, text, sizeof text)) return;
    dp_text_add(t->why, sizeof t->why, "; %s", text);
}

/* Where o failed in a session, its verdict says in which call. */
static void name_call(const dp_case *c, dp_result_id field, dp_run *run) {
    dp_judgement *t = &run->tensor[run->ntensor - 1];
    const dp_session *s = &c->session;
    if (!s->text || field != DP_RESULT_O || t->verdict != DP_FAIL || t->failed.at.token < 0) return;
    dp_session_call x;
    const int64_t call =
        dp_session_call_of(s, t->failed.at.token - c->p.cu[t->failed.at.sequence], &x);
    dp_text_add(t->why, sizeof t->why,
                "; in call %lld of its sequence: %lld drafted, %lld accepted%s",
                (long long)call + 1, (long long)x.drafted, (long long)x.accepted,
                s->prefix && call == dp_session_call_of(s, s->prefix, NULL)
                    ? ", the first behind the shared prefix"
                    : "");
}

/* dg of a first token without an initial state is a sum of pairs that cancel. Kernels that round
 * the operands of dq and dk separately leave one rounding of an operand (FLA: 0.7% of its head's
 * rows). So are dA_log and ddt_bias of a head of such tokens alone. */
static double cancelled(const dp_run *run, dp_result_id field) {
    const int sums =
        field == DP_RESULT_DG || field == DP_RESULT_DA_LOG || field == DP_RESULT_DDT_BIAS;
    return sums && run->base == DP_BASE_BF16 ? storing(run, 0x1p-8) : 0;
}

/* One rounding of the arithmetic over a bound, where rows of the recurrence cancel. There fused
 * kernels and those with other orders of summation made up to 1/12 of their bound. */
static double terms(const judging *j, const dp_run *run) {
    const int wide = run->base != DP_BASE_BF16 || j->known->by_tokens;
    return dp_rows_cancel(dp_recurrence_of(&j->sp->c->p)) ? (wide ? 1 : 0x1p-16) / 32 : 0;
}

/* Loss of a number near zero by its file's format or, in fp16, by its own. */
static double tiny_of(const judging *j, const dp_run *run, dp_result_id field) {
    const double file = j->out->stored ? j->out->stored->tiny[field] : 0;
    return run->design.out[field] == DP_FP16 ? fmax(file, 0x1p-25) : file;
}

/* The least number that becomes Inf in the result's format, which that loss tells; 0: none. */
static double most_of(const dp_run *run, dp_result_id field, double tiny) {
    const dp_format kept = field == DP_RESULT_FINAL_STATE ? run->design.final_state : DP_FP64;
    if (tiny >= 0x1p-25 || kept == DP_FP16 || kept == DP_FP16SR) return 65520;
    return run->base != DP_BASE_FP64 || tiny > 0 ? 0x1.ffp127 : 0; /* of bf16, nearly of fp32 */
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

static void judge_field(const judging *j, dp_result_id field, const dp_drop *lost, dp_run *run) {
    const dp_sharding *sp = j->sp;
    const dp_problem *p = &sp->c->p;
    const dp_ball *want = &sp->truth->field[field];
    const dp_stored_results *stored = j->out->stored;
    const dp_expected *x = j->expected;
    const dp_row_kind kind = dp_result_fields[field].kind;
    const double *got = j->out->results->out[field];
    int64_t rows, width;
    dp_result_shape(p, field, &rows, &width);
    if (!rows || !got || !want->rows) return;
    assert(want->rows == rows && want->width == width);
    const field_places places = {.p = p,
                                 .field = field,
                                 .heads = dp_result_heads(p, field),
                                 .per = dp_result_rows_per_token(p, field),
                                 .N = sp->N,
                                 .chunk_of = sp->windows.window_of};
    DP_OWN double *freedom = dp_row_freedom_new(p, field);
    const double own = j->known->storage[field];
    const double u = stored && stored->u[field] > own ? stored->u[field] : 0;
    const int wide = kind != DP_OF_TOKENS && !run->design.out[field]; /* fp32 unless declared */
    DP_OWN double *exact = run->exact ? truth_as_stored(want, got, wide ? u : fmax(u, own)) : NULL;
    const double tiny = tiny_of(j, run, field);
    dp_compare_in in = comparing(run, sp, (int)field, u, tiny);
    in.most = most_of(run, field, tiny);
    in.name = dp_result_fields[field].name;
    in.heads = places.heads;
    in.rows = rows;
    in.width = width;
    in.got = got;
    in.want = exact ? exact : want->hi;
    in.want_lo = want->lo;
    in.rad = want->rad;
    in.bound = j->known->bound.row[field];
    in.lost = lost->row[field];
    in.place = PLACES[kind];
    in.ctx = &places;
    in.tokens = kind == DP_OF_TOKENS ? p->T : 0;
    in.subrows = kind == DP_OF_SEQUENCES ? p->K : 1;
    in.draws = x && x->field[field].err2 ? &x->field[field] : NULL;
    in.freedom = freedom;
    in.bound_shown = !j->known->decides;
    in.file_unit = u;
    in.seen_most = seen_most(field);
    in.cancelled = cancelled(run, field);
    in.terms = terms(j, run);
    in.of_heads = kind == DP_OF_HEADS;
    judge_tensor(j, &in, run);
    name_lost_state(p, field, got, run);
    name_call(sp->c, field, run);
}

static dp_judgement *judgement_of(const dp_run *run, dp_result_id field) {
    for (int i = 0; i < run->ntensor; i++)
        if (!strcmp(run->tensor[i].name, dp_result_fields[field].name)) return &run->tensor[i];
    return NULL;
}

/* o .. ds0, row by row; sums against the addends. */
static void judge_results(const judging *j, dp_run *run) {
    dp_drop lost = {{NULL}};
    const dp_case *c = j->sp->c;
    if (run->design.drop) dp_drop_allowance(&c->p, run->design.drop, c->backward, &lost);
    for (int i = 0; i < DP_NRESULTS; i++)
        judge_field(j, i, &lost, run);
    dp_drop_free(&lost);
    if (run->exact) return;
    const dp_sums_in in = {.p = &j->sp->c->p,
                           .got = j->out->results,
                           .arithmetic = base_roundoff(run->base),
                           .tiny_dg = tiny_of(j, run, DP_RESULT_DG),
                           .tiny_dA_log = tiny_of(j, run, DP_RESULT_DA_LOG),
                           .tiny_ddt_bias = tiny_of(j, run, DP_RESULT_DDT_BIAS),
                           .dg = judgement_of(run, DP_RESULT_DG),
                           .dA_log = judgement_of(run, DP_RESULT_DA_LOG),
                           .ddt_bias = judgement_of(run, DP_RESULT_DDT_BIAS)};
    dp_sums_judge(&in);
}

/* ---- what ranks exchange --------------------------------------------------------------------- */

static int is_product(int which) { return which == DP_RANK_M || which == DP_RANK_DM; }

/* ---- one tensor of ranks --------------------------------------------------------------------- */

/* One tensor that ranks exchange. */
typedef struct {
    int which;           /* DP_RANK_S_IN .. */
    double *const *got;  /* [N*HV] */
    const double *bound; /* [N*HV] */
    int absent_fails;    /* 1: a pair without a value counts as NaN; 0: it is left out */
    double u, tiny;      /* unit roundoff and half spacing of the format it lies in, where that is
                            coarser than the base's own; else 0 */
} rank_values;

/* The pairs of rank and head that have it, one a row. pair: rank * HV + head. */
typedef struct {
    int HV, n, *pair;
    int64_t width;
    double *got, *want, *radius, *bound;
} rows;

static void place_pair(const void *ctx, int64_t row, dp_place *at) {
    const rows *x = ctx;
    *at = dp_place_of(x->pair[row] / x->HV, x->pair[row] % x->HV, -1);
}

static rows rows_new(int HV, int64_t most, int64_t width) {
    return (rows){.HV = HV,
                  .pair = dp_calloc((size_t)most, sizeof(int)),
                  .width = width,
                  .got = dp_doubles(most * width),
                  .want = dp_doubles(most * width),
                  .radius = dp_doubles(most),
                  .bound = dp_doubles(most)};
}

static void rows_free(rows *x) { DP_FREE(x->pair, x->got, x->want, x->radius, x->bound); }

/* got NULL: not a number. */
static void rows_add(rows *x, int pair, const double *got, const dp_truth_rank_tensor *want,
                     double bound) {
    double *row = x->got + x->n * x->width;
    for (int64_t i = 0; i < x->width; i++)
        row[i] = got ? got[i] : NAN;
    memcpy(x->want + x->n * x->width, want->x, sizeof(double) * (size_t)x->width);
    x->radius[x->n] = want->rad + 0x1p-53 * dp_norm_fro(x->width, want->x); /* of a double */
    x->bound[x->n] = bound;
    x->pair[x->n++] = pair;
}

static void judge_rows(const judging *j, const rank_values *x, const rows *z, dp_run *run) {
    const dp_sharding *sp = j->sp;
    const dp_expected *e = j->expected;
    DP_FREED(dp_draws_free) dp_draws draws = {0};
    if (e && e->rank[x->which].err2) draws = dp_draws_of_rows(&e->rank[x->which], z->n, z->pair);
    dp_compare_in in = comparing(run, sp, -1, x->u, x->tiny);
    in.name = dp_rank_name(x->which);
    in.heads = sp->c->p.HV;
    in.rows = z->n;
    in.width = z->width;
    in.got = z->got;
    in.want = z->want;
    in.rad = z->radius;
    in.bound = z->bound;
    in.place = place_pair;
    in.ctx = z;
    in.subrows = sp->c->p.K;
    in.draws = draws.err2 ? &draws : NULL;
    in.rounding = is_product(x->which) ? chain_rounding(run) : 0;
    in.bound_shown = !j->known->decides;
    in.file_unit = x->u;
    in.may_vanish = 1;
    judge_tensor(j, &in, run);
}

static void judge_rank_tensor(const judging *j, const rank_values *x, dp_run *run) {
    const dp_problem *p = &j->sp->c->p;
    const int pairs = j->sp->N * p->HV;
    DP_FREED(rows_free) rows z = rows_new(p->HV, pairs, dp_rank_width(p, x->which));
    for (int i = 0; i < pairs; i++) {
        const dp_truth_rank_tensor *want = &j->sp->at[i].of[x->which];
        if (want->there && (x->got[i] || x->absent_fails))
            rows_add(&z, i, x->got[i], want, x->bound[i]);
    }
    if (z.n) judge_rows(j, x, &z, run);
}

static void judge_ranks(const judging *j, dp_run *run) {
    for (int i = 0; i < DP_RANK_TENSORS; i++) {
        const rank_values x = {.which = i,
                               .got = j->out->rank[i],
                               .bound = j->known->bound.rank[i],
                               .absent_fails = dp_rank_is_state(i) || j->out->forms_all_pairs};
        if (x.got) judge_rank_tensor(j, &x, run);
    }
}

/* ---- M of every rank, and along the prefixes of one rank's chain ----------------------------- */

/* M of `chunks` chunks of a rank: got and true [K][K], bound of the error. */
typedef struct {
    int rank, chunks;
    const double *got, *want;
    double bound;
} product;

/* |dM S|_F / |S|_F */
static double effect(const double *dM, const double *S, int K, int V) {
    DP_OWN double *x = dp_doubles((int64_t)K * V);
    dp_mm(DP_FP64, 0, 0, K, V, K, dM, S, x);
    const double e = dp_norm_fro((int64_t)K * V, x), n = dp_norm_fro((int64_t)K * V, S);
    return n > 0 ? e / n : NAN;
}

static void add_point(const dp_sharding *sp, const product *m, dp_run *run) {
    const dp_problem *p = &sp->c->p;
    const int64_t KK = (int64_t)p->K * p->K;
    DP_OWN double *d = dp_doubles(KK);
    for (int64_t i = 0; i < KK; i++)
        d[i] = m->got[i] - m->want[i];
    const double err = dp_norm_fro(KK, d), norm = dp_norm_fro(KK, m->want);
    const dp_truth_rank_tensor *S_in = &sp->at[m->rank * p->HV].of[DP_RANK_S_IN];
    run->point = dp_realloc(run->point, sizeof *run->point * (size_t)(run->npoint + 1));
    run->point[run->npoint++] =
        (dp_chain_point){.rank = m->rank,
                         .chunks = m->chunks,
                         .rel = norm > 0 ? err / norm : NAN,
                         .abs = err,
                         .norm = norm,
                         .bound = norm > 0 ? m->bound / norm : NAN,
                         .effect = S_in->there ? effect(d, S_in->x, p->K, p->V) : NAN};
}

static void add_prefixes(const judging *j, dp_run *run) {
    const dp_sim *s = j->out->sim;
    const dp_sharding *sp = j->sp;
    for (int i = 0; sp->traj && i < s->ntraj; i++) {
        const product m = {s->traj_rank, s->traj_chunks[i], s->traj[i], sp->traj[i],
                           j->known->bound.traj[i]};
        if (m.want) add_point(sp, &m, run);
    }
}

/* Chunks that M of a rank runs over: simulated ranks count those of the last sub-sequence, the
 * kernels' record those of all its tokens. */
static int chunks_of(const judging *j, int rank) {
    const dp_sim *s = j->out->sim;
    if (!s) return (int)((j->sp->c->p.T / j->sp->N + DP_CHUNK - 1) / DP_CHUNK);
    const int n = s->ctx[rank].nlocal;
    return s->first[rank][n] - s->first[rank][n - 1];
}

static int known(const dp_run *run, int rank, int chunks) {
    int have = 0;
    for (int i = 0; i < run->npoint; i++)
        have |= run->point[i].rank == rank && run->point[i].chunks == chunks;
    return have;
}

static void judge_growth(const judging *j, dp_run *run) {
    const dp_sharding *sp = j->sp;
    double *const *M = j->out->rank[DP_RANK_M];
    if (sp->c->p.HV != 1 || !M) return;
    if (j->out->sim) add_prefixes(j, run);
    for (int r = 0; r < sp->N; r++) {
        const dp_truth_rank_tensor *want = &sp->at[r].of[DP_RANK_M];
        if (!want->there || !M[r]) continue;
        const product m = {r, chunks_of(j, r), M[r], want->x, j->known->bound.rank[DP_RANK_M][r]};
        if (!known(run, m.rank, m.chunks)) add_point(sp, &m, run);
    }
}

/* ---- formats of stages ----------------------------------------------------------------------- */

/* Format that stage i lies in: u 0 where it is none coarser than the base's own store, which is in
 * the bound. */
typedef struct {
    double u, tiny;
} storage;

static storage storage_of(const judging *j, dp_base base, int stage) {
    const dp_stored_results *stored = j->out->stored;
    if (!stored) return (storage){0, 0};
    const double u = stored->stage_u[stage];
    const int is_short = base == DP_BASE_BF16 && dp_stage_tensors[stage].stored_short;
    return (storage){u > (is_short ? 0x1p-8 : base_roundoff(base)) ? u : 0,
                     stored->stage_tiny[stage]};
}

/* ---- stages of tokens and chunks ------------------------------------------------------------- */

typedef struct {
    const dp_sim *s;
    int *group_of, per, chunk;
} stage_places; /* group_of [T] */

static void stage_place(const void *ctx, int64_t row, dp_place *at) {
    const stage_places *x = ctx;
    const int HV = x->s->p->HV;
    const int64_t t = x->chunk ? x->s->group[row / HV].t0 : row / ((int64_t)HV * x->per);
    const int g = x->chunk ? (int)(row / HV) : x->group_of[t];
    const dp_group *gr = &x->s->group[g];
    *at = (dp_place){.rank = gr->rank,
                     .head = (int)(x->chunk ? row % HV : row / x->per % HV),
                     .sequence = x->s->ctx[gr->rank].local_seq[gr->sub],
                     .chunk = g,
                     .token = t};
}

/* got, with zeros where it means nothing: above the diagonal of a chunk. To be freed. */
static double *meant(const stage_places *x, int stage, int64_t rows, int64_t width,
                     const double *got) {
    double *seen = dp_copy(got, rows * width);
    for (int64_t r = 0; r < rows && (stage == DP_AKK || stage == DP_AQK); r++) {
        const int64_t token = r / ((int64_t)x->s->p->HV * x->per);
        for (int64_t i = (token - x->s->group[x->group_of[token]].t0 + 1) * dp_rows(x->s->p);
             i < width; i++)
            seen[r * width + i] = 0;
    }
    return seen;
}

static void judge_inner(const judging *j, const dp_stage_errors *errors, int stage, dp_run *run) {
    const dp_sim *ref = dp_sharding_reference(j->sp);
    const dp_problem *p = ref->p;
    const int64_t rows = errors->rows[stage], width = errors->width[stage];
    const int by_chunk = dp_stage_tensors[stage].kind == DP_PER_CHUNK;
    const storage s = storage_of(j, run->base, stage);
    stage_places places = {.s = ref,
                           .group_of = dp_calloc((size_t)p->T, sizeof(int)),
                           .per = by_chunk ? 1 : (int)(rows / (p->T * p->HV)),
                           .chunk = by_chunk};
    for (int g = 0; g < ref->ngroup; g++)
        for (int i = 0; i < ref->group[g].c; i++)
            places.group_of[ref->group[g].t0 + i] = g;
    DP_OWN double *want = dp_stage_tensor_value(ref, stage);
    if (s.u > 0 || s.tiny > 0) dp_bound_widen(errors->bound[stage], want, rows, width, s.u, s.tiny);
    /* the simulated ranks form Akk in base bf16 alone: elsewhere its draws would be those of an
     * inverse in fp64 */
    const int drawn = stage != DP_AKK || run->base == DP_BASE_BF16;
    const dp_expected *x = drawn ? j->expected : NULL;
    DP_OWN double *seen = meant(&places, stage, rows, width, j->out->stage[stage]);
    dp_compare_in in = comparing(run, j->sp, -1, s.u, s.tiny);
    in.name = dp_stage_tensors[stage].name;
    in.heads = p->HV;
    in.rows = rows;
    in.width = width;
    in.got = seen;
    in.want = want;
    in.bound = errors->bound[stage];
    in.rad = errors->rad[stage];
    in.bound_shown = x && !j->known->derived;
    in.draws = x && x->stage[stage].err2 ? &x->stage[stage] : NULL;
    in.place = stage_place;
    in.ctx = &places;
    in.tokens = by_chunk ? 0 : p->T;
    in.subrows = by_chunk ? p->K : 1;
    dp_compare(&in, &run->tensor[run->ntensor++]);
    free(places.group_of);
}

/* The stages of stages.h are those of 64-token chunks. */
static int other_chunks(const dp_run *run, int stage) {
    return !run->undeclared &&
           dp_design_of_pass(&run->design, dp_stage_tensors[stage].backward).chunk != DP_CHUNK;
}

static void unjudged(const judging *j, int stage, dp_run *run) {
    const int N = j->sp->N, HV = j->sp->c->p.HV;
    dp_judgement *t = &run->tensor[run->ntensor++];
    *t = (dp_judgement){.N = N,
                        .heads = HV,
                        .rel_fro = NAN,
                        .bound = NAN,
                        .ratio = NAN,
                        .times = NAN,
                        .tier = "",
                        .verdict = DP_UNJUDGED,
                        .expected = {.excess = NAN},
                        .before = {.excess = NAN},
                        .worst.at.rank = -1,
                        .over.at.rank = -1,
                        .failed.at.rank = -1};
    snprintf(t->name, sizeof t->name, "%s", dp_stage_tensors[stage].name);
    snprintf(t->why, sizeof t->why,
             "stages are those of chunks of %d tokens, this design has others", DP_CHUNK);
    t->per_rank = dp_doubles(N);
    t->per_head = dp_doubles((int64_t)N * HV);
}

/* ---- stages of ranks ------------------------------------------------------------------------- */

/* M and dM may be left unwritten (NaN) where no state passes through the rank (math.md g.1). */
static int may_be_absent(const dp_sharding *sp, int stage, int rank) {
    const dp_problem *p = &sp->c->p;
    DP_FREED(dp_context_free) dp_context c = {0};
    if (stage != DP_M && stage != DP_DM) return 0;
    if (dp_context_of(p, sp->N, rank, &c, NULL)) return 0;
    return !dp_context_passes(&c);
}

int dp_is_blank(const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (!isnan(x[i])) return 0;
    return 1;
}

static void judge_exchanged(const judging *j, int stage, dp_run *run) {
    const dp_sharding *sp = j->sp;
    const int HV = sp->c->p.HV, pairs = sp->N * HV, which = dp_stage_tensors[stage].rank;
    const storage s = storage_of(j, run->base, stage);
    const int64_t width = dp_rank_width(&sp->c->p, which);
    DP_OWN double **got = dp_calloc((size_t)pairs, sizeof *got);
    DP_OWN double *bound = dp_copy(j->known->bound.rank[which], pairs);
    for (int i = 0; i < pairs; i++) {
        const dp_truth_rank_tensor *want = &sp->at[i].of[which];
        got[i] = j->out->stage[stage] + i * width;
        if (dp_is_blank(got[i], width) && may_be_absent(sp, stage, i / HV)) got[i] = NULL;
        if (!want->there) continue;
        bound[i] += s.u * (dp_norm_fro(width, want->x) + bound[i]);
        bound[i] += sqrt((double)width) * s.tiny;
    }
    const rank_values x = {.which = which, .got = got, .bound = bound, .u = s.u, .tiny = s.tiny};
    judge_rank_tensor(j, &x, run);
}

/* All that are there, those of ranks included. */
static void judge_shown(const judging *j, dp_run *run) {
    DP_FREED(dp_stage_errors_free) dp_stage_errors errors;
    dp_stage_errors_make(j->sp, run, j->out->stage, j->bases, &errors);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (!j->out->stage[i]) continue;
        if (dp_stage_tensors[i].kind == DP_PER_RANK)
            judge_exchanged(j, i, run);
        else if (other_chunks(run, i))
            unjudged(j, i, run);
        else
            judge_inner(j, &errors, i, run);
    }
}

/* ---- one run --------------------------------------------------------------------------------- */

/* The content of one tensor; partial: entries of it need not be written. x NULL: neither a result
 * nor a stage. */
typedef struct {
    const double *x;
    int64_t n;
    int partial;
} content;

static content content_of(const judging *j, const char *name) {
    const dp_problem *p = &j->sp->c->p;
    const int field = dp_result_find(name);
    if (field >= 0) return (content){j->out->results->out[field], dp_result_count(p, field), 0};
    const int stage = dp_stage_tensor_find(name);
    if (stage < 0) return (content){0};
    return (content){j->out->stage[stage], dp_stage_tensor_size(p, j->sp->N, stage),
                     stage == DP_AKK || stage == DP_AQK ||
                         dp_stage_tensors[stage].kind == DP_PER_RANK};
}

/* Writes "12 of 96 entries were never written, the first is entry 5", "3 of 96 entries are NaN or
 * Inf, ..", or "". Returns the number of unwritten entries. */
static int64_t flaws_of(const double *x, int64_t n, char *text, size_t size) {
    int64_t unwritten = 0, wild = 0, first = -1, odd = -1;
    *text = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!memcmp(&x[i], &DP_SUBJECT_UNWRITTEN, sizeof *x))
            first = unwritten++ ? first : i;
        else if (!isfinite(x[i]))
            odd = wild++ ? odd : i;
    }
    if (unwritten == n)
        snprintf(text, size, "was never written");
    else if (unwritten)
        snprintf(text, size, "%lld of %lld entries were never written, the first is entry %lld",
                 (long long)unwritten, (long long)n, (long long)first);
    else if (wild)
        snprintf(text, size, "%lld of %lld entries are NaN or Inf, the first is entry %lld",
                 (long long)wild, (long long)n, (long long)odd);
    return unwritten;
}

static void name_flaws(const judging *j, dp_run *run) {
    for (int i = 0; i < run->ntensor; i++) {
        dp_judgement *t = &run->tensor[i];
        const content c = content_of(j, t->name);
        char text[sizeof t->why];
        if (!c.x) continue;
        const int64_t unwritten = flaws_of(c.x, c.n, text, sizeof text);
        if (!*text) continue;
        if ((t->verdict != DP_FAIL || t->nbeyond) && (c.partial || !unwritten)) continue;
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
        any |= out->stage[i] && dp_stage_tensors[i].kind != DP_PER_RANK;
    return any;
}

static void judge_step(const judging *j, dp_run *r) {
    const dp_sharding *sp = j->sp;
    const dp_step_expected x = {j->expected, sp->windows.window_of, comparing(r, sp, -1, 0, 0)};
    if (sp->step) dp_step_judge(sp->c, sp->truth, sp->step, &j->known->bound, &x, r);
}

/* Zeros of it would pass, or it overflowed. */
static int has_no_size(const dp_judgement *t) {
    return (t->verdict == DP_UNJUDGED && t->seen_head > 2) ||
           (t->verdict == DP_FAIL && (!isfinite(t->rel_fro) || isinf(t->over.bound)));
}

/* "; the state grows: .." where keys or gates make it grow, or "". */
static void explain_growth(const dp_problem *p, char *text, size_t size) {
    const dp_growth of = dp_growth_of(p);
    *text = 0;
    if (of.strength > 2.01) /* what rounding adds to 2 */
        snprintf(text, size,
                 "; the state grows: sum of beta |k|^2 is %.3g at token %lld, at most 2 contracts: "
                 "normalise keys",
                 of.strength, (long long)of.token);
    else if (of.gates > 0)
        snprintf(
            text, size,
            "; the state grows: log decays above 0 add up to %.3g in head %d (fp32 ends at 88)",
            of.gates, of.head);
}

/* Where that is because the state grows: what the inputs would need. */
static void say_growth(const dp_problem *p, dp_run *r) {
    int any = 0;
    char text[200];
    for (int i = 0; i < r->ntensor; i++)
        any |= has_no_size(&r->tensor[i]);
    if (!any) return;
    explain_growth(p, text, sizeof text);
    for (int i = 0; i < r->ntensor; i++) {
        dp_judgement *t = &r->tensor[i];
        if (has_no_size(t)) dp_text_add(t->why, sizeof t->why, "%s", text);
    }
}

static void judge_all(const judging *of, dp_run *r) {
    judging j = *of;
    j.expected = dp_sharding_expected(of->sp, r, of->stages, of->draw);
    const int most = DP_NRESULTS + DP_STEP_TENSORS + DP_RANK_TENSORS + DP_NSTAGE_TENSORS;
    r->tensor = dp_calloc((size_t)most, sizeof *r->tensor);
    judge_results(&j, r);
    judge_step(&j, r);
    judge_ranks(&j, r);
    judge_growth(&j, r);
    if (j.out->stage) judge_shown(&j, r);
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
    const int64_t width = (int64_t)p->HV * dp_Kg(p);
    return sums_round(p, gates, width, r->design.chunk) ||
           sums_round(p, gates, width, r->design.chunk_backward) ||
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
static void settle(const judging *j, dp_run *r) {
    const int ties = has_ties(r, j->sp->c);
    if (r->exact || !may_settle(r, ties)) return;
    dp_run again = fresh(r, &r->design);
    again.set = ties ? DP_SET_OFF_LATTICE : 1;
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

/* Does nothing fail, as limits are wider than a tensor? */
static int is_too_wide(const dp_run *r) {
    int wide = 0;
    for (int i = 0; i < r->ntensor; i++)
        wide |= r->tensor[i].wide;
    return r->verdict == DP_UNJUDGED && wide;
}

/* Does b explain more than a? A pass comes first, then limits that are too wide, then the fewest
 * tensors that fail. Another unjudged design says less. */
static int explains_more(const dp_run *a, const dp_run *b) {
    if (a->verdict == DP_PASS || b->verdict == DP_PASS) return b->verdict == DP_PASS;
    if (a->verdict == DP_FAIL && is_too_wide(b)) return 1;
    if (a->verdict != DP_FAIL || b->verdict != DP_FAIL) return 0;
    int failed_a, failed_b;
    const double worst_a = worst_of(a, &failed_a), worst_b = worst_of(b, &failed_b);
    return failed_b != failed_a ? failed_b < failed_a : worst_b < worst_a;
}

/* Judges r by its bounds, and by its draws: all that it needs, or those that are known. */
static void judge_by(const judging *x, dp_run *r, int draw) {
    judging j = *x;
    j.known = dp_bounds_of_run(x->sp, x->bases, r, x->out->stored);
    j.draw = draw;
    judge_all(&j, r);
    if (draw) settle(&j, r);
    dp_run_close(r);
}

/* Chunks of half the length hold the longest sequence, too: the same design. */
static int is_another(const judging *x, const dp_design *d) {
    const dp_problem *p = &x->sp->c->p;
    if (x->stages) return d->chunk == DP_CHUNK; /* whose stages they are */
    return d->chunk <= 16 || d->chunk / 2 < dp_longest_sequence(p->cu, p->Nseq);
}

/* The common designs but for the first whose bounds hold all of it; their draws are made. Returns
 * their number. */
static int trials_of(const judging *x, const dp_run *r, dp_design t[DP_COMMON_DESIGNS]) {
    dp_design all[DP_COMMON_DESIGNS];
    const int most = dp_design_common(&r->design, all);
    int n = 0;
    for (int i = 1; i < most; i++) {
        if (!is_another(x, &all[i])) continue;
        dp_run bounded = fresh(r, &all[i]);
        judge_by(x, &bounded, 0);
        if (bounded.verdict != DP_FAIL) t[n++] = all[i];
        forget(&bounded);
    }
    dp_sharding_expect(x->sp, r, x->stages, n, t);
    return n;
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
static void try_others(const judging *x, dp_run *r) {
    dp_design t[DP_COMMON_DESIGNS];
    const int n = trials_of(x, r, t);
    for (int i = 0; i < n && r->verdict != DP_PASS; i++) {
        dp_run other = fresh(r, &t[i]);
        judge_by(x, &other, 1);
        const int better = explains_more(r, &other);
        forget(better ? r : &other);
        if (better) *r = other;
    }
}

/* Do calls read states again that lost bits over a scale? Then all behind them rounds. */
static int reads_rounded(const dp_run *r, const dp_session *s) {
    return s && (dp_stored_has_scale(r->design.final_state) || dp_stored_has_scale(s->kept));
}

void dp_judge_outputs(dp_sharding *sp, dp_bound_bases *bases, const dp_outputs *out, dp_run *r) {
    const judging x = {.sp = sp, .bases = bases, .out = out, .stages = inner_stages(out)};
    const dp_design declared = r->design;
    const dp_design *explained = out->stored ? out->stored->explained : NULL;
    dp_design common[DP_COMMON_DESIGNS];
    dp_design_common(&declared, common);
    if (r->undeclared) r->design = explained ? *explained : common[0];
    if (reads_rounded(r, dp_case_session(sp->c))) r->exact = 0;
    judge_by(&x, r, 1);
    if (r->undeclared && !explained && !r->exact && may_be_explained(r)) try_others(&x, r);
    r->explained = r->design;
    if (r->undeclared) r->design = declared;
}
