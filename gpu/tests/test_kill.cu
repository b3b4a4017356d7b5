/* gpu/tests/test_kill.cu - a rank that dies, stalls, hangs its device or fails at any phase ends
 * every rank, with a message that names it.
 *
 *   test_kill N [shared|nccl] [LIMIT] [few]
 *
 * Rank 1 of N goes wrong before a step of the forward or backward, or before it waits for the end.
 * dies: its thread returns. stalls: its thread sleeps until the others have ended, then goes on.
 * hangs: a kernel on its stream spins until the others have ended. fails: it calls abort. All other
 * ranks must return an error that names rank 1 within LIMIT (1 s) and 4 s more, rank 1 an error too
 * if it goes on. few: before a gather of each pass and before the end alone. Then the same before
 * one of three whole forwards over segments, and with windows (dpg_plan_connect). Exit status 0, 1,
 * or 2 (no device). */
#include "../dp_gpu.h"
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

#define CUDA(x)                                                                                 \
    do {                                                                                        \
        cudaError_t e_ = (x);                                                                   \
        if (e_ != cudaSuccess) {                                                                \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
            exit(2);                                                                            \
        }                                                                                       \
    } while (0)
#define DP(x)                                                          \
    do {                                                               \
        if ((x) != DP_OK) {                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, e.msg); \
            exit(2);                                                   \
        }                                                              \
    } while (0)

enum Kind { DIES, STALLS, HANGS, FAILS };
static const char *const kinds[] = {"dies", "stalls", "hangs", "fails"};
static const char *const phases[] = {"chunks",
                                     "pre",
                                     "gather",
                                     "merge",
                                     "state",
                                     "recompute",
                                     "dAv",
                                     "pre (backward)",
                                     "gather (backward)",
                                     "merge (backward)",
                                     "state (backward)",
                                     "intra",
                                     "gate",
                                     "the end"};
enum { FORWARD = 5, STEPS = 13 };

static volatile int *go_on; /* pinned: 1 releases what stalls or hangs */
static int failures, checks;
static bool whole, windows; /* forwards in one call; with windows */
static bool fast;           /* the path that has them, not that of gpu/tests/cpu */

static double seconds() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

__global__ void k_spin(volatile int *flag) {
    while (!*flag) {
    }
}

struct Rank {
    dpg_plan *plan;
    dpg_tensors t;
    dpg_grads g;
    void *ws;
    cudaStream_t stream;
    std::vector<void *> mem;
    dp_status st;
    dp_err err;
    double ended;

    void *zeros(size_t bytes) {
        void *p;
        CUDA(cudaMalloc(&p, bytes + 1));
        CUDA(cudaMemset(p, 0, bytes + 1));
        mem.push_back(p);
        return p;
    }
};

static void setup(Rank &r, int rank, int N, int64_t per_rank) {
    const int HV = 2, K = 64;
    int64_t cu[2] = {0, N * per_rank}, rows = per_rank * HV;
    dpg_problem p = {cu[1],
                     HV,
                     HV,
                     K,
                     K,
                     1,
                     K,
                     1,
                     cu,
                     0.125,
                     DP_GATE_LOG,
                     0,
                     DP_BETA_SIGMOID,
                     1,
                     DPG_BF16,
                     DPG_BF16,
                     DPG_BF16,
                     DPG_BF16,
                     DPG_BF16};
    dpg_options o = {
        DP_BASE_BF16,  DP_TF32X3, DPG_PATH_AUTO, whole ? DPG_CHAIN_AUGMENTED : DPG_CHAIN_DENSE,
        whole ? 2 : 0, 0,         !whole};
    dp_err &e = r.err;
    DP(dpg_plan_create(&r.plan, &p, &o, rank, N, &e));
    fast = dpg_plan_path(r.plan) == DPG_PATH_FAST;
    r.t.q = r.zeros(rows * K * 2);
    r.t.k = r.zeros(rows * K * 2);
    r.t.v = r.zeros(rows * K * 2);
    r.t.g = r.zeros(rows * K * 2);
    r.t.beta = r.zeros(rows * 2);
    r.t.A_log = (float *)r.zeros(HV * 4);
    r.t.o = r.zeros(rows * K * 2);
    r.t.saved = r.zeros(dpg_saved_bytes(r.plan));
    r.ws = r.zeros(dpg_workspace_bytes(r.plan));
    r.g.dout = r.zeros(rows * K * 2);
    r.g.dq = r.zeros(rows * K * 2);
    r.g.dk = r.zeros(rows * K * 2);
    r.g.dv = r.zeros(rows * K * 2);
    r.g.dg = r.zeros(rows * K * 2);
    r.g.dbeta = r.zeros(rows * 2);
    r.g.dA_log = (float *)r.zeros(HV * 4);
    CUDA(cudaStreamCreate(&r.stream));
    CUDA(cudaDeviceSynchronize());
}

static dp_status step(Rank &r, int i, dpg_comm *c) {
    if (whole && i < STEPS)
        return i < 3 ? dpg_forward(r.plan, &r.t, r.ws, c, r.stream, &r.err) : DP_OK;
    if (i < FORWARD) return dpg_forward_steps(r.plan, &r.t, r.ws, c, r.stream, 1 << i, &r.err);
    if (i < STEPS)
        return dpg_backward_steps(r.plan, &r.t, &r.g, r.ws, c, r.stream, 1 << (i - FORWARD),
                                  &r.err);
    return c->wait(c, r.stream, &r.err);
}

