/* Which stage of the pipeline is wrong: all stages in their order (bisect.h). */
#include "bisect_work.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* ---- one row --------------------------------------------------------------------------------- */

/* Is this row what it was in the first run? */
static int steady(dp_bisect_work *w, int n, const double *got) {
    const uint64_t h = XXH3_64bits(got, sizeof *got * (size_t)n);
    if (w->run)
        return w->first[w->stage].at >= w->first[w->stage].n ||
               w->first[w->stage].hash[w->first[w->stage].at++] == h;
    if (w->first[w->stage].n == w->first[w->stage].cap) {
        w->first[w->stage].cap = w->first[w->stage].cap ? 2 * w->first[w->stage].cap : 1024;
        w->first[w->stage].hash =
            dp_realloc(w->first[w->stage].hash, sizeof h * (size_t)w->first[w->stage].cap);
    }
    w->first[w->stage].hash[w->first[w->stage].n++] = h;
    return 1;
}

/* Difference of a row of n numbers: 2-norm of the error, index of the largest error. If judged = 0,
 * the reference is not finite, and nothing is compared. */
typedef struct {
    double err;
    int index, judged;
} row_difference;

static row_difference difference(int n, const double *got, const double *want, int differs) {
    row_difference d = {0};
    double e2 = 0, top = -1, scale = 0;
    for (int i = 0; i < n; i++) {
        if (!isfinite(want[i]) && !differs) return d;
        const double e = fabs(got[i] - want[i]);
        if (!(e <= top)) {
            top = e;
            d.index = i;
        }
        if (isnan(e)) break;
        scale = fmax(scale, e);
    }
    for (int i = 0; i < n; i++)
        e2 += scale > 0 ? ((got[i] - want[i]) / scale) * ((got[i] - want[i]) / scale) : 0;
    d.err = isnan(top) ? NAN : scale * sqrt(e2);
    d.judged = 1;
    return d;
}

static double limit_of(int n, const double *D, double more) {
    double d2 = 0;
    for (int i = 0; i < n; i++)
        d2 += D ? D[i] : 0;
    return DP_LAMBDA * sqrt(d2) + more;
}

/* Notes a failing row of the stage's first failing tensor, the one to report. */
static void note_failure(dp_bisect_row *x, const dp_bisect_row *now, int differs) {
    if (!x->fails) {
        memcpy(x->tensor, now->tensor, sizeof x->tensor);
        x->first = now->first;
        x->ratio = now->ratio;
        x->run = now->run;
    }
    x->fails++;
    x->unsteady += differs;
    if (!(now->ratio <= x->ratio)) x->ratio = now->ratio;
    if (now->first.at.rank >= 0) x->rank[now->first.at.rank] = 1;
    if (now->first.at.head >= 0) x->head[now->first.at.head] = 1;
}

static dp_bisect_tally *tally_of(dp_bisect_work *w, const char *tensor) {
    dp_bisect_tallies *x = w->tal;
    for (int i = x->n - 1; i >= 0; i--)
        if (x->t[i].stage == (int)w->stage && !strcmp(x->t[i].name, tensor)) return &x->t[i];
    assert(x->n < (int)(sizeof x->t / sizeof *x->t));
    dp_bisect_tally *t = &x->t[x->n++];
    *t = (dp_bisect_tally){.stage = (int)w->stage,
                           .n = (int64_t)(w->ref.ngroup > w->ref.N ? w->ref.ngroup : w->ref.N) *
                                w->p->HV};
    snprintf(t->name, sizeof t->name, "%s", tensor);
    t->e2 = dp_doubles(t->n * x->ndraw);
    t->err2 = dp_doubles(t->n);
    t->want2 = dp_doubles(t->n);
    t->rows = dp_doubles(t->n);
    t->worst = dp_calloc((size_t)t->n, sizeof *t->worst);
    return t;
}

