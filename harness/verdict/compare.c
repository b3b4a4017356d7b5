/* The verdict on one tensor: rows are measured once, then held against their bounds, then against
 * draws of the design.
 */
#include "compare.h"
#include "ref/vocabulary/problem.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WINDOW 64

const char *const dp_verdict_names[DP_NVERDICTS] = {"pass", "fail", "skipped", "unjudged"};

/* ---- rows ------------------------------------------------------------------------------------ */

typedef enum {
    ROW_OPEN,          /* measured; no bound, or none that is finite */
    ROW_BOUND,         /* held against its bound */
    ROW_WITHOUT_TRUTH, /* neither is finite */
    ROW_BESIDE,        /* not finite, in a chunk whose truth is not */
    ROW_WRONG_CLASS    /* finite where the truth is not */
} row_kind;

typedef struct {
    row_kind kind;
    dp_place at;
    double err2, want2, bound, limit;   /* limit: bound and radius */
    double raw2;                        /* err2 before what the row may lose was taken off */
    int finite_want, finite_got, worst; /* worst: entry */
    double worst_err;
} row;

typedef struct {
    const dp_compare_in *in;
    double *err; /* [rows][width] got - want */
    row *row;    /* [rows] */
    double *rms; /* [heads] root mean square of |truth| of a head's rows */
    dp_judgement *j;
} comparison;

static int is_looked_at(const row *r) { return r->kind <= ROW_BOUND; }

static void measure_entry(row *r, int i, double got, double want, double d) {
    r->finite_got &= isfinite(got) != 0;
    r->finite_want &= isfinite(want) != 0;
    if (isfinite(want)) r->want2 += want * want;
    if (isfinite(d)) r->err2 += d * d;
    const double size = isfinite(d) ? fabs(d) : isfinite(want) ? INFINITY : -1;
    if (size <= r->worst_err) return;
    r->worst_err = size;
    r->worst = i;
}

static void allow_loss(comparison *c, int64_t z, double lost) {
    row *r = &c->row[z];
    const double size = sqrt(r->err2);
    if (!(lost > 0) || size == 0) return;
    const double left = size > lost ? 1 - lost / size : 0;
    for (int i = 0; i < c->in->width; i++)
        c->err[z * c->in->width + i] *= left;
    r->err2 *= left * left;
}

static void measure(comparison *c, int64_t z) {
    const dp_compare_in *in = c->in;
    row *r = &c->row[z];
    r->finite_want = r->finite_got = 1;
    in->place(in->ctx, z, &r->at);
    for (int i = 0; i < in->width; i++) {
        const int64_t at = z * in->width + i;
        const double low = in->want_lo ? in->want_lo[at] : 0;
        c->err[at] = (in->got[at] - in->want[at]) - low;
        measure_entry(r, i, in->got[at], in->want[at], c->err[at]);
    }
    r->raw2 = r->err2;
    if (in->lost) allow_loss(c, z, in->lost[z]);
    const double radius = in->rad && isfinite(in->rad[z]) ? in->rad[z] : 0;
    r->bound = in->bound ? in->bound[z] : 0;
    r->limit = r->bound + radius;
    if (r->finite_want && !r->finite_got) r->err2 = r->raw2 = INFINITY;
}

/* Chunks and heads in which the truth is not finite: [chunks][heads], to be freed. */
static unsigned char *poisoned_chunks(const comparison *c) {
    int chunks = 0;
    for (int64_t z = 0; z < c->in->rows; z++)
        if (c->row[z].at.chunk >= chunks) chunks = c->row[z].at.chunk + 1;
    unsigned char *poison = dp_calloc((size_t)chunks * c->in->heads, 1);
    for (int64_t z = 0; z < c->in->rows; z++) {
        const row *r = &c->row[z];
        if (r->at.chunk >= 0 && !r->finite_want)
            poison[r->at.chunk * c->in->heads + r->at.head] = 1;
    }
    return poison;
}

static void classify(comparison *c) {
    unsigned char *poison = poisoned_chunks(c);
    for (int64_t z = 0; z < c->in->rows; z++) {
        row *r = &c->row[z];
        const int beside = r->at.chunk >= 0 && poison[r->at.chunk * c->in->heads + r->at.head];
        if (!r->finite_want)
            r->kind = r->finite_got ? ROW_WRONG_CLASS : ROW_WITHOUT_TRUTH;
        else if (beside && !r->finite_got)
            r->kind = ROW_BESIDE;
        else if (c->in->bound && (isfinite(r->limit) || isinf(r->err2)))
            r->kind = ROW_BOUND;
    }
    free(poison);
}

