/* A subject's errors in the shape of the draws that they are held against (levels.h). */
#include "compare_impl.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

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

void dp_subject_errors_free(dp_subject_errors *x) {
    void *const all[] = {x->window,        x->window_of_part, x->unit,    x->position,
                         x->column_head,   x->err2,           x->want2,   x->floor2,
                         x->along,         x->length2,        x->column2, x->want_column2,
                         x->floor_column2, x->column_rows,    x->terms2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

/* The place of every row in its window; none where a head has one window only. */
static void set_positions(const dp_comparison *c, dp_subject_errors *x) {
    const dp_compare_in *in = c->in;
    const int64_t windows = in->draws->windows;
    if (in->tokens <= 0 || windows <= in->heads) return;
    int64_t *first = dp_calloc((size_t)windows, sizeof *first);
    x->position = dp_calloc((size_t)in->rows, sizeof *x->position);
    for (int64_t w = 0; w < windows; w++)
        first[w] = INT64_MAX;
    for (int64_t z = 0; z < in->rows; z++)
        if (c->row[z].at.token < first[x->window[z]]) first[x->window[z]] = c->row[z].at.token;
    for (int64_t z = 0; z < in->rows; z++)
        x->position[z] = (int32_t)((c->row[z].at.token - first[x->window[z]]) % DP_POSITIONS);
    free(first);
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

dp_subject_errors dp_subject_errors_of(const dp_comparison *c) {
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
