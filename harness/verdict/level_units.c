/* Units of a level: sums over their rows, and the degrees of freedom of their draws. Then quadratic
 * levels: the expected error of a unit, its limit, and all windows alike (levels.h). */
#include "levels_impl.h"
#include "ref/arithmetic/elementary.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- quantiles of F -------------------------------------------------------------------------- */

#define MOST_DF 1e6 /* beyond it a distribution is its limit to six digits */
#define HALF_LOG_2PI 0.91893853320467274178

/* log Gamma(x), x > 0: Stirling's series above 12, where its first omitted term is below 1e-14. */
static double log_gamma(double x) {
    double shift = 1;
    while (x < 12) {
        shift *= x;
        x += 1;
    }
    const double z = 1 / (x * x);
    const double series =
        (1.0 / 12 - z * (1.0 / 360 - z * (1.0 / 1260 - z * (1.0 / 1680 - z * (1.0 / 1188))))) / x;
    return (x - 0.5) * dp_log(x) - x + HALF_LOG_2PI + series - dp_log(shift);
}

/* One step of Lentz's method, with the next numerator d of the continued fraction. */
typedef struct {
    double value, c, d;
} fraction;

static double away_from_zero(double x) { return fabs(x) < 1e-300 ? 1e-300 : x; }

static double advance(fraction *f, double numerator) {
    f->d = 1 / away_from_zero(1 + numerator * f->d);
    f->c = away_from_zero(1 + numerator / f->c);
    f->value *= f->c * f->d;
    return f->c * f->d;
}

/* The continued fraction of I_y(a, b), which converges fast for y < (a + 1) / (a + b + 2). */
static double beta_fraction(double y, double a, double b) {
    fraction f = {.value = 1, .c = 1, .d = 1 / away_from_zero(1 - (a + b) * y / (a + 1))};
    f.value = f.d;
    for (int m = 1; m < 100000; m++) {
        advance(&f, m * (b - m) * y / ((a + 2 * m - 1) * (a + 2 * m)));
        const double last =
            advance(&f, -(a + m) * (a + b + m) * y / ((a + 2 * m) * (a + 2 * m + 1)));
        if (fabs(last - 1) < 1e-15) break;
    }
    return f.value;
}

/* I_y(a, b); rest = 1 - y, a separate argument because it may be tiny. */
static double incomplete_beta(double y, double rest, double a, double b) {
    if (y <= 0) return 0;
    if (rest <= 0) return 1;
    const double scale = log_gamma(a + b) - log_gamma(a) - log_gamma(b);
    const double front = dp_exp(scale + a * dp_log(y) + b * dp_log(rest));
    if (y < (a + 1) / (a + b + 2)) return front * beta_fraction(y, a, b) / a;
    return 1 - front * beta_fraction(rest, b, a) / b;
}

double dp_f_tail(double x, double top, double bottom) {
    const double t = fmin(top, MOST_DF);
    const double b = fmin(bottom, MOST_DF);
    if (!(x > 0)) return 1;
    return incomplete_beta(b / (b + t * x), t * x / (b + t * x), b / 2, t / 2);
}

double dp_f_quantile(double p, double top, double bottom) {
    double low = 0;
    double high = 1;
    while (dp_f_tail(high, top, bottom) > p) {
        low = high;
        high *= 2;
        if (high > 1e30) return INFINITY;
    }
    for (int i = 0; i < 60 && high - low > 1e-10 * high; i++) {
        const double middle = (low + high) / 2;
        if (dp_f_tail(middle, top, bottom) > p)
            low = middle;
        else
            high = middle;
    }
    return high;
}

/* ---- units ----------------------------------------------------------------------------------- */

#define MOST_FREEDOM 1e6
#define OTHERS 4.0 /* draws that all units together count as, for one unit's freedom */

