/* Sums of errors by row, and by window along each direction. Then windows of tokens, and the rows
 * of each kind of tensor (draws.h). */
#include "draws.h"
#include "ref/arithmetic/mm.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/problem.h"

#include <assert.h>
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

/* ---- freedom of rows ------------------------------------------------------------------------- */

typedef enum { OTHERWISE, FROM_THE_FIRST, TO_THE_LAST } summed;

static summed tokens_of(const dp_problem *p, dp_result_id field) {
    switch (field) {
    case DP_RESULT_O:
    case DP_RESULT_DQ: return p->s0 ? OTHERWISE : FROM_THE_FIRST;
    case DP_RESULT_DK:
    case DP_RESULT_DV: return p->dstate ? OTHERWISE : TO_THE_LAST;
    default: return OTHERWISE;
    }
}

double *dp_row_freedom_new(const dp_problem *p, dp_result_id field) {
    const summed which = tokens_of(p, field);
    if (which == OTHERWISE) return NULL;
    const int heads = dp_result_heads(p, field), per = dp_result_rows_per_token(p, field);
    const int of_token = dp_rows(p) * (p->HV / heads);
    double *most = dp_doubles(p->T * heads * per);
    for (int s = 0; s < p->Nseq; s++)
        for (int64_t t = p->cu[s]; t < p->cu[s + 1]; t++) {
            const int64_t n = which == FROM_THE_FIRST ? t - p->cu[s] + 1 : p->cu[s + 1] - t;
            for (int64_t i = t * heads * per; i < (t + 1) * heads * per; i++)
                most[i] = (double)(n * of_token);
        }
    return most;
}

/* ---- rows and heads -------------------------------------------------------------------------- */

dp_windows dp_windows_of(const dp_problem *p, int N) {
    dp_windows w = {.p = p, .N = N, .window_of = dp_calloc((size_t)p->T, sizeof(int))};
    for (int r = 0; r < N; r++) {
        dp_context c;
        const dp_status st = dp_context_of(p, N, r, &c, NULL);
        assert(!st);
        (void)st;
        for (int s = 0; s < c.nlocal; s++) {
            const int64_t begin = c.local_cu[s];
            const int64_t end = c.local_cu[s + 1];
            for (int64_t t = begin; t < end; t++)
                w.window_of[c.a + t] = w.windows + (int)((t - begin) / DP_CHUNK);
            w.windows += (int)((end - begin + DP_CHUNK - 1) / DP_CHUNK);
        }
        dp_context_free(&c);
    }
    return w;
}

void dp_windows_free(dp_windows *w) {
    free(w->window_of);
    *w = (dp_windows){0};
}

dp_row_map dp_map_tokens(const dp_windows *w, int heads, int per, int width) {
    const int64_t rows = w->p->T * heads * per;
    int32_t *window = dp_calloc((size_t)rows, sizeof *window);
    for (int64_t r = 0; r < rows; r++)
        window[r] = w->window_of[r / (heads * per)] * heads + (int)(r / per % heads);
    return (dp_row_map){rows, (int64_t)w->windows * heads, width, 1, heads, per, window};
}

dp_row_map dp_map_rows(int64_t n, int width) {
    int32_t *window = dp_calloc((size_t)n, sizeof *window);
    for (int64_t r = 0; r < n; r++)
        window[r] = (int32_t)r;
    return (dp_row_map){n, n, width, 1, 0, 1, window};
}

dp_row_map dp_map_states(int64_t n, int K, int V) {
    dp_row_map m = dp_map_rows(n, K * V);
    m.subrows = K;
    m.groups = n;
    return m;
}

void dp_row_map_free(dp_row_map *m) {
    free((void *)m->window);
    *m = (dp_row_map){0};
}

dp_row_map dp_map_field(const dp_windows *w, int field) {
    const dp_problem *p = w->p;
    int64_t rows, width;
    dp_result_shape(p, field, &rows, &width);
    if (!rows) return (dp_row_map){.subrows = 1};
    switch (dp_result_fields[field].kind) {
    case DP_OF_SEQUENCES: return dp_map_states(rows, p->K, p->V);
    case DP_OF_HEADS: return dp_map_rows(rows, (int)width);
    default:
        return dp_map_tokens(w, dp_result_heads(p, field), dp_result_rows_per_token(p, field),
                             (int)width);
    }
}
