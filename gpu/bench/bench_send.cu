/* gpu/bench/bench_send.cu - the cost of exchanges and payloads. The time begins when N ranks of T /
 * N tokens have formed their pairs. It ends when the last one has its initial states, and includes
 * the synchronisation of host threads. Further columns: the time of all ranks' forwards and
 * backwards, the words that rank 0 sends, and the error of the last rank's state. The error is
 * relative to the all-gather with payload full. Ranks that exchange heads form no pair. Their time
 * is the transfer of inputs to the ranks of their heads, and of results or gradients back.
 *
 *   [runs] [N]        ranks that share one GPU: copies stay on it, latencies are those of calls and
 *                     kernels, no wire's, and one GPU does the work of N. N: 2, 4 and 8
 *   [runs] [N] nccl   ranks with a GPU each, each timed from its own start
 *
 *   [runs] [N] nccl micro
 *                     1, 4 and 16 forwards behind each other, T of 8,192 and 131,072: ms of each
 *
 * CUDA events, medians, nothing forgotten, T = 131,072, HV = 32, K = V = 128 */
#include "bench.h"
#include <memory>

struct Way {
    dp_exchange exchange;
    dp_payload payload;
    int dh_only;
    dp_own own = DP_OWN_EVEN;
    int share = 1; /* value heads that have one query head */
};
static const Way ways[] = {
    {DP_EXCHANGE_ALLGATHER, DP_PAYLOAD_FULL, 0},
    {DP_EXCHANGE_ALLGATHER, DP_PAYLOAD_FULL, 1},
    {DP_EXCHANGE_ALLGATHER, DP_PAYLOAD_BF16X2, 0},
    {DP_EXCHANGE_ALLGATHER, DP_PAYLOAD_BF16, 0},
    {DP_EXCHANGE_ALLGATHER, DP_PAYLOAD_LESS_I, 0},
    {DP_EXCHANGE_RING, DP_PAYLOAD_FULL, 0},
    {DP_EXCHANGE_RING, DP_PAYLOAD_BF16, 0},
    {DP_EXCHANGE_SCAN, DP_PAYLOAD_FULL, 0},
    {DP_EXCHANGE_SCAN, DP_PAYLOAD_LESS_I, 0},
    {DP_EXCHANGE_SERIAL, DP_PAYLOAD_FULL, 0},
    {DP_EXCHANGE_HEADS, DP_PAYLOAD_FULL, 0},
    {DP_EXCHANGE_HEADS, DP_PAYLOAD_FULL, 0, DP_OWN_EVEN, 32}, /* no N divides one query head */
    {DP_EXCHANGE_ALLGATHER, DP_PAYLOAD_FULL, 0, DP_OWN_ZIGZAG},
    {DP_EXCHANGE_RING, DP_PAYLOAD_FULL, 0, DP_OWN_ZIGZAG},
    {DP_EXCHANGE_SCAN, DP_PAYLOAD_FULL, 0, DP_OWN_ZIGZAG},
    {DP_EXCHANGE_SERIAL, DP_PAYLOAD_FULL, 0, DP_OWN_ZIGZAG},
    {DP_EXCHANGE_HEADS, DP_PAYLOAD_FULL, 0, DP_OWN_ZIGZAG},
    {DP_EXCHANGE_ALLGATHER, DP_PAYLOAD_FULL, 1, DP_OWN_GRID},
    {DP_EXCHANGE_RING, DP_PAYLOAD_FULL, 0, DP_OWN_GRID},
    {DP_EXCHANGE_SCAN, DP_PAYLOAD_FULL, 0, DP_OWN_GRID}};

/* Words that rank 0 sends in a forward. */
static size_t sent;
static dpg_comm called;
static dp_status counted_gather(dpg_comm *c, const float *send, float *recv, size_t count,
                                void *stream, dp_err *e) {
    if (c->rank == 0) sent += count;
    return called.all_gather(c, send, recv, count, stream, e);
}
static dp_status counted_hand(dpg_comm *c, const float *send, float *recv, size_t count, int by,
                              void *stream, dp_err *e) {
    if (c->rank == 0 && send) sent += count;
    return called.hand(c, send, recv, count, by, stream, e);
}
static dp_status counted_to_all(dpg_comm *c, const float *send, const dpg_piece *gives, float *recv,
                                const dpg_piece *gets, void *stream, dp_err *e) {
    for (int r = 1; r < c->N && c->rank == 0; r++)
        sent += gives[r].n;
    return called.all_to_all(c, send, gives, recv, gets, stream, e);
}

/* A host thread each. */
struct Ranks {
    int N;
    Table table;
    Comms comm;
    std::vector<std::unique_ptr<BenchRank>> rank;
    std::vector<cudaEvent_t> begun, ended;

