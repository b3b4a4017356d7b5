/* The verdict on one tensor: rows are measured once, then held against their bounds, then against
 * draws of the design.
 */
#include "compare.h"
#include "ref/bound/bound.h"
#include "ref/chunk/gate.h"
#include "ref/files/safetensors.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/problem.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WINDOW 64

const char *const dp_verdict_names[DP_NVERDICTS] = {"pass", "fail", "skipped", "unjudged"};

dp_place dp_place_of(int rank, int head, int sequence) {
    return (dp_place){rank, head, sequence, -1, -1};
}

typedef enum {
    ROW_OPEN,          /* measured; no bound, or none that is finite */
    ROW_BOUND,         /* held against its bound; rows up to here are looked at */
    ROW_WITHOUT_TRUTH, /* neither is finite */
    ROW_BESIDE,        /* no value, in a chunk whose truth is not finite */
    ROW_BEYOND,        /* the truth leaves the range of fp64 or of the result's format */
    ROW_WRONG_CLASS    /* finite where the truth is not */
} dp_row_kind_of;

typedef struct {
    dp_row_kind_of kind;
    dp_place at;
    double err2, want2, bound, radius, limit; /* limit: bound and radius */
    double raw2;                              /* err2 before what the row may lose was taken off */
    double err, size, raw;      /* norms: roots of err2, want2, raw2, also where those leave fp64 */
    int64_t known, wrong, lost; /* entries: truth finite; result finite where truth is not; the
                                 * reverse */
    int worst;                  /* entry */
    double worst_err;
} dp_measured;

typedef struct {
    const dp_compare_in *in;
    double *err;      /* [rows][width] got - want */
    dp_measured *row; /* [rows] */
    double *rms;      /* [heads] root mean square of |truth| of a head's rows */
    double scale;     /* a power of two that makes squares of the truth numbers of fp64; mostly 1 */
    dp_judgement *j;
} dp_comparison;

/* Below it squares lose digits; norms below it are made of those, and bounds of such norms. */
#define DP_SQUARE_LEAST 0x1p-900
#define DP_NORM_LEAST 0x1p-400

typedef struct {
    dp_row_map map;
    int32_t *window, *window_of_part, *unit, *position, *column_head;
    double *err2, *want2, *floor2, *along, *length2;
    double *terms2; /* [draws->rows] the part of floor2 that is of terms that cancel */
    double *column2, *want_column2, *floor_column2, *column_rows;
    double stored[DP_NDIRECTIONS];
} dp_subject_errors;

/* ---- rows ------------------------------------------------------------------------------------ */

static void measure_entry(dp_measured *r, int i, double got, double want, double d) {
    const int known = isfinite(want) != 0, given = isfinite(got) != 0;
    r->known += known;
    r->wrong += !known && given;
    r->lost += known && !given;
    if (known) r->want2 += want * want;
    if (known && isfinite(d)) r->err2 += d * d;
    const double size = known && isfinite(d) ? fabs(d) : known || given ? INFINITY : -1;
    if (size <= r->worst_err) return;
    r->worst_err = size;
    r->worst = i;
}

static void allow_loss(dp_comparison *c, int64_t z, double lost) {
    dp_measured *r = &c->row[z];
    if (!(lost > 0) || r->err == 0) return;
    const double left = r->err > lost ? 1 - lost / r->err : 0;
    for (int i = 0; i < c->in->width; i++)
        c->err[z * c->in->width + i] *= left;
    r->err2 *= left * left;
    r->err = r->err2 > DP_SQUARE_LEAST && isfinite(r->err2) ? sqrt(r->err2) : r->err * left;
}

/* The power of two of a number that is not 0. */
static double power_of(double x) {
    int e;
    frexp(x, &e);
    return ldexp(1, e < 1000 ? e : 1000);
}

/* The root of a sum of squares, from the n entries where those left the range of fp64. Entries
 * without a value count nothing. */
static double norm_of(double square, const double *x, const double *want, int64_t n) {
    if (square > DP_SQUARE_LEAST && isfinite(square)) return sqrt(square);
    double top = 0, sum = 0;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(want[i]) && isfinite(x[i])) top = fmax(top, fabs(x[i]));
    if (top == 0) return 0;
    const double unit = power_of(top);
    for (int64_t i = 0; i < n; i++)
        if (isfinite(want[i]) && isfinite(x[i])) sum += x[i] / unit * (x[i] / unit);
    return sqrt(sum) * unit;
}

/* The size of a row that may underflow. */
static double smallest(const dp_compare_in *in) { return in->tiny * sqrt((double)in->width); }

static void measure(dp_comparison *c, int64_t z) {
    const dp_compare_in *in = c->in;
    dp_measured *r = &c->row[z];
    r->worst_err = -1;
    in->place(in->ctx, z, &r->at);
    for (int i = 0; i < in->width; i++) {
        const int64_t at = z * in->width + i;
        const double low = in->want_lo ? in->want_lo[at] : 0;
        c->err[at] = (in->got[at] - in->want[at]) - low;
        measure_entry(r, i, in->got[at], in->want[at], c->err[at]);
    }
    r->raw2 = r->err2;
    const double *want = in->want + z * in->width;
    r->size = norm_of(r->want2, want, want, in->width);
    r->raw = r->err = norm_of(r->err2, c->err + z * in->width, want, in->width);
    if (in->lost) allow_loss(c, z, in->lost[z]);
    r->radius = in->rad && isfinite(in->rad[z]) ? in->rad[z] : 0;
    r->bound = in->bound ? in->bound[z] : 0;
    r->limit = r->bound + r->radius;
    if (r->size < DP_NORM_LEAST) r->limit += r->size > 0 ? DP_NORM_LEAST : 0x1p-1022;
}

/* Chunks and heads in which the truth is not finite: [chunks][heads], to be freed. */
static unsigned char *poisoned_chunks(const dp_comparison *c) {
    int chunks = 0;
    for (int64_t z = 0; z < c->in->rows; z++)
        if (c->row[z].at.chunk >= chunks) chunks = c->row[z].at.chunk + 1;
    unsigned char *poison = dp_calloc((size_t)chunks * c->in->heads, 1);
    for (int64_t z = 0; z < c->in->rows; z++) {
        const dp_measured *r = &c->row[z];
        if (r->at.chunk >= 0 && r->known < c->in->width)
            poison[r->at.chunk * c->in->heads + r->at.head] = 1;
    }
    return poison;
}