static void scale_of_heads(comparison *c) {
    double *n = dp_doubles(c->in->heads);
    for (int64_t z = 0; z < c->in->rows; z++) {
        c->rms[c->row[z].at.head] += c->row[z].want2;
        n[c->row[z].at.head]++;
    }
    for (int h = 0; h < c->in->heads; h++)
        c->rms[h] = n[h] > 0 ? sqrt(c->rms[h] / n[h]) : 0;
    free(n);
}

static double quotient(double err, double size) {
    return err == 0 ? 0 : size > 0 && isfinite(err) ? err / size : INFINITY;
}

static dp_row row_at(const comparison *c, int64_t z) {
    const row *r = &c->row[z];
    const int64_t at = z * c->in->width + r->worst;
    return (dp_row){.at = r->at,
                    .index = r->worst,
                    .got = c->in->got[at],
                    .want = c->in->want[at],
                    .err = sqrt(r->raw2),
                    .bound = c->in->bound ? r->limit + (c->in->lost ? c->in->lost[z] : 0) : NAN,
                    .size = sqrt(r->want2)};
}

static void note_over(comparison *c, int64_t z) {
    c->j->last = row_at(c, z);
    if (!c->j->nover++) c->j->first = c->j->last;
}

/* ---- what is said of the whole tensor -------------------------------------------------------- */

/* Errors of ranks and heads, and of the tensor. */
static void sum_up(comparison *c) {
    const dp_compare_in *in = c->in;
    dp_judgement *j = c->j;
    const int n = in->N * in->heads;
    double *err = dp_doubles(n + in->N + 1);
    double *want = dp_doubles(n + in->N + 1);
    int *seen = dp_calloc((size_t)(n + in->N + 1), sizeof *seen);
    for (int64_t z = 0; z < in->rows; z++) {
        const row *r = &c->row[z];
        if (!is_looked_at(r)) continue;
        const int unit[] = {r->at.rank * in->heads + r->at.head, n + r->at.rank, n + in->N};
        for (int i = 0; i < 3; i++) {
            err[unit[i]] += r->raw2;
            want[unit[i]] += r->want2;
            seen[unit[i]] = 1;
        }
    }
    j->per_head = dp_doubles(n);
    j->per_rank = dp_doubles(in->N);
    for (int i = 0; i < n; i++)
        j->per_head[i] = seen[i] ? quotient(sqrt(err[i]), sqrt(want[i])) : NAN;
    for (int r = 0; r < in->N; r++)
        j->per_rank[r] = seen[n + r] ? quotient(sqrt(err[n + r]), sqrt(want[n + r])) : NAN;
    j->rel_fro = quotient(sqrt(err[n + in->N]), sqrt(want[n + in->N]));
    free(err);
    free(want);
    free(seen);
}

static void worst_rows(comparison *c) {
    dp_judgement *j = c->j;
    double top = -1;
    j->per_rank_ratio = dp_doubles(c->in->N);
    for (int r = 0; r < c->in->N; r++)
        j->per_rank_ratio[r] = NAN;
    for (int64_t z = 0; z < c->in->rows; z++) {
        const row *r = &c->row[z];
        if (r->kind == ROW_WRONG_CLASS) note_over(c, z);
        if (!is_looked_at(r) && r->kind != ROW_WRONG_CLASS) continue;
        const double rel = is_looked_at(r) ? quotient(sqrt(r->err2), c->rms[r->at.head]) : INFINITY;
        if (rel > top) {
            top = j->worst_rel = rel;
            j->worst = row_at(c, z);
        }
        if (r->kind != ROW_BOUND) continue;
        const double ratio = quotient(sqrt(r->err2), r->limit);
        if (!(ratio <= j->ratio)) {
            j->ratio = ratio;
            j->over = row_at(c, z);
        }
        if (!(ratio <= j->per_rank_ratio[r->at.rank])) j->per_rank_ratio[r->at.rank] = ratio;
        if (!(ratio <= 1)) note_over(c, z);
    }
}

