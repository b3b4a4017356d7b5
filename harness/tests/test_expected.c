/* The expected tier: draws predict the error of a correct run, whatever the format; results that are wrong by little beside what their bounds allow
 * fail, with the place; and its statistics raise no alarm on errors of the kind that they assume. */
#include "../../ref/inputs.h"
#include "../expected.h"
#include "../judge.h"
#include "gt.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* 4 ranks of 80 tokens, two sequences, two heads that remember for long. */
static const char CASE[] = "reason = r\nsource = s\nop = kda\nT = 320\nH = 2\nHV = 2\nK = 16\nV = 16\ngate = softplus\nbeta = sigmoid\nl2norm = yes\ng_mean = -5\ng_scale = 0.5\ns0_scale = 1\n"
    "cu_seqlens = 0,100,320\ndtype = bf16\nranks = 4\nbase = bf16\nchain = fp32\n";

typedef struct { dp_case c; dp_sim s; } subject;

static void simulate(subject *x, dp_base base, dp_format chain) {
    dp_err e = {0};
    if (dp_case_parse(CASE, strlen(CASE), "x.case", 1, &x->c, &e)) gt_fail(__FILE__, __LINE__, "case", "%s", e.msg), abort();
    x->c.base[0] = base, x->c.chain[0] = chain;
    if (dp_sim_new(&x->s, &x->c.p, base, x->c.ranks[0], DP_FAULT_NONE, &e)) gt_fail(__FILE__, __LINE__, "sim", "%s", e.msg), abort();
    dp_sim_run(&x->s, chain, DP_MERGE_ALLGATHER, 1);
}

/* The results of the ranks, as they are at this moment, judged as those of another program. */
static dp_run *judged(subject *x, dp_runs *runs) {
    const dp_run_options o = {.cache = gt_tmpdir()};      /* one truth and one set of draws for all tests */
    dp_given g = {.r = x->s.out, .same_design = 1};
    dp_err e = {0};
    *runs = (dp_runs){0};
    if (dp_run_given(&x->c, &o, &g, runs, &e)) gt_fail(__FILE__, __LINE__, "judge", "%s", e.msg), abort();
    return &runs->run[0];
}

static const dp_judgement *tensor(const dp_run *r, const char *name) {
    for (int i = 0; i < r->ntensor; i++) if (!strcmp(r->tensor[i].name, name)) return &r->tensor[i];
    return NULL;
}

static void forget(subject *x) { dp_sim_free(&x->s), dp_case_free(&x->c); }

DP_TEST(expected, draws_predict_every_tensor_in_every_format) {
    const struct { dp_base base; dp_format chain; } pol[] = {{DP_BASE_FP64, DP_FP64}, {DP_BASE_FP32, DP_FP32}, {DP_BASE_BF16, DP_FP32}, {DP_BASE_BF16, DP_TF32RZ}};
    for (size_t i = 0; i < sizeof pol / sizeof *pol; i++) {
        subject x;
        dp_runs runs;
        simulate(&x, pol[i].base, pol[i].chain);
        const dp_run *r = judged(&x, &runs);
        CHECK(r->verdict == DP_PASS, "%s: %s", r->id, r->why);
        for (int t = 0; t < r->ntensor; t++) {
            const dp_judgement *j = &r->tensor[t];
            const double ratio = j->expected.at[DP_LEVEL_TENSOR].ratio;
            CHECK(!strcmp(j->tier, "expected"), "%s %s is judged by '%s'", r->id, j->name, j->tier);
            /* dA_log is two numbers: over 24 seeds of this case the ratio goes from 0.1 to 2.7, whatever multiplies the matrices */
            const int few = !strcmp(j->name, "dA_log");
            const double low = few ? 0.01 : 0.5, high = few ? j->expected.at[DP_LEVEL_TENSOR].limit : 2.5;
            CHECK(ratio > low && ratio < high, "%s %s: error is %.3g times expected, not %.3g to %.3g", r->id, j->name, ratio, low, high);
        }
        dp_runs_free(&runs);
        forget(&x);
    }
}

static void scale_rows(double *x, int64_t from, int64_t to, double by) { for (int64_t i = from; i < to; i++) x[i] *= by; }

