/* harness/tests/test_gate.c - gate, beta and L2 norm in fp64 and fp32: values and derivatives
 * against quadruple precision.
 *
 * Derivatives are taken by the complex step in __complex128 of math.md c as it stands, never from
 * the formulas under test.
 */
#include <float.h>
#include <math.h>
#include <quadmath.h>
#include <stdlib.h>
#include <string.h>

#include "gt.h"
#include "ref/chunk/gate.h"

typedef __float128 f128;
typedef __complex128 c128;

#define H_STEP 1e-40Q

static c128 step(double x, int on) {
    c128 z = (f128)x;
    if (on) __imag__ z = H_STEP;
    return z;
}

/* log(1 + exp(x)) and 1 / (1 + exp(-x)), accurate in quadruple precision for |x| <= 800: for x << 0
 * by their series. */
static c128 c_softplus(c128 x) {
    const c128 e = cexpq(crealq(x) > 0 ? -x : x);
    const c128 small = e - e * e / 2 + e * e * e / 3 - e * e * e * e / 4 + e * e * e * e * e / 5;
    return (crealq(x) > 0 ? x : 0) + (crealq(e) < 1e-7Q ? small : clogq(1 + e));
}
static c128 c_sigmoid(c128 x) {
    return crealq(x) > 0 ? 1 / (1 + cexpq(-x)) : cexpq(x) / (1 + cexpq(x));
}

static c128 c_gate(const dp_problem *p, c128 raw, c128 bias, c128 A) {
    if (p->gate == DP_GATE_LOG) return raw;
    const c128 x = raw + bias, a = cexpq(A);
    return p->gate == DP_GATE_SOFTPLUS ? -a * c_softplus(x)
                                       : (f128)p->lower_bound * c_sigmoid(a * x);
}

static double rel(double got, f128 want) {
    return want == 0 ? fabs(got) : (double)fabsq((got - want) / want);
}

/* |got - want| within tol |want| plus, in fp32, eight roundings of a subnormal number (2^-149
 * each). */
static int near(double got, f128 want, double tol, int f32) {
    return fabsq(got - want) <= tol * fabsq(want) + (f32 ? 0x1p-146 : 0);
}

/* T tokens, 2 heads, 3 channels; raw gates and betas sweep both ends. */
static dp_problem sweep(dp_model model, dp_gate gate, dp_beta beta, double widest) {
    dp_problem p = {.model = model,
                    .T = 41,
                    .H = 1,
                    .HV = 2,
                    .K = 3,
                    .V = 1,
                    .R = model == DP_MKDA ? 2 : 1,
                    .scale = 1,
                    .gate = gate,
                    .lower_bound = -5,
                    .beta_form = beta,
                    .l2norm = 1};
    dp_problem_alloc(&p);
    p.A_log = dp_doubles(p.HV);
    p.dt_bias = dp_doubles(p.HV * dp_Kg(&p));
    p.A_log[0] = -0.75;
    p.A_log[1] = 0.375;
    for (int i = 0; i < p.HV * dp_Kg(&p); i++)
        p.dt_bias[i] = 0.0625 * i - 0.125;
    const int64_t ng = p.T * p.HV * dp_Kg(&p), nb = p.T * p.HV * p.R;
    for (int64_t i = 0; i < ng; i++)
        p.g[i] = ldexp(rint(ldexp(widest * (2.0 * (double)i / (double)(ng - 1) - 1), 10)), -10);
    for (int64_t i = 0; i < nb; i++)
        p.beta[i] = ldexp(rint(ldexp(widest * (2.0 * (double)i / (double)(nb - 1) - 1), 10)), -10);
    for (int64_t i = 0; i < p.T * p.K; i++)
        p.q[i] = ldexp((double)((i * 37) % 101) - 50, -5);
    for (int64_t i = 0; i < p.T * p.R * p.K; i++)
        p.k[i] = ldexp((double)((i * 29) % 103) - 51, -(int)(i % 12));
    return p;
}

typedef struct {
    double *q, *k, *g, *beta, *rq, *rk;
} acts;

static acts acts_of(const dp_problem *p, int f32) {
    const int64_t T = p->T;
    acts a = {dp_doubles(T * p->H * p->K),
              dp_doubles(T * p->H * p->R * p->K),
              dp_doubles(T * p->HV * dp_Kg(p)),
              dp_doubles(T * p->HV * p->R),
              dp_doubles(T * p->H),
              dp_doubles(T * p->H * p->R)};
    (f32 ? dp_activate_f32 : dp_activate)(p, 0, T, a.q, a.k, a.g, a.beta, a.rq, a.rk);
    return a;
}
static void acts_free(acts *a) {
    double *x[] = {a->q, a->k, a->g, a->beta, a->rq, a->rk};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        free(x[i]);
}