static void rank_main(Rank &r, dpg_comm *c, int phase, int kind) {
    CUDA(cudaSetDevice(c->device));
    if (windows) r.st = dpg_plan_connect(r.plan, c, &r.err);
    if (windows && r.st == DP_OK && !dpg_plan_connected(r.plan)) {
        fprintf(stderr, "no windows\n");
        exit(2);
    }
    for (int i = 0; i <= STEPS && r.st == DP_OK; i++) {
        if (i == phase && c->rank == 1) {
            if (kind == DIES) return;
            if (kind == FAILS) {
                c->abort(c, "on purpose");
                return;
            }
            while (kind == STALLS && !*go_on)
                usleep(1000);
            if (kind == HANGS) k_spin<<<1, 1, 0, r.stream>>>(go_on);
        }
        r.st = step(r, i, c);
    }
    r.ended = seconds();
}

static void fact(bool ok, const std::string &what) {
    checks++;
    failures += !ok;
    if (!ok) printf("FAIL %s\n", what.c_str());
}

/* phase -1: nothing goes wrong. */
static void scene(int N, bool nccl, double limit, int phase, int kind) {
    std::vector<Rank> r(N);
    std::vector<dpg_comm> comm(N);
    std::vector<int> dev(N);
    std::vector<std::thread> th;
    dp_err e = {DP_OK, ""};
    for (int i = 0; i < N; i++)
        dev[i] = i;
    *go_on = 0;
    DP(nccl ? dpg_comm_nccl(comm.data(), N, dev.data(), limit, &e)
            : dpg_comm_shared(comm.data(), N, 0, limit, &e));
    for (int i = 0; i < N; i++) {
        CUDA(cudaSetDevice(comm[i].device));
        setup(r[i], i, N, whole ? 128 : 64);
    }
    double t0 = seconds(), last = 0;
    for (int i = 0; i < N; i++)
        th.emplace_back(rank_main, std::ref(r[i]), &comm[i], phase, kind);
    std::string name = phase < 0
                           ? "nothing wrong"
                           : std::string("rank 1 ") + kinds[kind] + " before " +
                                 (whole && phase < 3 ? "whole forward " + std::to_string(phase + 1)
                                                     : phases[phase]);
    if (windows) name += ", windows";
    for (int i = 0; i < N; i++) {
        if (i == 1) continue;
        th[i].join();
        last = fmax(last, r[i].ended - t0);
        bool ok = phase < 0 ? r[i].st == DP_OK
                            : r[i].st == DP_EDEVICE && (strstr(r[i].err.msg, "rank 1 ") ||
                                                        strstr(r[i].err.msg, "of rank 1"));
        fact(ok, name + ": rank " + std::to_string(i) + " says '" + r[i].err.msg + "'");
    }
    *go_on = 1;
    th[1].join();
    fact(last < limit + 4, name + ": the others ended after " + std::to_string(last) + " s");
    if (kind == STALLS || kind == HANGS || phase < 0)
        fact((phase < 0) == (r[1].st == DP_OK),
             name + ": rank 1 itself says '" + r[1].err.msg + "'");
    printf("%-42s %5.2f s  %s\n", name.c_str(), last, r[0].err.msg);
    fflush(stdout);
    for (int i = 0; i < N; i++) {
        CUDA(cudaSetDevice(comm[i].device));
        cudaStreamSynchronize(r[i].stream);
        for (void *p : r[i].mem)
            cudaFree(p);
        cudaStreamDestroy(r[i].stream);
        dpg_plan_destroy(r[i].plan);
    }
    for (auto &c : comm)
        c.destroy(&c);
}

int main(int argc, char **argv) {
    int N = argc > 1 ? atoi(argv[1]) : 3, ndev = 0;
    bool nccl = argc > 2 && !strcmp(argv[2], "nccl");
    double limit = argc > 3 ? atof(argv[3]) : 1;
    bool few = argc > 4;
    if (cudaGetDeviceCount(&ndev) != cudaSuccess || !ndev || N < 2) {
        fprintf(stderr, "test_kill: no CUDA device, or fewer than 2 ranks\n");
        return 2;
    }
    CUDA(
        cudaHostAlloc((void **)&go_on, sizeof *go_on, cudaHostAllocPortable | cudaHostAllocMapped));
    scene(N, nccl, 20, -1, FAILS); /* first launches of all kernels are slow */
    for (int phase = 0; phase <= STEPS; phase++)
        for (int kind : {DIES, STALLS, HANGS, FAILS})
            if (few ? phase == 2 || (phase == 8 && kind == HANGS) ||
                          (phase == STEPS && kind == DIES)
                    : kind == DIES || kind == HANGS || phase == 0 || phase == 2 || phase == 4 ||
                          phase == STEPS)
                scene(N, nccl, limit, phase, kind);
    scene(N, nccl, limit, -1, FAILS);
    whole = true;
    for (bool w : {false, true}) {
        windows = w;
        /* ranks that share a device take turns, so that none outruns a dead one */
        if (w && (!nccl || !fast)) break;
        scene(N, nccl, 20, -1, FAILS);
        for (int phase : {0, 1, 2, (int)STEPS})
            for (int kind : {DIES, STALLS, HANGS, FAILS})
                if (!few || (phase == 1 && kind != FAILS)) scene(N, nccl, limit, phase, kind);
        scene(N, nccl, limit, -1, FAILS);
    }
    printf("%d checks, %d failed\n", checks, failures);
    return failures ? 1 : 0;
}
