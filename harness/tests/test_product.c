/* ref/product and ref/triangle: the bits of plain loops in the order that the headers state, on
 * every instruction set of this CPU. Also the error bounds that they promise, against long double.
 */
#include "gt.h"
#include "ref/arithmetic/isa.h"
#include "ref/arithmetic/product.h"
#include "ref/arithmetic/triangle.h"
#include "ref/inputs/inputs.h"
#include "ref/vocabulary/formats.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const types[] = {"f64", "f32"};

/* The arrays of one trial hold doubles that are exact in fp32; the fp32 code gets them narrowed. */
static double *numbers(dp_rng *r, int n) {
    double *x = dp_doubles(n + 1);
    for (int i = 0; i < n; i++)
        x[i] = (float)(dp_rng_normal(r) * ldexp(1, (int)(8 * dp_rng_uniform(r)) - 4));
    return x;
}

static float *narrow(const double *x, int n) {
    float *y = dp_calloc((size_t)n + 1, sizeof *y);
    for (int i = 0; i < n; i++)
        y[i] = (float)x[i];
    return y;
}

static void widen(const float *x, int n, double *y) {
    for (int i = 0; i < n; i++)
        y[i] = x[i];
}

static double rounded(int f32, double x) { return f32 ? (double)(float)x : x; }

/* NaNs of any payload are the same. */
static int differ(const double *a, const double *b, int n) {
    for (int i = 0; i < n; i++)
        if (!(isnan(a[i]) && isnan(b[i])) && memcmp(&a[i], &b[i], sizeof *a)) return i + 1;
    return 0;
}

/* ---- products -----------------------------------------------------------------------------------
 */

static double at(const double *X, int t, int rows, int cols, int i, int j) {
    return t ? X[j * rows + i] : X[i * cols + j];
}

/* An fp32 operation is the fp64 one, rounded: 53 >= 2 * 24 + 2. */
static void plain_product(int f32, dp_shape s, int set, double alpha, const double *A,
                          const double *B, double *C) {
    for (int i = 0; i < s.m; i++)
        for (int j = 0; j < s.n; j++) {
            double sum = 0, *c = &C[i * s.n + j];
            for (int x = 0; x < s.k; x++)
                sum = rounded(f32, sum + rounded(f32, at(A, s.ta, s.m, s.k, i, x) *
                                                          at(B, s.tb, s.k, s.n, x, j)));
            *c = set ? sum : rounded(f32, *c + rounded(f32, alpha * sum));
        }
}

static void own_product(int f32, dp_shape s, int set, double alpha, const double *A,
                        const double *B, double *C) {
    if (!f32) {
        set ? dp_mul_f64(s, A, B, C) : dp_add_mul_f64(s, alpha, A, B, C);
        return;
    }
    float *a = narrow(A, s.m * s.k), *b = narrow(B, s.k * s.n), *c = narrow(C, s.m * s.n);
    set ? dp_mul_f32(s, a, b, c) : dp_add_mul_f32(s, (float)alpha, a, b, c);
    widen(c, s.m * s.n, C);
    free(a);
    free(b);
    free(c);
}

static void check_bound(const char *what, int f32, dp_shape s, const double *A, const double *B,
                        const double *C) {
    for (int i = 0; i < s.m; i++)
        for (int j = 0; j < s.n; j++) {
            long double sum = 0, size = 0;
            for (int x = 0; x < s.k; x++) {
                const long double t =
                    (long double)at(A, s.ta, s.m, s.k, i, x) * at(B, s.tb, s.k, s.n, x, j);
                sum += t;
                size += fabsl(t);
            }
            const double err = (double)fabsl(C[i * s.n + j] - sum),
                         bound = dp_eta(f32 ? DP_FP32 : DP_FP64, s.k) * (double)size;
            CHECK(err <= bound * (1 + 0x1p-8), "%s: entry %d,%d off by %g, bound %g", what, i, j,
                  err, bound);
        }
}

