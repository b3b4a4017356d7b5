/* ref/truth/truth_cache.c - the truth of a problem in a file (ref/files/cache.h): hi, lo, rad of
 * each ball, then the marks. */
#include "ref/files/cache.h"
#include "truth_impl.h"

#include <stdlib.h>

#define MAX_PARTS 64

static int parts_of(dp_truth *t, dp_part *part) {
    dp_ball *ball[DP_NRESULTS + 3];
    int n = 0, m = 0;
    for (int i = 0; i < DP_NRESULTS; i++)
        ball[n++] = &t->field[i];
    ball[n++] = &t->S_cut;
    ball[n++] = &t->dS_cut;
    ball[n++] = &t->M_seg;
    for (int i = 0; i < n; i++) {
        const size_t rows = (size_t)ball[i]->rows,
                     size = rows * (size_t)ball[i]->width * sizeof(double);
        if (!rows) continue;
        part[m++] = (dp_part){ball[i]->hi, size};
        part[m++] = (dp_part){ball[i]->lo, size};
        part[m++] = (dp_part){ball[i]->rad, rows * sizeof(double)};
    }
    part[m++] = (dp_part){t->mark, sizeof *t->mark * (size_t)t->nmark};
    return m;
}

static dp_key key_of(const dp_problem *p, const dp_truth_request *rq) {
    const size_t n = (size_t)rq->ncut + 4 + (rq->kind != DP_TRUTH_MPFR);
    DP_OWN int64_t *x = dp_calloc(n, sizeof *x);
    x[n - 1] = rq->kind;
    x[0] = rq->kind == DP_TRUTH_MPFR ? rq->bits : 0;
    x[1] = rq->backward;
    x[2] = rq->want_M;
    x[3] = rq->ncut;
    for (int i = 0; i < rq->ncut; i++)
        x[4 + i] = rq->cut[i];
    return dp_problem_key(p, x, sizeof *x * n);
}

dp_status dp_truth_cached(const dp_problem *p, const dp_truth_request *rq, const char *dir,
                          dp_truth *t, int *cached, dp_err *e) {
    dp_part part[MAX_PARTS];
    if (cached) *cached = 0;
    if (!dir) return dp_truth_run(p, rq, t, e);
    const dp_status s = tr_truth_alloc(p, rq, t, e);
    if (s) return s;
    const dp_key key = key_of(p, rq);
    if (dp_cache_load(dir, DP_CACHE_TRUTH, key, part, parts_of(t, part))) {
        if (cached) *cached = 1;
        return DP_OK;
    }
    dp_truth_free(t);
    const dp_status run = dp_truth_run(p, rq, t, e);
    if (!run) dp_cache_save(dir, DP_CACHE_TRUTH, key, part, parts_of(t, part));
    return run;
}
