/* The statistics of the expected tier: see levels.h for every formula. */
#include "levels.h"
#include "quantile.h"
#include "ref/arithmetic/elementary.h"
#include "ref/vocabulary/problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const dp_level_names[DP_NLEVELS] = {"row", "window", "rank",   "tensor",    "every",
                                                "sum", "factor", "offset", "truncation"};
const char *const dp_level_what[DP_NLEVELS] = {
    "in one row",
    "in one window of tokens and head, or one state",
    "over one rank and head",
    "over the whole tensor",
    "in all windows of tokens and heads alike",
    "in one head's sum over tokens",
    "along the tensor itself: as if it were multiplied by a factor",
    "with one sign: as if a constant were added",
    "against the sign of each entry: as if it were truncated, not rounded",
};

#define MOST_FREEDOM 1e6
#define OTHERS 4.0 /* draws that all units together count as, for one unit's freedom */

/* ---- units: rows, windows, ranks or the tensor --------------------------------------------------
 */

/* What a level knows of the variation of its units before it looks at them. */
typedef struct {
    double cv2;     /* squared coefficient of variation of |d|^2 */
    double draws;   /* that it counts as */
    double unknown; /* draws among them that stand for numbers of which nothing is known */
} presumption;

typedef struct {
    int ndraw;
    int64_t n;
    presumption presumed;
    double *draw2;                                  /* [ndraw][n] */
    double *err2, *want2, *floor2, *numbers, *rows; /* [n]; rows 0: nothing there */
    double most_rows;
    const double *most_freedom; /* [n]; NULL: no limit but numbers */
} unit_list;

static unit_list list_new(int ndraw, int64_t n) {
    unit_list u = {.ndraw = ndraw, .n = n};
    u.draw2 = dp_doubles(ndraw * n);
    u.err2 = dp_doubles(n);
    u.want2 = dp_doubles(n);
    u.floor2 = dp_doubles(n);
    u.numbers = dp_doubles(n);
    u.rows = dp_doubles(n);
    return u;
}

static void list_free(unit_list *u) {
    free(u->draw2);
    free(u->err2);
    free(u->want2);
    free(u->floor2);
    free(u->numbers);
    free(u->rows);
}

/* The unit of a row on a level, -1: it is not looked at. */
static int64_t unit_of(const dp_levels_in *in, dp_level level, int64_t row) {
    const int32_t window = in->window[row];
    if (window < 0 || in->unit[window] < 0) return -1;
    if (level == DP_LEVEL_ROW) return row;
    if (level == DP_LEVEL_WINDOW) return window;
    return level == DP_LEVEL_RANK ? in->unit[window] : 0;
}

static int64_t units_of(const dp_levels_in *in, dp_level level) {
    if (level == DP_LEVEL_ROW) return in->draws->rows;
    if (level == DP_LEVEL_WINDOW) return in->draws->windows;
    return level == DP_LEVEL_RANK ? in->units : 1;
}