static void one_product(dp_rng *r, int f32, int isa, dp_shape s, int special) {
    char what[128];
    const int na = s.m * s.k, nb = s.k * s.n, nc = s.m * s.n, set = dp_rng_uniform(r) < 0.5;
    double *A = numbers(r, na), *B = numbers(r, nb), *C = numbers(r, nc),
           *want = dp_copy(C, nc + 1);
    if (special && na && nb) {
        A[(int)(na * dp_rng_uniform(r))] = INFINITY;
        B[(int)(nb * dp_rng_uniform(r))] = special > 1 ? NAN : 0x1p-140;
    }
    snprintf(what, sizeof what, "%s %s %d x %d x %d%s%s%s", types[f32], dp_isa_names[isa], s.m, s.n,
             s.k, s.ta ? " A'" : "", s.tb ? " B'" : "", set ? "" : " added");
    plain_product(f32, s, set, 0.75, A, B, want);
    own_product(f32, s, set, 0.75, A, B, C);
    const int i = differ(C, want, nc);
    CHECK(!i, "%s: entry %d is %a, in the stated order %a", what, i - 1, C[i ? i - 1 : 0],
          want[i ? i - 1 : 0]);
    if (set && !special) check_bound(what, f32, s, A, B, C);
    free(A);
    free(B);
    free(C);
    free(want);
}

DP_TEST(product, has_the_bits_of_the_stated_order_on_every_instruction_set) {
    static const int sizes[] = {0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 100};
    enum { SIZES = sizeof sizes / sizeof *sizes };
    for (int isa = 0; isa < DP_NISAS; isa++) {
        dp_rng r;
        if (!dp_isa_here(isa)) continue;
        CHECK(!dp_isa_choose(dp_isa_names[isa], NULL) && (int)dp_isa_chosen() == isa, "choose");
        dp_rng_seed(&r, 21, 1);
        for (int i = 0; i < 600; i++) {
            int d[3];
            for (int x = 0; x < 3; x++)
                d[x] = sizes[(int)(SIZES * dp_rng_uniform(&r))];
            const dp_shape s = {i & 1, i >> 1 & 1, d[0], d[1], d[2]};
            one_product(&r, i >> 2 & 1, isa, s, i % 10 == 9 ? 1 + (i & 1) : 0);
        }
        one_product(&r, 0, isa, (dp_shape){0, 1, 9, 20, 5000},
                    0); /* a panel that is not on the stack */
        one_product(&r, 1, isa, (dp_shape){1, 0, 9, 20, 5000}, 0);
    }
    dp_isa_choose(NULL, NULL);
}

DP_TEST(product, an_instruction_set_that_is_not_here_is_refused_by_name) {
    dp_err e = {0};
    CHECK(dp_isa_choose("avx1024", &e) == DP_EINPUT && strstr(e.msg, "DP_ISA = avx1024") &&
              strstr(e.msg, "plain"),
          "%s", e.msg);
    CHECK(!dp_isa_choose(NULL, NULL), "the widest");
}

/* ---- triangles ----------------------------------------------------------------------------------
 */

static void plain_solve(int f32, int n, int cols, int trans, const double *L, double *X) {
    for (int c = 0; c < cols; c++)
        for (int y = 0; y < n; y++) {
            const int i = trans ? n - 1 - y : y;
            double x = X[i * cols + c];
            for (int z = 0; z < y; z++) {
                const int j = trans ? n - 1 - z : z;
                x = rounded(f32,
                            x - rounded(f32, L[trans ? j * n + i : i * n + j] * X[j * cols + c]));
            }
            X[i * cols + c] = x;
        }
}

static void own_solve(int f32, int n, int cols, int trans, const double *L, double *X) {
    if (!f32) {
        dp_solve_f64(n, cols, trans, L, X);
        return;
    }
    float *l = narrow(L, n * n), *x = narrow(X, n * cols);
    dp_solve_f32(n, cols, trans, l, x);
    widen(x, n * cols, X);
    free(l);
    free(x);
}

