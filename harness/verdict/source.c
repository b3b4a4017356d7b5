/* The source of wrong rows: the readings in their order, whole rows, exponents and nothing among
 * them (source.h). */
#include "source.h"
#include "harness/simulated/ranks.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"
#include "ref/bound/drop.h"
#include "ref/chunk/gate.h"
#include "ref/inputs/inputs.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/recurrence_text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define DP_SOURCE_LOOK \
    64 /* wrong rows looked at in each place; two values in one row are looked for in a quarter */

/* A row's hash and its number. */
typedef struct {
    uint64_t hash;
    int64_t i;
} dp_source_row;
/* Rows in the order of their hashes. */
typedef struct {
    int64_t n;
    dp_source_row *at;
} dp_source_book;

/* A place that rows come from, and an example of them. shift: rows of one source lie that many
 * tokens away. */
typedef struct {
    dp_source_place from;
    int rows;
    int64_t token, for_token, shift;
    int for_rank, for_head, distinct;
    uint64_t seen[3];
} dp_source_candidate; /* token: an example's own */
/* All places that were counted. */
typedef struct {
    int n;
    dp_source_candidate at[64];
} dp_source_tally;

/* Wrong rows of one place. */
typedef struct {
    const dp_problem *p;
    const dp_compare_in *in;
    const int64_t *row;
    int n;
    dp_source *out;
} dp_wrong_rows;

/* The rows of v and of the initial state, by content. */
typedef struct dp_source_values dp_source_values;

/* ---- rows by content, and the places that they come from ------------------------------------- */

/* Orders rows by hash, then number (qsort). */
static int source_by_hash(const void *a, const void *b) {
    const dp_source_row *x = a, *y = b;
    return x->hash != y->hash ? (x->hash > y->hash) - (x->hash < y->hash)
                              : (x->i > y->i) - (x->i < y->i);
}

/* How many numbers are not zero. */
static int source_nonzero(const double *x, int64_t n) {
    int m = 0;
    for (int64_t i = 0; i < n; i++)
        m += x[i] != 0;
    return m;
}

/* Are all numbers equal? */
static int source_equal(const double *a, const double *b, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (a[i] != b[i]) return 0;
    return 1;
}

/* Divided by its first entry that is not zero: that is a power of two times a small integer. */
static uint64_t source_hash(const double *x, int64_t n, int scale, double *lead) {
    double y[n];
    *lead = 0;
    for (int64_t i = 0; i < n && *lead == 0; i++)
        *lead = x[i];
    for (int64_t i = 0; i < n; i++)
        y[i] = (scale && *lead != 0 ? x[i] / *lead : x[i]) + 0.0;
    return XXH3_64bits(y, sizeof y);
}

/* The first row with that hash; NULL: none. */
static const dp_source_row *source_lookup(const dp_source_book *b, uint64_t h) {
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

static void note_content(dp_source_candidate *c, uint64_t content) {
    for (int i = 0; i < c->distinct; i++)
        if (c->seen[i] == content) return;
    if (c->distinct < 3) c->seen[c->distinct++] = content;
}

/* shift: rows of one source lie that many tokens away. content: of the row. */
static void source_count(dp_source_tally *t, dp_source_place from, int64_t token,
                         dp_source_place instead, int64_t shift, uint64_t content) {
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
        t->at[t->n++] = (dp_source_candidate){.from = from,
                                              .rows = 1,
                                              .token = token,
                                              .for_token = instead.token,
                                              .shift = shift,
                                              .for_rank = instead.rank,
                                              .for_head = instead.head,
                                              .distinct = 1,
                                              .seen = {content}};
}

/* The place that most rows come from; NULL: none was counted. */
static const dp_source_candidate *source_most(const dp_source_tally *t) {
    const dp_source_candidate *best = NULL;
    for (int i = 0; i < t->n; i++)
        if (!best || t->at[i].rows > best->rows) best = &t->at[i];
    return best;
}

/* Rank, head, sequence and token of a row. */
static dp_source_place source_place_at(const dp_compare_in *in, int64_t row) {
    dp_place at;
    in->place(in->ctx, row, &at);
    return (dp_source_place){at.rank, at.head, at.sequence, at.token};
}

/* Writes "rank 1, head 2" and, where there are several, the sequence. */
static void source_place_text(char *s, size_t n, const dp_problem *p, dp_source_place x) {
    snprintf(s, n, "rank %d, head %d", x.rank, x.head);
    if (p->Nseq > 1 && x.sequence >= 0) dp_text_add(s, n, ", sequence %d", x.sequence);
}

/* Are these rows at least two, and a quarter of those looked at? */
static int source_enough(int rows, int of) { return rows >= 2 && 4 * rows >= of; }

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
            (dp_source_row){source_hash(p->v + w->window.n, WINDOW, 1, &lead), w->window.n};
    }
    qsort(w->window.at, (size_t)w->window.n, sizeof *w->window.at, source_by_hash);
}

