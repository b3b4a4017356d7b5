/* The chain of math.md j.5 at K = 32: sizes, slopes, the law of truncated tf32, and the bounds'
 * worth. */
#include "cases.h"
#include "harness/case/case.h"
#include "harness/record/run.h"

#include "ref/arithmetic/dd.h"
#include "ref/bound/bound.h"
#include "ref/inputs/inputs.h"

#include <math.h>
#include <mpfr.h>
#include <stdio.h>
#include <string.h>

static const dp_run *find(const dp_runs *r, dp_format f) {
    for (int i = 0; i < r->n; i++)
        if (r->run[i].chain == f) return &r->run[i];
    return NULL;
}

static double rel_at(const dp_run *r, int chunks) {
    for (int i = 0; i < r->npoint; i++)
        if (r->point[i].chunks == chunks) return r->point[i].rel;
    return NAN;
}

static int run_regime(const char *name, int n, dp_runs *out) {
    dp_case c;
    dp_err e = {0};
    if (!gt_open_case(name, &c)) return 0;
    if (c.ch.n > n) c.ch.n = n;
    const dp_run_options o = {0};
    const int ok = dp_case_run(&c, &o, out, &e) == DP_OK;
    dp_case_free(&c);
    return ok;
}

/* Table of reports/growth.md, j.5: tf32rz within 10%, since its law is deterministic; the others
 * within a factor 2 (another random chain). 3xTF32 in `subspace` stands apart. The table split
 * operands to nearest even, while cvt.rna rounds ties away from zero. The low part of a 24-bit
 * number has a tie in every fourth value. Where all factors are nearly the same projector that
 * error repeats: slope 0.95 and 5.3e-6 at 256 chunks instead of 0.5 and 1.2e-6. (NumPy emulation of
 * both splits on one chain: 5.5e-6 and 1.3e-6.) */
DP_TEST(chain, table_of_error_growth_is_reproduced) {
    const struct {
        const char *name;
        int n;
        double fp32, x3, tf32, rz, op, st;
    } row[] = {{"chain-reflect-k32", 16, 4.1e-7, 4.7e-7, 1.1e-3, 1.0e-2, 9.2e-3, 6.3e-3},
               {"chain-reflect-k32", 64, 8.4e-7, 9.8e-7, 2.3e-3, 4.3e-2, 1.8e-2, 1.3e-2},
               {"chain-reflect-k32", 256, 1.7e-6, 1.9e-6, 4.7e-3, 1.6e-1, 3.9e-2, 2.6e-2},
               {"chain-reflect-k32", 1024, 3.4e-6, 3.9e-6, 9.4e-3, 5.1e-1, 7.6e-2, 5.4e-2},
               {"chain-subspace-k32", 256, 1.1e-6, 5.5e-6, 1.7e-3, 1.7e-1, 1.2e-2, 3.2e-3},
               {"chain-slow-k32", 256, 1.5e-6, 1.8e-6, 4.5e-3, 1.4e-1, 4.7e-1, 1.8e-1},
               {"chain-corr-k32", 256, 1.5e-6, 1.4e-6, 3.7e-3, 1.4e-1, 2.6e-2, 2.5e-2},
               {"chain-mild-k32", 16, 4.7e-7, 5.1e-7, 1.2e-3, 1.0e-2, 1.0e-2, 6.2e-3}};
    dp_runs r = {0};
    const char *last = "";
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        if (strcmp(last, row[i].name)) {
            dp_runs_free(&r);
            if (!run_regime(row[i].name, 1024, &r)) return;
            last = row[i].name;
        }
        const struct {
            dp_format f;
            double want, factor;
        } col[] = {{DP_FP32, row[i].fp32, 2}, {DP_TF32X3, row[i].x3, 2},
                   {DP_TF32, row[i].tf32, 2}, {DP_TF32RZ, row[i].rz, 1.1},
                   {DP_BF16, row[i].op, 2},   {DP_BF16ST, row[i].st, 2}};
        for (size_t k = 0; k < sizeof col / sizeof *col; k++) {
            const dp_run *x = find(&r, col[k].f);
            REQUIRE(x, "%s: no %s", row[i].name, dp_formats[col[k].f].name);
            const double got = rel_at(x, row[i].n),
                         f = strcmp(row[i].name, "chain-reflect-k32") && col[k].f == DP_TF32RZ
                                 ? 1.25
                                 : col[k].factor;
            CHECK(got <= f * col[k].want && got >= col[k].want / f,
                  "%s, %d chunks, %s: %.3g, table %.2g", row[i].name, row[i].n,
                  dp_formats[col[k].f].name, got, col[k].want);
        }
    }
    dp_runs_free(&r);
}

