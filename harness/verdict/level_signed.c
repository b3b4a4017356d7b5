/* Levels with sign: the error along directions, and sums over tokens by their shares (levels.h). */
#include "levels_impl.h"
#include "quantile.h"

#include <math.h>
#include <stdlib.h>

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

dp_level_result dp_judge_direction(const dp_levels_in *in, dp_direction d, double E) {
    components c = components_of(in, d);
    const spread s = spread_of(&c);
    dp_level_result r = dp_level_none();
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

dp_level_result dp_judge_sums(const dp_levels_in *in, const dp_unit_list *rows, dp_share *share) {
    const dp_draws *d = in->draws;
    const double extra = fmin(DP_INDEPENDENT, (double)(d->parts - 1));
    dp_level_result r = dp_level_none();
    *share = (dp_share){0};
    for (int64_t i = 0; i < rows->n; i++)
        r.units += rows->rows[i] > 0;
    for (int64_t i = 0; i < rows->n && extra > 0; i++) {
        double nu;
        const double independent = 2 * shares2(d, i, &nu);
        const double own = dp_mean_draw(rows, i, -1);
        if (!(rows->rows[i] > 0) || !isfinite(own)) continue;
        const double e2 = (d->ndraw * own + extra * independent) / (d->ndraw + extra);
        const double bottom = (d->ndraw + extra) * nu;
        const double f = sqrt(dp_f_quantile(DP_ALARM / (double)r.units, nu, bottom));
        const dp_level_result x = {.ratio = dp_error_over(rows->err2[i], e2 + rows->floor2[i]),
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
        if (dp_level_worse(&x, &r)) r = x;
        r.seen = seen;
    }
    r.median = r.ratio;
    return r;
}
