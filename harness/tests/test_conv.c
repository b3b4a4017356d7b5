/* ref/conv: against a naive oracle in long double, ranks against unsplit, bounds against the MPFR
 * truth. */
#include <float.h>
#include <math.h>
#include <mpfr.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gt.h"
#include "ref/chunk/conv.h"
#include "ref/inputs/inputs.h"
#include "ref/vocabulary/formats.h"

static int64_t pick(dp_rng *g, int64_t n) { return (int64_t)(dp_rng_uniform(g) * (double)n); }

typedef struct {
    int64_t T;
    int D, W, silu, bias, backward;
    const int64_t *cu;
    int Nseq;
    double scale;
} shape;

static double *random_bf16(dp_rng *g, int64_t n, double scale) {
    double *x = dp_doubles(n);
    for (int64_t i = 0; i < n; i++)
        x[i] = dp_bf16d(scale * dp_rng_normal(g));
    return x;
}

static dp_conv make(const shape *s, uint64_t seed) {
    dp_rng g;
    dp_rng_seed(&g, seed, 0);
    dp_conv c = {.T = s->T, .D = s->D, .W = s->W, .Nseq = s->Nseq, .silu = s->silu};
    c.cu = dp_calloc((size_t)s->Nseq + 1, sizeof *c.cu);
    memcpy(c.cu, s->cu, ((size_t)s->Nseq + 1) * sizeof *c.cu);
    c.x = random_bf16(&g, s->T * s->D, s->scale > 0 ? s->scale : 1);
    c.w = random_bf16(&g, (int64_t)s->D * s->W, 0.7);
    if (s->bias) c.bias = random_bf16(&g, s->D, 0.5);
    if (s->backward) c.dy = random_bf16(&g, s->T * s->D, 1);
    return c;
}

/* The tensors of a result as a table. */
typedef struct {
    const char *name;
    double *x;
    int64_t n;
} tensor;
enum { NTENSOR = 4 };
static void tensors(const dp_conv *c, const dp_conv_result *r, tensor t[NTENSOR]) {
    t[0] = (tensor){"y", r->y, c->T * c->D};
    t[1] = (tensor){"dx", r->dx, r->dx ? c->T * c->D : 0};
    t[2] = (tensor){"dw", r->dw, r->dw ? (int64_t)c->D * c->W : 0};
    t[3] = (tensor){"dbias", r->dbias, r->dbias ? c->D : 0};
}

/* Naive oracle. Every token looks up its sequence by counting; loops over all pairs (t, i), so no
 * index expression is shared. */
static int sequence_of(const dp_conv *c, int64_t t) {
    int n = 0;
    for (int q = 1; q <= c->Nseq; q++)
        n += c->cu[q] <= t;
    return n;
}

static long double oracle_pre(const dp_conv *c, int64_t t, int d) {
    long double p = c->bias ? c->bias[d] : 0;
    for (int64_t lag = 0; lag < c->W; lag++)
        if (t - lag >= 0 && sequence_of(c, t - lag) == sequence_of(c, t))
            p += (long double)c->w[(d + 1) * c->W - 1 - lag] * c->x[(t - lag) * c->D + d];
    return p;
}

static long double oracle_silu(const dp_conv *c, long double p) {
    return c->silu ? p / (1 + expl(-p)) : p;
}

static long double oracle_slope(const dp_conv *c, long double p) {
    const long double h = 0.5L * (1 + tanhl(p / 2)); /* sigmoid, by another formula than conv.c */
    return c->silu ? h + p * h * (1 - h) : 1;
}

