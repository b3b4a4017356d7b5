/* gpu/bench/bench_bwd.cu - time of the backward and of the convolution: CUDA events, median of many
 * runs after warm-up, random inputs larger than L2.
 *
 *   conv [runs]      the convolutions of q, k and v, forward and backward, against a copy of as
 *                    many bytes in the same run
 *   kda [runs]       forward and backward on one GPU, step by step, the shapes of the speed table;
 *                    few heads whole, then over segments
 *   table [runs]     the rows that speed is told by, step by step: KDA with many heads and with
 *                    few, GDN, KDA whose gates forget at once; each with everything recomputed,
 *                    then with nothing (save all)
 *   forward [runs]   the forward alone, KDA and GDN by number of tokens and heads, with both steps
 *   heads [runs]     forward and backward by number of heads, recomputed and all saved
 *   rows [runs]      forwards by themselves, last states out, ten calls behind each other: the rows
 *                    of the field's table
 *   shapes [runs]    forward and backward of K and V in {64, 128}, and of fp32 q, k, v
 *   wide [runs]      V of 256, beside as many heads of 128 (two calls of which are its columns) and
 *                    twice as many; with few heads on the simple path, too
 *   keys [runs]      KDA, MKDA with 2 and 4 keys a token, as many rows each, and GDN; all but KDA
 *                    also on the simple path
 *   token [runs]     recurrences token by token, forward, backward and every step, beside KDA by
 *                    every path
 *   cp N [runs]      forward and backward of T tokens on N GPUs over NCCL against T/N tokens on one
 *                    GPU, and every step by itself; M in bf16 (the pass's rounding), then in fp32
 *
 * The last also with the backward over whole sequences, one step after the other ("whole"). */
#include "../dp_conv.h"
#include "bench.h"

/* ---- the convolution ------------------------------------------------------------------------- */

static void conv_tensors(Memory &m, dpg_conv_tensors t[3], int64_t T, int D, int W) {
    const int64_t bytes = T * D * 2;
    for (int i = 0; i < 3; i++) {
        float *w = (float *)m.filled((size_t)D * (W + 1) * 4, 0x3e); /* 0.186 everywhere */
        t[i] = {random_words(m, T * D, i, DPG_BF16),
                random_words(m, T * D, i + 9, DPG_BF16),
                w,
                w + (size_t)D * W,
                m.room(bytes),
                m.room(bytes),
                (float *)m.room((size_t)D * W * 4),
                (float *)m.room(D * 4)};
    }
}

/* Forward: x read, y written; backward: x and dy read, dx written. Both with silu and bias. */
static void conv(int64_t T, int HV, int W, int runs) {
    int D = HV * 128;
    int64_t cu[2] = {0, T}, n = T * D;
    dpg_conv_problem p = {T, W, 1, 3, {D, D, D}, 1, cu, DPG_BF16};
    dpg_conv_tensors t[3];
    dpg_conv *c;
    dp_err e = {DP_OK, ""};
    cudaStream_t s;
    Memory memory;
    CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    DP(e, dpg_conv_create(&c, &p, 0, 1, &e));
    conv_tensors(memory, t, T, D, W);
    void *ws = memory.room(dpg_conv_workspace_bytes(c));
    CUDA(cudaDeviceSynchronize());
    double fwd = time_of(s, runs, [&] { DP(e, dpg_conv_forward(c, t, ws, NULL, s, &e)); });
    double bwd = time_of(s, runs, [&] { DP(e, dpg_conv_backward(c, t, ws, NULL, s, &e)); });
    double copy = time_of(s, runs, [&] {
        for (int i = 0; i < 3; i++)
            CUDA(cudaMemcpyAsync(t[i].y, t[i].x, n * 2, cudaMemcpyDeviceToDevice, s));
    });
    double f = 3.0 * n * 4, b = 3.0 * n * 6, rate = f / copy;
    printf("conv  T=%-7lld D=3x%-5d W=%d bf16 silu bias   forward %7.3f ms %5.2f TB/s (%2.0f%% of "
           "a copy)   backward %7.3f ms %5.2f TB/s (%2.0f%%)   copy %5.2f TB/s\n",
           (long long)T, D, W, fwd, f / fwd / 1e9, 100 * f / fwd / rate, bwd, b / bwd / 1e9,
           100 * b / bwd / rate, rate / 1e9);
    dpg_conv_destroy(c);
    cudaStreamDestroy(s);
    memory.release();
}

