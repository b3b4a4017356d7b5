/* gpu/tests/test_procs.cu - one process per rank over NCCL: the bits of as many ranks that share
 * one GPU, and the end of all when one is killed.
 *
 *   bits N [TIMES] [TOKENS]   N processes, rank r on GPU r modulo the GPUs; forward and backward of
 *                             every problem and way, TIMES repeats (20)
 *   kill N [LIMIT] [few]      rank 1 is killed, is stopped or aborts before every step of the
 *                             forward and backward, or is killed while its gather is under way: all
 *                             others return an error that names it within LIMIT (2 s) and 4 s more,
 *                             of one that was killed before the limit
 *
 * This process calls no CUDA: CUDA does not outlive a fork. Exit status 0, 1, or 2 (no device). */
#include "../dp_gpu.h"
#include <cuda_runtime.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

#define CUDA(x)                                                                                 \
    do {                                                                                        \
        cudaError_t e_ = (x);                                                                   \
        if (e_ != cudaSuccess) {                                                                \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
            _exit(2);                                                                           \
        }                                                                                       \
    } while (0)
#define DP(x)                                                          \
    do {                                                               \
        if ((x) != DP_OK) {                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, e.msg); \
            _exit(2);                                                  \
        }                                                              \
    } while (0)

/* END: seconds after which a process of this test ends itself */
enum { HV = 2, K = 64, MOST = 64, END = 60 };

struct Way {
    const char *name;
    dp_base base;
    dpg_chain_how how;
    int segments, dh_only;
};
static const Way ways[] = {{"fp32", DP_BASE_FP32, DPG_CHAIN_DENSE, 0, 0},
                           {"bf16", DP_BASE_BF16, DPG_CHAIN_DENSE, 0, 0},
                           {"bf16 dh-only", DP_BASE_BF16, DPG_CHAIN_DENSE, 0, 1},
                           {"bf16 segments", DP_BASE_BF16, DPG_CHAIN_AUGMENTED, 2, 0},
                           {"bf16 segments dh-only", DP_BASE_BF16, DPG_CHAIN_AUGMENTED, 2, 1}};

struct Result {
    dp_status st;
    char says[512];
    double ended, joined;
    /* ways that the kernels here have; repeats with other bits than the first */
    int ways, other;
};
struct Shared {
    Result r[MOST];
    volatile double go;
};

static int failures, checks;

static double seconds() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void fact(bool ok, const std::string &what) {
    checks++;
    failures += !ok;
    if (!ok) printf("FAIL %s\n", what.c_str());
}

template <class T> static T *shared_memory(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    return (T *)p;
}

/* Memory of a communicator: every rank maps it somewhere else. */
struct GroupFile {
    int f = memfd_create("communicator", 0);
    size_t n = dpg_comm_procs_bytes();

    GroupFile(int N, double limit_s) {
        dp_err e = {DP_OK, ""};
        if (f < 0 || ftruncate(f, n)) {
            perror("memfd_create");
            exit(2);
        }
        DP(dpg_comm_procs_init(map(-1), N, limit_s, &e));
    }
    ~GroupFile() { close(f); }
    void *map(int rank) {
        void *p = NULL;
        for (int i = -1; i <= rank; i++)
            p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
        if (p == MAP_FAILED) {
            perror("mmap");
            _exit(2);
        }
        return p;
    }
};

/* ---- one rank -------------------------------------------------------------------------------- */

struct Rank {
    dpg_plan *plan;
    dpg_tensors t;
    dpg_grads g;
    void *ws;
    cudaStream_t stream;
    int64_t tokens;
    std::vector<void *> mem;
    std::vector<std::pair<void *, size_t>> out;
    dp_err err;

