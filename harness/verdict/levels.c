/* Is an error more than its design makes? All levels, and the worst of them (levels.h). */
#include "levels.h"
#include "ref/arithmetic/elementary.h"
#include "ref/vocabulary/problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* The expectation that units of a finer level give for a coarser one: that of independent units,
 * times three, since they are not quite independent. (Over the windows of a head that remembers up
 * to 3.6 was measured, mostly 1.) Where one unit outweighs the others they tell nothing that its
 * own draws do not. */
#define DP_NOT_INDEPENDENT 3.0
#define DP_FROM_FINER 10.0

/* A level's prior knowledge of the variation of its units. */
typedef struct {
    double cv2;     /* squared coefficient of variation of |d|^2 */
    double draws;   /* that it counts as */
    double unknown; /* draws among them that stand for numbers of which nothing is known */
} dp_presumption;

/* Units of a level: rows, windows, ranks or the tensor. */
typedef struct {
    int ndraw;
    int64_t n;
    dp_presumption presumed;
    double *draw2;                                  /* [ndraw][n] */
    double *err2, *want2, *floor2, *numbers, *rows; /* [n]; rows 0: nothing there */
    int32_t *family; /* [n] below families; its head is family % heads */
    int families, heads;
    double most_rows;
    const double *most_freedom; /* [n]; NULL: no limit but numbers */
} dp_unit_list;

/* The allowance of one level: `stored` for units whose E is at least `from` times the truth. */
typedef struct {
    double usual, stored, from;
} dp_level_factor;

/* |err| over the expected error; 0 without error, INFINITY where none is expected. */
static double error_over(double err2, double e2) {
    return err2 == 0 ? 0 : e2 > 0 ? sqrt(err2 / e2) : INFINITY;
}

/* The result of a level that has nothing to judge. */
static dp_level_result level_none(void) {
    return (dp_level_result){
        .ratio = NAN, .median = NAN, .limit = NAN, .draw = NAN, .seen = INFINITY, .at = -1};
}

/* Does a exceed its limit by more than b? */
static int level_worse(const dp_level_result *a, const dp_level_result *b) {
    return isnan(b->ratio) || a->ratio / a->limit > b->ratio / b->limit;
}

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