/* ---- the recurrence -------------------------------------------------------------------------- */

/* How the backward goes. */
struct Way {
    dpg_path bwd = DPG_PATH_FAST, fwd = DPG_PATH_FAST;
    int segments = 0;
    bool whole = false; /* over whole sequences, one step after the other */
    dpg_save save = DPG_SAVE_STATE;
    dp_format chain = DP_BF16;
};
static dpg_options options_of(const Way &way) {
    dpg_options o = {};
    o.base = DP_BASE_BF16;
    o.chain = way.chain;
    o.path = way.fwd;
    o.chain_how = DPG_CHAIN_AUGMENTED;
    o.backward = 1;
    o.bwd_path = way.bwd;
    o.send_dh_only = 1;
    o.whole_bwd = way.whole;
    o.segments = way.segments;
    o.save = way.save;
    return o;
}

struct Both : BenchRank {
    bool whole;
    Both(const Shape &s, int rank, int N, const Way &way = Way())
        : BenchRank(s, rank, N, options_of(way)), whole(way.whole) {}
    void forward_all(dpg_comm *c) { DP(err, dpg_forward(plan, &t, ws, c, stream, &err)); }
    void both_ways(dpg_comm *c) {
        forward_all(c);
        if (!whole) backward_steps(c, DPG_BWD_ALL);
        for (int step = 1; whole && step < DPG_BWD_ALL; step *= 2)
            backward_steps(c, step);
    }
    double time_forward(dpg_comm *c, int runs) {
        return time_of(stream, runs, [&] { forward_all(c); });
    }
    double time_both(dpg_comm *c, int runs) {
        return time_of(stream, runs, [&] { both_ways(c); });
    }
    double time_backward(dpg_comm *c, int runs, int steps) {
        return time_of(stream, runs, [&] { backward_steps(c, steps); });
    }
};

static const char *name_of(dpg_path p) {
    return p == DPG_PATH_FAST ? "fast" : p == DPG_PATH_TOKEN ? "token" : "simple";
}
static const char *name_of(const Shape &s) {
    switch (s.model) {
    case DP_GDN2: return "gdn2";
    case DP_GLA: return "gla";
    case DP_SSD: return "ssd";
    case DP_DELTAPRODUCT: return "dprod";
    case DP_DPLR: return "dplr";
    default: return s.one_gate ? "gdn" : "kda";
    }
}

static void kda(const Shape &s, int runs, const Way &way = Way()) {
    Both k(s, 0, 1, way);
    const struct {
        const char *name;
        int step;
    } part[] = {{"recompute", DPG_BWD_RECOMPUTE},
                {"dAv", DPG_BWD_DAV},
                {"pre", DPG_BWD_PRE},
                {"merge", DPG_BWD_MERGE},
                {"state", DPG_BWD_STATE},
                {"intra", DPG_BWD_INTRA},
                {"gate", DPG_BWD_GATE}};
    double fwd = k.time_forward(NULL, runs), all = k.time_backward(NULL, runs, DPG_BWD_ALL);
    printf("%s   T=%-7lld HV=%-3d K=%-3d V=%-3d R=%d %s %s%s, %s gates %2d segments  forward %7.3f "
           " backward %7.3f  both %7.3f ms:",
           name_of(s), (long long)s.T, s.HV, s.K, s.V, s.R, s.type == DPG_F32 ? "fp32" : "bf16",
           name_of(way.bwd), way.save == DPG_SAVE_ALL ? ", save all" : "", s.gates(),
           dpg_plan_segments(k.plan), fwd, all, k.time_both(NULL, runs));
    for (auto &p : part)
        if (dpg_plan_segments(k.plan) > 1 || !(p.step & (DPG_BWD_PRE | DPG_BWD_MERGE)))
            printf("  %s %.3f", p.name, k.time_backward(NULL, runs, p.step));
    printf("  workspace %.3f GB  kept %zu B\n", dpg_workspace_bytes(k.plan) / 1e9,
           dpg_kept_bytes(k.plan));
}

