/* gpu/bench/bench_gpu.cu - time of the forward and of its steps: CUDA events, median of many runs
 * after warm-up, random inputs larger than L2 (every input tensor of a listed shape holds at least
 * 128 MB).
 *
 *   [runs]           one GPU: the shapes of the speed table, simple path for comparison at a small
 *                    shape
 *   cp N [runs]      N GPUs over NCCL: forward of T tokens on N ranks against forward of T/N tokens
 *                    on one GPU
 *   chain [runs]     2 GPUs, windows: ranks 2 and 3 of 4, states by way of all four (see
 *                    chain_of_four)
 *   ranks N [runs]   one GPU: forward of ranks 1 and N-1 of N, each alone, gathers as copies of as
 *                    many bytes behind a kernel that waits as long as the wires take */
#include "../dp_gpu.h"
#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <thread>
#include <vector>

#define CUDA(x)                                                                                 \
    do {                                                                                        \
        cudaError_t e_ = (x);                                                                   \
        if (e_ != cudaSuccess) {                                                                \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
            exit(2);                                                                            \
        }                                                                                       \
    } while (0)
#define DP(e, x)                                                                 \
    do {                                                                         \
        if ((x) != DP_OK) {                                                      \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, (e).msg); \
            exit(2);                                                             \
        }                                                                        \
    } while (0)

__global__ void fill(__nv_bfloat16 *x, int64_t n, float scale, uint32_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u + seed, sum = 0;
        for (int j = 0; j < 4; j++) {
            h ^= h >> 16;
            h *= 0x85ebca6bu;
            h ^= h >> 13;
            h *= 0xc2b2ae35u;
            sum += h >> 8 & 0xffff;
        }
        x[i] = __float2bfloat16(scale * ((float)sum / 65536.f - 2.f) * 1.73f);
    }
}
__global__ void constant(float *x, int n, float v) {
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        x[i] = v;
}

/* bias of the lower-bound gate: at -4 a head has forgotten everything after about 1,000 tokens, so
 * that M vanishes; at -14 it forgets nothing */
struct Shape {
    int64_t T;
    int HV, K, gdn;
    float bias = -4;
    int R = 1;
};
struct Run {
    dpg_plan *plan;
    dpg_tensors t;
    void *ws;
    cudaStream_t s;
    std::vector<void *> mem;
};

static __nv_bfloat16 *input(Run &r, int64_t n, float scale, uint32_t seed) {
    void *p;
    CUDA(cudaMalloc(&p, n * 2));
    fill<<<1024, 256>>>((__nv_bfloat16 *)p, n, scale, seed);
    r.mem.push_back(p);
    return (__nv_bfloat16 *)p;
}

static void setup(Run &r, Shape s, int64_t T, const int64_t *cu, int rank, int N, dpg_options o) {
    int Kg = s.gdn ? 1 : s.K;
    dpg_problem p = {T,
                     s.HV,
                     s.HV,
                     s.K,
                     s.K,
                     s.R,
                     Kg,
                     1,
                     cu,
                     1 / sqrt((double)s.K),
                     DP_GATE_LOWER_BOUND,
                     -5,
                     DP_BETA_SIGMOID,
                     1,
                     DPG_BF16,
                     DPG_BF16,
                     DPG_BF16};
    dp_err e = {DP_OK, ""};
    int64_t L = T / N;
    void *x;
    DP(e, dpg_plan_create(&r.plan, &p, &o, rank, N, &e));
    memset(&r.t, 0, sizeof r.t);
    r.t.q = input(r, L * s.HV * s.K, 1, 1);
    r.t.k = input(r, L * s.HV * s.R * s.K, 1, 2);
    r.t.v = input(r, L * s.HV * s.R * s.K, 1, 3);
    r.t.g = input(r, L * s.HV * Kg, 1, 4);
    r.t.beta = input(r, L * s.HV * s.R, 1, 5);
    r.t.o = input(r, L * s.HV * s.K, 0, 6);
    CUDA(cudaMalloc(&x, (size_t)s.HV * (1 + Kg) * 4));
    r.mem.push_back(x);
    constant<<<1, 256>>>((float *)x, s.HV, 0.f);
    constant<<<1, 256>>>((float *)x + s.HV, s.HV * Kg, s.bias);
    r.t.A_log = (float *)x;
    r.t.dt_bias = (float *)x + s.HV;
    CUDA(cudaMalloc(&r.ws, dpg_workspace_bytes(r.plan)));
    r.mem.push_back(r.ws);
    CUDA(cudaStreamCreateWithFlags(&r.s, cudaStreamNonBlocking));
    CUDA(cudaDeviceSynchronize());
}

