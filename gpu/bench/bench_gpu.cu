/* gpu/bench/bench_gpu.cu - time of the forward of ranks and of its steps: CUDA events, median of
 * many runs after warm-up. Random inputs are larger than L2. One rank: bench_bwd forward, kda,
 * keys.
 *
 *   cp N [runs]      N GPUs over NCCL: forward of T tokens on N ranks against forward of T/N tokens
 *                    on one GPU
 *   ranks N [runs]   one GPU: forward of ranks 1 and N-1 of N, each alone, gathers as copies of as
 *                    many bytes behind a kernel that waits as long as the wires take */
#include "bench.h"

static dpg_options options_of(dp_format chain = DP_FP32, dpg_chain_how how = DPG_CHAIN_AUGMENTED) {
    dpg_options o = {};
    o.base = DP_BASE_BF16;
    o.chain = chain;
    o.path = DPG_PATH_FAST;
    o.chain_how = how;
    return o;
}

static double time_steps(BenchRank &r, int steps, int runs, dpg_comm *comm = NULL) {
    return time_of(r.stream, runs, [&] { r.forward_steps(comm, steps); });
}

/* Shapes that ranks are timed with. */
static const Shape long_and_short[] = {
    {131072, 32, SLOW}, {131072, 32, FAST}, {32768, 32, SLOW}, {32768, 32, FAST}};

/* ---- N GPUs ---------------------------------------------------------------------------------- */

/* Elements stored into windows, gathered by NCCL, by a dense chain; through windows, and ranks are
 * whole: the first leads. */
enum Exchange { WINDOWS, GATHERED, DENSE, WHOLE };
static const char *const exchanges[] = {"windows", "NCCL", "dense tf32x3", "whole"};

/* Times of every rank. */
struct CpTimes {
    std::vector<double> alone, all, at_once, pre, gather, merge, state;
    Together ranks;
    explicit CpTimes(int N)
        : alone(N), all(N), at_once(N), pre(N), gather(N), merge(N), state(N), ranks(N) {}

    void rank(const Shape &s, int i, int N, dpg_comm *comm, Exchange how, int runs) {
        CUDA(cudaSetDevice(i));
        dpg_chain_how chain = how == DENSE ? DPG_CHAIN_DENSE : DPG_CHAIN_AUGMENTED;
        dpg_options o = options_of(DP_TF32X3, chain);
        BenchRank single(s.part(N), 0, 1, o);
        o.segments = how == WHOLE;
        BenchRank r(s, i, N, o); /* no memory is asked for later */
        if (how == WINDOWS || how == WHOLE) r.connect(comm);
        alone[i] = time_steps(single, DPG_STEP_ALL, runs);
        all[i] = time_steps(r, DPG_STEP_ALL, runs, comm);
        r.wait_all(comm);
        at_once[i] = time_of(
            r.stream, runs, [&] { r.forward_steps(comm, DPG_STEP_ALL); }, [&] { ranks.meet(); });
        if (how == WINDOWS || how == WHOLE) { /* one transfer of states */
            pre[i] = time_steps(r, DPG_STEP_PRE | DPG_STEP_GATHER | DPG_STEP_MERGE, runs, comm);
        } else {
            pre[i] = time_steps(r, DPG_STEP_PRE, runs, comm);
            gather[i] = time_steps(r, DPG_STEP_GATHER, runs, comm);
            merge[i] = time_steps(r, DPG_STEP_MERGE, runs, comm);
        }
        state[i] = time_steps(r, DPG_STEP_STATE, runs, comm);
        r.wait_all(comm);
    }
};

static void cp_shape(const Shape &s, int N, Comms &comm, Exchange how, int runs) {
    CpTimes x(N);
    on_ranks(N, [&](int i) { x.rank(s, i, N, &comm[i], how, runs); });
    double alone = largest(x.alone), all = largest(x.all), at_once = largest(x.at_once);
    printf("cp N=%d T=%-7lld HV=%d %s gates %-12s T/N on one GPU %7.3f ms  CP %7.3f ms  overhead "
           "%5.1f%%  from a common start %7.3f ms %+5.1f%%  %s %6.3f  gather %6.3f  merge %6.3f  "
           "state %6.3f ms\n",
           N, (long long)s.T, s.HV, s.gates(), exchanges[how], alone, all, percent_more(all, alone),
           at_once, percent_more(at_once, alone),
           how == WINDOWS || how == WHOLE ? "pre to merge" : "pre", largest(x.pre),
           largest(x.gather), largest(x.merge), largest(x.state));
}

static void cp(int N, int runs) {
    Comms comm(Comms::NCCL, N, 20);
    for (const Shape &s : long_and_short)
        for (Exchange how : {WINDOWS, WHOLE, GATHERED, DENSE})
            if (how != DENSE || s.bias > -10) cp_shape(s, N, comm, how, runs);
}

/* ---- ranks alone ----------------------------------------------------------------------------- */

/* A communicator of one rank whose peers are always there. `blocks` of 512 threads are busy with it
 * (NCCL's kernel), or one thread (copy engines). */
static int blocks;
static dp_status wires(dpg_comm *c, const float *send, float *recv, size_t count, void *stream,
                       dp_err *e) {
    wait_for((c->N - 1) * count, stream, blocks);
    return own_copies(c, send, recv, count, stream, e);
}

static void rank_alone(const Shape &s, int rank, int N, double alone, int runs) {
    BenchRank r(s, rank, N, options_of());
    dpg_comm c = alone_among(rank, N);
    c.all_gather = wires;
    blocks = 16;
    double by_kernel = time_steps(r, DPG_STEP_ALL, runs, &c), step[5];
    blocks = 0;
    double by_engines = time_steps(r, DPG_STEP_ALL, runs, &c);
    blocks = 16;
    for (int j = 0; j < 5; j++)
        step[j] = time_steps(r, 1 << j, runs, &c);
    printf("rank %d of %d T=%-7lld HV=%d %s gates segments %2d  alone %6.3f ms  CP %6.3f ms "
           "%+5.1f%%  (gather by copy engines %6.3f ms %+5.1f%%)  chunks %6.3f  pre %6.3f  "
           "gather %6.3f  merge %6.3f  state %6.3f ms\n",
           rank, N, (long long)s.T, s.HV, s.gates(), dpg_plan_segments(r.plan), alone, by_kernel,
           percent_more(by_kernel, alone), by_engines, percent_more(by_engines, alone), step[0],
           step[1], step[2], step[3], step[4]);
}

/* The whole forward on one GPU. */
static double time_whole(const Shape &s, int runs) {
    BenchRank r(s, 0, 1, options_of());
    return time_steps(r, DPG_STEP_ALL, runs);
}

static void ranks(int N, int runs) {
    for (const Shape &s : long_and_short) {
        double alone = time_whole(s.part(N), runs);
        for (int rank : {1, N - 1})
            rank_alone(s, rank, N, alone, runs);
    }
}

int main(int argc, char **argv) {
    std::string mode = argc > 2 ? argv[1] : "";
    if (mode != "cp" && mode != "ranks") {
        fprintf(stderr, "usage: bench_gpu cp|ranks N [runs]\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    devices("bench_gpu");
    (mode == "cp" ? cp : ranks)(atoi(argv[2]), argc > 3 ? atoi(argv[3]) : 30);
    return 0;
}
