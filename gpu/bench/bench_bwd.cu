/* gpu/bench/bench_bwd.cu - time of the backward and of the convolution: CUDA events, median of many
 * runs after warm-up, random inputs larger than L2.
 *
 *   conv [runs]      the convolutions of q, k and v, forward and backward, against a copy of as
 *                    many bytes in the same run
 *   kda [runs]       forward and backward on one GPU, step by step, the shapes of the speed table;
 *                    few heads whole, then over segments
 *   shapes [runs]    forward and backward of K and V in {64, 128}, and of fp32 q, k, v
 *   keys [runs]      KDA, MKDA with 2 and 4 keys a token, as many rows each, and GDN; all but KDA
 *                    also on the simple path
 *   cp N [runs]      forward and backward of T tokens on N GPUs over NCCL against T/N tokens on one
 *                    GPU, and every step by itself
 *   parts N [runs]   the work of each of N ranks alone on one GPU, gathers as copies: what the
 *                    ranks cost without the wires
 *
 * The last two also with the backward over whole sequences, one step after the other ("whole"). */
#include "../dp_conv.h"
#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <functional>
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

template <class T> __global__ void fill(T *x, int64_t n, float scale, uint32_t seed) {
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
        x[i] = (T)(scale * ((float)sum / 65536.f - 2.f) * 1.73f);
    }
}

static std::vector<void *> memory;
static void *room(size_t bytes) {
    void *p;
    CUDA(cudaMalloc(&p, bytes));
    memory.push_back(p);
    return p;
}
static void release() {
    for (void *p : memory)
        cudaFree(p);
    memory.clear();
}
static __nv_bfloat16 *input(int64_t n, float scale, uint32_t seed) {
    __nv_bfloat16 *p = (__nv_bfloat16 *)room(n * 2);
    fill<<<1024, 256>>>(p, n, scale, seed);
    return p;
}

static double time_of(cudaStream_t s, int runs, const std::function<void()> &f) {
    std::vector<float> ms(runs);
    cudaEvent_t a, b;
    CUDA(cudaEventCreate(&a));
    CUDA(cudaEventCreate(&b));
    for (int i = -3; i < runs; i++) {
        CUDA(cudaEventRecord(a, s));
        f();
        CUDA(cudaEventRecord(b, s));
        CUDA(cudaEventSynchronize(b));
        if (i >= 0) CUDA(cudaEventElapsedTime(&ms[i], a, b));
    }
    CUDA(cudaEventDestroy(a));
    CUDA(cudaEventDestroy(b));
    std::sort(ms.begin(), ms.end());
    return ms[runs / 2];
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
    CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    DP(e, dpg_conv_create(&c, &p, 0, 1, &e));
    for (int i = 0; i < 3; i++) {
        float *w = (float *)room((size_t)D * (W + 1) * 4);
        CUDA(cudaMemset(w, 0x3e, (size_t)D * (W + 1) * 4)); /* 0.186 everywhere */
        t[i] = {input(n, 1, i),
                input(n, 1, i + 9),
                w,
                w + (size_t)D * W,
                room(n * 2),
                room(n * 2),
                (float *)room((size_t)D * W * 4),
                (float *)room(D * 4)};
    }
    void *ws = room(dpg_conv_workspace_bytes(c));
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
    fflush(stdout);
    dpg_conv_destroy(c);
    cudaStreamDestroy(s);
    release();
}

__global__ void constant(float *x, int n, float v) {
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        x[i] = v;
}

/* One rank of a KDA problem, gate (lower bound), beta and L2 norm in the kernel. bias of the gate:
 * at -14 a head forgets nothing, at -4 after 1,000 tokens. */