static void oracle(const dp_conv *c, dp_conv_result *r) {
    dp_conv_result_alloc(r, c);
    const int D = c->D, W = c->W;
    long double *dx = calloc((size_t)(c->T * D), sizeof *dx),
                *dw = calloc((size_t)(D * W), sizeof *dw), *db = calloc((size_t)D, sizeof *db);
    for (int64_t t = 0; t < c->T; t++)
        for (int d = 0; d < D; d++) {
            const long double p = oracle_pre(c, t, d);
            r->y[t * D + d] = (double)oracle_silu(c, p);
            if (!c->dy) continue;
            const long double g = c->dy[t * D + d] * oracle_slope(c, p);
            db[d] += g;
            for (int64_t lag = 0; lag < W; lag++)
                if (t - lag >= 0 && sequence_of(c, t - lag) == sequence_of(c, t)) {
                    dx[(t - lag) * D + d] += g * c->w[d * W + W - 1 - lag];
                    dw[d * W + W - 1 - lag] += g * c->x[(t - lag) * D + d];
                }
        }
    for (int64_t i = 0; r->dx && i < c->T * D; i++)
        r->dx[i] = (double)dx[i];
    for (int i = 0; r->dw && i < D * W; i++)
        r->dw[i] = (double)dw[i];
    for (int i = 0; r->dbias && i < D; i++)
        r->dbias[i] = (double)db[i];
    free(dx);
    free(dw);
    free(db);
}

/* |got - want| <= bound (+ extra, may be NULL) everywhere; returns the largest share of the bound
 * that was used. */
static double within(const dp_conv *c, const dp_conv_result *got, const dp_conv_result *want,
                     const dp_conv_result *bound, const dp_conv_result *extra, const char *what,
                     double worst[NTENSOR]) {
    tensor g[NTENSOR], w[NTENSOR], b[NTENSOR], x[NTENSOR];
    tensors(c, got, g);
    tensors(c, want, w);
    tensors(c, bound, b);
    if (extra) tensors(c, extra, x);
    double all = 0;
    for (int k = 0; k < NTENSOR; k++)
        for (int64_t i = 0; i < g[k].n; i++) {
            const double lim = b[k].x[i] + (extra ? x[k].x[i] : 0),
                         err = fabs(g[k].x[i] - w[k].x[i]);
            if (!(err <= lim)) {
                gt_fail(__FILE__, __LINE__, "within bound",
                        "%s: %s[%lld] = %a, want %a, error %g, bound %g (T %lld D %d W %d Nseq %d)",
                        what, g[k].name, (long long)i, g[k].x[i], w[k].x[i], err, lim,
                        (long long)c->T, c->D, c->W, c->Nseq);
                return INFINITY;
            }
            const double share = lim > 0 ? err / lim : 0;
            if (worst && share > worst[k]) worst[k] = share;
            all = share > all ? share : all;
        }
    return all;
}

/* Layouts that matter: whole, aligned, cuts inside ranks, one-token and empty sequences. T = 24. */
static const int64_t whole[] = {0, 24}, inside[] = {0, 5, 6, 17, 24}, aligned[] = {0, 6, 12, 24},
                     specks[] = {0, 0, 1, 2, 2, 3, 11, 11, 24, 24};
static const struct {
    const int64_t *cu;
    int Nseq;
} layouts[] = {{whole, 1}, {inside, 4}, {aligned, 3}, {specks, 9}};
enum { NLAYOUT = sizeof layouts / sizeof *layouts };

typedef void (*visit)(const dp_conv *c, const char *what);

static void for_all_shapes(visit f) {
    for (int l = 0; l < NLAYOUT; l++)
        for (int W = 1; W <= 8; W++)
            for (int k = 0; k < 4; k++) {
                const shape s = {24, 3, W, k & 1, k >> 1, 1, layouts[l].cu, layouts[l].Nseq, 0};
                dp_conv c = make(&s, 100 + (uint64_t)W);
                char what[64];
                sprintf(what, "layout %d W %d silu %d bias %d", l, W, k & 1, k >> 1);
                f(&c, what);
                dp_conv_free(&c);
            }
}