DP_TEST(expected, small_faults_fail_where_they_are) {
    subject x;
    dp_runs runs;
    simulate(&x, DP_BASE_BF16, DP_FP32);
    const dp_problem *p = &x.c.p;
    const int64_t L = p->T / 4, row = (int64_t)p->HV * p->V;
    const struct { const char *tensor; double *x; int64_t from, to; double by; int rank; const char *what; } f[] = {
        {"dbeta", x.s.out.dbeta, 0, p->T * p->HV, 2, -1, "dbeta twice as large everywhere"},
        {"dbeta", x.s.out.dbeta, 2 * L * p->HV, 3 * L * p->HV, 0, 2, "dbeta never added on rank 2"},
        {"dk", x.s.out.dk, 0, 3 * L * p->H * p->K, 1.1, -1, "dk 10% wrong on all ranks but the last"},
        {"o", x.s.out.o, 2 * L * row, (2 * L + 60) * row, 1.02, 2, "o 2% wrong in the first tokens behind one boundary"},
        {"dg", x.s.out.dg, L * p->HV * p->K, 2 * L * p->HV * p->K, 0.8, 1, "dg 20% too small on rank 1"},
        {"ddt_bias", x.s.out.ddt_bias, p->K, 2 * p->K, 0.25, 0, "ddt_bias of head 1 is one rank's part"},
    };
    for (size_t i = 0; i < sizeof f / sizeof *f; i++) {
        double *kept = dp_copy(f[i].x, f[i].to);
        scale_rows(f[i].x, f[i].from, f[i].to, f[i].by);
        const dp_run *r = judged(&x, &runs);
        const dp_judgement *j = tensor(r, f[i].tensor);
        CHECK(r->verdict == DP_FAIL && j->verdict == DP_FAIL, "%s passes: excess %.3g, %.3g of its bound", f[i].what, j->expected.excess, j->ratio);
        CHECK(f[i].rank < 0 || dp_judgement_place(j)->rank == f[i].rank, "%s is placed on rank %d", f[i].what, dp_judgement_place(j)->rank);
        for (int t = 0; t < r->ntensor; t++) CHECK(&r->tensor[t] == j || r->tensor[t].verdict == DP_PASS, "%s: %s fails too: %s", f[i].what, r->tensor[t].name, r->tensor[t].why);
        if (j->verdict == DP_FAIL && !strcmp(j->tier, "expected")) CHECK(strstr(r->why, "times what these formats make of these inputs") && !strcmp(r->tier, "expected"), "says: %s", r->why);
        memcpy(f[i].x, kept, sizeof(double) * (size_t)f[i].to);
        free(kept);
        dp_runs_free(&runs);
    }
    forget(&x);
}

DP_TEST(expected, stages_are_judged_too) {
    subject x;
    const dp_run_options o = {.cache = gt_tmpdir()};
    simulate(&x, DP_BASE_BF16, DP_FP32);
    for (int bad = 0; bad < 2; bad++) {
        dp_given g = {.same_design = 1};
        dp_runs runs = {0};
        dp_err e = {0};
        for (int i = 0; i < DP_NTAPS; i++) g.stage[i] = dp_tap_value(&x.s, i);
        if (bad) scale_rows(g.stage[DP_W], 80 * 2 * 16, 90 * 2 * 16, 1.015);      /* 10 tokens behind the first boundary */
        REQUIRE(!dp_run_given(&x.c, &o, &g, &runs, &e), "%s", e.msg);
        for (int t = 0; t < runs.run->ntensor; t++) {
            const dp_judgement *j = &runs.run->tensor[t];
            const int wrong = bad && !strcmp(j->name, "w");
            CHECK(j->verdict == (wrong ? DP_FAIL : DP_PASS) && !strcmp(j->tier, "expected"), "%s: %s by '%s', excess %.3g, %.3g of its bound", j->name, dp_verdict_names[j->verdict], j->tier,
                  j->expected.excess, j->ratio);
            CHECK(!wrong || dp_judgement_place(j)->rank == 1, "w is placed on rank %d", dp_judgement_place(j)->rank);
        }
        CHECK(runs.run->ntensor == DP_NTAPS, "%d tensors", runs.run->ntensor);
        for (int i = 0; i < DP_NTAPS; i++) free(g.stage[i]);
        dp_runs_free(&runs);
    }
    forget(&x);
}

