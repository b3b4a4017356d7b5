/* The source of wrong rows: the readings in their order, whole rows, exponents and nothing among
 * them (source.h). */
#include "source.h"
#include "ref/inputs/inputs.h"
#include "source_parts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* ---- rows by content, and the places that they come from ------------------------------------- */

int dp_source_by_hash(const void *a, const void *b) {
    const dp_source_row *x = a, *y = b;
    return x->hash != y->hash ? (x->hash > y->hash) - (x->hash < y->hash)
                              : (x->i > y->i) - (x->i < y->i);
}

int dp_source_nonzero(const double *x, int64_t n) {
    int m = 0;
    for (int64_t i = 0; i < n; i++)
        m += x[i] != 0;
    return m;
}

int dp_source_equal(const double *a, const double *b, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (a[i] != b[i]) return 0;
    return 1;
}

/* Divided by its first entry that is not zero: that is a power of two times a small integer. */
uint64_t dp_source_hash(const double *x, int64_t n, int scale, double *lead) {
    double y[n];
    *lead = 0;
    for (int64_t i = 0; i < n && *lead == 0; i++)
        *lead = x[i];
    for (int64_t i = 0; i < n; i++)
        y[i] = (scale && *lead != 0 ? x[i] / *lead : x[i]) + 0.0;
    return XXH3_64bits(y, sizeof y);
}

const dp_source_row *dp_source_lookup(const dp_source_book *b, uint64_t h) {
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
void dp_source_count(dp_source_tally *t, dp_source_place from, int64_t token,
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

const dp_source_candidate *dp_source_most(const dp_source_tally *t) {
    const dp_source_candidate *best = NULL;
    for (int i = 0; i < t->n; i++)
        if (!best || t->at[i].rows > best->rows) best = &t->at[i];
    return best;
}

dp_source_place dp_source_place_at(const dp_compare_in *in, int64_t row) {
    dp_place at;
    in->place(in->ctx, row, &at);
    return (dp_source_place){at.rank, at.head, at.sequence, at.token};
}

int dp_source_place_text(char *s, size_t n, const dp_problem *p, dp_source_place x) {
    int k = snprintf(s, n, "rank %d, head %d", x.rank, x.head);
    if (p->Nseq > 1 && x.sequence >= 0)
        k += snprintf(s + k, n - (size_t)k, ", sequence %d", x.sequence);
    return k;
}

int dp_source_enough(int rows, int of) { return rows >= 2 && 4 * rows >= of; }

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
        if (!strcmp(t, k[i].name)) return k[i].kind;
    return DP_ROWS;
}

static int wrong(const dp_compare_in *in, int64_t row) {
    return !dp_source_equal(in->got + row * in->width, in->want + row * in->width, in->width);
}

static int whole_rows(const dp_wrong_rows *x, const dp_source_book *truth) {
    const dp_compare_in *in = x->in;
    const int matrix = dp_source_place_at(in, x->row[0]).token < 0;
    dp_source_tally t = {0};
    char a[96], b[96];
    double lead;
    if (in->width < 8) return 0; /* few numbers coincide by chance */
    for (int i = 0; i < x->n; i++) {
        const double *got = in->got + x->row[i] * in->width;
        const dp_source_place at = dp_source_place_at(in, x->row[i]);
        const uint64_t h = dp_source_hash(got, in->width, 0, &lead);
        int n = 0;
        if (dp_source_nonzero(got, in->width) < 3) continue;
        for (const dp_source_row *e = dp_source_lookup(truth, h);
             e && e < truth->at + truth->n && n++ < 16; e++) {
            if (!dp_source_equal(got, in->want + e->i * in->width, in->width)) break;
            const dp_source_place from = dp_source_place_at(in, e->i);
            dp_source_count(&t, from, at.token, at, at.token - from.token, h);
        }
    }
    const dp_source_candidate *c = dp_source_most(&t);
    if (!c || !(matrix ? c->rows == x->n : dp_source_enough(c->rows, x->n) && c->distinct == 3))
        return 0;
    x->out->at = dp_source_place_at(in, x->row[0]);
    x->out->from = c->from;
    x->out->rows = c->rows;
    x->out->of = x->n;
    dp_source_place_text(a, sizeof a, x->p, x->out->at);
    dp_source_place_text(b, sizeof b, x->p, c->from);
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
    const dp_source_place at = dp_source_place_at(in, x->row[0]);
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
        if (dp_source_enough(wrong_of[k], n) && (from < 0 || wrong_of[k] > wrong_of[from]))
            from = k;
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
    dp_source_place_text(a, sizeof a, p, at);
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
    x->out->at = dp_source_place_at(in, x->row[0]);
    x->out->nothing = 1;
    dp_source_place_text(a, sizeof a, x->p, x->out->at);
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
        const dp_source_place x = dp_source_place_at(in, i);
        int z = 0;
        for (; z < places; z++) {
            const dp_source_place y = dp_source_place_at(in, at[z].row[0]);
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
            dp_source_hash(in->want + truth.n * in->width, in->width, 0, &lead), truth.n};
    qsort(truth.at, (size_t)truth.n, sizeof *truth.at, dp_source_by_hash);
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
        if (!w->values) w->values = dp_source_values_open(w->p, in->N);
        dp_source_whose_values(x, w->values, kind == DP_STATES_OF_V);
    }
    if (!x->out->says[0] && chain && (step == 1 || step == 2))
        dp_source_whose_decays(x, back, kind != DP_DECAYS, step == 1 ? 1 : 3);
    if (!x->out->says[0] && step == 2 && kind == DP_STATES_OF_DO) whose_exponents(x);
}

void dp_source_find(const dp_problem *p, const dp_compare_in *in, dp_source *out) {
    const dp_source_place none = {-1, -1, -1, -1};
    wrong_place *at = dp_calloc(PLACES, sizeof *at);
    const int places = wrong_places(in, at);
    *out = (dp_source){.at = none, .from = none};
    if (places) {
        reading_work w = {.p = p, .truth = truth_of(in)};
        for (int step = 0; step < 4; step++)
            for (int z = 0; z < places && !out->says[0]; z++)
                read_place(&w, &(dp_wrong_rows){p, in, at[z].row, at[z].n, out}, step);
        dp_source_values_close(w.values);
        free(w.truth.at);
    }
    free(at);
}
