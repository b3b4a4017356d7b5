/* Units of a level: sums over their rows, and the degrees of freedom of their draws (levels.h). */
#include "levels_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MOST_FREEDOM 1e6
#define OTHERS 4.0 /* draws that all units together count as, for one unit's freedom */

dp_unit_list dp_unit_list_new(int ndraw, int64_t n) {
    dp_unit_list u = {.ndraw = ndraw, .n = n};
    u.draw2 = dp_doubles(ndraw * n);
    u.err2 = dp_doubles(n);
    u.want2 = dp_doubles(n);
    u.floor2 = dp_doubles(n);
    u.numbers = dp_doubles(n);
    u.rows = dp_doubles(n);
    u.family = dp_calloc((size_t)n, sizeof *u.family);
    u.families = 1;
    return u;
}

void dp_unit_list_free(dp_unit_list *u) {
    free(u->draw2);
    free(u->err2);
    free(u->want2);
    free(u->floor2);
    free(u->numbers);
    free(u->rows);
    free(u->family);
}

/* The unit of a row on a level, -1: it is not looked at. */
int64_t dp_level_unit_of(const dp_levels_in *in, dp_level level, int64_t row) {
    const int32_t window = in->window[row];
    if (window < 0 || in->unit[window] < 0) return -1;
    if (level == DP_LEVEL_ROW) return row;
    if (level == DP_LEVEL_WINDOW) return window;
    if (level == DP_LEVEL_POSITION)
        return (int64_t)(in->unit[window] % in->heads) * DP_POSITIONS + in->position[row];
    return level == DP_LEVEL_RANK ? in->unit[window] : 0;
}

int64_t dp_level_units(const dp_levels_in *in, dp_level level) {
    if (level == DP_LEVEL_ROW) return in->draws->rows;
    if (level == DP_LEVEL_WINDOW) return in->draws->windows;
    if (level == DP_LEVEL_POSITION) return in->position ? (int64_t)in->heads * DP_POSITIONS : 0;
    if (level == DP_LEVEL_CHANNEL) return in->column2 ? in->draws->columns : 0;
    return level == DP_LEVEL_RANK ? in->units : 1;
}

/* The columns of all groups: no sums over rows, which the draws do not hold by entry. */
static dp_unit_list columns_of(const dp_levels_in *in) {
    const dp_draws *d = in->draws;
    dp_unit_list u = dp_unit_list_new(d->ndraw, d->columns);
    memcpy(u.draw2, d->column2, sizeof *u.draw2 * (size_t)(d->ndraw * d->columns));
    memcpy(u.err2, in->column2, sizeof *u.err2 * (size_t)d->columns);
    memcpy(u.want2, in->want_column2, sizeof *u.want2 * (size_t)d->columns);
    memcpy(u.floor2, in->floor_column2, sizeof *u.floor2 * (size_t)d->columns);
    for (int64_t i = 0; i < d->columns; i++) {
        u.rows[i] = u.numbers[i] = in->column_rows[i / d->width];
        u.family[i] = in->column_head[i / d->width];
        u.most_rows = fmax(u.most_rows, u.rows[i]);
    }
    u.families = u.heads = in->heads;
    return u;
}

static int32_t family_of(const dp_levels_in *in, dp_level level, int64_t row, int64_t unit) {
    if (level == DP_LEVEL_TENSOR) return 0;
    return level == DP_LEVEL_POSITION ? (int32_t)(unit / DP_POSITIONS) : in->unit[in->window[row]];
}

dp_unit_list dp_unit_list_of(const dp_levels_in *in, dp_level level) {
    const dp_draws *d = in->draws;
    if (level == DP_LEVEL_CHANNEL) return columns_of(in);
    dp_unit_list u = dp_unit_list_new(d->ndraw, dp_level_units(in, level));
    u.families = level == DP_LEVEL_TENSOR ? 1 : in->units;
    u.heads = level == DP_LEVEL_TENSOR && in->heads > 1 ? 0 : in->heads;
    for (int64_t row = 0; row < d->rows; row++) {
        const int64_t z = dp_level_unit_of(in, level, row);
        if (z < 0) continue;
        for (int k = 0; k < d->ndraw; k++)
            u.draw2[k * u.n + z] += d->err2[k * d->rows + row];
        u.family[z] = family_of(in, level, row, z);
        u.err2[z] += in->err2[row];
        u.want2[z] += in->want2[row];
        u.floor2[z] += in->floor2[row];
        const double rows = in->rows ? in->rows[row] : 1;
        u.numbers[z] += d->width * rows;
        u.rows[z] += rows;
        u.most_rows = fmax(u.most_rows, u.rows[z]);
    }
    return u;
}

/* Mean |d|^2 of a unit over the draws, all but one of them when without >= 0. */
double dp_mean_draw(const dp_unit_list *u, int64_t i, int without) {
    double sum = 0;
    for (int k = 0; k < u->ndraw; k++)
        if (k != without) sum += u->draw2[k * u->n + i];
    return sum / (without >= 0 ? u->ndraw - 1 : u->ndraw);
}

