/* Comparison of two runs, bit by bit or within rounding (invariants_work.h). */
#include "invariants_work.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- comparing ------------------------------------------------------------------------------- */

/* Where rows of one result stand, of the problem that got is of and of the one of want. */
typedef struct {
    int state, param, heads;
    int64_t rows, width, per, skip;
} rows_of;

static rows_of layout(const dp_check_work *w, int f, const dp_check_pair *x) {
    const dp_row_kind kind = dp_result_fields[f].kind;
    rows_of r = {.state = kind == DP_OF_SEQUENCES,
                 .param = kind == DP_OF_HEADS,
                 .heads = dp_result_heads(x->p, f),
                 .per = dp_result_rows_per_token(x->p, f)};
    dp_result_shape(x->p, f, &r.rows, &r.width);
    r.skip = r.state ? (int64_t)x->seq0 * w->p->HV : r.param ? 0 : x->t0 * r.heads * r.per;
    return r;
}

static dp_place place_of(const dp_check_work *w, const rows_of *l, const dp_check_pair *x,
                         int64_t row) {
    if (l->state || l->param)
        return (dp_place){.token = -1,
                          .head = (int)(row % x->p->HV),
                          .sequence = l->state ? (int)(row / x->p->HV) + x->seq0 : -1};
    const int64_t token = row / l->per / l->heads + x->t0;
    return (dp_place){.rank = (int)(token / (w->p->T / w->N)),
                      .token = token,
                      .head = (int)(row / l->per % l->heads),
                      .sequence = dp_check_sequence_at(w->p, token)};
}

static int kept(const dp_check_pair *x, int f, const dp_place *at) {
    return !x->keep || x->keep(x->ctx, f, at->token, at->head, at->sequence);
}

static void place_text(const dp_place *at, char *text, size_t size) {
    if (at->token >= 0)
        snprintf(text, size, "rank %d, head %d, token %lld", at->rank, at->head,
                 (long long)at->token);
    else
        snprintf(text, size, "head %d, sequence %d", at->head, at->sequence);
}

void dp_check_row_text(const dp_check_work *w, int f, int64_t row, char *text, size_t size) {
    const dp_check_pair own = {.p = w->p};
    const rows_of l = layout(w, f, &own);
    const dp_place at = place_of(w, &l, &own, row);
    place_text(&at, text, size);
}

/* Among rows that differ: the one with the largest difference relative to its bounds. */
static void hold_within_bounds(dp_check_work *w, int f, const dp_check_pair *x, const rows_of *l,
                               const char *first) {
    const double *a = *dp_result_at((dp_result *)x->got, f);
    const double *b = *dp_result_at((dp_result *)x->want, f);
    const double *bound = dp_check_bounds_of(w)->row[f];
    double most = -1, allowed = 0, off = 0;
    int64_t worst = 0;
    for (int64_t r = 0; r < (bound ? l->rows : 0); r++) {
        const dp_place at = place_of(w, l, x, r);
        double d2 = 0;
        if (!kept(x, f, &at)) continue;
        for (int64_t i = 0; i < l->width; i++) {
            const double u = a[r * l->width + i], v = x->factor * b[(r + l->skip) * l->width + i];
            if (u != v && !(isnan(u) && isnan(v))) d2 += (u - v) * (u - v);
        }
        const double limit =
            2 * fabs(x->factor) * bound[r + l->skip] + x->small * sqrt((double)l->width);
        const double ratio = d2 == 0 ? 0 : isnan(d2) ? INFINITY : sqrt(d2) / limit;
        if (ratio <= most) continue;
        most = ratio;
        worst = r;
        off = sqrt(d2);
        allowed = limit;
    }
    if (most <= 1 && bound) {
        w->c->within_bounds = 1;
        if (!*w->c->why)
            snprintf(w->c->why, sizeof w->c->why, "not bitwise (%s); within bounds, at most %.2g",
                     first, most);
        return;
    }
    char at[96];
    const dp_place place = place_of(w, l, x, worst);
    place_text(&place, at, sizeof at);
    w->c->verdict = DP_FAIL;
    if (bound)
        snprintf(w->c->why, sizeof w->c->why,
                 "%.16s: %s: differ by %.3g, both bounds allow %.3g (first difference: %s)",
                 dp_result_fields[f].name, at, off, allowed, first);
    else
        snprintf(w->c->why, sizeof w->c->why, "%s; it has no bound", first);
}

