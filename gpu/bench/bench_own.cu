/* gpu/bench/bench_own.cu - the cost of ranks that own their tokens in parts. It times forward and
 * backward of ranks 1 and N - 1 of N, each alone on one GPU. A gather is a copy of as many bytes,
 * after a kernel that waits for the transfer time (20 us, 300 GB/s of received data). Ranks of T /
 * N tokens each are timed for comparison. With N = 1 one rank owns all parts. The row `heads` has
 * by_part and the exchange of heads; a rank's own words replace those of the others.
 *
 *   [runs [N]]   CUDA events, medians, HV = 32, K = V = 128; N: 4 */
#include "bench.h"

static dp_status wires(dpg_comm *c, const float *send, float *recv, size_t count, void *stream,
                       dp_err *e) {
    wait_for((c->N - 1) * count, stream);
    return own_copies(c, send, recv, count, stream, e);
}

static dp_status wires_to_all(dpg_comm *c, const float *send, const dpg_piece *gives, float *recv,
                              const dpg_piece *gets, void *stream, dp_err *) {
    const dpg_piece own = gives[c->rank];
    size_t comes = 0;
    for (int r = 0; r < c->N; r++)
        comes += r == c->rank ? 0 : gets[r].n;
    wait_for(comes, stream);
    for (int r = 0; r < c->N; r++)
        CUDA(cudaMemcpyAsync(recv + gets[r].at, send + own.at, 4 * std::min(own.n, gets[r].n),
                             cudaMemcpyDeviceToDevice, (cudaStream_t)stream));
    return DP_OK;
}

struct Times {
    double forward, backward, step[5];
};

/* Who owns what, and whether heads are exchanged. */
struct Owned {
    dp_own kind;
    int heads;
};

static Times rank_alone(const Shape &s, const Owned &w, int rank, int N, int runs) {
    const Table table(w.kind, s.T, N);
    dpg_options o = {};
    o.base = DP_BASE_BF16;
    o.chain = DP_FP32;
    o.path = DPG_PATH_FAST;
    o.chain_how = DPG_CHAIN_AUGMENTED;
    o.backward = 1;
    o.send_dh_only = !w.heads;
    if (w.heads) o.exchange = DP_EXCHANGE_HEADS;
    Times x;
    BenchRank r(s, rank, N, o, table.own);
    dpg_comm c = alone_among(rank, N);
    c.all_gather = wires;
    c.all_to_all = wires_to_all;
    x.forward = time_of(r.stream, runs, [&] { r.forward_steps(&c, DPG_STEP_ALL); });
    for (int i = 0; i < 5; i++)
        x.step[i] = time_of(r.stream, runs, [&] { r.forward_steps(&c, 1 << i); });
    x.backward = time_of(r.stream, runs, [&] { r.backward_steps(&c, DPG_BWD_ALL); });
    return x;
}

static void compare(const Shape &s, int rank, int N, int runs) {
    Times even = {};
    for (const Owned &w : {Owned{DP_OWN_EVEN, 0}, Owned{DP_OWN_ZIGZAG, 0}, Owned{DP_OWN_UNEVEN, 0},
                           Owned{DP_OWN_GRID, 0}, Owned{DP_OWN_GRID, 1}}) {
        if (N == 1 && (w.kind == DP_OWN_ZIGZAG || w.kind == DP_OWN_UNEVEN)) continue;
        Times x = rank_alone(s, w, rank, N, runs);
        if (w.kind == DP_OWN_EVEN) even = x;
        printf("rank %d of %d T=%-7lld %s gates %-12s forward %7.3f ms %+7.1f%%  backward %7.3f ms "
               "%+7.1f%%  "
               "chunks %6.3f  pre %6.3f  gather %6.3f  merge %6.3f  state %6.3f ms\n",
               rank, N, (long long)s.T, s.gates(), w.heads ? "grid, heads" : dp_own_names[w.kind],
               x.forward, percent_more(x.forward, even.forward), x.backward,
               percent_more(x.backward, even.backward), x.step[0], x.step[1], x.step[2], x.step[3],
               x.step[4]);
    }
}

int main(int argc, char **argv) {
    int runs = argc > 1 ? atoi(argv[1]) : 11, N = argc > 2 ? atoi(argv[2]) : 4;
    setvbuf(stdout, NULL, _IOLBF, 0);
    devices("bench_own");
    for (int64_t T : {32768, 131072})
        for (float bias : {SLOW, FAST}) {
            compare({T, 32, bias}, 0, 1, runs);
            for (int rank : {1, N - 1})
                compare({T, 32, bias}, rank, N, runs);
        }
    return 0;
}