/* u of the type, and the largest exponent argument: exp(|x|) makes |x| relative errors of one
 * relative error of x. */
static double tolerance(int f32, double widest) {
    return (8 + 2 * widest) * (f32 ? 0x1p-24 : 0x1p-53);
}

static const dp_gate gates[] = {DP_GATE_LOG, DP_GATE_SOFTPLUS, DP_GATE_LOWER_BOUND};
static const dp_beta betas[] = {DP_BETA_PLAIN, DP_BETA_SIGMOID, DP_BETA_SIGMOID2};
static const dp_model models[] = {DP_GDN, DP_KDA, DP_MKDA};

DP_TEST(gate, values_keep_relative_accuracy_at_both_ends) {
    for (int c = 0; c < 18; c++) {
        const int f32 = c / 9;
        dp_problem p = sweep(models[c % 3], gates[c / 3 % 3], betas[c % 3], 80);
        acts a = acts_of(&p, f32);
        const int64_t Kg = dp_Kg(&p);
        const double tol = tolerance(f32, 80 * exp(0.375));
        for (int64_t i = 0; i < p.T * p.HV * Kg; i++) {
            const int hv = (int)(i / Kg % p.HV);
            const f128 want = crealq(
                c_gate(&p, (f128)p.g[i], (f128)p.dt_bias[hv * Kg + i % Kg], (f128)p.A_log[hv]));
            CHECK(near(a.g[i], want, tol, f32),
                  "gate %d, f32 %d, raw %g: g = %g, want %g, off by %g", p.gate, f32, p.g[i],
                  a.g[i], (double)want, rel(a.g[i], want));
        }
        for (int64_t i = 0; i < p.T * p.HV * p.R; i++) {
            const f128 z = p.beta_form == DP_BETA_SIGMOID2 ? 2 : 1;
            const f128 want = p.beta_form == DP_BETA_PLAIN ? (f128)p.beta[i]
                                                           : z * crealq(c_sigmoid((f128)p.beta[i]));
            CHECK(near(a.beta[i], want, tol, f32), "beta form %d, f32 %d, raw %g: %g, want %g",
                  p.beta_form, f32, p.beta[i], a.beta[i], (double)want);
        }
        acts_free(&a);
        dp_problem_free(&p);
    }
}

DP_TEST(gate, rows_have_eps_inside_the_root) {
    for (int f32 = 0; f32 < 2; f32++) {
        dp_problem p = sweep(DP_MKDA, DP_GATE_LOG, DP_BETA_PLAIN, 1);
        memset(p.k, 0, sizeof(double) * 3); /* a zero key */
        acts a = acts_of(&p, f32);
        for (int64_t r = 0; r < p.T * p.R; r++) {
            f128 ss = (f128)DP_L2_EPS;
            for (int i = 0; i < 3; i++)
                ss += (f128)p.k[r * 3 + i] * p.k[r * 3 + i];
            CHECK(rel(a.rk[r], 1 / sqrtq(ss)) <= tolerance(f32, 0), "row %lld, f32 %d: rstd %g",
                  (long long)r, f32, a.rk[r]);
            for (int i = 0; i < 3; i++)
                CHECK(rel(a.k[r * 3 + i], p.k[r * 3 + i] / sqrtq(ss)) <= tolerance(f32, 0),
                      "row %lld entry %d", (long long)r, i);
        }
        CHECK(a.k[0] == 0 && rel(a.rk[0], 1000) <= 1e-6, "zero key: rstd %g", a.rk[0]);
        p.l2norm = 0;
        (f32 ? dp_activate_f32 : dp_activate)(&p, 0, p.T, a.q, a.k, a.g, a.beta, a.rq, a.rk);
        CHECK(!memcmp(a.q, p.q, sizeof(double) * (size_t)(p.T * 3)) && a.rq[5] == 1 && a.rk[5] == 1,
              "without l2norm q must pass unchanged, rstd 1");
        acts_free(&a);
        dp_problem_free(&p);
    }
}

/* Gradients of the activated values, any numbers exact in fp32. */
static void fill_grads(double *x, int64_t n, int salt) {
    for (int64_t i = 0; i < n; i++)
        x[i] = ldexp((double)((i * 53 + salt) % 127) - 63, -6);
}

typedef struct {
    acts a;
    double *dq, *dk, *dg, *db;
    dp_result out;
} back;

