/* The source of values: rows of v and of the initial state found in wrong rows of o and of
 * states. */
#include "ref/inputs/inputs.h"
#include "source_parts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const double *row;
    int64_t token;
    int head, sequence;
} atom;           /* token -1: a row of the initial state */
#define WINDOW 24 /* entries of v that name where they stand, wherever a row begins */
struct dp_source_values {
    const dp_problem *p;
    int N;
    int64_t n;
    atom *atom;
    double *s0;
    dp_source_book book, window;
};
typedef struct {
    int n;
    int64_t atom[2];
} reading; /* n 0: unread or zero */

static int sequence_of(const dp_problem *p, int64_t t) {
    int i = 0;
    while (i < p->Nseq - 1 && p->cu[i + 1] <= t)
        i++;
    return i;
}

/* Rows of a state by basis vector: s_a = sum_x basis(a, x) S[x]. */
static void to_basis(const dp_problem *p, const double *S, double *out) {
    memset(out, 0, sizeof *out * (size_t)p->K * p->V);
    for (int a = 0; a < p->K; a++)
        for (int x = 0; x < p->K; x++) {
            const double b = dp_inputs_exact_basis(p->K, a, x);
            for (int v = 0; v < p->V && b != 0; v++)
                out[(int64_t)a * p->V + v] += b * S[(int64_t)x * p->V + v];
        }
}

/* Reads every window of entries of v, wherever a row begins. */
static void open_windows(dp_source_values *w) {
    const dp_problem *p = w->p;
    const int64_t n = p->T * p->HV * p->R * p->V;
    w->window.at = dp_calloc((size_t)n, sizeof *w->window.at);
    for (; w->window.n <= n - WINDOW; w->window.n++) {
        double lead;
        w->window.at[w->window.n] =
            (dp_source_row){dp_source_hash(p->v + w->window.n, WINDOW, 1, &lead), w->window.n};
    }
    qsort(w->window.at, (size_t)w->window.n, sizeof *w->window.at, dp_source_by_hash);
}

dp_source_values *dp_source_values_open(const dp_problem *p, int N) {
    const int64_t nv = p->T * p->HV * p->R, ns = p->s0 ? (int64_t)p->Nseq * p->HV : 0;
    dp_source_values *w = dp_calloc(1, sizeof *w);
    *w = (dp_source_values){.p = p,
                            .N = N,
                            .atom = dp_calloc((size_t)(nv + ns * p->K), sizeof *w->atom),
                            .s0 = dp_doubles(ns * p->K * p->V)};
    for (int64_t i = 0; i < nv; i++)
        w->atom[w->n++] = (atom){p->v + i * p->V, i / (p->HV * p->R), (int)(i / p->R % p->HV),
                                 sequence_of(p, i / (p->HV * p->R))};
    for (int64_t i = 0; i < ns; i++) {
        double *s = w->s0 + i * p->K * p->V;
        to_basis(p, p->s0 + i * p->K * p->V, s);
        for (int a = 0; a < p->K; a++)
            if (dp_source_nonzero(s + (int64_t)a * p->V, p->V))
                w->atom[w->n++] =
                    (atom){s + (int64_t)a * p->V, -1, (int)(i % p->HV), (int)(i / p->HV)};
    }
    w->book.at = dp_calloc((size_t)w->n, sizeof *w->book.at);
    for (; w->book.n < w->n; w->book.n++) {
        double lead;
        w->book.at[w->book.n] =
            (dp_source_row){dp_source_hash(w->atom[w->book.n].row, p->V, 1, &lead), w->book.n};
    }
    qsort(w->book.at, (size_t)w->book.n, sizeof *w->book.at, dp_source_by_hash);
    if (p->V >= WINDOW) open_windows(w);
    return w;
}

void dp_source_values_close(dp_source_values *w) {
    if (!w) return;
    free(w->atom);
    free(w->s0);
    free(w->book.at);
    free(w->window.at);
    free(w);
}

static int power_of_two(double f) { return fabs(frexp(f, &(int){0})) == 0.5; }

/* The one row of v or s0 that this is, up to a power of two; -1: none, or more than one. */
static int64_t single(const dp_source_values *w, const double *row) {
    double lead;
    const dp_source_row *x = dp_source_lookup(&w->book, dp_source_hash(row, w->p->V, 1, &lead));
    if (!x || lead == 0 || (x + 1 < w->book.at + w->book.n && x[1].hash == x->hash)) return -1;
    const double *a = w->atom[x->i].row;
    double f = 0;
    for (int i = 0; i < w->p->V && f == 0; i++)
        if (a[i] != 0) f = row[i] / a[i];
    return power_of_two(f) ? x->i : -1;
}

/* The row of v that the first or last entries come from when they were read from an offset inside
 * rows. */
static int64_t spliced(const dp_source_values *w, const double *row) {
    for (int at = 0; w->window.n && at <= w->p->V - WINDOW;
         at += w->p->V > WINDOW ? w->p->V - WINDOW : WINDOW) {
        double lead;
        const dp_source_row *x =
            dp_source_lookup(&w->window, dp_source_hash(row + at, WINDOW, 1, &lead));
        if (x && lead != 0 && !(x + 1 < w->window.at + w->window.n && x[1].hash == x->hash) &&
            power_of_two(lead / w->p->v[x->i]))
            return x->i / w->p->V;
    }
    return -1;
}