static void against_oracle(const dp_conv *c, const char *what) {
    dp_conv_result o, r, b, t, rad;
    oracle(c, &o);
    dp_conv_result_alloc(&r, c);
    dp_conv_result_alloc(&b, c);
    dp_conv_result_alloc(&t, c);
    dp_conv_result_alloc(&rad, c);
    dp_conv_run(c, &r);
    dp_conv_bound(c, DP_BASE_FP64, 1, &b);
    within(c, &r, &o, &b, NULL, what, NULL);
    dp_conv_truth(c, 128, &t, &rad);
    within(c, &o, &t, &b, NULL, what,
           NULL); /* long double also rounds: the fp64 bound has room for it */
    CHECK(c->bias ? r.dbias != NULL : r.dbias == NULL, "%s: dbias exists iff bias does", what);
    dp_conv_result_free(&o);
    dp_conv_result_free(&r);
    dp_conv_result_free(&b);
    dp_conv_result_free(&t);
    dp_conv_result_free(&rad);
}
DP_TEST(conv, run_and_truth_equal_the_naive_oracle) { for_all_shapes(against_oracle); }

/* The gradient formulas themselves: central differences of the oracle's loss in long double. Step
 * 1e-5, curvature terms ~ 1e-10. */
DP_TEST(conv, gradients_are_derivatives) {
    const shape s = {24, 3, 4, 1, 1, 1, inside, 4, 0};
    dp_conv c = make(&s, 5);
    dp_conv_result r;
    dp_conv_result_alloc(&r, &c);
    dp_conv_run(&c, &r);
    const struct {
        const char *name;
        double *in, *grad;
        int64_t n;
    } v[] = {{"dx", c.x, r.dx, 72}, {"dw", c.w, r.dw, 12}, {"dbias", c.bias, r.dbias, 3}};
    for (int k = 0; k < 3; k++)
        for (int64_t i = 0; i < v[k].n; i++) {
            const double keep = v[k].in[i], h = 0x1p-17;
            long double loss[2] = {0, 0};
            for (int side = 0; side < 2; side++) {
                v[k].in[i] = keep + (side ? h : -h);
                for (int64_t t = 0; t < c.T; t++)
                    for (int d = 0; d < c.D; d++)
                        loss[side] += c.dy[t * c.D + d] * oracle_silu(&c, oracle_pre(&c, t, d));
            }
            v[k].in[i] = keep;
            const double slope = (double)((loss[1] - loss[0]) / (2 * h));
            CHECK(fabs(slope - v[k].grad[i]) <= 1e-8, "%s[%lld] = %.12g, difference quotient %.12g",
                  v[k].name, (long long)i, v[k].grad[i], slope);
        }
    dp_conv_result_free(&r);
    dp_conv_free(&c);
}

static void ranks_equal_unsplit(const dp_conv *c, const char *what) {
    for (int N = 1; N <= 24; N++) {
        if (24 % N) continue;
        for (int pol = 0; pol < 3; pol++) {
            dp_conv_result one, many, b1, bN;
            dp_conv_result *all[] = {&one, &many, &b1, &bN};
            for (int i = 0; i < 4; i++)
                dp_conv_result_alloc(all[i], c);
            REQUIRE(dp_conv_ranks(c, 1, (dp_base)pol, &one, NULL) == DP_OK, "%s", what);
            REQUIRE(dp_conv_ranks(c, N, (dp_base)pol, &many, NULL) == DP_OK, "%s", what);
            dp_conv_bound(c, (dp_base)pol, 1, &b1);
            dp_conv_bound(c, (dp_base)pol, N, &bN);
            char text[96];
            sprintf(text, "%s policy %d N %d", what, pol, N);
            within(c, &many, &one, &b1, &bN, text, NULL);
            CHECK(!memcmp(one.y, many.y, (size_t)(c->T * c->D) * sizeof *one.y),
                  "%s: y depends on the split", text);
            for (int i = 0; i < 4; i++)
                dp_conv_result_free(all[i]);
        }
    }
}
/* N = 12 and 24 have L = 2 and 1: with W up to 8 the halo spans as many as 7 ranks. */
DP_TEST(conv, ranks_equal_unsplit_for_every_N) { for_all_shapes(ranks_equal_unsplit); }