DP_TEST(expected, draws_are_the_same_for_any_order_of_policies) {
    const dp_base base[] = {DP_BASE_BF16, DP_BASE_FP64, DP_BASE_BF16};
    const dp_format chain[] = {DP_TF32RZ, DP_BF16, DP_BF16};
    dp_expected all[3], one;
    dp_part a[DP_EXPECTED_PARTS], b[DP_EXPECTED_PARTS];
    subject x;
    simulate(&x, DP_BASE_BF16, DP_FP32);
    dp_expected_run(&x.c.p, NULL, x.c.input_dtype, 4, 1, 0, 3, base, chain, all);
    for (int i = 0; i < 3; i++) {
        dp_expected_run(&x.c.p, NULL, x.c.input_dtype, 4, 1, 0, 1, base + i, chain + i, &one);
        const int n = dp_expected_parts(&one, a), m = dp_expected_parts(&all[i], b);
        CHECK(n == 16 && m == 16, "%d and %d tensors", n, m);
        for (int k = 0; k < n; k++) CHECK(a[k].size == b[k].size && !memcmp(a[k].at, b[k].at, a[k].size), "policy %d, tensor %d differs", i, k);
        dp_expected_free(&one), dp_expected_free(&all[i]);
    }
    forget(&x);
}

/* |err|^2 of cells with nu degrees of freedom each, by its definition. */
static double chi2(dp_rng *r, int nu) {
    double s = 0;
    for (int i = 0; i < nu; i++) {
        const double z = dp_rng_normal(r);
        s += z * z;
    }
    return s / nu;
}

DP_TEST(expected, statistics_raise_no_alarm_and_see_a_large_excess) {
    enum { D = 8, N = 24, TRIALS = 2000 };
    static const int freedom[] = {1, 3, 10, 100, 1000};
    for (size_t f = 0; f < sizeof freedom / sizeof *freedom; f++) {
        dp_rng r;
        int alarms = 0, seen = 0;
        dp_rng_seed(&r, 1, f);
        for (int t = 0; t < TRIALS; t++) {
            double e2[D * N], err2[N], want2[N], floor2[N] = {0};
            int belong[N];
            dp_excess x;
            for (int i = 0; i < D * N; i++) e2[i] = chi2(&r, freedom[f]);
            for (int i = 0; i < N; i++) err2[i] = chi2(&r, freedom[f]), want2[i] = 1e6, belong[i] = i / 6;
            dp_excess_in in = {.ndraw = D, .n = N, .e2 = e2, .err2 = err2, .want2 = want2, .floor2 = floor2, .belong = belong, .nbelong = 4, .safety = DP_EXCESS_SAME};
            dp_excess_judge(&in, &x);
            alarms += x.excess > 1;
            CHECK(!isnan(x.excess), "nu %d: not judged", freedom[f]);
            if (freedom[f] < 100) continue;
            err2[7] = 5 * 5;
            dp_excess_judge(&in, &x);
            seen += x.excess > 1 && x.cell == 7;
        }
        CHECK(!alarms, "nu %d: %d alarms in %d trials", freedom[f], alarms, TRIALS);
        CHECK(freedom[f] < 100 || seen == TRIALS, "nu %d: one cell 5 times too large seen in %d of %d trials", freedom[f], seen, TRIALS);
    }
}

/* A short window of one rank carries an error that is one number (a state's, through M in bf16), a thousand times the others': the other ranks' many degrees of freedom do not make it rarer. */
DP_TEST(expected, a_short_window_of_correlated_errors_is_no_alarm_for_its_rank) {
    enum { D = 8, N = 8, TRIALS = 10000 };
    dp_rng r;
    int alarms = 0;
    dp_rng_seed(&r, 3, 0);
    for (int t = 0; t < TRIALS; t++) {
        double e2[D * N], err2[N], want2[N], floor2[N] = {0}, rows[N];
        int belong[N];
        dp_excess x;
        for (int i = 0; i < N; i++) {
            rows[i] = i % 2 ? 37 : 3, want2[i] = 1e6 * rows[i], belong[i] = i / 2;
            for (int d = -1; d < D; d++) *(d < 0 ? &err2[i] : &e2[d * N + i]) = i ? rows[i] * chi2(&r, 100) : 1e6 * chi2(&r, 1);
        }
        const dp_excess_in in = {.ndraw = D, .n = N, .e2 = e2, .err2 = err2, .want2 = want2, .floor2 = floor2, .rows = rows, .belong = belong, .nbelong = 4, .safety = DP_EXCESS_SAME};
        dp_excess_judge(&in, &x);
        alarms += x.excess > 1;
    }
    CHECK(!alarms, "%d alarms in %d trials", alarms, TRIALS);
}

