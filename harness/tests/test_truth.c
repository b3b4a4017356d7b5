/* harness/tests/test_truth.c - the MPFR truth against a complex-step oracle in quadruple precision,
 * its radii, snapshots and cache.
 *
 * The oracle writes math.md b and c as they stand, in __complex128, from the RAW inputs to one
 * scalar
 *     loss = sum do o o + sum dstate o final_state,
 * and differentiates it entry by entry with the complex step: d loss / dx = Im loss(x + i h) / h,
 * error O(h^2) = 1e-80. It shares no formula with the adjoint of the truth.
 */
#include <math.h>
#include <mpfr.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "complex_step.h"
#include "gt.h"
#include "ref/truth/truth.h"

static uint64_t state;
static double uniform(double lo, double hi) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return lo + (hi - lo) * (double)(state >> 11) * 0x1p-53;
}
static void fill(double *x, int64_t n, double lo, double hi) {
    for (int64_t i = 0; i < n; i++)
        x[i] = uniform(lo, hi);
}

typedef struct {
    const char *name;
    dp_model model;
    int T, H, HV, K, V, R;
    dp_gate gate;
    int gate_params; /* A_log and dt_bias are there */
    dp_beta beta;
    int l2norm, states; /* states: s0 and dstate are there */
    int Nseq;
    int64_t cu[5];
} shape;

static const shape shapes[] = {
    {"gdn", DP_GDN, 5, 1, 1, 3, 2, 1, DP_GATE_LOG, 0, DP_BETA_PLAIN, 0, 0, 1, {0, 5}},
    {"gdn-full",
     DP_GDN,
     6,
     2,
     2,
     3,
     2,
     1,
     DP_GATE_SOFTPLUS,
     1,
     DP_BETA_SIGMOID,
     1,
     1,
     3,
     {0, 4, 4, 6}},
    {"gdn-lb", DP_GDN, 4, 1, 2, 2, 3, 1, DP_GATE_LOWER_BOUND, 1, DP_BETA_SIGMOID2, 1, 1, 1, {0, 4}},
    {"kda", DP_KDA, 5, 1, 1, 3, 2, 1, DP_GATE_LOG, 0, DP_BETA_PLAIN, 1, 1, 1, {0, 5}},
    {"kda-full",
     DP_KDA,
     6,
     1,
     2,
     3,
     4,
     1,
     DP_GATE_SOFTPLUS,
     1,
     DP_BETA_SIGMOID2,
     1,
     1,
     3,
     {0, 0, 2, 6}},
    {"kda-noparams",
     DP_KDA,
     4,
     1,
     1,
     2,
     2,
     1,
     DP_GATE_SOFTPLUS,
     0,
     DP_BETA_SIGMOID,
     0,
     0,
     1,
     {0, 4}},
    {"kda-lb",
     DP_KDA,
     5,
     1,
     2,
     2,
     3,
     1,
     DP_GATE_LOWER_BOUND,
     1,
     DP_BETA_SIGMOID,
     0,
     1,
     2,
     {0, 3, 5}},
    {"kda-lb-noparams",
     DP_KDA,
     3,
     1,
     1,
     2,
     2,
     1,
     DP_GATE_LOWER_BOUND,
     0,
     DP_BETA_PLAIN,
     0,
     0,
     1,
     {0, 3}},
    {"mkda2",
     DP_MKDA,
     5,
     1,
     2,
     3,
     2,
     2,
     DP_GATE_SOFTPLUS,
     1,
     DP_BETA_SIGMOID,
     1,
     1,
     3,
     {0, 2, 2, 5}},
    {"mkda4",
     DP_MKDA,
     4,
     2,
     4,
     3,
     2,
     4,
     DP_GATE_LOWER_BOUND,
     1,
     DP_BETA_SIGMOID2,
     1,
     1,
     2,
     {0, 3, 4}},
    {"mkda4-plain", DP_MKDA, 4, 1, 1, 5, 3, 4, DP_GATE_LOG, 0, DP_BETA_PLAIN, 0, 1, 1, {0, 4}},
    {"one-token", DP_KDA, 1, 1, 1, 3, 2, 1, DP_GATE_SOFTPLUS, 1, DP_BETA_SIGMOID, 1, 1, 1, {0, 1}},
    {"gdn2", DP_GDN2, 5, 1, 1, 3, 2, 1, DP_GATE_LOG, 0, DP_BETA_PLAIN, 0, 0, 1, {0, 5}},
    {"gdn2-full",
     DP_GDN2,
     6,
     1,
     2,
     3,
     4,
     1,
     DP_GATE_SOFTPLUS,
     1,
     DP_BETA_PLAIN,
     1,
     1,
     3,
     {0, 0, 2, 6}},
    {"gdn2-wide-v", DP_GDN2, 4, 2, 2, 3, 19, 1, DP_GATE_LOG, 0, DP_BETA_PLAIN, 1, 1, 1, {0, 4}},
    {"gla", DP_GLA, 6, 1, 2, 3, 4, 1, DP_GATE_SOFTPLUS, 1, DP_BETA_PLAIN, 1, 1, 3, {0, 0, 2, 6}},
    {"ssd", DP_SSD, 5, 2, 2, 3, 19, 1, DP_GATE_LOG, 0, DP_BETA_PLAIN, 0, 1, 1, {0, 5}},
    {"deltaproduct",
     DP_DELTAPRODUCT,
     4,
     1,
     1,
     3,
     2,
     2,
     DP_GATE_LOG,
     0,
     DP_BETA_PLAIN,
     0,
     0,
     1,
     {0, 4}},
    {"deltaproduct-full",
     DP_DELTAPRODUCT,
     5,
     1,
     2,
     3,
     4,
     3,
     DP_GATE_SOFTPLUS,
     1,
     DP_BETA_SIGMOID2,
     1,
     1,
     3,
     {0, 0, 2, 5}},
    {"dplr", DP_DPLR, 5, 1, 1, 3, 2, 1, DP_GATE_LOG, 0, DP_BETA_PLAIN, 0, 0, 1, {0, 5}},
    {"dplr-full",
     DP_DPLR,
     6,
     2,
     2,
     3,
     19,
     1,
     DP_GATE_SOFTPLUS,
     1,
     DP_BETA_PLAIN,
     0,
     1,
     3,
     {0, 0, 2, 6}},
    {"wide-v", DP_KDA, 3, 1, 1, 2, 37, 1, DP_GATE_SOFTPLUS, 1, DP_BETA_SIGMOID, 1, 1, 1, {0, 3}},
};
enum { NSHAPES = sizeof shapes / sizeof *shapes };

