/* gpu/tests/test_procs.cu - one process per rank over NCCL. The bits are those of as many ranks
 * that share one GPU. All processes end when one is killed. A single process of all ranks may be
 * stopped for a while.
 *
 *   bits N [TIMES] [TOKENS]   N processes, rank r on GPU r modulo the GPUs; forward and backward of
 *                             every problem and way, TIMES repeats (20)
 *   kill N [LIMIT] [few]      rank 1 is killed, is stopped or aborts before every step of the
 *                             forward and backward, or is killed while its gather is under way: all
 *                             others return an error that names it within LIMIT (2 s) and 4 s more,
 *                             of one that was killed that it has ended
 *   pause N [LIMIT]           the process of N host threads stops for 3 LIMITs (1 s) while one of
 *                             them has yet to come to a gather: none fails
 *
 * This process calls no CUDA: CUDA does not outlive a fork. Exit status 0, 1, or 2 (no device). */
#include "steps.h"
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

/* END: seconds after which a process of this test ends itself */
enum { MOST = 64, END = 60 };

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

/* One rank's result, for the others. */
struct Result {
    dp_status st;
    char says[512];
    double ended, joined;
    /* variants that the kernels here have; repeats with other bits than the first */
    int ways, other;
};
struct Shared {
    Result r[MOST];
    volatile double go;
};

template <class T> static T *shared_memory(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) {
        perror("mmap");
        give_up();
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
            give_up();
        }
        DP(e, dpg_comm_procs_init(map(-1), N, limit_s, &e));
    }
    ~GroupFile() { close(f); }
    void *map(int rank) {
        void *p = NULL;
        for (int i = -1; i <= rank; i++)
            p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
        if (p == MAP_FAILED) {
            perror("mmap");
            give_up();
        }
        return p;
    }
};

/* ---- one rank -------------------------------------------------------------------------------- */

/* Numbers from, from + 1 .. of a stream, in [lo, hi], in `type` by truncation: the same for every
 * number of ranks. */
static Vec random_words(uint64_t seed, int64_t from, int64_t n, float lo, float hi) {
    Vec x(n);
    for (int64_t i = 0; i < n; i++) {
        uint64_t z = (seed * 1000003 + from + i + 1) * 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        z ^= z >> 31;
        x[i] = lo + (hi - lo) * (float)(z >> 40) * 0x1p-24f;
    }
    return x;
}

/* Slow gates: M of the ranks between matters. No dt_bias. */
static const struct {
    const char *name;
    uint64_t seed;
    float lo, hi;
} inputs[] = {{"q", 1, -1, 1},        {"k", 2, -0.5f, 1}, {"v", 3, -1, 1},
              {"g", 4, -9, -5},       {"beta", 5, -3, 1}, {"A_log", 6, -0.5f, 0.5f},
              {"s0", 7, -0.3f, 0.3f}, {"do", 8, -1, 1},   {"dfinal_state", 9, -0.3f, 0.3f}};

/* N ranks of L tokens each; packed: four sequences, the second of which lies over all ranks but the
 * ends. */
struct ProcProblem {
    std::vector<int64_t> cu;
    dpg_problem problem;
    dpg_options options = {};

    ProcProblem(int N, int64_t L, const Way &w, bool packed) {
        int64_t T = N * L;
        cu = packed ? std::vector<int64_t>{0, L / 2, T - L / 2, T - L / 4, T}
                    : std::vector<int64_t>{0, T};
        problem = small_problem(cu, DP_GATE_SOFTPLUS, w.base == DP_BASE_BF16 ? DPG_BF16 : DPG_F32);
        options.base = w.base;
        options.chain = DP_TF32X3;
        options.chain_how = w.how;
        options.segments = w.segments;
        options.send_dh_only = w.dh_only;
        options.backward = 1;
    }
};

struct ProcRank : Rank {
    ProcRank(int rank, int N, int64_t L, const Way &w, bool packed) {
        ProcProblem s(N, L, w, packed);
        open(s.problem, s.options, rank, N, [&](const Share &x) -> void * {
            for (auto &i : inputs)
                if (!strcmp(i.name, x.name))
                    return memory.copy(random_words(i.seed, x.from, x.n, i.lo, i.hi), 0, x.n,
                                       x.type);
            return NULL;
        });
    }
    /* All outputs, one behind the other. */
    void collect(char *to) const {
        for (const Share &x : shares)
            if (x.is_output) {
                CUDA(cudaMemcpy(to, *x.at, x.bytes(), cudaMemcpyDeviceToHost));
                to += x.bytes();
            }
    }
    dp_status once(dpg_comm *c) {
        clear_outputs();
        clear_workspace();
        if (forward(c) != DP_OK || wait(c) != DP_OK) return st;
        clear_workspace();
        return backward(c) == DP_OK ? wait(c) : st;
    }
};

