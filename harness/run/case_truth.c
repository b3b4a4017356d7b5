/* Which truth judges a case, and its audit. */
#include "harness/record/run.h"
#include "ref/files/cache.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

const char *const dp_truth_pick_names[DP_NTRUTH_PICKS] = {"auto", "mpfr", "dd"};

/* Entries of states that the recurrence passes through, an adjoint step counted as three more. MPFR
 * does about 4e6 a second on a core. */
static double steps(const dp_problem *p, const dp_truth_request *rq) {
    return (double)p->T * p->HV * p->K *
           (p->V * (rq->backward ? 4.0 : 1.0) + (rq->want_M ? p->K : 0));
}
#define MPFR_STEPS 1e7 /* auto: MPFR up to here, some 2.5 seconds of one core */

static int judges_fp64(const dp_case *c) {
    for (int i = 0; i < c->nbase; i++)
        if (c->base[i] == DP_BASE_FP64) return 1;
    return 0;
}
int dp_truth_fine_for_fp64(const dp_problem *p, const dp_truth *t) {
    for (int i = 0; i < DP_NRESULTS + 3; i++) {
        const dp_ball *b = i < DP_NRESULTS        ? &t->field[i]
                           : i == DP_NRESULTS     ? &t->S_cut
                           : i == DP_NRESULTS + 1 ? &t->dS_cut
                                                  : &t->M_seg;
        const int sum = i < DP_NRESULTS && dp_result_fields[i].kind == DP_OF_HEADS;
        const double ulps = 0x1p-58 * (sum ? sqrt((double)p->T) : 1);
        double all = 0;
        for (int64_t x = 0; x < b->rows * b->width; x++)
            all += b->hi[x] * b->hi[x];
        for (int64_t r = 0; r < b->rows; r++) {
            double row = 0;
            for (int64_t x = r * b->width; x < (r + 1) * b->width; x++)
                row += b->hi[x] * b->hi[x];
            if (!(b->rad[r] <= ulps * sqrt(row + all / (double)b->rows))) return 0;
        }
    }
    return 1;
}
#define AUDIT_COLUMNS 2
#define AUDIT_TOKENS 512 /* of each at most: a second on one core */

static dp_status audited(const dp_case *c, const dp_truth_request *rq, const char *cache,
                         const dp_truth *t, dp_truth_audit *a, dp_err *e) {
    const int64_t what[4] = {rq->kind, rq->backward, AUDIT_COLUMNS, AUDIT_TOKENS};
    const dp_key key = dp_problem_key(&c->p, what, sizeof what);
    dp_part part = {a, sizeof *a};
    uint64_t seed;
    memcpy(&seed, key.byte, sizeof seed);
    if (cache && dp_cache_load(cache, DP_CACHE_AUDIT, key, &part, 1)) return DP_OK;
    const dp_status st = dp_truth_audit_columns(&c->p, t, seed, AUDIT_COLUMNS, AUDIT_TOKENS, a, e);
    if (!st && cache) dp_cache_save(cache, DP_CACHE_AUDIT, key, &part, 1);
    return st;
}

dp_status dp_case_truth(const dp_case *c, dp_truth_request rq, dp_truth_pick pick,
                        const char *cache, dp_truth *t, dp_truth_note *note, dp_err *e) {
    *note = (dp_truth_note){0};
    if (pick == DP_PICK_DD) rq.kind = DP_TRUTH_DD;
    if (pick == DP_PICK_AUTO)
        rq.kind = steps(&c->p, &rq) > MPFR_STEPS && !dp_truth_dd_refuses(&c->p) ? DP_TRUTH_DD
                                                                                : DP_TRUTH_MPFR;
    if (rq.kind == DP_TRUTH_DD && !rq.backward) rq.device = dp_cuda_truth(&c->p);
    dp_err why = {0};
    dp_status st = dp_truth_cached(&c->p, &rq, cache, t, &note->cached, &why);
    if (!st && pick == DP_PICK_AUTO && rq.kind == DP_TRUTH_DD && judges_fp64(c) &&
        !dp_truth_fine_for_fp64(&c->p, t)) {
        dp_truth_free(t);
        rq.kind = DP_TRUTH_MPFR;
        st = dp_truth_cached(&c->p, &rq, cache, t, &note->cached, &why);
    }
    if (!st && rq.kind == DP_TRUTH_DD) {
        note->device = rq.device && !note->cached ? dp_cuda_device() : NULL;
        st = audited(c, &rq, cache, t, &note->audit, &why);
        if (st) dp_truth_free(t);
    }
    return st ? dp_fail(e, st, "%s: %s", c->path, why.msg) : DP_OK;
}