    void *device(size_t bytes) {
        void *p;
        CUDA(cudaMalloc(&p, bytes + 1));
        CUDA(cudaMemset(p, 0xff, bytes + 1));
        mem.push_back(p);
        return p;
    }
    void *output(size_t bytes) {
        out.push_back({device(bytes), bytes});
        return out.back().first;
    }
    /* Words of the whole problem from `from` on: the same for every number of ranks. */
    void *input(uint64_t seed, int64_t from, int64_t n, float lo, float hi, bool bf16) {
        std::vector<float> f(n);
        std::vector<uint16_t> h(n);
        for (int64_t i = 0; i < n; i++) {
            uint64_t z = (seed * 1000003 + from + i + 1) * 0x9e3779b97f4a7c15ull;
            z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
            z = (z ^ z >> 27) * 0x94d049bb133111ebull;
            z ^= z >> 31;
            uint32_t w;
            f[i] = lo + (hi - lo) * (float)(z >> 40) * 0x1p-24f;
            memcpy(&w, &f[i], 4);
            h[i] = w >> 16;
        }
        void *p = device(n * 4);
        CUDA(cudaMemcpy(p, bf16 ? (void *)h.data() : (void *)f.data(), n * (bf16 ? 2 : 4),
                        cudaMemcpyHostToDevice));
        return p;
    }
    void clear() {
        for (auto &o : out)
            CUDA(cudaMemset(o.first, 0xff, o.second));
        CUDA(cudaMemset(ws, 0xff, dpg_workspace_bytes(plan)));
        CUDA(cudaDeviceSynchronize());
    }
    size_t collect(char *to) {
        size_t n = 0;
        for (auto &o : out) {
            if (to) CUDA(cudaMemcpy(to + n, o.first, o.second, cudaMemcpyDeviceToHost));
            n += o.second;
        }
        return n;
    }
};

/* packed: four sequences, the second of which lies over all ranks but the ends. Slow gates: M of
 * the ranks between matters. */
static void setup(Rank &r, int rank, int N, int64_t L, const Way &w, bool packed) {
    int64_t T = N * L, rows = L * HV, at = rank * rows, one[2] = {0, T},
            four[5] = {0, L / 2, T - L / 2, T - L / 4, T};
    bool b = w.base == DP_BASE_BF16;
    int ns = packed ? 4 : 1;
    dpg_dtype d = b ? DPG_BF16 : DPG_F32;
    dpg_problem p = {
        T, HV, HV, K, K, 1, K, ns, packed ? four : one, 0.125, DP_GATE_SOFTPLUS, 0, DP_BETA_SIGMOID,
        1, d,  d,  d, d, d};
    dpg_options o = {};
    o.base = w.base;
    o.chain = DP_TF32X3;
    o.chain_how = w.how;
    o.segments = w.segments;
    o.send_dh_only = w.dh_only;
    o.backward = 1;
    dp_err &e = r.err;
    DP(dpg_plan_create(&r.plan, &p, &o, rank, N, &e));
    r.tokens = L;
    r.t.q = r.input(1, at * K, rows * K, -1, 1, b);
    r.t.k = r.input(2, at * K, rows * K, -0.5f, 1, b);
    r.t.v = r.input(3, at * K, rows * K, -1, 1, b);
    r.t.g = r.input(4, at * K, rows * K, -9, -5, b);
    r.t.beta = r.input(5, at, rows, -3, 1, b);
    r.t.A_log = (float *)r.input(6, 0, HV, -0.5f, 0.5f, false);
    r.t.s0 = (float *)r.input(7, 0, (int64_t)ns * HV * K * K, -0.3f, 0.3f, false);
    r.g.dout = r.input(8, at * K, rows * K, -1, 1, b);
    r.g.dfinal_state = (float *)r.input(9, 0, (int64_t)ns * HV * K * K, -0.3f, 0.3f, false);
    size_t each = b ? 2 : 4;
    r.t.o = r.output(rows * K * each);
    r.t.final_state = (float *)r.output((size_t)ns * HV * K * K * 4);
    r.g.dq = r.output(rows * K * each);
    r.g.dk = r.output(rows * K * each);
    r.g.dv = r.output(rows * K * each);
    r.g.dg = r.output(rows * K * each);
    r.g.dbeta = r.output(rows * each);
    r.g.dA_log = (float *)r.output(HV * 4);
    r.g.ds0 = (float *)r.output((size_t)ns * HV * K * K * 4);
    r.t.saved = r.device(dpg_saved_bytes(r.plan));
    r.ws = r.device(dpg_workspace_bytes(r.plan));
    CUDA(cudaStreamCreate(&r.stream));
    CUDA(cudaDeviceSynchronize());
}