static dp_problem problem_of(const shape *s) {
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
    state = 0x9e3779b97f4a7c15u + (uint64_t)(s->T * 131 + s->K * 17 + s->R);
    p.cu = dp_calloc((size_t)s->Nseq + 1, sizeof *p.cu);
    memcpy(p.cu, s->cu, sizeof *p.cu * (size_t)(s->Nseq + 1));
    dp_problem_alloc(&p);
    const int64_t T = p.T, Kg = dp_Kg(&p), states = (int64_t)p.Nseq * p.HV * p.K * p.V;
    const double key = s->l2norm ? 1 : 1 / sqrt(s->K);
    fill(p.q, T * p.H * p.K, -1, 1);
    fill(p.k, T * p.H * p.R * p.K, -key, key);
    fill(p.v, T * p.HV * p.R * p.V, -1, 1);
    if (s->gate == DP_GATE_LOG)
        fill(p.g, T * p.HV * Kg, -1, 0);
    else
        fill(p.g, T * p.HV * Kg, -3, 2);
    if (dp_by_gates(&p)) {
        fill(p.erase, T * p.HV * p.K, 0, 1);
        fill(p.write, T * p.HV * p.V, -0.5, 1);
    } else if (dp_by_rows(&p)) {
        fill(p.lr_a, T * p.HV * p.K, -1, 1);
        fill(p.lr_b, T * p.HV * p.K, -0.5, 0.5);
    } else if (p.beta && s->beta == DP_BETA_PLAIN)
        fill(p.beta, T * p.HV * p.R, 0, 2.0 / p.R);
    else if (p.beta)
        fill(p.beta, T * p.HV * p.R, -3, 1);
    p.dout = dp_doubles(T * p.HV * p.V);
    fill(p.dout, T * p.HV * p.V, -1, 1);
    if (s->gate_params) {
        p.A_log = dp_doubles(p.HV);
        p.dt_bias = dp_doubles(p.HV * Kg);
        fill(p.A_log, p.HV, -1, 0.5);
        fill(p.dt_bias, p.HV * Kg, -1, 1);
    }
    if (s->states) {
        p.s0 = dp_doubles(states);
        p.dstate = dp_doubles(states);
        fill(p.s0, states, -1, 1);
        fill(p.dstate, states, -1, 1);
    }
    return p;
}

/* ------------------------------------------------------------------------------------------------
 * oracle */

static c128 c_beta(const dp_problem *p, const bump *b, const double *x) {
    if (p->beta_form == DP_BETA_PLAIN) return in(b, x);
    return (p->beta_form == DP_BETA_SIGMOID2 ? 2 : 1) * c_sigmoid(in(b, x));
}

static void c_row(const dp_problem *p, const bump *b, const double *x, c128 *y) {
    c128 ss = (f128)DP_L2_EPS;
    for (int i = 0; i < p->K; i++) {
        y[i] = in(b, &x[i]);
        ss += y[i] * y[i];
    }
    for (int i = 0; i < p->K && p->l2norm; i++)
        y[i] /= csqrtq(ss);
}

/* One token of one head: S is updated, o written. k [R][K], q [K], u [R][V]. */
static void c_token(const dp_problem *p, const bump *b, int64_t t, int hv, c128 *S, c128 *o) {
    const int K = p->K, V = p->V, R = p->R, h = hv / dp_G(p);
    c128 q[K], k[R * K], u[R * V];
    c_row(p, b, p->q + (t * p->H + h) * K, q);
    for (int j = 0; j < R; j++)
        c_row(p, b, p->k + ((t * p->H + h) * R + j) * K, k + j * K);
    c128 read[V]; /* lr_a S, before the decay */
    for (int v = 0; v < V; v++) {
        read[v] = 0;
        for (int i = 0; i < K && p->lr_a; i++)
            read[v] += in(b, &p->lr_a[(t * p->HV + hv) * K + i]) * S[i * V + v];
    }
    for (int i = 0; i < K; i++) {
        const c128 d = cexpq(c_gate(p, b, t * p->HV + hv, i));
        for (int v = 0; v < V; v++)
            S[i * V + v] *= d;
    }
    for (int j = 0; j < R; j++)
        for (int v = 0; v < V; v++) {
            const int64_t row = (t * p->HV + hv) * R + j;
            c128 e = in(b, &p->v[row * V + v]);
            if (!dp_erases(p) || p->lr_b) { /* S <- S + k' v, + lr_b' read */
                u[v] = e;
                for (int i = 0; i < K && p->lr_b; i++)
                    S[i * V + v] += in(b, &p->lr_b[row * K + i]) * read[v];
                continue;
            }
            if (!p->beta) { /* S <- S + k' (write o v - (erase o k) S) */
                e *= in(b, &p->write[row * V + v]);
                for (int i = 0; i < K; i++)
                    e -= in(b, &p->erase[row * K + i]) * k[i] * S[i * V + v];
                u[v] = e;
                continue;
            }
            for (int i = 0; i < K; i++)
                e -= k[j * K + i] * S[i * V + v];
            u[j * V + v] = c_beta(p, b, &p->beta[row]) * e;
            for (int i = 0; i < K && dp_in_turn(p); i++)
                S[i * V + v] += k[j * K + i] * u[j * V + v];
        }
    for (int v = 0; v < V; v++) {
        o[v] = 0;
        for (int i = 0; i < K; i++) {
            for (int j = 0; j < R && !dp_in_turn(p); j++)
                S[i * V + v] += k[j * K + i] * u[j * V + v];
            o[v] += q[i] * S[i * V + v];
        }
        o[v] *= (f128)p->scale;
    }
}

/* o and final_state (either may be NULL) and the loss. */
static c128 c_run(const dp_problem *p, const bump *b, c128 *o_out, c128 *S_out) {
    const int64_t KV = (int64_t)p->K * p->V;
    c128 S[KV], o[p->V], loss = 0;
    for (int64_t row = 0; row < p->Nseq * p->HV; row++) {
        const int seq = (int)(row / p->HV), hv = (int)(row % p->HV);
        for (int64_t i = 0; i < KV; i++)
            S[i] = p->s0 ? in(b, &p->s0[row * KV + i]) : 0;
        for (int64_t t = p->cu[seq]; t < p->cu[seq + 1]; t++) {
            c_token(p, b, t, hv, S, o);
            for (int v = 0; v < p->V; v++) {
                loss += (f128)p->dout[(t * p->HV + hv) * p->V + v] * o[v];
                if (o_out) o_out[(t * p->HV + hv) * p->V + v] = o[v];
            }
        }
        for (int64_t i = 0; i < KV; i++) {
            if (p->dstate) loss += (f128)p->dstate[row * KV + i] * S[i];
            if (S_out) S_out[row * KV + i] = S[i];
        }
    }
    return loss;
}

/* The right values of field i of the results: [n]. */
static f128 *oracle_field(const dp_problem *p, int field, int64_t n) {
    f128 *y = dp_calloc((size_t)n, sizeof *y);
    const bump none = {NULL, 0};
    if (field < 2) {
        c128 *z = dp_calloc((size_t)n, sizeof *z);
        c_run(p, &none, field == 0 ? z : NULL, field == 1 ? z : NULL);
        for (int64_t i = 0; i < n; i++)
            y[i] = crealq(z[i]);
        free(z);
        return y;
    }
    const double *x = dp_input_of(p, dp_result_fields[field].of);
    for (int64_t i = 0; i < n; i++) {
        const bump b = {x + i, 1e-40Q};
        y[i] = cimagq(c_run(p, &b, NULL, NULL)) / b.h;
    }
    return y;
}

