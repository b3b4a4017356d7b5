#include "source.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"
#include "ref/inputs/inputs.h"
#include "ref/vocabulary/context.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define PLACES 8 /* wrong (rank, head) looked at */
#define LOOK \
    64 /* wrong rows looked at in each; two values in one row are looked for in a quarter of them \
        */

dp_source_kind dp_source_kind_of(const char *t) {
    static const struct {
        const char *name;
        dp_source_kind kind;
    } k[] = {{"o", DP_ROWS_OF_V},
             {"final_state", DP_STATES_OF_V},
             {"S_in", DP_STATES_OF_V},
             {"H", DP_STATES_OF_V},
             {"dS_out", DP_STATES_OF_DO},
             {"dH", DP_STATES_OF_DO},
             {"ds0", DP_STATES_OF_DO},
             {"M", DP_DECAYS},
             {"dM", DP_DECAYS}};
    for (size_t i = 0; i < sizeof k / sizeof *k; i++)
        if (!strcmp(t, k[i].name)) return k[i].kind;
    return DP_ROWS;
}

/* ---- rows by content ------------------------------------------------------------------------- */

typedef struct {
    uint64_t hash;
    int64_t i;
} entry;
typedef struct {
    int64_t n;
    entry *at;
} book;

static int by_hash(const void *a, const void *b) {
    const entry *x = a, *y = b;
    return x->hash != y->hash ? (x->hash > y->hash) - (x->hash < y->hash)
                              : (x->i > y->i) - (x->i < y->i);
}

static int nonzero(const double *x, int64_t n) {
    int m = 0;
    for (int64_t i = 0; i < n; i++)
        m += x[i] != 0;
    return m;
}

static int equal(const double *a, const double *b, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (a[i] != b[i]) return 0;
    return 1;
}

/* -0 and 0 are one number; with scale the row is first divided by its first entry that is not zero,
 * a power of two times a small integer. */
static uint64_t hash(const double *x, int64_t n, int scale, double *lead) {
    double y[n];
    *lead = 0;
    for (int64_t i = 0; i < n && *lead == 0; i++)
        *lead = x[i];
    for (int64_t i = 0; i < n; i++)
        y[i] = (scale && *lead != 0 ? x[i] / *lead : x[i]) + 0.0;
    return XXH3_64bits(y, sizeof y);
}

static const entry *lookup(const book *b, uint64_t h) { /* the first with that hash */
    int64_t lo = 0, hi = b->n;
    while (lo < hi) {
        const int64_t m = (lo + hi) / 2;
        if (b->at[m].hash < h)
            lo = m + 1;
        else
            hi = m;
    }
    return lo < b->n && b->at[lo].hash == h ? &b->at[lo] : NULL;
}

/* ---- the values ------------------------------------------------------------------------------ */

typedef struct {
    const double *row;
    int64_t token;
    int head, sequence;
} atom;           /* token -1: a row of the initial state */
#define WINDOW 24 /* entries of v that name where they stand, wherever a row begins */
typedef struct {
    const dp_problem *p;
    int N;
    int64_t n;
    atom *atom;
    double *s0;
    book book, window;
} values;
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

static void values_open(const dp_problem *p, int N, values *w) {
    const int64_t nv = p->T * p->HV * p->R, ns = p->s0 ? (int64_t)p->Nseq * p->HV : 0;
    *w = (values){.p = p,
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
            if (nonzero(s + (int64_t)a * p->V, p->V))
                w->atom[w->n++] =
                    (atom){s + (int64_t)a * p->V, -1, (int)(i % p->HV), (int)(i / p->HV)};
    }
    w->book.at = dp_calloc((size_t)w->n, sizeof *w->book.at);
    for (; w->book.n < w->n; w->book.n++) {
        double lead;
        w->book.at[w->book.n] = (entry){hash(w->atom[w->book.n].row, p->V, 1, &lead), w->book.n};
    }
    qsort(w->book.at, (size_t)w->book.n, sizeof *w->book.at, by_hash);
    if (p->V < WINDOW) return;
    w->window.at = dp_calloc((size_t)(nv * p->V), sizeof *w->window.at);
    for (; w->window.n <= nv * p->V - WINDOW; w->window.n++) {
        double lead;
        w->window.at[w->window.n] =
            (entry){hash(p->v + w->window.n, WINDOW, 1, &lead), w->window.n};
    }
    qsort(w->window.at, (size_t)w->window.n, sizeof *w->window.at, by_hash);
}

