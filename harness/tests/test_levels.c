/* The statistics of the expected tier: no alarm on errors that follow the draws' law, however few
 * numbers and units there are. Each level sees its fault.
 */
#include "gt.h"
#include "harness/verdict/compare.h"
#include "harness/verdict/draws.h"
#include "harness/verdict/levels.h"
#include "ref/inputs/inputs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- quantiles ----------------------------------------------------------------------------------
 */

/* Made with mpmath 1.3: x with betainc(b/2, a/2, 0, b/(b + a x), regularized=True) = p. */
DP_TEST(levels, f_quantiles_are_right_far_out) {
    static const struct {
        double p, top, bottom, x;
    } known[] = {
        {1e-2, 1, 5, 16.2581770398337},     {1e-7, 1, 8, 318.122773758888},
        {1e-7, 64, 64, 3.86309100213038},   {1e-10, 8, 15, 75.6207258784733},
        {1e-12, 30, 180, 5.17319661344093},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const double x = dp_f_quantile(known[i].p, known[i].top, known[i].bottom);
        const double p = dp_f_tail(x, known[i].top, known[i].bottom);
        CHECK(fabs(p / known[i].p - 1) < 1e-6, "tail of quantile: %g for %g", p, known[i].p);
        CHECK(fabs(x / known[i].x - 1) < 1e-8, "F(%g; %g, %g) = %.12g, not %.12g", known[i].p,
              known[i].top, known[i].bottom, x, known[i].x);
    }
    /* Student's t with 5 degrees of freedom, two-sided 1e-3: 6.8688 (tables) */
    CHECK(fabs(sqrt(dp_f_quantile(1e-3, 1, 5)) - 6.868826625881) < 1e-6, "%.12g",
          sqrt(dp_f_quantile(1e-3, 1, 5)));
    /* chi squared with 2 degrees of freedom has the tail exp(-x/2) */
    CHECK(fabs(2 * dp_f_quantile(1e-7, 2, INFINITY) / (-2 * log(1e-7)) - 1) < 1e-4, "%.12g",
          dp_f_quantile(1e-7, 2, INFINITY));
}

/* ---- a tensor of errors ---------------------------------------------------------------------- */

/* Errors and draws of a made-up tensor [tokens][heads][width]. */
typedef struct {
    int D, tokens, heads, width;
    dp_draws draws;
    dp_row_map map;
    int32_t *window, *unit;
    double *want, *err, *err2, *want2, *floor2;
    dp_levels_in in;
} tensor;

static tensor tensor_new(int D, int tokens, int heads, int width) {
    const int64_t rows = (int64_t)tokens * heads;
    const int windows = (tokens + 63) / 64 * heads;
    tensor t = {.D = D, .tokens = tokens, .heads = heads, .width = width};
    t.window = dp_calloc((size_t)rows, sizeof *t.window);
    t.unit = dp_calloc((size_t)windows, sizeof *t.unit);
    for (int64_t r = 0; r < rows; r++) {
        t.window[r] = (int32_t)(r / heads / 64 * heads + r % heads);
        t.unit[t.window[r]] = (int32_t)(r % heads);
    }
    t.map = (dp_row_map){
        .rows = rows, .windows = windows, .width = width, .subrows = 1, .window = t.window};
    dp_draws_alloc(&t.draws, D, &t.map, 0);
    t.want = dp_doubles(rows * width);
    t.err = dp_doubles(rows * width);
    t.err2 = dp_doubles(rows);
    t.want2 = dp_doubles(rows);
    t.floor2 = dp_doubles(rows);
    t.in = (dp_levels_in){.err2 = t.err2,
                          .want2 = t.want2,
                          .floor2 = t.floor2,
                          .window = t.window,
                          .unit = t.unit,
                          .heads = heads,
                          .units = heads,
                          .by_token = tokens > 1,
                          .allowance = {1.2, 1.2, 0.1}};
    return t;
}

