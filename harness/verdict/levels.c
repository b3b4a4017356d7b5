/* Is an error more than its design makes? All levels, and the worst of them (levels.h). */
#include "levels_impl.h"

#include <math.h>
#include <stdlib.h>

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
            in->draws->along ? dp_judge_direction(in, d, E) : dp_level_none();
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
    out->at[DP_LEVEL_SUM] = dp_judge_sums(in, &rows, &sums);
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