/* max |hi + lo - want| / max |want| */
static double ball_error(const dp_ball *b, const f128 *want) {
    f128 err = 0, size = 0;
    for (int64_t i = 0; i < b->rows * b->width; i++) {
        const f128 e = fabsq((f128)b->hi[i] + b->lo[i] - want[i]), s = fabsq(want[i]);
        if (!(e <= err)) err = e;
        if (s > size) size = s;
    }
    return (double)(size > 0 ? err / size : err);
}

DP_TEST(truth, agrees_with_complex_step_oracle) {
    for (int s = 0; s < NSHAPES; s++) {
        dp_problem p = problem_of(&shapes[s]);
        dp_err e = {0};
        REQUIRE(dp_problem_check(&p, 0, &e) == DP_OK, "%s: %s", shapes[s].name, e.msg);
        dp_truth t;
        const dp_truth_request rq = {.bits = 192, .backward = 1};
        REQUIRE(dp_truth_run(&p, &rq, &t, &e) == DP_OK, "%s: %s", shapes[s].name, e.msg);
        for (int f = 0; f < DP_NRESULTS; f++) {
            const dp_ball *b = &t.field[f];
            int64_t rows, width;
            dp_result_shape(&p, f, &rows, &width);
            CHECK(b->rows == rows && (!rows || b->width == width), "%s %s: shape", shapes[s].name,
                  dp_result_fields[f].name);
            if (!rows || (f == DP_RESULT_DS0 && !p.s0))
                continue; /* ds0 without s0 has no entry to step */
            f128 *want = oracle_field(&p, f, rows * width);
            const double err = ball_error(b, want);
            CHECK(err <= 1e-30, "%s %s: relative error %g", shapes[s].name,
                  dp_result_fields[f].name, err);
            free(want);
        }
        dp_truth_free(&t);
        dp_problem_free(&p);
    }
}

/* Largest error of a row over its radius. */
static double over_radius(const dp_ball *b, const f128 *want) {
    f128 worst = 0;
    for (int64_t r = 0; r < b->rows; r++) {
        f128 square = 0;
        for (int64_t i = r * b->width; i < (r + 1) * b->width; i++) {
            const f128 e = (f128)b->hi[i] + b->lo[i] - want[i];
            square += e * e;
        }
        const f128 over = sqrtq(square) / (b->rad[r] + 1e-300Q);
        if (!(over <= worst)) worst = over;
    }
    return (double)worst;
}

/* Tokens that grow the state by up to e^0.5, in MPFR at 64 bits and in double-double. */
DP_TEST(truth, log_decays_above_0_agree_with_the_oracle_inside_their_radius) {
    for (int s = 0; s < NSHAPES; s++) {
        if (shapes[s].gate != DP_GATE_LOG) continue;
        dp_problem p = problem_of(&shapes[s]);
        dp_err e = {0};
        fill(p.g, dp_input_count(&p, DP_INPUT_G), -0.3, 0.5);
        REQUIRE(dp_problem_check(&p, 0, &e) == DP_OK, "%s: %s", shapes[s].name, e.msg);
        for (int dd = 0; dd < (dp_truth_dd_refuses(&p) ? 1 : 2); dd++) {
            dp_truth t;
            const dp_truth_request rq = {
                .kind = dd ? DP_TRUTH_DD : DP_TRUTH_MPFR, .bits = 64, .backward = 1};
            REQUIRE(dp_truth_run(&p, &rq, &t, &e) == DP_OK, "%s: %s", shapes[s].name, e.msg);
            for (int f = 0; f < DP_NRESULTS; f++) {
                const dp_ball *b = &t.field[f];
                if (!b->rows || (f == DP_RESULT_DS0 && !p.s0)) continue;
                f128 *want = oracle_field(&p, f, b->rows * b->width);
                const double over = over_radius(b, want), err = ball_error(b, want);
                CHECK(over <= 1 && err <= (dd ? 1e-28 : 1e-17), "%s %s: %g of its radius, %g",
                      shapes[s].name, dp_result_fields[f].name, over, err);
                free(want);
            }
            dp_truth_free(&t);
        }
        p.g[0] = 21;
        CHECK(dp_truth_dd_refuses(&p), "%s: a step that grows by e^21", shapes[s].name);
        dp_problem_free(&p);
    }
}

DP_TEST(truth, ds0_without_s0_is_that_of_a_zero_s0) {
    dp_problem p = problem_of(&shapes[7]);
    dp_truth t, z;
    const dp_truth_request rq = {.bits = 192, .backward = 1};
    REQUIRE(!p.s0 && dp_truth_run(&p, &rq, &t, NULL) == DP_OK, "run");
    p.s0 = dp_doubles((int64_t)p.HV * p.K * p.V);
    REQUIRE(dp_truth_run(&p, &rq, &z, NULL) == DP_OK, "run");
    CHECK(!memcmp(t.field[DP_RESULT_DS0].hi, z.field[DP_RESULT_DS0].hi,
                  sizeof(double) *
                      (size_t)(t.field[DP_RESULT_DS0].rows * t.field[DP_RESULT_DS0].width)),
          "ds0 differs");
    f128 *want = oracle_field(&p, 9, z.field[DP_RESULT_DS0].rows * z.field[DP_RESULT_DS0].width);
    CHECK(ball_error(&z.field[DP_RESULT_DS0], want) <= 1e-30, "ds0: %g",
          ball_error(&z.field[DP_RESULT_DS0], want));
    free(want);
    dp_truth_free(&t);
    dp_truth_free(&z);
    dp_problem_free(&p);
}

/* ------------------------------------------------------------------------------------------------
 * radii */

static const dp_ball *ball_of(const dp_truth *t, int i,
                              const char **name) { /* 0..9 fields, then snapshots */
    static const char *const more[] = {"S_cut", "dS_cut", "M_seg"};
    *name = i < DP_NRESULTS ? dp_result_fields[i].name : more[i - DP_NRESULTS];
    return i < DP_NRESULTS        ? &t->field[i]
           : i == DP_NRESULTS     ? &t->S_cut
           : i == DP_NRESULTS + 1 ? &t->dS_cut
                                  : &t->M_seg;
}
enum { NBALLS = 13 };

static f128 row_norm(const dp_ball *a, const dp_ball *b,
                     int64_t row) { /* |a - b|_2; b NULL: |a|_2 */
    f128 s = 0;
    for (int64_t i = row * a->width; i < (row + 1) * a->width; i++) {
        const f128 d =
            b ? ((f128)a->hi[i] - b->hi[i]) + ((f128)a->lo[i] - b->lo[i]) : (f128)a->hi[i];
        s += d * d;
    }
    return sqrtq(s);
}