static void values_close(values *w) {
    free(w->atom);
    free(w->s0);
    free(w->book.at);
    free(w->window.at);
}

static int power_of_two(double f) { return fabs(frexp(f, &(int){0})) == 0.5; }

/* The one row of v or s0 that this is, up to a power of two; -1: none, or more than one. */
static int64_t single(const values *w, const double *row) {
    double lead;
    const entry *x = lookup(&w->book, hash(row, w->p->V, 1, &lead));
    if (!x || lead == 0 || (x + 1 < w->book.at + w->book.n && x[1].hash == x->hash)) return -1;
    const double *a = w->atom[x->i].row;
    double f = 0;
    for (int i = 0; i < w->p->V && f == 0; i++)
        if (a[i] != 0) f = row[i] / a[i];
    return power_of_two(f) ? x->i : -1;
}

/* The row of v that the first or last entries come from when they were read from an offset inside
 * rows. */
static int64_t spliced(const values *w, const double *row) {
    for (int at = 0; w->window.n && at <= w->p->V - WINDOW;
         at += w->p->V > WINDOW ? w->p->V - WINDOW : WINDOW) {
        double lead;
        const entry *x = lookup(&w->window, hash(row + at, WINDOW, 1, &lead));
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

static reading read_row(const values *w, const double *row, double unit, int two) {
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

/* What stands in `got` and should not: an atom, -1: nothing of that kind. *want: what should and
 * does not, -1: none. */
static int64_t intruder(const values *w, const double *got, const double *want, double unit,
                        int two, int64_t *missing) {
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
    return t.n || !nonzero(want, w->p->V) ? in : -1;
}

/* ---- counting sources ------------------------------------------------------------------------ */

typedef struct {
    dp_source_place from;
    int rows;
    int64_t token, for_token, shift;
    int for_rank, for_head, distinct;
    uint64_t seen[3];
} candidate; /* token: an example's own */
typedef struct {
    int n;
    candidate at[64];
} tally;

static void note_content(candidate *c, uint64_t content) {
    for (int i = 0; i < c->distinct; i++)
        if (c->seen[i] == content) return;
    if (c->distinct < 3) c->seen[c->distinct++] = content;
}

/* shift: rows of one source lie that many tokens away. content: of the row. */
static void count(tally *t, dp_source_place from, int64_t token, dp_source_place instead,
                  int64_t shift, uint64_t content) {
    for (int i = 0; i < t->n; i++) {
        const dp_source_place *x = &t->at[i].from;
        if (x->rank == from.rank && x->head == from.head && x->sequence == from.sequence &&
            t->at[i].shift == shift) {
            t->at[i].rows++;
            note_content(&t->at[i], content);
            return;
        }
    }
    if (t->n < 64)
        t->at[t->n++] = (candidate){.from = from,
                                    .rows = 1,
                                    .token = token,
                                    .for_token = instead.token,
                                    .shift = shift,
                                    .for_rank = instead.rank,
                                    .for_head = instead.head,
                                    .distinct = 1,
                                    .seen = {content}};
}

static const candidate *most(const tally *t) {
    const candidate *best = NULL;
    for (int i = 0; i < t->n; i++)
        if (!best || t->at[i].rows > best->rows) best = &t->at[i];
    return best;
}

static int wrong(const dp_compare_in *in, int64_t row) {
    return !equal(in->got + row * in->width, in->want + row * in->width, in->width);
}

static dp_source_place place(const dp_compare_in *in, int64_t row) {
    dp_place at;
    in->place(in->ctx, row, &at);
    return (dp_source_place){at.rank, at.head, at.sequence, at.token};
}

static int place_text(char *s, size_t n, const dp_problem *p, dp_source_place x) {
    int k = snprintf(s, n, "rank %d, head %d", x.rank, x.head);
    if (p->Nseq > 1 && x.sequence >= 0)
        k += snprintf(s + k, n - (size_t)k, ", sequence %d", x.sequence);
    return k;
}

static int enough(int rows, int of) { return rows >= 2 && 4 * rows >= of; }

/* ---- the readings: each returns 1 when it has found the source of the wrong rows at one place  */

typedef struct {
    const dp_problem *p;
    const dp_compare_in *in;
    const int64_t *row;
    int n;
    dp_source *out;
} wrong_rows; /* of one place */

static int whole_rows(const wrong_rows *x, const book *truth) {
    const dp_compare_in *in = x->in;
    const int matrix = place(in, x->row[0]).token < 0;
    tally t = {0};
    char a[96], b[96];
    double lead;
    if (in->width < 8) return 0; /* few numbers coincide by chance */
    for (int i = 0; i < x->n; i++) {
        const double *got = in->got + x->row[i] * in->width;
        const dp_source_place at = place(in, x->row[i]);
        const uint64_t h = hash(got, in->width, 0, &lead);
        int n = 0;
        if (nonzero(got, in->width) < 3) continue;
        for (const entry *e = lookup(truth, h); e && e < truth->at + truth->n && n++ < 16; e++) {
            if (!equal(got, in->want + e->i * in->width, in->width)) break;
            const dp_source_place from = place(in, e->i);
            count(&t, from, at.token, at, at.token - from.token, h);
        }
    }
    const candidate *c = most(&t);
    if (!c || !(matrix ? c->rows == x->n : enough(c->rows, x->n) && c->distinct == 3)) return 0;
    x->out->at = place(in, x->row[0]);
    x->out->from = c->from;
    x->out->rows = c->rows;
    x->out->of = x->n;
    place_text(a, sizeof a, x->p, x->out->at);
    place_text(b, sizeof b, x->p, c->from);
    if (matrix)
        snprintf(x->out->says, sizeof x->out->says, "%s of %s holds what %s should", in->name, a,
                 b);
    else
        snprintf(x->out->says, sizeof x->out->says,
                 "%s of %s holds what %s should (token %lld: that of %lld; %d of %d wrong rows)",
                 in->name, a, b, (long long)c->token, (long long)c->from.token, c->rows, x->n);
    return 1;
}

static dp_source_place place_of(const values *w, const atom *a) {
    const int64_t t = a->token >= 0                     ? a->token
                      : w->p->cu[a->sequence] < w->p->T ? w->p->cu[a->sequence]
                                                        : w->p->T - 1;
    return (dp_source_place){(int)(t / (w->p->T / w->N)), a->head, a->sequence, a->token};
}

static int whose_values(const wrong_rows *x, const values *w, int states) {
    const dp_compare_in *in = x->in;
    const dp_problem *p = x->p;
    const int per = states ? p->K : 1;
    double *got = dp_doubles((int64_t)p->K * p->V), *want = dp_doubles((int64_t)p->K * p->V);
    tally t = {0};
    int of = 0;
    char a[96], b[96], of_token[48] = "", instead[96] = "";
    for (int i = 0; i < x->n && of < LOOK; i++) {
        const double *g = in->got + x->row[i] * in->width, *r = in->want + x->row[i] * in->width;
        if (states) {
            to_basis(p, g, got);
            to_basis(p, r, want);
            g = got;
            r = want;
        }
        for (int k = 0; k < per; k++) {
            int64_t missing;
            if (equal(g + (int64_t)k * p->V, r + (int64_t)k * p->V, p->V)) continue;
            const int64_t found = intruder(w, g + (int64_t)k * p->V, r + (int64_t)k * p->V,
                                           states ? 1 : p->scale, of % 4 == 0, &missing);
            of++;
            if (found < 0) continue;
            count(&t, place_of(w, &w->atom[found]), place(in, x->row[i]).token,
                  missing < 0 ? (dp_source_place){-1, -1, -1, -1} : place_of(w, &w->atom[missing]),
                  0, 0);
        }
    }
    free(got);
    free(want);
    const candidate *c = most(&t);
    if (!c || !enough(c->rows, of)) return 0;
    x->out->at = place(in, x->row[0]);
    x->out->from = c->from;
    x->out->rows = c->rows;
    x->out->of = of;
    place_text(a, sizeof a, p, x->out->at);
    place_text(b, sizeof b, p, c->from);
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

/* Numbers of a gradient of the state lie around 2^dp_inputs_exact_log2_do of their sequence; 9
 * places to the next. */
static int whose_exponents(const wrong_rows *x) {
    const dp_compare_in *in = x->in;
    const dp_problem *p = x->p;
    const dp_source_place at = place(in, x->row[0]);
    const int64_t L = p->T / in->N;
    if (p->Nseq < 2) return 0;
    int wrong_of[3] = {0}, right_of[3] = {0}, n = 0, from = -1, own = -1, name = -1, several = 0;
    for (int64_t i = 0; i < in->width; i++) {
        const double v[2] = {in->got[x->row[0] * in->width + i],
                             in->want[x->row[0] * in->width + i]};
        for (int k = 0; k < 2; k++) {
            if (!isfinite(v[k]) || v[k] == 0 || (k == 0 && v[0] == v[1])) continue;
            const int e = ilogb(v[k]) - dp_inputs_exact_log2_do(p, 0, at.head) + 4;
            if (e >= 0 && e < 27) {
                (k ? right_of : wrong_of)[e / 9]++;
                n += !k;
            }
        }
    }
    for (int k = 0; k < 3; k++) {
        if (right_of[k] > 0 && (own < 0 || right_of[k] > right_of[own])) own = k;
        if (enough(wrong_of[k], n) && (from < 0 || wrong_of[k] > wrong_of[from])) from = k;
    }
    if (from < 0 || own < 0 || from == own) return 0;
    for (int s = 0; s < p->Nseq; s++) /* which of the rank's own sequences has those numbers */
        if (p->cu[s + 1] > p->cu[s] && p->cu[s] < (at.rank + 1) * L && p->cu[s + 1] > at.rank * L &&
            s % 3 == from) {
            several += name >= 0;
            name = s;
        }
    if (name < 0 || several) return 0;
    char a[96];
    x->out->at = at, x->out->from = (dp_source_place){at.rank, at.head, name, -1};
    x->out->rows = wrong_of[from];
    x->out->of = n;
    place_text(a, sizeof a, p, at);
    snprintf(x->out->says, sizeof x->out->says,
             "%s of %s holds numbers of sequence %d (%d of %d wrong entries)", in->name, a, name,
             wrong_of[from], n);
    return 1;
}

/* ---- decays ---------------------------------------------------------------------------------- */

typedef struct {
    int K, V, c;
    double *F, *e, *H, *dH;
} factors; /* of c chunks: F [c][K][K], e [c][K] decay to the chunk's end, what it adds to S and dS
              [c][K][V] */

/* X [K][n] <- X minus the part along a token's keys, times beta; they do not see each other. */
static void project(const dp_problem *p, int64_t t, int hv, int n, double *X) {
    const int K = p->K, R = p->R;
    double *D = dp_doubles((int64_t)K * n), *y = dp_doubles(n);
    for (int r = 0; r < R; r++) {
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

static void one_chunk(const dp_problem *p, int64_t t0, int64_t t1, int hv, double *F, double *e,
                      double *H, double *dH) {
    const int K = p->K, V = p->V, R = p->R;
    for (int x = 0; x < K; x++)
        F[(int64_t)x * K + x] = e[x] = 1;
    for (int64_t t = t0; t < t1; t++) {
        for (int x = 0; x < K; x++)
            e[x] *= decay(p, t, hv, x);
        scale_rows(p, t, hv, K, F);
        project(p, t, hv, K, F);
        scale_rows(p, t, hv, V, H);
        project(p, t, hv, V, H);
        for (int r = 0; r < R; r++)
            for (int x = 0; x < K; x++)
                for (int v = 0; v < V; v++)
                    H[(int64_t)x * V + v] += p->beta[(t * p->HV + hv) * R + r] *
                                             p->k[((t * p->H + hv / dp_G(p)) * R + r) * K + x] *
                                             p->v[((t * p->HV + hv) * R + r) * V + v];
    }
    for (int64_t t = t1 - 1; t >= t0 && p->dout; t--) {
        for (int x = 0; x < K; x++)
            for (int v = 0; v < V; v++)
                dH[(int64_t)x * V + v] += p->scale * p->q[(t * p->H + hv / dp_G(p)) * K + x] *
                                          p->dout[(t * p->HV + hv) * V + v];
        project(p, t, hv, V, dH);
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

static void factors_free(factors *f) { free(f->F), free(f->e), free(f->H), free(f->dH); }

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

/* limit: how many places may decay alike and all be named. */
static int whose_decays(const wrong_rows *x, int back, int state, int limit) {
    const dp_problem *p = x->p;
    const dp_compare_in *in = x->in;
    const dp_source_place at = place(in, x->row[0]);
    dp_context c, d;
    dp_source_place from = {-1, -1, -1, -1};
    char also[128] = "";
    int found = 0, n = 0;
    if (dp_context_build(p->cu, p->Nseq, in->N, at.rank, &c, NULL)) return 0;
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
                dp_context_build(p->cu, p->Nseq, in->N, r, &d, NULL))
                continue;
            factors other = chunk_factors(p, &d, back ? 0 : d.nlocal - 1, d.nlocal, h);
            if (other.c >= own.c) {
                product(&own, other.e, back, state, X);
                if (equal(X, in->got + x->row[0] * in->width, in->width) && found++ < limit) {
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
             "%s of rank %d, head %d is what the decays of %s make", in->name, at.rank, at.head,
             also);
    return 1;
}

/* ---- all places ------------------------------------------------------------------------------ */

static int nothing_there(const wrong_rows *x) {
    const dp_compare_in *in = x->in;
    const int cols = dp_source_kind_of(in->name) == DP_STATES_OF_V ||
                             dp_source_kind_of(in->name) == DP_STATES_OF_DO
                         ? x->p->V
                         : (int)in->width;
    int64_t zero = 0, nan = 0, n = 0;
    int lo = cols, hi = -1;
    char a[96], in_columns[48] = "";
    for (int i = 0; i < x->n; i++)
        for (int64_t z = x->row[i] * in->width; z < (x->row[i] + 1) * in->width; z++) {
            if (in->got[z] == in->want[z]) continue;
            const int c = (int)(z % in->width % cols);
            n++;
            zero += in->got[z] == 0;
            nan += isnan(in->got[z]) != 0;
            if (c < lo) lo = c;
            if (c > hi) hi = c;
        }
    if (n < 8 || (zero < n && nan < n)) return 0;
    x->out->at = place(in, x->row[0]);
    x->out->nothing = 1;
    place_text(a, sizeof a, x->p, x->out->at);
    if (hi - lo + 1 <= cols / 2)
        snprintf(in_columns, sizeof in_columns, " and in columns %d to %d", lo, hi);
    snprintf(x->out->says, sizeof x->out->says,
             "what is wrong in %s of %s is %s everywhere%s (%lld entries)", in->name, a,
             zero == n ? "zero" : "NaN", in_columns, (long long)n);
    return 1;
}

void dp_source_find(const dp_problem *p, const dp_compare_in *in, dp_source *out) {
    const dp_source_kind kind = dp_source_kind_of(in->name);
    const dp_source_place none = {-1, -1, -1, -1};
    struct {
        int n;
        int64_t row[LOOK];
    } *at = dp_calloc(PLACES, sizeof *at);
    book truth = {0};
    values w = {0};
    double lead;
    int places = 0, open = 0;
    *out = (dp_source){.at = none, .from = none};
    for (int64_t i = 0; i < in->rows; i++) {
        if (!wrong(in, i)) continue;
        const dp_source_place x = place(in, i);
        int z = 0;
        for (; z < places; z++) {
            const dp_source_place y = place(in, at[z].row[0]);
            if (y.rank == x.rank && y.head == x.head && y.sequence == x.sequence) break;
        }
        if (z == places && places < PLACES) places++;
        if (z < places && at[z].n < LOOK) at[z].row[at[z].n++] = i;
    }
    if (!places) goto done;
    truth.at = dp_calloc((size_t)in->rows, sizeof *truth.at);
    for (; truth.n < in->rows; truth.n++)
        truth.at[truth.n] =
            (entry){hash(in->want + truth.n * in->width, in->width, 0, &lead), truth.n};
    qsort(truth.at, (size_t)truth.n, sizeof *truth.at, by_hash);
    for (int step = 0; step < 4 && !out->says[0]; step++) /* what names one source first */
        for (int z = 0; z < places && !out->says[0]; z++) {
            const wrong_rows x = {p, in, at[z].row, at[z].n, out};
            const int back = in->name[0] == 'd', chain = kind == DP_DECAYS ||
                                                         !strcmp(in->name, "H") ||
                                                         !strcmp(in->name, "dH");
            if (step == 0)
                whole_rows(&x, &truth);
            else if (step == 3)
                nothing_there(&x);
            else if (step == 1 && (kind == DP_ROWS_OF_V || kind == DP_STATES_OF_V)) {
                if (!open++) values_open(p, in->N, &w);
                whose_values(&x, &w, kind == DP_STATES_OF_V);
            }
            if (!out->says[0] && chain && (step == 1 || step == 2))
                whose_decays(&x, back, kind != DP_DECAYS, step == 1 ? 1 : 3);
            if (!out->says[0] && step == 2 && kind == DP_STATES_OF_DO) whose_exponents(&x);
        }
done:
    if (open) values_close(&w);
    free(truth.at);
    free(at);
}