static void teardown(Rank &r) {
    for (void *p : r.mem)
        cudaFree(p);
    cudaStreamDestroy(r.stream);
    dpg_plan_destroy(r.plan);
}

static dp_status once(Rank &r, dpg_comm *c) {
    dp_status st = dpg_forward(r.plan, &r.t, r.ws, c, r.stream, &r.err);
    if (st == DP_OK) st = c->wait(c, r.stream, &r.err);
    if (st == DP_OK) CUDA(cudaMemsetAsync(r.ws, 0xff, dpg_workspace_bytes(r.plan), r.stream));
    if (st == DP_OK) st = dpg_backward(r.plan, &r.t, &r.g, r.ws, c, r.stream, &r.err);
    return st == DP_OK ? c->wait(c, r.stream, &r.err) : st;
}

/* Every way of one and of four sequences; bytes of one after the other at `out`, which is NULL when
 * only their number is asked for. */
static dp_status all_ways(int rank, int N, int64_t L, dpg_comm *c, int times, char *out,
                          Result *res) {
    for (const Way &w : ways)
        for (int packed = 0; packed < 2; packed++) {
            Rank r = {};
            setup(r, rank, N, L, w, packed);
            size_t n = r.collect(NULL);
            std::vector<char> again(n);
            bool has = w.how == DPG_CHAIN_DENSE || dpg_plan_path(r.plan) == DPG_PATH_FAST;
            res->ways += has && !packed;
            for (int i = 0; i < times && has; i++) {
                r.clear();
                dp_status st = once(r, c);
                if (st != DP_OK) {
                    snprintf(res->says, sizeof res->says, "%s, %d sequences: %.400s", w.name,
                             packed ? 4 : 1, r.err.msg);
                    return st;
                }
                r.collect(i ? again.data() : out);
                res->other += i && memcmp(again.data(), out, n);
            }
            teardown(r);
            out += n;
        }
    return DP_OK;
}

static size_t bytes_of(int64_t L) {
    size_t n = 0;
    for (const Way &w : ways)
        for (size_t ns : {1, 4})
            n += (size_t)L * HV * (6 * K + 1) * (w.base == DP_BASE_BF16 ? 2 : 4) -
                 (size_t)L * HV * K * (w.base == DP_BASE_BF16 ? 2 : 4) + HV * 4 +
                 2 * ns * HV * K * K * 4;
    return n;
}

/* ---- processes ------------------------------------------------------------------------------- */

template <class F> static pid_t process(F body) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(END);
    body();
    fflush(stdout);
    _exit(0);
}

static int status_of(pid_t pid) {
    int st = -1;
    return waitpid(pid, &st, 0) == pid ? st : -1;
}

static int devices() {
    int *n = shared_memory<int>(4096);
    status_of(process([&] {
        if (cudaGetDeviceCount(n) != cudaSuccess) *n = 0;
    }));
    return *n;
}