/* Largest over heads of |error|_F / |truth|_F in each window of 64 tokens. */
static void windows(comparison *c) {
    const dp_compare_in *in = c->in;
    const int n = (int)((in->tokens + WINDOW - 1) / WINDOW);
    double *err = dp_doubles((int64_t)n * in->heads);
    double *want = dp_doubles((int64_t)n * in->heads);
    for (int64_t z = 0; z < in->rows; z++) {
        const row *r = &c->row[z];
        err[r->at.token / WINDOW * in->heads + r->at.head] += r->raw2;
        want[r->at.token / WINDOW * in->heads + r->at.head] += r->want2;
    }
    c->j->nwindow = n;
    c->j->window = dp_doubles(n);
    for (int64_t z = 0; z < (int64_t)n * in->heads; z++) {
        const double x = want[z] > 0 ? sqrt(err[z] / want[z]) : 0;
        if (x > c->j->window[z / in->heads]) c->j->window[z / in->heads] = x;
    }
    free(err);
    free(want);
}

/* ---- the bound tier -------------------------------------------------------------------------- */

typedef struct {
    int64_t bound, beside, wrong, open; /* rows of each kind */
    double bound2, want2;               /* of those with a bound */
} counts;

static counts count_rows(const comparison *c) {
    counts n = {0};
    for (int64_t z = 0; z < c->in->rows; z++) {
        const row *r = &c->row[z];
        n.beside += r->kind == ROW_BESIDE;
        n.wrong += r->kind == ROW_WRONG_CLASS;
        n.open += r->kind == ROW_OPEN;
        if (r->kind != ROW_BOUND) continue;
        n.bound++;
        n.bound2 += r->limit * r->limit;
        n.want2 += r->want2;
    }
    return n;
}

static void decide(dp_judgement *j, dp_verdict verdict, const char *tier) {
    j->verdict = verdict;
    j->tier = tier;
}

static void fail_by_bound(comparison *c) {
    dp_judgement *j = c->j;
    decide(j, DP_FAIL, "bound");
    j->failed = j->over;
    j->times = j->ratio;
    snprintf(j->why, sizeof j->why,
             "error is %.3g times its bound (|error| %.3g, bound %.3g, |truth| %.3g of the row; "
             "rows of the head %.3g)",
             j->ratio, j->over.err, j->over.bound, j->over.size, c->rms[j->over.at.head]);
}

static void judge_bounds(comparison *c, const counts *n) {
    dp_judgement *j = c->j;
    const dp_compare_in *in = c->in;
    if (n->wrong) {
        decide(j, DP_FAIL, "bound");
        j->failed = j->first;
        snprintf(j->why, sizeof j->why, "%lld rows are finite where the truth is not",
                 (long long)n->wrong);
    } else if (!in->bound) {
        j->verdict = DP_UNJUDGED;
        snprintf(j->why, sizeof j->why, "%s",
                 in->why_unjudged ? in->why_unjudged : "no bound is derived for this tensor");
    } else if (!n->bound) {
        decide(j, n->beside + n->open ? DP_UNJUDGED : DP_PASS, n->beside + n->open ? "" : "bound");
        if (j->verdict == DP_UNJUDGED) snprintf(j->why, sizeof j->why, "no row has a useful bound");
    } else if (j->ratio > 1 && (!in->bound_shown || isinf(j->over.err))) {
        fail_by_bound(c);
    } else if (j->ratio <= 1 && j->bound >= 1 && n->want2 > 0) {
        j->verdict = DP_UNJUDGED;
        snprintf(j->why, sizeof j->why, "within its bound, but the bound is %.2g times the tensor",
                 j->bound);
    } else if (in->bound_shown) {
        j->verdict = DP_UNJUDGED;
        snprintf(j->why, sizeof j->why, "no bound is derived for this design");
    } else {
        decide(j, DP_PASS, "bound");
        if (n->beside + n->open)
            snprintf(j->why, sizeof j->why,
                     "%lld of %lld rows not judged: %lld beside a non-finite input, %lld without a "
                     "useful bound",
                     (long long)(n->beside + n->open), (long long)in->rows, (long long)n->beside,
                     (long long)n->open);
    }
}

/* ---- the expected tier ----------------------------------------------------------------------- */

/* The subject's errors in the shape of the draws. */
typedef struct {
    dp_row_map map;
    int32_t *window, *window_of_part, *unit;
    double *err2, *want2, *floor2, *along, *length2;
} subject_errors;

