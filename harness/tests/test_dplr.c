/* DPLR equals KDA for lr_a = -exp(g) o k, lr_b = beta k and values beta v. If no gate rounds, the
 * truths agree to their radii; if gates round, so do all gradients by the chain rule. The ranks
 * agree with the truth. Unsupported features are refused with the reason.
 */
#include "gt.h"
#include "harness/case/case.h"
#include "harness/commands/large_problem.h"
#include "harness/simulated/ranks.h"
#include "oracle.h"
#include "ref/truth/truth.h"
#include "runs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int64_t CU[] = {0, 21, 21, 50, 60};

/* decays 0: no gate; betas are then powers of two, so that beta k and beta v are exact. */
static dp_problem kda_problem(int decays) {
    oracle_spec s = oracle_packed(DP_KDA, 8, CU, 91);
    dp_problem p;
    s.H = 2;
    s.gate = DP_GATE_LOG;
    s.l2norm = 0;
    oracle_problem(&p, &s);
    for (int64_t i = 0; i < p.T * p.H * p.K; i++)
        p.k[i] *= 0.25;
    for (int64_t i = 0; i < p.T * p.HV * p.K; i++)
        p.g[i] = decays ? -0.1 * (double)(i % 7) : 0;
    for (int64_t i = 0; i < p.T * p.HV; i++)
        p.beta[i] = decays ? 0.1 + 0.07 * (double)(i % 11) : i % 3 ? 0.5 : 0.25;
    return p;
}

static dp_problem dplr_of(const dp_problem *kda) {
    dp_problem y = *kda;
    y.model = DP_DPLR;
    y.beta = NULL;
    y.lr_a = dp_doubles(dp_input_count(&y, DP_INPUT_LR_A));
    y.lr_b = dp_doubles(dp_input_count(&y, DP_INPUT_LR_B));
    y.v = dp_doubles(dp_input_count(&y, DP_INPUT_V));
    for (int64_t i = 0; i < y.T * y.HV * y.K; i++) {
        y.lr_a[i] = -exp(y.g[i]) * y.k[i];
        y.lr_b[i] = kda->beta[i / y.K] * y.k[i];
    }
    for (int64_t i = 0; i < y.T * y.HV * y.V; i++)
        y.v[i] = kda->beta[i / y.V] * kda->v[i];
    return y;
}

static void dplr_free(dp_problem *y) {
    free(y->lr_a);
    free(y->lr_b);
    free(y->v);
}

static dp_truth truth_of(const dp_problem *p) {
    static const int64_t CUT[] = {15, 30, 45};
    const dp_truth_request rq = {.bits = 192, .backward = 1, .ncut = 3, .cut = CUT, .want_M = 1};
    dp_truth t = {0};
    dp_err e = {0};
    if (dp_problem_check(p, 0, &e) || dp_truth_run(p, &rq, &t, &e))
        gt_fail(__FILE__, __LINE__, "truth", "%s", e.msg);
    return t;
}

/* Largest error of a row of x in the sum of both radii. */
static double in_radii(const dp_ball *x, const dp_ball *y) {
    double most = 0;
    for (int64_t r = 0; r < x->rows; r++) {
        double d2 = 0;
        for (int64_t i = r * x->width; i < (r + 1) * x->width; i++) {
            const double d = (x->hi[i] - y->hi[i]) + (x->lo[i] - y->lo[i]);
            d2 += d * d;
        }
        most = fmax(most, sqrt(d2) / (x->rad[r] + y->rad[r] + 1e-300));
    }
    return most;
}

DP_TEST(dplr, truth_is_that_of_kda_to_both_radii_where_no_gate_rounds) {
    static const int SAME[] = {DP_RESULT_O, DP_RESULT_FINAL_STATE, DP_RESULT_DQ, DP_RESULT_DS0};
    dp_problem kda = kda_problem(0), two = dplr_of(&kda);
    dp_truth a = truth_of(&kda), b = truth_of(&two);
    for (size_t i = 0; i < sizeof SAME / sizeof *SAME; i++) {
        const dp_ball *x = &a.field[SAME[i]], *y = &b.field[SAME[i]];
        CHECK(x->rows == y->rows && in_radii(x, y) <= 1, "%s: %.3g of both radii",
              dp_result_fields[SAME[i]].name, in_radii(x, y));
        for (int64_t r = 0; r < y->rows; r++)
            CHECK(y->rad[r] <= 0x1p-100, "%s, row %lld: radius %.3g",
                  dp_result_fields[SAME[i]].name, (long long)r, y->rad[r]);
    }
    CHECK(in_radii(&a.S_cut, &b.S_cut) <= 1 && in_radii(&a.dS_cut, &b.dS_cut) <= 1 &&
              in_radii(&a.M_seg, &b.M_seg) <= 1,
          "S_cut %.3g, dS_cut %.3g, M %.3g of both radii", in_radii(&a.S_cut, &b.S_cut),
          in_radii(&a.dS_cut, &b.dS_cut), in_radii(&a.M_seg, &b.M_seg));
    dp_truth_free(&a);
    dp_truth_free(&b);
    dplr_free(&two);
    dp_problem_free(&kda);
}

