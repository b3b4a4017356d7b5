/* Quadratic levels: the expected error of a unit, its limit, and all windows alike (levels.h). */
#include "levels_impl.h"
#include "quantile.h"
#include "ref/arithmetic/elementary.h"

#include <math.h>
#include <stdlib.h>

/* How the tensor's mean error for a size stands beside a unit's own draws. */
typedef struct {
    double rate;    /* mean |d|^2 over |want|^2 */
    double freedom; /* d0 */
} prior;

static double prior_rate(const dp_unit_list *u) {
    double err = 0;
    double want = 0;
    for (int64_t i = 0; i < u->n; i++) {
        if (!(u->want2[i] > 0)) continue;
        err += dp_mean_draw(u, i, -1);
        want += u->want2[i];
    }
    return want > 0 && isfinite(err) ? err / want : 0;
}

/* d0 by moments: the draws' means over what the prior tells vary by 2 / (D nu) from their own
 * scatter, and by 2 / d0 from what the prior does not know. */
static prior prior_of(const dp_unit_list *u, double nu) {
    prior p = {.rate = prior_rate(u)};
    double sum = 0;
    double square = 0;
    double n = 0;
    for (int64_t i = 0; i < u->n && p.rate > 0; i++) {
        const double m = dp_mean_draw(u, i, -1);
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

/* Degrees of freedom that the prior adds for unit i: none where the truth is zero, of whose errors
 * those in proportion to a size say nothing. */
static double prior_freedom(const dp_unit_list *u, const prior *p, int64_t i) {
    return u->want2[i] > 0 ? p->freedom : 0;
}

/* E^2 of unit i, of freedom nu, from all draws or all but one. */
static double expected2(const dp_unit_list *u, const prior *p, double nu, int64_t i, int without) {
    const double draws = (u->ndraw - (without >= 0)) * nu, added = prior_freedom(u, p, i);
    const double told = added * p->rate * u->want2[i];
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

typedef struct {
    const dp_unit_list *u;
    const dp_allowance *allowance;
    int small; /* the class looked at */
    double nu;
    prior prior;
} level_view;

static int counts(const level_view *v, int64_t i) {
    return v->u->rows[i] > 0 && dp_unit_is_small(v->u, i) == v->small;
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
            const double x = dp_error_over(v->u->draw2[k * v->u->n + i], e2);
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
static dp_level_result judge_class(const dp_unit_list *u, const dp_allowance *allowance,
                                   int small) {
    level_view v = {.u = u, .allowance = allowance, .small = small};
    v.nu = fmin(dp_typical_freedom(u, small), dp_typical_freedom(u, -1));
    v.prior = prior_of(u, v.nu);
    dp_level_result r = {.units = count(&v), .draw = largest_draw(&v), .freedom = v.nu, .at = -1};
    r.ratio = r.limit = NAN;
    const double p = DP_ALARM / fmax(1, (double)r.units);
    quantiles with = {p, u->ndraw, v.prior.freedom, {0}};
    quantiles without = {p, u->ndraw, 0, {0}};
    double *ratio = dp_doubles(r.units);
    int64_t n = 0;
    for (int64_t i = 0; i < u->n; i++) {
        if (!counts(&v, i)) continue;
        const double mine = dp_own_freedom(u, i, v.nu);
        const double x = dp_error_over(u->err2[i], expected2(u, &v.prior, v.nu, i, -1));
        quantiles *q = prior_freedom(u, &v.prior, i) > 0 ? &with : &without;
        const double k = fmin(DP_LIMIT_MOST, allowance->factor * fmax(r.draw, limit_at(q, mine)));
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

dp_level_result dp_judge_quadratic(const dp_unit_list *u, const dp_allowance *allowance) {
    const dp_level_result most = judge_class(u, allowance, 0);
    const dp_level_result small = judge_class(u, allowance, 1);
    return small.units && dp_level_worse(&small, &most) ? small : most;
}

/* Power mean over windows of |err| / E with exponent 2/3, in which |err| is nearly normal (Wilson
 * and Hilferty) and no window outweighs the others. k: of that draw against the others, < 0: of
 * the subject. Draws carry the floor, too: the subject is allowed it. */
static double power_mean(const dp_unit_list *u, const prior *p, double nu, int k) {
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

dp_level_result dp_judge_every(const dp_unit_list *u, const dp_allowance *allowance) {
    const int D = u->ndraw;
    const double nu = dp_typical_freedom(u, -1);
    const prior p = prior_of(u, nu);
    dp_unit_list one = dp_unit_list_new(D, 1);
    one.presumed = (dp_presumption){DP_NOT_INDEPENDENT * 2 / (nu * (double)u->n),
                                    fmin(DP_FROM_FINER, (double)(u->n - 1) * (D - 1)), 0};
    double total = 0;
    one.rows[0] = 1;
    one.numbers[0] = INFINITY;
    for (int k = 0; k < D; k++) {
        const double x = power_mean(u, &p, nu, k);
        one.draw2[k] = x * x;
        total += x * x;
    }
    dp_level_result r = dp_level_none();
    if (total > 0 && isfinite(total) && u->n > 1) {
        r.ratio = r.median = power_mean(u, &p, nu, -1) / sqrt(total / D);
        r.units = 1;
        r.at = 0;
        for (int k = 0; k < D; k++)
            r.draw = fmax(k ? r.draw : 0, sqrt(one.draw2[k] / dp_mean_draw(&one, 0, k)));
        r.freedom = dp_own_freedom(&one, 0, dp_typical_freedom(&one, -1));
        quantiles q = {DP_ALARM, D, 0, {0}};
        const double k = fmax(r.draw, limit_at(&q, r.freedom));
        r.limit = fmin(DP_LIMIT_MOST, allowance->factor * k);
    }
    dp_unit_list_free(&one);
    return r;
}