static int32_t window_of(const dp_compare_in *in, const row *r, int64_t z) {
    return (int32_t)(r->at.chunk >= 0 ? (int64_t)r->at.chunk * in->heads + r->at.head : z);
}

/* One rounding of the result itself, of its row and of its head's typical row: where a row cancels
 * to nothing beside the others, a rounding of their size is no error. And the truth's radius. */
static double floor2(const comparison *c, const row *r, int subrows) {
    const dp_compare_in *in = c->in;
    const double radius = isfinite(r->bound) ? r->limit - r->bound : 0;
    const double rms = c->rms[r->at.head];
    const double row2 = in->unit * in->unit * (r->want2 + rms * rms) + radius * radius;
    return (row2 + in->tiny * in->tiny * (double)in->width) / subrows;
}

/* What the draws of a row lack of one rounding in the format that goes through it: numbers that the
 * draws leave where they are, as the diagonal of an M that hardly differs from I, are rounded alike
 * in all of them, by next to nothing where they lie near a number of the format. */
static double missing2(const dp_compare_in *in, int64_t i, double want2) {
    const dp_draws *d = in->draws;
    double drawn = 0;
    for (int k = 0; k < d->ndraw; k++)
        drawn += d->err2[k * d->rows + i] / d->ndraw;
    return fmax(0, in->rounding * in->rounding * want2 - drawn);
}

/* Where a draw is not finite, beside numbers that are not, nothing is expected. */
static int is_drawn(const dp_draws *d, int64_t first, int n) {
    for (int k = 0; k < d->ndraw; k++)
        for (int i = 0; i < n; i++)
            if (!isfinite(d->err2[k * d->rows + first + i])) return 0;
    return 1;
}

static subject_errors errors_of(const comparison *c) {
    const dp_compare_in *in = c->in;
    const dp_draws *d = in->draws;
    const int subrows = in->subrows ? in->subrows : 1;
    const int part = (int)(in->width / subrows);
    subject_errors x = {.map = {in->rows, d->windows, (int)in->width, subrows, NULL}};
    x.window = dp_calloc((size_t)in->rows, sizeof *x.window);
    x.window_of_part = dp_calloc((size_t)d->rows, sizeof *x.window);
    x.unit = dp_calloc((size_t)d->windows, sizeof *x.unit);
    x.map.window = x.window;
    x.err2 = dp_doubles(d->rows);
    x.want2 = dp_doubles(d->rows);
    x.floor2 = dp_doubles(d->rows);
    x.along = dp_doubles(DP_NDIRECTIONS * d->windows);
    x.length2 = dp_doubles(DP_NDIRECTIONS * d->windows);
    assert(in->rows * subrows == d->rows && part == d->width);
    for (int64_t w = 0; w < d->windows; w++)
        x.unit[w] = -1;
    for (int64_t z = 0; z < in->rows; z++) {
        const row *r = &c->row[z];
        x.window[z] = window_of(in, r, z);
        assert(x.window[z] < d->windows);
        const int looked_at = is_looked_at(r) && is_drawn(d, z * subrows, subrows);
        if (looked_at) x.unit[x.window[z]] = r->at.rank * in->heads + r->at.head;
        for (int s = 0; s < subrows; s++) {
            const int64_t i = z * subrows + s;
            x.window_of_part[i] = looked_at ? x.window[z] : -1;
            for (int k = 0; k < part; k++)
                x.want2[i] += in->want[i * part + k] * in->want[i * part + k];
            x.floor2[i] = floor2(c, r, subrows) + missing2(in, i, x.want2[i]);
        }
    }
    dp_sum_errors(&x.map, c->err, in->want, x.err2, x.along, x.length2);
    return x;
}

static void errors_free(subject_errors *x) {
    free(x->window);
    free(x->window_of_part);
    free(x->unit);
    free(x->err2);
    free(x->want2);
    free(x->floor2);
    free(x->along);
    free(x->length2);
}

static void fail_by_draws(comparison *c) {
    dp_judgement *j = c->j;
    const dp_levels_result *e = &j->expected;
    const dp_level_result *l = &e->at[e->level];
    decide(j, DP_FAIL, "expected");
    j->failed = row_at(c, e->row / (c->in->subrows ? c->in->subrows : 1));
    j->times = e->excess;
    if (e->level < DP_LEVEL_FACTOR)
        snprintf(j->why, sizeof j->why,
                 "error is %.3g times what this design makes of these inputs (%s; at most %.3g "
                 "times is its own)",
                 l->ratio, dp_level_what[e->level], l->limit);
    else
        snprintf(j->why, sizeof j->why,
                 "%.3g of the error expected of this design lies %s (at most %.3g is its own)",
                 l->ratio, dp_level_what[e->level], l->limit);
}

