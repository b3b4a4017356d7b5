/* Gated DeltaProduct beside its parts. With one key a token it is GDN. Where no key of a token sees
 * another it is MKDA with one gate a head, and elsewhere it is not. The arithmetics of its truth
 * agree. */
#include "gt.h"
#include "oracle.h"
#include "ref/truth/truth.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int64_t CU[] = {0, 21, 21, 50, 60};

static void problem(dp_problem *p, int R, dp_beta beta) {
    oracle_spec s = oracle_packed(DP_DELTAPRODUCT, 8, CU, 81);
    s.R = R;
    s.beta = beta;
    oracle_problem(p, &s);
}

static dp_truth truth_of(const dp_problem *p, dp_truth_kind kind) {
    static const int64_t CUT[] = {15, 30, 45};
    const dp_truth_request rq = {
        .kind = kind, .bits = 128, .backward = 1, .ncut = 3, .cut = CUT, .want_M = 1};
    dp_truth t = {0};
    dp_err e = {0};
    if (dp_truth_run(p, &rq, &t, &e)) gt_fail(__FILE__, __LINE__, "truth", "%s", e.msg);
    return t;
}

/* Largest distance of a row of x to the row of y, in units of the sum of both radii. The distance
 * relative to the size of x goes to *apart. */
static double distance(const dp_ball *x, const dp_ball *y, double *apart) {
    double most = 0, off = 0, size = 0;
    for (int64_t r = 0; r < x->rows; r++) {
        double d2 = 0;
        for (int64_t i = r * x->width; i < (r + 1) * x->width; i++) {
            const double d = (x->hi[i] - y->hi[i]) + (x->lo[i] - y->lo[i]);
            d2 += d * d;
            size += x->hi[i] * x->hi[i];
        }
        off += d2;
        most = fmax(most, d2 > 0 ? sqrt(d2) / (x->rad[r] + y->rad[r]) : 0);
    }
    *apart = size > 0 ? sqrt(off / size) : 0;
    return most;
}

static const dp_ball *ball(const dp_truth *t, int i) {
    const dp_ball *const more[] = {&t->S_cut, &t->dS_cut, &t->M_seg};
    return i < DP_NRESULTS ? &t->field[i] : more[i - DP_NRESULTS];
}

/* All tensors, but those of the bits `but`. */
static void same(const char *what, const dp_truth *a, const dp_truth *b, unsigned but) {
    for (int i = 0; i < DP_NRESULTS + 3; i++) {
        const dp_ball *x = ball(a, i), *y = ball(b, i);
        double apart;
        if (but >> i & 1) continue;
        REQUIRE(x->rows == y->rows, "%s, tensor %d: %lld rows, %lld", what, i, (long long)x->rows,
                (long long)y->rows);
        const double d = distance(x, y, &apart);
        CHECK(d <= 1, "%s, tensor %d: %.3g of both radii, %.3g of it", what, i, d, apart);
    }
}

DP_TEST(deltaproduct, with_one_key_a_token_it_is_gdn) {
    dp_problem p;
    problem(&p, 1, DP_BETA_SIGMOID2);
    dp_truth a = truth_of(&p, DP_TRUTH_MPFR);
    p.model = DP_GDN;
    dp_truth b = truth_of(&p, DP_TRUTH_MPFR);
    same("GDN", &a, &b, 0);
    dp_truth_free(&a);
    dp_truth_free(&b);
    dp_problem_free(&p);
}

/* MKDA has a gate a channel: K times the one of the head. */
static void widen_gates(dp_problem *p) {
    double *g = dp_doubles(p->T * p->HV * p->K);
    for (int64_t i = 0; i < p->T * p->HV * p->K; i++)
        g[i] = p->g[i / p->K];
    free(p->g);
    p->g = g;
}

/* Key j of R has the channels j, j + R, .. alone. */
static void part_keys(dp_problem *p) {
    for (int64_t i = 0; i < p->T * p->H * p->R * p->K; i++)
        if (i % p->K % p->R != i / p->K % p->R) p->k[i] = 0;
}

DP_TEST(deltaproduct, it_is_mkda_where_no_key_of_a_token_sees_another) {
    for (int parted = 0; parted < 2; parted++) {
        dp_problem p;
        problem(&p, 2, DP_BETA_SIGMOID);
        for (int64_t i = 0; i < p.T * p.HV; i++)
            p.g[i] = -0.1 * (double)(i % 7);
        p.gate = DP_GATE_LOG;
        free(p.dt_bias);
        p.dt_bias = NULL;
        if (parted) part_keys(&p);
        dp_truth a = truth_of(&p, DP_TRUTH_MPFR);
        widen_gates(&p);
        p.model = DP_MKDA;
        dp_truth b = truth_of(&p, DP_TRUTH_MPFR);
        double apart;
        if (parted) {
            /* dk: a key may rotate towards another; dg is of a head, or of a channel */
            same("MKDA", &a, &b, 1u << DP_RESULT_DK | 1u << DP_RESULT_DG);
        } else {
            distance(&a.field[DP_RESULT_O], &b.field[DP_RESULT_O], &apart);
            CHECK(apart > 0.01, "o is MKDA's to %.3g of it, though keys see each other", apart);
        }
        dp_truth_free(&a);
        dp_truth_free(&b);
        dp_problem_free(&p);
    }
}

DP_TEST(deltaproduct, both_arithmetics_of_the_truth_agree) {
    dp_problem p;
    problem(&p, 3, DP_BETA_SIGMOID2);
    dp_truth a = truth_of(&p, DP_TRUTH_MPFR), b = truth_of(&p, DP_TRUTH_DD);
    dp_truth_audit audit;
    dp_err e = {0};
    same("double-double", &a, &b, 0);
    CHECK(!dp_truth_audit_columns(&p, &b, 5, 3, 60, &audit, &e) && audit.columns == 3, "%s", e.msg);
    dp_truth_free(&a);
    dp_truth_free(&b);
    dp_problem_free(&p);
}
