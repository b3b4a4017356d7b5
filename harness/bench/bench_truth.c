/* harness/bench/bench_truth.c - tokens per second of the truth in MPFR (192 bits) and in
 * double-double, one KDA head, K = V = 128, all cores.
 *
 * usage: bench_truth [tokens [runs [bits]]]
 *            default 512 3 192; prints the median over the runs, and the ratio
 *        bench_truth long [tokens]
 *            default 1048576: forward in double-double, on the device where there is one; its first
 *            4096 tokens on the CPU too, bit for bit, and two columns of 512 tokens in MPFR. Exit
 *            status 1: they differ
 */
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/device/device_run.h"
#include "ref/truth/truth.h"

static uint64_t state = 1;
static double uniform(void) { /* [-1, 1) */
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(state >> 11) * 0x1p-52 - 1;
}

static void fill(double *x, int64_t n, double lo, double hi) {
    for (int64_t i = 0; i < n; i++)
        x[i] = lo + (hi - lo) * (uniform() + 1) / 2;
}

static dp_problem head(int64_t T, int backward) {
    dp_problem p = {.model = DP_KDA,
                    .T = T,
                    .H = 1,
                    .HV = 1,
                    .K = 128,
                    .V = 128,
                    .R = 1,
                    .scale = 0.0883883476483184405,
                    .gate = DP_GATE_SOFTPLUS,
                    .beta_form = DP_BETA_SIGMOID,
                    .l2norm = 1};
    dp_problem_alloc(&p);
    p.A_log = dp_doubles(1);
    p.dt_bias = dp_doubles(128);
    fill(p.q, T * 128, -1, 1);
    fill(p.k, T * 128, -1, 1);
    fill(p.v, T * 128, -1, 1);
    fill(p.g, T * 128, -8, -4);
    fill(p.beta, T, -2, 2);
    if (backward) {
        p.dout = dp_doubles(T * 128);
        fill(p.dout, T * 128, -1, 1);
    }
    return p;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static dp_truth run(const dp_problem *p, const dp_truth_request *rq, double *seconds) {
    dp_truth t;
    dp_err e = {0};
    const double start = omp_get_wtime();
    if (dp_truth_run(p, rq, &t, &e)) {
        fprintf(stderr, "bench_truth: %s\n", e.msg);
        exit(2);
    }
    *seconds = omp_get_wtime() - start;
    return t;
}

static double median_seconds(const dp_problem *p, const dp_truth_request *rq, int runs,
                             double *radius) {
    double s[64];
    for (int i = 0; i < runs; i++) {
        dp_truth t = run(p, rq, &s[i]);
        *radius = 0;
        for (int64_t r = 0; r < t.field[DP_RESULT_O].rows; r++)
            *radius = fmax(*radius, t.field[DP_RESULT_O].rad[r]);
        dp_truth_free(&t);
    }
    qsort(s, (size_t)runs, sizeof *s, compare);
    return s[runs / 2];
}

/* ---- a long sequence ------------------------------------------------------------------------- */

static int same_prefix(const dp_truth *a,
                       const dp_truth *b) { /* o of b against the first rows of a: hi, lo, radius */
    const dp_ball *x = &a->field[DP_RESULT_O], *y = &b->field[DP_RESULT_O];
    const size_t n = (size_t)(y->rows * y->width) * sizeof(double);
    return !memcmp(x->hi, y->hi, n) && !memcmp(x->lo, y->lo, n) &&
           !memcmp(x->rad, y->rad, (size_t)y->rows * sizeof(double));
}

/* Columns 0 and 127 of o in MPFR: largest |difference| / (sum of the radii). */
static double audit(const dp_problem *p, const dp_truth *t, int64_t T) {
    dp_problem c = *p;
    const int64_t cu[2] = {0, T};
    DP_OWN double *v = dp_doubles(2 * T);
    double seconds, worst = 0;
    for (int64_t i = 0; i < T; i++) {
        v[2 * i] = p->v[i * 128];
        v[2 * i + 1] = p->v[i * 128 + 127];
    }
    c.T = T;
    c.V = 2;
    c.v = v;
    c.cu = (int64_t *)cu;
    dp_truth m = run(&c, &(dp_truth_request){.bits = 192}, &seconds);
    for (int64_t i = 0; i < 2 * T; i++) {
        const int64_t at = i / 2 * 128 + i % 2 * 127;
        const long double d =
            ((long double)t->field[DP_RESULT_O].hi[at] - m.field[DP_RESULT_O].hi[i]) +
            ((long double)t->field[DP_RESULT_O].lo[at] - m.field[DP_RESULT_O].lo[i]);
        worst = fmax(worst, (double)fabsl(d) / (t->field[DP_RESULT_O].rad[i / 2] +
                                                m.field[DP_RESULT_O].rad[i / 2]));
    }
    dp_truth_free(&m);
    return worst;
}

static int long_sequence(int64_t T) {
    const int64_t n = T < 4096 ? T : 4096, m = T < 512 ? T : 512, cu[2] = {0, n};
    double s, s2, top = 0;
    dp_problem p = head(T, 0), first = p;
    first.T = n;
    first.cu = (int64_t *)cu;
    dp_truth_request rq = {.kind = DP_TRUTH_DD, .device = dp_cuda_truth(&p)};
    dp_truth t = run(&p, &rq, &s);
    for (int64_t i = 0; i < T; i++)
        top = fmax(top, t.field[DP_RESULT_O].rad[i]);
    printf("truth: KDA forward, one head, K = V = 128, T = %lld on %s, %d CPU threads: %.2f s, "
           "%.0f tokens/s; largest radius of o %.2g\n",
           (long long)T, rq.device ? dp_cuda_device() : "the CPU", omp_get_max_threads(), s,
           (double)T / s, top);
    rq.device = NULL;
    dp_truth c = run(&first, &rq, &s2);
    const int same = same_prefix(&t, &c);
    const double worst = audit(&p, &t, m);
    printf("  first %lld tokens on the CPU: %.0f tokens/s, o %s bit for bit\n", (long long)n,
           (double)n / s2, same ? "the same" : "DIFFERS");
    printf("  2 columns of %lld tokens in MPFR: largest difference / (sum of both radii) %.2g\n",
           (long long)m, worst);
    dp_truth_free(&c);
    dp_truth_free(&t);
    dp_problem_free(&p);
    return !(same && worst <= 1);
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "long"))
        return long_sequence(argc > 2 ? atoll(argv[2]) : 1048576);
    const int64_t T = argc > 1 ? atoll(argv[1]) : 512;
    int runs = argc > 2 ? atoi(argv[2]) : 3;
    if (T < 1 || runs < 1) {
        fprintf(stderr, "usage: bench_truth [tokens [runs [bits]]] | long [tokens]\n");
        return 2;
    }
    if (runs > 64) runs = 64;
    dp_problem p = head(T, 1);
    printf("truth: KDA, K = V = 128, T = %lld, %d threads, median of %d runs\n", (long long)T,
           omp_get_max_threads(), runs);
    const struct {
        const char *name;
        int backward, want_M;
    } mode[] = {{"forward", 0, 0}, {"forward + backward", 1, 0}, {"forward + backward + M", 1, 1}};
    for (size_t i = 0; i < sizeof mode / sizeof *mode; i++) {
        dp_truth_request rq = {.bits = argc > 3 ? atoi(argv[3]) : 192,
                               .backward = mode[i].backward,
                               .want_M = mode[i].want_M};
        double radius[2];
        const double s = median_seconds(&p, &rq, runs, &radius[0]);
        rq.kind = DP_TRUTH_DD;
        const double d = median_seconds(&p, &rq, runs, &radius[1]);
        printf("  %-24s MPFR %8.1f tokens/s   double-double %8.0f tokens/s   %5.1f times   radius "
               "of o %.1e and %.1e\n",
               mode[i].name, (double)T / s, (double)T / d, s / d, radius[0], radius[1]);
    }
    dp_problem_free(&p);
    return 0;
}