/* Largest |a - b| / (scale * rad_a + rad_b) over rows; NaN counts as infinite. */
static double worst_ratio(const dp_ball *a, const dp_ball *b, double scale) {
    double worst = 0;
    for (int64_t r = 0; r < a->rows; r++) {
        const f128 d = row_norm(a, b, r), rad = (f128)scale * a->rad[r] + b->rad[r];
        const double ratio = d == 0 ? 0 : (double)(d / rad);
        if (!(ratio <= worst)) worst = isnan(ratio) ? INFINITY : ratio;
    }
    return worst;
}

/* Largest rad / max row norm of the ball. */
static double relative_radius(const dp_ball *b) {
    double rad = 0, size = 0;
    for (int64_t r = 0; r < b->rows; r++) {
        if (!(b->rad[r] <= rad)) rad = b->rad[r];
        size = fmax(size, (double)row_norm(b, NULL, r));
    }
    return size > 0 ? rad / size : rad;
}

static const shape long_shapes[] = {
    {"gdn-long",
     DP_GDN,
     150,
     1,
     2,
     12,
     20,
     1,
     DP_GATE_SOFTPLUS,
     1,
     DP_BETA_SIGMOID2,
     1,
     1,
     3,
     {0, 100, 100, 150}},
    {"kda-long",
     DP_KDA,
     150,
     2,
     2,
     12,
     20,
     1,
     DP_GATE_SOFTPLUS,
     1,
     DP_BETA_SIGMOID,
     1,
     1,
     2,
     {0, 97, 150}},
    {"mkda-long",
     DP_MKDA,
     100,
     1,
     2,
     12,
     17,
     4,
     DP_GATE_LOWER_BOUND,
     1,
     DP_BETA_PLAIN,
     1,
     1,
     1,
     {0, 100}},
    {"kda-plain", DP_KDA, 150, 1, 1, 8, 8, 1, DP_GATE_LOG, 0, DP_BETA_PLAIN, 0, 0, 1, {0, 150}},
};
static const shape gdn2_long = {"gdn2",           DP_GDN2, 100,           1, 2, 4, 3,       1,
                                DP_GATE_SOFTPLUS, 1,       DP_BETA_PLAIN, 1, 1, 1, {0, 100}};
static const shape gla_long = {"gla", DP_GLA,        100, 1, 2, 4,       3, 1, DP_GATE_SOFTPLUS,
                               1,     DP_BETA_PLAIN, 1,   1, 1, {0, 100}};
static const shape dplr_long = {"dplr",           DP_DPLR, 100,           2, 2, 4, 3,       1,
                                DP_GATE_SOFTPLUS, 1,       DP_BETA_PLAIN, 0, 1, 1, {0, 100}};
static const shape *const MPFR_ALONE[] = {&gdn2_long, &gla_long, &dplr_long};
enum { NLONG = sizeof long_shapes / sizeof *long_shapes };
static const int64_t long_cut[] = {20, 64, 97};

static dp_status run_long(const dp_problem *p, int bits, int threads, dp_truth *t) {
    const dp_truth_request rq = {
        .bits = bits, .backward = 1, .ncut = 3, .cut = long_cut, .want_M = 1, .threads = threads};
    return dp_truth_run(p, &rq, t, NULL);
}

/* Far below what error / radius is seen to be. Sums over all tokens add bounds where errors cancel,
 * so theirs is smaller. */
static double least_ratio(int f) {
    return f == DP_RESULT_DA_LOG || f == DP_RESULT_DDT_BIAS ? 1e-10 : 1e-6;
}

/* At 64 bits the rounding errors are 2^128 times those of the 192-bit run and hi + lo holds them
 * all. */
DP_TEST(truth, radius_covers_the_difference_between_precisions) {
    for (int s = 0; s < NLONG + 3; s++) {
        const shape *one = s < NLONG ? &long_shapes[s] : MPFR_ALONE[s - NLONG];
        dp_problem p = problem_of(one);
        dp_truth want;
        REQUIRE(run_long(&p, 384, 0, &want) == DP_OK, "run");
        const int bits[] = {64, 80, 192};
        for (int i = 0; i < 3; i++) {
            dp_truth got;
            REQUIRE(run_long(&p, bits[i], 0, &got) == DP_OK, "run");
            for (int f = 0; f < NBALLS; f++) {
                const char *name;
                const dp_ball *a = ball_of(&got, f, &name), *b = ball_of(&want, f, &name);
                if (!a->rows) continue;
                const double ratio = worst_ratio(a, b, 1), rel = relative_radius(a);
                CHECK(ratio <= 1, "%s %s at %d bits: error / radius %g", one->name, name, bits[i],
                      ratio);
                if (bits[i] == 192)
                    CHECK(rel <= 1e-28, "%s %s: relative radius %g at 192 bits", one->name, name,
                          rel);
                if (bits[i] != 64) continue;
                CHECK(ratio >= least_ratio(f), "%s %s: error / radius %g: no error was measured",
                      one->name, name, ratio);
                if (getenv("DP_TRUTH_RATIOS"))
                    printf("%-10s %-12s error / radius %8.1e   radius / size %8.1e (64 bits)\n",
                           one->name, name, ratio, rel);
            }
            dp_truth_free(&got);
        }
        dp_truth_free(&want);
        dp_problem_free(&p);
    }
}

/* The check above sees a radius that is too small: with radii scaled down it reports a violation in
 * every tensor. */
static void small_radii_are_caught(const shape *of) {
    dp_problem p = problem_of(of);
    dp_truth got, want;
    REQUIRE(run_long(&p, 64, 0, &got) == DP_OK && run_long(&p, 384, 0, &want) == DP_OK, "run");
    for (int f = 0; f < NBALLS; f++) {
        const char *name;
        const dp_ball *a = ball_of(&got, f, &name), *b = ball_of(&want, f, &name);
        if (!a->rows) continue;
        CHECK(worst_ratio(a, b, least_ratio(f)) > 1, "%s: radius * %g still covers the error", name,
              least_ratio(f));
    }
    dp_truth_free(&got);
    dp_truth_free(&want);
    dp_problem_free(&p);
}

DP_TEST(truth, radius_check_catches_a_radius_that_is_too_small) {
    small_radii_are_caught(&long_shapes[1]);
    small_radii_are_caught(&gdn2_long);
    small_radii_are_caught(&gla_long);
    small_radii_are_caught(&dplr_long);
}

/* Problems that make one source of error large against all others, so that a radius without its
 * term is too small. `constant`: every entry of a tensor is the same number. So a sum adds the same
 * term again and again and rounds alike within a binade. Its error grows with the number of terms
 * instead of its root. */
