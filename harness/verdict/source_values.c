/* The source of values and of decays (source.h). Rows of v and of the initial state are found in
 * wrong rows of o and of states. M, H, dM and dH are formed anew with the decays of other ranks and
 * heads. */
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"
#include "ref/inputs/inputs.h"
#include "ref/vocabulary/context.h"
#include "source_parts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- values ---------------------------------------------------------------------------------- */

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

/* ---- decays ---------------------------------------------------------------------------------- */

typedef struct {
    int K, V, c;
    double *F, *e, *H, *dH;
} factors; /* of c chunks: F [c][K][K], e [c][K] decay to the chunk's end, what it adds to S and dS
              [c][K][V] */

/* X [K][n] <- X minus k' (erase o k) X, one key a token; back: its transpose. */
static void project_gated(const dp_problem *p, int64_t t, int hv, int n, int back, double *X) {
    const int K = p->K;
    const double *k = p->k + (t * p->H + hv / dp_G(p)) * K,
                 *erase = p->erase + (t * p->HV + hv) * K;
    for (int j = 0; j < n; j++) {
        double y = 0;
        for (int x = 0; x < K; x++)
            y += k[x] * (back ? 1 : erase[x]) * X[(int64_t)x * n + j];
        for (int x = 0; x < K; x++)
            X[(int64_t)x * n + j] -= k[x] * (back ? erase[x] : 1) * y;
    }
}

/* The value v that a token writes, as a factor. */
static double written(const dp_problem *p, int64_t t, int hv, int r, int v) {
    if (!dp_erases(p)) return 1;
    return p->beta ? p->beta[(t * p->HV + hv) * p->R + r] : p->write[(t * p->HV + hv) * p->V + v];
}

/* X [K][n] <- X minus the part along keys first .. end-1 of a token, times beta; they do not see
 * each other. */
static void project(const dp_problem *p, int64_t t, int hv, int first, int end, int n, int back,
                    double *X) {
    const int K = p->K, R = p->R;
    if (!dp_erases(p)) return;
    if (!p->beta) {
        project_gated(p, t, hv, n, back, X);
        return;
    }
    double *D = dp_doubles((int64_t)K * n), *y = dp_doubles(n);
    for (int r = first; r < end; r++) {
        const double *k = p->k + ((t * p->H + hv / dp_G(p)) * R + r) * K,
                     beta = p->beta[(t * p->HV + hv) * R + r];
        memset(y, 0, sizeof *y * (size_t)n);
        for (int x = 0; x < K; x++)
            for (int j = 0; j < n && k[x] != 0; j++)
                y[j] += k[x] * X[(int64_t)x * n + j];
        for (int x = 0; x < K; x++)
            for (int j = 0; j < n && k[x] != 0; j++)
                D[(int64_t)x * n + j] += beta * k[x] * y[j];
    }
    for (int64_t z = 0; z < (int64_t)K * n; z++)
        X[z] -= D[z];
    free(D);
    free(y);
}

static double decay(const dp_problem *p, int64_t t, int hv, int x) {
    return dp_exp(p->g[(t * p->HV + hv) * dp_Kg(p) + (dp_Kg(p) == 1 ? 0 : x)]);
}

static void scale_rows(const dp_problem *p, int64_t t, int hv, int n, double *X) {
    for (int x = 0; x < p->K; x++)
        for (int j = 0; j < n; j++)
            X[(int64_t)x * n + j] *= decay(p, t, hv, x);
}

/* H [K][V] += what keys first .. end-1 of a token write. */
static void write_keys(const dp_problem *p, int64_t t, int hv, int first, int end, double *H) {
    const int K = p->K, V = p->V, R = p->R;
    for (int r = first; r < end; r++)
        for (int x = 0; x < K; x++)
            for (int v = 0; v < V; v++)
                H[(int64_t)x * V + v] += written(p, t, hv, r, v) *
                                         p->k[((t * p->H + hv / dp_G(p)) * R + r) * K + x] *
                                         p->v[((t * p->HV + hv) * R + r) * V + v];
}

static void one_chunk(const dp_problem *p, int64_t t0, int64_t t1, int hv, double *F, double *e,
                      double *H, double *dH) {
    const int K = p->K, V = p->V, R = p->R;
    for (int x = 0; x < K; x++)
        F[(int64_t)x * K + x] = e[x] = 1;
    for (int64_t t = t0; t < t1; t++) {
        for (int x = 0; x < K; x++)
            e[x] *= decay(p, t, hv, x);
        scale_rows(p, t, hv, K, F);
        scale_rows(p, t, hv, V, H);
        for (int r = 0, n = dp_keys_at_once(p); r < R; r += n) {
            project(p, t, hv, r, r + n, K, 0, F);
            project(p, t, hv, r, r + n, V, 0, H);
            write_keys(p, t, hv, r, r + n, H);
        }
    }
    for (int64_t t = t1 - 1; t >= t0 && p->dout; t--) {
        for (int x = 0; x < K; x++)
            for (int v = 0; v < V; v++)
                dH[(int64_t)x * V + v] += p->scale * p->q[(t * p->H + hv / dp_G(p)) * K + x] *
                                          p->dout[(t * p->HV + hv) * V + v];
        for (int n = dp_keys_at_once(p), r = R - n; r >= 0; r -= n)
            project(p, t, hv, r, r + n, V, 1, dH);
        scale_rows(p, t, hv, V, dH);
    }
}

