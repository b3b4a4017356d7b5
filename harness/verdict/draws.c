/* Sums of errors by row, and by window along each direction. */
#include "draws.h"
#include "ref/vocabulary/problem.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const dp_direction_names[DP_NDIRECTIONS] = {"factor", "offset", "truncation"};

/* The power of two below |x|, with its sign; 0 for zeros and subnormals. */
static inline double spacing(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits &= 0xfff0000000000000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

double dp_direction_entry(dp_direction d, double want) {
    if (d == DP_ALONG_VALUE) return want;
    return d == DP_ALONG_OFFSET ? 1 : spacing(want);
}

void dp_draws_alloc(dp_draws *d, int ndraw, const dp_row_map *map, int64_t parts) {
    *d = (dp_draws){.ndraw = ndraw, .windows = map->windows, .parts = parts};
    d->rows = map->rows * map->subrows;
    d->width = map->width / map->subrows;
    d->columns = map->groups * d->width;
    d->err2 = dp_doubles(ndraw * d->rows);
    d->blank = dp_doubles(ndraw * d->rows);
    if (d->columns) d->column2 = dp_doubles(ndraw * d->columns);
    d->along = dp_doubles(ndraw * DP_NDIRECTIONS * d->windows);
    d->length2 = dp_doubles(ndraw * DP_NDIRECTIONS * d->windows);
    if (parts) d->part = dp_doubles(ndraw * parts * d->rows * d->width);
}

void dp_draws_free(dp_draws *d) {
    free(d->err2);
    free(d->blank);
    free(d->column2);
    free(d->along);
    free(d->length2);
    free(d->part);
    *d = (dp_draws){0};
}

dp_error_sums dp_draws_at(const dp_draws *d, int k) {
    const int64_t directions = (int64_t)k * DP_NDIRECTIONS * d->windows;
    return (dp_error_sums){.err2 = d->err2 + k * d->rows,
                           .blank = d->blank + k * d->rows,
                           .column2 = d->columns ? d->column2 + k * d->columns : NULL,
                           .along = d->along + directions,
                           .length2 = d->length2 + directions};
}

/* Sums in a stated order that vectors of any width make alike: entry i in partial sum i mod LANES,
 * these added in order. A row's end is filled up with entries that count nothing. */
#define LANES 8
typedef struct {
    double dot[DP_NDIRECTIONS][LANES], length2[DP_NDIRECTIONS][LANES];
} partial_sums;

static double total(const double *part) {
    double sum = 0;
    for (int j = 0; j < LANES; j++)
        sum += part[j];
    return sum;
}

static inline int has_value(double x) { return fabs(x) <= DBL_MAX; }

static inline double square_of(double err, double want) {
    return has_value(want) & has_value(err) ? err * err : 0;
}

static inline void add_squares(const double *err, const double *want, double *square) {
#pragma omp simd
    for (int j = 0; j < LANES; j++)
        square[j] += square_of(err[j], want[j]);
}

/* <err, d> and |d|^2 along every direction, from the entries where the truth has a value (and, in
 * the first, the error). */
static inline void add_components(const double *err, const double *want, partial_sums *to) {
    double e[LANES], along[DP_NDIRECTIONS][LANES];
#pragma omp simd
    for (int j = 0; j < LANES; j++) {
        const int known = has_value(want[j]);
        const double w = known ? want[j] : 0;
        e[j] = known & has_value(err[j]) ? err[j] : 0;
        along[DP_ALONG_VALUE][j] = w;
        along[DP_ALONG_OFFSET][j] = known ? 1 : 0;
        along[DP_ALONG_ZERO][j] = spacing(w);
    }
#pragma GCC unroll 3
    for (dp_direction d = 0; d < DP_NDIRECTIONS; d++)
#pragma omp simd
        for (int j = 0; j < LANES; j++) {
            to->dot[d][j] += e[j] * along[d][j];
            to->length2[d][j] += along[d][j] * along[d][j];
        }
}

static double square_sum(const double *err, const double *want, int64_t n) {
    double square[LANES] = {0}, last[LANES] = {0}, known[LANES] = {0};
    const int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        add_squares(err + i, want + i, square);
    for (int64_t i = whole; i < n; i++) {
        last[i - whole] = err[i];
        known[i - whole] = want[i];
    }
    if (whole < n) add_squares(last, known, square);
    return total(square);
}

static partial_sums components(const double *err, const double *want, int64_t n) {
    partial_sums to = {0};
    double last[LANES], known[LANES];
    const int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        add_components(err + i, want + i, &to);
    for (int j = 0; whole < n && j < LANES; j++) {
        last[j] = whole + j < n ? err[whole + j] : 0;
        known[j] = whole + j < n ? want[whole + j] : NAN;
    }
    if (whole < n) add_components(last, known, &to);
    return to;
}

/* Adds one row in parts of `part` entries: squares by part, and by column. */
static void add_row(const double *err, const double *want, int part, int parts, double *err2,
                    double *blank, double *column2) {
    for (int s = 0; s < parts; s++) {
        const double *e = err + (int64_t)s * part, *w = want + (int64_t)s * part;
        err2[s] += square_sum(e, w, part);
        if (blank) blank[s] = 0;
        for (int i = 0; blank && i < part; i++)
            blank[s] += !(has_value(w[i]) & has_value(e[i]));
        for (int i = 0; column2 && i < part; i++)
            column2[i] += square_of(e[i], w[i]);
    }
}

static void add_directions(const dp_row_map *map, const double *err, const double *want,
                           const dp_error_sums *to) {
    memset(to->length2, 0, sizeof *to->length2 * (size_t)(DP_NDIRECTIONS * map->windows));
    for (int64_t r = 0; r < map->rows; r++) {
        const int64_t at = r * map->width;
        const partial_sums row = components(err + at, want + at, map->width);
        for (dp_direction d = 0; d < DP_NDIRECTIONS; d++) {
            to->along[d * map->windows + map->window[r]] += total(row.dot[d]);
            to->length2[d * map->windows + map->window[r]] += total(row.length2[d]);
        }
    }
}

void dp_sum_errors(const dp_row_map *map, const double *err, const double *want,
                   const dp_error_sums *to) {
    const int part = map->width / map->subrows;
    for (int64_t r = 0; r < map->rows; r++) {
        const int64_t at = r * map->width, group = map->groups ? r / map->per % map->groups : 0;
        add_row(err + at, want + at, part, map->subrows, to->err2 + r * map->subrows,
                to->blank ? to->blank + r * map->subrows : NULL,
                to->column2 ? to->column2 + group * part : NULL);
    }
    if (to->along) add_directions(map, err, want, to);
}
