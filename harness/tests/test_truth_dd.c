/* harness/tests/test_truth_dd.c - the double-double truth against MPFR. Values are within both
 * radii, radii are those of the analysis. The bits are the same for every instruction set and
 * number of threads. Also exp, log1p, sigmoid and 1/sqrt one by one. */
#include <math.h>
#include <mpfr.h>
#include <stdlib.h>
#include <string.h>

#include "gt.h"
#include "harness/record/run.h"
#include "ref/inputs/inputs.h"
#include "ref/truth/truth.h"
#include "ref/truth/truth_dd.h"

typedef __float128 f128;

typedef struct {
    const char *name;
    dp_model model;
    int T, H, HV, K, V, R;
    dp_gate gate;
    dp_beta beta;
    int l2norm, states, Nseq;
    int64_t cu[5];
} shape;

static const shape shapes[] = {
    {"kda-128", DP_KDA, 30, 1, 1, 128, 12, 1, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID, 1, 0, 1, {0, 30}},
    {"kda-log", DP_KDA, 150, 1, 1, 16, 8, 1, DP_GATE_LOG, DP_BETA_PLAIN, 0, 0, 1, {0, 150}},
    {"kda-odd",
     DP_KDA,
     150,
     2,
     4,
     13,
     9,
     1,
     DP_GATE_SOFTPLUS,
     DP_BETA_SIGMOID2,
     1,
     1,
     3,
     {0, 97, 97, 150}},
    {"gdn",
     DP_GDN,
     150,
     1,
     2,
     20,
     17,
     1,
     DP_GATE_SOFTPLUS,
     DP_BETA_SIGMOID,
     1,
     1,
     4,
     {0, 1, 100, 100, 150}},
    {"gdn-lb", DP_GDN, 90, 1, 1, 8, 4, 1, DP_GATE_LOWER_BOUND, DP_BETA_SIGMOID, 0, 0, 1, {0, 90}},
    {"mkda2", DP_MKDA, 100, 1, 1, 16, 8, 2, DP_GATE_LOG, DP_BETA_PLAIN, 0, 1, 1, {0, 100}},
    {"mkda4",
     DP_MKDA,
     100,
     1,
     2,
     12,
     10,
     4,
     DP_GATE_LOWER_BOUND,
     DP_BETA_SIGMOID,
     1,
     1,
     2,
     {0, 70, 100}},
    {"gdn2", DP_GDN2, 90, 1, 2, 12, 10, 1, DP_GATE_SOFTPLUS, DP_BETA_PLAIN, 1, 1, 2, {0, 66, 90}},
    {"gla", DP_GLA, 90, 1, 2, 12, 10, 1, DP_GATE_LOG, DP_BETA_PLAIN, 0, 1, 2, {0, 66, 90}},
    {"dplr", DP_DPLR, 90, 2, 2, 12, 10, 1, DP_GATE_LOG, DP_BETA_PLAIN, 0, 1, 2, {0, 66, 90}},
    {"in-turn",
     DP_DELTAPRODUCT,
     90,
     1,
     2,
     12,
     10,
     3,
     DP_GATE_SOFTPLUS,
     DP_BETA_SIGMOID2,
     1,
     1,
     2,
     {0, 66, 90}},
    {"one-token", DP_KDA, 1, 1, 1, 3, 2, 1, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID, 1, 1, 1, {0, 1}},
};
enum { NSHAPES = sizeof shapes / sizeof *shapes, NBALLS = DP_NRESULTS + 3 };