/* Random lengths, widths and cuts (empty sequences included) against the oracle, every N. */
DP_TEST(conv, random_layouts_equal_the_oracle) {
    dp_rng g;
    dp_rng_seed(&g, 8, 0);
    for (int k = 0; k < 300; k++) {
        const int64_t T = 1 + pick(&g, 40);
        int64_t cu[6] = {0};
        const int Nseq = 1 + (int)pick(&g, 5);
        for (int i = 1; i <= Nseq; i++)
            cu[i] = i == Nseq ? T : cu[i - 1] + pick(&g, T + 1 - cu[i - 1]);
        const shape s = {T, 2, 1 + (int)pick(&g, 8), k & 1, k >> 1 & 1, 1, cu, Nseq, 0};
        dp_conv c = make(&s, 1000 + (uint64_t)k);
        dp_conv_result o, r, b;
        oracle(&c, &o);
        dp_conv_result_alloc(&r, &c);
        dp_conv_result_alloc(&b, &c);
        for (int N = 1; N <= T; N++) {
            if (T % N) continue;
            REQUIRE(dp_conv_ranks(&c, N, DP_BASE_FP64, &r, NULL) == DP_OK, "layout %d", k);
            dp_conv_bound(&c, DP_BASE_FP64, N, &b);
            within(&c, &r, &o, &b, NULL, "random layout", NULL);
        }
        dp_conv_result_free(&o);
        dp_conv_result_free(&r);
        dp_conv_result_free(&b);
        dp_conv_free(&c);
    }
}

DP_TEST(conv, halo_spans_ranks_when_they_are_short) {
    const int64_t cu[] = {0, 16};
    const shape s = {16, 2, 7, 1, 1, 1, cu, 1, 0};
    dp_conv c = make(&s, 77);
    dp_conv_result o, r, b;
    oracle(&c, &o);
    dp_conv_result_alloc(&r, &c);
    dp_conv_result_alloc(&b, &c);
    REQUIRE(dp_conv_ranks(&c, 8, DP_BASE_FP64, &r, NULL) == DP_OK, "L = 2, W = 7");
    dp_conv_bound(&c, DP_BASE_FP64, 8, &b);
    within(&c, &r, &o, &b, NULL, "L 2 W 7", NULL);
    /* x_0 reaches y_6, three ranks on; dy_6 reaches dx_0 */
    const double y6 = r.y[6 * 2], y7 = r.y[7 * 2], dx0 = r.dx[0];
    c.x[0] += 1;
    REQUIRE(dp_conv_ranks(&c, 8, DP_BASE_FP64, &r, NULL) == DP_OK, "run");
    CHECK(r.y[6 * 2] != y6 && r.y[7 * 2] == y7, "y_6 must read x_0 and y_7 must not");
    c.x[0] -= 1;
    c.dy[6 * 2] += 1;
    REQUIRE(dp_conv_ranks(&c, 8, DP_BASE_FP64, &r, NULL) == DP_OK, "run");
    CHECK(r.dx[0] != dx0, "dx_0 must read dy_6");
    dp_conv_result_free(&o);
    dp_conv_result_free(&r);
    dp_conv_result_free(&b);
    dp_conv_free(&c);
}

/* A sequence that starts inside a rank must not see the tokens before it, nor send them gradient.
 * Change everything else, and its own results keep their bits. */
DP_TEST(conv, no_leak_between_sequences) {
    for (int l = 1; l < NLAYOUT; l++)
        for (int q = 0; q < layouts[l].Nseq; q++)
            for (int N = 1; N <= 24; N++) {
                if (24 % N) continue;
                const shape s = {24, 2, 7, 1, 0, 1, layouts[l].cu, layouts[l].Nseq, 0};
                dp_conv c = make(&s, 9);
                dp_conv_result before, after;
                dp_conv_result_alloc(&before, &c);
                dp_conv_result_alloc(&after, &c);
                REQUIRE(dp_conv_ranks(&c, N, DP_BASE_FP32, &before, NULL) == DP_OK, "run");
                const int64_t from = c.cu[q] * c.D, to = c.cu[q + 1] * c.D;
                for (int64_t i = 0; i < c.T * c.D; i++)
                    if (i < from || i >= to) {
                        c.x[i] = NAN;
                        c.dy[i] = NAN;
                    }
                REQUIRE(dp_conv_ranks(&c, N, DP_BASE_FP32, &after, NULL) == DP_OK, "run");
                const size_t n = (size_t)(to - from) * sizeof(double);
                CHECK(!memcmp(before.y + from, after.y + from, n), "layout %d sequence %d N %d: y",
                      l, q, N);
                CHECK(!memcmp(before.dx + from, after.dx + from, n),
                      "layout %d sequence %d N %d: dx", l, q, N);
                dp_conv_result_free(&before);
                dp_conv_result_free(&after);
                dp_conv_free(&c);
            }
}