static unit_list gather(const dp_levels_in *in, dp_level level) {
    const dp_draws *d = in->draws;
    unit_list u = list_new(d->ndraw, units_of(in, level));
    for (int64_t row = 0; row < d->rows; row++) {
        const int64_t z = unit_of(in, level, row);
        if (z < 0) continue;
        for (int k = 0; k < d->ndraw; k++)
            u.draw2[k * u.n + z] += d->err2[k * d->rows + row];
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
static double mean_draw(const unit_list *u, int64_t i, int without) {
    double sum = 0;
    for (int k = 0; k < u->ndraw; k++)
        if (k != without) sum += u->draw2[k * u->n + i];
    return sum / (without >= 0 ? u->ndraw - 1 : u->ndraw);
}

/* ---- degrees of freedom ---------------------------------------------------------------------- */

/* From the variance of D draws over their own mean squared: 2 / cv^2, corrected for that mean. */
static double freedom_of(double cv2, int D) {
    const double two_over_nu = cv2 < 0.9 * D ? cv2 / (1 - cv2 / D) : 9.0 * D;
    return fmax(0.5, fmin(2 / fmax(two_over_nu, 1e-9), MOST_FREEDOM));
}

static double variation(const unit_list *u, int64_t i) { /* NAN: draws zero or not finite */
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
static int is_small(const unit_list *u, int64_t i) { return 4 * u->rows[i] <= u->most_rows; }

/* Of a typical unit (of a class; -1: of all): the draws of all its units together with what is
 * presumed. Few units and draws say little: fewer degrees of freedom are assumed then, by two
 * standard deviations of the estimate. */
static double typical_freedom(const unit_list *u, int small) {
    double sum = u->presumed.cv2 * u->presumed.draws;
    double n = u->presumed.draws;
    for (int64_t i = 0; i < u->n; i++) {
        const double x = u->rows[i] > 0 ? variation(u, i) : NAN;
        if (isnan(x) || (small >= 0 && is_small(u, i) != small)) continue;
        sum += x * (u->ndraw - 1);
        n += u->ndraw - 1;
    }
    return freedom_of(sum / n * (1 + 2 * sqrt(2 / n)), u->ndraw);
}

/* Of unit i among others that have nu. */
static double own_freedom(const unit_list *u, int64_t i, double nu) {
    const int D = u->ndraw;
    const double x = variation(u, i);
    double most = fmin(nu, u->numbers[i]);
    if (u->most_freedom) most = fmin(most, u->most_freedom[i]);
    if (isnan(x)) return most;
    return fmin(most, freedom_of((OTHERS * 2 / nu + (D - 1) * x) / (OTHERS + D - 1), D));
}

/* What the units of a finer level let expect of a coarser one: were they independent, and three
 * times that, because they are not quite (over the windows of a head that remembers up to 3.6 was
 * measured, mostly 1). Where one unit outweighs the others they tell nothing that its own draws do
 * not. The finest level knows nothing: few numbers, of any correlation. */
#define NOT_INDEPENDENT 3.0
#define FROM_FINER 10.0
#define UNKNOWN_DRAWS 3.0
static const presumption NOTHING_KNOWN = {1, UNKNOWN_DRAWS, UNKNOWN_DRAWS};

static int64_t parent(const dp_levels_in *in, dp_level fine, int64_t i) {
    if (fine == DP_LEVEL_ROW) return in->window[i];
    return fine == DP_LEVEL_WINDOW ? in->unit[i] : 0;
}

/* Sums over the fine units of a coarse one: of m = mean |d|^2, of m^2, and of its variance. */
typedef struct {
    double sum, square, variance;
} family;

static presumption presume(const dp_levels_in *in, dp_level fine, const unit_list *u, int64_t n) {
    family *coarse = dp_calloc((size_t)n, sizeof *coarse);
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
        cv2 += fmin(count, NOT_INDEPENDENT) * f->variance / (f->sum * f->sum);
        draws += (count - 1) * (u->ndraw - 1);
        unknown += u->presumed.unknown / count;
        units++;
    }
    free(coarse);
    if (units == 0) return NOTHING_KNOWN;
    const double finer = fmin(FROM_FINER, draws / units);
    const double rest = unknown / units;
    return (presumption){(finer * cv2 / units + rest) / (finer + rest), finer + rest, rest};
}

/* What a rank and head has at most: from its windows, were they independent. [units], to be freed.
 */
static double *freedom_of_windows(const dp_levels_in *in, const unit_list *windows) {
    const double of[2] = {typical_freedom(windows, 0), typical_freedom(windows, 1)};
    double *most = dp_doubles(in->units);
    double *square = dp_doubles(in->units);
    for (int64_t i = 0; i < windows->n; i++) {
        const int32_t z = in->unit[i];
        const double m = mean_draw(windows, i, -1);
        if (z < 0 || !(windows->rows[i] > 0) || !isfinite(m)) continue;
        most[z] += m;
        square[z] += m * m / own_freedom(windows, i, of[is_small(windows, i)]);
    }
    for (int z = 0; z < in->units; z++)
        most[z] = square[z] > 0 ? most[z] * most[z] / square[z] : INFINITY;
    free(square);
    return most;
}

/* ---- the expected error ---------------------------------------------------------------------- */

/* How the tensor's mean error for a size stands beside a unit's own draws. */
typedef struct {
    double rate;    /* mean |d|^2 over |want|^2 */
    double freedom; /* d0 */
} prior;

static double prior_rate(const unit_list *u) {
    double err = 0;
    double want = 0;
    for (int64_t i = 0; i < u->n; i++) {
        if (!(u->want2[i] > 0)) continue;
        err += mean_draw(u, i, -1);
        want += u->want2[i];
    }
    return want > 0 && isfinite(err) ? err / want : 0;
}

/* d0 by moments: the draws' means over what the prior tells vary by 2 / (D nu) from their own
 * scatter, and by 2 / d0 from what the prior does not know. */
static prior prior_of(const unit_list *u, double nu) {
    prior p = {.rate = prior_rate(u)};
    double sum = 0;
    double square = 0;
    double n = 0;
    for (int64_t i = 0; i < u->n && p.rate > 0; i++) {
        const double m = mean_draw(u, i, -1);
        if (!(u->want2[i] > 0) || !isfinite(m)) continue;
        const double x = m / (p.rate * u->want2[i]);
        sum += x;
        square += x * x;
        n++;
    }
    if (n < 2 || !(sum > 0)) return p;
    const double mean = sum / n;
    const double rest = (square / n / (mean * mean) - 1) * n / (n - 1) - 2 / (u->ndraw * nu);
    p.freedom = fmin(fmin(DP_PRIOR_MOST, n), rest > 0 ? 2 / rest : DP_PRIOR_MOST);
    return p;
}

/* E^2 of unit i, of freedom nu, from all draws or all but one. */
static double expected2(const unit_list *u, const prior *p, double nu, int64_t i, int without) {
    const double draws = (u->ndraw - (without >= 0)) * nu;
    const double told = p->freedom * p->rate * u->want2[i];
    return (draws * mean_draw(u, i, without) + told) / (draws + p->freedom) + u->floor2[i];
}

static double over(double err2, double e2) {
    return err2 == 0 ? 0 : e2 > 0 ? sqrt(err2 / e2) : INFINITY;
}

/* ---- limits ---------------------------------------------------------------------------------- */

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

/* ---- quadratic levels ------------------------------------------------------------------------ */

typedef struct {
    const unit_list *u;
    const dp_allowance *allowance;
    int small; /* the class looked at */
    double nu;
    prior prior;
} level_view;

static int counts(const level_view *v, int64_t i) {
    return v->u->rows[i] > 0 && is_small(v->u, i) == v->small;
}

static int64_t count(const level_view *v) {
    int64_t n = 0;
    for (int64_t i = 0; i < v->u->n; i++)
        n += counts(v, i);
    return n;
}

/* The largest ratio of one draw to what the others expect. */
static double largest_draw(const level_view *v) {
    double top = NAN;
    for (int64_t i = 0; i < v->u->n; i++) {
        if (!counts(v, i)) continue;
        for (int k = 0; k < v->u->ndraw; k++) {
            const double e2 = expected2(v->u, &v->prior, v->nu, i, k);
            const double x = over(v->u->draw2[k * v->u->n + i], e2);
            if (!(x <= top)) top = x;
        }
    }
    return top;
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

/* Every unit of one class against the limit of its own freedom. */
static dp_level_result judge_class(const unit_list *u, const dp_allowance *allowance, int small) {
    level_view v = {.u = u, .allowance = allowance, .small = small};
    v.nu = fmin(typical_freedom(u, small), typical_freedom(u, -1));
    v.prior = prior_of(u, v.nu);
    dp_level_result r = {.units = count(&v), .draw = largest_draw(&v), .freedom = v.nu, .at = -1};
    r.ratio = r.limit = NAN;
    quantiles q = {DP_ALARM / fmax(1, (double)r.units), u->ndraw, v.prior.freedom, {0}};
    double *ratio = dp_doubles(r.units);
    int64_t n = 0;
    for (int64_t i = 0; i < u->n; i++) {
        if (!counts(&v, i)) continue;
        const double mine = own_freedom(u, i, v.nu);
        const double x = over(u->err2[i], expected2(u, &v.prior, v.nu, i, -1));
        const double k = fmin(DP_LIMIT_MOST, allowance->factor * fmax(r.draw, limit_at(&q, mine)));
        ratio[n++] = x;
        if (x / k <= r.ratio / r.limit) continue;
        r.ratio = x;
        r.limit = k;
        r.freedom = mine;
        r.at = i;
    }
    r.median = median_of(ratio, n);
    free(ratio);
    return r;
}

static int worse(const dp_level_result *a, const dp_level_result *b) {
    return isnan(b->ratio) || a->ratio / a->limit > b->ratio / b->limit;
}

static dp_level_result judge_quadratic(const unit_list *u, const dp_allowance *allowance) {
    const dp_level_result most = judge_class(u, allowance, 0);
    const dp_level_result small = judge_class(u, allowance, 1);
    return small.units && worse(&small, &most) ? small : most;
}

/* ---- all windows alike ----------------------------------------------------------------------- */

/* Power mean over windows of |err| / E with exponent 2/3, in which |err| is nearly normal (Wilson
 * and Hilferty) and no window outweighs the others. k: of that draw against the others, < 0: of
 * the subject. Draws carry the floor, too: the subject is allowed it. */
static double power_mean(const unit_list *u, const prior *p, double nu, int k) {
    double sum = 0;
    int64_t n = 0;
    for (int64_t i = 0; i < u->n; i++) {
        const double e2 = u->rows[i] > 0 ? expected2(u, p, nu, i, k) : 0;
        const double x = k < 0 ? u->err2[i] : u->draw2[k * u->n + i] + u->floor2[i];
        if (!(e2 > 0) || !isfinite(e2)) continue;
        sum += dp_cbrt(x / e2);
        n++;
    }
    if (n == 0) return NAN;
    const double mean = sum / (double)n;
    return mean * sqrt(mean);
}

static dp_level_result none(void) {
    return (dp_level_result){.ratio = NAN, .median = NAN, .limit = NAN, .draw = NAN, .at = -1};
}

static dp_level_result judge_every(const unit_list *u, const dp_allowance *allowance) {
    const int D = u->ndraw;
    const double nu = typical_freedom(u, -1);
    const prior p = prior_of(u, nu);
    unit_list one = list_new(D, 1);
    one.presumed = (presumption){NOT_INDEPENDENT * 2 / (nu * (double)u->n),
                                 fmin(FROM_FINER, (double)(u->n - 1) * (D - 1)), 0};
    double total = 0;
    one.rows[0] = 1;
    one.numbers[0] = INFINITY;
    for (int k = 0; k < D; k++) {
        const double x = power_mean(u, &p, nu, k);
        one.draw2[k] = x * x;
        total += x * x;
    }
    dp_level_result r = none();
    if (total > 0 && isfinite(total) && u->n > 1) {
        r.ratio = r.median = power_mean(u, &p, nu, -1) / sqrt(total / D);
        r.units = 1;
        r.at = 0;
        for (int k = 0; k < D; k++)
            r.draw = fmax(k ? r.draw : 0, sqrt(one.draw2[k] / mean_draw(&one, 0, k)));
        r.freedom = own_freedom(&one, 0, typical_freedom(&one, -1));
        quantiles q = {DP_ALARM, D, 0, {0}};
        const double k = fmax(r.draw, limit_at(&q, r.freedom));
        r.limit = fmin(DP_LIMIT_MOST, allowance->factor * k);
    }
    list_free(&one);
    return r;
}

/* ---- directions ------------------------------------------------------------------------------ */

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
    double *length = dp_doubles(x->ndraw);
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
    free(length);
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

static dp_level_result judge_direction(const dp_levels_in *in, dp_direction d, double E) {
    components c = components_of(in, d);
    const spread s = spread_of(&c);
    dp_level_result r = none();
    if (E > 0 && isfinite(E) && isfinite(s.variance) && in->draws->rows * in->draws->width > 1) {
        const double t = sqrt((1 + 1.0 / c.D) * dp_f_quantile(DP_ALARM, 1, s.freedom));
        const double own = (fabs(s.mean) + sqrt(s.variance) * t) / E;
        r.units = 1;
        r.at = 0;
        r.freedom = s.freedom;
        r.ratio = r.median = fabs(in->along[d]) / E;
        r.draw = fabs(s.mean) / E;
        r.limit = fmin(DP_LIMIT_MOST, in->allowance.factor * own + in->allowance.lean);
    }
    free(c.total);
    return r;
}

/* ---- sums over tokens ------------------------------------------------------------------------ */

/* Of row i: squares of its shares, mean over draws, and how many numbers of its width they fill. */
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

static dp_level_result judge_sums(const dp_levels_in *in, const unit_list *rows) {
    const dp_draws *d = in->draws;
    const double extra = fmin(DP_INDEPENDENT, (double)(d->parts - 1));
    dp_level_result r = none();
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
        const dp_level_result x = {.ratio = over(rows->err2[i], e2 + rows->floor2[i]),
                                   .limit = fmin(DP_LIMIT_MOST, in->allowance.factor * f),
                                   .freedom = nu,
                                   .units = r.units,
                                   .at = i,
                                   .draw = NAN};
        if (worse(&x, &r)) r = x;
    }
    r.median = r.ratio;
    return r;
}

/* ---- all of it ------------------------------------------------------------------------------- */

static int has_rows(const dp_levels_in *in) {
    return in->by_token && in->draws->width >= DP_ROW_NUMBERS;
}

static void judge_units(const dp_levels_in *in, dp_excess *out) {
    const dp_level first = has_rows(in) ? DP_LEVEL_ROW : DP_LEVEL_WINDOW;
    presumption presumed = NOTHING_KNOWN;
    double *most = NULL;
    out->at[DP_LEVEL_ROW] = none();
    for (dp_level l = first; l <= DP_LEVEL_TENSOR; l++) {
        unit_list u = gather(in, l);
        u.presumed = presumed;
        u.most_freedom = l == DP_LEVEL_RANK ? most : NULL;
        out->at[l] = judge_quadratic(&u, &in->allowance);
        if (l == DP_LEVEL_WINDOW) {
            most = freedom_of_windows(in, &u);
            out->at[DP_LEVEL_EVERY] = judge_every(&u, &in->allowance);
        }
        if (l < DP_LEVEL_TENSOR)
            presumed = presume(in, l, &u, units_of(in, l + 1));
        else if (u.want2[0] > 0)
            out->expected = sqrt(mean_draw(&u, 0, -1) / u.want2[0]);
        list_free(&u);
    }
    free(most);
}

static void judge_signed(const dp_levels_in *in, dp_excess *out) {
    unit_list all = gather(in, DP_LEVEL_TENSOR);
    const double E = sqrt(mean_draw(&all, 0, -1) + all.floor2[0]);
    for (dp_direction d = 0; d < DP_NDIRECTIONS; d++)
        out->at[DP_LEVEL_FACTOR + d] = in->draws->along ? judge_direction(in, d, E) : none();
    list_free(&all);
}

/* The row that stands for the unit that decided: the one with the largest error for its draws. */
static int64_t worst_row(const dp_levels_in *in, dp_level level, int64_t unit) {
    const dp_draws *d = in->draws;
    double top = -1;
    int64_t at = -1;
    for (int64_t row = 0; row < d->rows; row++) {
        const dp_level l = level <= DP_LEVEL_TENSOR ? level : DP_LEVEL_TENSOR;
        const int64_t z = level == DP_LEVEL_SUM ? row : unit_of(in, l, row);
        double e2 = in->floor2[row];
        if (in->window[row] < 0 || z != unit) continue;
        for (int k = 0; k < d->ndraw; k++)
            e2 += d->err2[k * d->rows + row] / d->ndraw;
        const double x = over(in->err2[row], e2);
        if (x <= top) continue;
        top = x;
        at = row;
    }
    return at;
}

void dp_levels_judge(const dp_levels_in *in, dp_excess *out) {
    *out = (dp_excess){.expected = NAN, .excess = NAN, .row = -1};
    judge_units(in, out);
    judge_signed(in, out);
    out->at[DP_LEVEL_SUM] = none();
    if (in->draws->parts) {
        unit_list rows = gather(in, DP_LEVEL_ROW);
        out->at[DP_LEVEL_SUM] = judge_sums(in, &rows);
        list_free(&rows);
    }
    for (int l = 0; l < DP_NLEVELS; l++) {
        const double x = out->at[l].ratio / out->at[l].limit;
        if (isnan(x) || x <= out->excess) continue;
        out->excess = x;
        out->level = (dp_level)l;
    }
    if (!isnan(out->excess)) out->row = worst_row(in, out->level, out->at[out->level].at);
}