static dp_problem problem_of(const shape *s, uint64_t seed) {
    dp_problem p = {.model = s->model,
                    .T = s->T,
                    .H = s->H,
                    .HV = s->HV,
                    .K = s->K,
                    .V = s->V,
                    .R = s->R,
                    .Nseq = s->Nseq,
                    .scale = 1 / sqrt(s->K),
                    .gate = s->gate,
                    .lower_bound = -5,
                    .beta_form = s->beta,
                    .l2norm = s->l2norm};
    p.cu = dp_calloc((size_t)s->Nseq + 1, sizeof *p.cu);
    memcpy(p.cu, s->cu, sizeof *p.cu * (size_t)(s->Nseq + 1));
    dp_problem_alloc(&p);
    if (p.gate) {
        p.A_log = dp_doubles(p.HV);
        p.dt_bias = dp_doubles(p.HV * dp_Kg(&p));
    }
    if (s->states) {
        p.s0 = dp_doubles((int64_t)p.Nseq * p.HV * p.K * p.V);
        p.dstate = dp_doubles((int64_t)p.Nseq * p.HV * p.K * p.V);
    }
    p.dout = dp_doubles(p.T * p.HV * p.V);
    const dp_inputs_spec in = {.seed = seed,
                               .dtype = DP_FP32,
                               .g_mean = p.gate ? -3 : 0,
                               .g_scale = p.gate ? 2 : 0.05,
                               .beta_lo = 0,
                               .beta_hi = p.R > 1 ? 0.5 : 1,
                               .s0_scale = s->states};
    dp_inputs_fill(&p, &in);
    dp_inputs_fill_gradients(&p, &in);
    return p;
}

static dp_status run(const dp_problem *p, dp_truth_kind kind, int bits, int threads, dp_truth *t) {
    static const int64_t cut[] = {20, 64};
    const dp_truth_request rq = {.kind = kind,
                                 .bits = bits,
                                 .backward = 1,
                                 .ncut = p->T > 64 ? 2 : p->T > 20,
                                 .cut = cut,
                                 .want_M = 1,
                                 .threads = threads};
    return dp_truth_run(p, &rq, t, NULL);
}

static const dp_ball *ball_of(const dp_truth *t, int i, const char **name) {
    static const char *const more[] = {"S_cut", "dS_cut", "M_seg"};
    *name = i < DP_NRESULTS ? dp_result_fields[i].name : more[i - DP_NRESULTS];
    return i < DP_NRESULTS        ? &t->field[i]
           : i == DP_NRESULTS     ? &t->S_cut
           : i == DP_NRESULTS + 1 ? &t->dS_cut
                                  : &t->M_seg;
}

/* Largest |a - b| / (rad_a + rad_b) over rows, |a - b| / |b| over all; NaN counts as infinite. */
static double worst_ratio(const dp_ball *a, const dp_ball *b, double *rel) {
    double worst = 0;
    f128 all = 0, size = 0;
    for (int64_t r = 0; r < a->rows; r++) {
        f128 s = 0;
        for (int64_t i = r * a->width; i < (r + 1) * a->width; i++) {
            const f128 d = ((f128)a->hi[i] - b->hi[i]) + ((f128)a->lo[i] - b->lo[i]);
            s += d * d;
            size += (f128)b->hi[i] * b->hi[i];
        }
        const double ratio = s == 0 ? 0 : sqrt((double)s) / (a->rad[r] + b->rad[r]);
        if (!(ratio <= worst)) worst = isnan(ratio) ? INFINITY : ratio;
        all += s;
    }
    *rel = sqrt((double)(all / (size > 0 ? size : 1)));
    return worst;
}

/* Every tensor: error within both radii (with room: the analysis counts every rounding at its
 * worst), and about 2^-104 of the tensor. A lost low word shows as 1e-17. */
DP_TEST(truth_dd, agrees_with_mpfr) {
    for (int s = 0; s < NSHAPES; s++) {
        dp_problem p = problem_of(&shapes[s], (uint64_t)s + 1);
        dp_truth got, want;
        REQUIRE(run(&p, DP_TRUTH_DD, 0, 0, &got) == DP_OK &&
                    run(&p, DP_TRUTH_MPFR, 192, 0, &want) == DP_OK,
                "%s", shapes[s].name);
        CHECK(got.kind == DP_TRUTH_DD && got.bits == TR_DD_BITS, "kind %d, %d bits", got.kind,
              got.bits);
        for (int f = 0; f < NBALLS; f++) {
            const char *name;
            const dp_ball *a = ball_of(&got, f, &name), *b = ball_of(&want, f, &name);
            double rel;
            CHECK(a->rows == b->rows && a->width == b->width, "%s %s: shape", shapes[s].name, name);
            if (!a->rows) continue;
            const double ratio = worst_ratio(a, b, &rel);
            CHECK(ratio <= 0.01, "%s %s: error / radius %g", shapes[s].name, name, ratio);
            CHECK(rel <= 2e-30, "%s %s: relative error %g", shapes[s].name, name, rel);
        }
        dp_truth_free(&got);
        dp_truth_free(&want);
        dp_problem_free(&p);
    }
}

