/* Formats of stored states (ref/vocabulary/stored.h) against the numbers that they have, listed one
 * by one, and their bounds against what stores make; sessions against theirs. */
#include "harness/run/outputs.h"
#include "harness/verdict/expected.h"
#include "ref/truth/truth.h"
#include "ref/vocabulary/stored.h"
#include "runs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 2, K = 3, V = 40, N = HEADS * K * V };

/* The numbers of a format, 0 on; returns how many. */
static int numbers_of(const char *name, double x[256]) {
    const int e4m3 = !strncmp(name, "e4m3", 4), bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
    int n = 0;
    for (int i = 0; i < 128; i++) {
        const int e = i >> bits, m = i & ((1 << bits) - 1);
        if (!strncmp(name, "int8", 4))
            x[n++] = i;
        else if (e4m3 ? i < 127 : e < 31)
            x[n++] = ldexp(e ? (1 << bits) + m : m, (e ? e : 1) - bias - bits);
    }
    return n;
}

/* Is y a number nearest to x, by the scale s? */
static int is_nearest(const double *numbers, int n, double s, double x, double y) {
    double least = INFINITY;
    for (int i = 0; i < n; i++)
        least = fmin(least, fabs(s * numbers[i] - fabs(x)));
    return fabs(x - y) <= least + 0x1p-22 * s * numbers[n - 1] && x * y >= 0;
}

static void fill(uint64_t *seed, double *S) {
    for (int i = 0; i < N; i++) {
        *seed = *seed * 6364136223846793005u + 1442695040888963407u;
        S[i] = (float)(ldexp((double)(int64_t)*seed, -63) * ldexp(1, -(int)(*seed >> 20 & 15)));
    }
}

/* Entries that share the scale of entry i: from, to. */
static void share_of(const char *name, int i, int *from, int *to) {
    const int row = i / V * V, block = row + (i - row) / 32 * 32, head = i / (K * V) * K * V;
    const char *s = strchr(name, '-');
    *from = !strcmp(s, "-tensor") ? 0
            : !strcmp(s, "-head") ? head
            : !strcmp(s, "-row")  ? row
                                  : block;
    *to = !strcmp(s, "-tensor")  ? N
          : !strcmp(s, "-head")  ? head + K * V
          : !strcmp(s, "-row")   ? row + V
          : block + 32 < row + V ? block + 32
                                 : row + V;
}

DP_TEST(stored, a_number_is_the_nearest_of_its_format_and_stays_when_stored_again) {
    uint64_t seed = 1;
    for (int f = DP_E4M3_TENSOR; f < DP_NSTORED; f++) {
        const char *name = dp_formats[f].name;
        double numbers[256], S[N], x[N], again[N];
        const int n = numbers_of(name, numbers);
        fill(&seed, S);
        memcpy(x, S, sizeof S);
        dp_store_state((dp_format)f, HEADS, K, V, x);
        for (int i = 0, from, to; i < N; i++) {
            double most = 0;
            share_of(name, i, &from, &to);
            for (int j = from; j < to; j++)
                most = fmax(most, fabs(S[j]));
            CHECK(is_nearest(numbers, n, most / numbers[n - 1], S[i], x[i]), "%s: %a as %a", name,
                  S[i], x[i]);
        }
        memcpy(again, x, sizeof x);
        dp_store_state((dp_format)f, HEADS, K, V, again);
        CHECK(!memcmp(x, again, sizeof x), "%s: another number when stored again", name);
    }
}

/* |x| over the scale s, to the nearest number; of two the one of even code. */
static double coded(const double *numbers, int n, double s, double x) {
    int best = 0;
    for (int i = 1; i < n; i++) {
        const double more = fabs(x) / s - numbers[i], less = fabs(x) / s - numbers[best];
        if (fabs(more) < fabs(less) || (fabs(more) == fabs(less) && i % 2 == 0)) best = i;
    }
    return copysign(dp_fp32(s * numbers[best]), x);
}