static void tensor_free(tensor *t) {
    dp_draws_free(&t->draws);
    free(t->window);
    free(t->unit);
    free(t->want);
    free(t->err);
    free(t->err2);
    free(t->want2);
    free(t->floor2);
}

typedef void law(dp_rng *r, const tensor *t, double *err);

static void draw(tensor *t, dp_rng *r, law *f) {
    const int64_t rows = t->map.rows;
    for (int64_t i = 0; i < rows * t->width; i++)
        t->want[i] = dp_rng_normal(r);
    memset(t->draws.err2, 0, sizeof(double) * (size_t)(t->D * rows));
    memset(t->draws.along, 0, sizeof(double) * (size_t)(t->D * DP_NDIRECTIONS * t->map.windows));
    for (int k = 0; k < t->D; k++) {
        f(r, t, t->err);
        const dp_error_sums to = dp_draws_at(&t->draws, k);
        dp_sum_errors(&t->map, t->err, t->want, &to);
    }
    f(r, t, t->err);
}

static dp_levels_result judged(tensor *t) {
    const int64_t rows = t->map.rows;
    double *along = dp_doubles(DP_NDIRECTIONS * t->map.windows);
    double *length2 = dp_doubles(DP_NDIRECTIONS * t->map.windows);
    dp_levels_result x;
    memset(t->err2, 0, sizeof(double) * (size_t)rows);
    const dp_error_sums to = {.err2 = t->err2, .along = along, .length2 = length2};
    dp_sum_errors(&t->map, t->err, t->want, &to);
    for (int d = 0; d < DP_NDIRECTIONS; d++) {
        double sum = 0;
        t->in.along[d] = 0;
        for (int64_t w = 0; w < t->map.windows; w++) {
            t->in.along[d] += along[d * t->map.windows + w];
            sum += length2[d * t->map.windows + w];
        }
        t->in.along[d] /= sqrt(sum);
    }
    for (int64_t r = 0; r < rows; r++) {
        t->want2[r] = 0;
        for (int i = 0; i < t->width; i++)
            t->want2[r] += t->want[r * t->width + i] * t->want[r * t->width + i];
    }
    t->in.draws = &t->draws;
    dp_levels_judge(&t->in, &x);
    free(along);
    free(length2);
    return x;
}

/* ---- laws ------------------------------------------------------------------------------------ */

static void independent(dp_rng *r, const tensor *t, double *err) {
    for (int64_t i = 0; i < t->map.rows * t->width; i++)
        err[i] = dp_rng_normal(r);
}

/* A few numbers outweigh the others, the same in every draw. */
static void uneven(dp_rng *r, const tensor *t, double *err) {
    for (int64_t i = 0; i < t->map.rows * t->width; i++)
        err[i] = dp_rng_normal(r) * (i % 16 == 3 ? 30 : 1);
}

/* All numbers of a head share a part of their error. */
static void common(dp_rng *r, const tensor *t, double *err) {
    double of[8];
    for (int h = 0; h < t->heads; h++)
        of[h] = dp_rng_normal(r);
    for (int64_t i = 0; i < t->map.rows * t->width; i++)
        err[i] = dp_rng_normal(r) + 0.1 * of[i / t->width % t->heads] * t->want[i];
}

/* How many times the trials of a simulation: DP_TRIALS in the environment, else 1. */
static int trials_times(void) {
    const char *text = getenv("DP_TRIALS");
    const int n = text ? atoi(text) : 1;
    return n > 1 ? n : 1;
}

