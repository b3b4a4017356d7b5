/* harness/bench/bench_exchange.c - what each exchange and payload does to the state that enters the
 * ranks of a case: the largest error over ranks and heads, relative to the state, with messages and
 * bytes of all heads; pairs in fp64, so that the exchange alone rounds.
 *
 * usage: bench_exchange [CASE.case [ranks]]
 *            default cases/kda-long.case 8; heads of one sequence
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/case/case.h"
#include "harness/simulated/ranks.h"
#include "ref/chunk/exchange.h"

/* Pairs of one head; a rank that has none (the last) sends what nobody folds. */
static void pairs_of(const dp_sim *s, int hv, dp_affine *pair) {
    const int K = s->p->K, V = s->p->V, HV = s->p->HV;
    for (int r = 0; r < s->N; r++) {
        dp_affine_init(&pair[r], K, V);
        if (!s->M[r * HV + hv]) continue;
        memcpy(pair[r].M, s->M[r * HV + hv], sizeof(double) * (size_t)(K * K));
        memcpy(pair[r].H, s->H[r * HV + hv], sizeof(double) * (size_t)(K * V));
    }
}

typedef struct {
    double error, bound; /* relative to the state */
    dp_traffic t;
} found;

static void one_head(dp_exchange x, dp_payload p, double tolerance, int N, const dp_affine *pair,
                     found *f) {
    const int64_t KV = (int64_t)pair->K * pair->V;
    double *S = dp_doubles(N * KV), *want = dp_doubles(KV), bound[N];
    dp_exchange_states(x, p, tolerance, N, pair, S, bound, &f->t);
    for (int r = 1; r < N; r++) {
        double off = 0, size = 0;
        dp_affine_merge(pair, 0, r, 1, want);
        for (int64_t i = 0; i < KV; i++) {
            off += (S[r * KV + i] - want[i]) * (S[r * KV + i] - want[i]);
            size += want[i] * want[i];
        }
        f->error = fmax(f->error, sqrt(off / size));
        f->bound = fmax(f->bound, bound[r] / sqrt(size));
    }
    free(S);
    free(want);
}

static void line(const dp_sim *s, dp_exchange x, dp_payload p, double tolerance) {
    found f = {0};
    char name[32];
    for (int hv = 0; hv < s->p->HV; hv++) {
        dp_affine pair[s->N];
        pairs_of(s, hv, pair);
        one_head(x, p, tolerance, s->N, pair, &f);
        for (int r = 0; r < s->N; r++)
            dp_affine_free(&pair[r]);
    }
    snprintf(name, sizeof name, tolerance > 0 ? "%s %.0e" : "%s", dp_payload_names[p], tolerance);
    printf("%-10s %-15s %10.2e %9lld %12lld", dp_exchange_names[x], name, f.error,
           (long long)f.t.messages, (long long)f.t.bytes);
    if (tolerance > 0) printf("  bound %.2e", f.bound);
    putchar('\n');
}

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "cases/kda-long.case";
    const int N = argc > 2 ? atoi(argv[2]) : 8;
    dp_case c;
    dp_sim s;
    dp_err e = {0};
    if (dp_case_open(path, 1, &c, &e) || dp_sim_new(&s, &c.p, DP_BASE_FP64, N, DP_FAULT_NONE, &e)) {
        fprintf(stderr, "bench_exchange: %s\n", e.msg);
        return 2;
    }
    dp_sim_run(&s, DP_FP64, DP_EXCHANGE_ALLGATHER, 0);
    printf("%s, %d ranks, %d heads, K = %d, V = %d: error of S_in, messages, bytes\n", c.name, N,
           c.p.HV, c.p.K, c.p.V);
    for (int p = 0; p < DP_PAYLOAD_LOW_RANK; p++)
        for (int x = 0; x <= DP_EXCHANGE_SCAN; x++)
            line(&s, (dp_exchange)x, (dp_payload)p, 0);
    for (double tolerance = 1e-4; tolerance < 0.5; tolerance *= 10)
        line(&s, DP_EXCHANGE_ALLGATHER, DP_PAYLOAD_LOW_RANK, tolerance);
    dp_sim_free(&s);
    dp_case_free(&c);
    return 0;
}
