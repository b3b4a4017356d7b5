/* Quadratic levels: the expected error of a unit, its limit, and all windows alike (levels.h). */
#include "levels_impl.h"
#include "quantile.h"
#include "ref/arithmetic/elementary.h"

#include <math.h>
#include <stdlib.h>

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
    return v->u->rows[i] > 0 && (v->small < 0 || dp_unit_is_small(v->u, i) == v->small);
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
    v.nu = dp_typical_freedom(u, -1);
    if (small >= 0) v.nu = fmin(v.nu, dp_typical_freedom(u, small));
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
        const double mine = dp_own_freedom(u, i, v.nu), e2 = expected2(&v, i, -1);
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
    dp_unit_list one = dp_unit_list_new(D, 1);
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
        r.freedom = dp_own_freedom(&one, 0, dp_typical_freedom(&one, -1));
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