DP_TEST(levels, no_alarm_on_errors_of_the_draws_own_law) {
    static const struct {
        int D, tokens, heads, width, trials;
    } shape[] = {
        {6, 1, 1, 1, 20000}, {8, 1, 4, 1, 20000},  {6, 1, 1, 8, 20000}, {8, 1, 2, 32, 10000},
        {6, 40, 1, 1, 500},  {6, 100, 2, 16, 100}, {8, 300, 1, 8, 100},
    };
    static law *const laws[] = {independent, uneven, common};
    const int times = trials_times();
    int64_t all = 0;
    double largest = 0;
    for (size_t s = 0; s < sizeof shape / sizeof *shape; s++)
        for (int l = 0; l < 3; l++) {
            tensor t = tensor_new(shape[s].D, shape[s].tokens, shape[s].heads, shape[s].width);
            dp_rng r;
            int alarms = 0;
            const int trials = shape[s].trials * times;
            dp_rng_seed(&r, 100 + s, (uint64_t)l);
            for (int i = 0; i < trials; i++) {
                draw(&t, &r, laws[l]);
                const double excess = judged(&t).excess;
                alarms += excess > 1;
                largest = fmax(largest, excess);
            }
            all += trials;
            CHECK(!alarms, "%d tokens, %d heads of %d, law %d: %d alarms in %d", shape[s].tokens,
                  shape[s].heads, shape[s].width, l, alarms, trials);
            tensor_free(&t);
        }
    printf("%lld tensors, largest error %.3f of its limit\n", (long long)all, largest);
}

/* Two numbers make the error of a sequence's last row of dk, one of each value head. Eight draws of
 * it that happen to be alike suggest many numbers, and 4.2 times them a fault. Counted numbers do
 * not (a run of simulated ranks, reports/verdicts.md). */
DP_TEST(levels, a_row_of_two_numbers_is_no_alarm_where_they_are_counted) {
    enum { TOKENS = 100, LAST = TOKENS - 1, WIDTH = 64 };
    tensor t = tensor_new(8, TOKENS, 1, WIDTH);
    double freedom[TOKENS];
    dp_rng r;
    for (int i = 0; i < TOKENS; i++)
        freedom[i] = 2 * (TOKENS - i);
    dp_rng_seed(&r, 11, 0);
    draw(&t, &r, independent);
    for (int i = 0; i < WIDTH; i++)
        t.err[LAST * WIDTH + i] *= 4.2;
    dp_levels_result x = judged(&t);
    CHECK(x.excess > 1 && x.level == DP_LEVEL_ROW && x.row == LAST, "excess %.3g", x.excess);
    t.in.freedom = freedom;
    x = judged(&t);
    CHECK(x.excess < 1 && x.at[DP_LEVEL_ROW].freedom == 2, "counted: excess %.3g", x.excess);
    for (int i = 0; i < WIDTH; i++)
        t.err[(LAST - 12) * WIDTH + i] *= 4.2;
    x = judged(&t);
    CHECK(x.excess > 1 && x.row == LAST - 12, "12 tokens before: excess %.3g", x.excess);
    tensor_free(&t);
}

DP_TEST(levels, rows_at_the_ends_of_sequences_have_few_degrees_of_freedom) {
    static const struct {
        dp_result_id field;
        double first, second, before_last, last; /* of a sequence of 5 tokens behind one of 3 */
    } want[] = {
        {DP_RESULT_O, 1, 2, 4, 5}, {DP_RESULT_DQ, 2, 4, 8, 10}, {DP_RESULT_DK, 10, 8, 4, 2}};
    double state = 0;
    int64_t cu[] = {0, 3, 8};
    dp_problem p = {.T = 8, .H = 1, .HV = 2, .R = 1, .K = 4, .V = 4, .Nseq = 2, .cu = cu};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        double *most = dp_row_freedom_new(&p, want[i].field);
        const int heads = dp_result_heads(&p, want[i].field);
        CHECK(most[3 * heads] == want[i].first && most[4 * heads] == want[i].second &&
                  most[6 * heads] == want[i].before_last && most[7 * heads] == want[i].last,
              "%s: %g %g .. %g %g", dp_result_fields[want[i].field].name, most[3 * heads],
              most[4 * heads], most[6 * heads], most[7 * heads]);
        free(most);
    }
    CHECK(!dp_row_freedom_new(&p, DP_RESULT_DG), "dg has a limit");
    p.s0 = p.dstate = &state;
    CHECK(!dp_row_freedom_new(&p, DP_RESULT_O) && !dp_row_freedom_new(&p, DP_RESULT_DK),
          "a given state comes into every row");
}