/* Chunks of a rank's local sub-sequences sub0 .. sub1-1, from the step recurrence; every operation
 * is exact here. */
static factors chunk_factors(const dp_problem *p, const dp_context *c, int sub0, int sub1, int hv) {
    factors f = {.K = p->K, .V = p->V};
    int i = 0;
    for (int s = sub0; s < sub1; s++)
        f.c += (int)((c->local_cu[s + 1] - c->local_cu[s] + DP_CHUNK - 1) / DP_CHUNK);
    const int64_t KK = (int64_t)p->K * p->K, KV = (int64_t)p->K * p->V;
    f.F = dp_doubles(f.c * KK);
    f.e = dp_doubles((int64_t)f.c * p->K);
    f.H = dp_doubles(f.c * KV);
    f.dH = dp_doubles(f.c * KV);
    for (int s = sub0; s < sub1; s++)
        for (int64_t t = c->a + c->local_cu[s], end = c->a + c->local_cu[s + 1]; t < end;
             t += DP_CHUNK, i++)
            one_chunk(p, t, t + DP_CHUNK < end ? t + DP_CHUNK : end, hv, f.F + i * KK,
                      f.e + (int64_t)i * p->K, f.H + i * KV, f.dH + i * KV);
    return f;
}

static void factors_free(factors *f) {
    free(f->F);
    free(f->e);
    free(f->H);
    free(f->dH);
}

/* M (state 0) or H (state 1), back: dM, dH, when the factors have other decays on their diagonals.
 */
static void product(const factors *f, const double *e, int back, int state, double *X) {
    const int K = f->K, n = state ? f->V : K;
    const int64_t KK = (int64_t)K * K, Kn = (int64_t)K * n;
    double *F = dp_doubles(KK), *P = dp_doubles(Kn);
    memset(X, 0, sizeof *X * (size_t)Kn);
    for (int x = 0; x < K && !state; x++)
        X[(int64_t)x * K + x] = 1;
    for (int z = 0; z < f->c; z++) {
        const int i = back ? f->c - 1 - z : z;
        memcpy(F, f->F + i * KK, sizeof *F * (size_t)KK);
        for (int x = 0; x < K; x++)
            F[(int64_t)x * K + x] += e[(int64_t)i * K + x] - f->e[(int64_t)i * K + x];
        dp_mm(DP_FP64, back, 0, K, n, K, F, X, P);
        memcpy(X, P, sizeof *X * (size_t)Kn);
        for (int64_t y = 0; y < Kn && state; y++)
            X[y] += (back ? f->dH : f->H)[i * Kn + y];
    }
    free(F);
    free(P);
}

int dp_source_whose_decays(const dp_wrong_rows *x, int back, int state, int limit) {
    const dp_problem *p = x->p;
    const dp_compare_in *in = x->in;
    const dp_source_place at = dp_source_place_at(in, x->row[0]);
    dp_context c, d;
    dp_source_place from = {-1, -1, -1, -1};
    char also[128] = "";
    int found = 0, n = 0;
    if (dp_context_of(p, in->N, at.rank, &c, NULL)) return 0;
    factors own = chunk_factors(p, &c, back ? 0 : c.nlocal - 1, back ? 1 : c.nlocal, at.head);
    double *X = dp_doubles((int64_t)p->K * (state ? p->V : p->K));
    for (int step = 0; step < 3;
         step++) /* heads of this rank, this head of other ranks, the others */
        for (int i = 0; i < in->N * p->HV; i++) {
            const int r = i / p->HV, h = i % p->HV;
            if ((r == at.rank && h == at.head) ||
                step != (r == at.rank   ? 0
                         : h == at.head ? 1
                                        : 2) ||
                dp_context_of(p, in->N, r, &d, NULL))
                continue;
            factors other = chunk_factors(p, &d, back ? 0 : d.nlocal - 1, d.nlocal, h);
            if (other.c >= own.c) {
                product(&own, other.e, back, state, X);
                if (dp_source_equal(X, in->got + x->row[0] * in->width, in->width) &&
                    found++ < limit) {
                    if (found == 1) from = (dp_source_place){r, h, -1, -1};
                    n += snprintf(also + n, sizeof also - (size_t)n, "%srank %d, head %d",
                                  found == 1 ? "" : ", or of ", r, h);
                }
            }
            factors_free(&other);
            dp_context_free(&d);
        }
    dp_context_free(&c);
    factors_free(&own);
    free(X);
    if (found < 1 || found > limit) return 0;
    x->out->at = at;
    x->out->from = from;
    x->out->rows = x->out->of = 1;
    snprintf(x->out->says, sizeof x->out->says,
             "%s of rank %d, head %d was made with the decays of %s", in->name, at.rank, at.head,
             also);
    return 1;
}