/* Every step of one rank, ms. */
struct Step {
    const char *name;
    int fwd, bwd;
};
static const Step all_steps[] = {
    {"chunks", DPG_STEP_CHUNKS, 0}, {"pre", DPG_STEP_PRE, 0},
    {"gather", DPG_STEP_GATHER, 0}, {"merge", DPG_STEP_MERGE, 0},
    {"state", DPG_STEP_STATE, 0},   {"| recompute", 0, DPG_BWD_RECOMPUTE},
    {"dAv", 0, DPG_BWD_DAV},        {"pre", 0, DPG_BWD_PRE},
    {"gather", 0, DPG_BWD_GATHER},  {"merge", 0, DPG_BWD_MERGE},
    {"state", 0, DPG_BWD_STATE},    {"intra", 0, DPG_BWD_INTRA},
    {"gate", 0, DPG_BWD_GATE}};
typedef std::vector<double> StepTimes;

static StepTimes time_steps(Both &k, dpg_comm *c, int runs) {
    StepTimes ms;
    for (const Step &s : all_steps)
        ms.push_back(time_of(k.stream, runs, [&] {
            s.fwd ? k.forward_steps(c, s.fwd) : k.backward_steps(c, s.bwd);
        }));
    return ms;
}
static void print_steps(const StepTimes &ms) {
    for (size_t i = 0; i < ms.size(); i++)
        printf("  %s %.3f", all_steps[i].name, ms[i]);
    printf("\n");
}

/* Times of one rank of N, or of one. */
struct Times {
    double forward = 0, both = 0, whole = 0;
    void raise_to(const Times &x) {
        forward = std::max(forward, x.forward);
        both = std::max(both, x.both);
        whole = std::max(whole, x.whole);
    }
};
static Times time_alone(const Shape &s, int runs) {
    Both k(s, 0, 1);
    return {k.time_forward(NULL, runs), k.time_both(NULL, runs), 0};
}
static double time_whole(const Shape &s, int rank, int N, Way way, dpg_comm *c, int runs) {
    way.whole = true;
    return Both(s, rank, N, way).time_both(c, runs);
}

/* Times of one rank, over NCCL, through windows, and T/N tokens alone. */
struct CpTimes {
    Times nccl, windows, alone;
    StepTimes steps;
};
static CpTimes cp_rank(const Shape &s, int N, const Way &way, dpg_comm *c, int runs) {
    CpTimes x;
    CUDA(cudaSetDevice(c->rank));
    {
        Both k(s, c->rank, N, way);
        x.nccl.forward = k.time_forward(c, runs);
        x.nccl.both = k.time_both(c, runs);
        x.steps = time_steps(k, c, runs);
        k.wait_all(c);
        k.connect(c);
        x.windows.forward = k.time_forward(c, runs);
        x.windows.both = k.time_both(c, runs);
        k.wait_all(c);
    }
    x.nccl.whole = time_whole(s, c->rank, N, way, c, runs);
    x.alone = time_alone(s.part(N), runs);
    return x;
}

/* Wall time of a step on all ranks: the slowest rank's median. */
static void cp(const Shape &s, int N, const Way &way, int runs) {
    Comms comm(Comms::NCCL, N, 20);
    std::vector<CpTimes> ranks(N);
    on_ranks(N, [&](int r) { ranks[r] = cp_rank(s, N, way, &comm[r], runs); });
    Times nccl, windows, one = ranks[0].alone;
    for (const CpTimes &r : ranks) {
        nccl.raise_to(r.nccl);
        windows.raise_to(r.windows);
    }
    printf("cp    T=%-7lld HV=%-3d %s gates  M %s  ranks %d  forward %7.3f (alone %7.3f, %+.1f%%)  "
           "forward and backward %7.3f (alone %7.3f, %+.1f%%; whole %7.3f, %+.1f%%)  with windows "
           "%7.3f (%+.1f%%), %7.3f (%+.1f%%)\n",
           (long long)s.T, s.HV, s.gates(), way.chain == DP_BF16 ? "bf16" : "fp32", N, nccl.forward,
           one.forward, percent_more(nccl.forward, one.forward), nccl.both, one.both,
           percent_more(nccl.both, one.both), nccl.whole, percent_more(nccl.whole, one.both),
           windows.forward, percent_more(windows.forward, one.forward), windows.both,
           percent_more(windows.both, one.both));
    for (int r = 0; r < N; r++) {
        printf("      rank %d:", r);
        print_steps(ranks[r].steps);
    }
}

/* ---- modes ----------------------------------------------------------------------------------- */