/* One formula makes both radii. With MPFR at 98 bits they differ only by the number of column
 * blocks and by norms rounded up in double. With gradients double-double measures its states, which
 * makes its radii smaller, never larger, and those of dg most where a head remembers. */
DP_TEST(truth_dd, radii_are_those_of_98_bits) {
    double least = 1;
    for (int s = 0; s < NSHAPES; s++)
        for (int backward = 0; backward < 2; backward++) {
            dp_problem p = problem_of(&shapes[s], (uint64_t)s + 1);
            double *dout = p.dout;
            dp_truth got, want;
            if (!backward) p.dout = NULL;
            const int ok = run(&p, DP_TRUTH_DD, 0, 0, &got) == DP_OK &&
                           run(&p, DP_TRUTH_MPFR, TR_DD_BITS, 0, &want) == DP_OK;
            p.dout = dout;
            REQUIRE(ok, "%s", shapes[s].name);
            for (int f = 0; f < NBALLS; f++) {
                const char *name;
                const dp_ball *a = ball_of(&got, f, &name), *b = ball_of(&want, f, &name);
                for (int64_t r = 0; r < a->rows; r++) {
                    const double ratio = a->rad[r] / (b->rad[r] + TR_DD_FLOOR);
                    if (!strcmp(name, "dg") && ratio < least && b->rad[r] < INFINITY) least = ratio;
                    CHECK(a->rad[r] == b->rad[r] || (ratio > (backward ? 0 : 0.99) && ratio < 1.5),
                          "%s %s row %lld: radius %g, with MPFR %g", shapes[s].name, name,
                          (long long)r, a->rad[r], b->rad[r]);
                }
            }
            dp_truth_free(&got);
            dp_truth_free(&want);
            dp_problem_free(&p);
        }
    CHECK(least < 0.1, "radii of dg at most %g times smaller", 1 / least);
}

/* Where base fp64 is judged double-double is the truth only if no radius shows beside one rounding.
 */
DP_TEST(truth_dd, base_fp64_asks_for_radii_below_a_rounding) {
    dp_problem p = problem_of(&shapes[0], 1);
    dp_truth t;
    REQUIRE(run(&p, DP_TRUTH_DD, 0, 0, &t) == DP_OK, "run");
    CHECK(!dp_truth_lacks_bits(&p, &t, 0x1p-58, 0), "radii of a small problem");
    for (int f = 0; f < NBALLS; f++) {
        const char *name;
        dp_ball *b = (dp_ball *)ball_of(&t, f, &name);
        if (!b->rows) continue;
        double ss = 0, *rad = &b->rad[b->rows - 1];
        const double keep = *rad;
        for (int64_t i = 0; i < b->rows * b->width; i++)
            ss += b->hi[i] * b->hi[i];
        *rad = 0x1p-53 * sqrt(ss);
        if (strcmp(name, "dA_log") && strcmp(name, "ddt_bias"))
            CHECK(dp_truth_lacks_bits(&p, &t, 0x1p-58, 0) > 0, "%s with a radius of one rounding",
                  name);
        *rad = INFINITY;
        CHECK(dp_truth_lacks_bits(&p, &t, 0x1p-58, 0) > 0, "%s with no radius", name);
        *rad = keep;
    }
    dp_truth_free(&t);
    dp_problem_free(&p);
}