/* Collects them for a problem on N ranks; to be freed with source_values_close. */
static dp_source_values *source_values_open(const dp_problem *p, int N) {
    const int64_t nv = p->T * p->HV * p->R, ns = p->s0 ? (int64_t)p->Nseq * p->HV : 0;
    dp_source_values *w = dp_calloc(1, sizeof *w);
    *w = (dp_source_values){.p = p,
                            .N = N,
                            .atom = dp_calloc((size_t)(nv + ns * p->K), sizeof *w->atom),
                            .s0 = dp_doubles(ns * p->K * p->V)};
    for (int64_t i = 0; i < nv; i++)
        w->atom[w->n++] = (atom){p->v + i * p->V, i / (p->HV * p->R), (int)(i / p->R % p->HV),
                                 dp_sequence_of(p->cu, p->Nseq, i / (p->HV * p->R))};
    for (int64_t i = 0; i < ns; i++) {
        double *s = w->s0 + i * p->K * p->V;
        to_basis(p, p->s0 + i * p->K * p->V, s);
        for (int a = 0; a < p->K; a++)
            if (source_nonzero(s + (int64_t)a * p->V, p->V))
                w->atom[w->n++] =
                    (atom){s + (int64_t)a * p->V, -1, (int)(i % p->HV), (int)(i / p->HV)};
    }
    w->book.at = dp_calloc((size_t)w->n, sizeof *w->book.at);
    for (; w->book.n < w->n; w->book.n++) {
        double lead;
        w->book.at[w->book.n] =
            (dp_source_row){source_hash(w->atom[w->book.n].row, p->V, 1, &lead), w->book.n};
    }
    qsort(w->book.at, (size_t)w->book.n, sizeof *w->book.at, source_by_hash);
    if (p->V >= WINDOW) open_windows(w);
    return w;
}

/* Frees them; NULL: nothing. */
static void source_values_close(dp_source_values *w) {
    if (!w) return;
    DP_FREE(w->atom, w->s0, w->book.at, w->window.at, w);
}

static int power_of_two(double f) { return fabs(frexp(f, &(int){0})) == 0.5; }

/* The one row of v or s0 that this is, up to a power of two; -1: none, or more than one. */
static int64_t single(const dp_source_values *w, const double *row) {
    double lead;
    const dp_source_row *x = source_lookup(&w->book, source_hash(row, w->p->V, 1, &lead));
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
        const dp_source_row *x = source_lookup(&w->window, source_hash(row + at, WINDOW, 1, &lead));
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
    return t.n || !source_nonzero(want, w->p->V) ? in : -1;
}

static dp_source_place place_of(const dp_source_values *w, const atom *a) {
    const int64_t t = a->token >= 0                     ? a->token
                      : w->p->cu[a->sequence] < w->p->T ? w->p->cu[a->sequence]
                                                        : w->p->T - 1;
    return (dp_source_place){dp_own_part_of(w->p->own.kind, w->p->T, w->N, t), a->head, a->sequence,
                             a->token};
}

static void say_values(const dp_wrong_rows *x, const dp_source_candidate *c) {
    char a[96], b[96], of_token[48] = " (initial state)", instead[96] = "";
    source_place_text(a, sizeof a, x->p, x->out->at);
    source_place_text(b, sizeof b, x->p, c->from);
    if (c->from.token >= 0)
        snprintf(of_token, sizeof of_token, " (token %lld)", (long long)c->from.token);
    if (c->for_token >= 0)
        snprintf(instead, sizeof instead, " where rank %d, head %d (token %lld) should stand",
                 c->for_rank, c->for_head, (long long)c->for_token);
    snprintf(x->out->says, sizeof x->out->says,
             "%s of %s holds values of %s%s%s (%d of %d wrong rows)", x->in->name, a, b, of_token,
             instead, x->out->rows, x->out->of);
}