static Way by(dpg_path bwd, int segments = 0) {
    Way w;
    w.bwd = bwd;
    w.segments = segments;
    return w;
}
static int few(int runs) { return std::min(runs, 5); }

static void mode_conv(int, int runs) {
    for (int W : {4, 2, 8}) {
        conv(131072, 8, W, runs);
        conv(8192, 64, W, runs);
    }
}

static void mode_kda(int, int runs) {
    kda({8192, 64}, runs);
    for (int segments : {1, 0})
        for (float bias : {SLOW, FAST})
            for (int64_t T : {32768, 65536, 131072})
                kda({T, 8, bias}, runs, by(DPG_PATH_FAST, segments));
    kda({32768, 32, SLOW}, runs);
    kda({8192, 8}, few(runs), by(DPG_PATH_SIMPLE));
}

static void mode_table(int, int runs) {
    const Shape rows[] = {{8192, 64},
                          {131072, 8},
                          {8192, 64, FAST, 1, 128, 128, true},
                          {8192, 32, FAST, 1, 128, 128, true},
                          {131072, 8, FAST, 1, 128, 128, true},
                          {8192, 64, GONE},
                          {131072, 8, GONE}};
    for (const Shape &s : rows)
        for (dpg_save save : {DPG_SAVE_STATE, DPG_SAVE_ALL}) {
            Way way;
            way.save = save;
            kda(s, runs, way);
        }
}

static void mode_forward(int, int runs) {
    for (int64_t T : {8192, 65536})
        for (bool one_gate : {false, true})
            for (int HV : {64, 48, 40, 32, 24, 16}) {
                Shape s = {T, HV, SLOW, 1, 128, 128, one_gate};
                Both k(s, 0, 1);
                double all = k.time_forward(NULL, runs);
                auto step = [&](int steps) {
                    return time_of(k.stream, runs, [&] { k.forward_steps(NULL, steps); });
                };
                printf("%s   T=%-7lld HV=%-3d %s gates  forward %7.3f ms:  chunks %.3f  state "
                       "%.3f\n",
                       name_of(s), (long long)s.T, s.HV, s.gates(), all, step(DPG_STEP_CHUNKS),
                       step(DPG_STEP_STATE));
            }
}

static void mode_heads(int, int runs) {
    for (bool one_gate : {false, true})
        for (int64_t T : {8192, 2048})
            for (int HV : {64, 48, 40, 32, 24, 20, 16, 8})
                for (dpg_save save : {DPG_SAVE_STATE, DPG_SAVE_ALL}) {
                    Way way;
                    way.save = save;
                    kda({T, HV, FAST, 1, 128, 128, one_gate}, runs, way);
                }
}

/* B sequences of T tokens in all. */
static void mode_rows(int, int runs) {
    const int CALLS = 10;
    const bool kda = false, gdn = true;
    const struct {
        Shape s;
        int B;
    } rows[] = {{{8192, 64, FAST, 1, 128, 128, kda}, 1},  {{131072, 8, FAST, 1, 128, 128, kda}, 1},
                {{131072, 8, SLOW, 1, 128, 128, kda}, 1}, {{131072, 8, GONE, 1, 128, 128, kda}, 1},
                {{8192, 8, SLOW, 1, 128, 128, kda}, 1},   {{8192, 32, SLOW, 1, 128, 128, kda}, 8},
                {{8192, 64, FAST, 1, 128, 128, gdn}, 1},  {{8192, 8, SLOW, 1, 128, 128, gdn}, 1},
                {{131072, 8, SLOW, 1, 128, 128, gdn}, 1}, {{8192, 32, SLOW, 1, 128, 128, gdn}, 8},
                {{8192, 32, SLOW, 1, 128, 128, gdn}, 64}};
    for (auto &r : rows) {
        const Shape &s = r.s;
        dpg_options o = options_of(Way());
        o.backward = 0;
        std::vector<int64_t> cu(1);
        for (int b = 1; b <= r.B; b++)
            cu.push_back(s.T * b / r.B);
        BenchRank k(s, 0, 1, o, {}, cu);
        k.t.final_state = (float *)k.memory.room((size_t)r.B * s.HV * s.K * s.V * 4);
        double ms = time_of(k.stream, runs, [&] {
            for (int i = 0; i < CALLS; i++)
                DP(k.err, dpg_forward(k.plan, &k.t, k.ws, NULL, k.stream, &k.err));
        });
        printf("%s   %2d x %-6lld HV=%-3d %s gates  forward %7.4f ms\n", name_of(s), r.B,
               (long long)(s.T / r.B), s.HV, s.gates(), ms / CALLS);
    }
}