static int same_bits(const dp_truth *a, const dp_truth *b) {
    int same = 1;
    for (int f = 0; f < NBALLS && same; f++) {
        const char *name;
        const dp_ball *x = ball_of(a, f, &name), *y = ball_of(b, f, &name);
        const size_t n = sizeof(double) * (size_t)(x->rows * x->width);
        same = !n || (!memcmp(x->hi, y->hi, n) && !memcmp(x->lo, y->lo, n) &&
                      !memcmp(x->rad, y->rad, sizeof(double) * (size_t)x->rows));
    }
    return same;
}

DP_TEST(truth_dd, bits_depend_on_neither_threads_nor_instructions) {
    for (int s = 0; s < NSHAPES; s++) {
        dp_problem p = problem_of(&shapes[s], (uint64_t)s + 1);
        dp_truth first, again;
        REQUIRE(run(&p, DP_TRUTH_DD, 0, 1, &first) == DP_OK, "run");
        REQUIRE(run(&p, DP_TRUTH_DD, 0, 3, &again) == DP_OK, "run");
        CHECK(same_bits(&first, &again), "%s: 3 threads", shapes[s].name);
        dp_truth_free(&again);
        static const char *const name[] = {"plain", "wide", "avx2", "avx512"};
        for (int i = 0; i < 4; i++) {
            if (!tr_dd_choose(name[i])) continue;
            tr_dd_only = name[i];
            const dp_status st = run(&p, DP_TRUTH_DD, 0, 0, &again);
            tr_dd_only = NULL;
            REQUIRE(st == DP_OK, "run");
            CHECK(same_bits(&first, &again), "%s: %s", shapes[s].name, name[i]);
            dp_truth_free(&again);
        }
        dp_truth_free(&first);
        dp_problem_free(&p);
    }
}

/* ---- functions one by one -------------------------------------------------------------------- */

/* log2 of the relative error of h + l against the exact value; an exact result counts as -200 */
static double error_log2(double h, double l, mpfr_srcptr want) {
    mpfr_t d;
    mpfr_init2(d, 400);
    mpfr_sub_d(d, want, h, MPFR_RNDN);
    mpfr_sub_d(d, d, l, MPFR_RNDN);
    mpfr_div(d, d, want, MPFR_RNDN);
    const double e = mpfr_zero_p(d) ? -200 : log2(fabs(mpfr_get_d(d, MPFR_RNDA)));
    mpfr_clear(d);
    return e;
}

enum { FN = 16 }; /* channels of one call */

/* Gates of random raw values through gate() and the same in MPFR. Returns the largest error of d,
 * dx, dA over n calls; g's own error reaches d times |g|. */
