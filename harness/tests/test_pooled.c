/* Many cases together (verdict/levels.h): no alarm where errors follow the draws, an alarm where
 * all cases err by little, none where one alone does. The rows of a record. */
#include "gt.h"
#include "harness/record/record.h"
#include "harness/verdict/levels.h"
#include "ref/inputs/inputs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DRAWS = 6, CASES = 15 };

static double mean_square(dp_rng *r, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) {
        const double z = dp_rng_normal(r);
        sum += z * z / n;
    }
    return sum;
}

/* A case of n numbers whose errors are `times` what its draws show. */
static dp_share share_of(dp_rng *r, int n, double times) {
    const double expected2 = mean_square(r, DRAWS * n);
    return (dp_share){times * times * mean_square(r, n) / expected2, n, DRAWS * n};
}

/* ---- the statistic --------------------------------------------------------------------------- */

DP_TEST(pooled, its_chance_is_that_of_a_right_kernel) {
    static const int numbers[] = {1, 2, 5, 20, 60};
    enum { TRIALS = 4000 };
    int below_half = 0, below_hundredth = 0, alarms = 0;
    dp_rng r;
    dp_rng_seed(&r, 17, 0);
    for (int trial = 0; trial < TRIALS; trial++) {
        dp_share of_case[CASES];
        double factor[CASES];
        for (int c = 0; c < CASES; c++) {
            of_case[c] = share_of(&r, numbers[c % 5], 1);
            factor[c] = 1;
        }
        const double chance = dp_pool(CASES, of_case, factor).chance;
        below_half += chance < 0.5;
        below_hundredth += chance < 0.01;
        alarms += chance < DP_ALARM;
    }
    CHECK(fabs(below_half / (double)TRIALS - 0.5) < 0.03, "%d of %d below 1/2", below_half, TRIALS);
    CHECK(below_hundredth < 0.016 * TRIALS && below_hundredth > 0.005 * TRIALS,
          "%d of %d below 1/100", below_hundredth, TRIALS);
    CHECK(!alarms, "%d alarms", alarms);
}

DP_TEST(pooled, an_error_of_all_cases_is_seen_that_no_case_shows) {
    enum { TRIALS = 50, NUMBERS = 150 };
    int alone = 0, missed = 0;
    dp_rng r;
    dp_rng_seed(&r, 18, 0);
    for (int trial = 0; trial < TRIALS; trial++) {
        dp_share of_case[CASES], right[CASES];
        double factor[CASES];
        for (int c = 0; c < CASES; c++) {
            of_case[c] = share_of(&r, NUMBERS, 1.6);
            right[c] = share_of(&r, NUMBERS, 1);
            factor[c] = 1.4;
            alone +=
                dp_f_tail(of_case[c].square / (1.4 * 1.4), NUMBERS, DRAWS * NUMBERS) < DP_ALARM;
        }
        const dp_pooled p = dp_pool(CASES, of_case, factor);
        CHECK(fabs(p.ratio - 1.6) < 0.2, "%.2f times", p.ratio);
        CHECK((p.chance <= DP_ALARM) == (p.detects <= 1), "%.1e, %.3f", p.chance, p.detects);
        missed += p.chance > DP_ALARM;
        const dp_pooled q = dp_pool(CASES, right, factor);
        CHECK(q.chance > 0.5 && q.detects > 1.4 && q.detects < 1.7, "chance %.1e, detects %.2f",
              q.chance, q.detects);
    }
    CHECK(missed <= 1, "%d of %d missed", missed, TRIALS);
    CHECK(alone <= TRIALS * CASES / 100, "%d of %d cases show it alone", alone, TRIALS * CASES);
}

DP_TEST(pooled, one_case_alone_does_not_fail_the_others) {
    dp_rng r;
    dp_share of_case[CASES];
    double factor[CASES];
    dp_rng_seed(&r, 19, 0);
    for (int c = 0; c < CASES; c++) {
        of_case[c] = share_of(&r, 300, c ? 1 : 1e6);
        factor[c] = 1.2;
    }
    const double chance = dp_pool(CASES, of_case, factor).chance;
    CHECK(chance > 1e-3, "%.1e", chance);
}

DP_TEST(pooled, runs_of_one_case_are_one_share) {
    const dp_share runs[] = {{1, 8, 48}, {4, 2, 100}, {1, 5, 30}};
    const dp_share s = dp_share_of_runs(3, runs);
    CHECK(fabs(s.square - 2) < 1e-12 && s.top == 2 && s.bottom == 30, "%g %g %g", s.square, s.top,
          s.bottom);
}

/* ---- a record -------------------------------------------------------------------------------- */

/* Passing runs of `cases` cases, two splits of each, whose o errs by `times`. */
typedef struct {
    dp_runs runs;
    char name[CASES][16], id[2 * CASES][32];
} made;

static void make_runs(made *m, int cases, double times) {
    dp_rng r;
    dp_rng_seed(&r, 20, 0);
    m->runs = (dp_runs){.n = 2 * cases, .run = dp_calloc((size_t)(2 * cases), sizeof(dp_run))};
    for (int i = 0; i < 2 * cases; i++) {
        dp_run *x = &m->runs.run[i];
        snprintf(m->name[i / 2], sizeof m->name[0], "c%d", i / 2);
        snprintf(m->id[i], sizeof m->id[0], "c%d-%d", i / 2, i % 2);
        *x = (dp_run){.id = m->id[i],
                      .case_name = m->name[i / 2],
                      .backend = DP_BACKEND_SIM,
                      .base = DP_BASE_BF16,
                      .has_base = 1,
                      .ntensor = 1,
                      .tensor = dp_calloc(1, sizeof(dp_judgement)),
                      .verdict = DP_PASS};
        strcpy(x->tensor->name, "o");
        x->tensor->expected.share = share_of(&r, 300, times);
    }
}

static void free_runs(made *m) {
    for (int i = 0; i < m->runs.n; i++)
        free(m->runs.run[i].tensor);
    free(m->runs.run);
}

DP_TEST(pooled, a_record_whose_runs_all_pass_fails_by_what_they_show_together) {
    static const struct {
        int cases;
        double times;
        int rows;
        const char *verdict;
    } known[] = {{CASES, 1, 1, "pass"}, {CASES, 1.5, 1, "fail"}, {2, 1.5, 0, "pass"}};
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        made m;
        make_runs(&m, known[k].cases, known[k].times);
        dp_record rec = {.runs = &m.runs};
        dp_over_cases(&rec);
        CHECK(rec.npooled == known[k].rows, "%d rows", rec.npooled);
        CHECK(!strcmp(dp_record_verdict(&rec), known[k].verdict), "%d cases, %g times: %s",
              known[k].cases, known[k].times, dp_record_verdict(&rec));
        if (rec.npooled) {
            char text[400];
            dp_pooled_text(rec.pooled, text, sizeof text);
            CHECK(rec.pooled->is.cases == CASES && strstr(text, "o of sim, base bf16: "), "%s",
                  text);
        }
        dp_over_cases_free(&rec);
        free_runs(&m);
    }
}