static void mode_shapes(int, int runs) {
    for (int K : {64, 128})
        for (int V : {64, 128}) {
            kda({8192, 64, FAST, 1, K, V}, runs);
            kda({131072, 8, FAST, 1, K, V}, runs);
            if (K == V) kda({8192, 64, FAST, 1, K, V, false, DPG_F32}, runs);
        }
}

static void mode_wide(int, int runs) {
    for (bool one_gate : {false, true}) {
        for (const Shape &s : {Shape{8192, 32, FAST}, Shape{131072, 4, FAST}})
            for (int twice : {0, 1, 2}) {
                Shape x = s;
                x.one_gate = one_gate;
                x.V = twice ? 128 : 256;
                x.HV = twice == 2 ? 2 * s.HV : s.HV;
                kda(x, runs);
            }
        for (dpg_path path : {DPG_PATH_FAST, DPG_PATH_SIMPLE}) {
            Way way = by(path);
            way.fwd = path;
            kda({8192, 4, FAST, 1, 128, 256, one_gate}, few(runs), way);
        }
    }
}

static void mode_keys(int, int runs) {
    for (int R : {1, 2, 4})
        kda({8192, 64 / R, FAST, R}, runs);
    kda({8192, 64, FAST, 1, 128, 128, true}, runs);
    for (dpg_path path : {DPG_PATH_FAST, DPG_PATH_SIMPLE})
        kda({8192, 8, FAST, 1, 128, 128, true}, few(runs), by(path));
    for (int R : {2, 4})
        for (dpg_path path : {DPG_PATH_FAST, DPG_PATH_SIMPLE})
            kda({8192, 16 / R, FAST, R}, few(runs), by(path));
}

/* SSD and Gated DeltaProduct, with 2 keys a token, have one gate a head. */
static void mode_token(int, int runs) {
    const Shape kda_shape = {8192, 16};
    for (dpg_path path : {DPG_PATH_FAST, DPG_PATH_SIMPLE, DPG_PATH_TOKEN}) {
        Way way = by(path);
        way.fwd = path;
        kda(kda_shape, few(runs), way);
    }
    for (dp_model m : {DP_GDN2, DP_GLA, DP_SSD, DP_DELTAPRODUCT, DP_DPLR}) {
        Shape s = kda_shape;
        Way way = by(DPG_PATH_TOKEN);
        s.model = m;
        s.R = m == DP_DELTAPRODUCT ? 2 : 1;
        s.one_gate = m == DP_SSD || m == DP_DELTAPRODUCT;
        way.fwd = DPG_PATH_TOKEN;
        kda(s, few(runs), way);
    }
}

static void mode_cp(int N, int runs) {
    for (int64_t T : {131072, 32768})
        for (float bias : {SLOW, FAST})
            for (dp_format chain : {DP_BF16, DP_FP32}) {
                Way way;
                way.chain = chain;
                cp({T, 32, bias}, N, way, runs);
            }
}

int main(int argc, char **argv) {
    const struct {
        const char *name;
        int ranks; /* default; 0: takes no such number */
        void (*run)(int N, int runs);
    } modes[] = {{"conv", 0, mode_conv},       {"kda", 0, mode_kda},     {"table", 0, mode_table},
                 {"forward", 0, mode_forward}, {"heads", 0, mode_heads}, {"rows", 0, mode_rows},
                 {"shapes", 0, mode_shapes},   {"wide", 0, mode_wide},   {"keys", 0, mode_keys},
                 {"token", 0, mode_token},     {"cp", 2, mode_cp}};
    const char *mode = argc > 1 ? argv[1] : "conv";
    setvbuf(stdout, NULL, _IOLBF, 0);
    devices("bench_bwd");
    for (auto &m : modes)
        if (!strcmp(mode, m.name)) {
            int at = m.ranks ? 3 : 2;
            m.run(m.ranks && argc > 2 ? atoi(argv[2]) : m.ranks, argc > at ? atoi(argv[at]) : 50);
            return 0;
        }
    fprintf(stderr, "bench_bwd: no mode %s\n", mode);
    return 2;
}