static void gate_errors(dp_gate form, double lo, double hi, int n, double worst[3]) {
    const tr_dd_lanes *op = tr_dd_choose(NULL);
    dp_rng rng;
    double raw[FN] __attribute__((aligned(64))),
        bias[FN] __attribute__((aligned(64))) = {0}, in[FN] __attribute__((aligned(64))),
                 row[3][2 * FN] __attribute__((aligned(64)));
    mpfr_t x, e, s, t;
    mpfr_inits2(400, x, e, s, t, NULL);
    dp_rng_seed(&rng, 5, (uint64_t)form);
    worst[0] = worst[1] = worst[2] = -200;
    for (int c = 0; c < n; c++) {
        for (int i = 0; i < FN; i++) {
            raw[i] = lo + (hi - lo) * dp_rng_uniform(&rng);
            in[i] = 1;
        }
        tr_dd_gate a = {.Kp = FN,
                        .form = form,
                        .a = {1, 0},
                        .lower_bound = -5,
                        .raw = raw,
                        .bias = bias,
                        .in = in,
                        .d = row[0],
                        .dx = row[1],
                        .dA = row[2]};
        op->gate(&a);
        for (int i = 0; i < FN; i++) {
            mpfr_set_d(x, raw[i], MPFR_RNDN);
            mpfr_neg(e, x, MPFR_RNDN);
            mpfr_exp(e, e, MPFR_RNDN);
            mpfr_add_ui(s, e, 1, MPFR_RNDN);
            mpfr_ui_div(s, 1, s, MPFR_RNDN); /* sigmoid */
            if (form == DP_GATE_LOG)
                mpfr_set(t, x, MPFR_RNDN);
            else if (form == DP_GATE_SOFTPLUS) {
                mpfr_exp(t, x, MPFR_RNDN);
                mpfr_log1p(t, t, MPFR_RNDN);
                mpfr_neg(t, t, MPFR_RNDN);
            } else
                mpfr_mul_si(t, s, -5, MPFR_RNDN);
            const double g = fabs(mpfr_get_d(t, MPFR_RNDN));
            if (form == DP_GATE_SOFTPLUS) {
                worst[2] = fmax(worst[2], error_log2(row[2][i], row[2][FN + i], t));
                mpfr_neg(s, s, MPFR_RNDN);
                worst[1] = fmax(worst[1], error_log2(row[1][i], row[1][FN + i], s));
            } else if (form == DP_GATE_LOWER_BOUND) {
                mpfr_exp(e, x, MPFR_RNDN);
                mpfr_add_ui(e, e, 1, MPFR_RNDN);
                mpfr_div(s, s, e, MPFR_RNDN);
                mpfr_mul_si(s, s, -5, MPFR_RNDN);
                worst[1] = fmax(worst[1], error_log2(row[1][i], row[1][FN + i], s));
                mpfr_mul(s, s, x, MPFR_RNDN);
                worst[2] = fmax(worst[2], error_log2(row[2][i], row[2][FN + i], s));
            }
            mpfr_exp(t, t, MPFR_RNDN);
            if (g < 600)
                worst[0] = fmax(worst[0], error_log2(row[0][i], row[0][FN + i], t) -
                                              (form == DP_GATE_LOG ? 0 : log2(1 + g)));
        }
    }
    mpfr_clears(x, e, s, t, NULL);
}

DP_TEST(truth_dd, gates_are_good_to_their_claims) {
    static const struct {
        dp_gate form;
        double lo, hi;
    } range[] = {{DP_GATE_LOG, -600, 0},         {DP_GATE_LOG, -1, 0},
                 {DP_GATE_LOG, -0x1p-20, 0},     {DP_GATE_LOG, 0, 600},
                 {DP_GATE_SOFTPLUS, -40, 40},    {DP_GATE_SOFTPLUS, -1, 1},
                 {DP_GATE_SOFTPLUS, -600, -100}, {DP_GATE_SOFTPLUS, 100, 600},
                 {DP_GATE_LOWER_BOUND, -20, 20}, {DP_GATE_LOWER_BOUND, -300, 300}};
    for (size_t i = 0; i < sizeof range / sizeof *range; i++) {
        double e[3];
        gate_errors(range[i].form, range[i].lo, range[i].hi, 400, e);
        for (int j = 0; j < 3; j++)
            CHECK(e[j] <= -101, "form %d in %g..%g, output %d: 2^%.2f", range[i].form, range[i].lo,
                  range[i].hi, j, e[j]);
        CHECK(range[i].form != DP_GATE_LOG || e[0] > -110, "form %d: no error was measured",
              range[i].form);
    }
}

DP_TEST(truth_dd, rows_of_unit_norm) {
    const tr_dd_lanes *op = tr_dd_choose(NULL);
    dp_rng rng;
    double x[FN] __attribute__((aligned(64))), y[2 * FN] __attribute__((aligned(64))), rstd[2],
        worst = -200;
    mpfr_t s, t;
    mpfr_inits2(400, s, t, NULL);
    dp_rng_seed(&rng, 6, 0);
    for (int c = 0; c < 4000; c++) {
        const double size = ldexp(1, (int)(40 * dp_rng_uniform(&rng)) - 20);
        mpfr_set_d(s, DP_L2_EPS, MPFR_RNDN);
        for (int i = 0; i < FN; i++) {
            x[i] = dp_rng_normal(&rng) * size;
            mpfr_set_d(t, x[i], MPFR_RNDN);
            mpfr_sqr(t, t, MPFR_RNDN);
            mpfr_add(s, s, t, MPFR_RNDN);
        }
        mpfr_rec_sqrt(s, s, MPFR_RNDN);
        op->over_norm(FN, &(tr_dd_norm){2, 1, DP_L2_EPS}, x, y, rstd);
        worst = fmax(worst, error_log2(rstd[0], rstd[1], s));
        mpfr_mul_d(s, s, x[3], MPFR_RNDN);
        worst = fmax(worst, error_log2(y[3], y[FN + 3], s));
    }
    CHECK(worst <= -101 && worst > -110, "2^%.2f", worst);
    mpfr_clears(s, t, NULL);
}