struct Kda {
    dpg_plan *plan;
    dpg_tensors t;
    dpg_grads g;
    void *ws;
    cudaStream_t s;
    std::vector<void *> mem;
    void *alloc(size_t bytes) {
        void *p;
        CUDA(cudaMalloc(&p, bytes + 256));
        mem.push_back(p);
        return p;
    }
    void *random(int64_t n, uint32_t seed, dpg_dtype type = DPG_BF16) {
        void *p = alloc(n * (type == DPG_F32 ? 4 : 2));
        if (type == DPG_F32)
            fill<<<1024, 256>>>((float *)p, n, 1, seed);
        else
            fill<<<1024, 256>>>((__nv_bfloat16 *)p, n, 1, seed);
        return p;
    }
    Kda(int64_t T, int HV, int rank, int N, float bias, dpg_path bwd, int whole = 0, int R = 1,
        int segments = 0, int K = 128, int V = 128, dpg_dtype type = DPG_BF16, int gdn = 0) {
        int64_t cu[2] = {0, T}, L = T / N, n = L * HV * K, m = L * HV * V;
        dpg_problem p = {T,
                         HV,
                         HV,
                         K,
                         V,
                         R,
                         gdn ? 1 : K,
                         1,
                         cu,
                         1 / sqrt((double)K),
                         DP_GATE_LOWER_BOUND,
                         -5,
                         DP_BETA_SIGMOID,
                         1,
                         type,
                         DPG_BF16,
                         DPG_BF16,
                         DPG_BF16,
                         DPG_BF16};
        dpg_options o = {};
        dp_err e = {DP_OK, ""};
        o.base = DP_BASE_BF16;
        o.chain = DP_FP32;
        o.path = DPG_PATH_FAST;
        o.chain_how = DPG_CHAIN_AUGMENTED;
        o.backward = 1;
        o.bwd_path = bwd;
        o.send_dh_only = 1;
        o.whole_bwd = whole;
        o.segments = segments;
        DP(e, dpg_plan_create(&plan, &p, &o, rank, N, &e));
        t = dpg_tensors{random(n, 1, type), random(n * R, 2, type), random(m * R, 3, type),
                        random(n, 4), random(L * HV * R, 5)};
        float *A = (float *)alloc((size_t)HV * (1 + K) * 4);
        constant<<<1, 256>>>(A, HV, 0.f);
        constant<<<1, 256>>>(A + HV, HV * K, bias);
        t.A_log = A;
        t.dt_bias = A + HV;
        t.o = alloc(m * 2);
        t.saved = alloc(dpg_saved_bytes(plan));
        g = dpg_grads{random(m, 6),
                      NULL,
                      alloc(n * 2),
                      alloc(n * 2 * R),
                      alloc(m * 2 * R),
                      alloc(n * 2),
                      alloc(L * HV * R * 2),
                      (float *)alloc(HV * 4),
                      (float *)alloc((size_t)HV * K * 4),
                      NULL};
        ws = alloc(dpg_workspace_bytes(plan));
        CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
        CUDA(cudaDeviceSynchronize());
    }
    ~Kda() {
        for (void *p : mem)
            cudaFree(p);
        cudaStreamDestroy(s);
        dpg_plan_destroy(plan);
    }
    void forward(dpg_comm *c) {
        dp_err e = {DP_OK, ""};
        DP(e, dpg_forward(plan, &t, ws, c, s, &e));
    }
    void backward(dpg_comm *c, int steps) {
        dp_err e = {DP_OK, ""};
        DP(e, dpg_backward_steps(plan, &t, &g, ws, c, s, steps, &e));
    }
    void one_by_one(dpg_comm *c) {
        for (int step = 1; step < DPG_BWD_ALL; step *= 2)
            backward(c, step);
    }
};