static double find_quantile(double p, double top, double bottom) {
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

/* Tensors of like shapes ask for the same quantiles, which took a quarter of the judge's time. */
double dp_f_quantile(double p, double top, double bottom) {
    static _Thread_local struct { double of[3], x; } known[512];
    const double of[3] = {p, top, bottom};
    const size_t at = XXH64(of, sizeof of, 0) % (sizeof known / sizeof *known);
    if (memcmp(known[at].of, of, sizeof of)) {
        memcpy(known[at].of, of, sizeof of);
        known[at].x = find_quantile(p, top, bottom);
    }
    return known[at].x;
}

/* ---- units ----------------------------------------------------------------------------------- */

#define MOST_FREEDOM 1e6
#define OTHERS 4.0 /* draws that all units together count as, for one unit's freedom */

/* A list of n units without errors, all of one family, to be freed with unit_list_free. */
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

/* Frees a list's arrays. */
static void unit_list_free(dp_unit_list *u) {
    DP_FREE(u->draw2, u->err2, u->want2, u->floor2, u->numbers, u->rows, u->family);
}

/* The unit of a row on a level, -1: it is not looked at. */
static int64_t level_unit_of(const dp_levels_in *in, dp_level level, int64_t row) {
    const int32_t window = in->window[row];
    if (window < 0 || in->unit[window] < 0) return -1;
    if (level == DP_LEVEL_ROW) return row;
    if (level == DP_LEVEL_WINDOW) return window;
    if (level == DP_LEVEL_POSITION)
        return (int64_t)(in->unit[window] % in->heads) * DP_POSITIONS + in->position[row];
    return level == DP_LEVEL_RANK ? in->unit[window] : 0;
}

/* How many units a level has. */
static int64_t level_units(const dp_levels_in *in, dp_level level) {
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

/* The units of a level: sums over their rows. */
static dp_unit_list unit_list_of(const dp_levels_in *in, dp_level level) {
    const dp_draws *d = in->draws;
    if (level == DP_LEVEL_CHANNEL) return columns_of(in);
    dp_unit_list u = unit_list_new(d->ndraw, level_units(in, level));
    u.families = level == DP_LEVEL_TENSOR ? 1 : in->units;
    u.heads = level == DP_LEVEL_TENSOR && in->heads > 1 ? 0 : in->heads;
    for (int64_t row = 0; row < d->rows; row++) {
        const int64_t z = level_unit_of(in, level, row);
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
static double mean_draw(const dp_unit_list *u, int64_t i, int without) {
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
    const double m = mean_draw(u, i, -1);
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
/* The prior where nothing is known. */
static const dp_presumption DP_NOTHING_KNOWN = {1, UNKNOWN_DRAWS, UNKNOWN_DRAWS};

static int64_t parent(const dp_levels_in *in, dp_level fine, int64_t i) {
    if (fine == DP_LEVEL_ROW) return in->window[i];
    return fine == DP_LEVEL_WINDOW ? in->unit[i] : 0;
}

/* Sums over the fine units of a coarse one: of m = mean |d|^2, of m^2, and of its variance. */
typedef struct {
    double sum, square, variance;
} family;

/* The expectation that units of a finer level give for the n units of the next coarser one. */
static dp_presumption presume(const dp_levels_in *in, dp_level fine, const dp_unit_list *u,
                              int64_t n) {
    DP_OWN family *coarse = dp_calloc((size_t)n, sizeof *coarse);
    double cv2 = 0;
    double draws = 0;
    double units = 0;
    double unknown = 0;
    for (int64_t i = 0; i < u->n; i++) {
        const int64_t z = u->rows[i] > 0 ? parent(in, fine, i) : -1;
        const double m = mean_draw(u, i, -1);
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
    if (units == 0) return DP_NOTHING_KNOWN;
    const double finer = fmin(DP_FROM_FINER, draws / units);
    const double rest = unknown / units;
    return (dp_presumption){(finer * cv2 / units + rest) / (finer + rest), finer + rest, rest};
}

/* The most degrees of freedom of a rank and head: those of its windows, were they independent.
 * [units], to be freed.
 */
static double *freedom_of_windows(const dp_levels_in *in, const dp_unit_list *windows) {
    const double of[2] = {typical_freedom(windows, 0), typical_freedom(windows, 1)};
    double *most = dp_doubles(in->units);
    DP_OWN double *square = dp_doubles(in->units);
    for (int64_t i = 0; i < windows->n; i++) {
        const int32_t z = in->unit[i];
        const double m = mean_draw(windows, i, -1);
        if (z < 0 || !(windows->rows[i] > 0) || !isfinite(m)) continue;
        most[z] += m;
        square[z] += m * m / own_freedom(windows, i, of[unit_is_small(windows, i)]);
    }
    for (int z = 0; z < in->units; z++)
        most[z] = square[z] > 0 ? most[z] * most[z] / square[z] : INFINITY;
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
    *mean = mean_draw(v->u, i, -1);
    return counts(v, i) && v->u->want2[i] > 0 && isfinite(*mean);
}

/* Sets each family's rate. Families of one unit, which tells nothing beside itself, share their
 * geometric mean: one that is erratic does not outweigh the others. */
static void set_rates(level_view *v) {
    const dp_unit_list *u = v->u;
    DP_OWN double *want = dp_doubles(u->families), *err = dp_doubles(u->families);
    double logs = 0, n = 0, mean;
    DP_OWN int *units = dp_calloc((size_t)u->families, sizeof *units);
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
    return (draws * mean_draw(u, i, without) + told) / (draws + added) + u->floor2[i];
}

/* sqrt F(p; nu, D nu + d0), for nu rounded down to three binary digits behind its first: a wider
 * limit, and few quantiles to find. */
#define DIGITS 3
#define LEAST_EXPONENT (-2)
#define GRID ((24 - LEAST_EXPONENT) << DIGITS)
typedef struct {
    double p, draws, extra;
} quantiles;

static double limit_at(const quantiles *q, double nu) {
    int exponent;
    const double fraction = frexp(nu, &exponent); /* in [1/2, 1) */
    const int digits = (int)((2 * fraction - 1) * (1 << DIGITS));
    const int place = ((exponent - 1 - LEAST_EXPONENT) << DIGITS) + digits;
    const int i = place < 0 ? 0 : place >= GRID ? GRID - 1 : place;
    const double low =
        ldexp(1 + (double)(i % (1 << DIGITS)) / (1 << DIGITS), (i >> DIGITS) + LEAST_EXPONENT);
    return sqrt(dp_f_quantile(q->p, low, q->draws * low + q->extra));
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
    DP_OWN double *known = dp_doubles(u->families);
    int64_t n = 0;
    for (int f = 0; f < u->families; f++)
        v->draw[f] = NAN;
    for (int64_t i = 0; i < u->n; i++) {
        if (!counts(v, i)) continue;
        for (int k = 0; k < u->ndraw; k++) {
            const double x = error_over(u->draw2[k * u->n + i], expected2(v, i, k));
            if (!(x <= v->draw[u->family[i]])) v->draw[u->family[i]] = x;
        }
    }
    for (int f = 0; f < u->families; f++)
        if (!isnan(v->draw[f])) known[n++] = v->draw[f];
    const double usual = DP_ERRATIC * median_of(known, n);
    for (int f = 0; f < u->families; f++)
        if (v->draw[f] <= usual && !(v->draw[f] <= v->common)) v->common = v->draw[f];
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

/* Every unit of one class against the limit of its own freedom. each: [units] as r.seen. */
static dp_level_result judge_class(const dp_unit_list *u, dp_level_factor factor, int small,
                                   double *head_seen, double *each) {
    DP_FREED(view_free) level_view v = view_new(u, factor, small);
    dp_level_result r = level_none();
    r.units = count(&v);
    r.draw = v.common;
    r.freedom = v.nu;
    const double p = DP_ALARM / fmax(1, (double)r.units);
    quantiles with = {p, u->ndraw, v.prior}, without = {p, u->ndraw, 0};
    DP_OWN double *ratio = dp_doubles(r.units);
    int64_t n = 0;
    for (int64_t i = 0; i < u->n; i++) {
        if (!counts(&v, i)) continue;
        const double mine = own_freedom(u, i, v.nu), e2 = expected2(&v, i, -1);
        const double x = error_over(u->err2[i], e2);
        const double k = limit_of(&v, i, mine, e2, prior_freedom(&v, i) > 0 ? &with : &without);
        const double seen = u->want2[i] > 0 ? k * sqrt(e2 / u->want2[i]) : INFINITY;
        if (seen < r.seen) r.seen = seen;
        if (each) each[i] = seen;
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
    return r;
}

/* Every unit against the limit of its own freedom. head_seen: as in dp_levels_in. */
static dp_level_result judge_quadratic(const dp_unit_list *u, dp_level_factor factor,
                                       double *head_seen, double *each) {
    dp_level_result most = judge_class(u, factor, 0, head_seen, each);
    dp_level_result small = judge_class(u, factor, 1, head_seen, each);
    most.seen = small.seen = fmin(most.seen, small.seen);
    return small.units && level_worse(&small, &most) ? small : most;
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

/* The power mean over all units. */
static dp_level_result judge_every(const dp_unit_list *u, dp_level_factor factor) {
    const int D = u->ndraw;
    DP_FREED(view_free) level_view v = view_new(u, factor, -1);
    DP_FREED(unit_list_free) dp_unit_list one = unit_list_new(D, 1);
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
    dp_level_result r = level_none();
    if (total > 0 && isfinite(total) && u->n > 1) {
        const double usual = sqrt(total / D);
        r.ratio = r.median = power_mean(&v, u->err2, -1) / usual;
        r.units = 1;
        r.at = 0;
        for (int k = 0; k < D; k++)
            r.draw = fmax(k ? r.draw : 0, sqrt(one.draw2[k] / mean_draw(&one, 0, k)));
        r.freedom = own_freedom(&one, 0, typical_freedom(&one, -1));
        quantiles q = {DP_ALARM, D, 0};
        const double k = fmax(r.draw, limit_at(&q, r.freedom));
        r.limit = fmin(DP_LIMIT_MOST, (all_stored(&v) ? factor.stored : factor.usual) * k);
        const double all = power_mean(&v, u->want2, -1) / usual;
        if (all > 0) r.seen = r.limit / all;
    }
    return r;
}

/* ---- levels with sign: along directions, and sums over tokens by their shares ---------------- */

/* Components of the draws along a direction: by draw and head, and the squares of windows. */
typedef struct {
    int D, heads;
    double *total;   /* [D][heads] */
    double windows2; /* mean over draws of the sum of squares over windows */
    int64_t windows;
} components;

/* |d| over what is looked at. */
static double length_of(const dp_levels_in *in, int draw, dp_direction d) {
    const dp_draws *x = in->draws;
    double sum = 0;
    for (int64_t w = 0; w < x->windows; w++)
        if (in->unit[w] >= 0) sum += x->length2[(draw * DP_NDIRECTIONS + d) * x->windows + w];
    return sqrt(sum);
}

static components components_of(const dp_levels_in *in, dp_direction d) {
    const dp_draws *x = in->draws;
    DP_OWN double *length = dp_doubles(x->ndraw);
    for (int k = 0; k < x->ndraw; k++)
        length[k] = length_of(in, k, d);
    components c = {.D = x->ndraw, .heads = in->heads, .total = dp_doubles(x->ndraw * in->heads)};
    for (int64_t w = 0; w < x->windows; w++) {
        if (in->unit[w] < 0) continue;
        c.windows++;
        for (int k = 0; k < c.D; k++) {
            const double raw = x->along[(k * DP_NDIRECTIONS + d) * x->windows + w];
            const double s = length[k] > 0 ? raw / length[k] : 0;
            c.total[k * c.heads + in->unit[w] % in->heads] += s;
            c.windows2 += s * s / c.D;
        }
    }
    return c;
}

typedef struct {
    double mean, variance, freedom;
} spread;

/* Variance of the total over heads, whose errors are independent; freedom: D - 1 for each head that
 * counts (Welch and Satterthwaite). */
static spread spread_of_heads(const components *c) {
    spread s = {0};
    double squares = 0;
    for (int h = 0; h < c->heads; h++) {
        double mean = 0;
        double v = 0;
        for (int k = 0; k < c->D; k++)
            mean += c->total[k * c->heads + h] / c->D;
        for (int k = 0; k < c->D; k++) {
            const double x = c->total[k * c->heads + h] - mean;
            v += x * x / (c->D - 1);
        }
        s.mean += mean;
        s.variance += v;
        squares += v * v;
    }
    s.freedom = squares > 0 ? s.variance * s.variance / squares * (c->D - 1) : c->D - 1;
    return s;
}

/* With the windows taken as independent, twice over: they are not quite. */
static spread spread_of(const components *c) {
    spread s = spread_of_heads(c);
    const double extra = fmin(DP_INDEPENDENT, (double)(c->windows - c->heads));
    if (extra <= 0) return s;
    s.variance = (s.freedom * s.variance + extra * 2 * c->windows2) / (s.freedom + extra);
    s.freedom += extra;
    return s;
}

/* The error along a direction, E: the expected error of the tensor. */
static dp_level_result judge_direction(const dp_levels_in *in, dp_direction d, double E) {
    components c = components_of(in, d);
    const spread s = spread_of(&c);
    dp_level_result r = level_none();
    if (E > 0 && isfinite(E) && isfinite(s.variance) && in->draws->rows * in->draws->width > 1) {
        const double t = sqrt((1 + 1.0 / c.D) * dp_f_quantile(DP_ALARM, 1, s.freedom));
        const double own = (fabs(s.mean) + sqrt(s.variance) * t) / E;
        r.units = 1;
        r.at = 0;
        r.freedom = s.freedom;
        r.ratio = r.median = fabs(in->along[d]) / E;
        r.draw = fabs(s.mean) / E;
        r.limit =
            fmin(DP_LIMIT_MOST, in->allowance.local * own + in->allowance.lean + in->stored[d] / E);
    }
    free(c.total);
    return r;
}

/* Row i: squares of its shares, mean over draws, and how many numbers of its width they fill. */
static double shares2(const dp_draws *d, int64_t i, double *freedom) {
    double sum = 0;
    double squares = 0;
    for (int x = 0; x < d->width; x++) {
        double v = 0;
        for (int64_t kp = 0; kp < d->ndraw * d->parts; kp++) {
            const double s = d->part[(kp * d->rows + i) * d->width + x];
            v += s * s / d->ndraw;
        }
        sum += v;
        squares += v * v;
    }
    *freedom = squares > 0 ? sum * sum / squares : 1;
    return sum;
}

/* One head more. */
static void add_share(dp_share *s, double ratio, double nu, double bottom) {
    s->square = (s->square * s->top + ratio * ratio * nu) / (s->top + nu);
    s->top += nu;
    s->bottom += bottom;
}

/* Every head's sum over tokens, by the draws' shares; share: of all heads. */
static dp_level_result sums_of_heads(const dp_levels_in *in, const dp_unit_list *rows,
                                     dp_share *share) {
    const dp_draws *d = in->draws;
    const double extra = fmin(DP_INDEPENDENT, (double)(d->parts - 1));
    dp_level_result r = level_none();
    *share = (dp_share){0};
    for (int64_t i = 0; i < rows->n; i++)
        r.units += rows->rows[i] > 0;
    for (int64_t i = 0; i < rows->n && extra > 0; i++) {
        double nu;
        const double independent = 2 * shares2(d, i, &nu);
        const double own = mean_draw(rows, i, -1);
        if (!(rows->rows[i] > 0) || !isfinite(own)) continue;
        const double e2 = (d->ndraw * own + extra * independent) / (d->ndraw + extra);
        const double bottom = (d->ndraw + extra) * nu;
        const double f = sqrt(dp_f_quantile(DP_ALARM / (double)r.units, nu, bottom));
        const dp_level_result x = {.ratio = error_over(rows->err2[i], e2 + rows->floor2[i]),
                                   .limit = fmin(DP_LIMIT_MOST, in->allowance.factor * f),
                                   .freedom = nu,
                                   .units = r.units,
                                   .at = i,
                                   .draw = NAN,
                                   .seen = INFINITY};
        const double blind = x.limit * sqrt((e2 + rows->floor2[i]) / rows->want2[i]);
        if (rows->want2[i] > 0) r.seen = fmin(r.seen, blind);
        if (rows->want2[i] > 0 && in->head_seen) {
            double *seen = &in->head_seen[rows->family[i] % in->heads];
            *seen = fmin(*seen, blind);
        }
        add_share(share, x.ratio, nu, bottom);
        const double seen = r.seen;
        if (level_worse(&x, &r)) r = x;
        r.seen = seen;
    }
    r.median = r.ratio;
    return r;
}

/* ---- all levels ------------------------------------------------------------------------------ */

const char *const dp_level_names[DP_NLEVELS] = {"row",      "window",  "rank",      "tensor",
                                                "position", "channel", "every",     "sum",
                                                "factor",   "offset",  "truncation"};
const char *const dp_level_what[DP_NLEVELS] = {
    "in one row",
    "in one window of tokens and head, or one state",
    "over one rank and head",
    "over the whole tensor",
    "at one place of all windows of a head",
    "in one channel of a head, or one column of a state",
    "in every window and head",
    "in one head's sum over tokens",
    "along the tensor itself: as if it were multiplied by a factor",
    "with one sign: as if a constant were added",
    "against the sign of each entry: as if it were truncated, not rounded",
};

static int has_rows(const dp_levels_in *in) {
    return in->by_token && in->draws->width >= DP_ROW_NUMBERS;
}

/* Most degrees of freedom of windows, from those of their rows; NULL: no limit. To be freed. */
static double *freedom_of_rows(const dp_levels_in *in) {
    double *most = in->freedom ? dp_doubles(in->draws->windows) : NULL;
    for (int64_t row = 0; most && row < in->draws->rows; row++)
        if (in->window[row] >= 0) most[in->window[row]] += in->freedom[row];
    return most;
}

static dp_level_factor factor_of(const dp_levels_in *in, dp_level l) {
    const int local = l == DP_LEVEL_ROW || l == DP_LEVEL_WINDOW || l == DP_LEVEL_POSITION;
    const dp_allowance *a = &in->allowance;
    return local ? (dp_level_factor){a->local, a->stored_local, a->stored}
                 : (dp_level_factor){a->factor, a->stored_factor, a->stored};
}

static void judge_units(const dp_levels_in *in, dp_levels_result *out) {
    const dp_level first = has_rows(in) ? DP_LEVEL_ROW : DP_LEVEL_WINDOW;
    dp_presumption presumed = DP_NOTHING_KNOWN;
    DP_OWN double *of_rows = freedom_of_rows(in), *of_windows = NULL;
    out->at[DP_LEVEL_ROW] = level_none();
    for (dp_level l = first; l <= DP_LEVEL_TENSOR; l++) {
        dp_unit_list u = unit_list_of(in, l);
        u.presumed = presumed;
        u.most_freedom = l == DP_LEVEL_ROW      ? in->freedom
                         : l == DP_LEVEL_WINDOW ? of_rows
                         : l == DP_LEVEL_RANK   ? of_windows
                                                : NULL;
        out->at[l] = judge_quadratic(&u, factor_of(in, l), in->head_seen,
                                     l <= DP_LEVEL_WINDOW ? in->seen[l] : NULL);
        if (l == DP_LEVEL_WINDOW) {
            of_windows = freedom_of_windows(in, &u);
            out->at[DP_LEVEL_EVERY] = judge_every(&u, factor_of(in, DP_LEVEL_EVERY));
        }
        if (l < DP_LEVEL_TENSOR)
            presumed = presume(in, l, &u, level_units(in, l + 1));
        else if (u.want2[0] > 0)
            out->expected = sqrt(mean_draw(&u, 0, -1) / u.want2[0]);
        unit_list_free(&u);
    }
}

static void judge_across(const dp_levels_in *in, dp_levels_result *out) {
    for (dp_level l = DP_LEVEL_POSITION; l <= DP_LEVEL_CHANNEL; l++) {
        out->at[l] = level_none();
        if (!level_units(in, l)) continue;
        dp_unit_list u = unit_list_of(in, l);
        u.presumed = DP_NOTHING_KNOWN;
        out->at[l] = judge_quadratic(&u, factor_of(in, l), in->head_seen, NULL);
        unit_list_free(&u);
    }
}

static void judge_signed(const dp_levels_in *in, dp_levels_result *out) {
    DP_FREED(unit_list_free) dp_unit_list all = unit_list_of(in, DP_LEVEL_TENSOR);
    const double E = sqrt(mean_draw(&all, 0, -1) + all.floor2[0]);
    for (dp_direction d = 0; d < DP_NDIRECTIONS; d++)
        out->at[DP_LEVEL_FACTOR + d] = in->draws->along ? judge_direction(in, d, E) : level_none();
    dp_level_result *factor = &out->at[DP_LEVEL_FACTOR];
    if (all.want2[0] > 0 && !isnan(factor->limit))
        factor->seen = factor->limit * E / sqrt(all.want2[0]);
}

/* The row that stands for the unit that decided: the one with the largest error for its draws. */
static int64_t worst_row(const dp_levels_in *in, dp_level level, int64_t unit) {
    const dp_draws *d = in->draws;
    double top = -1;
    int64_t at = -1;
    for (int64_t row = 0; row < d->rows; row++) {
        const dp_level l = level <= DP_LEVEL_POSITION ? level : DP_LEVEL_TENSOR;
        const int64_t z = level == DP_LEVEL_SUM ? row : level_unit_of(in, l, row);
        const int elsewhere =
            level == DP_LEVEL_CHANNEL
                ? in->column_head[unit / d->width] !=
                      in->unit[in->window[row] >= 0 ? in->window[row] : 0] % in->heads
                : z != unit && level != DP_LEVEL_EVERY;
        double e2 = in->floor2[row];
        if (in->window[row] < 0 || elsewhere) continue;
        for (int k = 0; k < d->ndraw; k++)
            e2 += d->err2[k * d->rows + row] / d->ndraw;
        const double x = error_over(in->err2[row], e2);
        if (x <= top) continue;
        top = x;
        at = row;
    }
    return at;
}

static dp_share share_of_tensor(const dp_level_result *r, int draws) {
    return (dp_share){r->ratio * r->ratio, r->freedom, draws * r->freedom};
}

static void judge_sums(const dp_levels_in *in, dp_levels_result *out) {
    dp_share sums;
    DP_FREED(unit_list_free) dp_unit_list rows = unit_list_of(in, DP_LEVEL_ROW);
    out->at[DP_LEVEL_SUM] = sums_of_heads(in, &rows, &sums);
    if (sums.top > out->share.top) out->share = sums;
}

void dp_levels_judge(const dp_levels_in *in, dp_levels_result *out) {
    *out = (dp_levels_result){.expected = NAN, .excess = NAN, .row = -1};
    judge_units(in, out);
    judge_across(in, out);
    judge_signed(in, out);
    out->share = share_of_tensor(&out->at[DP_LEVEL_TENSOR], in->draws->ndraw);
    out->at[DP_LEVEL_SUM] = level_none();
    if (in->draws->parts) judge_sums(in, out);
    out->seen = INFINITY;
    for (int l = 0; l < DP_NLEVELS; l++) {
        out->seen = fmin(out->seen, out->at[l].seen);
        const double x = out->at[l].ratio / out->at[l].limit;
        if (isnan(x) || x <= out->excess) continue;
        out->excess = x;
        out->level = (dp_level)l;
    }
    if (!isnan(out->excess)) out->row = worst_row(in, out->level, out->at[out->level].at);
}

/* ---- Fisher's sum over cases (levels.h) ------------------------------------------------------ */

dp_share dp_share_of_runs(int n, const dp_share *run) {
    dp_share s = {0, INFINITY, INFINITY};
    for (int i = 0; i < n; i++) {
        s.square += run[i].square / n;
        s.top = fmin(s.top, run[i].top);
        s.bottom = fmin(s.bottom, run[i].bottom);
    }
    return s;
}

/* The chance of as much, were every error `grown` times as large. */
static double chance(int n, const dp_share *of_case, const double *factor, double grown) {
    double sum = 0;
    for (int c = 0; c < n; c++) {
        const double x = of_case[c].square * (grown / factor[c]) * (grown / factor[c]);
        const double p = dp_f_tail(x, of_case[c].top, of_case[c].bottom);
        sum -= 2 * dp_log(fmax(p, DP_POOLED_LEAST));
    }
    return dp_f_tail(sum / (2 * n), 2 * n, INFINITY);
}

static double detects(int n, const dp_share *of_case, const double *factor) {
    double low = 1.0 / 64;
    double high = 64;
    if (chance(n, of_case, factor, high) > DP_ALARM) return INFINITY;
    for (int i = 0; i < 40; i++) {
        const double middle = sqrt(low * high);
        if (chance(n, of_case, factor, middle) > DP_ALARM)
            low = middle;
        else
            high = middle;
    }
    return high;
}

dp_pooled dp_pool(int n, const dp_share *of_case, const double *factor) {
    dp_pooled r = {.cases = n};
    for (int c = 0; c < n; c++) {
        r.freedom += of_case[c].top;
        r.ratio += of_case[c].top * of_case[c].square;
    }
    r.ratio = sqrt(r.ratio / r.freedom);
    r.chance = chance(n, of_case, factor, 1);
    r.detects = detects(n, of_case, factor);
    return r;
}