/* Rows of v or of the initial state that stand in rows of o, or (states) in states. */
static int source_whose_values(const dp_wrong_rows *x, const dp_source_values *w, int states) {
    const dp_compare_in *in = x->in;
    const dp_problem *p = x->p;
    const int per = states ? p->K : 1;
    DP_OWN double *got = dp_doubles((int64_t)p->K * p->V), *want = dp_doubles((int64_t)p->K * p->V);
    dp_source_tally t = {0};
    int of = 0;
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
            if (source_equal(g + (int64_t)k * p->V, r + (int64_t)k * p->V, p->V)) continue;
            const int64_t found = intruder(w, g + (int64_t)k * p->V, r + (int64_t)k * p->V,
                                           states ? 1 : p->scale, of % 4 == 0, &missing);
            of++;
            if (found < 0) continue;
            source_count(&t, place_of(w, &w->atom[found]), source_place_at(in, x->row[i]).token,
                         missing < 0 ? (dp_source_place){-1, -1, -1, -1}
                                     : place_of(w, &w->atom[missing]),
                         0, 0);
        }
    }
    const dp_source_candidate *c = source_most(&t);
    if (!c || !source_enough(c->rows, of)) return 0;
    x->out->at = source_place_at(in, x->row[0]);
    x->out->from = c->from;
    x->out->rows = c->rows;
    x->out->of = of;
    say_values(x, c);
    return 1;
}

/* ---- decays ---------------------------------------------------------------------------------- */

/* A place's chunks, from the first one of a reference's on. */
typedef struct {
    int g, hv, n;
} chunks;
static const dp_chunk *chunk_of(const dp_sim *s, chunks x, int i) {
    return dp_sim_chunk(s, x.g + i, x.hv);
}

/* A [K][V] <- the addition of chunk i to a state, backward to its gradient. */
static void added(const dp_sim *s, chunks x, int i, int back, double *A) {
    const dp_problem *p = s->p;
    DP_OWN double *dout = dp_doubles((int64_t)DP_CHUNK * p->V);
    memset(A, 0, sizeof *A * (size_t)p->K * (size_t)p->V);
    if (back) {
        dp_sim_gather_do(s, x.g + i, x.hv, dout);
        dp_chunk_state_bwd(chunk_of(s, x, i), dout, A, NULL);
    } else
        dp_chunk_state(chunk_of(s, x, i), A, NULL);
}

/* M (state 0) or H (state 1), back: dM, dH, of chunks with the decays of others. Every operation is
 * exact here. */
static void product(const dp_sim *s, chunks own, chunks other, int back, int state, double *X) {
    const int K = s->p->K, n = state ? s->p->V : K;
    const int64_t KK = (int64_t)K * K, Kn = (int64_t)K * n;
    DP_OWN double *F = dp_doubles(KK), *P = dp_doubles(Kn), *A = dp_doubles(Kn);
    memset(X, 0, sizeof *X * (size_t)Kn);
    for (int x = 0; x < K && !state; x++)
        X[(int64_t)x * K + x] = 1;
    for (int z = 0; z < own.n; z++) {
        const int i = back ? own.n - 1 - z : z;
        const dp_chunk *ch = chunk_of(s, own, i), *with = chunk_of(s, other, i);
        dp_chunk_M(ch, F);
        for (int x = 0; x < K; x++)
            F[(int64_t)x * K + x] += with->eC[x] - ch->eC[x];
        dp_mm(DP_FP64, back, 0, K, n, K, F, X, P);
        if (state) added(s, own, i, back, A);
        for (int64_t y = 0; y < Kn; y++)
            X[y] = P[y] + A[y];
    }
}

/* The chunks of a rank's last local sub-sequence; back: of all from the first one on. */
static chunks chunks_of(const dp_sim *s, int back, int rank, int hv) {
    const int last = s->ctx[rank].nlocal, g = s->first[rank][back ? 0 : last - 1];
    return (chunks){g, hv, s->first[rank][last] - g};
}

/* Does M, H, dM or dH contain the decays of another rank or head? The sources go
 * to x->out.
 *   back    1: of the backward
 *   state   1: H, dH
 *   limit   most places with equal decays that are all named */