/* One cell has nearly all of the tensor's error, and few degrees of freedom: only all cells alike say that every one of them is twice too large. */
DP_TEST(expected, an_excess_everywhere_is_seen_where_one_cell_outweighs_the_rest) {
    enum { D = 8, N = 80, TRIALS = 300 };
    dp_rng r;
    int alarms = 0, seen = 0, by_tensor = 0;
    dp_rng_seed(&r, 2, 0);
    for (int t = 0; t < TRIALS; t++)
        for (int by = 1; by <= 2; by++) {
            double e2[D * N], err2[N], want2[N], floor2[N] = {0};
            int belong[N];
            dp_excess x;
            for (int i = 0; i < N; i++) {
                const double size = pow(4, -i);
                want2[i] = 1e6 * size, belong[i] = 0, err2[i] = by * by * size * chi2(&r, 6);
                for (int d = 0; d < D; d++) e2[d * N + i] = size * chi2(&r, 6);
            }
            const dp_excess_in in = {.ndraw = D, .n = N, .e2 = e2, .err2 = err2, .want2 = want2, .floor2 = floor2, .belong = belong, .nbelong = 1, .safety = DP_EXCESS_SAME};
            dp_excess_judge(&in, &x);
            if (by == 1) alarms += x.excess > 1;
            else seen += x.excess > 1 && x.level == DP_LEVEL_EVERY, by_tensor += x.at[DP_LEVEL_TENSOR].ratio > x.at[DP_LEVEL_TENSOR].limit;
        }
    CHECK(!alarms && seen >= 0.99 * TRIALS && by_tensor < 0.5 * TRIALS, "%d alarms, seen in %d of %d, by the whole tensor in %d", alarms, seen, TRIALS, by_tensor);
}

static void place_row(const void *ctx, int64_t row, dp_place *at) {
    (void)ctx;
    *at = (dp_place){.sequence = (int)row, .chunk = -1, .token = -1};
}

/* A row that is exactly 0 beside rows of size 1 (dg of a sequence of one token): its error is rounding of what cancels there, not of itself. */
DP_TEST(expected, a_row_that_cancels_to_nothing_is_held_against_a_rounding_of_its_head) {
    enum { D = 4, ROWS = 8 };
    const double unit = 0x1p-24;
    double got[ROWS], want[ROWS], bound[ROWS], e2[D * ROWS];
    for (int i = 0; i < ROWS; i++) {
        want[i] = i > 0, got[i] = want[i] + (i > 0 ? 1e-3 : 10 * 1e-10), bound[i] = 1e-2;
        for (int d = 0; d < D; d++) e2[d * ROWS + i] = pow((i > 0 ? 1e-3 : 1e-10) * (0.9 + 0.05 * d), 2);
    }
    for (int wrong = 0; wrong < 2; wrong++) {
        dp_judgement j;
        if (wrong) got[0] = 100 * unit;
        const dp_compare_in in = {.name = "x", .N = 1, .heads = 1, .rows = ROWS, .width = 1, .got = got, .want = want, .bound = bound, .place = place_row, .ndraw = D, .ncell = ROWS, .e2 = e2,
                                  .safety = DP_EXCESS_SUMS, .unit = unit};
        dp_compare(&in, &j);
        CHECK(j.verdict == (wrong ? DP_FAIL : DP_PASS), "error %g: %s %s", got[0], dp_verdict_names[j.verdict], j.why);
        CHECK(!wrong || dp_judgement_place(&j)->sequence == 0, "row %d is blamed", dp_judgement_place(&j)->sequence);
        dp_judgement_free(&j);
    }
}