/* Bounds hold on larger data for inputs of every size. They are tight enough to see an error of 30
 * times the arithmetic's in y or dx. The largest used share is printed and must exceed 1/30 there.
 * For dw and dbias, which sum thousands of random errors, it must exceed the root of 1/30. */
DP_TEST(conv, bounds_hold_and_are_tight_enough) {
    static const char *const names[] = {"fp64", "fp32", "bf16"};
    const int64_t cu[] = {0, 700, 701, 2048};
    for (int pol = 0; pol < 3; pol++) {
        double worst[NTENSOR] = {0};
        for (int k = 0; k < 6; k++) {
            static const double scales[] = {0.1, 1, 10};
            const shape s = {2048, 8, 4, k % 2 == 0, 1, 1, cu, 3, scales[k / 2]};
            dp_conv c = make(&s, 40 + (uint64_t)k);
            for (int64_t i = 0; pol == 0 && i < c.T * c.D; i++)
                c.x[i] *= 1 + 0x1p-50 * (double)(i % 7); /* fp64: use all bits */
            dp_conv_result t, rad, r, b;
            dp_conv_result *all[] = {&t, &rad, &r, &b};
            for (int i = 0; i < 4; i++)
                dp_conv_result_alloc(all[i], &c);
            dp_conv_truth(&c, 160, &t, &rad);
            for (int N = 1; N <= 8; N *= 8) {
                REQUIRE(dp_conv_ranks(&c, N, (dp_base)pol, &r, NULL) == DP_OK, "run");
                dp_conv_bound(&c, (dp_base)pol, N, &b);
                char what[64];
                sprintf(what, "%s N %d scale %g silu %d", names[pol], N, s.scale, s.silu);
                within(&c, &r, &t, &b, &rad, what, worst);
            }
            for (int i = 0; i < 4; i++)
                dp_conv_result_free(all[i]);
            dp_conv_free(&c);
        }
        printf("  conv %s: error / bound at most y %.3f  dx %.3f  dw %.5f  dbias %.5f\n",
               names[pol], worst[0], worst[1], worst[2], worst[3]);
        CHECK(worst[0] > 1.0 / 30 && worst[1] > 1.0 / 30, "%s: bound of y or dx is loose: %g %g",
              names[pol], worst[0], worst[1]);
        CHECK(worst[2] > 1e-4 && worst[3] > 1e-4, "%s: bound of dw or dbias is loose: %g %g",
              names[pol], worst[2], worst[3]);
    }
}