static int v_like(const double *x, int n) { /* magnitudes m and 2m */
    double lo = INFINITY, hi = 0;
    for (int i = 0; i < n; i++) {
        const double a = fabs(x[i]);
        if (a < lo) lo = a;
        if (a > hi) hi = a;
        if (lo == 0 || hi > 2 * lo) return 0;
    }
    return hi <= 2 * lo;
}

static reading read_row(const dp_source_values *w, const double *row, double unit, int two) {
    static const double coef[] = {1, -1, 0.5, -0.5};
    const int V = w->p->V;
    double rest[V];
    for (int i = 0; i < V; i++)
        if (!isfinite(row[i])) return (reading){0};
    const int64_t one = single(w, row);
    if (one >= 0) return (reading){1, {one}};
    const int64_t part = spliced(w, row);
    if (part >= 0) return (reading){1, {part}};
    for (int64_t a = 0; a < w->n && two; a++)
        for (int c = 0; c < 4; c++) {
            const double f = coef[c] * unit, *x = w->atom[a].row;
            int i = 0;
            for (; i < V; i++) {
                rest[i] = row[i] - f * x[i];
                if (i == 3 && !v_like(rest, 4)) break;
            }
            if (i < V || !v_like(rest, V)) continue;
            const int64_t b = single(w, rest);
            if (b >= 0 && b != a) return (reading){2, {a, b}};
        }
    return (reading){0};
}

/* The wrong atom in `got`; -1: nothing of that kind. *want: the missing one, -1: none. */
static int64_t intruder(const dp_source_values *w, const double *got, const double *want,
                        double unit, int two, int64_t *missing) {
    const reading g = read_row(w, got, unit, two), t = read_row(w, want, unit, two);
    int64_t in = -1;
    *missing = -1;
    for (int i = 0; i < g.n; i++) {
        int known = 0;
        for (int k = 0; k < t.n; k++)
            known |= t.atom[k] == g.atom[i];
        if (!known && in < 0) in = g.atom[i];
    }
    for (int k = 0; k < t.n; k++) {
        int known = 0;
        for (int i = 0; i < g.n; i++)
            known |= t.atom[k] == g.atom[i];
        if (!known && *missing < 0) *missing = t.atom[k];
    }
    return t.n || !dp_source_nonzero(want, w->p->V) ? in : -1;
}

static dp_source_place place_of(const dp_source_values *w, const atom *a) {
    const int64_t t = a->token >= 0                     ? a->token
                      : w->p->cu[a->sequence] < w->p->T ? w->p->cu[a->sequence]
                                                        : w->p->T - 1;
    return (dp_source_place){dp_own_part_of(w->p->own.kind, w->p->T, w->N, t), a->head, a->sequence,
                             a->token};
}

int dp_source_whose_values(const dp_wrong_rows *x, const dp_source_values *w, int states) {
    const dp_compare_in *in = x->in;
    const dp_problem *p = x->p;
    const int per = states ? p->K : 1;
    double *got = dp_doubles((int64_t)p->K * p->V), *want = dp_doubles((int64_t)p->K * p->V);
    dp_source_tally t = {0};
    int of = 0;
    char a[96], b[96], of_token[48] = "", instead[96] = "";
    for (int i = 0; i < x->n && of < DP_SOURCE_LOOK; i++) {
        const double *g = in->got + x->row[i] * in->width, *r = in->want + x->row[i] * in->width;
        if (states) {
            to_basis(p, g, got);
            to_basis(p, r, want);
            g = got;
            r = want;
        }
        for (int k = 0; k < per; k++) {
            int64_t missing;
            if (dp_source_equal(g + (int64_t)k * p->V, r + (int64_t)k * p->V, p->V)) continue;
            const int64_t found = intruder(w, g + (int64_t)k * p->V, r + (int64_t)k * p->V,
                                           states ? 1 : p->scale, of % 4 == 0, &missing);
            of++;
            if (found < 0) continue;
            dp_source_count(
                &t, place_of(w, &w->atom[found]), dp_source_place_at(in, x->row[i]).token,
                missing < 0 ? (dp_source_place){-1, -1, -1, -1} : place_of(w, &w->atom[missing]), 0,
                0);
        }
    }
    free(got);
    free(want);
    const dp_source_candidate *c = dp_source_most(&t);
    if (!c || !dp_source_enough(c->rows, of)) return 0;
    x->out->at = dp_source_place_at(in, x->row[0]);
    x->out->from = c->from;
    x->out->rows = c->rows;
    x->out->of = of;
    dp_source_place_text(a, sizeof a, p, x->out->at);
    dp_source_place_text(b, sizeof b, p, c->from);
    if (c->from.token >= 0)
        snprintf(of_token, sizeof of_token, " (token %lld)", (long long)c->from.token);
    else
        snprintf(of_token, sizeof of_token, " (initial state)");
    if (c->for_token >= 0)
        snprintf(instead, sizeof instead, " where rank %d, head %d (token %lld) should stand",
                 c->for_rank, c->for_head, (long long)c->for_token);
    snprintf(x->out->says, sizeof x->out->says,
             "%s of %s holds values of %s%s%s (%d of %d wrong rows)", in->name, a, b, of_token,
             instead, c->rows, of);
    return 1;
}