/* Adds a row's errors to the tally of its tensor. */
static void bisect_count(dp_bisect_work *w, const char *tensor, const dp_place *at, int row, int n,
                         const double *got, const double *want) {
    dp_bisect_tally *t = tally_of(w, tensor);
    const int64_t cell = (int64_t)(at->chunk >= 0  ? at->chunk
                                   : at->rank >= 0 ? at->rank
                                                   : 0) *
                             w->p->HV +
                         (at->head >= 0 ? at->head : 0);
    double e2 = 0, w2 = 0, top = -1;
    int index = 0;
    for (int i = 0; i < n; i++) {
        const double e = fabs(got[i] - want[i]);
        if (!isfinite(e)) return; /* bounds have nothing to say of it, either */
        e2 += e * e;
        w2 += want[i] * want[i];
        if (e > top) {
            top = e;
            index = i;
        }
    }
    if (w->tal->draw >= 0) {
        t->e2[w->tal->draw * t->n + cell] += e2;
        return;
    }
    t->err2[cell] += e2;
    t->want2[cell] += w2;
    t->rows[cell]++;
    if (t->rows[cell] == 1 || sqrt(e2) > t->worst[cell].err)
        t->worst[cell] = (dp_bisect_entry){*at, row, index, got[index], want[index], sqrt(e2), 0};
}

void dp_bisect_judge(dp_bisect_work *w, const char *tensor, dp_place at, int row, int n,
                     const double *got, const double *want, const double *D, double more) {
    dp_bisect_row *x = &w->out->stage[w->stage];
    if (w->tal) {
        bisect_count(w, tensor, &at, row, n, got, want);
        return;
    }
    const int differs = !steady(w, n, got);
    const row_difference d = difference(n, got, want, differs);
    const double limit = limit_of(n, D, more);
    if (!d.judged || (isnan(limit) && !differs)) { /* beside an infinite or NaN input of its chunk:
                                                      nothing bounds it, as in compare.h */
        x->skipped += !w->run;
        return;
    }
    const double ratio = d.err == 0 ? 0 : d.err / limit;
    x->judged += !w->run;
    if (!x->tensor[0]) snprintf(x->tensor, sizeof x->tensor, "%s", tensor);
    if (x->fails && strcmp(x->tensor, tensor)) return;
    if (d.err <= limit && !differs) {
        if (x->fails || !(ratio >= x->ratio)) return;
        x->ratio = ratio;
        snprintf(x->tensor, sizeof x->tensor, "%s", tensor);
        return;
    }
    dp_bisect_row now = {.first = {at, row, d.index, got[d.index], want[d.index], d.err, limit},
                         .ratio = ratio,
                         .run = w->run};
    snprintf(now.tensor, sizeof now.tensor, "%s", tensor);
    note_failure(x, &now, differs);
}

void dp_bisect_judge_rows(dp_bisect_work *w, const char *tensor, dp_place at, int tokens_R,
                          int rows, int n, const double *got, const double *want, const double *D) {
    const int64_t t0 = at.token;
    for (int i = 0; i < rows; i++) {
        if (tokens_R) at.token = t0 + i / tokens_R;
        dp_bisect_judge(w, tensor, at,
                        tokens_R == 1 ? -1
                        : tokens_R    ? i % tokens_R
                                      : i,
                        n, got + (int64_t)i * n, want + (int64_t)i * n,
                        D ? D + (int64_t)i * n : NULL, 0);
    }
}

dp_place dp_bisect_chunk_place(const dp_bisect_work *w, int g, int hv) {
    const dp_group *gr = &w->ref.group[g];
    return (dp_place){.rank = gr->rank,
                      .head = hv,
                      .sequence = w->ref.ctx[gr->rank].local_seq[gr->sub],
                      .chunk = g,
                      .token = gr->t0};
}

/* A state or M of a whole rank: before (dir > 0: of its first, after: of its last) token. */
dp_place dp_bisect_rank_place(const dp_bisect_work *w, int r, int hv, int sub) {
    return (dp_place){
        .rank = r, .head = hv, .sequence = w->ref.ctx[r].local_seq[sub], .chunk = -1, .token = -1};
}