/* Without a bound: has the row no value, or, as its squares overflow, is it as wrong as zeros? */
static int is_beyond_all(const dp_measured *r) {
    return isinf(r->err) || (isinf(r->err2) && r->err >= r->size);
}

/* Has the format no number for an entry of the truth, and does the result say so, by its largest or
 * none? A result of Inf may err within the bound, by 2^-6 of its row at most. */
static int leaves_range(const dp_compare_in *in, const dp_measured *r, int64_t z) {
    const double off = fmin(r->limit, 0x1p-6 * r->size);
    int leaves = 0;
    for (int64_t i = z * in->width; i < (z + 1) * in->width && in->most > 0; i++) {
        const double want = fabs(in->want[i]), got = in->got[i];
        const int inf = isinf(got) && (got > 0) == (in->want[i] > 0);
        leaves |=
            isfinite(want) && !(fabs(got) < 0.99 * in->most) && want + (inf ? off : 0) >= in->most;
    }
    return leaves;
}

static void classify(dp_comparison *c) {
    DP_OWN unsigned char *poison = poisoned_chunks(c);
    for (int64_t z = 0; z < c->in->rows; z++) {
        dp_measured *r = &c->row[z];
        const int beside = r->at.chunk >= 0 && poison[r->at.chunk * c->in->heads + r->at.head];
        if (r->wrong)
            r->kind = ROW_WRONG_CLASS;
        else if ((c->in->finite && r->known < c->in->width) || leaves_range(c->in, r, z))
            r->kind = ROW_BEYOND;
        else if (!r->known)
            r->kind = ROW_WITHOUT_TRUTH;
        else if (beside && r->lost == r->known)
            r->kind = ROW_BESIDE;
        else if (!beside && r->lost)
            r->err2 = r->raw2 = r->err = r->raw = INFINITY;
        if (!isfinite(r->limit)) r->limit = INFINITY;
        if (r->kind == ROW_OPEN && c->in->bound && (isfinite(r->limit) || is_beyond_all(r)))
            r->kind = ROW_BOUND;
    }
}

/* The square of a norm in units of the comparison's scale. */
static double square(const dp_comparison *c, double norm, double norm2) {
    return c->scale == 1 ? norm2 : norm / c->scale * (norm / c->scale);
}

static void scale_of_heads(dp_comparison *c) {
    DP_OWN double *n = dp_doubles(c->in->heads);
    double top = 0;
    for (int64_t z = 0; z < c->in->rows; z++)
        top = fmax(top, c->row[z].size);
    c->scale = top <= smallest(c->in) || (top > DP_NORM_LEAST && top < 0x1p400) ? 1 : power_of(top);
    for (int64_t z = 0; z < c->in->rows; z++) {
        c->rms[c->row[z].at.head] += square(c, c->row[z].size, c->row[z].want2);
        n[c->row[z].at.head]++;
    }
    for (int h = 0; h < c->in->heads; h++)
        c->rms[h] = n[h] > 0 ? c->scale * sqrt(c->rms[h] / n[h]) : 0;
}

static double quotient(double err, double size) {
    return err == 0 ? 0 : size > 0 && isfinite(err) ? err / size : INFINITY;
}

static dp_row row_at(const dp_comparison *c, int64_t z) {
    const dp_measured *r = &c->row[z];
    const int64_t at = z * c->in->width + r->worst;
    return (dp_row){.at = r->at,
                    .index = r->worst,
                    .got = c->in->got[at],
                    .want = c->in->want[at],
                    .err = r->raw,
                    .bound = c->in->bound ? r->limit + (c->in->lost ? c->in->lost[z] : 0) : NAN,
                    .size = r->size};
}

static void note_over(dp_comparison *c, int64_t z) {
    c->j->last = row_at(c, z);
    if (!c->j->nover++) c->j->first = c->j->last;
}

/* ---- what is said of the whole tensor -------------------------------------------------------- */