/* gpu/decode/packed.cuh has these numbers, too: no state near its normal ones stays as it was. */
DP_TEST(stored, scales_below_the_normal_numbers_of_fp32_are_those_of_kernels) {
    uint64_t seed = 4;
    for (int f = DP_E4M3_TENSOR; f < DP_NSTORED; f++)
        for (int e = -160; e < -110; e++) {
            double numbers[256], S[N], x[N], off[HEADS] = {0}, d = 0, all = 0;
            const int n = numbers_of(dp_formats[f].name, numbers);
            fill(&seed, S);
            for (int i = 0; i < N; i++)
                S[i] = x[i] = dp_fp32(ldexp(S[i], e));
            dp_store_state((dp_format)f, HEADS, K, V, x);
            for (int i = 0, from, to; i < N; i++) {
                double most = 0;
                share_of(dp_formats[f].name, i, &from, &to);
                for (int j = from; j < to; j++)
                    most = fmax(most, fabs(S[j]));
                const double s = dp_fp32(most / numbers[n - 1]);
                const double y = s > 0 ? coded(numbers, n, s, S[i]) : 0;
                CHECK(x[i] == y, "%s: 2^%d: %a as %a, not %a", dp_formats[f].name, e, S[i], x[i],
                      y);
                d += (x[i] - S[i]) * (x[i] - S[i]);
            }
            for (int h = 0; h < HEADS; h++)
                all += pow(dp_stored_error((dp_format)f, HEADS, K, V, S, off, h), 2);
            CHECK(d <= all, "%s: 2^%d: %a, bound %a", dp_formats[f].name, e, sqrt(d), sqrt(all));
        }
}

DP_TEST(stored, chance_rounds_to_a_neighbour_and_to_the_number_in_the_mean) {
    double S[N], sum = 0, by = 0;
    uint64_t seed = 2;
    for (int round = 0; round < 200; round++) {
        double x[N];
        fill(&seed, S);
        memcpy(x, S, sizeof S);
        dp_store_state(DP_FP16SR, HEADS, K, V, x);
        for (int i = 0; i < N; i++) {
            int e;
            frexp(S[i], &e);
            const double spacing = ldexp(1, (e < -13 ? -13 : e) - 11);
            CHECK(fabs(x[i] - S[i]) < spacing && dp_store(DP_FP16, x[i]) == x[i], "%a as %a", S[i],
                  x[i]);
            sum += (x[i] - S[i]) / spacing;
            by += x[i] != dp_store(DP_FP16, S[i]);
        }
    }
    /* of a mean of n errors uniform on either side: sd 0.41 / sqrt(n) */
    CHECK(fabs(sum) < 5 * 0.41 * sqrt(200. * N), "a bias of %.3g spacings", sum / (200. * N));
    CHECK(by > 0.1 * 200 * N, "it rounds to nearest");
}

DP_TEST(stored, no_store_errs_by_more_than_its_bound) {
    uint64_t seed = 3;
    for (int round = 0; round < 40; round++)
        for (int f = DP_FP32; f < DP_NSTORED; f++) {
            double S[N], x[N], off[HEADS];
            if (f > DP_FP32 && f < DP_BF16) continue;
            if (f == DP_BF16ST) continue;
            fill(&seed, S);
            memcpy(x, S, sizeof S);
            for (int h = 0; h < HEADS; h++) { /* the state that is stored is another */
                off[h] = round % 2 ? 0 : 0.1;
                x[h * K * V + round % (K * V)] += off[h];
            }
            double given[N];
            memcpy(given, x, sizeof x);
            dp_store_state((dp_format)f, HEADS, K, V, x);
            for (int h = 0; h < HEADS; h++) {
                double d = 0;
                for (int i = h * K * V; i < (h + 1) * K * V; i++)
                    d += (x[i] - given[i]) * (x[i] - given[i]);
                const double most = dp_stored_error((dp_format)f, HEADS, K, V, S, off, h);
                CHECK(sqrt(d) <= most, "%s: %.3g, bound %.3g", dp_formats[f].name, sqrt(d), most);
                CHECK(round % 2 == 0 || f == DP_FP32 || sqrt(d) > most / 40,
                      "%s: %.3g, bound %.3g: it says nothing", dp_formats[f].name, sqrt(d), most);
            }
        }
}