static int source_whose_decays(const dp_wrong_rows *x, int back, int state, int limit) {
    const dp_problem *p = x->p;
    const dp_compare_in *in = x->in;
    const dp_source_place at = source_place_at(in, x->row[0]);
    dp_source_place from = {-1, -1, -1, -1};
    char also[128] = "";
    int found = 0;
    DP_FREED(dp_sim_free) dp_sim s;
    if (dp_sim_reference(&s, p, DP_CHUNK, in->N, NULL, back, NULL)) return 0;
    chunks own = chunks_of(&s, back, at.rank, at.head);
    if (back) own.n = s.first[at.rank][1] - own.g;
    DP_OWN double *X = dp_doubles((int64_t)p->K * (state ? p->V : p->K));
    /* heads of this rank, this head of other ranks, the others */
    for (int step = 0; step < 3; step++)
        for (int i = 0; i < in->N * p->HV; i++) {
            const int r = i / p->HV, h = i % p->HV;
            const chunks other = chunks_of(&s, back, r, h);
            if ((r == at.rank && h == at.head) ||
                step != (r == at.rank   ? 0
                         : h == at.head ? 1
                                        : 2) ||
                other.n < own.n)
                continue;
            product(&s, own, other, back, state, X);
            if (source_equal(X, in->got + x->row[0] * in->width, in->width) && found++ < limit) {
                if (found == 1) from = (dp_source_place){r, h, -1, -1};
                dp_text_add(also, sizeof also, "%srank %d, head %d", found == 1 ? "" : ", or of ",
                            r, h);
            }
        }
    if (found < 1 || found > limit) return 0;
    x->out->at = at;
    x->out->from = from;
    x->out->rows = x->out->of = 1;
    snprintf(x->out->says, sizeof x->out->says,
             "%s of rank %d, head %d was made with the decays of %s", in->name, at.rank, at.head,
             also);
    return 1;
}

/* ---- readings -------------------------------------------------------------------------------- */

#define PLACES 8 /* wrong (rank, head) looked at */

/* By names as in the record. */
static dp_source_kind source_kind_of(const char *t) {
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
        if (!strcmp(t, k[i].name) && (i || !dp_user_reads_along())) return k[i].kind;
    return DP_ROWS;
}

static int wrong(const dp_compare_in *in, int64_t row) {
    return !source_equal(in->got + row * in->width, in->want + row * in->width, in->width);
}

static int whole_rows(const dp_wrong_rows *x, const dp_source_book *truth) {
    const dp_compare_in *in = x->in;
    const int matrix = source_place_at(in, x->row[0]).token < 0;
    dp_source_tally t = {0};
    char a[96], b[96];
    double lead;
    if (in->width < 8) return 0; /* few numbers coincide by chance */
    for (int i = 0; i < x->n; i++) {
        const double *got = in->got + x->row[i] * in->width;
        const dp_source_place at = source_place_at(in, x->row[i]);
        const uint64_t h = source_hash(got, in->width, 0, &lead);
        int n = 0;
        if (source_nonzero(got, in->width) < 3) continue;
        for (const dp_source_row *e = source_lookup(truth, h);
             e && e < truth->at + truth->n && n++ < 16; e++) {
            if (!source_equal(got, in->want + e->i * in->width, in->width)) break;
            const dp_source_place from = source_place_at(in, e->i);
            source_count(&t, from, at.token, at, at.token - from.token, h);
        }
    }
    const dp_source_candidate *c = source_most(&t);
    if (!c || !(matrix ? c->rows == x->n : source_enough(c->rows, x->n) && c->distinct == 3))
        return 0;
    x->out->at = source_place_at(in, x->row[0]);
    x->out->from = c->from;
    x->out->rows = c->rows;
    x->out->of = x->n;
    source_place_text(a, sizeof a, x->p, x->out->at);
    source_place_text(b, sizeof b, x->p, c->from);
    if (matrix)
        snprintf(x->out->says, sizeof x->out->says, "%s of %s holds what %s should", in->name, a,
                 b);
    else
        snprintf(x->out->says, sizeof x->out->says,
                 "%s of %s holds what %s should (token %lld: that of %lld; %d of %d wrong rows)",
                 in->name, a, b, (long long)c->token, (long long)c->from.token, c->rows, x->n);
    return 1;
}

/* Numbers of a gradient of the state lie around 2^dp_inputs_exact_log2_do of their sequence; 9
 * places to the next. */