/* Steps I + 3 u u' for 60 tokens: 64 bits are off by what the radii grow with. */
DP_TEST(dplr, radii_grow_with_the_steps) {
    dp_problem kda = kda_problem(0), two = dplr_of(&kda);
    dp_err e = {0};
    for (int64_t i = 0; i < two.T * two.HV * two.K; i++) {
        const double u = ((i % two.K) & 1 ? -1 : 1) / sqrt(two.K) * (1 + 0x1p-30 * (double)(i % 5));
        two.lr_a[i] = u;
        two.lr_b[i] = 3 * u;
    }
    dp_truth t[2];
    for (int i = 0; i < 2; i++) {
        const dp_truth_request rq = {.bits = i ? 512 : 64, .backward = 1, .want_M = 1};
        REQUIRE(!dp_truth_run(&two, &rq, &t[i], &e), "%s", e.msg);
    }
    for (int i = 0; i < DP_NRESULTS; i++)
        CHECK(in_radii(&t[0].field[i], &t[1].field[i]) <= 1, "%s: %.3g of both radii",
              dp_result_fields[i].name, in_radii(&t[0].field[i], &t[1].field[i]));
    const dp_ball *M = &t[0].M_seg;
    CHECK(in_radii(M, &t[1].M_seg) <= 1, "M: %.3g of both radii", in_radii(M, &t[1].M_seg));
    CHECK(t[1].field[DP_RESULT_FINAL_STATE].hi[0] != 0 && isfinite(t[1].M_seg.rad[0]), "no growth");
    dp_truth_free(&t[0]);
    dp_truth_free(&t[1]);
    dplr_free(&two);
    dp_problem_free(&kda);
}

static const double *of(const dp_truth *t, int field) { return t->field[field].hi; }

/* KDA's gradients on the left, DPLR's on the right: dk = dk + beta dlr_b - exp(g) o dlr_a, dg = dg
 * + lr_a o dlr_a, dv = beta dv, dbeta = <k, dlr_b> + <v, dv>. */
DP_TEST(dplr, gradients_are_those_of_kda_by_the_chain_rule) {
    dp_problem kda = kda_problem(1), two = dplr_of(&kda);
    dp_truth a = truth_of(&kda), b = truth_of(&two);
    const int K = kda.K, V = kda.V;
    const double *da = of(&b, DP_RESULT_DLR_A), *db = of(&b, DP_RESULT_DLR_B);
    double *dbeta = dp_doubles(kda.T * kda.HV), *dk = dp_doubles(kda.T * kda.HV * K),
           *dg = dp_doubles(kda.T * kda.HV * K), *dv = dp_doubles(kda.T * kda.HV * V);
    for (int64_t i = 0; i < kda.T * kda.HV * K; i++) {
        dk[i] = of(&b, DP_RESULT_DK)[i] + kda.beta[i / K] * db[i] - exp(kda.g[i]) * da[i];
        dg[i] = of(&b, DP_RESULT_DG)[i] + two.lr_a[i] * da[i];
        dbeta[i / K] += kda.k[i] * db[i];
    }
    for (int64_t i = 0; i < kda.T * kda.HV * V; i++) {
        dv[i] = kda.beta[i / V] * of(&b, DP_RESULT_DV)[i];
        dbeta[i / V] += kda.v[i] * of(&b, DP_RESULT_DV)[i];
    }
    const struct {
        int field;
        const double *x;
    } all[] = {{DP_RESULT_DK, dk},       {DP_RESULT_DG, dg},
               {DP_RESULT_DV, dv},       {DP_RESULT_DBETA, dbeta},
               {DP_RESULT_O, of(&b, 0)}, {DP_RESULT_DQ, of(&b, DP_RESULT_DQ)}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const dp_ball *want = &a.field[all[i].field];
        const double off = oracle_maxrel(all[i].x, want->hi, want->rows * want->width);
        CHECK(off <= 1e-13, "%s: %.3g apart", dp_result_fields[all[i].field].name, off);
    }
    free(dbeta);
    free(dk);
    free(dg);
    free(dv);
    dp_truth_free(&a);
    dp_truth_free(&b);
    dplr_free(&two);
    dp_problem_free(&kda);
}