static void kda(int64_t T, int HV, int runs, float bias, dpg_path bwd, int R = 1, int segments = 0,
                int K = 128, int V = 128, dpg_dtype type = DPG_BF16, int gdn = 0) {
    Kda k(T, HV, 0, 1, bias, bwd, 0, R, segments, K, V, type, gdn);
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
    double fwd = time_of(k.s, runs, [&] { k.forward(NULL); }),
           all = time_of(k.s, runs, [&] { k.backward(NULL, DPG_BWD_ALL); });
    printf("%s   T=%-7lld HV=%-3d K=%-3d V=%-3d R=%d %s %s, %s gates %2d segments  forward %7.3f  "
           "backward %7.3f ms:",
           gdn ? "gdn" : "kda", (long long)T, HV, K, V, R, type == DPG_F32 ? "fp32" : "bf16",
           bwd == DPG_PATH_FAST ? "fast" : "simple", bias < -10 ? "slow" : "fast",
           dpg_plan_segments(k.plan), fwd, all);
    for (auto &p : part)
        if (dpg_plan_segments(k.plan) > 1 || !(p.step & (DPG_BWD_PRE | DPG_BWD_MERGE)))
            printf("  %s %.3f", p.name, time_of(k.s, runs, [&] { k.backward(NULL, p.step); }));
    printf("  workspace %.2f GB  kept %zu B\n", dpg_workspace_bytes(k.plan) / 1e9,
           dpg_kept_bytes(k.plan));
    fflush(stdout);
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
const int NSTEPS = sizeof all_steps / sizeof *all_steps;
static void time_steps(Kda &k, dpg_comm *c, int runs, double *ms) {
    for (int i = 0; i < NSTEPS; i++)
        ms[i] = time_of(k.s, runs, [&] {
            dp_err e = {DP_OK, ""};
            if (all_steps[i].fwd)
                DP(e, dpg_forward_steps(k.plan, &k.t, k.ws, c, k.s, all_steps[i].fwd, &e));
            else
                k.backward(c, all_steps[i].bwd);
        });
}
static void print_steps(const double *ms) {
    for (int i = 0; i < NSTEPS; i++)
        printf("  %s %.3f", all_steps[i].name, ms[i]);
    printf("\n");
    fflush(stdout);
}

/* A communicator of one rank among N that stand still: what it gathers is its own share N times. */
static dp_status copies(dpg_comm *c, const float *send, float *recv, size_t count, void *stream,
                        dp_err *) {
    for (int i = 0; i < c->N; i++)
        CUDA(cudaMemcpyAsync(recv + i * count, send, count * 4, cudaMemcpyDeviceToDevice,
                             (cudaStream_t)stream));
    return DP_OK;
}

static void parts(int64_t T, int HV, float bias, int N, int runs) {
    double f1, b1, f = 0, b = 0, w = 0;
    {
        Kda k(T / N, HV, 0, 1, bias, DPG_PATH_FAST);
        f1 = time_of(k.s, runs, [&] { k.forward(NULL); });
        b1 = time_of(k.s, runs, [&] { k.forward(NULL), k.backward(NULL, DPG_BWD_ALL); });
    }
    for (int r = 0; r < N; r++) {
        Kda k(T, HV, r, N, bias, DPG_PATH_FAST);
        double ms[NSTEPS];
        dpg_comm own = {};
        own.rank = r;
        own.N = N;
        own.all_gather = copies;
        double fr = time_of(k.s, runs, [&] { k.forward(&own); }),
               br = time_of(k.s, runs, [&] { k.forward(&own), k.backward(&own, DPG_BWD_ALL); });
        k.forward(&own);
        k.backward(&own, DPG_BWD_ALL);
        time_steps(k, &own, runs, ms);
        printf("rank %d of %d  T=%-7lld HV=%-3d %s gates  forward %7.3f  forward and backward "
               "%7.3f ms, %.1f MB kept between:",
               r, N, (long long)T, HV, bias < -10 ? "slow" : "fast", fr, br,
               dpg_kept_bytes(k.plan) / 1e6);
        print_steps(ms);
        f = std::max(f, fr);
        b = std::max(b, br);
    }
    for (int r = 0; r < N; r++) {
        Kda k(T, HV, r, N, bias, DPG_PATH_FAST, 1);
        dpg_comm own = {};
        own.rank = r;
        own.N = N;
        own.all_gather = copies;
        w = std::max(w, time_of(k.s, runs, [&] { k.forward(&own), k.one_by_one(&own); }));
    }
    printf(
        "parts T=%-7lld HV=%-3d %s gates  ranks %d  forward %7.3f (alone %7.3f, %+.1f%%)  forward "
        "and backward %7.3f (alone %7.3f, %+.1f%%; whole %7.3f, %+.1f%%), without the wires\n",
        (long long)T, HV, bias < -10 ? "slow" : "fast", N, f, f1, 100 * (f / f1 - 1), b, b1,
        100 * (b / b1 - 1), w, 100 * (w / b1 - 1));
    fflush(stdout);
}

/* Wall time of a step on all ranks: the slowest rank's median. */
static void cp(int64_t T, int HV, float bias, int N, int runs) {
    std::vector<dpg_comm> comm(N);
    std::vector<int> dev(N);
    std::vector<double> fwd(N), both(N), fwd_w(N), both_w(N), whole(N), alone_f(N), alone(N),
        steps(N * NSTEPS);
    std::vector<std::thread> th;
    dp_err e = {DP_OK, ""};
    for (int i = 0; i < N; i++)
        dev[i] = i;
    DP(e, dpg_comm_nccl(comm.data(), N, dev.data(), 20, &e));
    for (int r = 0; r < N; r++)
        th.emplace_back([&, r] {
            CUDA(cudaSetDevice(r));
            {
                Kda k(T, HV, r, N, bias, DPG_PATH_FAST);
                fwd[r] = time_of(k.s, runs, [&] { k.forward(&comm[r]); });
                both[r] = time_of(k.s, runs, [&] {
                    k.forward(&comm[r]);
                    k.backward(&comm[r], DPG_BWD_ALL);
                });
                time_steps(k, &comm[r], runs, &steps[r * NSTEPS]);
                dp_err err = {DP_OK, ""};
                DP(err, comm[r].wait(&comm[r], k.s, &err));
                DP(err, dpg_plan_connect(k.plan, &comm[r], &err));
                if (!dpg_plan_connected(k.plan)) fprintf(stderr, "rank %d has no windows\n", r);
                fwd_w[r] = time_of(k.s, runs, [&] { k.forward(&comm[r]); });
                both_w[r] = time_of(k.s, runs, [&] {
                    k.forward(&comm[r]);
                    k.backward(&comm[r], DPG_BWD_ALL);
                });
                DP(err, comm[r].wait(&comm[r], k.s, &err));
            }
            {
                Kda k(T, HV, r, N, bias, DPG_PATH_FAST, 1);
                whole[r] = time_of(k.s, runs, [&] {
                    k.forward(&comm[r]);
                    k.one_by_one(&comm[r]);
                });
            }
            Kda k(T / N, HV, 0, 1, bias, DPG_PATH_FAST);
            alone_f[r] = time_of(k.s, runs, [&] { k.forward(NULL); });
            alone[r] = time_of(k.s, runs, [&] {
                k.forward(NULL);
                k.backward(NULL, DPG_BWD_ALL);
            });
        });
    for (std::thread &x : th)
        x.join();
    double f = *std::max_element(fwd.begin(), fwd.end()),
           b = *std::max_element(both.begin(), both.end()),
           w = *std::max_element(whole.begin(), whole.end()), f1 = alone_f[0], b1 = alone[0];
    double fw = *std::max_element(fwd_w.begin(), fwd_w.end()),
           bw = *std::max_element(both_w.begin(), both_w.end());
    printf("cp    T=%-7lld HV=%-3d %s gates  ranks %d  forward %7.3f (alone %7.3f, %+.1f%%)  "
           "forward and backward %7.3f (alone %7.3f, %+.1f%%; whole %7.3f, %+.1f%%)  with windows "
           "%7.3f (%+.1f%%), %7.3f (%+.1f%%)\n",
           (long long)T, HV, bias < -10 ? "slow" : "fast", N, f, f1, 100 * (f / f1 - 1), b, b1,
           100 * (b / b1 - 1), w, 100 * (w / b1 - 1), fw, 100 * (fw / f1 - 1), bw,
           100 * (bw / b1 - 1));
    for (int r = 0; r < N; r++) {
        printf("      rank %d:", r);
        print_steps(&steps[r * NSTEPS]);
        comm[r].destroy(&comm[r]);
    }
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "conv";
    int at = strcmp(mode, "cp") && strcmp(mode, "parts") ? 2 : 3,
        runs = argc > at ? atoi(argv[at]) : 50;
    cudaDeviceProp prop;
    if (cudaGetDeviceProperties(&prop, 0) != cudaSuccess) {
        fprintf(stderr, "bench_bwd: no CUDA device\n");
        return 2;
    }
    printf("device %s\n", prop.name);
    if (!strcmp(mode, "conv"))
        for (int W : {4, 2, 8}) {
            conv(131072, 8, W, runs);
            conv(8192, 64, W, runs);
        }
    if (!strcmp(mode, "kda")) {
        kda(8192, 64, runs, -4, DPG_PATH_FAST);
        for (int segments : {1, 0})
            for (float bias : {-14.f, -4.f})
                for (int64_t T : {32768, 65536, 131072})
                    kda(T, 8, runs, bias, DPG_PATH_FAST, 1, segments);
        kda(32768, 32, runs, -14, DPG_PATH_FAST);
        kda(8192, 8, runs < 5 ? runs : 5, -4, DPG_PATH_SIMPLE);
    }
    if (!strcmp(mode, "shapes"))
        for (int K : {64, 128})
            for (int V : {64, 128}) {
                kda(8192, 64, runs, -4, DPG_PATH_FAST, 1, 0, K, V);
                kda(131072, 8, runs, -4, DPG_PATH_FAST, 1, 0, K, V);
                if (K == V) kda(8192, 64, runs, -4, DPG_PATH_FAST, 1, 0, K, V, DPG_F32);
            }
    if (!strcmp(mode, "keys")) {
        for (int R : {1, 2, 4})
            kda(8192, 64 / R, runs, -4, DPG_PATH_FAST, R);
        kda(8192, 64, runs, -4, DPG_PATH_FAST, 1, 0, 128, 128, DPG_BF16, 1);
        for (dpg_path path : {DPG_PATH_FAST, DPG_PATH_SIMPLE})
            kda(8192, 8, runs < 5 ? runs : 5, -4, path, 1, 0, 128, 128, DPG_BF16, 1);
        for (int R : {2, 4})
            for (dpg_path path : {DPG_PATH_FAST, DPG_PATH_SIMPLE})
                kda(8192, 16 / R, runs < 5 ? runs : 5, -4, path, R);
    }
    if (!strcmp(mode, "cp"))
        for (int64_t T : {131072, 32768})
            for (float bias : {-14.f, -4.f})
                cp(T, 32, bias, argc > 2 ? atoi(argv[2]) : 2, runs);
    if (!strcmp(mode, "parts"))
        for (int64_t T : {131072, 32768})
            for (float bias : {-14.f, -4.f})
                parts(T, 32, bias, argc > 2 ? atoi(argv[2]) : 4, runs);
    return 0;
}