    Ranks(const Shape &s, int n, const Way &w, Comms::Kind kind)
        : N(n), table(w.own, s.T, n), comm(kind, n, 20), rank(n), begun(n), ended(n) {
        dpg_options o = {};
        o.base = DP_BASE_BF16;
        o.chain = DP_FP32;
        o.path = DPG_PATH_FAST;
        o.chain_how = w.exchange == DP_EXCHANGE_SERIAL ? DPG_CHAIN_DENSE : DPG_CHAIN_AUGMENTED;
        o.backward = 1;
        o.send_dh_only = w.dh_only;
        o.exchange = w.exchange;
        o.payload = w.payload;
        called = comm[0];
        for (int r = 0; r < N; r++) {
            CUDA(cudaSetDevice(comm[r].device));
            rank[r].reset(new BenchRank(s, r, N, o, table.own));
            CUDA(cudaEventCreate(&begun[r]));
            CUDA(cudaEventCreate(&ended[r]));
            comm[r].all_gather = counted_gather;
            comm[r].hand = counted_hand;
            comm[r].all_to_all = counted_to_all;
        }
    }
    ~Ranks() {
        for (int r = 0; r < N; r++) {
            CUDA(cudaSetDevice(comm[r].device));
            rank[r].reset();
            CUDA(cudaEventDestroy(begun[r]));
            CUDA(cudaEventDestroy(ended[r]));
        }
    }
    /* From when all ranks have done `before` to when the last has done `f`; ms. */
    template <class Before, class F> double time(int runs, Before before, F f) {
        std::vector<float> ms(runs);
        for (int i = -2; i < runs; i++) {
            on_ranks(N, [&](int r) {
                CUDA(cudaSetDevice(comm[r].device));
                before(r);
                rank[r]->wait_all(&comm[r]);
                CUDA(cudaEventRecord(begun[r], rank[r]->stream));
                f(r);
                CUDA(cudaEventRecord(ended[r], rank[r]->stream));
                rank[r]->wait_all(&comm[r]);
            });
            float longest = 0, x;
            for (int r = 0; r < N; r++) {
                const int from = comm[r].device == comm[0].device ? 0 : r;
                CUDA(cudaEventElapsedTime(&x, begun[from], ended[r]));
                longest = fmaxf(longest, x);
            }
            if (i >= 0) ms[i] = longest;
        }
        return median(ms);
    }
    double steps(int runs, int before, int which) {
        return time(
            runs,
            [&](int r) {
                if (before) rank[r]->forward_steps(&comm[r], before);
            },
            [&](int r) { rank[r]->forward_steps(&comm[r], which); });
    }
    double back(int runs, int before, int which) {
        return time(
            runs,
            [&](int r) {
                if (before) rank[r]->backward_steps(&comm[r], before);
            },
            [&](int r) { rank[r]->backward_steps(&comm[r], which); });
    }
};

/* The distance of the last rank's state from that of T / N tokens and the all-gather in full, which
 * comes first; where that means anything. */
static void print_off(Ranks &x, const Way &w, Vec *full) {
    if (w.own || w.exchange == DP_EXCHANGE_HEADS) {
        printf("S_in off -         ");
        return;
    }
    CUDA(cudaSetDevice(x.comm[x.N - 1].device));
    const Vec state = x.rank[x.N - 1]->stage("S_in");
    if (full->empty()) *full = state;
    printf("S_in off %8.2e  ", rel_fro(state, *full));
}

static void measure(Shape s, int N, const Way &w, Comms::Kind kind, int runs, Vec *full) {
    s.share = w.share;
    Ranks x(s, N, w, kind);
    const double exchange =
        x.steps(runs, DPG_STEP_CHUNKS | DPG_STEP_PRE, DPG_STEP_GATHER | DPG_STEP_MERGE);
    sent = 0;
    const double forward = x.steps(runs, 0, DPG_STEP_ALL), mb = sent * 4e-6 / (runs + 2);
    printf("%d ranks  %-9s %-6s %-7s %-6s H %2d  exchange %7.3f ms  rank 0 sends %7.2f MB  ", N,
           dp_exchange_names[w.exchange], dp_payload_names[w.payload], w.dh_only ? "dh-only" : "",
           dp_own_names[w.own], s.HV / s.share, exchange, mb);
    print_off(x, w, full);
    const double back =
        x.back(runs, DPG_BWD_RECOMPUTE | DPG_BWD_DAV | DPG_BWD_PRE, DPG_BWD_GATHER | DPG_BWD_MERGE);
    printf("backward %7.3f ms  all forwards %7.3f ms, backwards %7.3f ms\n", back, forward,
           x.back(runs, 0, DPG_BWD_ALL));
}

/* Ranks go on to the next micro-batch while others are at this one. */
static void micro(Shape s, int N, Comms::Kind kind, int runs) {
    for (const Way &w :
         {Way{DP_EXCHANGE_ALLGATHER, DP_PAYLOAD_FULL, 0}, Way{DP_EXCHANGE_RING, DP_PAYLOAD_FULL, 0},
          Way{DP_EXCHANGE_SERIAL, DP_PAYLOAD_FULL, 0}}) {
        Ranks x(s, N, w, kind);
        printf("%d ranks  T=%-7lld HV=%-3d %-9s forward, ms for each of", N, (long long)s.T, s.HV,
               dp_exchange_names[w.exchange]);
        for (int count : {1, 4, 16})
            printf("  %d: %.3f", count,
                   x.time(
                       runs, [](int) {},
                       [&](int r) {
                           for (int i = 0; i < count; i++)
                               x.rank[r]->forward_steps(&x.comm[r], DPG_STEP_ALL);
                       }) /
                       count);
        printf("\n");
    }
}

int main(int argc, char **argv) {
    const int runs = argc > 1 ? atoi(argv[1]) : 11, only = argc > 2 ? atoi(argv[2]) : 0;
    const Comms::Kind kind = argc > 3 ? Comms::NCCL : Comms::SHARED;
    const bool in_a_row = argc == 5 && !strcmp(argv[4], "micro");
    if (argc > 5 || (argc > 3 && strcmp(argv[3], "nccl")) || (argc > 4 && !in_a_row) ||
        (argc > 2 && only != 2 && only != 4 && only != 8)) {
        fprintf(stderr, "usage: bench_send [runs] [2|4|8] [nccl] [micro]\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    devices("bench_send");
    const Shape s = {131072, 32, SLOW};
    if (in_a_row) {
        for (int64_t T : {8192, 131072})
            micro({T, 32, SLOW}, only, kind, runs);
        return 0;
    }
    for (int N : {2, 4, 8}) {
        Vec full;
        for (const Way &w : ways)
            if (!only || N == only) measure(s, N, w, kind, runs, &full);
    }
    return 0;
}