/* <err, d> over what is looked at, d of unit length. */
static double component_along(const subject_errors *x, int64_t windows, int d) {
    double sum = 0;
    double length2 = 0;
    for (int64_t w = 0; w < windows; w++) {
        if (x->unit[w] < 0) continue;
        sum += x->along[d * windows + w];
        length2 += x->length2[d * windows + w];
    }
    return length2 > 0 ? sum / sqrt(length2) : 0;
}

static void judge_draws(comparison *c) {
    const dp_compare_in *in = c->in;
    dp_judgement *j = c->j;
    subject_errors x = errors_of(c);
    dp_levels_in l = {.draws = in->draws,
                      .err2 = x.err2,
                      .want2 = x.want2,
                      .floor2 = x.floor2,
                      .freedom = in->freedom,
                      .window = x.window_of_part,
                      .unit = x.unit,
                      .heads = in->heads,
                      .units = in->N * in->heads,
                      .by_token = in->tokens > 0 || in->subrows > 1,
                      .allowance = in->allowance};
    for (int d = 0; d < DP_NDIRECTIONS; d++)
        l.along[d] = component_along(&x, in->draws->windows, d);
    dp_levels_judge(&l, &j->expected);
    errors_free(&x);
    if (j->verdict == DP_FAIL || isnan(j->expected.excess)) return;
    if (j->expected.excess > 1) {
        fail_by_draws(c);
    } else if (isfinite(j->expected.expected)) {
        if (j->verdict == DP_UNJUDGED) j->why[0] = 0;
        decide(j, DP_PASS, "expected");
    }
}

/* ---- all of it ------------------------------------------------------------------------------- */

static const dp_row NOWHERE = {.at = {-1, -1, -1, -1, -1}};

void dp_compare(const dp_compare_in *in, dp_judgement *j) {
    *j = (dp_judgement){.N = in->N,
                        .heads = in->heads,
                        .bound = NAN,
                        .ratio = NAN,
                        .times = NAN,
                        .expected = {.excess = NAN, .expected = NAN},
                        .before = {.excess = NAN},
                        .tier = "",
                        .worst = NOWHERE,
                        .over = NOWHERE,
                        .failed = NOWHERE};
    comparison c = {.in = in, .j = j};
    c.err = dp_doubles(in->rows * in->width);
    c.row = dp_calloc((size_t)in->rows, sizeof *c.row);
    c.rms = dp_doubles(in->heads);
    snprintf(j->name, sizeof j->name, "%s", in->name);
    for (int64_t z = 0; z < in->rows; z++)
        measure(&c, z);
    scale_of_heads(&c);
    classify(&c);
    sum_up(&c);
    worst_rows(&c);
    const counts n = count_rows(&c);
    if (in->bound) j->bound = !n.bound ? INFINITY : n.want2 > 0 ? sqrt(n.bound2 / n.want2) : 0;
    judge_bounds(&c, &n);
    if (in->draws) judge_draws(&c);
    if (in->tokens > 0) windows(&c);
    j->scale = dp_judgement_row(j)->at.rank >= 0 ? c.rms[dp_judgement_row(j)->at.head] : 0;
    free(c.err);
    free(c.row);
    free(c.rms);
}

int dp_judgement_marginal(const dp_judgement *j) {
    return j->times > 1 / DP_MARGIN && j->times <= DP_MARGIN;
}

int dp_judgement_says_more(const dp_judgement *a, const dp_judgement *b) {
    if (!a) return 1;
    const int x = !strcmp(a->tier, "expected");
    const int y = !strcmp(b->tier, "expected");
    return x == y ? b->times > a->times : x;
}

const dp_row *dp_judgement_row(const dp_judgement *j) {
    return j->failed.at.rank >= 0 ? &j->failed : &j->worst;
}

void dp_judgement_free(dp_judgement *j) {
    free(j->per_rank);
    free(j->per_head);
    free(j->per_rank_ratio);
    free(j->window);
    j->per_rank = j->per_head = j->per_rank_ratio = j->window = NULL;
}
