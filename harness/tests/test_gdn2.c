/* GDN-2 equals KDA if every channel erases and writes with one number. The truths agree to their
 * radii, the simulated ranks to both bounds. The gradients of those channels add up to that of the
 * number. */
#include "balls.h"
#include "gt.h"
#include "harness/bound/error_bound.h"
#include "harness/simulated/ranks.h"
#include "oracle.h"
#include "ref/truth/truth.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int64_t CU[] = {0, 37, 37, 98, 120};
static void packed(dp_problem *p) {
    const oracle_spec s = oracle_packed(DP_KDA, 16, CU, 71);
    oracle_problem(p, &s);
}

/* The same problem with erase = write = beta; all else is kda's own. */
static dp_problem twin_of(const dp_problem *kda) {
    dp_problem y = *kda;
    y.model = DP_GDN2;
    y.beta = NULL;
    y.erase = dp_doubles(dp_input_count(&y, DP_INPUT_ERASE));
    y.write = dp_doubles(dp_input_count(&y, DP_INPUT_WRITE));
    for (int64_t i = 0; i < y.T * y.HV; i++) {
        for (int x = 0; x < y.K; x++)
            y.erase[i * y.K + x] = kda->beta[i];
        for (int v = 0; v < y.V; v++)
            y.write[i * y.V + v] = kda->beta[i];
    }
    return y;
}

static void twin_free(dp_problem *y) {
    free(y->erase);
    free(y->write);
}

static int both_have(int f) {
    return f != DP_RESULT_DBETA && f != DP_RESULT_DERASE && f != DP_RESULT_DWRITE;
}

DP_TEST(gdn2, truth_is_that_of_kda_where_the_gates_are_one_number) {
    dp_problem kda;
    dp_truth a, b;
    dp_err e = {0};
    const dp_truth_request rq = {.bits = 128, .backward = 1};
    packed(&kda);
    dp_problem two = twin_of(&kda);
    REQUIRE(!dp_problem_check(&two, 0, &e), "%s", e.msg);
    REQUIRE(!dp_truth_run(&kda, &rq, &a, &e) && !dp_truth_run(&two, &rq, &b, &e), "%s", e.msg);
    for (int f = 0; f < DP_NRESULTS; f++)
        if (both_have(f))
            balls_meet(dp_result_fields[f].name, &a.field[f], &b.field[f], &b.field[f]);
    const dp_ball *db = &a.field[DP_RESULT_DBETA], *de = &b.field[DP_RESULT_DERASE],
                  *dw = &b.field[DP_RESULT_DWRITE];
    for (int64_t r = 0; r < db->rows; r++) {
        double sum = -db->hi[r], size = 0;
        for (int i = 0; i < kda.K; i++) {
            sum += de->hi[r * kda.K + i];
            size += fabs(de->hi[r * kda.K + i]);
        }
        for (int i = 0; i < kda.V; i++) {
            sum += dw->hi[r * kda.V + i];
            size += fabs(dw->hi[r * kda.V + i]);
        }
        CHECK(fabs(sum) <= 64 * 0x1p-52 * size,
              "row %lld: dbeta and the sum of derase and dwrite "
              "differ by %.3g of %.3g",
              (long long)r, sum, size);
    }
    dp_truth_free(&a);
    dp_truth_free(&b);
    twin_free(&two);
    dp_problem_free(&kda);
}

/* Both pipelines and both bounds, of one base. */
static void compare_ranks(const dp_problem *p, const dp_problem *q, dp_base base) {
    const dp_problem *problem[2] = {p, q};
    dp_sim ref[2], s[2];
    dp_error_bound_base w[2];
    dp_error_bound b[2];
    const dp_format chain = base == DP_BASE_BF16 ? DP_BF16 : DP_FP32;
    const dp_design design = dp_design_of(base);
    for (int i = 0; i < 2; i++) {
        REQUIRE(!dp_sim_new(&ref[i], problem[i], DP_BASE_FP64, 3, DP_FAULT_NONE, NULL), "ref");
        dp_sim_run(&ref[i], DP_FP64, DP_EXCHANGE_ALLGATHER, 1);
        REQUIRE(!dp_sim_new(&s[i], problem[i], base, 3, DP_FAULT_NONE, NULL), "sim");
        dp_sim_run(&s[i], chain, DP_EXCHANGE_ALLGATHER, 1);
        dp_error_bound_base_init(&w[i], &ref[i], &design, 2, 1, NULL);
        dp_error_bound_run(&w[i], chain, 1, &b[i]);
    }
    for (int f = 0; f < DP_NRESULTS; f++) {
        int64_t rows, width;
        dp_result_shape(p, f, &rows, &width);
        const double *x = s[0].out.out[f], *y = s[1].out.out[f], *u = ref[0].out.out[f],
                     *v = ref[1].out.out[f];
        if (!both_have(f) || !rows) continue;
        const double e = oracle_maxrel(v, u, rows * width);
        CHECK(e <= 1e-12, "fp64, %s: %.2e", dp_result_fields[f].name, e);
        for (int64_t r = 0; r < rows; r++) {
            double off = 0;
            for (int64_t i = r * width; i < (r + 1) * width; i++)
                off += (x[i] - y[i]) * (x[i] - y[i]);
            CHECK(sqrt(off) <= b[0].row[f][r] + b[1].row[f][r],
                  "%s, %s, row %lld: %.3g, bounds %.3g", dp_base_names[base],
                  dp_result_fields[f].name, (long long)r, sqrt(off),
                  b[0].row[f][r] + b[1].row[f][r]);
        }
    }
    for (int i = 0; i < 2; i++) {
        dp_error_bound_free(&b[i]);
        dp_error_bound_base_free(&w[i]);
        dp_sim_free(&s[i]);
        dp_sim_free(&ref[i]);
    }
}

DP_TEST(gdn2, ranks_are_those_of_kda_where_the_gates_are_one_number) {
    dp_problem kda;
    packed(&kda);
    dp_problem two = twin_of(&kda);
    compare_ranks(&kda, &two, DP_BASE_FP32);
    compare_ranks(&kda, &two, DP_BASE_BF16);
    twin_free(&two);
    dp_problem_free(&kda);
}

/* Combinations that a problem may not hold. */
DP_TEST(gdn2, beta_and_gates_exclude_each_other) {
    dp_problem kda;
    dp_err e = {0};
    packed(&kda);
    dp_problem two = twin_of(&kda);
    two.beta = kda.beta;
    CHECK(dp_problem_check(&two, 0, &e) == DP_EINPUT && strstr(e.msg, "gdn2 has no such input"),
          "%s", e.msg);
    two.beta = NULL;
    two.beta_form = DP_BETA_SIGMOID;
    e = (dp_err){0};
    CHECK(dp_problem_check(&two, 0, &e) == DP_EINPUT && strstr(e.msg, "erase and write"), "%s",
          e.msg);
    twin_free(&two);
    dp_problem_free(&kda);
}
