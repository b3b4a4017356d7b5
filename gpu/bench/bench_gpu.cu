/* gpu/bench/bench_gpu.cu - time of the forward and of its steps: CUDA events, median of many runs
 * after warm-up. Random inputs are larger than L2: every input tensor of a listed shape holds at
 * least 128 MB.
 *
 *   [runs]           one GPU: the shapes of the speed table, simple path for comparison at a small
 *                    shape
 *   cp N [runs]      N GPUs over NCCL: forward of T tokens on N ranks against forward of T/N tokens
 *                    on one GPU
 *   ranks N [runs]   one GPU: forward of ranks 1 and N-1 of N, each alone, gathers as copies of as
 *                    many bytes behind a kernel that waits as long as the wires take */
#include "bench.h"

static dpg_options options_of(dpg_path path, dp_format chain = DP_FP32, int segments = 0,
                              dpg_chain_how how = DPG_CHAIN_AUGMENTED) {
    dpg_options o = {};
    o.base = DP_BASE_BF16;
    o.chain = chain;
    o.path = path;
    o.chain_how = how;
    o.segments = segments;
    return o;
}

static double time_steps(BenchRank &r, int steps, int runs, dpg_comm *comm = NULL) {
    return time_of(r.stream, runs, [&] { r.forward_steps(comm, steps); });
}

/* Shapes that ranks are timed with. */
static const Shape long_and_short[] = {
    {131072, 32, SLOW}, {131072, 32, FAST}, {32768, 32, SLOW}, {32768, 32, FAST}};

/* ---- one GPU --------------------------------------------------------------------------------- */

/* Bytes of the two kernels of a forward as they stand. */
struct Bytes {
    double in, between, out;
    explicit Bytes(const Shape &s) {
        double tiles = (double)s.T / 64 * s.HV * s.R, D = s.K;
        in = tiles * 64 * D * 2 * (2 + (s.one_gate ? 1. : 2.) / s.R);
        between = tiles * (64 * D * 2 * 4 + 64 * 64 * 2 + D * 4);
        out = tiles * 64 * D * 2 / s.R;
    }
};
static double floor_ms(double bytes) { return bytes / 4.3e9; } /* of a copy, 4.3 TB/s */

static void one(const Shape &s, dpg_path path, int runs) {
    BenchRank r(s, 0, 1, options_of(path));
    double chunks = time_steps(r, DPG_STEP_CHUNKS, runs),
           state = time_steps(r, DPG_STEP_STATE, runs), all = time_steps(r, DPG_STEP_ALL, runs);
    Bytes b(s);
    printf("%-6s %-4s T=%-7lld HV=%-3d K=V=%-4d chunks %8.3f ms (floor %6.3f)  state %8.3f ms "
           "(floor %6.3f)  forward %8.3f ms (floor of inputs and o %6.3f)\n",
           path == DPG_PATH_FAST ? "fast" : "simple",
           s.one_gate ? "gdn"
           : s.R == 1 ? "kda"
           : s.R == 2 ? "mkd2"
                      : "mkd4",
           (long long)s.T, s.HV, s.K, chunks, floor_ms(b.in + b.between), state,
           floor_ms(b.between + b.out), all, floor_ms(b.in + b.out));
}

/* The steps of one rank of N, without the gather: what context parallelism adds on each GPU. An
 * inner rank makes (M, H) for those behind it; the last one only for its own segments. */
static void one_rank(const Shape &s, int rank, int N, int runs) {
    dpg_comm unused;
    BenchRank r(s, rank, N, options_of(DPG_PATH_FAST));
    double chunks = time_steps(r, DPG_STEP_CHUNKS, runs, &unused),
           pre = time_steps(r, DPG_STEP_PRE, runs, &unused),
           merge = time_steps(r, DPG_STEP_MERGE, runs, &unused),
           state = time_steps(r, DPG_STEP_STATE, runs, &unused);
    printf("rank %d of %d, T=%-7lld HV=%-3d %s gates  chunks %7.3f  pre %7.3f  merge %7.3f  state "
           "%7.3f ms\n",
           rank, N, (long long)s.T, s.HV, s.gates(), chunks, pre, merge, state);
}

static void speed_table(int runs) {
    for (const Shape &s :
         {Shape{8192, 64}, Shape{32768, 8}, Shape{131072, 8},
          Shape{8192, 64, FAST, 1, 128, 128, true}, Shape{8192, 64, FAST, 1, 64, 64}})
        one(s, DPG_PATH_FAST, runs);
    for (float bias : {SLOW, FAST})
        for (int rank : {1, 3}) {
            one_rank({131072, 32, bias}, rank, 4, runs);
            one_rank({32768, 32, bias}, rank, 4, runs);
            one_rank({131072, 8, bias}, rank, 4, runs);
        }
    one({8192, 32, FAST, 2}, DPG_PATH_FAST, runs);
    one({8192, 16, FAST, 4}, DPG_PATH_FAST, runs);
    one({8192, 8, FAST, 2}, DPG_PATH_SIMPLE, 3);
    one({8192, 8, FAST, 2}, DPG_PATH_FAST, runs);
    one({8192, 8}, DPG_PATH_FAST, runs);
    one({8192, 8}, DPG_PATH_SIMPLE, 3);
}

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
        dpg_options o = options_of(DPG_PATH_FAST, DP_TF32X3, 0, chain);
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

__global__ void wait_ns(long long ns) {
    long long t0, t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t0));
    do
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    while (t - t0 < ns);
}

/* A communicator of one rank whose peers are always there. The wires take as long as NCCL over
 * NVLink: 20 us and 300 GB/s of received data. `blocks` of 512 threads are busy with it (NCCL's
 * kernel), or one thread (copy engines). */
static int blocks;
static dp_status wires(dpg_comm *c, const float *send, float *recv, size_t count, void *stream,
                       dp_err *e) {
    wait_ns<<<blocks ? blocks : 1, blocks ? 512 : 1, 0, (cudaStream_t)stream>>>(
        20000 + (long long)((c->N - 1) * count * 4 / 300.));
    return own_copies(c, send, recv, count, stream, e);
}

static void rank_alone(const Shape &s, int rank, int N, double alone, int runs) {
    BenchRank r(s, rank, N, options_of(DPG_PATH_FAST));
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
    BenchRank r(s, 0, 1, options_of(DPG_PATH_FAST));
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
    std::string mode = argc > 1 ? argv[1] : "";
    auto number = [&](int i, int otherwise) { return argc > i ? atoi(argv[i]) : otherwise; };
    setvbuf(stdout, NULL, _IOLBF, 0);
    devices("bench_gpu");
    if (mode == "cp" && argc > 2)
        cp(number(2, 0), number(3, 30));
    else if (mode == "ranks" && argc > 2)
        ranks(number(2, 0), number(3, 30));
    else
        speed_table(number(1, 50));
    return 0;
}