/* A list of n units without errors, all of one family, to be freed with dp_unit_list_free. */
static dp_unit_list unit_list_new(int ndraw, int64_t n) {
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
    dp_unit_list u = unit_list_new(d->ndraw, d->columns);
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
    dp_unit_list u = unit_list_new(d->ndraw, dp_level_units(in, level));
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
static int unit_is_small(const dp_unit_list *u, int64_t i) {
    return 4 * u->rows[i] <= u->most_rows;
}

/* A typical unit (of a class; -1: of all): the draws of all its units together with the prior. Few
 * units and draws say little: fewer degrees of freedom are assumed then, by two standard deviations
 * of the estimate. */
static double typical_freedom(const dp_unit_list *u, int small) {
    double sum = u->presumed.cv2 * u->presumed.draws;
    double n = u->presumed.draws;
    for (int64_t i = 0; i < u->n; i++) {
        const double x = u->rows[i] > 0 ? variation(u, i) : NAN;
        if (isnan(x) || (small >= 0 && unit_is_small(u, i) != small)) continue;
        sum += x * (u->ndraw - 1);
        n += u->ndraw - 1;
    }
    return freedom_of(sum / n * (1 + 2 * sqrt(2 / n)), u->ndraw);
}

/* Unit i among others that have nu. */
static double own_freedom(const dp_unit_list *u, int64_t i, double nu) {
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
    const double of[2] = {typical_freedom(windows, 0), typical_freedom(windows, 1)};
    double *most = dp_doubles(in->units);
    double *square = dp_doubles(in->units);
    for (int64_t i = 0; i < windows->n; i++) {
        const int32_t z = in->unit[i];
        const double m = dp_mean_draw(windows, i, -1);
        if (z < 0 || !(windows->rows[i] > 0) || !isfinite(m)) continue;
        most[z] += m;
        square[z] += m * m / own_freedom(windows, i, of[unit_is_small(windows, i)]);
    }
    for (int z = 0; z < in->units; z++)
        most[z] = square[z] > 0 ? most[z] * most[z] / square[z] : INFINITY;
    free(square);
    return most;
}

/* ---- quadratic levels ------------------------------------------------------------------------ */

/* A class of units of one level, and what its families share. */
typedef struct {
    const dp_unit_list *u;
    dp_level_factor factor;
    int small; /* the class looked at; -1: all */
    double nu;
    double *rate;  /* [families] mean |d|^2 over |want|^2; 0: not known */
    double prior;  /* d0: how that stands beside a unit's own draws, in degrees of freedom */
    double *draw;  /* [families] the largest ratio of one draw to what the others expect; NAN */
    double common; /* the largest of families that are not erratic */
} level_view;

static int counts(const level_view *v, int64_t i) {
    return v->u->rows[i] > 0 && (v->small < 0 || unit_is_small(v->u, i) == v->small);
}

/* Does the unit tell of a rate? Its mean |d|^2. */
static int has_rate(const level_view *v, int64_t i, double *mean) {
    *mean = dp_mean_draw(v->u, i, -1);
    return counts(v, i) && v->u->want2[i] > 0 && isfinite(*mean);
}

/* Sets each family's rate. Families of one unit, which tells nothing beside itself, share their
 * geometric mean: one that is erratic does not outweigh the others. */
static void set_rates(level_view *v) {
    const dp_unit_list *u = v->u;
    double *want = dp_doubles(u->families), *err = dp_doubles(u->families), logs = 0, n = 0, mean;
    int *units = dp_calloc((size_t)u->families, sizeof *units);
    for (int64_t i = 0; i < u->n; i++) {
        if (!has_rate(v, i, &mean)) continue;
        err[u->family[i]] += mean;
        want[u->family[i]] += u->want2[i];
        units[u->family[i]]++;
    }
    for (int f = 0; f < u->families; f++) {
        v->rate[f] = want[f] > 0 && isfinite(err[f] / want[f]) ? err[f] / want[f] : 0;
        if (units[f] != 1 || !(v->rate[f] > 0)) continue;
        logs += dp_log(v->rate[f]);
        n++;
    }
    for (int f = 0; f < u->families && n > 0; f++)
        if (units[f] == 1) v->rate[f] = dp_exp(logs / n);
    free(want);
    free(err);
    free(units);
}

/* d0 by moments: the draws' means relative to the prior have the variance 2 / (D nu) from their own
 * scatter. The variance beyond it is 2 / d0. */
static void set_prior(level_view *v) {
    const dp_unit_list *u = v->u;
    double sum = 0, square = 0, n = 0, m;
    set_rates(v);
    for (int64_t i = 0; i < u->n; i++) {
        if (!has_rate(v, i, &m) || !(v->rate[u->family[i]] > 0)) continue;
        const double x = m / (v->rate[u->family[i]] * u->want2[i]);
        sum += x;
        square += x * x;
        n++;
    }
    if (n < 2 || !(sum > 0)) return;
    const double mean = sum / n;
    const double rest = (square / n / (mean * mean) - 1) * n / (n - 1) - 2 / (u->ndraw * v->nu);
    v->prior = fmin(fmin(DP_PRIOR_MOST, n), rest > 0 ? 2 / rest : DP_PRIOR_MOST);
}

/* Degrees of freedom that the prior adds for unit i. None where the truth is zero: errors in
 * proportion to a size say nothing there. */
static double prior_freedom(const level_view *v, int64_t i) {
    return v->u->want2[i] > 0 && v->rate[v->u->family[i]] > 0 ? v->prior : 0;
}

/* E^2 of unit i from all draws or all but one. */
static double expected2(const level_view *v, int64_t i, int without) {
    const dp_unit_list *u = v->u;
    const double draws = (u->ndraw - (without >= 0)) * v->nu, added = prior_freedom(v, i);
    const double told = added * v->rate[u->family[i]] * u->want2[i];
    return (draws * dp_mean_draw(u, i, without) + told) / (draws + added) + u->floor2[i];
}

/* sqrt F(p; nu, D nu + d0), for nu rounded down to three binary digits behind its first: a wider
 * limit, and few quantiles. */
#define DIGITS 3
#define LEAST_EXPONENT (-2)
#define GRID ((24 - LEAST_EXPONENT) << DIGITS)
typedef struct {
    double p, draws, extra, known[GRID];
} quantiles;

static double limit_at(quantiles *q, double nu) {
    int exponent;
    const double fraction = frexp(nu, &exponent); /* in [1/2, 1) */
    const int digits = (int)((2 * fraction - 1) * (1 << DIGITS));
    const int place = ((exponent - 1 - LEAST_EXPONENT) << DIGITS) + digits;
    const int i = place < 0 ? 0 : place >= GRID ? GRID - 1 : place;
    const double low =
        ldexp(1 + (double)(i % (1 << DIGITS)) / (1 << DIGITS), (i >> DIGITS) + LEAST_EXPONENT);
    if (q->known[i] == 0) q->known[i] = sqrt(dp_f_quantile(q->p, low, q->draws * low + q->extra));
    return q->known[i];
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(double *x, int64_t n) {
    if (n == 0) return NAN;
    qsort(x, (size_t)n, sizeof *x, ascending);
    return x[n / 2];
}

/* The largest ratio of one draw to what the others expect: of each family, and of all families but
 * the erratic ones. */
static void set_draws(level_view *v) {
    const dp_unit_list *u = v->u;
    double *known = dp_doubles(u->families);
    int64_t n = 0;
    for (int f = 0; f < u->families; f++)
        v->draw[f] = NAN;
    for (int64_t i = 0; i < u->n; i++) {
        if (!counts(v, i)) continue;
        for (int k = 0; k < u->ndraw; k++) {
            const double x = dp_error_over(u->draw2[k * u->n + i], expected2(v, i, k));
            if (!(x <= v->draw[u->family[i]])) v->draw[u->family[i]] = x;
        }
    }
    for (int f = 0; f < u->families; f++)
        if (!isnan(v->draw[f])) known[n++] = v->draw[f];
    const double usual = DP_ERRATIC * median_of(known, n);
    for (int f = 0; f < u->families; f++)
        if (v->draw[f] <= usual && !(v->draw[f] <= v->common)) v->common = v->draw[f];
    free(known);
}

static level_view view_new(const dp_unit_list *u, dp_level_factor factor, int small) {
    level_view v = {.u = u, .factor = factor, .small = small, .common = NAN};
    v.nu = typical_freedom(u, -1);
    if (small >= 0) v.nu = fmin(v.nu, typical_freedom(u, small));
    v.rate = dp_doubles(u->families);
    v.draw = dp_doubles(u->families);
    set_prior(&v);
    set_draws(&v);
    return v;
}

static void view_free(level_view *v) {
    free(v->rate);
    free(v->draw);
}

static int64_t count(const level_view *v) {
    int64_t n = 0;
    for (int64_t i = 0; i < v->u->n; i++)
        n += counts(v, i);
    return n;
}

/* Is unit i's error that of a stored state? */
static int is_stored(const level_view *v, int64_t i, double e2) {
    const double from = v->factor.from;
    return from > 0 && v->u->want2[i] > 0 && e2 >= from * from * v->u->want2[i];
}

/* The limit of unit i, whose freedom is nu and E^2 e2. */
static double limit_of(const level_view *v, int64_t i, double nu, double e2, quantiles *q) {
    const double draw = fmax(v->draw[v->u->family[i]], v->common);
    const double factor = is_stored(v, i, e2) ? v->factor.stored : v->factor.usual;
    return fmin(DP_LIMIT_MOST, factor * fmax(draw, limit_at(q, nu)));
}

/* Every unit of one class against the limit of its own freedom. */
static dp_level_result judge_class(const dp_unit_list *u, dp_level_factor factor, int small,
                                   double *head_seen) {
    level_view v = view_new(u, factor, small);
    dp_level_result r = dp_level_none();
    r.units = count(&v);
    r.draw = v.common;
    r.freedom = v.nu;
    const double p = DP_ALARM / fmax(1, (double)r.units);
    quantiles with = {p, u->ndraw, v.prior, {0}}, without = {p, u->ndraw, 0, {0}};
    double *ratio = dp_doubles(r.units);
    int64_t n = 0;
    for (int64_t i = 0; i < u->n; i++) {
        if (!counts(&v, i)) continue;
        const double mine = own_freedom(u, i, v.nu), e2 = expected2(&v, i, -1);
        const double x = dp_error_over(u->err2[i], e2);
        const double k = limit_of(&v, i, mine, e2, prior_freedom(&v, i) > 0 ? &with : &without);
        const double seen = u->want2[i] > 0 ? k * sqrt(e2 / u->want2[i]) : INFINITY;
        if (seen < r.seen) r.seen = seen;
        if (head_seen && u->heads) {
            double *of = &head_seen[u->family[i] % u->heads];
            *of = fmin(*of, seen);
        }
        ratio[n++] = x;
        if (x / k <= r.ratio / r.limit) continue;
        r.ratio = x;
        r.limit = k;
        r.freedom = mine;
        r.draw = fmax(v.draw[u->family[i]], v.common);
        r.at = i;
    }
    r.median = median_of(ratio, n);
    free(ratio);
    view_free(&v);
    return r;
}

dp_level_result dp_judge_quadratic(const dp_unit_list *u, dp_level_factor factor,
                                   double *head_seen) {
    dp_level_result most = judge_class(u, factor, 0, head_seen);
    dp_level_result small = judge_class(u, factor, 1, head_seen);
    most.seen = small.seen = fmin(most.seen, small.seen);
    return small.units && dp_level_worse(&small, &most) ? small : most;
}

/* Power mean over windows of |err| / E with exponent 2/3. With this exponent |err| is nearly normal
 * (Wilson and Hilferty), and no window outweighs the others. With k >= 0 it is of draw k against
 * the others, else of the squares in err2. Draws carry the floor, too: the subject is allowed
 * it. */
static double power_mean(const level_view *v, const double *err2, int k) {
    const dp_unit_list *u = v->u;
    double sum = 0;
    int64_t n = 0;
    for (int64_t i = 0; i < u->n; i++) {
        const double e2 = u->rows[i] > 0 ? expected2(v, i, k) : 0;
        const double x = k < 0 ? err2[i] : u->draw2[k * u->n + i] + u->floor2[i];
        if (!(e2 > 0) || !isfinite(e2)) continue;
        sum += dp_cbrt(x / e2);
        n++;
    }
    if (n == 0) return NAN;
    const double mean = sum / (double)n;
    return mean * sqrt(mean);
}

/* Are the errors of all units those of stored states? */
static int all_stored(const level_view *v) {
    for (int64_t i = 0; i < v->u->n; i++)
        if (v->u->rows[i] > 0 && !is_stored(v, i, expected2(v, i, -1))) return 0;
    return 1;
}

dp_level_result dp_judge_every(const dp_unit_list *u, dp_level_factor factor) {
    const int D = u->ndraw;
    level_view v = view_new(u, factor, -1);
    dp_unit_list one = unit_list_new(D, 1);
    one.presumed = (dp_presumption){DP_NOT_INDEPENDENT * 2 / (v.nu * (double)u->n),
                                    fmin(DP_FROM_FINER, (double)(u->n - 1) * (D - 1)), 0};
    double total = 0;
    one.rows[0] = 1;
    one.numbers[0] = INFINITY;
    for (int k = 0; k < D; k++) {
        const double x = power_mean(&v, NULL, k);
        one.draw2[k] = x * x;
        total += x * x;
    }
    dp_level_result r = dp_level_none();
    if (total > 0 && isfinite(total) && u->n > 1) {
        const double usual = sqrt(total / D);
        r.ratio = r.median = power_mean(&v, u->err2, -1) / usual;
        r.units = 1;
        r.at = 0;
        for (int k = 0; k < D; k++)
            r.draw = fmax(k ? r.draw : 0, sqrt(one.draw2[k] / dp_mean_draw(&one, 0, k)));
        r.freedom = own_freedom(&one, 0, typical_freedom(&one, -1));
        quantiles q = {DP_ALARM, D, 0, {0}};
        const double k = fmax(r.draw, limit_at(&q, r.freedom));
        r.limit = fmin(DP_LIMIT_MOST, (all_stored(&v) ? factor.stored : factor.usual) * k);
        const double all = power_mean(&v, u->want2, -1) / usual;
        if (all > 0) r.seen = r.limit / all;
    }
    dp_unit_list_free(&one);
    view_free(&v);
    return r;
}