typedef struct {
    const char *name;
    int T, K, V, R, l2norm, constant;
    dp_gate gate;
    double g, beta, v;
} stress;
static const stress stresses[] = {
    {"errors live on", 20000, 1, 1, 1, 0, 0, DP_GATE_LOG, -1e-5, 1e-5, 1e-3},
    {"errors live on, l2", 10000, 2, 1, 1, 1, 0, DP_GATE_LOG, -1e-5, 1e-5, 1e-3},
    {"one reading token, channels", 1, 10000, 1, 1, 0, 1, DP_GATE_LOG, -0.1, 0, 1},
    {"one reading token, l2", 1, 10000, 1, 1, 1, 1, DP_GATE_LOG, -0.1, 0, 1},
    {"one reading token, columns", 1, 1, 30000, 1, 0, 1, DP_GATE_LOG, -0.1, 0, 1},
    {"sums over channels", 3, 10000, 1, 1, 0, 1, DP_GATE_LOG, -0.1, 1, 1e-3},
    {"sums over channels, l2", 3, 10000, 1, 1, 1, 1, DP_GATE_LOG, -0.1, 1, 1e-3},
    {"sums over columns", 3, 1, 30000, 1, 0, 1, DP_GATE_LOG, -0.1, 1, 1},
    {"sums over keys", 3, 2, 2, 400, 0, 1, DP_GATE_LOG, -0.1, 1, 1},
    {"expanding steps", 40, 3, 2, 4, 0, 0, DP_GATE_LOG, -1e-3, 4, 1},
    {"strong gate", 1, 2, 2, 1, 0, 0, DP_GATE_SOFTPLUS, 300, 0, 0},
    {"saturated gate", 1, 2, 2, 1, 0, 0, DP_GATE_LOWER_BOUND, -600, 0, 0},
};

static void fill_about(double *x, int64_t n, double lo, double hi, int constant) {
    if (constant) lo = hi = uniform(lo, hi);
    fill(x, n, lo, hi);
}

static dp_problem stress_problem(const stress *s, int seed) {
    const shape base = {
        s->name, s->R > 1 ? DP_MKDA : DP_KDA, s->T,          1,         1, s->K, s->V,     s->R,
        s->gate, s->gate != DP_GATE_LOG,      DP_BETA_PLAIN, s->l2norm, 1, 1,    {0, s->T}};
    dp_problem p = problem_of(&base);
    const int64_t T = s->T, K = s->K, V = s->V, R = s->R;
    const double key = 1 / sqrt((double)K);
    state += (uint64_t)seed;
    p.scale = 1;
    fill_about(p.q, T * K, 0.9 * key, key, s->constant);
    fill_about(p.k, T * R * K, 0.9 * key, key, s->constant);
    fill_about(p.v, T * R * V, 0, s->v, s->constant);
    fill_about(p.g, T * K, s->gate == DP_GATE_LOG ? s->g : 0.9 * s->g,
               s->gate == DP_GATE_LOG ? 0 : s->g, s->constant);
    fill_about(p.beta, T * R, 0.5 * s->beta / (double)R, s->beta / (double)R, s->constant);
    fill_about(p.s0, K * V, 0.9, 1, s->constant);
    fill_about(p.dout, T * V, 0, 1e-3, s->constant);
    fill_about(p.dstate, K * V, 0.9, 1, s->constant);
    return p;
}

/* Largest error / radius of each tensor over the seeds. */
static void stress_ratios(const stress *s, int seed, double *ratio) {
    dp_problem p = stress_problem(s, seed);
    dp_truth got, want;
    const dp_truth_request low = {.bits = 64, .backward = 1, .want_M = p.K < 10},
                           high = {.bits = 256, .backward = 1, .want_M = p.K < 10};
    REQUIRE(dp_truth_run(&p, &low, &got, NULL) == DP_OK &&
                dp_truth_run(&p, &high, &want, NULL) == DP_OK,
            "run");
    for (int f = 0; f < NBALLS; f++) {
        const char *name;
        const dp_ball *a = ball_of(&got, f, &name);
        if (a->rows) ratio[f] = fmax(ratio[f], worst_ratio(a, ball_of(&want, f, &name), 1));
    }
    dp_truth_free(&got);
    dp_truth_free(&want);
    dp_problem_free(&p);
}

DP_TEST(truth, radius_covers_each_source_of_error) {
    for (size_t s = 0; s < sizeof stresses / sizeof *stresses; s++) {
        double ratio[NBALLS] = {0};
        for (int seed = 0; seed < (stresses[s].T > 100 ? 1 : 3); seed++)
            stress_ratios(&stresses[s], seed, ratio);
        for (int f = 0; f < NBALLS; f++) {
            const char *name;
            ball_of(&(dp_truth){0}, f, &name);
            CHECK(ratio[f] <= 1, "%s, %s: error / radius %g", stresses[s].name, name, ratio[f]);
            if (ratio[f] > 0 && getenv("DP_TRUTH_RATIOS"))
                printf("%-28s %-12s error / radius %8.1e\n", stresses[s].name, name, ratio[f]);
        }
    }
}

/* One token, K = V = 1, from S = 0: o = scale q k beta v, a product of five doubles, exact in 265
 * bits. */
DP_TEST(truth, radius_covers_the_rounding_to_hi_and_lo) {
    double largest = 0;
    for (int i = 0; i < 50; i++) {
        const shape s = {"product", DP_KDA,        1, 1, 1, 1,     1, 1, DP_GATE_LOG,
                         0,         DP_BETA_PLAIN, 0, 0, 1, {0, 1}};
        dp_problem p = problem_of(&s);
        state = (uint64_t)i + 1;
        double *x[] = {p.q, p.k, p.beta, p.v, &p.scale};
        mpfr_t o, d;
        mpfr_init2(o, 400);
        mpfr_init2(d, 400);
        mpfr_set_ui(o, 1, MPFR_RNDN);
        for (int j = 0; j < 5; j++) {
            *x[j] = uniform(1, 2);
            mpfr_set_d(d, *x[j], MPFR_RNDN);
            mpfr_mul(o, o, d, MPFR_RNDN);
        }
        dp_truth t;
        const dp_truth_request rq = {.bits = 192};
        REQUIRE(dp_truth_run(&p, &rq, &t, NULL) == DP_OK, "run");
        mpfr_sub_d(o, o, t.field[DP_RESULT_O].hi[0], MPFR_RNDN);
        mpfr_sub_d(o, o, t.field[DP_RESULT_O].lo[0], MPFR_RNDN);
        const double err = fabs(mpfr_get_d(o, MPFR_RNDA)), rad = t.field[DP_RESULT_O].rad[0];
        CHECK(err <= rad, "instance %d: error %g, radius %g", i, err, rad);
        largest = fmax(largest, err / rad);
        mpfr_clear(o);
        mpfr_clear(d);
        dp_truth_free(&t);
        dp_problem_free(&p);
    }
    CHECK(largest > 0.5, "error / radius is at most %g: the rounding to hi + lo was not seen",
          largest);
}

/* ------------------------------------------------------------------------------------------------
 * determinism, snapshots */

static int same_ball(const dp_ball *a, const dp_ball *b) {
    const size_t n = (size_t)(a->rows * a->width) * sizeof(double),
                 r = (size_t)a->rows * sizeof(double);
    return a->rows == b->rows && (!r || (!memcmp(a->hi, b->hi, n) && !memcmp(a->lo, b->lo, n) &&
                                         !memcmp(a->rad, b->rad, r)));
}