static void bits(int N, int times, int64_t L) {
    size_t each = bytes_of(L);
    char *want = shared_memory<char>(each * N), *got = shared_memory<char>(each * N);
    Shared *s = shared_memory<Shared>(sizeof *s), *t = shared_memory<Shared>(sizeof *t);
    dp_err e = {DP_OK, ""};
    double t0 = seconds();
    int st = status_of(process([&] {
        std::vector<dpg_comm> c(N);
        std::vector<std::thread> th;
        DP(dpg_comm_shared(c.data(), N, 0, 30, &e));
        for (int r = 0; r < N; r++)
            th.emplace_back(
                [&, r] { t->r[r].st = all_ways(r, N, L, &c[r], 1, want + r * each, &t->r[r]); });
        for (auto &x : th)
            x.join();
    }));
    fact(st == 0, "ranks that share one GPU: status " + std::to_string(st));
    for (int r = 0; r < N; r++)
        fact(t->r[r].st == DP_OK, std::string("sharing one GPU: ") + t->r[r].says);
    double t1 = seconds();
    GroupFile group(N, 20);
    std::vector<pid_t> pid;
    for (int r = 0; r < N; r++)
        pid.push_back(process([&, r] {
            dpg_comm c;
            dp_err own = {DP_OK, ""};
            Result *x = &s->r[r];
            x->st = dpg_comm_procs_join(&c, group.map(r), r, &own);
            snprintf(x->says, sizeof x->says, "join: %.400s", own.msg);
            x->joined = seconds();
            if (x->st == DP_OK) {
                x->st = all_ways(r, N, L, &c, times, got + r * each, x);
                c.destroy(&c);
            }
            x->ended = seconds();
        }));
    double joined = 0;
    for (int r = 0; r < N; r++) {
        st = status_of(pid[r]);
        fact(st == 0 && s->r[r].st == DP_OK,
             "rank " + std::to_string(r) + ": status " + std::to_string(st) + ", " + s->r[r].says);
        fact(s->r[r].other == 0, "rank " + std::to_string(r) + ": " +
                                     std::to_string(s->r[r].other) + " repeats have other bits");
        fact(!memcmp(want + r * each, got + r * each, each),
             "rank " + std::to_string(r) +
                 ": other bits than that rank of ranks that share one GPU");
        joined = fmax(joined, s->r[r].joined - t1);
    }
    size_t nan = 0;
    for (size_t i = 0; i + 4 <= each * N; i += 4)
        nan += !memcmp(got + i, "\377\377\377\377", 4);
    /* of sequences that end or start elsewhere */
    size_t states = sizeof ways / sizeof *ways * N * 2 * 5 * HV * K * K;
    fact(nan < states, std::to_string(nan) + " words were never written");
    printf("%d processes on %d GPUs: %d ways of 1 and 4 sequences, %d times, %zu bytes compared; "
           "joined after %.2f s, all in %.2f s (sharing one GPU, once: %.2f s)\n",
           N, devices(), s->r[0].ways, times, each * N, joined, seconds() - t1, t1 - t0);
}

/* ---- a rank that is killed ------------------------------------------------------------------- */

enum Kind { KILLED, STOPPED, ABORTS, IN_FLIGHT };
static const char *const kinds[] = {"is killed before", "is stopped before", "aborts before",
                                    "is killed within"};
enum { FORWARD = 5, STEPS = 13 };
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

__global__ void k_spin(volatile int *flag) {
    while (!*flag) {
    }
}

static dp_status step(Rank &r, int i, dpg_comm *c) {
    if (i < FORWARD) return dpg_forward_steps(r.plan, &r.t, r.ws, c, r.stream, 1 << i, &r.err);
    if (i < STEPS)
        return dpg_backward_steps(r.plan, &r.t, &r.g, r.ws, c, r.stream, 1 << (i - FORWARD),
                                  &r.err);
    return c->wait(c, r.stream, &r.err);
}

static void go_wrong(dpg_comm *c, Rank &r, Kind kind) {
    if (kind == KILLED) kill(getpid(), SIGKILL);
    if (kind == STOPPED) kill(getpid(), SIGSTOP);
    if (kind == ABORTS) c->abort(c, "on purpose");
    if (kind == IN_FLIGHT) { /* the others' gather waits on their devices for this one's */
        int *never;
        CUDA(cudaMalloc(&never, sizeof *never));
        CUDA(cudaMemset(never, 0, sizeof *never));
        std::thread([] {
            usleep(300000);
            kill(getpid(), SIGKILL);
        }).detach();
        k_spin<<<1, 1, 0, r.stream>>>(never);
    }
}

