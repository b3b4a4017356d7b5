/* Prices of exchanges (exchange_price.h). */
#include "exchange_price.h"

#include <assert.h>
#include <math.h>

#define C 64     /* tokens a chunk */
#define PART 128 /* tokens a part of grid */

const dp_exchange_machine dp_exchange_usual = {5e-6, 2e11, 4e14};

int64_t dp_payload_M_bytes(dp_payload p, int K, int rank) {
    const int64_t bytes = dp_payloads[p].bytes;
    if (dp_payloads[p].tolerance > 0) return 2 * bytes * K * rank;
    return bytes * K * (p == DP_PAYLOAD_DIAGONAL ? 1 : K);
}

int64_t dp_payload_H_bytes(dp_payload p, int K, int V) {
    return (int64_t)dp_payloads[p].bytes * K * V;
}

/* Flops of one product with M. */
static double product(const dp_exchange_size *s, double columns) {
    const double K = s->K;
    if (s->payload == DP_PAYLOAD_DIAGONAL) return K * columns;
    if (dp_payloads[s->payload].tolerance > 0) return 4 * K * s->rank * columns;
    return 2 * K * K * columns;
}

static double pass_of(const dp_exchange_size *s, const dp_exchange_machine *m) {
    return ceil((double)s->L / C) * 4 * C * s->K * s->V * s->HV / m->flops_per_s;
}

dp_exchange_price dp_exchange_price_of(dp_exchange x, const dp_exchange_size *s,
                                       const dp_exchange_machine *m) {
    const double N = s->N, HV = s->HV, K = s->K, V = s->V, chunks = ceil((double)s->L / C),
                 pass = pass_of(s, m),
                 chain = s->payload == DP_PAYLOAD_DIAGONAL
                             ? 0
                             : chunks * (2 * C * K * K + 2 * K * K * K) * HV / m->flops_per_s,
                 pre = pass + chain,
                 state = HV * (double)dp_payload_H_bytes(s->payload, s->K, s->V),
                 pair = state + HV * (double)dp_payload_M_bytes(s->payload, s->K, s->rank),
                 fold = product(s, V) * HV / m->flops_per_s,
                 combine = (product(s, K) + product(s, V)) * HV / m->flops_per_s,
                 hop = m->latency_s + state / m->bytes_per_s,
                 hop2 = m->latency_s + pair / m->bytes_per_s;
    dp_exchange_price p = {.possible = 1};
    switch (x) {
    case DP_EXCHANGE_ALLGATHER:
        p = (dp_exchange_price){1, N * (N - 1), N * (N - 1) * pair,
                                pre + (N - 1) * (hop2 + fold) + pass, pre + pass};
        break;
    case DP_EXCHANGE_WINDOWS: /* one latency, since no read waits for another */
        p = (dp_exchange_price){
            1, N * (N - 1) / 2, N * (N - 1) / 2 * pair,
            pre + m->latency_s + (N - 1) * (pair / m->bytes_per_s + fold) + pass, pre + pass};
        break;
    case DP_EXCHANGE_RING:
        p = (dp_exchange_price){1, N - 1, (N - 1) * state, pre + (N - 1) * (hop + fold) + pass,
                                pre + pass};
        break;
    case DP_EXCHANGE_SCAN:
        p.messages = N - 1;
        p.bytes = (N - 1) * state;
        p.compute_s = pre + pass;
        p.path_s = p.compute_s + (N > 1 ? hop : 0);
        for (int d = 1; d < s->N; d *= 2) {
            p.messages += N - d;
            p.bytes += (N - d) * pair;
            p.path_s += hop2 + combine;
        }
        break;
    case DP_EXCHANGE_SERIAL:
        p = (dp_exchange_price){1, N - 1, (N - 1) * state, N * pass + (N - 1) * hop, N * pass};
        break;
    case DP_EXCHANGE_HEADS: /* q k v g beta there, o back, in bf16; the pass is as long in flops */
        p.possible = !dp_exchange_refuses(x, s->N, s->HV);
        p.messages = 2 * N * (N - 1);
        p.bytes = 2.0 * (double)s->L * (N - 1) * HV * (3 * K + 2 * V + 1);
        p.compute_s = pass;
        p.path_s = pass + (N > 1 ? 2 * m->latency_s : 0) + p.bytes / N / m->bytes_per_s;
        break;
    case DP_EXCHANGE_GRID: {
        const double parts = ceil((double)s->L / PART);
        p = (dp_exchange_price){1, N - 1, (N - 1) * state,
                                pre + (N - 1) * hop + (N * parts - 1) * fold + pass, pre + pass};
        break;
    }
    default: assert(0);
    }
    return p;
}

double dp_exchange_buffer_bytes(dp_exchange x, const dp_exchange_size *s) {
    const double state = (double)s->HV * (double)dp_payload_H_bytes(s->payload, s->K, s->V),
                 M = (double)s->HV * (double)dp_payload_M_bytes(s->payload, s->K, s->rank),
                 tokens = 2.0 * (double)s->L * s->HV * (3.0 * s->K + 2.0 * s->V + 1);
    switch (x) {
    case DP_EXCHANGE_ALLGATHER: return s->N * (state + M);
    case DP_EXCHANGE_WINDOWS: return state + M;
    case DP_EXCHANGE_SCAN: return 2 * (state + M);
    case DP_EXCHANGE_HEADS: return 2 * tokens;
    default: return 2 * state;
    }
}

dp_exchange_saved dp_exchange_saved_of(const dp_exchange_size *s) {
    const int64_t numbers = (int64_t)s->HV * s->K * s->V;
    return (dp_exchange_saved){4 * numbers, 2 * numbers * ((s->L + C - 1) / C)};
}

double dp_exchange_pipeline_s(const dp_exchange_size *s, int micro, const dp_exchange_machine *m) {
    const double state = (double)s->HV * (double)dp_payload_H_bytes(s->payload, s->K, s->V),
                 hop = m->latency_s + state / m->bytes_per_s, pass = pass_of(s, m);
    return s->N * pass + (s->N - 1) * hop + (micro - 1) * fmax(pass, hop);
}

dp_mesh_price dp_mesh_price_of(int cp, int tp, int64_t T, const dp_exchange_size *s,
                               const dp_exchange_machine *m) {
    if (s->HV % tp || T % cp) return (dp_mesh_price){0};
    dp_exchange_size own = *s;
    own.N = cp;
    own.HV = s->HV / tp;
    own.L = T / cp;
    const dp_exchange_price x = dp_exchange_price_of(DP_EXCHANGE_ALLGATHER, &own, m);
    const double sums = 2.0 * (double)own.L * s->HV * s->V, hops = 2.0 * (tp - 1),
                 sent = hops / tp * sums;
    return (dp_mesh_price){.possible = 1,
                           .states_bytes = x.bytes / cp,
                           .tp_bytes = sent,
                           .exchange_s = x.path_s - x.compute_s,
                           .reduce_s = hops * m->latency_s + sent / m->bytes_per_s,
                           .compute_s = cp > 1 ? x.compute_s : pass_of(&own, m)};
}