/* Inputs that fp32 cannot hold, huge and tiny arguments of the sigmoid, subnormal results. */
DP_TEST(conv, bounds_hold_at_the_edges) {
    static const double x[] = {0,      -0.0,   1e-300,  -1e-310,    0x1p-149,  -0x1p-126, 3.3e-39,
                               0.1,    -0.1,   1.0 / 3, -1.2784645, 2.3993573, -17.3,     -60.1,
                               -88.5,  -90.2,  -103.9,  -104.1,     -120,      95.7,      -300.3,
                               -700.2, -708.5, -709.5,  -710,       -745.1,    -746,      800,
                               -1e4,   1e6,    -1e6,    12345.678};
    enum { n = sizeof x / sizeof *x };
    const int64_t cu[] = {0, n};
    for (int W = 1; W <= 2; W++)
        for (int pol = 0; pol < 3; pol++) {
            const shape s = {n, 1, W, 1, W == 2, 1, cu, 1, 0};
            dp_conv c = make(&s, 3);
            memcpy(c.x, x, sizeof x);
            for (int i = 0; i < W; i++)
                c.w[i] = i == W - 1 ? 1 : 0x1p-30;
            for (int i = 0; c.bias && i < 1; i++)
                c.bias[0] = 1e-9;
            for (int i = 0; i < n; i++)
                c.dy[i] = 0.1 * (i + 1);
            dp_conv_result t, rad, r, b;
            dp_conv_result *all[] = {&t, &rad, &r, &b};
            for (int i = 0; i < 4; i++)
                dp_conv_result_alloc(all[i], &c);
            dp_conv_truth(&c, 300, &t, &rad);
            for (int N = 1; N <= n; N *= 2) {
                REQUIRE(dp_conv_ranks(&c, N, (dp_base)pol, &r, NULL) == DP_OK, "run");
                dp_conv_bound(&c, (dp_base)pol, N, &b);
                within(&c, &r, &t, &b, &rad, "edges", NULL);
            }
            for (int i = 0; i < n; i++)
                CHECK(b.y[i] < 1e-1 * (1 + fabs(x[i])), "x = %g: bound %g says nothing", x[i],
                      b.y[i]);
            for (int i = 0; i < 4; i++)
                dp_conv_result_free(all[i]);
            dp_conv_free(&c);
        }
}

/* Operands that fp32 cannot hold: rounding x, w and the product may all err by nearly u in one
 * direction, 3 u together. */
DP_TEST(conv, bound_counts_the_rounding_of_operands) {
    const int64_t cu[] = {0, 512};
    const shape s = {512, 64, 1, 0, 0, 1, cu, 1, 0};
    dp_conv c = make(&s, 31);
    dp_rng g;
    dp_rng_seed(&g, 32, 0);
    for (int64_t i = 0; i < c.T * c.D; i++)
        c.x[i] = 1 + 0.01 * dp_rng_uniform(&g);
    for (int64_t i = 0; i < c.T * c.D; i++)
        c.dy[i] = 1 + 0.01 * dp_rng_uniform(&g);
    for (int i = 0; i < c.D; i++)
        c.w[i] = 1 + 0.01 * dp_rng_uniform(&g);
    dp_conv_result t, rad, r, b;
    dp_conv_result *all[] = {&t, &rad, &r, &b};
    for (int i = 0; i < 4; i++)
        dp_conv_result_alloc(all[i], &c);
    REQUIRE(dp_conv_ranks(&c, 4, DP_BASE_FP32, &r, NULL) == DP_OK, "run");
    dp_conv_bound(&c, DP_BASE_FP32, 4, &b);
    dp_conv_truth(&c, 128, &t, &rad);
    double largest = 0;
    within(&c, &r, &t, &b, &rad, "operands", NULL);
    for (int64_t i = 0; i < c.T * c.D; i++)
        largest = fmax(largest, fabs(r.y[i] - t.y[i]) / fabs(t.y[i]));
    CHECK(largest > 2.2 * 0x1p-24, "inputs too tame: three roundings reach only %g u",
          largest * 0x1p24);
    for (int i = 0; i < 4; i++)
        dp_conv_result_free(all[i]);
    dp_conv_free(&c);
}

/* The radius is a claim about the exact value: low precisions make its arithmetic part visible. */
DP_TEST(conv, truth_lies_within_its_radius_at_any_precision) {
    static const int prec[] = {8, 24, 53, 64, 192};
    for (int l = 0; l < NLAYOUT; l++)
        for (int k = 0; k < 4; k++) {
            const shape s = {24, 4, 5, k & 1, k >> 1, 1, layouts[l].cu, layouts[l].Nseq, 3};
            dp_conv c = make(&s, 60 + (uint64_t)k);
            for (int64_t i = 0; i < c.T * c.D; i++)
                c.x[i] /= 3; /* all 53 bits in use */
            dp_conv_result best, brad, t, rad;
            dp_conv_result *all[] = {&best, &brad, &t, &rad};
            for (int i = 0; i < 4; i++)
                dp_conv_result_alloc(all[i], &c);
            dp_conv_truth(&c, 384, &best, &brad);
            for (int p = 0; p < 5; p++) {
                dp_conv_truth(&c, prec[p], &t, &rad);
                double worst[NTENSOR] = {0};
                within(&c, &t, &best, &rad, &brad, "truth", worst);
                if (prec[p] < 53)
                    CHECK(worst[0] > 1e-3, "%d bits: radius %g times the error is no evidence",
                          prec[p], 1 / worst[0]);
            }
            tensor v[NTENSOR], r[NTENSOR];
            tensors(&c, &t, v);
            tensors(&c, &rad, r);
            for (int i = 0; i < NTENSOR; i++)
                for (int64_t j = 0; j < v[i].n; j++)
                    CHECK(r[i].x[j] <= 0x1.0000001p-53 * fabs(v[i].x[j]) + 1e-300,
                          "192 bits: %s radius %g of %g is more than the last rounding", v[i].name,
                          r[i].x[j], v[i].x[j]);
            for (int i = 0; i < 4; i++)
                dp_conv_result_free(all[i]);
            dp_conv_free(&c);
        }
}

