/* Sums of errors by row, and by window along each direction. */
#include "draws.h"
#include "ref/vocabulary/problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const dp_direction_names[DP_NDIRECTIONS] = {"factor", "offset", "truncation"};

/* The power of two below |x|, with its sign; 0 for zeros and subnormals. */
static double spacing(double x) {
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
    d->rows = map->rows * map->split;
    d->width = map->width / map->split;
    d->err2 = dp_doubles(ndraw * d->rows);
    d->along = dp_doubles(ndraw * DP_NDIRECTIONS * d->windows);
    d->length2 = dp_doubles(ndraw * DP_NDIRECTIONS * d->windows);
    if (parts) d->part = dp_doubles(ndraw * parts * d->rows * d->width);
}

void dp_draws_free(dp_draws *d) {
    free(d->err2);
    free(d->along);
    free(d->length2);
    free(d->part);
    *d = (dp_draws){0};
}

/* |d|^2 where the truth has values. */
static double length2_of(const double *want, int64_t n, dp_direction d) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const double x = isfinite(want[i]) ? dp_direction_entry(d, want[i]) : 0;
        sum += x * x;
    }
    return sum;
}

static double square_sum(const double *err, const double *want, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += isfinite(want[i]) && isfinite(err[i]) ? err[i] * err[i] : INFINITY;
    return sum;
}

static double component(const double *err, const double *want, int64_t n, dp_direction d) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(want[i]) && isfinite(err[i])) sum += err[i] * dp_direction_entry(d, want[i]);
    return sum;
}

void dp_sum_errors(const dp_row_map *map, const double *err, const double *want, double *err2,
                   double *along, double *length2) {
    const int part = map->width / map->split;
    for (int64_t i = 0; i < map->rows * map->split; i++)
        err2[i] += square_sum(err + i * part, want + i * part, part);
    if (!along) return;
    memset(length2, 0, sizeof *length2 * (size_t)(DP_NDIRECTIONS * map->windows));
    for (dp_direction d = 0; d < DP_NDIRECTIONS; d++)
        for (int64_t r = 0; r < map->rows; r++) {
            const int64_t at = r * map->width;
            const int64_t window = d * map->windows + map->window[r];
            along[window] += component(err + at, want + at, map->width, d);
            length2[window] += length2_of(want + at, map->width, d);
        }
}