/* ---- copying true values into subject and twin ----------------------------------------------- */

void dp_bisect_give(dp_bisect_work *w, double *s, double *t, const double *ref, int64_t n,
                    int how) {
    for (int64_t i = 0; i < n; i++)
        s[i] = t[i] = how == DP_BISECT_STORE ? dp_round_store(w->base, ref[i])
                                             : dp_round_arith(w->base, ref[i]);
}

void dp_bisect_give_list(dp_bisect_work *w, double **s, double **t, double *const *ref, int64_t n) {
    for (int i = 0; i < w->ref.N * w->p->HV; i++)
        if (s[i] && t[i] && ref[i]) dp_bisect_give(w, s[i], t[i], ref[i], n, DP_BISECT_ARITH);
}

dp_bisect_chunk dp_bisect_chunk_of(dp_bisect_work *w, int g, int hv) {
    const int64_t z = (int64_t)g * w->p->HV + hv;
    return (dp_bisect_chunk){dp_sim_chunk(&w->s, g, hv),
                             dp_sim_chunk(&w->t, g, hv),
                             dp_sim_chunk(&w->ref, g, hv),
                             &w->intra[z],
                             &w->own[z],
                             dp_bisect_chunk_place(w, g, hv),
                             g,
                             hv};
}

/* ---- all stages ------------------------------------------------------------------------------ */

/* Judges w->stage, on true inputs. */
static void bisect_judge_stage(dp_bisect_work *w) {
    switch (w->stage) {
    case DP_STAGE_GATE: dp_bisect_stage_gate(w); break;
    case DP_STAGE_INTRA: dp_bisect_stage_intra(w); break;
    case DP_STAGE_SOLVE: dp_bisect_stage_solve(w); break;
    case DP_STAGE_WY: dp_bisect_stage_wy(w); break;
    case DP_STAGE_PRE_FWD: dp_bisect_stage_pre(w, 0); break;
    case DP_STAGE_MERGE_FWD: dp_bisect_stage_merge(w, 0); break;
    case DP_STAGE_STATE_FWD: dp_bisect_stage_state(w, 0, 0); break;
    case DP_STAGE_OUTPUT: dp_bisect_stage_output(w); break;
    case DP_STAGE_RECOMPUTE: dp_bisect_stage_state(w, 0, 1); break;
    case DP_STAGE_DAV: dp_bisect_stage_dAv(w); break;
    case DP_STAGE_PRE_BWD: dp_bisect_stage_pre(w, 1); break;
    case DP_STAGE_MERGE_BWD: dp_bisect_stage_merge(w, 1); break;
    case DP_STAGE_STATE_BWD: dp_bisect_stage_state(w, 1, 0); break;
    case DP_STAGE_WY_BWD: dp_bisect_stage_grads(w); break;
    case DP_STAGE_INTRA_BWD: break; /* computed with wy_bwd */
    case DP_STAGE_GATE_BWD: dp_bisect_stage_gate_bwd(w); break;
    default: assert(0);
    }
}

static void bounds(dp_bisect_work *w) {
    const int64_t n = (int64_t)w->ref.ngroup * w->p->HV;
    w->intra = dp_calloc((size_t)n, sizeof *w->intra);
    w->own = dp_calloc((size_t)n, sizeof *w->own);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; i++) {
        const dp_input_error exact = {0};
        dp_chunk_inverse(&w->ref.ch[i]);
        dp_bound_intra(&w->intra[i], &w->ref.ch[i], w->r, &exact);
        dp_bound_own(&w->own[i], &w->ref.ch[i], w->r);
    }
}

/* Does the subject cut its tokens into the chunks that they must be cut into? If not, no later
 * stage can be compared. */