static void teardown(Run &r) {
    for (void *p : r.mem)
        cudaFree(p);
    cudaStreamDestroy(r.s);
    dpg_plan_destroy(r.plan);
}

static double median(std::vector<float> &x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

static double time_steps(Run &r, int steps, int runs, dpg_comm *comm) {
    std::vector<float> ms(runs);
    dp_err e = {DP_OK, ""};
    cudaEvent_t a, b;
    CUDA(cudaEventCreate(&a));
    CUDA(cudaEventCreate(&b));
    for (int i = -3; i < runs; i++) {
        CUDA(cudaEventRecord(a, r.s));
        DP(e, dpg_forward_steps(r.plan, &r.t, r.ws, comm, r.s, steps, &e));
        CUDA(cudaEventRecord(b, r.s));
        CUDA(cudaEventSynchronize(b));
        if (i >= 0) CUDA(cudaEventElapsedTime(&ms[i], a, b));
    }
    CUDA(cudaEventDestroy(a));
    CUDA(cudaEventDestroy(b));
    return median(ms);
}

/* Bytes and flops of the two kernels as they stand, per tile of C tokens and D columns;
 * ceilings 4.3 TB/s and 790 Tflop/s (bf16). */
static void one(Shape s, dpg_path path, int runs, dpg_chain_how how = DPG_CHAIN_AUGMENTED) {
    Run r;
    int64_t cu[2] = {0, s.T};
    dpg_options o = {DP_BASE_BF16, DP_FP32, path, how, 0, 0};
    setup(r, s, s.T, cu, 0, 1, o);
    double chunks = time_steps(r, DPG_STEP_CHUNKS, runs, NULL),
           state = time_steps(r, DPG_STEP_STATE, runs, NULL);
    double all = time_steps(r, DPG_STEP_ALL, runs, NULL), tiles = (double)s.T / 64 * s.HV * s.R,
           D = s.K;
    double in = tiles * 64 * D * 2 * (2 + (s.gdn ? 1. : 2.) / s.R),
           mid = tiles * (64 * D * 2 * 4 + 64 * 64 * 2 + D * 4), out = tiles * 64 * D * 2 / s.R;
    printf("%-6s %-4s T=%-7lld HV=%-3d K=V=%-4d chunks %8.3f ms (floor %6.3f)  state %8.3f ms "
           "(floor %6.3f)  forward %8.3f ms (floor of inputs and o %6.3f)\n",
           path == DPG_PATH_FAST ? "fast" : "simple",
           s.gdn      ? "gdn"
           : s.R == 1 ? "kda"
           : s.R == 2 ? "mkd2"
                      : "mkd4",
           (long long)s.T, s.HV, s.K, chunks, (in + mid) / 4.3e9, state, (mid + out) / 4.3e9, all,
           (in + out) / 4.3e9);
    fflush(stdout);
    teardown(r);
}

/* The steps of one rank of N, without the gather: what context parallelism adds on each GPU. An
 * inner rank makes (M, H) for those behind it; the last one only for its own segments. */
static void one_rank(int64_t T, int HV, float bias, int rank, int N, int runs) {
    Run r;
    Shape s = {T, HV, 128, 0, bias};
    int64_t cu[2] = {0, T};
    dpg_comm unused;
    dpg_options o = {DP_BASE_BF16, DP_FP32, DPG_PATH_FAST, DPG_CHAIN_AUGMENTED, 0, 0};
    setup(r, s, T, cu, rank, N, o);
    CUDA(cudaMemset(r.ws, 0, dpg_workspace_bytes(r.plan)));
    double chunks = time_steps(r, DPG_STEP_CHUNKS, runs, &unused),
           pre = time_steps(r, DPG_STEP_PRE, runs, &unused);
    double merge = time_steps(r, DPG_STEP_MERGE, runs, &unused),
           state = time_steps(r, DPG_STEP_STATE, runs, &unused);
    printf("rank %d of %d, T=%-7lld HV=%-3d %s gates  chunks %7.3f  pre %7.3f  merge %7.3f  state "
           "%7.3f ms\n",
           rank, N, (long long)T, HV, bias < -10 ? "slow" : "fast", chunks, pre, merge, state);
    fflush(stdout);
    teardown(r);
}

/* Elements gathered by NCCL, stored into windows, and by a dense chain. */
static void cp(int N, int runs) {
    std::vector<int> dev(N);
    std::vector<dpg_comm> comm(N);
    dp_err e = {DP_OK, ""};
    for (int i = 0; i < N; i++)
        dev[i] = i;
    DP(e, dpg_comm_nccl(comm.data(), N, dev.data(), 20, &e));
    for (Shape s : {Shape{131072, 32, 128, 0, -14}, Shape{131072, 32, 128, 0, -4},
                    Shape{32768, 32, 128, 0, -14}, Shape{32768, 32, 128, 0, -4}})
        for (int how = 0; how < (s.bias < -10 ? 2 : 3); how++) {
            std::vector<double> all(N), pre(N), gather(N), merge(N), state(N), single(N);
            std::vector<std::thread> th;
            int64_t cu[2] = {0, s.T}, cu1[2] = {0, s.T / N};
            const char *gates = s.bias < -10 ? "slow gates" : "fast gates",
                       *say[] = {"windows", "NCCL", "dense tf32x3"};
            for (int i = 0; i < N; i++)
                th.emplace_back([&, i] {
                    Run r, q;
                    dp_err err = {DP_OK, ""};
                    CUDA(cudaSetDevice(i));
                    dpg_options o = {DP_BASE_BF16,
                                     DP_TF32X3,
                                     DPG_PATH_FAST,
                                     how == 2 ? DPG_CHAIN_DENSE : DPG_CHAIN_AUGMENTED,
                                     0,
                                     0};
                    setup(q, s, s.T / N, cu1, 0, 1, o);
                    setup(r, s, s.T, cu, i, N, o);
                    if (how == 0) DP(err, dpg_plan_connect(r.plan, &comm[i], &err));
                    if (how == 0 && !dpg_plan_connected(r.plan))
                        fprintf(stderr, "rank %d has no windows\n", i);
                    single[i] = time_steps(q, DPG_STEP_ALL, runs, NULL);
                    all[i] = time_steps(r, DPG_STEP_ALL, runs, &comm[i]);
                    if (how == 0) { /* an element is sent as it is made */
                        pre[i] = time_steps(r, DPG_STEP_PRE | DPG_STEP_GATHER, runs, &comm[i]);
                    } else {
                        pre[i] = time_steps(r, DPG_STEP_PRE, runs, &comm[i]);
                        gather[i] = time_steps(r, DPG_STEP_GATHER, runs, &comm[i]);
                    }
                    merge[i] = time_steps(r, DPG_STEP_MERGE, runs, &comm[i]);
                    state[i] = time_steps(r, DPG_STEP_STATE, runs, &comm[i]);
                    DP(err, comm[i].wait(&comm[i], r.s, &err));
                    teardown(r);
                    teardown(q);
                });
            for (auto &t : th)
                t.join();
            auto max = [](const std::vector<double> &x) {
                return *std::max_element(x.begin(), x.end());
            };
            printf("cp N=%d T=%-7lld HV=%d %s %-12s T/N on one GPU %7.3f ms  CP %7.3f ms  overhead "
                   "%5.1f%%  %s %6.3f  gather %6.3f  merge %6.3f  state %6.3f ms\n",
                   N, (long long)s.T, s.HV, gates, say[how], max(single), max(all),
                   100 * (max(all) / max(single) - 1), how ? "pre" : "pre, gather", max(pre),
                   max(gather), max(merge), max(state));
            fflush(stdout);
        }
    for (auto &c : comm)
        c.destroy(&c);
}

/* The last ranks of 4 on two GPUs, rank 2 on GPU 0 and rank 3 on GPU 1. The states come as on 4:
 * from rank 0, whose GPU is GPU 0 and which is no further than rank 2 when it sends them, to rank 1
 * on GPU 1, to rank 2, to rank 3. Ranks 0 and 1 have made their (M, H) once and for all, so that a
 * GPU makes one rank's forward and, between its pre-process and the states it waits for, what
 * another does in that place: rank 0 stores H, rank 1 multiplies and stores. The time is never less
 * than that of ranks 2 and 3 of 4 GPUs, whose kernels have a GPU to themselves. */
static void chain_of_four(int runs) {
    int dev[4] = {0, 1, 0, 1};
    std::vector<dpg_comm> comm(4);
    dp_err e = {DP_OK, ""};
    DP(e, dpg_comm_devices(comm.data(), 4, dev, 20, &e));
    for (Shape s : {Shape{131072, 32, 128, 0, -14}, Shape{131072, 32, 128, 0, -4},
                    Shape{32768, 32, 128, 0, -14}, Shape{32768, 32, 128, 0, -4}}) {
        std::vector<Run> r(4), q(2);
        std::vector<std::thread> th;
        std::vector<std::vector<float>> cp(2, std::vector<float>(runs));
        double single[2];
        int64_t cu[2] = {0, s.T}, cu1[2] = {0, s.T / 4};
        for (int i = 0; i < 4; i++)
            th.emplace_back([&, i] {
                dp_err err = {DP_OK, ""};
                CUDA(cudaSetDevice(dev[i]));
                dpg_options o = {DP_BASE_BF16,        DP_FP32,       DPG_PATH_FAST,
                                 DPG_CHAIN_AUGMENTED, i < 2 ? 1 : 0, 0};
                setup(r[i], s, s.T, cu, i, 4, o);
                /* both ranks of a GPU use one stream, and neither waits for what comes later there
                 */
                comm[i].in_order = 1;
                DP(err, dpg_plan_connect(r[i].plan, &comm[i], &err));
                if (!dpg_plan_connected(r[i].plan)) {
                    fprintf(stderr, "rank %d has no windows\n", i);
                    exit(2);
                }
            });
        for (auto &t : th)
            t.join();
        th.clear();
        for (int g = 0; g < 2; g++)
            th.emplace_back([&, g] {
                dp_err err = {DP_OK, ""};
                cudaEvent_t a, b;
                CUDA(cudaSetDevice(g));
                CUDA(cudaEventCreate(&a));
                CUDA(cudaEventCreate(&b));
                dpg_options o = {DP_BASE_BF16, DP_FP32, DPG_PATH_FAST, DPG_CHAIN_AUGMENTED, 0, 0};
                setup(q[g], s, s.T / 4, cu1, 0, 1, o);
                single[g] = time_steps(q[g], DPG_STEP_ALL, runs, NULL);
                auto steps = [&](int i, int which) {
                    DP(err, dpg_forward_steps(r[i].plan, &r[i].t, r[i].ws, &comm[i], r[g + 2].s,
                                              which, &err));
                };
                steps(g, DPG_STEP_ALL);
                steps(g + 2, DPG_STEP_ALL);
                for (int i = -3; i < runs; i++) {
                    CUDA(cudaEventRecord(a, r[g + 2].s));
                    steps(g + 2, DPG_STEP_CHUNKS | DPG_STEP_PRE);
                    steps(g, g ? DPG_STEP_GATHER | DPG_STEP_MERGE
                               : DPG_STEP_COMPOSE | DPG_STEP_GATHER);
                    steps(g + 2, DPG_STEP_GATHER | DPG_STEP_MERGE | DPG_STEP_STATE);
                    CUDA(cudaEventRecord(b, r[g + 2].s));
                    CUDA(cudaEventSynchronize(b));
                    if (i >= 0) CUDA(cudaEventElapsedTime(&cp[g][i], a, b));
                }
                CUDA(cudaEventDestroy(a));
                CUDA(cudaEventDestroy(b));
                teardown(q[g]);
            });
        for (auto &t : th)
            t.join();
        double alone = std::max(single[0], single[1]), two = median(cp[0]), three = median(cp[1]);
        printf("chain of 4 on 2 GPUs T=%-7lld HV=%d %s  T/4 on one GPU %7.3f ms  rank 2 %7.3f ms "
               "%+5.1f%%  rank 3 %7.3f ms %+5.1f%%\n",
               (long long)s.T, s.HV, s.bias < -10 ? "slow gates" : "fast gates", alone, two,
               100 * (two / alone - 1), three, 100 * (three / alone - 1));
        fflush(stdout);
        for (int i = 0; i < 4; i++) {
            CUDA(cudaSetDevice(dev[i]));
            CUDA(cudaDeviceSynchronize());
            teardown(r[i]);
        }
    }
    for (auto &c : comm)
        c.destroy(&c);
}

__global__ void wait_ns(long long ns) {
    long long t0, t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t0));
    do
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    while (t - t0 < ns);
}