/* phase -1: nothing goes wrong. */
static void scene(int N, double limit, int phase, Kind kind) {
    Shared *s = shared_memory<Shared>(sizeof *s);
    GroupFile group(N, phase < 0 ? 20 : limit);
    std::vector<pid_t> pid;
    std::string name =
        phase < 0 ? "nothing wrong" : std::string("rank 1 ") + kinds[kind] + " " + phases[phase];
    double last = 0;
    for (int i = 0; i < N; i++)
        pid.push_back(process([&, i] {
            dpg_comm c;
            Rank r = {};
            Result *x = &s->r[i];
            x->st = dpg_comm_procs_join(&c, group.map(i), i, &r.err);
            if (x->st == DP_OK) {
                setup(r, i, N, 64, ways[1], false);
                /* once in peace: first launches of kernels are slow */
                for (int k = 0; k <= STEPS && x->st == DP_OK; k++) {
                    x->st = step(r, k, &c);
                    if (k == FORWARD - 1 && x->st == DP_OK) x->st = c.wait(&c, r.stream, &r.err);
                }
                if (i == 0) s->go = seconds();
                for (int k = 0; k <= STEPS && x->st == DP_OK; k++) {
                    if (i == 1 && k == phase) go_wrong(&c, r, kind);
                    x->st = step(r, k, &c);
                }
            }
            snprintf(x->says, sizeof x->says, "%.500s", r.err.msg);
            x->ended = seconds();
            if (x->st == DP_OK) c.destroy(&c);
        }));
    for (int i = 0; i < N; i++) {
        if (i == 1 && phase >= 0) continue;
        int st = status_of(pid[i]);
        Result *x = &s->r[i];
        last = fmax(last, x->ended - s->go);
        bool ok = phase < 0 ? x->st == DP_OK
                            : x->st == DP_EDEVICE &&
                                  (strstr(x->says, "rank 1 ") || strstr(x->says, "of rank 1"));
        fact(st == 0 && ok, name + ": rank " + std::to_string(i) + ", status " +
                                std::to_string(st) + ", says '" + x->says + "'");
    }
    if (phase >= 0) {
        kill(pid[1], SIGKILL);
        status_of(pid[1]);
    }
    fact(s->go && last < (kind == KILLED && phase >= 0 ? limit : limit + 4),
         name + ": the others ended after " + std::to_string(last) + " s");
    printf("%-44s %5.2f s  %s\n", name.c_str(), last, s->r[0].says);
    fflush(stdout);
    munmap(s, sizeof *s);
}

static void kills(int N, double limit, bool few) {
    scene(N, 20, -1, KILLED);
    for (int phase = 0; phase <= STEPS; phase++)
        for (Kind kind : {KILLED, STOPPED, ABORTS, IN_FLIGHT}) {
            bool gather = phase == 2 || phase == 8;
            if (few ? (phase == 2 && kind != ABORTS) || (phase == STEPS && kind == KILLED)
                    : kind == KILLED || (gather && kind != ABORTS) || phase == 2 ||
                          (phase == STEPS && kind != IN_FLIGHT))
                scene(N, limit, phase, kind);
        }
    scene(N, 20, -1, KILLED);
}

int main(int argc, char **argv) {
    int N = argc > 2 ? atoi(argv[2]) : 0;
    if (N < 2 || N > MOST || (strcmp(argv[1], "bits") && strcmp(argv[1], "kill"))) {
        fprintf(stderr, "usage: test_procs bits N [TIMES] [TOKENS] | kill N [LIMIT] [few]\n");
        return 2;
    }
    if (devices() < 1) {
        fprintf(stderr, "test_procs: no CUDA device\n");
        return 2;
    }
    if (!strcmp(argv[1], "bits"))
        bits(N, argc > 3 ? atoi(argv[3]) : 20, argc > 4 ? atoi(argv[4]) : 256);
    else
        kills(N, argc > 3 ? atof(argv[3]) : 2, argc > 4);
    printf("%d checks, %d failed\n", checks, failures);
    return failures ? 1 : 0;
}