static void differ(dp_check_work *w, int f, const dp_check_pair *x, const rows_of *l,
                   int64_t first) {
    const double *a = *dp_result_at((dp_result *)x->got, f);
    const double *b = *dp_result_at((dp_result *)x->want, f);
    double got, want;
    dp_memory_get(x->got->memory, &got, a + first, 1);
    dp_memory_get(x->want->memory, &want, b + first + l->skip * l->width, 1);
    want *= x->factor;
    const dp_place at = place_of(w, l, x, first / l->width);
    char place[96], text[240], why[160];
    place_text(&at, place, sizeof place);
    snprintf(text, sizeof text, "%.16s: %s, entry %lld: got %.9g (%a), want %.9g (%a)",
             dp_result_fields[f].name, place, (long long)(first % l->width), got, got, want, want);
    if (!w->s->library || w->s->bitwise) {
        w->c->verdict = DP_FAIL;
        snprintf(w->c->why, sizeof w->c->why, "%s", text);
    } else if (dp_check_bounded(w, why, sizeof why)) {
        hold_within_bounds(w, f, x, l, text);
    } else {
        w->c->verdict = DP_SKIPPED;
        snprintf(w->c->why, sizeof w->c->why, "not bitwise (%s), and %s", text, why);
    }
}

/* A byte a row: is it compared? NULL: all are. */
static uint8_t *rows_kept(const dp_check_work *w, int f, const dp_check_pair *x, const rows_of *l) {
    if (!x->keep) return NULL;
    uint8_t *kept_rows = dp_alloc((size_t)l->rows, 1);
#pragma omp parallel for if (l->rows > 1 << 16)
    for (int64_t r = 0; r < l->rows; r++) {
        const dp_place at = place_of(w, l, x, r);
        kept_rows[r] = (uint8_t)kept(x, f, &at);
    }
    return kept_rows;
}

/* The first entry that differs, of arrays in memory of this process; -1: none does. */
static int64_t first_host(const dp_memory_pair *x) {
    int64_t first = INT64_MAX;
#pragma omp parallel for reduction(min : first) if (x->rows * x->width > 1 << 22)
    for (int64_t r = 0; r < x->rows; r++) {
        if (first < r * x->width || (x->kept && !x->kept[r])) continue;
        for (int64_t i = r * x->width; i < (r + 1) * x->width; i++) {
            const double u = x->got[i], v = x->factor * x->want[i];
            if (u == v || (isnan(u) && isnan(v)) || fabs(u - v) <= x->small) continue;
            if (i < first) first = i;
            break;
        }
    }
    return first == INT64_MAX ? -1 : first;
}

void dp_check_same_field(dp_check_work *w, int f, const dp_check_pair *x) {
    const double *a = *dp_result_at((dp_result *)x->got, f);
    const double *b = *dp_result_at((dp_result *)x->want, f);
    const rows_of l = layout(w, f, x);
    if (!l.rows || !a || !b || w->c->verdict != DP_PASS) return;
    uint8_t *kept_rows = rows_kept(w, f, x, &l);
    const dp_memory_pair pair = {.got = a,
                                 .want = b + l.skip * l.width,
                                 .kept = kept_rows,
                                 .rows = l.rows,
                                 .width = l.width,
                                 .factor = x->factor,
                                 .small = x->small};
    const int64_t first = (x->got->memory ? x->got->memory->first : first_host)(&pair);
    for (int64_t r = 0; r < l.rows; r++)
        w->c->compared += !kept_rows || kept_rows[r] ? l.width : 0;
    free(kept_rows);
    if (first >= 0) differ(w, f, x, &l, first);
}

void dp_check_same(dp_check_work *w, dp_check_outcome *got, const double factor[DP_NRESULTS],
                   double small, dp_check_keep *keep, const void *ctx) {
    for (int f = 0; f < DP_NRESULTS; f++)
        if (!factor || factor[f])
            dp_check_same_field(w, f,
                                &(dp_check_pair){.p = w->p,
                                                 .got = &got->r,
                                                 .want = &w->base->r,
                                                 .factor = factor ? factor[f] : 1,
                                                 .small = small,
                                                 .keep = keep,
                                                 .ctx = ctx});
}

void dp_check_skip(dp_check_work *w, const char *why) {
    w->c->verdict = DP_SKIPPED;
    snprintf(w->c->why, sizeof w->c->why, "%s", why);
}

/* Kernels that cut a long sequence in segments by its length cut its parts elsewhere: then both are
 * right and their bits differ. */
int dp_check_cut(const dp_check_outcome *a, const dp_check_outcome *b) {
    return a->segments > 1 || b->segments > 1;
}

/* The tensor-core kernels anchor decays, and what underflows there (2^-150, of 16 pairs) is
 * multiplied by up to 2^110 again. */
double dp_check_underflow(const dp_check_work *w, double scale) {
    return scale * (!dp_backends[w->s->backend].simulated ? 0x1p-36
                    : w->s->base == DP_BASE_FP64          ? 0x1p-960
                                                          : 0x1p-100);
}