/* Errors of a recurrent kernel in fp32 in a session, beside the bounds of stores alone. */
static void within_bounds(const char *kept, const char *words, const char *op) {
    dp_case c;
    dp_err e = {0};
    char text[512];
    dp_truth t;
    dp_design d;
    dp_drawn_run x;
    const dp_conv none[3] = {{0}};
    snprintf(text, sizeof text,
             "reason = r\nsource = s\nop = %s\nT = 60\nK = 16\nV = 40\nH = 2\ns0_scale = 0.5\n"
             "cu_seqlens = 0,25,25,60\nsession = 6,4-2,4-0,1\nsession_state = %s\n",
             op, kept);
    if (!gt_parse_case(text, &c)) return;
    REQUIRE(!dp_design_parse(words, DP_BASE_FP32, &d, &e), "%s", e.msg);
    const dp_truth_request rq = {.bits = 128};
    REQUIRE(!dp_truth_run(&c.p, &rq, &t, &e), "%s", e.msg);
    dp_drawn_open(&x, &d, &c.p, none, &c.session, 1, 0);
    dp_drawn_all(&x, DP_FP32);
    unsigned char *first = dp_calloc((size_t)c.p.T, 1);
    dp_session_firsts(&c.session, c.p.cu, c.p.Nseq, first);
    dp_error_bound bound;
    dp_error_bound_alloc(&c.p, 1, 0, 0, &bound);
    dp_bounds_keep(&c.p, 1, first, &c.session, &d, &bound);
    static const dp_result_id FIELD[2] = {DP_RESULT_O, DP_RESULT_FINAL_STATE};
    double most = 0;
    for (int i = 0; i < 2; i++) {
        const dp_ball *want = &t.field[FIELD[i]];
        const double *got = dp_drawn_results(&x)->out[FIELD[i]];
        for (int64_t r = 0; r < want->rows; r++) {
            double off = 0, size = 0;
            for (int64_t z = r * want->width; z < (r + 1) * want->width; z++) {
                off += pow(got[z] - want->hi[z], 2);
                size += pow(want->hi[z], 2);
            }
            const double rounding = 1e-4 * sqrt(size) + 1e-6;
            if (i && d.final_state != DP_FP64) continue; /* its last store is another's */
            CHECK(sqrt(off) <= bound.row[FIELD[i]][r] + rounding,
                  "%s %s %s: row %lld is off by %.3g, bound %g", op, kept, words, (long long)r,
                  sqrt(off), bound.row[FIELD[i]][r]);
            if (bound.row[FIELD[i]][r] > 0) most = fmax(most, sqrt(off) / bound.row[FIELD[i]][r]);
        }
    }
    CHECK(most > 0.02, "%s %s %s: errors are %.3g of the bound", op, kept, words, most);
    dp_error_bound_free(&bound);
    free(first);
    dp_drawn_close(&x);
    dp_truth_free(&t);
    dp_case_free(&c);
}

DP_TEST(stored, a_session_stays_within_what_its_stores_may_make) {
    static const char *const OPS[] = {"kda", "gdn", "gla", "dplr", "gdn2"};
    static const char *const KEPT[] = {"bf16",      "fp16sr",     "e4m3-row",
                                       "e5m2-head", "int8-block", "int8-tensor"};
    for (int o = 0; o < 5; o++)
        for (int k = 0; k < 6; k++)
            within_bounds(KEPT[k], "recurrent", OPS[o]);
    within_bounds("returned", "recurrent,final_state=e4m3-tensor", "kda");
    within_bounds("returned", "recurrent,state=bf16,read=kept", "kda");
    within_bounds("e4m3-row", "recurrent,state=e4m3-row,read=kept", "dplr");
    within_bounds("returned", "final_state=int8-row", "gdn");
}

/* A session in every format has bounds and passes on simulated ranks; a state of another format
 * does not. */
DP_TEST(stored, right_sessions_pass_and_another_format_is_red) {
    static const char *const KEPT[] = {"fp16sr", "e4m3-row", "int8-block", "e5m2-tensor"};
    for (int k = 0; k < 4; k++) {
        dp_case c;
        dp_err e = {0};
        dp_runs runs = {0};
        char text[512];
        const dp_run_options o = {.only[DP_ID_BACKEND] = {1, {DP_BACKEND_SIM}},
                                  .cache = gt_tmpdir()};
        snprintf(text, sizeof text,
                 "reason = r\nsource = s\nop = kda\nT = 60\nK = 16\nV = 40\nbase = fp32\n"
                 "session = 20,4-2,1\nsession_state = %s\n",
                 KEPT[k]);
        if (!gt_parse_case(text, &c)) return;
        REQUIRE(!dp_case_run(&c, &o, &runs, &e), "%s", e.msg);
        CHECK(runs.run[0].verdict == DP_PASS, "%s: %s", KEPT[k], runs.run[0].why);
        CHECK(runs.run[0].tensor[0].ratio > 0, "%s: no bound", KEPT[k]);
        dp_runs_free(&runs);
        dp_case_free(&c);
    }
}