DP_TEST(truth, bits_do_not_depend_on_threads) {
    for (int s = 0; s < NLONG; s++) {
        dp_problem p = problem_of(&long_shapes[s]);
        dp_truth a, b;
        REQUIRE(run_long(&p, 192, 1, &a) == DP_OK && run_long(&p, 192, 3, &b) == DP_OK, "run");
        for (int f = 0; f < NBALLS; f++) {
            const char *name;
            const dp_ball *x = ball_of(&a, f, &name);
            CHECK(same_ball(x, ball_of(&b, f, &name)), "%s %s: 1 and 3 threads differ",
                  long_shapes[s].name, name);
        }
        dp_truth_free(&a);
        dp_truth_free(&b);
        dp_problem_free(&p);
    }
}

static int same_row(const dp_ball *a, int64_t ra, const dp_ball *b, int64_t rb) {
    const size_t n = (size_t)a->width * sizeof(double);
    return !memcmp(a->hi + ra * a->width, b->hi + rb * b->width, n) &&
           !memcmp(a->lo + ra * a->width, b->lo + rb * b->width, n);
}

/* Tokens from..until-1 of p as a problem that borrows p's arrays; s0, dstate zero, one sequence. */
static dp_problem slice(const dp_problem *p, int64_t from, int64_t until, int64_t *cu) {
    dp_problem y = *p;
    cu[0] = 0;
    cu[1] = y.T = until - from;
    y.Nseq = 1;
    y.cu = cu;
    y.q += from * p->H * p->K;
    y.k += from * p->H * p->R * p->K;
    y.v += from * p->HV * p->R * p->V;
    y.g += from * p->HV * dp_Kg(p);
    y.beta += from * p->HV * p->R;
    y.dout += from * p->HV * p->V;
    y.s0 = y.dstate = NULL;
    return y;
}

DP_TEST(truth, snapshots_are_states_of_the_shortened_problem) {
    for (int s = 0; s < NLONG; s++) {
        dp_problem p = problem_of(&long_shapes[s]);
        const int64_t KV = (int64_t)p.K * p.V;
        dp_truth t;
        REQUIRE(run_long(&p, 192, 0, &t) == DP_OK, "run");
        for (int c = 0; c < 3; c++) {
            int seq = 0;
            while (p.cu[seq + 1] <= long_cut[c])
                seq++;
            for (int back = 0; back < 2; back++) {
                int64_t cu[2];
                dp_problem y = back ? slice(&p, long_cut[c], p.cu[seq + 1], cu)
                                    : slice(&p, p.cu[seq], long_cut[c], cu);
                y.s0 = !back && p.s0 ? p.s0 + seq * p.HV * KV : NULL;
                y.dstate = back && p.dstate ? p.dstate + seq * p.HV * KV : NULL;
                if (!y.T)
                    continue; /* the cut is the start of a sequence: the oracle test covers s0 */
                dp_truth u;
                const dp_truth_request rq = {.bits = 192, .backward = back};
                REQUIRE(dp_truth_run(&y, &rq, &u, NULL) == DP_OK, "run");
                for (int hv = 0; hv < p.HV; hv++)
                    CHECK(same_row(back ? &t.dS_cut : &t.S_cut, c * p.HV + hv,
                                   &u.field[back ? 9 : 1], hv),
                          "%s: %s at %lld, head %d", long_shapes[s].name, back ? "dS_cut" : "S_cut",
                          (long long)long_cut[c], hv);
                dp_truth_free(&u);
            }
        }
        dp_truth_free(&t);
        dp_problem_free(&p);
    }
}

static f128 *apply(const dp_problem *p, const double *M, const double *S,
                   const double *H) { /* M S + H */
    f128 *y = dp_calloc((size_t)p->K * p->V, sizeof *y);
    for (int i = 0; i < p->K; i++)
        for (int v = 0; v < p->V; v++) {
            f128 a = H[i * p->V + v];
            for (int k = 0; k < p->K; k++)
                a += (f128)M[i * p->K + k] * S[k * p->V + v];
            y[i * p->V + v] = a;
        }
    return y;
}

/* S_in(r+1) = M S_in + H for a rank inside one sequence, dS_out(r-1) = dM dS_out + dH, each rank
 * with the radii that it states. */
DP_TEST(truth, rank_view_satisfies_its_affine_map) {
    const int64_t cut[] = {10, 20, 30, 40, 50, 60, 70, 80, 90};
    const shape s = {
        "ranks", DP_KDA,          100, 1, 2, 6, 5, 1, DP_GATE_SOFTPLUS, 1, DP_BETA_SIGMOID, 1, 1,
        3,       {0, 25, 25, 100}};
    dp_problem p = problem_of(&s);
    dp_truth t;
    const dp_truth_request rq = {.bits = 192, .backward = 1, .ncut = 9, .cut = cut, .want_M = 1};
    REQUIRE(dp_truth_run(&p, &rq, &t, NULL) == DP_OK, "run");
    for (int N = 2; N <= 10; N += N == 2 ? 3 : 5) { /* 2 and 5 ranks need products of segments */
        dp_truth_rank rank[10];
        dp_context ctx[10];
        for (int hv = 0; hv < p.HV; hv++) {
            for (int r = 0; r < N; r++) {
                REQUIRE(dp_context_build(p.cu, p.Nseq, N, r, &ctx[r], NULL) == DP_OK, "context");
                dp_truth_at_rank(&t, &p, &ctx[r], hv, &rank[r]);
                CHECK(rank[r].of[DP_RANK_S_IN].there == !ctx[r].is_first &&
                          rank[r].of[DP_RANK_M].there == !ctx[r].is_last,
                      "N=%d rank %d: has", N, r);
                CHECK(rank[r].of[DP_RANK_DS_OUT].there == !ctx[r].is_last &&
                          rank[r].of[DP_RANK_DM].there == !ctx[r].is_first,
                      "N=%d rank %d: has", N, r);
            }
            const int64_t KV = (int64_t)p.K * p.V;
            for (int r = 0; r + 1 < N; r++) {
                if (!rank[r].of[DP_RANK_M].there) continue;
                const int starts =
                    !rank[r].of[DP_RANK_S_IN].there ||
                    ctx[r].nlocal > 1; /* last local sub-sequence starts in this rank */
                const int seq = ctx[r].local_seq[ctx[r].nlocal - 1];
                f128 *S = apply(&p, rank[r].of[DP_RANK_M].x,
                                starts ? p.s0 + (seq * p.HV + hv) * KV : rank[r].of[DP_RANK_S_IN].x,
                                rank[r].of[DP_RANK_H].x);
                f128 worst = 0;
                for (int64_t i = 0; i < KV; i++)
                    worst = fmaxq(worst, fabsq(S[i] - rank[r + 1].of[DP_RANK_S_IN].x[i]));
                CHECK(worst <= 1e-14Q, "N=%d rank %d: M S_in + H is off by %g", N, r,
                      (double)worst);
                CHECK(rank[r].of[DP_RANK_M].rad <= 1e-15 && rank[r].of[DP_RANK_H].rad <= 1e-14 &&
                          rank[r].of[DP_RANK_M].rad > 0,
                      "N=%d rank %d: radii %g %g", N, r, rank[r].of[DP_RANK_M].rad,
                      rank[r].of[DP_RANK_H].rad);
                free(S);
            }
            for (int r = N - 1; r > 0; r--) {
                if (!rank[r].of[DP_RANK_DM].there) continue;
                const int ends = !rank[r].of[DP_RANK_DS_OUT].there || ctx[r].nlocal > 1;
                f128 *S = apply(&p, rank[r].of[DP_RANK_DM].x,
                                ends ? p.dstate + (ctx[r].local_seq[0] * p.HV + hv) * KV
                                     : rank[r].of[DP_RANK_DS_OUT].x,
                                rank[r].of[DP_RANK_DH].x);
                f128 worst = 0;
                for (int64_t i = 0; i < KV; i++)
                    worst = fmaxq(worst, fabsq(S[i] - rank[r - 1].of[DP_RANK_DS_OUT].x[i]));
                CHECK(worst <= 1e-14Q, "N=%d rank %d: dM dS_out + dH is off by %g", N, r,
                      (double)worst);
                free(S);
            }
            for (int r = 0; r < N; r++) {
                dp_truth_rank_free(&rank[r]);
                dp_context_free(&ctx[r]);
            }
        }
    }
    dp_truth_free(&t);
    dp_problem_free(&p);
}