static void ranks_agree(const dp_problem *p, int N, dp_exchange exchange) {
    dp_truth t = truth_of(p);
    dp_sim s;
    dp_err e = {0};
    REQUIRE(!dp_sim_new(&s, p, DP_BASE_FP64, N, DP_FAULT_NONE, &e), "%s", e.msg);
    dp_sim_run(&s, DP_FP64, exchange, 1);
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_ball *want = &t.field[i];
        if (!want->rows) continue;
        const double off = oracle_maxrel(s.out.out[i], want->hi, want->rows * want->width);
        CHECK(off <= 1e-12, "%d ranks, %s: %.3g apart", N, dp_result_fields[i].name, off);
    }
    dp_sim_free(&s);
    dp_truth_free(&t);
}

DP_TEST(dplr, ranks_in_fp64_agree_with_the_truth) {
    dp_problem kda = kda_problem(1), two = dplr_of(&kda);
    for (int N = 1; N <= 4; N++)
        ranks_agree(&two, N, DP_EXCHANGE_ALLGATHER);
    ranks_agree(&two, 3, DP_EXCHANGE_RING);
    dplr_free(&two);
    dp_problem_free(&kda);
}

static const char CASE[] = "reason = r\nsource = s\nop = dplr\nT = 96\nH = 2\nK = 16\nV = 8\n"
                           "s0_scale = 1\nranks = 1,2\nbase = fp32\n";

DP_TEST(dplr, what_is_not_there_is_refused_with_the_reason) {
    dp_case c;
    dp_sim s;
    dp_err e = {0};
    REQUIRE(gt_parse_case(CASE, &c), "case");
    c.p.g[5] = -81;
    CHECK(dp_sim_new(&s, &c.p, DP_BASE_FP32, 2, DP_FAULT_NONE, &e) == DP_EINPUT &&
              strstr(e.msg, "g: a log decay of -81: dplr is computed down to -80"),
          "%s", e.msg);
    dp_case_free(&c);
}

/* Before limits are drawn, too: the program ends with the reason. */
DP_TEST(dplr, gates_that_overflow_are_refused_by_a_run) {
    char path[1024], cmd[2048], out[4096];
    snprintf(path, sizeof path, "%s/steep-dplr.case", gt_tmpdir());
    FILE *f = fopen(path, "w");
    fprintf(f, "%sg_scale = 300\n", CASE);
    fclose(f);
    snprintf(cmd, sizeof cmd, "'%s' run '%s'", gt_program(), path);
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 2 && strstr(out, "dplr is computed down to -80"), "%d: %s", rc, out);
}

DP_TEST(dplr, grouped_heads_and_norms_are_refused) {
    dp_problem kda = kda_problem(1), two = dplr_of(&kda);
    dp_err e = {0};
    two.l2norm = 1;
    CHECK(dp_problem_check(&two, 0, &e) == DP_EINPUT && strstr(e.msg, "l2norm"), "%s", e.msg);
    e = (dp_err){0};
    two.l2norm = 0;
    two.H = 1;
    CHECK(dp_problem_check(&two, 0, &e) == DP_EINPUT && strstr(e.msg, "a query head for each"),
          "%s", e.msg);
    dplr_free(&two);
    dp_problem_free(&kda);
}

/* At another size than the case's, too, `check` has vectors of the same law. */
DP_TEST(dplr, large_problems_have_unit_vectors_that_read_and_write) {
    dp_err e = {0};
    dp_case c;
    char path[4096];
    snprintf(path, sizeof path, "%s/smoke-dplr.case", gt_cases());
    REQUIRE(!dp_case_load(path, &c, &e), "%s", e.msg);
    dp_problem p = dp_large_problem(&c, 40, 3, 0, 1, NULL);
    for (int64_t r = 0; r < p.T * p.HV; r++) {
        double a = 0, b = 0;
        for (int x = 0; x < p.K; x++) {
            a += p.lr_a[r * p.K + x] * p.lr_a[r * p.K + x];
            b += p.lr_a[r * p.K + x] * p.lr_b[r * p.K + x];
        }
        CHECK(fabs(a - 1) < 0.02 && b <= 0 && b >= -1.02, "row %d: |lr_a|^2 = %g, lr_a lr_b = %g",
              (int)r, a, b);
        CHECK(b != 0, "row %d writes nothing", (int)r);
    }
    dp_problem_free(&p);
    dp_case_free(&c);
}
