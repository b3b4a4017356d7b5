/* harness/bench/bench_truth.c - tokens per second of the truth, one KDA head, K = V = 128, 192 bits, all cores.
 *
 * usage: bench_truth [tokens [runs [bits]]]      default 512 3 192; prints the median over the runs
 */
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../ref/truth.h"

static uint64_t state = 1;
static double uniform(void) {                    /* [-1, 1) */
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(state >> 11) * 0x1p-52 - 1;
}

static void fill(double *x, int64_t n, double lo, double hi) {
    for (int64_t i = 0; i < n; i++) x[i] = lo + (hi - lo) * (uniform() + 1) / 2;
}

static dp_problem head(int64_t T) {
    dp_problem p = {.model = DP_KDA, .T = T, .H = 1, .HV = 1, .K = 128, .V = 128, .R = 1, .scale = 0.0883883476483184405, .gate = DP_GATE_SOFTPLUS,
                    .beta_form = DP_BETA_SIGMOID, .l2norm = 1};
    dp_problem_alloc(&p);
    p.A_log = dp_doubles(1);
    p.dt_bias = dp_doubles(128);
    p.dout = dp_doubles(T * 128);
    fill(p.q, T * 128, -1, 1);
    fill(p.k, T * 128, -1, 1);
    fill(p.v, T * 128, -1, 1);
    fill(p.g, T * 128, -8, -4);
    fill(p.beta, T, -2, 2);
    fill(p.dout, T * 128, -1, 1);
    return p;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_seconds(const dp_problem *p, const dp_truth_request *rq, int runs) {
    double s[64];
    for (int i = 0; i < runs; i++) {
        dp_truth t;
        const double start = omp_get_wtime();
        if (dp_truth_run(p, rq, &t, NULL)) exit(2);
        s[i] = omp_get_wtime() - start;
        dp_truth_free(&t);
    }
    qsort(s, (size_t)runs, sizeof *s, compare);
    return s[runs / 2];
}

int main(int argc, char **argv) {
    const int64_t T = argc > 1 ? atoll(argv[1]) : 512;
    int runs = argc > 2 ? atoi(argv[2]) : 3;
    if (T < 1 || runs < 1) {
        fprintf(stderr, "usage: bench_truth [tokens [runs [bits]]]\n");
        return 2;
    }
    if (runs > 64) runs = 64;
    dp_problem p = head(T);
    printf("truth: KDA, K = V = 128, T = %lld, %d threads, median of %d runs\n", (long long)T, omp_get_max_threads(), runs);
    const struct { const char *name; int backward, want_M; } mode[] = {{"forward", 0, 0}, {"forward + backward", 1, 0}, {"forward + backward + M", 1, 1}};
    for (size_t i = 0; i < sizeof mode / sizeof *mode; i++) {
        const dp_truth_request rq = {.bits = argc > 3 ? atoi(argv[3]) : 192, .backward = mode[i].backward, .want_M = mode[i].want_M};
        const double s = median_seconds(&p, &rq, runs);
        printf("  %-24s %8.1f tokens/s   %7.3f s   %6.1f s for T = 8192\n", mode[i].name, (double)T / s, s, s * 8192 / (double)T);
    }
    dp_problem_free(&p);
    return 0;
}
