/* harness/bench/bench_exchange.c - the effect of each exchange and payload on the states that enter
 * the ranks of a case, and on their gradients. It prints the largest error over ranks and heads,
 * relative to the state, with messages and bytes of all heads, one direction. Ranks are in fp64, so
 * that the exchange alone rounds.
 *
 * usage: bench_exchange [CASE.case [ranks]]
 *            default cases/kda-long.case 8
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "harness/case/case.h"
#include "harness/simulated/ranks.h"

/* Largest over ranks and heads of |got - want| / |want|. */
static double largest(double **got, double **want, int n, int64_t size) {
    double most = 0;
    for (int i = 0; i < n; i++) {
        double off = 0, length = 0;
        for (int64_t k = 0; got[i] && k < size; k++) {
            off += (got[i][k] - want[i][k]) * (got[i][k] - want[i][k]);
            length += want[i][k] * want[i][k];
        }
        if (length > 0) most = fmax(most, sqrt(off / length));
    }
    return most;
}

static void line(dp_sim *s, const dp_sim *want, dp_exchange x, dp_payload p) {
    const int n = s->N * s->p->HV;
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    s->payload = p;
    dp_sim_run_ranks(s, DP_FP64, x, 0);
    const dp_traffic sent = s->sent;
    if (want->have_backward) dp_sim_run_ranks(s, DP_FP64, x, 1);
    printf("%-10s %-14s %10.2e %10.2e %9lld %12lld\n", dp_exchange_names[x], dp_payload_names[p],
           largest(s->S_in, want->S_in, n, KV), largest(s->dS_out, want->dS_out, n, KV),
           (long long)sent.messages, (long long)sent.bytes);
}

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "cases/kda-long.case";
    const int N = argc > 2 ? atoi(argv[2]) : 8;
    dp_case c;
    dp_sim s, want;
    dp_err e = {0};
    if (dp_case_open(path, 1, &c, &e) || dp_sim_new(&s, &c.p, DP_BASE_FP64, N, DP_FAULT_NONE, &e) ||
        dp_sim_new(&want, &c.p, DP_BASE_FP64, N, DP_FAULT_NONE, &e)) {
        fprintf(stderr, "bench_exchange: %s\n", e.msg);
        return 2;
    }
    dp_sim_run(&want, DP_FP64, DP_EXCHANGE_ALLGATHER, c.backward);
    dp_sim_run(&s, DP_FP64, DP_EXCHANGE_ALLGATHER, c.backward);
    printf("%s, %d ranks, %d heads, K = %d, V = %d\n", c.name, N, c.p.HV, c.p.K, c.p.V);
    printf("%-10s %-14s %10s %10s %9s %12s\n", "exchange", "payload", "S_in", "dS_out", "messages",
           "bytes");
    for (int p = 0; p < DP_NRUN_PAYLOADS; p++)
        for (int x = 0; x < DP_EXCHANGE_HEADS; x++)
            line(&s, &want, (dp_exchange)x, (dp_payload)p);
    dp_sim_free(&s);
    dp_sim_free(&want);
    dp_case_free(&c);
    return 0;
}