/* From the variance of D draws over their own mean squared: 2 / cv^2, corrected for that mean. */
static double freedom_of(double cv2, int D) {
    const double two_over_nu = cv2 < 0.9 * D ? cv2 / (1 - cv2 / D) : 9.0 * D;
    return fmax(0.5, fmin(2 / fmax(two_over_nu, 1e-9), MOST_FREEDOM));
}

static double variation(const dp_unit_list *u, int64_t i) { /* NAN: draws zero or not finite */
    const double m = dp_mean_draw(u, i, -1);
    double v = 0;
    if (!(m > 0) || !isfinite(m)) return NAN;
    for (int k = 0; k < u->ndraw; k++) {
        const double x = u->draw2[k * u->n + i] / m - 1;
        v += x * x;
    }
    return v / (u->ndraw - 1);
}

/* Units of few rows beside the others (a sequence of one token) are a class of their own. */
int dp_unit_is_small(const dp_unit_list *u, int64_t i) { return 4 * u->rows[i] <= u->most_rows; }

/* A typical unit (of a class; -1: of all): the draws of all its units together with the prior. Few
 * units and draws say little: fewer degrees of freedom are assumed then, by two standard deviations
 * of the estimate. */
double dp_typical_freedom(const dp_unit_list *u, int small) {
    double sum = u->presumed.cv2 * u->presumed.draws;
    double n = u->presumed.draws;
    for (int64_t i = 0; i < u->n; i++) {
        const double x = u->rows[i] > 0 ? variation(u, i) : NAN;
        if (isnan(x) || (small >= 0 && dp_unit_is_small(u, i) != small)) continue;
        sum += x * (u->ndraw - 1);
        n += u->ndraw - 1;
    }
    return freedom_of(sum / n * (1 + 2 * sqrt(2 / n)), u->ndraw);
}

/* Unit i among others that have nu. */
double dp_own_freedom(const dp_unit_list *u, int64_t i, double nu) {
    const int D = u->ndraw;
    const double x = variation(u, i);
    double most = fmin(nu, u->numbers[i]);
    if (u->most_freedom) most = fmin(most, u->most_freedom[i]);
    if (isnan(x)) return most;
    return fmin(most, freedom_of((OTHERS * 2 / nu + (D - 1) * x) / (OTHERS + D - 1), D));
}

#define UNKNOWN_DRAWS 3.0 /* the finest level: few numbers, of any correlation */
const dp_presumption DP_NOTHING_KNOWN = {1, UNKNOWN_DRAWS, UNKNOWN_DRAWS};

static int64_t parent(const dp_levels_in *in, dp_level fine, int64_t i) {
    if (fine == DP_LEVEL_ROW) return in->window[i];
    return fine == DP_LEVEL_WINDOW ? in->unit[i] : 0;
}

/* Sums over the fine units of a coarse one: of m = mean |d|^2, of m^2, and of its variance. */
typedef struct {
    double sum, square, variance;
} family;

dp_presumption dp_presume(const dp_levels_in *in, dp_level fine, const dp_unit_list *u, int64_t n) {
    family *coarse = dp_calloc((size_t)n, sizeof *coarse);
    double cv2 = 0;
    double draws = 0;
    double units = 0;
    double unknown = 0;
    for (int64_t i = 0; i < u->n; i++) {
        const int64_t z = u->rows[i] > 0 ? parent(in, fine, i) : -1;
        const double m = dp_mean_draw(u, i, -1);
        const double x = variation(u, i);
        if (z < 0 || isnan(x)) continue;
        coarse[z].sum += m;
        coarse[z].square += m * m;
        coarse[z].variance += m * m * x;
    }
    for (int64_t z = 0; z < n; z++) {
        const family *f = &coarse[z];
        if (!(f->sum > 0)) continue;
        const double count = f->sum * f->sum / f->square;
        cv2 += fmin(count, DP_NOT_INDEPENDENT) * f->variance / (f->sum * f->sum);
        draws += (count - 1) * (u->ndraw - 1);
        unknown += u->presumed.unknown / count;
        units++;
    }
    free(coarse);
    if (units == 0) return DP_NOTHING_KNOWN;
    const double finer = fmin(DP_FROM_FINER, draws / units);
    const double rest = unknown / units;
    return (dp_presumption){(finer * cv2 / units + rest) / (finer + rest), finer + rest, rest};
}

/* The most degrees of freedom of a rank and head: those of its windows, were they independent.
 * [units], to be freed.
 */
double *dp_freedom_of_windows(const dp_levels_in *in, const dp_unit_list *windows) {
    const double of[2] = {dp_typical_freedom(windows, 0), dp_typical_freedom(windows, 1)};
    double *most = dp_doubles(in->units);
    double *square = dp_doubles(in->units);
    for (int64_t i = 0; i < windows->n; i++) {
        const int32_t z = in->unit[i];
        const double m = dp_mean_draw(windows, i, -1);
        if (z < 0 || !(windows->rows[i] > 0) || !isfinite(m)) continue;
        most[z] += m;
        square[z] += m * m / dp_own_freedom(windows, i, of[dp_unit_is_small(windows, i)]);
    }
    for (int z = 0; z < in->units; z++)
        most[z] = square[z] > 0 ? most[z] * most[z] / square[z] : INFINITY;
    free(square);
    return most;
}
