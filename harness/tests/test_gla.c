/* Gated linear attention and scalar decay equal GDN-2 with erase = 0 and write = 1. The truths
 * agree to both radii, the ranks bit for bit. M of a rank is a diagonal, and no format of the chain
 * changes a bit of any result. A chain multiplied as a matrix does. */
#include "balls.h"
#include "cases.h"
#include "gt.h"
#include "harness/case/case.h"
#include "harness/simulated/ranks.h"
#include "oracle.h"
#include "ref/truth/truth.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int64_t CU[] = {0, 37, 37, 98, 120};
static void packed(dp_problem *p) {
    const oracle_spec s = oracle_packed(DP_GLA, 16, CU, 72);
    oracle_problem(p, &s);
}

/* The same problem with gates that erase nothing and write all. */
static dp_problem twin_of(const dp_problem *gla) {
    dp_problem y = *gla;
    y.model = DP_GDN2;
    y.erase = dp_doubles(dp_input_count(&y, DP_INPUT_ERASE));
    y.write = dp_doubles(dp_input_count(&y, DP_INPUT_WRITE));
    for (int64_t i = 0; i < dp_input_count(&y, DP_INPUT_WRITE); i++)
        y.write[i] = 1;
    return y;
}

static void twin_free(dp_problem *y) {
    free(y->erase);
    free(y->write);
}

DP_TEST(gla, truth_is_that_of_gdn2_where_nothing_is_erased) {
    dp_problem gla;
    dp_truth a, b;
    dp_err e = {0};
    const dp_truth_request rq = {.bits = 128, .backward = 1};
    packed(&gla);
    dp_problem two = twin_of(&gla);
    REQUIRE(!dp_truth_run(&gla, &rq, &a, &e) && !dp_truth_run(&two, &rq, &b, &e), "%s", e.msg);
    for (int f = 0; f < DP_NRESULTS; f++)
        if (dp_result_exists(&gla, f))
            balls_meet(dp_result_fields[f].name, &a.field[f], &b.field[f], &a.field[f]);
    dp_truth_free(&a);
    dp_truth_free(&b);
    twin_free(&two);
    dp_problem_free(&gla);
}

DP_TEST(gla, ranks_are_those_of_gdn2_where_nothing_is_erased) {
    dp_problem gla;
    packed(&gla);
    dp_problem two = twin_of(&gla);
    const dp_problem *p[] = {&gla, &two};
    dp_sim s[2];
    for (int i = 0; i < 2; i++) {
        REQUIRE(!dp_sim_new(&s[i], p[i], DP_BASE_FP32, 3, DP_FAULT_NONE, NULL), "sim");
        dp_sim_run(&s[i], DP_FP32, DP_EXCHANGE_ALLGATHER, 1);
    }
    for (int f = 0; f < DP_NRESULTS; f++) {
        int64_t rows, width;
        dp_result_shape(&gla, f, &rows, &width);
        for (int64_t i = 0; i < rows * width; i++) {
            const double x = (s[0].out.out[f])[i], y = (s[1].out.out[f])[i];
            CHECK(x == y, "%s[%lld]: %a, gdn2 %a", dp_result_fields[f].name, (long long)i, x, y);
        }
    }
    for (int i = 0; i < 2; i++)
        dp_sim_free(&s[i]);
    twin_free(&two);
    dp_problem_free(&gla);
}

static int64_t results_that_differ(const dp_problem *p, dp_result *a, dp_result *b) {
    int64_t n = 0;
    for (int f = 0; f < DP_NRESULTS; f++) {
        int64_t rows, width;
        dp_result_shape(p, f, &rows, &width);
        for (int64_t i = 0; i < rows * width; i++)
            n += (a->out[f])[i] != (b->out[f])[i];
    }
    return n;
}

static void check_diagonal(const dp_sim *s) {
    const int K = s->p->K;
    int seen = 0;
    for (int i = 0; i < s->N * s->p->HV; i++)
        for (int x = 0; s->M[i] && x < K * K; x++) {
            seen = 1;
            if (x / K != x % K) CHECK(s->M[i][x] == 0, "rank %d: M[%d] = %g", i, x, s->M[i][x]);
        }
    CHECK(seen, "no rank has an M");
}

static void check_formats(const dp_problem *p, dp_base base) {
    const dp_format own = base == DP_BASE_FP64 ? DP_FP64 : DP_FP32;
    dp_sim want, got, dense;
    REQUIRE(!dp_sim_new(&want, p, base, 4, DP_FAULT_NONE, NULL), "want");
    REQUIRE(!dp_sim_new(&got, p, base, 4, DP_FAULT_NONE, NULL), "got");
    REQUIRE(!dp_sim_new(&dense, p, base, 4, DP_FAULT_CHAIN_TF32RZ, NULL), "dense");
    dp_sim_run(&want, own, DP_EXCHANGE_ALLGATHER, 1);
    check_diagonal(&want);
    for (int f = 0; f < DP_NFORMATS; f++) {
        dp_sim_run(&got, (dp_format)f, DP_EXCHANGE_ALLGATHER, 1);
        const int64_t n = results_that_differ(p, &want.out, &got.out);
        CHECK(n == 0, "chain %s: %lld entries", dp_formats[f].name, (long long)n);
    }
    dp_sim_run(&dense, own, DP_EXCHANGE_ALLGATHER, 1);
    CHECK(results_that_differ(p, &want.out, &dense.out) > 0, "as matrices: the same bits");
    dp_sim_free(&want);
    dp_sim_free(&got);
    dp_sim_free(&dense);
}

DP_TEST(gla, no_format_of_the_chain_matters) {
    static const char *const NAME[] = {"smoke-gla", "smoke-ssd"};
    for (int i = 0; i < 2; i++) {
        dp_case c;
        if (!gt_open_case(NAME[i], &c)) continue;
        for (int base = 0; base < DP_NBASES; base++)
            check_formats(&c.p, (dp_base)base);
        dp_case_free(&c);
    }
}

DP_TEST(gla, a_beta_is_refused) {
    dp_problem gla;
    dp_err e = {0};
    packed(&gla);
    double one = 1;
    gla.beta = &one;
    CHECK(dp_problem_check(&gla, 0, &e) == DP_EINPUT && strstr(e.msg, "gla has no such input"),
          "%s", e.msg);
    gla.beta = NULL;
    gla.beta_form = DP_BETA_SIGMOID;
    e = (dp_err){0};
    CHECK(dp_problem_check(&gla, 0, &e) == DP_EINPUT && strstr(e.msg, "gla has nothing in"), "%s",
          e.msg);
    dp_problem_free(&gla);
}