static int same_chunks(dp_bisect_work *w) {
    const int n = w->ref.ngroup < w->s.ngroup ? w->ref.ngroup : w->s.ngroup;
    w->stage = DP_STAGE_INTRA;
    for (int g = 0; g < n; g++) {
        const dp_group *a = &w->s.group[g], *b = &w->ref.group[g];
        const double got[2] = {(double)a->t0, a->c}, want[2] = {(double)b->t0, b->c};
        dp_bisect_judge(w, "chunks", dp_bisect_chunk_place(w, g, -1), -1, 2, got, want, NULL, 0);
    }
    if (w->ref.ngroup > n)
        dp_bisect_judge(w, "chunks", dp_bisect_chunk_place(w, n, -1), -1, 1, &(double){NAN},
                        &(double){(double)w->ref.group[n].t0}, NULL, 0);
    dp_bisect_row *x = &w->out->stage[DP_STAGE_INTRA];
    const int same = !x->fails;
    if (same) {
        x->judged = 0;
        x->tensor[0] = 0;
        w->first[DP_STAGE_INTRA].n = 0;
    }
    return same;
}

/* Frees what bisect_work_new made. */
static void bisect_work_free(dp_bisect_work *w) {
    const int64_t n = (int64_t)w->ref.ngroup * w->p->HV;
    for (int64_t i = 0; w->own && i < n; i++) {
        dp_bound_free(&w->intra[i]);
        dp_bound_free(&w->own[i]);
    }
    free(w->intra);
    free(w->own);
    for (int i = 0; i < DP_NSTAGES; i++)
        free(w->first[i].hash);
    dp_sim_free(&w->s);
    dp_sim_free(&w->t);
    dp_sim_free(&w->ref);
}

/* by_inverse: even if the fault does not ask for it. */
static dp_status bisect_work_new(dp_bisect_work *w, const dp_problem *p, const dp_sim_policy *how,
                                 int by_inverse, dp_err *e) {
    const dp_exchange merge = dp_fault_exchange(how->fault, how->merge);
    const int shared = merge == DP_EXCHANGE_HEADS, N = shared ? 1 : how->N;
    w->p = p;
    w->base = how->base;
    w->r = dp_rounding_of(how->base, 2);
    dp_status st = dp_sim_new(&w->ref, p, DP_BASE_FP64, N, DP_FAULT_NONE, e);
    if (st) return st;
    st = dp_sim_new(&w->t, p, DP_BASE_FP64, N, DP_FAULT_NONE, e);
    if (!st) st = dp_sim_new(&w->s, p, how->base, N, how->fault, e);
    assert(!st);
    w->s.by_inverse |= by_inverse;
    w->t.by_inverse = w->s.by_inverse;
    w->r.inverse |= w->s.by_inverse;
    dp_sim_run(&w->ref, DP_FP64, DP_EXCHANGE_ALLGATHER, how->backward);
    if (shared) w->s.sharers = how->N;
    w->s.payload = shared ? DP_PAYLOAD_FULL : dp_fault_payload(how->fault, how->payload);
    dp_sim_begin(&w->t, DP_FP64, shared ? DP_EXCHANGE_ALLGATHER : merge, how->backward);
    dp_sim_begin(&w->s, how->chain, shared ? DP_EXCHANGE_ALLGATHER : merge, how->backward);
    bounds(w);
    return st;
}

dp_problem dp_bisect_owned(const dp_problem *p, dp_own kind, int ranks, int *parts) {
    dp_problem q = *p;
    *parts = ranks;
    if (!kind) return q;
    q.own = (dp_owners){kind, ranks};
    *parts = dp_own_parts(kind, p->T, ranks);
    return q;
}

