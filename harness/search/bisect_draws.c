/* Stages against what the formats make of nearby problems (bisect.h, bisect_work.h). */
#include "bisect_work.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

void dp_bisect_count(dp_bisect_work *w, const char *tensor, const dp_place *at, int row, int n,
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
        t->worst[cell] = (dp_bisect_worst){*at, row, index, got[index], want[index], sqrt(e2)};
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
        dp_bisect_judge_stage(w);
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
        const dp_bisect_worst *r = &t->worst[ex.row];
        const dp_level_result *l = &ex.at[ex.level];
        snprintf(x->tensor, sizeof x->tensor, "%s", t->name);
        x->fails = x->expected = 1;
        x->ratio = l->ratio;
        x->limit = l->limit;
        x->at = r->at;
        x->row = r->row;
        x->index = r->index;
        x->got = r->got;
        x->want = r->want;
        x->err = r->err;
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
    const dp_status st = dp_bisect_work_new(&w, p, how, 0, e);
    if (st) return st;
    const int by_inverse = w.s.by_inverse, same = w.s.ngroup == w.ref.ngroup;
    if (same) run_tallied(&w, how->backward);
    dp_bisect_work_free(&w);
    for (int d = 0; d < tal.ndraw && same; d++) {
        dp_problem y = dp_nearby_problem(p, &(dp_mover){(uint64_t)d, dtype, dtype});
        dp_bisect_work one = {.out = out, .tal = &tal};
        tal.draw = d;
        if (!dp_bisect_work_new(&one, &y, &right, by_inverse, e)) {
            run_tallied(&one, how->backward);
            dp_bisect_work_free(&one);
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
