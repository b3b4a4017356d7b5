/* gpu/bench/bench.h - what the benchmarks share: random inputs made on the device, one rank of a
 * problem, medians of CUDA events. */
#ifndef DPG_BENCH_H
#define DPG_BENCH_H
#include "ref/vocabulary/own.h"
#include "tests/rank.h"
#include <algorithm>
#include <cuda_bf16.h>
#include <functional>

/* Nearly normal numbers of standard deviation `scale`. */
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
static __global__ void constant(float *x, int64_t n, float v) {
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
        x[i] = v;
}

/* n numbers in device memory, the same for a seed; freed with m. */
static inline void *random_words(Memory &m, int64_t n, uint32_t seed, dpg_dtype type) {
    void *p = m.room(n * word_bytes(type));
    if (type == DPG_F32)
        fill<<<1024, 256>>>((float *)p, n, 1, seed);
    else
        fill<<<1024, 256>>>((__nv_bfloat16 *)p, n, 1, seed);
    return p;
}

/* Forgets nothing; forgets everything after about 1,000 tokens, so that M vanishes; after some 30:
 * bias of the lower-bound gate. */
static const float SLOW = -14, FAST = -4, GONE = 0;

struct Shape {
    int64_t T;
    int HV;
    float bias = FAST;
    int R = 1, K = 128, V = 128;
    bool one_gate = false;     /* a head, GDN */
    dpg_dtype type = DPG_BF16; /* of q, k, v; all else bf16 */
    dp_model model = DP_GDN;   /* DP_GDN: what R and one_gate make it */
    int share = 1;             /* value heads that have one query head */

    const char *gates() const { return bias == SLOW ? "slow" : bias == FAST ? "fast" : "gone"; }
    /* T / N tokens. */
    Shape part(int N) const {
        Shape s = *this;
        s.T /= N;
        return s;
    }
};

/* The problem of a shape; cu must outlive it. */
static inline dpg_problem problem_of(const Shape &s, const std::vector<int64_t> &cu) {
    dpg_problem p = sized(cu, s.HV / s.share, s.HV, s.K, s.V, s.R, s.one_gate ? 1 : s.K, DPG_BF16);
    p.model = s.model;
    p.gate = DP_GATE_LOWER_BOUND;
    p.lower_bound = -5;
    p.dtype = s.type;
    return p;
}

/* Parts of T tokens as ref/vocabulary/own.c cuts them, for N ranks. */
struct Table {
    std::vector<int64_t> cut;
    std::vector<int> owner;
    dpg_owners own = {};

    Table(dp_own kind, int64_t T, int N) {
        const dp_owners o = {kind, N};
        const int parts = dp_own_parts(kind, T, N);
        for (int i = 0; i < parts; i++) {
            cut.push_back(dp_own_cut(kind, T, parts, i));
            owner.push_back(dp_own_rank(o, parts, i));
        }
        cut.push_back(T);
        if (kind) own = {parts, kind == DP_OWN_GRID, cut.data(), owner.data()};
    }
};

/* Neither initial nor final states nor their gradients. cu: one sequence if empty. */
struct BenchRank : Rank {
    BenchRank(const Shape &s, int rank, int N, const dpg_options &o, dpg_owners own = {},
              std::vector<int64_t> cu = {}) {
        if (cu.empty()) cu = {0, s.T};
        dpg_problem p = problem_of(s, cu);
        p.own = own;
        open(p, o, rank, N, [&](const Share &x) -> void * {
            static const char *const drawn[] = {"q",  "k",     "v",     "g",   "beta",
                                                "do", "erase", "write", "lr_b"};
            if (!strcmp(x.name, "lr_a")) return memory.filled(x.bytes(), 0x3c); /* bf16: 0.0115 */
            for (uint32_t i = 0; i < sizeof drawn / sizeof *drawn; i++)
                if (!strcmp(x.name, drawn[i])) return random_words(memory, x.n, i + 1, x.type);
            if (strcmp(x.name, "A_log") && strcmp(x.name, "dt_bias")) return NULL;
            float *p = (float *)memory.room(x.bytes());
            constant<<<1, 256>>>(p, x.n, strcmp(x.name, "A_log") ? s.bias : 0.f);
            return p;
        });
        t.final_state = NULL;
        g.ds0 = NULL;
        CUDA(cudaMemset(ws, 0, dpg_workspace_bytes(plan)));
        CUDA(cudaDeviceSynchronize());
    }
    BenchRank(const BenchRank &) = delete;
    ~BenchRank() { close(); }
    /* Calls that succeed, or the end. */
    void forward_steps(dpg_comm *c, int steps) {
        DP(err, dpg_forward_steps(plan, &t, ws, c, stream, steps, &err));
    }
    void backward_steps(dpg_comm *c, int steps) {
        DP(err, dpg_backward_steps(plan, &t, &g, ws, c, stream, steps, &err));
    }
    void wait_all(dpg_comm *c) { DP(err, c->wait(c, stream, &err)); }
    /* Windows, which the benchmarks want. */
    void connect(dpg_comm *c) {
        DP(err, dpg_plan_connect(plan, c, &err));
        if (!dpg_plan_connected(plan)) fprintf(stderr, "rank %d has no windows\n", c->rank);
    }
};

/* The median of the elements, which are sorted. */
static inline double median(std::vector<float> &x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

/* Pairs of events around what a stream does, ms of each run after 3 to warm up. */
static inline std::vector<float> times_of(cudaStream_t s, int runs,
                                          const std::function<void()> &f) {
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
    return ms;
}
/* Median of `runs` calls behind a warm-up, in ms. */
static inline double time_of(cudaStream_t s, int runs, const std::function<void()> &f) {
    std::vector<float> ms = times_of(s, runs, f);
    return median(ms);
}

/* How much more x is than `than`, in percent. */
static inline double percent_more(double x, double than) { return 100 * (x / than - 1); }

static __global__ void wait_ns(long long ns) {
    long long t0, t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t0));
    do
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    while (t - t0 < ns);
}
/* As long as NCCL over NVLink takes for so many received words, 20 us and 300 GB/s, and as many
 * threads. */
static inline void wait_for(size_t words, void *stream) {
    wait_ns<<<16, 512, 0, (cudaStream_t)stream>>>(20000 + (long long)(words * 4 / 300.));
}

/* A communicator of one rank among N that stand still: what it gathers is its own share N times. */
static inline dp_status own_copies(dpg_comm *c, const float *send, float *recv, size_t count,
                                   void *stream, dp_err *) {
    for (int i = 0; i < c->N; i++)
        CUDA(cudaMemcpyAsync(recv + i * count, send, count * 4, cudaMemcpyDeviceToDevice,
                             (cudaStream_t)stream));
    return DP_OK;
}
/* A communicator whose exchanges copy this rank's words to all places. */
static inline dpg_comm alone_among(int rank, int N) {
    dpg_comm c = {};
    c.rank = rank;
    c.N = N;
    c.all_gather = own_copies;
    return c;
}
#endif