/* H of a rank that continues a sequence is the state that its own tokens leave when they start from
 * zero. */
DP_TEST(truth, rank_H_is_the_final_state_from_zero) {
    const int64_t cut[] = {30, 45, 60};
    const shape s = {"H", DP_MKDA,         90, 1, 1, 6,      5, 2, DP_GATE_SOFTPLUS,
                     1,   DP_BETA_SIGMOID, 1,  1, 1, {0, 90}};
    dp_problem p = problem_of(&s);
    dp_truth t, u;
    int64_t cu[2];
    dp_context ctx;
    dp_truth_rank r;
    const dp_truth_request rq = {.bits = 192, .backward = 1, .ncut = 3, .cut = cut, .want_M = 1},
                           plain = {.bits = 192, .backward = 1};
    dp_problem y = slice(&p, 30, 60, cu);
    REQUIRE(dp_truth_run(&p, &rq, &t, NULL) == DP_OK && dp_truth_run(&y, &plain, &u, NULL) == DP_OK,
            "run");
    REQUIRE(dp_context_build(p.cu, p.Nseq, 3, 1, &ctx, NULL) == DP_OK, "context");
    dp_truth_at_rank(&t, &p, &ctx, 0, &r);
    double H = 0, dH = 0;
    for (int64_t i = 0; i < (int64_t)p.K * p.V; i++) {
        H = fmax(H, fabs(r.of[DP_RANK_H].x[i] - u.field[DP_RESULT_FINAL_STATE].hi[i]));
        dH = fmax(dH, fabs(r.of[DP_RANK_DH].x[i] - u.field[DP_RESULT_DS0].hi[i]));
    }
    CHECK(H <= r.of[DP_RANK_H].rad + u.field[DP_RESULT_FINAL_STATE].rad[0] &&
              dH <= r.of[DP_RANK_DH].rad + u.field[DP_RESULT_DS0].rad[0],
          "H off by %g (radius %g), dH by %g (radius %g)", H, r.of[DP_RANK_H].rad, dH,
          r.of[DP_RANK_DH].rad);
    dp_truth_rank_free(&r);
    dp_context_free(&ctx);
    dp_truth_free(&t);
    dp_truth_free(&u);
    dp_problem_free(&p);
}

/* ------------------------------------------------------------------------------------------------
 * edges */

DP_TEST(truth, extreme_inputs_stay_finite_and_proven) {
    const shape s = {"extreme", DP_KDA,        8, 1, 1, 3,     2, 1, DP_GATE_LOG,
                     0,         DP_BETA_PLAIN, 1, 1, 1, {0, 8}};
    dp_problem p = problem_of(&s);
    p.g[0] = -1e300; /* exp underflows even in MPFR */
    p.g[4] = -800;
    p.g[5] = -0.0;
    p.beta[2] = 0;
    for (int i = 0; i < 3; i++)
        p.k[9 + i] = 0; /* a zero key: rstd = 1000 */
    p.v[6] = 4.9406564584124654e-324;
    p.q[0] = 2.2250738585072014e-308;
    p.q[1] = p.q[2] = 0;
    dp_truth t, w;
    const dp_truth_request rq = {.bits = 192, .backward = 1}, more = {.bits = 384, .backward = 1};
    REQUIRE(dp_truth_run(&p, &rq, &t, NULL) == DP_OK && dp_truth_run(&p, &more, &w, NULL) == DP_OK,
            "run");
    for (int f = 0; f < DP_NRESULTS; f++) {
        const dp_ball *b = &t.field[f];
        for (int64_t i = 0; i < b->rows * b->width; i++)
            CHECK(isfinite(b->hi[i]), "%s[%lld] = %g", dp_result_fields[f].name, (long long)i,
                  b->hi[i]);
        for (int64_t i = 0; i < b->rows; i++)
            CHECK(b->rad[i] < 1e-25, "%s: radius of row %lld is %g", dp_result_fields[f].name,
                  (long long)i, b->rad[i]);
        if (b->rows)
            CHECK(worst_ratio(b, &w.field[f], 1) <= 1, "%s: radius does not cover",
                  dp_result_fields[f].name);
    }
    CHECK(t.field[DP_RESULT_DBETA].hi[2] != 0, "dbeta at beta = 0 must use the residual");
    dp_truth_free(&t);
    dp_truth_free(&w);
    dp_problem_free(&p);
}

DP_TEST(truth, gates_at_both_ends_keep_relative_accuracy) {
    for (int lb = 0; lb < 2; lb++) {
        const shape s = {"ends",
                         DP_KDA,
                         4,
                         1,
                         1,
                         2,
                         2,
                         1,
                         lb ? DP_GATE_LOWER_BOUND : DP_GATE_SOFTPLUS,
                         1,
                         DP_BETA_SIGMOID,
                         0,
                         1,
                         1,
                         {0, 4}};
        dp_problem p = problem_of(&s);
        const double g[] = {-40, 40, -80, 80, -700, 30, 1e5, -1e5};
        memcpy(p.g, g, sizeof g);
        p.beta[0] = -80;
        p.beta[1] = 80;
        dp_truth t, w;
        const dp_truth_request rq = {.bits = 128, .backward = 1},
                               more = {.bits = 512, .backward = 1};
        REQUIRE(dp_truth_run(&p, &rq, &t, NULL) == DP_OK &&
                    dp_truth_run(&p, &more, &w, NULL) == DP_OK,
                "run");
        for (int f = 0; f < DP_NRESULTS; f++) {
            CHECK(worst_ratio(&t.field[f], &w.field[f], 1) <= 1, "%s: ratio %g",
                  dp_result_fields[f].name, worst_ratio(&t.field[f], &w.field[f], 1));
            for (int64_t i = 0; i < t.field[f].rows * t.field[f].width; i++) {
                const double a = t.field[f].hi[i], b = w.field[f].hi[i];
                CHECK(fabs(a - b) <= 1e-15 * fabs(b), "%s[%lld]: %g, more bits %g",
                      dp_result_fields[f].name, (long long)i, a, b);
            }
        }
        dp_truth_free(&t);
        dp_truth_free(&w);
        dp_problem_free(&p);
    }
}

