/* The last stage of the gate's backward, judged by itself: sums of the subject's own dg. */
#include "sums.h"
#include "ref/bound/bound.h"
#include "ref/chunk/gate.h"
#include "ref/vocabulary/design.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A sum to about twice fp64's precision (Neumaier), and what its rounding in other arithmetic may
 * be. */
typedef struct {
    double sum, rest;
    double terms2, running2; /* sums of squares of terms and of running sums */
    double lost;             /* what may be gone of terms below what their format holds in full */
} running_sum;

static void add(running_sum *s, double y, double lost) {
    s->lost += lost;
    const double t = s->sum + y;
    s->rest += fabs(s->sum) >= fabs(y) ? (s->sum - t) + y : (y - t) + s->sum;
    s->sum = t;
    s->terms2 += y * y;
    s->running2 += t * t;
}

/* own: what storing the sum itself may take, relative. */
static double limit_of(const running_sum *s, double u, double own, double a) {
    const double each = u + 8 * a;
    const double random = sqrt(each * each * s->terms2 + a * a * s->running2);
    return DP_LAMBDA * random + (16 * a + own) * fabs(s->sum) + s->lost;
}

/* A format that numbers are stored in: its unit roundoff, and the loss of a number below those that
 * it holds in full. The loss comes from rounding or, where fp32 is flushed to zero, from that. */
typedef struct {
    dp_format format;
    double u, tiny;
} store;

/* The narrowest one that holds every number. */
static store storage(const double *x, int64_t n) {
    static const store stores[] = {
        {DP_BF16, 0x1p-8, 0x1p-126}, {DP_FP16, 0x1p-11, 0x1p-25}, {DP_FP32, 0x1p-24, 0x1p-126}};
    for (size_t i = 0; i < sizeof stores / sizeof *stores; i++) {
        int64_t at = 0;
        while (at < n && (isnan(x[at]) || dp_store(stores[i].format, x[at]) == x[at]))
            at++;
        if (at == n) return stores[i];
    }
    return (store){DP_FP64, 0x1p-53, 0x1p-1022};
}

typedef struct {
    double over; /* |difference| over its limit */
    double got, want, off, limit;
    int64_t row;         /* a head, or a head and channel */
    double limit2, sum2; /* over all sums */
} worst_sum;

static void hold(const running_sum *s, double got, double u, double own, double a, int64_t row,
                 worst_sum *w) {
    const double off = fabs((got - s->sum) - s->rest);
    const double limit = limit_of(s, u, own, a);
    const double over = off == 0 ? 0 : off / limit;
    w->limit2 += limit * limit;
    w->sum2 += s->sum * s->sum;
    if (!isfinite(s->sum) || !isfinite(got) || over <= w->over) return;
    *w = (worst_sum){over, got, s->sum + s->rest, off, limit, row, w->limit2, w->sum2};
}

/* A sum that no other limit sees passes as the sum of terms that were judged. */
static void pass(dp_judgement *j, const worst_sum *w) {
    if (!j || j->verdict != DP_UNJUDGED || !(4 * w->limit2 < w->sum2)) return;
    j->verdict = DP_PASS;
    j->tier = "sum";
    j->times = w->over;
    j->seen = 1 + sqrt(w->limit2 / w->sum2);
    j->why[0] = 0;
}

static void fail(dp_judgement *j, const worst_sum *w, int channels) {
    if (!j || j->verdict == DP_FAIL || !(w->over > 1)) return;
    j->verdict = DP_FAIL;
    j->tier = "sum";
    j->times = w->over;
    j->failed = (dp_row){.at = {.rank = 0,
                                .head = (int)(w->row / channels),
                                .sequence = -1,
                                .chunk = -1,
                                .token = -1},
                         .index = (int)(w->row % channels),
                         .got = w->got,
                         .want = w->want,
                         .err = w->off,
                         .bound = w->limit,
                         .size = fabs(w->want)};
    snprintf(j->why, sizeof j->why,
             "not the sum of the dg beside it: the difference is %.3g, rounding explains %.3g",
             w->off, w->limit);
}

void dp_sums_judge(const dp_sums_in *in) {
    const dp_problem *p = in->p;
    const double *x = in->got->dg;
    const int Kg = dp_Kg(p);
    if (!in->dg || in->dg->verdict != DP_PASS || p->gate == DP_GATE_LOG) return;
    const store held = storage(x, p->T * p->HV * Kg);
    const double tiny = fmax(held.tiny, in->tiny_dg);
    const double u = held.u;
    const double a = in->arithmetic;
    const double own_bias = in->ddt_bias ? storage(in->got->ddt_bias, (int64_t)p->HV * Kg).u : 0;
    const double own_A = in->dA_log ? storage(in->got->dA_log, p->HV).u : 0;
    worst_sum A = {.over = 0};
    worst_sum bias = {.over = 0};
    for (int hv = 0; hv < p->HV; hv++) {
        running_sum all = {.lost = in->tiny_dA_log};
        for (int c = 0; c < Kg; c++) {
            running_sum channel = {.lost = in->tiny_ddt_bias};
            for (int64_t t = 0; t < p->T; t++) {
                const int64_t at = (t * p->HV + hv) * Kg + c;
                const double ratio = dp_gate_ratio(p, at);
                add(&channel, x[at], tiny);
                add(&all, x[at] * ratio, tiny * fabs(ratio));
            }
            if (in->ddt_bias)
                hold(&channel, in->got->ddt_bias[hv * Kg + c], u, own_bias, a, (int64_t)hv * Kg + c,
                     &bias);
        }
        if (in->dA_log) hold(&all, in->got->dA_log[hv], u, own_A, a, hv, &A);
    }
    fail(in->ddt_bias, &bias, Kg);
    fail(in->dA_log, &A, 1);
    pass(in->ddt_bias, &bias);
    pass(in->dA_log, &A);
}