/* A communicator of one rank whose peers are always there: what it gathers is its own share N
 * times. The wires take as long as NCCL over NVLink: 20 us and 300 GB/s of what comes in; `blocks`
 * of 512 threads are busy with it (NCCL's kernel), or one thread (copy engines). */
static int blocks;
static dp_status wires(dpg_comm *c, const float *send, float *recv, size_t count, void *stream,
                       dp_err *) {
    wait_ns<<<blocks ? blocks : 1, blocks ? 512 : 1, 0, (cudaStream_t)stream>>>(
        20000 + (long long)((c->N - 1) * count * 4 / 300.));
    for (int i = 0; i < c->N; i++)
        CUDA(cudaMemcpyAsync(recv + i * count, send, count * 4, cudaMemcpyDeviceToDevice,
                             (cudaStream_t)stream));
    return DP_OK;
}

static void ranks(int N, int runs) {
    for (Shape s : {Shape{131072, 32, 128, 0, -14}, Shape{131072, 32, 128, 0, -4},
                    Shape{32768, 32, 128, 0, -14}, Shape{32768, 32, 128, 0, -4}}) {
        Run q;
        dpg_options o = {DP_BASE_BF16, DP_FP32, DPG_PATH_FAST, DPG_CHAIN_AUGMENTED};
        int64_t cu[2] = {0, s.T}, cu1[2] = {0, s.T / N};
        setup(q, s, s.T / N, cu1, 0, 1, o);
        double alone = time_steps(q, DPG_STEP_ALL, runs, NULL);
        teardown(q);
        for (int rank : {1, N - 1}) {
            Run r;
            double all[2], step[5];
            dpg_comm c = {};
            c.rank = rank;
            c.N = N;
            c.all_gather = wires;
            setup(r, s, s.T, cu, rank, N, o);
            for (int j = 0; j < 2; j++) {
                blocks = j ? 0 : 16;
                all[j] = time_steps(r, DPG_STEP_ALL, runs, &c);
            }
            blocks = 16;
            for (int j = 0; j < 5; j++)
                step[j] = time_steps(r, 1 << j, runs, &c);
            printf("rank %d of %d T=%-7lld HV=%d %s segments %2d  alone %6.3f ms  CP %6.3f ms "
                   "%+5.1f%%  (gather by copy engines %6.3f ms %+5.1f%%)  chunks %6.3f  pre %6.3f  "
                   "gather %6.3f  merge %6.3f  state %6.3f ms\n",
                   rank, N, (long long)s.T, s.HV, s.bias < -10 ? "slow gates" : "fast gates",
                   dpg_plan_segments(r.plan), alone, all[0], 100 * (all[0] / alone - 1), all[1],
                   100 * (all[1] / alone - 1), step[0], step[1], step[2], step[3], step[4]);
            fflush(stdout);
            teardown(r);
        }
    }
}

