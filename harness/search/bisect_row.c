/* One row of a stage against its bound, and where it stands (bisect_work.h). */
#include "bisect_work.h"
#include <xxhash.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/* ---- one row --------------------------------------------------------------------------------- */

/* D [n]: squares of the entries' errors, NULL: none; more: on top of the row's bound. Rows come in
 * the order of execution. */
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

/* Notes a row of the stage's first failing tensor, the one to report. first: the report's row, if
 * it is the stage's first failing one. */
static void note_failure(dp_bisect_row *x, const dp_bisect_row *first, int differs) {
    if (!x->fails) {
        memcpy(x->tensor, first->tensor, sizeof x->tensor);
        x->at = first->at;
        x->row = first->row;
        x->index = first->index;
        x->got = first->got;
        x->want = first->want;
        x->err = first->err;
        x->limit = first->limit;
        x->ratio = first->ratio;
        x->run = first->run;
    }
    x->fails++;
    x->unsteady += differs;
    if (!(first->ratio <= x->ratio)) x->ratio = first->ratio;
    if (first->at.rank >= 0) x->rank[first->at.rank] = 1;
    if (first->at.head >= 0) x->head[first->at.head] = 1;
}

void dp_bisect_judge(dp_bisect_work *w, const char *tensor, dp_place at, int row, int n,
                     const double *got, const double *want, const double *D, double more) {
    dp_bisect_row *x = &w->out->stage[w->stage];
    if (w->tal) {
        dp_bisect_count(w, tensor, &at, row, n, got, want);
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
    dp_bisect_row now = {.at = at,
                         .row = row,
                         .index = d.index,
                         .got = got[d.index],
                         .want = want[d.index],
                         .err = d.err,
                         .limit = limit,
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
