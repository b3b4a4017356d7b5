/* Is an error more than its design makes? All levels, and the worst of them (levels.h). */
#include "levels.h"
#include "levels_impl.h"
#include "ref/arithmetic/elementary.h"

#include <math.h>
#include <stdlib.h>

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

/* The error along a direction, E: the expected error of the tensor. */
static dp_level_result judge_direction(const dp_levels_in *in, dp_direction d, double E) {
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

/* Every head's sum over tokens, by the draws' shares; share: of all heads. */
static dp_level_result sums_of_heads(const dp_levels_in *in, const dp_unit_list *rows,
                                     dp_share *share) {
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

double dp_error_over(double err2, double e2) {
    return err2 == 0 ? 0 : e2 > 0 ? sqrt(err2 / e2) : INFINITY;
}

dp_level_result dp_level_none(void) {
    return (dp_level_result){
        .ratio = NAN, .median = NAN, .limit = NAN, .draw = NAN, .seen = INFINITY, .at = -1};
}

int dp_level_worse(const dp_level_result *a, const dp_level_result *b) {
    return isnan(b->ratio) || a->ratio / a->limit > b->ratio / b->limit;
}

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
    double *of_rows = freedom_of_rows(in), *of_windows = NULL;
    out->at[DP_LEVEL_ROW] = dp_level_none();
    for (dp_level l = first; l <= DP_LEVEL_TENSOR; l++) {
        dp_unit_list u = dp_unit_list_of(in, l);
        u.presumed = presumed;
        u.most_freedom = l == DP_LEVEL_ROW      ? in->freedom
                         : l == DP_LEVEL_WINDOW ? of_rows
                         : l == DP_LEVEL_RANK   ? of_windows
                                                : NULL;
        out->at[l] = dp_judge_quadratic(&u, factor_of(in, l), in->head_seen);
        if (l == DP_LEVEL_WINDOW) {
            of_windows = dp_freedom_of_windows(in, &u);
            out->at[DP_LEVEL_EVERY] = dp_judge_every(&u, factor_of(in, DP_LEVEL_EVERY));
        }
        if (l < DP_LEVEL_TENSOR)
            presumed = dp_presume(in, l, &u, dp_level_units(in, l + 1));
        else if (u.want2[0] > 0)
            out->expected = sqrt(dp_mean_draw(&u, 0, -1) / u.want2[0]);
        dp_unit_list_free(&u);
    }
    free(of_rows);
    free(of_windows);
}

static void judge_across(const dp_levels_in *in, dp_levels_result *out) {
    for (dp_level l = DP_LEVEL_POSITION; l <= DP_LEVEL_CHANNEL; l++) {
        out->at[l] = dp_level_none();
        if (!dp_level_units(in, l)) continue;
        dp_unit_list u = dp_unit_list_of(in, l);
        u.presumed = DP_NOTHING_KNOWN;
        out->at[l] = dp_judge_quadratic(&u, factor_of(in, l), in->head_seen);
        dp_unit_list_free(&u);
    }
}

static void judge_signed(const dp_levels_in *in, dp_levels_result *out) {
    dp_unit_list all = dp_unit_list_of(in, DP_LEVEL_TENSOR);
    const double E = sqrt(dp_mean_draw(&all, 0, -1) + all.floor2[0]);
    for (dp_direction d = 0; d < DP_NDIRECTIONS; d++)
        out->at[DP_LEVEL_FACTOR + d] =
            in->draws->along ? judge_direction(in, d, E) : dp_level_none();
    dp_level_result *factor = &out->at[DP_LEVEL_FACTOR];
    if (all.want2[0] > 0 && !isnan(factor->limit))
        factor->seen = factor->limit * E / sqrt(all.want2[0]);
    dp_unit_list_free(&all);
}

/* The row that stands for the unit that decided: the one with the largest error for its draws. */
static int64_t worst_row(const dp_levels_in *in, dp_level level, int64_t unit) {
    const dp_draws *d = in->draws;
    double top = -1;
    int64_t at = -1;
    for (int64_t row = 0; row < d->rows; row++) {
        const dp_level l = level <= DP_LEVEL_POSITION ? level : DP_LEVEL_TENSOR;
        const int64_t z = level == DP_LEVEL_SUM ? row : dp_level_unit_of(in, l, row);
        const int elsewhere =
            level == DP_LEVEL_CHANNEL
                ? in->column_head[unit / d->width] !=
                      in->unit[in->window[row] >= 0 ? in->window[row] : 0] % in->heads
                : z != unit && level != DP_LEVEL_EVERY;
        double e2 = in->floor2[row];
        if (in->window[row] < 0 || elsewhere) continue;
        for (int k = 0; k < d->ndraw; k++)
            e2 += d->err2[k * d->rows + row] / d->ndraw;
        const double x = dp_error_over(in->err2[row], e2);
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
    dp_unit_list rows = dp_unit_list_of(in, DP_LEVEL_ROW);
    out->at[DP_LEVEL_SUM] = sums_of_heads(in, &rows, &sums);
    if (sums.top > out->share.top) out->share = sums;
    dp_unit_list_free(&rows);
}

void dp_levels_judge(const dp_levels_in *in, dp_levels_result *out) {
    *out = (dp_levels_result){.expected = NAN, .excess = NAN, .row = -1};
    judge_units(in, out);
    judge_across(in, out);
    judge_signed(in, out);
    out->share = share_of_tensor(&out->at[DP_LEVEL_TENSOR], in->draws->ndraw);
    out->at[DP_LEVEL_SUM] = dp_level_none();
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