/* Errors of ranks and heads, and of the tensor. */
static void sum_up(dp_comparison *c) {
    const dp_compare_in *in = c->in;
    dp_judgement *j = c->j;
    const int n = in->N * in->heads;
    DP_OWN double *err = dp_doubles(n + in->N + 1);
    DP_OWN double *want = dp_doubles(n + in->N + 1);
    DP_OWN int *seen = dp_calloc((size_t)(n + in->N + 1), sizeof *seen);
    for (int64_t z = 0; z < in->rows; z++) {
        const dp_measured *r = &c->row[z];
        if (r->kind > ROW_BOUND) continue;
        const int unit[] = {r->at.rank * in->heads + r->at.head, n + r->at.rank, n + in->N};
        for (int i = 0; i < 3; i++) {
            err[unit[i]] += square(c, r->raw, r->raw2);
            want[unit[i]] += square(c, r->size, r->want2);
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
}

/* Is the row 0, and the truth about as large as rows of its head, or beyond the bound? */
static int is_blank(const dp_comparison *c, int64_t z) {
    const dp_measured *r = &c->row[z];
    for (int64_t i = 0; i < c->in->width; i++)
        if (c->in->got[z * c->in->width + i] != 0) return 0;
    return r->size > 1e-3 * c->rms[r->at.head] || (r->kind == ROW_BOUND && r->err > r->limit);
}

static void worst_rows(dp_comparison *c) {
    dp_judgement *j = c->j;
    double top = -1;
    j->per_rank_ratio = dp_doubles(c->in->N);
    for (int r = 0; r < c->in->N; r++)
        j->per_rank_ratio[r] = NAN;
    for (int64_t z = 0; z < c->in->rows; z++) {
        const dp_measured *r = &c->row[z];
        j->nbeyond += r->kind == ROW_BEYOND;
        if (r->kind == ROW_WRONG_CLASS) note_over(c, z);
        if (r->kind > ROW_BOUND && r->kind != ROW_WRONG_CLASS) continue;
        j->nblank += is_blank(c, z);
        const double rel = r->kind <= ROW_BOUND ? quotient(r->err, c->rms[r->at.head]) : INFINITY;
        if (rel > top) {
            top = j->worst_rel = rel;
            j->worst = row_at(c, z);
        }
        if (r->kind != ROW_BOUND) continue;
        const double ratio = isfinite(r->limit) ? quotient(r->err, r->limit) : INFINITY;
        if (!(ratio <= j->ratio)) {
            j->ratio = ratio;
            j->over = row_at(c, z);
        }
        if (!(ratio <= j->per_rank_ratio[r->at.rank])) j->per_rank_ratio[r->at.rank] = ratio;
        if (!(ratio <= 1)) note_over(c, z);
    }
}

/* Largest over heads of |error|_F / |truth|_F in each window of 64 tokens. */
static void windows(dp_comparison *c) {
    const dp_compare_in *in = c->in;
    const int n = (int)((in->tokens + WINDOW - 1) / WINDOW);
    DP_OWN double *err = dp_doubles((int64_t)n * in->heads);
    DP_OWN double *want = dp_doubles((int64_t)n * in->heads);
    for (int64_t z = 0; z < in->rows; z++) {
        const dp_measured *r = &c->row[z];
        err[r->at.token / WINDOW * in->heads + r->at.head] += r->raw2;
        want[r->at.token / WINDOW * in->heads + r->at.head] += r->want2;
    }
    c->j->nwindow = n;
    c->j->window = dp_doubles(n);
    for (int64_t z = 0; z < (int64_t)n * in->heads; z++) {
        const double x = want[z] > 0 ? sqrt(err[z] / want[z]) : 0;
        if (x > c->j->window[z / in->heads]) c->j->window[z / in->heads] = x;
    }
}

/* ---- the bound tier -------------------------------------------------------------------------- */

typedef struct {
    int64_t bound, beside, wrong, open; /* rows of each kind */
    double bound2, want2;               /* of those with a bound */
} counts;

static counts count_rows(const dp_comparison *c) {
    counts n = {0};
    for (int64_t z = 0; z < c->in->rows; z++) {
        const dp_measured *r = &c->row[z];
        n.beside += r->kind == ROW_BESIDE;
        n.wrong += r->kind == ROW_WRONG_CLASS;
        n.open += r->kind == ROW_OPEN;
        if (r->kind != ROW_BOUND) continue;
        n.bound++;
        n.bound2 += square(c, r->limit, r->limit * r->limit);
        n.want2 += square(c, r->size, r->want2);
    }
    return n;
}

static void decide(dp_judgement *j, dp_verdict verdict, const char *tier) {
    j->verdict = verdict;
    j->tier = tier;
}

typedef struct {
    char text[24];
} times_text;

/* Three digits: 6.38, 638, 6,380; beyond a million 6.38e+06. */
static times_text times_of(double x) {
    times_text t;
    const long long n = x >= 999.5 && x < 1e6 ? 10 * llround(x / 10) : 0;
    if (n)
        snprintf(t.text, sizeof t.text, "%lld,%03lld", n / 1000, n % 1000);
    else
        snprintf(t.text, sizeof t.text, "%.3g", x);
    return t;
}

static void fail_by_bound(dp_comparison *c) {
    dp_judgement *j = c->j;
    decide(j, DP_FAIL, "bound");
    j->failed = j->over;
    j->times = j->ratio;
    snprintf(j->why, sizeof j->why,
             "error is %s times its bound (|error| %.3g, bound %.3g, |truth| %.3g of the row, "
             "%.3g of its head's typical row)",
             times_of(j->ratio).text, j->over.err, j->over.bound, j->over.size,
             c->rms[j->over.at.head]);
}

static void judge_bounds(dp_comparison *c, const counts *n) {
    dp_judgement *j = c->j;
    const dp_compare_in *in = c->in;
    if (n->wrong) {
        decide(j, DP_FAIL, "bound");
        j->failed = j->first;
        snprintf(j->why, sizeof j->why,
                 "%lld rows have entries that are finite where the truth is not",
                 (long long)n->wrong);
    } else if (!in->bound) {
        j->verdict = DP_UNJUDGED;
        snprintf(j->why, sizeof j->why, "%s",
                 in->why_unjudged ? in->why_unjudged : "no bound is derived for this tensor");
    } else if (!n->bound) {
        decide(j, n->beside + n->open ? DP_UNJUDGED : DP_PASS, n->beside + n->open ? "" : "bound");
        if (j->verdict == DP_UNJUDGED) snprintf(j->why, sizeof j->why, "no row has a useful bound");
    } else if (j->ratio > 1 && (!in->bound_shown || isinf(j->over.err) || isinf(j->over.bound))) {
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

/* ---- the subject's errors in the shape of the draws ------------------------------------------ */

#define DP_STORED_MOST 6.0 /* standard deviations of roundings that add up at random */

static int32_t window_of(const dp_compare_in *in, const dp_measured *r, int64_t z) {
    return (int32_t)(r->at.chunk >= 0 ? (int64_t)r->at.chunk * in->heads + r->at.head : z);
}

static int every_head_is_zero(const dp_comparison *c) {
    for (int h = 0; h < c->in->heads; h++)
        if (c->rms[h] > 0) return 0;
    return 1;
}

/* One rounding of the result, of its row and of its head's typical row. Where a row cancels beside
 * the others, a rounding of their size is no error. And the truth's radius. Where all rows of a
 * tensor cancel, only the bound contains the size of their terms. The floor is then 2^-8 of a
 * rounding in the bound, a rounding of fp32. */
static double floor2(const dp_comparison *c, const dp_measured *r, int subrows) {
    const dp_compare_in *in = c->in;
    const double radius = isfinite(r->bound) ? r->limit - r->bound : 0;
    const double rms = c->rms[r->at.head];
    const int nothing = r->want2 <= 0x1p-252 * rms * rms; /* fp32 underflows */
    const double unit = nothing ? fmax(in->unit, in->cancelled) : in->unit;
    const int none = rms == 0 && isfinite(r->bound) && every_head_is_zero(c);
    const double terms = none ? 0x1p-8 * in->cancelled * r->bound : 0;
    const double row2 = unit * unit * (r->want2 + rms * rms) + radius * radius + terms * terms;
    return (row2 + in->tiny * in->tiny * (double)in->width) / subrows;
}

/* The mean square of a row's draws. */
static double drawn2(const dp_draws *d, int64_t i) {
    double drawn = 0;
    for (int k = 0; k < d->ndraw; k++)
        drawn += d->err2[k * d->rows + i] / d->ndraw;
    return drawn;
}

/* The part of one rounding that the draws of a row miss. Numbers that the draws leave unchanged, as
 * the diagonal of an M that hardly differs from I, are rounded alike in all draws. Their error is
 * tiny if they lie near a number of the format. */
static double missing2(const dp_compare_in *in, int64_t i, double want2) {
    return fmax(0, in->rounding * in->rounding * want2 - drawn2(in->draws, i));
}

/* The same of one rounding of the terms of row z, part i, where these cancel. Draws that subtract
 * equal products make none. A kernel that fuses them, or adds in another order, does. The bound
 * alone knows their size. One entry may have all of it. */
static double terms2(const dp_comparison *c, int64_t z, int64_t i) {
    const double terms = isfinite(c->row[z].bound) ? c->in->terms * c->row[z].bound : 0;
    return terms > 0 ? fmax(0, terms * terms - drawn2(c->in->draws, i)) : 0;
}

/* Where draws have errors of other entries than the subject, nothing is expected. */
static int is_drawn(const dp_draws *d, const dp_measured *r, int64_t first, int n) {
    for (int64_t k = 0; k < d->ndraw; k++) {
        double compared = (double)n * d->width;
        for (int64_t i = k * d->rows + first; i < k * d->rows + first + n; i++) {
            compared -= d->blank ? d->blank[i] : 0;
            if (!isfinite(d->err2[i])) return 0;
        }
        if (compared != (double)(r->known - r->lost)) return 0;
    }
    return 1;
}

static dp_subject_errors errors_new(const dp_comparison *c, int subrows) {
    const dp_compare_in *in = c->in;
    const dp_draws *d = in->draws;
    const int64_t groups = d->columns / d->width;
    dp_subject_errors x = {
        .map = {
            .rows = in->rows, .windows = d->windows, .width = (int)in->width, .subrows = subrows}};
    x.window = dp_calloc((size_t)in->rows, sizeof *x.window);
    x.window_of_part = dp_calloc((size_t)d->rows, sizeof *x.window);
    x.unit = dp_calloc((size_t)d->windows, sizeof *x.unit);
    x.map.window = x.window;
    x.err2 = dp_doubles(d->rows);
    x.want2 = dp_doubles(d->rows);
    x.floor2 = dp_doubles(d->rows);
    x.terms2 = dp_doubles(d->rows);
    x.along = dp_doubles(DP_NDIRECTIONS * d->windows);
    x.length2 = dp_doubles(DP_NDIRECTIONS * d->windows);
    if (!groups) return x;
    x.column2 = dp_doubles(d->columns);
    x.want_column2 = dp_doubles(d->columns);
    x.floor_column2 = dp_doubles(d->columns);
    x.column_rows = dp_doubles(groups);
    x.column_head = dp_calloc((size_t)groups, sizeof *x.column_head);
    return x;
}

static void subject_errors_free(dp_subject_errors *x) {
    DP_FREE(x->window, x->window_of_part, x->unit, x->position, x->column_head, x->err2, x->want2,
            x->floor2, x->along, x->length2, x->column2, x->want_column2, x->floor_column2,
            x->column_rows, x->terms2);
}

/* The place of every row in its window; none where a head has one window only. */
static void set_positions(const dp_comparison *c, dp_subject_errors *x) {
    const dp_compare_in *in = c->in;
    const int64_t windows = in->draws->windows;
    if (in->tokens <= 0 || windows <= in->heads) return;
    DP_OWN int64_t *first = dp_calloc((size_t)windows, sizeof *first);
    x->position = dp_calloc((size_t)in->rows, sizeof *x->position);
    for (int64_t w = 0; w < windows; w++)
        first[w] = INT64_MAX;
    for (int64_t z = 0; z < in->rows; z++)
        if (c->row[z].at.token < first[x->window[z]]) first[x->window[z]] = c->row[z].at.token;
    for (int64_t z = 0; z < in->rows; z++)
        x->position[z] = (int32_t)((c->row[z].at.token - first[x->window[z]]) % DP_POSITIONS);
}

/* The entries of one row, added to the columns of its group. */
static void add_columns(const dp_comparison *c, int64_t z, int64_t group, dp_subject_errors *x) {
    const dp_compare_in *in = c->in;
    const int part = in->draws->width, subrows = x->map.subrows;
    for (int64_t i = 0; i < in->width; i++) {
        const int64_t at = z * in->width + i, column = group * part + i % part;
        const double want = isfinite(in->want[at]) ? in->want[at] : 0;
        const double err = isfinite(c->err[at]) ? c->err[at] : 0;
        x->column2[column] += err * err;
        x->want_column2[column] += want * want;
        const int64_t row = z * subrows + i / part;
        x->floor_column2[column] += (x->floor2[row] - x->terms2[row]) / part + x->terms2[row];
        x->floor_column2[column] += in->store * in->store * want * want;
    }
}

/* Rows of tokens have their heads as groups, states are groups of their own. A group of which a row
 * that has a truth is not looked at has no columns. */
static void set_columns(const dp_comparison *c, dp_subject_errors *x) {
    const dp_compare_in *in = c->in;
    for (int64_t z = 0; z < in->rows && x->column2; z++) {
        const dp_measured *r = &c->row[z];
        const int64_t group = in->tokens > 0 ? r->at.head : z;
        const int looked_at = x->window_of_part[z * x->map.subrows] >= 0;
        x->column_head[group] = r->at.head;
        if (looked_at) add_columns(c, z, group, x);
        x->column_rows[group] += looked_at ? x->map.subrows : r->known ? -INFINITY : 0;
    }
}

double dp_rounding_error(double x, double u) {
    int e;
    const double m = frexp(x, &e);
    return u > 0 ? ldexp(u * rint(m / u) - m, e) : 0;
}

/* Rounding the result into its file's format adds at most this along each direction. Roundings are
 * independent, as those of numbers that differ are, or those of the truth itself: equal numbers
 * round alike. So are those of terms that cancel. */
static void set_stored(const dp_comparison *c, dp_subject_errors *x) {
    const dp_compare_in *in = c->in;
    const int part = in->draws->width;
    double sum[DP_NDIRECTIONS] = {0}, length2[DP_NDIRECTIONS] = {0}, alike[DP_NDIRECTIONS] = {0};
    for (int64_t i = 0; i < in->rows * in->width && (in->store > 0 || in->terms > 0); i++) {
        const double want = in->want[i];
        const int64_t z = i / in->width;
        if (x->window_of_part[z * x->map.subrows] < 0 || !isfinite(want)) continue;
        const double rounding = dp_rounding_error(want, in->file_unit);
        const double rms2 = in->store * in->store * want * want + x->terms2[i / part];
        for (int d = 0; d < DP_NDIRECTIONS; d++) {
            const double e = dp_direction_entry((dp_direction)d, want);
            sum[d] += rms2 * e * e;
            length2[d] += e * e;
            alike[d] += rounding * e;
        }
    }
    for (int d = 0; d < DP_NDIRECTIONS; d++) {
        const double rms = sqrt(sum[d]);
        if (length2[d] > 0)
            x->stored[d] = fmax(DP_STORED_MOST * rms, fabs(alike[d]) + rms) / sqrt(length2[d]);
    }
}

/* One row, in its parts. */
static void set_row(const dp_comparison *c, int64_t z, dp_subject_errors *x) {
    const dp_compare_in *in = c->in;
    const dp_draws *d = in->draws;
    const dp_measured *r = &c->row[z];
    const int subrows = x->map.subrows;
    x->window[z] = window_of(in, r, z);
    assert(x->window[z] < d->windows);
    const int looked_at = r->kind <= ROW_BOUND && is_drawn(d, r, z * subrows, subrows);
    if (looked_at) x->unit[x->window[z]] = r->at.rank * in->heads + r->at.head;
    for (int64_t i = z * subrows; i < (z + 1) * subrows; i++) {
        x->window_of_part[i] = looked_at ? x->window[z] : -1;
        for (int k = 0; k < d->width; k++) {
            const double want = in->want[i * d->width + k];
            if (isfinite(want)) x->want2[i] += want * want;
        }
        x->terms2[i] = terms2(c, z, i);
        x->floor2[i] = floor2(c, r, subrows) + missing2(in, i, x->want2[i]) + x->terms2[i];
    }
}

/* The errors of a comparison that has draws, to be freed. */
static dp_subject_errors subject_errors_of(const dp_comparison *c) {
    const dp_compare_in *in = c->in;
    const dp_draws *d = in->draws;
    dp_subject_errors x = errors_new(c, in->subrows ? in->subrows : 1);
    assert(in->rows * x.map.subrows == d->rows && in->width == (int64_t)d->width * x.map.subrows);
    for (int64_t w = 0; w < d->windows; w++)
        x.unit[w] = -1;
    for (int64_t z = 0; z < in->rows; z++)
        set_row(c, z, &x);
    set_positions(c, &x);
    set_columns(c, &x);
    set_stored(c, &x);
    for (int64_t i = 0; i < d->rows; i++)
        x.floor2[i] += in->store * in->store * x.want2[i];
    const dp_error_sums to = {.err2 = x.err2, .along = x.along, .length2 = x.length2};
    dp_sum_errors(&x.map, c->err, in->want, &to);
    return x;
}

/* ---- limits as numbers for others ------------------------------------------------------------ */

enum { MOST_KEPT = 64 };
typedef enum {
    KEPT_BOUND,
    KEPT_ROW,
    KEPT_WINDOW,
    KEPT_WINDOW_MOST,
    KEPT_UNIT,
    KEPT_UNIT_MOST,
    KEPT_TENSOR_MOST,
    KEPT_RESULT,
    KEPT_TRUTH,
    KEPT_TRUTH_LO,
    NKEPT
} kept_array;
static const char *const SUFFIX[NKEPT] = {"bound", "row",       "window",      "window_most",
                                          "unit",  "unit_most", "tensor_most", "result",
                                          "truth", "truth_lo"};

typedef struct {
    char name[24];
    int64_t n[NKEPT];
    double *x[NKEPT];
} limits;

static struct {
    int keeps, results, n;
    limits of[MOST_KEPT];
} kept;

void dp_limits_keep(int results) {
    kept.keeps = 1;
    kept.results = results;
}

static void limits_free(limits *t) {
    for (int k = 0; k < NKEPT; k++)
        free(t->x[k]);
    memset(t, 0, sizeof *t);
}

static double *filled(limits *t, kept_array k, int64_t n, double x) {
    t->n[k] = n;
    t->x[k] = malloc((size_t)(n > 0 ? n : 1) * sizeof(double));
    for (int64_t i = 0; t->x[k] && i < n; i++)
        t->x[k][i] = x;
    return t->x[k];
}

/* The largest |error| of a unit of that level: an error there alone says its E and its limit. */
static double most_error(dp_levels_in *l, dp_level level, const double *err2) {
    dp_levels_result out;
    l->err2 = err2;
    dp_levels_judge(l, &out);
    const dp_level_result *r = &out.at[level];
    return r->ratio > 0 && isfinite(r->limit) ? r->limit / r->ratio : INFINITY;
}

/* Parts of group `at` share an error of length 1. */
static double most_of(dp_levels_in *l, dp_level level, const double *group, int64_t at, double *e) {
    const int64_t parts = l->draws->rows;
    int64_t n = 0;
    for (int64_t i = 0; i < parts; i++)
        n += group[i] == (double)at;
    for (int64_t i = 0; i < parts; i++)
        e[i] = group[i] == (double)at ? 1.0 / (double)n : 0;
    return n ? most_error(l, level, e) : INFINITY;
}

static void keep_levels(limits *t, const dp_levels_in *given) {
    dp_levels_in l = *given;
    const int64_t parts = l.draws->rows, windows = l.draws->windows;
    DP_OWN double *e = calloc((size_t)parts, sizeof *e);
    double *head_seen = l.head_seen;
    l.head_seen = NULL;
    memset(l.along, 0, sizeof l.along);
    double *row = filled(t, KEPT_ROW, parts, INFINITY), *window = filled(t, KEPT_WINDOW, parts, -1);
    double *unit = filled(t, KEPT_UNIT, parts, -1),
           *of = filled(t, KEPT_WINDOW_MOST, windows, INFINITY);
    double *of_unit = filled(t, KEPT_UNIT_MOST, l.units, INFINITY),
           *all = filled(t, KEPT_TENSOR_MOST, 1, 0);
    for (int64_t i = 0; i < parts; i++) {
        if (l.window[i] < 0) continue;
        window[i] = l.window[i];
        unit[i] = l.unit[l.window[i]];
    }
    for (int64_t i = 0; i < parts && l.by_token; i++) {
        e[i] = 1;
        if (window[i] >= 0) row[i] = most_error(&l, DP_LEVEL_ROW, e);
        e[i] = 0;
    }
    for (int64_t w = 0; w < windows; w++)
        of[w] = most_of(&l, DP_LEVEL_WINDOW, window, w, e);
    for (int64_t u = 0; u < l.units; u++)
        of_unit[u] = most_of(&l, DP_LEVEL_RANK, unit, u, e);
    for (int64_t i = 0; i < parts; i++)
        e[i] = window[i] >= 0 ? 1.0 / (double)parts : 0;
    const double whole = most_error(&l, DP_LEVEL_TENSOR, e);
    double length2 = 0;
    for (int64_t i = 0; i < parts; i++)
        length2 += e[i];
    all[0] = whole * sqrt(length2);
    l.head_seen = head_seen;
}

static limits *limits_of(const char *name) {
    for (int i = 0; i < kept.n; i++)
        if (!strcmp(kept.of[i].name, name)) return &kept.of[i];
    return kept.n < MOST_KEPT ? &kept.of[kept.n++] : NULL;
}

static void keep_results(limits *t, const dp_compare_in *in) {
    const int64_t n = in->rows * in->width;
    double *to[3] = {filled(t, KEPT_RESULT, n, 0), filled(t, KEPT_TRUTH, n, 0),
                     filled(t, KEPT_TRUTH_LO, n, 0)};
    const double *from[3] = {in->got, in->want, in->want_lo};
    for (int k = 0; k < 3; k++)
        if (to[k] && from[k] && n) memcpy(to[k], from[k], (size_t)n * sizeof *to[k]);
}

/* Keeps the limits of a comparison, where somebody asked. l NULL: no draws. */
static void keep_limits(const dp_comparison *c, const dp_levels_in *l) {
    const dp_compare_in *in = c->in;
    limits *t = kept.keeps ? limits_of(in->name) : NULL;
    if (!t) return;
    limits_free(t);
    snprintf(t->name, sizeof t->name, "%s", in->name);
    double *b = filled(t, KEPT_BOUND, in->rows, INFINITY);
    for (int64_t z = 0; b && z < in->rows && !in->bound_shown; z++)
        if (c->row[z].kind == ROW_BOUND) b[z] = c->row[z].limit;
    if (l) keep_levels(t, l);
    if (kept.results) keep_results(t, in);
}

static void forget_limits(void) {
    for (int i = 0; i < kept.n; i++)
        limits_free(&kept.of[i]);
    memset(&kept, 0, sizeof kept);
}

dp_status dp_limits_write(const char *path, dp_err *e) {
    DP_FREED(dp_tensorfile_free) dp_tensorfile f = {0};
    for (int i = 0; i < kept.n; i++)
        for (int k = 0; k < NKEPT; k++) {
            limits *t = &kept.of[i];
            char name[48];
            snprintf(name, sizeof name, "%s.%s", t->name, SUFFIX[k]);
            if (t->x[k]) dp_tensorfile_add(&f, name, "F64", 1, &t->n[k], t->x[k]);
        }
    const dp_status st = dp_safetensors_write(path, &f, e);
    forget_limits();
    return st;
}

/* ---- the expected tier ----------------------------------------------------------------------- */

/* Which of a head's places or channels, where one decided. */
static void name_unit(const dp_comparison *c, char *text, size_t size) {
    const dp_levels_result *e = &c->j->expected;
    const int64_t at = e->at[e->level].at;
    *text = 0;
    if (e->level == DP_LEVEL_POSITION)
        snprintf(text, size, ": place %lld of each", (long long)(at % DP_POSITIONS));
    if (e->level == DP_LEVEL_CHANNEL)
        snprintf(text, size, ": %lld", (long long)(at % c->in->draws->width));
}

static void fail_by_draws(dp_comparison *c) {
    dp_judgement *j = c->j;
    const dp_levels_result *e = &j->expected;
    const dp_level_result *l = &e->at[e->level];
    char unit[60];
    name_unit(c, unit, sizeof unit);
    decide(j, DP_FAIL, "expected");
    j->failed = row_at(c, e->row / (c->in->subrows ? c->in->subrows : 1));
    j->times = e->excess;
    if (e->level < DP_LEVEL_FACTOR)
        snprintf(j->why, sizeof j->why,
                 "error is %s times the rounding error expected for this design (limit %.3g), %s%s",
                 times_of(l->ratio).text, l->limit, dp_level_what[e->level], unit);
    else
        snprintf(j->why, sizeof j->why,
                 "%s times the rounding error expected for this design (limit %.3g) lies %s",
                 times_of(l->ratio).text, l->limit, dp_level_what[e->level]);
}

/* <err, d> over what is looked at, d of unit length. */
static double component_along(const dp_subject_errors *x, int64_t windows, int d) {
    double sum = 0;
    double length2 = 0;
    for (int64_t w = 0; w < windows; w++) {
        if (x->unit[w] < 0) continue;
        sum += x->along[d * windows + w];
        length2 += x->length2[d * windows + w];
    }
    return length2 > 0 ? sum / sqrt(length2) : 0;
}

/* The power of both tiers: by head the least |c - 1| of the tensor times c. And which
 * rows lie under a limit. */
typedef struct {
    double tensor, *head;   /* [heads] INFINITY: nothing */
    double blind;           /* share of the truth's square in rows that could be zeros */
    unsigned char *covered; /* [rows] */
} power;

static power power_new(const dp_comparison *c) {
    power p = {INFINITY, dp_doubles(c->in->heads), 0, dp_calloc((size_t)c->in->rows, 1)};
    for (int h = 0; h < c->in->heads; h++)
        p.head[h] = INFINITY;
    return p;
}

static void power_free(power *p) {
    free(p->head);
    free(p->covered);
}

static void see_by_bounds(const dp_comparison *c, power *p) {
    for (int64_t z = 0; z < c->in->rows && !c->in->bound_shown; z++) {
        const dp_measured *r = &c->row[z];
        if (r->kind != ROW_BOUND) continue;
        p->covered[z] = 1;
        if (!(r->size > 0)) continue;
        const double seen = r->limit / r->size;
        p->tensor = fmin(p->tensor, seen);
        p->head[r->at.head] = fmin(p->head[r->at.head], seen);
    }
}

/* Share of the truth's square in rows that all could be zeros, by limits of rows, windows and
 * tensor. row, window: as dp_levels_in.seen. */
static double blind_share(const dp_comparison *c, const dp_subject_errors *x, const double *row,
                          const double *window) {
    const dp_draws *d = c->in->draws;
    DP_OWN double *blind = dp_doubles(d->windows), *want = dp_doubles(d->windows);
    double all = 0, unseen = 0;
    for (int64_t i = 0; i < d->rows; i++) {
        const dp_measured *r = &c->row[i / x->map.subrows];
        const int bounded = r->kind == ROW_BOUND && !c->in->bound_shown && r->limit < r->size;
        const int32_t w = x->window_of_part[i];
        if (w < 0) continue;
        want[w] += x->want2[i];
        if (!(row[i] < 1) && !bounded) blind[w] += x->want2[i];
    }
    for (int64_t w = 0; w < d->windows; w++) {
        all += want[w];
        if (!(blind[w] > window[w] * window[w] * want[w])) unseen += blind[w];
    }
    const double tensor = c->j->expected.at[DP_LEVEL_TENSOR].seen;
    return unseen > 0 && !(unseen > tensor * tensor * all) ? unseen / all : 0;
}

static void judge_levels(const dp_comparison *c, const dp_subject_errors *x, power *p) {
    const dp_compare_in *in = c->in;
    DP_OWN double *row = dp_doubles(in->draws->rows), *window = dp_doubles(in->draws->windows);
    for (int64_t i = 0; i < in->draws->rows; i++)
        row[i] = INFINITY;
    for (int64_t i = 0; i < in->draws->windows; i++)
        window[i] = INFINITY;
    dp_levels_in l = {.draws = in->draws,
                      .err2 = x->err2,
                      .want2 = x->want2,
                      .floor2 = x->floor2,
                      .freedom = in->freedom,
                      .column2 = x->column2,
                      .want_column2 = x->want_column2,
                      .floor_column2 = x->floor_column2,
                      .column_rows = x->column_rows,
                      .column_head = x->column_head,
                      .position = x->position,
                      .window = x->window_of_part,
                      .unit = x->unit,
                      .heads = in->heads,
                      .units = in->N * in->heads,
                      .by_token = in->tokens > 0 || in->subrows > 1,
                      .allowance = in->allowance,
                      .seen = {row, window},
                      .head_seen = p->head};
    for (int d = 0; d < DP_NDIRECTIONS; d++) {
        l.along[d] = component_along(x, in->draws->windows, d);
        l.stored[d] = x->stored[d];
    }
    dp_levels_judge(&l, &c->j->expected);
    if (!in->of_heads) p->blind = blind_share(c, x, row, window);
    memset(l.seen, 0, sizeof l.seen);
    keep_limits(c, &l);
}

static void judge_draws(dp_comparison *c, power *p) {
    dp_judgement *j = c->j;
    DP_FREED(subject_errors_free) dp_subject_errors x = subject_errors_of(c);
    judge_levels(c, &x, p);
    const int judged = isfinite(j->expected.expected) && !isnan(j->expected.excess);
    if (judged) p->tensor = fmin(p->tensor, j->expected.seen);
    for (int64_t z = 0; z < c->in->rows && judged; z++)
        p->covered[z] |= x.window_of_part[z * x.map.subrows] >= 0;
    if (j->verdict == DP_FAIL || isnan(j->expected.excess)) return;
    if (j->expected.excess > 1) {
        fail_by_draws(c);
    } else if (judged) {
        if (j->verdict == DP_UNJUDGED) j->why[0] = 0;
        decide(j, DP_PASS, "expected");
    }
}

/* ---- what no limit covers -------------------------------------------------------------------- */

/* Is the truth of a row known to no better than 2^-10 of it and of a typical row of its head?
 * Inputs that are not finite make infinite radii, which do not count. */
static int is_vague(const dp_comparison *c, const dp_measured *r, double *over) {
    const double rms = c->rms[r->at.head],
                 size = c->scale == 1 ? sqrt(r->want2 + rms * rms) : fmax(r->size, rms);
    if (r->kind > ROW_BOUND || !(r->radius > fmax(0x1p-10 * size, c->in->tiny))) return 0;
    if (r->size == 0 && r->raw == 0) return 0;
    *over = fmax(*over, r->radius / size);
    return 1;
}

static int64_t count_vague(const dp_comparison *c, double *over) {
    int64_t n = 0;
    for (int64_t z = 0; z < c->in->rows; z++)
        n += is_vague(c, &c->row[z], over);
    return n;
}

/* Rows with values that lie under no limit. Zeros where the truth is zero are right. */
static int64_t uncovered(const dp_comparison *c, const power *p) {
    int64_t n = 0;
    for (int64_t z = 0; z < c->in->rows; z++) {
        const dp_measured *r = &c->row[z];
        n += r->kind <= ROW_BOUND && !p->covered[z] && !(r->size == 0 && r->raw == 0);
    }
    return n;
}

/* No run of a case on 1 or 4 ranks has more than a share of 0.014. On 2 ranks M of
 * deltaproduct-weak has 0.073. */
#define UNSEEN_MOST 0x1p-4

/* The power over the tensor, and over the head of which it is least. */
static void set_power(dp_comparison *c, const power *p) {
    dp_judgement *j = c->j;
    j->seen = 1 + p->tensor;
    for (int h = 0; h < c->in->heads; h++) {
        if (!(c->rms[h] > smallest(c->in)) || 1 + p->head[h] <= j->seen_head) continue;
        j->seen_head = 1 + p->head[h];
        j->blind_head = h;
    }
}

static int wants_zero(const dp_comparison *c) {
    for (int64_t z = 0; z < c->in->rows; z++)
        if (c->row[z].size > 0) return 0;
    return 1;
}

static int all_zero(const dp_comparison *c) {
    for (int64_t z = 0; z < c->in->rows; z++)
        if (c->row[z].known < c->in->width || c->row[z].raw > 0) return 0;
    return wants_zero(c);
}

static void leave_unjudged(dp_comparison *c, const power *p) {
    dp_judgement *j = c->j;
    set_power(c, p);
    if (j->verdict == DP_UNJUDGED && all_zero(c)) {
        decide(j, DP_PASS, "exact");
        j->why[0] = 0;
    }
    if (j->verdict != DP_FAIL && j->nbeyond) {
        decide(j, DP_UNJUDGED, "");
        snprintf(j->why, sizeof j->why,
                 "the truth of %lld of %lld rows leaves the range of their format: %.5g is Inf",
                 (long long)j->nbeyond, (long long)c->in->rows,
                 c->in->most > 0 ? c->in->most : DBL_MAX);
    }
    if (j->verdict != DP_PASS) return;
    double radius = 0;
    const int64_t open = uncovered(c, p), vague = count_vague(c, &radius);
    const int sums = c->in->of_heads && !wants_zero(c);
    const double seen = sums ? j->seen : j->seen_head;
    const int nothing = isnan(j->seen_head); /* the truth is 0, or near it, in every head */
    const int below = nothing && !c->in->may_vanish && j->seen > 2 && !wants_zero(c);
    const int whole = c->in->seen_most > 0 && !nothing && j->seen > c->in->seen_most;
    j->wide = p->blind > UNSEEN_MOST && !nothing && !(seen > 2);
    if (!open && !vague && !(seen > 2) && !whole && !below && !j->wide) return;
    decide(j, DP_UNJUDGED, "");
    if (open)
        snprintf(j->why, sizeof j->why, "%lld of %lld rows lie under no limit", (long long)open,
                 (long long)c->in->rows);
    else if (below)
        snprintf(j->why, sizeof j->why,
                 "zeros would pass: the truth is no larger than what may underflow");
    else if (whole && !(seen > 2))
        snprintf(j->why, sizeof j->why, "the tensor times %.3g would pass", j->seen);
    else if (j->wide && !vague)
        snprintf(j->why, sizeof j->why,
                 "zeros would pass in rows that hold %.3g of the tensor's norm", sqrt(p->blind));
    else if (!(seen > 2))
        snprintf(j->why, sizeof j->why,
                 "the truth's radius is up to %.2g times the truth in %lld of %lld rows", radius,
                 (long long)vague, (long long)c->in->rows);
    else if (isfinite(seen))
        snprintf(j->why, sizeof j->why,
                 "zeros in head %d would pass: limits there are %.3g times the truth",
                 j->blind_head, seen - 1);
    else
        snprintf(j->why, sizeof j->why, "zeros in head %d would pass: no limit is finite there",
                 j->blind_head);
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
                        .failed = NOWHERE,
                        .seen = INFINITY,
                        .seen_head = NAN,
                        .blind_head = -1};
    dp_comparison c = {.in = in, .j = j};
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
    DP_FREED(power_free) power p = power_new(&c);
    if (in->bound) j->bound = !n.bound ? INFINITY : n.want2 > 0 ? sqrt(n.bound2 / n.want2) : 0;
    judge_bounds(&c, &n);
    see_by_bounds(&c, &p);
    if (in->draws && c.scale == 1)
        judge_draws(&c, &p);
    else
        keep_limits(&c, NULL);
    leave_unjudged(&c, &p);
    if (in->tokens > 0) windows(&c);
    j->scale = dp_judgement_row(j)->at.rank >= 0 ? c.rms[dp_judgement_row(j)->at.head] : 0;
    DP_FREE(c.err, c.row, c.rms);
}

int dp_judgement_marginal(const dp_judgement *j) {
    return j->times > 1 / DP_MARGIN && j->times <= DP_MARGIN;
}

const dp_row *dp_judgement_row(const dp_judgement *j) {
    return j->failed.at.rank >= 0 ? &j->failed : &j->worst;
}

void dp_judgement_free(dp_judgement *j) {
    DP_FREE(j->per_rank, j->per_head, j->per_rank_ratio, j->window);
    j->per_rank = j->per_head = j->per_rank_ratio = j->window = NULL;
}

/* ---- dA_log and ddt_bias as sums of the subject's own dg ------------------------------------- */

/* A sum to about twice fp64's precision (Neumaier), and what its rounding in other arithmetic may
 * be. */
typedef struct {
    double sum, rest;
    double terms2, running2; /* sums of squares of terms and of running sums */
    double lost;             /* what may be gone of terms below what their format holds in full */
} running_sum;

static void add_to_sum(running_sum *s, double y, double lost) {
    s->lost += lost;
    const double t = s->sum + y;
    s->rest += fabs(s->sum) >= fabs(y) ? (s->sum - t) + y : (y - t) + s->sum;
    s->sum = t;
    s->terms2 += y * y;
    s->running2 += t * t;
}

/* own: what storing the sum itself may take, relative. */
static double limit_of_sum(const running_sum *s, double u, double own, double a) {
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

static void hold_sum(const running_sum *s, double got, double u, double own, double a, int64_t row,
                     worst_sum *w) {
    const double off = fabs((got - s->sum) - s->rest);
    const double limit = limit_of_sum(s, u, own, a);
    const double over = off == 0 ? 0 : off / limit;
    w->limit2 += limit * limit;
    w->sum2 += s->sum * s->sum;
    if (!isfinite(s->sum) || !isfinite(got) || over <= w->over) return;
    *w = (worst_sum){over, got, s->sum + s->rest, off, limit, row, w->limit2, w->sum2};
}

/* A sum that no other limit sees passes as the sum of terms that were judged. */
static void pass_sum(dp_judgement *j, const worst_sum *w) {
    if (!j || j->verdict != DP_UNJUDGED || !(4 * w->limit2 < w->sum2)) return;
    j->verdict = DP_PASS;
    j->tier = "sum";
    j->times = w->over;
    j->seen = 1 + sqrt(w->limit2 / w->sum2);
    j->why[0] = 0;
}

static void fail_sum(dp_judgement *j, const worst_sum *w, int channels) {
    if (!j || j->verdict == DP_FAIL || !(w->over > 1)) return;
    j->verdict = DP_FAIL;
    j->tier = "sum";
    j->times = w->over;
    j->failed = (dp_row){.at = dp_place_of(0, (int)(w->row / channels), -1),
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
                add_to_sum(&channel, x[at], tiny);
                add_to_sum(&all, x[at] * ratio, tiny * fabs(ratio));
            }
            if (in->ddt_bias)
                hold_sum(&channel, in->got->ddt_bias[hv * Kg + c], u, own_bias, a,
                         (int64_t)hv * Kg + c, &bias);
        }
        if (in->dA_log) hold_sum(&all, in->got->dA_log[hv], u, own_A, a, hv, &A);
    }
    fail_sum(in->ddt_bias, &bias, Kg);
    fail_sum(in->dA_log, &A, 1);
    pass_sum(in->ddt_bias, &bias);
    pass_sum(in->dA_log, &A);
}