int main(int argc, char **argv) {
    int ndev = 0;
    if (cudaGetDeviceCount(&ndev) != cudaSuccess || !ndev) {
        fprintf(stderr, "bench_gpu: no CUDA device\n");
        return 2;
    }
    if (argc > 2 && !strcmp(argv[1], "cp")) {
        cp(atoi(argv[2]), argc > 3 ? atoi(argv[3]) : 30);
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "chain")) {
        chain_of_four(argc > 2 ? atoi(argv[2]) : 30);
        return 0;
    }
    if (argc > 2 && !strcmp(argv[1], "ranks")) {
        ranks(atoi(argv[2]), argc > 3 ? atoi(argv[3]) : 30);
        return 0;
    }
    int runs = argc > 1 ? atoi(argv[1]) : 50;
    for (Shape s : {Shape{8192, 64, 128, 0}, Shape{32768, 8, 128, 0}, Shape{131072, 8, 128, 0},
                    Shape{8192, 64, 128, 1}, Shape{8192, 64, 64, 0}})
        one(s, DPG_PATH_FAST, runs);
    for (float bias : {-14.f, -4.f})
        for (int rank : {1, 3}) {
            one_rank(131072, 32, bias, rank, 4, runs);
            one_rank(32768, 32, bias, rank, 4, runs);
            one_rank(131072, 8, bias, rank, 4, runs);
        }
    one({8192, 32, 128, 0, -4, 2}, DPG_PATH_FAST, runs);
    one({8192, 16, 128, 0, -4, 4}, DPG_PATH_FAST, runs);
    one({8192, 8, 128, 0, -4, 2}, DPG_PATH_SIMPLE, 3);
    one({8192, 8, 128, 0, -4, 2}, DPG_PATH_FAST, runs);
    one({8192, 8, 128, 0}, DPG_PATH_FAST, runs);
    one({8192, 8, 128, 0}, DPG_PATH_SIMPLE, 3);
    return 0;
}