static size_t output_bytes(int N, int64_t L, const Way &w, bool packed) {
    dpg_tensors t;
    dpg_grads g;
    size_t n = 0;
    for (const Share &x : shares_of(ProcProblem(N, L, w, packed).problem, true, 0, N, &t, &g))
        n += x.is_output ? x.bytes() : 0;
    return n;
}

/* One variant, `times` times, its bytes at `out`. */
static dp_status one_way(ProcRank &r, dpg_comm *c, const Way &w, size_t bytes, int times, char *out,
                         Result *res) {
    std::vector<char> again(bytes);
    for (int i = 0; i < times; i++) {
        if (r.once(c) != DP_OK) {
            snprintf(res->says, sizeof res->says, "%s: %.400s", w.name, r.err.msg);
            return r.st;
        }
        r.collect(i ? again.data() : out);
        res->other += i && memcmp(again.data(), out, bytes);
    }
    return DP_OK;
}

/* Every variant of one and of four sequences; bytes of one after the other at `out`. */
static dp_status all_ways(int rank, int N, int64_t L, dpg_comm *c, int times, char *out,
                          Result *res) {
    for (const Way &w : ways)
        for (bool packed : {false, true}) {
            ProcRank r(rank, N, L, w, packed);
            size_t n = output_bytes(N, L, w, packed);
            if (w.how == DPG_CHAIN_DENSE || dpg_plan_path(r.plan) == DPG_PATH_FAST) {
                res->ways += !packed;
                dp_status st = one_way(r, c, w, n, times, out, res);
                if (st != DP_OK) return st;
            }
            r.close();
            out += n;
        }
    return DP_OK;
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

static int device_count() {
    int *n = shared_memory<int>(4096);
    status_of(process([&] {
        if (cudaGetDeviceCount(n) != cudaSuccess) *n = 0;
    }));
    return *n;
}

/* ---- bits ------------------------------------------------------------------------------------ */

/* Every rank's results, and its outcome. */
struct Outcome {
    size_t each; /* bytes of a rank */
    char *bytes;
    Shared *shared;
    Outcome(int N, size_t each_)
        : each(each_), bytes(shared_memory<char>(each_ * N)),
          shared(shared_memory<Shared>(sizeof(Shared))) {}
    char *of(int rank) const { return bytes + rank * each; }
};

/* Ranks that share one GPU, in a process of their own. */
static void run_sharing(int N, int64_t L, Outcome &o) {
    int st = status_of(process([&] {
        Comms c(Comms::SHARED, N, 30);
        on_ranks(N, [&](int r) {
            Result &x = o.shared->r[r];
            x.st = all_ways(r, N, L, &c[r], 1, o.of(r), &x);
        });
    }));
    fact(st == 0, "ranks that share one GPU: status %d", st);
    for (int r = 0; r < N; r++)
        fact(o.shared->r[r].st == DP_OK, "sharing one GPU: %s", o.shared->r[r].says);
}

/* A process a rank. */
static void run_apart(int N, int64_t L, int times, Outcome &o) {
    GroupFile group(N, 20);
    std::vector<pid_t> pid;
    for (int r = 0; r < N; r++)
        pid.push_back(process([&, r] {
            dpg_comm c;
            dp_err e = {DP_OK, ""};
            Result *x = &o.shared->r[r];
            x->st = dpg_comm_procs_join(&c, group.map(r), r, &e);
            snprintf(x->says, sizeof x->says, "join: %.400s", e.msg);
            x->joined = seconds();
            if (x->st == DP_OK) {
                x->st = all_ways(r, N, L, &c, times, o.of(r), x);
                c.destroy(&c);
            }
            x->ended = seconds();
        }));
    for (int r = 0; r < N; r++) {
        int st = status_of(pid[r]);
        const Result &x = o.shared->r[r];
        fact(st == 0 && x.st == DP_OK, "rank %d: status %d, %s", r, st, x.says);
        fact(x.other == 0, "rank %d: %d repeats have other bits", r, x.other);
    }
}

/* Words that still are the NaN that outputs were filled with; those of states may be, of sequences
 * that end or start elsewhere. */
static void all_written(int N, int64_t L, const Outcome &o) {
    size_t nan = 0, states = 0;
    for (size_t i = 0; i + 4 <= o.each * N; i += 4)
        nan += !memcmp(o.bytes + i, "\377\377\377\377", 4);
    for (const Way &w : ways)
        for (bool packed : {false, true}) {
            dpg_problem p = ProcProblem(N, L, w, packed).problem;
            states += (size_t)N * 2 * p.Nseq * p.HV * p.K * p.V;
        }
    fact(nan < states, "%zu words were never written", nan);
}

static void bits(int N, int times, int64_t L) {
    size_t each = 0;
    for (const Way &w : ways)
        each += output_bytes(N, L, w, false) + output_bytes(N, L, w, true);
    Outcome want(N, each), got(N, each);
    double t0 = seconds(), joined = 0;
    run_sharing(N, L, want);
    double t1 = seconds();
    run_apart(N, L, times, got);
    for (int r = 0; r < N; r++) {
        fact(!memcmp(want.of(r), got.of(r), each),
             "rank %d: other bits than that rank of ranks that share one GPU", r);
        joined = fmax(joined, got.shared->r[r].joined - t1);
    }
    all_written(N, L, got);
    printf("%d processes on %d GPUs: %d ways of 1 and 4 sequences, %d times, %zu bytes compared; "
           "joined after %.2f s, all in %.2f s (sharing one GPU, once: %.2f s)\n",
           N, device_count(), got.shared->r[0].ways, times, each * N, joined, seconds() - t1,
           t1 - t0);
}

/* ---- a rank that is killed ------------------------------------------------------------------- */

enum Kind { KILLED, STOPPED, ABORTS, IN_FLIGHT };
static const char *const kinds[] = {"is killed before", "is stopped before", "aborts before",
                                    "is killed within"};

static void go_wrong(dpg_comm *c, Rank &r, Kind kind) {
    if (kind == KILLED) kill(getpid(), SIGKILL);
    if (kind == STOPPED) kill(getpid(), SIGSTOP);
    if (kind == ABORTS) c->abort(c, "on purpose");
    if (kind == IN_FLIGHT) { /* the others' gather waits on their devices for this one's */
        int *never = (int *)r.memory.filled(sizeof *never, 0);
        std::thread([] {
            usleep(300000);
            kill(getpid(), SIGKILL);
        }).detach();
        k_spin<<<1, 1, 0, r.stream>>>(never);
    }
}

/* All steps once in peace, since first launches of kernels are slow, then again. */
static void all_steps(ProcRank &r, int rank, dpg_comm *c, int phase, Kind kind, Shared *s) {
    for (int i = 0; i <= STEPS && r.st == DP_OK; i++) {
        take_step(r, i, c);
        if (i == FORWARD - 1 && r.st == DP_OK) r.wait(c);
    }
    if (rank == 0) s->go = seconds();
    for (int i = 0; i <= STEPS && r.st == DP_OK; i++) {
        if (rank == 1 && i == phase) go_wrong(c, r, kind);
        take_step(r, i, c);
    }
}

/* The process of a rank. */
static void rank_process(int rank, int N, GroupFile &group, int phase, Kind kind, Shared *s) {
    dpg_comm c;
    dp_err e = {DP_OK, ""};
    Result *x = &s->r[rank];
    x->st = dpg_comm_procs_join(&c, group.map(rank), rank, &e);
    if (x->st == DP_OK) {
        ProcRank r(rank, N, 64, ways[1], false);
        all_steps(r, rank, &c, phase, kind, s);
        x->st = r.st;
        e = r.err;
    }
    snprintf(x->says, sizeof x->says, "%.500s", e.msg);
    x->ended = seconds();
    if (x->st == DP_OK) c.destroy(&c);
}

/* phase -1: nothing goes wrong. */
static void scene(int N, double limit, int phase, Kind kind) {
    Shared *s = shared_memory<Shared>(sizeof *s);
    GroupFile group(N, phase < 0 ? 20 : limit);
    std::vector<pid_t> pid;
    std::string name =
        phase < 0 ? "nothing wrong" : text("rank 1 %s %s", kinds[kind], phases[phase]);
    double last = 0;
    for (int i = 0; i < N; i++)
        pid.push_back(process([&, i] { rank_process(i, N, group, phase, kind, s); }));
    for (int i = 0; i < N; i++) {
        if (i == 1 && phase >= 0) continue;
        int st = status_of(pid[i]);
        const Result &x = s->r[i];
        bool ok = phase < 0 ? x.st == DP_OK : x.st == DP_EDEVICE && names_rank_1(x.says);
        if (phase >= 0 && kind == KILLED) ok = ok && strstr(x.says, "has ended");
        last = fmax(last, x.ended - s->go);
        fact(st == 0 && ok, "%s: rank %d, status %d, says '%s'", name.c_str(), i, st, x.says);
    }
    if (phase >= 0) {
        kill(pid[1], SIGKILL);
        status_of(pid[1]);
    }
    fact(s->go && last < limit + 4, "%s: the others ended after %f s", name.c_str(), last);
    printf("%-44s %5.2f s  %s\n", name.c_str(), last, s->r[0].says);
    munmap(s, sizeof *s);
}

/* Does rank 1 fail so before this step? */
static bool wanted(int phase, Kind kind, bool few) {
    bool gather = phase == 2 || phase == 8;
    if (few) return (phase == 2 && kind != ABORTS) || (phase == STEPS && kind == KILLED);
    return kind == KILLED || (gather && kind != ABORTS) || phase == 2 ||
           (phase == STEPS && kind != IN_FLIGHT);
}

static void kills(int N, double limit, bool few) {
    scene(N, 20, -1, KILLED);
    for (int phase = 0; phase <= STEPS; phase++)
        for (Kind kind : {KILLED, STOPPED, ABORTS, IN_FLIGHT})
            if (wanted(phase, kind, few)) scene(N, limit, phase, kind);
    scene(N, 20, -1, KILLED);
}

/* ---- a process that stands still ------------------------------------------------------------- */

/* Rank 1 comes to its gather after half the limit, and says when a fifth of that is over. */
static void gather_late(dpg_comm *c, double limit, Shared *s) {
    Memory memory;
    dp_err e = {DP_OK, ""};
    Result *x = &s->r[c->rank];
    float *words = (float *)memory.filled((c->N + 1) * sizeof(float), 0);
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; c->rank == 1 && i < 10; i++) {
        usleep((useconds_t)(limit / 20 * 1e6));
        if (i == 1) s->go = 1;
    }
    x->st = c->all_gather(c, words, words + 1, 1, NULL, &e);
    if (x->st == DP_OK) x->st = c->wait(c, NULL, &e);
    snprintf(x->says, sizeof x->says, "%.500s", e.msg);
    memory.release();
}