dp_status dp_bisect_sim(const dp_problem *p, const dp_sim_policy *how, int runs, int all,
                        dp_bisect *out, dp_err *e) {
    const int N = how->N;
    dp_bisect_work w = {.out = out};
    *out = (dp_bisect){.first = -1, .N = N, .HV = p->HV};
    const dp_status st = bisect_work_new(&w, p, how, 0, e);
    if (st) return st;
    for (int i = 0; i < DP_NSTAGES; i++) {
        out->stage[i].rank = dp_calloc((size_t)N, 1);
        out->stage[i].head = dp_calloc((size_t)p->HV, 1);
    }
    for (int i = 0; i < 2; i++) {
        out->conv[i].rank = dp_calloc((size_t)N, 1);
        out->conv[i].head = dp_calloc((size_t)p->HV, 1);
    }
    const int64_t nch = (int64_t)w.ref.ngroup * p->HV;
    const int last = same_chunks(&w) ? how->backward ? DP_NSTAGES : DP_STAGE_RECOMPUTE : 0;
    for (int i = 0; i < last; i++) {
        if (i == DP_STAGE_PRE_FWD)
            for (int64_t z = 0; z < nch; z++)
                dp_bound_exact(&w.own[z]);
        for (w.run = 0; w.run < runs; w.run++) {
            w.stage = i;
            w.s.runs = w.run;
            w.first[i].at = 0;
            w.first[i + (i == DP_STAGE_WY_BWD)].at = 0;
            dp_sim_stage(&w.s, w.stage);
            dp_sim_stage(&w.t, w.stage);
            bisect_judge_stage(&w);
        }
        if (out->stage[i].fails && !all) break;
    }
    for (int i = DP_NSTAGES - 1; i >= 0; i--) {
        dp_bisect_row *x = &out->stage[i];
        if (x->fails) out->first = i;
        if (w.s.sharers) x->first.at.rank = -1; /* who has a head, not who has a token */
        for (int r = 0; r < N; r++)
            x->nrank += x->rank[r];
        for (int h = 0; h < p->HV; h++)
            x->nhead += x->head[h];
    }
    bisect_work_free(&w);
    return DP_OK;
}

const char *const dp_bisect_conv_names[2] = {"conv_fwd", "conv_bwd"};

const dp_bisect_row *dp_bisect_first(const dp_bisect *b, const char **name) {
    const int conv = b->conv[0].fails ? 0 : b->first < 0 && b->conv[1].fails ? 1 : -1;
    *name = conv >= 0       ? dp_bisect_conv_names[conv]
            : b->first >= 0 ? dp_stage_names[b->first]
                            : NULL;
    return conv >= 0 ? &b->conv[conv] : b->first >= 0 ? &b->stage[b->first] : NULL;
}

void dp_bisect_free(dp_bisect *b) {
    for (int i = 0; i < DP_NSTAGES; i++) {
        free(b->stage[i].rank);
        free(b->stage[i].head);
    }
    for (int i = 0; i < 2; i++) {
        free(b->conv[i].rank);
        free(b->conv[i].head);
    }
    *b = (dp_bisect){.first = -1};
}

/* ---- against draws --------------------------------------------------------------------------- */

static void run_tallied(dp_bisect_work *w, int backward) {
    const int64_t nch = (int64_t)w->ref.ngroup * w->p->HV;
    for (int i = 0; i < (backward ? DP_NSTAGES : DP_STAGE_RECOMPUTE); i++) {
        if (i == DP_STAGE_PRE_FWD)
            for (int64_t z = 0; z < nch; z++)
                dp_bound_exact(&w->own[z]);
        w->stage = i;
        dp_sim_stage(&w->s, w->stage);
        dp_sim_stage(&w->t, w->stage);
        bisect_judge_stage(w);
    }
}

/* One rounding of what stands there, and of the head's typical row: where rows cancel to nothing
 * that is no error. */
static double *floors(const dp_bisect_tally *t, int HV) {
    double *f = dp_doubles(t->n);
    for (int h = 0; h < HV; h++) {
        double want = 0, rows = 0;
        for (int64_t i = h; i < t->n; i += HV) {
            want += t->want2[i];
            rows += t->rows[i];
        }
        for (int64_t i = h; i < t->n; i += HV)
            f[i] = 0x1p-48 * (t->want2[i] + (rows > 0 ? want / rows * t->rows[i] : 0)) +
                   0x1p-200 * t->rows[i];
    }
    return f;
}