static int whose_exponents(const dp_wrong_rows *x) {
    const dp_compare_in *in = x->in;
    const dp_problem *p = x->p;
    const dp_source_place at = source_place_at(in, x->row[0]);
    const int64_t first = dp_own_cut(p->own.kind, p->T, in->N, at.rank),
                  behind = dp_own_cut(p->own.kind, p->T, in->N, at.rank + 1);
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
        if (source_enough(wrong_of[k], n) && (from < 0 || wrong_of[k] > wrong_of[from])) from = k;
    }
    if (from < 0 || own < 0 || from == own) return 0;
    for (int s = 0; s < p->Nseq; s++) /* which of the rank's own sequences has those numbers */
        if (p->cu[s + 1] > p->cu[s] && p->cu[s] < behind && p->cu[s + 1] > first && s % 3 == from) {
            several += name >= 0;
            name = s;
        }
    if (name < 0 || several) return 0;
    char a[96];
    x->out->at = at;
    x->out->from = (dp_source_place){at.rank, at.head, name, -1};
    x->out->rows = wrong_of[from];
    x->out->of = n;
    source_place_text(a, sizeof a, p, at);
    snprintf(x->out->says, sizeof x->out->says,
             "%s of %s holds numbers of sequence %d (%d of %d wrong entries)", in->name, a, name,
             wrong_of[from], n);
    return 1;
}

static int nothing_there(const dp_wrong_rows *x) {
    const dp_compare_in *in = x->in;
    const int cols =
        source_kind_of(in->name) == DP_STATES_OF_V || source_kind_of(in->name) == DP_STATES_OF_DO
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
    x->out->at = source_place_at(in, x->row[0]);
    x->out->nothing = 1;
    source_place_text(a, sizeof a, x->p, x->out->at);
    if (hi - lo + 1 <= cols / 2)
        snprintf(in_columns, sizeof in_columns, " and in columns %d to %d", lo, hi);
    snprintf(x->out->says, sizeof x->out->says,
             "every wrong entry in %s of %s is %s%s (%lld entries)", in->name, a,
             zero == n ? "zero" : "NaN", in_columns, (long long)n);
    return 1;
}

/* Wrong rows, by the rank, head and sequence where they stand. */
typedef struct {
    int n;
    int64_t row[DP_SOURCE_LOOK];
} wrong_place;

/* The first PLACES of them; returns their number. */
static int wrong_places(const dp_compare_in *in, wrong_place *at) {
    int places = 0;
    for (int64_t i = 0; i < in->rows; i++) {
        if (!wrong(in, i)) continue;
        const dp_source_place x = source_place_at(in, i);
        int z = 0;
        for (; z < places; z++) {
            const dp_source_place y = source_place_at(in, at[z].row[0]);
            if (y.rank == x.rank && y.head == x.head && y.sequence == x.sequence) break;
        }
        if (z == places && places < PLACES) places++;
        if (z < places && at[z].n < DP_SOURCE_LOOK) at[z].row[at[z].n++] = i;
    }
    return places;
}

/* The rows that should stand in the tensor, by content; .at to be freed. */
static dp_source_book truth_of(const dp_compare_in *in) {
    dp_source_book truth = {.at = dp_calloc((size_t)in->rows, sizeof *truth.at)};
    double lead;
    for (; truth.n < in->rows; truth.n++)
        truth.at[truth.n] = (dp_source_row){
            source_hash(in->want + truth.n * in->width, in->width, 0, &lead), truth.n};
    qsort(truth.at, (size_t)truth.n, sizeof *truth.at, source_by_hash);
    return truth;
}

/* Shared by the readings of all places. */
typedef struct {
    const dp_problem *p;
    dp_source_book truth;
    dp_source_values *values; /* NULL: not opened yet */
} reading_work;

/* The readings of one step for one place: what names one source comes first. */
static void read_place(reading_work *w, const dp_wrong_rows *x, int step) {
    const dp_compare_in *in = x->in;
    const dp_source_kind kind = source_kind_of(in->name);
    const int back = in->name[0] == 'd';
    const int chain = kind == DP_DECAYS || !strcmp(in->name, "H") || !strcmp(in->name, "dH");
    if (step == 0)
        whole_rows(x, &w->truth);
    else if (step == 3)
        nothing_there(x);
    else if (step == 1 && (kind == DP_ROWS_OF_V || kind == DP_STATES_OF_V)) {
        if (!w->values) w->values = source_values_open(w->p, in->N);
        source_whose_values(x, w->values, kind == DP_STATES_OF_V);
    }
    if (!x->out->says[0] && chain && (step == 1 || step == 2))
        source_whose_decays(x, back, kind != DP_DECAYS, step == 1 ? 1 : 3);
    if (!x->out->says[0] && step == 2 && kind == DP_STATES_OF_DO) whose_exponents(x);
}