DP_TEST(conv, forward_only_and_refusals) {
    const shape s = {24, 2, 4, 1, 1, 0, inside, 4, 0};
    dp_conv c = make(&s, 1);
    dp_conv_result r, b, t, rad;
    dp_conv_result *all[] = {&r, &b, &t, &rad};
    for (int i = 0; i < 4; i++)
        dp_conv_result_alloc(all[i], &c);
    CHECK(!r.dx && !r.dw && !r.dbias, "no gradients without dy");
    CHECK(dp_conv_ranks(&c, 4, DP_BASE_BF16, &r, NULL) == DP_OK, "forward");
    dp_conv_bound(&c, DP_BASE_BF16, 4, &b);
    dp_conv_truth(&c, 100, &t, &rad);
    within(&c, &r, &t, &b, &rad, "forward only", NULL);
    for (int64_t i = 0; i < c.T * c.D; i++)
        CHECK(r.y[i] == dp_bf16((float)r.y[i]), "y[%lld] is not bf16", (long long)i);
    const int bad[] = {5, 48, 0, -1};
    for (int i = 0; i < 4; i++) {
        dp_err e = {0};
        CHECK(dp_conv_ranks(&c, bad[i], DP_BASE_FP64, &r, &e) == DP_EINPUT &&
                  strstr(e.msg, "ranks"),
              "N = %d: '%s'", bad[i], e.msg);
    }
    for (int i = 0; i < 4; i++)
        dp_conv_result_free(all[i]);
    dp_conv_free(&c);
}

/* A NaN spoils exactly the outputs that read it, and their bounds say so. */
DP_TEST(conv, nan_stays_in_its_window) {
    const shape s = {24, 1, 3, 1, 0, 1, whole, 1, 0};
    dp_conv c = make(&s, 2);
    c.x[10] = NAN;
    dp_conv_result r, b, t, rad;
    dp_conv_result *all[] = {&r, &b, &t, &rad};
    for (int i = 0; i < 4; i++)
        dp_conv_result_alloc(all[i], &c);
    REQUIRE(dp_conv_ranks(&c, 12, DP_BASE_FP32, &r, NULL) == DP_OK, "run");
    dp_conv_bound(&c, DP_BASE_FP32, 12, &b);
    dp_conv_truth(&c, 100, &t, &rad);
    for (int i = 0; i < 24; i++) {
        const int y = i >= 10 && i <= 12, dx = i >= 8 && i <= 12;
        CHECK(isnan(r.y[i]) == y && isnan(t.y[i]) == y && isinf(b.y[i]) == y &&
                  isinf(rad.y[i]) == y,
              "y[%d] %g bound %g", i, r.y[i], b.y[i]);
        CHECK(isnan(r.dx[i]) == dx && isnan(t.dx[i]) == dx && isinf(b.dx[i]) == dx &&
                  isinf(rad.dx[i]) == dx,
              "dx[%d] %g bound %g", i, r.dx[i], b.dx[i]);
    }
    for (int i = 0; i < 4; i++)
        dp_conv_result_free(all[i]);
    dp_conv_free(&c);
}
