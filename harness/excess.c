#include "excess.h"
#include "../ref/elementary.h"
#include "../ref/problem.h"

#include <math.h>
#include <stdlib.h>

const char *const dp_level_names[DP_NLEVELS] = {"window", "rank", "tensor", "every"};
const char *const dp_level_what[DP_NLEVELS] = {"in one window of tokens and head, or one state", "over one rank and head", "over the whole tensor", "in all windows of tokens and heads alike"};

#define OTHERS 4.0               /* draws that all units together count as, for the degrees of freedom of one */
#define PRIOR 8.0                /* degrees of freedom that the tensor's mean adds to a unit's own draws */

/* F quantile at z standard deviations by Wilson and Hilferty: f^(1/3) is nearly normal. a: of the error, b: of the draws together. Infinite when b is too
 * few to say. */
static double f_quantile(double z, double a, double b) {
    const double p = 2 / (9 * a), q = 2 / (9 * b), A = (1 - q) * (1 - q) - z * z * q;
    if (A <= 0) return INFINITY;
    const double B = (1 - p) * (1 - q), C = (1 - p) * (1 - p) - z * z * p, disc = B * B - A * C;
    const double x = (B + sqrt(fmax(disc, 0))) / A;
    return x * x * x;
}

typedef struct { int n; double *e2, *err2, *want2, *floor2, *count, *rows, top; } units;      /* e2 [ndraw][n] */

static units gather(const dp_excess_in *in, int level) {
    units u = {.n = level == DP_LEVEL_CELL ? (int)in->n : level == DP_LEVEL_RANK ? in->nbelong : 1};
    u.e2 = dp_doubles((int64_t)in->ndraw * u.n), u.err2 = dp_doubles(u.n), u.want2 = dp_doubles(u.n), u.floor2 = dp_doubles(u.n), u.count = dp_doubles(u.n), u.rows = dp_doubles(u.n);
    for (int64_t i = 0; i < in->n; i++) {
        if (in->belong[i] < 0) continue;
        const int64_t z = level == DP_LEVEL_CELL ? i : level == DP_LEVEL_RANK ? in->belong[i] : 0;
        for (int d = 0; d < in->ndraw; d++) u.e2[(int64_t)d * u.n + z] += in->e2[d * in->n + i];
        u.err2[z] += in->err2[i], u.want2[z] += in->want2[i], u.floor2[z] += in->floor2[i], u.count[z]++;
        u.rows[z] += in->rows ? in->rows[i] : 1, u.top = fmax(u.top, u.rows[z]);
    }
    return u;
}

static double mean_of(const units *u, int D, int64_t i, int without) {
    double s = 0;
    for (int d = 0; d < D; d++) if (d != without) s += u->e2[(int64_t)d * u->n + i];
    return s / (without >= 0 ? D - 1 : D);
}

/* Units of few rows beside the others (a sequence of one token) have few degrees of freedom: a class of their own. */
static int is_small(const units *u, int64_t i) { return 4 * u->rows[i] <= u->top; }

/* Degrees of freedom of |err|^2 whose D draws have this variance over their own mean squared: nu = 2 / cv^2, corrected for that mean. */
static double nu_of(double cv2, int D) {
    const double two_over_nu = cv2 < 0.9 * D ? cv2 / (1 - cv2 / D) : 9.0 * D;
    return fmax(0.5, fmin(2 / fmax(two_over_nu, 1e-9), 1e6));
}

static double cv2_of(const units *u, int D, int64_t i) {            /* NAN: the draws are zero or not finite */
    const double m = mean_of(u, D, i, -1);
    double v = 0;
    if (!(m > 0) || !isfinite(m)) return NAN;
    for (int d = 0; d < D; d++) {
        const double x = u->e2[(int64_t)d * u->n + i] / m - 1;
        v += x * x;
    }
    return v / (D - 1);
}

/* Of a typical unit, pooled over units. Few units and draws say little: then fewer are assumed, by two standard deviations of the estimate. */
static double freedom(const units *u, int D, int small) {           /* small -1: of all units */
    double cv2 = 0, n = 0;
    for (int64_t i = 0; i < u->n; i++) {
        const double x = cv2_of(u, D, i);
        if (!isnan(x) && (small < 0 || is_small(u, i) == small)) cv2 += x, n++;
    }
    return n > 0 ? nu_of(cv2 / n * (1 + 2 * sqrt(2 / (n * (D - 1)))), D) : 1;
}