static back back_of(const dp_problem *p, int f32) {
    const int64_t T = p->T;
    back b = {.a = acts_of(p, f32),
              .dq = dp_doubles(T * p->H * p->K),
              .dk = dp_doubles(T * p->H * p->R * p->K),
              .dg = dp_doubles(T * p->HV * dp_Kg(p)),
              .db = dp_doubles(T * p->HV * p->R)};
    fill_grads(b.dq, T * p->H * p->K, 1);
    fill_grads(b.dk, T * p->H * p->R * p->K, 2);
    fill_grads(b.dg, T * p->HV * dp_Kg(p), 3);
    fill_grads(b.db, T * p->HV * p->R, 4);
    dp_result_alloc(&b.out, p, 1);
    for (int i = 0; i < p->HV; i++)
        b.out.dA_log[i] = 0;
    for (int i = 0; i < p->HV * dp_Kg(p); i++)
        b.out.ddt_bias[i] = 0;
    return b;
}
static void back_run(const dp_problem *p, int f32, int64_t t0, int64_t t1, back *b) {
    const int64_t Kg = dp_Kg(p);
    (f32 ? dp_activate_bwd_f32 : dp_activate_bwd)(
        p, t0, t1, b->a.q + t0 * p->H * p->K, b->a.k + t0 * p->H * p->R * p->K, b->a.rq + t0 * p->H,
        b->a.rk + t0 * p->H * p->R, b->dq + t0 * p->H * p->K, b->dk + t0 * p->H * p->R * p->K,
        b->dg + t0 * p->HV * Kg, b->db + t0 * p->HV * p->R, &b->out);
}
static void back_free(back *b) {
    acts_free(&b->a);
    double *x[] = {b->dq, b->dk, b->dg, b->db};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        free(x[i]);
    dp_result_free(&b->out);
}

DP_TEST(gate, derivatives_match_the_complex_step) {
    for (int c = 0; c < 18; c++) {
        const int f32 = c / 9;
        dp_problem p = sweep(models[c % 3], gates[c / 3 % 3], betas[c % 3], 40);
        back b = back_of(&p, f32);
        back_run(&p, f32, 0, p.T, &b);
        const int64_t Kg = dp_Kg(&p);
        const double tol = 2 * tolerance(f32, 40 * exp(0.375));
        for (int64_t i = 0; i < p.T * p.HV * Kg; i++) {
            const int hv = (int)(i / Kg % p.HV);
            const f128 want = b.dg[i] *
                              cimagq(c_gate(&p, step(p.g[i], 1), (f128)p.dt_bias[hv * Kg + i % Kg],
                                            (f128)p.A_log[hv])) /
                              H_STEP;
            CHECK(rel(b.out.dg[i], want) <= tol, "gate %d, f32 %d, raw %g: dg %g, want %g", p.gate,
                  f32, p.g[i], b.out.dg[i], (double)want);
        }
        for (int64_t i = 0; i < p.T * p.HV * p.R; i++) {
            const f128 z = p.beta_form == DP_BETA_SIGMOID2 ? 2 : 1,
                       want = b.db[i] * (p.beta_form == DP_BETA_PLAIN
                                             ? 1
                                             : z * cimagq(c_sigmoid(step(p.beta[i], 1))) / H_STEP);
            CHECK(rel(b.out.dbeta[i], want) <= tol, "beta form %d, f32 %d, raw %g: %g, want %g",
                  p.beta_form, f32, p.beta[i], b.out.dbeta[i], (double)want);
        }
        back_free(&b);
        dp_problem_free(&p);
    }
}

/* Errors of sums: relative to the sum of absolute terms, T Kg additions. */
DP_TEST(gate, parameter_gradients_are_sums_over_tokens) {
    for (int c = 0; c < 18; c++) {
        const int f32 = c / 9;
        dp_problem p = sweep(models[c % 3], gates[c / 3 % 3], betas[c % 3], 10);
        back b = back_of(&p, f32);
        back_run(&p, f32, 0, 17, &b); /* two ranks: partial sums add up */
        back_run(&p, f32, 17, p.T, &b);
        const int64_t Kg = dp_Kg(&p);
        const double tol =
            tolerance(f32, 10 * exp(0.375)) + (double)(p.T * Kg + 2) * (f32 ? 0x1p-24 : 0x1p-53);
        for (int hv = 0; hv < p.HV; hv++) {
            f128 A = 0, A_abs = 0;
            for (int64_t ch = 0; ch < Kg; ch++) {
                f128 bias = 0, bias_abs = 0;
                for (int64_t t = 0; t < p.T; t++) {
                    const int64_t i = (t * p.HV + hv) * Kg + ch;
                    const f128 dA = b.dg[i] *
                                    cimagq(c_gate(&p, (f128)p.g[i], (f128)p.dt_bias[hv * Kg + ch],
                                                  step(p.A_log[hv], 1))) /
                                    H_STEP;
                    const f128 dx =
                        b.dg[i] *
                        cimagq(c_gate(&p, (f128)p.g[i], step(p.dt_bias[hv * Kg + ch], 1),
                                      (f128)p.A_log[hv])) /
                        H_STEP;
                    A += dA;
                    A_abs += fabsq(dA);
                    bias += dx;
                    bias_abs += fabsq(dx);
                }
                CHECK(fabsq(b.out.ddt_bias[hv * Kg + ch] - bias) <= tol * bias_abs,
                      "gate %d, f32 %d: ddt_bias %g, want %g", p.gate, f32,
                      b.out.ddt_bias[hv * Kg + ch], (double)bias);
            }
            CHECK(fabsq(b.out.dA_log[hv] - A) <= tol * A_abs, "gate %d, f32 %d: dA_log %g, want %g",
                  p.gate, f32, b.out.dA_log[hv], (double)A);
        }
        back_free(&b);
        dp_problem_free(&p);
    }
}