/* Twelve numbers a window. */
static void twelve(dp_rng *r, const tensor *t, double *err) {
    for (int64_t row = 0; row < t->map.rows; row++)
        err[row] = row / t->heads % 64 < 12 ? dp_rng_normal(r) : 0;
}

/* How many times what is expected head 0 errs by, whose truth is `size` times that of head 1. */
static double first_head(double size) {
    tensor t = tensor_new(6, 64 * 40, 2, 1);
    dp_rng r;
    dp_rng_seed(&r, 7, 1);
    draw(&t, &r, twelve);
    for (int64_t row = 0; row < t.map.rows; row += 2) {
        t.want[row] *= size;
        t.err[row + 1] *= 0.3;
    }
    const double ratio = judged(&t).at[DP_LEVEL_WINDOW].ratio;
    tensor_free(&t);
    return ratio;
}

/* Where the truth is zero, errors in proportion to a size say nothing: what is expected there comes
 * of the draws alone. It once was half of that, and a right head of zeros failed (many-heads-wide).
 */
DP_TEST(levels, a_window_whose_truth_is_zero_is_expected_to_err_as_its_draws_do) {
    const double alike = first_head(1), zero = first_head(0);
    CHECK(zero < 1.1 * alike && alike < 1.1 * zero, "%.3f times, of the size of the others %.3f",
          zero, alike);
}

/* ---- what each level is for ------------------------------------------------------------------ */

static void grow(tensor *t, int64_t from, int64_t to, double by) {
    for (int64_t i = from * t->width; i < to * t->width; i++)
        t->err[i] *= by;
}

static void lean(tensor *t, dp_direction d, double share) {
    for (int64_t i = 0; i < t->map.rows * t->width; i++)
        t->err[i] += share * dp_direction_entry(d, t->want[i]);
}

DP_TEST(levels, each_level_sees_its_fault) {
    static const struct {
        const char *what;
        int64_t from, to; /* rows that grow */
        double by;
        int direction; /* -1: none */
        dp_level level;
    } fault[] = {
        {"one row 3 times", 77, 78, 3, -1, DP_LEVEL_ROW},
        {"one window 1.7 times", 128, 256, 1.7, -1, DP_LEVEL_WINDOW},
        {"all of it 1.4 times", 0, 1 << 20, 1.4, -1, DP_LEVEL_EVERY},
        {"a factor", 0, 0, 1, DP_ALONG_VALUE, DP_LEVEL_FACTOR},
        {"an offset", 0, 0, 1, DP_ALONG_OFFSET, DP_LEVEL_OFFSET},
    };
    tensor t = tensor_new(8, 512, 2, 64);
    for (size_t f = 0; f < sizeof fault / sizeof *fault; f++) {
        dp_rng r;
        dp_rng_seed(&r, 9, f);
        for (int i = 0; i < 20; i++) {
            draw(&t, &r, independent);
            CHECK(judged(&t).excess < 1, "fails without the fault");
            grow(&t, fault[f].from, fault[f].to < t.map.rows ? fault[f].to : t.map.rows,
                 fault[f].by);
            if (fault[f].direction >= 0) lean(&t, (dp_direction)fault[f].direction, 0.3);
            const dp_levels_result x = judged(&t);
            const int same = x.level == fault[f].level ||
                             (fault[f].level == DP_LEVEL_EVERY && x.level == DP_LEVEL_TENSOR) ||
                             (fault[f].level == DP_LEVEL_FACTOR && x.level == DP_LEVEL_TRUNCATION);
            CHECK(x.excess > 1 && same, "%s: excess %.3g on level %s", fault[f].what, x.excess,
                  dp_level_names[x.level]);
            CHECK(fault[f].to != 78 || x.row == 77, "row %lld is named", (long long)x.row);
        }
    }
    tensor_free(&t);
}

/* A short window of one rank has an error that is one number (a state's, through M in bf16), a
 * thousand times the others'. The other ranks' many degrees of freedom do not make it rarer. */
