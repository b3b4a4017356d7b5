/* Rows looked up by content, and the counting of the places that wrong rows come from. */
#include "source_parts.h"

#include <stdio.h>
#include <xxhash.h>

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