/* |L x - b| <= gamma_n |L||x|, the residual in long double */
static void check_residual(const char *what, int f32, int n, int cols, int trans, const double *L,
                           const double *X, const double *b) {
    for (int c = 0; c < cols; c++)
        for (int i = 0; i < n; i++) {
            long double res = (long double)X[i * cols + c] - b[i * cols + c],
                        size = fabs(X[i * cols + c]);
            for (int j = trans ? i + 1 : 0; j < (trans ? n : i); j++) {
                const long double t =
                    (long double)L[trans ? j * n + i : i * n + j] * X[j * cols + c];
                res += t;
                size += fabsl(t);
            }
            const double bound = dp_gamma(n, f32 ? 0x1p-24 : 0x1p-53) * (double)size;
            CHECK(fabsl(res) <= bound * (1 + 0x1p-8),
                  "%s: row %d of column %d: residual %Lg, bound %g", what, i, c, fabsl(res), bound);
        }
}

static double *lower(dp_rng *r, int n) {
    double *L = numbers(r, n * n);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++)
            L[i * n + j] =
                j >= i ? NAN
                       : (float)(L[i * n + j] /
                                 (4 * sqrt(n))); /* neither diagonal nor upper half is read */
    return L;
}

static void one_triangle(dp_rng *r, int f32, int isa, int n, int cols, int trans, int special) {
    char what[128];
    double *L = lower(r, n), *X = numbers(r, n * cols), *b = dp_copy(X, n * cols + 1),
           *want = dp_copy(X, n * cols + 1);
    if (special && n > 2) L[(n - 1) * n + n / 2] = X[0] = special > 1 ? NAN : INFINITY;
    if (special && n > 2) want[0] = X[0];
    snprintf(what, sizeof what, "%s %s %d x %d%s", types[f32], dp_isa_names[isa], n, cols,
             trans ? " transposed" : "");
    plain_solve(f32, n, cols, trans, L, want);
    own_solve(f32, n, cols, trans, L, X);
    const int i = differ(X, want, n * cols);
    CHECK(!i, "%s: entry %d is %a, in the stated order %a", what, i - 1, X[i ? i - 1 : 0],
          want[i ? i - 1 : 0]);
    if (!special) check_residual(what, f32, n, cols, trans, L, X, b);
    free(L);
    free(X);
    free(b);
    free(want);
}

/* The inverse is the solve of the identity, and zero above the diagonal even where L is not finite.
 */
static void one_inverse(dp_rng *r, int f32, int isa, int n, int special) {
    double *L = lower(r, n), *want = dp_doubles(n * n + 1), *T = dp_doubles(n * n + 1);
    if (special && n > 2) L[(n - 1) * n + 1] = NAN;
    for (int i = 0; i < n; i++)
        want[i * n + i] = 1;
    plain_solve(f32, n, n, 0, L, want);
    for (int i = 0; i < n; i++)
        for (int j = i + 1; j < n; j++)
            want[i * n + j] = 0;
    float *l = narrow(L, n * n), *t = narrow(T, n * n);
    if (f32) {
        dp_invert_f32(n, l, t);
        widen(t, n * n, T);
    } else
        dp_invert_f64(n, L, T);
    const int i = differ(T, want, n * n);
    CHECK(!i, "%s %s, inverse of %d: entry %d is %a, must be %a", types[f32], dp_isa_names[isa], n,
          i - 1, T[i ? i - 1 : 0], want[i ? i - 1 : 0]);
    free(L);
    free(want);
    free(T);
    free(l);
    free(t);
}

DP_TEST(triangle, has_the_bits_of_the_stated_order_on_every_instruction_set) {
    static const int sizes[] = {0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 40, 64, 65, 96};
    enum { SIZES = sizeof sizes / sizeof *sizes };
    for (int isa = 0; isa < DP_NISAS; isa++) {
        dp_rng r;
        if (!dp_isa_here(isa)) continue;
        dp_isa_choose(dp_isa_names[isa], NULL);
        dp_rng_seed(&r, 22, 1);
        for (int i = 0; i < 300; i++) {
            const int n = sizes[(int)(SIZES * dp_rng_uniform(&r))],
                      cols = sizes[(int)(SIZES * dp_rng_uniform(&r))];
            one_triangle(&r, i & 1, isa, n, cols, i >> 1 & 1, i % 10 == 9 ? 1 + (i >> 2 & 1) : 0);
            if (i % 5 == 0) one_inverse(&r, i / 5 & 1, isa, n, i % 10 == 5);
        }
    }
    dp_isa_choose(NULL, NULL);
}