DP_TEST(truth, non_finite_inputs_reach_only_what_depends_on_them) {
    const shape s = {"nan", DP_KDA,          9, 2, 2, 3,        2, 1, DP_GATE_SOFTPLUS,
                     1,     DP_BETA_SIGMOID, 1, 0, 2, {0, 6, 9}};
    const double bad[] = {NAN, INFINITY, -INFINITY};
    for (int kind = 0; kind < 5; kind++)
        for (int b = 0; b < 3; b++) {
            dp_problem p = problem_of(&s);
            double *const x[] = {p.q + (3 * 2 + 1) * 3, p.k + (3 * 2 + 1) * 3,
                                 p.v + (3 * 2 + 1) * 2, p.g + (3 * 2 + 1) * 3, p.beta + 3 * 2 + 1};
            *x[kind] = bad[b]; /* token 3, head 1, sequence 0 */
            dp_truth t;
            const dp_truth_request rq = {.bits = 128, .backward = 1};
            REQUIRE(dp_truth_run(&p, &rq, &t, NULL) == DP_OK, "run");
            for (int64_t r = 0; r < 9 * 2; r++) {
                const int64_t tok = r / 2;
                const int hit = r % 2 == 1 && (kind == 0 ? tok == 3 : tok >= 3 && tok < 6);
                CHECK(hit ? isinf(t.field[DP_RESULT_O].rad[r])
                          : t.field[DP_RESULT_O].rad[r] < 1e-20,
                      "input %d, %g: radius of o at token %lld head %d is %g", kind, bad[b],
                      (long long)tok, (int)(r % 2), t.field[DP_RESULT_O].rad[r]);
                if (r % 2 == 0 || tok >= 6)
                    CHECK(t.field[DP_RESULT_DV].rad[r] < 1e-20 &&
                              isfinite(t.field[DP_RESULT_DV].hi[r * 2]),
                          "dv at token %lld", (long long)tok);
            }
            if (b == 0 && kind != 0)
                CHECK(isnan(t.field[DP_RESULT_O].hi[(5 * 2 + 1) * 2]),
                      "NaN must reach a later output");
            dp_truth_free(&t);
            dp_problem_free(&p);
        }
}

DP_TEST(truth, refuses_bad_requests) {
    dp_problem p = problem_of(&shapes[0]);
    dp_truth t;
    const int64_t zero = 0, end = 5, down[] = {3, 2};
    const dp_truth_request bad[] = {{.bits = 53},
                                    {.bits = 192, .ncut = 1, .cut = &zero},
                                    {.bits = 192, .ncut = 1, .cut = &end},
                                    {.bits = 192, .ncut = 2, .cut = down}};
    for (int i = 0; i < 4; i++) {
        dp_err e = {0};
        CHECK(dp_truth_run(&p, &bad[i], &t, &e) == DP_EINPUT && e.msg[0], "request %d", i);
    }
    dp_problem_free(&p);
}

/* ------------------------------------------------------------------------------------------------
 * cache */

static int cached_run(const dp_problem *p, const char *dir, dp_truth *t) {
    const dp_truth_request rq = {
        .bits = 128, .backward = 1, .ncut = 3, .cut = long_cut, .want_M = 1};
    int hit = -1;
    if (dp_truth_cached(p, &rq, dir, t, &hit, NULL)) return -1;
    return hit;
}

static int equal_truths(const dp_truth *a, const dp_truth *b) {
    int same = a->nmark == b->nmark && a->ncut == b->ncut && a->bits == b->bits &&
               a->backward == b->backward;
    for (int f = 0; f < NBALLS && same; f++) {
        const char *name;
        same = same_ball(ball_of(a, f, &name), ball_of(b, f, &name));
    }
    return same && !memcmp(a->mark, b->mark, sizeof *a->mark * (size_t)a->nmark);
}

DP_TEST(truth, cache_hits_and_survives_damage) {
    dp_problem p = problem_of(&long_shapes[3]);
    char dir[512], cmd[2048], out[512];
    snprintf(dir, sizeof dir, "%s/truth/cache", gt_tmpdir());
    dp_truth first, again;
    REQUIRE(cached_run(&p, dir, &first) == 0, "the first run must compute");
    REQUIRE(cached_run(&p, dir, &again) == 1, "the second run must hit");
    CHECK(equal_truths(&first, &again), "what comes back differs");
    dp_truth_free(&again);
    const char *damage[] = {"dd if=/dev/zero of=$f bs=1 seek=2000 count=8 conv=notrunc",
                            "truncate -s -1 $f",
                            "truncate -s 10 $f",
                            "truncate -s 0 $f",
                            "echo x >> $f",
                            "dd if=/dev/zero of=$f bs=1 seek=0 count=1 conv=notrunc"};
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        snprintf(cmd, sizeof cmd, "f=$(echo %s/*.truth); %s", dir, damage[i]);
        REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
        CHECK(cached_run(&p, dir, &again) == 0, "damaged by '%s': must compute again", damage[i]);
        CHECK(equal_truths(&first, &again), "damaged by '%s': result differs", damage[i]);
        dp_truth_free(&again);
        CHECK(cached_run(&p, dir, &again) == 1, "damaged by '%s': must be repaired", damage[i]);
        dp_truth_free(&again);
    }
    p.v[0] = nextafter(p.v[0], 2);
    CHECK(cached_run(&p, dir, &again) == 0, "another input bit must miss");
    dp_truth_free(&again);
    snprintf(cmd, sizeof cmd, "ls %s | grep -vc 'truth$'; ls %s | wc -l", dir, dir);
    gt_run(cmd, out, sizeof out);
    CHECK(!strcmp(out, "0\n2\n"), "cache folder: %s", out);
    dp_truth_free(&first);
    dp_problem_free(&p);
}

DP_TEST(truth, cache_folder_that_cannot_be_written_is_no_error) {
    dp_problem p = problem_of(&long_shapes[3]);
    dp_truth t;
    CHECK(cached_run(&p, "/proc/no/such", &t) == 0, "must compute");
    CHECK(isfinite(t.field[DP_RESULT_O].hi[0]), "o");
    dp_truth_free(&t);
    dp_problem_free(&p);
}