static void pauses(int N, double limit) {
    Shared *s = shared_memory<Shared>(sizeof *s);
    pid_t pid = process([&] {
        Comms c(Comms::SHARED, N, limit);
        on_ranks(N, [&](int r) { gather_late(&c[r], limit, s); });
    });
    for (double t0 = seconds(); !s->go && seconds() - t0 < END / 2;)
        usleep(1000);
    kill(pid, SIGSTOP);
    usleep((useconds_t)(3 * limit * 1e6));
    kill(pid, SIGCONT);
    fact(s->go && status_of(pid) == 0, "the process of all ranks failed");
    for (int r = 0; r < N; r++)
        fact(s->r[r].st == DP_OK, "a pause of all: rank %d says '%s'", r, s->r[r].says);
    printf("%d ranks, stopped for %g s, limit %g s\n", N, 3 * limit, limit);
}

int main(int argc, char **argv) {
    int N = argc > 2 ? atoi(argv[2]) : 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    const std::string mode = N < 2 || N > MOST ? "" : argv[1];
    if (mode != "bits" && mode != "kill" && mode != "pause") {
        fprintf(stderr, "usage: test_procs bits N [TIMES] [TOKENS] | kill N [LIMIT] [few] | "
                        "pause N [LIMIT]\n");
        return 2;
    }
    if (device_count() < 1) {
        fprintf(stderr, "test_procs: no CUDA device\n");
        return 2;
    }
    if (mode == "bits")
        bits(N, argc > 3 ? atoi(argv[3]) : 20, argc > 4 ? atoi(argv[4]) : 256);
    else if (mode == "pause")
        pauses(N, argc > 3 ? atof(argv[3]) : 1);
    else
        kills(N, argc > 3 ? atof(argv[3]) : 2, argc > 4);
    return verdict();
}