/* Error relative to |dy| rstd: the projection may cancel. */
DP_TEST(gate, l2norm_derivative_contains_eps) {
    for (int f32 = 0; f32 < 2; f32++) {
        dp_problem p = sweep(DP_MKDA, DP_GATE_LOG, DP_BETA_PLAIN, 1);
        for (int i = 0; i < 3; i++) {
            p.k[i] = 0;
            p.k[3 + i] = ldexp(1 + i, -10);
        }
        /* eps = 1e-6 matters: |k|^2 = 1.3e-5 */
        back b = back_of(&p, f32);
        back_run(&p, f32, 0, p.T, &b);
        for (int64_t r = 0; r < p.T * p.R; r++)
            for (int i = 0; i < 3; i++) {
                c128 loss = 0, x[3], ss = (f128)DP_L2_EPS;
                f128 dy = 0;
                for (int j = 0; j < 3; j++) {
                    x[j] = step(p.k[r * 3 + j], i == j);
                    ss += x[j] * x[j];
                    dy += (f128)b.dk[r * 3 + j] * b.dk[r * 3 + j];
                }
                for (int j = 0; j < 3; j++)
                    loss += b.dk[r * 3 + j] * x[j] / csqrtq(ss);
                const f128 want = cimagq(loss) / H_STEP;
                CHECK(fabsq(b.out.dk[r * 3 + i] - want) <=
                          12 * tolerance(f32, 0) * sqrtq(dy) * b.a.rk[r],
                      "row %lld entry %d, f32 %d: %g, want %g", (long long)r, i, f32,
                      b.out.dk[r * 3 + i], (double)want);
            }
        back_free(&b);
        dp_problem_free(&p);
    }
}

DP_TEST(gate, absent_parameters_mean_zero) {
    dp_problem p = sweep(DP_KDA, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID, 5);
    for (int i = 0; i < p.HV; i++)
        p.A_log[i] = 0;
    for (int i = 0; i < p.HV * p.K; i++)
        p.dt_bias[i] = 0;
    acts with = acts_of(&p, 0);
    free(p.A_log);
    free(p.dt_bias);
    p.A_log = p.dt_bias = NULL;
    acts without = acts_of(&p, 0);
    CHECK(!memcmp(with.g, without.g, sizeof(double) * (size_t)(p.T * p.HV * p.K)), "g differs");
    acts_free(&with);
    acts_free(&without);
    dp_problem_free(&p);
}

DP_TEST(gate, f32_is_fp32) {
    dp_problem p = sweep(DP_KDA, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID, 20);
    back b = back_of(&p, 1);
    back_run(&p, 1, 0, p.T, &b);
    const double *x[] = {b.a.q, b.a.k, b.a.g, b.a.beta, b.out.dq, b.out.dk, b.out.dg, b.out.dbeta};
    for (int f = 0; f < 8; f++)
        for (int64_t i = 0; i < p.T * 2; i++)
            CHECK((double)(float)x[f][i] == x[f][i], "array %d entry %lld = %a is no fp32 number",
                  f, (long long)i, x[f][i]);
    back_free(&b);
    dp_problem_free(&p);
}

DP_TEST(gate, token_range_is_relative_to_its_start) {
    dp_problem p = sweep(DP_MKDA, DP_GATE_LOWER_BOUND, DP_BETA_SIGMOID2, 5);
    acts all = acts_of(&p, 0), part = acts_of(&p, 0);
    dp_activate(&p, 10, 20, part.q, part.k, part.g, part.beta, part.rq, part.rk);
    CHECK(!memcmp(part.q, all.q + 10 * 3, 30 * sizeof(double)) &&
              !memcmp(part.k, all.k + 10 * 6, 60 * sizeof(double)),
          "q, k");
    CHECK(!memcmp(part.g, all.g + 10 * 6, 60 * sizeof(double)) &&
              !memcmp(part.beta, all.beta + 10 * 4, 40 * sizeof(double)),
          "g, beta");
    acts_free(&all);
    acts_free(&part);
    dp_problem_free(&p);
}