/* The draws of a stage's tensor: each cell is a row and a window of its own. */
static void hold(const dp_bisect_tally *t, int ndraw, int HV, dp_bisect *out) {
    dp_bisect_row *x = &out->stage[t->stage];
    double *floor2 = floors(t, HV);
    int32_t *unit = dp_calloc((size_t)t->n, sizeof *unit),
            *window = dp_calloc((size_t)t->n, sizeof *window);
    dp_levels_result ex;
    for (int64_t i = 0; i < t->n; i++) {
        unit[i] = (t->worst[i].at.rank > 0 ? t->worst[i].at.rank : 0) * HV + (int)(i % HV);
        window[i] = t->rows[i] > 0 ? (int32_t)i : -1;
    }
    const dp_draws draws = {
        .ndraw = ndraw, .rows = t->n, .windows = t->n, .width = 1, .err2 = t->e2};
    const dp_levels_in in = {.draws = &draws,
                             .err2 = t->err2,
                             .want2 = t->want2,
                             .floor2 = floor2,
                             .rows = t->rows,
                             .window = window,
                             .unit = unit,
                             .heads = HV,
                             .units = out->N * HV,
                             .allowance = {1.2, 1.2, 0}};
    dp_levels_judge(&in, &ex);
    if (ex.excess > 1 && !x->fails && ex.row >= 0) {
        const dp_bisect_entry *r = &t->worst[ex.row];
        const dp_level_result *l = &ex.at[ex.level];
        snprintf(x->tensor, sizeof x->tensor, "%s", t->name);
        x->fails = x->expected = 1;
        x->ratio = l->ratio;
        x->first = *r;
        x->first.limit = l->limit;
        if (r->at.rank >= 0) {
            x->rank[r->at.rank] = 1;
            x->nrank = 1;
        }
        if (r->at.head >= 0) {
            x->head[r->at.head] = 1;
            x->nhead = 1;
        }
    }
    free(floor2);
    free(unit);
    free(window);
}

dp_status dp_bisect_expected(const dp_problem *p, const dp_sim_policy *how, dp_format dtype,
                             dp_bisect *out, dp_err *e) {
    dp_sim_policy right = *how;
    dp_bisect_tallies tal = {.draw = -1, .ndraw = dp_expected_count(p)};
    dp_bisect_work w = {.out = out, .tal = &tal};
    right.merge = dp_fault_exchange(how->fault, how->merge);
    right.payload = dp_fault_payload(how->fault, how->payload);
    right.fault = DP_FAULT_NONE;
    if (how->base == DP_BASE_FP64 || out->first >= 0) return DP_OK;
    const dp_status st = bisect_work_new(&w, p, how, 0, e);
    if (st) return st;
    const int by_inverse = w.s.by_inverse, same = w.s.ngroup == w.ref.ngroup;
    if (same) run_tallied(&w, how->backward);
    bisect_work_free(&w);
    for (int d = 0; d < tal.ndraw && same; d++) {
        dp_problem y = dp_nearby_problem(p, &(dp_mover){(uint64_t)d, dtype, dtype});
        dp_bisect_work one = {.out = out, .tal = &tal};
        tal.draw = d;
        if (!bisect_work_new(&one, &y, &right, by_inverse, e)) {
            run_tallied(&one, how->backward);
            bisect_work_free(&one);
        }
        dp_problem_free(&y);
    }
    for (int i = 0; i < tal.n; i++) {
        hold(&tal.t[i], tal.ndraw, p->HV, out);
        free(tal.t[i].e2);
        free(tal.t[i].err2);
        free(tal.t[i].want2);
        free(tal.t[i].rows);
        free(tal.t[i].worst);
    }
    for (int i = DP_NSTAGES - 1; i >= 0; i--)
        if (out->stage[i].fails) out->first = i;
    return DP_OK;
}