/* Truncated operands shrink P by 1 - exp(-(n - 1) 1.4427 2^-11) (math.md j.4), whatever the chain.
 */
DP_TEST(chain, truncation_follows_its_law_and_slopes_tell_bias_from_rounding) {
    dp_runs r = {0};
    if (!run_regime("chain-reflect-k32", 1024, &r)) return;
    for (int n = 16; n <= 1024; n *= 4) {
        const double law = 1 - exp(-(n - 1) * 1.4427 * 0x1p-11),
                     got = rel_at(find(&r, DP_TF32RZ), n);
        CHECK(fabs(got / law - 1) < 0.1, "%d chunks: %.3g, law %.3g", n, got, law);
    }
    for (int f = DP_FP32; f < DP_NFORMATS; f++) {
        const double s = find(&r, f)->slope, want = f == DP_TF32RZ ? 1 : 0.5;
        CHECK(fabs(s - want) < 0.06, "%s: slope %.3f", dp_formats[f].name, s);
    }
    dp_runs_free(&r);
}

DP_TEST(chain, bounds_hold_in_every_regime_and_are_not_absurd) {
    const char *name[] = {"chain-reflect-k32",  "chain-slow-k32",  "chain-corr-k32",
                          "chain-subspace-k32", "chain-mixed-k32", "chain-mild-k32",
                          "chain-strong-k32"};
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
        dp_runs r = {0};
        if (!run_regime(name[i], 256, &r)) return;
        for (int k = 0; k < r.n; k++) {
            CHECK(r.run[k].verdict != DP_FAIL, "%s: %s", r.run[k].id, r.run[k].why);
            for (int p = 0; p < r.run[k].npoint; p++) {
                const dp_chain_point *c = &r.run[k].point[p];
                if (c->chunks > 1 && c->chunks <= 64 && c->norm > 1e-3 && c->abs > 0 &&
                    r.run[k].chain != DP_FP64)
                    CHECK(c->bound <= 1e4 * c->rel, "%s: %d chunks, error %.2e, bound %.2e",
                          r.run[k].id, c->chunks, c->rel, c->bound);
            }
        }
        dp_runs_free(&r);
    }
}

/* The truth's products against 300 bits, within the eta that their radius counts with; both parts
 * of B, as in a chain. */
DP_TEST(chain, products_in_double_double_keep_their_promise) {
    enum { K = 19 };
    double a[K * K], b[K * K], bl[K * K], h[K * K], l[K * K], top = 0;
    dp_rng r;
    mpfr_t sum, x, y;
    mpfr_inits2(300, sum, x, y, NULL);
    dp_rng_seed(&r, 7, 0);
    for (int i = 0; i < K * K; i++) {
        a[i] = (dp_rng_uniform(&r) - 0.5) * exp2(30 * dp_rng_uniform(&r));
        b[i] = (dp_rng_uniform(&r) - 0.5) * exp2(30 * dp_rng_uniform(&r));
        bl[i] = b[i] * 0x1p-54 * (dp_rng_uniform(&r) - 0.5);
    }
    dp_dd_mm(K, K, K, a, NULL, b, bl, h, l);
    for (int i = 0; i < K; i++)
        for (int j = 0; j < K; j++) {
            double abs = 0;
            mpfr_set_zero(sum, 1);
            for (int k = 0; k < K; k++) {
                mpfr_set_d(x, b[k * K + j], MPFR_RNDN);
                mpfr_add_d(x, x, bl[k * K + j], MPFR_RNDN);
                mpfr_mul_d(y, x, a[i * K + k], MPFR_RNDN);
                mpfr_add(sum, sum, y, MPFR_RNDN);
                abs += fabs(a[i * K + k] * b[k * K + j]);
            }
            mpfr_sub_d(sum, sum, h[i * K + j], MPFR_RNDN);
            mpfr_sub_d(sum, sum, l[i * K + j], MPFR_RNDN);
            top = fmax(top, fabs(mpfr_get_d(sum, MPFR_RNDN)) / (DP_DD_ETA(K) * abs));
        }
    CHECK(top <= 1 && top > 1e-6, "%g of the promise", top);
    mpfr_clears(sum, x, y, NULL);
}

/* ---- errors of a product whose factors project ----------------------------------------------- */

enum { CK = 16, KEYS = 2, STEPS = 6 };

/* Factors M_c = - A' B that each leave one direction, and rotate it: those that a moving state
 * sees. */
typedef struct {
    double A[STEPS][KEYS * CK], B[STEPS][KEYS * CK];
} projections;

static void random_unit(dp_rng *r, double *x) {
    double sum = 0;
    for (int i = 0; i < CK; i++) {
        x[i] = dp_rng_normal(r);
        sum += x[i] * x[i];
    }
    for (int i = 0; i < CK; i++)
        x[i] /= sqrt(sum);
}