DP_TEST(levels, a_short_window_of_correlated_errors_is_no_alarm_for_its_rank) {
    enum { D = 8, N = 8, TRIALS = 10000 };
    dp_rng r;
    int alarms = 0;
    dp_rng_seed(&r, 3, 0);
    for (int trial = 0; trial < TRIALS; trial++) {
        double e2[D * N], err2[N], want2[N], rows[N], floor2[N] = {0};
        int32_t window[N], unit[N];
        dp_levels_result x;
        for (int i = 0; i < N; i++) {
            rows[i] = i % 2 ? 37 : 3;
            want2[i] = 1e6 * rows[i];
            window[i] = i;
            unit[i] = i / 2;
            for (int d = -1; d < D; d++) {
                const int numbers = i ? 100 : 1;
                double sum = 0;
                for (int k = 0; k < numbers; k++) {
                    const double z = dp_rng_normal(&r);
                    sum += z * z / numbers;
                }
                *(d < 0 ? &err2[i] : &e2[d * N + i]) = i ? rows[i] * sum : 1e6 * sum;
            }
        }
        const dp_draws draws = {.ndraw = D, .rows = N, .windows = N, .width = 100, .err2 = e2};
        const dp_levels_in in = {.draws = &draws,
                                 .err2 = err2,
                                 .want2 = want2,
                                 .floor2 = floor2,
                                 .rows = rows,
                                 .window = window,
                                 .unit = unit,
                                 .heads = 1,
                                 .units = 4,
                                 .allowance = {1.2, 1.2, 0}};
        dp_levels_judge(&in, &x);
        alarms += x.excess > 1;
    }
    CHECK(!alarms, "%d alarms in %d trials", alarms, TRIALS);
}

/* ---- through dp_compare ---------------------------------------------------------------------- */

static void place_row(const void *ctx, int64_t row, dp_place *at) {
    (void)ctx;
    *at = (dp_place){.sequence = (int)row, .chunk = -1, .token = -1};
}

/* Rows of one number, of one rank and one head. */
static dp_compare_in rows_in(const char *name, int64_t rows, const double *got, const double *want,
                             const double *bound) {
    return (dp_compare_in){.name = name,
                           .N = 1,
                           .heads = 1,
                           .rows = rows,
                           .width = 1,
                           .got = got,
                           .want = want,
                           .bound = bound,
                           .place = place_row,
                           .unit = 0x1p-24};
}

/* A row that is exactly 0 beside rows of size 1 (dg of a sequence of one token). Its error is a
 * rounding of the terms that cancel there, not of itself. */
DP_TEST(levels, a_row_that_cancels_to_nothing_is_held_against_a_rounding_of_its_head) {
    enum { D = 6, ROWS = 8 };
    const double unit = 0x1p-24;
    double got[ROWS], want[ROWS], bound[ROWS], e2[D * ROWS], along[D * DP_NDIRECTIONS * ROWS] = {0};
    double length2[D * DP_NDIRECTIONS * ROWS] = {0};
    for (int i = 0; i < ROWS; i++) {
        want[i] = i > 0;
        got[i] = want[i] + (i > 0 ? 1e-3 : 10 * 1e-10) * (i % 2 ? 1 : -1);
        bound[i] = 1e-2;
        for (int d = 0; d < D; d++)
            e2[d * ROWS + i] = pow((i > 0 ? 1e-3 : 1e-10) * (0.9 + 0.05 * d), 2);
    }
    const dp_draws draws = {.ndraw = D,
                            .rows = ROWS,
                            .windows = ROWS,
                            .width = 1,
                            .err2 = e2,
                            .along = along,
                            .length2 = length2};
    for (int wrong = 0; wrong < 2; wrong++) {
        dp_judgement j;
        if (wrong) got[0] = 200 * unit;
        dp_compare_in in = rows_in("x", ROWS, got, want, bound);
        in.draws = &draws;
        in.allowance = (dp_allowance){.factor = 1.5, .local = 1.5, .lean = 1};
        dp_compare(&in, &j);
        CHECK(j.verdict == (wrong ? DP_FAIL : DP_PASS), "error %g: %s %s", got[0],
              dp_verdict_names[j.verdict], j.why);
        CHECK(!wrong || dp_judgement_row(&j)->at.sequence == 0, "row %d is blamed",
              dp_judgement_row(&j)->at.sequence);
        dp_judgement_free(&j);
    }
}