void dp_source_find(const dp_problem *p, const dp_compare_in *in, dp_source *out) {
    const dp_source_place none = {-1, -1, -1, -1};
    DP_OWN wrong_place *at = dp_calloc(PLACES, sizeof *at);
    const int places = wrong_places(in, at);
    *out = (dp_source){.at = none, .from = none};
    if (places) {
        reading_work w = {.p = p, .truth = truth_of(in)};
        for (int step = 0; step < 4; step++)
            for (int z = 0; z < places && !out->says[0]; z++)
                read_place(&w, &(dp_wrong_rows){p, in, at[z].row, at[z].n, out}, step);
        source_values_close(w.values);
        free(w.truth.at);
    }
}

/* ---- the state that a row lacks -------------------------------------------------------------- */

#define EXPLAINED 0.1 /* of the error may stay */

/* A problem and its inputs after their activations. */
typedef struct {
    const dp_problem *p;
    dp_activated in;
} inputs;

/* The rows of a token and value head. */
typedef struct {
    const double *g, *k, *erasing, *values, *beta;
} token_rows;
static token_rows rows_of(const inputs *x, int64_t t, int hv) {
    const dp_problem *p = x->p;
    const int64_t at = t * p->HV + hv;
    return (token_rows){x->in.g + at * dp_Kg(p),
                        x->in.k + (t * p->H + hv / dp_G(p)) * dp_rows(p) * p->K,
                        dp_erasing_at(p, x->in.k, x->in.erasing, t, hv),
                        dp_values_at(p, x->in.values, t, hv), x->in.beta + at * dp_rows(p)};
}

/* sum [V] += what token t wrote, as y [K] reads the state after it; y <- as it reads the one
 * before. */
static void step_back(const inputs *x, int64_t t, int hv, double *y, double *sum) {
    const dp_problem *p = x->p;
    const token_rows r = rows_of(x, t, hv);
    DP_OWN double *through = dp_doubles(dp_rows(p));
    for (int n = dp_keys_at_once(p), first = dp_rows(p) - n; first >= 0; first -= n) {
        for (int j = first; j < first + n; j++) {
            for (int i = 0; i < p->K; i++)
                through[j] += r.k[(int64_t)j * p->K + i] * y[i];
            through[j] *= r.beta[j];
            for (int v = 0; v < p->V; v++)
                sum[v] += through[j] * r.values[j * p->V + v];
        }
        for (int j = first; j < first + n; j++)
            for (int i = 0; i < p->K; i++)
                y[i] -= through[j] * r.erasing[(int64_t)j * p->K + i];
    }
    for (int i = 0; i < p->K; i++)
        y[i] *= dp_exp(r.g[dp_Kg(p) == 1 ? 0 : i]);
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
} lost_row;

static lost_row lost_row_of(const inputs *x, int field, const dp_row *row, const double *got) {
    const dp_problem *p = x->p;
    lost_row r = {.hv = row->at.head, .y = dp_doubles(p->K)};
    if (field == DP_RESULT_O) {
        const int64_t t = row->at.token;
        const int seq = dp_sequence_of(p->cu, p->Nseq, t);
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

int dp_lost_state(const dp_problem *p, int field, const dp_row *row, const double *got, int drop,
                  char *text, size_t size) {
    inputs x = {.p = p, .in = dp_activated_new(p)};
    lost_row r = lost_row_of(&x, field, row, got);
    DP_OWN double *sum = dp_doubles(p->V);
    double best = INFINITY;
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
        snprintf(text, size,
                 "lacks the state before token %lld (%lld tokens back), %.2g of the row: "
                 "at most 2^%.1f of a state is left from there, by the largest gate of each "
                 "token (the largest channel sum, which bounds nothing, says 2^%.1f)",
                 (long long)cut, (long long)(r.last - cut),
                 error / fmax(distance(sum, NULL, p->V), 1e-300), shown(a.bound), shown(a.channel));
        if (drop) dp_text_add(text, size, "; 2^-%d is claimed", drop);
    }
    dp_activated_free(&x.in);
    free(r.y);
    return found;
}