static projections projections_of(dp_rng *r) {
    projections x;
    double d[STEPS + 1][CK];
    for (int c = 0; c <= STEPS; c++)
        random_unit(r, d[c]);
    for (int c = 0; c < STEPS; c++) {
        random_unit(r, x.A[c] + CK);
        random_unit(r, x.B[c] + CK);
        for (int i = 0; i < CK; i++) {
            x.A[c][i] = -d[c + 1][i];
            x.B[c][i] = d[c][i];
            x.A[c][CK + i] *= 1e-3;
        }
    }
    return x;
}

/* |product with every entry of A and B moved by sigma - product|_F^2 */
static double sampled(dp_rng *r, const projections *x, double sigma) {
    double P[CK * CK] = {0}, Q[CK * CK] = {0}, sum = 0;
    for (int i = 0; i < CK; i++)
        P[i * CK + i] = Q[i * CK + i] = 1;
    for (int c = 0; c < STEPS; c++) {
        double a[KEYS * CK], b[KEYS * CK], BP[KEYS * CK] = {0}, bQ[KEYS * CK] = {0};
        for (int i = 0; i < KEYS * CK; i++) {
            a[i] = x->A[c][i] + sigma * dp_rng_normal(r);
            b[i] = x->B[c][i] + sigma * dp_rng_normal(r);
        }
        for (int m = 0; m < KEYS; m++)
            for (int k = 0; k < CK; k++)
                for (int j = 0; j < CK; j++) {
                    BP[m * CK + j] += x->B[c][m * CK + k] * P[k * CK + j];
                    bQ[m * CK + j] += b[m * CK + k] * Q[k * CK + j];
                }
        for (int i = 0; i < CK; i++)
            for (int j = 0; j < CK; j++) {
                P[i * CK + j] = Q[i * CK + j] = 0;
                for (int m = 0; m < KEYS; m++) {
                    P[i * CK + j] -= x->A[c][m * CK + i] * BP[m * CK + j];
                    Q[i * CK + j] -= a[m * CK + i] * bQ[m * CK + j];
                }
            }
    }
    for (int i = 0; i < CK * CK; i++)
        sum += (P[i] - Q[i]) * (P[i] - Q[i]);
    return sum;
}

/* The squares of what b [CK][CK] and the covariance behind it say of the product's error. */
static void predicted(const projections *x, double sigma, double *entries, double *covariance) {
    const dp_rounding r = dp_rounding_of(DP_BASE_FP64, 2);
    double P[CK * CK] = {0}, M[CK * CK], DM[CK * CK], b[2 * CK * CK] = {0}, none[CK * CK] = {0};
    double off[KEYS * CK], bias = 0;
    for (int i = 0; i < KEYS * CK; i++)
        off[i] = sigma * sigma;
    for (int i = 0; i < CK; i++)
        P[i * CK + i] = 1;
    for (int c = 0; c < STEPS; c++) {
        const dp_factor_error e = {KEYS, 0, x->A[c], x->B[c], off, off, none};
        for (int i = 0; i < CK * CK; i++) {
            M[i] = DM[i] = 0;
            for (int m = 0; m < KEYS; m++) {
                const double a = x->A[c][m * CK + i / CK], w = x->B[c][m * CK + i % CK];
                M[i] -= a * w;
                DM[i] += sigma * sigma * (a * a + w * w);
            }
        }
        dp_bound_chain_step(&r, DP_FP64, CK, M, DM, &e, 1, P, b, &bias);
        double Q[CK * CK] = {0};
        for (int i = 0; i < CK * CK; i++)
            for (int k = 0; k < CK; k++)
                Q[i] += M[i / CK * CK + k] * P[k * CK + i % CK];
        memcpy(P, Q, sizeof P);
    }
    *entries = *covariance = 0;
    for (int i = 0; i < CK * CK; i++)
        *entries += b[i];
    for (int i = 0; i < CK; i++)
        *covariance += b[CK * CK + i * CK + i];
}

DP_TEST(chain, covariance_of_its_error_is_that_of_sampled_factors) {
    enum { SAMPLES = 2000 };
    const double sigma = 1e-5;
    dp_rng r;
    double mean = 0, entries, covariance;
    dp_rng_seed(&r, 31, 0);
    const projections x = projections_of(&r);
    predicted(&x, sigma, &entries, &covariance);
    for (int i = 0; i < SAMPLES; i++)
        mean += sampled(&r, &x, sigma) / SAMPLES;
    CHECK(fabs(covariance / mean - 1) < 0.05, "%.3g of the mean square of %d samples",
          covariance / mean, SAMPLES);
    CHECK(entries < 0.5 * mean, "entries alone: %.3g of it: factors that show nothing",
          entries / mean);
}