/* A radius widens its row's limit, so that zeros would pass where it is larger than the row. */
DP_TEST(levels, a_row_whose_truth_is_not_known_is_unjudged) {
    enum { ROWS = 4 };
    const double one[ROWS] = {1, 1, 1, 1}, bound[ROWS] = {0.1, 0.1, 0.1, 0.1};
    const double vague[] = {0, 0x1p-12, 0x1p-8, 0.5};
    for (size_t i = 0; i < sizeof vague / sizeof *vague; i++) {
        double rad[ROWS] = {0};
        rad[2] = vague[i];
        dp_compare_in in = rows_in("x", ROWS, one, one, bound);
        in.rad = rad;
        dp_judgement j;
        dp_compare(&in, &j);
        CHECK(j.verdict == (i < 2 ? DP_PASS : DP_UNJUDGED) &&
                  (i < 2 || (strstr(j.why, "in 1 of 4 rows") && strstr(j.why, "radius"))),
              "radius %g: %s %s", vague[i], dp_verdict_names[j.verdict], j.why);
        dp_judgement_free(&j);
    }
}

/* dA_log of one token without a state: all terms are 0, and so are the bounds. */
DP_TEST(levels, a_sum_over_tokens_that_is_zero_by_all_its_terms_is_judged) {
    enum { ROWS = 2 };
    const double zero[ROWS] = {0, 0}, got[][ROWS] = {{0, 0}, {0, 1e-30}};
    for (int wrong = 0; wrong < 2; wrong++) {
        dp_compare_in in = rows_in("dA_log", ROWS, got[wrong], zero, zero);
        in.of_heads = 1;
        dp_judgement j;
        dp_compare(&in, &j);
        CHECK(j.verdict == (wrong ? DP_FAIL : DP_PASS), "%s %s", dp_verdict_names[j.verdict],
              j.why);
        dp_judgement_free(&j);
    }
}

/* Squares of numbers of fp64 leave its range. */
DP_TEST(levels, numbers_whose_squares_leave_fp64_do_not_pass_as_zeros) {
    enum { ROWS = 4 };
    static const struct {
        double size, got, bound; /* got and bound relative to size */
        dp_verdict verdict;
    } x[] = {{1e-300, 1, 1e-15, DP_UNJUDGED}, {1e-300, 0, 1e-15, DP_UNJUDGED},
             {1e-170, 0, 1e-15, DP_UNJUDGED}, {1e-170, 1e100, 1e-15, DP_FAIL},
             {1e-100, 0, 1e-15, DP_FAIL},     {1e200, 1, 1e-15, DP_PASS},
             {1e200, 1.01, 1e-15, DP_FAIL},   {1e200, 1.01, INFINITY, DP_UNJUDGED},
             {1e200, 0, NAN, DP_FAIL},        {1e-310, 1.1, 1e-15, DP_UNJUDGED}};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++) {
        double want[ROWS], got[ROWS], bound[ROWS];
        for (int z = 0; z < ROWS; z++) {
            want[z] = x[i].size;
            got[z] = x[i].size * x[i].got;
            bound[z] = x[i].size * x[i].bound;
        }
        dp_compare_in in = rows_in("x", ROWS, got, want, bound);
        in.unit = 0x1p-53;
        in.tiny = 0x1p-1022;
        dp_judgement j;
        dp_compare(&in, &j);
        CHECK(j.verdict == x[i].verdict, "size %g, got %g of it: %s %s", x[i].size, x[i].got,
              dp_verdict_names[j.verdict], j.why);
        CHECK(j.verdict != DP_PASS || j.rel_fro == 0, "error %g", j.rel_fro);
        dp_judgement_free(&j);
    }
}