DP_TEST(truth_dd, refuses_what_it_cannot_do) {
    dp_problem p = problem_of(&shapes[7], 1);
    dp_truth t;
    dp_err e = {0};
    const dp_truth_request rq = {.kind = DP_TRUTH_DD, .backward = 1};
    static const double bad[] = {0x1p31, -0x1p31, NAN, INFINITY};
    for (int i = 0; i < 4; i++) {
        const double keep = p.v[1];
        p.v[1] = bad[i];
        e.code = DP_OK;
        CHECK(dp_truth_dd_refuses(&p) && dp_truth_run(&p, &rq, &t, &e) == DP_EINPUT &&
                  strstr(e.msg, "2^30"),
              "%g: %s", bad[i], e.msg);
        p.v[1] = keep;
    }
    CHECK(!dp_truth_dd_refuses(&p), "the problem itself");
    dp_problem_free(&p);
}

/* ---- audit ----------------------------------------------------------------------------------- */

DP_TEST(truth_dd, audit_passes_and_is_reproducible) {
    for (int s = 0; s < NSHAPES; s++) {
        dp_problem p = problem_of(&shapes[s], (uint64_t)s + 1);
        dp_truth t;
        dp_truth_audit a, b;
        dp_err e = {0};
        REQUIRE(run(&p, DP_TRUTH_DD, 0, 0, &t) == DP_OK, "run");
        for (int64_t tokens = 30; tokens <= 1000; tokens += 970) {
            CHECK(dp_truth_audit_columns(&p, &t, 7, 2, tokens, &a, &e) == DP_OK &&
                      dp_truth_audit_columns(&p, &t, 7, 2, tokens, &b, &e) == DP_OK,
                  "%s: %s", shapes[s].name, e.msg);
            CHECK(a.columns == 2 && a.tokens == b.tokens && a.worst == b.worst && a.worst <= 0.01,
                  "%s: %d columns, %g", shapes[s].name, a.columns, a.worst);
            CHECK(a.worst > 1e-9, "%s: no difference was measured", shapes[s].name);
        }
        dp_truth_free(&t);
        dp_problem_free(&p);
    }
}

/* A low word off by four radii: the audit of all columns (one) names tensor, head and token. */
DP_TEST(truth_dd, audit_names_the_row_that_is_wrong) {
    shape s = shapes[1];
    s.V = 1;
    static const struct {
        int field;
        int64_t at;
        const char *says;
    } bad[] = {{0, 17, "o, head 0, sequence 0, token 17, state column 0"},
               {4, 149, "dv, head 0, sequence 0, token 149"},
               {1, 5, "final_state, head 0, sequence 0, state column 0"}};
    dp_problem p = problem_of(&s, 1);
    dp_truth t;
    REQUIRE(run(&p, DP_TRUTH_DD, 0, 0, &t) == DP_OK, "run");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dp_ball *b = &t.field[bad[i].field];
        dp_truth_audit a;
        dp_err e = {0};
        const double keep = b->lo[bad[i].at];
        b->lo[bad[i].at] += 4 * b->rad[bad[i].at / b->width];
        CHECK(dp_truth_audit_columns(&p, &t, 3, 1, 1000, &a, &e) == DP_EIO &&
                  strstr(e.msg, bad[i].says),
              "%s: '%s'", bad[i].says, e.msg);
        b->lo[bad[i].at] = keep;
    }
    dp_truth_free(&t);
    dp_problem_free(&p);
}
