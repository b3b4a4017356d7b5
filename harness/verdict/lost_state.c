/* A state that a wrong row lacks: see lost_state.h. */
#include "lost_state.h"
#include "ref/arithmetic/elementary.h"
#include "ref/bound/drop.h"
#include "ref/chunk/gate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

int dp_lost_state_find(const dp_problem *p, int field, const dp_row *row, const double *got,
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