/* Of unit i among others that have nu: its own draws count, where they differ more than those of the others do (a rank that one few-token window of correlated errors outweighs). */
static double own_freedom(const units *u, int D, int64_t i, double nu) {
    const double x = cv2_of(u, D, i);
    return isnan(x) ? nu : fmin(nu, nu_of((OTHERS * 2 / nu + (D - 1) * x) / (OTHERS + D - 1), D));
}

static double expected2(const dp_excess_in *in, const units *u, int64_t i, int without, double own, double prior) {
    return own * mean_of(u, in->ndraw, i, without) + (1 - own) * prior * u->want2[i] + u->floor2[i];
}

/* Mean of |err|^2 / |want|^2 over the tensor and its draws; own: what a unit's own draws count, of nu degrees of freedom each. */
static double prior_of(const dp_excess_in *in, const units *u) {
    double e = 0, w = 0;
    for (int64_t i = 0; i < u->n; i++) {
        if (!(u->want2[i] > 0)) continue;
        w += u->want2[i];
        for (int d = 0; d < in->ndraw; d++) e += u->e2[(int64_t)d * u->n + i] / in->ndraw;
    }
    return w > 0 ? e / w : 0;
}

static double limit_of(const dp_excess_in *in, int units, double draw, double nu, double all) {
    return fmin(DP_EXCESS_MOST, in->safety * fmax(draw, sqrt(f_quantile(units > 1 ? DP_EXCESS_Z : DP_EXCESS_Z_WHOLE, nu, all))));
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Degrees of freedom that a rank and head has at most, from those of its cells, were they independent (Welch and Satterthwaite): few where one short window of correlated
 * errors outweighs the rest, whatever the other ranks have. */
static double *rank_freedom(const dp_excess_in *in, const units *cells) {
    const int D = in->ndraw;
    const double of[2] = {freedom(cells, D, 0), freedom(cells, D, 1)};
    double *cap = dp_doubles(2 * (int64_t)in->nbelong), *v = cap + in->nbelong;
    for (int64_t i = 0; i < in->n; i++) {
        const double m = mean_of(cells, D, i, -1);
        if (in->belong[i] >= 0 && isfinite(m)) cap[in->belong[i]] += m, v[in->belong[i]] += m * m / own_freedom(cells, D, i, of[is_small(cells, i)]);
    }
    for (int z = 0; z < in->nbelong; z++) cap[z] = v[z] > 0 ? cap[z] * cap[z] / v[z] : INFINITY;
    return cap;
}

/* cap [u->n]: degrees of freedom that a unit has at most; NULL: none. */
static dp_excess_level judge_level(const dp_excess_in *in, const units *u, int small, const double *cap) {
    const int D = in->ndraw;
    const double nu = fmin(freedom(u, D, small), freedom(u, D, -1)), all = prior_of(in, u);
    dp_excess_level r = {.nu = nu, .ratio = NAN, .limit = NAN, .draw = NAN, .at = -1};
    double *every = dp_doubles(2 * (int64_t)u->n), *ratio = every + u->n;
    int64_t judged = 0;
    for (int64_t i = 0; i < u->n; i++) r.units += u->count[i] > 0 && is_small(u, i) == small;
    const double prior_df = r.units > 1 ? PRIOR : 0, own = D * nu / (D * nu + prior_df);
    for (int64_t i = 0; i < u->n; i++) {
        if (!(u->count[i] > 0) || is_small(u, i) != small) continue;
        const double e2 = expected2(in, u, i, -1, own, all);
        every[judged++] = ratio[i] = u->err2[i] == 0 ? 0 : e2 > 0 ? sqrt(u->err2[i] / e2) : INFINITY;
        for (int d = 0; d < D; d++) {
            const double x = u->e2[(int64_t)d * u->n + i], o2 = expected2(in, u, i, d, own, all), y = x == 0 ? 0 : o2 > 0 ? sqrt(x / o2) : INFINITY;
            if (!(y <= r.draw)) r.draw = y;
        }
    }
    for (int64_t i = 0; i < u->n; i++) {                         /* each against the limit of its own freedom */
        if (!(u->count[i] > 0) || is_small(u, i) != small) continue;
        const double mine = fmin(own_freedom(u, D, i, nu), cap ? cap[i] : INFINITY), limit = limit_of(in, r.units, r.draw, mine, D * mine + prior_df);
        if (!(ratio[i] / limit <= r.ratio / r.limit)) r.ratio = ratio[i], r.limit = limit, r.nu = mine, r.at = i;
    }
    qsort(every, (size_t)judged, sizeof *every, ascending);
    r.median = judged ? every[judged / 2] : NAN;
    free(every);
    return r;
}

/* Root of the mean over cells of (|err| / E)^(2/3), cubed: of draw d against the others, d < 0: of the subject. Two thirds, because that power of a cell's |err| is nearly
 * normal (Wilson and Hilferty) and no cell outweighs the others. Draws carry the floor, too: the subject is allowed it. */
static double typical(const dp_excess_in *in, const units *u, int d, double own, double prior) {
    double sum = 0;
    int64_t n = 0;
    for (int64_t i = 0; i < u->n; i++) {
        const double E2 = u->count[i] > 0 ? expected2(in, u, i, d, own, prior) : 0, x = d < 0 ? u->err2[i] : u->e2[(int64_t)d * u->n + i] + u->floor2[i];
        if (E2 > 0 && isfinite(E2)) sum += dp_cbrt(x / E2), n++;
    }
    const double mean = sum / (double)n;
    return n ? mean * sqrt(mean) : NAN;
}

/* All cells together, each in units of its own expected error. at: the cell that has the most of it. */
static dp_excess_level judge_every(const dp_excess_in *in, const units *u, int64_t at) {
    const int D = in->ndraw;
    dp_excess_level r = {.nu = 1, .ratio = NAN, .draw = NAN, .median = NAN, .at = at, .limit = DP_EXCESS_MOST};
    units one = {.n = 1, .e2 = dp_doubles(D)};
    const double prior = prior_of(in, u), own = 1 / (1 + PRIOR / (D * freedom(u, D, -1)));
    double mean = 0;
    for (int d = 0; d < D; d++) {
        const double x = typical(in, u, d, own, prior);
        one.e2[d] = x * x, mean += x * x / D;
    }
    if (mean > 0 && isfinite(mean)) {
        r.nu = freedom(&one, D, -1);
        r.ratio = r.median = typical(in, u, -1, own, prior) / sqrt(mean), r.units = 1;
        for (int d = 0; d < D; d++) {
            const double y = sqrt(one.e2[d] / mean_of(&one, D, 0, d));
            if (!(y <= r.draw)) r.draw = y;
        }
        r.limit = limit_of(in, 1, r.draw, r.nu, D * r.nu);
    }
    free(one.e2);
    return r;
}

static void free_units(units *u) { free(u->e2), free(u->err2), free(u->want2), free(u->floor2), free(u->count), free(u->rows); }

void dp_excess_judge(const dp_excess_in *in, dp_excess *out) {
    *out = (dp_excess){.expected = NAN, .excess = NAN, .cell = -1};
    units cells = gather(in, DP_LEVEL_CELL);
    for (int l = 0; l <= DP_LEVEL_TENSOR; l++) {
        units u = gather(in, l);
        dp_excess_level *r = &out->at[l];
        double *cap = l == DP_LEVEL_RANK ? rank_freedom(in, &cells) : NULL;
        *r = judge_level(in, &u, 0, cap);
        const dp_excess_level few = judge_level(in, &u, 1, cap);
        if (few.ratio / few.limit > r->ratio / r->limit || isnan(r->ratio)) *r = few;
        if (l == DP_LEVEL_TENSOR && u.want2[0] > 0) out->expected = sqrt(mean_of(&u, in->ndraw, 0, -1) / u.want2[0]);
        free_units(&u), free(cap);
    }
    out->at[DP_LEVEL_EVERY] = judge_every(in, &cells, out->at[DP_LEVEL_TENSOR].at);
    for (int l = 0; l < DP_NLEVELS; l++) {
        const double x = out->at[l].ratio / out->at[l].limit;
        if (!isnan(x) && !(x <= out->excess)) out->excess = x, out->level = l;
    }
    double top = -1;
    for (int64_t i = 0; i < in->n; i++) {                        /* the worst cell of the unit that decided */
        const int64_t unit = out->level == DP_LEVEL_CELL ? i : out->level == DP_LEVEL_RANK ? in->belong[i] : 0;
        if (in->belong[i] < 0 || unit != out->at[out->level].at) continue;
        const double e2 = expected2(in, &cells, i, -1, 1, 0), x = in->err2[i] == 0 ? 0 : e2 > 0 ? in->err2[i] / e2 : INFINITY;
        if (x > top) top = x, out->cell = i;
    }
    free_units(&cells);
}
